"""A Redis server of its own for tests, on a loopback port, with its files in a directory of its own."""

import asyncio
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from triptych.cli import ports
from triptych.ports import Store
from triptych.store.limits import StoreLimits
from triptych.store.memory import MemoryStore
from triptych.store.redis import RedisStore
from triptych.store.redis_settings import RedisSettings

LIMITS = StoreLimits(max_value_bytes=1000, max_entries=20, max_log_records=50)
STARTED_WITHIN_S = 20.0


@dataclass
class RedisServer:
    """``redis-server`` of the Debian package. ``options`` are further lines of its configuration."""

    folder: Path
    options: tuple[str, ...] = ()
    tls: bool = False
    port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start it, again on the same port, and wait until it listens."""
        if (program := shutil.which("redis-server")) is None:
            pytest.skip("redis-server is not installed: apt-get install redis-server")
        self.port = self.port or ports.free(1)[0]
        lines = (
            f"{'tls-port' if self.tls else 'port'} {self.port}",
            *(("port 0",) if self.tls else ()),
            "bind 127.0.0.1",
            'save ""',
            f"dir {self.folder}",
            *self.options,
        )
        config = self.folder / "redis.conf"
        config.write_text("\n".join(lines) + "\n")
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([program, str(config)], stdout=log, stderr=log)
        end_s = time.monotonic() + STARTED_WITHIN_S  # noqa: TID251 - a real process
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                assert self._process.poll() is None, (self.folder / "redis.log").read_text()
                assert time.monotonic() < end_s, "redis-server does not listen"  # noqa: TID251
                time.sleep(0.01)
            else:
                return

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Without persistence all data is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def settings(self) -> RedisSettings:
        return RedisSettings(redis=f"127.0.0.1:{self.port}", redis_timeout_s=1.0, redis_poll_s=0.02)

    @asynccontextmanager
    async def admin(self, **options: Any) -> AsyncIterator["Redis"]:
        """A plain client, to look at the data and to break things."""
        client = Redis(host="127.0.0.1", port=self.port, protocol=2, **options)
        try:
            yield client
        finally:
            await client.aclose()


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Kit:
    """Makes stores of one backend that have their data in common, if the backend can."""

    make: Callable[[], Store]
    pass_time: Callable[[float], Any]
    """An awaitable that lets the store's clock advance."""


@asynccontextmanager
async def memory_kit() -> AsyncIterator[Kit]:
    clock = ManualClock()
    store = MemoryStore(clock=clock, limits=LIMITS)

    async def pass_time(seconds: float) -> None:
        clock.now_s += seconds

    yield Kit(lambda: store, pass_time)
    await store.close()


@asynccontextmanager
async def redis_kit(server: RedisServer, prefix: str) -> AsyncIterator[Kit]:
    settings = replace(server.settings, redis_prefix=prefix)
    made: list[RedisStore] = []

    def make() -> Store:
        made.append(RedisStore(settings, limits=LIMITS))
        return made[-1]

    yield Kit(make, asyncio.sleep)
    for store in made:
        await store.close()
