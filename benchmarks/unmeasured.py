"""Runs a service without metrics, to measure what they cost: ``python -m benchmarks.unmeasured triptych.services.router ...``.

Nothing is counted, and what a finished request is described by is not looked at. Windows of load and attainment remain,
as pools are scaled by them.
"""

import runpy
import sys
from collections.abc import Sequence
from typing import Any, Self

import triptych.services.router.app
from triptych.runtime import metrics
from triptych.services.router.record import NO_RECORD


class _Nothing:
    """A counter, gauge or histogram."""

    def labels(self, *values: str) -> Self:
        del values
        return self

    def inc(self, amount: float = 1) -> None:
        del amount

    def dec(self, amount: float = 1) -> None:
        del amount

    def observe(self, amount: float) -> None:
        del amount


class _NoMetrics(metrics.Metrics):
    def counter(self, name: str, help_: str, labels: Sequence[str] = ()) -> Any:
        del name, help_, labels
        return _Nothing()

    def gauge(self, name: str, help_: str, labels: Sequence[str] = ()) -> Any:
        del name, help_, labels
        return _Nothing()

    def histogram(
        self, name: str, help_: str, labels: Sequence[str] = (), buckets: Sequence[float] = metrics.STAGE_BUCKETS_S
    ) -> Any:
        del name, help_, labels, buckets
        return _Nothing()


def main() -> None:
    replaced: dict[tuple[Any, str], Any] = {
        (metrics, "Metrics"): _NoMetrics,
        (triptych.services.router.app, "RouterRecord"): lambda _: NO_RECORD,
    }
    for (owner, name), value in replaced.items():
        assert hasattr(owner, name), name
        setattr(owner, name, value)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
