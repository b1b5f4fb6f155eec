"""Memory of a text instance's image cache: which embeddings were pulled, are being pulled, and who needs them.

One entry per embedding key, shared by all requests that need it: one pull per instance.

    Acquire -> PULLING -- Pulled -> READY -- nobody needs it, least recently used, room is needed -> gone
                  +------ PullFailed -> pulled again with the ticket of another request, or gone

A request gets memory for all its items or for none; until then it waits, the most urgent first, and holds nothing
(no hold-and-wait). A pull belongs to the instance, not to the request that asked first: once it has begun it goes on
when that request leaves. Every ticket that comes in goes out exactly once as ``ReleaseLease``, as soon as nothing reads through it.

Memory that a late write of the transport may still reach is set aside until the transport says that it is over.
"""

from dataclasses import dataclass, field
from enum import Enum

from triptych.domain.embedding import Ticket
from triptych.errors import InvalidRequest, LeaseLost, Overloaded, TransferFailed, TriptychError
from triptych.machine.extents import Extents, round_up
from triptych.machine.text.image_cache_events import (
    Acquire,
    Acquired,
    CachedSlot,
    Effect,
    Event,
    Evicted,
    Hastened,
    Key,
    Leave,
    Pulled,
    PullFailed,
    Range,
    Refused,
    ReleaseLease,
    StartPull,
    Tick,
    Unneeded,
    Waiting,
)


class CacheState(Enum):
    PULLING = "pulling"
    READY = "ready"


@dataclass(slots=True)
class _Entry:
    ticket: Ticket
    offset: int
    pull_id: int
    deadline_s: float
    """While PULLING: of the most urgent request that it was ever needed by."""
    state: CacheState = CacheState.PULLING
    pins: set[str] = field(default_factory=set)
    tickets: dict[str, Ticket] = field(default_factory=dict)
    """While PULLING: by request, what it came with, not yet given back."""
    orphan: Ticket | None = None
    """While PULLING: the ticket in use, when its request has left."""


@dataclass(slots=True)
class _Request:
    tickets: tuple[Ticket, ...]
    deadline_s: float
    hits: tuple[bool, ...] = ()

    @property
    def keys(self) -> dict[Key, Ticket]:
        """Distinct keys, each with its first ticket."""
        first: dict[Key, Ticket] = {}
        for ticket in self.tickets:
            first.setdefault(ticket.key, ticket)
        return first


class ImageCacheMachine:
    """``handle`` is the only mutator. ``start`` and ``end`` bound the memory it gives out, in bytes."""

    def __init__(self, *, start: int, end: int, max_waiting: int) -> None:
        self._extents = Extents(start, end)
        self._max_waiting = max_waiting
        self._entries: dict[Key, _Entry] = {}
        self._idle: dict[Key, _Entry] = {}
        """Those that can be reclaimed, least recently used first: an entry comes to the end when the last request
        leaves it.
        """
        self._ready = 0
        self._pinned_bytes = 0
        self._requests: dict[str, _Request] = {}
        """Those that were let in."""
        self._waiting: dict[str, _Request] = {}
        """Those in line, in the order in which they came."""
        self._set_aside: dict[int, int] = {}
        """Offset and size of extents that a late write may reach."""
        self._pulls: dict[int, Key] = {}
        self._next_pull_id = 1

    @property
    def capacity_bytes(self) -> int:
        return self._extents.capacity

    @property
    def pinned_bytes(self) -> int:
        """Bytes that cannot be reclaimed now: needed by a request, being pulled, or set aside."""
        return self._pinned_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes that are taken and can be reclaimed: embeddings that nobody needs now."""
        return self.capacity_bytes - self._extents.free_bytes - self.pinned_bytes

    @property
    def cached(self) -> int:
        return self._ready

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def needed(self, pull_id: int) -> bool:
        """Whether a request waits for this pull."""
        return bool(self._entries[self._pulls[pull_id]].pins)

    def handle(self, event: Event, now_s: float) -> list[Effect]:  # noqa: ARG002 - every machine is given the time
        match event:
            case Acquire():
                return self._acquire(event)
            case Pulled(pull_id):
                return self._pulled(pull_id)
            case PullFailed():
                return self._pull_failed(event)
            case Leave(request_id):
                return self._leave(request_id)
            case Tick(quarantined):
                self._end_quarantine(quarantined)
                return self._admit()

    # --- coming in ---------------------------------------------------------------------------------------------------

    def _acquire(self, event: Acquire) -> list[Effect]:
        if event.request_id in self._requests or event.request_id in self._waiting:
            raise ValueError(f"request {event.request_id!r} is here already")
        request = _Request(event.tickets, event.deadline_s)
        error = self._refusal(request)
        if error is not None:
            return [
                Refused(event.request_id, error),
                *(ReleaseLease(ticket, "the request was refused") for ticket in event.tickets),
            ]
        self._waiting[event.request_id] = request
        effects = self._admit()
        if event.request_id in self._waiting:
            reason = f"{self.pinned_bytes} of the image cache's {self.capacity_bytes} bytes are in use"
            effects.append(Waiting(event.request_id, reason))
        return effects

    def _refusal(self, request: _Request) -> TriptychError | None:
        keys = request.keys
        nbytes = sum(round_up(ticket.slot_nbytes) for ticket in keys.values())
        if nbytes > self.capacity_bytes:
            return InvalidRequest(
                f"the request's embeddings take {nbytes} bytes, the image cache has {self.capacity_bytes}"
            )
        if any(not same_embedding(ticket, keys[ticket.key]) for ticket in request.tickets):
            return InvalidRequest("two items of the request are the same embedding, but of different size")
        if len(self._waiting) >= self._max_waiting:
            return Overloaded(f"{self._max_waiting} requests wait for the image cache, which is the limit")
        return None

    def _admit(self) -> list[Effect]:
        """Let the most urgent in for as long as there is room. Smaller ones behind do not overtake: nobody starves."""
        effects: list[Effect] = []
        while self._waiting:
            request_id, request = min(self._waiting.items(), key=lambda one: one[1].deadline_s)
            conflicts = self._drop_conflicts(request, effects)
            if conflicts:
                del self._waiting[request_id]
                message = "another embedding with the same identity but other tensors is in use"
                effects.append(Refused(request_id, TransferFailed(message, items=conflicts)))
                effects += [ReleaseLease(ticket, "the request was refused") for ticket in request.tickets]
                continue
            offsets = self._place(request, effects)
            if offsets is None:
                break
            del self._waiting[request_id]
            self._requests[request_id] = request
            effects += self._enter(request_id, request, offsets)
        return effects

    def _drop_conflicts(self, request: _Request, effects: list[Effect]) -> tuple[int, ...]:
        """Entries that a ticket contradicts are no hits: evict them; the items for which that is impossible return."""
        conflicts: list[int] = []
        for item, ticket in enumerate(request.tickets):
            entry = self._entries.get(ticket.key)
            if entry is None or same_embedding(entry.ticket, ticket):
                continue
            if self._held(entry):
                conflicts.append(item)
            else:
                self._evict(ticket.key, "a ticket says that its tensors are others", effects)
        return tuple(conflicts)

    def _place(self, request: _Request, effects: list[Effect]) -> dict[Key, int] | None:
        """Memory for everything that is missing, evicting the least recently used; None, and nothing held, if not."""
        keys = request.keys
        missing = {key: ticket.slot_nbytes for key, ticket in keys.items() if key not in self._entries}
        spared = sum(self._extents.size(self._idle[key].offset) for key in keys if key in self._idle)
        if sum(map(round_up, missing.values())) > self.capacity_bytes - self._pinned_bytes - spared:
            return None
        placed: dict[Key, int] = {}
        for key in sorted(missing, key=lambda key: (-missing[key], key)):
            offset = self._extents.allocate(missing[key])
            while offset is None and (victim := next((k for k in self._idle if k not in keys), None)) is not None:
                self._evict(victim, f"room for {missing[key]} bytes was needed", effects)
                offset = self._extents.allocate(missing[key])
            if offset is None:
                for taken in placed.values():
                    self._extents.free(taken)
                return None
            placed[key] = offset
        return placed

    def _enter(self, request_id: str, request: _Request, offsets: dict[Key, int]) -> list[Effect]:
        effects: list[Effect] = []
        request.hits = tuple(ticket.key not in offsets for ticket in request.tickets)
        first = request.keys
        spare = [ticket for ticket in request.tickets if first[ticket.key] is not ticket]
        effects += [ReleaseLease(ticket, "the request has another ticket for it") for ticket in spare]
        for key, ticket in first.items():
            if key in offsets:
                entry = _Entry(ticket, offsets[key], pull_id=0, deadline_s=request.deadline_s)
                self._entries[key] = entry
                self._pinned_bytes += self._extents.size(entry.offset)
                effects.append(self._start_pull(entry, ticket, request_id, "not in the image cache"))
            entry = self._entries[key]
            if self._idle.pop(key, None) is not None:
                self._pinned_bytes += self._extents.size(entry.offset)
            entry.pins.add(request_id)
            if entry.state is CacheState.PULLING:
                entry.tickets[request_id] = ticket
                if request.deadline_s < entry.deadline_s:
                    entry.deadline_s = request.deadline_s
                    effects.append(Hastened(entry.pull_id, request_id, request.deadline_s))
            else:
                effects.append(ReleaseLease(ticket, "it is in the image cache"))
        return effects + self._report(request_id)

    def _start_pull(self, entry: _Entry, ticket: Ticket, request_id: str, reason: str) -> StartPull:
        entry.pull_id, entry.ticket = self._next_pull_id, ticket
        self._next_pull_id += 1
        self._pulls[entry.pull_id] = ticket.key
        return StartPull(entry.pull_id, ticket, entry.offset, request_id, entry.deadline_s, reason)

    def _report(self, request_id: str) -> list[Effect]:
        """Acquired, once everything that the request needs is READY."""
        request = self._requests[request_id]
        entries = [self._entries[ticket.key] for ticket in request.tickets]
        if any(entry.state is not CacheState.READY for entry in entries):
            return []
        slots = tuple(CachedSlot(entry.ticket.key, entry.offset, entry.ticket) for entry in entries)
        return [Acquired(request_id, slots, request.hits)]

    # --- pulls -------------------------------------------------------------------------------------------------------

    def _pulled(self, pull_id: int) -> list[Effect]:
        key = self._pulls.pop(pull_id)
        entry = self._entries[key]
        entry.state = CacheState.READY
        self._ready += 1
        self._rest(key, entry)
        effects: list[Effect] = [ReleaseLease(ticket, "it was pulled") for ticket in self._take_tickets(entry)]
        for request_id in sorted(entry.pins):
            effects += self._report(request_id)
        if not entry.pins:
            effects += self._admit()
        return effects

    def _pull_failed(self, event: PullFailed) -> list[Effect]:
        key = self._pulls.pop(event.pull_id)
        entry = self._entries[key]
        used = entry.ticket
        effects: list[Effect] = []
        if entry.orphan is not None:
            effects.append(ReleaseLease(entry.orphan, "its pull failed"))
            entry.orphan = None
        lost = isinstance(event.error, LeaseLost)
        for request_id in [i for i, t in entry.tickets.items() if t is used or not (lost or other_slot(t, used))]:
            effects += self._fail(request_id, key, event.error)
        self._set_aside[entry.offset] = self._extents.size(entry.offset)
        self._end_quarantine(event.quarantined)
        if not entry.tickets:
            del self._entries[key]
            return effects + self._admit()
        return effects + self._pull_again(entry) + self._admit()

    def _pull_again(self, entry: _Entry) -> list[Effect]:
        """Another request has another ticket for the same embedding: use it, in memory that nothing else writes to."""
        effects: list[Effect] = []
        request_id = min(entry.tickets, key=lambda one: self._requests[one].deadline_s)
        ticket = entry.tickets[request_id]
        offset = self._extents.allocate(ticket.slot_nbytes)
        if offset is not None:
            entry.offset = offset
            self._pinned_bytes += self._extents.size(offset)
            entry.deadline_s = self._requests[request_id].deadline_s
            return [self._start_pull(entry, ticket, request_id, "the pull with another ticket failed")]
        error = TransferFailed("the embedding could not be pulled, and there was no room for another try")
        for request_id in list(entry.tickets):
            effects += self._fail(request_id, ticket.key, error)
        del self._entries[ticket.key]
        return effects

    def _fail(self, request_id: str, key: Key, error: TriptychError) -> list[Effect]:
        """A request that cannot have ``key`` is refused as a whole and gives up all that it held."""
        request = self._requests[request_id]
        items = tuple(item for item, ticket in enumerate(request.tickets) if ticket.key == key)
        failed = TransferFailed(error.message, items=items)
        return [Refused(request_id, failed), *self._withdraw(request_id, failed=key)]

    def _take_tickets(self, entry: _Entry) -> list[Ticket]:
        tickets = list(entry.tickets.values())
        if entry.orphan is not None:
            tickets.append(entry.orphan)
        entry.tickets, entry.orphan = {}, None
        return tickets

    # --- going out ---------------------------------------------------------------------------------------------------

    def _leave(self, request_id: str) -> list[Effect]:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            effects: list[Effect] = [ReleaseLease(ticket, "the request left") for ticket in waiting.tickets]
            return effects + self._admit()
        if request_id not in self._requests:
            return []
        return self._withdraw(request_id, failed=None) + self._admit()

    def _withdraw(self, request_id: str, *, failed: Key | None) -> list[Effect]:
        """Unpin everything of a request. A ticket that a pull is reading through is kept until the pull ends."""
        effects: list[Effect] = []
        for key in self._requests.pop(request_id).keys:
            entry = self._entries[key]
            entry.pins.discard(request_id)
            self._rest(key, entry)
            ticket = entry.tickets.pop(request_id, None)
            if ticket is None:
                continue
            if ticket is entry.ticket and key != failed:
                entry.orphan = ticket
            else:
                effects.append(ReleaseLease(ticket, "its pull failed" if key == failed else "the request left"))
            if failed is None and not entry.pins:
                effects.append(Unneeded(entry.pull_id))
        return effects

    def _rest(self, key: Key, entry: _Entry) -> None:
        """From now on it can be reclaimed, unless somebody needs it."""
        if not self._held(entry):
            self._idle[key] = entry
            self._pinned_bytes -= self._extents.size(entry.offset)

    def _evict(self, key: Key, reason: str, effects: list[Effect]) -> None:
        entry = self._entries.pop(key)
        del self._idle[key]
        self._ready -= 1
        self._extents.free(entry.offset)
        effects.append(Evicted(key, reason))

    def _end_quarantine(self, quarantined: tuple[Range, ...]) -> None:
        for offset, size in list(self._set_aside.items()):
            if not any(start < offset + size and offset < start + nbytes for start, nbytes in quarantined):
                del self._set_aside[offset]
                self._pinned_bytes -= size
                self._extents.free(offset)

    @staticmethod
    def _held(entry: _Entry) -> bool:
        return bool(entry.pins) or entry.state is CacheState.PULLING

    def validate(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        self._extents.validate()
        sizes = [self._extents.size(e.offset) for e in self._entries.values()] + list(self._set_aside.values())
        assert sum(sizes) + self._extents.free_bytes == self.capacity_bytes, "bytes do not add up"  # noqa: S101 - invariant
        offsets = [e.offset for e in self._entries.values()] + list(self._set_aside)
        assert len(set(offsets)) == len(offsets), "memory is given out twice"  # noqa: S101 - invariant
        held = {key for key, entry in self._entries.items() if self._held(entry)}
        pinned = sum(self._extents.size(self._entries[key].offset) for key in held) + sum(self._set_aside.values())
        assert pinned == self._pinned_bytes, "pinned bytes do not add up"  # noqa: S101 - invariant
        assert self._idle.keys() == self._entries.keys() - held, "what is idle"  # noqa: S101 - invariant
        ready = sum(entry.state is CacheState.READY for entry in self._entries.values())
        assert ready == self._ready, "what is ready"  # noqa: S101 - invariant
        pulling = {e.pull_id: key for key, e in self._entries.items() if e.state is CacheState.PULLING}
        assert pulling == self._pulls, "an entry is pulling exactly while a pull runs"  # noqa: S101 - invariant
        pins = {(i, key) for key, e in self._entries.items() for i in e.pins}
        assert pins == {(i, key) for i, r in self._requests.items() for key in r.keys}, "pins"  # noqa: S101 - invariant
        for entry in self._entries.values():
            ready = entry.state is CacheState.READY
            assert not (ready and (entry.tickets or entry.orphan)), "a lease is kept for nothing"  # noqa: S101 - invariant
            assert ready or entry.tickets.keys() == entry.pins, "a request without its ticket"  # noqa: S101 - invariant
        assert len(self._waiting) <= self._max_waiting, "too many in line"  # noqa: S101 - invariant


def same_embedding(a: Ticket, b: Ticket) -> bool:
    """Whether two tickets of one key agree on what the embedding is: count, names, shapes, dtypes (vllm#57696)."""
    return (a.tokens, a.tensors, a.payload_nbytes) == (b.tokens, b.tensors, b.payload_nbytes)


def other_slot(a: Ticket, b: Ticket) -> bool:
    """Whether two tickets of one key lead to different memory."""
    return (a.holder, a.epoch, a.offset, a.generation) != (b.holder, b.epoch, b.offset, b.generation)
