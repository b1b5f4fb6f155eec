"""The controlling end of ``site``: processes that a test starts, commands, stops and kills."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.contract.transport_kit import NIXL_IS_HERE

ROOT = Path(__file__).parents[3]
READY_S = 120.0
ANSWER_S = 120.0
LATE_S = 10.0
"""How much later than its limit an error may come on a machine that has other work."""
"""Far beyond every deadline under test: a longer call hangs."""

nixl = pytest.param(
    "nixl", marks=pytest.mark.skipif(not NIXL_IS_HERE, reason="NIXL is not installed: its backend was NOT tested")
)


UCX_OVER_TCP = {"UCX_TLS": "tcp", "UCX_PROTO_EMULATION_ENABLE": "y"}
"""NIXL as between hosts without RDMA, which it refuses by default.

UCX makes the holder send, and aborts it when its reader's connection ends midway. So here no reader dies and no
connection is reset.
"""


class SiteError(Exception):
    """An error of a command; ``kind`` is the name of its class in the other process."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Gone(Exception):
    """The process ended before it responded."""


CLEAR = ("TransferFailed", "LeaseLost", "Overloaded")
"""What a pull may say when it does not bring the right bytes."""


@dataclass
class Remote:
    """One process. Commands may run concurrently."""

    process: asyncio.subprocess.Process
    _waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    _ended: bool = False
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    async def call(self, do: str, *, within_s: float = ANSWER_S, **arguments: Any) -> Any:
        """Raises SiteError, Gone, and TimeoutError for a command that hangs."""
        assert self.process.stdin is not None
        if self._ended or self.process.stdin.is_closing():
            raise Gone
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # the caller may have been cancelled
        self.process.stdin.write(json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n")
        try:
            return await asyncio.wait_for(answer, within_s)
        finally:
            self._waiting.pop(number, None)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    async def kill(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        await self.process.wait()

    async def listen(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            answer = json.loads(line)
            waiting = self._waiting.get(answer["id"])
            if waiting is None or waiting.done():
                continue
            if "error" in answer:
                waiting.set_exception(SiteError(*answer["error"]))
            else:
                waiting.set_result(answer["done"])
        self._ended = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Gone())


@asynccontextmanager
async def site(
    backends: Sequence[str],
    instance_id: str,
    *,
    nbytes: int = 64 << 20,
    epoch: int = 1,
    max_pull_s: float = 5.0,
    connect_timeout_s: float = 3.0,
    host: str = "127.0.0.1",
    machine: str = "test-host",
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Remote]:
    """A process that is killed at the end of the block at the latest. ``prefix``: a command that runs commands."""
    said = {
        "backends": list(backends),
        "instance_id": instance_id,
        "epoch": epoch,
        "nbytes": nbytes,
        "max_pull_s": max_pull_s,
        "connect_timeout_s": connect_timeout_s,
        "host": host,
        "machine": machine,
    }
    process = await asyncio.create_subprocess_exec(
        *prefix,
        *(sys.executable, "-m", "tests.integration.transport.site", json.dumps(said)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},  # noqa: TID251 - a child process gets all of it
    )
    remote = Remote(process)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_S):
            assert await process.stdout.readline() == b"{}\n", "the process did not start"
        async with asyncio.TaskGroup() as group:
            group.create_task(remote.listen())
            try:
                yield remote
            finally:
                await remote.kill()
    finally:
        await remote.kill()
        if process.stdin is not None:
            process.stdin.close()


@dataclass
class Pulled:
    """The result of a pull: ``digest`` of the bytes, or the error's class; and its duration."""

    digest: str | None
    error: str | None
    duration_s: float

    def must_be_right(self, digest: str) -> None:
        assert (self.error, self.digest) == (None, digest)

    def must_be_right_or_clear(self, digest: str, *, within_s: float) -> None:
        assert self.duration_s < within_s, f"it took {self.duration_s:.2f} s"
        if self.error is None:
            assert self.digest == digest, "wrong bytes"
        else:
            assert self.error in CLEAR, self.error


async def pull(reader: Remote, peer: int, ticket: dict[str, Any], at: int) -> Pulled:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        arrived = await reader.call("pull", peer=peer, ticket=ticket, at=at)
    except SiteError as error:
        return Pulled(None, error.kind, loop.time() - began_s)
    return Pulled(arrived, None, loop.time() - began_s)


async def quarantine_over(reader: Remote, *, within_s: float = 60.0) -> None:
    """Polls the transport until no late write is possible."""
    async with asyncio.timeout(within_s):
        while await reader.call("quarantined"):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)


async def connect_in_time(reader: Remote, holder: Remote, *, within_s: float) -> int:
    """Retries as a reader does after a fault, until the link works."""
    offers = await holder.call("offers")
    async with asyncio.timeout(within_s):
        while True:
            try:
                return int(await reader.call("connect", offers=offers))
            except SiteError as error:
                if error.kind not in CLEAR:
                    raise
                await asyncio.sleep(0.1)
