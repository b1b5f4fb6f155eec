"""The encoder's gauges, read at every scrape: items, arena, leases."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from triptych.domain.stage import Stage
from triptych.runtime.metrics import Metrics, gauge, longest_wait
from triptych.transport.arena_gauges import arena_gauges

from .build import BuiltEncoder


def watch(metrics: Metrics, encoder: BuiltEncoder) -> None:
    """Read the encoder's state at every scrape."""
    service, files = encoder.service, encoder.files

    def read() -> Iterable[Metric]:
        load = service.load().at(Stage.ENCODE)
        yield longest_wait(
            "triptych_encoder_longest_wait_seconds",
            "Longest wait of the items that are waiting",
            service.longest_waits_s(),
        )
        yield gauge("triptych_encoder_items_pending", "Items being prepared, waiting or being encoded", load.pending)
        yield gauge("triptych_encoder_tokens_pending", "Their tokens", load.pending_tokens)
        yield from arena_gauges(encoder.store.memory, "encoder", "embeddings")
        if files is not None:
            yield gauge(
                "triptych_embedding_file_bytes", "Embeddings in files, of all encoders that share them", files.nbytes
            )

    metrics.watch(read)
