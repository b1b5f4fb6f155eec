"""A reader's cache of pulled tensor sets: which are present, being pulled or queued, and which requests need them.

A tensor set is the content of one ticket's slot: the tensors of an embedding, or others. There is one entry per key,
shared by all requests that need it, so an instance pulls it once.


    acquire -> WAITING (to be pulled) -> PULLING -- pulled -> READY -- unused, and room is needed -> gone
                  ^                         |
                  +-- another's ticket -----+-- pull_failed -> gone

A request gets memory for all its tensor sets or for none; until then it is queued and holds nothing (no hold-and-wait).
``policy.queueing`` orders both admission and pulls (``pull_queue``); what is transient is admitted first, and never waits for
bytes held elsewhere, as those that hold them may wait for its reader. A pull serves the instance, not the request that
caused it: once started, it continues when that request leaves. Every ticket that comes in goes out exactly once, as an
effect, as soon as nothing reads through it.

A request with a failed pull is refused once its other pulls have ended too, or after a grace period, so that one error
names all failures. Memory that a late write of the transport may still reach is quarantined until the transport says
that it is safe.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from triptych.domain.bounds import Between
from triptych.domain.embedding import HolderRef, Ticket
from triptych.domain.limits import Positive, check_limits
from triptych.domain.queue_position import QueuePosition
from triptych.errors import InvalidRequest, LeaseLost, Overloaded, TransferFailed, TriptychError
from triptych.machine.arena.extents import Extents, round_up
from triptych.machine.text.pull_queue import PullLimits, PullQueue
from triptych.machine.text.tensor_effects import (
    Acquired,
    CachedSlot,
    Effect,
    Key,
    Range,
    StartPull,
    StopPull,
    TensorEvicted,
    TensorsRefused,
    WaitsForRoom,
    WakeAt,
)


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Limits of requests that wait for embeddings, and of the bytes held for running ones."""

    max_waiting_requests: Positive = 2048
    """Most requests that wait for their embeddings or for the engine; one more is refused."""
    max_embedding_bytes: Positive = 1 << 30
    """Most bytes of embeddings held for requests that run or wait for the engine; further requests wait before they
    pull, a larger one is refused."""
    failure_grace_s: Annotated[float, Between(0, 60)] = 0.5
    """After a request's first failed pull: how long to wait for others to fail, to report them all at once."""

    def __post_init__(self) -> None:
        check_limits(self)


class CacheState(Enum):
    WAITING = "waiting"
    PULLING = "pulling"
    READY = "ready"


@dataclass(slots=True)
class _Entry:
    ticket: Ticket
    """The one that it is, or was, pulled with ..."""
    holder: HolderRef
    """... and from where."""
    offset: int
    pull_id: int = 0
    reason: str = ""
    """Why it is pulled."""
    state: CacheState = CacheState.WAITING
    pins: set[str] = field(default_factory=set)
    tickets: dict[str, Ticket] = field(default_factory=dict)
    """Until READY: each request's ticket, not yet released."""
    orphan: Ticket | None = None
    """Until READY: the ticket in use, if its request has left."""
    backend: str = ""
    duration_s: float = 0.0
    """Of the pull."""


@dataclass(slots=True)
class _Request:
    tickets: tuple[Ticket, ...]
    queue_position: QueuePosition
    transient: bool = False
    keys: dict[Key, Ticket] = field(default_factory=dict)
    """Distinct keys, each with its first ticket."""
    sizes: dict[Key, int] = field(default_factory=dict)
    """Bytes of each key's slot, as allocated."""
    nbytes: int = 0
    """Bytes of all tickets' slots."""
    missed: frozenset[Key] = frozenset()
    """Keys that were neither present nor being pulled at admission."""

    def __post_init__(self) -> None:
        for ticket in self.tickets:
            size = round_up(ticket.slot_nbytes)
            self.nbytes += size
            if ticket.key not in self.keys:
                self.keys[ticket.key], self.sizes[ticket.key] = ticket, size


@dataclass(slots=True)
class _Failing:
    """A request that failed and has not been told yet."""

    error: TriptychError
    failed: set[int]
    """Indices of tickets."""
    pulls: dict[int, set[int]]
    """Running pulls, each with the indices of its tickets."""
    until_s: float


class TensorCache:
    """Owner of pulled tensors: entries, pins, memory, the queue of pulls and the bytes in flight.

    The methods for requests and pulls alone change it, and return the effects.
    """

    def __init__(self, limits: CacheLimits, pulls: PullLimits, *, start: int, end: int) -> None:
        """``start`` and ``end`` bound its memory, in bytes."""
        self._limits = limits
        self._extents = Extents(start, end)
        self.capacity_bytes = self._extents.capacity
        self._pull_queue = PullQueue(pulls)
        self._failing: dict[str, _Failing] = {}
        self._entries: dict[Key, _Entry] = {}
        self._idle: dict[Key, _Entry] = {}
        """Entries that can be reclaimed, least recently used first: an entry comes to the end when the last request
        leaves it.
        """
        self._ready = 0
        self._pinned_bytes = 0
        self._requests: dict[str, _Request] = {}
        """Admitted requests."""
        self._held: dict[str, int] = {}
        """Bytes of each admitted request that is not over."""
        self._waiting: dict[str, _Request] = {}
        """Queued requests, in order of arrival."""
        self._set_aside: dict[int, int] = {}
        """Offset and size of extents that a late write may reach."""
        self._pulls: dict[int, Key] = {}
        self._next_pull_id = 1

    @property
    def pinned_bytes(self) -> int:
        """Bytes that cannot be reclaimed: needed by a request, being pulled, or in quarantine."""
        return self._pinned_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes that can be reclaimed: cached tensor sets that no request needs."""
        return self.capacity_bytes - self._extents.free_bytes - self.pinned_bytes

    @property
    def cached(self) -> int:
        return self._ready

    def ready(self, key: Key) -> Ticket | None:
        """The ticket that a present tensor set was pulled with; None if it is not present."""
        entry = self._entries.get(key)
        return entry.ticket if entry is not None and entry.state is CacheState.READY else None

    @property
    def held_bytes(self) -> int:
        """Bytes of admitted requests that are not over."""
        return sum(self._held.values())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def pulls(self) -> PullQueue:
        """Running and waiting pulls. Read-only."""
        return self._pull_queue

    # --- requests ----------------------------------------------------------------------------------------------------

    def acquire(
        self,
        request_id: str,
        tickets: tuple[Ticket, ...],
        queue_position: QueuePosition,
        now_s: float,
        *,
        transient: bool = False,
    ) -> list[Effect]:
        """A request needs these tensor sets, one ticket each. Answered by Acquired (now or later) or TensorsRefused.

        ``queue_position`` orders admission and pulls. ``transient``: they are read at once, by what runs already. So they are
        admitted first, and nothing is held for them after ``leave``.
        """
        if request_id in self._held or request_id in self._waiting or request_id in self._failing:
            raise ValueError(f"request {request_id!r} is here already")
        request = _Request(tickets, queue_position, transient)
        error = self._refusal(request)
        if error is not None:
            return [TensorsRefused(request_id, error), *tickets]
        self._waiting[request_id] = request
        effects = self._admit(now_s)
        if request_id in self._waiting:
            reason = f"{self.pinned_bytes} of {self.capacity_bytes} bytes are in use, copies take {self.held_bytes}"
            effects.append(WaitsForRoom(request_id, reason))
        return self._with_pulls(effects, now_s)

    def leave(self, request_id: str, now_s: float) -> list[Effect]:
        """The request no longer reads its tensor sets. Unknown ids are ignored.

        Until ``copies_gone`` their bytes count as held elsewhere.
        """
        self._failing.pop(request_id, None)
        waiting = self._waiting.pop(request_id, None)
        effects: list[Effect] = []
        if waiting is not None:
            effects += waiting.tickets
        elif request_id in self._requests:
            keys = self._requests[request_id].keys
            effects += self._withdraw(request_id, failed=None)
            effects += self._drop_unneeded(keys)
        else:
            return []
        if self._waiting:
            effects += self._admit(now_s)
        return self._with_pulls(effects, now_s)

    def copies_gone(self, request_id: str, now_s: float) -> list[Effect]:
        """The copies of the request's tensor sets are freed too. Unknown ids are ignored."""
        if not self._held.pop(request_id, 0) or not self._waiting:
            return []
        return self._with_pulls(self._admit(now_s), now_s)

    def tick(self, quarantined: tuple[Range, ...], now_s: float) -> list[Effect]:
        """Time has passed. ``quarantined``: the current value of ``Transport.quarantined()``."""
        self._end_quarantine(quarantined)
        return self._with_pulls(self._admit(now_s), now_s)

    def _with_pulls(self, effects: list[Effect], now_s: float) -> list[Effect]:
        """The effects, with what follows from any change: requests that have failed are told, and pulls begin."""
        if self._failing:
            effects += self._tell_failed(now_s)
        if self._pulls:
            effects += self._begin_pulls(now_s)
        return effects

    # --- admission ---------------------------------------------------------------------------------------------------

    def _refusal(self, request: _Request) -> TriptychError | None:
        nbytes = sum(request.sizes.values())
        if nbytes > self.capacity_bytes:
            return InvalidRequest(
                f"the request's embeddings take {nbytes} bytes, the image cache has {self.capacity_bytes}"
            )
        for ticket in request.tickets:
            first = request.keys[ticket.key]
            if ticket is not first and not same_embedding(ticket, first):
                return InvalidRequest("two items of the request are the same embedding, but of different size")
        if len(self._waiting) >= self._limits.max_waiting_requests:
            return Overloaded(
                f"{self._limits.max_waiting_requests} requests wait for the image cache, which is the limit"
            )
        return None

    def _admit(self, now_s: float) -> list[Effect]:
        """Admit the most urgent requests while there is room. Smaller ones do not overtake, so nothing starves."""
        effects: list[Effect] = []
        while self._waiting:
            if len(self._waiting) == 1:
                request_id, request = next(iter(self._waiting.items()))
            else:
                request_id, request = min(
                    self._waiting.items(), key=lambda entry: (not entry[1].transient, entry[1].queue_position.at(now_s))
                )
            held_bytes, more = self.held_bytes, 0 if request.transient else request.nbytes
            if more and held_bytes and held_bytes + more > self._limits.max_embedding_bytes:
                break
            conflicts = self._drop_conflicts(request, effects)
            if conflicts:
                del self._waiting[request_id]
                message = "another embedding with the same identity but other tensors is in use"
                effects.append(TensorsRefused(request_id, TransferFailed(message, items=conflicts)))
                effects += request.tickets
                continue
            offsets = self._place(request, effects)
            if offsets is None:
                break
            del self._waiting[request_id]
            self._requests[request_id] = request
            self._held[request_id] = more
            effects += self._enter(request_id, request, offsets)
        return effects

    def _drop_conflicts(self, request: _Request, effects: list[Effect]) -> tuple[int, ...]:
        """Evict entries that contradict a ticket. Returns the items for which that is impossible."""
        conflicts: list[int] = []
        for item, ticket in enumerate(request.tickets):
            entry = self._entries.get(ticket.key)
            if entry is None or same_embedding(entry.ticket, ticket):
                continue
            if self._is_pinned(entry):
                conflicts.append(item)
            else:
                self._evict(ticket.key, "a ticket says that its tensors are others", effects)
        return tuple(conflicts)

    def _place(self, request: _Request, effects: list[Effect]) -> dict[Key, int] | None:
        """Allocate memory for everything missing, evicting the least recently used.

        Returns None, with nothing allocated, if it cannot.
        """
        keys = request.keys
        missing = [(-nbytes, key) for key, nbytes in request.sizes.items() if key not in self._entries]
        room = self.capacity_bytes - self._pinned_bytes
        for key in keys:
            if key in self._idle:
                room -= self._extents.size(self._idle[key].offset)
            elif key not in self._entries:
                room -= request.sizes[key]
        if room < 0:
            return None
        placed: dict[Key, int] = {}
        for _, key in sorted(missing):
            nbytes = request.sizes[key]
            offset = self._extents.allocate(nbytes)
            while offset is None and (victim := next((k for k in self._idle if k not in keys), None)) is not None:
                self._evict(victim, f"room for {nbytes} bytes was needed", effects)
                offset = self._extents.allocate(nbytes)
            if offset is None:
                for taken in placed.values():
                    self._extents.free(taken)
                own = next((key for key in keys if key in self._idle), None)
                if own is None or self._pinned_bytes:
                    return None
                # Nothing is pinned, so no event would ever make room: the request's own cached tensors split the free memory.
                self._evict(own, "its place is needed for the rest of its request", effects)
                return self._place(request, effects)
            placed[key] = offset
        return placed

    def _enter(self, request_id: str, request: _Request, offsets: dict[Key, int]) -> list[Effect]:
        effects: list[Effect] = []
        request.missed = frozenset(offsets)
        first = request.keys
        effects += [
            ticket for ticket in request.tickets if first[ticket.key] is not ticket
        ]  # it has another one for it
        for key, ticket in first.items():
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(ticket, ticket.held_by, offsets[key])
                self._pinned_bytes += self._extents.size(entry.offset)
                self._want(entry, request_id, "not in the image cache")
                entry.tickets[request_id] = ticket
            elif entry.state is CacheState.READY:
                effects.append(ticket)
                if self._idle.pop(key, None) is not None:
                    self._pinned_bytes += self._extents.size(entry.offset)
            else:
                entry.tickets[request_id] = ticket
                self._pull_queue.hasten(entry.pull_id, request_id, request.queue_position)
            entry.pins.add(request_id)
        return effects if offsets else effects + self._report(request_id)

    def _want(self, entry: _Entry, request_id: str, reason: str) -> None:
        """Queue the entry's pull, with its ticket, which is of this request."""
        entry.pull_id, entry.reason = self._next_pull_id, reason
        entry.state = CacheState.WAITING
        self._next_pull_id += 1
        self._pulls[entry.pull_id] = entry.ticket.key
        queue_position = self._requests[request_id].queue_position
        self._pull_queue.want(entry.pull_id, request_id, queue_position, entry.holder, entry.ticket.slot_nbytes)

    def _begin_pulls(self, now_s: float) -> list[StartPull]:
        begun: list[StartPull] = []
        for pull_id in self._pull_queue.begin(now_s):
            entry = self._entries[self._pulls[pull_id]]
            entry.state = CacheState.PULLING
            begun.append(StartPull(pull_id, entry.ticket, entry.holder, entry.offset, entry.reason))
        return begun

    def _report(self, request_id: str) -> list[Effect]:
        """Acquired, once everything that the request needs is READY."""
        request = self._requests[request_id]
        entries = [self._entries[ticket.key] for ticket in request.tickets]
        for entry in entries:
            if entry.state is not CacheState.READY:
                return []
        slots = [
            CachedSlot(entry.offset, entry.ticket, entry.backend, entry.duration_s)
            if ticket.key in request.missed
            else CachedSlot(entry.offset, entry.ticket)
            for ticket, entry in zip(request.tickets, entries, strict=True)
        ]
        return [Acquired(request_id, tuple(slots))]

    # --- pulls -------------------------------------------------------------------------------------------------------

    def pulled(self, pull_id: int, backend: str, duration_s: float, now_s: float) -> list[Effect]:
        """A pull by this backend is complete and verified."""
        key = self._ended(pull_id)
        entry = self._entries[key]
        entry.state, entry.backend, entry.duration_s = CacheState.READY, backend, duration_s
        self._ready += 1
        effects = _released(entry)
        if entry.pins:
            for request_id in sorted(entry.pins):
                effects += self._report(request_id)
        else:
            self._rest(key, entry)
            effects += self._admit(now_s)
        return self._with_pulls(effects, now_s)

    def pull_failed(
        self, pull_id: int, error: TriptychError, now_s: float, quarantined: tuple[Range, ...] = ()
    ) -> list[Effect]:
        """``quarantined``: the current value of ``Transport.quarantined()``."""
        key = self._ended(pull_id, failed=True)
        entry = self._entries[key]
        used = entry.ticket
        effects = _orphaned(entry)
        lost = isinstance(error, LeaseLost)
        for request_id in [i for i, t in entry.tickets.items() if t is used or not (lost or other_slot(t, used))]:
            effects += self._fail(request_id, key, error, now_s)
        effects += self._not_pulled(key, entry, quarantined, now_s)
        return self._with_pulls(effects, now_s)

    def pull_stopped(self, pull_id: int, now_s: float, quarantined: tuple[Range, ...] = ()) -> list[Effect]:
        """A pull ended because of ``StopPull``. Requests that have come for it since then get a pull of their own.

        ``quarantined`` as in ``pull_failed``.
        """
        key = self._ended(pull_id)
        entry = self._entries[key]
        effects = _orphaned(entry) + self._not_pulled(key, entry, quarantined, now_s)
        return self._with_pulls(effects, now_s)

    def _ended(self, pull_id: int, *, failed: bool = False) -> Key:
        """A pull has ended: update the failing requests that wait for it."""
        self._pull_queue.end(pull_id)
        for failing in self._failing.values():
            places = failing.pulls.pop(pull_id, set())
            if failed:
                failing.failed |= places
        return self._pulls.pop(pull_id)

    def _not_pulled(self, key: Key, entry: _Entry, quarantined: tuple[Range, ...], now_s: float) -> list[Effect]:
        """Set its memory aside, which a late write may reach, and pull again for those who need it."""
        self._set_aside[entry.offset] = self._extents.size(entry.offset)
        self._end_quarantine(quarantined)
        if not entry.tickets:
            del self._entries[key]
            return self._admit(now_s)
        return self._pull_again(entry, now_s) + self._admit(now_s)

    def _pull_again(self, entry: _Entry, now_s: float) -> list[Effect]:
        """Retry with another request's ticket for the same embedding, in memory that nothing else writes to."""
        effects: list[Effect] = []
        request_id = min(entry.tickets, key=lambda reader: self._requests[reader].queue_position)
        ticket = entry.tickets[request_id]
        offset = self._extents.allocate(ticket.slot_nbytes)
        if offset is not None:
            entry.offset, entry.ticket, entry.holder = offset, ticket, ticket.held_by
            self._pinned_bytes += self._extents.size(offset)
            self._want(entry, request_id, "the pull with another ticket ended without it")
            return []
        error = TransferFailed("the embedding could not be pulled, and there was no room for another try")
        for request_id in list(entry.tickets):
            effects += self._fail(request_id, ticket.key, error, now_s)
        del self._entries[ticket.key]
        return effects

    def _fail(self, request_id: str, key: Key, error: TriptychError, now_s: float) -> list[Effect]:
        """Refuse a request that cannot get ``key``, and release all that it holds."""
        failed, pulls = set[int](), dict[int, set[int]]()
        for place, ticket in enumerate(self._requests[request_id].tickets):
            entry = self._entries[ticket.key]
            if ticket.key == key:
                failed.add(place)
            elif entry.state is not CacheState.READY:
                pulls.setdefault(entry.pull_id, set()).add(place)
        until_s = now_s + self._limits.failure_grace_s
        self._failing[request_id] = _Failing(error, failed, pulls, until_s)
        effects = self._withdraw(request_id, failed=key)
        del self._held[request_id]
        return [*effects, WakeAt(until_s, "its other pulls may fail as well")] if pulls else effects

    def _tell_failed(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for request_id, failing in list(self._failing.items()):
            if not failing.pulls or failing.until_s <= now_s:
                del self._failing[request_id]
                effects.append(
                    TensorsRefused(
                        request_id, TransferFailed(failing.error.message, items=tuple(sorted(failing.failed)))
                    )
                )
        return effects

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _drop_unneeded(self, keys: Iterable[Key]) -> list[Effect]:
        """Cancel pulls that no request needs any more."""
        effects: list[Effect] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or entry.pins or entry.state is CacheState.READY:
                continue
            if entry.state is CacheState.PULLING:
                effects.append(StopPull(entry.pull_id, "nobody needs it any more"))
                continue
            self._pull_queue.drop(entry.pull_id)
            for failing in self._failing.values():
                failing.pulls.pop(entry.pull_id, None)
            del self._pulls[entry.pull_id], self._entries[key]
            self._pinned_bytes -= self._extents.size(entry.offset)
            self._extents.free(entry.offset)
            effects += _released(entry)
        return effects

    def _withdraw(self, request_id: str, *, failed: Key | None) -> list[Effect]:
        """Unpin everything of a request. A ticket in use by a pull is kept until the pull ends."""
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
                effects.append(ticket)
        return effects

    def _rest(self, key: Key, entry: _Entry) -> None:
        """Make the entry reclaimable, unless a request needs it."""
        if not entry.pins and entry.state is CacheState.READY:
            self._idle[key] = entry
            self._pinned_bytes -= self._extents.size(entry.offset)

    def _evict(self, key: Key, reason: str, effects: list[Effect]) -> None:
        entry = self._entries.pop(key)
        del self._idle[key]
        self._ready -= 1
        self._extents.free(entry.offset)
        effects.append(TensorEvicted(key, reason))

    def _end_quarantine(self, quarantined: tuple[Range, ...]) -> None:
        for offset, size in list(self._set_aside.items()):
            if not any(start < offset + size and offset < start + nbytes for start, nbytes in quarantined):
                del self._set_aside[offset]
                self._pinned_bytes -= size
                self._extents.free(offset)

    @staticmethod
    def _is_pinned(entry: _Entry) -> bool:
        return bool(entry.pins) or entry.state is not CacheState.READY

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        self._extents.validate()
        sizes = [self._extents.size(e.offset) for e in self._entries.values()] + list(self._set_aside.values())
        assert sum(sizes) + self._extents.free_bytes == self.capacity_bytes, "bytes do not add up"
        offsets = [e.offset for e in self._entries.values()] + list(self._set_aside)
        assert len(set(offsets)) == len(offsets), "memory is given out twice"
        held = {key for key, entry in self._entries.items() if self._is_pinned(entry)}
        pinned = sum(self._extents.size(self._entries[key].offset) for key in held) + sum(self._set_aside.values())
        assert pinned == self._pinned_bytes, "pinned bytes do not add up"
        assert self._idle.keys() == self._entries.keys() - held, "what is idle"
        ready = sum(entry.state is CacheState.READY for entry in self._entries.values())
        assert ready == self._ready, "what is ready"
        self._pull_queue.validate()
        pulling = {e.pull_id: key for key, e in self._entries.items() if e.state is not CacheState.READY}
        assert pulling == self._pulls, "an entry is pulling exactly while a pull runs"
        for entry in self._entries.values():
            waits = self._pull_queue.waits(entry.pull_id)
            assert waits == (entry.state is CacheState.WAITING), "queue of pulls and entries differ"
        assert not self._failing.keys() & self._requests.keys(), "a request is refused and here"
        pins = {(i, key) for key, e in self._entries.items() for i in e.pins}
        assert pins == {(i, key) for i, r in self._requests.items() for key in r.keys}, "pins"
        for entry in self._entries.values():
            ready = entry.state is CacheState.READY
            assert not (ready and (entry.tickets or entry.orphan)), "a READY entry keeps a lease"
            assert ready or entry.tickets.keys() == entry.pins, "tickets and pins differ"
        held_fits = sum(map(bool, self._held.values())) <= 1 or self.held_bytes <= self._limits.max_embedding_bytes
        assert held_fits, "requests hold too many bytes"
        assert self._held.keys() >= self._requests.keys(), "the bytes of a request are not counted"
        assert len(self._waiting) <= self._limits.max_waiting_requests, "too many in line"


def _released(entry: _Entry) -> list[Effect]:
    """All tickets of an entry that needs none any more."""
    tickets, entry.tickets = entry.tickets, {}
    return [*tickets.values(), *_orphaned(entry)]


def _orphaned(entry: _Entry) -> list[Effect]:
    """The ticket in use whose request has left."""
    orphan, entry.orphan = entry.orphan, None
    return [] if orphan is None else [orphan]


def same_embedding(a: Ticket, b: Ticket) -> bool:
    """Whether two tickets of one key agree on the embedding: count, names, shapes, dtypes (vllm#57696)."""
    return a.tokens == b.tokens and a.tensors == b.tensors and a.payload_nbytes == b.payload_nbytes


def other_slot(a: Ticket, b: Ticket) -> bool:
    """Whether two tickets of one key point to different memory."""
    return (a.holder, a.epoch, a.offset, a.generation) != (b.holder, b.epoch, b.offset, b.generation)
