from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.policy.backlog import Alone, EncodeBacklog, Work
from triptych.policy.placement.affinity import Holding
from triptych.policy.placement.items import Choice, Shortage, place_items
from triptych.policy.placement.policy import LEAST_LOADED, PLACEMENTS, PlacementPolicy, Score, better_half, distance
from triptych.policy.placement.pool import Candidate, Pool
from triptych.policy.placement.requests import RequestPlace, place_request
from triptych.policy.placement.wants import Placeable, RequestWant, Want


def candidate(name: str, tokens: int = 0, pending: int = 0) -> Candidate:
    return Candidate(name, True, tokens, pending, 1000, 1000, instance_id=f"i-{name}")


def routed(routing: PlacementPolicy, *candidates: Candidate, turns: int = 1, seed: int = 7) -> list[str]:
    rng = Random(seed)
    chosen = [place_request(Pool(candidates, turn), RequestWant(5), routing, None, rng) for turn in range(turns)]
    return [place.name for place in chosen if isinstance(place, RequestPlace)]


@pytest.mark.parametrize("name", ["least-loaded", "least-requests", "power-of-two", "round-robin"])
def test_equal_instances_get_equal_shares(name: str) -> None:
    counts = Counter(routed(PLACEMENTS[name], candidate("a"), candidate("b"), candidate("c"), turns=300))
    assert set(counts) == {"a", "b", "c"}
    assert max(counts.values()) - min(counts.values()) < 60


def test_least_loaded_compares_tokens_then_requests() -> None:
    assert routed(PLACEMENTS["least-loaded"], candidate("a", 9, 1), candidate("b", 8, 5), candidate("c", 8, 2)) == ["c"]


def test_least_requests_compares_the_number_of_requests() -> None:
    assert routed(PLACEMENTS["least-requests"], candidate("a", 9, 3), candidate("b", 900, 1), candidate("c", 8, 2)) == [
        "b"
    ]


def test_round_robin_ignores_load() -> None:
    assert routed(PLACEMENTS["round-robin"], candidate("a", 900), candidate("b"), turns=5) == ["a", "b", "a", "b", "a"]


def test_power_of_two_never_takes_the_most_loaded() -> None:
    pool = (candidate("a", 900), candidate("b", 5), candidate("c", 50))
    counts = Counter(routed(PLACEMENTS["power-of-two"], *pool, turns=300))
    assert set(counts) == {"b", "c"}
    assert counts["b"] > counts["c"] > 60
    assert routed(PLACEMENTS["power-of-two"], *pool, turns=9) == routed(PLACEMENTS["power-of-two"], *pool, turns=9)


@pytest.mark.parametrize("routing", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_every_policy_finds_a_packing_and_the_encoder_that_holds_the_embedding(routing: PlacementPolicy) -> None:
    encoders = (
        candidate("a"),
        candidate("b")._replace(available_bytes=10),
        candidate("c")._replace(available_bytes=90),
    )
    wants = [Want(item, 10, nbytes, (b"%d" % item, b"")) for item, nbytes in enumerate((900, 90, 100, 10))]
    for turn in range(9):
        assert isinstance(place_items(Pool(encoders, turn), wants, routing, Random(turn)), tuple)
    held = Pool((candidate("a"), candidate("b"), candidate("c")), held=lambda _: (Holding("c"),))
    choices = place_items(held, wants[:1], routing, Random(7))
    assert isinstance(choices, tuple)
    assert [choice.encoder for choice in choices if isinstance(choice, Choice)] == ["c"]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_the_less_loaded_half_has_three_at_least_and_all_that_are_equal(loads: list[int]) -> None:
    half = better_half(loads)
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
    texts = Counter[str]()
    for _ in range(600):
        place = place_request(pool, RequestWant(5), LEAST_LOADED, None, rng)
        assert isinstance(place, RequestPlace)
        texts[place.name] += 1
    assert {name: round(count / 100) for name, count in texts.items()} == {"0": 3, "1": 2, "2": 1}, "pairs of four"
    encoders = Counter[str]()
    for number in range(600):
        choices = place_items(pool, [Want(0, 5, 10, (b"%d" % number, b""))], LEAST_LOADED, rng)
        assert not isinstance(choices, Shortage)
        encoders[choices[0].encoder] += 1
    assert {name: round(count / 100) for name, count in encoders.items()} == {"0": 3, "1": 2, "2": 1}


def test_routers_agree_on_the_encoder_of_a_content_where_their_loads_differ_little() -> None:
    """Each router has sent one of eight encoders an item that the other does not know of yet."""

    def chosen(own: int, content: int) -> str:
        candidates = tuple(
            Candidate(f"e{number}", usable=True, pending_tokens=9 * (number == own), pending=0, available_bytes=100)
            for number in range(8)
        )
        pool = Pool(candidates, shared=True)
        choices = place_items(pool, [Want(0, 5, 10, (b"%d" % content, b""))], LEAST_LOADED, Random(7))
        assert not isinstance(choices, Shortage)
        return choices[0].encoder

    assert sum(chosen(2, content) == chosen(5, content) for content in range(400)) >= 280


def test_the_distance_is_to_those_that_hold_the_embeddings_or_to_the_host_with_most_bytes_of_them() -> None:
    pool = Pool(candidate(name) for name in "abc")
    pool.hosts = {"i-a": "north", "i-b": "south", "e1": "north", "e2": "south", "e3": "south"}

    def distances(**holders: int) -> list[float]:
        return list(distance(pool, RequestWant(5, holders=holders), pool.all))

    assert distances() == distances(unknown=9) == [], "nothing is known"
    assert distances(e1=30, e2=20) == [False, True, True]
    assert distances(e1=30, e2=20, e3=20) == [True, False, True]
    assert distances(**{"e1": 30, "i-c": 1}) == [True, True, False], "it holds some itself"
    assert distance(pool, RequestWant(5, holders={"e1": 30, "i-c": 1}), [0, 1]) == [False, True], "one without it"


def test_a_later_score_decides_among_those_that_are_equal_by_the_earlier_ones() -> None:
    def score(*values: float) -> Callable[[Pool, Placeable, Sequence[int]], Sequence[float]]:
        return lambda _, __, places: [values[place] for place in places]

    rows = [candidate(name) for name in "abcd"]
    some, all_equal = score(1, 2, 1, 1), score(3, 3, 3, 3)
    unknown: Score = lambda _, __, ___: ()  # noqa: E731
    assert routed(PlacementPolicy((some, score(3, 0, 2, 2))), *rows, turns=4) == ["c", "c", "c", "d"]
    assert routed(PlacementPolicy((all_equal, unknown, some, score(3, 0, 2, 1))), *rows, turns=4) == ["d"] * 4
    assert routed(PlacementPolicy((unknown,)), *rows, turns=4) == list("abcd")


class Seconds:
    """A second for each token."""

    def alone(self, work: Work) -> Alone:
        return Alone(work.tokens, work.tokens)

    def pull_s(self, near_nbytes: int, far_nbytes: int) -> float:
        return 0.0 * (near_nbytes + far_nbytes)


def test_where_seconds_are_predicted_they_decide_and_not_tokens() -> None:
    """Of b the seconds are few and the tokens many; of a it is the other way round."""
    fast, slow = EncodeBacklog(Seconds(), wait_s=3.0), EncodeBacklog(Seconds(), wait_s=90.0)
    rows = (
        candidate("a", 9)._replace(backlog=slow),
        candidate("b", 900)._replace(backlog=fast),
        candidate("c", 5)._replace(backlog=EncodeBacklog(Seconds(), wait_s=2.0)),
    )
    pool = Pool(rows, held=lambda _: (Holding("b"),))

    def chosen(name: str, pool: Pool) -> str:
        choices = place_items(pool, [Want(0, 5, 10, (b"cat", b""))], PLACEMENTS[name], Random(7))
        assert not isinstance(choices, Shortage)
        return choices[0].encoder

    assert (chosen("predicted", pool), chosen("least-loaded", pool)) == ("b", "c")
    busier = Pool([rows[0], rows[1]])
    assert (chosen("predicted", busier), chosen("least-loaded", busier)) == ("b", "a")
