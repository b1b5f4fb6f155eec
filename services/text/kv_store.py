"""Segments of keys and values in the arena that others read: reserved in turn, written by the engine, sealed, leased."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from triptych.domain.embedding import GENERATION_NBYTES, KEY_NBYTES, LEASE_ID_NBYTES, LeaseId
from triptych.domain.kv_segment import KvPlacement, KvSegment, SealedSegment, SegmentKind
from triptych.domain.queue_position import QueuePosition
from triptych.errors import ArenaFull, InvalidMedia
from triptych.machine.arena.extents import round_up
from triptych.machine.arena.published import PublishedContents
from triptych.machine.arena.slots import Slot
from triptych.ports import Clock, Rng
from triptych.transport.arena_store import ArenaStore

MOST_PUBLISHED = 16_384
"""Segments that routers are told of, where no encoder shares the arena."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A caller that waits for room."""

    nbytes: int
    queue_position: QueuePosition
    is_next: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the caller is the first in line, and there is room."""


class KvStore:
    """Owner of the keys and values that an arena holds.

    Single-threaded, on the event loop.
    """

    def __init__(
        self,
        store: ArenaStore,
        kind: SegmentKind,
        *,
        shared: bool,
        rng: Rng,
        clock: Clock,
        published: PublishedContents | None = None,
    ) -> None:
        """``shared``: embeddings lie in the arena too. Then nothing waits for room, as requests that hold embeddings there would
        wait for each other. ``published``: where whole segments are named for routers, which is told what the arena evicts;
        None if they are not.
        """
        self.store = store
        self.kind = kind
        self.published = published
        self._shared = shared
        self._rng = rng
        self._clock = clock
        self._line: list[_Waiting] = []
        if not shared:
            store.on_change(self._call_next)
            if published is not None:
                store.on_evicted(published.gone)

    @property
    def capacity_tokens(self) -> int:
        """Positions of one sequence that fit into the arena."""
        left_nbytes = self.store.memory.capacity_bytes - self.kind.nbytes(0)
        return max(0, left_nbytes) // max(1, self.kind.position_nbytes)

    @property
    def leases(self) -> int:
        """Leases on what lies here; 0 where the arena is shared with an encoder, which waits for all of them when it drains."""
        return 0 if self._shared else self.store.memory.leases

    async def reserve(self, segments: Sequence[KvSegment], queue_position: QueuePosition) -> list[Slot]:
        """Slots for all segments, once there is room and it is this caller's turn. None overtakes, so that nothing starves.

            join the line -> first, and there is room -> reserve -> leave the line, call the next
                                    ^                       |
                                    +-- no room in one piece

        Where nothing waits, or the segments can never all have room: slots for the first of them, at once.
        """
        nbytes = sum(round_up(segment.nbytes + 2 * GENERATION_NBYTES) for segment in segments)
        if self._shared or nbytes > self.store.memory.capacity_bytes:
            return self.reserve_now(segments)
        waiting = _Waiting(nbytes, queue_position)
        self._line.append(waiting)
        try:
            self._call_next()
            while True:
                await waiting.is_next.wait()
                slots = self.reserve_now(segments)
                if len(slots) == len(segments):
                    return slots
                self.abandon(slots)
                waiting.is_next.clear()  # until the arena changes again
        finally:
            self._line.remove(waiting)
            self._call_next()

    def _call_next(self) -> None:
        if not self._line:
            return
        now_s = self._clock()
        first = min(self._line, key=lambda waiting: waiting.queue_position.at(now_s))
        if first.nbytes <= self.store.memory.available_bytes:
            first.is_next.set()

    def reserve_now(self, segments: Sequence[KvSegment]) -> list[Slot]:
        """Slots for the first segments, as many as there is room for."""
        slots: list[Slot] = []
        for segment in segments:
            # The key depends on the contents, which the engine gets later.
            key = self._rng.getrandbits(8 * KEY_NBYTES).to_bytes(KEY_NBYTES, "little")
            try:
                slots.append(self.store.reserve(key, (segment.spec,), segment.positions))
            except (ArenaFull, InvalidMedia):
                break
        return slots

    def has(self, key: bytes, segment: KvSegment) -> bool:
        """Whether it is in the arena; then it counts as used."""
        if self.store.tokens(key) is None:
            return False
        self._publish(key, segment)
        return True

    async def seal(self, slot: Slot, key: bytes, segment: KvSegment) -> None:
        """Make what was written through ``window`` grantable from then on. When cancelled, the slot stays reserved."""
        await self.store.seal(slot, key)
        if key != slot.key:  # else its contents have no identity
            self._publish(key, segment)

    def _publish(self, key: bytes, segment: KvSegment) -> None:
        """Name a whole segment for routers: the last, shorter one of a sequence is in no other's prefix."""
        if self.published is not None and segment.positions == self.kind.segment_tokens:
            self.published.segment(key)

    def abandon(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.store.abandon(slot)

    def window(self, slot: Slot) -> memoryview:
        """Where the segment is written."""
        memory = self.store.window(slot)
        assert memory is not None  # noqa: S101 - the arena is in host memory
        return memory

    def pin(self, key: bytes, lease_s: float) -> LeaseId:
        """Keep a sealed segment until its lease is released. Raises LeaseLost, Overloaded."""
        return self.store.grant(key, self._new_lease(), lease_s).lease_id

    def grant(self, key: bytes, segment: KvSegment, choices: tuple[int, ...], lease_s: float) -> SealedSegment:
        """Grant a lease to its reader and one to the router. Raises LeaseLost, Overloaded; then neither is granted."""
        lease_id, router_lease = self._new_lease(), self._new_lease()
        ticket = self.store.grant(key, lease_id, lease_s, router_lease=router_lease)
        return SealedSegment(KvPlacement(segment.first, ticket, choices), router_lease)

    def sweep(self) -> None:
        """Expire leases. The encoder does it for an arena that is shared with one."""
        if not self._shared:
            self.store.sweep()

    def _new_lease(self) -> LeaseId:
        return self._rng.getrandbits(8 * LEASE_ID_NBYTES).to_bytes(LEASE_ID_NBYTES, "little")
