"""Runs one request: performs its machine's effects and feeds the results back as events."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from triptych.domain.chat import ChatRequest
from triptych.domain.embedding import Ticket
from triptych.domain.encoding import EncodeRequest, LeaseRequest
from triptych.domain.instance import ModelInfo
from triptych.domain.reasons import shown
from triptych.domain.resolving import ResolveRequest
from triptych.domain.tenant import NOBODY, Tenant
from triptych.domain.timeline import Timeline
from triptych.errors import (
    Cancelled,
    InstanceLost,
    InternalError,
    InvalidRequest,
    RequestTooLarge,
    TriptychError,
    Unavailable,
)
from triptych.machine.router.losses import Loss
from triptych.machine.router.request import RequestMachine, RequestPhase
from triptych.machine.router.request_events import (
    Abort,
    After,
    Encode,
    End,
    Failed,
    Generate,
    Renew,
    Renewed,
    RequestEffect,
    RequestEvent,
    Resolved,
    Signal,
    TextReported,
)
from triptych.machine.router.shared_events import (
    CallFailed,
    CreditsAbandoned,
    CreditsWanted,
    FirstToken,
    HedgeWanted,
    ItemEncoded,
    Release,
    TextWanted,
)
from triptych.ports import Clock
from triptych.runtime import tracing

from .cluster import Cluster
from .connection import STOPPED_RESPONDING

logger = logging.getLogger(__name__)

_REASONED = CreditsWanted | CreditsAbandoned | TextWanted | HedgeWanted | Encode | Renew | Abort | After | Release

_RESULTS = ItemEncoded | TextReported | FirstToken
"""Of calls: events of the cluster too. Of a failed call the cluster is told at once, and the request when more is known of it."""
_LOST = "an instance was lost while it worked on the request"
_TOGETHER_S = 0.05
"""Instances that end within this time are taken to be ended by the same cause from outside: no request is sent to them meanwhile."""
_LAST_CALL_S = 1.0
"""How long a text instance may take to end its call after the answer's end."""

Call = Callable[[], Coroutine[object, object, None]]
"""A factory, so that a call cancelled before it starts leaves no coroutine unawaited."""
Listeners = Mapping[type, Callable[["RequestTask", Any], None]]
"""Listeners that are told of a request's events once they are handled, and of its effects, by their type."""
NO_LISTENERS: Listeners = {}


class RequestTask(ABC):
    """A request that runs: ``drive`` brings it to its end. Subclasses prepare it, and serve what becomes of its items."""

    def __init__(
        self,
        request: ChatRequest | ResolveRequest,
        machine: RequestMachine,
        cluster: Cluster,
        clock: Clock,
        *,
        model: ModelInfo,
        media_bytes: int,
        listeners: Listeners = NO_LISTENERS,
    ) -> None:
        """``media_bytes`` are those of ``request``."""
        self.request = request
        self.machine = machine
        """For reading: ``feed`` changes it."""
        self._listeners = listeners
        self.media_bytes = media_bytes
        self.number = machine.number
        self.tenant: Tenant = (request.tenant if isinstance(request, ChatRequest) else None) or NOBODY
        """The request's tenant. Those who name none are one."""
        self.model = model
        """The model that computes it, without an adapter; for reading."""
        self._cluster = cluster
        self._clock = clock
        self.started_s = clock()
        """When it was admitted; for reading."""
        self._events: deque[RequestEvent] = deque()
        self._feeding = False
        self._over = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        """By credit: the calls that the machine may abort."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._lost_with: list[str] = []
        """Instances that ended while they worked on the request, and why, as far as is known: for the log."""

    @abstractmethod
    async def _prepare(self) -> None:
        """Feed ``Prepared``, or ``Failed``."""

    @abstractmethod
    def _serve(self, effect: Generate | Resolved) -> None:
        """Go on with the items, all or enough of which are encoded."""

    @abstractmethod
    def _ended(self, error: TriptychError | None) -> None:
        """End what the caller sees, as the request is over."""

    @property
    def streamed_tokens(self) -> int:
        """Tokens of the answer, so far."""
        return 0

    def timeline(self) -> Timeline:
        return self.machine.timeline(self._clock(), self.streamed_tokens)

    def cancel(self) -> None:
        """The caller left: stop what runs and release what is held. No effect on a finished request."""
        if not self.machine.phase.has_ended:
            self.feed(Signal.CALLER_LEFT)

    # --- lifecycle ---------------------------------------------------------------------------------------------------

    async def drive(self, on_over: Callable[["RequestTask"], None]) -> None:
        """Run to the end. ``on_over`` is called when nothing of the request runs any more."""
        with tracing.child("request"):
            await self._drive(on_over)

    async def _drive(self, on_over: Callable[["RequestTask"], None]) -> None:
        self._feed_after(self._left_s(), Signal.DEADLINE_PASSED)
        self._cluster.register(self.number, self)
        try:
            async with asyncio.TaskGroup() as self._group:
                self._start(self._prepare, "prepare")
                try:
                    await self._over.wait()
                except asyncio.CancelledError:
                    # The process is ending: report it to whoever waits for the answer.
                    self.feed(Signal.CALLER_LEFT)
                    raise
                if self.machine.phase is RequestPhase.DONE:
                    # At most the end of the text instance's call is outstanding.
                    self._timers.append(asyncio.get_running_loop().call_later(_LAST_CALL_S, self._stop))
                else:
                    self._stop()
        finally:
            for timer in self._timers:
                timer.cancel()
            self._cluster.unregister(self.number)
            on_over(self)

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def feed(self, event: RequestEvent) -> None:
        """Publish an event: to the cluster, if it is a result of a call; then to the request's machine; then to the listeners.

        Events caused by effects are queued behind.
        """
        if isinstance(event, _RESULTS):
            self._cluster.feed(event)
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                event = self._events.popleft()
                if effects := self.machine.handle(event, self._clock()):
                    self._apply(effects)
                if (listener := self._listeners.get(type(event))) is not None:
                    listener(self, event)
        finally:
            self._feeding = False

    def _feed_after(self, delay_s: float, event: RequestEvent) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, self.feed, event))

    def _apply(self, effects: list[RequestEffect]) -> None:  # noqa: C901, PLR0912 - one dispatch
        debug = logger.isEnabledFor(logging.DEBUG)
        for effect in effects:
            if debug and isinstance(effect, _REASONED):  # only the reason: effects hold lease ids, which are secret
                logger.debug("request %s: %s: %s", self.request.request_id, type(effect).__name__, effect.reason)
            if (listener := self._listeners.get(type(effect))) is not None:
                listener(self, effect)
            match effect:
                case Encode(credit):
                    self._start(partial(self._encode, effect), f"encode {effect.index}", credit)
                case Renew(credit):
                    # What extends leases ends by itself: the call of this credit that may be aborted is another one.
                    self._start(partial(self._renew, effect), f"renew {credit}", None if effect.extends else credit)
                case Generate() | Resolved():
                    self._serve(effect)
                case Abort(credit):
                    if (call := self._calls.get(credit)) is not None:
                        call.cancel()
                case Release():
                    self._cluster.release(effect)
                case After(delay_s, event):
                    self._feed_after(delay_s, event)
                case End(error):
                    if self.machine.losses.too_many:
                        lost_with = "; ".join(self._lost_with)
                        logger.error("request %s fails alone, lost with %s", self.request.request_id, lost_with)
                    self._ended(error)
                    self._over.set()
                case _:
                    self._cluster.feed(effect)

    def _start(self, work: Call, name: str, credit: int | None = None) -> asyncio.Task[None]:
        if self._group is None:
            raise AssertionError("drive() has not started")
        task = self._group.create_task(self._guarded(work), name=f"{self.request.request_id}/{name}")
        self._tasks.add(task)
        if credit is not None:
            self._calls[credit] = task
        task.add_done_callback(partial(self._call_ended, credit))
        return task

    def _call_ended(self, credit: int | None, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if credit is not None and self._calls.get(credit) is task:
            del self._calls[credit]

    async def _guarded(self, work: Call) -> None:
        try:
            await work()
        except Exception:  # a defect fails this request, not the process
            logger.exception("request %s", self.request.request_id)
            self.feed(Failed(InternalError("the router failed on this request")))

    def _left_s(self) -> float:
        return max(0.0, self.machine.deadline_s - self._clock())

    # --- calls -------------------------------------------------------------------------------------------------------

    async def _failed(self, credit: int, name: str, error: TriptychError, epoch: int | None = None) -> None:
        """Tell of a failed call. ``epoch`` is that of an instance that worked on the request, and may have ended by it."""
        ends = type(error) is Unavailable and error.sent_by_peer  # it says so, before its load report does
        event = CallFailed(
            credit, name, _lost_if_cancelled(error), ends or self._cluster.machine.instances.drains(name)
        )
        self._cluster.feed(event)
        lost = isinstance(error, InstanceLost) and not event.drains and error.message != STOPPED_RESPONDING
        if epoch is not None and lost:
            loss, has_ended = Loss(name, epoch), error.sent_by_peer
            survivors = frozenset[Loss]()
            if not has_ended:
                await asyncio.sleep(_TOGETHER_S)  # else it would be sent to the next one that was killed with this one
            if doubtful := self.machine.losses.doubtful(loss, certain=has_ended):
                survivors = await self._cluster.surviving(doubtful)
            if loss not in survivors:
                self._lost_with.append(f"{name}: {shown(error.message)}")
                logger.warning("request %s was lost with %s", self.request.request_id, self._lost_with[-1])
            event = replace(event, error=InstanceLost(_LOST), loss=loss, has_ended=has_ended, survivors=survivors)
        self.feed(event)

    async def _encode(self, effect: Encode) -> None:
        plan, epoch = effect.plan, self._cluster.epoch_of(effect.name)
        request = EncodeRequest(
            request_id=self.request.request_id,
            item=effect.index,
            model=self.model.model_id,
            media=plan.media,
            info=plan.info,
            tokens=plan.tokens,
            tenant_salt=self.request.tenant_salt,
            timeout_s=self._left_s(),
            lease_s=effect.lease_s,
            reader_lease=effect.reader_lease,
            router_lease=effect.router_lease,
            shard=plan.shard,
            priority=self.request.priority,
            position=effect.queue_position.relative(self._clock()),
        )
        try:
            with self._cluster.call(effect.name) as encoder:
                result = await encoder.encode(request)
        except TriptychError as error:
            if isinstance(error, InvalidRequest | RequestTooLarge):
                error.param = error.param or plan.param
            await self._failed(effect.credit, effect.name, error, epoch)
        else:
            self.feed(ItemEncoded(effect.credit, effect.name, result))

    async def _renew(self, effect: Renew) -> None:
        sent_s, tickets, refused = self._clock(), list[Ticket](), None
        try:
            with self._cluster.call(effect.name) as holder:
                for known, lease_id in zip(effect.tickets, effect.lease_ids, strict=True):
                    request = LeaseRequest(known.key, known.generation, lease_id, effect.lease_s, self._left_s())
                    tickets.append(await holder.lease(request))
        except TriptychError as error:
            refused = _lost_if_cancelled(error)
            self._cluster.feed(CallFailed(effect.credit, effect.name, refused))
        self.feed(Renewed(effect, sent_s, tuple(tickets), refused))


def _lost_if_cancelled(error: TriptychError) -> TriptychError:
    """A call cancelled by the other side means that the instance is going down."""
    return InstanceLost("the instance cancelled the call") if isinstance(error, Cancelled) else error
