"""Limits of batches that the manager sets, or only advises, as profiles say."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from triptych.domain.instance import InstanceLimits, InstanceLoad, LimitsReport
from triptych.domain.membership import MemberKind
from triptych.domain.pool import MemberCondition, MemberStatus, Registration
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role
from triptych.domain.windows import ClassWindow
from triptych.policy.sizing import BatchChange
from triptych.services.pool_manager.batch_limits import BatchDecision, BatchDecisions

PD, E = PoolName("m", Role.PD), PoolName("m", Role.E)
CHANGE = BatchChange(now=16, best=64, gain=0.5)


def instance(name: str, **changes: Any) -> MemberStatus:
    limits = replace(LimitsReport(InstanceLimits(max_sequences=16)), **changes)
    told = Registration(MemberKind.INSTANCE, name, 1, f"{name}:1", "m", role=Role.PD)
    load = InstanceLoad({}, limits=limits)
    return MemberStatus(told, MemberCondition.ACTIVE, suspected=False, load=load, since_s=1.0, heard_s=0.0)


class Site:
    def __init__(self, *, advises: bool = False) -> None:
        self.now_s = 0.0
        self.change: BatchChange | None = CHANGE
        self.orders: list[tuple[str, InstanceLimits]] = []
        self.decisions = BatchDecisions(
            lambda _name, _classes: self.change,
            lambda name, limits, _reason: self.orders.append((name, limits)),
            advises=advises,
            clock=lambda: self.now_s,
        )

    def decide(self, *members: MemberStatus, name: PoolName = PD, may_order: bool = True) -> BatchDecision | None:
        classes: Mapping[str, ClassWindow] = {}
        return self.decisions.decide(name, members, lambda: classes, may_order=may_order)


def test_a_better_batch_is_set_on_all_instances_with_a_reason() -> None:
    site = Site()
    found = site.decide(instance("a"), instance("b"))
    wanted = InstanceLimits(max_sequences=64)
    assert site.orders == [("a", wanted), ("b", wanted)]
    reason = (
        "max_sequences 64 on 2 of 2 instances: batches of up to 64 instead of 16 bear 50% more within the objectives"
    )
    assert found == BatchDecision(reason, advised=False)
    assert site.decide(instance("a"), instance("b")) is None, "the mix is that of the last 30 s"
    site.now_s = 30.0
    site.change = None
    assert site.decide(instance("a"), instance("b")) is None


def test_encoders_get_items_of_a_pass() -> None:
    site = Site()
    site.decide(instance("a"), name=E)
    assert site.orders == [("a", InstanceLimits(max_batch_items=64))]


@pytest.mark.parametrize("changes", [{"by_hand": True}, {"fault": "there is no memory"}])
def test_limits_by_hand_and_those_that_were_refused_stay(changes: dict[str, Any]) -> None:
    site = Site()
    assert site.decide(instance("a", **changes)) is None
    found = site.decide(instance("a", **changes), instance("b"))
    assert [name for name, _ in site.orders] == ["b"]
    assert found is not None
    assert "on 1 of 2 instances" in found.reason


def test_it_only_says_so_if_it_is_to_advise_and_once() -> None:
    site = Site(advises=True)
    assert site.decide(instance("a")) == BatchDecision(str(CHANGE), advised=True)
    site.now_s = 30.0
    assert site.decide(instance("a")) is None
    site.now_s, site.change = 60.0, replace(CHANGE, best=32)
    assert site.decide(instance("a"), may_order=False) is not None
    assert site.orders == []


def test_one_that_does_not_lead_orders_nothing() -> None:
    site = Site()
    assert site.decide(instance("a"), may_order=False) is None
    assert site.orders == []
