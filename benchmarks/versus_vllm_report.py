"""The figures of ``benchmarks/versus_vllm.py``: latency by class, goodput, and which system is ahead."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.workload.report import Objectives, Record, percentile

FACTORS = ((5.0, 5.0), (5.0, 3.0), (3.0, 2.0))
"""Objectives: multiples of the base's TTFT for as many images, and of its TPOT, both without load."""
FOR_P99 = 200
LEAST_ROUNDS = 5
CLASSES: Mapping[str, range] = {
    "text": range(1),
    "1-4 images": range(1, 5),
    "5-8 images": range(5, 9),
    "images": range(1, 9),
}


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The base's latency without load: the median TTFT by number of images, and TPOT."""

    ttft_s: tuple[float, ...]
    tpot_s: float

    def objectives(self, images: int, ttft_factor: float, tpot_factor: float) -> Objectives:
        return Objectives(ttft_factor * self.ttft_s[images], tpot_factor * self.tpot_s)


@dataclass(frozen=True, slots=True)
class Taken:
    """What one system did in one round at one rate."""

    system: str
    share: float
    rate: float
    """Requests per second, by the plan."""
    round: int
    records: tuple[Record, ...]
    cpu_s: float
    """Of all its processes."""

    def of(self, images: range) -> list[Record]:
        return [record for record in self.records if len(record.planned.images) in images]


@dataclass(frozen=True, slots=True)
class Run:
    capacity: float
    unloaded: Unloaded
    idle_core_share: float
    taken: tuple[Taken, ...]


def good(records: Sequence[Record], alone: Unloaded, factors: tuple[float, float]) -> int:
    """How many met their objectives."""
    return sum(alone.objectives(len(record.planned.images), *factors).met(record) for record in records)


def span_s(taken: Taken) -> float:
    """From the first request's time to the last answer's end."""
    return max(record.planned.arrival_s + record.end_s for record in taken.records)


def rows(result: Run) -> list[dict[str, Any]]:
    """Rows, one per rate and system; ranges are those of the rounds."""
    made = []
    for share in sorted({taken.share for taken in result.taken}):
        for system in dict.fromkeys(taken.system for taken in result.taken):
            rounds = [taken for taken in result.taken if (taken.system, taken.share) == (system, share)]
            row: dict[str, Any] = {
                "share": share,
                "rate": round(share * result.capacity, 3),
                "system": system,
                "requests": sum(len(taken.records) for taken in rounds),
                "failed": sum(not record.ok for taken in rounds for record in taken.records),
                "sent_late_p99_s": round(
                    percentile([record.sent_late_s for taken in rounds for record in taken.records], 99), 3
                ),
                "cpu_s_per_request": _over([taken.cpu_s / len(taken.records) for taken in rounds]),
                "classes": {name: _class(rounds, images) for name, images in CLASSES.items()},
                "goodput": {
                    f"{ttft:g}x TTFT, {tpot:g}x TPOT": _over(
                        [good(taken.records, result.unloaded, (ttft, tpot)) / span_s(taken) for taken in rounds]
                    )
                    for ttft, tpot in FACTORS
                },
            }
            made.append(row)
    return made


def _class(rounds: Sequence[Taken], images: range) -> dict[str, Any]:
    """Times in seconds of the requests with so many images."""
    by_round = [[record for record in taken.of(images) if record.ok] for taken in rounds]
    pooled = [record for records in by_round for record in records]
    figures: dict[str, Any] = {"requests": sum(len(taken.of(images)) for taken in rounds), "answered": len(pooled)}
    for name, value in (("ttft", _ttft), ("tpot", _tpot)):
        for percent in (50, 90, 99):
            per_round = [percentile(times, percent) for records in by_round if (times := value(records))]
            if per_round:
                figures[f"{name}_p{percent}_s"] = {"all": round(percentile(value(pooled), percent), 4)} | _range(
                    per_round
                )
    return figures


def _ttft(records: Sequence[Record]) -> list[float]:
    return [record.ttft_s for record in records if record.ttft_s is not None]


def _tpot(records: Sequence[Record]) -> list[float]:
    return [record.tpot_s for record in records if record.tpot_s is not None]


def _over(values: Sequence[float]) -> dict[str, float]:
    return {"all": round(statistics.fmean(values), 4)} | _range(values)


def _range(values: Sequence[float]) -> dict[str, float]:
    return {"least": round(min(values), 4), "most": round(max(values), 4)}


def ahead(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    """Whether the first time is shorter, in every round than in any of the second's."""
    return first["most"] < second["least"]


def verdicts(made: Sequence[dict[str, Any]], rounds: int) -> list[str]:
    """The comparisons that were named before the run."""
    if rounds < LEAST_ROUNDS:
        return [f"{rounds} rounds are too few to say which system is ahead: at least {LEAST_ROUNDS}"]
    said = []
    for system, other, name in (
        ("triptych-vllm", "vllm-apart", "text"),
        ("triptych-vllm", "vllm-apart", "images"),
        *(
            (system, "vllm", name)
            for system in ("triptych-vllm", "triptych-apart", "triptych-hybrid")
            for name in ("text", "images")
        ),
    ):
        for first in (row for row in made if row["system"] == system):
            second = next((row for row in made if row["system"] == other and row["share"] == first["share"]), None)
            if second is None:
                continue
            mine, its = (_tail(row["classes"][name]) for row in (first, second))
            if mine is None or its is None or mine[0] != its[0]:
                continue
            ours, theirs = mine[1], its[1]
            word = (
                "ahead of" if ahead(ours, theirs) else "behind" if ahead(theirs, ours) else "not distinguishable from"
            )
            said.append(f"{first['share']:.0%}: {system} is {word} {other} in {mine[0]} of {name}: {ours} and {theirs}")
    return said


def _tail(figures: Mapping[str, Any]) -> tuple[str, Mapping[str, float]] | None:
    key = "ttft_p99_s" if figures["answered"] >= FOR_P99 else "ttft_p90_s"
    return (key, figures[key]) if key in figures else None


def ratios(made: Sequence[dict[str, Any]], others: Sequence[str]) -> list[str]:
    """P99 TTFT of images, and goodput, of each system over those of ``others``, by rate. Few requests' P99 is near their maximum."""
    said = []
    factors = "{:g}x TTFT, {:g}x TPOT".format(*FACTORS[0])
    for row in made:
        late_s, good_per_s = _late_s(row), row["goodput"][factors]["all"]
        if late_s is None or row["system"] == others[0]:
            continue
        beside = [other for other in made if other["system"] in others and other["share"] == row["share"]]
        parts = [
            f"{late_s / its_s:.2f} and {good_per_s / its_good:.2f} of {other['system']}"
            for other in beside
            if other is not row and (its_s := _late_s(other)) and (its_good := other["goodput"][factors]["all"])
        ]
        said.append(
            f"{row['share']:.0%}: {row['system']}: P99 TTFT of {row['classes']['images']['answered']} with images {late_s:.1f} s, goodput {good_per_s:.2f}/s: "
            f"{'; '.join(parts)}"
        )
    return said


def _late_s(row: Mapping[str, Any]) -> float | None:
    found = row["classes"]["images"].get("ttft_p99_s")
    return None if found is None else float(found["all"])


def show(made: Sequence[dict[str, Any]], rounds: int) -> None:
    for row in made:
        print(
            f"\n{row['share']:.0%} ({row['rate']} requests/s)  {row['system']}: {row['requests']} requests, {row['failed']} failed, "
            f"sent late P99 {row['sent_late_p99_s']} s, CPU {row['cpu_s_per_request']['all']} s a request"
        )
        for name, figures in row["classes"].items():
            times = "  ".join(
                f"{key.removesuffix('_s')} {value['all']} ({value['least']} to {value['most']})"
                for key, value in figures.items()
                if isinstance(value, dict)
            )
            print(f"  {name:>10}: {figures['answered']} of {figures['requests']} answered  {times}")
        for name, value in row["goodput"].items():
            print(f"  goodput at {name}: {value['all']} requests/s ({value['least']} to {value['most']})")
    print()
    for line in verdicts(made, rounds):
        print(line)


def document(result: Run) -> list[dict[str, Any]]:
    """Every request: images, and what became of it."""
    return [
        {
            "system": taken.system,
            "share": taken.share,
            "round": taken.round,
            "cpu_s": round(taken.cpu_s, 3),
            "requests": [
                [len(r.planned.images), round(r.planned.arrival_s, 3), _rounded(r.ttft_s), _rounded(r.tpot_s), r.error]
                for r in taken.records
            ],
        }
        for taken in result.taken
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
