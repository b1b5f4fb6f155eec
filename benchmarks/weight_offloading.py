"""What it costs to have only that part of a model in memory that the role needs: switches with and without a load, and decodes meanwhile.

One instance in a process of its own, over real engines on the CPU: of the demo model, and of a Qwen2.5-VL with random weights. ``all`` has all weights in memory
(``--resident all``), ``role`` what the open stages need. A few answers are decoded while the encode stage is opened and closed (PD to EPD and back); then, without
answers, the instance switches from E to PD and back. Files are in the page cache.

The gap is the longest time between two tokens of an answer from the order until the stage is open, beside the longest gap of a time as long without a
switch. Memory is that of the process, in which the client runs too.
"""

import argparse
import asyncio
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil

from benchmarks import ending, machine, random_qwen
from benchmarks.figures import add_json_option, write_figures
from triptych.demo import MODEL_DIR
from triptych.domain.generation import TextRequest, TokenChunk
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import Role, Stage
from triptych.engine.decoder.options import EngineOptions
from triptych.services.text.app import InstanceApp, app
from triptych.services.text.settings import TextSettings

MIB = 1 << 20
_POLL_S = 0.001
_SETTLE_S = 0.5
"""After the answers have begun, and after each switch."""
_LIMIT_S = 300.0
_SHAPE = random_qwen.Shape(vision_layers=6, vision_width=512, text_layers=6, text_width=512, vocabulary=16_000)
Resident = Literal["all", "role"]


@dataclass(frozen=True, slots=True)
class Settings:
    models: tuple[str, ...] = ("demo", "qwen")
    rounds: int = 5
    answers: int = 2
    torch_threads: int = 1
    packed_weight_bytes: int = 0
    """Of second copies of weights, which are chosen by measuring: without them memory is the same at each start."""


QUICK = Settings(("demo",), rounds=1)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of the rounds; of gaps also the longest."""

    model: str
    resident: Resident
    open_encode_ms: float
    """From the order to the open stage, with answers running."""
    open_text_ms: float
    """E to PD, without answers."""
    gap_without_ms: float
    """The longest gap between two tokens without a switch."""
    gap_opening_ms: float
    """... until the encode stage is open."""
    gap_opening_longest_ms: float
    """Of all rounds."""
    rss_e_mib: float
    """Memory of the process in role E."""
    rss_pd_mib: float
    rss_epd_mib: float


class Gaps:
    """When the tokens of running answers came."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._gaps: list[tuple[float, float]] = []

    def token(self, answer: int) -> None:
        now_s = time.perf_counter()
        if (last_s := self._last.get(answer)) is not None:
            self._gaps.append((now_s, now_s - last_s))
        self._last[answer] = now_s

    def longest_s(self, since_s: float, until_s: float) -> float:
        """Of the gaps that lie partly within this time."""
        return max((gap_s for end_s, gap_s in self._gaps if end_s >= since_s and end_s - gap_s <= until_s), default=0.0)


class Driven:
    def __init__(self, running: InstanceApp) -> None:
        self._running = running
        self._version = 0

    async def switch(self, role: Role) -> float:
        """Until all its stages are open and no others; the seconds until all were open."""
        switching = self._running.instance.switching
        if switching is None:
            raise RuntimeError("the instance cannot switch")
        self._version += 1
        began_s, opened_s = time.perf_counter(), None
        switching.set_stages(role.stages, self._version, "the benchmark")
        while (stages := self._open()) != role.stages:
            if opened_s is None and stages >= role.stages:
                opened_s = time.perf_counter()
            await asyncio.sleep(_POLL_S)
        return (opened_s or time.perf_counter()) - began_s

    def _open(self) -> frozenset[Stage]:
        return frozenset(self._running.service.load().stages)

    async def answer(self, number: int, gaps: Gaps) -> None:
        """Until cancelled."""
        sampling = SamplingParams(max_tokens=200, temperature=0.0, seed=1, ignore_eos=True)
        while True:
            request = TextRequest(f"a{number}", "m", tuple(range(30, 46)), (), sampling, _LIMIT_S)
            async with aclosing(self._running.instance.text.generate(request)) as stream:
                async for events in stream:
                    if any(isinstance(event, TokenChunk) for event in events):
                        gaps.token(number)


@asynccontextmanager
async def instance(model: Path, role: Role, resident: Resident, settings: Settings) -> AsyncIterator[Driven]:
    told: dict[str, Any] = {
        "compute": {"torch_threads": settings.torch_threads, "packed_weight_bytes": settings.packed_weight_bytes}
    }
    made = TextSettings(
        model=model,
        model_id="m",
        role=role,
        switchable=Role.EPD,
        resident=resident,
        port=0,
        image_cache_bytes=MIB,
        kv_arena_bytes=MIB,
        mount_encoder=f"--arena-bytes {8 * MIB}",
        engine=EngineOptions(kv_cache_bytes=64 * MIB),
        **told,
    )
    async with app(made) as running:
        yield Driven(running)


async def measured(name: str, model: Path, resident: Resident, settings: Settings) -> Row:
    opened_s, quiet_s, gaps_s, texts_s = list[float](), list[float](), list[float](), list[float]()
    async with instance(model, Role.PD, resident, settings) as driven:
        gaps = Gaps()
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(driven.answer(number, gaps)) for number in range(settings.answers)]
            await asyncio.sleep(2 * _SETTLE_S)
            rss_pd = _rss()
            for _ in range(settings.rounds):
                began_s = time.perf_counter()
                opened_s.append(await driven.switch(Role.EPD))
                await asyncio.sleep(_SETTLE_S)  # until the token after a gap has come
                gaps_s.append(gaps.longest_s(began_s, began_s + opened_s[-1]))
                rss_epd = _rss()
                await driven.switch(Role.PD)
                await asyncio.sleep(_SETTLE_S)
                began_s = time.perf_counter()
                await asyncio.sleep(_SETTLE_S)
                quiet_s.append(gaps.longest_s(began_s, began_s + opened_s[-1]))
            for answer in answers:
                answer.cancel()
        for _ in range(settings.rounds):
            await driven.switch(Role.E)
            await asyncio.sleep(_SETTLE_S)
            rss_e = _rss()
            texts_s.append(await driven.switch(Role.PD))
            await asyncio.sleep(_SETTLE_S)
    return Row(
        name,
        resident,
        _ms(median(opened_s)),
        _ms(median(texts_s)),
        _ms(median(quiet_s)),
        _ms(median(gaps_s)),
        _ms(max(gaps_s)),
        rss_e,
        rss_pd,
        rss_epd,
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


def _rss() -> float:
    nbytes: int = psutil.Process().memory_info().rss
    return round(nbytes / MIB, 1)


def rows(name: str, settings: Settings) -> Sequence[Row]:
    with tempfile.TemporaryDirectory() as directory:
        model = MODEL_DIR
        if name == "qwen":
            model = Path(directory)
            random_qwen.make(model, _SHAPE)
        found: list[Row] = []
        residents: tuple[Resident, ...] = ("all", "role")
        for resident in residents:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                found.append(process.submit(row, name, model, resident, settings).result())
        return found


def row(name: str, model: Path, resident: Resident, settings: Settings) -> Row:
    """In a process of its own, as its memory counts."""
    logging.disable(logging.WARNING)
    return asyncio.run(measured(name, model, resident, settings))


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=Settings().models, default=Settings().models)
    parser.add_argument("--rounds", type=int, default=Settings().rounds)
    parser.add_argument("--torch-threads", type=int, default=Settings().torch_threads)
    parser.add_argument("--packed-weight-bytes", type=int, default=Settings().packed_weight_bytes)
    parser.add_argument("--quick", action="store_true", help="only show that it works")
    add_json_option(parser)
    args = parser.parse_args()
    settings = QUICK
    if not args.quick:
        settings = Settings(
            tuple(args.models),
            args.rounds,
            torch_threads=args.torch_threads,
            packed_weight_bytes=args.packed_weight_bytes,
        )
    said = machine.describe()
    print(said)
    print(settings)
    found: list[Row] = []
    for name in settings.models:
        for row in rows(name, settings):
            found.append(row)
            print(
                f"{row.model:5} {row.resident:5} encode opens in {row.open_encode_ms:8.1f} ms, text in {row.open_text_ms:8.1f}; longest gap "
                f"{row.gap_opening_ms:7.1f} ms (of all rounds {row.gap_opening_longest_ms:7.1f}), without a switch {row.gap_without_ms:7.1f}; "
                f"memory in role E {row.rss_e_mib:7.1f} MiB, PD {row.rss_pd_mib:7.1f}, EPD {row.rss_epd_mib:7.1f}",
                flush=True,
            )
    told = {"machine": said, "settings": asdict(settings), "rows": [asdict(row) for row in found]}
    write_figures(args.json, told)


if __name__ == "__main__":
    main()
