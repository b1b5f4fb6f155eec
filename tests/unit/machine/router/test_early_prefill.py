"""The prefix of a prompt goes to a text instance while items are encoded, and costs nothing but time if that fails."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.machine.router.test_cluster import cluster, info, load, text_granted, text_load
from tests.unit.machine.router.test_request import TENSORS, World, failed, growing, items
from triptych.domain.item_plan import ItemPlan
from triptych.domain.media import Shard
from triptych.errors import ArenaFull, EngineFailure, InstanceLost, LeaseLost, Overloaded, TransferFailed, TriptychError
from triptych.machine.router.cluster import ClusterMachine
from triptych.machine.router.cluster_events import (
    ClusterEvent,
    InstanceSeen,
    InstanceSuspected,
    LoadReported,
    MemberLeaving,
)
from triptych.machine.router.request import RequestPhase
from triptych.machine.router.request_events import Abort, Encode, Generate, PrefilledEarly, Renew, Signal
from triptych.machine.router.request_items import RequestItems
from triptych.machine.router.shared_events import (
    CallFailed,
    CreditReturned,
    FirstToken,
    Grant,
    Granted,
    Release,
    TextWanted,
)


def encodes(count: int) -> tuple[World, list[Encode]]:
    """The calls for all items run."""
    world = World(count, dispatch=growing)
    world.place_all()
    return world, [call for call in world.take(Encode) if isinstance(call, Encode)]


def begin(world: World) -> Generate:
    """Grants the place that is wanted for a beginning."""
    (wanted,) = world.take(TextWanted)
    assert isinstance(wanted, TextWanted)
    world.place_early(wanted)
    return the_beginning(world)


def the_beginning(world: World) -> Generate:
    (call,) = world.take_early()
    return call


def renew(world: World) -> None:
    world.renew_all()


def whole(world: World) -> tuple[TextWanted, Generate]:
    (wanted,) = world.take(TextWanted)
    assert isinstance(wanted, TextWanted)
    return wanted, world.place_text(wanted)


def test_what_comes_before_the_first_missing_item_is_computed_meanwhile_where_the_request_goes_then() -> None:
    world, (first, second, third) = encodes(3)
    world.encoded(first)
    early = begin(world)
    assert (early.name, early.tokens, [placement.item for placement in early.placements]) == ("t1", 10, [0])
    world.feed(PrefilledEarly(early.credit))
    renew(world)
    world.encoded(third)
    assert not world.calls, "the second item is still missing"
    world.encoded(second)
    wanted, generate = whole(world)
    assert (wanted.early, wanted.kept_credit) == (False, early.credit)
    assert (generate.credit, generate.name) == (early.credit, "t1")
    assert [placement.item for placement in generate.placements] == [0, 1, 2]
    sent = early.placements[0].ticket.lease_id, generate.placements[0].ticket.lease_id
    assert sent[0] != sent[1], "the instance releases a lease that it has used"
    assert not any(isinstance(effect, Abort) for effect in world.effects)
    world.feed(FirstToken(generate.credit))
    assert world.machine.timeline(1.0, 0).early_tokens == 10


def test_longer_beginnings_follow_when_the_one_before_is_computed() -> None:
    world, calls = encodes(4)
    world.encoded(calls[0])
    early = begin(world)
    renew(world)
    world.encoded(calls[1])
    world.encoded(calls[2])
    assert not world.calls, "one at a time"
    world.feed(PrefilledEarly(early.credit))
    longer = the_beginning(world)
    assert (longer.credit, longer.tokens, [placement.item for placement in longer.placements]) == (
        early.credit,
        30,
        [0, 1, 2],
    )


def test_the_text_before_the_first_item_needs_no_item() -> None:
    plans = tuple(replace(plan, start=plan.start + 200) for plan in items(1))
    world = World(0, dispatch=growing, plans=plans)
    world.place_all()
    early = begin(world)
    assert (early.tokens, early.placements) == (200, ())
    world.encode_all()
    assert whole(world)[1].credit == early.credit


def test_a_beginning_in_progress_is_cancelled_when_the_request_goes() -> None:
    world, calls = encodes(2)
    world.encoded(calls[0])
    early = begin(world)
    world.encoded(calls[1])
    assert not world.take(TextWanted), "the first item needs a new lease"
    renew(world)
    assert Abort(early.credit, "every item is encoded") in world.effects
    _, generate = whole(world)
    assert generate.credit == early.credit
    assert world.feed(PrefilledEarly(early.credit)) == [], "it came too late"


@pytest.mark.parametrize(
    ("error", "avoided"),
    [
        (InstanceLost("gone"), True),
        (Overloaded("busy"), True),
        (EngineFailure("failed"), True),
        (TransferFailed("broken", items=(0,)), False),
        (LeaseLost("over"), False),
    ],
)
def test_a_beginning_that_fails_costs_the_request_nothing(error: TriptychError, *, avoided: bool) -> None:
    world, calls = encodes(3)
    world.encoded(calls[0])
    early = begin(world)
    effects = world.feed(CallFailed(early.credit, early.name, error))
    assert [effect.credit for effect in effects if isinstance(effect, Release)] == [early.credit]
    renew(world)
    world.encoded(calls[1])
    assert not world.calls, "it is not tried again"
    world.encoded(calls[2])
    wanted, generate = whole(world)
    assert (wanted.kept_credit, wanted.avoid) == (None, frozenset({early.name} if avoided else ()))
    assert [placement.item for placement in generate.placements] == [0, 1, 2]
    assert world.machine.timeline(1.0, 0).early_tokens == 0
    assert world.machine.timeline(1.0, 0).text_attempts == 1


def test_a_place_that_is_lost_meanwhile_is_replaced_without_an_attempt() -> None:
    world, calls = encodes(2)
    world.encoded(calls[0])
    early = begin(world)
    renew(world)
    world.feed(PrefilledEarly(early.credit))
    world.encoded(calls[1])
    (wanted,) = world.take(TextWanted)
    assert isinstance(wanted, TextWanted)
    assert wanted.kept_credit == early.credit
    del world.early[early.credit]
    generate = world.place_text(replace(wanted, kept_credit=None))
    assert generate.name == "t2"


def test_a_place_that_comes_when_all_items_are_there_is_that_of_the_request() -> None:
    world, calls = encodes(2)
    world.encoded(calls[0])
    (late,) = world.take(TextWanted)
    assert isinstance(late, TextWanted)
    world.encoded(calls[1])
    world.place_early(late)
    (generate,) = world.take(Generate)
    assert isinstance(generate, Generate)
    assert len(generate.placements) == 2


@pytest.mark.parametrize("signal", [Signal.CALLER_LEFT, Signal.DEADLINE_PASSED])
@pytest.mark.parametrize("running", [False, True])
def test_the_place_is_returned_at_the_end(signal: Signal, *, running: bool) -> None:
    world, calls = encodes(2)
    world.encoded(calls[0])
    early = begin(world)
    if not running:
        world.feed(PrefilledEarly(early.credit))
    effects = world.feed(signal)
    assert not world.early
    assert any(isinstance(effect, Abort) and effect.credit == early.credit for effect in effects) is running


def test_a_request_that_waits_for_memory_keeps_no_place() -> None:
    world, calls = encodes(2)
    world.encoded(calls[0])
    begin(world)
    world.take(Renew)
    world.feed(failed(calls[1], ArenaFull("full")))
    assert world.machine.phase is RequestPhase.WAITING
    assert not world.early


def test_nothing_is_sent_early_by_default_or_to_go_on_with_an_answer() -> None:
    world = World(2)
    world.place_all()
    first, second = world.take(Encode)
    assert isinstance(first, Encode)
    assert isinstance(second, Encode)
    world.encoded(first)
    assert not world.calls
    world, calls = encodes(2)
    world.encoded(calls[0])
    begin(world)
    renew(world)
    world.encoded(calls[1])
    _, generate = whole(world)
    world.feed(FirstToken(generate.credit))
    world.feed(failed(generate, InstanceLost("gone")))
    world.place_all()
    again = world.take(Encode)
    assert isinstance(again[0], Encode)
    world.encoded(again[0])
    assert not world.take(TextWanted)


def ready(plans: Sequence[ItemPlan], *which: int) -> tuple[int, int]:
    """``RequestItems.beginning`` when these are encoded."""
    world = World(0, dispatch=None, plans=tuple(plans))
    world.place_all()
    for call in world.take(Encode):
        assert isinstance(call, Encode)
        if call.index in which:
            world.encoded(call)
    found: RequestItems = world.machine._items
    return found.beginning()


def test_an_item_is_not_cut_between_its_shards() -> None:
    alone, sharded = items(2)
    shards = [replace(sharded, shard=Shard(first, 1, 2), start=10 + 4 * first, tensors=TENSORS) for first in (0, 1)]
    plans = (alone, *shards, replace(alone, item=2, start=40))
    assert ready(plans) == (0, 0)
    assert ready(plans, 0) == (1, 10)
    assert ready(plans, 0, 1) == (1, 10)
    assert ready(plans, 0, 1, 2) == (3, 40)
    assert ready(plans, 1, 2) == (0, 0)


def test_a_second_place_is_given_back() -> None:
    world, calls = encodes(3)
    world.encoded(calls[0])
    (wanted,) = world.take(TextWanted)
    assert isinstance(wanted, TextWanted)
    world.place_early(wanted)
    grants = world.feed(Granted(1, (world.text_grant(wanted),)))
    assert [effect.reason for effect in grants if isinstance(effect, Release)] == ["no longer wanted"]


def texts(*names: str) -> ClusterMachine:
    """A cluster with these text instances, which prefill early but for ``u``."""
    machine = cluster("a")
    for name in names:
        machine.handle(InstanceSeen(name, replace(info(name), prefills_early=name != "u")), 0)
    return machine


def granted_early(machine: ClusterMachine, request: int) -> Grant | None:
    effects = machine.handle(TextWanted(request, 100, early=True), 0)
    return text_granted(effects) if effects else None


def test_only_instances_without_other_prompts_that_find_beginnings_again_get_them() -> None:
    machine = texts("t", "u")
    first = granted_early(machine, 1)
    assert first is not None
    assert first.name == "t"
    assert granted_early(machine, 2) is None, "one computes the first request's, and the other would compute it twice"
    machine.handle(FirstToken(first.credit), 0)
    assert granted_early(machine, 3) is not None


def test_a_place_becomes_that_of_the_request() -> None:
    machine = texts("t")
    early = granted_early(machine, 1)
    assert early is not None
    kept = text_granted(machine.handle(TextWanted(1, 100, kept_credit=early.credit, kept_tokens=60), 0))
    assert (kept.credit, kept.name) == (early.credit, "t")


def test_a_place_where_others_are_in_front_is_exchanged_if_that_is_sooner() -> None:
    """Tokens to compute: 100 elsewhere, against those of others and 40 where the beginning is."""
    for of_others, chosen in ((50, "t"), (61, "u")):
        machine = texts("t")
        early = granted_early(machine, 1)
        assert early is not None
        machine.handle(LoadReported("t", text_load(of_others + 100, 2, 0)), 0)
        machine.handle(InstanceSeen("u", info("u")), 0)
        grant = text_granted(machine.handle(TextWanted(1, 100, kept_credit=early.credit, kept_tokens=60), 0))
        assert grant.name == chosen
        assert (grant.credit == early.credit) is (chosen == "t")
        machine.handle(CreditReturned(grant.credit), 0)
        assert machine.outstanding == 0


@pytest.mark.parametrize("event", [MemberLeaving("t"), InstanceSuspected("t"), LoadReported("t", load(draining=True))])
def test_a_place_at_an_instance_that_goes_is_returned(event: ClusterEvent) -> None:
    machine = texts("t", "u")
    early = granted_early(machine, 1)
    assert early is not None
    machine.handle(event, 0)
    (answer,) = [
        effect
        for effect in machine.handle(TextWanted(1, 100, kept_credit=early.credit, kept_tokens=60), 0)
        if isinstance(effect, Granted)
    ]
    assert answer.grants[0].name == "u"
    machine.handle(CreditReturned(answer.grants[0].credit), 0)
    assert machine.outstanding == 0
