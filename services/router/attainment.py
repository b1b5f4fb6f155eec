"""Load and SLO attainment of this router: feeds their machine from running requests, and shows them as metrics."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.core import Metric as Family

from triptych.domain.chat import ChatRequest
from triptych.domain.item_plan import ItemPlan
from triptych.domain.mix import Form
from triptych.domain.record import record
from triptych.domain.slo import ChargedStage, Expected, Isolated, Metric, Slo, modality_of
from triptych.domain.stage import Stage
from triptych.domain.tenant import NOBODY, Tenant
from triptych.domain.timeline import Outcome, Timeline
from triptych.domain.windows import ClassWindow, Judged, Sketch, WindowReport, summed
from triptych.errors import Overloaded, TriptychError
from triptych.machine.router.attainment import AttainmentRecorder, Gaps, WindowLimits
from triptych.machine.router.request_events import AttemptKind, Generate
from triptych.machine.router.shared_events import FirstToken
from triptych.machine.router.wait_predictor import ANSWER_WEIGHT, WaitPredictor
from triptych.policy.attainment import arrival, form_of
from triptych.policy.fairness import Fairness, Share, by_weight
from triptych.ports import Clock
from triptych.runtime.metrics import gauge, total

from .request_task import Listeners, RequestTask

_LABELS = ("model_name", "metric", "modality")
_QUANTILES = {"0.5": 0.5, "0.99": 0.99}


@record
class Arrival:
    """Traits of a prepared request."""

    class_name: str
    counts: ClassWindow
    """A window with nothing but it."""
    form: Form
    profiled: Isolated | None
    """Latencies with the system to itself; None where no profile has them."""


class Attainment:
    """Owner of the router's ``AttainmentRecorder`` and ``WaitPredictor``, which are told of the same steps."""

    def __init__(
        self,
        *,
        slo: Slo,
        limits: WindowLimits,
        epoch: int,
        clock: Clock,
        isolated: Callable[[ClassWindow], Isolated | None] | None = None,
        fairness: Fairness | None = by_weight,
        keeps_windows: bool = True,
    ) -> None:
        """``isolated`` gives the latencies of a request with the system to itself, from a window with nothing but it; None
        where no profile has them. ``fairness`` is how tenants share the service.
        Without ``keeps_windows`` only that is kept by which requests are ordered and refused.
        """
        self._isolated = isolated
        self._clock = clock
        self._keeps_windows = keeps_windows
        self._recorder = AttainmentRecorder(slo=slo, limits=limits, epoch=epoch, now_s=clock())
        self._waits = WaitPredictor(fairness)
        self.listeners: Listeners = {Generate: self._dispatched, FirstToken: self._answering}
        """Listeners to the events of a chat, by their types."""

    def refused(self, error: TriptychError) -> None:
        self._recorder.refused(overloaded=isinstance(error, Overloaded), now_s=self._clock())

    def see(self, tenant: Tenant) -> bool:
        """See ``WaitPredictor.see``."""
        return self._waits.see(tenant, self._clock())

    def least_s(self, priority: int, *, media: bool, tenant: Tenant = NOBODY) -> tuple[float, float]:
        """How long a new request of unknown class would wait, and then take at least."""
        wait_s = self._waits.wait_s(priority, self._clock(), media=media, tenant=tenant)
        return wait_s, self._waits.least_answer_s

    def arrival(self, items: Sequence[ItemPlan], prompt_tokens: int) -> Arrival:
        """Traits of a prepared request."""
        class_name, counts = arrival(items, prompt_tokens)
        form = form_of([item.info for item in items], prompt_tokens)
        return Arrival(class_name, counts, form, None if self._isolated is None else self._isolated(counts))

    def predicted_s(self, arrived: Arrival, priority: int, tenant: Tenant = NOBODY) -> tuple[float, float]:
        """How long a prepared request would wait, and then take to its last token; both 0 if it would not wait."""
        wait_s = self._waits.wait_s(priority, self._clock(), media=arrived.counts.items > 0, tenant=tenant)
        if not wait_s:
            return 0.0, 0.0
        if (profiled := arrived.profiled) is not None:
            begins_s = profiled.encode_s + profiled.prefill_s
        else:  # what is estimated of encoding contains waits, which are predicted already
            estimated = self._recorder.estimated(arrived.class_name)
            begins_s = 0.0 if estimated is None else estimated.prefill_s
        return wait_s, begins_s + self._waits.answer_s(arrived.class_name)

    def takes_s(self, request: ChatRequest) -> float:
        """How long the slowest stage takes for a request like this at its tenant's share; 0 while that is not known."""
        return self._waits.takes_s(self._clock(), media=bool(request.media), tenant=request.tenant or NOBODY)

    def prepared(
        self,
        number: int,
        arrived: Arrival,
        waited_s: float,
        priority: int = 0,
        *,
        begun: bool = False,
        answer_tokens: int = 0,
        tenant: Tenant = NOBODY,
    ) -> tuple[Gaps, Expected]:
        """Count an arrival, of which ``answer_tokens`` are expected. Returns where the gaps between its tokens are counted, and what
        is expected of it. Of an answer that another router has begun only the gaps are judged.
        """
        now_s, class_name, counts = self._clock(), arrived.class_name, arrived.counts
        self._waits.prepared(
            number,
            class_name,
            priority=priority,
            media_work=self._encode_work(counts),
            prompt_tokens=counts.prompt_tokens,
            answer_tokens=answer_tokens,
            tenant=tenant,
            now_s=now_s,
        )
        gaps = self._recorder.prepared(
            number,
            class_name,
            counts,
            arrived.profiled,
            waited_s=waited_s,
            now_s=now_s,
            begun=begun,
            form=arrived.form,
        )
        return gaps, self._recorder.expected(number)

    def _encode_work(self, counts: ClassWindow) -> int:
        """Of all items, in microseconds by a profile, else in tokens."""
        if not counts.items or self._isolated is None:
            return counts.media_tokens
        item = ClassWindow(
            arrivals=1,
            items=1,
            media_tokens=round(counts.media_tokens / counts.items),
            media_bytes=round(counts.media_bytes / counts.items),
            pixels=round(counts.pixels / counts.items),
        )
        alone = self._isolated(item)
        return counts.media_tokens if alone is None else max(1, round(1e6 * counts.items * alone.encode_s))

    def share(self, number: int, stage: Stage) -> Share:
        """The share of a request at a stage that it has come to (``WaitPredictor.share``)."""
        if stage is Stage.PREFILL:
            self._waits.encoded(number, self._clock())
        return self._waits.share(number, stage)

    def _dispatched(self, task: RequestTask, effect: Generate) -> None:
        if effect.kind is not AttemptKind.EARLY_PREFILL:
            self._recorder.dispatched(task.number, task.machine.text_instance, self._clock())

    def _answering(self, task: RequestTask, _: FirstToken) -> None:
        now_s = self._clock()
        self._waits.answering(task.number, now_s)
        if self._keeps_windows and (beginning := task.machine.beginning()) is not None:
            self._recorder.answering(task.number, beginning, now_s)

    def ended(self, number: int, timeline: Timeline) -> None:
        now_s, is_done = self._clock(), timeline.outcome is Outcome.DONE
        answer_s = timeline.total_s - timeline.ttft_s if is_done and not timeline.continued_tokens else None
        self._waits.ended(number, answer_s, now_s, served=self._served(timeline) if is_done else None)
        if self._keeps_windows:
            self._recorder.ended(number, timeline, now_s)
        else:
            self._recorder.forget(number)

    def _served(self, timeline: Timeline) -> Mapping[Stage, int]:
        """What an answered request took: embeddings that an encoder had already took nothing."""
        answer_tokens = timeline.completion_tokens - timeline.continued_tokens
        served = {Stage.PREFILL: timeline.prompt_tokens + ANSWER_WEIGHT * answer_tokens}
        if timeline.items and all(item.encoder_cached for item in timeline.items):
            served[Stage.ENCODE] = 0
        return served

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        self._recorder.validate()
        self._waits.validate()

    def reports(self, after: int = 0) -> list[WindowReport]:
        """See ``AttainmentRecorder.reports``."""
        return self._recorder.reports(after, self._clock())

    def metrics(self, model: str) -> Iterable[Family]:
        """Gauges over the sliding window; a share without requests is missing."""
        self._recorder.roll(self._clock())
        modalities = summed((modality_of(name), window) for name, window in self._recorder.window.items())
        yield from _shown(modalities, model)
        yield gauge(
            "triptych_slo_limit_seconds",
            "SLOs in seconds by request class; one that is a factor of an unknown latency is missing",
            {(model, metric.value, name): limit_s for (name, metric), limit_s in self._recorder.limits_s().items()},
            ("model_name", "metric", "class"),
        )
        yield total(
            "triptych_tenant_work",
            "Work served to each tenant: tokens of prompts and twice those of answers, or at encoders microseconds or tokens",
            {(model, tenant, stage.value): work for (tenant, stage), work in self._waits.served.items()},
            ("model_name", "tenant", "stage"),
        )
        yield total(
            "triptych_slo_judged",
            "Requests judged by the SLO",
            _verdicts(model, self._recorder.judged),
            (*_LABELS, "verdict"),
        )


def _verdicts(model: str, judged: Mapping[tuple[str, Metric], Judged]) -> dict[tuple[str, ...], float]:
    return {
        (model, metric.value, modality, verdict): number
        for (modality, metric), requests in judged.items()
        for verdict, number in (("met", requests.met), ("missed", requests.missed))
        if requests.count
    }


def _shown(windows: dict[str, ClassWindow], model: str) -> Iterable[Family]:
    judged = {(modality, metric): window.judged(metric) for modality, window in windows.items() for metric in Metric}
    yield gauge(
        "triptych_slo_attainment",
        "Share of requests that met the SLO, over the sliding window",
        {(model, m.value, name): verdict.met / verdict.count for (name, m), verdict in judged.items() if verdict.count},
        _LABELS,
    )
    yield gauge(
        "triptych_slo_requests",
        "Requests judged by the SLO in the sliding window",
        _verdicts(model, judged),
        (*_LABELS, "verdict"),
    )
    yield gauge(
        "triptych_slo_stage_attainment",
        "Share of requests without a missed TTFT that this stage is charged with, over the sliding window",
        {
            (model, stage.value, name): 1 - window.missed_by(stage) / window.ttft.count
            for name, window in windows.items()
            for stage in ChargedStage
            if window.ttft.count
        },
        ("model_name", "stage", "modality"),
    )
    yield gauge(
        "triptych_latency_seconds",
        "Quantiles over the sliding window, within 9 %",
        {
            (model, metric.value, name, shown): seconds
            for name, window in windows.items()
            for metric, sketch in _sketches(window).items()
            for shown, share in _QUANTILES.items()
            if (seconds := sketch.quantile_s(share)) is not None
        },
        (*_LABELS, "quantile"),
    )


def _sketches(window: ClassWindow) -> dict[Metric, Sketch]:
    return {Metric.TTFT: window.ttft_s, Metric.TBT: window.tbt_s, Metric.E2E: window.e2e_s}
