from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.policy.backlog import Alone, EncodeBacklog, Work
from triptych.policy.placement.affinity import Holding
from triptych.policy.placement.filters import has_room
from triptych.policy.placement.items import place_items
from triptych.policy.placement.policy import LEAST_LOADED
from triptych.policy.placement.pool import Candidate, Pool
from triptych.policy.placement.requests import place_request
from triptych.policy.placement.wants import RequestWant, Want

NAMES = "abcdef"
FAILED_ELSEWHERE = frozenset({"no instance of the pool"})
"""An item or request that avoids it has the same choice, but its places are looked at one by one."""


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    few = st.integers(0, 3)
    candidates = tuple(
        Candidate(
            name,
            usable=draw(st.sampled_from([True, True, True, False])),
            pending_tokens=10 * draw(few),
            pending=draw(few),
            arena_bytes=100,
            available_bytes=draw(st.sampled_from([0, 40, 100, 100])),
            max_items=draw(st.sampled_from([0, 0, 2, 4])),
            backoff=draw(st.sampled_from([False, False, False, True])),
            probation=draw(st.sampled_from([False, False, False, True])),
            instance_id=f"i-{name}",
        )
        for name in NAMES[: draw(st.integers(1, len(NAMES)))]
    )
    holders = draw(st.lists(st.builds(Holding, st.sampled_from(NAMES), st.booleans(), st.booleans()), max_size=3))
    shared = draw(st.booleans())
    return Pool(candidates, draw(st.integers(0, 20)), lambda content: holders if content[0] != b"0" else (), shared)


@given(pools(), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(1, 60)), min_size=1, max_size=5))
def test_encoders_chosen_by_whole_columns_are_those_chosen_one_by_one(
    pool: Pool, items: list[tuple[int, int, int]]
) -> None:
    def chosen(avoid: frozenset[str]) -> object:
        wants = [
            Want(item, tokens, nbytes, (b"%d" % content, b""), avoid)
            for item, (content, tokens, nbytes) in enumerate(items)
        ]
        return place_items(pool, wants, LEAST_LOADED, Random(7))

    assert chosen(frozenset()) == chosen(FAILED_ELSEWHERE)


@given(pools(), st.dictionaries(st.sampled_from(["i-a", "i-c", "north", "south"]), st.integers(1, 9), max_size=3))
def test_text_instances_chosen_by_whole_columns_are_those_chosen_one_by_one(
    pool: Pool, holders: dict[str, int]
) -> None:
    candidates = tuple(candidate._replace(max_items=0, probation=False) for candidate in pool.candidates)
    pool = Pool(candidates, pool.turn, shared=pool.shared)
    pool.hosts = {"i-a": "n", "i-b": "n", "i-c": "s", "i-d": "s", "north": "n", "south": "s"}
    avoids: tuple[frozenset[str], ...] = (frozenset(), FAILED_ELSEWHERE)
    first, second = (
        place_request(pool, RequestWant(5, holders=holders, avoid=avoid), LEAST_LOADED, None, Random(7))
        for avoid in avoids
    )
    assert first == second


def test_only_usable_instances_out_of_backoff_that_take_a_further_item_are_open() -> None:
    assert list(Pool().open) == []
    pool = Pool(
        (
            Candidate("a", True, 500, 2, max_items=3),
            Candidate("b", False, 0, 0),
            Candidate("c", True, 0, 0, backoff=True),
            Candidate("d", True, 0, 3, max_items=3),
        )
    )
    assert list(pool.open) == [0]
    pool.put(2, 7, 1, 0, False, False)
    pool.put(0, 500, 3, 0, False, False)
    assert list(pool.open) == [2]
    assert (pool.pending_tokens[2], pool.pending[2]) == (7, 1)
    pool.set([Candidate("e", True, 0, 0)])
    assert (list(pool.open), pool.places) == ([0], {"e": 0})


def test_what_is_put_is_what_a_row_says() -> None:
    rows = [Candidate("a", True, 5, 1, 100, 40, 3, False, "i-a", True), Candidate("b", False, 0, 0)]
    pool = Pool(rows)
    assert pool.candidates == rows
    pool.put(1, 9, 2, 30, True, False)
    assert pool.candidate(1) == Candidate("b", False, 9, 2, available_bytes=30, backoff=True)


@pytest.mark.parametrize(("most", "is_open"), [(2, False), (3, True)])
def test_an_item_more_counts_only_in_the_copy(most: int, is_open: bool) -> None:
    row = Candidate("a", True, 50, 1, 200, 100, most, instance_id="i-a")
    pool = Pool([row])
    more = pool.copy()
    more.add(0, Want(0, 20, 30, (b"", b"")), 20, 30)
    assert more.candidates == [row._replace(pending_tokens=70, pending=2, available_bytes=70)]
    assert (list(more.open), more.turn) == ([0] if is_open else [], 1)
    assert (pool.candidates, list(pool.open), pool.turn) == ([row], [0], 0)


def test_an_instance_on_probation_takes_one_more_item() -> None:
    pool = Pool([Candidate("a", True, 0, 0, probation=True)]).copy()
    pool.add(0, Want(0, 5, 5, (b"", b"")), 5, 5)
    assert not pool.open


def test_an_instance_whose_room_has_shrunk_gets_nothing_that_does_not_fit() -> None:
    pool = Pool([Candidate(name, True, available_bytes=100) for name in "ab"])
    want = Want(0, 5, 50, (b"", b""))
    assert list(has_room(pool, want, pool.all)) == [0, 1]
    pool.put(0, 0, 1, 10, False, False)
    assert list(has_room(pool, want, pool.all)) == [1]
    pool.put(0, 0, 1, 50, False, False)
    assert list(has_room(pool, want, pool.all)) == [0, 1]


def test_an_instance_has_a_slot_while_it_has_fewer_items_than_its_limit() -> None:
    pool = Pool([Candidate("a", True, 0, 9), Candidate("b", True, 0, 1, max_items=2)])
    assert [pool.has_slot(place) for place in pool.all] == [True, True]
    pool.put(1, 0, 2, 0, False, False)
    assert [pool.has_slot(place) for place in pool.all] == [True, False]


class OneSecondPerToken:
    def alone(self, work: Work) -> Alone:
        return Alone(work.tokens, work.tokens)

    def pull_s(self, near_nbytes: int, far_nbytes: int) -> float:
        return float(near_nbytes + far_nbytes)


def test_work_is_priced_once_for_each_want() -> None:
    pool, first, second = Pool(), Want(0, 5, 5, (b"", b"")), Want(1, 7, 5, (b"", b""))
    speed, prices = OneSecondPerToken(), pool.prices(first)
    assert prices[speed].alone.idle_s == 5
    assert pool.prices(first) is prices
    assert pool.prices(second)[speed].alone.idle_s == 7


def test_an_item_more_is_in_the_predicted_seconds_unless_it_costs_nothing() -> None:
    backlog = EncodeBacklog(OneSecondPerToken(), wait_s=10.0)
    pool, want = Pool([Candidate("a", True, backlog=backlog)]), Want(0, 5, 5, (b"", b""))
    pool.add(0, want, 0, 5)
    assert pool.backlog == [backlog], "its embedding is there"
    pool.add(0, want, 5, 5)
    assert pool.backlog == [backlog._replace(wait_s=15.0)]


def test_an_emptied_pool_has_all_its_room_and_nothing_pending() -> None:
    row = Candidate("a", False, 50, 1, 200, 100, 2, instance_id="i-a")
    pool = Pool([row], turn=3)
    empty = row._replace(pending_tokens=0, pending=0, available_bytes=200)
    assert (pool.emptied().candidates, pool.emptied().turn) == ([empty], 3)
    assert pool.emptied(revived=True).candidates == [empty._replace(usable=True)]
    assert pool.emptied(uncounted=True).candidates == [empty._replace(max_items=0)]
    assert pool.candidates == [row]


def test_loads_are_compared_by_tokens_and_then_by_items_however_they_came_about() -> None:
    pool = Pool([Candidate("a", True, 9, 5), Candidate("b", True, 9, 6), Candidate("c", True, 10, 0)])
    assert sorted(pool.all, key=pool.loads.__getitem__) == [0, 1, 2]
    pool.put(2, 9, 4, 0, False, False)
    assert sorted(pool.all, key=pool.loads.__getitem__) == [2, 0, 1]
    for _ in range(3):
        pool.add(2, Want(0, 5, 5, (b"", b"")), 0, 0)
    assert sorted(pool.all, key=pool.loads.__getitem__) == [0, 1, 2]
    assert pool.loads == Pool(pool.candidates).loads
