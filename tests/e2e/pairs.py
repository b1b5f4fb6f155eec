"""A cluster with two of every process that requests pass through, and rounds of requests while one of them is hit."""

import asyncio
import math
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.e2e.client import REST_TIMEOUT_S, Refused, asked
from tests.e2e.reference import answer, questions
from tests.e2e.revisions import THIS, Processes, Service, settings_of
from triptych.workload.report import percentile

KINDS = ("encoder", "router", "text", "gateway", "pool_manager")
PAIRED = KINDS[:-1]
"""Kinds that have a spare. No request passes through the pool manager."""
CLIENTS = 24
NOTICED_S = 0.25
"""Until those that call a killed process know of it."""
LONG_TOKENS = 32
ELSEWHERE_S = 1.0
"""Until connections that were opened before are accepted."""
WHOLE_S = 180.0
"""Until all processes work together again."""
REQUESTS = 200
"""Of a round."""


class Hit(Enum):
    """What happens to a process in a round."""

    KILL = "kill -9"
    PAUSE = "SIGSTOP, SIGCONT"
    RESTART = "SIGTERM, and started again"


@dataclass(frozen=True)
class Asked:
    """A request, and its right answer."""

    body: dict[str, Any]
    right: str


@dataclass
class Outcome:
    """What became of a round's requests."""

    process: str
    hit: Hit
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    hung: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Clear errors, by code."""
    other_errors: int = 0
    """Errors of requests that did not run while the process was killed."""
    cut: int = 0
    """Connections that a killed gateway had; their requests were sent again to the other one."""
    took_s: list[float] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "process": self.process,
            "hit": self.hit.value,
            "answers": self.answers,
            "wrong": len(self.wrong),
            "hung": self.hung,
            "errors": dict(self.errors),
            "cut": self.cut,
            "p50_s": round(percentile(self.took_s, 50), 3),
            "p99_s": round(percentile(self.took_s, 99), 3),
        }


class Pairs:
    """A pool manager, and two each of gateways, routers, encoders and text instances of the demo model."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self.services: dict[str, Service] = {}
        """By name: ``router-1``."""
        self.open_to: dict[str, bool] = {}
        """Whether clients may be sent to a gateway, by name."""

    @classmethod
    @asynccontextmanager
    async def running(cls, logs: Path) -> AsyncIterator["Pairs"]:
        async with Processes.running(logs) as processes:
            pairs = cls(processes)
            await pairs._start("pool_manager", "pool_manager-1")
            for kind in PAIRED:
                for number in (1, 2):
                    await pairs._start(kind, f"{kind}-{number}")
            await pairs.until_whole()
            yield pairs
            assert processes.faults() == {}

    async def _start(self, kind: str, name: str) -> None:
        """Start it, at the same address if it has run before."""
        former = self.services.get(name)
        manager = "" if kind == "pool_manager" else self.services["pool_manager-1"].target
        port = 0 if former is None else former.port
        self.services[name] = await self._processes.start(
            kind, name, THIS, *settings_of(kind, name, manager), port=port
        )

    async def until_whole(self) -> None:
        """Wait until every process is ready, and each gateway's routers agree that all instances are."""
        for service in self.services.values():
            await service.until_ready()
        wanted = {f"{kind}-{number}: ready" for kind in ("encoder", "text") for number in (1, 2)}
        async with asyncio.timeout(WHOLE_S), httpx.AsyncClient(trust_env=False) as http:
            for number in (1, 2):
                url = f"http://{self.services[f'gateway-{number}'].target}/ready"
                while set((await http.get(url)).json()["instances"]) != wanted:  # noqa: ASYNC110 - asked over HTTP
                    await asyncio.sleep(0.1)
        self.open_to = {f"gateway-{number}": True for number in (1, 2)}

    async def hit(self, name: str, hit: Hit, pause_s: float) -> None:
        """Returns when it has ended, or goes on."""
        service = self.services[name]
        match hit:
            case Hit.PAUSE:
                service.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(pause_s)
                service.process.send_signal(signal.SIGCONT)
                return
            case Hit.KILL:
                service.process.kill()
                await service.process.wait()
            case Hit.RESTART:
                if service.kind == "gateway":  # as docs/operations.md says: clients are sent elsewhere first
                    self.open_to[name] = False
                    await asyncio.sleep(ELSEWHERE_S)
                await service.end()

    async def start_again(self, name: str) -> None:
        """Returns at once."""
        await self._start(self.services[name].kind, name)


async def mixture(pairs: Pairs) -> tuple[Asked, ...]:
    """Different requests with known answers: text and images, whole and streamed, short and long.

    The long ones are sampled, and go on past their end, so that streams are open whenever a process is hit. Their right answers are
    those of the cluster while nothing happens to it; those of the others are of transformers.
    """
    found = [
        Asked(question.body(stream=bool(at % 2)), answer(question).text)
        for at, question in enumerate(questions((0, 1, 0, 2, 4), 20))
    ]
    async with client() as http:
        url = f"http://{pairs.services['gateway-1'].target}"
        for seed, question in enumerate(questions((0, 2), 4)):
            body = question.body(max_tokens=LONG_TOKENS, temperature=1.2, seed=seed, ignore_eos=True, stream=True)
            found.append(Asked(body, await asked(http, url, body)))
    return tuple(found)


def client() -> httpx.AsyncClient:
    """A connection of its own for each request, so that none is lost because the gateway has closed an idle one."""
    limits = httpx.Limits(max_connections=2 * CLIENTS, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=REST_TIMEOUT_S, limits=limits, trust_env=False)


class Round:
    """``count`` requests from ``CLIENTS`` clients at once, of which the ``hit_at``-th answer sets off the hit."""

    def __init__(self, pairs: Pairs, process: str, hit: Hit, rng: Random, *, hit_at: int, pause_s: float) -> None:
        self._pairs = pairs
        self._rng = rng
        self._hit_at = hit_at
        self._pause_s = pause_s
        self._due = asyncio.Event()
        self._hit_from_s = self._hit_to_s = math.inf
        self.outcome = Outcome(process, hit)

    async def play(self, mixed: tuple[Asked, ...], count: int) -> Outcome:
        order = list(islice(cycle(mixed), count))
        self._rng.shuffle(order)
        left = iter(enumerate(order))
        async with client() as http, asyncio.TaskGroup() as group:
            group.create_task(self._hit())
            for _ in range(CLIENTS):
                group.create_task(self._client(http, left))
        return self.outcome

    async def _hit(self) -> None:
        process, hit = self.outcome.process, self.outcome.hit
        await self._due.wait()
        self._hit_from_s = time.perf_counter()
        await self._pairs.hit(process, hit, self._pause_s)
        self._hit_to_s = time.perf_counter()
        if hit is not Hit.PAUSE:
            await self._pairs.start_again(process)

    def _ran_then(self, began_s: float) -> bool:
        """Whether a request that ends now, and began then, ran while the process was hit, or was sent before anyone noticed."""
        return time.perf_counter() >= self._hit_from_s and began_s <= self._hit_to_s + NOTICED_S

    async def _client(self, http: httpx.AsyncClient, left: Iterator[tuple[int, Asked]]) -> None:
        for number, question in left:
            began_s = time.perf_counter()
            try:
                async with asyncio.timeout(REST_TIMEOUT_S):
                    text = await self._ask(http, number, question, began_s)
            except TimeoutError:
                self.outcome.hung += 1
            except Refused as error:
                self.outcome.errors[error.code or str(error)] += 1
                self.outcome.other_errors += not self._ran_then(began_s)
            except (AssertionError, httpx.HTTPError) as error:
                self.outcome.wrong.append(repr(error))
            else:
                self.outcome.answers += 1
                self.outcome.took_s.append(time.perf_counter() - began_s)
                if text != question.right:
                    self.outcome.wrong.append(f"{text!r} instead of {question.right!r}")
                if self.outcome.answers == self._hit_at:
                    self._due.set()

    async def _ask(self, http: httpx.AsyncClient, number: int, question: Asked, began_s: float) -> str:
        """As a client that knows two addresses: the other gateway if one does not listen, or was killed with the request."""
        gateways = [f"gateway-{1 + (number + other) % 2}" for other in range(2)]
        for gateway in gateways:
            if not self._pairs.open_to[gateway]:
                continue
            try:
                return await asked(http, f"http://{self._pairs.services[gateway].target}", question.body)
            except httpx.ConnectError:
                if gateway != self.outcome.process:
                    raise
            except httpx.TransportError:
                killed = (self.outcome.process, self.outcome.hit) == (gateway, Hit.KILL)
                if not killed or not self._ran_then(began_s):
                    raise
                self.outcome.cut += 1
        raise AssertionError("no gateway takes connections")


async def survived(
    pairs: Pairs, mixed: tuple[Asked, ...], process: str, hit: Hit, rng: Random, *, pause_s: float
) -> Outcome:
    """A round in which the process is hit: no answer is lost or wrong, and all is whole afterwards. Raises AssertionError."""
    round_ = Round(pairs, process, hit, rng, hit_at=rng.randint(REQUESTS // 10, REQUESTS // 2), pause_s=pause_s)
    outcome = await round_.play(mixed, REQUESTS)
    assert (outcome.wrong, outcome.hung) == ([], 0)
    assert not outcome.errors
    assert outcome.answers == REQUESTS
    assert outcome.cut == 0 or (process.startswith("gateway"), hit) == (True, Hit.KILL)
    await pairs.until_whole()
    return outcome
