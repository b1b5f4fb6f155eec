"""One pool manager on one core: heartbeats of many members, changes at many watchers, and everybody at once.

The manager is a process of its own (``python -m triptych.services.pool_manager``), pinned to one core; members and watchers run
here, pinned to the others. Each member has a connection and a stream of its own, as a real one has, and sends
heartbeats at a fixed rate, whatever the manager does. Meanwhile members change their state in turn, and each watcher
notes when it learns of it.

- ``rates``: one row per offered rate, from low to high until the manager no longer keeps up. ``handled`` is read from the
  manager, whose status shows the number in each member's last heartbeat. A change's latency is from before its heartbeat
  is sent until a watcher has received it. ``suspected`` members would be an error: the manager did not read in time.
- ``gatherings``: all members lose their connections and open them again together; then the manager is killed and started
  again, empty, and members register and watchers follow as soon as it listens.

``manager_cpu`` is the manager's CPU time by wall-clock time; ``generator_cpu`` that of this process. The generator is the
limit in rows where ``generator_cpu`` is near the number of its cores and ``manager_cpu`` is not near 1.
``handled_per_core_s`` divides heartbeats by the manager's CPU seconds, and so does not depend on other load.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from tempfile import TemporaryFile
from typing import Any

import grpc.aio
import psutil
import uvloop

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from triptych.cli.child import child_command
from triptych.domain.membership import MemberKind
from triptych.domain.pool import Registration
from triptych.domain.stage import Role
from triptych.rpc import limits
from triptych.runtime.tasks import TaskScope
from triptych.v1 import instance_pb2, pool_manager_pb2, pool_manager_pb2_grpc
from triptych.wire import pool_manager
from triptych.workload.report import percentile

HOST = "127.0.0.1"
_ATTEND = "/triptych.v1.PoolManager/Attend"
_WATCH = "/triptych.v1.PoolManager/Watch"
_MODEL = "benchmark"
_RETRY_S = 0.1
_START_S = 60.0
_KEEPS_UP = 0.98
"""The share of the offered heartbeats that the manager must have handled."""


@dataclass(frozen=True, slots=True)
class Settings:
    members: int = 500
    watchers: int = 50
    rates: tuple[int, ...] = (1000, 3000, 5000, 7000, 9000, 11_000, 13_000, 15_000, 17_000, 20_000)
    """Heartbeats per second, of all members together."""
    seconds: float = 8.0
    """Duration of each rate."""
    changes_per_s: float = 5.0
    reconnects: int = 3


QUICK = Settings(rates=(500,), seconds=1.0, reconnects=1)


@dataclass(frozen=True, slots=True)
class Rate:
    """Heartbeats at one offered rate. Latencies in milliseconds, over all watchers and changes."""

    offered_per_s: int
    sent_per_s: float
    handled_per_s: float
    handled_per_core_s: float
    manager_cpu: float
    generator_cpu: float
    changes: int
    changes_missed: int
    """Changes that a watcher had not received two seconds after the end."""
    change_p50_ms: float
    change_p99_ms: float
    change_max_ms: float
    suspected: int
    keeps_up: bool


@dataclass(frozen=True, slots=True)
class Gathering:
    """The return of all members and watchers at once. Times in seconds, from the loss of the connections, or from when the new manager listens."""

    what: str
    registered_p50_s: float
    registered_all_s: float
    watchers_see_all_s: float
    removed: int
    """Members that a watcher was told are gone."""


class Member:
    """A member's connection: it registers again whenever its stream ends, and sends heartbeats when told."""

    def __init__(self, number: int, target: str) -> None:
        self.address = f"{HOST}:{10_000 + number}"
        told = Registration(
            MemberKind.INSTANCE, f"instance-{number}", 1, self.address, _MODEL, "r1", Role.E, 1 << 30, 64, 0, ("shm",)
        )
        self._registration = pool_manager.report_to_wire(told).SerializeToString()
        self._target = target
        self._message = pool_manager_pb2.MemberReport()
        self._load = self._message.heartbeat.load.stages.add(stage=instance_pb2.STAGE_ENCODE, pending_tokens=1)
        self._sequence = 0
        self._writes = asyncio.Lock()
        self._call: Any = None
        self.sent = 0
        self.registered_s = 0.0
        """When the manager last accepted the registration; 0 while it has not."""

    async def run(self) -> None:
        while True:
            async with grpc.aio.insecure_channel(self._target, options=limits.channel_options()) as channel:
                call: Any = channel.stream_stream(_ATTEND)()
                try:
                    await call.write(self._registration)
                    await call.read()
                    self._sequence, self._call, self.registered_s = 0, call, time.perf_counter()
                    while await call.read() is not grpc.aio.EOF:
                        """The order does not matter here."""
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    """Open another stream."""
                finally:
                    self._call, self.registered_s = None, 0.0
                    call.cancel()
            await asyncio.sleep(_RETRY_S)

    async def heartbeat(self, *, draining: bool | None = None) -> None:
        async with self._writes:
            if (call := self._call) is None:
                return
            self._sequence += 1
            message = self._message
            message.heartbeat.sequence = self._load.pending = self._sequence
            if draining is not None:
                message.heartbeat.load.draining = draining
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(message.SerializeToString())
                self.sent += 1


class Watcher:
    """A watcher that notes when it learns of each member's state."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.seen: dict[str, int] = {}
        """State of each member, by address."""
        self.changed_s: dict[tuple[str, int], float] = {}
        """When each state of a member was last received."""
        self.all_s = 0.0
        """When the number of members last changed."""
        self.removed = 0

    async def run(self) -> None:
        while True:
            async with grpc.aio.insecure_channel(self._target, options=limits.channel_options()) as channel:
                watch: Any = channel.unary_stream(_WATCH)
                call = watch(pool_manager_pb2.WatchRequest().SerializeToString())
                try:
                    async for data in call:
                        self._take(pool_manager_pb2.MembershipDelta.FromString(data))
                except grpc.aio.AioRpcError:
                    """Open another stream."""
                finally:
                    call.cancel()
            await asyncio.sleep(_RETRY_S)

    def _take(self, delta: pool_manager_pb2.MembershipDelta) -> None:
        now_s, before = time.perf_counter(), len(self.seen)
        if delta.full:
            self.seen.clear()
        for removed in delta.removed:
            self.removed += self.seen.pop(removed.address, None) is not None
        for member in delta.members:
            self.seen[member.address] = member.state
            self.changed_s[member.address, member.state] = now_s
        if len(self.seen) != before:
            self.all_s = now_s


class Site:
    """A manager with its members and watchers."""

    def __init__(self, settings: Settings, port: int) -> None:
        target = f"{HOST}:{port}"
        self.port = port
        self.members = [Member(number, target) for number in range(settings.members)]
        self.watchers = [Watcher(target) for _ in range(settings.watchers)]
        self.process: psutil.Process | None = None
        self._channel = grpc.aio.insecure_channel(target, options=limits.channel_options())
        self._stub = pool_manager_pb2_grpc.PoolManagerStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def until_all_are_there(self) -> None:
        """Every member is registered, and every watcher knows all of them. Raises TimeoutError, which says who is missing."""
        end_s = time.perf_counter() + _START_S
        while True:
            absent = sum(not member.registered_s for member in self.members)
            behind = sum(len(watcher.seen) != len(self.members) for watcher in self.watchers)
            if not absent and not behind:
                return
            if time.perf_counter() > end_s:
                raise TimeoutError(f"{absent} members are not registered, {behind} watchers do not know all of them")
            await asyncio.sleep(0.02)

    async def status(self) -> tuple[int, int]:
        """Heartbeats handled on the current streams, and suspected members."""
        told = await self._stub.Status(pool_manager_pb2.StatusRequest(), timeout=30.0, wait_for_ready=True)
        members = [member for pool in told.pools for member in pool.members]
        pending = sum(stage.pending for member in members for stage in member.load.stages)
        return pending, sum(member.suspected for member in members)

    def cpu_s(self) -> float:
        assert self.process is not None
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def managing(site: Site, cores: Sequence[int]) -> Iterator[None]:
    """The manager's process, on these cores."""
    options = ("--log-level", "ERROR", "--remove-s", str(_START_S))  # members that wait for others send no heartbeats
    command = child_command("triptych.services.pool_manager", "--port", str(site.port), *options)
    own_cores = os.sched_getaffinity(0)
    with TemporaryFile() as log:
        os.sched_setaffinity(0, cores)  # the child inherits it
        try:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        finally:
            os.sched_setaffinity(0, own_cores)
        site.process = psutil.Process(process.pid)
        try:
            yield
        except BaseException:
            log.seek(0)
            print(log.read()[-2000:].decode(errors="replace"), file=sys.stderr)
            raise
        finally:
            process.kill()
            process.wait()


def connected(everyone: Sequence[Member | Watcher]) -> TaskScope:
    """Connect all now; they lose their connections together at the end of the context."""
    scope = TaskScope("connected")
    for client in everyone:
        scope.spawn(client.run(), name="client")
    return scope


async def beat(members: Sequence[Member], rate: float, until_s: float) -> None:
    """Heartbeats at a fixed rate, each member's at its own times; a member that is late skips none."""

    async def beat_one(member: Member, first_s: float) -> None:
        due_s = first_s
        while due_s < until_s:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if time.perf_counter() >= until_s:
                return
            await member.heartbeat()
            due_s += interval_s

    interval_s = len(members) / rate
    now_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, member in enumerate(members):
            group.create_task(beat_one(member, now_s + interval_s * number / len(members)))


async def change(site: Site, per_s: float, until_s: float) -> list[tuple[str, int, float]]:
    """Let members start and stop draining in turn. Returns address, state and time of each change."""
    made: list[tuple[str, int, float]] = []
    number = 0
    while (now_s := time.perf_counter()) < until_s - 1 / per_s:
        member = site.members[number % len(site.members)]
        number += 1
        made.append((member.address, pool_manager_pb2.MEMBER_STATE_LEAVING, now_s))
        await member.heartbeat(draining=True)
        await asyncio.sleep(1 / per_s)
    return made


async def at_rate(site: Site, settings: Settings, rate: int) -> Rate:
    """Members at this rate, and changes meanwhile."""
    for member in site.members:
        await member.heartbeat(draining=False)
    await asyncio.sleep(1.0)
    for watcher in site.watchers:
        watcher.changed_s.clear()
    handled_before, _ = await site.status()
    sent_before = sum(member.sent for member in site.members)
    own, began_cpu_s = psutil.Process(), site.cpu_s()
    own_cpu_s = sum(own.cpu_times()[:2])
    began_s = time.perf_counter()
    until_s = began_s + settings.seconds
    made, _ = await asyncio.gather(
        change(site, settings.changes_per_s, until_s), beat(site.members, rate - settings.changes_per_s, until_s)
    )
    seconds = time.perf_counter() - began_s
    sent = sum(member.sent for member in site.members) - sent_before
    cpu_s, own_cpu_s = site.cpu_s() - began_cpu_s, sum(own.cpu_times()[:2]) - own_cpu_s
    handled, suspected = await site.status()
    await asyncio.sleep(2.0)
    took_ms = [
        1e3 * (received_s - changed_s)
        for address, state, changed_s in made
        for watcher in site.watchers
        if (received_s := watcher.changed_s.get((address, state))) is not None
    ]
    handled -= handled_before
    return Rate(
        rate,
        sent / seconds,
        handled / seconds,
        handled / max(cpu_s, 0.01),
        cpu_s / seconds,
        own_cpu_s / seconds,
        len(made),
        len(made) * len(site.watchers) - len(took_ms),
        statistics.median(took_ms),
        percentile(took_ms, 99),
        max(took_ms),
        suspected,
        handled / seconds >= _KEEPS_UP * rate,
    )


async def gather(site: Site, what: str, lost_s: float) -> Gathering:
    """Wait until everybody is there again."""
    for watcher in site.watchers:
        watcher.removed = 0
    await site.until_all_are_there()
    registered = [member.registered_s - lost_s for member in site.members]
    return Gathering(
        what,
        statistics.median(registered),
        max(registered),
        max(max(watcher.all_s for watcher in site.watchers) - lost_s, *registered),
        sum(watcher.removed for watcher in site.watchers),
    )


async def until_it_listens(port: int) -> None:
    async with asyncio.timeout(_START_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(HOST, port)
            except OSError:
                await asyncio.sleep(0.005)
            else:
                writer.close()
                return


async def measure(settings: Settings) -> dict[str, Any]:
    """All rates, then all reconnects, then the restart."""
    available = sorted(os.sched_getaffinity(0))
    manager_cores, own_cores = available[:1], available[1:] or available
    rates: list[Rate] = []
    gatherings: list[Gathering] = []
    with contextlib.ExitStack() as stack:
        site = Site(settings, _free_port())
        stack.enter_context(managing(site, manager_cores))
        os.sched_setaffinity(0, own_cores)
        await until_it_listens(site.port)
        async with connected(site.watchers):
            lost_s = time.perf_counter()
            async with connected(site.members):
                gatherings.append(await gather(site, "all connect to a new manager", lost_s))
                for rate in settings.rates:
                    rates.append(await at_rate(site, settings, rate))
                    _print_rate(rates[-1])
                    if not rates[-1].keeps_up:
                        break
            for _ in range(settings.reconnects):
                lost_s = time.perf_counter()
                async with connected(site.members):
                    gatherings.append(await gather(site, "all members reconnect", lost_s))
            async with connected(site.members):
                await gather(site, "", lost_s)
                stack.close()
                for watcher in site.watchers:
                    watcher.seen.clear()
                stack.enter_context(managing(site, manager_cores))
                await until_it_listens(site.port)
                gatherings.append(await gather(site, "all reconnect to a restarted manager", time.perf_counter()))
        await site.close()
    for gathering in gatherings:
        _print_gathering(gathering)
    return {
        "machine": machine.describe(),
        "settings": asdict(settings),
        "cores": {"manager": len(manager_cores), "generator": len(own_cores), "shared": len(available) == 1},
        "rates": [asdict(row) for row in rates],
        "gatherings": [asdict(row) for row in gatherings],
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def _print_rate(row: Rate) -> None:
    print(
        f"offered {row.offered_per_s:>5}/s  sent {row.sent_per_s:7.0f}  handled {row.handled_per_s:7.0f}  "
        f"({row.handled_per_core_s:6.0f} per core)  CPU {row.manager_cpu:4.2f} (generator {row.generator_cpu:4.2f})  "
        f"change {row.change_p50_ms:5.0f} ms p50, {row.change_p99_ms:5.0f} p99, {row.change_max_ms:5.0f} max, "
        f"missed {row.changes_missed}  suspected {row.suspected}",
        flush=True,
    )


def _print_gathering(row: Gathering) -> None:
    print(
        f"{row.what:<37} registered {row.registered_p50_s:5.2f} s p50, {row.registered_all_s:5.2f} all; "
        f"watchers {row.watchers_see_all_s:5.2f}; removed {row.removed}"
    )


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="one rate, for a second: shows that it works")
    defaults = Settings()
    parser.add_argument("--members", type=int, default=defaults.members)
    parser.add_argument("--watchers", type=int, default=defaults.watchers)
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="duration of each rate")
    parser.add_argument("--rates", help="heartbeats per second, separated by commas")
    arguments = parser.parse_args()
    rates = tuple(map(int, arguments.rates.split(","))) if arguments.rates else defaults.rates
    settings = Settings(arguments.members, arguments.watchers, rates, arguments.seconds)
    result = uvloop.run(measure(QUICK if arguments.quick else settings))
    write_figures(arguments.json, result)


if __name__ == "__main__":
    main()
