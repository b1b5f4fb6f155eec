"""What running clusters said of plans: measured over predicted times, kept in a file that the next plan reads.

A line of JSON for each verification. It is kept beside the profiles, under a name that readers of profiles do not take for one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from triptych.files import BadFile, read_text
from triptych.runtime.plans import Placement
from triptych.workload.report import Latency, Record

FILE_NAME = "verified.jsonl"
LATEST = 8
"""Verifications on the same kinds of devices that count: the last ones."""
Figure = Literal["ttft_p50", "ttft_p90", "ttft_p99", "tpot_p50", "tpot_p90", "tpot_p99"]
Metric = Literal["ttft", "tpot"]
_FIGURES: Mapping[Metric, Sequence[Figure]] = {
    "ttft": ("ttft_p50", "ttft_p90", "ttft_p99"),
    "tpot": ("tpot_p50", "tpot_p90", "tpot_p99"),
}
_MAX_NBYTES = 16 << 20
_LEAST, _MOST = 1e-3, 1e3


class BadCalibration(ValueError):
    """A file that is no calibration. The message says what is wrong, without the file's name."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A cluster that ran a plan, beside what was predicted of it."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    at: str
    """ISO 8601, UTC."""
    model_id: str
    devices: str
    """The kinds of devices, as ``kinds_text`` names them."""
    placement: str
    rate: float
    requests: int
    factors: Mapping[Figure, float]
    """Measured over predicted, of the figures that were judged."""
    within: bool
    """Whether all were within the error that was expected."""


def kinds_text(devices: Iterable[str]) -> str:
    """Kinds of devices, in alphabetical order."""
    return "+".join(sorted(set(devices)))


def kinds_of(placement: Placement) -> str:
    """The kinds of a placement's devices."""
    return kinds_text(placement.device_counts)


@dataclass(frozen=True, slots=True)
class Calibration:
    """All verifications, the oldest first."""

    verified: tuple[Verified, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Empty if there is no file. Raises BadCalibration, naming the line."""
        if not path.exists():
            return cls()
        try:
            lines = read_text(path, _MAX_NBYTES).splitlines()
        except BadFile as error:
            raise BadCalibration(str(error)) from None
        return cls(tuple(_parsed(number, line) for number, line in enumerate(lines, 1) if line.strip()))

    def of(self, model_id: str) -> "Calibration":
        """Those of one model."""
        return Calibration(tuple(entry for entry in self.verified if entry.model_id == model_id))

    def factor(self, kinds: str, name: Metric) -> float:
        """By which predicted times are to be multiplied: the geometric mean of P50 and P90 in the latest verifications on these kinds of
        devices (``kinds_text``). 1 if there is none.
        """
        known = [entry.factors for entry in self.verified if entry.devices == kinds][-LATEST:]
        logs = [log(factors[figure]) for factors in known for figure in _FIGURES[name][:2] if figure in factors]
        return exp(sum(logs) / len(logs)) if logs else 1.0

    def corrected(self, placement: Placement, records: Sequence[Record]) -> Sequence[Record]:
        """Simulated requests with their times multiplied."""
        kinds = kinds_of(placement)
        ttft, tpot = self.factor(kinds, "ttft"), self.factor(kinds, "tpot")
        return records if ttft == tpot == 1 else [_corrected(record, ttft, tpot) for record in records]


UNVERIFIED = Calibration()
"""Of models of which no plan was verified."""


def _corrected(record: Record, ttft: float, tpot: float) -> Record:
    """A request that was not answered stays as it is."""
    if record.ttft_s is None:
        return record
    first_s = ttft * record.ttft_s
    return replace(record, ttft_s=first_s, end_s=first_s + tpot * (record.end_s - record.ttft_s))


def beside(profiles: Path) -> Path:
    """Where verifications are kept: in a directory of profiles, or beside a file with one."""
    return profiles / FILE_NAME if profiles.is_dir() else profiles.with_name(FILE_NAME)


def add(path: Path, entry: Verified) -> None:
    """Add a line to the file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(_adapter().dump_python(entry, mode="json")) + "\n")


def factors_of(predicted: Mapping[Figure, float], measured: Mapping[Figure, float]) -> Mapping[Figure, float]:
    """Measured over predicted, of what both have; each within a factor of a thousand."""
    return {
        figure: min(max(measured[figure] / expected, _LEAST), _MOST)
        for figure, expected in predicted.items()
        if expected > 0 and measured.get(figure, 0.0) > 0
    }


def times_of(ttft: Latency, tpot: Latency) -> Mapping[Figure, float]:
    """The figures of a run, seconds; those without a value are left out."""
    known = {
        figure: value
        for figures, latency in ((_FIGURES["ttft"], ttft), (_FIGURES["tpot"], tpot))
        for figure, value in zip(figures, (latency.p50_s, latency.p90_s, latency.p99_s), strict=True)
    }
    return {figure: value for figure, value in known.items() if value is not None}


def _parsed(number: int, line: str) -> Verified:
    try:
        entry = _adapter().validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise BadCalibration(f"line {number}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if not all(_LEAST <= factor <= _MOST for factor in entry.factors.values()):
        raise BadCalibration(f"line {number}: a factor is not between {_LEAST:g} and {_MOST:g}")
    return entry


@cache
def _adapter() -> "TypeAdapter[Verified]":
    return TypeAdapter(Verified)
