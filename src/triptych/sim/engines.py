"""Engines of simulated instances: they sleep by a profile in virtual time, and what they did meanwhile is kept."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from triptych.domain.instance import ModelInfo
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.delay import DelayEncoderEngine, DelayTextEngine, Work
from triptych.families.base import Family
from triptych.policy.costs import Costs
from triptych.virtual.offload import billed_s, spend

from .memory import zeros
from .outcome import Busy, Span


@dataclass(slots=True)
class Activity:
    """What one instance did: seconds by kind of work, and each piece of it where ``keeps_spans``."""

    instance: str
    keeps_spans: bool = False
    busy_s: defaultdict[Busy, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)

    def spend(self, work: Work, seconds: float, size: int) -> None:
        """Let virtual time pass within work."""
        start_s = asyncio.get_running_loop().time() + billed_s()
        spend(seconds)
        self.did(work, start_s, seconds, size)

    def did(self, work: Busy, start_s: float, seconds: float, size: int) -> None:
        self.busy_s[work] += seconds
        if self.keeps_spans and seconds:
            self.spans.append(Span(self.instance, work, start_s, start_s + seconds, size))


class SimEncoderEngine(DelayEncoderEngine):
    def __init__(
        self, model: ModelInfo, family: Family, costs: Costs, activity: Activity, *, bytes_per_pixel: float
    ) -> None:
        self._activity = activity
        super().__init__(model, family, costs, sleep=spend, bytes_per_pixel=bytes_per_pixel)

    def _spend(self, work: Work, seconds: float, size: int) -> None:
        self._activity.spend(work, seconds, size)

    def _zeros(self, nbytes: int) -> memoryview:
        return zeros(nbytes)


class SimTextEngine(DelayTextEngine):
    def __init__(
        self, model: ModelInfo, family: Family, costs: Costs, options: EngineOptions, activity: Activity
    ) -> None:
        self._activity = activity
        super().__init__(model, family, costs, options, sleep=spend)

    def _spend(self, work: Work, seconds: float, size: int) -> None:
        self._activity.spend(work, seconds, size)
