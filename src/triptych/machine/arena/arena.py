"""A holder's arena: where embeddings are stored, who may read them, and until when (docs/adr/0002).

One entry per embedding key (a segment of keys and values gets its key with ``Commit``):

    Reserve -> WRITING -- Commit -> READY -- room is needed, least recently used -> gone
                  +------ Abandon -> gone

Every reader has its own lease (``leases.py``), whose id the caller chooses. So the caller can release it without having seen
the answer, even before it is granted. A slot with a lease, live or lapsed, is never reused; the last release frees it at once.
Reused memory always gets a new generation, so that a reader detects a recycled slot.

A refusal is an effect with an error for the caller. Nothing waits here: a refused caller holds nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from triptych.domain.embedding import GENERATION_NBYTES, LeaseId, Ticket, payload_nbytes
from triptych.errors import ArenaFull, InvalidMedia, LeaseLost
from triptych.machine.arena.arena_events import (
    Abandon,
    ArenaTick,
    Commit,
    Effect,
    Event,
    GrantLease,
    Key,
    Lapsed,
    LeaseGranted,
    Present,
    ReleaseLeases,
    ReservationRefused,
    Reserve,
    Reserved,
    Slot,
    SlotEvicted,
    SlotState,
)
from triptych.machine.arena.extents import Extents, round_up
from triptych.machine.arena.leases import ArenaLeases, LeaseLimits

_DEFAULTS = LeaseLimits()


@dataclass(slots=True)
class _Entry:
    slot: Slot
    nbytes: int
    """As allocated."""
    state: SlotState = SlotState.WRITING
    checksum: int = 0


class ArenaMachine:
    """Owner of the slots and generations of an arena.

    ``handle`` is the only mutator.

    ``start`` and ``end`` bound the slots' part of the arena, in bytes. ``max_pull_s`` is the longest duration of a read,
    after which readers and transports abort it.
    """

    def __init__(
        self,
        *,
        start: int,
        end: int,
        holder: str,
        epoch: int,
        max_pull_s: float,
        limits: LeaseLimits = _DEFAULTS,
        max_released: int = 16_384,
    ) -> None:
        self._extents = Extents(start, end)
        self.capacity_bytes = self._extents.capacity
        self._holder = holder
        self._epoch = epoch
        self._leases = ArenaLeases(limits, max_pull_s=max_pull_s, max_released=max_released)
        self._entries: dict[Key, _Entry] = {}
        self._idle: dict[Key, _Entry] = {}
        """Reclaimable entries, least recently used first."""
        self._ready = 0
        self.leased_bytes = 0
        """Bytes that cannot be reclaimed: being written, leased, or lapsed and perhaps still being read."""
        self._generation = 0

    @property
    def available_bytes(self) -> int:
        return self.capacity_bytes - self.leased_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes that can be reclaimed: cached embeddings without leases."""
        return self.capacity_bytes - self._extents.free_bytes - self.leased_bytes

    @property
    def cached(self) -> int:
        """Number of embeddings that can be granted at once."""
        return self._ready

    @property
    def leases(self) -> int:
        return len(self._leases)

    def find(self, key: Key) -> Slot | None:
        """The slot of a READY embedding."""
        entry = self._entries.get(key)
        return entry.slot if entry is not None and entry.state is SlotState.READY else None

    def may_read(self, lease_id: LeaseId, offset: int, nbytes: int, now_s: float) -> bool:
        """Whether a live lease covers these bytes of the arena; called by transports before they serve a read."""
        key = self._leases.readable(lease_id, now_s)
        if key is None:
            return False
        slot = self._entries[key].slot
        return nbytes >= 0 and slot.offset <= offset and offset + nbytes <= slot.offset + slot.slot_nbytes

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case Reserve():
                return self._reserve(event, now_s)
            case Commit():
                return self._commit(event)
            case Abandon():
                self._abandon(event)
                return []
            case GrantLease():
                return self._grant(event, now_s)
            case ReleaseLeases(lease_ids):
                self._unpinned(self._leases.release(lease_ids))
                return []
            case ArenaTick():
                return self._sweep(now_s)

    def _reserve(self, event: Reserve, now_s: float) -> list[Effect]:
        present = self._entries.get(event.key)
        if present is not None:
            return [Present(present.slot, present.state)]
        payload = payload_nbytes(event.tensors)
        nbytes = payload + 2 * GENERATION_NBYTES
        if round_up(nbytes) > self.capacity_bytes:
            message = f"the embedding takes {nbytes} bytes, the arena has {self.capacity_bytes}"
            return [ReservationRefused(event.key, InvalidMedia(message))]
        effects: list[Effect] = []
        offset = self._extents.allocate(nbytes)
        if offset is None:
            effects += self._sweep(now_s)
            effects += self._make_room(nbytes)
            offset = self._extents.allocate(nbytes)
        if offset is None:
            message = f"the embedding takes {nbytes} bytes, {self.leased_bytes} of the arena's {self.capacity_bytes} are in use"
            return [*effects, ReservationRefused(event.key, ArenaFull(message))]
        self._generation += 1
        slot = Slot(event.key, self._generation, offset, event.tensors, event.tokens, payload)
        entry = self._entries[event.key] = _Entry(slot, self._extents.size(offset))
        self.leased_bytes += entry.nbytes
        return [*effects, Reserved(slot)]

    def _make_room(self, nbytes: int) -> list[Effect]:
        """Evict the least recently used until ``nbytes`` fit contiguously; evict nothing if they never would."""
        if not self._could_fit(nbytes):
            return []
        effects: list[Effect] = []
        while self._extents.largest_gap < nbytes and self._idle:
            entry = next(iter(self._idle.values()))
            self._forget(entry)
            effects.append(SlotEvicted(entry.slot, f"room for {nbytes} bytes was needed"))
        return effects

    def _could_fit(self, nbytes: int) -> bool:
        """Whether ``nbytes`` fit once everything reclaimable is evicted."""
        if self.available_bytes < nbytes:
            return False
        fixed = [(e.slot.offset, e.nbytes) for e in self._pinned()]
        at = self._extents.start
        for offset, size in sorted(fixed):
            if offset - at >= nbytes:
                return True
            at = offset + size
        return self._extents.end - at >= nbytes

    def _commit(self, event: Commit) -> list[Effect]:
        entry = self._writing(event.key, event.generation)
        if event.named is not None:
            if (present := self._entries.get(event.named)) is not None:
                self._abandon(Abandon(event.key, event.generation))
                return [Present(present.slot, present.state)]
            del self._entries[event.key]
            entry.slot = replace(entry.slot, key=event.named)
            self._entries[event.named] = entry
        entry.state, entry.checksum = SlotState.READY, event.checksum
        self._ready += 1
        self._unpinned((entry.slot.key,))
        return []

    def _abandon(self, event: Abandon) -> None:
        entry = self._writing(event.key, event.generation)
        self.leased_bytes -= entry.nbytes
        self._forget(entry)

    def _writing(self, key: Key, generation: int) -> _Entry:
        entry = self._entries.get(key)
        if entry is None or entry.state is not SlotState.WRITING or entry.slot.generation != generation:
            raise ValueError(f"generation {generation} of this embedding is not being written")
        return entry

    def _grant(self, event: GrantLease, now_s: float) -> list[Effect]:
        entry = self._entries.get(event.key)
        if entry is None or entry.state is not SlotState.READY or event.generation not in (None, entry.slot.generation):
            return [ReservationRefused(event.key, LeaseLost("the embedding is no longer held here"))]
        lease_ids = (event.lease_id,) if event.router_lease is None else (event.lease_id, event.router_lease)
        if (error := self._leases.refusal(lease_ids, event.key)) is not None:
            return [ReservationRefused(event.key, error)]
        if self._idle.pop(event.key, None) is not None:
            self.leased_bytes += entry.nbytes
        lease_s = self._leases.grant(lease_ids, event.key, event.lease_s, now_s)
        slot = entry.slot
        ticket = Ticket(
            key=slot.key,
            holder=self._holder,
            epoch=self._epoch,
            offset=slot.offset,
            payload_nbytes=slot.payload_nbytes,
            generation=slot.generation,
            checksum=entry.checksum,
            tensors=slot.tensors,
            tokens=slot.tokens,
            lease_id=event.lease_id,
            lease_s=lease_s,
        )
        return [LeaseGranted(ticket)]

    def _sweep(self, now_s: float) -> list[Effect]:
        lapsed, freed = self._leases.lapsed(now_s)
        self._unpinned(freed)
        return [Lapsed(key, "a lease ended without being released") for key in lapsed]

    def _unpinned(self, keys: Iterable[Key]) -> None:
        for key in keys:
            entry = self._idle[key] = self._entries[key]
            self.leased_bytes -= entry.nbytes

    def _pinned(self) -> list[_Entry]:
        """Entries whose memory cannot be reclaimed."""
        return [e for key, e in self._entries.items() if e.state is SlotState.WRITING or key in self._leases]

    def _forget(self, entry: _Entry) -> None:
        assert entry.slot.key not in self._leases, "a leased slot was freed"
        del self._entries[entry.slot.key]
        if self._idle.pop(entry.slot.key, None) is not None:
            self._ready -= 1
        self._extents.free(entry.slot.offset)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        self._extents.validate()
        slots = sorted((e.slot.offset, e.slot.slot_nbytes) for e in self._entries.values())
        for (offset, nbytes), (following, _) in pairwise(slots):
            assert offset + nbytes <= following, f"slots at {offset} and {following} overlap"
        taken = sum(self._extents.size(offset) for offset, _ in slots)
        assert taken + self._extents.free_bytes == self.capacity_bytes, "bytes do not add up"
        pinned = {entry.slot.key: entry for entry in self._pinned()}
        leased = sum(entry.nbytes for entry in pinned.values())
        assert leased == self.leased_bytes, "leased bytes do not add up"
        assert self._idle.keys() == self._entries.keys() - pinned.keys(), "what is idle"
        ready = sum(entry.state is SlotState.READY for entry in self._entries.values())
        assert ready == self._ready, "what is ready"
        self._leases.validate()
        for key, entry in self._entries.items():
            assert entry.slot.key == key, "an entry has another key"
            assert entry.nbytes == self._extents.size(entry.slot.offset), "an entry has another size"
            assert 0 < entry.slot.generation <= self._generation, "a generation from nowhere"
            is_leased = key in self._leases
            assert not (is_leased and entry.state is SlotState.WRITING), "a lease on a slot being written"
