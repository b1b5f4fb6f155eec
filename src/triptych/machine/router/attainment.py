"""Measures a router's load and SLO attainment in windows (``domain.windows``).

A TTFT is judged as soon as it is decided: at the first token, or when the limit has passed without one, so that a burst
shows in the next report and not when its requests end.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from triptych.domain.limits import Positive, PositiveSeconds, check_limits
from triptych.domain.slo import ChargedStage, Isolated, Metric, Slo
from triptych.domain.timeline import ItemTimeline, Outcome, Timeline
from triptych.domain.windows import (
    MAX_BLAMED,
    ClassWindow,
    Judged,
    NamedClass,
    NamedInstance,
    Refusals,
    Sketch,
    SketchBuilder,
    WindowReport,
    add_to,
    merged,
)
from triptych.policy.attainment import charged

_MAX_INSTANCES = 4096
_TBT_SHARE = 100
"""A request meets its TBT objective if at most one gap in so many is longer: its 99th percentile is within it."""


@dataclass(frozen=True, slots=True)
class WindowLimits:
    report_window_s: PositiveSeconds = 1.0
    """Shortest window of a report on load and attainment."""
    attainment_window_s: PositiveSeconds = 60.0
    """Length of the sliding window of attainment in metrics and status."""
    isolated_samples: Positive = 20
    """Requests of a class after which its isolated latency is estimated, where no profile has it."""

    def __post_init__(self) -> None:
        check_limits(self, ("report_window_s", "attainment_window_s"))


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What is known of a request once its prompt is prepared."""

    class_name: str
    counts: ClassWindow
    """A window with nothing but its arrival."""
    isolated: Isolated | None = None
    """If a profile has it; else it is estimated from requests of its class."""


# --- events -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestPrepared:
    number: int
    shape: RequestShape
    waited_s: float
    """Since its arrival."""


@dataclass(frozen=True, slots=True)
class RequestDispatched:
    """All items are encoded, and a text instance gets the request."""

    number: int
    instance_id: str


@dataclass(frozen=True, slots=True)
class RequestAnswering:
    """Its first token has arrived."""

    number: int
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class RequestOver:
    number: int
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class RequestRefused:
    overloaded: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


AttainmentEvent = RequestPrepared | RequestDispatched | RequestAnswering | RequestOver | RequestRefused | Tick


@dataclass(frozen=True, slots=True)
class Report:
    """The only effect: a window has ended."""

    report: WindowReport


# --- state --------------------------------------------------------------------------------------------------------------


class Gaps:
    """The gaps between the tokens of one request. Fed directly, as tokens are no events of a machine."""

    __slots__ = ("_last_s", "count", "limit_s", "over", "seconds", "sketch")

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self.count = self.over = 0
        self.seconds = 0.0
        self.sketch = SketchBuilder()
        self._last_s: dict[int, float] = {}

    def tokens(self, choice: int, tokens: int, now_s: float) -> None:
        """Tokens of a choice have arrived. Those that arrive together share the time since the previous ones."""
        last_s = self._last_s.get(choice)
        self._last_s[choice] = now_s
        if last_s is None or not tokens:
            return
        gap_s = (now_s - last_s) / tokens
        self.count += tokens
        self.seconds += now_s - last_s
        self.sketch.add(gap_s, tokens)
        if self.limit_s is not None and gap_s > self.limit_s:
            self.over += tokens

    @property
    def met(self) -> bool:
        """Whether the 99th percentile is within the limit."""
        return self.over * _TBT_SHARE <= self.count


class _IsolatedEstimate:
    """The isolated latency of a class, estimated as the 10th percentile of what its requests took.

    The fastest requests are those that found the system idle. Old values lose half their weight after every ``_KEEP``
    requests, so that the estimate follows a new mix of prompts.
    """

    _SHARE = 0.1
    _KEEP = 1000
    _EVERY = 20

    def __init__(self) -> None:
        self.count = 0
        self._sketches = [SketchBuilder() for _ in range(4)]
        self._known: Isolated | None = None

    def add(self, *seconds: float | None) -> None:
        for sketch, value in zip(self._sketches, seconds, strict=False):
            if value is not None:
                sketch.add(value)
        self.count += 1
        if self.count % self._EVERY == 0:
            self._known = None
        if self.count % self._KEEP == 0:
            for sketch in self._sketches:
                sketch.halve()

    def isolated(self) -> Isolated:
        """Estimated anew after every ``_EVERY`` requests."""
        if self._known is None:
            self._known = Isolated(*(one.sketch().quantile_s(self._SHARE) or 0.0 for one in self._sketches))
        return self._known


@dataclass(slots=True)
class _Running:
    shape: RequestShape
    arrived_s: float
    gaps: Gaps
    isolated: Isolated | None
    ttft_limit_s: float | None
    dispatched_s: float | None = None
    instance_id: str = ""
    answering: bool = False
    judged: bool = False


def _judged(met: bool) -> Judged:
    return Judged(int(met), int(not met))


class AttainmentRecorder:
    def __init__(self, *, slo: Slo, limits: WindowLimits, epoch: int, now_s: float) -> None:
        self._slo = slo
        self._limits = limits
        self._epoch = epoch
        self._sequence = count(1)
        self._model = ""
        self._running: dict[int, _Running] = {}
        self._isolated: dict[str, _IsolatedEstimate] = {}
        self._last_isolated: dict[str, Isolated] = {}
        """Of the last request of each class."""
        self._opened_s = now_s
        self._classes: dict[str, ClassWindow] = {}
        self._instances: dict[str, list[int]] = {}
        self._refusals = Refusals()
        self._closed: deque[tuple[float, WindowReport]] = deque()

    # --- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: AttainmentEvent, now_s: float) -> list[Report]:
        """An event about a request that is unknown or over has no effect."""
        match event:
            case RequestPrepared(number, shape, waited_s):
                self._prepared(number, shape, now_s - waited_s)
            case RequestDispatched(number, instance_id):
                if (one := self._running.get(number)) is not None:
                    one.dispatched_s, one.instance_id = now_s, instance_id
            case RequestAnswering(number, timeline):
                if (one := self._running.get(number)) is not None:
                    self._answering(one, timeline)
            case RequestOver(number, timeline):
                if (one := self._running.pop(number, None)) is not None:
                    self._over(one, timeline)
                self._model = timeline.model
            case RequestRefused(overloaded):
                self._refusals += Refusals(int(overloaded), int(not overloaded))
            case Tick():
                pass
        return self._roll(now_s)

    def _prepared(self, number: int, shape: RequestShape, arrived_s: float) -> None:
        isolated = shape.isolated or self._estimate(shape.class_name)
        self._running[number] = _Running(
            shape,
            arrived_s,
            Gaps(self._limit_s(shape.class_name, Metric.TBT, isolated)),
            isolated,
            self._limit_s(shape.class_name, Metric.TTFT, isolated),
        )
        self._count(shape.class_name, shape.counts)
        if isolated is not None:
            self._last_isolated[shape.class_name] = isolated

    def _answering(self, one: _Running, timeline: Timeline) -> None:
        if one.answering:
            return
        one.answering = True
        self._count(one.shape.class_name, ClassWindow(ttft_s=Sketch.of(timeline.ttft_s)))
        encode_s = timeline.encode_s
        prefill_s = max(0.0, timeline.ttft_s - timeline.prepare_s - encode_s)
        if not one.judged:
            self._judge(one, timeline.ttft_s, timeline.prepare_s, encode_s, prefill_s, timeline.items)
        # The wait for the engine is no part of the isolated latency.
        self._sample(one).add(timeline.prepare_s, encode_s, max(0.0, prefill_s - timeline.queue_s))

    def _over(self, one: _Running, timeline: Timeline) -> None:
        gaps = one.gaps
        if timeline.outcome is Outcome.DONE:
            self._answering(one, timeline)
            self._judge_end(one, timeline)
        elif not one.judged:
            self._judge_unanswered(one, timeline)
        counts = ClassWindow(
            done=int(timeline.outcome is Outcome.DONE),
            failed=int(timeline.outcome is Outcome.FAILED),
            cancelled=int(timeline.outcome is Outcome.CANCELLED),
            output_tokens=timeline.completion_tokens,
            cached_tokens=sum(item.tokens for item in timeline.items if item.encoder_cached or item.text_cached),
            finished_media_tokens=sum(item.tokens for item in timeline.items),
            gaps=gaps.count,
            gaps_over=gaps.over,
            tbt_s=gaps.sketch.sketch(),
        )
        self._count(one.shape.class_name, counts)
        if gaps.count:
            self._sample(one).add(None, None, None, gaps.seconds / gaps.count)

    def _judge_end(self, one: _Running, timeline: Timeline) -> None:
        limit_s = self._limit_s(one.shape.class_name, Metric.E2E, one.isolated, timeline.completion_tokens)
        counts = ClassWindow(
            tbt=_judged(one.gaps.met) if one.gaps.count and one.gaps.limit_s is not None else Judged(),
            e2e=Judged() if limit_s is None else _judged(timeline.total_s <= limit_s),
            e2e_s=Sketch.of(timeline.total_s),
        )
        self._count(one.shape.class_name, counts)

    def _judge_unanswered(self, one: _Running, timeline: Timeline) -> None:
        """A request that ended without a first token. Its own time limit is not the system's fault."""
        gave_up = timeline.outcome is Outcome.CANCELLED or timeline.error == "deadline_exceeded"
        if not gave_up:
            return
        if one.ttft_limit_s is not None and timeline.total_s > one.ttft_limit_s:
            self._miss_unanswered(one, timeline.total_s)
        else:
            self._count(one.shape.class_name, ClassWindow(impatient=1))

    # --- judging -----------------------------------------------------------------------------------------------------

    def _judge(
        self,
        one: _Running,
        ttft_s: float,
        prepare_s: float,
        encode_s: float,
        prefill_s: float,
        items: Sequence[ItemTimeline] = (),
    ) -> None:
        one.judged = True
        name = one.shape.class_name
        if one.ttft_limit_s is None:
            if self._slo.objective(name, Metric.TTFT) is not None:
                self._count(name, ClassWindow(not_judged=1))
            return
        met = ttft_s <= one.ttft_limit_s
        stages: tuple[ChargedStage, ...] = ()
        if not met:
            stages = charged(
                one.ttft_limit_s, one.isolated, prepare_s=prepare_s, encode_s=encode_s, prefill_s=prefill_s
            )
        counts = ClassWindow(
            ttft=_judged(met),
            missed_prepare=int(ChargedStage.PREPARE in stages),
            missed_encode=int(ChargedStage.ENCODE in stages),
            missed_prefill=int(ChargedStage.PREFILL in stages),
            missed_uncharged=int(not met and not stages),
        )
        self._count(name, counts)
        if slowest := max(items, key=lambda item: item.queue_s + item.encode_s, default=None):
            self._blame(slowest.encoder, missed=ChargedStage.ENCODE in stages)
        if one.instance_id:
            self._blame(one.instance_id, missed=ChargedStage.PREFILL in stages)

    def _miss_unanswered(self, one: _Running, waited_s: float) -> None:
        """The limit has passed without a first token: charge the stages up to the one it is in."""
        encoded_s = waited_s if one.dispatched_s is None else one.dispatched_s - one.arrived_s
        has_items = bool(one.shape.counts.items)
        self._judge(one, waited_s, 0.0, encoded_s if has_items else 0.0, waited_s - encoded_s * has_items)

    def _blame(self, instance_id: str, *, missed: bool) -> None:
        if instance_id in self._instances or len(self._instances) < _MAX_INSTANCES:
            self._instances.setdefault(instance_id, [0, 0])[int(missed)] += 1

    def _limit_s(self, name: str, metric: Metric, isolated: Isolated | None, tokens: int = 1) -> float | None:
        objective = self._slo.objective(name, metric)
        limit_s = None if objective is None else objective.seconds(metric, isolated, tokens)
        return limit_s or None  # a factor of nothing is no limit

    def _sample(self, one: _Running) -> _IsolatedEstimate:
        return self._isolated.setdefault(one.shape.class_name, _IsolatedEstimate())

    def _estimate(self, name: str) -> Isolated | None:
        estimate = self._isolated.get(name)
        return estimate.isolated() if estimate and estimate.count >= self._limits.isolated_samples else None

    def _count(self, name: str, counts: ClassWindow) -> None:
        add_to(self._classes, name, counts)

    # --- windows -----------------------------------------------------------------------------------------------------

    def _roll(self, now_s: float) -> list[Report]:
        """Close the open window if it is long enough."""
        if now_s - self._opened_s < self._limits.report_window_s:
            return []
        for one in self._running.values():
            overdue = one.ttft_limit_s is not None and now_s - one.arrived_s > one.ttft_limit_s
            if overdue and not one.judged:
                self._miss_unanswered(one, now_s - one.arrived_s)
        waiting = [one for one in self._running.values() if not one.answering]
        worst = sorted(self._instances.items(), key=lambda entry: (-entry[1][1], -entry[1][0], entry[0]))
        report = WindowReport(
            epoch=self._epoch,
            sequence=next(self._sequence),
            duration_s=now_s - self._opened_s,
            age_s=0.0,
            model=self._model,
            classes=tuple(NamedClass(name, one) for name, one in sorted(self._classes.items())),
            instances=tuple(NamedInstance(name, Judged(*judged)) for name, judged in worst[:MAX_BLAMED]),
            refusals=self._refusals,
            waiting=len(waiting),
            waiting_media_tokens=sum(one.shape.counts.media_tokens for one in waiting if one.dispatched_s is None),
            waiting_prompt_tokens=sum(
                one.shape.counts.prompt_tokens for one in waiting if one.dispatched_s is not None
            ),
        )
        self._opened_s, self._classes, self._instances, self._refusals = now_s, {}, {}, Refusals()
        self._closed.append((now_s, report))
        while self._closed[0][0] <= now_s - self._limits.attainment_window_s:
            self._closed.popleft()
        return [Report(report)]

    # --- readers -----------------------------------------------------------------------------------------------------

    def gaps(self, number: int) -> Gaps | None:
        """Where to count the tokens of a running request."""
        one = self._running.get(number)
        return None if one is None else one.gaps

    @property
    def window(self) -> dict[str, ClassWindow]:
        """The sliding window of ``attainment_window_s``, by class. The part that is still open is missing."""
        return merged(report for _, report in self._closed)

    def limits_s(self) -> dict[tuple[str, Metric], float]:
        """The objectives in seconds, as the last request of each class had them; those that are unknown yet are missing."""
        found = {
            (name, metric): self._limit_s(name, metric, self._last_isolated.get(name) or self._estimate(name))
            for name in self._isolated.keys() | self._last_isolated.keys()
            for metric in (Metric.TTFT, Metric.TBT)
        }
        return {key: limit_s for key, limit_s in found.items() if limit_s is not None}

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        if self._limits.attainment_window_s and len(self._closed) > 1 + (
            self._limits.attainment_window_s / self._limits.report_window_s
        ):
            raise AssertionError("more closed windows are kept than fit into the sliding window")
        if any(one.answering and not one.judged for one in self._running.values()):
            raise AssertionError("a request has a first token, and its TTFT is not judged")
