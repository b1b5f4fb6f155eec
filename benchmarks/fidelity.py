"""Is ``triptych simulate`` right? What it predicts beside what real processes do on this machine, cell by cell.

A cell is a model, a placement, a mix of requests and a load. Rates are shares of a capacity: how many requests per second of the mix E:1,PD:1
answers in a closed loop of 16 callers. All placements get the same requests. Beforehand, in runs of their own: ``triptych profile`` of each model, and
what services take beside engines (``fidelity_calibration.py``). Nothing is taken from the runs that are predicted.

The requests are planned as ``triptych bench`` does, and sent by its client. The simulator gets the same ones, with as many tokens as the
model's tokenizer makes of them. In each round the placements come in another order. The first cell of a round is repeated at its end: that is
the drift. After each cell lone prompts and answers show the pace: their CPU time over that in the calibration, of which predictions do not know. An error is
*predicted / measured - 1*, of the medians over rounds.

Aims: 10 % at P50 and P90 of TTFT and TPOT, by class of requests; 15 % at P99 of 200 requests or more; 10 % for goodput, the rate up to which
90 % of the requests meet both objectives; the order of any two placements that differ by more than 10 %; and the placement of the highest goodput,
or one that lacks 5 % of it, for each mix and four pairs of objectives. Objectives are multiples of what a lone request took in the calibration.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import ending, machine, random_qwen
from benchmarks.fidelity_calibration import (
    CONTROL_S,
    Calibration,
    Item,
    idle_cores_of,
    measure,
    paces,
    toml,
    with_transfers,
    with_two,
)
from benchmarks.fidelity_live import (
    OPTIONS,
    PATIENCE_S,
    PREPARE_THREADS,
    VLLM_ARGS,
    Engine,
    Live,
    Watched,
    given_options,
    running,
)
from benchmarks.fidelity_report import AGAIN, OBJECTIVES, Cell, Figures, Result, document, show
from benchmarks.figures import add_json_option, write_figures
from triptych.cli.bench import payload
from triptych.cli.model import Model as NamedModel
from triptych.cli.simulate.deployment import Hardware, deployment_of
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.profile import Profile
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import open_checkpoint
from triptych.families.base import count_tokens
from triptych.families.model_files import ModelFiles
from triptych.runtime.clock import monotonic
from triptych.runtime.cores import usable_cores
from triptych.runtime.profiles import read_profiles
from triptych.sim.host import Host
from triptych.sim.outcome import Outcome
from triptych.sim.run import simulate
from triptych.tokens.tokenizer import Tokenizer
from triptych.workload.report import Objectives, Record
from triptych.workload.requests import TEMPLATE_TOKENS, Distribution, Mix, Plan, Planned, Size, arrivals

PLACEMENTS = {"E+PD": "E:1,PD:1", "EPD": "EPD:2", "E+P+D": "E:1,P:1,D:1", "2E+PD": "E:2,PD:1"}
MIXES = {"text": "0", "mixed": "0:0.5,1:0.4,2:0.1", "images": "2:0.5,4:0.5"}
"""Images of each request."""
OUTPUT = "16:1,48:1"
MODEL_ID = "fidelity"
CALLERS = 16
"""Of the closed loop that measures a capacity: as many sequences as an instance runs."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model that is asked, and what its requests are like."""

    size: Size
    words: str
    """Of each prompt."""
    requests: int
    """Requests of a cell."""
    calibration: int
    """Requests of each kind."""
    engine: Engine = "triptych"
    placements: tuple[str, ...] = tuple(PLACEMENTS)
    """Those that the engine serves."""

    @property
    def mean_words(self) -> int:
        values = Distribution.parse(self.words).values
        return sum(values) // len(values)


APART = "E+P+D"
"""The placement in which keys and values are transferred, ..."""
MONOLITHS = "EPD"
"""... and that of two text instances that decode."""
MODELS = {
    "demo": Served(Size(336, 336), "16:1,64:1", 400, 60),
    "50m": Served(Size(224, 224), "8:1,24:1", 100, 64),
    "50m-vllm": Served(Size(224, 224), "8:1,24:1", 200, 16, "vllm", ("E+PD", "E+P+D", "2E+PD")),
}
"""The bundled model of 2 million parameters, a Qwen2.5-VL of 50 million with random weights, and that with vLLM as the text engine."""


@dataclass(frozen=True, slots=True)
class Settings:
    models: tuple[str, ...] = tuple(name for name, served in MODELS.items() if served.engine == "triptych")
    """By default those that need no environment with vLLM."""
    placements: tuple[str, ...] = tuple(PLACEMENTS)
    mixes: tuple[str, ...] = tuple(MIXES)
    shares: tuple[float, ...] = (0.3, 0.6, 0.9)
    rounds: int = 1
    requests: int | None = None
    """Of a cell, in place of the model's."""
    capacity_requests: int = 200
    minutes: float = 1e9
    """No cluster is started later than that after the start."""
    seed: int = 38

    def cells(self, model: str) -> list[Cell]:
        """Grouped by placement, each of which needs one cluster."""
        return [
            Cell(model, placement, mix, share)
            for placement in self.placements
            if placement in MODELS[model].placements
            for mix in self.mixes
            for share in self.shares
        ]


QUICK = Settings(("demo",), ("E+PD",), ("mixed",), (0.6,), requests=12, capacity_requests=12)


def requests_of(settings: Settings, cell: Cell, rate: float, round_: int) -> list[Planned]:
    """The same for each placement."""
    served = MODELS[cell.model]
    rng = random.Random(f"{settings.seed} {round_} {cell.model} {cell.mix} {cell.share}")
    number = settings.requests or served.requests
    mix = Mix(
        Distribution.parse(MIXES[cell.mix]), Distribution.parse(served.words), Distribution.parse(OUTPUT), served.size
    )
    times = arrivals(rate, 2 * number / rate, 1.0, rng)[:number]
    return [mix.request(at_s, rng) for at_s in times]


def bodies_seed(cell: Cell, round_: int) -> str:
    """Of texts and images: other placements may have the first ones in no cache, as each cluster is new."""
    return f"{cell.mix} {cell.share} {round_}"


@dataclass(frozen=True, slots=True)
class Prompts:
    """How many tokens requests have for the model."""

    tokenizer: Tokenizer
    template_tokens: int
    """Around the text of a request."""

    @classmethod
    def of(cls, path: Path, lone: Sequence[Record], seed: str) -> "Prompts":
        """``lone``: requests without images that were sent with this seed; the server has counted their tokens."""
        tokenizer = Tokenizer.load(ModelFiles.load(path))
        counted = cls(tokenizer, TEMPLATE_TOKENS).planned([record.planned for record in lone], seed)
        around = {record.prompt_tokens - planned.text_tokens for record, planned in zip(lone, counted, strict=True)}
        if len(around) > 1:
            raise RuntimeError(f"the template's tokens depend on the text: {sorted(around)}")
        return cls(tokenizer, around.pop())

    def planned(self, requests: Sequence[Planned], seed: str) -> list[Planned]:
        """The same requests with the tokens of the texts that the client sends with this seed, for the simulator."""
        rng, style = random.Random(seed), payload.Style(MODEL_ID, ignore_eos=True)
        counted = []
        for planned in requests:
            content = json.loads(payload.body(planned, style, rng))["messages"][0]["content"]
            tokens = len(self.tokenizer.encode(content[-1]["text"]))
            counted.append(replace(planned, text_tokens=tokens + self.template_tokens - TEMPLATE_TOKENS))
        return counted


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a model before any cell is run."""

    path: Path
    profiles: Path
    """Directory of those that ``triptych profile`` has written."""
    image: Item
    calibration: Calibration
    prompts: Prompts
    objectives: Mapping[str, Mapping[str, Objectives]]
    """By mix and name."""
    rates: Mapping[str, float]
    """Capacity by mix, requests per second."""

    @property
    def costs(self) -> Mapping[ModelPart, Profile]:
        return {profile.identity.part: profile for profile in read_profiles(self.profiles)[0]}

    @property
    def host(self) -> Host:
        return self.calibration.host(self.costs, self.image, len(usable_cores()))

    def predict(self, cell: Cell, requests: Sequence[Planned], seed: str) -> Outcome:
        hardware = Hardware("cpu", "1", None, None, self.profiles, PREPARE_THREADS, CONTROL_S)
        simulated = deployment_of(
            model=str(self.path),
            roles=PLACEMENTS[cell.placement],
            preset=None,
            autoscale=False,
            switch_roles=False,
            hardware=hardware,
            given=given_options(MODELS[cell.model].engine),
            faults=(),
        )
        bytes_per_pixel = self.image.nbytes / self.image.pixels
        deployment = replace(simulated.deployment, host=self.host, bytes_per_pixel=bytes_per_pixel)
        planned = self.prompts.planned(requests, seed)
        return simulate(deployment, Plan(planned, planned[-1].arrival_s + 1.0), timeout_s=PATIENCE_S)


def profile(name: str, path: Path, directory: Path) -> None:
    """As a user would. Raises CalledProcessError, but not for a machine whose speed changed: the report says so."""
    command = [
        sys.executable,
        "-m",
        "triptych.cli",
        "profile",
        "--quick",
        "--model",
        str(path),
        "--out",
        str(directory),
    ]
    if MODELS[name].engine == "vllm":
        command += ["--engine", "vllm", f"--vllm-args={VLLM_ARGS}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if len(list(directory.glob("*.json"))) < len(ModelPart):
        raise RuntimeError(f"the profile of {name} failed: {done.stderr[-500:]}")


async def learn(name: str, settings: Settings, folder: Path) -> Known:
    """Everything that predictions need."""
    served = MODELS[name]
    path = NamedModel.named("demo").path if name == "demo" else folder / "model"
    if name != "demo":
        random_qwen.make(path, random_qwen.FIFTY_MILLION)
    say(f"{name}: profiles")
    profile(name, path, folder / "profiles")
    say(f"{name}: calibration")
    png = payload.png(served.size, random.Random(0))
    tokens = count_tokens(
        open_checkpoint(path).family,
        MediaInfo(Modality.IMAGE, "png", served.size.width, served.size.height, len(png), bytes(32)),
    )
    async with running(path, MODEL_ID, PLACEMENTS["E+PD"], served.engine) as live:
        number = min(served.calibration, settings.requests or served.calibration)
        calibration = await measure(live, served.size, served.mean_words, requests=number)
        lone = [Planned(0.2 * number, words, (), 1) for number, words in enumerate((4, 16, 40))]
        told = sorted(await live.send(lone, "prompts"), key=lambda record: record.planned.arrival_s)
        rates = {mix: await _capacity(live, name, mix, settings) for mix in settings.mixes}
    if APART in settings.placements:
        async with running(path, MODEL_ID, PLACEMENTS[APART], served.engine) as live:
            calibration = await with_transfers(calibration, live, served.size, served.mean_words, requests=number)
    if MONOLITHS in settings.placements and MONOLITHS in served.placements:
        async with running(path, MODEL_ID, PLACEMENTS[MONOLITHS], served.engine) as live:
            calibration = await with_two(calibration, live, served.mean_words)
    taken = calibration.taken
    objectives = {
        mix: {
            name: Objectives(
                ttft_times * taken["text" if mix == "text" else "image"].ttft_s, tpot_times * taken["answer"].tpot_s
            )
            for name, (ttft_times, tpot_times) in OBJECTIVES.items()
        }
        for mix in settings.mixes
    }
    item = Item(tokens, len(png), served.size.width * served.size.height)
    return Known(path, folder / "profiles", item, calibration, Prompts.of(path, told, "prompts"), objectives, rates)


async def _capacity(live: Live, model: str, mix: str, settings: Settings) -> float:
    planned = requests_of(replace(settings, requests=settings.capacity_requests), Cell(model, "", mix, 0.0), 1.0, 0)
    rate = await live.capacity(planned, f"capacity {mix}", CALLERS)
    say(f"{model}, {mix}: {rate:.1f} requests/s")
    return rate


@dataclass(frozen=True, slots=True)
class Ran:
    """What a cell's requests came to."""

    cell: Cell
    round: int
    records: Sequence[Record]
    watched: Watched
    paces: tuple[float, float]
    """CPU time of a lone prompt right after it, and of a step of a lone answer, over those in the calibration."""


async def run_round(known: Known, model: str, settings: Settings, round_: int, ends_s: float) -> list[Ran]:
    """All cells of a model, placement by placement; the first again at the end."""
    served = [placement for placement in settings.placements if placement in MODELS[model].placements]
    first = round_ % max(1, len(served))
    placements = [*served[first:], *served[:first]]
    ran: list[Ran] = []
    for placement in placements:
        if monotonic() > ends_s:
            break
        async with running(known.path, MODEL_ID, PLACEMENTS[placement], MODELS[model].engine) as live:
            for images in (0, 1, 4):
                planned = Planned(0.0, 8, (MODELS[model].size,) * images, 8)
                await live.send([planned] * 4, f"warm {images}")
            idle_cores = await idle_cores_of(live)
            cells = [cell for cell in settings.cells(model) if cell.placement == placement]
            for cell in cells:
                if monotonic() <= ends_s:
                    ran += [await _run_cell(live, known, settings, cell, round_, idle_cores)]
            if placement == placements[0]:
                again = await _run_cell(live, known, settings, cells[0], round_, idle_cores, again=True)
                ran.append(replace(again, round=AGAIN))
    return ran


async def _run_cell(
    live: Live,
    known: Known,
    settings: Settings,
    cell: Cell,
    round_: int,
    idle_cores: Mapping[str, float],
    *,
    again: bool = False,
) -> Ran:
    requests = requests_of(settings, cell, cell.share * known.rates[cell.mix], round_)
    seed = bodies_seed(cell, round_) + " again" * again
    before = await live.watched()
    records = await live.send(requests, seed)
    watched = (await live.watched()).since(before)
    slower = await paces(known.calibration, live, MODELS[cell.model].mean_words, idle_cores, seed)
    say(
        f"round {round_}, {cell}: {len(records)} requests, {watched.foreign_cores:.2f} cores taken by others, pace {slower[0]:.2f}, {slower[1]:.2f}"
    )
    return Ran(cell, round_, records, watched, slower)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def result_of(known: Known, settings: Settings, ran: Ran) -> Result:
    """With what is predicted of it."""
    cell, again = ran.cell, ran.round == AGAIN
    rate = cell.share * known.rates[cell.mix]
    round_ = 0 if again else ran.round
    outcome = known.predict(
        cell, requests_of(settings, cell, rate, round_), bodies_seed(cell, round_) + " again" * again
    )
    objectives = known.objectives[cell.mix]
    timelines = [timeline for timeline in outcome.timelines if timeline is not None]
    return Result(
        cell,
        ran.round,
        rate,
        Figures.of(ran.records, objectives),
        Figures.of(outcome.records, objectives),
        {
            stage: (
                sum_s / max(1.0, ran.watched.requests),
                statistics.mean(getattr(timeline, f"{stage}_s") for timeline in timelines),
            )
            for stage, sum_s in ran.watched.stages_s.items()
        },
        (sum(ran.watched.cpu_s.values()) / ran.watched.at_s, outcome.host_s / outcome.ended_s),
        ran.watched.foreign_cores,
        *ran.paces,
    )


async def run(settings: Settings, folder: Path) -> list[tuple[Known, list[Ran]]]:
    """Each model: what was learnt, then its cells."""
    ends_s = monotonic() + 60 * settings.minutes
    found: list[tuple[Known, list[Ran]]] = []
    for name in settings.models:
        known = await learn(name, settings, folder / name)
        ran: list[Ran] = []
        for round_ in range(settings.rounds):
            ran += await run_round(known, name, settings, round_, ends_s)
        found.append((known, ran))
    return found


def figures_of(settings: Settings, found: Sequence[tuple[Known, Sequence[Ran]]]) -> dict[str, Any]:
    """Everything that is predicted and compared."""
    results = [result_of(known, settings, live) for known, ran in found for live in ran]
    said = {
        name: {
            "drift": {part.value: profile.measured.drift for part, profile in known.costs.items()},
            "capacity": known.rates,
            "objectives": {
                mix: {name: asdict(stated) for name, stated in objectives.items()}
                for mix, objectives in known.objectives.items()
            },
            "host": toml(known.host),
            "calibration": asdict(known.calibration),
        }
        for name, (known, _) in zip(settings.models, found, strict=True)
    }
    every = {cell for model in MODELS for cell in replace(Settings(), models=(model,)).cells(model)}
    missing = sorted(map(str, every - {result.cell for result in results}))
    return {"models": said, **document(results), "not_run": missing}


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    defaults = Settings()
    parser.add_argument("--quick", action="store_true", help="one cell of few requests: shows that it works")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, help="those with vLLM need its environment (make vllm-environment)"
    )
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS)
    parser.add_argument("--mixes", nargs="+", choices=MIXES)
    parser.add_argument("--shares", type=float, nargs="+", help="loads, of the capacity")
    parser.add_argument("--rounds", type=int, help=f"{defaults.rounds} by default")
    parser.add_argument("--requests", type=int, help="of a cell")
    parser.add_argument("--minutes", type=float, help="no cell begins later than this after the start")
    options = parser.parse_args()
    given = {
        name: value for name, value in vars(options).items() if value is not None and name not in ("json", "quick")
    }
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    settings = replace(QUICK if options.quick else defaults, **given)
    print("; ".join(f"{key} {value}" for key, value in machine.describe().items()))
    print("; ".join(f"{key} {value}" for key, value in asdict(settings).items()))
    options_of = {name: OPTIONS[MODELS[name].engine] for name in settings.models}
    for name, of_model in options_of.items():
        print(f"{name}: {' '.join(of_model)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        compared = figures_of(settings, asyncio.run(run(settings, Path(folder))))
    show(compared)
    print(f"not run: {'; '.join(compared['not_run']) or 'none'}")
    described = {"machine": machine.describe(), "settings": asdict(settings), "options": options_of}
    write_figures(options.json, described | compared)


if __name__ == "__main__":
    main()
