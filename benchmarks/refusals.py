"""What a refused request costs: CPU of the gateway and of the router for each.

A real gateway process, and a router process that refuses every request as it would under overload, as its answer would be
late (``benchmarks.refusing_router``). Requests come at random (Poisson), over kept connections; all
are different, have a deadline, and are text only or have one image. *Asked* are those that the gateway asks the router
about; *shed* are those that it refuses by itself, as a router's last refusal came late.

With ``--before DIR``, the root of another working tree, its gateway and router are measured as well, in the same run: all
in turn, round by round, in changing order. A ratio is that of two such rounds, to ``before``; the median is shown, with the quartiles. CPU time is
that of all threads of a process, less what it takes without requests. ``shed`` is the share of requests that the gateway refused by itself,
whatever the row.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import uvloop

from benchmarks import ending, machine
from benchmarks.figures import Quartiles, add_before_options, add_json_option, quartiles, shown, write_figures
from benchmarks.refusing_router import SLOW
from triptych.cli.bench.payload import png
from triptych.services.gateway.shedding import RECENT_S
from triptych.testing.fakes import FAKE_MODEL
from triptych.workload.requests import Size

HERE = Path(__file__).parents[1]
HOST = "127.0.0.1"
NOW, BEFORE = "now", "before"
DEADLINE_S = 30.0
_WORDS = ("What", "digits", "are", "shown", "here", "which", "one", "is", "the", "largest", "how", "many", "images")
_IMAGE = Size(1024, 768)
_CPU_CLOCK = 2
"""Of Linux: the clock of a process that counts the time it was scheduled."""
_START_S = 120.0
_SHED = b"more come than can be looked at"
_BEHIND_S = 0.5
_GATEWAY = f"""
import runpy
from triptych.services.gateway import shedding
from triptych.runtime.parent import end_with_parent
end_with_parent({os.getpid()})
shedding.BEHIND_S = {_BEHIND_S}
shedding.LATE_RECENT_S = shedding.RECENT_S
shedding.LATE_COUNT = 1
if hasattr(shedding, "Probing"):
    shedding.Probing.take = lambda probing, now_s: False
runpy.run_module("triptych.services.gateway", run_name="__main__", alter_sys=True)
"""
"""A gateway that is behind only at a longer delay, as on a busy machine it would shed what it is to ask about, and that does not ask a router again
after one late refusal."""


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    images: int
    shed: bool = False


KINDS = {
    "text": Kind("text", 0),
    "image": Kind("image", 1),
    "text-shed": Kind("text-shed", 0, shed=True),
    "image-shed": Kind("image-shed", 1, shed=True),
}


@dataclass(frozen=True, slots=True)
class Settings:
    kinds: tuple[str, ...] = tuple(KINDS)
    rounds: int = 15
    requests: int = 150
    """Of a round, for each kind of request."""
    rate: float = 280.0
    """Requests per second, at random (Poisson), whatever has become of earlier ones. A pause begins when the one before was
    sent: a client that was held up does not send several at once, which would share a message by themselves."""
    seed: int = 1


QUICK = Settings(("text", "image-shed"), rounds=1, requests=20)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU in us of a refused request; ratios are to ``before``, as median and quartiles."""

    tree: str
    kind: str
    body_bytes: int
    gateway_us: float
    router_us: float
    shed: float
    """Share of the requests."""
    gateway_ratio: Quartiles | None
    router_ratio: Quartiles | None


@dataclass(slots=True)
class System:
    """A gateway and its router."""

    port: int
    pids: Mapping[str, int]
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)
    """Connections without a request."""

    async def post(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        connection = await self._connection()
        answer = await post(connection, body)
        self.idle.append(connection)
        return answer

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self.idle:
            reader, writer = self.idle.pop()
            if not reader.at_eof():  # the gateway closes idle connections
                return reader, writer
            writer.close()
        return await asyncio.open_connection(HOST, self.port)

    def cpu_s(self) -> dict[str, float]:
        return {name: time.clock_gettime((~pid << 3) | _CPU_CLOCK) for name, pid in self.pids.items()}


@dataclass(frozen=True, slots=True)
class Round:
    gateway_us: float
    router_us: float
    shed: float


class Bodies:
    """Different requests. Images are few, as making them takes long."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        made = (png(_IMAGE, rng) for _ in range(8))
        self._urls = ["data:image/png;base64," + base64.b64encode(image).decode() for image in made]

    def make(self, images: int, *, priority: int = 0) -> bytes:
        urls = self._rng.sample(self._urls, images)
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content.append({"type": "text", "text": " ".join(self._rng.choices(_WORDS, k=16))})
        asked = {"model": FAKE_MODEL.model_id, "messages": [{"role": "user", "content": content}], "temperature": 0}
        return json.dumps(asked | {"max_tokens": 16} | ({"priority": priority} if priority else {})).encode()


async def post(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], body: bytes) -> tuple[int, bytes]:
    reader, writer = connection
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"x-request-timeout: {DEADLINE_S}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    told = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = next(line for line in told.split(b"\r\n") if line.startswith(b"content-length:"))
    return int(told.split()[1]), await reader.readexactly(int(length.partition(b":")[2]))


@contextlib.asynccontextmanager
async def running(tree: Path) -> AsyncIterator[System]:
    """Gateway and router of a working tree."""
    with contextlib.ExitStack() as ports:
        sockets = [ports.enter_context(socket.socket()) for _ in range(2)]
        for listener in sockets:
            listener.bind((HOST, 0))
        port, router_port = (listener.getsockname()[1] for listener in sockets)
    # The script is this tree's, all that it imports is the other one's.
    router = (str(HERE / "benchmarks" / "refusing_router.py"), str(os.getpid()), str(router_port))
    gateway = ("-c", _GATEWAY, "--port", str(port), "--router", f"{HOST}:{router_port}")
    with process(tree, router) as router_pid, process(tree, gateway) as gateway_pid:
        system = System(port, {"gateway": gateway_pid, "router": router_pid})
        deadline_s, body = time.perf_counter() + _START_S, Bodies(random.Random(0)).make(0)
        while not await _refuses(system, body):
            if time.perf_counter() > deadline_s:
                raise RuntimeError(f"the gateway of {tree} does not refuse")
            await asyncio.sleep(0.2)
        yield system
        for _, writer in system.idle:
            writer.close()


async def _refuses(system: System, body: bytes) -> bool:
    try:
        return (await system.post(body))[0] == HTTPStatus.TOO_MANY_REQUESTS
    except (OSError, EOFError):
        return False


@contextlib.contextmanager
def process(tree: Path, arguments: Sequence[str]) -> Iterator[int]:
    paths = os.pathsep.join((str(tree / "src"), str(tree)))
    environment = {**os.environ, "PYTHONPATH": paths}  # noqa: TID251 - passed to the child
    with TemporaryFile() as log:
        started = subprocess.Popen((sys.executable, "-P", *arguments), env=environment, stdout=log, stderr=log)
        try:
            yield started.pid
        except Exception:
            log.seek(0)
            sys.stderr.write(log.read()[-2000:].decode(errors="replace"))
            raise
        finally:
            started.kill()
            started.wait()


async def refusals(system: System, kind: Kind, settings: Settings, bodies: Bodies) -> Round:
    """One round of a kind. With ``kind.shed`` a request that the router refuses late makes the gateway shed for a while."""
    rng = random.Random(settings.seed)
    left = [bodies.make(kind.images) for _ in range(settings.requests)]
    shed = 0

    async def ask(body: bytes) -> None:
        nonlocal shed
        status, told = await system.post(body)
        assert status == HTTPStatus.TOO_MANY_REQUESTS, f"a request was answered {status}: {told!r}"
        shed += _SHED in told

    spent = dict.fromkeys(system.pids, 0.0)
    while left:
        await asyncio.sleep(RECENT_S + 0.1)  # the gateway forgets the last round
        await system.post(bodies.make(0, priority=SLOW if kind.shed else 0))
        before, began_s = system.cpu_s(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while left and (not kind.shed or time.perf_counter() - began_s < 0.8 * _BEHIND_S):
                group.create_task(ask(left.pop()))
                await asyncio.sleep(rng.expovariate(settings.rate))
        spent = {name: spent[name] + now_s - before[name] for name, now_s in system.cpu_s().items()}
    cpu_us = {name: 1e6 * cpu_s / settings.requests for name, cpu_s in spent.items()}
    return Round(cpu_us["gateway"], cpu_us["router"], shed / settings.requests)


async def measure(settings: Settings, before: Path | None) -> dict[str, Any]:
    bodies = Bodies(random.Random(settings.seed))
    kinds = [KINDS[name] for name in settings.kinds]
    trees = {BEFORE: before, NOW: HERE} if before is not None else {NOW: HERE}
    rounds: dict[tuple[str, str], list[Round]] = {}
    async with contextlib.AsyncExitStack() as stack:
        systems = {
            name: await stack.enter_async_context(running(tree.resolve()))
            for name, tree in trees.items()
            if tree is not None
        }
        for system in systems.values():  # warms up
            for kind in kinds:
                await refusals(system, kind, replace(settings, requests=min(100, settings.requests)), bodies)
        for number in range(settings.rounds):
            for kind in kinds:
                for name in sorted(systems, reverse=bool(number % 2)):
                    found = await refusals(systems[name], kind, settings, bodies)
                    rounds.setdefault((name, kind.name), []).append(found)
    rows: list[Cost] = []
    for kind in kinds:
        nbytes = len(bodies.make(kind.images))
        for name in trees:
            rows.append(_cost(name, kind, nbytes, rounds[name, kind.name], rounds.get((BEFORE, kind.name), [])))
            _show(rows[-1])
    return {"machine": machine.describe(), "settings": asdict(settings), "refusals": [asdict(row) for row in rows]}


def _cost(name: str, kind: Kind, nbytes: int, own: Sequence[Round], base: Sequence[Round]) -> Cost:
    pairs = list(zip(own, base, strict=True)) if base else []
    return Cost(
        name,
        kind.name,
        nbytes,
        statistics.median(round_.gateway_us for round_ in own),
        statistics.median(round_.router_us for round_ in own),
        statistics.mean(round_.shed for round_ in own),
        quartiles([round_.gateway_us / other.gateway_us for round_, other in pairs]),
        None if kind.shed else quartiles([round_.router_us / other.router_us for round_, other in pairs]),
    )


def _show(row: Cost) -> None:
    print(
        f"{row.tree:<7} {row.kind:<12} {row.body_bytes:>6} bytes  gateway {row.gateway_us:6.0f} us{shown(row.gateway_ratio)}  "
        f"router {row.router_us:6.0f} us{shown(row.router_ratio)}  shed {row.shed:.0%}",
        flush=True,
    )


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="a few requests of each kind: shows that it works")
    add_before_options(parser, Settings().rounds)
    parser.add_argument("--requests", type=int, default=Settings().requests, help="of a round, for each kind")
    parser.add_argument("--rate", type=float, default=Settings().rate, help="requests per second")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}, separated by commas")
    arguments = parser.parse_args()
    settings = Settings(tuple(arguments.kinds.split(",")), arguments.rounds, arguments.requests, arguments.rate)
    if arguments.quick:
        settings = QUICK
    print(json.dumps(machine.describe()), settings)
    write_figures(arguments.json, uvloop.run(measure(settings, arguments.before)))


if __name__ == "__main__":
    main()
