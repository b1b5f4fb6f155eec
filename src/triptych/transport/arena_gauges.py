"""Gauges of an arena that others read from, read at every scrape."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from triptych.machine.arena.arena import ArenaMachine
from triptych.runtime.metrics import gauge

ARENA = ("arena",)
"""A process may have two: the one that others read from, and the one that it pulls into."""


def arena_gauges(memory: ArenaMachine, name: str, what: str) -> Iterable[Metric]:
    """``name``: label of this arena. ``what``: it holds."""

    def of_arena(value: float) -> dict[tuple[str, ...], float]:
        return {(name,): value}

    yield gauge(
        "triptych_arena_capacity_bytes", f"Registered memory for {what}", of_arena(memory.capacity_bytes), ARENA
    )
    leased = of_arena(memory.leased_bytes)
    yield gauge("triptych_arena_leased_bytes", "... that is leased, being written, or in quarantine", leased, ARENA)
    cached = of_arena(memory.cached_bytes)
    yield gauge("triptych_arena_cached_bytes", f"... that holds cached {what} without a lease", cached, ARENA)
    yield gauge(
        "triptych_arena_embeddings", "Embeddings, or segments of keys and values, in it", of_arena(memory.cached), ARENA
    )
    yield gauge("triptych_arena_leases", "Leases granted", memory.leases)
