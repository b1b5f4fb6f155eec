"""The text service: ``ports.Text`` over an engine and a tensor receiver, and a holder of the keys and values that it exports."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.generation import TextEvent, TextRequest
from triptych.domain.instance import InstanceInfo, InstanceLimits, InstanceLoad, ServedPart, TransportOffer
from triptych.domain.lora import LoadedLora, LoadLora
from triptych.domain.sampling import ResponseFormat
from triptych.domain.stage import Stage
from triptych.errors import InvalidRequest, LeaseLost
from triptych.machine.stage_states import StageStates
from triptych.policy.batching import most_copied_nbytes
from triptych.policy.queueing import longest_waits
from triptych.ports import AdjustableSteps, Offload, TextEngine, TokenGrammar
from triptych.runtime.batch_limits import LiveLimits
from triptych.runtime.hinted_load import watch_with_hints
from triptych.runtime.loras import Loras
from triptych.runtime.metrics import Read
from triptych.runtime.watched_value import WatchedValue
from triptych.runtime.world import World
from triptych.tokens.answer_text import Detokenizer
from triptych.transport.receiver import TensorReceiver

from .device_scheduler import DeviceScheduler
from .engine_loop import EngineLoop
from .exports import Exporter
from .generation import Generation, Serving
from .imports import Importer
from .jobs import Jobs
from .kv_store import KvStore
from .open_stages import OpenStages, stage_loads
from .record import Record
from .settings import TextSettings

logger = logging.getLogger(__name__)

_TOLERATED_GAP = 4
"""In multiples of the objective between tokens: beyond it an answer leaves an instance where items go first."""


@dataclass(frozen=True, slots=True)
class LoadedText:
    """An engine that works, the thread that runs it, and what reads and bounds its tokens."""

    engine: TextEngine
    part: ServedPart
    thread: Offload
    """Runs one call at a time, always in the same thread."""
    new_detokenizer: Callable[[], Detokenizer]
    new_grammar: Callable[[ResponseFormat], TokenGrammar]
    """Blocks. Raises InvalidRequest."""
    metrics: Read | None = None
    """The engine's own metrics, if it has some."""
    when_lost: Callable[[Callable[[], None]], None] | None = None
    """Sets what the engine calls, in any thread, when it notices between two steps that it cannot go on."""


class TextService:
    """``ports.Text``, and of ``ports.Encoder`` what a holder has. Call ``start`` once its scope is open."""

    def __init__(
        self,
        settings: TextSettings,
        world: World,
        loaded: LoadedText,
        receiver: TensorReceiver,
        *,
        offers: Callable[[], tuple[TransportOffer, ...]],
        offload: Offload,
        record: Record,
        scheduler: DeviceScheduler | None,
        kv: KvStore | None,
        states: StageStates | None,
    ) -> None:
        """``scheduler`` is set if the instance also encodes in the engine's thread. ``offload`` compiles grammars and reads adapters.

        ``offers`` are of the arena that others read, if there is one. ``kv``: the part of that arena for keys and values; None if they
        are not exported. ``states``: of an instance that switches. Read only.
        """
        engine, scope, clock = loaded.engine, world.scope, world.clock
        self._engine = engine
        self._receiver = receiver
        self._settings = settings
        self._offers = offers
        self._scope = scope
        self._clock = clock
        self._part = loaded.part
        self._kv = kv
        self._jobs = Jobs()
        self._stages = OpenStages(settings.role, states)
        self._numbers = count()
        self._watched_load = WatchedValue(self.load, settings.load_reports)
        self._loop = EngineLoop(
            engine,
            loaded.thread,
            clock=clock,
            on_change=self._watched_load.notify,
            on_gap=record.token_gap,
            on_step=record.stepped,
            scheduler=scheduler,
            most_copied_bytes=lambda: most_copied_nbytes(self._stages.open, settings.kv_bytes_per_step),
        )
        self.loras = Loras(
            engine.loras,
            engine.model.model_id,
            settings.lora_limits,
            root=settings.lora_root,
            between=self._loop.between,
            is_used=self._jobs.names_lora,
            reading=offload,
            scope=scope,
            load=self._watched_load,
        )
        """For reading, and to load at start."""
        self.live_limits = LiveLimits((self,), self._watched_load.notify)
        """Of a text instance that encodes as well, those of the whole instance count."""
        self._steps_at_start = None if engine.steps is None else _limits_of(engine.steps)
        if kv is not None:
            kv.store.on_change(self._watched_load.notify)
        self._kv_kind = None if engine.kv is None else engine.kv.kind
        tpot_slo_s = settings.engine_options.tpot_slo_s
        is_lender = scheduler is not None and scheduler.turns.encode_first
        self._serving = Serving(
            settings=settings,
            engine=engine,
            loop=self._loop,
            importer=Importer(receiver, self._loop, engine.kv, scope, clock, record),
            exporter=None
            if kv is None or engine.kv is None
            else Exporter(kv, self._loop, engine.kv, scope, clock, record),
            jobs=self._jobs,
            stages=self._stages,
            loras=self.loras,
            new_detokenizer=loaded.new_detokenizer,
            new_grammar=loaded.new_grammar,
            offload=offload,
            rng=world.rng,
            clock=clock,
            record=record,
            notify=self._watched_load.notify,
            tolerated_gap_s=inf if tpot_slo_s is None or not is_lender else _TOLERATED_GAP * tpot_slo_s,
        )

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
            parts=(self._part,),
            continues=True,
            prefills_early=self._engine.finds_prefixes,
            kv_kind="" if self._kv_kind is None else self._kv_kind.digest,
            transfers_kv=self._kv is not None,
            kv_segment_tokens=0 if self._kv_kind is None else self._kv_kind.segment_tokens,
            kv_position_bytes=0 if self._kv_kind is None else self._kv_kind.position_nbytes,
            switchable=None if self._stages.states is None else self._stages.states.widest,
        )

    def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        """``Ready`` is sent when the engine has started the request and what it imports has arrived. Closing the generator ends it
        within one step.

        ``queue_s`` is all time before ``Ready`` except pulling. Raises before ``Ready``: TransferFailed,
        ContextTooLong, InvalidRequest, ModelNotFound, Overloaded, Unavailable; at any time: DeadlineExceeded and
        EngineFailure. Leases in the request's tickets are released in any case, and those of ``KvTransferred`` if the caller
        leaves without it.
        """
        return Generation(request, next(self._numbers), self._serving).events()

    async def load_lora(self, order: LoadLora) -> LoadedLora:
        return await self.loras.order(order)

    async def unload_lora(self, name: str) -> None:
        self.loras.unload(name)

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        """Raises InvalidRequest: of ``ports.Encoder`` it has only what holders have."""
        raise InvalidRequest(
            f"item {request.item}: this instance does not encode, its role is {self._settings.role.value}"
        )

    async def lease(self, request: LeaseRequest) -> Ticket:
        """On a segment of keys and values. One without a generation is on the prefix of another prompt: no drain waits for those."""
        if self._kv is None:
            raise LeaseLost("this instance holds nothing")
        if request.generation is None and self._stages.draining and not self._jobs:
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
        """The load of each open stage; one that has switched to none of text says nothing."""
        unstarted, running = self._loop.requests
        waiting = unstarted + self._jobs.outside
        tokens = self._loop.pending_tokens + self._jobs.outside_tokens
        stages = stage_loads(
            self._stages.open,
            waiting=waiting,
            running=running,
            tokens=tokens,
            unanswered_tokens=self._jobs.unanswered_tokens,
            leased_bytes=0 if self._kv is None else self._kv.store.memory.leased_bytes,
            free_tokens=self._loop.load.free_tokens,
        )
        return self._stages.report(stages, self.live_limits.report(), self.loras.loaded)

    @property
    def batch_limits(self) -> InstanceLimits:
        steps = self._engine.steps
        return InstanceLimits() if steps is None else _limits_of(steps)

    def check_batch_limits(self, wanted: InstanceLimits) -> None:
        """Raises InvalidRequest for what the engine has no memory for, and for a step that has more sequences than tokens."""
        if (steps := self._engine.steps) is None:
            return
        sequences, tokens = self._steps(wanted)
        if not 1 <= sequences <= steps.most_sequences:
            text = f"max_sequences is {sequences}, must be from 1 to {steps.most_sequences}"
            raise InvalidRequest(text, param="max_sequences")
        if not sequences <= tokens <= steps.most_tokens:
            text = (
                f"token_budget is {tokens}, must be from {sequences}, the sequences of a step, to {steps.most_tokens}"
            )
            raise InvalidRequest(text, param="token_budget")

    def limit_batches(self, wanted: InstanceLimits) -> None:
        """It takes effect between two steps, and is reported then."""
        if (steps := self._engine.steps) is not None:
            done = self._loop.between(partial(steps.limit_steps, *self._steps(wanted)))
            done.add_done_callback(lambda _: self._watched_load.notify())

    def _steps(self, wanted: InstanceLimits) -> tuple[int, int]:
        """Sequences and tokens of a step. As at the start, a step has room for all sequences if nothing else is said."""
        start = self._steps_at_start or InstanceLimits()
        sequences = wanted.over(start).max_sequences or 0
        tokens = wanted.token_budget
        return sequences, max(sequences, start.token_budget or 0) if tokens is None else tokens

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
        return ("it is draining",) if self._stages.draining else ()

    async def drain(self) -> None:
        """Refuse new requests. Returns once the running ones have ended and returned the leases of others, and then once nobody needs
        what they transferred, or after ``kv_transfer_wait_s``.

        If the settings say so, those that have not begun end with Unavailable, and answers are transferred.
        """
        self._stages.draining = True
        self._watched_load.notify()
        if self._settings.transfer_kv_on_drain and self._kv is not None:
            for job in self._jobs:
                job.departure.want("drain")
        await self._watched_load.wait_until(lambda _: not self._jobs)
        await self._receiver.releases.released()
        if self._kv is not None:
            kv = self._kv
            try:
                async with asyncio.timeout(self._settings.kv_transfer_wait_s):
                    await self._watched_load.wait_until(lambda _: not kv.leases)
            except TimeoutError:
                logger.warning("drained with %d leases on what was transferred: what was not pulled is lost", kv.leases)

    def stages_changed(self) -> None:
        """Other stages are open now. What has not begun at a closing one ends with StageClosed, and what is decoded is transferred
        if decode closes; prompts that have begun are computed.
        """
        for job in self._jobs:
            closed = job.needs - self._stages.open
            if closed and (not job.has_begun or Stage.DECODE in closed):
                job.departure.want("switch")
        self._stages.changed()
        self._watched_load.notify()

    def is_idle(self, stage: Stage) -> bool:
        """Whether nothing of this stage runs here."""
        return not any(job.runs_at(stage) for job in self._jobs)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        self._jobs.validate()
        self._receiver.cache.validate()
        if self._kv is not None:
            self._kv.store.memory.validate()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sweep_interval_s)
            await self._receiver.tick()
            if self._kv is not None:
                self._kv.sweep()


def _limits_of(steps: AdjustableSteps) -> InstanceLimits:
    return InstanceLimits(max_sequences=steps.max_sequences, token_budget=steps.token_budget)
