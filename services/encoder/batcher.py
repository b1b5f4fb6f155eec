"""From bytes to embeddings: each item is prepared in a pool, waits, and goes through the tower in a batch.

Callers who want the same embedding at the same time share a *flight*: one is encoded, each gets leases of its own. A
flight belongs to the instance, not to the caller who came first, so it goes on when that one leaves. When all have left
it ends: a decode that runs is stopped, and an item that is in a pass when they leave is dropped after it.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Generic

from triptych.domain.embedding import Tensor
from triptych.domain.encoding import EncodeRequest, EncodeResult
from triptych.errors import DeadlineExceeded, InternalError, InvalidMedia, InvalidRequest, Overloaded, TriptychError
from triptych.machine.encoder import batch_queue
from triptych.machine.encoder.arena_events import Slot
from triptych.policy.iteration import ImageBudget
from triptych.ports import Clock, EncoderEngine, Offload, PreparedT
from triptych.runtime.offload import Stop
from triptych.runtime.tasks import TaskScope

from .arena_store import ArenaStore

logger = logging.getLogger(__name__)


class _Waiter:
    """One call that waits for a flight."""

    def __init__(self, request: EncodeRequest, arrived_s: float) -> None:
        self.request = request
        self.arrived_s = arrived_s
        # Errors are results here: an exception that a cancelled call never fetches would be reported as lost.
        self.outcome: asyncio.Future[EncodeResult | TriptychError] = asyncio.get_running_loop().create_future()

    def tell(self, outcome: EncodeResult | TriptychError) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class _Flight(Generic[PreparedT]):
    """An item on its way to being an embedding, and who waits for it."""

    def __init__(self, key: bytes, request: EncodeRequest) -> None:
        self.key = key
        self.info = request.info
        self.shard = request.shard
        self.media = request.media
        self.waiters: dict[int, _Waiter] = {}
        self.prepared: PreparedT | None = None
        self.slot: Slot | None = None
        self.encode_started_s = 0.0
        self.unwanted = Stop()
        """Given when the last of its waiters leaves while it is prepared."""


class Batcher(Generic[PreparedT]):
    """Owns the tower. Either ``run`` is started once, or somebody else gives it its turns (``turn``)."""

    def __init__(
        self,
        engine: EncoderEngine[PreparedT],
        store: ArenaStore,
        limits: batch_queue.BatchLimits,
        *,
        scope: TaskScope,
        prepare: Offload,
        max_preparing: int,
        compute: Offload,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        """``prepare`` is a pool for ``max_preparing`` items at a time; ``compute`` runs one call at a time. ``on_change``: the load may have changed."""
        self._engine = engine
        self._store = store
        self._queue = batch_queue.BatchQueue(limits, max_preparing=max_preparing)
        self._scope = scope
        self._prepare_pool = prepare
        self._compute = compute
        self._clock = clock
        self._on_change = on_change
        self._flights: dict[bytes, _Flight[PreparedT]] = {}
        self._waiter_ids = itertools.count()
        self._on_ready: Callable[[], None] = lambda: None

    @property
    def queue(self) -> batch_queue.BatchQueue:
        """What is remembered, to be read only."""
        return self._queue

    async def encode(self, key: bytes, request: EncodeRequest) -> EncodeResult:
        """Raises Overloaded or ArenaFull rather than wait for memory, InvalidMedia, InvalidRequest, EngineFailure."""
        waiter_id, waiter = next(self._waiter_ids), _Waiter(request, self._clock())
        self._join(key, waiter_id, waiter)
        try:
            outcome = await waiter.outcome
        except asyncio.CancelledError:
            self._take_back(waiter)
            raise
        finally:
            self._leave(key, waiter_id)
        if isinstance(outcome, TriptychError):
            raise outcome
        return outcome

    async def run(self) -> None:
        """Feed the tower until cancelled, where nobody else says when it has its turns."""
        ready = asyncio.Event()
        self.when_ready(ready.set)
        while True:
            ready.clear()
            if not await self.turn():
                await ready.wait()

    @property
    def waiting_since_s(self) -> float | None:
        """When the first item that waits for the tower began to, on the clock; None where none waits."""
        return self._queue.waiting_since_s

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` from now on whenever there is one item more that waits for the tower."""
        self._on_ready = wake

    async def turn(self, budget: ImageBudget | None = None) -> bool:
        """Encode one batch of what waits, within ``budget``; whether there was anything. One turn at a time."""
        batch = self._handle(batch_queue.Take(budget))
        if batch:
            await self._encode(batch)
        return bool(batch)

    # --- callers -----------------------------------------------------------------------------------------------------

    def _join(self, key: bytes, waiter_id: int, waiter: _Waiter) -> None:
        request = waiter.request
        arrive = batch_queue.Arrive(
            key=key,
            waiter=waiter_id,
            tokens=request.tokens,
            nbytes=len(request.media) + self._engine.decoded_nbytes(request.info, request.shard),
            deadline_s=waiter.arrived_s + request.timeout_s,
            priority=request.priority,
        )
        if key not in self._flights:
            self._flights[key] = _Flight(key, request)
        self._flights[key].waiters[waiter_id] = waiter
        self._handle(arrive)
        self._on_change()

    def _handle(self, event: batch_queue.Event) -> list[_Flight[PreparedT]]:
        """Do what the queue says; what it says is to be encoded now is returned. Raises what it refuses a caller with."""
        batch: list[_Flight[PreparedT]] = []
        for effect in self._queue.handle(event, self._clock()):
            match effect:
                case batch_queue.StartPreparing(key):
                    self._scope.spawn(self._prepare(self._flights[key]), name="prepare")
                case batch_queue.Encode(keys):
                    batch = [self._flights[key] for key in keys]
                case batch_queue.Drop():
                    self._drop(effect)
                case batch_queue.Refuse(key, fits, reason):
                    del self._flights[key]
                    raise Overloaded(reason) if fits else InvalidMedia(reason)
        return batch

    def _take_back(self, waiter: _Waiter) -> None:
        """Leases that were granted in the very moment in which their caller went away."""
        if waiter.outcome.done() and not waiter.outcome.cancelled():
            result = waiter.outcome.result()
            if isinstance(result, EncodeResult):
                self._store.release((result.ticket.lease_id, result.router_lease))

    def _leave(self, key: bytes, waiter_id: int) -> None:
        flight = self._flights.get(key)
        if flight is None or flight.waiters.pop(waiter_id, None) is None:
            return
        if not flight.waiters:
            flight.unwanted.stop()
        self._handle(batch_queue.Leave(key, waiter_id))
        self._on_change()

    # --- preparing ---------------------------------------------------------------------------------------------------

    async def _prepare(self, flight: _Flight[PreparedT]) -> None:
        prepared: PreparedT | None = None
        while prepared is None and flight.waiters:
            unwanted = flight.unwanted = Stop()
            try:
                prepared = await self._prepare_pool.run(self._prepare_if_wanted, flight, unwanted)
            except Exception as error:  # noqa: BLE001 - told to those whose item it is
                if not unwanted.stopped:  # else it was ended for want of callers; there may be new ones
                    self._fail(flight, error)
                    return
        if prepared is not None:
            self._refuse_fewer_than(flight, prepared.tokens)
        if prepared is None or not flight.waiters:
            self._end(flight)
            return
        try:
            # Before compute is spent: where there is no room, nobody waits for it.
            flight.slot = self._store.reserve(flight.key, prepared.outputs, prepared.tokens)
        except TriptychError as error:
            self._fail(flight, error)
            return
        flight.prepared, flight.media = prepared, b""
        self._handle(batch_queue.Prepared(flight.key, prepared.tokens, prepared.nbytes))
        self._on_ready()
        self._on_change()

    def _prepare_if_wanted(self, flight: _Flight[PreparedT], unwanted: Stop) -> PreparedT | None:
        """In a thread. An item that everybody left while it waited for the thread is not touched."""
        if unwanted.stopped:
            return None
        return self._engine.prepare(flight.media, flight.info, flight.shard, unwanted)

    def _refuse_fewer_than(self, flight: _Flight[PreparedT], tokens: int) -> None:
        """A caller who counted fewer tokens than there are has a prompt that the embedding does not fit into."""
        for waiter_id, waiter in list(flight.waiters.items()):
            if tokens > waiter.request.tokens:
                waiter.tell(too_many_tokens(tokens, waiter.request))
                self._leave(flight.key, waiter_id)

    # --- encoding ----------------------------------------------------------------------------------------------------

    async def _encode(self, batch: Sequence[_Flight[PreparedT]]) -> None:
        """One pass; when it fails, one for each item that is still wanted, so that none fails for its neighbours."""
        started_s = self._clock()
        prepared = [flight.prepared for flight in batch if flight.prepared is not None]
        try:
            embeddings = await self._compute.run(self._engine.encode, prepared)
        except Exception as error:  # noqa: BLE001 - told to those whose items they are
            if len(batch) == 1:
                self._fail(batch[0], error)
                return
            logger.warning("a batch of %d items failed: they are encoded one by one (%s)", len(batch), error)
            for flight in batch:
                if flight.waiters:
                    await self._encode([flight])
                else:
                    self._end(flight)
            return
        if len(embeddings) != len(batch):
            for flight in batch:
                self._fail(flight, RuntimeError(f"{len(batch)} items gave {len(embeddings)} embeddings"))
            return
        for flight, tensors in zip(batch, embeddings, strict=True):
            flight.encode_started_s = started_s
            # The tower goes on while this is copied.
            self._scope.spawn(self._publish(flight, tensors), name="publish")

    async def _publish(self, flight: _Flight[PreparedT], tensors: Sequence[Tensor]) -> None:
        slot = flight.slot
        if slot is None:
            raise RuntimeError("an item was encoded without reserved memory")
        try:
            await self._store.fill(slot, tensors)
        except Exception as error:  # noqa: BLE001 - told to those whose item it is
            self._fail(flight, error)
            return
        flight.slot = None
        now_s = self._clock()
        for waiter in flight.waiters.values():
            waiter.tell(self._result(flight, waiter, now_s))
        self._end(flight)

    def _result(self, flight: _Flight[PreparedT], waiter: _Waiter, now_s: float) -> EncodeResult | TriptychError:
        if waiter.outcome.done():
            return DeadlineExceeded("the caller has left")
        tokens = self._store.tokens(flight.key)
        if tokens is not None and tokens > waiter.request.tokens:
            return too_many_tokens(tokens, waiter.request)
        try:
            ticket = self._store.grant_pair(flight.key, waiter.request)
        except TriptychError as error:
            return error
        return EncodeResult(
            ticket=ticket,
            router_lease=waiter.request.router_lease,
            cached=False,
            queue_s=max(0.0, flight.encode_started_s - waiter.arrived_s),
            encode_s=now_s - flight.encode_started_s,
        )

    # --- endings -----------------------------------------------------------------------------------------------------

    def _drop(self, drop: batch_queue.Drop) -> None:
        error: TriptychError = DeadlineExceeded(drop.reason) if drop.expired else Overloaded(drop.reason)
        self._fail(self._flights[drop.key], error)

    def _fail(self, flight: _Flight[PreparedT], error: Exception) -> None:
        """Tell everyone who waits, and forget the flight: the same item may come again and succeed."""
        if not isinstance(error, TriptychError):
            logger.error("an item of %d bytes failed", flight.info.nbytes, exc_info=error)
            error = InternalError("the item could not be encoded")
        for waiter in flight.waiters.values():
            waiter.tell(error)
        self._end(flight)

    def _end(self, flight: _Flight[PreparedT]) -> None:
        if flight.slot is not None:
            self._store.abandon(flight.slot)
            flight.slot = None
        del self._flights[flight.key]
        self._handle(batch_queue.Done(flight.key))
        self._on_change()


def too_many_tokens(tokens: int, request: EncodeRequest) -> InvalidRequest:
    """The embedding does not fit into the prompt that was counted for it."""
    return InvalidRequest(f"item {request.item} takes {tokens} tokens, {request.tokens} were counted for it")
