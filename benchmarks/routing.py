"""Time to first token by policy and load: ModServe's steps one after the other, in virtual time.

The real services of a simulated cluster (``tests.simulation``): a router and eight instances, ``--splits`` of them encoders
and text instances, whose engines sleep as profiles of two models say (``benchmarks.routing_models``, which also says how the
requests are made). Of equal seeds all policies, splits and loads get the same requests in the same order; a load only moves
them closer together.

``decoupled`` is the baseline: first come first served, to the instance with the fewest requests. Its capacity is measured
first, for each split, with all requests at once; the loads are shares of the largest, for the monoliths too. ``short first`` shows what order alone can do: short requests have
a priority above the others at every queue, and are first come first served among each other. The monoliths are eight instances that do all, each with a
router of its own, behind a choice of the one with the fewest requests. ``short`` is a request of text only, or with one
image that has fewer tokens than the median request with images; ``brief`` is a short request whose prompt the text engine
computes in one step (2,048 tokens), as text alone may be long. The objective of a request is five times its TTFT with the system
to itself, by the profiles; goodput counts the requests that met theirs.

Times are virtual and equal on any machine. ``router`` is not: the CPU time that the decisions of the router's state machines took
for one request, of the thread that runs them, the measuring included (about half a microsecond per event). Other work on the machine adds to it only by what it evicts from caches.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from benchmarks.routing_models import MODELS, Mixed
from tests.simulation.cluster import MIB, SimCluster, SimMembership, World, running
from tests.simulation.workload import Ask
from triptych import ports
from triptych.domain.generation import ChatFinished, TokenChunk
from triptych.errors import TriptychError
from triptych.machine.router.cluster import ClusterMachine
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.machine.router.request import RequestMachine
from triptych.machine.text.tensor_cache import CacheLimits
from triptych.policy.admission import ServerBounds
from triptych.policy.policies import PolicyNames
from triptych.virtual import virtual_time
from triptych.workload.report import percentile
from triptych.workload.requests import Planned

_SLO_FACTOR = 5.0
_ISOLATED_ENCODERS = 2
"""Of the system that a request has to itself, for its objective: that of all splits."""
_TIMEOUT_S = 120.0
"""Of requests, as ``ChatRequest`` has it without one."""
_CAPACITY_TIMEOUT_S = 590.0
_WARM_SHARE = 0.1
"""Of the requests, the first, which find the system empty and are not counted."""
_ANY = 65_536
_STEP_TOKENS = 2048
"""Default ``token_budget`` of a text engine."""
_FIRST_SEED = 201
ALL, SHORT, BRIEF, LONG = KINDS = ("all", "short", "brief", "long")


@dataclass(frozen=True, slots=True)
class Step:
    """One row of the ablation."""

    routing: str
    ordering: str
    monolith: bool = False
    budget: bool = False
    short_first: bool = False
    """Every queue knows which requests are short, and they go first."""

    @property
    def policies(self) -> PolicyNames:
        """Nothing is split or refused, in any row."""
        return PolicyNames(self.routing, self.routing, sharding="never", ordering=self.ordering, deadlines="admit")


BASELINE = "decoupled"
STEPS: Mapping[str, Step] = {
    "monolith": Step("least-requests", "first-come", monolith=True),
    "monolith, budget": Step("least-requests", "first-come", monolith=True, budget=True),
    "round robin": Step("round-robin", "first-come"),
    BASELINE: Step("least-requests", "first-come"),
    "short first": Step("least-requests", "first-come", short_first=True),
    "+ scheduling": Step("least-requests", "slo"),
    "+ routing": Step("least-loaded", "slo"),
    "+ prediction": Step("predicted", "slo"),
}


class Split(NamedTuple):
    """Instances of each kind."""

    encoders: int
    texts: int

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Of ``2+6``. Raises argparse.ArgumentTypeError."""
        encoders, _, texts = text.strip().partition("+")
        if not (encoders.isdecimal() and texts.isdecimal() and int(encoders) and int(texts)):
            raise argparse.ArgumentTypeError(f"{text!r} is not encoders+text instances, such as 2+6")
        return cls(int(encoders), int(texts))

    def __str__(self) -> str:
        return f"{self.encoders}+{self.texts}"


@dataclass(frozen=True, slots=True)
class Settings:
    requests: int = 1500
    seeds: int = 3
    loads: tuple[float, ...] = (0.5, 0.8, 0.95)
    models: tuple[str, ...] = tuple(MODELS)
    steps: tuple[str, ...] = tuple(STEPS)
    splits: tuple[Split, ...] = (Split(2, 6), Split(3, 5), Split(4, 4))


QUICK = Settings(requests=60, seeds=1, loads=(0.8,), models=("decoder-only",), splits=(Split(2, 6), Split(4, 4)))


@dataclass(frozen=True, slots=True)
class Case:
    """One run. ``rate_per_s`` None: all at once."""

    model: str
    step: str
    split: Split
    """A monolith has so many instances altogether."""
    seed: int
    load: float
    rate_per_s: float | None


@dataclass(slots=True)
class Served:
    """What a client saw, and what it asked for."""

    ask: Ask
    short: bool
    brief: bool
    slo_s: float
    ttft_s: float | None = None
    ended_s: float = 0.0
    tokens: int = 0
    error: str = ""


@dataclass(slots=True)
class Run:
    """Times in seconds. ``ttft_s`` by kind; of requests without an answer it is missing."""

    case: Case
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    asked: int = 0
    met: int = 0
    failed: int = 0
    per_s: float = 0.0
    """Answers per second until the last request has its first token, without the first quarter of that time."""
    goodput_per_s: float = 0.0
    router_us: float = 0.0


def run(case: Case, traces: Path, requests: int) -> Run:
    """One run, in virtual time. Raises AssertionError if anything is still held afterwards."""
    step, model = STEPS[case.step], MODELS[case.model]
    world = _world(case, requests)
    mixed = Mixed.sampled(traces, requests, case.seed)
    asks = mixed.asks(case.rate_per_s, timeout_s=_TIMEOUT_S if case.rate_per_s else _CAPACITY_TIMEOUT_S)
    of_images = [sum(map(model.tokens, request.images)) for request in mixed.requests if request.images]
    median = statistics.median(of_images)
    served = [_served(ask, request, case, median) for ask, request in zip(asks, mixed.requests, strict=True)]
    if step.short_first:
        for request in served:
            request.ask = replace(request.ask, request=replace(request.ask.request, priority=0 if request.short else 1))

    async def main() -> None:
        async with running(world) as cluster:
            front = await _front(cluster, step)
            async with asyncio.TaskGroup() as group:
                began_s = asyncio.get_running_loop().time()
                for request in served:
                    group.create_task(_client(front, request, began_s))
            await cluster.check_nothing_is_held()

    with router_cpu() as spent:
        virtual_time.run(main(), seed=case.seed, limit_s=7200)
    return _summarized(case, served, 1e6 * spent.seconds / len(served))


def _served(ask: Ask, planned: Planned, case: Case, median: float) -> Served:
    model = MODELS[case.model]
    short = not planned.images or (len(planned.images) == 1 and model.tokens(planned.images[0]) < median)
    brief = short and model.prompt_tokens(planned) <= _STEP_TOKENS
    return Served(ask, short, brief, _SLO_FACTOR * model.isolated_ttft_s(planned, encoders=_ISOLATED_ENCODERS))


def _world(case: Case, requests: int) -> World:
    """Memory and limits are such that only computing takes time."""
    step, model, split = STEPS[case.step], MODELS[case.model], case.split
    router: dict[str, Any] = {
        "policies": step.policies,
        "capacity": ServerBounds(max_concurrent_requests=_ANY),
        "cluster": ClusterLimits(max_waiting_requests=_ANY),
        "history_requests": requests,
    }
    return World(
        seed=case.seed,
        encoders=0 if step.monolith else split.encoders,
        texts=0 if step.monolith else split.texts,
        hybrids=sum(split) if step.monolith else 0,
        image_budget=model.image_budget if step.budget else None,
        encoder_arena_bytes=32 * MIB,
        text_arena_bytes=32 * MIB,
        engines=model.engines,
        profiled=True,
        router=router,
        text={
            "tensor_cache": CacheLimits(max_waiting_requests=_ANY),
            "max_concurrent_requests": _ANY,
            "stream_interval_s": 1.0,
        },
    )


class _Front:
    """Sends each request to the router of the replica with the fewest."""

    def __init__(self, routers: Sequence[ports.Router]) -> None:
        self.routers = routers
        self.open = dict.fromkeys(range(len(routers)), 0)

    @contextmanager
    def chosen(self) -> Iterator[ports.Router]:
        number = min(self.open, key=lambda index: self.open[index])
        self.open[number] += 1
        try:
            yield self.routers[number]
        finally:
            self.open[number] -= 1


async def _front(cluster: SimCluster, step: Step) -> _Front:
    if not step.monolith:
        return _Front([cluster.router])
    routers = []
    for node in cluster.hybrids:
        router = cluster.make_router(SimMembership([node.name]), cluster.connect, name=f"router of {node.name}")
        while not (await router.readiness()).instances:  # noqa: ASYNC110  # virtual time
            await asyncio.sleep(0.01)
        routers.append(router)
    return _Front(routers)


async def _client(front: _Front, served: Served, began_s: float) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(began_s + served.ask.at_s - loop.time())
    with front.chosen() as router:
        try:
            async with aclosing(router.chat(served.ask.request)) as stream:
                async for events in stream:
                    for event in events:
                        if isinstance(event, TokenChunk) and served.ttft_s is None:
                            served.ttft_s = loop.time() - began_s - served.ask.at_s
                        if isinstance(event, ChatFinished):
                            served.tokens = event.usage.completion_tokens
        except TriptychError as error:
            served.error = type(error).__name__
    served.ended_s = loop.time() - began_s
    assert served.error or served.tokens == served.ask.request.sampling.seed, "an answer of the wrong length"


@dataclass(slots=True)
class _Spent:
    seconds: float = 0.0


@contextmanager
def router_cpu() -> Iterator[_Spent]:
    """The CPU time that the router's machines take, meanwhile. All of a run is in one thread."""
    spent = _Spent()

    def timed(handle: Any) -> Any:
        def handling(*arguments: Any) -> Any:
            began_s = time.thread_time()
            try:
                return handle(*arguments)
            finally:
                spent.seconds += time.thread_time() - began_s

        return handling

    owners: tuple[Any, ...] = (ClusterMachine, RequestMachine)
    before = [owner.handle for owner in owners]
    for owner in owners:
        owner.handle = timed(owner.handle)
    try:
        yield spent
    finally:
        for owner, handle in zip(owners, before, strict=True):
            owner.handle = handle


def _summarized(case: Case, served: Sequence[Served], router_us: float) -> Run:
    counted = served[round(_WARM_SHARE * len(served)) :]
    result = Run(case, router_us=router_us, asked=len(counted))
    for request in counted:
        if request.error or request.ttft_s is None:
            result.failed += 1
            continue
        kinds = {ALL: True, SHORT: request.short, LONG: not request.short, BRIEF: request.brief}
        for kind in filter(kinds.__getitem__, kinds):
            result.ttft_s[kind].append(request.ttft_s)
        result.met += request.ttft_s <= request.slo_s
    all_begun_s = max(
        (request.ask.at_s + request.ttft_s for request in served if request.ttft_s is not None), default=0.0
    )
    ended = sum(all_begun_s / 4 < request.ended_s <= all_begun_s for request in served if not request.error)
    result.per_s = ended / (0.75 * all_begun_s)
    result.goodput_per_s = result.per_s * result.met / result.asked
    return result


# --- all runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """Over the seeds."""

    middle: float
    """Median."""
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Range":  # frozen
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one load. Times in milliseconds."""

    model: str
    step: str
    split: str
    """Encoders and text instances; of monoliths their number."""
    load: float
    rate_per_s: float
    mean_ms: dict[str, Range]
    """By kind."""
    p99_ms: dict[str, Range]
    attainment: Range
    per_s: Range
    goodput_per_s: Range
    failed: int
    router_us: Range


def measure(settings: Settings, traces: Path, jobs: int) -> dict[str, Any]:
    rows: list[Row] = []
    capacities: dict[str, dict[str, Range]] = {}
    one_run = partial(run, traces=traces, requests=settings.requests)
    seeds = range(_FIRST_SEED, _FIRST_SEED + settings.seeds)
    with ProcessPoolExecutor(jobs) as pool:
        for model in settings.models:
            capacities[model] = {}
            for split in settings.splits:
                at_once = list(pool.map(one_run, [Case(model, BASELINE, split, seed, 0.0, None) for seed in seeds]))
                capacities[model][str(split)] = capacity = Range.of([result.per_s for result in at_once])
                print(
                    f"{model}: capacity of {split} {capacity.middle:.1f} requests/s"
                    f" ({capacity.least:.1f} to {capacity.most:.1f})",
                    flush=True,
                )
            most_per_s = max(capacity.middle for capacity in capacities[model].values())
            cases = [
                Case(model, step, split, seed, load, load * most_per_s)
                for load in settings.loads
                for step in settings.steps
                for split in (settings.splits[:1] if STEPS[step].monolith else settings.splits)
                for seed in seeds
            ]
            results = pool.map(one_run, cases)
            rows += [_shown(_row([next(results) for _ in seeds])) for _ in range(len(cases) // settings.seeds)]
    return {
        "machine": machine.describe(),
        "settings": {**asdict(settings), "splits": list(map(str, settings.splits)), "slo_factor": _SLO_FACTOR},
        "capacity_per_s": {
            model: {split: asdict(capacity) for split, capacity in of_splits.items()}
            for model, of_splits in capacities.items()
        },
        "rows": [asdict(row) for row in rows],
    }


def _row(runs: Sequence[Run]) -> Row:
    case = runs[0].case

    assert case.rate_per_s is not None, "rows are of loads"
    return Row(
        case.model,
        case.step,
        str(sum(case.split)) if STEPS[case.step].monolith else str(case.split),
        case.load,
        case.rate_per_s,
        {kind: Range.of([1e3 * statistics.fmean(run.ttft_s[kind]) for run in runs]) for kind in KINDS},
        {kind: Range.of([1e3 * percentile(run.ttft_s[kind], 99) for run in runs]) for kind in KINDS},
        Range.of([run.met / run.asked for run in runs]),
        Range.of([run.per_s for run in runs]),
        Range.of([run.goodput_per_s for run in runs]),
        sum(run.failed for run in runs),
        Range.of([run.router_us for run in runs]),
    )


def _shown(row: Row) -> Row:
    def of(spread: Range) -> str:
        return f"{spread.middle:6.0f} ({spread.least:.0f}-{spread.most:.0f})"

    print(
        f"{row.model:<15} {row.load:4.0%}  {row.step:<16} {row.split:<4} TTFT"
        + "; ".join(f" {kind} mean {of(row.mean_ms[kind]):<17} p99 {of(row.p99_ms[kind]):<17}" for kind in KINDS)
        + f" attained {row.attainment.middle:5.1%}  {row.per_s.middle:5.1f}/s, good {row.goodput_per_s.middle:5.1f}/s"
        f"  failed {row.failed}  router {row.router_us.middle:.0f} us",
        flush=True,
    )
    return row


def trace_directory(given: Path | None) -> Path:
    """The ServeGen workload to sample. Ends the program with a message if it is not there."""
    root = os.environ.get("TRIPTYCH_TEST_TRACES", "")  # noqa: TID251  # where a machine has them is not the project's to say
    path = given or Path(root) / "servegen-mm-image"
    if next(path.glob("chunk-*-trace.csv"), None) is None:
        sys.exit(
            f"{path} has no chunk-N-trace.csv: this benchmark samples a ServeGen workload (chunk-N-trace.csv, chunk-N-dataset.json); "
            "give its directory with --traces, or the directory above servegen-mm-image in TRIPTYCH_TEST_TRACES"
        )
    return path


def main() -> None:
    ending.by_sigterm()
    usual = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="directory of a ServeGen workload")
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="few requests, one load: shows that it works")
    parser.add_argument("--requests", type=int, default=usual.requests, help="of each run")
    parser.add_argument("--seeds", type=int, default=usual.seeds, help="runs of each policy at each load")
    parser.add_argument("--loads", default=",".join(map(str, usual.loads)), help="shares of the capacity")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--steps", default="; ".join(STEPS), help=f"separated by semicolons, of {'; '.join(STEPS)}")
    parser.add_argument(
        "--splits",
        type=lambda text: tuple(map(Split.parsed, text.split(","))),
        default=usual.splits,
        help="encoders and text instances, such as 2+6,4+4; the same number altogether",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at the same time; more add a little to the times of the router"
    )
    given = parser.parse_args()
    settings = QUICK
    if not given.quick:
        settings = Settings(
            given.requests,
            given.seeds,
            tuple(map(float, given.loads.split(","))),
            tuple(given.models.split(",")),
            tuple(step.strip() for step in given.steps.split(";")),
            given.splits,
        )
    if len(set(map(sum, settings.splits))) != 1:
        parser.error("--splits: not the same number of instances altogether")
    print("; ".join(f"{key} {value}" for key, value in machine.describe().items()))
    print(
        f"{settings.requests} requests, {settings.seeds} seeds, {', '.join(map(str, settings.splits))} encoders and text "
        f"instances, objective {_SLO_FACTOR:g} times the TTFT alone; times in ms: median of the seeds (least-most)"
    )
    result = measure(settings, trace_directory(given.traces), given.jobs)
    write_figures(given.json, result)


if __name__ == "__main__":
    main()
