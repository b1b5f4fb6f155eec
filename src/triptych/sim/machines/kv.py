"""Keys and values that go from one text instance to another: exported segment by segment as they are computed, and pulled.

As ``services.text.exports`` and ``imports`` do it, for answers with one choice.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import TYPE_CHECKING

from triptych.domain.embedding import GENERATION_NBYTES, KEY_NBYTES, LEASE_ID_NBYTES, LeaseId
from triptych.domain.generation import KvReport
from triptych.domain.kv_segment import KvKind, KvPlacement, KvSegment, SealedSegment
from triptych.domain.queue_position import QueuePosition
from triptych.errors import Cancelled, TriptychError
from triptych.machine.arena.extents import round_up
from triptych.machine.arena.slots import Slot
from triptych.machine.text.tensor_effects import CachedSlot

from ..agenda import Agenda  # noqa: TID252 - of the simulator
from .encoder import SimArena

if TYPE_CHECKING:
    from .text import SimText, TextCall

_AT_ONCE = 4
"""Segments of a request that are pulled or wait to be copied at the same time."""
Slots = Sequence[Slot]


@dataclass(eq=False, slots=True)
class _Waiting:
    segments: Sequence[KvSegment]
    nbytes: int
    queue_position: QueuePosition
    then: Callable[[Slots], None]
    is_next: bool = False


class SimKvStore:
    """``services.text.kv_store.KvStore`` over the same arena machine, without contents."""

    def __init__(self, arena: SimArena, kind: KvKind, agenda: Agenda, *, shared: bool) -> None:
        """``shared``: embeddings lie in the arena too."""
        self.arena = arena
        self.kind = kind
        self._agenda = agenda
        self._shared = shared
        self._line: list[_Waiting] = []
        self._rng = Random(f"keys and values of {arena.holder}")  # noqa: S311 - nobody is to be kept out
        if not shared:
            arena.before_change = self._call_next

    def reserve(
        self, segments: Sequence[KvSegment], queue_position: QueuePosition, then: Callable[[Slots], None]
    ) -> None:
        """Call ``then`` with slots for all segments, once there is room and it is this caller's turn; or with as many as there is room
        for, at once, where nothing waits.
        """
        nbytes = sum([round_up(segment.nbytes + 2 * GENERATION_NBYTES) for segment in segments])
        if self._shared or nbytes > self.arena.machine.capacity_bytes:
            then(self.reserve_now(segments))
            return
        waiting = _Waiting(segments, nbytes, queue_position, then)
        self._line.append(waiting)
        self._call_next()
        if waiting.is_next:
            self._try(waiting)

    def leave(self, then: Callable[[Slots], None]) -> None:
        """A caller no longer waits."""
        before = len(self._line)
        self._line = [waiting for waiting in self._line if waiting.then is not then]
        if len(self._line) < before:
            self._call_next()

    def _call_next(self) -> None:
        if not self._line:
            return
        now_s = self._agenda.now_s
        first = min(self._line, key=lambda waiting: waiting.queue_position.at(now_s))
        if not first.is_next and first.nbytes <= self.arena.machine.available_bytes:
            first.is_next = True
            self._agenda.soon(self._try, first)

    def _try(self, waiting: _Waiting) -> None:
        if waiting not in self._line or not waiting.is_next:
            return
        slots = self.reserve_now(waiting.segments)
        if len(slots) < len(waiting.segments):
            self.abandon(slots)
            waiting.is_next = False
            return
        self._line.remove(waiting)
        self._call_next()
        waiting.then(slots)

    def reserve_now(self, segments: Sequence[KvSegment]) -> list[Slot]:
        """Slots for the first segments, as many as there is room for."""
        slots: list[Slot] = []
        for segment in segments:
            try:
                slots.append(self.arena.reserve(self._new(KEY_NBYTES), (segment.spec,), segment.positions))
            except TriptychError:
                break
        return slots

    def seal(self, slot: Slot) -> None:
        self.arena.commit(slot)

    def abandon(self, slots: Slots) -> None:
        for slot in slots:
            self.arena.abandon(slot)

    def pin(self, key: bytes, lease_s: float) -> LeaseId:
        """Raises LeaseLost, Overloaded."""
        return self.arena.grant(key, self._new(LEASE_ID_NBYTES), lease_s).lease_id

    def grant(self, key: bytes, segment: KvSegment, lease_s: float) -> SealedSegment:
        """Raises LeaseLost, Overloaded."""
        lease_id, router_lease = self._new(LEASE_ID_NBYTES), self._new(LEASE_ID_NBYTES)
        ticket = self.arena.grant(key, lease_id, lease_s, router_lease=router_lease)
        return SealedSegment(KvPlacement(segment.first, ticket, ()), router_lease)

    def _new(self, nbytes: int) -> bytes:
        """A key or a lease that nobody else has."""
        return self._rng.getrandbits(8 * nbytes).to_bytes(nbytes, "little")


@dataclass(eq=False, slots=True)
class _Part:
    segment: KvSegment
    slot: Slot | None
    """Reserved and not sealed."""
    key: bytes
    pin: LeaseId | None = None


class KvExport:
    """``services.text.exports.KvTransfer``: what an answer goes on with elsewhere."""

    def __init__(
        self,
        call: "TextCall",
        segments: Sequence[KvSegment],
        slots: Slots,
        store: SimKvStore,
        text: "SimText",
        agenda: Agenda,
    ) -> None:
        self._call = call
        self._store = store
        self._text = text
        self._agenda = agenda
        self._pin_s = call.deadline_s - agenda.now_s
        self._parts = [_Part(segment, slot, slot.key) for segment, slot in zip(segments, slots, strict=False)]
        self._next = 0
        self._sealing = 0
        self._computed = 0
        self._awaited: float = inf
        self._is_ending = self._is_stopped = self._is_done = False
        self._when_done: Callable[[], None] | None = None
        agenda.soon(self._run)

    def _run(self) -> None:
        self._text.follow(self._call, self._tell)
        if self._parts:
            self._text.between(0, lambda: True, lambda _: self._go())
        else:
            self._go()

    def _tell(self, computed: int) -> None:
        self._computed = computed
        if computed >= self._awaited:
            self._awaited = inf
            self._agenda.soon(self._go)

    def _go(self) -> None:
        """Begin to copy what is computed."""
        parts = self._parts
        while self._next < len(parts) and not self._is_stopped:
            part = parts[self._next]
            if self._computed >= part.segment.end:
                self._sealing += 1
                self._text.between(part.segment.nbytes, partial(self._pack, part), partial(self._seal, part))
            elif not self._is_ending:
                self._awaited = part.segment.end
                return
            self._next += 1
        self._next = len(parts)
        self._end_if_sealed()

    def _pack(self, part: _Part) -> bool:
        sequence = self._text.batch.running.get(self._call.job_id)
        return sequence is not None and sequence.positions >= part.segment.end

    def _seal(self, part: _Part, packed: bool) -> None:
        if packed and part.slot is not None:
            self._store.seal(part.slot)
            part.slot = None
            try:
                part.pin = self._store.pin(part.key, self._pin_s)
            except TriptychError:
                part.pin = None
        self._free(part)
        self._sealing -= 1
        self._end_if_sealed()

    def _free(self, part: _Part) -> None:
        if part.slot is not None:
            self._store.abandon((part.slot,))
            part.slot = None

    def _end_if_sealed(self) -> None:
        if self._next == len(self._parts) and not self._sealing and not self._is_done:
            self._agenda.soon(self._end)

    def _end(self) -> None:
        if self._is_done:
            return
        for part in self._parts:
            self._free(part)
        if self._is_stopped:
            self._unpin()
        self._text.unfollow(self._call)
        self._is_done = True
        if self._when_done is not None:
            self._agenda.soon(self._when_done)

    def stop(self) -> None:
        """The request ends here, and what is sealed and not granted is for nobody."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._is_done:
            self._unpin()
        elif self._awaited < inf:
            self._awaited = inf
            self._agenda.soon(self._go)

    def sealed(self, then: Callable[[], None]) -> None:
        """Nothing more will be computed: call ``then`` when all that is computed is sealed."""
        self._is_ending = True
        if self._is_done:
            then()
            return
        self._when_done = then
        if self._awaited < inf:
            self._awaited = inf
            self._agenda.soon(self._go)

    def granted(self, lease_s: float) -> tuple[SealedSegment, ...]:
        """Leases on what is sealed without a gap."""
        segments: list[SealedSegment] = []
        for part in self._parts:
            if part.pin is None:
                break
            try:
                segments.append(self._store.grant(part.key, part.segment, lease_s))
            except TriptychError:
                break
        self._unpin()
        return tuple(segments)

    def _unpin(self) -> None:
        self._store.arena.release([part.pin for part in self._parts if part.pin is not None])
        for part in self._parts:
            part.pin = None


@dataclass(eq=False, slots=True)
class _Pull:
    name: str
    segment: KvSegment
    slots: tuple[CachedSlot, ...] | TriptychError | None = None
    """Once it has come, or cannot."""


class KvImport:
    """``services.text.imports``: keys and values that a request brings from the instance that computed its prompt."""

    def __init__(self, call: "TextCall", kind: KvKind, text: "SimText", agenda: Agenda) -> None:
        self._call = call
        self._text = text
        self._agenda = agenda
        self._offered = [
            (KvSegment(kind, placement.first, placement.ticket.tokens), placement.ticket)
            for placement in call.effect.kv_segments
        ]
        self.positions = max([segment.end for segment, _ in self._offered], default=0)
        """The most that can arrive."""
        self._next = 0
        self._pulls: deque[_Pull] = deque()
        self._waits = False
        self._covered = self._computed = 0
        self._awaits = False
        self._pulled_tokens = self._pulled_nbytes = self._found_tokens = 0
        self._has_ended = self._is_running = False
        self._began_s = 0.0
        self._then: Callable[[KvReport], None]

    def run(self, then: Callable[[KvReport], None]) -> None:
        """Bring them to the batch, which has memory for all positions; call ``then`` when nothing more will arrive."""
        self._then, self._began_s, self._is_running = then, self._agenda.now_s, True
        self._agenda.soon(self._run)

    def _run(self) -> None:
        if self._offered:
            self._text.between(0, self._state, self._bring)
        else:
            self._end()

    def _state(self) -> bool:
        sequence = self._text.batch.running.get(self._call.job_id)
        self._computed = 0 if sequence is None else sequence.positions
        self._awaits = sequence is not None and sequence.is_arriving and not sequence.paused
        return True

    def _bring(self, _: bool) -> None:
        self._cover(self._computed)
        self._more()

    def _more(self) -> None:
        """Pull the next segments, a few at the same time; then copy in what has come."""
        while self._next < len(self._offered) and len(self._pulls) < _AT_ONCE and not self._has_ended:
            segment, ticket = self._offered[self._next]
            name = f"{self._call.job_id}/kv/{self._next}"
            self._next += 1
            if not self._awaits or self._computed >= segment.end:
                self._found_tokens += segment.positions if self._computed >= segment.end else 0
                self._text.receiver.release(ticket)
                continue
            pull = _Pull(name, segment)
            self._pulls.append(pull)
            acquire = partial(self._text.receiver.acquire, name, (ticket,), self._call.queue_position, transient=True)
            self._agenda.soon(acquire, partial(self._came, pull))
        if not self._pulls:
            self._text.between(0, self._all_arrived, lambda _: self._end())
        elif self._pulls[0].slots is not None:
            self._agenda.soon(self._copy_in)
        else:
            self._waits = True

    def _came(self, pull: _Pull, slots: tuple[CachedSlot, ...] | TriptychError) -> None:
        if pull.slots is not None:
            return
        pull.slots = slots
        if self._waits and pull is self._pulls[0]:
            self._waits = False
            self._agenda.soon(self._copy_in)

    def _copy_in(self) -> None:
        """Copy in the next segment, and those behind it that have come as well."""
        come: list[_Pull] = []
        while self._pulls and (not come or self._pulls[0].slots is not None):
            come.append(self._pulls.popleft())
        copying = 0
        done = partial(self._copied_in, come)
        results: dict[str, bool] = {}
        for pull in come:
            if isinstance(pull.slots, TriptychError) or self._has_ended:
                self._has_ended = True
                continue
            copying += 1
            self._text.between(
                pull.segment.nbytes, partial(self._unpack, pull.segment), partial(self._copied, pull, results)
            )
        self._left, self._when_copied = copying, done
        self._results = results
        if not copying:
            done()

    def _copied(self, pull: _Pull, results: dict[str, bool], arrived: bool) -> None:
        results[pull.name] = arrived
        self._left -= 1
        if not self._left:
            self._when_copied()

    def _unpack(self, segment: KvSegment) -> bool:
        batch = self._text.batch
        sequence = batch.running.get(self._call.job_id)
        if sequence is None or not sequence.is_arriving or sequence.paused:
            return False
        if segment.first > sequence.computed or segment.end > sequence.computed + sequence.left:
            return False
        batch.arrive(sequence, segment.end)
        return True

    def _copied_in(self, come: Sequence[_Pull]) -> None:
        for pull in come:
            if (arrived := self._results.get(pull.name)) is None:
                continue
            if not arrived:
                self._has_ended = True
                continue
            self._cover(pull.segment.end)
            assert isinstance(pull.slots, tuple)  # noqa: S101 - it was copied
            nbytes = pull.slots[0].pulled_nbytes
            if nbytes:
                self._pulled_tokens += pull.segment.positions
                self._pulled_nbytes += nbytes
            else:
                self._found_tokens += pull.segment.positions
        for pull in come:
            self._text.receiver.leave(pull.name)
            self._text.receiver.copies_gone(pull.name)
        self._more()

    def _cover(self, end: int) -> None:
        self._covered = max(self._covered, min(end, self._call.known_tokens - 1))

    def _all_arrived(self) -> bool:
        self._text.batch.end_arrival(self._call.job_id)
        return True

    def _end(self) -> None:
        for _, ticket in self._offered[self._next :]:
            self._text.receiver.release(ticket)
        self._next = len(self._offered)
        computed = max(0, self._call.known_tokens - 1 - self._covered)
        pull_s = self._agenda.now_s - self._began_s
        self._agenda.soon(
            self._then, KvReport(self._pulled_tokens, self._found_tokens, computed, self._pulled_nbytes, pull_s)
        )

    def stop(self) -> None:
        """The request ends here: what does not come any more is not waited for."""
        self._has_ended = True
        for pull in self._pulls:
            if pull.slots is None:
                pull.slots = Cancelled("the request has ended")
        if self._waits:
            self._waits = False
            self._agenda.soon(self._copy_in)
        if not self._is_running:
            for _, ticket in self._offered:
                self._text.receiver.release(ticket)
            self._offered = []
