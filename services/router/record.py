"""Observability of requests: metrics, one log line each, and attributes on their trace span.

Everything is derived from a finished request's timeline. Metrics named ``vllm:...`` are those that dashboards for vLLM
expect; only the router exports those about whole requests.
"""

import logging

from prometheus_client import Counter, Histogram

from triptych.domain.timeline import Outcome, Timeline
from triptych.errors import TriptychError
from triptych.runtime import tracing
from triptych.runtime.logs import FIELDS
from triptych.runtime.metrics import Metrics

logger = logging.getLogger(__name__)

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_REQUEST_S = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
_MODEL = ("model_name",)


class Record:
    """Receives what became of requests. This one does nothing with it."""

    def refused(self, error: TriptychError) -> None: ...

    def ended(self, timeline: Timeline, finish_reason: str) -> None:
        """A chat has ended. ``finish_reason`` is empty if it failed or was cancelled."""

    def resolved(self, timeline: Timeline) -> None:
        """A request that resolved media has ended."""

    def keys_resolved(self, keys: int, code: str) -> None:
        """A request that resolved keys has ended; ``code`` is that of its error, or empty."""


NO_RECORD = Record()


class RouterRecord(Record):
    """Writes to metrics, log and trace."""

    def __init__(self, metrics: Metrics) -> None:
        counter, histogram = metrics.counter, metrics.histogram
        self._outcomes = counter("triptych_requests", "Requests finished", ("outcome", "code"))
        self._refused = counter("triptych_requests_refused", "Requests refused", ("code",))
        self._resolves = counter("triptych_resolves", "Requests that resolved media", ("outcome", "code"))
        self._keys = counter("triptych_resolved_keys", "Keys of requests that resolved keys", ("code",))
        self._attempts = counter("triptych_attempts", "Encodes and dispatches to text instances", ("kind",))
        self._cache = counter(
            "triptych_embedding_cache", "Where the embeddings of answered requests were cached", ("where",)
        )
        self._media = counter("triptych_items", "Items of answered requests", ("modality",))
        self._kv_tokens = counter(
            "triptych_kv_tokens",
            "Tokens whose answers were transferred, by where their keys and values came from",
            ("how",),
        )
        self._prefix_tokens = counter(
            "triptych_kv_prefix_tokens", "Tokens of prompts whose keys and values came from other instances", ()
        )
        self._kv_pulled = counter("triptych_kv_pull_bytes", "Bytes of keys and values pulled", ())
        self._stages = histogram("triptych_stage_seconds", "Stages of answered requests", ("stage",))
        self._success = counter("vllm:request_success", "Requests by how they ended", (*_MODEL, "finished_reason"))
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens, including placeholder tokens", _MODEL)
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated", _MODEL)
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token", _MODEL, _TTFT_S)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token", _MODEL, _REQUEST_S)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean over a request's tokens after the first",
            _MODEL,
            _TOKEN_S,
        )
        self._queue = histogram("vllm:request_queue_time_seconds", "Waiting in the text instance", _MODEL, _REQUEST_S)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "Prefill", _MODEL, _REQUEST_S)
        self._decode = histogram("vllm:request_decode_time_seconds", "Decode", _MODEL, _REQUEST_S)
        self._request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", _MODEL, _TOKENS)
        self._request_generation = histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request", _MODEL, _TOKENS
        )
        # Looking up a labelled child is slower than counting. Both caches stay small: one model, few label values.
        self._counters: dict[tuple[Counter, tuple[str, ...]], Counter] = {}
        self._histograms: dict[tuple[Histogram, str], Histogram] = {}

    def refused(self, error: TriptychError) -> None:
        self._count(self._refused, error.code)
        logger.info("refused: %s", error.code)

    def ended(self, timeline: Timeline, finish_reason: str) -> None:
        ended_as = {Outcome.DONE: finish_reason, Outcome.CANCELLED: "abort"}.get(timeline.outcome, "error")
        self._count(self._outcomes, timeline.outcome.value, timeline.error)
        self._count(self._success, timeline.model, ended_as)
        self._count_encodes(timeline)
        self._count(self._attempts, "text", by=timeline.text_attempts)
        self._count(self._attempts, "text_again", by=max(0, timeline.text_attempts - 1))
        self._count(self._attempts, "continuation", by=timeline.continuations)
        self._count(self._attempts, "router_continuation", by=int(timeline.continued_tokens > 0))
        self._count_kv(timeline)
        self._count(self._prompt_tokens, timeline.model, by=timeline.prompt_tokens)
        generated = timeline.completion_tokens - timeline.continued_tokens
        self._count(self._generation_tokens, timeline.model, by=generated)
        if timeline.outcome is Outcome.DONE:
            self._observe_done(timeline)
        self._log(timeline, ended_as)
        self._trace(timeline)

    def resolved(self, timeline: Timeline) -> None:
        self._count(self._resolves, timeline.outcome.value, timeline.error)
        self._count_encodes(timeline)
        if timeline.outcome is Outcome.DONE:
            self._observe(self._stages, "prepare", timeline.prepare_s)
            self._observe(self._stages, "encode", timeline.encode_s)
            self._count_items(timeline)
        self._log(timeline, timeline.outcome.value, "resolve")
        self._trace(timeline)

    def keys_resolved(self, keys: int, code: str) -> None:
        self._count(self._keys, code, by=keys)

    def _count_encodes(self, timeline: Timeline) -> None:
        self._count(self._attempts, "encode", by=sum(item.encode_attempts for item in timeline.items))
        self._count(self._attempts, "encode_again", by=sum(max(0, i.encode_attempts - 1) for i in timeline.items))
        self._count(self._attempts, "encode_hedge", by=sum(item.hedges for item in timeline.items))
        self._count(self._attempts, "encode_hedge_won", by=sum(item.hedge_won for item in timeline.items))

    def _count_kv(self, timeline: Timeline) -> None:
        self._prefix_tokens.inc(timeline.prefix_tokens)
        if not timeline.prefill_instance:
            return
        self._count(self._attempts, "kv_transfer")
        self._count(self._kv_tokens, "pulled", by=timeline.kv_pulled_tokens)
        self._count(self._kv_tokens, "cached", by=timeline.kv_cached_tokens)
        self._count(self._kv_tokens, "computed", by=timeline.kv_computed_tokens)
        self._kv_pulled.inc(timeline.kv_pull_bytes)

    def _count_items(self, timeline: Timeline) -> None:
        for item in timeline.items:
            self._count(self._media, item.modality)
            where = "text" if item.text_cached else "encoder" if item.encoder_cached else "nowhere"
            self._count(self._cache, where)

    def _observe_done(self, timeline: Timeline) -> None:
        stages = {"prepare": timeline.prepare_s, "queue": timeline.queue_s, "prefill": timeline.prefill_s}
        if timeline.items:
            stages |= {"encode": timeline.encode_s, "pull": timeline.pull_s}
        if timeline.prefill_instance:
            stages["kv_transfer"] = timeline.kv_transfer_s
        for stage, seconds in (*stages.items(), ("decode", timeline.decode_s)):
            self._observe(self._stages, stage, seconds)
        self._count_items(timeline)
        model = timeline.model
        if not timeline.continued_tokens:  # else another router saw its beginning
            self._observe(self._ttft, model, timeline.ttft_s)
            self._observe(self._e2e, model, timeline.total_s)
        self._observe(self._queue, model, timeline.queue_s)
        self._observe(self._prefill, model, timeline.prefill_s)
        self._observe(self._decode, model, timeline.decode_s)
        self._observe(self._request_prompt, model, timeline.prompt_tokens)
        self._observe(self._request_generation, model, timeline.completion_tokens)
        gaps = timeline.completion_tokens - max(1, timeline.continued_tokens)
        if gaps > 0:
            self._observe(self._tpot, model, timeline.decode_s / gaps)

    def _count(self, counter: Counter, *labels: str, by: int = 1) -> None:
        child = self._counters.get((counter, labels))
        if child is None:
            child = self._counters[counter, labels] = counter.labels(*labels)
        if by:
            child.inc(by)

    def _observe(self, histogram: Histogram, label: str, value: float) -> None:
        child = self._histograms.get((histogram, label))
        if child is None:
            child = self._histograms[histogram, label] = histogram.labels(label)
        child.observe(value)

    def _log(self, timeline: Timeline, ended_as: str, kind: str = "request") -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        fields = summary(timeline, ended_as)
        logger.info("%s %s", kind, " ".join(f"{key}={value}" for key, value in fields.items()), extra={FIELDS: fields})

    def _trace(self, timeline: Timeline) -> None:
        if (span := tracing.recording()) is not None:
            span.note({f"triptych.{key}": value for key, value in summary(timeline, "").items()})


def summary(timeline: Timeline, ended_as: str) -> dict[str, str | int | float]:
    """One request in a log line: counts, durations and codes; no user content."""
    fields: dict[str, str | int | float] = {"outcome": timeline.outcome.value}
    if ended_as and ended_as != timeline.outcome.value:
        fields["finish_reason"] = ended_as
    if timeline.error:
        fields["code"] = timeline.error
    fields |= {
        "items": len(timeline.items),
        "prompt_tokens": timeline.prompt_tokens,
        "completion_tokens": timeline.completion_tokens,
        "encode_attempts": sum(item.encode_attempts for item in timeline.items),
        "text_attempts": timeline.text_attempts,
        "continuations": timeline.continuations,
        "continued_tokens": timeline.continued_tokens,
        "preemptions": timeline.preemptions,
    }
    if timeline.prefill_instance:
        fields |= {
            "kv_transfer_s": round(timeline.kv_transfer_s, 4),
            "prefix_tokens": timeline.prefix_tokens,
            "kv_pulled_tokens": timeline.kv_pulled_tokens,
            "kv_cached_tokens": timeline.kv_cached_tokens,
            "kv_computed_tokens": timeline.kv_computed_tokens,
        }
    durations = ("prepare_s", "encode_s", "queue_s", "pull_s", "prefill_s", "decode_s", "ttft_s", "total_s")
    return fields | {name: round(float(getattr(timeline, name)), 4) for name in durations}
