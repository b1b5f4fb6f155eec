"""Limits of an instance's batches: orders are obeyed as a whole, or not at all."""

import pytest

from triptych.domain.instance import InstanceLimits, LimitsReport
from triptych.errors import Conflict, InvalidRequest
from triptych.runtime.batch_limits import LiveLimits

START = InstanceLimits(8, 32, 512)


class Part:
    """A part with some of the limits, each at most 100."""

    def __init__(self, start: InstanceLimits) -> None:
        self.start = self.batch_limits = start

    def check_batch_limits(self, wanted: InstanceLimits) -> None:
        for name, value in wanted.given.items():
            if name in self.start.given and value > 1000:
                raise InvalidRequest(f"{name} is {value}, must be at most 1000")

    def limit_batches(self, wanted: InstanceLimits) -> None:
        self.batch_limits = InstanceLimits(**{**self.start.given, **_of(wanted, self.start)})


def _of(wanted: InstanceLimits, start: InstanceLimits) -> dict[str, int]:
    return {name: value for name, value in wanted.given.items() if name in start.given}


@pytest.fixture
def parts() -> tuple[Part, Part]:
    return Part(InstanceLimits(max_batch_items=8)), Part(InstanceLimits(max_sequences=32, token_budget=512))


def test_an_order_names_what_differs_from_the_start(parts: tuple[Part, Part]) -> None:
    notes: list[int] = []
    limits = LiveLimits(parts, lambda: notes.append(1))
    assert limits.report() == LimitsReport(START)
    limits.set(InstanceLimits(4, 64), 1, True, "a test")
    assert limits.report() == LimitsReport(InstanceLimits(4, 64, 512), 1, by_hand=True)
    limits.set(InstanceLimits(token_budget=100), 2, False, "a test")
    assert limits.report() == LimitsReport(InstanceLimits(8, 32, 100), 2)
    limits.set(InstanceLimits(), 3, False, "a test")
    assert limits.report() == LimitsReport(START, 3)
    assert len(notes) == 3


def test_an_order_that_one_part_refuses_changes_nothing_and_is_reported(parts: tuple[Part, Part]) -> None:
    limits = LiveLimits(parts, lambda: None)
    limits.set(InstanceLimits(max_sequences=64), 1, True, "a test")
    with pytest.raises(InvalidRequest, match="max_sequences is 2000"):
        limits.set(InstanceLimits(4, 2000), 2, False, "a test")
    fault = "max_sequences is 2000, must be at most 1000"
    assert limits.report() == LimitsReport(InstanceLimits(8, 64, 512), 2, by_hand=True, fault=fault)
    limits.set(InstanceLimits(), 3, False, "a test")
    assert limits.report() == LimitsReport(START, 3)


def test_an_older_order_is_refused(parts: tuple[Part, Part]) -> None:
    limits = LiveLimits(parts, lambda: None)
    limits.set(InstanceLimits(4), 5, True, "a test")
    with pytest.raises(Conflict, match="the order has version 5, the last one had 5"):
        limits.set(InstanceLimits(6), 5, True, "a test")
    assert limits.report() == LimitsReport(InstanceLimits(4, 32, 512), 5, by_hand=True)


def test_a_limit_that_no_part_has_is_refused(parts: tuple[Part, Part]) -> None:
    encoder, _ = parts
    limits = LiveLimits((encoder,), lambda: None)
    with pytest.raises(InvalidRequest, match="this instance cannot change max_sequences, token_budget"):
        limits.set(InstanceLimits(1, 2, 3), 1, True, "a test")
    assert LiveLimits((Part(InstanceLimits()),), lambda: None).report() is None
