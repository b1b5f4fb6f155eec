"""What of a prompt's prefix is sent with it, by what instances say that they hold."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from tests.unit.machine.router.test_cluster import LIMITS, MODEL, Checked, text_granted
from tests.unit.policy.profiles import DECODER, ENCODER
from triptych.domain.embedding_hints import EmbeddingHints, hint_of_segment
from triptych.domain.instance import InstanceInfo, InstanceLoad, ServedPart, TransportOffer
from triptych.domain.kv_segment import KnownSegment
from triptych.domain.membership import Member
from triptych.domain.profile import TransferRow
from triptych.domain.stage import ModelPart, Role
from triptych.machine.router.cluster import ClusterMachine
from triptych.machine.router.cluster_events import InstanceSeen, InstanceSuspected, LoadReported, MemberJoined
from triptych.machine.router.prompt_identity import PromptIdentity, PromptTokens
from triptych.machine.router.shared_events import Grant, TextWanted
from triptych.policy.costs import Costs
from triptych.policy.policies import Policies, PolicyNames
from triptych.policy.prefixes import PrefixGain
from triptych.policy.speeds import Pulls

SIZE = 64
PROMPT = PromptTokens(tuple(range(10, 11 + 10 * SIZE)), b"")
KEYS = PromptIdentity(PROMPT, ()).segment_keys("kind", SIZE)
TEXTS = ("a", "b", "c")


def info(name: str, **more: object) -> InstanceInfo:
    told = InstanceInfo(
        f"i-{name}", 1, Role.PD, MODEL, 100, (), kv_kind="kind", kv_segment_tokens=SIZE, kv_position_bytes=8
    )
    return replace(told, **more)  # type: ignore[arg-type]


def cluster(policy: str = "always", **more: object) -> ClusterMachine:
    machine = Checked(
        replace(LIMITS, max_embedding_hints=100),
        Policies.named(PolicyNames(prefixes=policy)),
        Random(7),
        arena_retry_s=0.5,
        retry_after_s=2.0,
    )
    for name in TEXTS:
        machine.handle(MemberJoined(Member(name)), 0)
        machine.handle(InstanceSeen(name, info(name, **more)), 0)
    return machine


def hold(machine: ClusterMachine, name: str, keys: Sequence[bytes]) -> None:
    hints = EmbeddingHints(1, held=tuple(map(hint_of_segment, keys)))
    machine.handle(LoadReported(name, InstanceLoad({}, hints=hints)), 0)


def sent(machine: ClusterMachine, *, to: str = "a", prompt: PromptTokens = PROMPT, **more: object) -> Grant:
    others = frozenset(TEXTS) - {to}
    wanted = TextWanted(1, len(prompt.token_ids), others, max_tokens=16, prompt=PromptIdentity(prompt, ()), **more)  # type: ignore[arg-type]
    return text_granted(machine.handle(wanted, 0))


def test_the_longest_beginning_is_sent_from_as_few_holders_as_can_be() -> None:
    machine = cluster()
    hold(machine, "b", KEYS[:3])
    hold(machine, "c", (*KEYS[1:4], KEYS[5]))
    prefix = sent(machine).prefix
    assert [segment.name for segment in prefix] == ["b", "b", "b", "c"]
    assert prefix[3] == KnownSegment("c", "i-c", KEYS[3], 3 * SIZE, SIZE)


def test_what_was_sent_there_is_not_pulled() -> None:
    machine = cluster()
    hold(machine, "b", KEYS[:3])
    assert len(sent(machine).prefix) == 3
    assert not sent(machine).prefix
    longer = replace(PROMPT, token_ids=(*PROMPT.token_ids, *range(SIZE)))
    hold(machine, "c", PromptIdentity(longer, ()).segment_keys("kind", SIZE))
    assert [segment.name for segment in sent(machine, prompt=longer).prefix] == ["b"] * 3 + ["c"] * 8, (
        "it has ten of eleven"
    )
    machine.handle(InstanceSeen("a", info("a", epoch=2)), 0)
    assert len(sent(machine).prefix) == 10, "it has lost them"


def test_its_own_arena_comes_last() -> None:
    machine = cluster()
    hold(machine, "a", KEYS[:2])
    hold(machine, "b", KEYS[:1])
    assert [segment.name for segment in sent(machine).prefix] == ["b", "a"]


def test_only_a_beginning_that_pays_is_sent() -> None:
    machine = cluster("by-cost")
    hold(machine, "b", KEYS[:7])
    assert not sent(machine).prefix
    hold(machine, "b", KEYS[:8])
    assert len(sent(machine, to="c").prefix) == 8


def test_nothing_is_sent_where_it_cannot_be_used() -> None:
    unasked = cluster("never")
    hold(unasked, "b", KEYS)
    assert not sent(unasked).prefix
    before = cluster(kv_segment_tokens=0)
    hold(before, "b", KEYS)
    assert not sent(before).prefix, "of the release before"
    lost = cluster()
    hold(lost, "b", KEYS)
    lost.handle(InstanceSuspected("b"), 0)
    assert not sent(lost).prefix


PROFILES = {
    ModelPart.ENCODER: Costs(replace(ENCODER, transfer=(*ENCODER.transfer, TransferRow("tcp", 1 << 20, 0.5)))),
    ModelPart.DECODER: Costs(DECODER),
}


def test_what_a_beginning_gains_is_priced_by_profiles() -> None:
    gains: list[PrefixGain] = []

    def policy(gain: PrefixGain) -> bool:
        gains.append(gain)
        return True

    def described(name: str, epoch: int = 1) -> InstanceSeen:
        parts = tuple(ServedPart(costs.profile.identity, 8) for costs in PROFILES.values())
        offers = (TransportOffer("tcp", "far" if name == "c" else "near", b""),)
        return InstanceSeen(name, info(name, epoch=epoch, parts=parts, offers=offers, kv_position_bytes=8192))

    machine = Checked(
        replace(LIMITS, max_embedding_hints=100),
        replace(Policies.named(PolicyNames()), prefixes=policy),
        Random(7),
        arena_retry_s=0.5,
        retry_after_s=2.0,
        costs=lambda identity: PROFILES[identity.part],
    )
    for name in TEXTS:
        machine.handle(MemberJoined(Member(name)), 0)
        machine.handle(described(name), 0)
    hold(machine, "b", KEYS[:3])
    hold(machine, "c", KEYS[3:5])
    pulls, decoder = Pulls(PROFILES[ModelPart.ENCODER]), PROFILES[ModelPart.DECODER]
    pull_s = 3 * pulls.pull_s(SIZE * 8192, 0) + 2 * pulls.pull_s(0, SIZE * 8192)
    compute_s = decoder.prefill_s(5 * SIZE, 0).value
    assert len(sent(machine).prefix) == 5
    (gain,) = gains
    assert (gain.tokens, gain.compute_s) == (5 * SIZE, compute_s)
    assert gain.pull_s == pytest.approx(pull_s)
    machine.handle(described("a", epoch=2), 0)
    sent(machine)
    steps_s = (3 + 2) * decoder.decode_s(1, 5 * SIZE).value
    assert gains[-1].pull_s == pytest.approx(pull_s + steps_s), "the first runs beside it"
