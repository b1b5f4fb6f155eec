"""Runs one request: performs its machine's effects and feeds the results back as events."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial

from triptych.domain.chat import ChatRequest
from triptych.domain.embedding import LeaseId
from triptych.domain.encoding import EncodeRequest, LeaseRequest
from triptych.domain.generation import Ready, TextEvent, TextRequest, Usage
from triptych.domain.instance import ModelInfo
from triptych.domain.item_plan import ItemPlan
from triptych.domain.timeline import Timeline
from triptych.errors import Cancelled, InstanceLost, InternalError, InvalidRequest, RequestTooLarge, TriptychError
from triptych.machine.router.attainment import Gaps
from triptych.machine.router.request import Phase, RequestMachine
from triptych.machine.router.request_events import (
    Abort,
    After,
    Encode,
    End,
    Extend,
    Failed,
    Generate,
    LeaseGranted,
    LeasesExtended,
    Prepared,
    Renew,
    RequestEffect,
    RequestEvent,
    Signal,
    TextReported,
)
from triptych.machine.router.shared_events import (
    CallFailed,
    CreditReturned,
    CreditsAbandoned,
    CreditsWanted,
    EmbeddingGone,
    FirstToken,
    ItemEncoded,
    Release,
    TextWanted,
)
from triptych.policy import admission
from triptych.ports import Clock, Offload, Text
from triptych.runtime import tracing

from .answer import Answer
from .attainment import Attainment
from .cluster import Cluster
from .prepare import Prepare, Prompted
from .stream_buffer import StreamBuffer

logger = logging.getLogger(__name__)

_REASONED = CreditsWanted | CreditsAbandoned | TextWanted | Encode | Renew | Abort | After | Release

_LAST_CALL_S = 1.0
"""How long a text instance may take to end its call after the answer's end."""

Call = Callable[[], Coroutine[object, object, None]]
"""A factory, so that a call cancelled before it starts leaves no coroutine unawaited."""


class RequestTask:
    """``drive`` runs the request to its end, and puts the answer into ``buffer``."""

    def __init__(
        self,
        number: int,
        request: ChatRequest,
        model: ModelInfo,
        machine: RequestMachine,
        *,
        media_bytes: int,
        deadline_s: float,
        cluster: Cluster,
        attainment: Attainment,
        prepare: Prepare,
        sharding: Callable[[Sequence[ItemPlan]], tuple[ItemPlan, ...]],
        offload: Offload,
        clock: Clock,
    ) -> None:
        self.request = request
        self.media_bytes = media_bytes
        self.buffer = StreamBuffer()
        self._number = number
        self._model = model
        self._machine = machine
        self._deadline_s = deadline_s
        self._cluster = cluster
        self._attainment = attainment
        self._gaps: Gaps | None = None
        self._prepare_request = prepare
        self._sharding = sharding
        self._offload = offload
        self._clock = clock
        self._started_s = clock()
        self._prompted: Prompted
        """Set by ``_prepare``."""
        self._sampling = request.sampling
        self._answer: Answer | None = None
        self._events: deque[RequestEvent] = deque()
        self._feeding = False
        self._over = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        """By credit: the calls that the machine may abort."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def number(self) -> int:
        """Unlike the request id, never reused."""
        return self._number

    @property
    def phase(self) -> Phase:
        return self._machine.phase

    def timeline(self) -> Timeline:
        return self._machine.timeline(self._clock(), 0 if self._answer is None else self._answer.streamed_tokens)

    @property
    def finish_reason(self) -> str:
        """The reason of the choice that finished last; empty before one did."""
        return "" if self._answer is None else self._answer.finish_reason

    def cancel(self) -> None:
        """The caller left: stop what runs and release what is held. No effect on a finished request."""
        if not self.phase.over:
            self.feed(Signal.CALLER_LEFT)

    # --- lifecycle ---------------------------------------------------------------------------------------------------

    async def drive(self, on_over: Callable[["RequestTask"], None]) -> None:
        """Run to the end. ``on_over`` is called when nothing of the request runs any more."""
        with tracing.child("request"):
            await self._drive(on_over)

    async def _drive(self, on_over: Callable[["RequestTask"], None]) -> None:
        self._feed_after(self._left_s(), Signal.DEADLINE_PASSED)
        self._cluster.register(self._number, self)
        try:
            async with asyncio.TaskGroup() as self._group:
                self._start(self._prepare, "prepare")
                try:
                    await self._over.wait()
                except asyncio.CancelledError:
                    # The process is ending: report it to whoever waits for the answer.
                    self.feed(Signal.CALLER_LEFT)
                    raise
                if self.phase is Phase.DONE:
                    # At most the end of the text instance's call is outstanding.
                    self._timers.append(asyncio.get_running_loop().call_later(_LAST_CALL_S, self._stop))
                else:
                    self._stop()
        finally:
            for timer in self._timers:
                timer.cancel()
            self._cluster.unregister(self._number)
            on_over(self)

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def feed(self, event: RequestEvent) -> None:
        """Handle events in order; events caused by effects are queued behind."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                if effects := self._machine.handle(self._events.popleft(), self._clock()):
                    self._apply(effects)
        finally:
            self._feeding = False

    def _feed_after(self, delay_s: float, event: RequestEvent) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, self.feed, event))

    def _feed_both(self, event: ItemEncoded | CallFailed | FirstToken) -> None:
        self._cluster.feed(event)
        self.feed(event)

    def _apply(self, effects: list[RequestEffect]) -> None:  # noqa: C901, PLR0912 - one dispatch
        releases: dict[str, list[Release]] = {}
        debug = logger.isEnabledFor(logging.DEBUG)
        for effect in effects:
            if debug and isinstance(effect, _REASONED):  # only the reason: effects hold lease ids, which are secret
                logger.debug("request %s: %s: %s", self.request.request_id, type(effect).__name__, effect.reason)
            match effect:
                case CreditsWanted() | CreditsAbandoned() | TextWanted() | EmbeddingGone():
                    self._cluster.feed(effect)
                case Encode(credit):
                    self._start(partial(self._encode, effect), f"encode {effect.index}", credit)
                case Renew(credit):
                    self._start(partial(self._renew, effect), f"renew {credit}", credit)
                case Extend(credit):
                    self._start(partial(self._extend, effect), f"extend {credit}")
                case Generate(credit):
                    self._attainment.dispatched(self._number, self._machine.text_instance)
                    task = self._start(partial(self._generate, effect), "generate")
                    task.add_done_callback(partial(self._generated, credit))
                case Abort(credit):
                    if (call := self._calls.get(credit)) is not None:
                        call.cancel()
                case Release(name):
                    releases.setdefault(name, []).append(effect)
                case After(delay_s, event):
                    self._feed_after(delay_s, event)
                case End(error):
                    self.buffer.close(error)
                    self._over.set()
        for name, group in releases.items():
            lease_ids: list[LeaseId] = []
            credits_: list[int] = []
            for release in group:
                lease_ids += release.lease_ids
                if release.credit is not None:
                    credits_.append(release.credit)
            self._cluster.release(name, tuple(lease_ids), tuple(credits_))

    def _start(self, work: Call, name: str, credit: int | None = None) -> asyncio.Task[None]:
        if self._group is None:
            raise AssertionError("drive() has not started")
        task = self._group.create_task(self._guarded(work), name=f"{self.request.request_id}/{name}")
        self._tasks.add(task)
        if credit is not None:
            self._calls[credit] = task
        task.add_done_callback(partial(self._ended, credit))
        return task

    def _ended(self, credit: int | None, task: asyncio.Task[None]) -> None:
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
        return max(0.0, self._deadline_s - self._clock())

    # --- calls -------------------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        try:
            with tracing.child("prepare"):
                self._prompted = await self._offload.run(self._prepare_request, self.request, self._model)
            prompt_tokens = len(self._prompted.token_ids)
            self._sampling = admission.complete(
                self._prompted.sampling,
                prompt_tokens=prompt_tokens,
                context_length=self._model.context_length,
                kv_tokens=self._cluster.kv_tokens,
            )
        except TriptychError as error:
            self.feed(Failed(error))
        else:
            items = self._prompted.items
            if any(len(item.units) > 1 for item in items):
                items = self._sharding(items)
            self._gaps = self._attainment.prepared(
                self._number, self._prompted.items, prompt_tokens, self._clock() - self._started_s
            )
            self.feed(Prepared(items, prompt_tokens, self._sampling.max_tokens or 0))

    def _failed(self, credit: int, name: str, error: TriptychError) -> None:
        self._feed_both(CallFailed(credit, name, _lost_if_cancelled(error)))

    async def _encode(self, effect: Encode) -> None:
        plan = effect.plan
        request = EncodeRequest(
            request_id=self.request.request_id,
            item=effect.index,
            model=self._model.model_id,
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
        )
        try:
            with self._cluster.call(effect.name) as encoder:
                result = await encoder.encode(request)
        except TriptychError as error:
            if isinstance(error, InvalidRequest | RequestTooLarge):
                error.param = error.param or plan.param
            self._failed(effect.credit, effect.name, error)
        else:
            self._feed_both(ItemEncoded(effect.credit, effect.name, result))

    async def _renew(self, effect: Renew) -> None:
        request = LeaseRequest(effect.key, effect.generation, effect.lease_id, effect.lease_s, self._left_s())
        try:
            with self._cluster.call(effect.name) as encoder:
                ticket = await encoder.lease(request)
        except TriptychError as error:
            self._failed(effect.credit, effect.name, error)
        else:
            self.feed(LeaseGranted(effect.credit, effect.name, ticket))

    async def _extend(self, effect: Extend) -> None:
        """Extend the router's own lease first. If the reader's has expired, the reader has its data or asks again."""
        sent_s, extended = self._clock(), list[LeaseId]()
        for lease_id in effect.lease_ids:
            request = LeaseRequest(effect.key, effect.generation, lease_id, effect.lease_s, self._left_s())
            try:
                with self._cluster.call(effect.name) as encoder:
                    await encoder.lease(request)
            except TriptychError as error:
                # The request goes on: its leases last until it ends or are renewed before use.
                self._cluster.feed(CallFailed(effect.credit, effect.name, _lost_if_cancelled(error)))
                break
            extended.append(lease_id)
        if extended:
            self.feed(LeasesExtended(effect.credit, tuple(extended), sent_s, effect.lease_s))

    async def _generate(self, effect: Generate) -> None:
        request = TextRequest(
            request_id=self.request.request_id,
            model=self._model.model_id,
            token_ids=self._prompted.token_ids,
            placements=effect.placements,
            sampling=self._sampling,
            timeout_s=self._left_s(),
            priority=self.request.priority,
            tenant_salt=self.request.tenant_salt,
        )
        try:
            with self._cluster.call(effect.name) as text:
                await self._stream(text, effect, request)
        except TriptychError as error:
            self._failed(effect.credit, effect.name, error)

    def _generated(self, credit: int, _: asyncio.Task[None]) -> None:
        self._cluster.feed(CreditReturned(credit))

    async def _stream(self, text: Text, effect: Generate, request: TextRequest) -> None:
        """Forward the answer. The machine gets only the events that change the request's phase."""
        async with aclosing(text.generate(request)) as stream:
            begun = False
            answer = self._answer = self._new_answer()
            async for events in stream:
                if answer.over:
                    continue  # wait for the end of the call, which is cheaper for both sides than cancelling it
                begun = begun or self._begins(effect.credit, events)
                for finished in answer.take(events):
                    self.feed(TextReported(effect.credit, finished))
        if not answer.over:
            raise InstanceLost("the text instance's stream ended early")

    def _begins(self, credit: int, events: Sequence[TextEvent]) -> bool:
        """Whether these events contain the answer's start; from then on the request cannot be retried."""
        for event in events:
            if not isinstance(event, Ready):
                self._feed_both(FirstToken(credit))
                self._attainment.answering(self._number, self.timeline())
                return True
            self.feed(TextReported(credit, event))
        return False

    def _new_answer(self) -> Answer:
        usage = Usage(len(self._prompted.token_ids), 0, self._machine.image_tokens)
        return Answer(
            self.buffer,
            self._prompted.calling,
            choices=self._sampling.n,
            usage=usage,
            gaps=self._gaps,
            clock=self._clock,
        )


def _lost_if_cancelled(error: TriptychError) -> TriptychError:
    """A call cancelled by the other side means that the instance is going down."""
    return InstanceLost("the instance cancelled the call") if isinstance(error, Cancelled) else error
