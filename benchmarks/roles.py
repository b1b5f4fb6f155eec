"""Where it pays to separate encode, prefill and decode, and where it costs: goodput of placements with equally many instances.

Local clusters of real processes: router, gateway, and four instances. With ``--engine delay`` these sleep as a synthetic profile says, so that
they take no CPU from each other; with ``--engine real`` they compute, one thread each, a random Qwen2.5-VL of about 50 million parameters, and
share the machine's cores. Every placement gets the same requests (Poisson):

- ``first token``: long prompts, few output tokens, a strict objective for the time to the first token;
- ``each token``: short prompts, many output tokens, a strict objective for the time per output token;
- both with an image in each request, and, for ``PD`` and ``P+D``, which do not encode, without (engines that sleep only).

*Goodput* is the highest of the load's rates at which at least 90 % of the requests meet both objectives, found by bisection: it is taken that
who misses at a rate misses at higher ones. ``EPD`` and ``PD`` have unlimited budgets: a step takes whole prompts, and encodes a batch of
images beside decodes. With ``budgets`` a step computes few tokens of prompts, and one image is encoded between two steps. Elsewhere than in
``EPD, defaults`` (engines that compute only) images may take any share of the time (``--encode-share 1``).

Objectives of the engines that compute are multiples of what the first placement (``EPD``) takes for one request at a time.
A whole run takes at most about twelve minutes with either engine.
"""

import argparse
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import uvloop

from benchmarks import ending, machine, random_qwen
from benchmarks.bursts import IMAGE, Delays, Served
from benchmarks.figures import add_json_option, write_figures
from triptych.cli.bench import load
from triptych.cli.bench.load import Endpoint
from triptych.cli.bench.payload import Style
from triptych.cli.cluster import LocalCluster
from triptych.runtime.clock import monotonic
from triptych.testing.delay_models import Attention
from triptych.workload.report import Objectives, Record, Report, goodput, summarize
from triptych.workload.requests import Distribution, Mix, Planned, Size

ATTAINMENT = 0.9
DELAY, REAL = "delay", "real"
DELAYS = Delays(image_s=0.12, prompt_token_s=0.00025, step_s=0.02, load_s=0.2)
_ONE_IMAGE = ("--max-batch-items", "1", "--arena-bytes", str(64 << 20))
_BATCHES = ("--max-batch-items", "8", "--max-batch-tokens", "2048", "--arena-bytes", str(64 << 20))
_UNLIMITED = 8192
_PATIENCE_S, _LONG_PATIENCE_S = 20.0, 100.0
"""Of a client under load, and without."""
_ALONE = 6
"""Requests that are sent one by one to learn what they take, the first of which is not counted."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Four instances; where requests have no images, beside an idle encoder, without which no cluster starts."""

    name: str
    roles: str
    budgets: bool = False
    defaults: bool = False
    """As started without options."""


PLACEMENTS = (
    Placement("EPD", "EPD:4"),
    Placement("EPD, budgets", "EPD:4", budgets=True),
    Placement("EPD, defaults", "EPD:4", defaults=True),
    Placement("E+PD", "E:1,PD:3"),
    Placement("E+PD, budgets", "E:1,PD:3", budgets=True),
    Placement("E+P+D", "E:1,P:1,D:2"),
    Placement("E+P+D, more P", "E:1,P:2,D:1"),
    Placement("EP+D", "EP:2,D:2"),
    Placement("EP+D, more EP", "EP:3,D:1"),
    Placement("ED+P", "ED:2,P:2"),
    Placement("ED+P, more P", "ED:1,P:3"),
    Placement("ED+P, more ED", "ED:3,P:1"),
    Placement("PD", "E:1,PD:4"),
    Placement("PD, budgets", "E:1,PD:4", budgets=True),
    Placement("P+D", "E:1,P:2,D:2"),
    Placement("P+D, more P", "E:1,P:3,D:1"),
)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are alike, and what they are to meet."""

    text_tokens: str
    output_tokens: str
    ttft: float
    tpot: float
    """Objectives in seconds; with engines that compute, in multiples of what a request takes alone."""
    rates: tuple[float, ...]
    placements: tuple[str, ...]
    """Placements to compare: of each separation the numbers that the stages' times per request suggest."""
    image: Size | None = IMAGE

    @property
    def mix(self) -> Mix:
        tokens = (Distribution.parse(self.text_tokens), Distribution.parse(self.output_tokens))
        return Mix(Distribution.parse("0" if self.image is None else "1"), *tokens, self.image or IMAGE)


_TOGETHER = ("EPD", "EPD, budgets", "E+PD")
_FOR_FIRST = (*_TOGETHER, "E+P+D, more P", "EP+D, more EP", "ED+P, more P")
_FOR_EACH = (*_TOGETHER, "E+P+D", "EP+D", "ED+P")
_DEFAULTS = ("EPD, defaults",)
"""Of engines that compute, which measure what they do together."""
_RATES, _TEXT_RATES = (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), (6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0)
_REAL_RATES = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
_REAL_IMAGE = Size(224, 224)
_FIRST, _EACH = (1.2, 0.5), (4.0, 0.05)
"""Objectives of the engines that sleep."""
LOADS: Mapping[str, Mapping[str, Load]] = MappingProxyType(
    {
        DELAY: {
            "first token": Load("600:1,1200:1", "8:1,16:1", *_FIRST, _RATES, _FOR_FIRST),
            "each token": Load("50:1,200:1", "48:1,96:1", *_EACH, _RATES, _FOR_EACH),
            "first token, text": Load(
                "600:1,1200:1", "8:1,16:1", *_FIRST, _TEXT_RATES, ("PD", "PD, budgets", "P+D, more P"), image=None
            ),
            "each token, text": Load(
                "50:1,200:1", "48:1,96:1", *_EACH, _TEXT_RATES, ("PD", "PD, budgets", "P+D"), image=None
            ),
        },
        REAL: {
            "first token": Load("100:1,200:1", "8:1", 4.0, 10.0, _REAL_RATES, _FOR_FIRST + _DEFAULTS, _REAL_IMAGE),
            "each token": Load("12:1,48:1", "48:1", 10.0, 3.0, _REAL_RATES, _FOR_EACH + _DEFAULTS, _REAL_IMAGE),
        },
    }
)


@dataclass(frozen=True, slots=True)
class Settings:
    engine: str = DELAY
    seconds: float = 10.0
    """Of each rate."""
    seed: int = 16
    placements: tuple[str, ...] = ()
    """Instead of those of each load."""
    loads: tuple[str, ...] = ()
    """Instead of all."""
    most_rates: int = 7

    @property
    def wanted(self) -> dict[str, Load]:
        """The loads, by name."""
        loads = LOADS[self.engine]
        return {name: loads[name] for name in self.loads or loads}


QUICK = Settings(seconds=3.0, placements=("E+PD", "E+P+D"), loads=("first token",), most_rates=1)


@dataclass(frozen=True, slots=True)
class Model:
    """What is served, and by which flags of the instances."""

    path: Path
    delays: tuple[str, ...]
    """Empty for engines that compute."""
    budget_tokens: int
    """Of prompts in a step, where there are budgets."""

    @classmethod
    def written(cls, engine: str, folder: Path) -> "Model":
        if engine == DELAY:
            served = Served.written(folder, Attention.DECODER_ONLY, DELAYS)
            return cls(served.model, ("--delay-profile", str(served.profiles)), 256)
        random_qwen.make(folder, random_qwen.FIFTY_MILLION)
        return cls(folder, (), 64)

    def options(self, placement: Placement) -> dict[str, tuple[str, ...]]:
        encoder = _BATCHES if placement.roles.startswith("EPD") and not placement.budgets else _ONE_IMAGE
        budget = self.budget_tokens if placement.budgets else _UNLIMITED
        if placement.defaults:
            return {}
        return {
            "encoder": (*self.delays, *encoder),
            "mounted_encoder": encoder,
            "text": (
                *(*self.delays, "--image-cache-bytes", str(64 << 20)),
                *("--token-budget", str(budget), "--max-sequences", "64", "--encode-share", "1"),
            ),
        }


async def sent(
    url: str, requests: Sequence[Planned], rng: random.Random, patience_s: float = _PATIENCE_S
) -> list[Record]:
    records: list[Record] = []
    endpoint = Endpoint(url, timeout_s=patience_s)
    style = Style(await load.model_to_ask(endpoint, None), ignore_eos=True)
    await load.run(endpoint, requests, style, rng, records.append)
    return records


def planned(wanted: Load, rate: float, settings: Settings) -> list[Planned]:
    """The same for every placement: as many requests as the rate says, at times of a Poisson process that has so many. At a higher
    rate there are more of them, after the same ones.
    """
    arrivals, requests = (
        random.Random(f"{settings.seed} {wanted.text_tokens} {of}") for of in ("arrivals", "requests")
    )
    number = max(1, round(rate * settings.seconds))
    times = sorted(arrivals.uniform(0, settings.seconds) for _ in range(number))
    return [wanted.mix.request(at_s, requests) for at_s in times]


async def at_rate(url: str, wanted: Load, rate: float, settings: Settings) -> list[Record]:
    return await sent(url, planned(wanted, rate, settings), random.Random(f"{settings.seed} {rate}"))


async def alone(url: str, wanted: Load) -> tuple[float, float]:
    """TTFT and TPOT of one request at a time: medians, in seconds."""
    rng = random.Random(wanted.text_tokens)
    records: list[Record] = []
    for _ in range(_ALONE):
        records += await sent(url, [wanted.mix.request(0.0, rng)], rng, _LONG_PATIENCE_S)
    del records[0]
    ttft_s = [record.ttft_s for record in records if record.ttft_s is not None]
    tpot_s = [record.tpot_s for record in records if record.tpot_s is not None]
    if len(ttft_s) < len(records):
        raise RuntimeError(f"requests fail without load: {[record.error for record in records]}")
    return statistics.median(ttft_s), statistics.median(tpot_s)


class Comparison:
    """Measures placements one after the other."""

    def __init__(self, settings: Settings, model: Model, note: Callable[[str], None]) -> None:
        self._settings = settings
        self._model = model
        self._note = note
        self.objectives = {name: Objectives(wanted.ttft, wanted.tpot) for name, wanted in settings.wanted.items()}
        self._are_measured = settings.engine == DELAY

    async def run(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        chosen = {
            name: self._settings.placements or wanted.placements for name, wanted in self._settings.wanted.items()
        }
        for placement in PLACEMENTS:
            if names := [name for name, placements in chosen.items() if placement.name in placements]:
                rows += await self._of(placement, names)
        return rows

    async def _of(self, placement: Placement, names: Sequence[str]) -> list[dict[str, Any]]:
        model = f"roles={self._model.path}"
        async with LocalCluster(model, roles=placement.roles, options=self._model.options(placement)) as up:
            if not self._are_measured:
                await self._measure_objectives(up.url)
            rows: list[dict[str, Any]] = []
            for name in names:
                await at_rate(up.url, self._settings.wanted[name], 1.0, replace(self._settings, seconds=2.0))
                reports = await self._bisected(up.url, placement, name)
                rows.append(
                    {
                        "placement": placement.name,
                        "roles": placement.roles,
                        "load": name,
                        "goodput": goodput(reports, ATTAINMENT),
                        "rates": [report.document() for report in reports],
                    }
                )
        return rows

    async def _measure_objectives(self, url: str) -> None:
        """From now on in seconds."""
        self._are_measured = True
        for name, wanted in self._settings.wanted.items():
            ttft_s, tpot_s = await alone(url, wanted)
            self.objectives[name] = Objectives(wanted.ttft * ttft_s, wanted.tpot * tpot_s)
            self._note(f"alone, {name}: TTFT {ttft_s:.3f} s, TPOT {tpot_s:.4f} s; {self.objectives[name]}")

    async def _bisected(self, url: str, placement: Placement, name: str) -> list[Report]:
        """Reports, of which the last to meet the objectives and the first to miss them are at neighbouring rates."""
        wanted, objectives = self._settings.wanted[name], self.objectives[name]
        rates = wanted.rates[: self._settings.most_rates]
        met, missed = -1, len(rates)
        reports: list[Report] = []
        while missed - met > 1:
            number = (met + missed) // 2
            records = await at_rate(url, wanted, rates[number], self._settings)
            report = summarize(records, objectives, rates[number])
            reports.append(report)
            self._note(_line(placement, name, report))
            if goodput([report], ATTAINMENT):
                met = number
            else:
                missed = number
        return reports


def _line(placement: Placement, name: str, report: Report) -> str:
    def ms(value_s: float | None) -> str:
        return "-" if value_s is None else f"{1e3 * value_s:.0f}"

    return (
        f"{placement.name:>14}, {name}: {report.rate:g}/s, {report.requests} requests, {report.attainment:.0%} in time; "
        f"TTFT P50 {ms(report.ttft.p50_s)} P90 {ms(report.ttft.p90_s)} ms, TPOT P50 {ms(report.tpot.p50_s)} P90 {ms(report.tpot.p90_s)} ms"
        + (f"; {report.errors}" if report.errors else "")
        + ("" if report.kept_up else "; the clients did not keep up")
    )


async def run(settings: Settings, note: Callable[[str], None]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows, and the objectives in seconds of each load."""
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        comparison = Comparison(settings, Model.written(settings.engine, Path(folder)), note)
        rows = await comparison.run()
        return rows, {name: asdict(objectives) for name, objectives in comparison.objectives.items()}


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Of the rows of one load: which placements win, which lose, and where the hybrid with budgets stands."""
    best, least = max(row["goodput"] for row in rows), min(row["goodput"] for row in rows)
    if best == least:
        return f"all have {best:g}"
    said = [
        f"{word}: {'; '.join(row['placement'] for row in rows if row['goodput'] == value)} ({value:g})"
        for word, value in (("best", best), ("least", least))
    ]
    said += [
        f"{row['placement']}: {row['goodput'] / best:.2f} times the best"
        for row in rows
        if row["placement"].endswith("budgets")
    ]
    return "; ".join(said)


def show(rows: Sequence[dict[str, Any]]) -> None:
    for name in dict.fromkeys(row["load"] for row in rows):
        of_load = sorted((row for row in rows if row["load"] == name), key=lambda row: -row["goodput"])
        print(f"goodput, requests/s, load {name!r}:")
        for row in of_load:
            print(f"  {row['goodput']:>4g}  {row['placement']} ({row['roles']})")
        print(f"  {verdict(of_load)}")


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--engine", choices=(DELAY, REAL), default=DELAY)
    parser.add_argument("--quick", action="store_true", help="a few seconds of two placements: shows that it works")
    parser.add_argument("--seconds", type=float, help="of each rate, instead of the default")
    parser.add_argument("--placements", help="of those above, separated by semicolons, instead of those of each load")
    parser.add_argument("--loads", help="of those above, separated by semicolons")
    arguments = parser.parse_args()
    settings = replace(QUICK if arguments.quick else Settings(), engine=arguments.engine)
    if arguments.seconds:
        settings = replace(settings, seconds=arguments.seconds)
    if arguments.placements:
        settings = replace(settings, placements=tuple(arguments.placements.split(";")))
    if arguments.loads:
        settings = replace(settings, loads=tuple(arguments.loads.split(";")))
    described = {**machine.describe(), "load_average_before": f"{os.getloadavg()[0]:.1f}"}
    of_engine = asdict(DELAYS if settings.engine == DELAY else random_qwen.FIFTY_MILLION)
    print("; ".join(f"{key} {value}" for key, value in described.items()))
    print(f"{settings}; {of_engine}", flush=True)
    began_s = monotonic()
    rows, objectives = uvloop.run(run(settings, lambda line: print(line, flush=True)))
    show(rows)
    described |= {"took_s": f"{monotonic() - began_s:.0f}", "load_average_after": f"{os.getloadavg()[0]:.1f}"}
    print(f"took {described['took_s']} s")
    said = {
        "settings": asdict(settings),
        "engine": of_engine,
        "placements": [asdict(placement) for placement in PLACEMENTS],
        "loads": {name: asdict(wanted) for name, wanted in settings.wanted.items()},
        "objectives": objectives,
    }
    write_figures(arguments.json, {"machine": described, **said, "rows": rows})


if __name__ == "__main__":
    main()
