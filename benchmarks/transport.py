"""Transfer rate of embeddings between two processes' memory, against memcpy and a gRPC stream.

Side by side in one run, round after round, on one machine:

- ``memcpy``: the same bytes copied inside the reader, one call per pull: the limit of the memory.
- ``memory``, ``shm``, ``nixl``, ``tcp``: the backends of ``triptych.transport``, each pull awaited.
- ``tls``: ``tcp`` under mutual TLS. Its ratio to ``tcp`` is what encryption costs.
- ``socket``: blocking ``sendall`` and ``recv_into`` on one connection, without event loop, checks or deadlines: the
  limit of TCP here. ``sockets``: the same on four connections, with a thread each at both ends.
- ``grpc``: a grpc.aio stream of 1 MB chunks, copied to their place: the alternative to a transport.

Holders are separate processes (except for ``memcpy`` and ``memory``), all on uvloop. Pulls cycle over ``SLOTS`` places
in both arenas. Ratios are to the memcpy of the same round and case; absolute figures depend on the machine and its
other load.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import grpc
import uvloop

from benchmarks import ending, identity, machine
from benchmarks.figures import add_json_option, write_figures
from benchmarks.talking_child import talking_child
from triptych.domain.embedding import DType, TensorSpec, Ticket
from triptych.domain.instance import TransportOffer
from triptych.policy.transport import MEMORY, NIXL, SHM, TCP
from triptych.ports import Transport
from triptych.transport.arena import HostArena
from triptych.transport.memory import MemoryNetwork, MemoryTransport
from triptych.transport.nixl import NixlTransport
from triptych.transport.shm import ShmTransport
from triptych.transport.tcp import TcpTransport
from triptych.transport.tcp_holder import TcpLimits

MEMCPY, TLS, SOCKET, SOCKETS, GRPC = "memcpy", "tls", "socket", "sockets", "grpc"
CONNECTIONS = {SOCKET: 1, SOCKETS: 4}
HOST = "this-host"
SLOTS = 8
TOGETHER = 32
"""Small pulls started in one turn of the event loop."""
MAX_PULL_S = 60.0
_WORD_NBYTES = 16
"""Bytes of a slot around its payload."""
_CHUNK_NBYTES = 1 << 20
_KB_NBYTES = 1 << 10
_METHOD = "/benchmark/read"
_RANGE = struct.Struct("<QQ")

Pull = Callable[[int, int], Awaitable[None]]
"""(slot, payload bytes): pull from a holder's slot to the reader's slot of the same number."""


def available_backends() -> tuple[str, ...]:
    """Backends that are installed here."""
    nixl = find_spec("nixl_cu12") is not None or find_spec("nixl_cu13") is not None
    here = {MEMORY: True, SHM: hasattr(os, "memfd_create"), NIXL: nixl, TCP: True}
    return tuple(backend for backend, usable in here.items() if usable)


@dataclass(frozen=True, slots=True)
class Settings:
    sizes: tuple[int, ...] = tuple(kib << 10 for kib in (64, 256, 1024, 4096, 16384, 65536))
    rounds: int = 5
    nbytes: int = 64 << 20
    """Least bytes pulled per measurement, with at least 16 pulls."""
    small_pulls: int = 2000
    idle_s: float = 2.0
    holders: int = 4


QUICK = Settings(sizes=(64 << 10, 1 << 20), rounds=1, nbytes=1 << 20, small_pulls=20, idle_s=0.05, holders=2)


@dataclass(frozen=True, slots=True)
class Case:
    """``at_once`` concurrent pulls, spread over ``holders`` processes."""

    nbytes: int
    at_once: int
    holders: int


@dataclass(frozen=True, slots=True)
class Sample:
    case: Case
    system: str
    gb_per_s: float
    cpu_s_per_gb: float
    """CPU time of reader and holders together."""


# --- the holder's side ------------------------------------------------------------------------------------------------


def make_arena(settings: Settings, instance_id: str) -> HostArena:
    """An arena of ``SLOTS`` slots of the largest size, filled with a pattern."""
    nbytes = SLOTS * stride(max(settings.sizes))
    arena = HostArena(4096 + nbytes, instance_id=instance_id, epoch=1)
    pattern = bytes(range(251)) * (nbytes // 251 + 1)
    arena.memory[arena.base :] = memoryview(pattern)[: arena.nbytes - arena.base]
    return arena


def stride(nbytes: int) -> int:
    return -(-(nbytes + _WORD_NBYTES) // 64) * 64


def ticket(arena: HostArena, holder: str, slot: int, nbytes: int) -> Ticket:
    """A ticket of an unsealed slot: only its place matters here."""
    return Ticket(
        key=b"k",
        holder=holder,
        epoch=1,
        offset=place(arena, slot, nbytes),
        payload_nbytes=nbytes,
        generation=1,
        checksum=0,
        tensors=(TensorSpec("t", DType.U8, (nbytes,)),),
        tokens=1,
        lease_id=b"l" * 16,
        lease_s=60.0,
    )


def place(arena: HostArena, slot: int, nbytes: int) -> int:
    return arena.base + slot * stride(nbytes)


async def open_transport(system: str, arena: HostArena, own: Path) -> Transport:
    """``own`` is the folder of a certificate."""
    match system:
        case "shm":
            return await ShmTransport.listen(arena, machine=HOST, max_pull_s=MAX_PULL_S)
        case "nixl":
            return await NixlTransport.start(arena, machine=HOST, max_pull_s=MAX_PULL_S)
        case "tcp" | "tls":
            limits = TcpLimits(max_pull_s=MAX_PULL_S)
            tls = identity.loaded(own) if system == TLS else None
            return await TcpTransport.listen(arena, machine=HOST, check=lambda *_: True, limits=limits, tls=tls)
    raise ValueError(f"no backend {system!r} between processes")


def over_grpc(arena: HostArena) -> tuple[grpc.aio.Server, int]:
    """A server that streams ranges of the arena."""

    async def read(request: bytes, _: object) -> AsyncGenerator[bytes]:
        offset, nbytes = _RANGE.unpack(request)
        for at in range(offset, offset + nbytes, _CHUNK_NBYTES):
            yield arena.memory[at : min(at + _CHUNK_NBYTES, offset + nbytes)].tobytes()

    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    handler: Any = grpc.unary_stream_rpc_method_handler(read)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmark", {"read": handler}),))
    return server, server.add_insecure_port("127.0.0.1:0")


def over_sockets(arena: HostArena, connections: int) -> int:
    """Start one thread per connection that sends ranges of the arena; returns their port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := connection.recv(_RANGE.size, socket.MSG_WAITALL):
            offset, nbytes = _RANGE.unpack(request)
            connection.sendall(arena.memory[offset : offset + nbytes])

    for _ in range(connections):
        threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


async def hold(systems: Sequence[str], settings: Settings, instance_id: str, own: Path) -> None:
    """The holder process: print the offers, then the CPU time on each request, until its input ends."""
    arena = make_arena(settings, instance_id)
    async with contextlib.AsyncExitStack() as stack:
        offers: dict[str, str | int] = {}
        for system in systems:
            if system == GRPC:
                server, offers[GRPC] = over_grpc(arena)
                await server.start()
                stack.push_async_callback(server.stop, None)
            elif system in CONNECTIONS:
                offers[system] = over_sockets(arena, CONNECTIONS[system])
            else:
                transport = await open_transport(system, arena, own)
                stack.push_async_callback(transport.close)
                offers[system] = transport.offer().metadata.hex()
        print(json.dumps(offers), flush=True)
        while await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
            print(time.process_time(), flush=True)


# --- the reader's side -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Holder:
    """A holder process, seen from the reader."""

    process: asyncio.subprocess.Process
    instance_id: str
    offers: dict[str, Any]

    async def cpu_s(self) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"cpu\n")
        return float(await self.process.stdout.readline())


@contextlib.asynccontextmanager
async def holder_process(systems: Sequence[str], settings: Settings, number: int, own: Path) -> AsyncIterator[Holder]:
    instance_id = f"holder-{number}"
    arguments = ("--hold", ",".join(systems), "--instance", instance_id, "--settings", json.dumps(asdict(settings)))
    async with talking_child("benchmarks.transport", *arguments, "--certificate", str(own)) as (process, offers):
        yield Holder(process, instance_id, offers)


class Reader:
    """The reading process: one pull function per system and holder."""

    def __init__(self, arena: HostArena, own: Path) -> None:
        self.arena = arena
        self._own = own
        self._stack = contextlib.AsyncExitStack()
        self._transports: dict[str, Transport] = {}
        self.pulls: dict[str, list[Pull]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def copy_inside(self, source: HostArena) -> None:
        """Set up ``memcpy`` and ``memory``, whose holder is this process."""
        target, network = self.arena, MemoryNetwork()

        async def memcpy(slot: int, nbytes: int) -> None:
            at = place(target, slot, nbytes)
            ctypes.memmove(target.address + at, source.address + at, nbytes + _WORD_NBYTES)

        holder = MemoryTransport(network, source, host=HOST, check=lambda *_: True)
        reader = MemoryTransport(network, target, host=HOST, check=lambda *_: True)
        self._transports[MEMORY] = reader
        self.pulls[MEMCPY] = [memcpy]
        self._pending = holder.offer()

    async def connect_inside(self) -> None:
        self.pulls[MEMORY] = [await self._connect(MEMORY, self._pending, "inside")]

    async def connect(self, system: str, holder: Holder) -> None:
        if system == GRPC:
            pull = self._stream(holder.offers[GRPC])
        elif system in CONNECTIONS:
            pull = self._blocking(holder.offers[system], CONNECTIONS[system])
        else:
            if system not in self._transports:
                self._transports[system] = await open_transport(system, self.arena, self._own)
                self._stack.push_async_callback(self._transports[system].close)
            offer = TransportOffer(TCP if system == TLS else system, HOST, bytes.fromhex(holder.offers[system]))
            pull = await self._connect(system, offer, holder.instance_id)
        self.pulls.setdefault(system, []).append(pull)

    async def _connect(self, system: str, offer: TransportOffer, holder: str) -> Pull:
        peer = await self._transports[system].connect(offer)
        self._stack.push_async_callback(peer.close)
        tickets: dict[tuple[int, int], Ticket] = {}

        async def pull(slot: int, nbytes: int) -> None:
            wanted = tickets.get((slot, nbytes))
            if wanted is None:
                wanted = tickets[slot, nbytes] = ticket(self.arena, holder, slot, nbytes)
            await peer.pull(wanted, wanted.offset)

        return pull

    def _stream(self, port: int) -> Pull:
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        self._stack.push_async_callback(channel.close)
        read: Any = channel.unary_stream(_METHOD)

        async def pull(slot: int, nbytes: int) -> None:
            at = place(self.arena, slot, nbytes)
            async for chunk in read(_RANGE.pack(at, nbytes + _WORD_NBYTES)):
                self.arena.memory[at : at + len(chunk)] = chunk
                at += len(chunk)

        return pull

    def _blocking(self, port: int, number: int) -> Pull:
        """Read one connection in this thread; several in a thread each, with a part of the bytes."""
        connections = [self._stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(number)]
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threads = self._stack.enter_context(ThreadPoolExecutor(number))

        def receive(connection: socket.socket, at: int, end: int) -> None:
            connection.sendall(_RANGE.pack(at, end - at))
            while at < end:
                at += connection.recv_into(self.arena.memory[at:end])

        async def pull(slot: int, nbytes: int) -> None:
            at = place(self.arena, slot, nbytes)
            end = at + nbytes + _WORD_NBYTES
            if number == 1:
                receive(connections[0], at, end)
                return
            step = -(-(end - at) // number)
            parts = [(start, min(start + step, end)) for start in range(at, end, step)]
            for done in [
                threads.submit(receive, connection, *part) for connection, part in zip(connections, parts, strict=False)
            ]:
                done.result()

        return pull

    def clear(self) -> None:
        ctypes.memset(self.arena.address + self.arena.base, 0, self.arena.nbytes - self.arena.base)

    def check(self, source: HostArena, nbytes: int) -> None:
        """Check that the pulled bytes equal the holder's; all holders have the same."""
        for slot in range(SLOTS):
            at = place(self.arena, slot, nbytes)
            end = at + nbytes + _WORD_NBYTES
            assert self.arena.memory[at:end] == source.memory[at:end], "a pull brought other bytes"


# --- measuring -------------------------------------------------------------------------------------------------------


async def timed(pulls: Sequence[Pull], case: Case, count: int) -> float:
    """Seconds for ``count`` pulls in a closed loop of ``case.at_once`` callers."""
    turns = iter(range(count))

    async def caller(pull: Pull) -> None:
        for turn in turns:
            await pull(turn % SLOTS, case.nbytes)

    began_s = time.perf_counter()
    if case.at_once == 1:
        await caller(pulls[0])
    else:
        async with asyncio.TaskGroup() as group:
            for number in range(case.at_once):
                group.create_task(caller(pulls[number % len(pulls)]))
    return time.perf_counter() - began_s


async def sample(reader: Reader, system: str, holders: Sequence[Holder], case: Case, settings: Settings) -> Sample:
    pulls = reader.pulls[system][: case.holders]
    busy = () if system in (MEMCPY, MEMORY) else holders[: case.holders]
    count = max(2 * SLOTS, settings.nbytes // case.nbytes)
    await timed(pulls, case, SLOTS)
    before_s = time.process_time() + sum([await holder.cpu_s() for holder in busy])
    took_s = await timed(pulls, case, count)
    cpu_s = time.process_time() + sum([await holder.cpu_s() for holder in busy]) - before_s
    gigabytes = count * case.nbytes / 1e9
    return Sample(case, system, gigabytes / took_s, cpu_s / gigabytes)


async def latencies_us(pull: Pull, count: int) -> list[float]:
    """Latencies of consecutive pulls of 8 payload bytes."""
    found: list[float] = []
    for _ in range(count):
        began_s = time.perf_counter()
        await pull(0, 8)
        found.append(1e6 * (time.perf_counter() - began_s))
    return found


async def lone_and_together_us(pull: Pull, count: int) -> list[tuple[float, float]]:
    """Alternately time a pull of 1 KB alone, and ``TOGETHER`` started in one turn of the loop; skips the first."""
    found: list[tuple[float, float]] = []
    for _ in range(1 + count):
        began_s = time.perf_counter()
        await pull(0, _KB_NBYTES)
        alone_s = time.perf_counter()
        await asyncio.gather(*(pull(slot, _KB_NBYTES) for slot in range(TOGETHER)))
        found.append((1e6 * (alone_s - began_s), 1e6 * (time.perf_counter() - alone_s)))
    return found[1:]


async def idle_cores(system: str, settings: Settings, own: Path) -> float:
    """Cores used by a connected reader and holder while idle."""
    small = Settings(**{**asdict(settings), "sizes": (64 << 10,)})
    async with holder_process([system], small, 0, own) as holder, Reader(make_arena(small, "reader"), own) as reader:
        await reader.connect(system, holder)
        await reader.pulls[system][0](0, 8)
        await asyncio.sleep(min(1.0, settings.idle_s))
        before_s, began_s = time.process_time() + await holder.cpu_s(), time.perf_counter()
        await asyncio.sleep(settings.idle_s)
        return (time.process_time() + await holder.cpu_s() - before_s) / (time.perf_counter() - began_s)


@dataclass(frozen=True, slots=True)
class Measured:
    samples: list[Sample]
    small_us: dict[str, list[float]]
    together_us: dict[str, list[tuple[float, float]]]
    """Times of one pull of 1 KB, and of ``TOGETHER``."""
    idle: dict[str, float]


async def run(settings: Settings, systems: Sequence[str], own: Path) -> Measured:
    """All systems alternate within each round, so that a slow phase of the machine affects all."""
    # NIXL last: threads left by its agents would count against the others.
    idle = {
        system: await idle_cores(system, settings, own) for system in sorted(systems, key=lambda name: name == NIXL)
    }
    everyone = (MEMCPY, MEMORY, *systems)
    cases = [
        Case(nbytes, at_once, holders)
        for nbytes in settings.sizes
        for at_once, holders in ((1, 1), (SLOTS, 1), (SLOTS, settings.holders))
    ]
    source = make_arena(settings, "inside")
    samples: list[Sample] = []
    small_us: dict[str, list[float]] = {system: [] for system in everyone}
    together_us: dict[str, list[tuple[float, float]]] = {system: [] for system in everyone}
    async with contextlib.AsyncExitStack() as stack:
        holders = [
            await stack.enter_async_context(holder_process(systems, settings, number, own))
            for number in range(settings.holders)
        ]
        reader = await stack.enter_async_context(Reader(make_arena(settings, "reader"), own))
        reader.copy_inside(source)
        await reader.connect_inside()
        for holder in holders:
            for system in systems:
                await reader.connect(system, holder)
        for system in everyone:
            for nbytes in settings.sizes:
                reader.clear()
                await timed(reader.pulls[system], Case(nbytes, SLOTS, settings.holders), SLOTS)
                reader.check(source, nbytes)
        for _ in range(settings.rounds):
            for case in cases:
                samples += [await sample(reader, system, holders, case, settings) for system in everyone]
            for system in everyone:
                pull = reader.pulls[system][0]
                small_us[system] += await latencies_us(pull, settings.small_pulls)
                together_us[system] += await lone_and_together_us(pull, max(1, settings.small_pulls // TOGETHER))
    return Measured(samples, small_us, together_us, idle)


# --- reporting -------------------------------------------------------------------------------------------------------


def report(measured: Measured) -> list[dict[str, Any]]:
    """One row per case and system: medians over the rounds, of figures and of ratios within a round."""
    groups: dict[tuple[Case, str], list[Sample]] = {}
    for sample in measured.samples:
        groups.setdefault((sample.case, sample.system), []).append(sample)
    rows: list[dict[str, Any]] = []
    for (case, system), group in groups.items():
        row = {
            **asdict(case),
            "system": system,
            "gb_per_s": round(statistics.median(sample.gb_per_s for sample in group), 2),
            "cpu_s_per_gb": round(statistics.median(sample.cpu_s_per_gb for sample in group), 3),
        }
        for other in (MEMCPY, TCP, SOCKETS, GRPC):
            base = groups.get((case, other))
            if base is not None:
                ratios = (sample.gb_per_s / its.gb_per_s for sample, its in zip(group, base, strict=True))
                row[f"x_{other}"] = round(statistics.median(ratios), 2)
        rows.append(row)
    return rows


def small(measured: Measured) -> list[dict[str, Any]]:
    """Latency of small pulls, alone and together, and the CPU use of an idle pair."""
    return [
        {
            "system": system,
            "p50_us": round(statistics.median(found), 1),
            "p99_us": round(sorted(found)[int(0.99 * len(found))], 1),
            "kb_lone_us": round(statistics.median(lone for lone, _ in measured.together_us[system]), 1),
            f"kb_{TOGETHER}_us": round(statistics.median(all_us for _, all_us in measured.together_us[system]), 1),
            f"kb_{TOGETHER}_x_lone": round(
                statistics.median(all_us / (TOGETHER * lone) for lone, all_us in measured.together_us[system]), 2
            ),
            "idle_percent_of_core": round(100 * measured.idle[system], 2) if system in measured.idle else None,
        }
        for system, found in measured.small_us.items()
    ]


def show(rows: list[dict[str, Any]], small_rows: list[dict[str, Any]]) -> None:
    print(
        f"{'KiB':>6} {'pulls':>5} {'from':>4} {'system':>7} {'GB/s':>7} {'x memcpy':>9} {'x tcp':>6} {'x sockets':>10} {'x grpc':>7} {'CPU s/GB':>9}"
    )
    for row in rows:
        print(
            f"{row['nbytes'] >> 10:>6} {row['at_once']:>5} {row['holders']:>4} {row['system']:>7} "
            f"{row['gb_per_s']:>7} {row['x_memcpy']:>9} {row.get('x_tcp', '-'):>6} {row.get('x_sockets', '-'):>10} {row.get('x_grpc', '-'):>7} {row['cpu_s_per_gb']:>9}"
        )
    print(
        f"8 bytes: {'p50 us':>16} {'p99 us':>9} {'1 KB us':>9} {f'{TOGETHER} of them':>11} {'x lone ones':>12} "
        f"{'idle, % of a core':>18}"
    )
    for row in small_rows:
        idle = "-" if row["idle_percent_of_core"] is None else row["idle_percent_of_core"]
        print(
            f"{row['system']:>15} {row['p50_us']:>9} {row['p99_us']:>9} {row['kb_lone_us']:>9} "
            f"{row[f'kb_{TOGETHER}_us']:>11} {row[f'kb_{TOGETHER}_x_lone']:>12} {idle:>18}"
        )


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="a few small pulls, to see that it runs")
    parser.add_argument("--rounds", type=int, help="instead of the default")
    parser.add_argument("--systems", help="comma-separated, instead of all that work here")
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    parser.add_argument("--instance", help=argparse.SUPPRESS)
    parser.add_argument("--certificate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        settings = Settings(**{**options.settings, "sizes": tuple(options.settings["sizes"])})
        uvloop.run(hold(options.hold.split(","), settings, options.instance, options.certificate))
        return
    settings = QUICK if options.quick else Settings()
    if options.rounds:
        settings = Settings(**{**asdict(settings), "rounds": options.rounds})
    systems = options.systems.split(",") if options.systems else [*available_backends(), TLS, SOCKET, SOCKETS, GRPC]
    systems = [system for system in (SHM, NIXL, TCP, TLS, SOCKET, SOCKETS, GRPC) if system in systems]
    on = {**machine.describe(), "load_average_before": f"{os.getloadavg()[0]:.1f}"}
    print("; ".join(f"{key} {value}" for key, value in on.items()))
    print("; ".join(f"{key} {value}" for key, value in asdict(settings).items()))
    with identity.certificate() as own:
        measured = uvloop.run(run(settings, systems, own))
    on["load_average_after"] = f"{os.getloadavg()[0]:.1f}"
    rows, small_rows = report(measured), small(measured)
    show(rows, small_rows)
    said = {"machine": on, "settings": asdict(settings), "rows": rows, "small": small_rows}
    write_figures(options.json, said)


if __name__ == "__main__":
    main()
