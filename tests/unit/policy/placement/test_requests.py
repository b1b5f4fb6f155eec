from collections.abc import Mapping
from dataclasses import replace
from random import Random
from types import MappingProxyType
from typing import Any

import pytest

from triptych.policy.backlog import Alone, TextBacklog, Work
from triptych.policy.kv_transfer import TransferRule, by_need
from triptych.policy.lending import MOST_MOVES, LenderState
from triptych.policy.placement.policy import LEAST_LOADED
from triptych.policy.placement.pool import Candidate, Pool, TextLoad, TextTraits
from triptych.policy.placement.requests import (
    RequestPlace,
    RequestShortage,
    is_faster_elsewhere,
    is_kept_apart,
    place_at_lender,
    place_request,
)
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


# --- prompts and answers -----------------------------------------------------------------------------------------------


def texts(*rows: Candidate, **loads: TextLoad) -> Pool:
    """Of text instances with equal loads, and these of each stage."""
    return Pool(rows, text_load=lambda place: loads.get(rows[place].name, TextLoad(kv_room=100)))


def candidate(name: str, **traits: Any) -> Candidate:
    return Candidate(name, True, 5, 1, text=TextTraits(**{"kv_kind": "k", **traits}))


def place(pool: Pool, want: RequestWant, kv_transfer: TransferRule | None = None) -> tuple[str, bool] | RequestShortage:
    found = place_request(pool, want, LEAST_LOADED, kv_transfer, RNG)
    return (found.name, found.transfers_kv) if isinstance(found, RequestPlace) else found


def test_the_prefix_of_a_prompt_is_computed_where_it_is_kept_and_no_other_prompt_waits() -> None:
    rows = [candidate("a"), candidate("b", prefills_early=True), candidate("c", prefills_early=True, prefill_only=True)]
    pool = texts(*rows, candidate("d", prefills_early=True), d=TextLoad(prefill_tokens=1))
    assert place(pool, RequestWant(9, early=True)) == ("b", False)
    pool.lenders = {"b": LenderState.LENDING}
    assert place(pool, RequestWant(9, early=True)) is RequestShortage.TO_COME


def test_one_that_only_prefills_gets_a_prompt_while_there_is_memory_for_its_answer() -> None:
    prompts = texts(candidate("p", prefill_only=True), candidate("q", prefill_only=True, kv_kind="other"))
    prompts.answers = texts(
        candidate("d"), candidate("e", kv_kind="other"), d=TextLoad(kv_room=50), e=TextLoad(kv_room=70)
    )
    assert {place(prompts, RequestWant(9, kv_tokens=60))} == {("q", True)}, "that of the least loaded is taken"
    assert place(prompts, RequestWant(9, kv_tokens=71)) is RequestShortage.TO_COME
    assert place(prompts, RequestWant(9, kv_tokens=40, first_in_line=False)) is RequestShortage.TO_COME
    assert place(prompts, RequestWant(9, kv_tokens=71, avoid=frozenset("pq"))) is RequestShortage.NO_INSTANCE


def test_an_answer_goes_on_where_its_keys_and_values_can_be_used_and_there_is_memory_for_them() -> None:
    rows = [candidate("a", continues=False), candidate("b", kv_kind="other"), candidate("c"), candidate("d")]
    pool = texts(*rows, c=TextLoad(kv_room=10))
    want = RequestWant(9, kv_tokens=50, continues=True, sender="p", sender_kv_kind="k")
    assert place(pool, want) == ("d", False)
    assert place(pool, replace(want, avoid=frozenset("d"))) == ("c", False), "it waits there"
    assert place(pool, replace(want, avoid=frozenset("cd"))) == ("b", False), "it computes"
    assert place(pool, replace(want, avoid=frozenset("bcd"), exclude=frozenset("bc"))) == ("d", False), "a last resort"
    assert place(texts(candidate("a", continues=False)), want) is RequestShortage.NO_INSTANCE


def test_an_answer_is_kv_transferred_by_policy_to_one_that_takes_its_keys_and_values() -> None:
    pool = texts(candidate("a", transfers_kv=True), a=TextLoad(decode_tokens=500))
    pool.answers = texts(candidate("d"), d=TextLoad(kv_room=60))
    want = RequestWant(9, answer_tokens=40, kv_tokens=49)
    assert place(pool, want, by_need) == ("a", True)
    assert place(pool, want) == ("a", False), "without a policy"
    assert place(pool, replace(want, kv_tokens=61), by_need) == ("a", False), "without memory"
    assert place(pool, replace(want, first_in_line=False), by_need) == ("a", False), "others wait for that memory"
    assert place(pool, replace(want, early=True), by_need) is RequestShortage.NO_INSTANCE
    pool.answers = texts(candidate("d", kv_kind="other"))
    assert place(pool, want, by_need) == ("a", False)


def test_those_that_encode_first_get_requests_while_they_lend_or_if_there_are_no_others() -> None:
    pool = texts(candidate("a"), candidate("b")._replace(pending_tokens=0), b=TextLoad(kv_room=20))
    pool.lenders = {"b": LenderState.LENDING}
    want = RequestWant(9, kv_tokens=20)
    assert place(pool, want) == ("b", False)
    assert place(pool, replace(want, kv_tokens=21)) == ("a", False)
    assert place(pool, replace(want, moves=MOST_MOVES)) == ("a", False)
    pool.lenders = {"b": LenderState.FULL}
    assert place(pool, want) == ("a", False)
    assert place(pool, replace(want, avoid=frozenset("a"))) == ("b", False)


def test_what_may_end_an_instance_waits_for_others_that_may() -> None:
    pool, suspect = texts(candidate("a")), RequestWant(9, exclude=frozenset("a"))
    assert place(pool, suspect) is RequestShortage.TO_COME
    assert is_kept_apart(pool, suspect)
    assert not is_kept_apart(pool, RequestWant(9))
    assert is_kept_apart(pool, RequestWant(9, continues=True))


def test_a_prompt_that_is_kept_moves_if_another_would_have_computed_it_sooner() -> None:
    pool = texts(candidate("a"), candidate("b"), a=TextLoad(prefill_tokens=100), b=TextLoad(prefill_tokens=20))
    assert is_faster_elsewhere(pool, "a", tokens=49, kept_tokens=30)
    assert not is_faster_elsewhere(pool, "a", tokens=50, kept_tokens=30)
    pool.lenders = {"b": LenderState.FULL}
    assert not is_faster_elsewhere(pool, "a", tokens=1, kept_tokens=0)


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
