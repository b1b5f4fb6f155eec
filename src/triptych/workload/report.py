"""Metrics of a run. Nothing is dropped: a failed request has missed its objectives."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from triptych.workload.requests import KINDS, Kind, Planned

PERCENTILES = (50, 90, 99)
LATE_S = 0.25
"""A generator whose 99th percentile send delay exceeds this has not kept up."""

NOT_SENT = "not sent: too many in flight"
TIMEOUT = "timeout"
_RESULTS = frozenset({"HTTP 429", "HTTP 504", TIMEOUT})
"""Answers of an endpoint that has more load than it can serve. Any other error is a failure."""


@dataclass(frozen=True, slots=True)
class Record:
    """The outcome of one request. Times count from when it was due, so that lag of server or sender is included."""

    planned: Planned
    sent_late_s: float = 0.0
    ttft_s: float | None = None
    end_s: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""
    """Kind of error, such as ``HTTP 429``; empty for a complete answer."""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        if self.ttft_s is None or self.tokens < 2:
            return None
        return (self.end_s - self.ttft_s) / (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Objectives:
    """Latency objectives in seconds; None sets no objective."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def of_ms(cls, ttft_ms: float | None, tpot_ms: float | None) -> Self:
        """From milliseconds."""
        return cls(*(None if value is None else value / 1000 for value in (ttft_ms, tpot_ms)))

    def __str__(self) -> str:
        limits = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
        return " and ".join(f"a {name} of at most {1000 * limit:g} ms" for name, limit in limits if limit is not None)

    @property
    def any(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def met(self, record: Record) -> bool:
        if not record.ok or record.ttft_s is None:
            return False
        in_time = self.ttft_s is None or record.ttft_s <= self.ttft_s
        return in_time and (self.tpot_s is None or record.tpot_s is None or record.tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies in seconds of the answered requests; None when there are none."""

    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        if not values:
            return cls(None, None, None, None)
        return cls(sum(values) / len(values), *(percentile(values, q) for q in PERCENTILES))


@dataclass(frozen=True, slots=True)
class KindReport:
    """The part of a run that has requests of one kind."""

    requests: int
    answered: int
    ttft: Latency
    tpot: Latency
    e2e: Latency
    attainment: float | None

    @classmethod
    def of(cls, records: Sequence[Record], objectives: Objectives) -> Self:
        good = [record for record in records if record.ok]
        return cls(
            requests=len(records),
            answered=len(good),
            ttft=Latency.of([record.ttft_s for record in good if record.ttft_s is not None]),
            tpot=Latency.of([record.tpot_s for record in good if record.tpot_s is not None]),
            e2e=Latency.of([record.end_s for record in good]),
            attainment=sum(map(objectives.met, records)) / len(records) if records and objectives.any else None,
        )


@dataclass(frozen=True, slots=True)
class Report:
    """Report of one run at one rate. ``attainment`` is the share of all requests, failed ones included, that met the
    objectives.
    """

    rate: float
    """Requests offered per second, according to the plan."""
    requests: int
    answered: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    images: int
    ttft: Latency
    tpot: Latency
    e2e: Latency
    sent_late_p99_s: float
    kept_up: bool
    """Whether the generator sent every request on time; if not, the load differed from ``rate``."""
    attainment: float | None
    by_kind: dict[Kind, KindReport]
    """Of runs with several kinds of requests; else empty."""

    @property
    def failed(self) -> int:
        """Requests that could not be sent, that broke, or that the endpoint failed on."""
        return sum(number for error, number in self.errors.items() if error not in _RESULTS)

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Run:
    """Run of the load: the requested rate (None: the trace's own) and its results."""

    asked_rate: float | None
    report: Report
    records: Sequence[Record]


def summarize(records: Sequence[Record], objectives: Objectives, rate: float) -> Report:
    """Summarize one run of at least one record, whose plan offered ``rate`` requests per second."""
    good = [record for record in records if record.ok]
    late_s = percentile([record.sent_late_s for record in records], 99)
    duration_s = max([record.planned.arrival_s + record.end_s for record in records] + [1e-9])
    tokens = sum(record.tokens for record in good)
    kinds = {record.planned.kind for record in records}
    whole = KindReport.of(records, objectives)
    return Report(
        rate=rate,
        requests=len(records),
        answered=len(good),
        errors=dict(Counter(record.error for record in records if not record.ok).most_common()),
        duration_s=duration_s,
        requests_per_s=len(good) / duration_s,
        output_tokens_per_s=tokens / duration_s,
        prompt_tokens=sum(record.prompt_tokens for record in good),
        output_tokens=tokens,
        images=sum(len(record.planned.images) for record in good),
        ttft=whole.ttft,
        tpot=whole.tpot,
        e2e=whole.e2e,
        sent_late_p99_s=late_s,
        kept_up=late_s <= LATE_S and not any(record.error == NOT_SENT for record in records),
        attainment=whole.attainment,
        by_kind={
            kind: KindReport.of([record for record in records if record.planned.kind == kind], objectives)
            for kind in KINDS
            if kind in kinds and len(kinds) > 1
        },
    )


def goodput(reports: Sequence[Report], attainment: float) -> float | None:
    """The highest offered rate that met the objectives, on average over the runs of that rate; 0 if none did, None without objectives.

    A run whose generator did not keep up has not offered its rate.
    """
    if all(report.attainment is None for report in reports):
        return None
    shares: dict[float, list[float]] = {}
    for report in reports:
        share = report.attainment if report.kept_up and report.attainment is not None else -math.inf
        shares.setdefault(report.rate, []).append(share)
    return max((rate for rate, of_rate in shares.items() if sum(of_rate) / len(of_rate) >= attainment), default=0.0)


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile, interpolated linearly between the two values around it."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
