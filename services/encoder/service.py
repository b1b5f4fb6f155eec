"""The encoder service: ``ports.Encoder`` over an engine and an arena."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from triptych.domain.embedding import EmbeddingIdentity, LeaseId, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.instance import InstanceInfo, InstanceLimits, InstanceLoad, ServedPart, StageLoad, TransportOffer
from triptych.domain.lora import LoadedLora, LoadLora
from triptych.domain.media import Modality, digest_of
from triptych.domain.profile import ProfileIdentity
from triptych.domain.stage import Role, Stage
from triptych.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestTooLarge,
    StageClosed,
    TriptychError,
    Unavailable,
)
from triptych.machine.arena.published import HintReader, PublishedContents
from triptych.machine.stage_states import StageStates
from triptych.ports import EncoderEngine, Offload, PreparedT
from triptych.runtime.batch_limits import LiveLimits
from triptych.runtime.hinted_load import watch_with_hints
from triptych.runtime.loras import Loras
from triptych.runtime.watched_value import WatchedValue
from triptych.runtime.world import World
from triptych.transport.arena_store import ArenaStore, checked_lease_s

from .batcher import Batcher, too_many_tokens
from .embedding_files import EmbeddingFiles
from .file_tier import FileTier
from .record import Record
from .settings import EncoderSettings


@dataclass(frozen=True, slots=True)
class LoadedEncoder(Generic[PreparedT]):
    """An engine that works, and the threads that run it."""

    engine: EncoderEngine[PreparedT]
    identity: ProfileIdentity
    """What the engine runs, or the profile by which it sleeps."""
    compute: Offload
    """One thread, for one batch at a time."""
    prepare: Offload
    prepare_threads: int
    files: EmbeddingFiles | None = None
    """Where embeddings are kept longer than in the arena."""
    prepare_cores: int | None = None
    """Items that are preprocessed at the same time; None: one by each thread."""


class EncoderService(Generic[PreparedT]):
    """``ports.Encoder``. Call ``start`` once its scope is open."""

    def __init__(
        self,
        settings: EncoderSettings,
        world: World,
        loaded: LoadedEncoder[PreparedT],
        store: ArenaStore,
        *,
        offers: Callable[[], tuple[TransportOffer, ...]],
        copy: Offload,
        record: Record,
        files: FileTier | None,
        states: StageStates | None,
    ) -> None:
        """``copy`` also hashes items, so that a cache hit never waits for preprocessing. ``files`` keep embeddings longer than
        the arena does. ``states``: of an instance that switches; only to read.
        """
        self._states = states
        self._record = record
        self._part = ServedPart(
            loaded.identity,
            settings.batches.max_batch_items,
            prepare_cores=loaded.prepare_cores or loaded.prepare_threads,
        )
        self._files = files
        self._engine = loaded.engine
        self._store = store
        self._settings = settings
        self._offers = offers
        self._scope = world.scope
        self._copy = copy
        self._clock = world.clock
        self._watched_load = WatchedValue(self.load, settings.load_reports)
        store.on_change(self._watched_load.notify)
        self.published = PublishedContents(settings.published_embeddings)
        """What routers are told; of an instance that keeps keys and values in this arena, those too."""
        store.on_evicted(self.published.gone)
        self._batcher = Batcher(
            loaded.engine,
            store,
            settings.batches,
            scope=world.scope,
            prepare=loaded.prepare,
            max_preparing=loaded.prepare_threads,
            compute=loaded.compute,
            clock=world.clock,
            on_change=self._watched_load.notify,
            on_batch=record.batch,
            published=self.published,
            on_encoded=(lambda *_: None) if files is None else files.keep,
        )
        self.loras = Loras(
            loaded.engine.loras,
            loaded.engine.model.model_id,
            settings.lora_limits,
            root=settings.lora_root,
            between=loaded.compute.run,
            is_used=self._batcher.names_lora,
            reading=copy,
            scope=world.scope,
            load=self._watched_load,
        )
        """For reading, and to load at start."""
        self.live_limits = LiveLimits((self,), self._watched_load.notify)
        """Of an encoder in an instance of other stages, those of the whole instance count."""
        self._received_bytes = 0
        self._draining = False
        self._served = 0
        """Items that were encoded since the stage opened."""

    def start(self, *, runs_batches: bool = True) -> None:
        """Start work, which ends with the scope. Without ``runs_batches`` another loop calls ``batcher.encode_batch``."""
        if runs_batches:
            self._scope.spawn(self._batcher.run(), name="batches", vital=True)
        self._scope.spawn(self._sweep(), name="sweep of embeddings", vital=True)

    @property
    def batcher(self) -> Batcher[PreparedT]:
        """The batcher, for a loop that calls its ``encode_batch``."""
        return self._batcher

    async def describe(self) -> InstanceInfo:
        arena = self._store.arena
        return InstanceInfo(
            instance_id=arena.instance_id,
            epoch=arena.epoch,
            role=Role.E,
            model=self._engine.model,
            arena_bytes=self._store.memory.capacity_bytes,
            offers=self._offers(),
            encoder_version=self._engine.version,
            max_items=self._settings.batches.max_waiting_items,
            parts=(self._part,),
        )

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        """``queue_s`` is the time until the item's batch started, including preprocessing; ``encode_s`` is the rest.

        Raises like ``ports.Encoder.encode``, and Overloaded or RequestTooLarge at this instance's limits.
        """
        try:
            result = await self._encode_in_time(request)
        except TriptychError as error:
            self._record.refused(error)
            raise
        self._record.encoded(request, result)
        self._served += self._is_open and not result.cached
        return result

    async def _encode_in_time(self, request: EncodeRequest) -> EncodeResult:
        self._check(request)
        self._received_bytes += len(request.media)
        try:
            async with asyncio.timeout(request.timeout_s):
                return await self._encode(request)
        except TimeoutError:
            raise DeadlineExceeded(f"item {request.item} was not encoded within {request.timeout_s:.3g} s") from None
        finally:
            self._received_bytes -= len(request.media)

    async def lease(self, request: LeaseRequest) -> Ticket:
        return self._store.lease(request)

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        self._store.release(lease_ids)

    async def load_lora(self, order: LoadLora) -> LoadedLora:
        return await self.loras.order(order)

    async def unload_lora(self, name: str) -> None:
        self.loras.unload(name)

    def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        return watch_with_hints(self._watched_load, self.hints())

    def hints(self) -> HintReader:
        """What it holds and is encoding, for one watcher."""
        return self.published.reader()

    def load(self) -> InstanceLoad:
        """The current load."""
        queue = self._batcher.queue
        served = None if self._states is None else self._served
        encode = StageLoad(queue.pending_tokens, queue.pending_items, self._store.memory.leased_bytes, served=served)
        stages = {Stage.ENCODE: encode} if self._is_open else {}
        return InstanceLoad(stages, self._draining, limits=self.live_limits.report(), loras=self.loras.loaded)

    @property
    def batch_limits(self) -> InstanceLimits:
        return InstanceLimits(max_batch_items=self._batcher.queue.limits.max_batch_items)

    def check_batch_limits(self, wanted: InstanceLimits) -> None:
        """Raises InvalidRequest for more items than may wait."""
        most = self._settings.batches.max_waiting_items
        if not 1 <= self._items(wanted) <= most:
            raise InvalidRequest(
                f"max_batch_items is {wanted.max_batch_items}, must be from 1 to {most}: so many items may wait",
                param="max_batch_items",
            )

    def limit_batches(self, wanted: InstanceLimits) -> None:
        self._batcher.limit_items(self._items(wanted))

    def _items(self, wanted: InstanceLimits) -> int:
        at_start = self._settings.batches.max_batch_items
        return at_start if wanted.max_batch_items is None else wanted.max_batch_items

    @property
    def _is_open(self) -> bool:
        return self._states is None or Stage.ENCODE in self._states.open

    def stages_changed(self) -> None:
        """Other stages are open now. Items in no batch are refused if this one is not; slots and leases stay."""
        if not self._is_open:
            self._batcher.refuse_unbegun(_closed())
            self._served = 0
        self._watched_load.notify()

    def is_idle(self, stage: Stage) -> bool:
        """Whether nothing of this stage runs here."""
        return stage is not Stage.ENCODE or not self._batcher.queue.pending_items

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the load may have changed."""
        self._watched_load.on_change(listener)

    def longest_waits_s(self) -> dict[int, float]:
        """By priority, the longest wait of a caller for an item that is not being encoded."""
        return self._batcher.queue.longest_waits_s(self._clock())

    async def missing(self) -> tuple[str, ...]:
        """Why the instance is not ready; empty if it is."""
        return ("it is draining",) if self._draining else ()

    async def drain(self) -> None:
        """Refuse new items. Returns once nothing is being encoded and all leases are released or expired."""
        self._draining = True
        self._watched_load.notify()
        await self._watched_load.wait_until(
            lambda _: self._batcher.queue.pending_items == 0 and self._store.memory.leases == 0
        )

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        self._store.memory.validate()
        self.published.validate()
        self._batcher.queue.validate()

    def _check(self, request: EncodeRequest) -> None:
        if self._draining:
            raise Unavailable("the encoder is draining")
        if not self._is_open:
            raise _closed()
        if request.model != self._engine.model.model_id:
            raise ModelNotFound(f"this encoder serves {self._engine.model.model_id!r}, not {request.model!r}")
        self.loras.check(request.info.lora)
        nbytes, settings = len(request.media), self._settings
        if nbytes > settings.max_item_bytes:
            raise RequestTooLarge(f"item {request.item} has {nbytes} bytes, the limit is {settings.max_item_bytes}")
        if nbytes != request.info.nbytes:
            raise InvalidRequest(f"item {request.item} has {nbytes} bytes, {request.info.nbytes} were announced")
        checked_lease_s(request.lease_s)
        if request.reader_lease == request.router_lease:
            raise InvalidRequest(f"item {request.item} has the same lease id for two readers")
        if self._received_bytes + nbytes > settings.max_received_bytes:
            raise Overloaded(
                f"calls in progress hold {self._received_bytes} of {settings.max_received_bytes} media bytes, "
                f"this one has {nbytes}"
            )

    async def _encode(self, request: EncodeRequest) -> EncodeResult:
        key = await self._key(request)
        if self._files is not None and self._store.tokens(key) is None and not self._batcher.encodes(key):
            await self._files.restore(key)
        if request.info.modality is Modality.VIDEO and self._store.tokens(key) is None:
            # A model without a family asks its processor, and keeps the answer: not in this loop.
            await self._copy.run(self._engine.decoded_nbytes, request.info, request.shard)
        tokens = self._store.tokens(key)
        if tokens is None:
            self.loras.check(request.info.lora)  # it may have been unloaded meanwhile
            return await self._batcher.encode(key, request)
        if tokens > request.tokens:
            raise too_many_tokens(tokens, request)
        self.published.held(key, request.content)
        ticket = self._store.grant(key, request.reader_lease, request.lease_s, router_lease=request.router_lease)
        return EncodeResult(ticket, request.router_lease, cached=True, queue_s=0.0, encode_s=0.0)

    async def _key(self, request: EncodeRequest) -> bytes:
        """The embedding's identity, from the bytes; the caller's digest is only compared."""
        digest = await self._copy.run(digest_of, request.media)
        if digest != request.info.digest:
            raise InvalidRequest(f"item {request.item} does not match its announced digest")
        model = self._engine.model
        return EmbeddingIdentity(
            model_id=model.model_id,
            model_revision=model.revision,
            encoder_version=self._engine.version,
            processor_digest=self._engine.processor_digest,
            dtype=model.dtype,
            media=request.info,
            shard=request.shard,
            tenant_salt=request.tenant_salt,
        ).key

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sweep_interval_s)
            self._store.sweep()


def _closed() -> StageClosed:
    return StageClosed("the instance has switched and does not encode now")
