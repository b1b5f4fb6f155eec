"""One request under way: does what its machine says, and tells it what came of it."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from triptych.domain.chat import ChatRequest
from triptych.domain.embedding import LeaseId
from triptych.domain.encoding import EncodeRequest, LeaseRequest
from triptych.domain.generation import (
    Finished,
    Ready,
    TextRequest,
    TokenChunk,
    Usage,
)
from triptych.domain.instance import ModelInfo
from triptych.domain.timeline import Timeline
from triptych.errors import Cancelled, InstanceLost, InternalError, InvalidRequest, RequestTooLarge, TriptychError
from triptych.machine.router.cluster_events import (
    CreditsAbandoned,
    CreditsWanted,
    EmbeddingGone,
    EmbeddingHeld,
    Granted,
    ItemEnded,
    TextGranted,
    TextReturned,
    TextWorked,
)
from triptych.machine.router.request import Phase, RequestMachine
from triptych.machine.router.request_events import (
    AbandonCredits,
    Abort,
    Alarm,
    CallerLeft,
    CountedItem,
    CreditsGranted,
    CreditsRefused,
    DeadlinePassed,
    Dispatch,
    EmbeddingMissing,
    Encode,
    End,
    Extend,
    Failed,
    FirstToken,
    ItemEncoded,
    ItemFailed,
    LeaseFailed,
    LeaseGranted,
    LeasesDue,
    LeasesExtended,
    NoText,
    Pause,
    PoolLost,
    Prepared,
    Release,
    Renew,
    RequestEffect,
    RequestEvent,
    Resumed,
    TextChosen,
    TextFailed,
    TextFinished,
    TextReady,
    WantCredits,
)
from triptych.policy import admission
from triptych.policy.sharding import ShardLimits
from triptych.ports import Clock, Offload
from triptych.runtime import tracing

from .answer import Answer
from .cluster import Cluster
from .outbox import Outbox
from .outgoing import OutgoingCalls
from .prepare import Prepare, Prompted
from .shards import in_pieces

logger = logging.getLogger(__name__)

_REASONED = WantCredits | Pause | AbandonCredits | Encode | Renew | Dispatch | Abort | Release

Call = Callable[[], Coroutine[object, object, None]]
"""A call not yet begun, so that cancelling it before it begins leaves nothing behind."""


class Run:
    """``drive`` runs the request to its end; meanwhile its answer appears in ``outbox``."""

    def __init__(
        self,
        number: int,
        request: ChatRequest,
        model: ModelInfo,
        machine: RequestMachine,
        *,
        deadline_s: float,
        cluster: Cluster,
        prepare: Prepare,
        shard_limits: ShardLimits,
        offload: Offload,
        clock: Clock,
    ) -> None:
        self.request = request
        self.outbox = Outbox()
        self._number = number
        self._model = model
        self._machine = machine
        self._deadline_s = deadline_s
        self._cluster = cluster
        self._prepare_request = prepare
        self._shard_limits = shard_limits
        self._offload = offload
        self._clock = clock
        self._prompted = Prompted((), (), (), request.sampling)
        self._sampling = request.sampling
        self._answer: Answer | None = None
        self._events: deque[RequestEvent] = deque()
        self._feeding = False
        self._over = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._by_credit: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._outgoing = OutgoingCalls()

    @property
    def number(self) -> int:
        """Unlike the request's id, never used twice."""
        return self._number

    @property
    def phase(self) -> Phase:
        return self._machine.phase

    def timeline(self) -> Timeline:
        return self._machine.timeline(self._clock(), 0 if self._answer is None else self._answer.streamed_tokens)

    @property
    def finish_reason(self) -> str:
        """Of the choice that ended last; empty before one did."""
        return "" if self._answer is None else self._answer.finish_reason

    def cancel(self) -> None:
        """The caller went away. What runs is stopped, what is held is given back; a request that is over stays so."""
        self._feed(CallerLeft())

    # --- as an applicant for credits ---------------------------------------------------------------------------------

    def placed(self, granted: Granted) -> None:
        self._feed(CreditsGranted(granted.grants))

    def refused(self, error: TriptychError) -> None:
        self._feed(CreditsRefused(error))

    def pool_lost(self, error: TriptychError) -> None:
        self._feed(PoolLost(error))

    def heartbeat_lost(self, name: str) -> None:
        """What waits for it waits no longer, as if it had died."""
        self._outgoing.give_up(name)

    # --- its life ----------------------------------------------------------------------------------------------------

    async def drive(self, on_over: Callable[["Run"], None]) -> None:
        """Run to the end; ``on_over`` is called once nothing of the request runs any more."""
        with tracing.child("request"):
            await self._drive(on_over)

    async def _drive(self, on_over: Callable[["Run"], None]) -> None:
        alarm = asyncio.get_running_loop().call_later(self._left_s(), self._feed, DeadlinePassed())
        self._cluster.join(self._number, self)
        try:
            async with asyncio.TaskGroup() as self._group:
                self._start(self._prepare, "prepare")
                try:
                    await self._over.wait()
                except asyncio.CancelledError:
                    # The process ends; whoever waits for the answer is told.
                    self._feed(CallerLeft())
                    raise
                for task in self._tasks:
                    task.cancel()
        finally:
            alarm.cancel()
            self._cluster.leave(self._number)
            on_over(self)

    def _feed(self, event: RequestEvent) -> None:
        """Hand events to the machine one after the other, also those that doing its effects brings up."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                self._apply(self._machine.handle(self._events.popleft(), self._clock()))
        finally:
            self._feeding = False

    def _apply(self, effects: list[RequestEffect]) -> None:  # noqa: C901, PLR0912 - one dispatch
        releases: dict[str, list[Release]] = {}
        told = logger.isEnabledFor(logging.DEBUG)
        for effect in effects:
            if told and isinstance(effect, _REASONED):  # the reason alone: effects hold lease ids, which give access
                logger.debug("request %s: %s: %s", self.request.request_id, type(effect).__name__, effect.reason)
            match effect:
                case Encode():
                    self._start(partial(self._encode, effect), f"encode {effect.item}", effect.credit)
                case Renew():
                    self._start(partial(self._renew, effect), f"renew {effect.item}", effect.credit)
                case Extend():
                    self._start(partial(self._extend, effect), f"extend {effect.item}")
                case Alarm():
                    self._start(partial(self._alarm, effect), "alarm")
                case Abort(_, credit) if credit in self._by_credit:
                    self._by_credit[credit].cancel()
                case Release(encoder):
                    releases.setdefault(encoder, []).append(effect)
                case EmbeddingMissing(encoder, content):
                    self._cluster.feed(EmbeddingGone(encoder, content))
                case WantCredits(wants, wait):
                    self._cluster.feed(CreditsWanted(self._number, wants, wait, self.request.priority))
                case Pause():
                    self._start(partial(self._pause, effect), "pause")
                case AbandonCredits():
                    self._cluster.feed(CreditsAbandoned(self._number))
                case Dispatch():
                    self._dispatch(effect)
                case End(error):
                    self.outbox.close(error)
                    self._over.set()
        for encoder, group in releases.items():
            lease_ids: tuple[LeaseId, ...] = tuple(lease_id for release in group for lease_id in release.lease_ids)
            credits_ = tuple(release.credit for release in group if release.credit is not None)
            self._cluster.release(encoder, lease_ids, credits_)

    def _start(self, work: Call, name: str, credit: int | None = None) -> asyncio.Task[None]:
        if self._group is None:
            raise AssertionError("nothing is asked of a request before it is driven")
        task = self._group.create_task(self._guarded(work), name=f"{self.request.request_id}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if credit is not None:
            self._by_credit[credit] = task
            task.add_done_callback(lambda _: self._by_credit.pop(credit, None))
        return task

    async def _guarded(self, work: Call) -> None:
        try:
            await work()
        except Exception:  # a defect ends its own request, never the process
            logger.exception("request %s", self.request.request_id)
            self._feed(Failed(InternalError("the router failed on this request")))

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - self._clock())

    async def _pause(self, effect: Pause) -> None:
        await asyncio.sleep(effect.delay_s)
        self._feed(Resumed(effect.number))

    # --- its calls ---------------------------------------------------------------------------------------------------

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
            self._feed(Failed(error))
        else:
            self._prompted = replace(self._prompted, items=self._in_pieces(self._prompted))
            self._feed(Prepared(self._prompted.items, prompt_tokens))

    def _in_pieces(self, prompted: Prompted) -> tuple[CountedItem, ...]:
        if not any(prompted.cuttable):
            return prompted.items
        cluster = self._cluster
        return in_pieces(prompted.items, prompted.cuttable, cluster.view, cluster.holds, self._shard_limits)

    async def _encode(self, effect: Encode) -> None:
        item = self._prompted.items[effect.item]
        asked_s = self._clock()
        request = EncodeRequest(
            request_id=self.request.request_id,
            item=effect.item,
            model=self._model.model_id,
            media=self._prompted.media[item.item],
            info=item.info,
            tokens=item.tokens,
            tenant_salt=self.request.tenant_salt,
            timeout_s=self._left_s(),
            lease_s=effect.lease_s,
            reader_lease=effect.reader_lease,
            router_lease=effect.router_lease,
            shard=item.shard,
        )
        try:
            with self._outgoing.to(effect.encoder):
                result = await self._cluster.encoder(effect.encoder).encode(request)
        except TriptychError as caught:
            error = _lost_if_cancelled(caught)
            if isinstance(error, InvalidRequest | RequestTooLarge):
                error.param = error.param or item.param
            self._cluster.call_failed(effect.encoder, error)
            self._cluster.feed(ItemEnded(effect.credit))
            self._feed(ItemFailed(effect.item, effect.credit, error))
        else:
            self._cluster.feed(ItemEnded(effect.credit))
            self._cluster.feed(EmbeddingHeld(effect.encoder, item.content))
            instance_id = self._cluster.instance_id(effect.encoder)
            self._feed(
                ItemEncoded(effect.item, effect.credit, effect.encoder, instance_id, result, asked_s, effect.lease_s)
            )

    async def _renew(self, effect: Renew) -> None:
        asked_s = self._clock()
        request = LeaseRequest(effect.key, effect.generation, effect.lease_id, effect.lease_s, self._left_s())
        try:
            with self._outgoing.to(effect.encoder):
                ticket = await self._cluster.encoder(effect.encoder).lease(request)
        except TriptychError as caught:
            error = _lost_if_cancelled(caught)
            self._cluster.call_failed(effect.encoder, error)
            self._feed(LeaseFailed(effect.item, effect.credit, error))
        else:
            self._feed(LeaseGranted(effect.item, effect.credit, effect.encoder, ticket, asked_s, effect.lease_s))

    async def _extend(self, effect: Extend) -> None:
        """The router's own lease first. The reader's may be over: then its reader has what it needs, or asks again."""
        asked_s, extended = self._clock(), list[LeaseId]()
        for lease_id in effect.lease_ids:
            request = LeaseRequest(effect.key, effect.generation, lease_id, effect.lease_s, self._left_s())
            try:
                with self._outgoing.to(effect.encoder):
                    await self._cluster.encoder(effect.encoder).lease(request)
            except TriptychError as error:
                self._cluster.call_failed(effect.encoder, _lost_if_cancelled(error))
                break
            extended.append(lease_id)
        if extended:
            self._feed(LeasesExtended(effect.item, effect.credit, tuple(extended), asked_s, effect.lease_s))

    async def _alarm(self, effect: Alarm) -> None:
        await asyncio.sleep(effect.delay_s)
        self._feed(LeasesDue())

    def _dispatch(self, effect: Dispatch) -> None:
        tokens = len(self._prompted.token_ids) + (self._sampling.max_tokens or 0)
        holders = frozenset(placement.ticket.holder for placement in effect.placements)
        try:
            granted = self._cluster.choose_text(self._number, tokens, effect.avoid, holders)
        except TriptychError as error:
            self._feed(NoText(effect.attempt, error))
            return
        self._feed(TextChosen(effect.attempt, granted.text, self._cluster.instance_id(granted.text)))
        task = self._start(partial(self._generate, effect, granted), "generate")
        task.add_done_callback(lambda _: self._cluster.feed(TextReturned(granted.credit)))

    async def _generate(self, effect: Dispatch, granted: TextGranted) -> None:
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
            with self._outgoing.to(granted.text):
                await self._stream(effect.attempt, granted.text, request)
        except TriptychError as caught:
            error = _lost_if_cancelled(caught)
            self._cluster.call_failed(granted.text, error)
            self._feed(TextFailed(effect.attempt, error))

    async def _stream(self, attempt: int, text: str, request: TextRequest) -> None:
        """Pass the answer on, telling the machine only what changes the request's phase."""
        async with aclosing(self._cluster.text(text).generate(request)) as stream:
            begun = False
            answer = self._answer = self._new_answer()
            async for events in stream:
                for event in events:
                    if not begun and not isinstance(event, Ready):
                        begun = True  # what has been passed on cannot be taken back
                        self._feed(FirstToken(attempt))
                        self._cluster.feed(TextWorked(text))
                    match event:
                        case Ready():
                            self._feed(TextReady(attempt, event))
                        case TokenChunk():
                            answer.chunk(event)
                        case Finished():
                            answer.finished(event)
                            self._feed(TextFinished(attempt, event))
                if answer.over:
                    return
        raise InstanceLost(f"text instance {self._cluster.instance_id(text)} ended the answer before its end")

    def _new_answer(self) -> Answer:
        usage = Usage(len(self._prompted.token_ids), 0, self._machine.image_tokens)
        return Answer(self.outbox, self._prompted.calling, choices=self._sampling.n, usage=usage)


def _lost_if_cancelled(error: TriptychError) -> TriptychError:
    """A call that was cancelled, but not from here, was cancelled by an instance that goes down."""
    return InstanceLost("the instance gave the call up") if isinstance(error, Cancelled) else error
