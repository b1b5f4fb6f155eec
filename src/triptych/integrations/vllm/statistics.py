"""vLLM's own statistics: its metrics, and what an instance reports of its engine."""

from collections.abc import Iterable
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import Metric
from vllm.v1.metrics.loggers import StatLoggerBase

_PREFIX = "vllm:"


class SchedulerTotals(StatLoggerBase):
    """Sums up the statistics of vLLM's scheduler."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        del vllm_config, engine_index
        self.prefix_queries_tokens = 0
        self.prefix_hits_tokens = 0
        self.preemptions = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        del mm_cache_stats, engine_idx
        if scheduler_stats is not None:
            prefixes = scheduler_stats.prefix_cache_stats
            self.prefix_queries_tokens += prefixes.queries
            self.prefix_hits_tokens += prefixes.hits
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Log nothing."""


def vllm_metrics() -> Iterable[Metric]:
    """The metrics that vLLM keeps in this process, as they are."""
    return [family for family in REGISTRY.collect() if family.name.startswith(_PREFIX)]
