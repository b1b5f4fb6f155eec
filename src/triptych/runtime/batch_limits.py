"""Limits of an instance's batches, which a pool manager can change while the instance runs."""

import logging
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Protocol

from triptych.domain.instance import InstanceLimits, LimitsReport
from triptych.errors import Conflict, InvalidRequest

logger = logging.getLogger(__name__)

SetLimits = Callable[[InstanceLimits, int, bool, str], None]
"""Obeys an order with limits and a version, which a person gave or not, for a reason. Raises Conflict, InvalidRequest."""


class Batching(Protocol):
    """What runs batches of one part of the model."""

    @property
    def batch_limits(self) -> InstanceLimits:
        """Limits in use. None where it has no such limit, or cannot change it."""
        ...

    def check_batch_limits(self, wanted: InstanceLimits) -> None:
        """Raises InvalidRequest for limits that it cannot have. Those of other parts are none of its business."""
        ...

    def limit_batches(self, wanted: InstanceLimits) -> None:
        """Have these limits, or those of its start, from the next batch on."""
        ...


class LiveLimits:
    """Owner of the order that an instance obeys. All parts have its limits, or none has."""

    def __init__(self, parts: Sequence[Batching], notify: Callable[[], None]) -> None:
        """``notify`` is called when the report has changed."""
        self._parts = parts
        self._notify = notify
        self._version = 0
        self._by_hand = False
        self._fault = ""

    @property
    def _in_use(self) -> InstanceLimits:
        return reduce(InstanceLimits.over, (part.batch_limits for part in self._parts))

    def report(self) -> LimitsReport | None:
        """None if no limit can change."""
        in_use = self._in_use
        return LimitsReport(in_use, self._version, self._by_hand, self._fault) if in_use.given else None

    def set(self, wanted: InstanceLimits, version: int, by_hand: bool, reason: str) -> None:
        """Obey an order; it returns at once. Raises Conflict unless ``version`` is above that of the last order, and InvalidRequest for
        limits that the instance cannot have: then it keeps those in use, and reports why.
        """
        if version <= self._version:
            raise Conflict(f"the order has version {version}, the last one had {self._version}")
        self._version = version
        try:
            self._check(wanted)
        except InvalidRequest as error:
            self._fault = error.message
            self._notify()
            raise
        self._by_hand, self._fault = by_hand, ""
        for part in self._parts:
            part.limit_batches(wanted)
        logger.info("limits of batches: %s, as ordered with version %d: %s", wanted, version, reason)
        self._notify()

    def _check(self, wanted: InstanceLimits) -> None:
        if lacking := wanted.beyond(self._in_use):
            raise InvalidRequest(f"this instance cannot change {', '.join(lacking)}", param=lacking[0])
        for part in self._parts:
            part.check_batch_limits(wanted)
