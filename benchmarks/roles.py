"""Where it pays to separate encode, prefill and decode, and where it costs: goodput of placements with equally many instances.

Local clusters of real processes: router, gateway, and four instances whose engines sleep as a synthetic profile says, so that they take no CPU from
each other. Every placement gets the same requests at rising rates (Poisson), each with one image of 576 tokens:

- ``first token``: long prompts, few output tokens, a strict objective for the time to the first token;
- ``each token``: short prompts, many output tokens, a strict objective for the time per output token.

*Goodput* is the highest of the rates at which at least 90 % of the requests meet both objectives. Rates rise until a placement misses twice in a row.
``EPD`` has unlimited budgets: a step takes whole prompts, and encodes a batch of images beside decodes. ``EPD, budgets`` computes at most 256 tokens of
prompts in a step, and one image between two steps.
"""

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import uvloop

from benchmarks import ending, machine
from benchmarks.bursts import IMAGE, Delays, Served
from benchmarks.figures import add_json_option, write_figures
from triptych.cli.bench import load
from triptych.cli.bench.load import Endpoint, Record
from triptych.cli.bench.payload import Style
from triptych.cli.bench.report import Objectives, Report, goodput, summarize
from triptych.cli.bench.workload import Distribution, Mix, synthetic
from triptych.cli.cluster import LocalCluster
from triptych.testing.delay_models import Attention

ATTAINMENT = 0.9
DELAYS = Delays(image_s=0.12, prompt_token_s=0.00025, step_s=0.02, load_s=0.2)
_ONE_IMAGE = ("--max-batch-items", "1", "--arena-bytes", str(64 << 20))
_BATCHES = ("--max-batch-items", "8", "--arena-bytes", str(64 << 20))
_UNLIMITED = 8192


@dataclass(frozen=True, slots=True)
class Placement:
    """Four instances."""

    name: str
    roles: str
    token_budget: int = _UNLIMITED
    encoder: tuple[str, ...] = _ONE_IMAGE


PLACEMENTS = (
    Placement("EPD", "EPD:4", encoder=_BATCHES),
    Placement("EPD, budgets", "EPD:4", token_budget=256),
    Placement("E+PD", "E:1,PD:3"),
    Placement("E+PD, budgets", "E:1,PD:3", token_budget=256),
    Placement("E+P+D", "E:1,P:1,D:2"),
    Placement("E+P+D, more P", "E:1,P:2,D:1"),
    Placement("EP+D", "EP:2,D:2"),
    Placement("EP+D, more EP", "EP:3,D:1"),
    Placement("ED+P", "ED:2,P:2"),
    Placement("ED+P, more ED", "ED:3,P:1"),
)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are alike, and what they are to meet."""

    text_tokens: str
    output_tokens: str
    objectives: Objectives
    rates: tuple[float, ...]

    @property
    def mix(self) -> Mix:
        tokens = (Distribution.parse(self.text_tokens), Distribution.parse(self.output_tokens))
        return Mix(Distribution.parse("1"), *tokens, IMAGE)


LOADS: Mapping[str, Load] = MappingProxyType(
    {
        "first token": Load("600:1,1200:1", "8:1,16:1", Objectives(1.2, 0.5), (1, 2, 3, 4, 5, 6, 7, 8)),
        "each token": Load("50:1,200:1", "48:1,96:1", Objectives(4.0, 0.05), (1, 2, 3, 4, 5, 6, 7, 8)),
    }
)


@dataclass(frozen=True, slots=True)
class Settings:
    seconds: float = 30.0
    """Of each rate."""
    seed: int = 16
    placements: tuple[str, ...] = tuple(one.name for one in PLACEMENTS)
    loads: tuple[str, ...] = tuple(LOADS)
    most_rates: int = 8


QUICK = Settings(seconds=3.0, placements=("E+PD", "E+P+D"), loads=("first token",), most_rates=1)


def options_of(served: Served, placement: Placement) -> dict[str, tuple[str, ...]]:
    options = served.options
    delayed = ("--delay-profile", str(served.profiles))
    return {
        "encoder": (*delayed, *placement.encoder),
        "mounted_encoder": placement.encoder,
        "text": (*options["text"], "--token-budget", str(placement.token_budget), "--max-sequences", "64"),
    }


async def at_rate(url: str, wanted: Load, rate: float, settings: Settings) -> list[Record]:
    """The same requests for every placement."""
    rng = random.Random(f"{settings.seed} {rate} {wanted.text_tokens}")
    plan = synthetic(wanted.mix, rate=rate, duration_s=settings.seconds, burstiness=1.0, rng=rng)
    records: list[Record] = []
    endpoint = Endpoint(url, timeout_s=60.0)
    style = Style(await load.model_to_ask(endpoint, None), ignore_eos=True)
    await load.run(endpoint, plan.requests, style, rng, records.append)
    return records


async def measured(
    served: Served, placement: Placement, name: str, settings: Settings, note: Callable[[str], None]
) -> dict[str, Any]:
    wanted = LOADS[name]
    reports: list[Report] = []
    async with LocalCluster(
        f"roles={served.model}", roles=placement.roles, options=options_of(served, placement)
    ) as up:
        warm = replace(settings, seconds=2.0)
        await at_rate(up.url, wanted, 1.0, warm)
        for rate in wanted.rates[: settings.most_rates]:
            records = await at_rate(up.url, wanted, rate, settings)
            reports.append(summarize(records, wanted.objectives, rate))
            note(_line(placement, name, reports[-1]))
            if all((one.attainment or 0.0) < ATTAINMENT for one in reports[-2:]) and len(reports) > 1:
                break
    return {
        "placement": placement.name,
        "roles": placement.roles,
        "load": name,
        "goodput": goodput(reports, ATTAINMENT),
        "rates": [one.document() for one in reports],
    }


def _line(placement: Placement, name: str, report: Report) -> str:
    def ms(value_s: float | None) -> str:
        return "-" if value_s is None else f"{1e3 * value_s:.0f}"

    return (
        f"{placement.name:>14}, {name}: {report.rate:g}/s, {report.requests} requests, {report.attainment:.0%} in time; "
        f"TTFT P50 {ms(report.ttft.p50_s)} P90 {ms(report.ttft.p90_s)} ms, TPOT P50 {ms(report.tpot.p50_s)} P90 {ms(report.tpot.p90_s)} ms"
        + (f"; {report.errors}" if report.errors else "")
        + ("" if report.kept_up else "; the clients did not keep up")
    )


def _chosen(settings: Settings) -> Iterator[tuple[str, Placement]]:
    by_name = {one.name: one for one in PLACEMENTS}
    for name in settings.loads:
        for placement in settings.placements:
            yield name, by_name[placement]


async def run(settings: Settings, note: Callable[[str], None]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        served = Served.written(Path(folder), Attention.DECODER_ONLY, DELAYS)
        return [await measured(served, placement, name, settings, note) for name, placement in _chosen(settings)]


def show(rows: Sequence[dict[str, Any]]) -> None:
    for name in dict.fromkeys(row["load"] for row in rows):
        print(f"goodput, requests/s, load {name!r}:")
        for row in sorted((row for row in rows if row["load"] == name), key=lambda row: -row["goodput"]):
            print(f"  {row['goodput']:>4g}  {row['placement']} ({row['roles']})")


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="a few seconds of two placements: shows that it works")
    parser.add_argument("--seconds", type=float, default=Settings().seconds, help="of each rate")
    parser.add_argument("--placements", help="of those above, separated by semicolons")
    parser.add_argument("--loads", help="of those above, separated by semicolons")
    arguments = parser.parse_args()
    settings = QUICK if arguments.quick else Settings(seconds=arguments.seconds)
    if arguments.placements:
        settings = replace(settings, placements=tuple(arguments.placements.split(";")))
    if arguments.loads:
        settings = replace(settings, loads=tuple(arguments.loads.split(";")))
    described = machine.describe()
    print(f"{described['cpu']}, {described['cores']} cores; {settings}; {DELAYS}", flush=True)
    rows = uvloop.run(run(settings, lambda line: print(line, flush=True)))
    show(rows)
    said = {
        "placements": [asdict(one) for one in PLACEMENTS],
        "loads": {name: asdict(one) for name, one in LOADS.items()},
    }
    write_figures(
        arguments.json,
        {"machine": described, "settings": asdict(settings), "delays": asdict(DELAYS), **said, "rows": rows},
    )


if __name__ == "__main__":
    main()
