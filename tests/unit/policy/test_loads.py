from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.policy.affinity import Holding
from triptych.policy.loads import NOT_USED, Loads
from triptych.policy.routing import Candidate, Pool, Want, assign_items, choose_text, least_loaded

NAMES = "abcdef"
FAILED_ELSEWHERE = frozenset({"no instance of the pool"})
"""An item or request that avoids it has the same choice, but is routed over the candidates, which are read one by one."""


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
    return Pool(candidates, draw(st.integers(0, 20)), lambda content: holders if content[0] != b"0" else ())


@given(pools(), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(1, 60)), min_size=1, max_size=5))
def test_encoders_chosen_by_lists_of_loads_are_those_chosen_by_candidates(
    pool: Pool, items: list[tuple[int, int, int]]
) -> None:
    def chosen(avoid: frozenset[str]) -> object:
        wants = [
            Want(item, tokens, nbytes, (b"%d" % content, b""), avoid)
            for item, (content, tokens, nbytes) in enumerate(items)
        ]
        return assign_items(pool, wants, least_loaded, Random(7))

    assert chosen(frozenset()) == chosen(FAILED_ELSEWHERE)


@given(pools(), st.dictionaries(st.sampled_from(["i-a", "i-c", "north", "south"]), st.integers(1, 9), max_size=3))
def test_text_instances_chosen_by_lists_of_loads_are_those_chosen_by_candidates(
    pool: Pool, holders: dict[str, int]
) -> None:
    pool = Pool(tuple(one._replace(max_items=0, probation=False) for one in pool.candidates), pool.turn)
    hosts = {"i-a": "n", "i-b": "n", "i-c": "s", "i-d": "s", "north": "n", "south": "s"}
    avoids: tuple[frozenset[str], ...] = (frozenset(), FAILED_ELSEWHERE)
    first, second = (
        choose_text(pool, least_loaded, Random(7), holders=holders, hosts=hosts, avoid=avoid) for avoid in avoids
    )
    assert first == second


def test_an_instance_of_which_nothing_is_known_is_not_used() -> None:
    assert Loads((), ()).least(0, (b"", b"")) is None
    loads = Loads(("a", "b"), ("", ""))
    assert loads.least(0, (b"", b"")) is None
    loads.put(1, 500, 2)
    assert (loads.least(0, (b"", b"")), loads.least_in_turn(0), loads.tokens(1)) == (1, [1], 500)
    loads.put_aside(1)
    assert loads.least_in_turn(0) == []


@pytest.mark.parametrize(("left", "then"), [(1, NOT_USED), (2, (70 << 32) + 2)])
def test_an_item_more_counts_only_in_the_copy(left: int, then: int) -> None:
    loads = Loads(("a",), ("i-a",))
    loads.put(0, 50, 1, room=100, left=left)
    more = loads.copy()
    more.add(0, 20, 30)
    assert more.of(0) == (then, 70, left - 1)
    assert loads.of(0) == ((50 << 32) + 1, 100, left)
