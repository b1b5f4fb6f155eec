from dataclasses import fields

import pytest

from triptych.domain.queue_position import AGEING_S, QueuePosition
from triptych.policy.placement.policy import PLACEMENTS
from triptych.policy.policies import (
    ADMISSIONS,
    DEADLINES,
    DISPATCHES,
    KV_TRANSFERS,
    LENDINGS,
    ORDERINGS,
    PREFIXES,
    SHARDINGS,
    TENANTS,
    Ordering,
    Policies,
    PolicyNames,
)

NAMES = {
    "encoder_routing": "least-loaded",
    "text_routing": "least-loaded",
    "sharding": "never",
    "ordering": "first-come",
    "admission": "bounded",
    "deadlines": "admit",
    "tenants": "none",
    "dispatch": "prefix",
    "kv_transfer": "by-need",
    "lending": "idle",
    "prefixes": "by-cost",
}


@pytest.mark.parametrize("kind", list(NAMES))
def test_an_unknown_name_is_refused_with_the_known_ones(kind: str) -> None:
    tables = {
        "sharding": SHARDINGS,
        "ordering": ORDERINGS,
        "admission": ADMISSIONS,
        "deadlines": DEADLINES,
        "tenants": TENANTS,
        "dispatch": DISPATCHES,
        "kv_transfer": KV_TRANSFERS,
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


def test_first_come_orders_by_priority_and_arrival_only() -> None:
    ordering = ORDERINGS["first-come"]
    early = ordering(priority=1, deadline_s=900.0, arrived_s=0.0, arrival=1)
    assert early < ordering(priority=1, deadline_s=1.0, arrived_s=0.0, arrival=2)
    assert ordering(priority=0, deadline_s=900.0, arrived_s=9.0, arrival=3) < early
    assert isinstance(early, QueuePosition)


@pytest.mark.parametrize("ordering", ORDERINGS.values(), ids=ORDERINGS.keys())
def test_every_ordering_puts_priority_first_and_lets_nothing_be_overtaken_by_what_came_much_later(
    ordering: Ordering,
) -> None:
    old = ordering(priority=0, deadline_s=900.0, arrived_s=5.0, arrival=1, due_s=400.0, needs_s=1.0)
    young = ordering(priority=0, deadline_s=900.0, arrived_s=5.1 + AGEING_S, arrival=2, due_s=6.0 + AGEING_S)
    low = ordering(priority=1, deadline_s=6.0, arrived_s=0.0, arrival=0, due_s=1.0)
    for now_s in (40.0, 500.0):
        assert sorted(position.at(now_s) for position in (low, young, old)) == [
            old.at(now_s),
            young.at(now_s),
            low.at(now_s),
        ]


def test_the_orderings_differ_in_what_comes_first() -> None:
    def first(name: str, now_s: float) -> str:
        ordering = ORDERINGS[name]
        queue_positions = {
            "long": ordering(priority=0, deadline_s=900.0, arrived_s=0.0, arrival=0, due_s=8.0, needs_s=2.0),
            "short": ordering(priority=0, deadline_s=900.0, arrived_s=1.0, arrival=1, due_s=5.0, needs_s=1.0),
            "hurried": ordering(priority=0, deadline_s=10.0, arrived_s=2.0, arrival=2, due_s=20.0, needs_s=9.5),
        }
        return min(queue_positions, key=lambda number: queue_positions[number].at(now_s))

    assert {name: first(name, 3.0) for name in ORDERINGS} == {
        "slo": "short",
        "deadline": "hurried",
        "first-come": "long",
    }
    assert first("slo", 4.5) == "long", "the others are lost"


@pytest.mark.parametrize(
    ("encoder_routing", "text_routing", "predict"),
    [("predicted", "least-loaded", True), ("least-loaded", "predicted", True), ("round-robin", "least-loaded", False)],
)
def test_seconds_are_predicted_if_items_or_requests_are_placed_by_them(
    encoder_routing: str, text_routing: str, predict: bool
) -> None:
    names = PolicyNames(encoder_routing=encoder_routing, text_routing=text_routing)
    assert Policies.named(names).predict is predict
