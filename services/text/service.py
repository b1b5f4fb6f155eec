"""The text service: ``ports.Text`` over an engine and a tensor receiver."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from triptych.domain.generation import Finished, FinishReason, Ready, TextEvent, TextRequest
from triptych.domain.instance import InstanceInfo, InstanceLoad, ServedPart, StageLoad, TransportOffer
from triptych.domain.sampling import ResponseFormat
from triptych.domain.stage import Role, Stage
from triptych.errors import DeadlineExceeded, InvalidRequest, Overloaded, TriptychError, Unavailable
from triptych.machine.extents import round_up
from triptych.policy.queueing import Turn, as_called, longest_waits
from triptych.ports import Clock, EngineRequest, Offload, Rng, TextEngine, TokenGrammar
from triptych.runtime.tasks import TaskScope
from triptych.runtime.watched_value import WatchedValue
from triptych.tokens.answer_text import Detokenizer
from triptych.transport.receiver import Arrived, TensorReceiver

from .answer import Answer
from .checks import check_request
from .device_scheduler import DeviceScheduler
from .engine_loop import EngineLoop
from .record import NO_RECORD, Record
from .sequences import Sequences
from .settings import TextSettings


@dataclass(slots=True)
class _Job:
    """One request. Its id is unique in this instance, as a caller may send the same request again."""

    job_id: str
    request: TextRequest
    arrived_s: float
    deadline_s: float
    turn: Turn
    """Its position in every queue of this instance."""
    tokens: int
    """Prompt tokens and the most that may be generated."""
    in_receiver: bool = False
    """The receiver has the tickets and releases their leases."""
    in_engine: bool = False
    """The engine has the request and signals when it no longer needs the embeddings."""
    has_begun: bool = False
    """The engine has started the request."""
    has_answered: bool = False
    """There is a first token, so its prompt has been computed."""


class TextService:
    """``ports.Text``. Call ``start`` once its scope is open."""

    def __init__(
        self,
        engine: TextEngine,
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
    ) -> None:
        """``engine_thread`` runs one call at a time, always in the same thread. ``rng`` draws missing seeds.

        ``scheduler`` is set if the instance also encodes in that thread. ``new_grammar`` blocks, is called through
        ``offload``, and raises InvalidRequest.
        """
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
        )
        self._jobs: dict[str, _Job] = {}
        self._job_numbers = itertools.count()
        self._draining = False

    def start(self) -> None:
        """Start work, which ends with the scope."""
        self._scope.spawn(self._loop.run(), name="engine", vital=True)
        self._scope.spawn(self._sweep(), name="sweep", vital=True)

    def lose_engine(self) -> None:
        """The engine cannot go on: the part that drives it ends, and its requests fail with InstanceLost."""
        self._loop.lose()

    async def describe(self) -> InstanceInfo:
        arena = self._receiver.arena
        return InstanceInfo(
            instance_id=arena.instance_id,
            epoch=arena.epoch,
            role=Role.PD,
            model=self._engine.model,
            arena_bytes=self._receiver.cache.capacity_bytes,
            offers=self._offers(),
            kv_tokens=self._engine.kv_tokens,
            parts=() if self._part is None else (self._part,),
            continues=True,
            prefills_early=self._engine.finds_prefixes,
        )

    async def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        """``Ready`` is sent when the engine has started the request. Closing the generator ends it within one step.

        ``queue_s`` is all time before ``Ready`` except pulling. Raises before ``Ready``: TransferFailed,
        ContextTooLong, InvalidRequest, ModelNotFound, Overloaded, Unavailable; at any time: DeadlineExceeded and
        EngineFailure. Leases in the request's tickets are released in any case.
        """
        job, record = self._job(request), NO_RECORD if request.early else self._record
        try:
            self._admit(job)
            answers = await self._answers(job)
            ready, sequences = await self._prepare(job)
            record.ready(ready)
            yield (ready,)
            while answers:
                async with self._deadline(job):
                    ready_tokens = await sequences.next()
                job.has_answered = True
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
                if events:
                    yield events
                if answers and self._settings.stream_interval_s:
                    async with self._deadline(job):
                        await sequences.settled(self._settings.stream_interval_s)
        except TriptychError as error:
            record.failed(error)
            raise
        finally:
            self._release(job)

    def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        return self._watched_load.watch()

    def load(self) -> InstanceLoad:
        """Requests that have not started count as prefill load, the others as decode load, as both share a batch.

        A prompt counts as prefill load until the first token of its answer, the most that may be generated as decode
        load.
        """
        waiting, running = self._loop.requests
        prompts, tokens = 0, self._loop.pending_tokens
        for job in self._jobs.values():
            if not job.has_answered:
                prompts += len(job.request.token_ids)
            if not job.in_engine:
                tokens += job.tokens
                waiting += 1
        prompts = min(prompts, tokens)
        stages = {Stage.PREFILL: StageLoad(prompts, waiting), Stage.DECODE: StageLoad(tokens - prompts, running)}
        return InstanceLoad(stages, self._draining)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the load may have changed."""
        self._watched_load.on_change(listener)

    def longest_waits_s(self) -> dict[int, float]:
        """By priority, the longest wait of a request for its embeddings or the engine."""
        now_s = self._clock()
        waiting = ((job.request.priority, now_s - job.arrived_s) for job in self._jobs.values() if not job.has_begun)
        return longest_waits(waiting)

    async def missing(self) -> tuple[str, ...]:
        """Why the instance is not ready; empty if it is."""
        return ("it is draining",) if self._draining else ()

    async def drain(self) -> None:
        """Refuse new requests. Returns once the running ones have ended."""
        self._draining = True
        self._watched_load.notify()
        await self._watched_load.wait_until(lambda _: not self._jobs)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        self._receiver.cache.validate()

    # --- requests ----------------------------------------------------------------------------------------------------

    def _job(self, request: TextRequest) -> _Job:
        number, now_s = next(self._job_numbers), self._clock()
        deadline_s = now_s + request.timeout_s
        return _Job(
            f"{request.request_id}/{number}",
            request,
            now_s,
            deadline_s,
            as_called(
                priority=request.priority,
                deadline_s=deadline_s,
                arrived_s=now_s,
                arrival=number,
                due_in_s=request.due_in_s,
                lost_in_s=request.lost_in_s,
                aged_in_s=request.aged_in_s,
                behind_s=request.behind_s,
            ),
            len(request.token_ids) + len(request.begun) * (request.sampling.max_tokens or 0),
        )

    def _admit(self, job: _Job) -> None:
        request = job.request
        if self._draining:
            raise Unavailable("the text instance is draining")
        check_request(request, self._engine)
        if len(self._jobs) >= self._settings.max_concurrent_requests:
            raise Overloaded(f"{self._settings.max_concurrent_requests} requests are open, which is the limit")
        nbytes = sum(round_up(placement.ticket.slot_nbytes) for placement in request.placements)
        if nbytes > self._settings.tensor_cache.max_embedding_bytes:
            raise InvalidRequest(
                f"the request's embeddings take {nbytes} bytes, the limit is {self._settings.tensor_cache.max_embedding_bytes}"
            )
        if (waiting := self.load().stages[Stage.PREFILL].pending) >= self._settings.tensor_cache.max_waiting_requests:
            raise Overloaded(f"{waiting} requests are waiting, which is the limit")
        self._jobs[job.job_id] = job
        self._watched_load.notify()

    async def _answers(self, job: _Job) -> dict[int, Answer]:
        """An answer per choice to run, after the tokens that it has already."""
        request = job.request
        begun = request.begun
        answers = {choice: Answer(self._new_detokenizer(), request.sampling, choice) for choice in begun}
        if request.continued:
            async with self._deadline(job):
                await self._offload.run(_replay, answers, begun)
        return answers

    async def _prepare(self, job: _Job) -> tuple[Ready, Sequences]:
        """Acquire the request's embeddings, then submit it to the engine."""
        arrived, pull_s, grammar = Arrived((), ()), 0.0, None
        async with self._deadline(job):
            if job.request.sampling.response_format is not None:
                grammar = await self._offload.run(self._new_grammar, job.request.sampling.response_format)
            if job.request.placements:
                began_s = self._clock()
                job.in_receiver = True
                arrived = await self._receiver.acquire(job.job_id, job.request.placements, job.turn)
                pull_s = self._clock() - began_s
            sequences = self._submit(job, arrived, grammar)
            began_s = await sequences.joined()
        job.has_begun = True
        queue_s = max(0.0, began_s - job.arrived_s - pull_s)
        return Ready(arrived.reports, queue_s, pull_s), sequences

    def _submit(self, job: _Job, arrived: Arrived, grammar: TokenGrammar | None) -> Sequences:
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
        )
        job.in_engine = True
        return self._loop.submit(
            engine_request,
            on_copied=partial(self._receiver.leave, job.job_id),
            on_over=partial(self._receiver.copies_gone, job.job_id),
        )

    def _release(self, job: _Job) -> None:
        """Release everything that the request still has, wherever it ended."""
        if job.in_engine:
            self._loop.cancel(job.job_id)
        elif job.in_receiver:
            self._receiver.leave(job.job_id)
        else:
            for placement in job.request.placements:
                self._receiver.releases.add(placement.ticket)
        self._receiver.copies_gone(job.job_id)
        self._jobs.pop(job.job_id, None)
        self._watched_load.notify()

    @asynccontextmanager
    async def _deadline(self, job: _Job) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(max(0.0, job.deadline_s - self._clock())):
                yield
        except TimeoutError:
            raise DeadlineExceeded(f"the request was not answered within {job.request.timeout_s:.3g} s") from None

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sweep_interval_s)
            await self._receiver.tick()


def _replay(answers: Mapping[int, Answer], begun: Mapping[int, Sequence[int]]) -> None:
    for choice, answer in answers.items():
        answer.replay(begun[choice])


def _finished(reason: FinishReason, completion_tokens: int, sequences: Sequences, choice: int) -> Finished:
    (first_s, last_s), joined_s = sequences.times_s(choice), sequences.joined_s
    if first_s is None or last_s is None or joined_s is None:
        return Finished(reason, completion_tokens, prefill_s=0.0, decode_s=0.0, choice=choice)
    preemptions, preempted_s = sequences.preempted(choice)
    return Finished(reason, completion_tokens, first_s - joined_s, last_s - first_s, choice, preemptions, preempted_s)
