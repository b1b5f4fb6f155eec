"""The store in this process: for one manager. It is empty after a restart."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from triptych.domain.store import Changes, Entry, Fence, LogRecord
from triptych.errors import Conflict, Deposed, Overloaded, StoreUnavailable
from triptych.ports import Clock
from triptych.store.limits import StoreLimits, check_key, check_name, check_ttl


@dataclass(slots=True)
class _Lease:
    owner: str
    token: int
    until_s: float


@dataclass(slots=True)
class _Table:
    entries: dict[str, Entry] = field(default_factory=dict)
    watchers: set["_Watcher"] = field(default_factory=set)


class _Watcher:
    """Keys that changed since they were last yielded: bounded by the keys that the table has had in between."""

    def __init__(self) -> None:
        self.changed: dict[str, None] = {}
        self.news = asyncio.Event()


class MemoryStore:
    """``ports.Store`` in memory.

    Versions and fencing tokens begin above ``first_revision``. If something that outlives this process remembers tokens (a
    scaler does), it must grow from start to start: microseconds since 1970, as in ``store.redis``.
    """

    def __init__(self, *, clock: Clock, first_revision: int = 0, limits: StoreLimits | None = None) -> None:
        self.fault = ""
        self._limits = limits or StoreLimits()
        self._clock = clock
        self._revision = first_revision
        self._tables: dict[str, _Table] = {}
        self._logs: dict[str, deque[LogRecord]] = {}
        self._leases: dict[str, _Lease] = {}
        self._closed = False

    # --- tables ---

    async def get(self, table: str, key: str) -> Entry | None:
        check_key(key)
        return self._table(table).entries.get(key)

    async def entries(self, table: str) -> tuple[Entry, ...]:
        entries = self._table(table).entries
        return tuple(entries[key] for key in sorted(entries))

    async def put(
        self, table: str, key: str, value: bytes, *, expected: int | None = None, fence: Fence | None = None
    ) -> int:
        check_key(key)
        self._limits.check_value(value)
        entries = self._table(table).entries
        self._check(table, key, expected, fence)
        if key not in entries and len(entries) >= self._limits.max_entries:
            raise Overloaded(f"table {table} has {len(entries)} entries, the limit is {self._limits.max_entries}")
        entries[key] = Entry(key, bytes(value), self._next_revision())
        self._notify(table, key)
        return self._revision

    async def delete(self, table: str, key: str, *, expected: int | None = None, fence: Fence | None = None) -> bool:
        check_key(key)
        self._check(table, key, expected, fence)
        if self._table(table).entries.pop(key, None) is None:
            return False
        self._notify(table, key)
        return True

    async def watch(self, table: str) -> AsyncGenerator[Changes]:
        state = self._table(table)
        with _watching(state) as watcher:
            yield Changes(tuple(state.entries[key] for key in sorted(state.entries)))
            while True:
                await watcher.news.wait()
                self._check_open()
                keys = list(watcher.changed)
                watcher.changed.clear()
                watcher.news.clear()
                yield Changes(
                    tuple(state.entries[key] for key in keys if key in state.entries),
                    tuple(key for key in keys if key not in state.entries),
                )

    # --- logs ---

    async def append(self, log: str, value: bytes, *, keep: int, fence: Fence | None = None) -> int:
        self._check_open()
        check_name(log)
        self._limits.check_value(value)
        self._limits.check_records(keep)
        self._check_fence(fence)
        records = self._logs.setdefault(log, deque())
        records.append(LogRecord(self._next_revision(), bytes(value)))
        while len(records) > keep:
            records.popleft()
        return self._revision

    async def tail(self, log: str, n: int) -> tuple[LogRecord, ...]:
        self._check_open()
        check_name(log)
        self._limits.check_records(n)
        return tuple(self._logs.get(log, ()))[-n:]

    # --- leases ---

    async def acquire(self, lease: str, owner: str, ttl_s: float) -> Fence | None:
        self._check_open()
        check_name(lease)
        check_key(owner)
        check_ttl(ttl_s)
        held = self._held(lease)
        if held is not None and held.owner != owner:
            return None
        token = self._next_revision()
        self._leases[lease] = _Lease(owner, token, self._clock() + ttl_s)
        return Fence(lease, token)

    async def renew(self, fence: Fence, ttl_s: float) -> bool:
        self._check_open()
        check_ttl(ttl_s)
        held = self._held(fence.lease)
        if held is None or held.token != fence.token:
            return False
        held.until_s = self._clock() + ttl_s
        return True

    async def release(self, fence: Fence) -> bool:
        self._check_open()
        held = self._held(fence.lease)
        if held is None or held.token != fence.token:
            return False
        del self._leases[fence.lease]
        return True

    async def holder(self, lease: str) -> str | None:
        self._check_open()
        check_name(lease)
        held = self._held(lease)
        return None if held is None else held.owner

    async def close(self) -> None:
        self._closed = True
        for table in self._tables.values():
            for watcher in table.watchers:
                watcher.news.set()

    # --- how ---

    def _table(self, name: str) -> _Table:
        self._check_open()
        check_name(name)
        return self._tables.setdefault(name, _Table())

    def _next_revision(self) -> int:
        self._revision += 1
        return self._revision

    def _held(self, lease: str) -> _Lease | None:
        held = self._leases.get(lease)
        return held if held is not None and self._clock() < held.until_s else None

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")

    def _check(self, table: str, key: str, expected: int | None, fence: Fence | None) -> None:
        self._check_fence(fence)
        entry = self._table(table).entries.get(key)
        version = 0 if entry is None else entry.version
        if expected is not None and expected != version:
            raise Conflict(f"{key} in table {table} has version {version}, not {expected}")

    def _check_fence(self, fence: Fence | None) -> None:
        if fence is not None and ((held := self._held(fence.lease)) is None or held.token != fence.token):
            raise Deposed(f"lease {fence.lease} is no longer held under token {fence.token}")

    def _notify(self, table: str, key: str) -> None:
        for watcher in self._tables[table].watchers:
            watcher.changed[key] = None
            watcher.news.set()


@contextmanager
def _watching(table: _Table) -> Iterator[_Watcher]:
    watcher = _Watcher()
    table.watchers.add(watcher)
    try:
        yield watcher
    finally:
        table.watchers.discard(watcher)
