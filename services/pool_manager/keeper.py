"""State that the leading manager keeps in the store, so that the next one goes on: wanted sizes, manual sizes,
decisions.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from triptych.domain.decision import DecisionRecord, SavedPool
from triptych.domain.store import Fence
from triptych.errors import InvalidRequest, Overloaded
from triptych.ports import Clock, Store

logger = logging.getLogger(__name__)

T = TypeVar("T")
_POOLS, _DECISIONS = "pools", "decisions"
_KEEP_RECORDS = 512
_MAX_WAITING_RECORDS = 256
_REFRESH_S = 5.0
"""Interval at which times are written, seconds. They count on from there when another manager takes over."""


@dataclass(frozen=True, slots=True)
class Left:
    """An entry: a pool as this manager left it."""

    owner: str
    pool: SavedPool


@dataclass(frozen=True, slots=True)
class _Written:
    token: int
    what: tuple[object, ...]
    at_s: float


def later(pool: SavedPool, seconds: float) -> SavedPool:
    """A pool so long after it was read."""
    override = pool.override
    return replace(
        pool,
        override=None if override is None else replace(override, left_s=override.left_s - seconds),
        changes_s=tuple(age_s + seconds for age_s in pool.changes_s),
        decisions_s=tuple((number, age_s + seconds) for number, age_s in pool.decisions_s),
    )


class Table(Generic[T]):
    """A table of the store, as values by key. An entry that this program did not write is skipped, and logged once."""

    def __init__(self, store: Store, name: str, kind: TypeAdapter[T]) -> None:
        self._store = store
        self._name = name
        self._kind = kind
        self._skipped: set[str] = set()
        """Keys whose entries could not be used when they were last read."""

    async def read(self) -> dict[str, T]:
        table: dict[str, T] = {}
        skipped: set[str] = set()
        for entry in await self._store.entries(self._name):
            try:
                table[entry.key] = self._kind.validate_json(entry.value)
            except ValidationError:
                skipped.add(entry.key)
        for key in sorted(skipped - self._skipped):
            logger.warning("the store's entry of %s in %s cannot be used", key, self._name)
        self._skipped = skipped
        return table


_LEFT = TypeAdapter(Left)
_RECORD = TypeAdapter(DecisionRecord)


class Keeper:
    """Keeper of the leader's state. Every method raises StoreUnavailable, StoreCorrupt, and Deposed when it writes.
    Times are durations only.
    """

    def __init__(self, store: Store, clock: Clock, owner: str) -> None:
        """``owner`` names this manager."""
        self._owner = owner
        self._store = store
        self._pools = Table(store, _POOLS, _LEFT)
        self._clock = clock
        self._written: dict[str, _Written] = {}
        self._records: deque[bytes] = deque(maxlen=_MAX_WAITING_RECORDS)

    async def read(self) -> dict[str, Left]:
        """Read all pools."""
        return await self._pools.read()

    async def read_decisions(self) -> dict[str, tuple[DecisionRecord, ...]]:
        """The last decisions by pool, oldest first."""
        decisions: dict[str, dict[int, DecisionRecord]] = {}
        for entry in await self._store.tail(_DECISIONS, _KEEP_RECORDS):
            try:
                record = _RECORD.validate_json(entry.value)
            except ValidationError:
                continue  # of another version
            decisions.setdefault(record.view.pool, {})[record.number] = record
        return {pool: tuple(records[number] for number in sorted(records)) for pool, records in decisions.items()}

    def note(self, record: DecisionRecord) -> None:
        """Write this decision with the next ``write``; the oldest ones are dropped while the store is away for long."""
        self._records.append(_RECORD.dump_json(record))

    async def write(self, pools: Mapping[str, SavedPool], fence: Fence) -> None:
        """Write what has changed, and decisions."""
        await self.drop([name for name in self._written if name not in pools], fence)
        for name, pool in pools.items():
            if self._is_fresh(name, pool, fence):
                continue
            try:
                await self.keep(name, pool, fence)
            except (InvalidRequest, Overloaded) as error:
                logger.warning("pool %s cannot be kept in the store: %s", name, error)
                self._written[name] = _Written(fence.token, _what(pool), self._clock())
        while self._records:
            await self._append(self._records[0], fence)
            self._records.popleft()

    async def drop(self, pools: Iterable[str], fence: Fence) -> None:
        """Forget pools that are gone."""
        for name in pools:
            with suppress(InvalidRequest):  # it was never there: its name is no key
                await self._store.delete(_POOLS, name, fence=fence)
            self._written.pop(name, None)

    async def keep(self, name: str, pool: SavedPool, fence: Fence) -> None:
        """Write this pool now. Raises InvalidRequest and Overloaded if the store does not take it."""
        self._written.pop(name, None)  # until it is certain what the store has
        await self._store.put(_POOLS, name, _LEFT.dump_json(Left(self._owner, pool)), fence=fence)
        self._written[name] = _Written(fence.token, _what(pool), self._clock())

    def _is_fresh(self, name: str, pool: SavedPool, fence: Fence) -> bool:
        known = self._written.get(name)
        if known is None or (known.token, known.what) != (fence.token, _what(pool)):
            return False
        return self._clock() - known.at_s < _REFRESH_S

    async def _append(self, value: bytes, fence: Fence) -> None:
        try:
            await self._store.append(_DECISIONS, value, keep=_KEEP_RECORDS, fence=fence)
        except InvalidRequest:  # too large: without the single instances
            record = _RECORD.validate_json(value)
            short = replace(record, view=replace(record.view, instances=()))
            await self._store.append(_DECISIONS, _RECORD.dump_json(short), keep=_KEEP_RECORDS, fence=fence)


def _what(pool: SavedPool) -> tuple[object, ...]:
    """Part that is written as soon as it changes."""
    size = None if pool.override is None else pool.override.size
    return pool.wanted, size, pool.given_up, len(pool.changes_s)
