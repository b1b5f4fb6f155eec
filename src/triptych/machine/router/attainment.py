"""Measures a router's load and SLO attainment in windows (``domain.windows``).

A TTFT is judged as soon as it is decided: at the first token, or when the limit has passed without one, so that a burst
shows in the next report and not when its requests end.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from triptych.domain.limits import Positive, PositiveSeconds, check_limits
from triptych.domain.mix import Form, Mix
from triptych.domain.slo import (
    CLASSES,
    NOTHING_EXPECTED,
    ChargedStage,
    Expected,
    Isolated,
    Metric,
    Slo,
    modality_of,
)
from triptych.domain.timeline import Beginning, Outcome, Timeline
from triptych.domain.windows import (
    ATTAINMENT_WINDOW_S,
    MAX_BLAMED,
    NO_REFUSALS,
    ClassWindow,
    Judged,
    NamedClass,
    NamedInstance,
    Refusals,
    SketchBuilder,
    WindowBuilder,
    WindowReport,
    merged,
)
from triptych.policy.attainment import charged

KEPT_REPORTS = 60
_MAX_INSTANCES = 4096
_MAX_ENDED = 1024
"""Requests that come or end in one window and are counted in the mix."""
_TBT_SHARE = 100
"""A request meets its TBT objective if at most one gap in so many is longer: its 99th percentile is within it."""


@dataclass(frozen=True, slots=True)
class WindowLimits:
    report_window_s: PositiveSeconds = 1.0
    """Shortest window of a report on load and attainment."""
    attainment_window_s: PositiveSeconds = ATTAINMENT_WINDOW_S
    """Length of the sliding window of attainment in metrics and status."""
    isolated_samples: Positive = 20
    """Requests of a class after which its isolated latency is estimated, where no profile has it."""

    def __post_init__(self) -> None:
        check_limits(self, ("report_window_s", "attainment_window_s"))


class Gaps:
    """The gaps between the tokens of one request. Fed directly, as tokens are no events of a machine."""

    __slots__ = ("_last_s", "count", "limit_s", "over_limit", "seconds", "sketch")

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self.count = self.over_limit = 0
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
            self.over_limit += tokens

    @property
    def met(self) -> bool:
        """Whether the 99th percentile is within the limit."""
        return self.over_limit * _TBT_SHARE <= self.count


class _IsolatedEstimate:
    """The isolated latency of a class, estimated as the 10th percentile of what its requests took.

    The fastest requests are those that found the system idle. Old values lose half their weight after every ``_KEEP``
    requests, so that the estimate follows a new mix of prompts. The largest requests of a class have four times the media of
    the smallest. So encoding is estimated per media token as well, and the longer time counts.
    """

    _SHARE = 0.1
    _KEEP = 1000
    _EVERY = 20
    _RATE_TOKENS = 1000
    """Encoding is kept as the time of so many media tokens."""

    def __init__(self) -> None:
        self.count = 0
        self._sketches = [SketchBuilder() for _ in range(4)]
        self._encode_rate = SketchBuilder()
        self._known: Isolated | None = None
        self._known_rate_s = 0.0

    def add(self, *seconds: float | None) -> None:
        for sketch, value in zip(self._sketches, seconds, strict=False):
            if value is not None:
                sketch.add(value)
        self.count += 1
        if self.count % self._EVERY == 0:
            self._known = None
        if self.count % self._KEEP == 0:
            for sketch in (*self._sketches, self._encode_rate):
                sketch.halve()

    def encoded(self, media_tokens: int, encode_s: float) -> None:
        if media_tokens:
            self._encode_rate.add(encode_s * self._RATE_TOKENS / media_tokens)

    def isolated(self, media_tokens: int) -> Isolated:
        """Of a request with so many media tokens. Estimated anew after every ``_EVERY`` requests."""
        if self._known is None:
            self._known = Isolated(*(sketch.sketch().quantile_s(self._SHARE) or 0.0 for sketch in self._sketches))
            self._known_rate_s = self._encode_rate.sketch().quantile_s(self._SHARE) or 0.0
        by_rate_s = self._known_rate_s * media_tokens / self._RATE_TOKENS
        return self._known if by_rate_s <= self._known.encode_s else replace(self._known, encode_s=by_rate_s)


@dataclass(slots=True)
class _Running:
    class_name: str
    counts: ClassWindow
    arrived_s: float
    gaps: Gaps
    isolated: Isolated | None
    ttft_limit_s: float | None
    dispatched_s: float | None = None
    instance_id: str = ""
    answering: bool = False
    judged: bool = False
    begun: bool = False
    """By another router."""
    form: Form | None = None


@dataclass(slots=True)
class _Closed:
    """A window that has ended. Its report is made when somebody reads it."""

    at_s: float
    sequence: int
    _new_report: Callable[..., WindowReport]
    """Takes classes, instances and forms."""
    _classes: Mapping[str, WindowBuilder]
    _instances: Mapping[str, Sequence[int]]
    _forms: Iterable[Form]
    _report: WindowReport | None = None

    def report(self) -> WindowReport:
        if self._report is None:
            classes = [NamedClass(name, window.window()) for name, window in sorted(self._classes.items())]
            worst = sorted(self._instances.items(), key=lambda entry: (-entry[1][1], -entry[1][0], entry[0]))
            instances = [NamedInstance(name, Judged(*judged)) for name, judged in worst[:MAX_BLAMED]]
            forms = Mix.of(self._forms).forms
            self._report = self._new_report(classes=tuple(classes), instances=tuple(instances), forms=forms)
            self._classes, self._instances, self._forms = {}, {}, ()
        return self._report


class AttainmentRecorder:
    """Owner of a router's windows of load and SLO attainment.

    It is told of each step of a request; what is said of a request that is unknown or over has no effect.
    """

    def __init__(self, *, slo: Slo, limits: WindowLimits, epoch: int, now_s: float) -> None:
        self._objectives = {
            (name, metric): found
            for name in CLASSES
            for metric in Metric
            if (found := slo.objective(name, metric)) is not None
        }
        self._limits = limits
        self._epoch = epoch
        self._sequence = count(1)
        self._model = ""
        self._running: dict[int, _Running] = {}
        self._isolated: defaultdict[str, _IsolatedEstimate] = defaultdict(_IsolatedEstimate)
        self._last_isolated: dict[str, Isolated] = {}
        """Of the last request of each class."""
        self._opened_s = now_s
        self._classes: defaultdict[str, WindowBuilder] = defaultdict(WindowBuilder)
        """The open windows."""
        self._instances: dict[str, list[int]] = {}
        self._refusals = NO_REFUSALS
        self._forms: deque[Form] = deque(maxlen=_MAX_ENDED)
        self._judged: defaultdict[tuple[str, Metric], list[int]] = defaultdict(lambda: [0, 0])
        """Requests judged in windows that have ended, missed and met, by modality."""
        self._closed: deque[_Closed] = deque()

    # --- steps of a request ------------------------------------------------------------------------------------------

    def prepared(
        self,
        number: int,
        class_name: str,
        counts: ClassWindow,
        isolated: Isolated | None,
        *,
        waited_s: float,
        now_s: float,
        begun: bool = False,
        form: Form | None = None,
    ) -> Gaps:
        """A prompt is prepared, ``waited_s`` after the request's arrival. Returns where to count the gaps between tokens.

        ``counts`` is a window with nothing but its arrival. ``isolated`` is None if no profile has it; then it is
        estimated from requests of the class. Of an answer that another router has ``begun``, this one knows neither the
        first token nor the whole time, so only gaps are judged. ``form``: how it counts in the mix.
        """
        isolated = isolated or self.estimated(class_name, counts.media_tokens)
        request = self._running[number] = _Running(
            class_name,
            counts,
            now_s - waited_s,
            Gaps(self._limit_s(class_name, Metric.TBT, isolated)),
            isolated,
            None if begun else self._limit_s(class_name, Metric.TTFT, isolated),
            begun=begun,
            answering=begun,
            judged=begun,
            form=form,
        )
        self._classes[class_name].add(
            arrivals=counts.arrivals,
            items=counts.items,
            media_tokens=counts.media_tokens,
            media_bytes=counts.media_bytes,
            pixels=counts.pixels,
            prompt_tokens=counts.prompt_tokens,
        )
        if form is not None and not begun:
            self._forms.append(form)
        if isolated is not None:
            self._last_isolated[class_name] = isolated
        self.roll(now_s)
        return request.gaps

    def expected(self, number: int) -> Expected:
        """Expectations of a prepared request, by which it is judged and ordered; nothing of an unknown one."""
        request = self._running.get(number)
        return NOTHING_EXPECTED if request is None else Expected(request.ttft_limit_s, request.isolated)

    def dispatched(self, number: int, instance_id: str, now_s: float) -> None:
        """All items are encoded, and a text instance gets the request."""
        if (request := self._running.get(number)) is not None:
            request.dispatched_s, request.instance_id = now_s, instance_id
        self.roll(now_s)

    def answering(self, number: int, beginning: Beginning, now_s: float) -> None:
        """Note that its first token has arrived."""
        if (request := self._running.get(number)) is not None and not request.answering:
            self._answering(request, beginning)
        self.roll(now_s)

    def ended(self, number: int, timeline: Timeline, now_s: float) -> None:
        if (request := self._running.pop(number, None)) is not None:
            self._over(request, timeline)
            if request.form is not None and timeline.outcome is Outcome.DONE:
                self._forms.append(request.form.after_answer(timeline.completion_tokens))
        self._model = timeline.model
        self.roll(now_s)

    def forget(self, number: int) -> None:
        """A request is over, and is not counted."""
        self._running.pop(number, None)

    def refused(self, *, overloaded: bool, now_s: float) -> None:
        """Before anything was encoded or sent to a text instance."""
        self._refusals += Refusals(int(overloaded), int(not overloaded))
        self.roll(now_s)

    def _answering(self, request: _Running, beginning: Beginning) -> None:
        request.answering = True
        ttft_s, prepare_s, encode_s = beginning.ttft_s, beginning.prepare_s, beginning.encode_s
        self._classes[request.class_name].seconds[Metric.TTFT].add(ttft_s)
        prefill_s = max(0.0, ttft_s - prepare_s - encode_s)
        if not request.judged:
            self._judge(request, ttft_s, prepare_s, encode_s, prefill_s, beginning.slowest_encoder)
        # The wait for the engine is no part of the isolated latency.
        sample = self._isolated[request.class_name]
        sample.add(prepare_s, encode_s, max(0.0, prefill_s - beginning.queue_s))
        sample.encoded(request.counts.media_tokens, encode_s)

    def _over(self, request: _Running, timeline: Timeline) -> None:
        gaps, outcome = request.gaps, timeline.outcome
        if outcome is Outcome.DONE:
            if not request.answering:
                self._answering(request, timeline.beginning)
            self._judge_end(request, timeline)
        elif not request.judged:
            self._judge_unanswered(request, timeline)
        window = self._classes[request.class_name]
        window.add(
            done=int(outcome is Outcome.DONE),
            failed=int(outcome is Outcome.FAILED),
            cancelled=int(outcome is Outcome.CANCELLED),
            output_tokens=timeline.completion_tokens - timeline.continued_tokens,
            cached_tokens=sum([item.tokens for item in timeline.items if item.encoder_cached or item.text_cached]),
            finished_media_tokens=sum([item.tokens for item in timeline.items]),
            gaps=gaps.count,
            gaps_over=gaps.over_limit,
        )
        if gaps.count:
            window.seconds[Metric.TBT].add_all(gaps.sketch)
            self._isolated[request.class_name].add(None, None, None, gaps.seconds / gaps.count)

    def _judge_end(self, request: _Running, timeline: Timeline) -> None:
        window = self._classes[request.class_name]
        if request.gaps.count and request.gaps.limit_s is not None:
            window.judge(Metric.TBT, met=request.gaps.met)
        if request.begun:
            return
        window.seconds[Metric.E2E].add(timeline.total_s)
        limit_s = self._limit_s(request.class_name, Metric.E2E, request.isolated, timeline.completion_tokens)
        if limit_s is not None:
            window.judge(Metric.E2E, met=timeline.total_s <= limit_s)

    def _judge_unanswered(self, request: _Running, timeline: Timeline) -> None:
        """A request that ended without a first token. Its own time limit is not the system's fault."""
        gave_up = timeline.outcome is Outcome.CANCELLED or timeline.error == "deadline_exceeded"
        if not gave_up:
            return
        if request.ttft_limit_s is not None and timeline.total_s > request.ttft_limit_s:
            self._miss_unanswered(request, timeline.total_s)
        else:
            self._classes[request.class_name].add(impatient=1)

    # --- judging -----------------------------------------------------------------------------------------------------

    def _judge(
        self,
        request: _Running,
        ttft_s: float,
        prepare_s: float,
        encode_s: float,
        prefill_s: float,
        slowest_encoder: str = "",
    ) -> None:
        request.judged = True
        window = self._classes[request.class_name]
        if request.ttft_limit_s is None:
            window.add(not_judged=int((request.class_name, Metric.TTFT) in self._objectives))
            return
        met = ttft_s <= request.ttft_limit_s
        window.judge(Metric.TTFT, met=met)
        stages: tuple[ChargedStage, ...] = ()
        if not met:
            stages = charged(
                request.ttft_limit_s, request.isolated, prepare_s=prepare_s, encode_s=encode_s, prefill_s=prefill_s
            )
            window.add(
                missed_prepare=int(ChargedStage.PREPARE in stages),
                missed_encode=int(ChargedStage.ENCODE in stages),
                missed_prefill=int(ChargedStage.PREFILL in stages),
                missed_uncharged=int(not stages),
            )
        if slowest_encoder:
            self._blame(slowest_encoder, missed=ChargedStage.ENCODE in stages)
        if request.instance_id:
            self._blame(request.instance_id, missed=ChargedStage.PREFILL in stages)

    def _miss_unanswered(self, request: _Running, waited_s: float) -> None:
        """The limit has passed without a first token: charge the stages up to the one it is in."""
        encoded_s = waited_s if request.dispatched_s is None else request.dispatched_s - request.arrived_s
        has_items = bool(request.counts.items)
        self._judge(request, waited_s, 0.0, encoded_s if has_items else 0.0, waited_s - encoded_s * has_items)

    def _blame(self, instance_id: str, *, missed: bool) -> None:
        if instance_id in self._instances or len(self._instances) < _MAX_INSTANCES:
            self._instances.setdefault(instance_id, [0, 0])[int(missed)] += 1

    def _limit_s(self, name: str, metric: Metric, isolated: Isolated | None, tokens: int = 1) -> float | None:
        objective = self._objectives.get((name, metric))
        limit_s = None if objective is None else objective.seconds(metric, isolated, tokens)
        return limit_s or None  # a factor of nothing is no limit

    def estimated(self, name: str, media_tokens: int = 0) -> Isolated | None:
        """The isolated latency of a request of a class, in seconds, from earlier requests; None while they are too few.

        Without ``media_tokens`` it is that of the smallest.
        """
        estimate = self._isolated.get(name)
        if estimate is None or estimate.count < self._limits.isolated_samples:
            return None
        return estimate.isolated(media_tokens)

    # --- windows -----------------------------------------------------------------------------------------------------

    def roll(self, now_s: float) -> None:
        """Close the open window if it is long enough."""
        if now_s - self._opened_s < self._limits.report_window_s:
            return
        for request in self._running.values():
            overdue = request.ttft_limit_s is not None and now_s - request.arrived_s > request.ttft_limit_s
            if overdue and not request.judged:
                self._miss_unanswered(request, now_s - request.arrived_s)
        waiting = media_tokens = prompt_tokens = 0
        for request in self._running.values():
            if not request.answering:
                waiting += 1
                if request.dispatched_s is None:
                    media_tokens += request.counts.media_tokens
                else:
                    prompt_tokens += request.counts.prompt_tokens
        for name, window in self._classes.items():
            modality = modality_of(name)
            for metric, (missed, met) in window.judged.items():
                judged = self._judged[modality, metric]
                judged[0] += missed
                judged[1] += met
        sequence = next(self._sequence)
        new_report = partial(
            WindowReport,
            epoch=self._epoch,
            sequence=sequence,
            duration_s=now_s - self._opened_s,
            age_s=0.0,
            model=self._model,
            refusals=self._refusals,
            waiting=waiting,
            waiting_media_tokens=media_tokens,
            waiting_prompt_tokens=prompt_tokens,
        )
        self._closed.append(_Closed(now_s, sequence, new_report, self._classes, self._instances, self._forms))
        self._forms = deque(maxlen=_MAX_ENDED)
        self._opened_s, self._instances, self._refusals = now_s, {}, NO_REFUSALS
        self._classes = defaultdict(WindowBuilder)
        while len(self._closed) > KEPT_REPORTS and self._closed[0].at_s <= self._slides_from_s:
            self._closed.popleft()

    # --- readers -----------------------------------------------------------------------------------------------------

    def reports(self, after: int, now_s: float) -> list[WindowReport]:
        """The last ``KEPT_REPORTS`` windows with a sequence number above ``after``, oldest first. They say how old they are."""
        self.roll(now_s)
        recent = [closed for closed in list(self._closed)[-KEPT_REPORTS:] if closed.sequence > after]
        return [replace(closed.report(), age_s=now_s - closed.at_s) for closed in recent]

    @property
    def judged(self) -> dict[tuple[str, Metric], Judged]:
        """Requests judged since the start, by modality; those of the open window are missing."""
        return {key: Judged(met, missed) for key, (missed, met) in self._judged.items()}

    @property
    def window(self) -> dict[str, ClassWindow]:
        """The sliding window of ``attainment_window_s``, by class. The part that is still open is missing."""
        return merged(closed.report() for closed in self._closed if closed.at_s > self._slides_from_s)

    @property
    def _slides_from_s(self) -> float:
        """Start of the sliding window that ends with the last report."""
        return self._opened_s - self._limits.attainment_window_s

    def limits_s(self) -> dict[tuple[str, Metric], float]:
        """The objectives in seconds, as the last request of each class had them; those that are unknown yet are missing."""
        found = {
            (name, metric): self._limit_s(name, metric, self._last_isolated.get(name) or self.estimated(name))
            for name in self._isolated.keys() | self._last_isolated.keys()
            for metric in (Metric.TTFT, Metric.TBT)
        }
        return {key: limit_s for key, limit_s in found.items() if limit_s is not None}

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        if len(self._closed) > max(KEPT_REPORTS, 1 + self._limits.attainment_window_s / self._limits.report_window_s):
            raise AssertionError("more closed windows are kept than fit into the sliding window")
        if any(request.answering and not request.judged for request in self._running.values()):
            raise AssertionError("a request has a first token, and its TTFT is not judged")
