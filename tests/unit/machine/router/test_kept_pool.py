from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.policy.profiles import DECODER, ENCODER
from triptych.domain.embedding import DType, Ticket
from triptych.domain.encoding import EncodeResult
from triptych.domain.instance import InstanceInfo, InstanceLoad, ModelInfo, ServedPart, StageLoad
from triptych.domain.membership import Member
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.errors import ArenaFull, EngineFailure, Unavailable
from triptych.machine.router.cluster import ClusterMachine
from triptych.machine.router.cluster_events import (
    ClusterEvent,
    ClusterTick,
    InstanceSeen,
    InstanceSuspected,
    LoadReported,
    MemberJoined,
    MemberLeaving,
    MemberLeft,
)
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.machine.router.instance import Instance, Stages
from triptych.machine.router.instances import ENCODE, TEXT
from triptych.machine.router.shared_events import (
    CallFailed,
    CreditReturned,
    CreditsWanted,
    FirstToken,
    Granted,
    ItemEncoded,
    TextWanted,
)
from triptych.policy.costs import Costs
from triptych.policy.placement.pool import Candidate, Pool
from triptych.policy.placement.wants import Want
from triptych.policy.policies import Policies, PolicyNames

MODEL = ModelInfo("m", "r", DType.F32, 8, 100)
ROLES = {"a": Role.E, "b": Role.E, "h": Role.EPD, "t": Role.PD}
PROFILES = {ModelPart.ENCODER: ENCODER, ModelPart.DECODER: DECODER}
POOLS = {"encode": ENCODE, "text": TEXT}


def cluster(routing: str = "least-loaded", *, profiled: bool = False) -> ClusterMachine:
    """All instances have been seen, in both pools, and both pools have been looked at."""
    machine = ClusterMachine(
        ClusterLimits(),
        Policies.named(PolicyNames(encoder_routing=routing, text_routing=routing)),
        Random(7),
        arena_retry_s=0.5,
        retry_after_s=2.0,
        costs=lambda identity: Costs(PROFILES[identity.part]) if profiled else None,
    )
    for name in ROLES:
        machine.handle(MemberJoined(Member(name)), 0.0)
        machine.handle(seen(name), 0.0)
    for stages in POOLS.values():
        kept(machine, stages)
    return machine


def seen(name: str, *, epoch: int = 1, model: ModelInfo = MODEL) -> InstanceSeen:
    parts = tuple(ServedPart(profile.identity, 4) for profile in PROFILES.values())
    return InstanceSeen(name, InstanceInfo(f"i-{name}", epoch, ROLES[name], model, 100, (), max_items=3, parts=parts))


def load(number: int, *, draining: bool = False) -> InstanceLoad:
    stage_load = StageLoad(number % 50, number % 4, number % 90)
    return InstanceLoad({Stage.ENCODE: stage_load, Stage.PREFILL: stage_load, Stage.DECODE: stage_load}, draining)


def encoded(credit: int, name: str) -> ItemEncoded:
    ticket = Ticket(bytes(32), f"i-{name}", 1, 0, 0, 1, 0, (), 1, b"reader", 1.0)
    return ItemEncoded(credit, name, EncodeResult(ticket, b"router", cached=False, queue_s=0, encode_s=0))


def kept(machine: ClusterMachine, stages: Stages, now_s: float = 0.0) -> tuple[Candidate, ...]:
    return tuple(machine.instances.pool(stages, now_s).candidates)


def made_anew(machine: ClusterMachine, stages: Stages, now_s: float) -> tuple[Candidate, ...]:
    members = machine.instances.pools[stages].members.values()
    backlogs = machine.instances.backlogs
    backlog_of = None if backlogs is None else backlogs.of_encoder if stages is ENCODE else backlogs.of_text
    pool = Pool([member.row(stages) for member in members])
    for place, member in enumerate(members):
        member.put(pool, place, stages, now_s, backlog_of and backlog_of(member))
    return tuple(pool.candidates)


def event_of(kind: str, name: str, number: int, machine: ClusterMachine) -> ClusterEvent:  # noqa: C901, PLR0911, PLR0912
    """An event of this kind, about this instance or, chosen by ``number``, a credit that is out."""
    credits_ = sorted(machine.credits) or [0]
    credit = credits_[number % len(credits_)]
    match kind:
        case "joins":
            return MemberJoined(Member(name))
        case "leaves":
            return MemberLeaving(name)
        case "has left":
            return MemberLeft(name)
        case "is seen":
            return seen(name, epoch=1 + number % 2)
        case "serves another model":
            return seen(name, model=replace(MODEL, revision="s"))
        case "is suspected":
            return InstanceSuspected(name)
        case "reports":
            return LoadReported(name, load(number))
        case "drains":
            return LoadReported(name, load(number, draining=bool(number % 2)))
        case "items wanted":
            wants = tuple(Want(item, number % 40, 1 + number % 60, (b"%d" % (number + item), b"")) for item in range(2))
            return CreditsWanted(number, wants, wait=False)
        case "text wanted":
            return TextWanted(number, 1 + number % 50)
        case "encoded":
            return encoded(credit, name)
        case "first token":
            return FirstToken(credit)
        case "engine failed":
            return CallFailed(credit, name, EngineFailure("failed"))
        case "arena full":
            return CallFailed(credit, name, ArenaFull("full"))
        case "call lost":
            return CallFailed(credit, name, Unavailable("lost"))
        case "returned":
            return CreditReturned(credit)
        case _:
            return ClusterTick()


KINDS = (
    *("joins", "leaves", "has left", "is seen", "serves another model", "is suspected", "drains"),
    *("engine failed", "arena full", "call lost"),
    *("reports", "items wanted", "text wanted", "encoded", "first token", "returned", "time passes", *POOLS) * 3,
)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.sampled_from(sorted(ROLES)), st.integers(0, 2000)), min_size=5, max_size=60
    ),
    st.sampled_from(["least-loaded", "predicted"]),
    st.booleans(),
)
def test_what_is_kept_is_always_what_would_be_made_anew(
    steps: list[tuple[str, str, int]], routing: str, profiled: bool
) -> None:
    """Pools are looked at now and then only, so that several changes lie between two looks."""
    machine, now_s = cluster(routing, profiled=profiled), 0.0
    for kind, name, number in steps:
        if kind in POOLS:
            assert kept(machine, POOLS[kind], now_s) == made_anew(machine, POOLS[kind], now_s)
        else:
            now_s += number / 1000 if kind == "time passes" else 0.0
            machine.handle(event_of(kind, name, number, machine), now_s)
        machine.validate()
    for stages in POOLS.values():
        assert kept(machine, stages, now_s) == made_anew(machine, stages, now_s)


def put(machine: ClusterMachine, now_s: float) -> list[str]:
    """The encoders whose rows are put when the pool is looked at."""
    with patch.object(Instance, "put", autospec=True, side_effect=Instance.put) as put_again:
        kept(machine, ENCODE, now_s)
    return [call.args[0].name for call in put_again.call_args_list]


def test_only_the_row_of_a_changed_instance_is_put_again() -> None:
    machine = cluster()
    assert put(machine, 5.0) == []
    machine.handle(LoadReported("b", load(7)), 5.0)
    assert put(machine, 5.0) == ["b"]
    assert kept(machine, ENCODE, 5.0)[1].pending_tokens == 7
    assert put(machine, 5.0) == []


def test_an_instance_in_two_pools_is_put_again_in_both() -> None:
    machine = cluster()
    machine.handle(LoadReported("h", load(7)), 0.0)
    assert [row.pending_tokens for row in kept(machine, ENCODE)] == [0, 0, 7]
    assert [row.pending_tokens for row in kept(machine, TEXT)] == [7 + 6, 0], (
        "six answers that may have seven tokens together"
    )


def test_a_row_is_put_again_when_its_time_is_up() -> None:
    machine = cluster()
    machine.handle(CallFailed(0, "a", ArenaFull("full")), 1.0)
    assert put(machine, 1.0) == ["a"]
    assert put(machine, 1.4) == []
    assert [[row.available_bytes for row in kept(machine, ENCODE, now_s)] for now_s in (1.4, 1.5)] == [
        [0, 100, 100],
        [100, 100, 100],
    ]
    assert put(machine, 1.6) == [], "it holds from now on"


def test_a_pool_is_shared_once_its_instances_report_much_of_other_routers() -> None:
    machine = cluster()
    assert not machine.instances.pool(ENCODE, 0.0).shared
    for _ in range(9):
        machine.handle(LoadReported("a", InstanceLoad({Stage.ENCODE: StageLoad(5, 3)})), 0.0)
    assert machine.instances.pool(ENCODE, 0.0).shared
    assert not machine.instances.pool(TEXT, 0.0).shared


def test_a_row_that_has_fallen_behind_is_noticed() -> None:
    machine = cluster()
    machine.instances.by_name["a"].stages[Stage.ENCODE].own_tokens = 3
    with pytest.raises(AssertionError, match="a: its row is out of date"):
        machine.instances.validate()


def test_decisions_make_no_candidates() -> None:
    machine = cluster()
    with patch.object(Pool, "candidate", side_effect=AssertionError("made")):
        for number, kind in enumerate(("items wanted", "text wanted", "reports", "items wanted", "text wanted"), 1):
            effects = machine.handle(event_of(kind, "b", number, machine), 1.0)
            assert kind == "reports" or isinstance(effects[0], Granted)
