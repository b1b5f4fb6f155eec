"""What ``fidelity.py`` compares: figures of a run, errors of predictions, aims, and the order of placements."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from triptych.planning.conclusion import SIMPLER
from triptych.workload.report import Objectives, Record, percentile

ATTAINMENT = 0.9
AIMS = {"p50": 0.10, "p90": 0.10, "p99": 0.15}
"""Relative errors."""
GOODPUT_AIM = 0.10
LEAST_FOR_P99 = 200
"""Requests; of fewer a P99 is shown and not judged."""
UNDISTURBED = 0.1
"""Cores that others take, below which a run counts as undisturbed."""
APART = 0.10
"""Placements that differ by more are in an order."""
AGAIN = -1
"""The round of a cell that is repeated."""
ALL = "all"
"""The class of all requests."""
BOTH = "both"
OBJECTIVES = {BOTH: (5.0, 5.0), "first token": (2.5, 10.0), "other tokens": (10.0, 2.5), "loose": (10.0, 10.0)}
"""For TTFT and TPOT, in multiples of what a lone request takes."""
SIMPLEST = "EPD"
CHOICE_AIM = 0.05
"""What the chosen placement may lack of the best one's goodput."""

Percentiles = Mapping[str, float]
"""``p50``, ``p90`` and ``p99``, seconds."""


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """Of the requests of one class."""

    requests: int
    ttft_s: Percentiles
    tpot_s: Percentiles


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run."""

    failed: int
    classes: Mapping[str, ClassFigures]
    attainments: Mapping[str, float]
    """By name of the objectives."""

    @classmethod
    def of(cls, records: Sequence[Record], objectives: Mapping[str, Objectives]) -> "Figures":
        """Raises ValueError if no request was answered."""
        good = [record for record in records if record.ok]
        if not good:
            raise ValueError("no request was answered")
        kinds = sorted({record.planned.kind for record in good})
        classes = {ALL: good}
        if len(kinds) > 1:
            classes |= {kind: [record for record in good if record.planned.kind == kind] for kind in kinds}
        return cls(
            len(records) - len(good),
            {name: _class(answered) for name, answered in classes.items()},
            {name: sum(stated.met(record) for record in records) / len(records) for name, stated in objectives.items()},
        )


def _class(records: Sequence[Record]) -> ClassFigures:
    ttft_s = [record.ttft_s for record in records if record.ttft_s is not None]
    tpot_s = [record.tpot_s for record in records if record.tpot_s is not None]
    return ClassFigures(len(records), _percentiles(ttft_s), _percentiles(tpot_s))


def _percentiles(values: Sequence[float]) -> Percentiles:
    return {name: percentile(values, int(name[1:])) for name in AIMS} if values else {}


@dataclass(frozen=True, slots=True)
class Cell:
    """What is predicted and run. ``share``: of the capacity."""

    model: str
    placement: str
    mix: str
    share: float

    def __str__(self) -> str:
        return f"{self.model}, {self.placement}, {self.mix}, {self.share:.0%}"


@dataclass(frozen=True, slots=True)
class Result:
    """A run of a cell, and what was predicted of it."""

    cell: Cell
    round: int
    rate: float
    measured: Figures
    predicted: Figures
    stages_s: Mapping[str, tuple[float, float]]
    """Means over the requests, measured and predicted."""
    cores: tuple[float, float]
    """Cores that the cluster and its client took, measured and predicted."""
    foreign_cores: float
    """Cores that other processes took meanwhile."""
    pace: float = 1.0
    """CPU time of a lone prompt right after it, over that in the calibration, ..."""
    decode_pace: float = 1.0
    """... and of a step of a lone answer."""


@dataclass(frozen=True, slots=True)
class Error:
    """Of one figure: ``predicted / measured - 1``, of the medians over rounds."""

    cell: Cell
    of: str
    """Class of requests."""
    figure: str
    """``ttft p50``."""
    measured: float
    predicted: float
    judged: bool
    """Whether there were enough requests."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def within_aim(self) -> bool:
        return abs(self.error) <= AIMS[self.figure.split()[1]]


def errors(results: Sequence[Result]) -> list[Error]:
    """Of all cells, in their order."""
    found: list[Error] = []
    for cell, of_cell in by_cell(results).items():
        for name, first in of_cell[0].measured.classes.items():
            for metric in ("ttft", "tpot"):
                for quantile in AIMS:
                    pairs = list(_pairs(of_cell, name, f"{metric}_s", quantile))
                    if pairs:
                        measured, predicted = (middle([pair[at] for pair in pairs]) for at in (0, 1))
                        judged = quantile != "p99" or first.requests >= LEAST_FOR_P99
                        found.append(Error(cell, name, f"{metric} {quantile}", measured, predicted, judged))
    return found


def by_cell(results: Sequence[Result]) -> dict[Cell, list[Result]]:
    cells: dict[Cell, list[Result]] = {}
    for result in results:
        if result.round != AGAIN:
            cells.setdefault(result.cell, []).append(result)
    return cells


def _pairs(results: Sequence[Result], name: str, metric: str, quantile: str) -> Iterator[tuple[float, float]]:
    """Measured and predicted, of each round that has both."""
    for result in results:
        both = [figures.classes.get(name) for figures in (result.measured, result.predicted)]
        values = [getattr(figures, metric).get(quantile) for figures in both if figures is not None]
        if len(values) == 2 and all(values):
            yield values[0], values[1]


def middle(values: Sequence[float]) -> float:
    return percentile(values, 50)


@dataclass(frozen=True, slots=True)
class Order:
    """Two placements under the same requests, whose measured figure differs by more than ``APART``."""

    model: str
    mix: str
    share: float
    figure: str
    better: str
    """As measured: the one with less."""
    worse: str
    measured: float
    """How many times as much the worse one has."""
    predicted: float

    @property
    def right(self) -> bool:
        return self.predicted > 1


def orders(found: Sequence[Error]) -> list[Order]:
    """Of the figures of all requests."""
    at: dict[tuple[str, str, float, str], dict[str, Error]] = {}
    for error in found:
        if error.of == ALL and error.judged:
            cell = error.cell
            at.setdefault((cell.model, cell.mix, cell.share, error.figure), {})[cell.placement] = error
    made: list[Order] = []
    for place, placements in at.items():
        for placement, other in combinations(placements, 2):
            better, worse = sorted((placement, other), key=lambda name: placements[name].measured)
            measured = placements[worse].measured / placements[better].measured
            if measured > 1 + APART:
                predicted = placements[worse].predicted / placements[better].predicted
                made.append(Order(*place, better, worse, measured, predicted))
    return made


@dataclass(frozen=True, slots=True)
class Goodput:
    """Highest rate at which ``ATTAINMENT`` of the requests meet the objectives, between the loads of a placement and mix."""

    model: str
    placement: str
    mix: str
    objectives: str
    measured: float
    predicted: float
    highest: float
    """The highest rate that was offered: a goodput as high may be higher."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else float("inf") * (self.predicted > 0 or -0.0)


def goodputs(results: Sequence[Result]) -> list[Goodput]:
    """Goodput of each placement and mix with several loads, for each of the objectives."""
    by_place: dict[tuple[str, str, str], dict[float, list[Result]]] = {}
    for cell, of_cell in by_cell(results).items():
        by_place.setdefault((cell.model, cell.placement, cell.mix), {})[cell.share] = of_cell
    made = []
    for place, loads in by_place.items():
        if len(loads) < 2:
            continue
        rates = {share: middle([result.rate for result in loads[share]]) for share in sorted(loads)}
        for name in loads[min(loads)][0].measured.attainments:
            measured, predicted = (
                highest_rate(
                    [
                        (rate, middle([getattr(result, side).attainments[name] for result in loads[share]]))
                        for share, rate in rates.items()
                    ]
                )
                for side in ("measured", "predicted")
            )
            made.append(Goodput(*place, name, measured, predicted, max(rates.values())))
    return made


@dataclass(frozen=True, slots=True)
class Choice:
    """What ``triptych plan`` would run of these placements for goodput, by the predicted ones."""

    model: str
    mix: str
    objectives: str
    chosen: str
    best: str
    """As measured."""
    lacks: float
    """Share of the best one's measured goodput that the chosen one does not have."""

    @property
    def right(self) -> bool:
        return self.lacks <= CHOICE_AIM


def choices(found: Sequence[Goodput]) -> list[Choice]:
    """Of each mix and objectives that some placement meets."""
    by_question: dict[tuple[str, str, str], dict[str, Goodput]] = {}
    for goodput in found:
        question = goodput.model, goodput.mix, goodput.objectives
        by_question.setdefault(question, {})[goodput.placement] = goodput
    made = []
    for question, placements in by_question.items():
        measured, predicted = (
            {placement: getattr(goodput, side) for placement, goodput in placements.items()}
            for side in ("measured", "predicted")
        )
        if len(placements) < 2 or not max(measured.values()):
            continue
        best, chosen = (max(rates, key=rates.__getitem__) for rates in (measured, predicted))
        if predicted.get(SIMPLEST, 0.0) >= (1 - SIMPLER) * predicted[chosen]:
            chosen = SIMPLEST
        made.append(Choice(*question, chosen, best, 1 - measured[chosen] / measured[best]))
    return made


def highest_rate(attained: Sequence[tuple[float, float]]) -> float:
    """Where attainment, linear between these rates and all of the requests at none, falls below ``ATTAINMENT``."""
    before = (0.0, 1.0)
    for rate, share in attained:
        if share < ATTAINMENT:
            return before[0] + (rate - before[0]) * (before[1] - ATTAINMENT) / (before[1] - share)
        before = (rate, share)
    return before[0]


def drifts(results: Sequence[Result]) -> list[dict[str, object]]:
    """How far the repetitions of cells are from their first runs: nothing can be predicted better."""
    found: list[dict[str, object]] = []
    for again in (result for result in results if result.round == AGAIN):
        first = by_cell(results)[again.cell][0]
        changes = {
            f"{metric} {quantile}": getattr(again.measured.classes[ALL], f"{metric}_s")[quantile]
            / getattr(first.measured.classes[ALL], f"{metric}_s")[quantile]
            - 1
            for metric in ("ttft", "tpot")
            for quantile in AIMS
        }
        found.append({"cell": str(again.cell), **{name: round(change, 3) for name, change in changes.items()}})
    return found


def document(results: Sequence[Result]) -> dict[str, Any]:
    """All figures, and what is compared."""
    found, rates = errors(results), goodputs(results)
    return {
        "cells": [
            {
                **asdict(cell),
                "rate": middle([result.rate for result in of_cell]),
                "requests": of_cell[0].measured.classes[ALL].requests,
                "rounds": len(of_cell),
                "failed": sum(result.measured.failed for result in of_cell),
                "attainment": [
                    middle([getattr(result, side).attainments[BOTH] for result in of_cell])
                    for side in ("measured", "predicted")
                ],
                "cores": [middle([result.cores[at] for result in of_cell]) for at in (0, 1)],
                "foreign_cores": middle([result.foreign_cores for result in of_cell]),
                "pace": middle([result.pace for result in of_cell]),
                "decode_pace": middle([result.decode_pace for result in of_cell]),
                "stages_ms": {
                    stage: [1e3 * middle([result.stages_s[stage][at] for result in of_cell]) for at in (0, 1)]
                    for stage in of_cell[0].stages_s
                },
                "errors": [
                    {
                        "class": error.of,
                        "figure": error.figure,
                        "measured_ms": 1e3 * error.measured,
                        "predicted_ms": 1e3 * error.predicted,
                        "error": error.error,
                        "within": error.within_aim if error.judged else None,
                    }
                    for error in found
                    if error.cell == cell
                ],
            }
            for cell, of_cell in by_cell(results).items()
        ],
        "goodput": [{**asdict(goodput), "error": goodput.error} for goodput in rates],
        "choices": [{**asdict(choice), "right": choice.right} for choice in choices(rates)],
        "orders": [{**asdict(order), "right": order.right} for order in orders(found)],
        "drifts": drifts(results),
    }


def summary(compared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of what ``document`` has: by model, mix and figure, how many are within the aim, and how large errors are."""
    found: dict[tuple[str, str], dict[str, list[tuple[bool, float | None]]]] = {}

    def add(row: Mapping[str, Any], figure: str, good: bool, error: float | None) -> None:
        found.setdefault((row["model"], row["mix"]), {}).setdefault(figure, []).append((good, error))

    for cell in compared["cells"]:
        for error in cell["errors"]:
            if error["within"] is not None:
                add(cell, error["figure"], error["within"], error["error"])
    for row in compared["goodput"]:
        if min(row["measured"], row["predicted"]) < row["highest"]:  # else neither was found: both may be higher
            add(row, "goodput", abs(row["error"]) <= GOODPUT_AIM, row["error"])
    for figure in ("order", "choice"):
        for row in compared[f"{figure}s"]:
            add(row, figure, row["right"], None)
    rows: list[dict[str, Any]] = []
    for (model, mix), figures in found.items():
        for figure, judged in figures.items():
            sizes = sorted(abs(error) for _, error in judged if error is not None)
            rows.append(
                {
                    "model": model,
                    "mix": mix,
                    "figure": figure,
                    "within": sum(good for good, _ in judged),
                    "of": len(judged),
                    "median": middle(sizes) if sizes else None,
                    "worst": max(sizes) if sizes else None,
                }
            )
    return rows


def show(compared: Mapping[str, Any]) -> None:
    """Print every error, the order of placements, and the summary."""
    for cell in compared["cells"]:
        measured, predicted = cell["attainment"]
        print(
            f"{cell['model']}, {cell['placement']}, {cell['mix']}, {cell['share']:.0%}: {cell['rate']:.2f} requests/s, {cell['requests']} requests, "
            f"{cell['failed']} failed; {cell['cores'][0]:.2f} cores, predicted {cell['cores'][1]:.2f}, {cell['foreign_cores']:.2f} by others; pace {cell['pace']:.2f}, {cell['decode_pace']:.2f}; "
            f"in time {measured:.1%}, predicted {predicted:.1%}"
        )
        for error in cell["errors"]:
            mark = {None: "not judged", True: "", False: "beyond the aim"}[error["within"]]
            print(
                f"    {error['class']:>6} {error['figure']}: {error['measured_ms']:8.2f} ms, predicted {error['predicted_ms']:8.2f}: {error['error']:+.1%} {mark}"
            )
        stages = (f"{stage} {values[0]:.2f}, {values[1]:.2f}" for stage, values in cell["stages_ms"].items())
        print(f"    means, measured and predicted, ms: {'; '.join(stages)}")
    for goodput in compared["goodput"]:
        print(
            f"goodput of {goodput['model']}, {goodput['placement']}, {goodput['mix']}, {goodput['objectives']}: {goodput['measured']:.2f}, predicted {goodput['predicted']:.2f}: {goodput['error']:+.1%}"
            f"{' (the highest rate offered)' if goodput['measured'] == goodput['highest'] else ''}"
        )
    for order in compared["orders"]:
        print(
            f"{order['model']}, {order['mix']}, {order['share']:.0%}, {order['figure']}: {order['worse']} has {order['measured']:.2f} times {order['better']}'s, "
            f"predicted {order['predicted']:.2f}{'' if order['right'] else ': WRONG ORDER'}"
        )
    for choice in compared["choices"]:
        print(
            f"{choice['model']}, {choice['mix']}, {choice['objectives']}: {choice['chosen']} is chosen, and lacks {choice['lacks']:.1%} of the goodput of {choice['best']}"
        )
    for drift in compared["drifts"]:
        print(f"repeated: {drift}")
    for row in summary(compared):
        sizes = "" if row["median"] is None else f"; errors: median {row['median']:.1%}, worst {row['worst']:.1%}"
        print(f"{row['model']}, {row['mix']}, {row['figure']}: {row['within']} of {row['of']} within aim{sizes}")
