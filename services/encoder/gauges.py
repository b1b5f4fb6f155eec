"""The encoder's gauges, read at every scrape: items, arena, leases."""

from collections.abc import Iterable
from typing import Any

from prometheus_client.core import Metric

from triptych.domain.stage import Stage
from triptych.runtime.metrics import Metrics, gauge, longest_wait
from triptych.transport.arena_gauges import arena_gauges
from triptych.transport.arena_store import ArenaStore

from .file_tier import FileTier
from .service import EncoderService


def watch(metrics: Metrics, service: EncoderService[Any], store: ArenaStore, files: FileTier | None = None) -> None:
    """Read the encoder's state at every scrape."""

    def read() -> Iterable[Metric]:
        load = service.load().at(Stage.ENCODE)
        yield longest_wait(
            "triptych_encoder_longest_wait_seconds",
            "Longest wait of the items that are waiting",
            service.longest_waits_s(),
        )
        yield gauge("triptych_encoder_items_pending", "Items being prepared, waiting or being encoded", load.pending)
        yield gauge("triptych_encoder_tokens_pending", "Their tokens", load.pending_tokens)
        yield from arena_gauges(store.memory, "encoder", "embeddings")
        if files is not None:
            yield gauge(
                "triptych_embedding_file_bytes", "Embeddings in files, of all encoders that share them", files.nbytes
            )

    metrics.watch(read)
