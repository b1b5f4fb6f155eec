from dataclasses import replace
from itertools import count, product
from math import inf
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.examples import examples
from triptych.domain.embedding import DType, Ticket
from triptych.domain.encoding import EncodeResult
from triptych.domain.generation import Finished, FinishReason
from triptych.domain.instance import InstanceInfo, InstanceLoad, ModelInfo, StageLoad, TransportOffer
from triptych.domain.membership import Member
from triptych.domain.queue_position import QueuePosition
from triptych.domain.stage import Role, Stage
from triptych.errors import (
    ArenaFull,
    EngineFailure,
    InstanceLost,
    InvalidRequest,
    Overloaded,
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.machine.router.cluster import ClusterMachine
from triptych.machine.router.cluster_events import (
    ClusterEffect,
    ClusterEvent,
    ClusterTick,
    Connect,
    DescribeAgain,
    Disconnect,
    InstanceSeen,
    InstanceSuspected,
    LoadReported,
    Logged,
    MemberJoined,
    MemberLeaving,
    MemberLeft,
    WakeAt,
)
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.machine.router.instance import InstanceState
from triptych.machine.router.instances import ENCODE, TEXT
from triptych.machine.router.request_events import TextReported
from triptych.machine.router.shared_events import (
    CallFailed,
    CreditReturned,
    CreditsAbandoned,
    CreditsWanted,
    EmbeddingGone,
    EmbeddingsRead,
    FirstToken,
    Grant,
    Granted,
    HedgeWanted,
    ItemEncoded,
    LeasesReturned,
    LeasesTaken,
    Overtaken,
    PlaceRefused,
    TextPoolLost,
    TextWanted,
)
from triptych.policy.placement.affinity import Holding
from triptych.policy.placement.policy import PLACEMENTS
from triptych.policy.placement.pool import Candidate
from triptych.policy.placement.wants import Want
from triptych.policy.policies import Policies, PolicyNames

MODEL = ModelInfo("m", "r", DType.F32, 8, 100)
POLICIES = Policies.named(PolicyNames())
LIMITS = ClusterLimits(
    max_waiting_requests=3, max_embedding_hints=2, pool_grace_s=1.0, first_backoff_s=1.0, longest_backoff_s=8.0
)
SAME, UNSEEN = InstanceState.SAME_PROCESS.value, InstanceState.NOT_SEEN.value
ENCODERS = ("a", "b")
TEXTS = ("t", "u")


def info(name: str, *, epoch: int = 1, model: ModelInfo = MODEL, arena_bytes: int = 100) -> InstanceInfo:
    return InstanceInfo(f"i-{name}", epoch, Role.E if name in ENCODERS else Role.PD, model, arena_bytes, ())


class Checked(ClusterMachine):
    """Validates the invariants after each event."""

    def handle(self, event: ClusterEvent, now_s: float) -> list[ClusterEffect]:
        effects = super().handle(event, now_s)
        self.validate()
        return effects


def cluster(*seen: str, policies: Policies = POLICIES) -> ClusterMachine:
    """A cluster with these members; those in ``seen`` have reported."""
    machine = Checked(LIMITS, policies, Random(7), arena_retry_s=0.5, retry_after_s=2.0)
    for name in ENCODERS + TEXTS:
        machine.handle(MemberJoined(Member(name)), 0)
    for name in seen:
        machine.handle(InstanceSeen(name, info(name)), 0)
    machine.handle(ClusterTick(), 0)  # requested before there was a text instance
    return machine


NUMBERS = count(1000)


def wants(*nbytes: int, first: int = 0) -> tuple[Want, ...]:
    return tuple(Want(i, n, n, (b"%d" % (first + i), b"")) for i, n in enumerate(nbytes))


def granted(effects: list[ClusterEffect]) -> Granted:
    (found,) = [effect for effect in effects if isinstance(effect, Granted)]
    return found


def refused(effects: list[ClusterEffect]) -> PlaceRefused:
    (found,) = [effect for effect in effects if isinstance(effect, PlaceRefused)]
    return found


def load(tokens: int = 0, *, items: int | None = None, leased: int = 0, draining: bool = False) -> InstanceLoad:
    stage_load = StageLoad(tokens, (tokens and 1) if items is None else items, leased)
    return InstanceLoad({Stage.ENCODE: stage_load}, draining)


def text_load(tokens: int, waiting: int, running: int) -> InstanceLoad:
    return InstanceLoad({Stage.PREFILL: StageLoad(tokens, waiting), Stage.DECODE: StageLoad(0, running)})


def encoder(machine: ClusterMachine, name: str, now_s: float = 0.0) -> Candidate:
    return next(candidate for candidate in machine.instances.pool(ENCODE, now_s).candidates if candidate.name == name)


def text(machine: ClusterMachine, name: str, now_s: float = 0.0) -> Candidate:
    return next(candidate for candidate in machine.instances.pool(TEXT, now_s).candidates if candidate.name == name)


def usable(machine: ClusterMachine, now_s: float) -> list[str]:
    """The encoders that may get items."""
    return [candidate.name for candidate in machine.instances.pool(ENCODE, now_s).candidates if candidate.usable]


def engine_fails(machine: ClusterMachine, name: str, now_s: float = 0.0) -> None:
    """An engine failure of this instance, at the first work that it is given."""
    others = frozenset(ENCODERS + TEXTS) - {name}
    if name in ENCODERS:
        want = Want(0, 1, 1, (b"fails", b""), exclude=others)
        grant = granted(machine.handle(CreditsWanted(99, (want,), wait=False), now_s)).grants[0]
    else:
        grant = text_granted(machine.handle(TextWanted(99, 1, avoid=others), now_s))
    machine.handle(CallFailed(grant.credit, name, EngineFailure("failed")), now_s)
    machine.handle(CreditReturned(grant.credit), now_s)


def text_granted(effects: list[ClusterEffect]) -> Grant:
    assert isinstance(effects[0], Granted)
    return effects[0].grants[0]


def encoded(grant: Grant) -> ItemEncoded:
    ticket = Ticket(bytes(32), grant.instance_id, 1, 0, 0, 1, 0, (), 1, b"reader", 1.0)
    return ItemEncoded(grant.credit, grant.name, EncodeResult(ticket, b"router", cached=False, queue_s=0, encode_s=0))


def wakes(effects: list[ClusterEffect]) -> list[float]:
    return [effect.at_s for effect in effects if isinstance(effect, WakeAt)]


def test_an_encoders_load_is_its_report_plus_later_dispatches() -> None:
    machine = cluster("a")
    machine.handle(LoadReported("a", load(5, leased=20)), 0)
    grant = granted(machine.handle(CreditsWanted(1, wants(10), wait=True), 0)).grants[0]
    view = encoder(machine, "a")
    assert (view.pending_tokens, view.pending, view.available_bytes) == (15, 2, 70)
    machine.handle(encoded(grant), 0)
    machine.handle(encoded(grant), 0)
    view = encoder(machine, "a")
    assert (view.pending_tokens, view.pending, view.available_bytes) == (5, 1, 70)
    machine.handle(CreditReturned(grant.credit), 0)
    machine.handle(CreditReturned(grant.credit), 0)
    view = encoder(machine, "a")
    assert (view.pending_tokens, view.pending, view.available_bytes) == (5, 1, 80)


def test_a_dispatch_in_a_text_instances_report_is_not_subtracted_twice() -> None:
    machine = cluster("t")
    machine.handle(LoadReported("t", text_load(100, 1, 2)), 0)
    first = text_granted(machine.handle(TextWanted(1, 60), 0))
    assert (text(machine, "t").pending_tokens, text(machine, "t").pending) == (160, 4)
    second = text_granted(machine.handle(TextWanted(2, 10), 0))
    machine.handle(CreditReturned(second.credit), 0)
    assert (text(machine, "t").pending_tokens, text(machine, "t").pending) == (160, 4)
    machine.handle(LoadReported("t", text_load(40, 0, 1)), 0)
    machine.handle(CreditReturned(first.credit), 0)
    assert (text(machine, "t").pending_tokens, text(machine, "t").pending) == (40, 1)


def test_a_restarted_process_starts_without_load() -> None:
    machine = cluster("a")
    machine.handle(LoadReported("a", load(50, leased=60)), 0)
    engine_fails(machine, "a")
    machine.handle(CallFailed(0, "a", ArenaFull("full")), 0)
    assert not granted_at_once(machine, 1)
    [noticed, *_] = machine.handle(InstanceSeen("a", info("a", epoch=2)), 0.1)
    assert noticed == Logged("a", "restarted, ready")
    view = encoder(machine, "a", 0.1)
    assert (view.pending_tokens, view.available_bytes, view.backoff) == (0, 100, False)
    assert granted_at_once(machine, 2)


def granted_at_once(machine: ClusterMachine, run: int) -> bool:
    effects = machine.handle(CreditsWanted(run, wants(10, first=run), wait=False), 0.1)
    return any(isinstance(effect, Granted) for effect in effects)


def test_backoff_of_a_failing_engine_grows_until_a_success() -> None:
    machine = cluster("a", "b", "t", "u")
    item = granted(machine.handle(CreditsWanted(1, wants(10), wait=False), 0)).grants[0]
    place = text_granted(machine.handle(TextWanted(1, 10), 0))
    for name, view, worked in ((item.name, encoder, encoded(item)), (place.name, text, FirstToken(place.credit))):
        now_s = 0.0
        for backoff_s in (1.0, 2.0, 4.0, 8.0, 8.0):
            engine_fails(machine, name, now_s)
            engine_fails(machine, name, now_s + backoff_s / 2)  # of the same failed batch
            assert view(machine, name, now_s + backoff_s - 0.01).backoff
            now_s += backoff_s
            assert not view(machine, name, now_s).backoff
        engine_fails(machine, name, now_s)
        machine.handle(worked, now_s)
        assert not view(machine, name, now_s).backoff
        engine_fails(machine, name, now_s)
        assert view(machine, name, now_s + 0.99).backoff
        assert not view(machine, name, now_s + 1.0).backoff, "backoff starts over"


def encoders(*names: str, limits: ClusterLimits = LIMITS) -> ClusterMachine:
    """A cluster of encoders, all of them seen."""
    machine = Checked(limits, POLICIES, Random(7), arena_retry_s=0.5, retry_after_s=2.0)
    for name in names:
        machine.handle(MemberJoined(Member(name)), 0)
        machine.handle(InstanceSeen(name, replace(info(name), role=Role.E)), 0)
    return machine


def given_to(machine: ClusterMachine, name: str, now_s: float = 0.0) -> Grant:
    """An item, unlike all others, that only this encoder may get."""
    others = frozenset(machine.instances.by_name) - {name}
    want = Want(0, 1, 1, (b"%d" % next(NUMBERS), b""), exclude=others)
    return granted(machine.handle(CreditsWanted(99, (want,), wait=False), now_s)).grants[0]


def test_at_most_a_share_of_a_pool_is_in_backoff() -> None:
    machine = encoders(*"wxyz")
    for name in "wxyz":
        machine.handle(CallFailed(given_to(machine, name).credit, name, EngineFailure("failed")), 0)
    assert [name for name in "wxyz" if encoder(machine, name, 0.5).backoff] == ["w", "x"]
    effects = machine.handle(CallFailed(given_to(machine, "y", 1.0).credit, "y", EngineFailure("failed")), 1.0)
    assert effects == [Logged("y", "in backoff for 1 s: its engine fails")]
    assert [name for name in "wxyz" if encoder(machine, name, 1.5).backoff] == ["y"]


def test_the_last_usable_instance_is_never_in_backoff() -> None:
    machine = encoders("x", "y")
    machine.handle(InstanceSuspected("y"), 0)
    machine.handle(CallFailed(given_to(machine, "x").credit, "x", EngineFailure("failed")), 0)
    assert not encoder(machine, "x", 0.5).backoff


def test_an_encoder_that_was_in_backoff_gets_one_item_at_a_time_until_one_is_encoded() -> None:
    machine = encoders("x", "y")
    machine.handle(CallFailed(given_to(machine, "x").credit, "x", EngineFailure("failed")), 0)
    grants = granted(machine.handle(CreditsWanted(1, wants(1, 1, 1, 1), wait=False), 1.0)).grants
    assert sorted(grant.name for grant in grants) == ["x", "y", "y", "y"]
    probe = next(grant for grant in grants if grant.name == "x")
    more = granted(machine.handle(CreditsWanted(2, wants(1, first=4), wait=False), 1.1)).grants
    assert [grant.name for grant in more] == ["y"]
    machine.handle(encoded(probe), 1.2)
    grants = granted(machine.handle(CreditsWanted(3, wants(1, 1, 1, first=5), wait=False), 1.3)).grants
    assert [grant.name for grant in grants] == ["x", "x", "x"], "it is well, and the least loaded"


def test_a_probe_that_is_cancelled_makes_way_for_another() -> None:
    machine = encoders("x", "y")
    machine.handle(CallFailed(given_to(machine, "x").credit, "x", EngineFailure("failed")), 0)
    probe = given_to(machine, "x", 1.0)
    assert encoder(machine, "x", 1.0).backoff
    machine.handle(CreditReturned(probe.credit), 1.1)
    view = encoder(machine, "x", 1.1)
    assert (view.backoff, view.probation) == (False, True)


def test_calls_that_break_again_and_again_lead_to_a_backoff() -> None:
    machine = encoders("x", "y")
    backoffs = []
    for now_s in (0.0, 1.0, 2.0):
        for grant in [given_to(machine, "x", now_s) for _ in range(3)]:  # all break with one connection
            machine.handle(CallFailed(grant.credit, "x", InstanceLost("gone")), now_s)
        machine.handle(InstanceSeen("x", replace(info("x"), role=Role.E)), now_s + 0.1)
        backoffs.append(encoder(machine, "x", now_s + 0.1).backoff)
    assert backoffs == [False, False, True]
    machine.handle(encoded(given_to(machine, "x", 3.0)), 3.0)
    machine.handle(CallFailed(given_to(machine, "x", 3.0).credit, "x", InstanceLost("gone")), 3.1)
    machine.handle(InstanceSeen("x", replace(info("x"), role=Role.E)), 3.2)
    assert not encoder(machine, "x", 3.2).backoff, "they were not in a row"


def test_no_request_passes_a_suspect_that_waits_for_room_in_an_arena() -> None:
    machine = cluster("a")
    first = granted(machine.handle(CreditsWanted(1, wants(60), wait=True), 0)).grants[0]
    suspect = CreditsWanted(2, wants(80, first=1), wait=True, queue_position=QueuePosition(0, 0.0, 2), suspect=True)
    assert machine.handle(suspect, 0) == []
    assert (
        machine.handle(CreditsWanted(3, wants(30, first=2), wait=True, queue_position=QueuePosition(0, 1.0, 3)), 0)
        == []
    ), "it has room"
    assert granted(machine.handle(CreditReturned(first.credit), 0)).request == 2


def test_a_suspect_that_waits_for_another_one_holds_up_nobody() -> None:
    machine = cluster("a")
    first = granted(machine.handle(CreditsWanted(1, wants(10), wait=True, suspect=True), 0)).grants[0]
    assert machine.handle(CreditsWanted(2, wants(10, first=1), wait=True, suspect=True), 0) == []
    assert granted(machine.handle(CreditsWanted(3, wants(10, first=2), wait=True), 0)).request == 3
    assert granted(machine.handle(encoded(first), 0)).request == 2


def test_embeddings_that_cannot_be_used_lead_to_a_backoff_though_every_call_succeeds() -> None:
    machine = encoders("x", "y")

    def encodes_wrongly(now_s: float) -> None:
        grant = given_to(machine, "x", now_s)
        machine.handle(encoded(grant), now_s)
        machine.handle(EmbeddingGone(grant.credit, unusable=True), now_s)
        machine.handle(CreditReturned(grant.credit), now_s)

    for _ in range(2):
        encodes_wrongly(0.0)
    read = given_to(machine, "x")
    machine.handle(EmbeddingsRead((read.credit, 12345)), 0)
    for _ in range(2):
        encodes_wrongly(0.0)
    machine.handle(EmbeddingGone(read.credit), 0)  # evicted: no fault of its own
    assert not encoder(machine, "x").backoff
    encodes_wrongly(0.0)
    assert encoder(machine, "x", 0.9).backoff
    probe = given_to(machine, "x", 1.0)
    machine.handle(encoded(probe), 1.1)
    assert encoder(machine, "x", 1.1).probation, "that it encodes proves nothing"
    encodes_wrongly(1.2)
    assert encoder(machine, "x", 3.1).backoff
    machine.handle(EmbeddingsRead((probe.credit,)), 3.3)
    assert not encoder(machine, "x", 3.3).probation


def take(machine: ClusterMachine, name: str, now_s: float, time_s: float) -> list[str]:
    """An encode of this encoder, from its grant to its answer. Returns what is logged."""
    grant = given_to(machine, name, now_s)
    effects = machine.handle(encoded(grant), now_s + time_s)
    machine.handle(CreditReturned(grant.credit), now_s + time_s)
    return [f"{effect.name}: {effect.what}" for effect in effects if isinstance(effect, Logged)]


def test_an_encoder_far_slower_than_the_others_is_in_backoff_until_a_probe_is_quick() -> None:
    machine = encoders("x", "y", "z")
    logged = []
    for _ in range(30):
        for name in "xyz":
            logged += take(machine, name, 0.0, 1.0 if name == "x" else 0.1)
    assert logged == ["x: in backoff for 1 s: it is far slower than the others"]
    assert encoder(machine, "x", 1.9).backoff
    assert take(machine, "x", 2.0, 1.0) == ["x: in backoff for 2 s: it is far slower than the others"]
    earlier = given_to(machine, "x", 4.9)
    machine.handle(encoded(earlier), 5.0)
    assert encoder(machine, "x", 5.0).probation, "it was not granted on probation"
    take(machine, "x", 5.0, 0.1)
    view = encoder(machine, "x", 5.1)
    assert (view.backoff, view.probation) == (False, False)


def test_the_slow_encoder_of_two_is_in_backoff_but_never_both() -> None:
    machine = encoders("x", "y")
    logged = []
    for _ in range(30):
        for name in "xy":
            logged += take(machine, name, 0.0, 1.0 if name == "x" else 0.1)
    for _ in range(60):
        logged += take(machine, "y", 0.0, 100.0)
    assert logged == ["x: in backoff for 1 s: it is far slower than the others"]


def test_without_a_factor_slow_encoders_are_used() -> None:
    machine = encoders("x", "y", "z", limits=replace(LIMITS, outlier_factor=0.0))
    for _ in range(30):
        for name in "xyz":
            assert not take(machine, name, 0.0, 10.0 if name == "x" else 0.1)


def hedged(machine: ClusterMachine, grant: Grant, now_s: float = 0.0) -> list[str]:
    """Names of the encoder that is granted as a hedge of this one."""
    want = Want(0, 1, 1, (b"hedged %d" % next(NUMBERS), b""), exclude=frozenset({grant.name}))
    effects = machine.handle(HedgeWanted(7, want), now_s)
    grants = [grant for effect in effects if isinstance(effect, Granted) for grant in effect.grants]
    assert all(grant.hedges and (grant.item, grant.hedge_after_s) == (0, inf) for grant in grants)
    return [grant.name for grant in grants]


def test_an_item_may_be_hedged_from_the_99th_percentile_of_its_size_on() -> None:
    machine = encoders("x", "y")
    assert given_to(machine, "x").hedge_after_s == inf
    for _ in range(100):
        take(machine, "x", 0.0, 0.5)
    assert 0.5 <= given_to(machine, "y").hedge_after_s <= 0.55
    big = Want(0, 50, 1, (b"big", b""))
    assert granted(machine.handle(CreditsWanted(1, (big,), wait=False), 0)).grants[0].hedge_after_s == inf


def test_without_a_share_for_hedges_none_is_wanted() -> None:
    machine = encoders("x", "y", limits=replace(LIMITS, hedge_share=0.0))
    for _ in range(100):
        take(machine, "x", 0.0, 0.5)
    assert given_to(machine, "x").hedge_after_s == inf


def test_hedges_are_a_share_of_the_encodes_and_need_an_idle_encoder() -> None:
    machine = encoders("x", "y", limits=replace(LIMITS, hedge_share=0.25))
    slow = given_to(machine, "x")
    for _ in range(3):
        take(machine, "y", 0.0, 0.1)
    assert hedged(machine, slow) == [], "there is no share yet"
    for _ in range(9):
        take(machine, "y", 0.0, 0.1)
    busy = given_to(machine, "y")
    assert hedged(machine, slow) == [], "all have work"
    machine.handle(CreditReturned(busy.credit), 0)
    assert hedged(machine, slow) == ["y"]
    assert hedged(machine, slow) == [], "now y has work too"


def test_nothing_is_hedged_while_requests_wait_for_room() -> None:
    machine = encoders("x", "y", limits=replace(LIMITS, hedge_share=1.0))
    slow = given_to(machine, "x")
    take(machine, "y", 0.0, 0.1)
    machine.handle(encoded(given_to(machine, "y")), 0)  # without work, but its arena is not empty
    machine.handle(CreditsWanted(1, wants(100), wait=True), 0)
    assert machine.waiting == 1
    assert hedged(machine, slow) == []
    machine.handle(CreditsAbandoned(1), 0)
    assert hedged(machine, slow) == ["y"]


def test_an_encoder_that_is_overtaken_again_and_again_is_in_backoff() -> None:
    machine = encoders("x", "y")

    def overtaken(now_s: float) -> list[str]:
        grant = given_to(machine, "x", now_s)
        effects = machine.handle(Overtaken(grant.credit), now_s + 1.0)
        machine.handle(CreditReturned(grant.credit), now_s + 1.0)
        return [f"{effect.name}: {effect.what}" for effect in effects if isinstance(effect, Logged)]

    assert not overtaken(0.0)
    assert not overtaken(0.0)
    take(machine, "x", 0.0, 0.1)
    assert not overtaken(0.0)
    assert not overtaken(0.0)
    assert overtaken(0.0) == ["x: in backoff for 1 s: it is far slower than the others"]
    assert not overtaken(0.0)
    assert overtaken(2.0) == ["x: in backoff for 2 s: it is far slower than the others"], "it was a probe"
    assert machine.handle(Overtaken(12345), 0) == []


def test_items_are_encoded_again_within_a_budget_that_encodes_earn() -> None:
    machine = encoders("x", "y", limits=replace(LIMITS, retry_share=0.5, retry_burst=3))

    def again(request: int, items: int) -> list[ClusterEffect]:
        return machine.handle(CreditsWanted(request, wants(*[1] * items), wait=False, again=True), 0)

    first = granted(again(1, 2)).grants
    refusal = refused(again(2, 2))
    assert (refusal.final, type(refusal.error), refusal.error.retry_after_s) == (True, Unavailable, 2.0)
    assert "no more than 50% of the items are encoded again" in refusal.error.message
    assert machine.retries_left == 1.0
    for grant in first:
        machine.handle(encoded(grant), 0)
    granted(again(3, 2))
    assert machine.retries_left == 0.0
    granted(machine.handle(CreditsWanted(4, wants(1), wait=False), 0))  # the first time


def test_items_that_find_no_place_cost_no_budget() -> None:
    machine = encoders("x", limits=replace(LIMITS, retry_burst=3))
    granted(machine.handle(CreditsWanted(1, wants(100), wait=False), 0))
    refusal = refused(machine.handle(CreditsWanted(2, wants(100), wait=False, again=True), 0))
    assert (refusal.final, type(refusal.error), machine.retries_left) == (False, ArenaFull, 3.0)


def test_a_request_waiting_for_an_encoder_in_backoff_is_woken_at_its_end() -> None:
    machine = cluster("t", "a", "b")
    engine_fails(machine, "a")
    granted(machine.handle(CreditsWanted(1, wants(90), wait=True), 0))
    effects = machine.handle(CreditsWanted(2, wants(90, first=1), wait=True), 0)
    assert wakes(effects) == [1.0]
    assert granted(machine.handle(ClusterTick(), 1.0)).grants[0].name == "a"


def test_a_wake_is_requested_once_and_again_after_an_early_one() -> None:
    machine = cluster("t")
    assert wakes(machine.handle(CreditsWanted(1, wants(10), wait=True), 0)) == [1.0]
    assert wakes(machine.handle(CreditsWanted(2, wants(10), wait=True), 0)) == []
    assert wakes(machine.handle(ClusterTick(), 0.7)) == [1.0]


def test_ties_between_text_instances_rotate() -> None:
    machine = cluster("t", "u")
    chosen = []
    for run in range(4):
        grant = text_granted(machine.handle(TextWanted(run, 10), 0))
        machine.handle(CreditReturned(grant.credit), 0)
        chosen.append(grant.name)
    assert chosen == ["t", "u", "t", "u"]


def test_machines_that_know_nothing_of_each_other_prefer_the_same_encoder_for_equal_content() -> None:
    def chosen(*names: str) -> list[str]:
        machine, found = cluster(*names), []
        for run in range(20):
            grant = granted(machine.handle(CreditsWanted(run, wants(10, first=run), wait=True), 0)).grants[0]
            machine.handle(CreditReturned(grant.credit), 0)
            found.append(grant.name)
        return found

    assert chosen("a", "b") == chosen("b", "a")
    assert set(chosen("a", "b")) == {"a", "b"}


def test_among_equal_text_instances_one_on_the_host_of_the_embeddings_is_preferred() -> None:
    def on(name: str, host: str) -> InstanceInfo:
        return replace(info(name), offers=(TransportOffer("tcp", host, b""),))

    machine = cluster("a")
    for name, host in (("a", "north"), ("b", "south"), ("t", "north"), ("u", "south")):
        machine.handle(InstanceSeen(name, on(name, host)), 0)
    for run, (encoder_id, expected) in enumerate([("i-b", "u"), ("i-a", "t")] * 2):
        grant = text_granted(machine.handle(TextWanted(run, 10, holders={encoder_id: 5}), 0))
        machine.handle(CreditReturned(grant.credit), 0)
        assert grant.name == expected


def test_the_kv_limit_is_known_only_when_every_usable_text_instance_reports_it() -> None:
    machine = cluster("a")
    assert machine.instances.kv_tokens == 0
    machine.handle(InstanceSeen("t", replace(info("t"), kv_tokens=100)), 0)
    machine.handle(InstanceSeen("u", replace(info("u"), kv_tokens=50)), 0)
    assert machine.instances.kv_tokens == 100
    machine.handle(InstanceSeen("u", info("u")), 0)
    assert machine.instances.kv_tokens == 0
    machine.handle(InstanceSuspected("u"), 0)
    assert machine.instances.kv_tokens == 100


def test_an_encoder_announces_its_maximum_number_of_items() -> None:
    machine = cluster("b")
    machine.handle(InstanceSeen("a", replace(info("a"), max_items=1)), 0)
    assert (encoder(machine, "a").max_items, encoder(machine, "b").max_items) == (1, 0)


def test_instances_are_counted_by_role_and_by_state() -> None:
    machine = cluster("a", "t", "u")
    machine.handle(InstanceSuspected("u"), 0)
    assert machine.instances.states() == {
        ("E", "ready"): 1,
        ("", "not seen yet"): 1,
        ("PD", "ready"): 1,
        ("PD", "not reachable"): 1,
    }


def test_missing_stages_are_named() -> None:
    assert (cluster().instances.readiness().ready, cluster().instances.readiness().missing) == (
        False,
        ("encode", "prefill", "decode"),
    )
    assert cluster("a").instances.readiness().missing == ("prefill", "decode")
    assert cluster("t").instances.readiness().missing == ("encode",)
    assert cluster("a", "t").instances.readiness().missing == ()


def test_losing_an_unseen_or_lost_instance_has_no_effect() -> None:
    machine = cluster("b", "t")
    assert machine.handle(InstanceSuspected("a"), 0) == []
    assert machine.handle(InstanceSuspected("b"), 0) == [Logged("b", "not reachable")]
    assert machine.handle(InstanceSuspected("b"), 0) == []


def test_a_report_of_an_unseen_instance_is_ignored() -> None:
    machine = cluster()
    machine.handle(LoadReported("a", load(50)), 0)
    assert encoder(machine, "a").pending_tokens == 0


def test_a_request_cannot_wait_twice() -> None:
    machine = cluster("t")
    machine.handle(CreditsWanted(1, wants(10), wait=True), 0)
    with pytest.raises(ValueError, match="is waiting already"):
        machine.handle(CreditsWanted(1, wants(10), wait=True), 0)


def test_a_burst_between_two_reports_is_spread_over_instances() -> None:
    machine = cluster("a", "b", "t")
    machine.handle(LoadReported("a", load(5)), 0)
    machine.handle(LoadReported("b", load(0)), 0)
    chosen = [
        granted(machine.handle(CreditsWanted(run, wants(10, first=run), wait=True), 0)).grants[0].name
        for run in range(6)
    ]
    assert chosen == ["b", "a", "b", "a", "b", "a"]


def test_finished_work_is_not_counted_and_load_of_other_routers_is() -> None:
    machine = cluster("a", "b")
    machine.handle(LoadReported("a", load(7)), 0)
    grant = granted(machine.handle(CreditsWanted(1, wants(10), wait=True), 0)).grants[0]
    assert grant.name == "b"
    machine.handle(encoded(grant), 0)
    view = {candidate.name: candidate for candidate in machine.instances.pool(ENCODE, 0).candidates}
    assert (view["a"].pending_tokens, view["b"].pending_tokens, view["b"].available_bytes) == (7, 0, 90)
    machine.handle(CreditReturned(grant.credit), 0)
    assert encoder(machine, "b").available_bytes == 100
    assert machine.outstanding == 0


def test_credits_are_all_or_nothing_and_first_come_first_served() -> None:
    machine = cluster("a", "b")
    first = granted(machine.handle(CreditsWanted(1, wants(80, 80), wait=True), 0))
    assert machine.handle(CreditsWanted(2, wants(60, 60, first=2), wait=True), 0)[:1] != [first]
    # A smaller request does not overtake the large one, which would starve otherwise.
    machine.handle(CreditsWanted(3, wants(10, first=9), wait=True), 0)
    assert (machine.waiting, machine.outstanding) == (2, 2)
    assert not [
        effect for effect in machine.handle(CreditReturned(first.grants[0].credit), 0) if isinstance(effect, Granted)
    ], "credits are all or nothing"
    effects = machine.handle(CreditReturned(first.grants[1].credit), 0)
    assert [effect.request for effect in effects if isinstance(effect, Granted)] == [2, 3]


def test_a_lower_priority_number_is_served_first_and_ties_in_order() -> None:
    machine = cluster("a", "b")
    first = granted(machine.handle(CreditsWanted(1, wants(90, 90), wait=True), 0))
    for run, priority in ((2, 1), (3, 0), (4, 0)):
        machine.handle(
            CreditsWanted(run, wants(20, first=2 * run), wait=True, queue_position=QueuePosition(priority, 0.0, run)), 0
        )
    effects = [effect for grant in first.grants for effect in machine.handle(CreditReturned(grant.credit), 0)]
    assert [effect.request for effect in effects if isinstance(effect, Granted)] == [3, 4, 2]


def test_the_longest_wait_of_each_priority_is_known() -> None:
    machine = cluster("a", "b")
    machine.handle(CreditsWanted(1, wants(90, 90), wait=True), 0)
    for run, priority, now_s in ((2, 1, 1.0), (3, 0, 2.0), (4, 0, 3.0)):
        machine.handle(
            CreditsWanted(run, wants(20, first=2 * run), wait=True, queue_position=QueuePosition(priority, 0.0, run)),
            now_s,
        )
    assert machine.longest_waits_s(5.0) == {0: 3.0, 1: 4.0}
    machine.handle(CreditsAbandoned(2), 6.0)
    assert machine.longest_waits_s(7.0) == {0: 5.0}


def order_of_grants(
    machine: ClusterMachine, queue_positions: dict[int, QueuePosition], *, came_s: float, now_s: float
) -> list[int]:
    """The requests with these queue positions, in the order in which they get what a first one has had."""
    first = granted(machine.handle(CreditsWanted(1, wants(90, 90), wait=True), came_s))
    for run, queue_position in queue_positions.items():
        machine.handle(CreditsWanted(run, wants(20, first=2 * run), wait=True, queue_position=queue_position), came_s)
    effects = [effect for grant in first.grants for effect in machine.handle(CreditReturned(grant.credit), now_s)]
    return [effect.request for effect in effects if isinstance(effect, Granted)]


def test_within_a_priority_what_is_due_first_goes_first() -> None:
    queue_positions = {run: QueuePosition(0, due_s, run) for run, due_s in ((2, 30.0), (3, 50.0), (4, 25.0))}
    assert order_of_grants(cluster("a", "b"), queue_positions, came_s=0.0, now_s=1.0) == [4, 2, 3]


@pytest.mark.parametrize(("now_s", "order"), [(4.0, [2, 3, 4]), (4.1, [3, 4, 2]), (6.0, [4, 2, 3]), (9.0, [2, 3, 4])])
def test_what_is_lost_goes_behind_what_can_still_be_met(now_s: float, order: list[int]) -> None:
    queue_positions = {
        2: QueuePosition(0, 5.0, 2, lost_s=4.0, aged_s=30.0),
        3: QueuePosition(0, 6.0, 3, lost_s=5.0, aged_s=31.0),
        4: QueuePosition(0, 9.0, 4, lost_s=8.0, aged_s=32.0),
    }
    assert order_of_grants(cluster("a", "b"), queue_positions, came_s=0.0, now_s=now_s) == order


def test_a_request_that_is_lost_on_arrival_goes_behind_at_once() -> None:
    queue_positions = {
        2: QueuePosition(0, 1.0, 2, lost_s=0.5, aged_s=30.0),
        3: QueuePosition(0, 6.0, 3, lost_s=5.0, aged_s=31.0),
    }
    assert order_of_grants(cluster("a", "b"), queue_positions, came_s=1.0, now_s=1.0) == [3, 2]


def test_the_machine_uses_the_policies_it_is_given() -> None:
    machine = cluster("a", "b", "t", policies=replace(POLICIES, encoder_routing=PLACEMENTS["round-robin"]))
    machine.handle(LoadReported("a", load(50)), 0)
    chosen = [granted(machine.handle(CreditsWanted(run, wants(5, first=run), wait=True), 0)) for run in (1, 2, 3)]
    assert [effect.grants[0].name for effect in chosen] == ["a", "b", "a"]


def test_a_request_without_a_priority_has_priority_zero() -> None:
    machine = cluster("a", "b")
    first = granted(machine.handle(CreditsWanted(1, wants(90, 90), wait=True), 0))
    for run, event in enumerate(
        (
            CreditsWanted(2, wants(20, first=4), wait=True),
            CreditsWanted(3, wants(20, first=6), wait=True, queue_position=QueuePosition(0, 0.0, 0)),
            CreditsWanted(4, wants(20, first=8), wait=True),
        ),
        2,
    ):
        assert event.request == run
        machine.handle(event, 0)
    effects = [effect for grant in first.grants for effect in machine.handle(CreditReturned(grant.credit), 0)]
    assert [effect.request for effect in effects if isinstance(effect, Granted)] == [2, 3, 4]


def test_leaving_the_queue_admits_the_next_request() -> None:
    machine = cluster("a", "b")
    machine.handle(CreditsWanted(1, wants(90, 50), wait=True), 0)
    machine.handle(CreditsWanted(2, wants(60, 60, first=2), wait=True), 0)
    machine.handle(CreditsWanted(3, wants(10, first=9), wait=True), 0)
    assert granted(machine.handle(CreditsAbandoned(2), 0)).request == 3


def test_a_request_that_does_not_wait_is_answered_at_once() -> None:
    machine = cluster("a", "b")
    machine.handle(CreditsWanted(1, wants(90, 90), wait=True), 0)
    error = refused(machine.handle(CreditsWanted(2, wants(50, first=3), wait=False), 0)).error
    assert isinstance(error, ArenaFull)
    assert machine.waiting == 0


def test_the_queue_is_bounded() -> None:
    machine = cluster("a", "b")
    machine.handle(CreditsWanted(0, wants(90, 90), wait=True), 0)
    for run in (1, 2, 3):
        machine.handle(CreditsWanted(run, wants(50, first=run), wait=True), 0)
    error = refused(machine.handle(CreditsWanted(4, wants(50, first=9), wait=True), 0)).error
    assert type(error) is Overloaded
    assert error.retry_after_s == 2.0


def test_a_request_larger_than_all_arenas_is_refused_for_good() -> None:
    error = refused(cluster("a", "b", "t", "u").handle(CreditsWanted(1, wants(101), wait=True), 0)).error
    assert isinstance(error, InvalidRequest)
    assert "arenas of 200 bytes" in error.message


def test_more_items_than_the_encoders_take_at_once_are_refused_by_that_limit() -> None:
    machine = cluster("t", "u", "a")
    machine.handle(MemberLeft("b"), 0)
    machine.handle(InstanceSeen("a", replace(info("a"), max_items=2)), 0)
    error = refused(machine.handle(CreditsWanted(1, wants(1, 1, 1), wait=True), 0)).error
    assert isinstance(error, InvalidRequest)
    assert "than the 2 that the encoders take at once" in error.message


def test_without_an_encoder_a_request_waits_for_the_grace_period_only() -> None:
    machine = cluster("t")
    assert [
        effect for effect in machine.handle(CreditsWanted(1, wants(10), wait=True), 0) if isinstance(effect, WakeAt)
    ] == [WakeAt(1.0, "no encoder within the grace")]
    assert isinstance(refused(machine.handle(ClusterTick(), 1.0)).error, Unavailable)
    machine.handle(CreditsWanted(2, wants(10), wait=True), 2)
    assert granted(machine.handle(InstanceSeen("a", info("a")), 2.5)).request == 2


def test_the_grace_period_starts_at_the_loss() -> None:
    machine = cluster("a", "t")
    first = granted(machine.handle(CreditsWanted(1, wants(90), wait=True), 0))
    machine.handle(CreditsWanted(2, wants(90), wait=True), 1)
    assert not [effect for effect in machine.handle(InstanceSuspected("a"), 60) if isinstance(effect, PlaceRefused)]
    machine.handle(CreditReturned(first.grants[0].credit), 60.1)
    assert granted(machine.handle(InstanceSeen("a", info("a")), 60.5)).request == 2


def test_events_of_other_instances_do_not_restart_the_grace_period() -> None:
    machine = cluster()
    machine.handle(CreditsWanted(1, wants(10), wait=True), 0)
    machine.handle(InstanceSeen("t", info("t")), 0.5)
    assert isinstance(refused(machine.handle(ClusterTick(), 1.0)).error, Unavailable)


def test_a_text_pool_that_never_appeared_is_reported_lost_once() -> None:
    machine = cluster()
    assert not machine.text_lost
    assert wakes(machine.handle(ClusterTick(), 0)) == [1.0]
    assert [type(effect) for effect in machine.handle(ClusterTick(), 1.0)] == [TextPoolLost]
    assert machine.handle(ClusterTick(), 2.0) == []


def test_an_item_too_large_for_the_known_encoders_waits_for_the_others() -> None:
    machine = cluster("t", "a")
    assert wakes(machine.handle(CreditsWanted(1, wants(101), wait=True), 0)) == [1.0]
    assert granted(machine.handle(InstanceSeen("b", info("b", arena_bytes=200)), 0.5)).grants[0].name == "b"


def test_a_request_waiting_for_an_unknown_encoder_does_not_block_others() -> None:
    machine = cluster("t", "a")
    machine.handle(CreditsWanted(1, wants(101), wait=True), 0)
    assert granted(machine.handle(CreditsWanted(2, wants(10, first=10), wait=True), 0.1)).request == 2
    assert refused(machine.handle(ClusterTick(), 1.0)).request == 1


def test_what_waits_for_another_encoder_is_refused_in_time_behind_what_waits_for_room() -> None:
    machine = cluster("t", "a")
    machine.handle(CreditsWanted(1, wants(90), wait=True), 0)
    machine.handle(CreditsWanted(2, wants(101, first=10), wait=True), 0)
    machine.handle(CreditsWanted(3, wants(90, first=20), wait=True), 0)
    machine.handle(CreditsAbandoned(2), 0.5)
    machine.handle(CreditsWanted(4, wants(101, first=10), wait=True, queue_position=QueuePosition(-1, 0.0, 4)), 0.5)
    assert refused(machine.handle(ClusterTick(), 1.5)).request == 4
    assert machine.waiting == 1


def test_the_end_of_a_refusal_pause_wakes_no_request() -> None:
    machine = cluster("t", "a")
    machine.handle(CreditsWanted(1, wants(90), wait=True), 0)
    machine.handle(CallFailed(0, "a", ArenaFull("full")), 0)
    assert wakes(machine.handle(CreditsWanted(2, wants(50, first=1), wait=True), 0)) == [0.5]
    assert wakes(machine.handle(ClusterTick(), 0.5)) == []


def test_an_encoder_that_refused_gets_no_work_for_a_pause() -> None:
    machine = cluster("a", "t")
    machine.handle(CallFailed(0, "a", ArenaFull("full")), 0)
    effects = machine.handle(CreditsWanted(1, wants(10), wait=True), 0)
    assert [effect.at_s for effect in effects if isinstance(effect, WakeAt)] == [0.5]
    assert granted(machine.handle(ClusterTick(), 0.5)).request == 1


def test_an_instance_of_all_stages_has_one_load_per_stage() -> None:
    machine = Checked(LIMITS, POLICIES, Random(7), arena_retry_s=0.5, retry_after_s=2.0)
    machine.handle(MemberJoined(Member("h")), 0)
    machine.handle(InstanceSeen("h", replace(info("h"), role=Role.EPD)), 0)
    readiness = machine.instances.readiness()
    assert (readiness.ready, readiness.instances) == (True, ("i-h: ready",))
    assert machine.instances.states() == {("EPD", "ready"): 1}
    machine.handle(LoadReported("h", InstanceLoad({**load(40).stages, **text_load(7, 1, 0).stages})), 0)
    assert (encoder(machine, "h").pending_tokens, text(machine, "h").pending_tokens) == (40, 7)
    machine.handle(MemberJoined(Member("a")), 0)
    machine.handle(InstanceSeen("a", info("a")), 0)
    machine.handle(CallFailed(given_to(machine, "h").credit, "h", EngineFailure("failed")), 0)
    assert encoder(machine, "h").backoff
    assert not text(machine, "h").backoff, "the other engine works"
    machine.handle(InstanceSuspected("h"), 0)
    assert machine.instances.readiness().instances == ("i-a: ready", "i-h: not reachable")
    assert not encoder(machine, "h").usable
    assert not text(machine, "h").usable


def test_an_instance_that_returns_in_another_role_changes_pools() -> None:
    machine = cluster("a", "t")
    machine.handle(InstanceSeen("a", replace(info("a", epoch=2), role=Role.PD)), 0)
    assert machine.instances.readiness().missing == ("encode",)
    assert text(machine, "a").usable
    assert machine.instances.pool(ENCODE, 0).name == ["b", "u"], "an unseen instance may be an encoder"


@pytest.mark.parametrize(
    ("role", "missing"), [(Role.P, "decode"), (Role.D, "prefill"), (Role.EP, "decode"), (Role.ED, "prefill")]
)
def test_a_request_needs_instances_that_prefill_and_decode(role: Role, missing: str) -> None:
    machine = cluster("a")
    machine.handle(InstanceSeen("t", replace(info("t"), role=role)), 0)
    assert machine.instances.readiness().missing == (missing,)
    assert isinstance(machine.handle(TextWanted(1, 10), 0)[0], PlaceRefused)


def continuing(*names: str, able: tuple[str, ...]) -> ClusterMachine:
    """A cluster with these text instances, of which those in ``able`` go on with answers."""
    machine = cluster()
    for name in names:
        machine.handle(InstanceSeen(name, replace(info(name), continues=name in able)), 0)
    return machine


def test_an_answer_goes_on_only_where_that_is_known() -> None:
    machine = continuing("t", "u", able=("u",))
    wanted = TextWanted(1, 10, continues=True)
    assert {text_granted(machine.handle(wanted, 0)).name for _ in range(4)} == {"u"}
    assert {text_granted(machine.handle(TextWanted(2, 10), 0)).name for _ in range(8)} == {"t", "u"}


def test_an_answer_returns_to_an_instance_where_it_broke_if_there_is_no_other() -> None:
    machine = continuing("t", "u", able=("t", "u"))
    broke = TextWanted(1, 10, frozenset({"t"}), continues=True)
    assert {text_granted(machine.handle(broke, 0)).name for _ in range(4)} == {"u"}
    machine.handle(MemberLeft("u"), 0)
    assert text_granted(machine.handle(broke, 0)).name == "t"
    (refused,) = machine.handle(TextWanted(2, 10, frozenset({"t"})), 0)
    assert isinstance(refused, PlaceRefused), "a new request tries elsewhere, or ends"


@pytest.mark.parametrize(("seen", "final"), [((), False), (("t",), True)])
def test_an_answer_does_not_wait_where_all_usable_instances_cannot_go_on(seen: tuple[str, ...], final: bool) -> None:
    machine = continuing(*seen, able=())
    refused = machine.handle(TextWanted(1, 10, continues=True), 0)[0]
    assert isinstance(refused, PlaceRefused)
    assert refused.final is final


def test_a_refusal_is_final_once_the_text_pool_is_lost() -> None:
    machine = cluster("a")
    machine.handle(ClusterTick(), 0)
    assert any(isinstance(effect, TextPoolLost) for effect in machine.handle(ClusterTick(), 60.0))
    refused = machine.handle(TextWanted(1, 10, continues=True), 60.0)[0]
    assert isinstance(refused, PlaceRefused)
    assert refused.final


# --- membership ------------------------------------------------------------------------------------------------------


def test_a_joining_member_is_connected_once_and_gets_work_after_its_first_report() -> None:
    machine = Checked(LIMITS, POLICIES, Random(7), arena_retry_s=0.5, retry_after_s=2.0)
    assert Connect("a") in machine.handle(MemberJoined(Member("a")), 0)
    assert Connect("a") not in machine.handle(MemberJoined(Member("a", epoch=1)), 0)
    machine.handle(MemberJoined(Member("t")), 0)
    machine.handle(InstanceSeen("t", info("t")), 0)
    machine.handle(CreditsWanted(1, wants(10), wait=True), 0)
    assert granted(machine.handle(InstanceSeen("a", info("a")), 0.5)).request == 1


@pytest.mark.parametrize("member", [Member("a", role=Role.PD), Member("a", model="n"), Member("a", epoch=2)])
def test_an_instance_that_differs_from_its_member_entry_gets_no_work(member: Member) -> None:
    machine = cluster("a", "b", "t")
    machine.handle(MemberJoined(member), 0)
    assert "i-a: is not the member that is expected there" in machine.instances.readiness().instances
    grants = granted(machine.handle(CreditsWanted(1, wants(9, 9), wait=True), 0)).grants
    assert {grant.name for grant in grants} == {"b"}
    machine.handle(MemberJoined(Member("a", role=Role.E, model="m", epoch=1)), 0)
    assert machine.instances.readiness().instances == ("i-a: ready", "i-b: ready", "i-t: ready")


def test_one_process_under_two_addresses_is_used_once() -> None:
    machine = cluster("a", "t")
    same = replace(info("b"), instance_id="i-a")
    machine.handle(InstanceSeen("b", same), 0)
    assert machine.instances.states() == {
        ("E", "ready"): 1,
        ("E", SAME): 1,
        ("PD", "ready"): 1,
        ("", UNSEEN): 1,
    }
    assert usable(machine, 0) == ["a"]
    machine.handle(InstanceSeen("u", info("u")), 0)
    error = refused(machine.handle(CreditsWanted(1, wants(150), wait=True), 0)).error
    assert isinstance(error, InvalidRequest), "its arena counts once"
    machine.handle(InstanceSuspected("a"), 1)
    assert usable(machine, 1) == ["b"]
    machine.handle(InstanceSeen("a", info("a")), 2)
    assert usable(machine, 2) == ["b"], "the address in use stays in use"
    machine.handle(InstanceSeen("b", info("b", epoch=2)), 3)
    assert usable(machine, 3) == ["a", "b"], "another process has taken over"


def test_the_new_address_of_a_process_is_used_while_the_old_one_leaves() -> None:
    machine = cluster("a")
    granted(machine.handle(CreditsWanted(1, wants(10), wait=True), 0))
    machine.handle(InstanceSeen("b", replace(info("b"), instance_id="i-a")), 0)
    machine.handle(MemberLeaving("a"), 0)
    assert usable(machine, 0) == ["b"]


def test_a_leaving_member_without_work_is_removed_at_once() -> None:
    machine = cluster("a", "b", "t")
    machine.handle(CreditReturned(hold(machine, "a", b"0").credit), 0)
    assert Disconnect("a") in machine.handle(MemberLeaving("a"), 0)
    assert not machine.instances.directory
    assert machine.instances.readiness().instances == ("i-b: ready", "i-t: ready")


def test_a_leaving_member_gets_no_new_work_and_is_removed_after_its_last_credit() -> None:
    machine = cluster("a", "t")
    grants = granted(machine.handle(CreditsWanted(1, wants(10, 10), wait=True), 0)).grants
    dispatch = text_granted(machine.handle(TextWanted(1, 10), 0))
    for name in ("a", "t"):
        assert Disconnect(name) not in machine.handle(MemberLeaving(name), 0)
        assert not [effect for effect in machine.handle(MemberLeaving(name), 0) if isinstance(effect, Logged)], (
            "it is logged once"
        )
    assert machine.instances.readiness().instances == ("i-a: leaving", "i-t: leaving")
    assert isinstance(machine.handle(TextWanted(2, 10), 0)[0], PlaceRefused)
    assert isinstance(refused(machine.handle(CreditsWanted(2, wants(10), wait=False), 0)).error, Unavailable)
    machine.handle(encoded(grants[0]), 0)
    assert not machine.instances.directory, "its cached embeddings attract no request"
    machine.handle(CreditReturned(grants[0].credit), 0)
    assert Disconnect("a") in machine.handle(CreditReturned(grants[1].credit), 0)
    machine.handle(CallFailed(dispatch.credit, "t", Unavailable("draining")), 0)
    assert Disconnect("t") in machine.handle(CreditReturned(dispatch.credit), 0), "whether it is reachable or not"
    assert machine.outstanding == 0


def test_a_leaving_member_is_not_forgotten_while_it_has_leases_that_no_credit_covers() -> None:
    machine = cluster("a", "t")
    assert machine.handle(LeasesTaken("t", (b"1", b"2")), 0) == []
    assert Logged("t", "leaving, 0 credits and 2 other leases in use") in machine.handle(MemberLeaving("t"), 0)
    assert machine.handle(LeasesReturned("t", (b"1", b"another")), 0) == []
    assert machine.leases == 1
    machine.validate()
    assert Disconnect("t") in machine.handle(LeasesReturned("t", (b"2",)), 0)
    assert machine.handle(LeasesTaken("t", (b"3",)), 0) == [], "of no instance"
    assert machine.leases == 0
    machine.validate()


def test_a_leaving_member_that_is_not_reached_is_forgotten_with_all_that_is_held_there() -> None:
    """Nothing can be released there."""
    machine = cluster("a", "t")
    (held,) = granted(machine.handle(CreditsWanted(1, wants(10), wait=True), 0)).grants
    machine.handle(encoded(held), 0)
    machine.handle(LeasesTaken("t", (b"1",)), 0)
    for name in ("a", "t"):
        machine.handle(MemberLeaving(name), 0)
        assert Disconnect(name) not in machine.handle(InstanceSuspected(name), 1)
    machine.handle(InstanceSeen("t", info("t")), 2)
    assert Disconnect("a") not in machine.handle(ClusterTick(), 5.9)
    assert Disconnect("a") in machine.handle(ClusterTick(), 6)
    machine.validate()
    assert (machine.outstanding, machine.leases) == (0, 1), "the other one has been reached again"
    assert not any(isinstance(effect, Disconnect) for effect in machine.handle(ClusterTick(), 60))
    assert WakeAt in [type(effect) for effect in machine.handle(InstanceSuspected("t"), 60)]
    assert Disconnect("t") in machine.handle(ClusterTick(), 65)
    assert machine.handle(CreditReturned(held.credit), 65) == []


def test_calls_to_a_leaving_member_are_waited_for_whether_it_is_reached_or_not() -> None:
    machine = cluster("a", "t")
    held, running = granted(machine.handle(CreditsWanted(1, wants(10, 10), wait=True), 0)).grants
    machine.handle(encoded(held), 0)
    machine.handle(MemberLeaving("a"), 0)
    machine.handle(InstanceSuspected("a"), 0)
    assert Disconnect("a") not in machine.handle(ClusterTick(), 60)
    assert Disconnect("a") in machine.handle(CreditReturned(running.credit), 60)
    assert machine.outstanding == 0


def test_a_member_that_stops_leaving_gets_work_again() -> None:
    machine = cluster("a", "t")
    grant = granted(machine.handle(CreditsWanted(1, wants(10), wait=True), 0)).grants[0]
    machine.handle(MemberLeaving("a"), 0)
    assert Connect("a") not in machine.handle(MemberJoined(Member("a")), 0)
    assert granted(machine.handle(CreditsWanted(2, wants(10, first=2), wait=True), 0))
    assert Disconnect("a") not in machine.handle(CreditReturned(grant.credit), 0)


def test_a_member_that_left_loses_its_credits_and_hints() -> None:
    machine = cluster("a", "t")
    first, second = granted(machine.handle(CreditsWanted(1, wants(10, 10), wait=True), 0)).grants
    machine.handle(encoded(first), 0)
    assert Disconnect("a") in machine.handle(MemberLeft("a"), 0)
    assert (machine.outstanding, len(machine.instances.directory)) == (0, 0)
    for event in (
        CreditReturned(first.credit),
        encoded(second),
        EmbeddingGone(first.credit),
        FirstToken(second.credit),
        CallFailed(second.credit, "a", EngineFailure("failed")),
        CallFailed(second.credit, "a", InstanceLost("gone")),
        InstanceSeen("a", info("a")),
        InstanceSuspected("a"),
        LoadReported("a", load(5)),
        MemberLeaving("a"),
        MemberLeft("a"),
    ):
        assert machine.handle(event, 0) == [], "no instance is left"
    machine.handle(MemberJoined(Member("a")), 1)
    machine.handle(InstanceSeen("a", info("a", epoch=2)), 1)
    machine.handle(CreditReturned(second.credit), 1)
    assert encoder(machine, "a").available_bytes == 100, "credits of an earlier epoch do not count for the new one"


def test_requests_waiting_for_the_last_encoder_fail_after_the_grace_period() -> None:
    machine = cluster("a", "t")
    machine.handle(MemberLeft("b"), 0)
    granted(machine.handle(CreditsWanted(1, wants(90), wait=True), 0))
    machine.handle(CreditsWanted(2, wants(90, first=1), wait=True), 0)
    assert wakes(machine.handle(MemberLeft("a"), 5)) == [6.0]
    assert isinstance(refused(machine.handle(ClusterTick(), 6.0)).error, Unavailable)


@pytest.mark.parametrize(
    "event",
    [
        InstanceSuspected("a"),
        LoadReported("a", load(draining=True)),
        InstanceSeen("a", info("a", model=replace(MODEL, revision="other"))),
        MemberLeaving("a"),
    ],
)
def test_only_ready_encoders_get_work_and_readiness_says_why(event: InstanceSuspected) -> None:
    machine = cluster("a", "b", "t")
    machine.handle(event, 0)
    grants = granted(machine.handle(CreditsWanted(1, wants(10, 10), wait=True), 0)).grants
    assert {grant.name for grant in grants} == {"b"}
    assert "i-a: ready" not in machine.instances.readiness().instances
    assert machine.instances.readiness().ready


def test_an_instance_that_is_seen_again_gets_work_again() -> None:
    machine = cluster("a")
    machine.handle(InstanceSuspected("a"), 0)
    machine.handle(InstanceSeen("a", info("a")), 1)
    assert granted(machine.handle(CreditsWanted(1, wants(10), wait=True), 1))


def test_the_new_model_becomes_current_when_no_instance_serves_the_old_one() -> None:
    machine = cluster("a", "t")
    new = replace(MODEL, revision="new")
    machine.handle(InstanceSeen("a", info("a", model=new)), 0)
    assert machine.instances.model == MODEL
    machine.handle(InstanceSeen("t", info("t", model=new)), 0)
    assert machine.instances.model == new
    assert machine.instances.readiness().ready


def test_an_unreachable_instance_does_not_keep_the_old_model_current() -> None:
    machine = cluster("a")
    machine.handle(InstanceSuspected("a"), 0)
    new = replace(MODEL, revision="new")
    machine.handle(InstanceSeen("b", info("b", model=new)), 0)
    assert machine.instances.model == new


def test_models_are_compared_by_their_identity() -> None:
    machine = cluster("t")
    machine.handle(InstanceSeen("a", info("a", model=replace(MODEL))), 0)
    machine.handle(InstanceSeen("b", info("b", model=replace(MODEL))), 0)
    assert machine.instances.readiness().instances == ("i-a: ready", "i-b: ready", "i-t: ready")


def test_hints_are_used_until_they_are_wrong_or_the_holder_restarts() -> None:
    def chosen(machine: ClusterMachine, run: int) -> str:
        grants = granted(machine.handle(CreditsWanted(run, wants(10), wait=True), 0)).grants
        machine.handle(CreditReturned(grants[0].credit), 0)
        return grants[0].name

    machine = cluster("a", "b")
    preferred = chosen(machine, 0)
    other = "b" if preferred == "a" else "a"
    held = hold(machine, other, b"0")
    machine.handle(CreditReturned(held.credit), 0)
    assert [chosen(machine, run) for run in range(3)] == [other, other, other]
    held = hold(machine, other, b"0")
    machine.handle(EmbeddingGone(held.credit), 0)
    machine.handle(CreditReturned(held.credit), 0)
    assert chosen(machine, 0) == preferred
    machine.handle(CreditReturned(hold(machine, other, b"0").credit), 0)
    machine.handle(InstanceSeen(other, info(other, epoch=2)), 0)
    assert chosen(machine, 0) == preferred


def hold(machine: ClusterMachine, name: str, digest: bytes) -> Grant:
    """Makes this encoder, and no other, encode an item with this content."""
    want = Want(0, 1, 1, (digest, b""), exclude=frozenset(ENCODERS) - {name})
    grant = granted(machine.handle(CreditsWanted(99, (want,), wait=False), 0)).grants[0]
    machine.handle(encoded(grant), 0)
    return grant


def test_what_comes_of_hints_is_counted() -> None:
    machine, content = cluster("a", "b"), (b"cat", b"")
    want = (Want(0, 10, 10, content),)

    def sent() -> Grant:
        return granted(machine.handle(CreditsWanted(next(NUMBERS), want, wait=True), 0)).grants[0]

    def answered(grant: Grant, *, cached: bool) -> dict[str, int]:
        event = encoded(grant)
        event = replace(event, result=replace(event.result, cached=cached))
        for _ in range(2):  # the second one comes too late
            machine.handle(event, 0)
        machine.handle(CreditReturned(grant.credit), 0)
        return machine.instances.directory.followed

    first, joins = sent(), sent()
    assert answered(first, cached=False) == {"hit": 0, "joined": 0, "stale": 0}
    assert answered(joins, cached=False) == {"hit": 0, "joined": 1, "stale": 0}
    assert answered(sent(), cached=True) == {"hit": 1, "joined": 1, "stale": 0}
    assert answered(sent(), cached=False) == {"hit": 1, "joined": 1, "stale": 1}
    assert len(machine.instances.directory) == 1


def test_hints_are_bounded() -> None:
    machine = cluster("a", "b")

    def known(name: str) -> list[int]:
        return [
            number for number in range(9) if Holding(name) in machine.instances.directory.holders((b"%d" % number, b""))
        ]

    for number in range(5):
        hold(machine, "a", b"%d" % number)
        hold(machine, "a", b"0")
    assert known("a") == [0, 4]
    hold(machine, "a", b"4")
    hold(machine, "a", b"5")
    assert known("a") == [4, 5], "the oldest is evicted"
    hold(machine, "a", b"0")
    elsewhere = hold(machine, "b", b"0")
    assert (known("a"), known("b")) == ([0], [0])
    machine.handle(EmbeddingGone(elsewhere.credit), 0)
    assert (known("a"), known("b")) == ([0], []), "its loss on another encoder has no effect"
    machine.handle(CreditReturned(elsewhere.credit), 0)
    machine.handle(EmbeddingGone(elsewhere.credit), 0)
    machine.handle(encoded(elsewhere), 0)
    assert known("b") == [], "nor does an event for a returned credit"


@pytest.mark.parametrize(
    ("error", "usable", "effects"),
    [
        (InstanceLost("gone"), False, [Logged("a", "not reachable"), DescribeAgain("a")]),
        (Unavailable("draining"), False, [Logged("a", "not reachable"), DescribeAgain("a")]),
        (TransferFailed("broken"), True, []),
        (InvalidRequest("bad"), True, []),
    ],
)
def test_an_instance_reported_down_by_a_call_gets_no_work_and_is_probed(
    error: TriptychError, usable: bool, effects: list[ClusterEffect]
) -> None:
    machine = cluster("a", "t")
    grant = granted(machine.handle(CreditsWanted(1, wants(10), wait=False), 0)).grants[0]
    assert machine.handle(CallFailed(grant.credit, "a", error), 0) == effects
    view = encoder(machine, "a")
    assert (view.usable, view.pending_tokens, view.available_bytes) == (usable, 0, 90), "its bytes may still be in use"


def test_a_full_arena_error_of_a_text_instance_has_no_effect() -> None:
    machine = cluster("a", "t")
    machine.handle(CallFailed(0, "t", ArenaFull("the image cache is full")), 0)
    assert text_granted(machine.handle(TextWanted(1, 10), 0)).name == "t"
    assert granted_at_once(machine, 1)


def test_text_goes_to_the_least_pending_tokens_including_own_dispatches() -> None:
    machine = cluster("t", "u")
    machine.handle(LoadReported("t", text_load(100, 0, 1)), 0)
    machine.handle(LoadReported("u", text_load(0, 0, 0)), 0)
    chosen = []
    for run in range(4):
        last = text_granted(machine.handle(TextWanted(run, 60), 0))
        chosen.append(last.name)
    assert chosen == ["u", "u", "t", "u"]
    machine.handle(CreditReturned(last.credit), 0)
    assert text(machine, "u").pending_tokens == 120
    machine.handle(LoadReported("u", text_load(10, 0, 2)), 0)
    assert text(machine, "u").pending_tokens == 120, "what is still on its way is not in the report"
    machine.handle(LoadReported("u", text_load(300, 4, 2)), 0)
    assert text(machine, "u").pending_tokens == 300, "a report replaces earlier counts, and has those of other routers"


def test_a_request_weighs_its_prompt_and_the_answer_that_is_expected_not_what_its_limit_allows() -> None:
    machine = cluster("t", "u")
    long = text_granted(machine.handle(TextWanted(1, 4000, max_tokens=28_000), 0))
    assert text(machine, long.name).pending_tokens == 4000 + 256, "nothing is known of answers yet"
    short = [text_granted(machine.handle(TextWanted(2 + n, 100, max_tokens=31_900), 0)) for n in range(12)]
    assert {grant.name for grant in short} == {"t", "u"} - {long.name}, "twelve short ones weigh no more"
    assert text_granted(machine.handle(TextWanted(20, 100, max_tokens=31_900), 0)).name != short[0].name


def test_a_limit_and_choices_bound_what_is_expected_of_an_answer() -> None:
    machine = cluster("t")
    machine.handle(TextWanted(1, 100, max_tokens=8, choices=3), 0)
    assert text(machine, "t").pending_tokens == 100 + 3 * 8


def answer_ended(credit: int, tokens: int, *, by_itself: bool = True) -> TextReported:
    return TextReported(credit, Finished(FinishReason.STOP if by_itself else FinishReason.LENGTH, tokens, 0.1, 0.1))


def test_what_is_expected_follows_the_answers_of_its_class() -> None:
    machine = cluster("t")
    grant = text_granted(machine.handle(TextWanted(1, 100, max_tokens=30_000, with_items=True), 0))
    for _ in range(2000):
        machine.handle(answer_ended(grant.credit, 20), 0)
    machine.handle(answer_ended(99, 5000), 0)  # of a call that is over
    expected = machine.expected_output
    classes = (True, False, None)
    assert [expected.predict(with_items, 30_000) for with_items in classes] == [21, 256, 21]
    assert text(machine, "t").pending_tokens == 100 + 256, "a credit keeps what it was granted with"
    machine.handle(CreditReturned(grant.credit), 0)
    assert text(machine, "t").pending_tokens == 0


def test_a_prompt_counts_until_the_first_token_and_the_answer_until_the_end() -> None:
    machine = cluster("t")
    grant = text_granted(machine.handle(TextWanted(1, 100, max_tokens=8), 0))
    machine.handle(FirstToken(grant.credit), 0)
    machine.handle(FirstToken(grant.credit), 0)
    assert (text(machine, "t").pending_tokens, text(machine, "t").pending) == (8, 1)
    machine.handle(CallFailed(grant.credit, "t", InvalidRequest("bad")), 0)
    machine.handle(FirstToken(grant.credit), 0)
    machine.handle(CreditReturned(grant.credit), 0)
    assert (text(machine, "t").pending_tokens, text(machine, "t").pending) == (0, 0)


def test_the_answers_in_a_report_weigh_what_is_expected_and_at_most_what_they_may_have() -> None:
    machine = cluster("t")
    for most, weight in ((1_000_000, 5 * 256), (50, 5 * 10), (0, 0)):
        stages = {Stage.PREFILL: StageLoad(100, 2), Stage.DECODE: StageLoad(most, 3)}
        machine.handle(LoadReported("t", InstanceLoad(stages)), 0)
        assert (text(machine, "t").pending_tokens, text(machine, "t").pending) == (100 + weight, 5)


def test_open_ended_requests_of_several_routers_spread_by_their_tokens() -> None:
    assert most_to_mean("least-loaded") < 1.15
    assert most_to_mean("least-requests") > 1.15


def most_to_mean(text_routing: str) -> float:
    """Tokens at the text instance that has most, to the mean. Every fourth prompt is long.

    Three routers send 300 requests without a limit of their own. Reports come after each router has sent one, which the
    others do not see before.
    """
    policies = Policies.named(PolicyNames(text_routing=text_routing))
    routers = [Checked(LIMITS, policies, Random(n), arena_retry_s=0.5, retry_after_s=2.0) for n in range(3)]
    prompts: dict[str, list[int]] = {f"t{n}": [] for n in range(6)}
    for router, name in product(routers, prompts):
        router.handle(MemberJoined(Member(name)), 0)
        router.handle(InstanceSeen(name, info(name)), 0)
    random = Random(5)
    for number in range(100):
        for router in routers:
            prompt = random.choice((100, 100, 100, 16_000))
            wanted = TextWanted(number, prompt, max_tokens=32_768 - prompt)
            prompts[text_granted(router.handle(wanted, 0)).name].append(prompt)
        for router, (name, there) in product(routers, prompts.items()):
            most = sum(32_768 - prompt for prompt in there)
            stages = {Stage.PREFILL: StageLoad(sum(there), len(there)), Stage.DECODE: StageLoad(most, 0)}
            router.handle(LoadReported(name, InstanceLoad(stages)), 0)
    tokens = [sum(there) for there in prompts.values()]
    return max(tokens) * len(tokens) / sum(tokens)


def test_without_a_text_instance_dispatches_are_refused_and_the_loss_is_reported_after_the_grace_period() -> None:
    machine = cluster("t")
    effects = machine.handle(InstanceSuspected("t"), 5.0)
    assert [effect.at_s for effect in effects if isinstance(effect, WakeAt)] == [6.0]
    assert isinstance(machine.handle(TextWanted(1, 10), 5.1)[0], PlaceRefused)
    assert machine.handle(ClusterTick(), 5.9) == [WakeAt(6.0, "no text instance within the grace")]
    lost = [machine.text_lost]
    assert [type(effect) for effect in machine.handle(ClusterTick(), 6.0)] == [TextPoolLost]
    lost.append(machine.text_lost)
    assert machine.handle(ClusterTick(), 7.0) == []
    machine.handle(InstanceSeen("t", info("t")), 8.0)
    lost.append(machine.text_lost)
    assert lost == [False, True, False]


def test_a_text_instance_that_returns_within_the_grace_period_is_not_reported_lost() -> None:
    machine = cluster("t")
    machine.handle(InstanceSuspected("t"), 5.0)
    machine.handle(InstanceSeen("t", info("t")), 5.5)
    assert machine.handle(ClusterTick(), 6.0) == []


class Traffic(RuleBasedStateMachine):
    """Any order of events: credits never exceed the arenas, and all are returned in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = ClusterMachine(LIMITS, POLICIES, Random(7), arena_retry_s=0.5, retry_after_s=2.0)
        self.members: set[str] = set()
        self.now_s = 0.0
        self.run = 0
        self.waiting: set[int] = set()
        self.texts_waiting: set[int] = set()
        self.credits: set[int] = set()

    def feed(self, effects: list[ClusterEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Granted):
                self.waiting.discard(effect.request)
                self.texts_waiting.discard(effect.request)
                self.credits |= {grant.credit for grant in effect.grants}
            elif isinstance(effect, PlaceRefused):
                self.waiting.discard(effect.request)
                self.texts_waiting.discard(effect.request)
            elif isinstance(effect, Connect):
                assert effect.name not in self.members
                self.members.add(effect.name)
            elif isinstance(effect, Disconnect):
                self.members.remove(effect.name)
        self.credits &= self.machine.credits

    @rule(name=st.sampled_from(ENCODERS + TEXTS), epoch=st.sampled_from([None, None, 1]))
    def join(self, name: str, epoch: int | None) -> None:
        self.feed(self.machine.handle(MemberJoined(Member(name, epoch=epoch)), self.now_s))
        assert name in self.members

    @rule(name=st.sampled_from(ENCODERS + TEXTS))
    def leave(self, name: str) -> None:
        self.feed(self.machine.handle(MemberLeaving(name), self.now_s))

    @rule(name=st.sampled_from(ENCODERS + TEXTS))
    def left(self, name: str) -> None:
        self.feed(self.machine.handle(MemberLeft(name), self.now_s))
        assert name not in self.members

    @rule(name=st.sampled_from(ENCODERS + TEXTS), process=st.sampled_from(ENCODERS + TEXTS), epoch=st.integers(1, 3))
    def see(self, name: str, process: str, epoch: int) -> None:
        found = replace(info(name, epoch=epoch), instance_id=f"i-{process}")
        self.feed(self.machine.handle(InstanceSeen(name, found), self.now_s))

    @rule(
        name=st.sampled_from(ENCODERS + TEXTS),
        role=st.sampled_from(list(Role)),
        kv_tokens=st.sampled_from([0, 60, 120]),
        kind=st.sampled_from(["", "one", "two"]),
        epoch=st.integers(1, 3),
    )
    def see_role(self, name: str, role: Role, kv_tokens: int, kind: str, epoch: int) -> None:
        found = replace(info(name, epoch=epoch), role=role, kv_tokens=kv_tokens, kv_kind=kind, continues=bool(kind))
        self.feed(self.machine.handle(InstanceSeen(name, replace(found, transfers_kv=bool(kind))), self.now_s))

    @rule(name=st.sampled_from(ENCODERS + TEXTS))
    def suspect(self, name: str) -> None:
        self.feed(self.machine.handle(InstanceSuspected(name), self.now_s))

    @rule(name=st.sampled_from(ENCODERS), tokens=st.integers(0, 50), leased=st.integers(0, 100))
    def report(self, name: str, tokens: int, leased: int) -> None:
        self.feed(self.machine.handle(LoadReported(name, load(tokens, leased=leased)), self.now_s))

    @rule(name=st.sampled_from(TEXTS), tokens=st.integers(0, 50))
    def report_text(self, name: str, tokens: int) -> None:
        self.feed(self.machine.handle(LoadReported(name, text_load(tokens, 0, 0)), self.now_s))

    @rule(
        sizes=st.lists(st.integers(1, 120), min_size=1, max_size=4),
        wait=st.booleans(),
        suspect=st.booleans(),
    )
    def want(self, sizes: list[int], wait: bool, suspect: bool) -> None:
        self.run += 1
        self.waiting.add(self.run)
        wanted = CreditsWanted(self.run, wants(*sizes, first=self.run), wait=wait, suspect=suspect)
        self.feed(self.machine.handle(wanted, self.now_s))

    @rule(
        tokens=st.integers(1, 50),
        choices=st.integers(1, 3),
        most=st.integers(0, 50),
        with_items=st.booleans(),
        suspect=st.booleans(),
    )
    def want_text(self, tokens: int, choices: int, most: int, with_items: bool, suspect: bool) -> None:
        self.run += 1
        wanted = TextWanted(self.run, tokens, choices=choices, max_tokens=most, with_items=with_items, suspect=suspect)
        effects = self.machine.handle(wanted, self.now_s)
        if not effects:
            self.texts_waiting.add(self.run)
        self.feed(effects)

    @rule(
        tokens=st.integers(1, 50),
        sender=st.sampled_from(("", *TEXTS)),
        covered=st.integers(0, 60),
        suspect=st.booleans(),
    )
    def go_on(self, tokens: int, sender: str, covered: int, suspect: bool) -> None:
        self.run += 1
        wanted = TextWanted(
            self.run,
            tokens,
            max_tokens=20,
            continues=True,
            sender=sender,
            covered_tokens=covered,
            suspect=suspect,
        )
        effects = self.machine.handle(wanted, self.now_s)
        if not effects:
            self.texts_waiting.add(self.run)
        self.feed(effects)

    @precondition(lambda self: self.texts_waiting)
    @rule(data=st.data())
    def abandon_text(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(sorted(self.texts_waiting)))
        self.texts_waiting.discard(run)
        self.feed(self.machine.handle(CreditsAbandoned(run), self.now_s))

    @precondition(lambda self: self.credits)
    @rule(data=st.data(), tokens=st.integers(0, 50), by_itself=st.booleans())
    def answer(self, data: st.DataObject, tokens: int, by_itself: bool) -> None:
        credit = data.draw(st.sampled_from(sorted(self.credits)))
        self.feed(self.machine.handle(FirstToken(credit), self.now_s))
        if tokens:
            self.feed(self.machine.handle(answer_ended(credit, tokens, by_itself=by_itself), self.now_s))

    @precondition(lambda self: self.credits)
    @rule(data=st.data(), ended_first=st.booleans())
    def give_back(self, data: st.DataObject, ended_first: bool) -> None:
        credit = data.draw(st.sampled_from(sorted(self.credits)))
        self.credits.discard(credit)
        if ended_first:
            self.feed(self.machine.handle(CallFailed(credit, "a", InvalidRequest("bad")), self.now_s))
        self.feed(self.machine.handle(CreditReturned(credit), self.now_s))

    @rule(
        name=st.sampled_from(ENCODERS + TEXTS), leases=st.sets(st.sampled_from((b"1", b"2", b"3"))), taken=st.booleans()
    )
    def count_leases(self, name: str, leases: set[bytes], taken: bool) -> None:
        event = (LeasesTaken if taken else LeasesReturned)(name, tuple(leases))
        self.feed(self.machine.handle(event, self.now_s))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(sorted(self.waiting)))
        self.waiting.discard(run)
        self.feed(self.machine.handle(CreditsAbandoned(run), self.now_s))

    @rule(name=st.sampled_from(ENCODERS))
    def refuse(self, name: str) -> None:
        self.feed(self.machine.handle(CallFailed(0, name, ArenaFull("full")), self.now_s))

    @rule(later_s=st.floats(0.01, 2))
    def tick(self, later_s: float) -> None:
        self.now_s += later_s
        self.feed(self.machine.handle(ClusterTick(), self.now_s))

    @invariant()
    def sound(self) -> None:
        self.machine.validate()
        assert self.machine.waiting == len(self.waiting)
        assert self.machine.waiting_for_kv == len(self.texts_waiting)
        assert self.machine.outstanding == len(self.credits)
        for encoder in self.machine.instances.pool(ENCODE, self.now_s).candidates:
            assert encoder.pending_tokens >= 0
            assert encoder.available_bytes <= encoder.arena_bytes

    def teardown(self) -> None:
        """Every waiting request is served or refused once all credits have returned."""
        for name in TEXTS:
            self.feed(self.machine.handle(MemberLeft(name), self.now_s))
        for name in ENCODERS:
            self.feed(self.machine.handle(MemberJoined(Member(name)), self.now_s))
            self.feed(self.machine.handle(InstanceSeen(name, info(name, epoch=9)), self.now_s))
        self.now_s += 10
        for _ in range(len(self.waiting) + 1):
            self.feed(self.machine.handle(ClusterTick(), self.now_s))
            for credit in sorted(self.credits):
                self.credits.discard(credit)
                self.feed(self.machine.handle(CreditReturned(credit), self.now_s))
        assert not self.waiting
        assert not self.texts_waiting
        assert self.machine.outstanding == len(self.credits)
        self.machine.validate()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("end", [MemberLeaving, MemberLeft, InstanceSuspected])
def test_instances_of_a_new_model_serve_when_those_of_the_former_are_gone(
    end: type[MemberLeaving | MemberLeft | InstanceSuspected],
) -> None:
    machine = cluster("a", "t")
    for name in ("b", "u"):
        machine.handle(MemberJoined(Member(name)), 1)
        machine.handle(InstanceSeen(name, info(name, model=replace(MODEL, revision="new"))), 1)
    assert machine.instances.model == MODEL
    for name in ("a", "t"):
        machine.handle(end(name), 2)
    for now_s in range(3, 10):
        machine.handle(LoadReported("u", load()), now_s)
        machine.handle(ClusterTick(), now_s)
    assert machine.instances.model is not None
    assert machine.instances.model.revision == "new"
    assert machine.instances.readiness().ready
    assert not machine.text_lost


def test_instances_of_a_new_model_serve_while_one_that_leaves_still_streams() -> None:
    machine = cluster("a", "t")
    machine.handle(TextWanted(1, 10), 0)
    for name in ("a", "t"):
        machine.handle(MemberLeaving(name), 1)
    for name in ("b", "u"):
        machine.handle(MemberJoined(Member(name)), 2)
        machine.handle(InstanceSeen(name, info(name, model=replace(MODEL, revision="new"))), 2)
    assert machine.instances.readiness().ready
