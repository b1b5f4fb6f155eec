"""Encoders that lend their idle time: which text requests they get, and when these go elsewhere."""

from dataclasses import replace
from random import Random

from tests.unit.machine.router.test_cluster import LIMITS, Checked, encoded, granted, text_load, wants
from tests.unit.machine.router.test_text_places import EXPECTED, seen, want
from triptych.domain.generation import Ready
from triptych.domain.membership import Member
from triptych.domain.stage import Role
from triptych.machine.router.cluster import ClusterMachine
from triptych.machine.router.cluster_events import ClusterEffect, InstanceSeen, LoadReported, MemberJoined, MemberLeft
from triptych.machine.router.request_events import TextReported
from triptych.machine.router.shared_events import (
    CreditReturned,
    CreditsWanted,
    FirstToken,
    Grant,
    Granted,
    Moved,
    TextWanted,
)
from triptych.policy.lending import MOST_MOVES, LenderState
from triptych.policy.policies import Policies, PolicyNames

ABOVE, MOST, PATIENCE_S = 2, 2, 1.0
STARTED = Ready((), 0.0, 0.0)
LENDER, TEXT = seen("h", Role.EPD), seen("t", Role.PD)


def lending(*described: InstanceSeen, policy: str = "idle") -> ClusterMachine:
    limits = replace(LIMITS, lend_above=ABOVE, max_lent=MOST, lent_patience_s=PATIENCE_S)
    policies = Policies.named(PolicyNames(lending=policy))
    machine = Checked(limits, policies, Random(7), arena_retry_s=0.5, retry_after_s=2.0)
    for instance in described or (LENDER, TEXT):
        machine.handle(MemberJoined(Member(instance.name)), 0)
        machine.handle(instance, 0)
    return machine


def reported(machine: ClusterMachine, name: str = "t", now_s: float = 0.0) -> list[Moved]:
    """What moves at a report of this instance, which has much to do."""
    return moved(machine.handle(LoadReported(name, text_load(10_000 if name == "t" else 0, 3, 0)), now_s))


def moved(effects: list[ClusterEffect]) -> list[Moved]:
    return [effect for effect in effects if isinstance(effect, Moved)]


def an_item(machine: ClusterMachine, number: int = 90, now_s: float = 0.0) -> Grant:
    return granted(machine.handle(CreditsWanted(number, wants(10, first=number), wait=False), now_s)).grants[0]


def test_new_requests_go_to_a_lender_once_enough_wait_up_to_its_most() -> None:
    machine = lending()
    assert [want(machine, number).name for number in range(7)] == ["t", "t", "t", "h", "h", "t", "t"]
    found = machine.lending
    assert found.lenders == {LenderState.ENCODE_ONLY: 0, LenderState.LENDING: 0, LenderState.FULL: 1}
    assert (found.requests, found.lent["new"]) == (2, 2)


def test_a_request_is_lent_until_its_call_ends_whatever_it_has_got() -> None:
    machine = lending()
    places = [want(machine, number) for number in range(5)]
    for place in places:
        machine.handle(TextReported(place.credit, STARTED), 0)
        machine.handle(FirstToken(place.credit), 0)
    lent = [place for place in places if place.name == "h"]
    assert machine.lending.requests == 2
    machine.handle(CreditReturned(lent[0].credit), 0)
    assert machine.lending.requests == 1
    an_item(machine)
    assert machine.lending.requests == 1, "items are none"


def test_without_the_policy_it_is_an_instance_like_the_others() -> None:
    machine = lending(policy="always")
    assert sorted(want(machine, number).name for number in range(4)) == ["h", "h", "t", "t"]
    assert not any([machine.lending.requests, *machine.lending.lent.values(), *machine.lending.lenders.values()])


def test_while_it_has_items_it_gets_no_text() -> None:
    machine = lending()
    item = an_item(machine)
    assert [want(machine, number).name for number in range(4)] == ["t"] * 4
    assert not reported(machine)
    assert [effect.request for effect in moved(machine.handle(encoded(item), 0))] == [3, 2]


def test_those_that_wait_are_taken_from_the_last_on_if_they_have_not_started() -> None:
    machine = lending()
    item = an_item(machine)
    places = [want(machine, number) for number in range(5)]
    machine.handle(TextReported(places[4].credit, STARTED), 0)
    machine.handle(FirstToken(places[3].credit), 0)
    (first, second) = moved(machine.handle(encoded(item), 0))
    assert [(effect.request, effect.credit) for effect in (first, second)] == [
        (2, places[2].credit),
        (1, places[1].credit),
    ]
    assert first.grant is not None
    assert first.grant.name == "h"
    assert not reported(machine), "it is full"
    assert machine.lending.lent == {"new": 0, "moved": 2, "continued": 0}


def test_nothing_is_moved_that_would_not_be_done_earlier() -> None:
    machine = lending()
    item = an_item(machine)
    for number in range(3):
        want(machine, number, tokens=10)
    machine.handle(LoadReported("h", text_load(10_000, 0, 0)), 0)
    assert not moved(machine.handle(encoded(item), 0))
    assert len(moved(machine.handle(LoadReported("h", text_load(0, 0, 0)), 0))) == MOST


def test_a_moved_request_gets_the_place_that_is_kept_for_it_unless_items_have_come() -> None:
    machine = lending()
    item = an_item(machine)
    for number in range(4):
        want(machine, number)
    first, second = moved(machine.handle(encoded(item), 0))
    for move in (first, second):
        machine.handle(CreditReturned(move.credit), 0)
    assert first.grant is not None
    assert second.grant is not None
    assert want(machine, 3, kept_credit=first.grant.credit, moves=1).credit == first.grant.credit
    an_item(machine, 91)
    again = want(machine, 2, kept_credit=second.grant.credit, moves=1)
    assert again.name == "t"
    assert again.credit != second.grant.credit
    assert machine.lending.lent["moved"] == 2
    assert machine.lending.taken_back == {"held_up": 0, "closed": 1, "slower": 0, "lost": 0}


def test_a_request_is_moved_a_few_times_only() -> None:
    machine = lending()
    item = an_item(machine)
    for number in range(4):
        want(machine, number, moves=MOST_MOVES)
    assert not moved(machine.handle(encoded(item), 0))
    assert want(machine, 5, moves=MOST_MOVES).name == "t"


def test_what_has_no_token_goes_elsewhere_when_items_have_come_first_for_long() -> None:
    machine = lending()
    places = [want(machine, number) for number in range(5)]
    begun, waits = [place for place in places if place.name == "h"]
    machine.handle(TextReported(begun.credit, STARTED), 0)
    machine.handle(FirstToken(begun.credit), 0)
    machine.handle(TextReported(waits.credit, STARTED), 0)
    an_item(machine, 90, 1.0)
    assert not reported(machine, now_s=1.0)
    assert not reported(machine, now_s=0.9 + PATIENCE_S)
    assert [(effect.request, effect.grant) for effect in reported(machine, now_s=1.0 + PATIENCE_S)] == [(4, None)]
    assert not reported(machine, now_s=9.0)
    assert machine.lending.taken_back == {"held_up": 1, "closed": 0, "slower": 0, "lost": 0}


def test_a_lender_serves_alone_where_no_other_can() -> None:
    machine = lending()
    assert want(machine, 1, avoid=frozenset({"t"})).name == "h"
    an_item(machine)
    machine.handle(MemberLeft("t"), 0)
    before = dict(machine.lending.lent)
    assert want(machine, 2).name == "h"
    assert want(machine, 3, continues=True).name == "h"
    assert machine.lending.lent == before, "that is no lending"


def test_it_gets_what_its_memory_has_room_for() -> None:
    narrow = seen("h", Role.EPD, kv_tokens=50 + EXPECTED + 10)
    machine = lending(narrow, seen("t", Role.PD, kv_tokens=1000))
    assert [want(machine, number).name for number in range(5)] == ["t", "t", "t", "h", "t"]


def test_no_beginning_of_a_prompt_is_computed_at_a_lender() -> None:
    machine = lending()
    machine.handle(LoadReported("t", text_load(10_000, 3, 0)), 0)
    assert not [effect for effect in machine.handle(TextWanted(1, 50, early=True), 0) if isinstance(effect, Granted)]


def test_answers_go_on_elsewhere_as_long_as_a_lender_is_closed() -> None:
    machine = lending(LENDER, TEXT, seen("u", Role.PD))
    grants = [want(machine, number, continues=True, sender="t", covered_tokens=50) for number in range(3)]
    assert {grant.name for grant in grants} == {"u"}
