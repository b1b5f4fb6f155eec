"""Triptych beside vLLM, in one run on the same two cores: latency and goodput of a mixed workload by OpenAI's API.

- ``vllm``: one ``vllm serve`` with two threads.
- ``vllm-apart``: vLLM's own encoder disaggregation: an encoder and a text server of one thread each, its example connector
  (files), and a minimal proxy.
- ``triptych-vllm``: Triptych with an encoder and vLLM as the text engine, one thread each.
- ``triptych-apart``: Triptych with an encoder and its own text engine, one thread each.
- ``triptych-hybrid``: Triptych with one instance that encodes, prefills and decodes, two threads.

The model is a Qwen2.5-VL with random weights, in float32, or a LLaVA (``--family``). Seven of ten requests are text only,
the others have 1 to 8 images, each different (``--images N``: every request has N); every answer has 32 tokens. First the
capacity of ``vllm`` is measured, by a closed loop, and its latency without load for each number of images. The rates are
shares of that capacity, and the objectives multiples of that latency: both are fixed before the first round. In each round and at each rate all systems get the same requests
at the same times (open loop, Poisson), one system after the other, in an order that changes from round to round; the
others idle meanwhile. On more than two cores the client runs on others.

CPU time is that of all processes of a system. A class of fewer than 200 requests is compared by P90 in place of P99. A system is
ahead of another in a figure if the ranges of their rounds do not overlap. Every vLLM has the same arguments; its defaults
compile the model, ``--eager`` does not. Triptych has its defaults, but the number of sequences and the KV memory of vLLM.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import psutil

from benchmarks import ending, machine, random_llava, random_qwen
from benchmarks.figures import add_json_option, write_figures
from benchmarks.random_qwen import CONTEXT_TOKENS, Shape
from benchmarks.versus_vllm_report import LEAST_ROUNDS, Run, Taken, Unloaded, document, ratios, rows, show, verdicts
from benchmarks.vllm_servers import Vllm
from triptych.cli.bench import load, payload
from triptych.cli.bench.load import Endpoint
from triptych.cli.cluster import LocalCluster
from triptych.workload.report import Record, percentile
from triptych.workload.requests import Distribution, Mix, Planned, Size, arrivals

MODEL_ID = "random"
BASE = "vllm"
SYSTEMS = (BASE, "vllm-apart", "triptych-vllm", "triptych-apart", "triptych-hybrid")
MIB = 1 << 20
FULL = Shape()
IMAGE_PX = 224
FAMILIES = {
    "qwen2.5-vl": (random_qwen.make, random_qwen.image_tokens(IMAGE_PX)),
    "llava": (random_llava.make, random_llava.IMAGE_TOKENS),
}
"""How the model is made, and the tokens of an image."""
START_S = 900.0
WARM_UP, UNLOADED, CAPACITY, ROUNDS = range(0, 4_000_000, 1_000_000)
"""Seeds of the parts of a run: no image is sent twice to a system."""


@dataclass(frozen=True, slots=True)
class Settings:
    family: str = "qwen2.5-vl"
    """Name in ``FAMILIES``."""
    shape: Shape = FULL
    rounds: int = LEAST_ROUNDS
    requests: int = 60
    """Of a round at one rate."""
    shares: tuple[float, ...] = (0.3, 0.6, 0.9)
    """Rates, of the base's capacity."""
    capacity_requests: int = 96
    capacity_callers: int = 16
    unloaded_repeats: int = 5
    text_share: float = 0.7
    image_counts: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    """Of requests with images, each as often as the others."""
    image_px: int = IMAGE_PX
    prompt_words: int = 16
    """Words of about four tokens each."""
    output_tokens: int = 32
    max_sequences: int = 32
    vllm_step_tokens: int = 2048
    """The default of ``vllm serve`` on a CPU. Triptych's own engine measures its token budget."""
    kv_cache_mib: int = 512
    eager: bool = False
    systems: tuple[str, ...] = SYSTEMS

    @property
    def mix(self) -> Mix:
        share = (1 - self.text_share) / len(self.image_counts)
        images = [(0, self.text_share)] if self.text_share else []
        return Mix(
            Distribution.of([*images, *((number, share) for number in self.image_counts)]),
            Distribution.of([(self.prompt_words, 1)]),
            Distribution.of([(self.output_tokens, 1)]),
            Size(self.image_px, self.image_px),
        )

    def planned(self, images: int, arrival_s: float = 0.0) -> Planned:
        sizes = (Size(self.image_px, self.image_px),) * images
        return Planned(arrival_s, self.prompt_words, sizes, self.output_tokens)


SMOKE = Settings(
    shape=Shape(vision_layers=2, vision_width=128, text_layers=2, text_width=128),
    rounds=1,
    requests=8,
    shares=(0.5,),
    capacity_requests=8,
    capacity_callers=4,
    unloaded_repeats=1,
    kv_cache_mib=64,
    eager=True,
)


# --- the systems ---


def systems(settings: Settings, model: Path, logs: Path) -> dict[str, Callable[[], AbstractAsyncContextManager[str]]]:
    """How each is started; the contexts give URLs."""
    common = (
        *("--max-num-seqs", str(settings.max_sequences), "--max-num-batched-tokens", str(settings.vllm_step_tokens)),
        *("--max-model-len", str(CONTEXT_TOKENS), "--kv-cache-memory-bytes", str(settings.kv_cache_mib * MIB)),
        *(("--enforce-eager",) if settings.eager else ()),
    )
    own = ("--max-sequences", str(settings.max_sequences), "--kv-cache-bytes", str(settings.kv_cache_mib * MIB))
    vllm = Vllm(model, MODEL_ID, common, logs)
    by_vllm = ("--engine", "vllm", "--vllm-args", " ".join(common))

    def triptych(name: str, text: Sequence[str], roles: str, threads: int = 1) -> LocalCluster:
        return LocalCluster(
            f"{MODEL_ID}={model}",
            roles=roles,
            threads=threads,
            options={"text": text},
            log_dir=logs / name,
            start_timeout_s=START_S,
        )

    return {
        BASE: lambda: vllm.serve(BASE, 2),
        "vllm-apart": lambda: vllm.disaggregated(1),
        "triptych-vllm": lambda: url_of(triptych("triptych-vllm", by_vllm, "E:1,PD:1")),
        "triptych-apart": lambda: url_of(triptych("triptych-apart", own, "E:1,PD:1")),
        "triptych-hybrid": lambda: url_of(triptych("triptych-hybrid", own, "EPD:1", 2)),
    }


@asynccontextmanager
async def url_of(cluster: LocalCluster) -> AsyncGenerator[str]:
    async with cluster:
        yield cluster.url


# --- measuring ---


async def send(url: str, requests: Sequence[Planned], seed: int) -> list[Record]:
    """Send all of these, when they are due. Images and texts depend on the seed alone."""
    records: list[Record] = []
    style = payload.Style(MODEL_ID, ignore_eos=True)
    await load.run(Endpoint(url), requests, style, random.Random(seed), records.append)
    return records


async def unloaded(url: str, settings: Settings) -> Unloaded:
    """One request at a time."""
    ttft_s: list[float] = []
    tpot_s: list[float] = []
    for images in range(max(settings.image_counts) + 1):
        taken = [
            _answered(await send(url, [settings.planned(images)], seed=UNLOADED + 1000 * images + number))[0]
            for number in range(settings.unloaded_repeats)
        ]
        ttft_s.append(statistics.median(record.ttft_s or 0.0 for record in taken))
        tpot_s += [record.tpot_s or 0.0 for record in taken]
    return Unloaded(tuple(ttft_s), statistics.median(tpot_s))


async def capacity(url: str, settings: Settings) -> float:
    """Requests per second of a closed loop over the workload."""
    rng = random.Random(1)
    left = [settings.mix.request(0.0, rng) for _ in range(settings.capacity_requests)]
    seeds = count(CAPACITY)

    async def caller() -> None:
        while left:
            _answered(await send(url, [left.pop()], next(seeds)))

    clock = asyncio.get_running_loop().time
    began_s = clock()
    async with asyncio.TaskGroup() as group:
        for _ in range(settings.capacity_callers):
            group.create_task(caller())
    return settings.capacity_requests / (clock() - began_s)


def _answered(records: list[Record]) -> list[Record]:
    errors = {record.error for record in records if not record.ok}
    if errors:
        raise RuntimeError(f"requests failed without load: {', '.join(sorted(errors))}")
    return records


def plan(settings: Settings, rate: float, seed: int) -> list[Planned]:
    """A round's requests at a rate: the same for every system."""
    rng = random.Random(seed)
    duration_s = 2 * settings.requests / rate
    times = arrivals(rate, duration_s, 1.0, rng)[: settings.requests]
    return [settings.mix.request(at_s, rng) for at_s in times]


async def idle_core_share(seconds: float) -> float:
    """Of one core, what everything that was started takes while nothing is asked."""
    started = psutil.Process().children()
    before_s = cpu_s(started)
    await asyncio.sleep(seconds)
    return (cpu_s(started) - before_s) / seconds


def cpu_s(started: Sequence[psutil.Process]) -> float:
    """What these processes and those that they started have taken."""
    return sum(
        sum(process.cpu_times()[:2]) for first in started for process in (first, *first.children(recursive=True))
    )


async def run(settings: Settings, model: Path, logs: Path, cores: tuple[set[int], set[int]]) -> Run:
    """``cores``: those of the systems, and those of this process while it measures."""
    starting = systems(settings, model, logs)
    taken: list[Taken] = []
    seeds = count(ROUNDS)
    async with AsyncExitStack() as stack:
        urls: dict[str, str] = {}
        processes: dict[str, list[psutil.Process]] = {}
        os.sched_setaffinity(0, cores[0])  # children inherit it
        for name in settings.systems:
            say(f"starting {name}")
            before = psutil.Process().children()
            urls[name] = await stack.enter_async_context(starting[name]())
            processes[name] = [child for child in psutil.Process().children() if child not in before]
        os.sched_setaffinity(0, cores[1])
        for url in urls.values():
            for images in (0, 1, max(settings.image_counts)):
                _answered(await send(url, [settings.planned(images)] * 2, seed=WARM_UP + images))
        idle = await idle_core_share(5.0)
        alone = await unloaded(urls[BASE], settings)
        most = await capacity(urls[BASE], settings)
        say(
            f"{BASE}: {most:.2f} requests/s; without load TTFT s {[round(s, 2) for s in alone.ttft_s]}, TPOT {alone.tpot_s:.3f} s"
        )
        for number in range(1, settings.rounds + 1):
            for share in settings.shares:
                seed = next(seeds)
                requests = plan(settings, share * most, seed)
                order = list(urls)
                order = order[number % len(order) :] + order[: number % len(order)]
                for name in order:
                    before_s = cpu_s(processes[name])
                    records = await send(urls[name], requests, seed)
                    took_s = cpu_s(processes[name]) - before_s
                    taken.append(Taken(name, share, share * most, number, tuple(records), took_s))
                    say(f"round {number}, {share:.0%}, {name}: {brief(records)}")
    return Run(most, alone, idle, tuple(taken))


def brief(records: Sequence[Record]) -> str:
    times = [record.ttft_s for record in records if record.ok and record.ttft_s is not None]
    failed = sum(not record.ok for record in records)
    return (
        f"{len(records)} requests, {failed} failed, TTFT P50 {percentile(times, 50):.2f} s" if times else "all failed"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--smoke", action="store_true", help="a small model and a few requests: shows that it works")
    parser.add_argument("--rounds", type=int, help=f"at least {LEAST_ROUNDS} for a result")
    parser.add_argument("--requests", type=int, help="of a round at one rate")
    parser.add_argument("--shares", type=float, nargs="+", help="rates, of the capacity of vllm")
    parser.add_argument("--eager", action="store_true", help="vLLM compiles nothing: a faster start")
    parser.add_argument("--family", choices=FAMILIES, default=Settings().family)
    parser.add_argument("--images", type=int, choices=range(1, 9), metavar="1..8", help="every request has so many")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help=f"besides {BASE}")
    options = parser.parse_args()
    if find_spec("vllm") is None:
        parser.error("vLLM is not installed here: run it by build/vllm/bin/python, which `make vllm-environment` makes")
    given = {name: value for name in ("rounds", "requests") if (value := getattr(options, name)) is not None}
    if options.shares:
        given["shares"] = tuple(options.shares)
    settings = replace(SMOKE if options.smoke else Settings(), **given)
    settings = replace(settings, eager=settings.eager or options.eager, family=options.family)
    if options.images:
        settings = replace(settings, text_share=0.0, image_counts=(options.images,))
    if options.systems:
        settings = replace(
            settings, systems=tuple(system for system in SYSTEMS if system == BASE or system in options.systems)
        )
    allowed = sorted(os.sched_getaffinity(0))
    cores = set(allowed[:2]), set(allowed[2:]) or set(allowed)
    on = {**machine.describe(), "system_cores": str(sorted(cores[0])), "client_cores": str(sorted(cores[1]))}
    print("; ".join(f"{key} {value}" for key, value in on.items()))
    print("; ".join(f"{key} {value}" for key, value in asdict(settings).items()))
    make, tokens = FAMILIES[settings.family]
    print(f"{tokens} tokens per image; load average {os.getloadavg()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="versus-vllm-") as name:
        model, logs = Path(name) / "model", Path(name) / "logs"
        logs.mkdir()
        make(model, settings.shape)
        result = asyncio.run(run(settings, model, logs, cores))
    made = rows(result)
    print(
        f"all systems idle take {result.idle_core_share:.3f} of a core; capacity of {BASE} {result.capacity:.2f} requests/s"
    )
    print(f"objectives are multiples of {asdict(result.unloaded)}")
    show(made, settings.rounds)
    late = ratios(made, (BASE, "vllm-apart"))
    print("\n".join(late))
    said = {
        "machine": on,
        "settings": asdict(settings),
        "capacity": result.capacity,
        "unloaded": asdict(result.unloaded),
        "idle_core_share": result.idle_core_share,
        "rows": made,
        "verdicts": verdicts(made, settings.rounds),
        "late_images": late,
        "requests": document(result),
    }
    write_figures(options.json, said)


if __name__ == "__main__":
    main()
