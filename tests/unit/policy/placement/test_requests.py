from collections.abc import Mapping
from random import Random
from types import MappingProxyType

import pytest

from triptych.policy.backlog import Alone, TextBacklog, Work
from triptych.policy.lending import LenderState
from triptych.policy.placement.policy import LEAST_LOADED
from triptych.policy.placement.pool import Candidate, Pool
from triptych.policy.placement.requests import RequestPlace, place_at_lender, place_request
from triptych.policy.placement.wants import RequestWant

RNG = Random(7)
NOTHING: Mapping[str, str] = MappingProxyType({})


def choose_text(
    pool: Pool,
    *,
    avoid: frozenset[str] = frozenset(),
    holders: Mapping[str, int] = MappingProxyType({}),
    hosts: Mapping[str, str] = NOTHING,
) -> str | None:
    pool.hosts = hosts
    place = place_request(pool, RequestWant(0, avoid=avoid, holders=holders), LEAST_LOADED, None, RNG)
    return place.name if isinstance(place, RequestPlace) else None


def test_text_goes_to_the_least_pending_tokens_and_ties_rotate() -> None:
    texts = (Candidate("a", True, 10, 0), Candidate("b", True, 5, 0), Candidate("c", False, 0, 0))
    assert choose_text(Pool(texts)) == "b"
    assert choose_text(Pool(texts), avoid=frozenset({"b"})) == "a"
    assert choose_text(Pool(texts), avoid=frozenset({"a", "b"})) is None
    even = (Candidate("a", True, 0, 0), Candidate("b", True, 0, 0))
    assert [choose_text(Pool(candidates=even, turn=turn)) for turn in range(3)] == ["a", "b", "a"]
    assert choose_text(Pool(candidates=even)) == "a", "turn 0 is the first instance's"
    assert choose_text(Pool(candidates=(Candidate("a", True, 0, 1), Candidate("b", True, 0, 0)))) == "b"


def test_among_equal_text_instances_one_with_the_embeddings_is_preferred() -> None:
    even = tuple(Candidate(name, True, 4, 1, instance_id=f"i-{name}") for name in ("a", "b", "c"))
    for turn in range(3):
        view = Pool(candidates=even, turn=turn)
        assert choose_text(view, holders={"i-b": 1, "elsewhere": 9}) == "b"
    assert choose_text(Pool(candidates=even), holders={"i-b": 1}, avoid=frozenset({"b"})) == "a"
    busy = (Candidate("a", True, 4, 1, instance_id="i-a"), Candidate("b", True, 5, 1, instance_id="i-b"))
    assert choose_text(Pool(candidates=busy), holders={"i-b": 1}) == "a", "load comes first"


def test_among_equal_text_instances_one_on_the_host_of_most_embedding_bytes_is_preferred() -> None:
    hosts = {"i-a": "north", "i-b": "south", "i-c": "south", "e1": "north", "e2": "south", "e3": "south"}
    even = tuple(Candidate(name, True, 4, 1, instance_id=f"i-{name}") for name in ("a", "b", "c"))
    for turn in range(3):
        pool = Pool(candidates=even, turn=turn)
        assert choose_text(pool, hosts=hosts, holders={"e1": 30, "e2": 20, "unknown": 99}) == "a"
        assert choose_text(pool, hosts=hosts, holders={"e1": 30, "e2": 20, "e3": 20}) in {"b", "c"}
        assert choose_text(pool, hosts=hosts, holders={"e1": 30, "i-c": 20}) == "c", "it has some of its own"
    spread = [choose_text(Pool(candidates=even, turn=turn), hosts=hosts, holders={"e2": 1}) for turn in range(3)]
    assert set(spread) == {"b", "c"}
    unknown = [choose_text(Pool(candidates=even, turn=turn), hosts=hosts, holders={"e4": 1}) for turn in range(3)]
    assert unknown == ["a", "b", "c"]
    busy = (even[0]._replace(pending_tokens=5), *even[1:])
    assert choose_text(Pool(candidates=busy), hosts=hosts, holders={"e1": 1}) == "b", "load comes first"


def test_a_text_instance_in_backoff_is_avoided_while_another_is_usable() -> None:
    busy, backed_off = Candidate("a", True, 5, 0), Candidate("b", True, 0, 0, backoff=True)
    assert choose_text(Pool(candidates=(busy, backed_off))) == "a"
    assert choose_text(Pool(candidates=(busy, backed_off)), avoid=frozenset({"a"})) == "b"


# --- from where it waits to a lender ---------------------------------------------------------------------------------


def ends_earlier(here: Candidate, there: Candidate, want: RequestWant) -> bool:
    pool = Pool((here._replace(name="here"), there._replace(name="there")))
    pool.lenders = {"there": LenderState.LENDING}
    chosen = place_at_lender(pool, want, "here", LEAST_LOADED, RNG)
    assert chosen in {"there", None}
    return chosen == "there"


def text(tokens: int, backlog: TextBacklog | None = None) -> Candidate:
    return Candidate("t", True, tokens, 1, backlog=backlog)


def test_the_load_where_a_request_waits_includes_its_own() -> None:
    want = RequestWant(50, 10)
    assert not ends_earlier(text(160), text(100), want)
    assert ends_earlier(text(161), text(100), want)


class Steady:
    """A second for each token of a prompt, and a step for each of an answer."""

    def alone(self, work: Work) -> Alone:
        return Alone(work.tokens, work.tokens, work.answer_tokens)

    def pull_s(self, near_nbytes: int, far_nbytes: int) -> float:
        return float(near_nbytes + far_nbytes)


@pytest.mark.parametrize(("step_s", "earlier"), [(1.0, True), (1.9, True), (2.1, False)])
def test_where_seconds_are_known_they_count(step_s: float, earlier: bool) -> None:
    want, speed = RequestWant(50, 10), Steady()
    here = text(0, TextBacklog(speed, wait_s=60.0, step_s=1.0))
    assert ends_earlier(here, text(1000, TextBacklog(speed, step_s=step_s)), want) is earlier
