from collections import Counter
from dataclasses import fields
from random import Random

import pytest

from triptych.policy.placement.affinity import Holding
from triptych.policy.placement.items import Choice, place_items
from triptych.policy.placement.policy import PLACEMENTS, PlacementPolicy
from triptych.policy.placement.pool import Candidate, Pool
from triptych.policy.placement.requests import RequestPlace, place_request
from triptych.policy.placement.wants import RequestWant, Want
from triptych.policy.policies import (
    ADMISSIONS,
    DEADLINES,
    DISPATCHES,
    HANDOFFS,
    LENDINGS,
    ORDERINGS,
    PREFIXES,
    SHARDINGS,
    TENANTS,
    Ordering,
    Policies,
    PolicyNames,
)
from triptych.policy.queueing import AGEING_S, Turn

NAMES = {
    "encoder_routing": "least-loaded",
    "text_routing": "least-loaded",
    "sharding": "never",
    "ordering": "first-come",
    "admission": "bounded",
    "deadlines": "admit",
    "tenants": "none",
    "dispatch": "prefix",
    "handoff": "by-need",
    "lending": "idle",
    "prefixes": "by-cost",
}


def one(name: str, tokens: int = 0, pending: int = 0) -> Candidate:
    return Candidate(name, True, tokens, pending, 1000, 1000, instance_id=f"i-{name}")


def routed(routing: PlacementPolicy, *candidates: Candidate, turns: int = 1, seed: int = 7) -> list[str]:
    rng = Random(seed)
    chosen = [place_request(Pool(candidates, turn), RequestWant(5), routing, None, rng) for turn in range(turns)]
    return [place.name for place in chosen if isinstance(place, RequestPlace)]


@pytest.mark.parametrize("kind", list(NAMES))
def test_an_unknown_name_is_refused_with_the_known_ones(kind: str) -> None:
    tables = {
        "sharding": SHARDINGS,
        "ordering": ORDERINGS,
        "admission": ADMISSIONS,
        "deadlines": DEADLINES,
        "tenants": TENANTS,
        "dispatch": DISPATCHES,
        "handoff": HANDOFFS,
        "lending": LENDINGS,
        "prefixes": PREFIXES,
    }
    with pytest.raises(ValueError, match=f"{kind} is 'fastest', which is none of") as refused:
        PolicyNames(**{**NAMES, kind: "fastest"})
    for name in tables.get(kind, PLACEMENTS):
        assert name in str(refused.value)


def test_each_kind_of_policy_can_be_chosen_by_name() -> None:
    assert {field.name for field in fields(Policies)} == set(NAMES)
    assert Policies.named(PolicyNames(**NAMES)).ordering is ORDERINGS["first-come"]


@pytest.mark.parametrize("name", ["least-loaded", "least-requests", "power-of-two", "round-robin"])
def test_equal_instances_get_equal_shares(name: str) -> None:
    counts = Counter(routed(PLACEMENTS[name], one("a"), one("b"), one("c"), turns=300))
    assert set(counts) == {"a", "b", "c"}
    assert max(counts.values()) - min(counts.values()) < 60


def test_least_loaded_compares_tokens_then_requests() -> None:
    assert routed(PLACEMENTS["least-loaded"], one("a", 9, 1), one("b", 8, 5), one("c", 8, 2)) == ["c"]


def test_least_requests_compares_the_number_of_requests() -> None:
    assert routed(PLACEMENTS["least-requests"], one("a", 9, 3), one("b", 900, 1), one("c", 8, 2)) == ["b"]


def test_round_robin_ignores_load() -> None:
    assert routed(PLACEMENTS["round-robin"], one("a", 900), one("b"), turns=5) == ["a", "b", "a", "b", "a"]


def test_power_of_two_never_takes_the_most_loaded() -> None:
    pool = (one("a", 900), one("b", 5), one("c", 50))
    counts = Counter(routed(PLACEMENTS["power-of-two"], *pool, turns=300))
    assert set(counts) == {"b", "c"}
    assert counts["b"] > counts["c"] > 60
    assert routed(PLACEMENTS["power-of-two"], *pool, turns=9) == routed(PLACEMENTS["power-of-two"], *pool, turns=9)


@pytest.mark.parametrize("routing", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_every_policy_finds_a_packing_and_the_encoder_that_holds_the_embedding(routing: PlacementPolicy) -> None:
    encoders = (one("a"), one("b")._replace(available_bytes=10), one("c")._replace(available_bytes=90))
    wants = [Want(item, 10, nbytes, (b"%d" % item, b"")) for item, nbytes in enumerate((900, 90, 100, 10))]
    for turn in range(9):
        assert isinstance(place_items(Pool(encoders, turn), wants, routing, Random(turn)), tuple)
    held = Pool((one("a"), one("b"), one("c")), held=lambda _: (Holding("c"),))
    choices = place_items(held, wants[:1], routing, Random(7))
    assert isinstance(choices, tuple)
    assert [choice.encoder for choice in choices if isinstance(choice, Choice)] == ["c"]


def test_first_come_orders_by_priority_and_arrival_only() -> None:
    ordering = ORDERINGS["first-come"]
    early = ordering(priority=1, deadline_s=900.0, arrived_s=0.0, arrival=1)
    assert early < ordering(priority=1, deadline_s=1.0, arrived_s=0.0, arrival=2)
    assert ordering(priority=0, deadline_s=900.0, arrived_s=9.0, arrival=3) < early
    assert isinstance(early, Turn)


@pytest.mark.parametrize("ordering", ORDERINGS.values(), ids=ORDERINGS.keys())
def test_every_ordering_puts_priority_first_and_lets_nothing_be_overtaken_by_what_came_much_later(
    ordering: Ordering,
) -> None:
    old = ordering(priority=0, deadline_s=900.0, arrived_s=5.0, arrival=1, due_s=400.0, needs_s=1.0)
    young = ordering(priority=0, deadline_s=900.0, arrived_s=5.1 + AGEING_S, arrival=2, due_s=6.0 + AGEING_S)
    low = ordering(priority=1, deadline_s=6.0, arrived_s=0.0, arrival=0, due_s=1.0)
    for now_s in (40.0, 500.0):
        assert sorted(one.at(now_s) for one in (low, young, old)) == [old.at(now_s), young.at(now_s), low.at(now_s)]


def test_the_orderings_differ_in_what_comes_first() -> None:
    def first(name: str, now_s: float) -> str:
        ordering = ORDERINGS[name]
        turns = {
            "long": ordering(priority=0, deadline_s=900.0, arrived_s=0.0, arrival=0, due_s=8.0, needs_s=2.0),
            "short": ordering(priority=0, deadline_s=900.0, arrived_s=1.0, arrival=1, due_s=5.0, needs_s=1.0),
            "hurried": ordering(priority=0, deadline_s=10.0, arrived_s=2.0, arrival=2, due_s=20.0, needs_s=9.5),
        }
        return min(turns, key=lambda one: turns[one].at(now_s))

    assert {name: first(name, 3.0) for name in ORDERINGS} == {
        "slo": "short",
        "deadline": "hurried",
        "first-come": "long",
    }
    assert first("slo", 4.5) == "long", "the others are lost"
