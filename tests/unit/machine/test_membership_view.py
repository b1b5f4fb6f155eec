"""A watcher keeps what the manager has merely lost, and drops what has left."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.membership import MAX_MEMBERS, Member, MemberState
from triptych.domain.pool import Departure, MembershipDelta, Removal
from triptych.machine.membership_view import MembershipView, ViewLimits

GRACE_S = 60.0
A, B, C = (Member(name) for name in "abc")


def suspected(*members: Member) -> tuple[Member, ...]:
    return tuple(replace(member, suspected=True) for member in members)


def full(*members: Member, incarnation: int = 1, version: int = 1) -> MembershipDelta:
    return MembershipDelta(incarnation, version, full=True, members=members)


def removed(departure: Departure, *members: Member, version: int = 2) -> MembershipDelta:
    return MembershipDelta(1, version, removed=tuple(Removal(member.address, departure) for member in members))


@pytest.fixture
def view() -> MembershipView:
    made = MembershipView(ViewLimits(GRACE_S))
    assert made.handle(full(A, B, C), 0.0)
    return made


def test_nothing_is_known_until_the_manager_has_told_its_list_even_an_empty_one() -> None:
    view = MembershipView(ViewLimits())
    assert (view.snapshot.version, view.known) == (0, (0, 0))
    assert view.handle(full(version=7), 0.0)
    assert (view.snapshot.version, view.snapshot.members, view.known) == (1, (), (1, 7))


def test_deltas_change_the_list_and_each_change_is_a_new_version(view: MembershipView) -> None:
    leaving = replace(B, state=MemberState.LEAVING)
    assert view.handle(MembershipDelta(1, 2, members=(leaving,)), 1.0)
    assert view.snapshot.members == (A, leaving, C)
    assert view.snapshot.version == 2
    assert view.known == (1, 2)
    assert not view.handle(MembershipDelta(1, 3), 1.0), "nothing has changed"
    assert view.snapshot.version == 2
    assert view.known == (1, 3)


def test_one_that_has_left_is_dropped_at_once(view: MembershipView) -> None:
    assert view.handle(removed(Departure.LEFT, A), 1.0)
    assert view.snapshot.members == (B, C)


def test_one_that_was_lost_stays_for_the_grace_period(view: MembershipView) -> None:
    assert view.handle(removed(Departure.LOST, A), 1.0)
    assert view.snapshot.members == (B, C, *suspected(A))
    assert not view.handle(MembershipDelta(1, 2), 60.9)
    assert view.handle(MembershipDelta(1, 2), 61.0)
    assert view.snapshot.members == (B, C)


def test_one_that_was_lost_and_then_leaves_is_dropped(view: MembershipView) -> None:
    assert view.handle(removed(Departure.LOST, B), 62.0)
    assert view.handle(removed(Departure.LEFT, B, version=3), 63.0)
    assert view.snapshot.members == (A, C)


def test_one_that_was_lost_while_it_left_is_dropped(view: MembershipView) -> None:
    view.handle(MembershipDelta(1, 2, members=(replace(A, state=MemberState.LEAVING),)), 1.0)
    assert view.handle(removed(Departure.LOST, A, version=3), 2.0)
    assert view.snapshot.members == (B, C)


def test_one_that_comes_back_is_listed_as_the_manager_says(view: MembershipView) -> None:
    view.handle(removed(Departure.LOST, A), 1.0)
    again = replace(A, epoch=2)
    assert view.handle(MembershipDelta(1, 3, members=(again,)), 2.0)
    assert view.snapshot.members == (B, C, again)
    assert not view.handle(MembershipDelta(1, 3), 1000.0)


@pytest.mark.parametrize("passed_s", [1.0, 61.0, 100_000.0])
def test_a_manager_that_restarts_empty_takes_no_member_away(view: MembershipView, passed_s: float) -> None:
    assert view.handle(full(incarnation=2), 1.0)
    view.handle(MembershipDelta(2, 1), passed_s)
    assert view.snapshot.members == suspected(A, B, C)
    assert view.handle(full(A, B, C, incarnation=2, version=4), passed_s)
    assert view.snapshot.members == (A, B, C)


def test_members_that_do_not_register_again_are_given_up_once_most_others_have(view: MembershipView) -> None:
    view.handle(full(A, incarnation=2), 1.0)
    view.handle(MembershipDelta(2, 1), 100.0)
    assert view.snapshot.members == (A, *suspected(B, C)), "two of three are lost"
    assert view.handle(MembershipDelta(2, 2, members=(B,)), 101.0)
    assert view.snapshot.members == (A, B)


def test_the_longest_lost_one_is_dropped_when_members_become_too_many(view: MembershipView) -> None:
    view.handle(removed(Departure.LOST, B), 1.0)
    others = [Member(f"m{number}") for number in range(MAX_MEMBERS - 2)]
    view.handle(full(*others, version=3), 2.0)
    view.validate()
    assert view.snapshot.members == (*others, *suspected(A, C))


def test_a_delta_that_does_not_continue_the_known_version_is_ignored(view: MembershipView) -> None:
    view.handle(MembershipDelta(1, 5, members=(replace(A, epoch=5),)), 1.0)
    assert not view.handle(MembershipDelta(1, 4, members=(A,)), 1.0)
    assert not view.handle(MembershipDelta(9, 6, members=(A,)), 1.0)
    assert view.known == (1, 5)
    assert view.snapshot.members[0].epoch == 5


Told = tuple[list[Member], list[Removal], str]
MEMBERS = st.sampled_from("abcdef").flatmap(
    lambda name: st.sampled_from((Member(name), Member(name, MemberState.LEAVING), Member(name, epoch=2)))
)
DELTAS: st.SearchStrategy[Told] = st.builds(
    lambda members, removed, kind: (members, removed, kind),
    st.lists(MEMBERS, max_size=4, unique_by=lambda member: member.address),
    st.lists(st.builds(Removal, st.sampled_from("abcdef"), st.sampled_from(Departure)), max_size=3),
    st.sampled_from(("delta", "full", "restarted")),
)


@given(st.lists(st.tuples(DELTAS, st.floats(0, 40)), max_size=20))
def test_versions_rise_addresses_are_unique_and_what_the_manager_lists_is_listed(
    deltas: list[tuple[Told, float]],
) -> None:
    view, now_s, incarnation = MembershipView(ViewLimits(GRACE_S)), 0.0, 1
    last: dict[str, Member] = {}
    for number, ((members, gone, kind), later_s) in enumerate(deltas):
        now_s += later_s
        incarnation += kind == "restarted"
        is_full = kind != "delta" or number == 0
        before = view.snapshot
        delta = MembershipDelta(incarnation, number, is_full, tuple(members), () if is_full else tuple(gone))
        changed = view.handle(delta, now_s)
        view.validate()
        assert view.snapshot.version == before.version + changed
        listed = {} if is_full else {k: v for k, v in last.items() if k not in {removal.address for removal in gone}}
        listed |= {member.address: member for member in members}
        there = {member.address: member for member in view.snapshot.members}
        assert len(there) == len(view.snapshot.members)
        assert {address: there[address] for address in listed} == listed
        assert all(member.suspected for address, member in there.items() if address not in listed)
        last = listed
