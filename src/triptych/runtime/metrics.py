"""Prometheus metrics of one process, with a registry per object: nothing is global and tests need no reset.

``counter``, ``gauge`` and ``histogram`` record events as they happen; ``watch`` reads an object's state at scrape time only.
Labels come from small fixed sets: never a request id, an address, or user input.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, GCCollector, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Histogram buckets for durations of stages and calls."""

Read = Callable[[], Iterable[Metric]]
Values = Mapping[tuple[str, ...], float]


class Metrics:
    """``render`` must run on the event loop of the objects that ``watch`` reads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._watched = _Watched()
        self.registry.register(self._watched)
        self._common: dict[str, Counter] = {}

    def counter(self, name: str, help_: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, help_, labels, registry=self.registry)

    def gauge(self, name: str, help_: str, labels: Sequence[str] = ()) -> Gauge:
        """Make a gauge for what begins and ends in many places. ``watch`` is for the state of one object."""
        return Gauge(name, help_, labels, registry=self.registry)

    def common_counter(self, name: str, help_: str, labels: Sequence[str] = ()) -> Counter:
        """Make a counter like ``counter``, but shared by several parts of one process. It is created on first use."""
        if name not in self._common:
            self._common[name] = self.counter(name, help_, labels)
        return self._common[name]

    def histogram(
        self, name: str, help_: str, labels: Sequence[str] = (), buckets: Sequence[float] = STAGE_BUCKETS_S
    ) -> Histogram:
        return Histogram(name, help_, labels, buckets=buckets, registry=self.registry)

    def watch(self, read: Read) -> None:
        """Call ``read`` at every scrape.

        Several readers may report the same name with different labels.
        """
        self._watched.reads.append(read)

    def render(self) -> bytes:
        """Render all metrics in Prometheus' text format (``CONTENT_TYPE``)."""
        return generate_latest(self.registry)


class _Watched(Collector):
    def __init__(self) -> None:
        self.reads: list[Read] = []

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for family in (family for read in self.reads for family in read()):
            families.setdefault(family.name, family)
            if families[family.name] is not family:
                families[family.name].samples.extend(family.samples)
        return families.values()

    def describe(self) -> Iterable[Metric]:
        """Empty: registering must not read objects that are still being set up."""
        return ()


def gauge(name: str, help_: str, value: float | Values, labels: Sequence[str] = ()) -> Metric:
    """Metric with one value, or with ``labels`` one per tuple of label values."""
    return _filled(GaugeMetricFamily(name, help_, labels=labels), value)


def longest_wait(name: str, help_: str, waits_s: Mapping[int, float]) -> Metric:
    """The longest wait of each priority, in seconds (``policy.queueing.longest_waits``)."""
    return gauge(name, help_, {(str(priority),): wait_s for priority, wait_s in waits_s.items()}, ("priority",))


def total(name: str, help_: str, value: float | Values, labels: Sequence[str] = ()) -> Metric:
    """Metric like ``gauge``, for a counter. ``name`` is without its ``_total``."""
    return _filled(CounterMetricFamily(name, help_, labels=labels), value)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, value: float | Values) -> Metric:
    for names, samples in value.items() if isinstance(value, Mapping) else (((), value),):
        family.add_metric(names, samples)
    return family
