"""An order of limits, and what a member's reports say of it."""

from triptych.domain.instance import InstanceLimits, LimitsReport
from triptych.machine.pool_manager.limits_order import LimitsOrder

LIMITS = InstanceLimits(max_sequences=64)


def report(version: int) -> LimitsReport:
    return LimitsReport(LIMITS, version)


def test_an_order_is_unknown_until_it_was_sent_and_the_member_has_its_version() -> None:
    order = LimitsOrder(LIMITS, by_hand=True, reason="a test")
    assert order.is_unknown(report(9))
    order.version = 10
    assert order.is_unknown(report(9))
    assert not order.is_unknown(report(10))


def test_a_version_above_its_own_is_of_another_manager() -> None:
    order = LimitsOrder(LIMITS, by_hand=True, reason="a test", version=10)
    assert not order.is_overtaken(report(10))
    assert order.is_overtaken(report(11))
    assert not LimitsOrder(LIMITS, by_hand=True, reason="a test").is_overtaken(report(11)), "it was not sent"


def test_another_process_gets_the_same_order_anew() -> None:
    order = LimitsOrder(LIMITS, by_hand=True, reason="a test", version=10, answered=True)
    assert order.again() == LimitsOrder(LIMITS, by_hand=True, reason="a test")
