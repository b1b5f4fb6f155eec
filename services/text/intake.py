"""Embeddings on their way into this instance: what the image cache's machine decides is done here.

Everything is pulled beside the engine, never inside a step, from many encoders at once. Turns go to the most urgent
request, shared fairly and bounded in bytes (``machine/text/pull_queue.py``). A pull belongs to the instance: several
requests may wait for it, and once it has begun it goes on when they have left.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from triptych.domain.embedding import Ticket
from triptych.domain.generation import Placement, PullReport
from triptych.errors import TransferFailed, TriptychError
from triptych.machine.text import image_cache_events, pull_queue
from triptych.machine.text.image_cache import ImageCacheMachine
from triptych.ports import Arena, Clock, EmbeddingInput, Offload
from triptych.runtime.tasks import TaskScope
from triptych.transport.peer_pool import PeerPool
from triptych.transport.slot import tensors, verify

from .merging import merge
from .record import NoRecord, Record
from .releases import Releases

logger = logging.getLogger(__name__)


class Quarantine(Protocol):
    """The part of a transport that knows which memory a late write may still reach."""

    def quarantined(self) -> tuple[tuple[int, int], ...]: ...


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    max_waiting: int
    """Requests that wait for memory."""
    max_pulls_per_holder: int
    max_pulling_nbytes: int
    """Bytes on their way at the same time; half of them at most from one holder, so that one that hangs leaves room."""
    max_pull_s: float
    failure_grace_s: float
    """How long a request whose first pull failed looks on whether its others fail as well."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request's embeddings; readable until the request leaves the intake."""

    inputs: tuple[EmbeddingInput, ...]
    """Of its items, in the order of its placements; shards of an item are one again."""
    reports: tuple[PullReport, ...]


@dataclass(slots=True)
class _Pull:
    """A pull that waits for its turn or is under way."""

    start: image_cache_events.StartPull
    failed: asyncio.Future[bool]


@dataclass(frozen=True, slots=True)
class _Refusal:
    error: TriptychError
    still_pulling: tuple[tuple[int, _Pull], ...]
    """Index of a ticket, and the pull of it that goes on."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    tickets: tuple[Ticket, ...]
    outcome: asyncio.Future[image_cache_events.Acquired | _Refusal]


@dataclass(frozen=True, slots=True)
class _Journey:
    backend: str
    nbytes: int
    duration_s: float


@dataclass(slots=True)
class Intake:
    """Turns the machine's effects into pulls, and their outcomes into events."""

    arena: Arena
    transport: Quarantine
    peers: PeerPool
    releases: Releases
    limits: IntakeLimits
    scope: TaskScope
    offload: Offload
    clock: Clock
    record: Record = field(default_factory=NoRecord)
    memory: ImageCacheMachine = field(init=False)
    """What is remembered, to be read only."""
    queue: pull_queue.PullQueue = field(init=False)
    """Whose pull is next, to be read only."""
    _wanted: dict[str, _Wanted] = field(init=False, default_factory=dict)
    _pulls: dict[int, _Pull] = field(init=False, default_factory=dict)
    _journeys: dict[bytes, _Journey] = field(init=False, default_factory=dict)
    """Of what is in the cache."""

    def __post_init__(self) -> None:
        self.memory = ImageCacheMachine(
            start=self.arena.base, end=self.arena.nbytes, max_waiting=self.limits.max_waiting
        )
        self.queue = pull_queue.PullQueue(
            pull_queue.PullLimits(
                max_nbytes=self.limits.max_pulling_nbytes,
                max_holder_nbytes=self.limits.max_pulling_nbytes // 2,
                max_holder_pulls=self.limits.max_pulls_per_holder,
            )
        )

    async def acquire(self, request_id: str, placements: Sequence[Placement], *, deadline_s: float) -> Arrived:
        """Wait until all embeddings are here. They stay until ``leave``, which must follow in any case.

        ``deadline_s`` is when the caller gives up, on the intake's clock: the earlier, the sooner its turn.

        From here on the tickets' leases are given back by the intake. Raises TransferFailed, which names the items
        (of the placements), InvalidRequest for what can never fit, Overloaded.
        """
        wanted = _Wanted(tuple(one.ticket for one in placements), asyncio.get_running_loop().create_future())
        self._wanted[request_id] = wanted
        self._handle(image_cache_events.Acquire(request_id, wanted.tickets, deadline_s))
        outcome = await wanted.outcome
        if isinstance(outcome, _Refusal):
            raise await self._whole_failure(outcome, placements)
        inputs = tuple(
            EmbeddingInput(one.start, one.tokens, tensors(self.arena, slot.offset, slot.ticket), slot.ticket.key)
            for one, slot in zip(placements, outcome.slots, strict=True)
        )
        continues = [one.continues for one in placements]
        if any(continues):
            inputs = await self.offload.run(merge, inputs, continues)
        reports = tuple(self._report(one, cached=hit) for one, hit in zip(placements, outcome.hits, strict=True))
        return Arrived(inputs, reports)

    def leave(self, request_id: str) -> None:
        """The request reads its embeddings no more; unknown ids are fine."""
        self._wanted.pop(request_id, None)
        self._handle(image_cache_events.Leave(request_id))

    async def tick(self) -> None:
        """Look whether memory that was set aside is free again, and let go of holders that nobody reads from."""
        await self.peers.close_idle()
        self._handle(image_cache_events.Tick(self.transport.quarantined()))

    def _handle(self, event: image_cache_events.Event) -> None:
        events = deque([event])
        while events:
            unneeded: list[int] = []
            for effect in self.memory.handle(events.popleft(), self.clock()):
                self._do(effect, unneeded)
            for pull_id in unneeded:
                if self.queue.waits(pull_id) and not self.memory.needed(pull_id):
                    self._pulls.pop(pull_id).failed.set_result(False)
                    self._turn(pull_queue.Drop(pull_id))
                    left = TransferFailed("nobody waits for the embedding any more")
                    events.append(image_cache_events.PullFailed(pull_id, left, self.transport.quarantined()))

    def _do(self, effect: image_cache_events.Effect, unneeded: list[int]) -> None:
        match effect:
            case image_cache_events.StartPull(pull_id, ticket):
                self._pulls[pull_id] = _Pull(effect, asyncio.get_running_loop().create_future())
                holder = ticket.held_by
                self._turn(
                    pull_queue.Want(
                        pull_id, effect.request_id, holder, ticket.slot_nbytes, deadline_s=effect.deadline_s
                    )
                )
            case image_cache_events.Hastened(pull_id, request_id, deadline_s):
                self._turn(pull_queue.Hasten(pull_id, request_id, deadline_s))
            case image_cache_events.Unneeded(pull_id):
                unneeded.append(pull_id)
            case image_cache_events.Acquired(request_id):
                self._tell(request_id, effect)
            case image_cache_events.Refused(request_id, error):
                self._tell(request_id, _Refusal(error, self._still_pulling(request_id)))
            case image_cache_events.ReleaseLease(ticket):
                self.releases.add(ticket)
            case image_cache_events.Evicted(key, reason):
                self._journeys.pop(key, None)
                logger.debug("evicted an embedding: %s", reason)
            case image_cache_events.Waiting(request_id, reason):
                logger.debug("request %s waits: %s", request_id, reason)

    def _turn(self, event: pull_queue.Event) -> None:
        for begin in self.queue.handle(event, self.clock()):
            self.scope.spawn(self._pull(self._pulls[begin.pull_id].start), name="pull")

    def _tell(self, request_id: str, outcome: image_cache_events.Acquired | _Refusal) -> None:
        wanted = self._wanted.get(request_id)
        if wanted is not None and not wanted.outcome.done():
            wanted.outcome.set_result(outcome)

    # --- pulling -----------------------------------------------------------------------------------------------------

    async def _pull(self, start: image_cache_events.StartPull) -> None:
        """Pull and check one embedding.

        That it is finite was checked by the encoder before it computed the checksum, and is checked again by the
        text engine when the request is added.
        """
        ticket, started_s, backend = start.ticket, self.clock(), ""
        try:
            async with asyncio.timeout(self.limits.max_pull_s):
                async with self.peers.use(ticket.held_by) as peer:
                    backend = peer.backend
                    await peer.pull(ticket, start.offset)
                await self.offload.run(verify, self.arena, start.offset, ticket)
        except TimeoutError:
            error: TriptychError = TransferFailed(f"an embedding did not arrive within {self.limits.max_pull_s:g} s")
        except TriptychError as reason:
            error = reason
        except Exception:
            logger.exception("a pull failed")
            error = TransferFailed("an embedding could not be pulled")
        else:
            journey = self._journeys[ticket.key] = _Journey(backend, ticket.slot_nbytes, self.clock() - started_s)
            self.record.pulled(journey.backend, journey.nbytes, journey.duration_s)
            self._pulls.pop(start.pull_id).failed.set_result(False)
            self._turn(pull_queue.Ended(start.pull_id))
            self._handle(image_cache_events.Pulled(start.pull_id))
            return
        logger.info("a pull from %s failed: %s", ticket.holder, error)
        self.record.pull_failed(backend, error)
        self._pulls.pop(start.pull_id).failed.set_result(True)
        self._turn(pull_queue.Ended(start.pull_id))
        self._handle(image_cache_events.PullFailed(start.pull_id, error, self.transport.quarantined()))

    # --- answers -----------------------------------------------------------------------------------------------------

    def _still_pulling(self, request_id: str) -> tuple[tuple[int, _Pull], ...]:
        wanted = self._wanted.get(request_id)
        by_key = {pull.start.ticket.key: pull for pull in self._pulls.values()}
        tickets = () if wanted is None else wanted.tickets
        return tuple((index, by_key[ticket.key]) for index, ticket in enumerate(tickets) if ticket.key in by_key)

    async def _whole_failure(self, refusal: _Refusal, placements: Sequence[Placement]) -> TriptychError:
        """The refusal, with every item that failed: items of one dead encoder fail one after the other."""
        if not isinstance(refusal.error, TransferFailed):
            return refusal.error
        pulls = {pull.failed for _, pull in refusal.still_pulling}
        if pulls:
            await asyncio.wait(pulls, timeout=self.limits.failure_grace_s)
        failed = {index for index, pull in refusal.still_pulling if pull.failed.done() and pull.failed.result()}
        items = sorted(placements[index].item for index in failed.union(refusal.error.items))
        return TransferFailed(refusal.error.message, items=tuple(items))

    def _report(self, placement: Placement, *, cached: bool) -> PullReport:
        journey = None if cached else self._journeys.get(placement.ticket.key)
        if journey is None:
            return PullReport(placement.item, backend="", nbytes=0, duration_s=0.0, cached=True)
        return PullReport(placement.item, journey.backend, journey.nbytes, journey.duration_s, cached=False)
