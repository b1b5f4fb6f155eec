"""Measurements of routers in short windows: load, outcomes and attainment, by class of request.

Windows can be added up. All times are durations: clocks differ between processes. Every part is bounded, whatever the
load.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cache
from operator import add, attrgetter
from typing import Any, Self, TypeVar

from triptych.domain.mix import Form
from triptych.domain.record import record
from triptych.domain.slo import ChargedStage, Metric

SKETCH_LOW_S = 1e-4
SKETCH_PER_DOUBLING = 4
SKETCH_BUCKETS = 96
"""Buckets from 0.1 ms to about 1,700 s. A bucket is 19 % wide, so a quantile is within 9 % of the measured value."""
_BEGINS_S = [SKETCH_LOW_S * 2 ** (bucket / SKETCH_PER_DOUBLING) for bucket in range(1, SKETCH_BUCKETS)]
"""Where each bucket but the first begins; values out of range are in the first or the last."""
ATTAINMENT_WINDOW_S = 60.0
"""Time over which routers and pool managers take attainment by default."""
MAX_BLAMED = 64
"""Instances with misses in one window report."""


@record
class Sketch:
    """A histogram of durations over fixed logarithmic buckets: ``counts`` of the buckets from ``first`` on."""

    first: int = 0
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, seconds: float) -> "Sketch":
        """A sketch of one value."""
        return cls(bisect_right(_BEGINS_S, seconds), (1,))

    @property
    def count(self) -> int:
        return sum(self.counts)

    def __add__(self, other: "Sketch") -> "Sketch":
        if not other.counts or not self.counts:
            return self if self.counts else other
        first = min(self.first, other.first)
        counts = [0] * (max(self.first + len(self.counts), other.first + len(other.counts)) - first)
        for sketch in (self, other):
            for index, count in enumerate(sketch.counts, sketch.first - first):
                counts[index] += count
        return Sketch(first, tuple(counts))

    def quantile_s(self, share: float) -> float | None:
        """The duration that this share of the values does not exceed (nearest rank), in seconds; None without values."""
        rank = max(1, math.ceil(share * self.count))
        for index, count in enumerate(self.counts, self.first):
            rank -= count
            if rank <= 0:
                return SKETCH_LOW_S * 2 ** ((index + 0.5) / SKETCH_PER_DOUBLING)
        return None


class SketchBuilder:
    """Counts values and makes a ``Sketch`` of them."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, seconds: float, times: int = 1) -> None:
        index = bisect_right(_BEGINS_S, seconds)
        self._counts[index] = self._counts.get(index, 0) + times

    def add_all(self, other: "SketchBuilder") -> None:
        for index, count in other._counts.items():  # noqa: SLF001 - of the same class
            self._counts[index] = self._counts.get(index, 0) + count

    def halve(self) -> None:
        """Halve all counts, rounded down."""
        self._counts = {index: count // 2 for index, count in self._counts.items() if count > 1}

    def sketch(self) -> Sketch:
        if not self._counts:
            return Sketch()
        first, last = min(self._counts), max(self._counts)
        return Sketch(first, tuple(self._counts.get(index, 0) for index in range(first, last + 1)))


@record
class Counts:
    """Numbers that add up. Subclasses have fields of int, ``Counts`` or ``Sketch``."""

    def __add__(self, other: Self) -> Self:
        names: tuple[str, ...] = self.__match_args__  # the fields, without the cost of ``fields``
        values = _reader(names)
        return type(self)(*map(add, values(self), values(other)))


CountsT = TypeVar("CountsT", bound=Counts)


@cache
def _reader(names: tuple[str, ...]) -> Callable[[Counts], tuple[Any, ...]]:
    """Reads these fields, at least two."""
    return attrgetter(*names)


@record
class Judged(Counts):
    """Requests that were judged by one objective."""

    met: int = 0
    missed: int = 0

    @property
    def count(self) -> int:
        return self.met + self.missed

    @property
    def attainment(self) -> float | None:
        """The share that met it; None when none was judged."""
        return self.met / self.count if self.count else None


NOTHING_JUDGED = Judged()


@record
class ClassWindow(Counts):
    """Window of one class of requests. Fields that are not seconds are counts."""

    arrivals: int = 0
    """Requests whose prompt was prepared."""
    items: int = 0
    media_tokens: int = 0
    """Tokens of the embeddings of all items."""
    media_bytes: int = 0
    pixels: int = 0
    """Pixels of images and of videos' frames; samples of sounds."""
    prompt_tokens: int = 0
    """Tokens of prompts: with the positions of media for decoder-only families, text alone for cross-attention
    families.
    """
    output_tokens: int = 0
    cached_tokens: int = 0
    """Media tokens of finished requests whose embeddings were cached, so that nothing was encoded."""
    finished_media_tokens: int = 0
    """Media tokens of finished requests."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    impatient: int = 0
    """Requests that ended by their own time limit, or were cancelled, before an objective was missed: not judged."""

    ttft: Judged = NOTHING_JUDGED
    missed_prepare: int = 0
    """Missed TTFTs that the router's preparation is charged with. One miss may be charged to several stages."""
    missed_encode: int = 0
    missed_prefill: int = 0
    missed_uncharged: int = 0
    """Missed TTFTs that no stage is charged with, as the isolated latency is unknown."""
    tbt: Judged = NOTHING_JUDGED
    e2e: Judged = NOTHING_JUDGED
    not_judged: int = 0
    """Requests with a TTFT objective whose limit is unknown yet."""
    gaps: int = 0
    """Gaps between tokens of requests with a TBT objective."""
    gaps_over: int = 0

    ttft_s: Sketch = Sketch()
    tbt_s: Sketch = Sketch()
    e2e_s: Sketch = Sketch()

    def judged(self, metric: Metric) -> Judged:
        """Requests that were judged by an objective of this metric."""
        return {Metric.TTFT: self.ttft, Metric.TBT: self.tbt, Metric.E2E: self.e2e}[metric]

    def missed_by(self, stage: ChargedStage) -> int:
        """Missed TTFTs that this stage is charged with."""
        return {
            ChargedStage.PREPARE: self.missed_prepare,
            ChargedStage.ENCODE: self.missed_encode,
            ChargedStage.PREFILL: self.missed_prefill,
        }[stage]


class WindowBuilder:
    """Counts requests of one class and makes a ``ClassWindow`` of them."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self.judged: dict[Metric, list[int]] = {metric: [0, 0] for metric in Metric}
        """Missed and met; for reading."""
        self.seconds = {metric: SketchBuilder() for metric in Metric}

    def add(self, **counts: int) -> None:
        """Add to fields of ``ClassWindow`` that are plain counts."""
        for name, number in counts.items():
            self._counts[name] = self._counts.get(name, 0) + number

    def judge(self, metric: Metric, *, met: bool) -> None:
        self.judged[metric][met] += 1

    def window(self) -> ClassWindow:
        def judged(metric: Metric) -> Judged:
            missed, met = self.judged[metric]
            return Judged(met, missed)

        return ClassWindow(
            ttft=judged(Metric.TTFT),
            tbt=judged(Metric.TBT),
            e2e=judged(Metric.E2E),
            ttft_s=self.seconds[Metric.TTFT].sketch(),
            tbt_s=self.seconds[Metric.TBT].sketch(),
            e2e_s=self.seconds[Metric.E2E].sketch(),
            **self._counts,
        )


@record
class NamedClass:
    name: str
    """Name of one of ``domain.slo.CLASSES``."""
    window: ClassWindow


@record
class NamedInstance:
    """Requests that were judged by TTFT and that the instance had a part in. One sick instance can so be told from a
    pool that is too small. A miss that it is not charged with counts as met.
    """

    instance_id: str
    judged: Judged


@record
class Refusals(Counts):
    """Requests that were refused before they were prepared, so that their class is unknown."""

    overloaded: int = 0
    """More instances would have taken them."""
    other: int = 0


NO_REFUSALS = Refusals()


@record
class WindowReport:
    """Report of one router on one window."""

    epoch: int
    """Epoch of the router: a restarted one has another, and counts ``sequence`` from 1 again."""
    sequence: int
    duration_s: float
    age_s: float
    """Time from the end of the window to the sending of the report, seconds."""
    model: str
    """Empty until the router knows it."""
    classes: tuple[NamedClass, ...] = ()
    instances: tuple[NamedInstance, ...] = ()
    """Instances with the most misses, at most ``MAX_BLAMED``."""
    refusals: Refusals = NO_REFUSALS
    waiting: int = 0
    """Requests without a first token at the window's end."""
    waiting_media_tokens: int = 0
    """Media tokens of requests that are not encoded yet."""
    waiting_prompt_tokens: int = 0
    """Prompt tokens of requests that are encoded and have no first token."""
    forms: tuple[Form, ...] = ()
    """Requests that came or were answered in the window, at most ``MAX_FORMS`` forms."""


def add_to(sums: dict[str, CountsT], name: str, counts: CountsT) -> None:
    """Add counts to those under a name, if there are any."""
    before = sums.get(name)
    sums[name] = counts if before is None else before + counts


def summed(entries: Iterable[tuple[str, CountsT]]) -> dict[str, CountsT]:
    """The sums of counts by name."""
    sums: dict[str, CountsT] = {}
    for name, counts in entries:
        add_to(sums, name, counts)
    return sums


def merged(reports: Iterable[WindowReport]) -> dict[str, ClassWindow]:
    """The sum of the classes of several reports, by name."""
    return summed((window.name, window.window) for report in reports for window in report.classes)


def total(classes: Iterable[ClassWindow]) -> ClassWindow:
    """The sum over classes."""
    return sum(classes, start=ClassWindow())
