"""Pulls tensors into a reader's arena, as ``machine.text.tensor_cache`` decides.

Pulls run beside the engine, never inside a step, from many holders at once.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from triptych.domain.embedding import Tensor, Ticket
from triptych.domain.engine import EmbeddingInput
from triptych.domain.generation import Placement, PullReport
from triptych.domain.queue_position import QueuePosition
from triptych.errors import TransferFailed, TriptychError
from triptych.machine.text.pull_queue import PullLimits
from triptych.machine.text.tensor_cache import CacheLimits, TensorCache
from triptych.machine.text.tensor_effects import (
    Acquired,
    CachedSlot,
    Effect,
    StartPull,
    StopPull,
    TensorEvicted,
    TensorsRefused,
    WaitsForRoom,
    WakeAt,
)
from triptych.ports import Arena, Clock, Offload
from triptych.runtime.tasks import TaskScope
from triptych.runtime.world import World
from triptych.transport.data_plane import DataPlane, OwnHolder
from triptych.transport.merging import merge
from triptych.transport.options import TransferOptions
from triptych.transport.peer_pool import PeerPool
from triptych.transport.releases import Releases
from triptych.transport.slot import tensors, verify
from triptych.transport.start import nobody_reads
from triptych.transport.transport_set import TransportSet

logger = logging.getLogger(__name__)

_MAX_HOLDERS = 1024
"""Limit on concurrent connections."""


class ReaderSettings(Protocol):
    """Settings of a process that pulls, with the meanings of a text instance's."""

    @property
    def transfers(self) -> TransferOptions: ...
    @property
    def prefer_transport(self) -> str: ...
    @property
    def tensor_cache(self) -> CacheLimits: ...
    @property
    def pulls(self) -> PullLimits: ...
    @property
    def connect_timeout_s(self) -> float: ...
    @property
    def release_timeout_s(self) -> float: ...


class PullRecord:
    """Receives events about pulls. This one does nothing with them."""

    def pulled(self, backend: str, nbytes: int, duration_s: float) -> None: ...

    def pull_failed(self, backend: str, error: TriptychError) -> None:
        """``backend`` is empty if there was no connection."""


NO_PULL_RECORD = PullRecord()


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request's embeddings, readable until the request leaves the receiver."""

    inputs: tuple[EmbeddingInput, ...]
    """Inputs of the items, in the order of placements; shards are merged."""
    reports: tuple[PullReport, ...]


@dataclass(slots=True)
class TensorReceiver:
    """Turns the machine's effects into pulls, and their results into events."""

    arena: Arena
    transports: TransportSet
    peers: PeerPool
    releases: Releases
    limits: CacheLimits
    pulls: PullLimits
    max_pull_s: float
    scope: TaskScope
    offload: Offload
    clock: Clock
    record: PullRecord = NO_PULL_RECORD
    cache: TensorCache = field(init=False)
    """The cache's state. Read-only."""
    _wanted: dict[str, asyncio.Future[tuple[CachedSlot, ...]]] = field(init=False, default_factory=dict)
    _pulling: dict[int, asyncio.Timeout | None] = field(init=False, default_factory=dict)
    """Running pulls, each with what ends it in time; None until its task has begun."""
    _stopped: set[int] = field(init=False, default_factory=set)
    """Running pulls that nobody needs."""

    def __post_init__(self) -> None:
        self.cache = TensorCache(self.limits, self.pulls, start=self.arena.base, end=self.arena.nbytes)

    async def acquire(self, request_id: str, placements: Sequence[Placement], queue_position: QueuePosition) -> Arrived:
        """Wait until all embeddings are present.

        They stay until ``leave``, which must follow, and then ``copies_gone``.

        From here on the receiver releases the tickets' leases. Raises TransferFailed, which names the items (of the
        placements), InvalidRequest for what can never fit, Overloaded.
        """
        try:
            tickets = tuple([placement.ticket for placement in placements])
            slots = await self._acquired(request_id, tickets, queue_position, transient=False)
        except TransferFailed as error:
            raise TransferFailed(
                error.message, items=tuple(sorted(placements[at].item for at in error.items))
            ) from None
        inputs: list[EmbeddingInput] = []
        reports: list[PullReport] = []
        for placement, slot in zip(placements, slots, strict=True):
            of_slot = tensors(self.arena, slot.offset, slot.ticket)
            inputs.append(EmbeddingInput(placement.start, placement.tokens, of_slot, slot.ticket.key))
            reports.append(
                PullReport(placement.item, slot.backend, slot.pulled_nbytes, slot.duration_s, cached=not slot.backend)
            )
        merged: tuple[EmbeddingInput, ...] = tuple(inputs)
        continues = [placement.continues for placement in placements]
        if any(continues):
            merged = await self.offload.run(merge, merged, continues)
        return Arrived(merged, tuple(reports))

    async def acquire_transient(
        self, request_id: str, ticket: Ticket, queue_position: QueuePosition
    ) -> tuple[Mapping[str, Tensor], int]:
        """The tensors of one ticket, which are read at once, and the bytes pulled for them: 0 if they were here. They stay until
        ``leave``, which must follow.

        From here on the receiver releases the ticket's lease. Raises as ``acquire``.
        """
        [slot] = await self._acquired(request_id, (ticket,), queue_position, transient=True)
        return tensors(self.arena, slot.offset, slot.ticket), slot.pulled_nbytes

    async def _acquired(
        self, request_id: str, tickets: tuple[Ticket, ...], queue_position: QueuePosition, *, transient: bool
    ) -> tuple[CachedSlot, ...]:
        wanted: asyncio.Future[tuple[CachedSlot, ...]] = asyncio.get_running_loop().create_future()
        self._wanted[request_id] = wanted
        self._apply(self.cache.acquire(request_id, tickets, queue_position, self.clock(), transient=transient))
        return await wanted

    def leave(self, request_id: str) -> None:
        """The request no longer reads its embeddings. Unknown ids are ignored."""
        self._wanted.pop(request_id, None)
        if effects := self.cache.leave(request_id, self.clock()):
            self._apply(effects)

    def copies_gone(self, request_id: str) -> None:
        """Note that all copies of the request's embeddings are freed. Unknown ids are ignored."""
        if effects := self.cache.copies_gone(request_id, self.clock()):
            self._apply(effects)

    async def tick(self) -> None:
        """End quarantines that are over, and close idle connections."""
        await self.peers.close_idle()
        self._tick()

    def _tick(self) -> None:
        self._apply(self.cache.tick(self.transports.quarantined(), self.clock()))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartPull():
                    self._pulling[effect.pull_id] = None
                    self.scope.spawn(self._pull(effect), name="pull")
                case StopPull(pull_id):
                    self._stop(pull_id)
                case Acquired(request_id, slots):
                    if (wanted := self._waits(request_id)) is not None:
                        wanted.set_result(slots)
                case TensorsRefused(request_id, error):
                    if (wanted := self._waits(request_id)) is not None:
                        wanted.set_exception(error)
                case Ticket():
                    self.releases.add(effect)
                case WakeAt(at_s):
                    asyncio.get_running_loop().call_later(max(0.0, at_s - self.clock()), self._tick)
                case TensorEvicted(_, reason):
                    logger.debug("evicted a tensor set: %s", reason)
                case WaitsForRoom(request_id, reason):
                    logger.debug("request %s is waiting: %s", request_id, reason)

    def _waits(self, request_id: str) -> asyncio.Future[tuple[CachedSlot, ...]] | None:
        wanted = self._wanted.get(request_id)
        return None if wanted is None or wanted.done() else wanted

    def _stop(self, pull_id: int) -> None:
        if pull_id not in self._stopped and pull_id in self._pulling:
            self._stopped.add(pull_id)
            if (limit := self._pulling[pull_id]) is not None:
                limit.reschedule(asyncio.get_running_loop().time())

    async def _pull(self, start: StartPull) -> None:
        """Pull and verify one tensor set."""
        pull_id, began_s = start.pull_id, self.clock()
        backend = ""
        try:
            async with asyncio.timeout(0 if pull_id in self._stopped else self.max_pull_s) as self._pulling[pull_id]:
                async with self.peers.use(start.holder) as peer:
                    backend = peer.backend
                    await peer.pull(start.ticket, start.offset)
                # The encoder checks that embeddings are finite before it computes the checksum; the text engine checks again.
                await self.offload.run(verify, self.arena, start.offset, start.ticket)
        except TimeoutError:
            error: TriptychError = TransferFailed(f"an embedding did not arrive within {self.max_pull_s:g} s")
            if pull_id in self._stopped:
                self._end(pull_id)
                self._apply(self.cache.pull_stopped(pull_id, self.clock(), self.transports.quarantined()))
                return
        except TriptychError as reason:
            error = reason
        except asyncio.CancelledError:
            self._pulling[pull_id] = None  # the process ends: there is no limit to move any more
            raise
        except Exception:
            logger.exception("a pull failed")
            error = TransferFailed("an embedding could not be pulled")
        else:
            now_s = self.clock()
            self.record.pulled(backend, start.ticket.slot_nbytes, now_s - began_s)
            self._end(pull_id)
            self._apply(self.cache.pulled(pull_id, backend, now_s - began_s, now_s))
            return
        logger.info("a pull from %s failed: %s", start.ticket.holder, error)
        self.record.pull_failed(backend, error)
        self._end(pull_id)
        self._apply(self.cache.pull_failed(pull_id, error, self.clock(), self.transports.quarantined()))

    def _end(self, pull_id: int) -> None:
        del self._pulling[pull_id]
        self._stopped.discard(pull_id)


@asynccontextmanager
async def open_receiver(
    settings: ReaderSettings,
    world: World,
    data_plane: DataPlane,
    arena: Arena,
    *,
    offload: Offload,
    record: PullRecord = NO_PULL_RECORD,
    own: OwnHolder | None = None,
) -> AsyncGenerator[TensorReceiver]:
    """A receiver of embeddings in ``arena``. ``offload`` verifies them. ``own``: the holder in this process.

    At the end, the tasks of the world end before the connections.
    """
    async with AsyncExitStack() as stack:
        transports = await data_plane.open(
            arena,
            nobody_reads,
            connect_timeout_s=settings.connect_timeout_s,
            preferred=settings.prefer_transport,
            own=None if own is None else own.network,
        )
        stack.push_async_callback(transports.close)
        peers = PeerPool(
            data_plane.holder,
            transports.connect,
            limit=_MAX_HOLDERS,
            clock=world.clock,
            own=None if own is None else (arena.instance_id, arena.epoch, own),
        )
        stack.push_async_callback(peers.close)
        stack.push_async_callback(world.scope.close)
        yield TensorReceiver(
            arena=arena,
            transports=transports,
            peers=peers,
            releases=Releases(peers, scope=world.scope, timeout_s=settings.release_timeout_s),
            limits=settings.tensor_cache,
            pulls=settings.pulls,
            max_pull_s=settings.transfers.max_pull_s,
            scope=world.scope,
            offload=offload,
            clock=world.clock,
            record=record,
        )
