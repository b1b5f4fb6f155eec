"""Engines of simulated instances: they sleep by a profile in virtual time, and what they did meanwhile is kept."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.instance import ModelInfo
from triptych.domain.kv_segment import KvSegment
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.delay import DelayEncoderEngine, DelayTextEngine, Work
from triptych.families.base import Family
from triptych.machine.text.counted_batch import CountedSequence, CountedStep
from triptych.policy.costs import Costs
from triptych.virtual.offload import Kind, billed_s, does, spend

from .host import EncoderCosts, TextCosts
from .memory import zeros
from .outcome import Busy, Span


@dataclass(slots=True)
class Activity:
    """Activity of one instance: seconds by kind of work, and each piece of it where ``keeps_spans``."""

    instance: str
    keeps_spans: bool = False
    spans: list[Span] = field(default_factory=list)
    _ended_s: defaultdict[Busy, float] = field(default_factory=lambda: defaultdict(float))
    """Of pieces that were over when it was asked last."""
    _running: list[tuple[Busy, float, float]] = field(default_factory=list)
    """The others: work, start and end."""
    _pulled_s: float = 0.0
    """End of the last pull, as pulls overlap."""

    def spend(self, work: Busy, seconds: float, size: int) -> None:
        """Let virtual time pass within work."""
        if not seconds:
            return
        start_s = asyncio.get_running_loop().time() + billed_s()
        spend(seconds)
        self.did(work, start_s, start_s + seconds, size)

    def pulled(self, start_s: float, end_s: float, nbytes: int) -> None:
        """Note a pull that has ended. Time with several at once counts once."""
        self.did("pull", max(start_s, min(self._pulled_s, end_s)), end_s, nbytes, began_s=start_s)
        self._pulled_s = end_s

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way but the work that asks."""
        began_s = asyncio.get_running_loop().time()
        return not any(end_s > began_s and start_s < began_s for _, start_s, end_s in self._running)

    def did(self, work: Busy, start_s: float, end_s: float, size: int, *, began_s: float | None = None) -> None:
        """Note a piece of work, which may not have ended. ``began_s``: of its span, where the beginning counts for another one."""
        self._running.append((work, start_s, end_s))
        if self.keeps_spans and end_s > start_s:
            self.spans.append(Span(self.instance, work, start_s if began_s is None else began_s, end_s, size))

    def ran(self, began_s: float, ends_s: Sequence[float], now_s: float, size: int) -> None:
        """Note steps that were made at once, as far as they have begun. ``size``: tokens of each."""
        if not self.keeps_spans:
            ends_s = ends_s[-1:]
        for end_s in ends_s:
            if began_s < now_s:
                self.did("step", began_s, end_s, size)
            began_s = end_s

    def until(self, now_s: float) -> dict[Busy, float]:
        """Seconds by kind of work until now, the part of what is under way included."""
        running, ended_s = [], self._ended_s
        for piece in self._running:
            work, start_s, end_s = piece
            if end_s <= now_s:
                ended_s[work] += end_s - start_s
            else:
                running.append(piece)
        self._running = running
        busy_s = dict(ended_s)
        for work, start_s, _ in running:
            busy_s[work] = busy_s.get(work, 0.0) + max(0.0, now_s - start_s)
        return busy_s


class EncoderTimes:
    """How long an encoder takes. Many items are alike, and are priced once."""

    def __init__(self, costs: Costs, bytes_per_pixel: float) -> None:
        self._costs = costs
        self._bytes_per_pixel = bytes_per_pixel
        self._prepare_s: dict[int, float] = {}
        self._encode_s: dict[tuple[float, int], float] = {}

    def prepare_s(self, size: int) -> float:
        """Of an item with so many pixels or samples, on one core."""
        if (took_s := self._prepare_s.get(size)) is None:
            took_s = self._prepare_s[size] = self._costs.prepare_s(self._bytes_per_pixel * size, size).value
        return took_s

    def encode_s(self, tokens: Sequence[int]) -> float:
        """Of a batch of items with so many tokens each."""
        alike = sum(tokens) / len(tokens), len(tokens)
        if (took_s := self._encode_s.get(alike)) is None:
            took_s = self._encode_s[alike] = self._costs.encode_s(*alike).value
        return took_s


class SimEncoderEngine(DelayEncoderEngine):
    def __init__(
        self,
        model: ModelInfo,
        family: Family,
        costs: Costs,
        activity: Activity,
        *,
        bytes_per_pixel: float,
        beside: EncoderCosts,
        afterwards: Callable[[float], object],
    ) -> None:
        """``afterwards`` takes what nothing waits for, seconds of CPU time."""
        self._activity = activity
        self._afterwards = afterwards
        self._beside = beside
        super().__init__(model, family, costs, sleep=spend, bytes_per_pixel=bytes_per_pixel)

    def _spend(self, work: Work, seconds: float, size: int) -> None:
        does(Kind.PASS)
        self._activity.spend(work, seconds, size)
        if work == "prepare":
            self._activity.spend("beside", self._beside.item.s(alone=self._activity.is_idle), 1)
        elif self._beside.end.alone_s:
            self._afterwards(size * self._beside.end.s(alone=size == 1))

    def _zeros(self, nbytes: int) -> memoryview:
        return zeros(nbytes)


class SimTextEngine(DelayTextEngine):
    def __init__(
        self,
        model: ModelInfo,
        family: Family,
        costs: Costs,
        options: EngineOptions,
        activity: Activity,
        *,
        copied_bytes_per_s: float,
        beside: TextCosts,
        afterwards: Callable[[float], object],
    ) -> None:
        """``afterwards`` takes what nothing waits for, seconds of CPU time."""
        self._activity = activity
        self._copied_bytes_per_s = copied_bytes_per_s
        self._beside = beside
        self._afterwards = afterwards
        super().__init__(model, family, costs, options, sleep=spend)

    def add(self, request: EngineRequest) -> None:
        costs, alone = self._beside, not self.has_work
        super().add(request)
        cost = costs.request
        if request.arriving:
            cost += costs.transfer
            self._afterwards(costs.transfer_end.s(alone=alone))
        self._spend("beside", cost.s(alone=alone), 0)

    def _run(self, step: CountedStep[Any]) -> list[EngineOutput]:
        does(Kind.PASS if any(tokens > 1 for tokens, _ in step.prompts) else Kind.DECODE)
        outputs = super()._run(step)
        if sequences := step.decodes + len(step.prompts):
            self._spend("beside", self._beside.step_s + sequences * self._beside.sequence_s, sequences)
            if ended := sum(output.finish_reason is not None for output in outputs):
                self._afterwards(ended * self._beside.end.s(alone=sequences == 1))
        return outputs

    def _spend(self, work: Busy, seconds: float, size: int) -> None:
        self._activity.spend(work, seconds, size)

    def _copied(self, nbytes: int) -> None:
        self._spend("copy", nbytes / self._copied_bytes_per_s, nbytes)

    def _exported(self, sequence: CountedSequence, segment: KvSegment) -> None:
        super()._exported(sequence, segment)
        if sequence.paused and segment.end >= sequence.positions:
            alone = len(self._batch.running) + len(self._batch.waiting) == 1
            self._spend("beside", self._beside.export.s(alone=alone), 0)
