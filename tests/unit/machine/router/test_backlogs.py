"""What routing by predicted time knows of instances, through the cluster machine."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from tests.unit.policy.profiles import DECODER, ENCODER
from triptych.domain.embedding import DType, Ticket
from triptych.domain.encoding import EncodeResult
from triptych.domain.instance import InstanceInfo, InstanceLoad, ModelInfo, ServedPart, StageLoad, TransportOffer
from triptych.domain.membership import Member
from triptych.domain.profile import ProfileIdentity, TransferRow
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.machine.router.backlogs import Backlogs
from triptych.machine.router.cluster import ClusterMachine
from triptych.machine.router.cluster_events import (
    ClusterEffect,
    ClusterEvent,
    InstanceSeen,
    LoadReported,
    MemberJoined,
    MemberLeft,
)
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.machine.router.instance import Instance
from triptych.machine.router.instances import ENCODE, TEXT
from triptych.machine.router.relative_times import RelativeTimes
from triptych.machine.router.shared_events import (
    CreditReturned,
    CreditsWanted,
    FirstToken,
    Grant,
    Granted,
    ItemEncoded,
    TextWanted,
)
from triptych.policy.backlog import Backlog, EncodeBacklog, TextBacklog
from triptych.policy.costs import Costs
from triptych.policy.placement.wants import Want
from triptych.policy.policies import Policies, PolicyNames

MODEL = ModelInfo("m", "r", DType.F32, 8, 4096)
PREDICTED = Policies.named(PolicyNames(encoder_routing="predicted", text_routing="predicted"))
FAR = replace(ENCODER, transfer=(*ENCODER.transfer, TransferRow("tcp", 1 << 20, 0.5)))
"""Half a second for an embedding from another host."""
ENCODES = ServedPart(ENCODER.identity, max_batch=4, prepare_cores=2)
WRITES = ServedPart(DECODER.identity, max_batch=8, token_budget=2048)


def by_profiles(identity: ProfileIdentity) -> Costs:
    return Costs(FAR if identity.part is ModelPart.ENCODER else DECODER)


def unknown(_: ProfileIdentity) -> None:
    return None


class Checked(ClusterMachine):
    """Validates the invariants after each event."""

    def handle(self, event: ClusterEvent, now_s: float) -> list[ClusterEffect]:
        effects = super().handle(event, now_s)
        self.instances.pool(ENCODE, now_s)
        self.instances.pool(TEXT, now_s)
        self.validate()
        return effects


def cluster(costs: Callable[[ProfileIdentity], Costs | None], policies: Policies = PREDICTED, **hosts: str) -> Checked:
    """Of members named by role and number; each is on the host given."""
    machine = Checked(ClusterLimits(), policies, Random(7), arena_retry_s=0.5, retry_after_s=2.0, costs=costs)
    for name, host in hosts.items():
        role = {"e": Role.E, "t": Role.PD, "h": Role.EPD}[name[0]]
        parts = tuple(part for stage, part in ((Stage.ENCODE, ENCODES), (Stage.PREFILL, WRITES)) if role.serves(stage))
        offers = (TransportOffer("tcp", host, b""),)
        info = InstanceInfo(f"i-{name}", 1, role, MODEL, 1 << 30, offers, max_items=64, kv_tokens=1 << 20, parts=parts)
        machine.handle(MemberJoined(Member(name)), 0.0)
        machine.handle(InstanceSeen(name, info), 0.0)
    return machine


def backlog(machine: ClusterMachine, name: str, stages: tuple[Stage, ...] = ENCODE) -> Backlog | None:
    return next(
        candidate.backlog for candidate in machine.instances.pool(stages, 0.0).candidates if candidate.name == name
    )


def granted(effects: list[ClusterEffect]) -> Grant:
    (found,) = [effect for effect in effects if isinstance(effect, Granted)]
    return found.grants[0]


def want(number: int, tokens: int = 200, *, nbytes: int = 1 << 20, pixels: int = 1_000_000) -> Want:
    return Want(0, tokens, nbytes, (b"%d" % number, b""), media_nbytes=100_000, pixels=pixels)


def encode(machine: ClusterMachine, number: int, item: Want, now_s: float = 0.0) -> Grant:
    return granted(machine.handle(CreditsWanted(number, (item,), wait=False), now_s))


def encoded(machine: ClusterMachine, grant: Grant, now_s: float) -> None:
    ticket = Ticket(bytes(32), grant.instance_id, 1, 0, 0, 1, 0, (), 1, b"reader", 1.0)
    result = EncodeResult(ticket, b"router", cached=False, queue_s=0, encode_s=0)
    machine.handle(ItemEncoded(grant.credit, grant.name, result), now_s)
    machine.handle(CreditReturned(grant.credit), now_s)


def test_without_the_policy_nothing_is_predicted() -> None:
    machine = cluster(by_profiles, Policies.named(PolicyNames()), e0="a", t0="a")
    assert backlog(machine, "e0") is None
    assert backlog(machine, "t0", TEXT) is None


def test_an_encoder_has_what_it_was_given_and_what_it_reports() -> None:
    machine = cluster(by_profiles, e0="a", t0="b")
    grant = encode(machine, 1, want(1))
    predicted = backlog(machine, "e0")
    assert isinstance(predicted, EncodeBacklog)
    assert predicted.wait_s == pytest.approx(0.02 + 1e-4 * 200)
    assert predicted.prepared_s == pytest.approx((1e-3 + 1e-3) / 2)
    machine.handle(LoadReported("e0", InstanceLoad({Stage.ENCODE: StageLoad(600, 3)})), 0.0)
    predicted = backlog(machine, "e0")
    assert isinstance(predicted, EncodeBacklog)
    assert predicted.wait_s == pytest.approx(0.02 + 1e-4 * 600)
    assert predicted.prepared_s == pytest.approx(3 * 1e-3), "items of other routers count as much as its own"
    encoded(machine, grant, 0.1)
    machine.handle(LoadReported("e0", InstanceLoad({Stage.ENCODE: StageLoad(0, 0)})), 0.0)
    predicted = backlog(machine, "e0")
    assert isinstance(predicted, EncodeBacklog)
    assert (predicted.wait_s, predicted.prepared_s) == (0.0, 0.0)


def test_a_text_instance_has_prompts_and_answers() -> None:
    machine = cluster(by_profiles, e0="a", t0="b", t1="b")
    grant = granted(machine.handle(TextWanted(1, 1024, max_tokens=100), 0.0))
    assert grant.name == "t0"
    busy, idle = backlog(machine, "t0", TEXT), backlog(machine, "t1", TEXT)
    assert isinstance(busy, TextBacklog)
    assert isinstance(idle, TextBacklog)
    assert busy.wait_s == pytest.approx(0.01 + 1e-4 * 1024 + busy.step_s, rel=0.01)
    assert idle.wait_s == 0.0
    assert busy.step_s > idle.step_s
    machine.handle(FirstToken(grant.credit), 0.2)
    busy = backlog(machine, "t0", TEXT)
    assert isinstance(busy, TextBacklog)
    assert busy.wait_s == 0.0
    assert busy.step_s > idle.step_s, "its answer goes on"


def test_a_long_prompt_goes_where_fewer_wait_although_more_answers_run_there() -> None:
    """Tokens of prompts and answers are not alike: 2,000 of a prompt are 0.2 s, 2,000 more of answers some steps."""
    machine = cluster(by_profiles, e0="a", t0="b", t1="b")
    machine.handle(
        LoadReported("t0", InstanceLoad({Stage.PREFILL: StageLoad(2000, 1), Stage.DECODE: StageLoad(0, 0)})), 0.0
    )
    machine.handle(
        LoadReported("t1", InstanceLoad({Stage.PREFILL: StageLoad(0, 0), Stage.DECODE: StageLoad(2500, 3)})), 0.0
    )
    asked = TextWanted(1, 500, max_tokens=20)
    assert granted(machine.handle(asked, 0.0)).name == "t1"


def test_a_text_instance_on_the_host_of_the_embeddings_is_chosen_unless_it_is_late_by_more_than_the_pull() -> None:
    for waiting, chosen in ((2000, "t0"), (8000, "t1")):
        machine = cluster(by_profiles, e0="a", t0="a", t1="b")
        machine.handle(LoadReported("t0", InstanceLoad({Stage.PREFILL: StageLoad(waiting, 1)})), 0.0)
        asked = TextWanted(1, 500, max_tokens=20, holders={"i-e0": 1 << 20})
        assert granted(machine.handle(asked, 0.0)).name == chosen


def test_an_instance_that_does_both_takes_an_item_itself_unless_its_prompts_take_longer_than_the_pull() -> None:
    for waiting, chosen in ((0, "h0"), (2000, "h0"), (8000, "e0")):
        machine = cluster(by_profiles, e0="a", h0="b")
        machine.handle(LoadReported("h0", InstanceLoad({Stage.PREFILL: StageLoad(waiting, min(waiting, 1))})), 0.0)
        assert encode(machine, 1, want(1)).name == chosen
    near = cluster(by_profiles, e0="b", h0="b")
    near.handle(LoadReported("h0", InstanceLoad({Stage.PREFILL: StageLoad(2000, 1)})), 0.0)
    assert encode(near, 1, want(1)).name == "e0", "a pull within the host is quick"


def test_a_request_with_many_images_uses_the_encoders_beside_an_instance_that_does_both() -> None:
    machine = cluster(by_profiles, e0="a", e1="a", h0="b")
    wants = tuple(replace(want(item, 2000), item=item) for item in range(12))
    (found,) = [
        effect for effect in machine.handle(CreditsWanted(1, wants, wait=False), 0.0) if isinstance(effect, Granted)
    ]
    assert {grant.name for grant in found.grants} == {"e0", "e1", "h0"}


def test_without_profiles_it_learns_how_long_encoders_take_and_which_is_slow() -> None:
    machine, now_s = cluster(unknown, e0="a", e1="a", t0="b"), 0.0
    assert backlog(machine, "e0") is None
    names: list[str] = []
    for number in range(200):
        grant = encode(machine, number, want(number), now_s)
        names.append(grant.name)
        now_s += 0.4 if grant.name == "e0" else 0.1
        encoded(machine, grant, now_s)
    assert {"e0", "e1"} == set(names)
    assert names[-50:] == ["e1"] * 50, "idle, the slow one ends later"
    grants = [encode(machine, number, want(number), now_s) for number in range(1000, 1010)]
    assert {grant.name for grant in grants} == {"e0", "e1"}
    assert sum(grant.name == "e1" for grant in grants) > 5


def test_without_profiles_it_learns_how_long_first_tokens_take() -> None:
    machine, now_s = cluster(unknown, e0="a", t0="b", t1="b"), 0.0
    names: list[str] = []
    for number in range(200):
        grant = granted(machine.handle(TextWanted(number, 500, max_tokens=20), now_s))
        names.append(grant.name)
        now_s += 0.4 if grant.name == "t0" else 0.1
        machine.handle(FirstToken(grant.credit), now_s)
        machine.handle(CreditReturned(grant.credit), now_s)
    assert names[-50:] == ["t1"] * 50
    machine.handle(MemberLeft("t1"), now_s)
    assert granted(machine.handle(TextWanted(999, 500, max_tokens=20), now_s)).name == "t0"


def backlogs(costs: Callable[[ProfileIdentity], Costs | None]) -> tuple[Backlogs, Instance]:
    """Of one text instance."""
    instance = Instance(Member("t"))
    instance.seen(InstanceInfo("i-t", 1, Role.PD, MODEL, 1 << 30, (), parts=(WRITES,)))
    made = Backlogs(costs, RelativeTimes(), RelativeTimes())
    made.review({"t": instance}, {})
    return made, instance


def test_what_was_learned_is_used_more_and_more_rarely() -> None:
    made, _ = backlogs(unknown)
    refreshed = []
    for number in range(1, 200):
        if number % 2:
            made.observed()
        else:
            made.prompted(100)
        if made.refresh():
            refreshed.append(number)
    assert refreshed == [8, 24, 56, 120, 184]


def test_steps_are_predicted_for_prompts_of_the_mean_length_as_a_power_of_two() -> None:
    made, instance = backlogs(by_profiles)

    def step_s() -> float:
        found = made.of_text(instance)
        assert isinstance(found, TextBacklog)
        assert (found.slowness, found.instance_id) == (1.0, "i-t")
        return found.step_s

    for _ in range(8):
        made.observed()
    assert not made.refresh(), "the profile knows all but the length of prompts"
    assert step_s() == pytest.approx(Costs(DECODER).decode_s(1, 1).value)
    for tokens in (1000,) * 15 + (1400,):
        made.prompted(tokens)
    assert made.refresh()
    assert step_s() == pytest.approx(Costs(DECODER).decode_s(1, 1024).value)
    for _ in range(32):
        made.prompted(1000)
    assert not made.refresh(), "nothing has changed"
