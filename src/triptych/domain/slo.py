"""Service level objectives (SLOs) of requests: time to first token, time between tokens, end to end.

An objective is absolute (``ttft=0.5s``) or a factor of the latency that the same request has alone on the system
(``ttft=5x``), as in ModServe section 5.1. It may be given for one class of requests (``text:ttft=0.3s``).
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from triptych.domain.media import Modality
from triptych.domain.record import record


class Metric(StrEnum):
    TTFT = "ttft"
    """Arrival to first token."""
    TBT = "tbt"
    """Time between tokens: the 99th percentile of one request's gaps."""
    E2E = "e2e"
    """Arrival to last token."""


USUAL_FACTOR = 5.0
"""An objective that nobody has given: so many times the latency without load."""
TEXT = "text"
MEDIA_TOKEN_BUCKETS = (256, 1024, 4096, 16384)
"""Upper bounds of the media tokens in a request class; the last class has no bound."""
CLASSES = (
    TEXT,
    *(f"{modality.value}-{bound}" for modality in Modality for bound in (*MEDIA_TOKEN_BUCKETS, "more")),
)
"""Request classes. A request without media is ``text``; others go by their largest modality and their media tokens."""

MAX_OBJECTIVES = 64
"""Most objectives of one router."""

_OBJECTIVE = re.compile(r"(?:(?P<of>[a-z0-9-]+):)?(?P<metric>ttft|tbt|e2e)=(?P<value>\d+(?:\.\d+)?)(?P<unit>ms|s|x)")
_LARGEST_S = 3600.0
_LARGEST_FACTOR = 1000.0


def request_class(media_tokens: Mapping[Modality, int]) -> str:
    """The class of a request with these tokens of each modality."""
    if not media_tokens:
        return TEXT
    bucket = bisect_left(MEDIA_TOKEN_BUCKETS, sum(media_tokens.values()))
    if len(media_tokens) == 1:
        [modality] = media_tokens
    else:
        modality = max(media_tokens, key=lambda modality: (media_tokens[modality], modality.value))
    return f"{modality.value}-{MEDIA_TOKEN_BUCKETS[bucket] if bucket < len(MEDIA_TOKEN_BUCKETS) else 'more'}"


def modality_of(class_name: str) -> str:
    """``text``, ``image``, ``video`` or ``audio``."""
    return class_name.partition("-")[0]


@record
class Isolated:
    """Latencies in seconds of a request that has the system to itself, by stage. 0 for a stage that it does not have."""

    prepare_s: float
    """Time at the router, seconds."""
    encode_s: float
    prefill_s: float
    """Time from the last embedding to the first token, seconds: pull and prefill."""
    tbt_s: float

    @property
    def ttft_s(self) -> float:
        return self.prepare_s + self.encode_s + self.prefill_s

    def of(self, metric: Metric, output_tokens: int = 1) -> float:
        """``output_tokens`` is needed for the end-to-end latency only."""
        match metric:
            case Metric.TTFT:
                return self.ttft_s
            case Metric.TBT:
                return self.tbt_s
            case Metric.E2E:
                return self.ttft_s + self.tbt_s * max(0, output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Objective:
    """Seconds, or with ``relative`` a factor of the isolated latency."""

    value: float
    relative: bool = False

    def seconds(self, metric: Metric, isolated: Isolated | None, output_tokens: int = 1) -> float | None:
        """The limit in seconds; None if it is relative to a latency that is unknown."""
        if not self.relative:
            return self.value
        return None if isolated is None else self.value * isolated.of(metric, output_tokens)


@dataclass(frozen=True, slots=True)
class Slo:
    """The objectives, by (class or modality, metric); the class ``""`` stands for all."""

    objectives: Mapping[tuple[str, Metric], Objective] = field(default_factory=dict)

    @classmethod
    def parse(cls, entries: Iterable[str]) -> "Slo":
        """Parse entries such as ``ttft=5x``, ``tbt=100ms``, ``text:ttft=0.3s`` or ``image-1024:e2e=20s``.

        Raises ValueError that names the entry.
        """
        objectives: dict[tuple[str, Metric], Objective] = {}
        for entry in entries:
            if (match := _OBJECTIVE.fullmatch(entry)) is None:
                raise ValueError(f"slo {entry!r} is not [CLASS:]METRIC=VALUE with ttft, tbt or e2e, and s, ms or x")
            selector, metric, relative = match["of"] or "", Metric(match["metric"]), match["unit"] == "x"
            if (
                selector
                and selector not in CLASSES
                and selector not in {TEXT, *(modality.value for modality in Modality)}
            ):
                raise ValueError(f"slo {entry!r}: the class is not one of text, {', '.join(m.value for m in Modality)}")
            if (selector, metric) in objectives:
                raise ValueError(f"slo {entry!r}: {selector or 'every class'} has a limit of {metric} already")
            value = float(match["value"]) / (1000 if match["unit"] == "ms" else 1)
            low, high, unit = (1.0, _LARGEST_FACTOR, "x") if relative else (0.0, _LARGEST_S, "s")
            if not low <= value <= high or value == 0:
                raise ValueError(f"slo {entry!r} must be {'from 1' if relative else 'above 0'} to {high:g} {unit}")
            objectives[selector, metric] = Objective(value, relative)
        return cls(objectives)

    def objective(self, class_name: str, metric: Metric) -> Objective | None:
        """The most specific one: of the class, of its modality, of all."""
        for selector in (class_name, modality_of(class_name), ""):
            if (objective := self.objectives.get((selector, metric))) is not None:
                return objective
        return None


@record
class Expected:
    """Expectations of a prepared request; None where they are unknown."""

    ttft_limit_s: float | None = None
    """The TTFT objective of its class, in seconds."""
    isolated: Isolated | None = None


NOTHING_EXPECTED = Expected()


class ChargedStage(StrEnum):
    """Stage that a missed TTFT is charged to."""

    PREPARE = "prepare"
    ENCODE = "encode"
    PREFILL = "prefill"
