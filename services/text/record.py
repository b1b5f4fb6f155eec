"""Observability of requests, pulls and switches: metrics, and stages on the request's trace."""

from prometheus_client import Counter, Histogram

from triptych.domain.generation import Finished, Ready
from triptych.domain.instance import ModelInfo
from triptych.errors import TriptychError
from triptych.runtime import tracing
from triptych.runtime.metrics import Metrics
from triptych.transport.receiver import PullRecord

_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_STEP_S = (0.0005, *_TOKEN_S)
_PULL_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_NO_BACKEND = "none"
"""For a pull that failed before it had a connection."""


class Record(PullRecord):
    """Receives events about requests, pulls and tokens. This one does nothing with them."""

    def ready(self, ready: Ready) -> None: ...

    def finished(self, finished: Finished) -> None: ...

    def failed(self, error: TriptychError) -> None: ...

    def token_gap(self, seconds: float) -> None:
        """Time between two deliveries of tokens to one sequence."""

    def stepped(self, seconds: float) -> None:
        """The engine has made a step, which took so long."""

    def kv_segments(self, outcome: str, count: int = 1, nbytes: int = 0) -> None:
        """What became of segments of keys and values: ``sealed`` or ``cached`` (in the arena already) where they are transferred, ``kept`` where they are for others;
        ``pulled``, ``found`` (here already), ``lost`` or ``computed`` (not tried) where they arrive.
        """

    def prefix_segments(self, outcome: str, count: int = 1) -> None:
        """The same of the segments of a new prompt's prefix: ``pulled``, ``found``, ``lost`` or ``computed``."""

    def kv_transferred(self, segments: int, prefill_s: float, why: str) -> None:
        """An answer goes on elsewhere. ``prefill_s``: from its start to its first token. ``why``: ``asked`` for by the request,
        ``drain``, ``switch``, or ``held_up`` by items that go first.
        """


NO_RECORD = Record()


class SwitchRecord:
    """Receives what becomes of orders to switch. This one does nothing with it."""

    def switched(self, took_s: float) -> None:
        """How long the last switch took, in seconds."""

    def overtaken(self) -> None:
        """A newer order came before that."""

    def refused(self) -> None:
        """The order is older than the last one, or cannot be obeyed."""

    def failed(self) -> None:
        """Count a stage whose needs could not be loaded."""


NO_SWITCH_RECORD = SwitchRecord()


class MeteredSwitches(SwitchRecord):
    """Writes to metrics."""

    def __init__(self, metrics: Metrics) -> None:
        orders = metrics.counter("triptych_switches", "Orders to switch to another role", ("outcome",))
        outcomes = ("done", "overtaken", "refused", "failed")
        self._done, self._overtaken, self._refused, self._failed = map(orders.labels, outcomes)
        self._seconds = metrics.histogram(
            "triptych_switch_seconds", "From an order to switch until the other stages are closed"
        )

    def switched(self, took_s: float) -> None:
        self._done.inc()
        self._seconds.observe(took_s)

    def overtaken(self) -> None:
        self._overtaken.inc()

    def refused(self) -> None:
        self._refused.inc()

    def failed(self) -> None:
        self._failed.inc()


class TextRecord(Record):
    """Writes to metrics and trace."""

    def __init__(self, metrics: Metrics, model: ModelInfo, *, counts_tokens: bool = True) -> None:
        """Without ``counts_tokens`` the engine has metrics of tokens of its own."""
        counter, histogram = metrics.counter, metrics.histogram
        stages = histogram("triptych_text_stage_seconds", "Stages of requests in this instance", ("stage",))
        self._stages = {name: stages.labels(name) for name in ("queue", "pull", "prefill", "decode")}
        self._steps = histogram("triptych_step_seconds", "Steps of the engine", (), _STEP_S)
        self._failed = counter("triptych_text_failures", "Requests that failed", ("code",))
        items = counter("triptych_image_cache", "Items of requests, by whether their embedding was cached", ("hit",))
        self._hits, self._misses = items.labels("yes"), items.labels("no")
        self._transfer_seconds = histogram(
            "triptych_transfer_seconds", "One pull, including verification", ("backend",), _PULL_S
        )
        self._transfer_bytes = counter("triptych_transfer_bytes", "Bytes pulled", ("backend",))
        self._of_backend: dict[str, tuple[Histogram, Counter]] = {}
        """Looking up a labelled child takes longer than counting."""
        self._transfer_failures = counter("triptych_transfer_failures", "Pulls that failed", ("backend", "code"))
        self._kv_segments = counter(
            "triptych_kv_segments", "Segments of keys and values of requests that are transferred", ("outcome",)
        )
        self._kv_bytes = counter("triptych_kv_segment_bytes", "Bytes of these segments", ("outcome",))
        self._prefix_segments = counter(
            "triptych_kv_prefix_segments", "Segments of new prompts' prefixes that others hold", ("outcome",)
        )
        self._kv_transfers = counter("triptych_kv_transfers", "Answers transferred", ("with_segments", "why"))
        self._resets = metrics.common_counter(
            "triptych_transport_resets", "Resets of a transport", ("backend", "cause")
        )
        self._token: Histogram | None = None
        if counts_tokens:
            token = histogram("vllm:inter_token_latency_seconds", "Time between tokens", ("model_name",), _TOKEN_S)
            self._token = token.labels(model.model_id)

    def ready(self, ready: Ready) -> None:
        self._stages["queue"].observe(ready.queue_s)
        durations = {"queue": ready.queue_s}
        if ready.pulls:
            self._stages["pull"].observe(ready.pull_s)
            durations["pull"] = ready.pull_s
        hits = sum(pull.cached for pull in ready.pulls)
        self._hits.inc(hits)
        self._misses.inc(len(ready.pulls) - hits)
        if (span := tracing.recording()) is not None:
            nbytes = sum(pull.nbytes for pull in ready.pulls)
            backends = ",".join(sorted({pull.backend for pull in ready.pulls if pull.backend}))
            attributes: tracing.Attributes = {
                "triptych.items": len(ready.pulls),
                "triptych.bytes": nbytes,
                "triptych.backends": backends,
            }
            span.stages(durations, {"pull": attributes})

    def finished(self, finished: Finished) -> None:
        self._stages["prefill"].observe(finished.prefill_s)
        self._stages["decode"].observe(finished.decode_s)
        if (span := tracing.recording()) is not None:
            decode = {"triptych.tokens": finished.completion_tokens, "triptych.choice": finished.choice}
            span.stages({"prefill": finished.prefill_s, "decode": finished.decode_s}, {"decode": decode})

    def failed(self, error: TriptychError) -> None:
        self._failed.labels(error.code).inc()

    def pulled(self, backend: str, nbytes: int, duration_s: float) -> None:
        children = self._of_backend.get(backend)
        if children is None:
            children = self._transfer_seconds.labels(backend), self._transfer_bytes.labels(backend)
            self._of_backend[backend] = children
        children[0].observe(duration_s)
        children[1].inc(nbytes)

    def pull_failed(self, backend: str, error: TriptychError) -> None:
        self._transfer_failures.labels(backend or _NO_BACKEND, error.code).inc()

    def kv_segments(self, outcome: str, count: int = 1, nbytes: int = 0) -> None:
        self._kv_segments.labels(outcome).inc(count)
        self._kv_bytes.labels(outcome).inc(nbytes)

    def prefix_segments(self, outcome: str, count: int = 1) -> None:
        self._prefix_segments.labels(outcome).inc(count)

    def kv_transferred(self, segments: int, prefill_s: float, why: str) -> None:
        self._kv_transfers.labels("yes" if segments else "no", why).inc()
        self._stages["prefill"].observe(prefill_s)
        if (span := tracing.recording()) is not None:
            span.stages({"prefill": prefill_s})

    def transport_reset(self, backend: str, cause: str) -> None:
        """``OnReset`` of this process's transports."""
        self._resets.labels(backend, cause).inc()

    def stepped(self, seconds: float) -> None:
        self._steps.observe(seconds)

    def token_gap(self, seconds: float) -> None:
        if self._token is not None:
            self._token.observe(seconds)
