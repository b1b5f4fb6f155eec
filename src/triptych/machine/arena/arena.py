"""A holder's arena: where embeddings are stored, who may read them, and until when (docs/adr/0002).

One entry per embedding key (a segment of keys and values gets its key with ``commit``):

    reserve -> being written -- commit -> ready -- room is needed, least recently used -> gone
                     +--------- abandon -> gone

Every reader has its own lease (``leases.py``), whose id the caller chooses. So the caller can release it without having seen
the answer, even before it is granted. A slot with a lease, live or lapsed, is never reused; the last release frees it at once.
Reused memory always gets a new generation, so that a reader detects a recycled slot.

Each call is answered at once, by what it returns or raises. Nothing waits here: a refused caller holds nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from triptych.domain.embedding import GENERATION_NBYTES, LeaseId, TensorSpec, Ticket, payload_nbytes
from triptych.errors import ArenaFull, InternalError, InvalidMedia, LeaseLost
from triptych.machine.arena.extents import Extents, round_up
from triptych.machine.arena.leases import ArenaLeases, LeaseLimits
from triptych.machine.arena.slots import Key, Slot

_DEFAULTS = LeaseLimits()


@dataclass(slots=True)
class _Entry:
    slot: Slot
    nbytes: int
    """As allocated."""
    is_ready: bool = False
    """Whether it is written, so that leases on it can be granted."""
    checksum: int = 0


class ArenaMachine:
    """Owner of the slots and generations of an arena.

    ``start`` and ``end`` bound the slots' part of the arena, in bytes. ``max_pull_s`` is the longest duration of a read,
    after which readers and transports abort it. ``on_evicted`` gets each slot whose content is gone, so that hints about it are
    withdrawn, and why.
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
        on_evicted: Callable[[Slot, str], None] = lambda *_: None,
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
        self._on_evicted = on_evicted
        self.lapsed = 0
        """Leases that have expired without a release, so far: their readers died or lost their tickets. For reading."""

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
        """The slot of an embedding that is ready."""
        entry = self._entries.get(key)
        return entry.slot if entry is not None and entry.is_ready else None

    def may_read(self, lease_id: LeaseId, offset: int, nbytes: int, now_s: float) -> bool:
        """Whether a live lease covers these bytes of the arena; called by transports before they serve a read."""
        key = self._leases.readable(lease_id, now_s)
        if key is None:
            return False
        slot = self._entries[key].slot
        return nbytes >= 0 and slot.offset <= offset and offset + nbytes <= slot.offset + slot.slot_nbytes

    # --- slots -------------------------------------------------------------------------------------------------------

    def reserve(self, key: Key, tensors: tuple[TensorSpec, ...], tokens: int, now_s: float) -> Slot:
        """Memory for an embedding to be computed; ``commit`` or ``abandon`` must follow.

        Raises ArenaFull (not now), InvalidMedia (never), InternalError if the key has a slot already.
        """
        if key in self._entries:
            raise InternalError("the embedding has a slot already")
        payload = payload_nbytes(tensors)
        nbytes = payload + 2 * GENERATION_NBYTES
        if round_up(nbytes) > self.capacity_bytes:
            raise InvalidMedia(f"the embedding takes {nbytes} bytes, the arena has {self.capacity_bytes}")
        offset = self._extents.allocate(nbytes)
        if offset is None:
            self.sweep(now_s)
            self._make_room(nbytes)
            offset = self._extents.allocate(nbytes)
        if offset is None:
            message = f"the embedding takes {nbytes} bytes, {self.leased_bytes} of the arena's {self.capacity_bytes} are in use"
            raise ArenaFull(message)
        self._generation += 1
        slot = Slot(key, self._generation, offset, tensors, tokens, payload)
        entry = self._entries[key] = _Entry(slot, self._extents.size(offset))
        self.leased_bytes += entry.nbytes
        return slot

    def commit(self, key: Key, generation: int, checksum: int, named: Key | None = None) -> Slot:
        """The embedding is written to its slot and sealed. Returns the slot that can be granted from now on.

        ``named``: the slot's key, where that was not known when the slot was reserved, under another. If there is a slot of that
        name, that one is returned and this one is freed.
        """
        entry = self._writing(key, generation)
        if named is not None:
            if (present := self._entries.get(named)) is not None:
                self.abandon(key, generation)
                return present.slot
            del self._entries[key]
            entry.slot = replace(entry.slot, key=named)
            self._entries[named] = entry
        entry.is_ready, entry.checksum = True, checksum
        self._ready += 1
        self._unpinned((entry.slot.key,))
        return entry.slot

    def abandon(self, key: Key, generation: int) -> None:
        """The embedding will not be made, and nothing writes to its slot any more."""
        entry = self._writing(key, generation)
        self.leased_bytes -= entry.nbytes
        self._forget(entry)

    def _writing(self, key: Key, generation: int) -> _Entry:
        entry = self._entries.get(key)
        if entry is None or entry.is_ready or entry.slot.generation != generation:
            raise ValueError(f"generation {generation} of this embedding is not being written")
        return entry

    def _make_room(self, nbytes: int) -> None:
        """Evict the least recently used until ``nbytes`` fit contiguously; evict nothing if they never would."""
        if not self._could_fit(nbytes):
            return
        while self._extents.largest_gap < nbytes and self._idle:
            entry = next(iter(self._idle.values()))
            self._forget(entry)
            self._on_evicted(entry.slot, f"room for {nbytes} bytes was needed")

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

    # --- leases ------------------------------------------------------------------------------------------------------

    def grant(
        self,
        key: Key,
        lease_id: LeaseId,
        lease_s: float,
        now_s: float,
        *,
        generation: int | None = None,
        router_lease: LeaseId | None = None,
    ) -> Ticket:
        """Grant a lease to another reader, or extend one.

        ``lease_id``: 16 random bytes chosen by the caller. ``generation`` comes from the reader's old ticket; None accepts
        any. ``router_lease``: a second one, which is granted with it; either both are or none. Raises LeaseLost, InvalidRequest,
        Overloaded.
        """
        entry = self._entries.get(key)
        if entry is None or not entry.is_ready or generation not in (None, entry.slot.generation):
            raise LeaseLost("the embedding is no longer held here")
        lease_ids = (lease_id,) if router_lease is None else (lease_id, router_lease)
        if (error := self._leases.refusal(lease_ids, key)) is not None:
            raise error
        if self._idle.pop(key, None) is not None:
            self.leased_bytes += entry.nbytes
        granted_s = self._leases.grant(lease_ids, key, lease_s, now_s)
        slot = entry.slot
        return Ticket(
            key=slot.key,
            holder=self._holder,
            epoch=self._epoch,
            offset=slot.offset,
            payload_nbytes=slot.payload_nbytes,
            generation=slot.generation,
            checksum=entry.checksum,
            tensors=slot.tensors,
            tokens=slot.tokens,
            lease_id=lease_id,
            lease_s=granted_s,
        )

    def release(self, lease_ids: Sequence[LeaseId]) -> None:
        """Readers are done. Unknown or expired ids are ignored."""
        self._unpinned(self._leases.release(lease_ids))

    def sweep(self, now_s: float) -> list[Key]:
        """Expire leases. Returns the key of each that has lapsed."""
        lapsed, freed = self._leases.lapsed(now_s)
        self._unpinned(freed)
        self.lapsed += len(lapsed)
        return lapsed

    def _unpinned(self, keys: Iterable[Key]) -> None:
        for key in keys:
            entry = self._idle[key] = self._entries[key]
            self.leased_bytes -= entry.nbytes

    def _pinned(self) -> list[_Entry]:
        """Entries whose memory cannot be reclaimed."""
        return [e for key, e in self._entries.items() if not e.is_ready or key in self._leases]

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
        ready = sum(entry.is_ready for entry in self._entries.values())
        assert ready == self._ready, "what is ready"
        self._leases.validate()
        for key, entry in self._entries.items():
            assert entry.slot.key == key, "an entry has another key"
            assert entry.nbytes == self._extents.size(entry.slot.offset), "an entry has another size"
            assert 0 < entry.slot.generation <= self._generation, "a generation from nowhere"
            is_leased = key in self._leases
            assert entry.is_ready or not is_leased, "a lease on a slot being written"
