"""A process's load in one line, from its metrics."""

from collections.abc import Callable

from triptych.cli.metrics import Samples

_COUNTS = (
    ("triptych_http_requests_running", "{:g} requests"),
    ("triptych_requests_running", "{:g} requests"),
    ("triptych_encoder_items_pending", "{:g} items pending"),
    ("vllm:num_requests_running", "{:g} running"),
    ("vllm:num_requests_waiting", "{:g} waiting"),
)
_SHARES: tuple[tuple[str, Callable[[Samples], float | None]], ...] = (
    ("arena", lambda samples: _share(samples, "triptych_arena_leased_bytes", "triptych_arena_capacity_bytes")),
    ("kv", lambda samples: samples.total("vllm:kv_cache_usage_perc")),
)


def load_line(samples: Samples) -> str:
    """What it works on, what of its memory is taken, and whether its event loop keeps up."""
    parts = [form.format(value) for name, form in _COUNTS if (value := samples.total(name)) is not None]
    parts += [f"{name} {share:.0%}" for name, read in _SHARES if (share := read(samples)) is not None]
    if (resident := samples.total("process_resident_memory_bytes")) is not None:
        parts.append(f"{resident / 2**20:,.0f} MiB")
    if (lag_s := samples.total("triptych_event_loop_lag_max_seconds")) is not None:
        parts.append(f"worst loop lag {lag_s * 1000:.1f} ms")
    return ", ".join(parts)


def _share(samples: Samples, part: str, whole: str) -> float | None:
    taken, all_ = samples.total(part), samples.total(whole)
    return None if taken is None or not all_ else taken / all_
