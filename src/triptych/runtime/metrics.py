"""Prometheus metrics of one process: a registry per object, so that nothing is global and tests need no reset.

What changes with every call is counted where it happens (``counter``, ``histogram``). What an object knows anyway is
read when somebody asks (``watch``), and costs nothing until then. Labels come from small fixed sets: never a request
id, an address, or anything that a user writes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""For durations of stages and calls."""

Read = Callable[[], Iterable[Metric]]
Values = Mapping[tuple[str, ...], float]


class Metrics:
    """``render`` belongs to the event loop on which the objects live that ``watch`` reads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._watched = _Watched()
        self.registry.register(self._watched)
        self._common: dict[str, Counter] = {}

    def counter(self, name: str, help_: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, help_, labels, registry=self.registry)

    def common_counter(self, name: str, help_: str, labels: Sequence[str] = ()) -> Counter:
        """As ``counter``, of what several parts of one process count together: made for the first that asks."""
        if name not in self._common:
            self._common[name] = self.counter(name, help_, labels)
        return self._common[name]

    def histogram(
        self, name: str, help_: str, labels: Sequence[str] = (), buckets: Sequence[float] = STAGE_BUCKETS_S
    ) -> Histogram:
        return Histogram(name, help_, labels, buckets=buckets, registry=self.registry)

    def watch(self, read: Read) -> None:
        """Ask ``read`` at every scrape.

        Several may tell of one name, of parts of a process that are told apart by labels.
        """
        self._watched.reads.append(read)

    def render(self) -> bytes:
        """Everything, in the text format that Prometheus scrapes (``CONTENT_TYPE``)."""
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
        """Nothing: registering must not read what is still being set up."""
        return ()


def gauge(name: str, help_: str, value: float | Values, labels: Sequence[str] = ()) -> Metric:
    """One reading, or with ``labels`` one for each tuple of their values."""
    return _filled(GaugeMetricFamily(name, help_, labels=labels), value)


def total(name: str, help_: str, value: float | Values, labels: Sequence[str] = ()) -> Metric:
    """As ``gauge``, of a number that only grows; ``name`` is without its ``_total``."""
    return _filled(CounterMetricFamily(name, help_, labels=labels), value)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, value: float | Values) -> Metric:
    for names, one in value.items() if isinstance(value, Mapping) else (((), value),):
        family.add_metric(names, one)
    return family
