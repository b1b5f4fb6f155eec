"""What simulated instances are busy with: engines that sleep by a profile spend virtual time, which is counted here."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from triptych.testing.offload import billed_s, spend

from .outcome import Span, Work


@dataclass(slots=True)
class Activity:
    """What one instance did, seconds by kind of work, and each piece of it where ``keeps_spans``."""

    instance: str
    keeps_spans: bool = False
    busy_s: defaultdict[Work, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)

    def spend(self, work: Work, seconds: float, size: int) -> None:
        """What an engine calls instead of sleeping."""
        start_s = asyncio.get_running_loop().time() + billed_s()
        spend(seconds)
        self.did(work, start_s, seconds, size)

    def did(self, work: Work, start_s: float, seconds: float, size: int) -> None:
        self.busy_s[work] += seconds
        if self.keeps_spans and seconds:
            self.spans.append(Span(self.instance, work, start_s, start_s + seconds, size))
