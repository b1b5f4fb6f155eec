"""Filters in rows; what each of them reads is tested where it is used (``test_items``, ``test_requests``)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.policy.placement.filters import (
    ITEM_FILTERS,
    Filter,
    Filters,
    has_room,
    has_slot,
    large_enough,
    not_avoided,
    not_excluded,
    not_in_backoff,
    usable,
)
from triptych.policy.placement.pool import Candidate, Pool
from triptych.policy.placement.wants import Want

NAMES = "abcd"
some = st.frozensets(st.sampled_from(NAMES), max_size=3)


@given(
    st.lists(
        st.builds(
            lambda usable, pending, arena, available, most, backoff: Candidate(
                "", usable, 0, pending, arena, available, most, backoff
            ),
            st.booleans(),
            st.integers(0, 2),
            st.sampled_from([5, 20]),
            st.sampled_from([0, 5, 5]),
            st.sampled_from([0, 2]),
            st.booleans(),
        ),
        max_size=4,
    ),
    some,
    some,
)
def test_filters_that_are_tried_together_keep_what_they_keep_one_by_one(
    rows: list[Candidate], avoid: frozenset[str], exclude: frozenset[str]
) -> None:
    pool = Pool([row._replace(name=NAMES[place]) for place, row in enumerate(rows)])
    want = Want(0, 5, 5, (b"cat", b""), avoid, exclude)
    places = [place for place in pool.all if pool.usable[place] and pool.name[place] not in exclude]
    places = [place for place in places if pool.arena_bytes[place] >= 5]
    places = [place for place in places if not pool.backoff[place]] or places
    places = [place for place in places if pool.has_slot(place) and pool.available_bytes[place] >= 5]
    places = [place for place in places if pool.name[place] not in avoid] or places
    assert list(ITEM_FILTERS.passing(pool, want)) == places


@pytest.mark.parametrize(
    ("soft", "kept"), [((True, True), [0]), ((True, False), []), ((False, True), [0, 1]), ((False, False), [])]
)
def test_a_preference_is_given_up_where_nothing_is_left(soft: tuple[bool, bool], kept: list[int]) -> None:
    """Nothing passes both: the first is kept, and the second given up if it is a preference."""
    pool, want = Pool([Candidate(name, True) for name in "ab"]), Want(0, 5, 5, (b"cat", b""))
    first = Filter[Want](lambda _, __, places: [place for place in places if place == 0], soft=soft[0])
    second = Filter[Want](lambda _, __, places: [place for place in places if place == 2], soft=soft[1])
    row = Filters(first, second) if soft[0] else Filters(second, Filter[Want](lambda _, __, places: places))
    assert list(row.passing(pool, want)) == kept


def test_filters_of_a_policy_come_first() -> None:
    pool, want = Pool([Candidate("a", True), Candidate("b", True)]), Want(0, 5, 0, (b"cat", b""))
    only_b: Filter[Want] = Filter(lambda _, __, places: [place for place in places if place == 1])
    assert list(ITEM_FILTERS.after((only_b,)).passing(pool, want)) == [1]
    assert ITEM_FILTERS.after(()) is ITEM_FILTERS


def test_each_filter_keeps_the_order_of_places() -> None:
    pool, want = (
        Pool([Candidate(name, True, arena_bytes=9, available_bytes=9) for name in NAMES]),
        Want(0, 5, 5, (b"", b"")),
    )
    for keep in (usable, not_excluded, not_avoided, not_in_backoff, large_enough, has_slot, has_room):
        assert list(keep(pool, want, [3, 1, 2])) == [3, 1, 2]
