"""Random pulls over every backend while holders are killed, stopped and restarted and links are cut: right bytes or a
clear error each time, and no leaks. `make soak` does it for longer.
"""

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.contract.transport_kit import NIXL_IS_HERE
from tests.integration.transport.remote import CLEAR, LATE_S, READY_S, Gone, Remote, SiteError, site
from triptych.machine.arena.extents import Extents

TEST_S = 20.0
WARM_UP = 0.4
"""Fraction of the time after which libraries have made their permanent allocations."""
RSS_TOLERANCE = 24 << 20
"""Bytes by which a process may be larger at the end than when it was warm: arenas of 64 MB, embeddings up to 2 MB."""
FD_TOLERANCE = 0
MAX_PULL_S = 1.0
WORKERS = 4
STRIKES = 0.02
"""How often something happens just when pulls have begun."""
BACKENDS = ("shm", "nixl", "tcp") if NIXL_IS_HERE else ("shm", "tcp")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is looked at, not written to


@dataclass
class Place:
    """The successive incarnations of a holder; ``link`` is the reader's, to the incarnation ``linked``."""

    backends: tuple[str, ...]
    name: str
    remote: Remote | None = None
    link: int | None = None
    linked: Remote | None = None
    epoch: int = 0
    keys: int = 0
    die: asyncio.Event = field(default_factory=asyncio.Event)
    meeting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Soak:
    def __init__(self, reader: Remote, places: list[Place], base: int, nbytes: int, seed: int) -> None:
        self.reader = reader
        self.places = places
        self.rng = random.Random(seed)
        self.memory = Extents(base, nbytes)
        self.set_aside: set[int] = set()
        self.ends: Counter[str] = Counter()
        self.running = True

    # --- holders

    async def live(self, place: Place) -> None:
        """Runs one incarnation after the other."""
        while self.running:
            place.epoch += 1
            place.die.clear()
            async with site(place.backends, place.name, epoch=place.epoch) as remote:
                place.remote = remote
                await place.die.wait()
                place.remote = None
            await self.cut(place)

    async def cut(self, place: Place) -> None:
        link, place.link = place.link, None
        if link is not None:
            await self.reader.call("disconnect", peer=link)

    async def replace(self, place: Place) -> None:
        """Kills its process and starts another."""
        before = await self.started(place)
        before.signal(signal.SIGKILL)
        place.die.set()
        await self.started(place, after=before)

    async def started(self, place: Place, after: Remote | None = None) -> Remote:
        """Its process, once it has one, and another than ``after``."""
        async with asyncio.timeout(READY_S):
            while place.remote is None or place.remote is after:  # noqa: ASYNC110 - a process ends, another starts
                await asyncio.sleep(0.05)
            return place.remote

    async def trouble(self) -> None:
        """Causes a fault at one of them at random intervals."""
        while self.running:
            await asyncio.sleep(self.rng.uniform(0.3, 2.0))
            await self.strike(self.rng.choice(self.places))

    async def strike(self, place: Place) -> None:
        """The first holder is only stopped and disconnected, so that it can be measured."""
        remote, what = place.remote, self.rng.choice(("kill", "stop", "cut"))
        if what == "kill" and remote is not None and place is not self.places[0]:
            remote.signal(signal.SIGKILL)
            place.die.set()
        elif what == "stop" and remote is not None:
            remote.signal(signal.SIGSTOP)
            await asyncio.sleep(self.rng.uniform(0.1, 1.5 * MAX_PULL_S))
            remote.signal(signal.SIGCONT)
        elif what == "cut":
            await self.cut(place)

    # --- the reader

    async def pull(self, until_s: float) -> None:
        """One worker."""
        loop = asyncio.get_running_loop()
        while loop.time() < until_s:
            place = self.rng.choice(self.places)
            remote = place.remote
            if remote is None:
                await asyncio.sleep(0.02)
                continue
            try:
                await self.pull_some(place, remote)
            except Gone:
                self.ends["holder gone"] += 1
            except SiteError as error:
                self.note(error)

    def note(self, error: SiteError) -> None:
        expected = error.kind in (*CLEAR, "TimeoutError", "KeyError")  # cancelled; the link was cut already
        assert expected, str(error)
        self.ends[error.kind] += 1

    async def pull_some(self, place: Place, remote: Remote) -> None:
        """Tickets for a few embeddings, then all pulls at once: a fault of the holder hits some of them."""
        puts = []
        for _ in range(self.rng.randint(1, 6)):
            place.keys += 1
            nbytes = int(2 ** self.rng.uniform(10, 21))
            puts.append(await remote.call("put", key=f"{place.keys:016x}", seed=place.keys, nbytes=nbytes))
        try:
            if self.rng.random() < 0.1:
                await remote.call("release", lease_ids=[puts[0]["ticket"]["lease_id"]])
            link = await self.link(place, remote)
            async with asyncio.TaskGroup() as group:
                for put in puts:
                    patience_s = self.rng.choice((None, None, None, 0.001, 0.01))
                    group.create_task(self.into_own_memory(link, put, patience_s))
                if self.rng.random() < STRIKES:
                    group.create_task(self.strike(place))
        finally:
            with contextlib.suppress(Gone):  # which would replace the pull's error
                await remote.call("release", lease_ids=[put["ticket"]["lease_id"] for put in puts])

    async def pull_from_stopped(self, place: Place) -> None:
        """A pull that fails whatever the random ones do: its holder is stopped for longer than a pull may take."""
        remote = await self.started(place)
        put = await remote.call("put", key="f" * 16, seed=0, nbytes=1 << 20)
        link = await self.link(place, remote)
        remote.signal(signal.SIGSTOP)
        try:
            await self.into_own_memory(link, put, patience_s=None)
        finally:
            remote.signal(signal.SIGCONT)
        await remote.call("release", lease_ids=[put["ticket"]["lease_id"]])

    async def into_own_memory(self, link: int, put: dict[str, Any], patience_s: float | None) -> None:
        at = self.memory.allocate(put["ticket"]["nbytes"] + 16)
        if at is None:
            self.ends["own memory full"] += 1
            return
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            arrived = await self.reader.call("pull", peer=link, ticket=put["ticket"], at=at, patience_s=patience_s)
        except SiteError as error:
            assert loop.time() - began_s < MAX_PULL_S + LATE_S, "an error came late"
            self.set_aside.add(at)
            await self.end_quarantine()
            self.note(error)
        else:
            self.memory.free(at)
            self.ends["right"] += 1
            assert arrived == put["digest"], "wrong bytes"

    async def end_quarantine(self) -> None:
        candidates = sorted(self.set_aside)
        claimed = await self.reader.call("quarantined")
        for at in candidates:
            end = at + self.memory.size(at) if at in self.set_aside else at
            if at in self.set_aside and not any(start < end and at < start + nbytes for start, nbytes in claimed):
                self.set_aside.remove(at)
                self.memory.free(at)

    async def link(self, place: Place, remote: Remote) -> int:
        async with place.meeting:
            if place.linked is not remote:
                await self.cut(place)
            if place.link is None:
                offers = await remote.call("offers")
                place.link, place.linked = await self.reader.call("connect", offers=offers), remote
            return place.link

    async def run(self, duration_s: float) -> None:
        until_s = asyncio.get_running_loop().time() + duration_s
        async with asyncio.TaskGroup() as group:
            trouble = group.create_task(self.trouble())
            async with asyncio.TaskGroup() as workers:
                for _ in range(WORKERS):
                    workers.create_task(self.pull(until_s))
            trouble.cancel()
        for place in self.places:
            if place.remote is not None:
                place.remote.signal(signal.SIGCONT)

    async def settle(self) -> dict[str, dict[str, int]]:
        """No pull runs: no byte is quarantined and no link is left.

        Returns the resources of the lasting processes. UCX keeps its connections to live peers, so processes that may
        die are killed first.
        """
        for place in self.places:
            await self.cut(place)
        for place in self.places[1:]:
            await self.replace(place)
        async with asyncio.timeout(60):
            while self.set_aside:
                await self.end_quarantine()
                await asyncio.sleep(0.1)
        assert self.memory.free_bytes == self.memory.capacity
        self.memory.validate()
        steady = self.places[0].remote
        assert steady is not None
        await asyncio.sleep(2.0)  # closed connections are noticed at the other end
        seen = {"reader": await self.reader.call("stats"), "holder": await steady.call("stats")}
        print({"reader": await self.reader.call("descriptors"), "holder": await steady.call("descriptors")})  # noqa: T201 - as at the end
        return seen


@asynccontextmanager
async def soaking(seed: int) -> AsyncIterator[Soak]:
    steady = Place(BACKENDS, "steady")
    places = [steady, *(Place((backend,), f"holder-{backend}") for backend in BACKENDS)]
    nbytes = 64 << 20
    async with site(BACKENDS, "reader", nbytes=nbytes, max_pull_s=MAX_PULL_S) as reader:
        soak = Soak(reader, places, (await reader.call("stats"))["base"], nbytes, seed)
        async with asyncio.TaskGroup() as group:
            lives = [group.create_task(soak.live(place)) for place in places]
            for place in places:
                await soak.started(place)
            yield soak
            soak.running = False
            for life in lives:
                life.cancel()


@pytest.mark.extended
@pytest.mark.timeout(TEST_S + 90 + READY_S)
async def test_dying_holders_and_broken_links_leak_nothing() -> None:
    await soaked(TEST_S, seed=2026)


async def soaked(duration_s: float, seed: int) -> dict[str, Any]:
    """Pulls for so many seconds. Returns how they ended, and the resources of the lasting processes. Raises AssertionError."""
    shared_before = shared_memory_files()
    async with soaking(seed) as soak:
        await soak.run(duration_s * WARM_UP)
        warm = await soak.settle()
        await soak.run(duration_s * (1 - WARM_UP))
        await soak.pull_from_stopped(soak.places[-1])  # over TCP: its holder has to send
        end = await soak.settle()
        print(dict(soak.ends), [place.epoch for place in soak.places], warm, end)  # noqa: T201 - shown with -s, or on failure
        assert soak.ends["TransferFailed"] > 0, "no pull failed, not even one from a holder that was stopped"
        assert sum(place.epoch for place in soak.places) > len(soak.places), "no process was ever restarted"
    for side in ("reader", "holder"):
        assert (end[side]["leases"], end[side]["leased_bytes"]) == (0, 0)
        assert end[side]["fds"] <= warm[side]["fds"] + FD_TOLERANCE, f"{side}: {warm[side]} then {end[side]}"
        assert end[side]["rss"] <= warm[side]["rss"] + RSS_TOLERANCE, f"{side}: {warm[side]} then {end[side]}"
        assert end[side]["threads"] <= warm[side]["threads"] + 1, f"{side}: {warm[side]} then {end[side]}"
    assert not await left_in_shared_memory(shared_before)
    assert soak.ends["right"] > duration_s
    return {"ends": dict(soak.ends), "processes": sum(place.epoch for place in soak.places), "warm": warm, "end": end}


async def left_in_shared_memory(before: set[str]) -> set[str]:
    """Files that are new and stay. Tests that run at the same time have some for a moment, while two processes connect."""
    left = shared_memory_files() - before
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            while left:
                await asyncio.sleep(0.1)
                left &= shared_memory_files()
    return left


def shared_memory_files() -> set[str]:
    """Files of the libraries that this project uses; other programs may create and delete files."""
    if not SHARED_MEMORY.is_dir():
        return set()
    names = (path.name for path in SHARED_MEMORY.iterdir())
    return {name for name in names if name.startswith(("ucx", "nixl", "triptych"))}
