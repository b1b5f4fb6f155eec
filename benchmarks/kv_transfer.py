"""What it takes to hand keys and values from one process to another, against three copies of the same bytes in memory.

A set of 63 MiB: 1,152 positions of a language model with 28 layers, 4 key heads of 128 and 16-bit numbers (7 billion parameters with grouped
heads), in segments as ``domain.kv_segment.KvKind`` cuts them. Per segment the sender gathers the positions from scattered blocks of its
cache into a slot of its arena and seals it; the reader pulls the slot, checks it, and scatters it into the blocks, of another size, of its own
cache. These are three copies and two checksums. ``one by one`` waits for each segment before the next; ``pipelined`` does what instances do:
the sender goes on while the reader pulls.

``memcpy`` copies the set three times inside the reader, in the same round. Ratios are to it. Rounds alternate all systems.

Then, between two text instances with the real engine, the time from the end of a prompt at one to the first decode step at the other, and how
much was sealed before that end (``kv_transfer_steps``).
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks import ending, identity, kv_transfer_steps, machine
from benchmarks.figures import add_json_option, write_figures
from benchmarks.kv_transfer_steps import QUICK_STEPS, StepSettings
from benchmarks.talking_child import talking_child
from benchmarks.transport import HOST, available_backends, open_transport
from triptych.domain.embedding import GENERATION_NBYTES, KEY_NBYTES, LEASE_ID_NBYTES, DType, Ticket
from triptych.domain.instance import TransportOffer
from triptych.domain.kv_segment import KvKind, KvSegment
from triptych.engine.decoder.kv_cache import KvCache
from triptych.machine.arena.extents import round_up
from triptych.policy.transport import MEMORY, NIXL
from triptych.ports import Peer
from triptych.transport.arena import HostArena
from triptych.transport.slot import seal_in_place, verify

MEMCPY = "memcpy"
KIND = KvKind("0" * 64, DType.BF16, layers=28, heads=4, head_size=128)
SENDER_BLOCK, READER_BLOCK = 16, 48
"""Positions of a block of KV memory."""


@dataclass(frozen=True, slots=True)
class Settings:
    positions: int = 1152
    rounds: int = 15
    kind: KvKind = KIND


QUICK = Settings(positions=200, rounds=2, kind=replace(KIND, layers=2))


def segments(settings: Settings) -> tuple[KvSegment, ...]:
    return settings.kind.segments(0, settings.positions)


def cache_of(settings: Settings, block_tokens: int) -> KvCache:
    """Room for the set, and as much again, so that its blocks can be scattered."""
    blocks = 2 * -(-settings.positions // block_tokens)
    nbytes = blocks * block_tokens * settings.kind.position_nbytes
    return KvCache(settings.kind, nbytes=nbytes, block_tokens=block_tokens, device=torch.device("cpu"))


def filled_cache(settings: Settings) -> KvCache:
    """The sender's, with the same contents each time."""
    cache = cache_of(settings, SENDER_BLOCK)
    for memory in (cache.keys, cache.values):
        memory.normal_(generator=torch.Generator().manual_seed(16))
    return cache


def scattered(settings: Settings, block_tokens: int) -> list[int]:
    """A table of blocks of which no two adjacent ones are adjacent in memory."""
    return [2 * index for index in range(-(-settings.positions // block_tokens))]


def tickets(settings: Settings, holder: str, base: int) -> list[Ticket]:
    """Where the sender's segments lie; their checksums are told when they are sealed."""
    found, offset = [], base
    for index, segment in enumerate(segments(settings)):
        found.append(
            Ticket(
                key=index.to_bytes(KEY_NBYTES, "little"),
                holder=holder,
                epoch=1,
                offset=offset,
                payload_nbytes=segment.nbytes,
                generation=1,
                checksum=0,
                tensors=(segment.spec,),
                tokens=segment.positions,
                lease_id=b"l" * LEASE_ID_NBYTES,
                lease_s=60.0,
            )
        )
        offset += round_up(found[-1].slot_nbytes)
    return found


def arena_for(settings: Settings, instance_id: str) -> HostArena:
    last = tickets(settings, instance_id, 4096)[-1]
    return HostArena(last.offset + round_up(last.slot_nbytes), instance_id=instance_id, epoch=1)


def payload(arena: HostArena, ticket: Ticket) -> torch.Tensor:
    """The payload of a slot, as bytes."""
    window = arena.window(ticket.offset + GENERATION_NBYTES, ticket.payload_nbytes)
    return torch.frombuffer(window, dtype=torch.uint8)


# --- the sender ------------------------------------------------------------------------------------------------------


async def send(systems: Sequence[str], settings: Settings, own: Path) -> None:
    """The sender process: print the offers; then for each line with segments, seal them and print a line for each."""
    arena, cache = arena_for(settings, "sender"), filled_cache(settings)
    table = scattered(settings, SENDER_BLOCK)
    places = tickets(settings, "sender", arena.base)
    parts = segments(settings)
    async with contextlib.AsyncExitStack() as stack:
        offers: dict[str, str] = {}
        for system in systems:
            transport = await open_transport(system, arena, own)
            stack.push_async_callback(transport.close)
            offers[system] = transport.offer().metadata.hex()
        print(json.dumps(offers), flush=True)
        loop = asyncio.get_running_loop()

        def sealed(index: int) -> int:
            segment, ticket = parts[index], places[index]
            cache.export(table, segment.first, segment.end, payload(arena, ticket))
            return seal_in_place(arena, ticket.offset, ticket.generation, ticket.payload_nbytes)

        while line := await loop.run_in_executor(None, sys.stdin.readline):
            if line.strip() == "cpu":
                print(time.process_time(), flush=True)
                continue
            for index in map(int, line.split()):
                checksum = await loop.run_in_executor(None, sealed, index)
                print(index, checksum, flush=True)


class Sender:
    """The sender process, seen from the reader."""

    def __init__(self, process: asyncio.subprocess.Process, offers: dict[str, str]) -> None:
        self.offers = offers
        self._process = process

    async def seal(self, indices: Sequence[int]) -> AsyncIterator[tuple[int, int]]:
        """Segments and their checksums, as they are sealed."""
        self._write(" ".join(map(str, indices)))
        for _ in indices:
            index, checksum = (await self._line()).split()
            yield int(index), int(checksum)

    async def cpu_s(self) -> float:
        self._write("cpu")
        return float(await self._line())

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    async def _line(self) -> str:
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode()


@contextlib.asynccontextmanager
async def sender_process(systems: Sequence[str], own: Path, *, quick: bool) -> AsyncIterator[Sender]:
    arguments = ("--send", ",".join(systems), "--certificate", str(own), *(("--quick",) if quick else ()))
    async with talking_child("benchmarks.kv_transfer", *arguments) as (process, offers):
        yield Sender(process, offers)


# --- the reader ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    system: str
    how: str
    took_s: float
    cpu_s: float
    """Of both processes."""


class Reader:
    def __init__(self, settings: Settings, sender: Sender) -> None:
        self._settings = settings
        self._sender = sender
        self._arena = arena_for(settings, "reader")
        self._cache = cache_of(settings, READER_BLOCK)
        self._table = scattered(settings, READER_BLOCK)
        self._segments = segments(settings)
        self._tickets = tickets(settings, "sender", self._arena.base)
        nbytes = sum(segment.nbytes for segment in self._segments)
        self._copies = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(4)]
        self.nbytes = nbytes
        self._peers: dict[str, Peer] = {}

    async def connect(self, system: str, own: Path, stack: contextlib.AsyncExitStack) -> None:
        transport = await open_transport(system, self._arena, own)
        stack.push_async_callback(transport.close)
        offer = TransportOffer(system, HOST, bytes.fromhex(self._sender.offers[system]))
        self._peers[system] = await transport.connect(offer)
        stack.push_async_callback(self._peers[system].close)

    async def sample(self, system: str, how: str) -> Sample:
        before_s, began_s = time.process_time() + await self._sender.cpu_s(), time.perf_counter()
        if system == MEMCPY:
            self._memcpy()
        elif how == "one by one":
            for index in range(len(self._segments)):
                await self._bring(self._peers[system], [index])
        else:
            await self._bring(self._peers[system], range(len(self._segments)))
        took_s = time.perf_counter() - began_s
        return Sample(system, how, took_s, time.process_time() + await self._sender.cpu_s() - before_s)

    def _memcpy(self) -> None:
        for source, target in zip(self._copies, self._copies[1:], strict=False):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), self.nbytes)

    async def _bring(self, peer: Peer, indices: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        loading: asyncio.Future[None] | None = None
        async for index, checksum in self._sender.seal(indices):
            ticket = replace(self._tickets[index], checksum=checksum)
            await peer.pull(ticket, ticket.offset)
            if loading is not None:
                await loading
            loading = loop.run_in_executor(None, self._load, index, ticket)
        if loading is not None:
            await loading

    def _load(self, index: int, ticket: Ticket) -> None:
        verify(self._arena, ticket.offset, ticket)
        segment = self._segments[index]
        self._cache.load(self._table, segment, payload(self._arena, ticket), first=segment.first)

    def check(self) -> None:
        """Check that all positions have the sender's contents, and clear them."""
        sent = filled_cache(self._settings)
        theirs = sent.slots(scattered(self._settings, SENDER_BLOCK), 0, self._settings.positions)
        ours = self._cache.slots(self._table, 0, self._settings.positions)
        for wanted, memory in ((sent.keys, self._cache.keys), (sent.values, self._cache.values)):
            if not torch.equal(wanted[:, theirs], memory[:, ours]):
                raise RuntimeError("other keys and values arrived than were sent")
            memory.zero_()


async def run(settings: Settings, systems: Sequence[str], own: Path, *, quick: bool) -> list[Sample]:
    ways = [(MEMCPY, "three copies"), *((system, how) for system in systems for how in ("one by one", "pipelined"))]
    samples: list[Sample] = []
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(sender_process(systems, own, quick=quick))
        reader = Reader(settings, sender)
        for system in systems:
            await reader.connect(system, own, stack)
        for system, how in ways:
            await reader.sample(system, how)
            if system != MEMCPY:
                reader.check()
        for _ in range(settings.rounds):
            samples += [await reader.sample(system, how) for system, how in ways]
    return samples


def report(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One row per system and way: medians and quartiles over the rounds, of times and of ratios within a round."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.system, sample.how), []).append(sample)
    base = next(group for (system, _), group in groups.items() if system == MEMCPY)
    rows: list[dict[str, Any]] = []
    for (system, how), group in groups.items():
        ratios = [sample.took_s / its.took_s for sample, its in zip(group, base, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "system": system,
                "how": how,
                "ms": round(1e3 * statistics.median(sample.took_s for sample in group), 1),
                "cpu_ms": round(1e3 * statistics.median(sample.cpu_s for sample in group), 1),
                "x_memcpy": round(statistics.median(ratios), 2),
                "x_memcpy_quartiles": (round(low, 2), round(high, 2)),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'system':>8} {'how':>13} {'ms':>8} {'CPU ms':>8} {'x memcpy':>9}  quartiles")
    for row in rows:
        low, high = row["x_memcpy_quartiles"]
        print(
            f"{row['system']:>8} {row['how']:>13} {row['ms']:>8} {row['cpu_ms']:>8} {row['x_memcpy']:>9}  {low} to {high}"
        )


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="a small set, to see that it runs")
    parser.add_argument("--rounds", type=int, help="of both parts, instead of the defaults")
    parser.add_argument("--systems", help="comma-separated transports, instead of all that work here")
    parser.add_argument("--parts", default="copies,steps", help="comma-separated: of the two, instead of both")
    parser.add_argument("--models", help="separated by semicolons: of those of the second part, instead of all")
    parser.add_argument("--send", help=argparse.SUPPRESS)
    parser.add_argument("--certificate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = QUICK if options.quick else Settings()
    torch.set_num_threads(1)
    if options.send:
        uvloop.run(send(options.send.split(","), settings, options.certificate))
        return
    if options.rounds:
        settings = replace(settings, rounds=options.rounds)
    steps = QUICK_STEPS if options.quick else StepSettings()
    if options.rounds:
        steps = replace(steps, rounds=options.rounds)
    if options.models:
        chosen = options.models.split(";")
        steps = replace(steps, models=tuple(model for model in steps.models if model.name in chosen))
    parts = options.parts.split(",")
    on = {**machine.describe(), "load_average_before": f"{os.getloadavg()[0]:.1f}"}
    said = {**asdict(settings), "kind": asdict(settings.kind) | {"dtype": settings.kind.dtype.value}}
    print("; ".join(f"{key} {value}" for key, value in on.items()))
    print("; ".join(f"{key} {value}" for key, value in said.items()))
    print("; ".join(f"{key} {value}" for key, value in asdict(steps).items()), flush=True)
    rows = copied(settings, options.systems, quick=options.quick) if "copies" in parts else []
    step_rows: list[dict[str, Any]] = []
    if "steps" in parts:
        step_rows = uvloop.run(kv_transfer_steps.measure_steps(steps, lambda line: print(line, flush=True)))
    on["load_average_after"] = f"{os.getloadavg()[0]:.1f}"
    figures = {"machine": on, "settings": said, "rows": rows, "step_settings": asdict(steps), "steps": step_rows}
    write_figures(options.json, figures)


def copied(settings: Settings, systems: str | None, *, quick: bool) -> list[dict[str, Any]]:
    """The rows of the first part, printed."""
    chosen = systems.split(",") if systems else [system for system in available_backends() if system != MEMORY]
    chosen.sort(key=lambda system: system == NIXL)  # threads left by its agents would count against the others
    with identity.certificate() as own:
        rows = report(uvloop.run(run(settings, chosen, own, quick=quick)))
    show(rows)
    return rows


if __name__ == "__main__":
    main()
