"""A process's load from its metrics: as numbers, and as one line."""

from collections.abc import Callable, Mapping
from functools import partial

from triptych.cli.metrics import Samples

_MIB = 2**20


def _share(samples: Samples, part: str, whole: str) -> float | None:
    taken, all_ = samples.total(part), samples.total(whole)
    return None if taken is None or not all_ else taken / all_


def _attainment(metric: str, samples: Samples) -> float | None:
    met, missed = (
        samples.total("triptych_slo_requests", metric=metric, verdict=verdict) for verdict in ("met", "missed")
    )
    return None if met is None or missed is None else met / (met + missed)


_FIGURES: tuple[tuple[str, Callable[[Samples], float | None], Callable[[float], str]], ...] = (
    ("http_requests", lambda s: s.total("triptych_http_requests_running"), "{:g} requests".format),
    ("requests", lambda s: s.total("triptych_requests_running"), "{:g} requests".format),
    ("items_pending", lambda s: s.total("triptych_encoder_items_pending"), "{:g} items pending".format),
    ("requests_running", lambda s: s.total("vllm:num_requests_running"), "{:g} running".format),
    ("requests_waiting", lambda s: s.total("vllm:num_requests_waiting"), "{:g} waiting".format),
    *(
        (f"{metric}_attainment", partial(_attainment, metric), f"{metric.upper()} {{:.1%}} within SLO".format)
        for metric in ("ttft", "tbt", "e2e")
    ),
    (
        "arena_usage",
        lambda s: _share(s, "triptych_arena_leased_bytes", "triptych_arena_capacity_bytes"),
        "arena {:.0%}".format,
    ),
    ("kv_cache_usage", lambda s: s.total("vllm:kv_cache_usage_perc"), "kv {:.0%}".format),
    (
        "resident_bytes",
        lambda s: s.total("process_resident_memory_bytes"),
        lambda nbytes: f"{nbytes / _MIB:,.0f} MiB",
    ),
    (
        "worst_loop_lag_s",
        lambda s: s.total("triptych_event_loop_lag_max_seconds"),
        lambda lag_s: f"worst loop lag {lag_s * 1000:.1f} ms",
    ),
)
"""Running work, memory usage, and event-loop lag."""


def load_figures(samples: Samples) -> Mapping[str, float]:
    """The figures that the process reports; usages are fractions."""
    return {name: value for name, read, _ in _FIGURES if (value := read(samples)) is not None}


def load_line(samples: Samples) -> str:
    figures = load_figures(samples)
    return ", ".join(form(figures[name]) for name, _, form in _FIGURES if name in figures)
