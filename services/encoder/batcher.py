"""Prepares items in a thread pool, queues them, and encodes them in batches.

Callers who want the same embedding share a *flight*: the item is encoded once, and each caller gets its own leases. A
flight outlives the caller that started it. When all callers have left it ends: a running decode is stopped, and an item
in a batch is dropped after it.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Generic

from triptych.domain.embedding import Tensor, embedding_tokens
from triptych.domain.encoding import EncodeRequest, EncodeResult
from triptych.domain.queue_position import QueuePosition
from triptych.errors import (
    DeadlineExceeded,
    InstanceLost,
    InternalError,
    InvalidRequest,
    TriptychError,
    Unavailable,
)
from triptych.machine.arena.published import PublishedContents
from triptych.machine.arena.slots import Slot
from triptych.machine.encoder.batch_queue import BatchLimits, BatchQueue
from triptych.policy.iteration import ImageBudget
from triptych.ports import Clock, EncoderEngine, Offload, PreparedT
from triptych.runtime.offload import Stop
from triptych.runtime.tasks import TaskScope
from triptych.transport.arena_store import ArenaStore

logger = logging.getLogger(__name__)


class _Waiter:
    """One call that waits for a flight."""

    def __init__(self, request: EncodeRequest, arrived_s: float) -> None:
        self.request = request
        self.arrived_s = arrived_s
        # Errors are results: an exception that a cancelled call never retrieves would be logged as lost.
        self.outcome: asyncio.Future[EncodeResult | TriptychError] = asyncio.get_running_loop().create_future()

    def resolve(self, outcome: EncodeResult | TriptychError) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class _Flight(Generic[PreparedT]):
    """One item being encoded, and its waiters."""

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
        """Signalled when the last waiter leaves during preparation."""


class Batcher(Generic[PreparedT]):
    """Owns the encoder engine. Either start ``run`` once, or call ``encode_batch`` from another loop."""

    def __init__(
        self,
        engine: EncoderEngine[PreparedT],
        store: ArenaStore,
        limits: BatchLimits,
        *,
        scope: TaskScope,
        prepare: Offload,
        max_preparing: int,
        compute: Offload,
        clock: Clock,
        on_change: Callable[[], None],
        on_batch: Callable[[int], None],
        published: PublishedContents,
        on_encoded: Callable[[Slot, Sequence[Tensor]], None] = lambda *_: None,
    ) -> None:
        """``prepare`` is a pool for ``max_preparing`` items; ``compute`` runs one call at a time.

        ``on_change`` signals load; ``on_batch`` gets the number of items of each batch that was encoded; ``published`` is told what is being encoded; ``on_encoded`` gets each embedding once its callers are answered.
        """
        self._engine = engine
        self._store = store
        self.queue = BatchQueue(limits, max_preparing=max_preparing)
        """The queue's state. Read-only for others."""
        self._scope = scope
        self._prepare_pool = prepare
        self._compute = compute
        self._clock = clock
        self._on_change = on_change
        self._on_batch = on_batch
        self._on_encoded = on_encoded
        self._published = published
        self._flights: dict[bytes, _Flight[PreparedT]] = {}
        self._waiter_ids = itertools.count()
        self._on_ready: Callable[[], None] = lambda: None
        self._is_lost = False

    async def encode(self, key: bytes, request: EncodeRequest) -> EncodeResult:
        """Raises Overloaded or ArenaFull instead of waiting for memory; InvalidMedia, InvalidRequest, EngineFailure, InstanceLost."""
        if self._is_lost:
            raise _ending()
        waiter_id, waiter = next(self._waiter_ids), _Waiter(request, self._clock())
        self._join(key, waiter_id, waiter)
        try:
            outcome = await waiter.outcome
        except asyncio.CancelledError:
            self._release_granted(waiter)
            raise
        finally:
            self._leave(key, waiter_id)
        if isinstance(outcome, TriptychError):
            raise outcome
        return outcome

    def encodes(self, key: bytes) -> bool:
        """Whether an item with this key is being prepared, waits or is being encoded."""
        return key in self._flights

    def names_lora(self, digest: str) -> bool:
        """Whether such an item names the LoRA adapter of this digest."""
        return any(flight.info.lora == digest for flight in self._flights.values())

    def refuse_unbegun(self, error: TriptychError) -> None:
        """End the calls whose items are in no batch with this error."""
        for key in self.queue.unbegun:
            for waiter in self._flights[key].waiters.values():
                waiter.resolve(error)

    def limit_items(self, most: int) -> None:
        """From the next batch on, one has at most so many items."""
        self.queue.limit_items(most)

    async def run(self) -> None:
        """Encode batches until cancelled, if no other loop calls ``encode_batch``. Raises InstanceLost as ``encode_batch``."""
        ready = asyncio.Event()
        self.when_ready(ready.set)
        while True:
            ready.clear()
            if not await self.encode_batch():
                await ready.wait()

    @property
    def waiting_since_s(self) -> float | None:
        """Since when the first prepared item waits, on the clock; None if there is none."""
        return self.queue.waiting_since_s

    @property
    def first_queue_position(self) -> QueuePosition | None:
        """Of the prepared item that is encoded next; None if there is none."""
        return self.queue.first_queue_position(self._clock())

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever another item is ready to be encoded."""
        self._on_ready = wake

    async def encode_batch(self, budget: ImageBudget | None = None) -> bool:
        """Encode one batch within ``budget``. Returns whether there was one. Not reentrant.

        Raises InstanceLost when the engine cannot go on. The batch's items have failed with it, the others with Unavailable.
        """
        if self.queue.waiting_since_s is None:
            return False
        now_s = self._clock()
        for key in self.queue.expired(now_s):
            self._fail(self._flights[key], DeadlineExceeded("the time that its callers gave is over"))
        batch = [self._flights[key] for key in self.queue.take(now_s, budget)]
        if batch:
            try:
                await self._encode(batch)
            except InstanceLost:
                self._is_lost, ending = True, _ending()
                for flight in self._flights.values():  # those have no part in it
                    for waiter in flight.waiters.values():
                        waiter.resolve(ending)
                raise
        return bool(batch)

    # --- callers -----------------------------------------------------------------------------------------------------

    def _join(self, key: bytes, waiter_id: int, waiter: _Waiter) -> None:
        request = waiter.request
        flight = self._flights.get(key)
        is_new = flight is None
        started = self.queue.arrive(
            key,
            waiter_id,
            tokens=request.tokens,
            nbytes=len(request.media) + self._engine.decoded_nbytes(request.info, request.shard),
            deadline_s=waiter.arrived_s + request.timeout_s,
            now_s=waiter.arrived_s,
            priority=request.priority,
            modality=request.info.modality,
            position=request.position,
        )
        if flight is None:
            flight = self._flights[key] = _Flight(key, request)
        flight.waiters[waiter_id] = waiter
        self._start_preparing(started)
        if is_new:
            self._published.encoding(key, request.content)
        self._on_change()

    def _start_preparing(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._scope.spawn(self._prepare(self._flights[key]), name="prepare")

    def _release_granted(self, waiter: _Waiter) -> None:
        """Release leases that were granted just as the caller was cancelled."""
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
        if self.queue.leave(key, waiter_id):
            self._end(flight)
        self._on_change()

    # --- preparing ---------------------------------------------------------------------------------------------------

    async def _prepare(self, flight: _Flight[PreparedT]) -> None:
        prepared: PreparedT | None = None
        while prepared is None and flight.waiters:
            if flight.unwanted.stopped:
                flight.unwanted = Stop()
            unwanted = flight.unwanted
            try:
                prepared = await self._prepare_pool.run(self._prepare_if_wanted, flight, unwanted)
            except Exception as error:  # noqa: BLE001 - reported to the waiters
                if not unwanted.stopped:  # else it was stopped for lack of waiters; there may be new ones
                    self._fail(flight, error)
                    return
        if prepared is not None:
            self._refuse_fewer_than(flight, prepared.tokens)
        if prepared is None or not flight.waiters:
            self._end(flight)
            return
        try:
            # Reserve before compute: if there is no room, the item is refused, not queued.
            flight.slot = self._store.reserve(flight.key, prepared.outputs, prepared.tokens)
            tokens = embedding_tokens(prepared.outputs)
            started = self.queue.prepared(flight.key, tokens, prepared.nbytes, self._clock())
        except TriptychError as error:
            self._fail(flight, error)
            return
        flight.prepared, flight.media = prepared, b""
        self._start_preparing(started)
        self._on_ready()  # of the load, ``reserve`` has told

    def _prepare_if_wanted(self, flight: _Flight[PreparedT], unwanted: Stop) -> PreparedT | None:
        """Runs in a thread. Skips an item that everybody left while it was queued."""
        if unwanted.stopped:
            return None
        return self._engine.prepare(flight.media, flight.info, flight.shard, unwanted)

    def _refuse_fewer_than(self, flight: _Flight[PreparedT], tokens: int) -> None:
        """Refuse callers whose prompt has fewer placeholders than the item has tokens."""
        for waiter_id, waiter in list(flight.waiters.items()):
            if tokens > waiter.request.tokens:
                waiter.resolve(too_many_tokens(tokens, waiter.request))
                self._leave(flight.key, waiter_id)

    # --- encoding ----------------------------------------------------------------------------------------------------

    async def _encode(self, batch: Sequence[_Flight[PreparedT]]) -> None:
        """Encode a batch; if that fails, encode its items one by one, so that none fails because of another.

        Raises InstanceLost, when its items have failed with it.
        """
        started_s = self._clock()
        prepared = [flight.prepared for flight in batch if flight.prepared is not None]
        try:
            embeddings = await self._compute.run(self._engine.encode, prepared)
        except InstanceLost as error:
            for flight in batch:
                self._fail(flight, error)
            raise
        except Exception as error:  # noqa: BLE001 - reported to the waiters
            if len(batch) == 1:
                self._fail(batch[0], error)
                return
            logger.warning("a batch of %d items failed: they are encoded one by one (%s)", len(batch), error)
            await self._one_by_one(batch)
            return
        self._on_batch(len(batch))
        if len(embeddings) != len(batch):
            for flight in batch:
                self._fail(flight, RuntimeError(f"{len(batch)} items gave {len(embeddings)} embeddings"))
            return
        for flight, tensors in zip(batch, embeddings, strict=True):
            flight.encode_started_s = started_s
            # The next batch is encoded while this is copied.
            self._scope.spawn(self._publish(flight, tensors), name="publish")

    async def _one_by_one(self, batch: Sequence[_Flight[PreparedT]]) -> None:
        lost: InstanceLost | None = None
        for flight in batch:
            if lost is not None:
                self._fail(flight, _ending())
            elif flight.waiters:
                try:
                    await self._encode([flight])
                except InstanceLost as error:
                    lost = error
            else:
                self._end(flight)
        if lost is not None:
            raise lost

    async def _publish(self, flight: _Flight[PreparedT], tensors: Sequence[Tensor]) -> None:
        slot = flight.slot
        if slot is None:
            raise RuntimeError("an item was encoded without reserved memory")
        try:
            await self._store.fill(slot, tensors)
        except Exception as error:  # noqa: BLE001 - reported to the waiters
            self._fail(flight, error)
            return
        flight.slot = None
        now_s = self._clock()
        for waiter in flight.waiters.values():
            waiter.resolve(self._result(flight, waiter, slot.tokens, now_s))
        self._end(flight, held=True)
        self._on_encoded(slot, tensors)

    def _result(
        self, flight: _Flight[PreparedT], waiter: _Waiter, tokens: int, now_s: float
    ) -> EncodeResult | TriptychError:
        if waiter.outcome.done():
            return DeadlineExceeded("the caller has left")
        request = waiter.request
        if tokens > request.tokens:
            return too_many_tokens(tokens, request)
        try:
            ticket = self._store.grant(
                flight.key, request.reader_lease, request.lease_s, router_lease=request.router_lease
            )
        except TriptychError as error:
            return error
        return EncodeResult(
            ticket=ticket,
            router_lease=request.router_lease,
            cached=False,
            queue_s=max(0.0, flight.encode_started_s - waiter.arrived_s),
            encode_s=now_s - flight.encode_started_s,
        )

    # --- endings -----------------------------------------------------------------------------------------------------

    def _fail(self, flight: _Flight[PreparedT], error: Exception) -> None:
        """Report the error to all waiters and forget the flight: a retry of the item may succeed."""
        if not isinstance(error, TriptychError):
            logger.error("an item of %d bytes failed", flight.info.nbytes, exc_info=error)
            error = InternalError("the item could not be encoded")
        for waiter in flight.waiters.values():
            waiter.resolve(error)
        self._end(flight)

    def _end(self, flight: _Flight[PreparedT], *, held: bool = False) -> None:
        """Forget the flight. ``held``: its embedding is in the arena."""
        if flight.slot is not None:
            self._store.abandon(flight.slot)
            flight.slot = None
        del self._flights[flight.key]
        held = held or self._store.tokens(flight.key) is not None
        self._published.encoding_ended(flight.key, held=held)
        self._start_preparing(self.queue.done(flight.key, self._clock()))
        self._on_change()


def _ending() -> Unavailable:
    """Why what was not being encoded fails."""
    return Unavailable("the encoder is shutting down")


def too_many_tokens(tokens: int, request: EncodeRequest) -> InvalidRequest:
    """The embedding does not fit the prompt's placeholders."""
    return InvalidRequest(f"item {request.item} has {tokens} tokens, the request says {request.tokens}")
