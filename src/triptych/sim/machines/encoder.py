"""An encoder: items are prepared on cores, wait for a batch, are encoded, and lie in the arena until their leases are released."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from triptych.domain.embedding import LeaseId, TensorSpec, Ticket, embedding_tokens
from triptych.domain.encoding import EncodeResult
from triptych.domain.instance import StageLoad
from triptych.domain.item_plan import ItemPlan
from triptych.domain.media import digest_of
from triptych.domain.queue_position import QueuePosition, RelativeQueuePosition
from triptych.errors import DeadlineExceeded, InternalError, TriptychError
from triptych.machine.arena.arena import ArenaMachine
from triptych.machine.arena.slots import Slot
from triptych.machine.encoder.batch_queue import BatchQueue
from triptych.policy.costs import Costs
from triptych.policy.iteration import ImageBudget
from triptych.services.encoder.settings import EncoderSettings

from ..agenda import Agenda  # noqa: TID252 - of the simulator
from ..engines import Activity, EncoderTimes  # noqa: TID252


@dataclass(eq=False, slots=True)
class EncodeCall:
    """A call of the router for one item, and what becomes of it."""

    name: str
    """The encoder's address."""
    plan: ItemPlan
    timeout_s: float
    lease_s: float
    reader_lease: LeaseId
    router_lease: LeaseId
    position: RelativeQueuePosition
    answered: Callable[[EncodeResult | TriptychError], None]
    """Called at the encoder, when it answers."""
    arrived_s: float = 0.0
    is_over: bool = False
    """Whether it is answered, or cancelled."""
    number: int = 0

    @property
    def key(self) -> bytes:
        """The key that the embedding lies under."""
        content = self.plan.content[0]
        return content if self.plan.shard is None else digest_of(content)

    def end(self) -> None:
        """End the call: it is answered, or its caller has left."""
        self.is_over, self.answered = True, nobody


def nobody(_: EncodeResult | TriptychError) -> None:
    """Waits for the answer."""


@dataclass(eq=False, slots=True)
class _Flight:
    """An item that is being encoded, and the calls that wait for it."""

    key: bytes
    plan: ItemPlan
    calls: dict[int, EncodeCall] = field(default_factory=dict)
    slot: Slot | None = None
    encode_started_s: float = 0.0


class SimArena:
    """Memory that an instance holds for others, as ``transport.arena_store.ArenaStore``, without contents."""

    def __init__(self, machine: ArenaMachine, holder: str, agenda: Agenda, on_change: Callable[[], None]) -> None:
        self.machine = machine
        self.holder = holder
        """The name of the instance."""
        self.before_change: Callable[[], None] = lambda: None
        """Called before ``on_change``."""
        self._awaited: dict[LeaseId, Callable[[], None]] = {}
        self._agenda = agenda
        self.on_change = on_change

    def reserve(self, key: bytes, tensors: tuple[TensorSpec, ...], tokens: int) -> Slot:
        """Raises ArenaFull, InvalidMedia, InternalError."""
        try:
            return self.machine.reserve(key, tensors, tokens, self._agenda.now_s)
        finally:
            self._changed()

    def commit(self, slot: Slot) -> None:
        self.machine.commit(slot.key, slot.generation, 0)
        self._changed()

    def abandon(self, slot: Slot) -> None:
        self.machine.abandon(slot.key, slot.generation)
        self._changed()

    def grant(
        self,
        key: bytes,
        lease_id: LeaseId,
        lease_s: float,
        generation: int | None = None,
        *,
        router_lease: LeaseId | None = None,
    ) -> Ticket:
        """Raises LeaseLost, InvalidRequest, Overloaded."""
        try:
            return self.machine.grant(
                key, lease_id, lease_s, self._agenda.now_s, generation=generation, router_lease=router_lease
            )
        finally:
            self._changed()

    def sweep(self) -> None:
        """Expire leases."""
        self.machine.sweep(self._agenda.now_s)
        self._changed()

    def when_released(self, lease_ids: Sequence[LeaseId], then: Callable[[], None]) -> None:
        """Call ``then`` when one of these is released, and when others are, until ``forget``."""
        self._awaited.update(dict.fromkeys(lease_ids, then))

    def forget(self, lease_ids: Sequence[LeaseId]) -> None:
        for lease_id in lease_ids:
            del self._awaited[lease_id]

    def release(self, lease_ids: Sequence[LeaseId]) -> None:
        if self._awaited:
            for lease_id in lease_ids:
                if (then := self._awaited.get(lease_id)) is not None:
                    self._agenda.soon(then)
        self.machine.release(lease_ids)
        self._changed()

    def _changed(self) -> None:
        self.before_change()
        self.on_change()


class SimEncoder:
    """``services.encoder``'s batcher over the same machines."""

    def __init__(
        self,
        settings: EncoderSettings,
        costs: Costs,
        arena: SimArena,
        agenda: Agenda,
        activity: Activity,
        *,
        cores: int,
        bytes_per_pixel: float,
        on_change: Callable[[], None],
    ) -> None:
        self.queue = BatchQueue(settings.batches, max_preparing=cores)
        self.arena = arena
        self._agenda = agenda
        self._activity = activity
        self._times = EncoderTimes(costs, bytes_per_pixel)
        self._on_change = on_change
        self.on_ready: Callable[[], None] = self._wake
        """Called when another item can be encoded. Of an instance that has a batch of text as well, its loop calls ``encode_batch``."""
        self._flights: dict[bytes, _Flight] = {}
        self._numbers = count()
        self._is_busy = self._is_woken = False

    def load(self) -> StageLoad:
        return StageLoad(self.queue.pending_tokens, self.queue.pending_items, self.arena.machine.leased_bytes)

    # --- calls -------------------------------------------------------------------------------------------------------

    def arrive(self, call: EncodeCall) -> None:
        """A call has come."""
        if call.is_over:
            return
        plan, key = call.plan, call.key
        call.arrived_s = self._agenda.now_s
        call.number = next(self._numbers)
        if (slot := self.arena.machine.find(key)) is not None:
            self._answer(call, self._granted(key, call, slot.tokens, None))
            return
        try:
            started = self.queue.arrive(
                key,
                call.number,
                tokens=plan.tokens,
                nbytes=plan.info.nbytes + 4 * (plan.info.pixels + plan.info.samples),
                deadline_s=call.arrived_s + call.timeout_s,
                now_s=call.arrived_s,
                modality=plan.info.modality,
                position=call.position,
            )
        except TriptychError as error:
            self._answer(call, error)
            return
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(key, plan)
        flight.calls[call.number] = call
        self._start_preparing(started)
        self._on_change()

    def cancel(self, call: EncodeCall) -> None:
        """The caller has left, after the call has come."""
        flight = self._flights.get(call.key)
        if flight is None or flight.calls.pop(call.number, None) is None:
            return
        if self.queue.leave(flight.key, call.number):
            self._end(flight)
        self._on_change()

    def _answer(self, call: EncodeCall, answer: EncodeResult | TriptychError) -> None:
        if not call.is_over:
            call.answered(answer)
        elif isinstance(answer, EncodeResult):
            self.arena.release((answer.ticket.lease_id, answer.router_lease))

    def _granted(
        self, key: bytes, call: EncodeCall, tokens: int, encode_started_s: float | None
    ) -> EncodeResult | TriptychError:
        """``encode_started_s``: None where it was here already."""
        if tokens > call.plan.tokens:
            return InternalError("a simulated item has as many tokens as its plan says")
        try:
            ticket = self.arena.grant(key, call.reader_lease, call.lease_s, router_lease=call.router_lease)
        except TriptychError as error:
            return error
        if encode_started_s is None:
            return EncodeResult(ticket, call.router_lease, cached=True, queue_s=0.0, encode_s=0.0)
        return EncodeResult(
            ticket,
            call.router_lease,
            cached=False,
            queue_s=max(0.0, encode_started_s - call.arrived_s),
            encode_s=self._agenda.now_s - encode_started_s,
        )

    # --- the queue ---------------------------------------------------------------------------------------------------

    def _start_preparing(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._agenda.soon(self._prepare, self._flights[key])

    def _prepare(self, flight: _Flight) -> None:
        if not flight.calls:
            self._end(flight)
            return
        size, now_s = flight.plan.info.samples_or_pixels, self._agenda.now_s
        took_s = self._times.prepare_s(size)
        self._activity.did("prepare", now_s, now_s + took_s, size)
        self._agenda.after(took_s, self._prepared, flight)

    def _prepared(self, flight: _Flight) -> None:
        if not flight.calls:
            self._end(flight)
            return
        plan = flight.plan
        try:
            flight.slot = self.arena.reserve(flight.key, plan.tensors, plan.tokens)
            nbytes = sum([spec.nbytes for spec in plan.tensors])
            started = self.queue.prepared(flight.key, embedding_tokens(plan.tensors), nbytes, self._agenda.now_s)
        except TriptychError as error:
            self._fail(flight, error)
            return
        self._start_preparing(started)
        self.on_ready()
        self._on_change()

    def _fail(self, flight: _Flight, error: TriptychError) -> None:
        for call in flight.calls.values():
            self._agenda.soon(self._answer, call, error)
        self._end(flight)

    def _end(self, flight: _Flight) -> None:
        if flight.slot is not None:
            self.arena.abandon(flight.slot)
            flight.slot = None
        del self._flights[flight.key]
        self._start_preparing(self.queue.done(flight.key, self._agenda.now_s))
        self._on_change()

    # --- batches -----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not (self._is_busy or self._is_woken):
            self._is_woken = True
            self._agenda.soon(self._run)

    def _run(self) -> None:
        self._is_woken = False
        self._is_busy = self.encode_batch(self._run)

    def encode_batch(self, then: Callable[[], None], budget: ImageBudget | None = None) -> bool:
        """Encode one batch within ``budget``, and call ``then`` when it is done. False if there is none."""
        now_s = self._agenda.now_s
        for key in self.queue.expired(now_s):
            self._fail(self._flights[key], DeadlineExceeded("the time that its callers gave is over"))
        batch = [self._flights[key] for key in self.queue.take(now_s, budget)]
        if not batch:
            return False
        took_s = self._times.encode_s([embedding_tokens(flight.plan.tensors) for flight in batch])
        self._activity.did("encode", now_s, now_s + took_s, len(batch))
        self._agenda.after(took_s, self._encoded, batch, now_s, then)
        return True

    def _encoded(self, batch: Sequence[_Flight], started_s: float, then: Callable[[], None]) -> None:
        for flight in batch:
            flight.encode_started_s = started_s
            self._agenda.soon(self._publish, flight)
        then()

    def _publish(self, flight: _Flight) -> None:
        slot, flight.slot = flight.slot, None
        assert slot is not None  # noqa: S101 - it is reserved before it waits for a batch
        self.arena.commit(slot)
        for call in flight.calls.values():
            self._agenda.soon(self._answer, call, self._granted(flight.key, call, slot.tokens, flight.encode_started_s))
        self._end(flight)

    @property
    def waiting_since_s(self) -> float | None:
        """Since when the first prepared item waits; None if there is none."""
        return self.queue.waiting_since_s

    @property
    def first_queue_position(self) -> QueuePosition | None:
        """Of the prepared item that is encoded next; None if there is none."""
        return self.queue.first_queue_position(self._agenda.now_s)
