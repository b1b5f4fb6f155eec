"""Compares two deployments over the same requests: each figure of both, and the difference with its interval over seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from triptych.cli.outcome import CliError
from triptych.cli.simulate.command import INTERRUPTED, Outputs, Simulation, document_of, prices_of, print_effort
from triptych.cli.simulate.goodput import GoodputSearch
from triptych.cli.simulate.runs import Ran, run_all
from triptych.sim import html
from triptych.workload.interval import CONFIDENCE, Interval
from triptych.workload.report import Latency, Report
from triptych.workload.requests import WorkloadError

_PAIRED = f"difference of the means, {CONFIDENCE:.0%} interval by Student's t over the seeds' differences"


@dataclass(frozen=True, slots=True)
class Side:
    """A simulation of the two, with the name of its file."""

    name: str
    simulation: Simulation


@dataclass(frozen=True, slots=True)
class _Figure:
    name: str
    form: Callable[[float], str]
    of: Callable[[Ran, Report], float | None]


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of both simulations: means over the seeds that both have, and the paired difference."""

    rate: float | None
    """None for a figure over all rates."""
    figure: str
    first: float
    second: float
    difference: Interval
    form: Callable[[float], str]

    @property
    def cells(self) -> tuple[str, ...]:
        ends = self.difference.ends
        interval = "-" if ends is None else f"{_signed(self.form, ends[0])} to {_signed(self.form, ends[1])}"
        values = (self.form(self.first), self.form(self.second), _signed(self.form, self.difference.mean))
        return ("" if self.rate is None else f"{self.rate:.4g}", self.figure, *values, interval)

    def document(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "figure": self.figure,
            "means": [self.first, self.second],
            "difference": self.difference.mean,
            "interval": self.difference.ends,
            "seeds": self.difference.count,
        }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _dollars(value: float) -> str:
    return f"${value:.2f}"


def _signed(form: Callable[[float], str], value: float) -> str:
    """With a sign, unless it is shown as nothing."""
    text = form(abs(value))
    return text if text == form(0.0) else f"{'+' if value > 0 else '-'}{text}"


def _price(run: Ran, report: Report) -> float | None:
    prices = prices_of(run.case.simulation, run.outcome, report)
    return None if prices is None else prices.usd_per_thousand_requests


def _latency(name: str, of: Callable[[Report], Latency]) -> list[_Figure]:
    quantiles = {"mean": "mean_s", "P50": "p50_s", "P90": "p90_s", "P99": "p99_s"}
    return [
        _Figure(f"{name} {title}", _ms, lambda _, report, field=field: getattr(of(report), field))  # type: ignore[misc]
        for title, field in quantiles.items()
    ]


_FIGURES = (
    *_latency("TTFT", lambda report: report.ttft),
    *_latency("TPOT", lambda report: report.tpot),
    *_latency("end to end", lambda report: report.e2e),
    _Figure("attainment", _percent, lambda _, report: report.attainment),
    _Figure("answered", _percent, lambda _, report: report.answered / report.requests),
    _Figure("answers/s", _number, lambda _, report: report.requests_per_s),
    _Figure("tokens/s", _number, lambda _, report: report.output_tokens_per_s),
    _Figure("price of 1000 requests", _dollars, _price),
)
_GOODPUT = "goodput, requests/s"


def compare(pair: tuple[Side, Side], outputs: Outputs, console: Console) -> None:
    """Run both, show and write their differences. Interrupted, it does so with what there is. Raises CliError, WorkloadError."""
    if outputs.trace is not None:
        raise CliError("--perfetto shows one run: leave it out with --compare", caller=True)
    _refuse_different(pair)
    searches = [side.simulation.search() for side in pair]
    cases = []
    for side, search in zip(pair, searches, strict=True):
        try:
            cases += side.simulation.first_cases(search)
        except WorkloadError as error:
            raise WorkloadError(f"{side.name}: {error}") from None
        for note in side.simulation.simulated.notes:
            console.print(f"{side.name}: {note}", soft_wrap=True, style="dim")

    def number_of(run: Ran) -> int:
        return next(number for number, side in enumerate(pair) if side.simulation is run.case.simulation)

    ran, is_whole = run_all(cases, console, lambda run: run.case.simulation.next_case(searches[number_of(run)], run))
    of_side = [[run for run in ran if number_of(run) == number] for number in range(len(pair))]
    found = _of_goodput(searches) if any(searches) else _differences(of_side)
    _show(pair, found, searches, console)
    if ran:
        print_effort([run.outcome for run in ran], _fidelity(pair), console)
        _write(pair, of_side, found, searches, outputs, is_whole=is_whole)
    if not is_whole:
        raise KeyboardInterrupt
    for side, search in zip(pair, searches, strict=True):
        if search is not None and search.fault:
            raise CliError(f"{side.name}: {search.fault}", caller=True)


def _fidelity(pair: tuple[Side, Side]) -> str:
    return " | ".join(dict.fromkeys(side.simulation.fidelity for side in pair))


def _refuse_different(pair: tuple[Side, Side]) -> None:
    """Raise CliError unless both simulations have the same requests, and the same rules by which they count."""
    names = ("seeds", "bracket", "objectives", "attainment", "timeout_s", "warm_up_s")
    facts = [
        {field.name: getattr(side.simulation.workload, field.name) for field in fields(side.simulation.workload)}
        | {name: getattr(side.simulation, name) for name in names}
        for side in pair
    ]
    if different := [name for name in facts[0] if facts[0][name] != facts[1][name]]:
        first, second = (side.name for side in pair)
        said = ", ".join(name.removesuffix("_s").replace("_", " ") for name in different)
        raise CliError(
            f"{first} and {second} have different workloads ({said}): give these options on the command line, for both",
            caller=True,
        )


def _differences(of_side: Sequence[Sequence[Ran]]) -> list[Difference]:
    known: list[dict[tuple[float, int], tuple[Ran, Report]]] = [
        {(run.outcome.rate, run.case.seed): (run, run.case.simulation.report(run.outcome)) for run in runs}
        for runs in of_side
    ]
    both = sorted(known[0].keys() & known[1].keys())
    found = []
    for rate in sorted({rate for rate, _ in both}):
        keys = [key for key in both if key[0] == rate]
        for figure in _FIGURES:
            pairs = [(figure.of(*known[0][key]), figure.of(*known[1][key])) for key in keys]
            found += _paired(rate, figure.name, figure.form, pairs)
    return found


def _of_goodput(searches: Sequence[GoodputSearch | None]) -> list[Difference]:
    first, second = (None if search is None else search.found() for search in searches)
    if first is None or second is None:
        return []
    pairs = [(first.by_seed[seed], second.by_seed[seed]) for seed in first.by_seed]
    return _paired(None, _GOODPUT, _number, pairs)


def _paired(
    rate: float | None,
    figure: str,
    form: Callable[[float], str],
    pairs: Sequence[tuple[float | None, float | None]],
) -> list[Difference]:
    """The difference of a figure, over the seeds for which both have it; none if there is no such seed."""
    known = [(first, second) for first, second in pairs if first is not None and second is not None]
    if not known:
        return []
    means = [sum(values) / len(known) for values in zip(*known, strict=True)]
    return [
        Difference(rate, figure, means[0], means[1], Interval.of([second - first for first, second in known]), form)
    ]


def _header(pair: tuple[Side, Side]) -> tuple[str, ...]:
    first, second = (side.name for side in pair)
    return ("requests/s", "", first, second, f"{second} - {first}", f"{CONFIDENCE:.0%} interval")


def _show(
    pair: tuple[Side, Side],
    found: Sequence[Difference],
    searches: Sequence[GoodputSearch | None],
    console: Console,
) -> None:
    table = Table(*_header(pair), box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for difference in found:
        table.add_row(*difference.cells)
    if found:
        console.print(table)
        seeds = pair[0].simulation.seeds
        how = _PAIRED if seeds > 1 else "one seed has no interval: --seeds 5 gives one"
        console.print(f"the same requests in both, seeds: {seeds}; {how}", soft_wrap=True, style="dim")
    for side, search in zip(pair, searches, strict=True):
        if search is not None and search.found() is not None:
            console.print(f"{side.name}: {search.finding}", soft_wrap=True)


def _write(
    pair: tuple[Side, Side],
    of_side: Sequence[Sequence[Ran]],
    found: Sequence[Difference],
    searches: Sequence[GoodputSearch | None],
    outputs: Outputs,
    *,
    is_whole: bool,
) -> None:
    """Raises CliError."""
    document: Mapping[str, Any] = {
        "mode": _fidelity(pair),
        "interrupted": not is_whole,
        "compared": [side.name for side in pair],
        "method": _PAIRED,
        "differences": [difference.document() for difference in found],
        "simulations": [
            document_of(side.simulation, [run.outcome for run in runs], search, is_whole=is_whole)
            for side, runs, search in zip(pair, of_side, searches, strict=True)
        ],
    }
    first, second = pair
    names = dict.fromkeys((*first.simulation.settings, *second.simulation.settings))
    settings = {
        name: " | ".join(dict.fromkeys(side.simulation.settings.get(name, "-") for side in pair)) for name in names
    }
    notes = [f"{side.name}: {note}" for side in pair for note in side.simulation.simulated.notes]
    page = html.Page(
        f"{first.name} and {second.name} compared",
        settings,
        (f"simulated by {_fidelity(pair)}", *notes, *(() if is_whole else (INTERRUPTED,))),
        first.simulation.objectives,
        {**first.simulation.simulated.prices, **second.simulation.simulated.prices},
        [f"{side.name}: {search.finding}" for side, search in zip(pair, searches, strict=True) if search is not None],
        (),
        html.Grid(_header(pair), [difference.cells for difference in found], _PAIRED),
    )
    outputs.write(document, page)
