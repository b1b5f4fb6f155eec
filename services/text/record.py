"""What a text instance tells of its requests and pulls: metrics, and the stages on the trace of each request."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import Metric

from triptych.domain.generation import Finished, Ready
from triptych.domain.instance import ModelInfo, TextLoad
from triptych.errors import TriptychError
from triptych.runtime import tracing
from triptych.runtime.metrics import Metrics, gauge, total

if TYPE_CHECKING:
    from .intake import Intake

_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_PULL_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_NO_BACKEND = "none"
"""Of a pull that failed before there was a link to its holder."""


class Record(Protocol):
    """Told by the service and its parts of what happens to requests, pulls and tokens."""

    def ready(self, ready: Ready) -> None: ...

    def finished(self, finished: Finished) -> None: ...

    def failed(self, error: TriptychError) -> None: ...

    def pulled(self, backend: str, nbytes: int, duration_s: float) -> None: ...

    def pull_failed(self, backend: str, error: TriptychError) -> None: ...

    def token_gap(self, seconds: float) -> None:
        """Between two deliveries of tokens to one sequence."""
        ...


class NoRecord:
    """``Record`` for those who do not listen."""

    def ready(self, ready: Ready) -> None:
        del ready

    def finished(self, finished: Finished) -> None:
        del finished

    def failed(self, error: TriptychError) -> None:
        del error

    def pulled(self, backend: str, nbytes: int, duration_s: float) -> None:
        del backend, nbytes, duration_s

    def pull_failed(self, backend: str, error: TriptychError) -> None:
        del backend, error

    def token_gap(self, seconds: float) -> None:
        del seconds


class TextRecord:
    """``Record`` into a process's metrics."""

    def __init__(self, metrics: Metrics, model: ModelInfo) -> None:
        counter, histogram = metrics.counter, metrics.histogram
        stages = histogram("triptych_text_stage_seconds", "Stages of requests in this instance", ("stage",))
        self._stages = {name: stages.labels(name) for name in ("queue", "pull", "prefill", "decode")}
        self._failed = counter("triptych_text_failures", "Requests that got an error", ("code",))
        items = counter("triptych_image_cache", "Items that requests needed, by whether they were here", ("hit",))
        self._hits, self._misses = items.labels("yes"), items.labels("no")
        self._transfer_seconds = histogram(
            "triptych_transfer_seconds", "One pull, checks included", ("backend",), _PULL_S
        )
        self._transfer_bytes = counter("triptych_transfer_bytes", "Bytes pulled", ("backend",))
        self._transfer_failures = counter("triptych_transfer_failures", "Pulls that failed", ("backend", "code"))
        self._resets = counter(
            "triptych_transport_resets", "Times that a transport had to begin anew", ("backend", "cause")
        )
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
        if (span := tracing.current()) is not None:
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
        if (span := tracing.current()) is not None:
            decode = {"triptych.tokens": finished.completion_tokens, "triptych.choice": finished.choice}
            span.stages({"prefill": finished.prefill_s, "decode": finished.decode_s}, {"decode": decode})

    def failed(self, error: TriptychError) -> None:
        self._failed.labels(error.code).inc()

    def pulled(self, backend: str, nbytes: int, duration_s: float) -> None:
        self._transfer_seconds.labels(backend).observe(duration_s)
        self._transfer_bytes.labels(backend).inc(nbytes)

    def pull_failed(self, backend: str, error: TriptychError) -> None:
        self._transfer_failures.labels(backend or _NO_BACKEND, error.code).inc()

    def transport_reset(self, backend: str, cause: str) -> None:
        """``OnReset`` of this process's transports."""
        self._resets.labels(backend, cause).inc()

    def token_gap(self, seconds: float) -> None:
        self._token.observe(seconds)


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The engine's, as it is now."""

    usage: float
    """From 0 to 1; what is only kept for later does not count."""
    queries_tokens: int
    """Tokens of prompts whose beginning was looked up so far."""
    hits_tokens: int
    """... and was there."""
    preemptions: int


class Loaded(Protocol):
    """What says how much waits and runs."""

    def load(self) -> TextLoad: ...


def watch(
    metrics: Metrics,
    service: Loaded,
    intake: "Intake",
    *,
    model: ModelInfo,
    kv: Callable[[], KvMemory],
    connections: Callable[[], dict[tuple[str, ...], int]],
    preferred: str | None,
) -> None:
    """Read the instance's state at every scrape. ``connections`` are links by backend,
    ``preferred`` is the backend that the operator wants tried first.
    """
    of_model = ("model_name",)

    def per_model(value: float) -> dict[tuple[str, ...], float]:
        return {(model.model_id,): value}

    def read() -> Iterable[Metric]:
        load, memory, pulls = service.load(), intake.memory, intake.queue
        running, waiting = per_model(load.running_requests), per_model(load.waiting_requests)
        yield gauge("vllm:num_requests_running", "Requests in the engine", running, of_model)
        yield gauge("vllm:num_requests_waiting", "Requests that wait for items or the engine", waiting, of_model)
        memory_of_kv = kv()
        usage, queries = per_model(memory_of_kv.usage), per_model(memory_of_kv.queries_tokens)
        hits, preemptions = per_model(memory_of_kv.hits_tokens), per_model(memory_of_kv.preemptions)
        yield gauge("vllm:kv_cache_usage_perc", "KV memory in use, 1 is all of it", usage, of_model)
        yield total("vllm:prefix_cache_queries", "Tokens of prompts that were looked up", queries, of_model)
        yield total("vllm:prefix_cache_hits", "... and were known, so that they were not computed", hits, of_model)
        yield total("vllm:num_preemptions", "Sequences put back to be computed again", preemptions, of_model)
        yield gauge("triptych_text_tokens_pending", "Tokens to prefill or decode", load.pending_tokens)
        yield gauge("triptych_arena_capacity_bytes", "Registered memory for pulled embeddings", memory.capacity_bytes)
        yield gauge("triptych_arena_leased_bytes", "... that is needed, written to, or set aside", memory.pinned_bytes)
        yield gauge("triptych_arena_cached_bytes", "... that holds embeddings nobody needs now", memory.cached_bytes)
        yield gauge("triptych_arena_embeddings", "Embeddings that lie in it", memory.cached)
        yield gauge("triptych_requests_waiting_for_memory", "Requests that wait for room in it", memory.waiting)
        yield gauge("triptych_pulls_waiting", "Pulls that wait for their turn", pulls.waiting)
        yield gauge("triptych_pulls_running", "Pulls under way", pulls.under_way)
        yield gauge("triptych_pulls_running_bytes", "Their bytes", pulls.nbytes_under_way)
        yield gauge("triptych_connections", "Links to holders' memory", connections(), ("backend",))
        chosen: dict[tuple[str, ...], float] = {(preferred,): 1.0} if preferred else {}
        yield gauge("triptych_transport_preferred", "The backend that is tried first by setting", chosen, ("backend",))

    metrics.watch(read)
