"""One request of the text service, from its admission to its last event."""

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from math import inf

from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.generation import Finished, FinishReason, KvTransferred, Ready, TextEvent, TextRequest
from triptych.domain.kv_segment import SealedSegment
from triptych.domain.sampling import ResponseFormat
from triptych.errors import InvalidRequest, Overloaded, TriptychError
from triptych.machine.arena.extents import round_up
from triptych.policy.queueing import as_called
from triptych.ports import Clock, Offload, Rng, TextEngine, TokenGrammar
from triptych.runtime.loras import Loras
from triptych.tokens.answer_text import Detokenizer

from .answer import Answer
from .checks import check_request
from .departure import DepartsError, Departure
from .engine_loop import EngineLoop
from .exports import Exporter, KvPrefix, KvTransfer
from .imports import Importer, Imports
from .jobs import Job, Jobs
from .open_stages import OpenStages
from .record import NO_RECORD, Record
from .sequences import Sequences
from .settings import TextSettings

_WHOLE_S = 0.05
"""How long tokens of an answer that is read as a whole wait for others, seconds."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Collaborators that the requests of an instance share."""

    settings: TextSettings
    engine: TextEngine
    loop: EngineLoop
    importer: Importer
    exporter: Exporter | None
    """None if keys and values are not exported."""
    jobs: Jobs
    stages: OpenStages
    loras: Loras
    new_detokenizer: Callable[[], Detokenizer]
    new_grammar: Callable[[ResponseFormat], TokenGrammar]
    offload: Offload
    rng: Rng
    clock: Clock
    record: Record
    notify: Callable[[], None]
    """The load may have changed."""
    tolerated_gap_s: float
    """Between two tokens of an answer; beyond it, the answer leaves."""

    @property
    def waiting(self) -> int:
        """Requests that the engine has not started."""
        return self.loop.requests[0] + self.jobs.outside


class Generation:
    """Run ``events`` once; closing it ends the request within one step."""

    def __init__(self, request: TextRequest, number: int, serving: Serving) -> None:
        """``number``: unique in this instance, and rising."""
        now_s = serving.clock()
        deadline_s = now_s + request.timeout_s
        self._departure = Departure(timeout_s=request.timeout_s, deadline_s=deadline_s, clock=serving.clock)
        queue_position = as_called(
            priority=request.priority,
            deadline_s=deadline_s,
            arrived_s=now_s,
            arrival=number,
            position=request.position,
        )
        self._begun = request.begun
        """By choice that is to run, the tokens that it has already."""
        most = 1 if request.transfers_kv else request.sampling.max_tokens or 0
        self._job = Job(
            f"{request.request_id}/{number}",
            request,
            now_s,
            deadline_s,
            queue_position,
            self._departure,
            tokens=len(request.token_ids) + len(self._begun) * most,
        )
        self._request = request
        self._serving = serving
        self._loop = serving.loop
        self._record = NO_RECORD if request.early else serving.record
        self._tolerated_gap_s = inf if request.continued else serving.tolerated_gap_s
        self._imports = Imports(self._job, serving.importer)
        self._prefix: KvPrefix | None = None
        self._transfer: KvTransfer | None = None
        self._is_transferred = request.transfers_kv
        """Whether it goes on elsewhere once each choice has a token."""
        self._answered: set[int] = set()
        """The choices with a token from here."""
        self._interval_s = max(serving.settings.stream_interval_s, _WHOLE_S if request.whole else 0.0)
        """Between two messages of the answer, in which tokens collect."""

    async def events(self) -> AsyncGenerator[Sequence[TextEvent]]:
        """As ``TextService.generate``."""
        try:
            self._admit()
            try:
                answers = await self._new_answers()
                ready, sequences = await self._begin()
            except DepartsError:
                raise self._serving.stages.closed() from None
            self._record.ready(ready)
            yield (ready,)
            answered = self._answered
            while answers:
                outputs = await self._next(sequences)
                if self._departure.is_wanted and answered.issuperset(answers) and await self._pause(answers):
                    outputs += sequences.take()
                if events := self._take(outputs, answers, sequences):
                    yield events
                if self._is_transferred and answered.issuperset(answers):
                    break
                if answers and self._interval_s:
                    await self._collect(sequences)
            if answers:
                prefill_s = max(sequences.prefill_s(choice) for choice in answers)
                async with await self._transferred(answers.keys()) as segments:
                    yield (KvTransferred(segments, prefill_s),)
                    self._record.kv_transferred(len(segments), prefill_s, self._departure.why)
        except TriptychError as error:
            self._record.failed(error)
            raise
        finally:
            self._release()

    # --- before the first token --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Raises what the request is refused with."""
        serving, request, limits = self._serving, self._request, self._serving.settings.tensor_cache
        if not serving.stages.takes(self._job.needs):
            raise serving.stages.closed()
        check_request(request, serving.engine)
        serving.loras.check(request.lora)
        if request.transfers_kv and serving.engine.kv is None:
            raise InvalidRequest("this instance does not transfer", param="transfers_kv")
        if len(serving.jobs) >= serving.settings.max_concurrent_requests:
            raise Overloaded(f"{serving.settings.max_concurrent_requests} requests are open, which is the limit")
        nbytes = sum(round_up(placement.ticket.slot_nbytes) for placement in request.placements)
        if nbytes > limits.max_embedding_bytes:
            raise InvalidRequest(
                f"the request's embeddings take {nbytes} bytes, the limit is {limits.max_embedding_bytes}"
            )
        if (waiting := serving.waiting) >= limits.max_waiting_requests:
            raise Overloaded(f"{waiting} requests are waiting, which is the limit")
        self._imports.check()
        serving.jobs.add(self._job)
        serving.notify()

    async def _new_answers(self) -> dict[int, Answer]:
        """An answer per choice to run, after the tokens that it has already."""
        serving, request = self._serving, self._request
        answers = {choice: Answer(serving.new_detokenizer(), request.sampling, choice) for choice in self._begun}
        if request.continued:
            async with self._departure.bounded():
                await serving.offload.run(_replay, answers, self._begun)
        return answers

    async def _begin(self) -> tuple[Ready, Sequences]:
        """Get, in this order: grammar, embeddings, room for what is transferred, memory of the engine, keys and values."""
        serving, job, request = self._serving, self._job, self._request
        async with self._departure.bounded():
            grammar = None
            if request.sampling.response_format is not None:
                grammar = await serving.offload.run(serving.new_grammar, request.sampling.response_format)
            arrived, pull_s = await self._imports.embeddings()
            if request.transfers_kv and serving.exporter is not None:
                self._transfer = await serving.exporter.transfer(job)
            engine_request = EngineRequest(
                job.job_id,
                request.token_ids,
                arrived.inputs,
                request.sampling.seeded(serving.rng),  # a router of the release before draws no seed
                grammar,
                request.tenant_salt,
                job.queue_position,
                request.continued,
                pauses=request.transfers_kv,
                arriving=self._imports.kv_positions,
                lora=request.lora,
            )
            serving.jobs.enters_engine(job)
            sequences = self._loop.submit(
                engine_request, job.tokens, on_copied=self._imports.copied, on_over=self._imports.copies_gone
            )
            if serving.exporter is not None and self._transfer is None and not request.early:
                self._prefix = serving.exporter.keep_prefix(job)
            began_s = await sequences.joined()
            job.has_begun = True
            if request.transfers_kv:
                self._departure.settle("asked")
            kv = await self._imports.keys_and_values()
            if self._prefix is not None:
                self._prefix.begin(self._imports.pulled_positions)
        queue_s = max(0.0, began_s - job.arrived_s - pull_s)
        return Ready(arrived.reports, queue_s, pull_s, kv), sequences

    # --- tokens ------------------------------------------------------------------------------------------------------

    async def _next(self, sequences: Sequences) -> list[EngineOutput]:
        """The next tokens; none if the request is to leave first."""
        outputs: list[EngineOutput] = []
        with suppress(DepartsError):
            async with self._departure.bounded():
                outputs = await sequences.next()
        if sequences.longest_gap_s > self._tolerated_gap_s:
            self._tolerated_gap_s = inf  # it leaves for that once, as it may be held up anywhere
            self._departure.want("held_up")
        return outputs

    def _take(
        self, outputs: Sequence[EngineOutput], answers: dict[int, Answer], sequences: Sequences
    ) -> list[TextEvent]:
        """Take what to send of these tokens. Answers that end with them are removed."""
        events: list[TextEvent] = []
        if outputs and not self._job.is_decoded:
            self._serving.stages.served(self._serving.jobs.got_tokens(self._job))
        for output in outputs:
            choice = output.choice
            answer = answers[choice]
            self._answered.add(choice)
            waited_s = self._serving.clock() - sequences.last_token_s(choice) if self._interval_s else 0.0
            chunk, reason = answer.feed(output.token_ids, output.finish_reason, output.scores, waited_s)
            if chunk.token_ids or chunk.text:
                events.append(chunk)
            if reason is not None:
                self._loop.cancel_choice(self._job.job_id, choice)  # stop strings are not known to the engine
                del answers[choice]
                end = _finished(reason, answer.completion_tokens, sequences, choice)
                self._record.finished(end)
                events.append(end)
        return events

    async def _collect(self, sequences: Sequences) -> None:
        """Let tokens collect for the next message."""
        with suppress(DepartsError):
            async with self._departure.bounded():
                await sequences.settled(self._interval_s)

    # --- going on elsewhere ------------------------------------------------------------------------------------------

    async def _pause(self, answers: Mapping[int, Answer]) -> bool:
        """Get no more tokens, and transfer what there is. False, and nothing has changed, if there is no room for it, or the caller
        takes no transfer.
        """
        exporter, job = self._serving.exporter, self._job
        self._departure.is_wanted = False  # it is tried once
        if exporter is None or not self._request.kv_lease_s > 0:
            return False
        if self._prefix is not None:
            self._prefix.stop()
            await self._prefix.wait_until_done()
        tokens = {choice: answer.completion_tokens - 1 for choice, answer in answers.items()}
        self._transfer = exporter.transfer_now(job, tokens)
        if self._transfer is None:
            return False
        self._is_transferred = True
        self._departure.settle()
        async with self._departure.bounded():
            await self._loop.between(partial(exporter.access.pause, job.job_id))
        return True

    async def _transferred(self, choices: Collection[int]) -> AbstractAsyncContextManager[tuple[SealedSegment, ...]]:
        """The sealed segments of these choices, with leases, to be sent to the caller within. The engine has forgotten the request."""
        if self._transfer is None:
            return nullcontext(())
        async with self._departure.bounded():
            await self._transfer.sealed()
        self._loop.cancel(self._job.job_id)  # its memory is free before the answer goes on elsewhere
        return self._transfer.granted(choices, self._request.kv_lease_s)

    # --- end ---------------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Release everything that the request still has, wherever it ended."""
        if self._job.in_engine:
            self._loop.cancel(self._job.job_id)
        self._imports.release(in_engine=self._job.in_engine)
        if self._transfer is not None:
            self._transfer.stop()
        if self._prefix is not None:
            self._prefix.stop()
        self._serving.jobs.ended(self._job)
        self._serving.notify()


def _replay(answers: Mapping[int, Answer], begun: Mapping[int, Sequence[int]]) -> None:
    for choice, answer in answers.items():
        answer.replay(begun[choice])


def _finished(reason: FinishReason, completion_tokens: int, sequences: Sequences, choice: int) -> Finished:
    preemptions, preempted_s = sequences.preempted(choice)
    prefill_s, decode_s = sequences.prefill_s(choice), sequences.decode_s(choice)
    return Finished(
        reason,
        completion_tokens,
        prefill_s,
        decode_s,
        choice,
        preemptions,
        preempted_s,
        sequences.cached_tokens(choice),
    )
