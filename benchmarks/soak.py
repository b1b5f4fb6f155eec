"""A soak for a stated time, with fresh seeds: simulations, properties, pulls, and processes that are hit under load.

``--minutes`` are divided among the parts:

- ``simulation``: the real services in virtual time under random faults, with invariants checked after every event; while pools
  scale; and once 64 instances for a quarter as many simulated minutes as the soak has.
- ``properties``: the tests of hypothesis, with twenty times the examples of `make test`.
- ``transport``: random pulls over every backend while holders are killed, stopped and restarted, and links are cut.
- ``processes``: each kind of process killed, paused and restarted under 200 requests; those that nobody kills are watched for
  growth. Then many streams at once.

What fails is written with its seed, and the soak goes on with the next one. It also fails where memory, files, sockets, threads,
shared memory or processes grow or are left. The least that a process has in the last third of its life is compared with that in the
third before: memory swings by some 70 MiB as allocators keep and return it, and a leak raises its floor.
"""

import argparse
import asyncio
import gc
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from tests.e2e.pairs import KINDS, Hit, Outcome, Pairs, mixture, survived
from tests.e2e.test_many_streams import opened
from tests.integration.transport.test_soak import left_in_shared_memory, shared_memory_files, soaked
from tests.simulation import test_control_plane as control_plane
from tests.simulation import test_random_faults as random_faults
from tests.simulation.conftest import COLLECTED_AFTER
from tests.simulation.workload import make_bursts

ROOT = Path(__file__).parents[1]
SHARES = {"simulation": 0.4, "properties": 0.15, "transport": 0.1, "processes": 0.35}
WORKERS = 2
"""Processes that simulate, or try properties, at a time."""
SCALING_EVERY = 12
"""Of so many simulations one is of pools that scale; of those every third has 64 instances."""
LARGE = 32
"""Instances of a kind in a large cluster."""
LONG_REQUESTS_PER_S = 8
PAUSES_S = (2.0, 8.0)
"""A router takes an instance for lost that has been silent for 5 s."""
STREAMS_PER_MINUTE, MOST_STREAMS = 150, 2000
FILES_AT_ONCE = 2
"""Test files of one run of properties."""
LONG_SHARE = 0.25
"""Simulated minutes of the long simulation for one of the soak: it is to end in time on a busy machine too."""
MIB = 1 << 20
GROWTH = {"rss_mib": 32.0, "fds": 8, "sockets": 8, "threads": 2}
"""By how much the last third of a process's life may have more than the one before."""
SIMULATED_GROWTH_MIB = 96.0
"""The same of a process that simulates clusters of any size."""
MARK = "SOAK_MARK"
"""Variable of the environment by which the processes of a soak are found."""
PATIENCE_S = 5.0
TOLD_CHARS = 4000
"""Of an error, from its end."""


@dataclass
class Part:
    """What a part has done."""

    part: str
    ran: Counter[str] = field(default_factory=Counter)
    """By kind."""
    failures: list[dict[str, str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    took_s: float = 0.0
    load: float = 0.0
    """Of the machine, with what else ran on it: processes that want to run, over the last 5 minutes."""

    def failed(self, what: str, error: BaseException | str) -> None:
        said = error if isinstance(error, str) else "".join(traceback.format_exception(error))
        said = said.replace(f"{ROOT}/", "").replace(f"{sys.base_prefix}/", "")
        self.failures.append({"what": what, "error": said[-TOLD_CHARS:]})
        print(f"{self.part}: FAILED: {what}\n{said[-TOLD_CHARS:]}", flush=True)

    def report(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "part": self.part,
            "minutes": round(self.took_s / 60, 2),
            "load": round(self.load, 1),
            "ran": dict(self.ran),
            "failed": len(self.failures),
            "failures": self.failures,
            **self.figures,
        }


# --- simulations


@dataclass(frozen=True)
class Simulated:
    """One simulation in a worker process, whose memory is of after it."""

    kind: str
    seed: int
    took_s: float
    error: str
    pid: int
    rss_mib: float


def _faults(seed: int) -> None:
    with random_faults.checked():
        random_faults.run(seed)


def _scaling(seed: int, duration_s: float = control_plane.MINUTE_S, *, large: bool = False) -> None:
    world = control_plane.world_of(seed)
    if large:
        world = replace(world, encoders=LARGE, texts=LARGE)
    requests = control_plane.REQUESTS if duration_s == control_plane.MINUTE_S else LONG_REQUESTS_PER_S * duration_s
    control_plane.run(seed, world, make_bursts(seed, round(requests), duration_s), duration_s)


def _large(seed: int) -> None:
    _scaling(seed, large=True)


SIMULATIONS: Mapping[str, Callable[[int], None]] = {"faults": _faults, "scaling": _scaling, "large": _large}


def simulations(seed: int) -> Iterator[tuple[str, int]]:
    """Kinds and seeds, without end."""
    for number in count():
        scaling, rest = divmod(number, SCALING_EVERY)
        kind = "faults" if rest else "scaling" if scaling % 3 else "large"
        yield kind, seed + number


def simulated(kind: str, seed: int, minutes: float = 0.0) -> Simulated:
    """One of SIMULATIONS, or the ``long`` one."""
    began_s, error = time.perf_counter(), ""
    try:
        if kind == "long":
            _scaling(seed, 60 * LONG_SHARE * minutes, large=True)
        else:
            SIMULATIONS[kind](seed)
    except Exception as raised:  # noqa: BLE001 - whatever it is, it is recorded
        error = "".join(traceback.format_exception(raised))
    gc.collect()
    rss_mib = psutil.Process().memory_info().rss / MIB
    return Simulated(kind, seed, time.perf_counter() - began_s, error, os.getpid(), rss_mib)


def _prepare() -> None:
    """Garbage is collected rarely, and what services log is not shown."""
    gc.set_threshold(COLLECTED_AFTER, *gc.get_threshold()[1:])
    logging.getLogger().addHandler(logging.NullHandler())


def simulate(part: Part, duration_s: float, seed: int, minutes: float) -> None:
    """Simulations in two processes; the long one comes first."""
    until_s = time.perf_counter() + duration_s
    memory: dict[int, list[float]] = defaultdict(list)
    slowest_s: dict[str, float] = defaultdict(float)
    left = chain([("long", seed)], simulations(seed))
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        running: set[Future[Simulated]] = set()
        while running or time.perf_counter() < until_s:
            while len(running) < WORKERS and time.perf_counter() < until_s:
                running.add(pool.submit(simulated, *next(left), minutes))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for run in (future.result() for future in done):
                part.ran[run.kind] += 1
                slowest_s[run.kind] = max(slowest_s[run.kind], round(run.took_s, 1))
                memory[run.pid].append(run.rss_mib)
                if run.error:
                    part.failed(f"--again {run.kind}:{run.seed}", run.error)
    part.figures = {"first_seed": seed, "slowest_s": dict(slowest_s), "growth": []}
    for number, values in enumerate(memory.values()):
        grown(part, f"simulation-{number + 1}", {"rss_mib": values}, {"rss_mib": SIMULATED_GROWTH_MIB})


def grown(part: Part, process: str, samples: Mapping[str, Sequence[float]], most: Mapping[str, float]) -> None:
    """Compare the last two thirds of a process's life, and record both."""
    row: dict[str, Any] = {"process": process, "samples": len(next(iter(samples.values())))}
    for name, values in samples.items():
        third = len(values) // 3
        if not third:
            continue
        before, after = min(values[third : 2 * third]), min(values[2 * third :])
        row |= {f"{name}_before": round(before, 1), f"{name}_after": round(after, 1)}
        if after > before + most[name]:
            part.failed(f"{process} grows", f"{name}: at least {before:.1f}, then {after:.1f}")
    part.figures["growth"].append(row)


# --- properties


def try_properties(part: Part, duration_s: float, rng: Random) -> None:
    """The tests of hypothesis, some files at a time, in random order."""
    until_s = time.perf_counter() + duration_s
    files = sorted(path for path in (ROOT / "tests" / "unit").rglob("test_*.py") if "hypothesis" in path.read_text())
    seeds: list[int] = []
    while time.perf_counter() < until_s:
        rng.shuffle(files)
        for at in range(0, len(files), FILES_AT_ONCE):
            if time.perf_counter() > until_s:
                break
            seeds.append(rng.randrange(1 << 31))
            _try(part, files[at : at + FILES_AT_ONCE], seeds[-1])
    part.figures = {"seeds": seeds}
    if not part.ran["tests"]:
        part.failed("properties", "no test has run")


def _try(part: Part, files: Sequence[Path], seed: int) -> None:
    names = [str(file.relative_to(ROOT)) for file in files]
    with tempfile.TemporaryDirectory(prefix="triptych-soak-") as folder:
        report = Path(folder) / "report.xml"
        chosen = ("-m", "hypothesis", "--hypothesis-profile=explore", f"--hypothesis-seed={seed}")
        command = (sys.executable, "-m", "pytest", "-q", "-n", str(WORKERS), "--dist", "worksteal", *chosen)
        paths = (f"--junitxml={report}", f"--basetemp={folder}/tests", "-o", "timeout=600", "-p", "no:cacheprovider")
        done = subprocess.run([*command, *paths, *names], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1, 5) or not report.exists():  # 5: no test of hypothesis in these files
            part.failed(f"pytest ended with {done.returncode}: {names}", done.stdout + done.stderr)
            return
        for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it
            part.ran["tests"] += case.find("skipped") is None
            for fault in (*case.findall("failure"), *case.findall("error")):
                name = f"{case.get('classname')}::{case.get('name')}"
                part.failed(f"{name} with --hypothesis-profile=explore --hypothesis-seed={seed}", fault.text or "")


# --- processes


class Watch:
    """The resources of the processes that nobody kills, sampled while no request runs."""

    def __init__(self, pairs: Pairs) -> None:
        steady = [service for service in pairs.services.values() if not is_victim(service.name)]
        self._processes = {service.name: psutil.Process(service.process.pid) for service in steady}
        self.samples: dict[str, dict[str, list[float]]] = {
            name: {figure: [] for figure in GROWTH} for name in self._processes
        }

    def sample(self) -> None:
        for name, process in self._processes.items():
            figures = {
                "rss_mib": process.memory_info().rss / MIB,
                "fds": process.num_fds(),
                "sockets": len(process.net_connections("all")),
                "threads": process.num_threads(),
            }
            for figure, value in figures.items():
                self.samples[name][figure].append(value)


def is_victim(name: str) -> bool:
    """Whether a process may be killed. Its spare is only paused, so that it can be watched."""
    return name.endswith("-2") or name == "pool_manager-1"


def victim(kind: str, hit: Hit, rng: Random) -> str:
    if kind == "pool_manager":
        return f"{kind}-1"
    return f"{kind}-{rng.choice((1, 2)) if hit is Hit.PAUSE else 2}"


def hits(rng: Random) -> Iterator[tuple[str, Hit]]:
    """Every kind of process and of hit, in random order again and again."""
    while True:
        yield from rng.sample([(kind, hit) for kind in KINDS for hit in Hit], len(KINDS) * len(Hit))


async def hit_processes(part: Part, duration_s: float, rng: Random, folder: Path) -> None:
    """Rounds until the time is over. After one that failed with another cluster."""
    until_s = time.perf_counter() + duration_s
    outcomes: list[Outcome] = []
    part.figures = {"rounds": [], "growth": []}
    order = hits(rng)
    while time.perf_counter() < until_s:
        logs = Path(tempfile.mkdtemp(prefix="logs-", dir=folder))
        what = "starting a cluster"
        try:
            async with Pairs.running(logs) as pairs:
                mixed = await mixture(pairs)
                watch = Watch(pairs)
                while time.perf_counter() < until_s:
                    kind, hit = next(order)
                    process = victim(kind, hit, rng)
                    what = f"{process}: {hit.value}"
                    outcomes.append(await survived(pairs, mixed, process, hit, rng, pause_s=rng.uniform(*PAUSES_S)))
                    part.ran[hit.value] += 1
                    watch.sample()
                for process, samples in watch.samples.items():
                    grown(part, process, samples, GROWTH)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is recorded
            part.failed(f"{what}; logs are in {logs}", error)
    part.figures["rounds"] = [outcome.report() for outcome in outcomes]


def open_streams(part: Part, minutes: float, folder: Path) -> None:
    streams = round(min(MOST_STREAMS, STREAMS_PER_MINUTE * minutes))
    part.figures["streams"] = asyncio.run(opened(streams, folder))
    part.ran["streams"] += streams


def pull(part: Part, duration_s: float, seed: int) -> None:
    found = asyncio.run(soaked(duration_s, seed))
    part.ran |= Counter(found.pop("ends"))
    part.figures = {"seed": seed, **found}


# --- all of it


def run(name: str, minutes: float, seed: int, folder: Path) -> Part:
    """One part, for its share of the time."""
    part, rng = Part(name), Random(f"{seed}/{name}")
    began_s, duration_s = time.perf_counter(), 60 * minutes * SHARES[name]
    try:
        match name:
            case "simulation":
                simulate(part, duration_s, seed, minutes)
            case "properties":
                try_properties(part, duration_s, rng)
            case "transport":
                pull(part, duration_s, seed)
            case _:
                asyncio.run(hit_processes(part, duration_s, rng, folder))
                open_streams(part, minutes, folder)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is recorded
        part.failed(f"{name} of seed {seed}", error)
    part.took_s, part.load = time.perf_counter() - began_s, os.getloadavg()[1]
    ran = ", ".join(f"{number} {kind}" for kind, number in part.ran.items())
    print(f"{name}: {part.took_s / 60:.1f} minutes: {ran}; {len(part.failures)} failures", flush=True)
    return part


def marked() -> str:
    """Mark the environment of what is started from now on. Returns the mark."""
    mark = os.environ[MARK] = secrets.token_hex(16)  # noqa: TID251 - for the children
    return mark


def left_over(shared_before: set[str], mark: str, patience_s: float = PATIENCE_S) -> Part:
    """Processes and shared memory that are still there. ``patience_s``: in which what is ending may end."""
    part = Part("left over")
    _, alive = psutil.wait_procs(_started(mark), patience_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            part.failed("a process is left", " ".join(process.cmdline()) or process.name())
    if left := asyncio.run(left_in_shared_memory(shared_before)):
        part.failed("shared memory is left", ", ".join(left))
    return part


def _started(mark: str) -> list[psutil.Process]:
    """Processes with this mark: also those whose parent has ended, which are children of another one then."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has just ended, or is another user's
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                tracks = "multiprocessing.resource_tracker" in " ".join(process.cmdline())
                if not (tracks and process.ppid() == os.getpid()):  # this process's own, which ends with it
                    found.append(process)
    return found


def again(told: str, minutes: float) -> int:
    """One simulation that failed."""
    kind, _, seed = told.partition(":")
    found = simulated(kind, int(seed), minutes)
    print(found.error or f"{told}: nothing failed in {found.took_s:.1f} s")
    return int(bool(found.error))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--minutes", type=float, default=60.0, help="for all parts together (60)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="by default another one each time")
    parser.add_argument("--parts", default=",".join(SHARES), help="those that run, each for its share: %(default)s")
    parser.add_argument(
        "--again",
        metavar="KIND:SEED",
        help="a single simulation, as a failure names it; a long one needs --minutes as well",
    )
    arguments = parser.parse_args()
    if arguments.again:
        return again(arguments.again, arguments.minutes)
    ending.by_sigterm()
    shared_before, mark = shared_memory_files(), marked()
    print(f"seed {arguments.seed}", flush=True)
    settings = {"minutes": arguments.minutes, "seed": arguments.seed, "shares": SHARES, "most_growth": GROWTH}
    parts: list[Part] = []

    def done(part: Part) -> None:
        parts.append(part)
        reports = [part.report() for part in parts]
        write_figures(arguments.json, {"machine": machine.describe(), "settings": settings, "parts": reports})

    folder = Path(tempfile.mkdtemp(prefix="triptych-soak-"))
    for name in arguments.parts.split(","):
        done(run(name, arguments.minutes, arguments.seed, folder))
    done(left_over(shared_before, mark))
    if failures := sum(len(part.failures) for part in parts):
        print(f"{failures} failures; logs are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
