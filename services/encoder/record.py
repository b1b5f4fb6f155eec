"""Observability of items: metrics, and stages on the request's trace."""

from triptych.domain.encoding import EncodeRequest, EncodeResult
from triptych.errors import TriptychError
from triptych.runtime import tracing
from triptych.runtime.metrics import Metrics


class Record:
    """Receives the outcome of every encode call, and of each read and write of an embedding's file. This one does nothing with them."""

    def encoded(self, request: EncodeRequest, result: EncodeResult) -> None: ...

    def refused(self, error: TriptychError) -> None: ...

    def batch(self, items: int) -> None:
        """A batch of so many items has been encoded."""

    def file_read(self, outcome: str) -> None:
        """hit, miss, damaged (and removed), failed, or left (by all callers)."""

    def file_written(self, outcome: str) -> None:
        """written, dropped, or failed."""


NO_RECORD = Record()


class EncoderRecord(Record):
    """Writes to metrics and trace."""

    def __init__(self, metrics: Metrics) -> None:
        items = metrics.counter(
            "triptych_encoder_items", "Items requested, by whether their embedding was cached", ("cached",)
        )
        self._cached, self._encoded = items.labels("yes"), items.labels("no")
        self._tokens = metrics.counter("triptych_encoder_tokens", "Embedding tokens computed or waited for")
        self._failed = metrics.counter("triptych_encoder_failures", "Items that failed", ("code",))
        self._resets = metrics.common_counter(
            "triptych_transport_resets", "Resets of a transport", ("backend", "cause")
        )
        stages = metrics.histogram("triptych_encoder_stage_seconds", "Stages of encoded items", ("stage",))
        self._queue, self._encode = stages.labels("queue"), stages.labels("encode")
        self._batches = metrics.histogram(
            "triptych_encoder_batch_items", "Items of each batch", buckets=(1, 2, 4, 8, 16, 32, 64)
        )
        self._file_reads = metrics.counter(
            "triptych_embedding_file_reads", "Embeddings looked for in files, by outcome", ("outcome",)
        )
        self._file_writes = metrics.counter(
            "triptych_embedding_file_writes", "Embeddings to be kept in files, by outcome", ("outcome",)
        )

    def encoded(self, request: EncodeRequest, result: EncodeResult) -> None:
        if result.cached:
            self._cached.inc()
        else:
            self._encoded.inc()
            self._tokens.inc(result.ticket.tokens)
            self._queue.observe(result.queue_s)
            self._encode.observe(result.encode_s)
        if (span := tracing.recording()) is not None:
            span.note({"triptych.item": request.item, "triptych.cached": result.cached})
            if not result.cached:
                span.stages({"queue": result.queue_s, "encode": result.encode_s})

    def batch(self, items: int) -> None:
        self._batches.observe(items)

    def refused(self, error: TriptychError) -> None:
        self._failed.labels(error.code).inc()

    def transport_reset(self, backend: str, cause: str) -> None:
        """``OnReset`` of this process's transports."""
        self._resets.labels(backend, cause).inc()

    def file_read(self, outcome: str) -> None:
        self._file_reads.labels(outcome).inc()

    def file_written(self, outcome: str) -> None:
        self._file_writes.labels(outcome).inc()
