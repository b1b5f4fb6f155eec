"""A store that can be cut off, for tests of what depends on it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from triptych.domain.store import Changes, Entry, Fence, LogRecord
from triptych.errors import StoreUnavailable
from triptych.ports import Store

T = TypeVar("T")

_REASON = "the store was cut off"


class StoreLink:
    """One process's connection to a store that several share.

    While ``cut`` is set, calls fail after ``timeout_s`` and watchers learn nothing; writes are lost on the way there.
    """

    def __init__(self, store: Store, *, latency_s: float = 0.001, timeout_s: float = 2.0) -> None:
        self.fault = ""
        self.latency_s = latency_s
        self._store = store
        self._timeout_s = timeout_s
        self._connected = asyncio.Event()
        self._connected.set()

    @property
    def cut(self) -> bool:
        return not self._connected.is_set()

    @cut.setter
    def cut(self, cut: bool) -> None:
        if cut:
            self._connected.clear()
        else:
            self._connected.set()

    async def get(self, table: str, key: str) -> Entry | None:
        return await self._call(self._store.get(table, key))

    async def entries(self, table: str) -> tuple[Entry, ...]:
        return await self._call(self._store.entries(table))

    async def put(
        self, table: str, key: str, value: bytes, *, expected: int | None = None, fence: Fence | None = None
    ) -> int:
        return await self._call(self._store.put(table, key, value, expected=expected, fence=fence))

    async def delete(self, table: str, key: str, *, expected: int | None = None, fence: Fence | None = None) -> bool:
        return await self._call(self._store.delete(table, key, expected=expected, fence=fence))

    async def watch(self, table: str) -> AsyncGenerator[Changes]:
        async with aclosing(self._store.watch(table)) as changes:
            while True:
                await self._connected.wait()
                change = await anext(changes)
                await self._connected.wait()
                yield change

    async def append(self, log: str, value: bytes, *, keep: int, fence: Fence | None = None) -> int:
        return await self._call(self._store.append(log, value, keep=keep, fence=fence))

    async def tail(self, log: str, n: int) -> tuple[LogRecord, ...]:
        return await self._call(self._store.tail(log, n))

    async def acquire(self, lease: str, owner: str, ttl_s: float) -> Fence | None:
        return await self._call(self._store.acquire(lease, owner, ttl_s))

    async def renew(self, fence: Fence, ttl_s: float) -> bool:
        return await self._call(self._store.renew(fence, ttl_s))

    async def release(self, fence: Fence) -> bool:
        return await self._call(self._store.release(fence))

    async def holder(self, lease: str) -> str | None:
        return await self._call(self._store.holder(lease))

    async def close(self) -> None:
        """The store itself stays open for the others."""

    async def _call(self, call: Awaitable[T]) -> T:
        # A coroutine that is never awaited would warn, so it is closed.
        started = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.sleep(self.latency_s)
                await self._connected.wait()
                started = True
                answer = await call
        except TimeoutError:
            self.fault = _REASON
            raise StoreUnavailable(_REASON) from None
        finally:
            if not started and asyncio.iscoroutine(call):
                call.close()
        self.fault = ""
        return answer
