from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.policy.affinity import Holding
from triptych.policy.loads import NOT_USED, Loads, less_loaded
from triptych.policy.routing import Candidate, Pool, Shortage, Want, assign_items, choose_text, least_loaded

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
    shared = draw(st.booleans())
    return Pool(candidates, draw(st.integers(0, 20)), lambda content: holders if content[0] != b"0" else (), shared)


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
    candidates = tuple(one._replace(max_items=0, probation=False) for one in pool.candidates)
    pool = Pool(candidates, pool.turn, shared=pool.shared)
    hosts = {"i-a": "n", "i-b": "n", "i-c": "s", "i-d": "s", "north": "n", "south": "s"}
    avoids: tuple[frozenset[str], ...] = (frozenset(), FAILED_ELSEWHERE)
    first, second = (
        choose_text(pool, least_loaded, Random(7), holders=holders, hosts=hosts, avoid=avoid) for avoid in avoids
    )
    assert first == second


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_the_less_loaded_half_has_three_at_least_and_all_that_are_equal(loads: list[int]) -> None:
    half = less_loaded(loads)
    assert half == sorted(half)
    assert len(half) >= min(len(loads), max(3, len(loads) // 2))
    most = max(loads[place] for place in half)
    assert all((place in half) is (load <= most) for place, load in enumerate(loads))
    assert sum(load < most for load in loads) < max(3, (len(loads) + 1) // 2), "no more than needed"


def test_of_shared_instances_the_less_loaded_of_two_in_the_less_loaded_half_is_chosen() -> None:
    loads = [0, 10, 20, 30, 40, 50, 60, 70]
    pool = Pool(
        tuple(
            Candidate(str(number), usable=True, pending_tokens=load, pending=1, arena_bytes=100, available_bytes=100)
            for number, load in enumerate(loads)
        ),
        shared=True,
    )
    rng = Random(7)
    texts = Counter(choose_text(pool, least_loaded, rng) for _ in range(600))
    assert {name: round(count / 100) for name, count in texts.items()} == {"0": 3, "1": 2, "2": 1}, "pairs of four"
    encoders = Counter[str]()
    for number in range(600):
        choices = assign_items(pool, [Want(0, 5, 10, (b"%d" % number, b""))], least_loaded, rng)
        assert not isinstance(choices, Shortage)
        encoders[choices[0].encoder] += 1
    assert {name: round(count / 100) for name, count in encoders.items()} == {"0": 3, "1": 2, "2": 1}


def test_routers_agree_on_the_encoder_of_a_content_where_their_loads_differ_little() -> None:
    """Each has sent one of eight encoders an item that the other does not know of yet."""

    def chosen(own: int, content: int) -> str:
        candidates = tuple(
            Candidate(f"e{number}", usable=True, pending_tokens=9 * (number == own), pending=0, available_bytes=100)
            for number in range(8)
        )
        choices = assign_items(
            Pool(candidates, shared=True), [Want(0, 5, 10, (b"%d" % content, b""))], least_loaded, Random(7)
        )
        assert not isinstance(choices, Shortage)
        return choices[0].encoder

    assert sum(chosen(2, content) == chosen(5, content) for content in range(400)) >= 280


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
