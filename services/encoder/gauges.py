"""The encoder's gauges, read at every scrape: items, arena, leases."""

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import Metric

from triptych.domain.instance import InstanceLoad
from triptych.domain.stage import Stage
from triptych.runtime.metrics import Metrics, gauge, longest_wait

from .arena_store import ArenaStore
from .file_tier import FileTier

_ARENA = ("arena",)
"""A text instance that also encodes has two."""


class Loaded(Protocol):
    """Reports load."""

    def load(self) -> InstanceLoad: ...

    def longest_waits_s(self) -> dict[int, float]: ...


def watch(metrics: Metrics, service: Loaded, store: ArenaStore, files: FileTier | None = None) -> None:
    """Read the encoder's state at every scrape."""

    def of_arena(value: float) -> dict[tuple[str, ...], float]:
        return {("encoder",): value}

    def read() -> Iterable[Metric]:
        load, memory = service.load().at(Stage.ENCODE), store.memory
        leased = load.leased_bytes
        yield longest_wait(
            "triptych_encoder_longest_wait_seconds",
            "Longest wait of the items that are waiting",
            service.longest_waits_s(),
        )
        yield gauge("triptych_encoder_items_pending", "Items being prepared, waiting or being encoded", load.pending)
        yield gauge("triptych_encoder_tokens_pending", "Their tokens", load.pending_tokens)
        yield gauge(
            "triptych_arena_capacity_bytes", "Registered memory for embeddings", of_arena(memory.capacity_bytes), _ARENA
        )
        yield gauge(
            "triptych_arena_leased_bytes",
            "... that is leased, being written, or in quarantine",
            of_arena(leased),
            _ARENA,
        )
        yield gauge(
            "triptych_arena_cached_bytes",
            "... that holds cached embeddings without a lease",
            of_arena(memory.cached_bytes),
            _ARENA,
        )
        yield gauge("triptych_arena_embeddings", "Embeddings in it", of_arena(memory.cached), _ARENA)
        yield gauge("triptych_arena_leases", "Leases granted", memory.leases)
        if files is not None:
            yield gauge(
                "triptych_embedding_file_bytes", "Embeddings in files, of all encoders that share them", files.nbytes
            )

    metrics.watch(read)
