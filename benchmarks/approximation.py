"""How far simulation by queues is from simulation by machines: latencies, goodput, and the order of placements.

LLaVA-1.5-7B on eight A100 of 80 GB, in the placements of the presets, with costs computed from its configuration. Both serve the same requests.
Capacity is the rate at which machines serve requests that are all there from the beginning; loads are shares of it. Objectives are twice the
90th percentile of TTFT and one and a half times that of TPOT, as machines have them at the least load. Goodput is the highest rate at
which 90 % of the requests are within both, by bisection to 4 %, up to one and a half times the capacity. Placements are in an order where a
figure differs by more than 10 %; P99 of so few requests is in none.
"""

import argparse
import json
import multiprocessing
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import ending, machine
from benchmarks.fidelity_report import (
    ALL,
    APART,
    ATTAINMENT,
    BOTH,
    Cell,
    Error,
    Figures,
    Result,
    errors,
    middle,
    orders,
)
from benchmarks.figures import add_json_option, write_figures
from triptych.cli.presets import PresetName
from triptych.cli.simulate.deployment import Hardware, deployment_of
from triptych.sim.machines.run import simulate as by_machines
from triptych.sim.outcome import Outcome
from triptych.sim.queues.run import simulate as by_queues
from triptych.sim.run import Simulate
from triptych.sim.scenario import Deployment
from triptych.workload.report import Objectives, percentile
from triptych.workload.requests import Distribution, Mix, Plan, Size, synthetic
from triptych.workload.search import Bracket, RateSearch

MODEL = "LLaVA-1.5-7B"
CONFIG: Mapping[str, Any] = {
    "model_type": "llava",
    "image_token_index": 32000,
    "torch_dtype": "float16",
    "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
    },
}
PLACEMENTS: Mapping[str, tuple[PresetName, str]] = {
    "E:2,PD:6": ("modserve", "E:2,PD:6"),
    "E:2,P:3,D:3": ("epd", "E:2,P:3,D:3"),
    "EP:5,D:3": ("distserve", "EP:5,D:3"),
    "EP:5,D:3 in budgets": ("hydra-ep-d", "EP:5,D:3"),
    "P:4,ED:4 in budgets": ("hydra-ed-p", "P:4,ED:4"),
    "EPD:8": ("monolith", "EPD:8"),
}
TEXT, ANSWER, IMAGE = (
    Distribution.parse("50:0.4,150:0.3,400:0.3"),
    Distribution.parse("20:0.3,80:0.4,200:0.3"),
    Size(672, 672),
)
MIXES = {
    "text": Mix(Distribution.parse("0"), TEXT, ANSWER, IMAGE),
    "mixed": Mix(Distribution.parse("0:0.4,1:0.4,3:0.2"), TEXT, ANSWER, IMAGE),
    "images": Mix(Distribution.parse("2:0.5,4:0.5"), TEXT, ANSWER, IMAGE),
}
WAYS: Mapping[str, Simulate] = {"machines": by_machines, "queues": by_queues}
_MOST_TIMES = 1.5
"""The highest rate of the search for goodput, of the capacity."""
_SLOWER, _SLOWER_TOKENS = 2.0, 1.5
"""How many times as long as at the least load a first token may take, and the time between two tokens."""


@dataclass(frozen=True, slots=True)
class Settings:
    placements: tuple[str, ...] = tuple(PLACEMENTS)
    mixes: tuple[str, ...] = tuple(MIXES)
    shares: tuple[float, ...] = (0.3, 0.6, 0.8)
    requests: int = 240
    """Of a run."""
    precision: float = 0.04
    """Of goodput."""
    processes: int = 2
    """That simulate side by side."""


QUICK = Settings(("E:2,PD:6",), ("mixed",), (0.5,), 160, 0.5, 1)


def deployment(placement: str) -> Deployment:
    preset, roles = PLACEMENTS[placement]
    with TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(CONFIG))
        return deployment_of(
            model=str(path),
            roles=roles,
            preset=preset,
            autoscale=False,
            switch_roles=False,
            hardware=Hardware("a100-80", "1", None, None, None, 8, 0.0003),
            given={"router": (), "encoder": (), "text": ("--max-sequences=64",), "pool_manager": (), "gateway": ()},
            faults=(),
        ).deployment


def plan(mix: str, rate: float, requests: int, seed: int) -> Plan:
    """The n-th request of a seed is the same at all rates."""
    return synthetic(MIXES[mix], rate=rate, duration_s=requests / rate, burstiness=1.0, rng=random.Random(seed))


def capacity(cluster: Deployment, mix: str, requests: int) -> float:
    """Requests per second, by machines, of requests that are all there from the beginning."""
    rng = random.Random(0)
    at_once = Plan([MIXES[mix].request(1e-6 * number, rng) for number in range(requests)], 1.0)
    outcome = by_machines(cluster, at_once, timeout_s=600.0)
    return sum(record.ok for record in outcome.records) / outcome.ended_s


def objectives_of(outcome: Outcome) -> Objectives:
    """By a run at the least load."""
    ttft_s = [record.ttft_s for record in outcome.records if record.ttft_s is not None]
    tpot_s = [record.tpot_s for record in outcome.records if record.tpot_s is not None]
    return Objectives(_SLOWER * percentile(ttft_s, 90), _SLOWER_TOKENS * percentile(tpot_s, 90))


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests per second."""

    placement: str
    mix: str
    capacity: float
    machines: float
    queues: float

    @property
    def error(self) -> float:
        return self.queues / self.machines - 1 if self.machines else float("inf")

    @property
    def is_unbounded(self) -> bool:
        """Whether both are the highest rate that was tried, and may be higher."""
        return min(self.machines, self.queues) >= _MOST_TIMES * self.capacity


def goodput(is_good: Callable[[float], bool], highest: float, precision: float) -> float:
    """The highest rate that is good, at most ``highest``; 0 if an eighth of that is not."""
    search = RateSearch(Bracket(highest / 8, highest), precision)
    while (rate := search.next_rate) is not None:
        search.tried(rate, is_good=is_good(rate))
    return search.good or 0.0


def measure_place(settings: Settings, placement: str, mix: str) -> tuple[list[Result], Goodput]:
    """All loads of a placement and mix, and its goodput."""
    cluster = deployment(placement)
    most, results, objectives = capacity(cluster, mix, settings.requests), list[Result](), Objectives()
    for share in settings.shares:
        requests = plan(mix, share * most, settings.requests, 0)
        outcomes = {name: simulate(cluster, requests) for name, simulate in WAYS.items()}
        if not objectives.any:
            objectives = objectives_of(outcomes["machines"])
        measured, predicted = (Figures.of(outcomes[name].records, {BOTH: objectives}) for name in WAYS)
        cell = Cell(MODEL, placement, mix, share)
        results.append(Result(cell, 0, share * most, measured, predicted, {}, (0.0, 0.0), 0.0))

    def is_good(simulate: Simulate, rate: float) -> bool:
        records = simulate(cluster, plan(mix, rate, settings.requests, 0)).records
        return sum(map(objectives.met, records)) >= ATTAINMENT * len(records)

    rates = [
        goodput(lambda rate, simulate=simulate: is_good(simulate, rate), _MOST_TIMES * most, settings.precision)  # type: ignore[misc]
        for simulate in WAYS.values()
    ]
    return results, Goodput(placement, mix, most, *rates)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two placements of which one is better by machines, and how many times as good it is by both."""

    mix: str
    load: str
    figure: str
    better: str
    worse: str
    machines: float
    queues: float

    @property
    def right(self) -> bool:
        return self.queues > 1


def pairs_of_latencies(found: Sequence[Error]) -> list[Pair]:
    return [
        Pair(
            order.mix,
            f"{order.share:.0%}",
            order.figure,
            order.better,
            order.worse,
            order.measured,
            order.predicted,
        )
        for order in orders(found)
        if not order.figure.endswith("p99")
    ]


def pairs_of_goodput(rates: Sequence[Goodput]) -> Iterator[Pair]:
    """Of each two placements whose goodput differs by more than ``APART`` by machines."""
    for mix in dict.fromkeys(rate.mix for rate in rates):
        for pair in combinations([rate for rate in rates if rate.mix == mix], 2):
            less, more = sorted(pair, key=lambda rate: rate.machines)
            if more.machines > (1 + APART) * less.machines:
                times = [more.machines / max(1e-9, less.machines), more.queues / max(1e-9, less.queues)]
                yield Pair(mix, "", "goodput", more.placement, less.placement, *times)


def summary(found: Sequence[Error], rates: Sequence[Goodput], shares: Sequence[float]) -> list[dict[str, Any]]:
    """By load and figure: errors of the figures of all requests. Goodput has none of the loads."""
    rows: list[dict[str, Any]] = []
    for share in shares:
        for figure in dict.fromkeys(error.figure for error in found):
            sizes = [
                abs(error.error)
                for error in found
                if (error.cell.share, error.figure, error.of) == (share, figure, ALL) and error.judged
            ]
            if sizes:
                rows.append({"load": f"{share:.0%}", "figure": figure, "median": middle(sizes), "worst": max(sizes)})
    sizes = [abs(rate.error) for rate in rates if not rate.is_unbounded]
    return [*rows, {"load": "", "figure": "goodput", "median": middle(sizes), "worst": max(sizes)}] if sizes else rows


def attainments(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [
        {
            **asdict(result.cell),
            "machines": result.measured.attainments[BOTH],
            "queues": result.predicted.attainments[BOTH],
        }
        for result in results
    ]


def measure(settings: Settings) -> dict[str, Any]:
    results: list[Result] = []
    rates: list[Goodput] = []
    places = [(settings, placement, mix) for placement in settings.placements for mix in settings.mixes]
    with ProcessPoolExecutor(settings.processes, multiprocessing.get_context("spawn")) as pool:
        for cells, rate in pool.map(measure_place, *zip(*places, strict=True)):
            results += cells
            rates.append(rate)
            print(f"{rate.placement:<20} {rate.mix:<7} capacity {rate.capacity:6.1f}/s", end="")
            for error in errors(cells):
                if error.of == ALL and error.figure.endswith(("p50", "p90")):
                    print(f"  {error.cell.share:.0%} {error.figure} {error.error:+.1%}", end="")
            print(f"  goodput {rate.machines:.1f} {rate.queues:.1f} ({rate.error:+.1%})", flush=True)
    found = errors(results)
    pairs = {"latencies": pairs_of_latencies(found), "goodput": list(pairs_of_goodput(rates))}
    wrong = [pair for of_figure in pairs.values() for pair in of_figure if not pair.right]
    print("\n".join(["wrong order:", *map(str, wrong)]) if wrong else "no wrong order")
    return {
        "machine": machine.describe(),
        "settings": asdict(settings),
        "summary": summary(found, rates, settings.shares),
        "errors": [
            {
                **asdict(error.cell),
                "class": error.of,
                "figure": error.figure,
                "machines_ms": 1e3 * error.measured,
                "error": error.error,
            }
            for error in found
        ],
        "attainment": attainments(results),
        "goodput": [{**asdict(rate), "error": rate.error} for rate in rates],
        "orders": [
            {"of": name, "right": sum(pair.right for pair in of_figure), "all": len(of_figure)}
            for name, of_figure in pairs.items()
        ],
        "wrong": [asdict(pair) for pair in wrong],
    }


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="one placement and a few requests: shows that it works")
    parser.add_argument("--placement", choices=PLACEMENTS, help="only this one")
    arguments = parser.parse_args()
    settings = QUICK if arguments.quick else Settings()
    if arguments.placement:
        settings = replace(settings, placements=(arguments.placement,))
    write_figures(arguments.json, measure(settings))


if __name__ == "__main__":
    main()
