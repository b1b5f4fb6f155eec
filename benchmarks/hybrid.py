"""One hybrid instance under a mixed load, beside an encoder and a text instance apart, on the same two cores.

A random Qwen2.5-VL of 160 million parameters, as in ``benchmarks.versus_vllm``: seven of ten requests are text only, the others have 1 to 8
images of 224 pixels, each different; answers have 32 tokens.

- ``hybrid, 2 threads``: stages compute at the same time; ``hybrid, 1 thread``: in turns.
- ``apart``: an encoder and a text instance, one thread each.
- With ``--before DIR``, the root of another working tree: both hybrids of that tree.

All systems are started first, and idle while another is asked. In each round and at each rate all get the same requests at the same times
(Poisson, open loop), in an order that changes. Attainment is the share of requests within 5 times the TTFT that ``apart`` takes for as many
images without load, and 5 times its TPOT.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks import ending, machine
from benchmarks.figures import add_before_options, add_json_option, write_figures
from benchmarks.random_qwen import Shape, make
from triptych.cli import ports
from triptych.cli.bench import load
from triptych.cli.bench.load import Endpoint
from triptych.cli.bench.payload import Style
from triptych.workload.report import Record, percentile
from triptych.workload.requests import Distribution, Mix, Planned, Size, arrivals

HERE = Path(__file__).parents[1]
APART = "apart"
_MODEL = "random"
_COMMAND = "from triptych.cli.main import main; main()"
"""``triptych``, of this tree or of another."""
_IMAGE = Size(224, 224)
_MOST_IMAGES, _TEXT_SHARE, _WORDS, _TOKENS = 8, 0.7, 16, 32
_MIX = Mix(
    Distribution.of([(0, _TEXT_SHARE), *((n, (1 - _TEXT_SHARE) / _MOST_IMAGES) for n in range(1, _MOST_IMAGES + 1))]),
    Distribution.of([(_WORDS, 1)]),
    Distribution.of([(_TOKENS, 1)]),
    _IMAGE,
)
_WITHIN = 5.0
_START_S, _END_S = 180.0, 30.0


@dataclass(frozen=True, slots=True)
class System:
    name: str
    roles: str
    threads: int
    tree: Path = HERE


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds over all rounds."""

    system: str
    rate: float
    requests: int
    failed: int
    text_ttft_p50: float
    text_ttft_p90: float
    image_ttft_p50: float
    image_ttft_p90: float
    tpot_p50: float
    tpot_p90: float
    attainment: float


def systems(before: Path | None) -> list[System]:
    hybrids = (("hybrid, 2 threads", 2), ("hybrid, 1 thread", 1))
    made = [System(APART, "E:1,PD:1", 1), *(System(name, "EPD:1", threads) for name, threads in hybrids)]
    return made + [System(f"{name}, before", "EPD:1", n, before) for name, n in hybrids if before is not None]


@asynccontextmanager
async def running(system: System, model: Path, log: Path) -> AsyncIterator[str]:
    """``triptych up`` of the system's tree; its URL."""
    (port,) = ports.free(1, set())
    command = [sys.executable, "-c", _COMMAND, "up", "--no-live", "--model", f"{_MODEL}={model}"]
    command += ["--roles", system.roles, "--threads", str(system.threads), "--port", str(port), "--router-port", "0"]
    environment = {**os.environ, "PYTHONPATH": f"{system.tree}:{system.tree / 'src'}"}  # noqa: TID251 - passed to the child
    with log.open("w") as out:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=out, stderr=out, cwd=system.tree, env=environment
        )
        try:
            url = f"http://{ports.HOST}:{port}"
            await _ready(url, process, log)
            yield url
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _END_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _ready(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(_START_S), httpx.AsyncClient(trust_env=False) as client:
        while process.returncode is None:
            with suppress(httpx.HTTPError):
                if (await client.get(f"{url}/ready")).is_success:
                    return
            await asyncio.sleep(0.2)
    said = await asyncio.to_thread(log.read_text)
    raise RuntimeError(f"a cluster did not start: {said[-2000:]}")


async def sent(url: str, requests: Sequence[Planned], seed: int) -> list[Record]:
    records: list[Record] = []
    await load.run(Endpoint(url), requests, Style(_MODEL, ignore_eos=True), random.Random(seed), records.append)
    return records


async def alone(url: str) -> tuple[list[float], float]:
    """TTFT by number of images, and TPOT: medians of three requests, one at a time."""
    ttft: list[float] = []
    tpot: list[float] = []
    for images in range(_MOST_IMAGES + 1):
        taken = [(await sent(url, [_planned(images)], 1000 + 10 * images + number))[0] for number in range(3)]
        ttft.append(statistics.median(record.ttft_s or 0.0 for record in taken))
        tpot += [record.tpot_s or 0.0 for record in taken]
    return ttft, statistics.median(tpot)


def _planned(images: int) -> Planned:
    return Planned(0.0, _WORDS, (_IMAGE,) * images, _TOKENS)


def planned(rate: float, number: int, seed: int) -> list[Planned]:
    rng = random.Random(seed)
    times = arrivals(rate, 2 * number / rate, 1.0, rng)[:number]
    return [_MIX.request(at_s, rng) for at_s in times]


def row(system: str, rate: float, records: Sequence[Record], ttft: Sequence[float], tpot_s: float) -> Row:
    answered = [record for record in records if record.ok and record.ttft_s is not None]

    def first(*, images: bool, percent: float) -> float:
        times = [record.ttft_s or 0.0 for record in answered if bool(record.planned.images) is images]
        return round(percentile(times, percent), 3) if times else 0.0

    tokens = [record.tpot_s or 0.0 for record in answered]
    within = sum(
        (record.ttft_s or 0.0) <= _WITHIN * ttft[len(record.planned.images)]
        and (record.tpot_s or 0.0) <= _WITHIN * tpot_s
        for record in answered
    )
    return Row(
        system,
        rate,
        len(records),
        len(records) - len(answered),
        first(images=False, percent=50),
        first(images=False, percent=90),
        first(images=True, percent=50),
        first(images=True, percent=90),
        round(percentile(tokens, 50), 4),
        round(percentile(tokens, 90), 4),
        round(within / len(records), 3),
    )


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    records: dict[tuple[str, float], list[Record]] = {}
    with tempfile.TemporaryDirectory(prefix="hybrid-benchmark") as name:
        folder = Path(name)
        shape = Shape(vision_layers=2, vision_width=128, text_layers=2, text_width=128) if options.quick else Shape()
        (folder / "model").mkdir()
        make(folder / "model", shape)
        async with AsyncExitStack() as stack:
            urls: dict[str, str] = {}
            chosen = systems(options.before)[: 2 if options.quick else None]
            for number, system in enumerate(chosen):
                up = running(system, folder / "model", folder / f"{number}.log")
                urls[system.name] = await stack.enter_async_context(up)
            for url in urls.values():
                await sent(url, [_planned(images) for images in (0, 1, _MOST_IMAGES)] * 2, 1)
            ttft, tpot_s = await alone(urls[APART])
            print(
                f"{APART}, without load: TTFT {[round(median_s, 3) for median_s in ttft]} s, TPOT {tpot_s:.4f} s",
                flush=True,
            )
            await _rounds(options, urls, records)
    rows = [row(system, rate, found, ttft, tpot_s) for (system, rate), found in records.items()]
    _show(rows)
    return {"unloaded": {"ttft_s": ttft, "tpot_s": tpot_s}, "rows": [asdict(figures) for figures in rows]}


async def _rounds(
    options: argparse.Namespace, urls: Mapping[str, str], records: dict[tuple[str, float], list[Record]]
) -> None:
    names = list(urls)
    for number in range(options.rounds):
        for rate in options.rates:
            requests = planned(rate, options.requests, seed=2000 + number)
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                records.setdefault((name, rate), []).extend(await sent(urls[name], requests, seed=3000 + number))
                print(f"  round {number + 1}, {rate}/s: {name}", file=sys.stderr, flush=True)


def _show(rows: Sequence[Row]) -> None:
    print(
        f"{'':>26} {'rate':>5} {'text P50':>9} {'P90':>6} {'images P50':>11} {'P90':>6} {'TPOT P50':>9} {'P90':>7} {'in time':>8} failed"
    )
    for row in sorted(rows, key=lambda row: row.rate):
        print(
            f"{row.system:>26} {row.rate:>5} {row.text_ttft_p50:>9.2f} {row.text_ttft_p90:>6.2f} {row.image_ttft_p50:>11.2f} "
            f"{row.image_ttft_p90:>6.2f} {1e3 * row.tpot_p50:>7.0f}ms {1e3 * row.tpot_p90:>5.0f}ms {row.attainment:>8.0%} {row.failed}"
        )


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    add_before_options(parser, rounds=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.8, 1.2], help="requests per second")
    parser.add_argument("--requests", type=int, default=24, help="of a round at one rate")
    parser.add_argument(
        "--quick", action="store_true", help="a small model, two systems and a few requests: shows that it works"
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.rates, options.requests = 1, [2.0], 6
    on = machine.describe()
    print("; ".join(f"{key} {value}" for key, value in on.items()))
    settings = {name: getattr(options, name) for name in ("rounds", "rates", "requests")}
    write_figures(options.json, {"machine": on, "settings": settings, **asyncio.run(measure(options))})


if __name__ == "__main__":
    main()
