"""A pool that changes its tensor-parallel degree: one instance after the other is replaced by one with another degree.


    BEGUN -- degree and one more instance ordered -- one with the new degree is ready -> drain one with the old
       ^                                                                                         |
       +------------------------- it has ended, and is replaced ---------------------------------+
       |
       +-- none with the old degree is left -> DONE        an instance does not start, or not in time -> ABORTED

The pool has one instance more than before while it rolls, so that its capacity stays. Nothing is drained before its successor serves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from triptych.domain.decision import InstancePhase, PoolInstance
from triptych.policy.scaling import instance_to_drain


@dataclass(frozen=True, slots=True)
class DrainForDegree:
    """Let an instance with the old degree drain: its successor serves."""

    instance_id: str
    reason: str


class RollOutcome(StrEnum):
    DONE = "done"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class RollEnded:
    """The pool has its size again. Aborted: instances that start from now on have the old degree."""

    outcome: RollOutcome
    reason: str


RollEffect = DrainForDegree | RollEnded


class RollMachine:
    """Owner of the replacement of one pool's instances by such with another degree. ``handle`` is the only mutator.

    It begins once ``size`` instances serve, and the scaler was told the degree and one instance more.
    """

    def __init__(self, degree: int, before: int, size: int, *, patience_s: float, now_s: float) -> None:
        """``before`` is the degree until now. ``patience_s``: in which an instance must become ready, from its order on."""
        self.degree = degree
        self.before = before
        self.size = size
        self._patience_s = patience_s
        self._waits_since_s = now_s
        """Since when a successor is awaited."""
        self._replaced = 0
        """Instances that were told to drain."""
        self._failed = ""

    @property
    def wanted(self) -> int:
        """Size of the pool now: the last one that drains is not replaced."""
        return self.size + (self._replaced < self.size)

    def failed(self, reason: str) -> None:
        """An instance of the pool ended before it was ready. Part of ``handle``'s next input."""
        self._failed = self._failed or reason

    def handle(self, instances: Sequence[PoolInstance], degrees: dict[str, int], now_s: float) -> list[RollEffect]:
        """Decide what is next. ``degrees`` are those of the members by name."""
        ready = [instance for instance in instances if instance.phase is InstancePhase.READY]
        old = [instance for instance in ready if degrees.get(instance.instance_id) != self.degree]
        leaving = [
            instance for instance in instances if instance.phase in (InstancePhase.DRAINING, InstancePhase.DRAINED)
        ]
        new = len(ready) - len(old)
        if leaving:
            self._waits_since_s = now_s
            return []
        if not old and new >= self.size:
            return [RollEnded(RollOutcome.DONE, f"all {new} instances have degree {self.degree}")]
        if new > self._replaced and old:
            self._replaced += 1
            self._waits_since_s, self._failed = now_s, ""
            name = instance_to_drain(old)
            return [DrainForDegree(name, f"{new} of {self.size} instances have degree {self.degree}")]
        if self._failed:
            return [
                RollEnded(RollOutcome.ABORTED, f"an instance with degree {self.degree} did not start: {self._failed}")
            ]
        if now_s - self._waits_since_s >= self._patience_s:
            text = f"no instance with degree {self.degree} was ready within {self._patience_s:.0f} s"
            return [RollEnded(RollOutcome.ABORTED, text)]
        return []

    def __str__(self) -> str:
        return f"rolls from tensor-parallel degree {self.before} to {self.degree}: {self._replaced} of {self.size} instances were replaced"
