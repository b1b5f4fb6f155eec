"""Filters alone and in rows; ``test_items`` and ``test_requests`` test what is chosen by them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.policy.lending import MOST_MOVES, LenderState
from triptych.policy.placement.filters import (
    ANSWER_FILTERS,
    HEDGE_FILTERS,
    ITEM_FILTERS,
    MOVE_FILTERS,
    PROMPT_FILTERS,
    Filter,
    Filters,
    has_room,
    has_slot,
    large_enough,
    not_avoided,
    not_excluded,
    not_in_backoff,
    receivers,
    usable,
)
from triptych.policy.placement.pool import Candidate, Pool, TextLoad, TextTraits
from triptych.policy.placement.wants import RequestWant, Want

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


def test_a_hedge_goes_to_no_encoder_that_is_tried_again_or_has_failed_the_item() -> None:
    rows = [Candidate(name, True, arena_bytes=9, available_bytes=9) for name in NAMES]
    rows[0], rows[1] = rows[0]._replace(probation=True), rows[1]._replace(backoff=True)
    want = Want(0, 5, 5, (b"cat", b""), avoid=frozenset("c"))
    assert list(HEDGE_FILTERS.passing(Pool(rows), want)) == [3]
    assert list(HEDGE_FILTERS.passing(Pool(rows[:3]), want)) == [], "nothing is given up"


# --- of text instances -----------------------------------------------------------------------------------------------


def texts(*traits: dict[str, Any], **loads: TextLoad) -> Pool:
    """Text instances a, b, c and so on with these traits, and with room for 100 tokens unless ``loads`` says otherwise."""
    rows = [
        Candidate(name, True, text=TextTraits(**{"kv_kind": "k", **trait}))
        for name, trait in zip(NAMES, traits, strict=False)
    ]
    return Pool(rows, text_load=lambda place: loads.get(NAMES[place], TextLoad(kv_room=100)))


def test_a_lender_gets_a_prompt_only_while_it_lends_to_one_that_has_not_moved_often() -> None:
    pool, want = texts({}, {}), RequestWant(5)
    states = {"b": LenderState.LENDING}
    pool.lenders = states
    assert list(PROMPT_FILTERS.passing(pool, want)) == [0, 1]
    assert list(PROMPT_FILTERS.passing(pool, replace(want, moves=MOST_MOVES - 1))) == [0, 1]
    assert list(PROMPT_FILTERS.passing(pool, replace(want, moves=MOST_MOVES))) == [0]
    for states["b"] in (LenderState.FULL, LenderState.ENCODE_ONLY):
        assert list(PROMPT_FILTERS.passing(pool, want)) == [0]
        assert list(PROMPT_FILTERS.passing(pool, replace(want, avoid=frozenset("a")))) == [1], "there are no others"


def test_a_lender_gets_a_request_only_if_it_has_kv_memory_for_it_unless_there_are_no_others() -> None:
    pool = texts({}, {}, a=TextLoad(kv_room=0), b=TextLoad(kv_room=20))
    pool.lenders = {"b": LenderState.LENDING}
    for filters in (PROMPT_FILTERS, ANSWER_FILTERS):
        assert list(filters.passing(pool, RequestWant(5, kv_tokens=20))) == [0, 1], "only lenders are asked"
        assert list(filters.passing(pool, RequestWant(5, kv_tokens=21))) == [0]
    assert list(PROMPT_FILTERS.passing(pool, RequestWant(5, kv_tokens=21, avoid=frozenset("a")))) == [1]


def test_a_request_moves_only_to_lenders_that_lend_and_keep_their_answers() -> None:
    pool, want = texts({}, {}, {}, {"prefill_only": True}), RequestWant(5)
    pool.lenders = {"b": LenderState.LENDING, "c": LenderState.FULL, "d": LenderState.LENDING}
    assert list(MOVE_FILTERS.passing(pool, want)) == [1]
    assert list(MOVE_FILTERS.passing(pool, replace(want, avoid=frozenset("b")))) == []


def test_an_early_prefill_is_kept_where_the_answer_stays_and_nothing_else_is_prefilled() -> None:
    early = {"prefills_early": True}
    pool = texts({}, early, early | {"prefill_only": True}, early, d=TextLoad(prefill_tokens=1))
    assert list(PROMPT_FILTERS.passing(pool, RequestWant(5, early=True))) == [1]
    pool.lenders = {"b": LenderState.LENDING}
    assert list(PROMPT_FILTERS.passing(pool, RequestWant(5, early=True))) == []


def test_answers_are_received_by_others_that_go_on_and_if_possible_take_the_keys_and_values() -> None:
    pool = texts({}, {"continues": False}, {"kv_kind": "other"}, {})
    assert receivers(pool, "a", "k") == [3], "not the sender itself"
    assert receivers(pool, "e", "k") == [0, 3]
    assert receivers(pool, "a", "other") == [2]
    assert receivers(pool, "a", "none") == receivers(pool, "a", "") == [2, 3], "where they compute"
    assert receivers(pool, "a", "none", alike=True) == []
    pool.lenders = {"d": LenderState.FULL}
    assert receivers(pool, "a", "") == [2]
    assert receivers(pool, "a", "k") == [3], "as there is no other"


def test_an_answer_goes_where_its_keys_and_values_have_kv_memory_and_only_then_elsewhere() -> None:
    pool = texts({}, {"kv_kind": "other"}, {}, {}, c=TextLoad(kv_room=49), d=TextLoad(kv_room=50))
    want = RequestWant(5, kv_tokens=50, continues=True, sender="a", sender_kv_kind="k")
    assert list(ANSWER_FILTERS.passing(pool, want)) == [3]
    assert list(ANSWER_FILTERS.passing(pool, replace(want, kv_tokens=51))) == [2, 3], "it waits there"
    assert list(ANSWER_FILTERS.passing(pool, replace(want, sender=""))) == [0, 1, 2, 3], "nothing is transferred"


def test_a_prompt_whose_answer_leaves_waits_until_a_receiver_has_kv_memory() -> None:
    pool = texts({"prefill_only": True})
    pool.answers = texts({}, b=TextLoad(kv_room=1000))
    assert list(PROMPT_FILTERS.passing(pool, RequestWant(5, kv_tokens=100))) == []
    pool.answers = texts({"continues": False}, {}, b=TextLoad(kv_room=100))
    want = RequestWant(5, kv_tokens=60)
    assert list(PROMPT_FILTERS.passing(pool, replace(want, promised_kv_tokens=40))) == [0]
    assert list(PROMPT_FILTERS.passing(pool, replace(want, promised_kv_tokens=41))) == [], "others were promised it"
    assert list(PROMPT_FILTERS.passing(pool, replace(want, first_in_line=False))) == []
