"""The text service: ``ports.Text`` over an engine and a tensor receiver, and a holder of what it hands over."""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from math import inf

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.generation import Finished, FinishReason, HandedOver, Ready, TextEvent, TextRequest
from triptych.domain.instance import InstanceInfo, InstanceLoad, ServedPart, StageLoad, TransportOffer
from triptych.domain.kv_segment import KvKind
from triptych.domain.sampling import ResponseFormat
from triptych.domain.stage import Stage
from triptych.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LeaseLost,
    Overloaded,
    StageClosed,
    TriptychError,
    Unavailable,
)
from triptych.machine.encoder.arena_events import Slot
from triptych.machine.extents import round_up
from triptych.machine.stage_states import StageStates
from triptych.policy.queueing import as_called, longest_waits
from triptych.ports import Clock, EngineRequest, HandingTextEngine, ObservedTextEngine, Offload, Rng, TokenGrammar
from triptych.runtime.hinted_load import watch_with_hints
from triptych.runtime.tasks import TaskScope
from triptych.runtime.watched_value import WatchedValue
from triptych.tokens.answer_text import Detokenizer
from triptych.transport.receiver import Arrived, TensorReceiver

from .answer import Answer
from .arriving import Arriving
from .checks import arriving_lengths, check_request, usable_segments
from .device_scheduler import DeviceScheduler
from .engine_loop import EngineLoop, handing_engine
from .handing import Handing, Stretch, stretches
from .jobs import BOTH, DECODE, PREFILL, Job, Jobs
from .keeping import Keeping
from .kv_store import KvStore
from .record import NO_RECORD, Record
from .sequences import Sequences, Tokens
from .settings import TextSettings

logger = logging.getLogger(__name__)

_SETTLES_S = 0.1
"""How long a hand-over may be taken back after it has been given to the transport: a caller that left meanwhile does not get it, and so cannot
release its leases. Without effect on the caller, which goes on at once."""
_TOLERATED_GAP = 4
"""In multiples of the objective between tokens: beyond it an answer leaves an instance where items go first."""


class TextService:
    """``ports.Text``, and of ``ports.Encoder`` what a holder has. Call ``start`` once its scope is open."""

    def __init__(
        self,
        engine: ObservedTextEngine,
        receiver: TensorReceiver,
        settings: TextSettings,
        *,
        offers: Callable[[], tuple[TransportOffer, ...]],
        new_detokenizer: Callable[[], Detokenizer],
        new_grammar: Callable[[ResponseFormat], TokenGrammar],
        scope: TaskScope,
        offload: Offload,
        engine_thread: Offload,
        rng: Rng,
        clock: Clock,
        record: Record = NO_RECORD,
        part: ServedPart | None = None,
        scheduler: DeviceScheduler | None = None,
        kv: KvStore | None = None,
        states: StageStates | None = None,
    ) -> None:
        """``engine_thread`` runs one call at a time, always in the same thread. ``rng`` draws missing seeds.

        ``scheduler`` is set if the instance also encodes in that thread. ``new_grammar`` blocks, is called through
        ``offload``, and raises InvalidRequest. ``offers`` are of the arena that others read, if there is one. ``kv``: where it
        puts what it hands over; None if it does not. ``states``: of an instance that switches; only to read.
        """
        self._kv = kv
        self._states = states
        self._handing_engine = handing_engine(engine)
        self._record = record
        self._part = part
        self._engine = engine
        self._receiver = receiver
        self._settings = settings
        self._offers = offers
        self._new_detokenizer = new_detokenizer
        self._new_grammar = new_grammar
        self._offload = offload
        self._scope = scope
        self._rng = rng
        self._clock = clock
        self._watched_load = WatchedValue(self.load, settings.load_reports)
        self._loop = EngineLoop(
            engine,
            engine_thread,
            clock=clock,
            on_change=self._watched_load.notify,
            on_gap=self._record.token_gap,
            scheduler=scheduler,
            most_copied_bytes=settings.kv_bytes_per_step,
        )
        if kv is not None:
            kv.store.on_change(self._watched_load.notify)
        self._jobs = Jobs()
        self._job_numbers = itertools.count()
        self._draining = False
        self._served: Counter[Stage] = Counter()
        """By open stage, what it has served since it opened."""
        slo_s = settings.engine_options.tpot_slo_s
        is_lender = scheduler is not None and scheduler.encode_first
        self._tolerated_gap_s = inf if slo_s is None or not is_lender else _TOLERATED_GAP * slo_s
        """Between two tokens of an answer."""

    def start(self) -> None:
        """Start work, which ends with the scope."""
        self._scope.spawn(self._loop.run(), name="engine", vital=True)
        self._scope.spawn(self._sweep(), name="sweep", vital=True)

    def lose_engine(self) -> None:
        """The engine cannot go on: the part that drives it ends, and its requests fail with InstanceLost."""
        self._loop.lose()

    async def between_steps(self, call: Callable[[], None]) -> None:
        """Call the engine between two steps, once it has got all that was submitted and cancelled before. Raises what ``call`` raises, and
        Unavailable at the end.
        """
        await self._loop.between(call)

    async def describe(self) -> InstanceInfo:
        arena = self._receiver.arena
        return InstanceInfo(
            instance_id=arena.instance_id,
            epoch=arena.epoch,
            role=self._settings.role,
            model=self._engine.model,
            arena_bytes=self._receiver.cache.capacity_bytes,
            offers=self._offers(),
            kv_tokens=self._engine.kv_tokens,
            kv_block_tokens=self._engine.kv_block_tokens,
            parts=() if self._part is None else (self._part,),
            continues=True,
            prefills_early=self._engine.finds_prefixes,
            kv_kind="" if self._kv_kind is None else self._kv_kind.digest,
            hands_over=self._kv is not None,
            kv_segment_tokens=0 if self._kv_kind is None else self._kv_kind.segment_tokens,
            kv_position_bytes=0 if self._kv_kind is None else self._kv_kind.position_nbytes,
            switchable=None if self._states is None else self._states.widest,
        )

    async def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        """``Ready`` is sent when the engine has started the request and what arrives has arrived. Closing the generator ends it within one step.

        ``queue_s`` is all time before ``Ready`` except pulling. Raises before ``Ready``: TransferFailed,
        ContextTooLong, InvalidRequest, ModelNotFound, Overloaded, Unavailable; at any time: DeadlineExceeded and
        EngineFailure. Leases in the request's tickets are released in any case, and those of ``HandedOver`` if the caller
        leaves without it.
        """
        job, record = self._job(request), NO_RECORD if request.early else self._record
        try:
            self._admit(job)
            try:
                answers = await self._answers(job)
                ready, sequences = await self._prepare(job)
            except _LeavingError:
                raise self._closed() from None
            record.ready(ready)
            yield (ready,)
            answered = set[int]()
            while answers:
                try:
                    async with self._deadline(job):
                        ready_tokens = await sequences.next()
                except _LeavingError:
                    ready_tokens = []
                if sequences.longest_gap_s > self._tolerated_gap_s and not (request.continued or job.has_been_held_up):
                    job.is_leaving = job.has_been_held_up = True
                    job.why_leaving = "held_up"
                is_last = request.hands_over
                if job.is_leaving and not is_last and answered.issuperset(answers):
                    is_last = await self._pause(job, answers)
                    ready_tokens += sequences.take()
                answered.update(tokens.choice for tokens in ready_tokens)
                if ready_tokens:
                    self._count_served(job)
                if events := self._events(job, answers, ready_tokens, sequences, record):
                    yield events
                if is_last and answers and answered.issuperset(answers):
                    prefill_s = max(sequences.prefill_s(choice) for choice in answers)
                    async with aclosing(self._hand_over(job, answers, prefill_s)) as last:
                        async for one in last:
                            yield one
                    return
                if answers and self._settings.stream_interval_s:
                    with suppress(_LeavingError):
                        async with self._deadline(job):
                            await sequences.settled(self._settings.stream_interval_s)
        except TriptychError as error:
            record.failed(error)
            raise
        finally:
            self._release(job)

    def _events(
        self,
        job: Job,
        answers: dict[int, Answer],
        ready_tokens: Sequence[Tokens],
        sequences: Sequences,
        record: Record,
    ) -> list[TextEvent]:
        """What to send of these tokens. Answers that end with them are removed."""
        events: list[TextEvent] = []
        for tokens in ready_tokens:
            answer = answers[tokens.choice]
            chunk, reason = answer.feed(tokens)
            if chunk.token_ids or chunk.text:
                events.append(chunk)
            if reason is not None:
                self._loop.cancel_choice(job.job_id, tokens.choice)  # stop strings are not known to the engine
                del answers[tokens.choice]
                end = _finished(reason, answer.completion_tokens, sequences, tokens.choice)
                record.finished(end)
                events.append(end)
        return events

    async def _pause(self, job: Job, answers: Mapping[int, Answer]) -> bool:
        """Get no more tokens, and begin to hand over what there is. False, and nothing has changed, if there is no room for it, or
        the caller does not take it.
        """
        job.is_leaving = False  # it is tried once
        kv, engine, prompt = self._kv, self._handing_engine, len(job.request.token_ids)
        if kv is None or engine is None or not job.request.kv_lease_s > 0:
            return False
        if job.keeping is not None:
            job.keeping.stop()
            await job.keeping.over()
        wanted = stretches(
            kv.kind, prompt, {one: prompt + answer.completion_tokens - 1 for one, answer in answers.items()}
        )
        slots = kv.reserve_now([one.segment for one in wanted])
        if len(slots) < len(wanted):
            kv.abandon(slots)
            return False
        job.handing = self._start_handing(job, kv, engine, wanted, slots)
        async with self._deadline(job):
            await self._loop.between(partial(engine.pause, job.job_id))
        return True

    async def _hand_over(
        self, job: Job, choices: Collection[int], prefill_s: float
    ) -> AsyncGenerator[Sequence[TextEvent]]:
        """``HandedOver``, once what can be handed over is sealed."""
        handing, why = job.handing, "asked" if job.request.hands_over else job.why_leaving
        if handing is None:
            self._record.handed_over(0, prefill_s, why)
            yield (HandedOver((), prefill_s),)
            return
        handing.end()
        async with self._deadline(job):
            await handing.sealed()
        self._loop.cancel(job.job_id)  # its memory is free before the answer goes on elsewhere
        handed_over = handing.hand_over(choices, job.request.kv_lease_s, prefill_s=prefill_s)
        is_taken = False
        try:
            yield (handed_over,)
            self._record.handed_over(len(handed_over.segments), prefill_s, why)
            if handed_over.segments:
                await asyncio.sleep(_SETTLES_S)
            is_taken = True
        finally:
            if not is_taken:
                handing.take_back(handed_over)

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        """Raises InvalidRequest: of ``ports.Encoder`` it has only what holders have."""
        raise InvalidRequest(
            f"item {request.item}: this instance does not encode, its role is {self._settings.role.value}"
        )

    async def lease(self, request: LeaseRequest) -> Ticket:
        """On a segment of keys and values. One without a generation is on the prefix of another prompt: no drain waits for those."""
        if self._kv is None:
            raise LeaseLost("this instance holds nothing")
        if request.generation is None and self._draining and not self._jobs:
            raise LeaseLost("this instance is about to end")
        return self._kv.store.lease(request)

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        if self._kv is not None:
            self._kv.store.release(lease_ids)

    def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        published = None if self._kv is None else self._kv.published
        if published is None:
            return self._watched_load.watch()
        return watch_with_hints(self._watched_load, published.reader())

    def load(self) -> InstanceLoad:
        """Requests that have not started count as prefill load, the others as decode load, as both share a batch. An instance
        without one of these stages counts all at the other, and one that has switched to none of them says nothing.

        A prompt counts as prefill load until the first token of its answer, the most that may be generated as decode
        load.
        """
        waiting, running = self._waiting, self._loop.requests[1]
        tokens = self._loop.pending_tokens + self._jobs.outside_tokens
        prompts = min(self._jobs.unanswered_tokens, tokens)
        leased = 0 if self._kv is None else self._kv.store.memory.leased_bytes
        free = self._loop.free_tokens
        serves = self._open & BOTH
        stages: dict[Stage, StageLoad] = {}
        if serves == BOTH:
            stages = {
                Stage.PREFILL: StageLoad(prompts, waiting, leased),
                Stage.DECODE: StageLoad(tokens - prompts, running, free_tokens=free),
            }
        elif serves == PREFILL:
            stages = {Stage.PREFILL: StageLoad(tokens, waiting + running, leased)}
        elif serves == DECODE:
            stages = {Stage.DECODE: StageLoad(tokens, waiting + running, free_tokens=free)}
        if self._states is None:
            return InstanceLoad(stages, self._draining)
        stages = {stage: replace(load, served=self._served[stage]) for stage, load in stages.items()}
        return InstanceLoad(stages, self._draining, stages_version=self._states.version, closed=self._states.told)

    def _count_served(self, job: Job) -> None:
        """It has got tokens."""
        is_first = not job.has_answered
        if is_first:
            self._jobs.answered(job)
        counted = set[Stage]()
        if is_first:
            counted |= job.needs & PREFILL
        if not job.is_decoded and (job.request.continued or not is_first):
            job.is_decoded = True
            counted |= job.needs & DECODE
        self._served.update(counted & self._open)

    @property
    def _open(self) -> frozenset[Stage]:
        return self._settings.role.stages if self._states is None else self._states.open

    @property
    def _waiting(self) -> int:
        """Requests that the engine has not started."""
        return self._loop.requests[0] + self._jobs.outside

    @property
    def _kv_kind(self) -> KvKind | None:
        return None if self._handing_engine is None else self._handing_engine.kv_kind

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the load may have changed."""
        self._watched_load.on_change(listener)

    def longest_waits_s(self) -> dict[int, float]:
        """By priority, the longest wait of a request for its embeddings or the engine."""
        now_s = self._clock()
        waiting = ((job.request.priority, now_s - job.arrived_s) for job in self._jobs if not job.has_begun)
        return longest_waits(waiting)

    async def missing(self) -> tuple[str, ...]:
        """Why the instance is not ready; empty if it is."""
        return ("it is draining",) if self._draining else ()

    async def drain(self) -> None:
        """Refuse new requests. Returns once the running ones have ended and returned the leases of others, and then once nobody needs
        what they handed over, or after ``handed_over_wait_s``.

        If the settings say so, those that have not begun end with Unavailable, and answers are handed over.
        """
        self._draining = True
        self._watched_load.notify()
        if self._settings.hand_over_on_drain and self._kv is not None:
            for job in self._jobs:
                self._leave(job, "drain")
        await self._watched_load.wait_until(lambda _: not self._jobs)
        await self._receiver.releases.released()
        if self._kv is not None:
            kv = self._kv
            try:
                async with asyncio.timeout(self._settings.handed_over_wait_s):
                    await self._watched_load.wait_until(lambda _: not kv.leases)
            except TimeoutError:
                logger.warning("drained with %d leases on what was handed over: what was not pulled is lost", kv.leases)

    def _leave(self, job: Job, why: str) -> None:
        """It ends with Unavailable if it has not begun, else it is handed over if that can be."""
        if job.has_begun and job.handing is not None:
            return  # it is handed over already, or will be
        job.is_leaving, job.why_leaving = True, why
        if job.limit is not None and not job.limit.expired():
            job.limit.reschedule(asyncio.get_running_loop().time())

    def stages_changed(self) -> None:
        """Other stages are open now. What has not begun at a closing one ends with StageClosed, and what is decoded is handed over
        if decode closes; prompts that have begun are computed.
        """
        for job in self._jobs:
            closed = job.needs - self._open
            if closed and (not job.has_begun or Stage.DECODE in closed):
                self._leave(job, "switch")
        for stage in BOTH - self._open:
            del self._served[stage]
        self._watched_load.notify()

    def is_idle(self, stage: Stage) -> bool:
        """Whether nothing of this stage runs here."""
        return not any(job.runs_at(stage) for job in self._jobs)

    def _closed(self) -> Unavailable:
        """Why what has not begun is refused."""
        if self._draining:
            return Unavailable("the text instance is draining")
        return StageClosed("the instance has switched to other stages")

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        self._jobs.validate()
        self._receiver.cache.validate()
        if self._kv is not None:
            self._kv.store.memory.validate()

    # --- requests ----------------------------------------------------------------------------------------------------

    def _job(self, request: TextRequest) -> Job:
        number, now_s = next(self._job_numbers), self._clock()
        deadline_s = now_s + request.timeout_s
        return Job(
            f"{request.request_id}/{number}",
            request,
            now_s,
            deadline_s,
            as_called(
                priority=request.priority,
                deadline_s=deadline_s,
                arrived_s=now_s,
                arrival=number,
                position=request.position,
            ),
            len(request.token_ids)
            + len(request.begun) * (1 if request.hands_over else request.sampling.max_tokens or 0),
        )

    def _admit(self, job: Job) -> None:
        request = job.request
        if self._draining or (self._states is not None and not job.needs <= self._open):
            raise self._closed()
        check_request(request, self._engine)
        if request.hands_over and self._handing_engine is None:
            raise InvalidRequest("this instance does not hand over", param="hands_over")
        if len(self._jobs) >= self._settings.max_concurrent_requests:
            raise Overloaded(f"{self._settings.max_concurrent_requests} requests are open, which is the limit")
        nbytes = sum(round_up(placement.ticket.slot_nbytes) for placement in request.placements)
        if nbytes > self._settings.tensor_cache.max_embedding_bytes:
            raise InvalidRequest(
                f"the request's embeddings take {nbytes} bytes, the limit is {self._settings.tensor_cache.max_embedding_bytes}"
            )
        if (waiting := self._waiting) >= self._settings.tensor_cache.max_waiting_requests:
            raise Overloaded(f"{waiting} requests are waiting, which is the limit")
        if request.kv_segments:
            job.arriving = self._arriving(job)
        self._jobs.add(job)
        self._watched_load.notify()

    async def _answers(self, job: Job) -> dict[int, Answer]:
        """An answer per choice to run, after the tokens that it has already."""
        request = job.request
        begun = request.begun
        answers = {choice: Answer(self._new_detokenizer(), request.sampling, choice) for choice in begun}
        if request.continued:
            async with self._deadline(job):
                await self._offload.run(_replay, answers, begun)
        return answers

    async def _prepare(self, job: Job) -> tuple[Ready, Sequences]:
        """Acquire the request's embeddings, and room for what it hands over, then submit it to the engine, and bring the keys
        and values that it can get.
        """
        arrived, pull_s, grammar, kv = Arrived((), ()), 0.0, None, None
        async with self._deadline(job):
            if job.request.sampling.response_format is not None:
                grammar = await self._offload.run(self._new_grammar, job.request.sampling.response_format)
            if job.request.placements:
                began_s = self._clock()
                job.in_receiver = True
                arrived = await self._receiver.acquire(job.job_id, job.request.placements, job.turn)
                pull_s = self._clock() - began_s
            if job.request.hands_over:
                job.handing = await self._handing(job)
            sequences = self._submit(job, arrived, grammar)
            if job.handing is None and not job.request.early:
                job.keeping = self._keeping(job)
            began_s = await sequences.joined()
            job.has_begun = True
            if job.arriving is not None:
                self._scope.spawn(job.arriving.run(), name="arriving")
                kv = await job.arriving.over()
            if job.keeping is not None:
                job.keeping.begin(0 if job.arriving is None else job.arriving.pulled)
        queue_s = max(0.0, began_s - job.arrived_s - pull_s)
        return Ready(arrived.reports, queue_s, pull_s, kv), sequences

    def _arriving(self, job: Job) -> Arriving:
        """Raises InvalidRequest."""
        offered, ignored = usable_segments(job.request, self._kv_kind)
        return Arriving(
            job.job_id,
            offered,
            ignored,
            lengths=arriving_lengths(job.request),
            receiver=self._receiver,
            loop=self._loop,
            engine=self._handing_engine,
            turn=job.turn,
            clock=self._clock,
            record=self._record,
            is_prefix=not job.request.continued,
        )

    async def _handing(self, job: Job) -> Handing | None:
        """Reserve room for the keys and values of all tokens of the request that are known, before they are computed."""
        request, kv, engine = job.request, self._kv, self._handing_engine
        if kv is None or engine is None:
            return None
        prompt = len(request.token_ids)
        wanted = stretches(kv.kind, prompt, {one: prompt + len(tokens) for one, tokens in request.begun.items()})
        slots = await kv.reserve([one.segment for one in wanted], job.turn)
        return self._start_handing(job, kv, engine, wanted, slots)

    def _start_handing(
        self, job: Job, kv: KvStore, engine: HandingTextEngine, wanted: Sequence[Stretch], slots: Sequence[Slot]
    ) -> Handing:
        handing = Handing(
            job.job_id,
            wanted,
            slots,
            kv=kv,
            loop=self._loop,
            engine=engine,
            pin_s=job.deadline_s - self._clock(),
            record=self._record,
        )
        self._scope.spawn(handing.run(), name="handing")
        return handing

    def _keeping(self, job: Job) -> Keeping | None:
        """What copies its keys and values for others that begin alike, if this instance does so."""
        kv, engine = self._kv, self._handing_engine
        if kv is None or engine is None or kv.published is None:
            return None
        choice, begun = next(iter(job.request.begun.items()))
        keeping = Keeping(
            job.job_id,
            choice,
            len(job.request.token_ids) + len(begun),
            kv=kv,
            loop=self._loop,
            engine=engine,
            record=self._record,
        )
        self._scope.spawn(keeping.run(), name="keeping")
        return keeping

    def _submit(self, job: Job, arrived: Arrived, grammar: TokenGrammar | None) -> Sequences:
        request = job.request
        sampling = request.sampling.seeded(self._rng)  # a router of the release before draws no seed
        engine_request = EngineRequest(
            job.job_id,
            request.token_ids,
            arrived.inputs,
            sampling,
            grammar,
            request.tenant_salt,
            job.turn,
            request.continued,
            pauses=request.hands_over,
            arriving=0 if job.arriving is None else job.arriving.positions,
        )
        self._jobs.enters_engine(job)
        return self._loop.submit(
            engine_request,
            on_copied=partial(self._receiver.leave, job.job_id),
            on_over=partial(self._receiver.copies_gone, job.job_id),
        )

    def _release(self, job: Job) -> None:
        """Release everything that the request still has, wherever it ended."""
        if job.in_engine:
            self._loop.cancel(job.job_id)
        elif job.in_receiver:
            self._receiver.leave(job.job_id)
        else:
            for placement in job.request.placements:
                self._receiver.releases.add(placement.ticket)
        self._receiver.copies_gone(job.job_id)
        if job.handing is not None:
            job.handing.stop()
        if job.keeping is not None:
            job.keeping.stop()
        if job.arriving is not None:
            job.arriving.stop()
        else:
            for one in job.request.kv_segments:
                self._receiver.releases.add(one.ticket)
        self._jobs.over(job)
        self._watched_load.notify()

    @asynccontextmanager
    async def _deadline(self, job: Job) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(max(0.0, job.deadline_s - self._clock())) as job.limit:
                yield
        except TimeoutError:
            if job.is_leaving and self._clock() < job.deadline_s:
                raise _LeavingError from None
            raise DeadlineExceeded(f"the request was not answered within {job.request.timeout_s:.3g} s") from None
        finally:
            job.limit = None

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sweep_interval_s)
            await self._receiver.tick()
            if self._kv is not None:
                self._kv.sweep()


class _LeavingError(Exception):
    """A wait has ended as the instance drains, or a stage closes."""


def _replay(answers: Mapping[int, Answer], begun: Mapping[int, Sequence[int]]) -> None:
    for choice, answer in answers.items():
        answer.replay(begun[choice])


def _finished(reason: FinishReason, completion_tokens: int, sequences: Sequences, choice: int) -> Finished:
    (first_s, last_s), joined_s = sequences.times_s(choice), sequences.joined_s
    if first_s is None or last_s is None or joined_s is None:
        return Finished(reason, completion_tokens, prefill_s=0.0, decode_s=0.0, choice=choice)
    preemptions, preempted_s = sequences.preempted(choice)
    prefill_s = sequences.prefill_s(choice)
    return Finished(reason, completion_tokens, prefill_s, last_s - first_s, choice, preemptions, preempted_s)
