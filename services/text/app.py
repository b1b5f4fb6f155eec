"""Wires up the text instance: engine, memory, transports, stubs, threads.

Engines that compute are imported when they are loaded: torch and transformers take seconds, and engines that delay need neither.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc.aio
from triptych.engine.delay import DelayTextEngine, delay_costs

from triptych.domain.instance import ServedPart
from triptych.domain.profile import BadProfile, ProfileIdentity
from triptych.domain.stage import ModelPart, Stage
from triptych.engine.arenas import open_arena
from triptych.engine.checkpoint import DTYPES, Checkpoint, open_checkpoint
from triptych.engine.first_pass import answer_first
from triptych.families.model_files import BadModel
from triptych.machine.encoder.published_embeddings import PublishedEmbeddings
from triptych.machine.stage_states import StageStates
from triptych.policy.iteration import ImageBudget
from triptych.ports import Arena, HolderStub, Instance, LeaseCheck, ObservedTextEngine, Offload, StagedTextEngine
from triptych.rpc import encoder, instance
from triptych.rpc.app import RpcApp, server_of
from triptych.rpc.encoder import EncoderServicer
from triptych.rpc.instance import InstanceServicer
from triptych.rpc.registered import instance_registered
from triptych.rpc.server import Register, check_port
from triptych.rpc.stubs import holder_stub
from triptych.runtime.clock import monotonic
from triptych.runtime.host import instance_name, machine_name, new_epoch
from triptych.runtime.hub import model_directory, served_name
from triptych.runtime.metrics import Metrics, Read
from triptych.runtime.offload import ThreadOffload
from triptych.runtime.process import CannotStart, tls_identity
from triptych.runtime.registrar import SetStages
from triptych.runtime.tasks import TaskScope
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import TlsIdentity
from triptych.tokens.detokenize import IncrementalDetokenizer
from triptych.tokens.grammar import Grammars
from triptych.tokens.tokenizer import Tokenizer
from triptych.transport.arena import HostArena
from triptych.transport.arena_store import ArenaStore
from triptych.transport.memory import MemoryNetwork
from triptych.transport.peer_pool import PeerPool
from triptych.transport.receiver import TensorReceiver
from triptych.transport.releases import Releases
from triptych.transport.start import nobody_reads, start_transports
from triptych.transport.transport_set import TransportSet

from .device_scheduler import DeviceScheduler, VisionEncoder
from .engine_loop import handing_engine
from .gauges import KvMemory, watch, watch_stages
from .kv_store import MOST_PUBLISHED, KvStore
from .record import MeteredSwitches, TextRecord
from .residence import Residence
from .service import TextService
from .servicer import SERVICE_NAME, TextServicer
from .settings import TextSettings
from .switching import Switching, SwitchingService

logger = logging.getLogger(__name__)

_MAX_HOLDERS = 1024
"""Limit on concurrent connections."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine with what it was loaded from. One that sleeps runs what its profile is of."""

    engine: ObservedTextEngine
    part: ServedPart
    tokenizer: Tokenizer
    grammars: Grammars
    metrics: Read | None = None
    """The engine's own metrics, if it has some."""
    close: Callable[[], None] | None = None
    """Ends what the engine has started, in the engine's thread."""
    when_lost: Callable[[Callable[[], None]], None] | None = None
    """Sets what the engine calls, in any thread, when it notices between two steps that it cannot go on."""


@dataclass(frozen=True, slots=True)
class MountedEncoder:
    """The encoder in this process, as used by the text instance."""

    encoder: HolderStub
    """Its reader's interface, which reads from memory to memory."""
    network: MemoryNetwork
    """The network of both memory transports."""
    vision_encoder: VisionEncoder | None
    """Computes in the text engine's thread, in turns with it; None if it computes in its own, at the same time."""
    image_budget: Callable[[ObservedTextEngine], ImageBudget | None]
    """Of a turn, measured with this engine, in the engine's thread."""
    whole: Callable[[TextService], Instance]
    """Combines the text service and the encoder into one instance."""
    store: ArenaStore
    """Its arena, which also holds keys and values."""
    published: PublishedEmbeddings
    """What it tells routers that the arena holds."""
    register: Register
    """Adds the encoder's servicer to the server."""
    before_listening: Callable[[TextService, ObservedTextEngine], Awaitable[None]]
    """Completes the instance. Raises CannotStart."""


@asynccontextmanager
async def app(settings: TextSettings, telemetry: Telemetry | None = None) -> AsyncGenerator[RpcApp[TextService]]:
    """Load the engine, register the arena, listen. Raises CannotStart, and Unavailable if the port is in use."""
    check_port(settings.host, settings.port)
    telemetry = telemetry or Telemetry()
    tls = tls_identity(settings, telemetry)
    epoch = new_epoch()
    instance_id = settings.instance_id or instance_name("text", settings.port, epoch)
    engine_thread = ThreadOffload(1, name="text-engine")
    states = states_of(settings)
    try:
        async with (
            opened(
                settings,
                telemetry,
                model=settings.model,
                engine_thread=engine_thread,
                instance_id=instance_id,
                epoch=epoch,
                tls=tls,
                states=states,
            ) as running,
            instance_registered(
                settings,
                running.service,
                running,
                telemetry=telemetry,
                tls=tls,
                set_stages=switches(states, telemetry.metrics, running.service),
            ),
        ):
            yield running
    finally:
        engine_thread.close()


@asynccontextmanager
async def opened(
    settings: TextSettings,
    telemetry: Telemetry,
    *,
    model: Path | Checkpoint,
    engine_thread: Offload,
    instance_id: str,
    epoch: int,
    tls: TlsIdentity | None,
    states: StageStates | None = None,
    mounted: MountedEncoder | None = None,
    unloads: bool = False,
) -> AsyncGenerator[RpcApp[TextService]]:
    """All of ``app`` but the engine's thread, which a mounted encoder may share. ``states``: of an instance that switches. ``unloads``: its
    weights can leave the memory.
    """
    async with AsyncExitStack() as stack:
        checks = ThreadOffload(settings.check_threads, name="text-check")
        stack.callback(checks.close)
        loaded = await _loaded(settings, model, engine_thread, stack, can_unload=unloads)
        engine = loaded.engine
        _check_role(settings, engine)
        record = TextRecord(telemetry.metrics, engine.model, counts_tokens=loaded.metrics is None)
        own_store = None
        if mounted is None and settings.kv_arena_bytes and handing_engine(engine) is not None:
            own_store = await _own_store(settings, instance_id, epoch, engine_thread, stack)
        part = "" if mounted is None and own_store is None else "pulled"
        opening = partial(open_arena, instance_id=instance_id, epoch=epoch, device=settings.compute.device, part=part)
        arena = await engine_thread.run(opening, settings.transfers.arena, settings.image_cache_bytes)
        scope = TaskScope("text")
        network = None if mounted is None else mounted.network
        start = partial(_transports, settings, record=record, tls=tls, scope=scope)
        transports = await start(arena, nobody_reads, network=network)
        stack.push_async_callback(transports.close)
        offering = transports
        if own_store is not None:
            offering = await start(own_store.arena, own_store.may_read)
            stack.push_async_callback(offering.close)
        peers = PeerPool(
            partial(holder_stub, tls=tls, beyond_loopback=settings.allow_network or tls is not None),
            transports.connect,
            limit=_MAX_HOLDERS,
            clock=monotonic,
            own=None if mounted is None else (instance_id, epoch, mounted.encoder),
        )
        stack.push_async_callback(peers.close)

        await stack.enter_async_context(scope)
        receiver = _receiver(settings, arena, transports, peers, scope=scope, checks=checks, record=record)
        kv = _kv_store(settings, engine, own_store, mounted)
        service = TextService(
            engine,
            receiver,
            settings,
            offers=offering.offers,
            new_detokenizer=lambda: IncrementalDetokenizer(loaded.tokenizer),
            new_grammar=loaded.grammars.start,
            scope=scope,
            offload=checks,
            engine_thread=engine_thread,
            rng=random.SystemRandom(),
            clock=monotonic,
            record=record,
            part=loaded.part,
            scheduler=await _scheduler(settings, engine, mounted, engine_thread),
            kv=kv,
            states=states,
        )
        watch(
            telemetry.metrics,
            service,
            receiver,
            model=engine.model,
            kv=None if loaded.metrics is not None else partial(_kv_memory, engine),
            connections=peers.by_backend,
            preferred=transports.preferred,
            held=None if own_store is None else own_store.memory,
        )
        if loaded.metrics is not None:
            telemetry.metrics.watch(loaded.metrics)
        service.start()
        if loaded.when_lost is not None:
            loaded.when_lost(partial(_call_soon, asyncio.get_running_loop(), service.lose_engine))

        whole = service if mounted is None else mounted.whole(service)

        def register(server: grpc.aio.Server) -> None:
            InstanceServicer(whole).register(server)
            TextServicer(service).register(server)
            if mounted is not None:
                mounted.register(server)
            elif own_store is not None:
                EncoderServicer(service).register(server)

        holding = (encoder.SERVICE_NAME,) if mounted is not None or own_store is not None else ()
        listening = server_of(
            settings, (SERVICE_NAME, instance.SERVICE_NAME, *holding), register, telemetry=telemetry, tls=tls
        )
        if mounted is not None:
            await mounted.before_listening(service, engine)
        yield RpcApp(service, await stack.enter_async_context(listening), scope)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From any thread; nothing if the loop has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


async def _scheduler(
    settings: TextSettings, engine: ObservedTextEngine, mounted: MountedEncoder | None, engine_thread: Offload
) -> DeviceScheduler | None:
    """None if no encoder shares the engine's thread."""
    if mounted is None or mounted.vision_encoder is None:
        return None
    if not isinstance(engine, StagedTextEngine):
        raise CannotStart(f"engine {settings.engine.engine} cannot share its device with an encoder")
    budget = await engine_thread.run(mounted.image_budget, engine)
    by_turns = not settings.widest.serves(Stage.DECODE)
    return DeviceScheduler(
        engine,
        mounted.vision_encoder,
        budget,
        settings.encode_patience_s,
        monotonic,
        by_turns,
        settings.encode_first,
        settings.encode_share if budget is None else 1.0,
    )


def _receiver(
    settings: TextSettings,
    arena: Arena,
    transports: TransportSet,
    peers: PeerPool,
    *,
    scope: TaskScope,
    checks: ThreadOffload,
    record: TextRecord,
) -> TensorReceiver:
    return TensorReceiver(
        arena=arena,
        transport=transports,
        peers=peers,
        releases=Releases(peers, scope=scope, timeout_s=settings.release_timeout_s),
        limits=settings.tensor_cache,
        pulls=settings.pulls,
        max_pull_s=settings.transfers.max_pull_s,
        scope=scope,
        offload=checks,
        clock=monotonic,
        record=record,
    )


def _kv_memory(engine: ObservedTextEngine) -> KvMemory:
    return KvMemory(
        1 - engine.kv_free_tokens / engine.kv_tokens,
        engine.prefix_queries_tokens,
        engine.prefix_hits_tokens,
        engine.preemptions,
        engine.kv_copies,
    )


async def _transports(
    settings: TextSettings,
    arena: Arena,
    check: LeaseCheck,
    *,
    record: TextRecord,
    tls: TlsIdentity | None,
    scope: TaskScope,
    network: MemoryNetwork | None = None,
) -> TransportSet:
    try:
        return await start_transports(
            settings.transfers,
            arena,
            machine=machine_name(),
            host=settings.host,
            check=check,
            connect_timeout_s=settings.connect_timeout_s,
            preferred=settings.prefer_transport,
            tls=tls,
            on_reset=record.transport_reset,
            on_failure=scope.fail,
            network=network,
        )
    except ValueError as error:
        raise CannotStart(str(error)) from None


def states_of(settings: TextSettings) -> StageStates | None:
    """The states of its stages, if it switches."""
    return None if settings.switchable is None else StageStates(settings.role, settings.switchable)


def switches(
    states: StageStates | None, metrics: Metrics, *services: SwitchingService, residence: Residence | None = None
) -> SetStages | None:
    """What switches an instance of these services, if it can. ``residence``: of one that has only those parts in memory that it needs."""
    if states is None:
        return None
    watch_stages(metrics, states, monotonic)
    return Switching(states, services, clock=monotonic, record=MeteredSwitches(metrics), residence=residence).set_stages


def _check_role(settings: TextSettings, engine: ObservedTextEngine) -> None:
    """Raises CannotStart for a role that needs what the engine cannot do."""
    apart = settings.switchable is not None or not settings.role.serves(Stage.PREFILL, Stage.DECODE)
    if apart and handing_engine(engine) is None:
        what = f"role {settings.role.value}" if settings.switchable is None else "an instance that switches"
        raise CannotStart(
            f"{what} needs keys and values that can be copied from and to KV blocks, and those of this engine and model "
            "cannot: prefill and decode run in one instance (PD or EPD)"
        )


async def _own_store(
    settings: TextSettings, instance_id: str, epoch: int, engine_thread: Offload, stack: AsyncExitStack
) -> ArenaStore:
    """For keys and values, as there is no encoder whose arena can have them."""
    arena = await engine_thread.run(partial(HostArena, settings.kv_arena_bytes, instance_id=instance_id, epoch=epoch))
    copy = ThreadOffload(1, name="text-copy")
    stack.callback(copy.close)
    return ArenaStore(arena, settings.leases, max_pull_s=settings.transfers.max_pull_s, clock=monotonic, copy=copy)


def _kv_store(
    settings: TextSettings, engine: ObservedTextEngine, own: ArenaStore | None, mounted: MountedEncoder | None
) -> KvStore | None:
    """Where keys and values are handed over; None if they are not."""
    handing = handing_engine(engine)
    store = own if mounted is None or not settings.kv_arena_bytes else mounted.store
    if handing is None or handing.kv_kind is None or store is None:
        return None
    if not isinstance(store.arena, HostArena):
        logger.warning(
            "keys and values are not handed over: the arena lies on a device, and they are copied by way of the host"
        )
        return None
    kv = KvStore(
        store,
        handing.kv_kind,
        shared=own is None,
        rng=random.SystemRandom(),
        clock=monotonic,
        published=_published(settings, mounted),
    )
    logger.info("the arena holds keys and values of up to %d tokens", kv.capacity_tokens)
    return kv


def _published(settings: TextSettings, mounted: MountedEncoder | None) -> PublishedEmbeddings | None:
    """Where kept segments are named for routers: with the embeddings, where they lie beside them."""
    if not settings.kv_prefixes:
        return None
    return PublishedEmbeddings(MOST_PUBLISHED) if mounted is None else mounted.published


async def _loaded(
    settings: TextSettings, model: Path | Checkpoint, engine_thread: Offload, stack: AsyncExitStack, *, can_unload: bool
) -> LoadedEngine:
    """An engine that has answered. Raises CannotStart."""
    loaded = await engine_thread.run(partial(_load, settings, model, can_unload=can_unload))
    if loaded.close is not None:
        stack.push_async_callback(engine_thread.run, loaded.close)
    try:
        await engine_thread.run(answer_first, loaded.engine)
    except BadModel as error:
        raise CannotStart(f"engine {settings.engine.engine}: {error}") from error
    return loaded


def _load(settings: TextSettings, model: Path | Checkpoint, *, can_unload: bool = False) -> LoadedEngine:
    """Runs in the engine's thread. Raises CannotStart."""
    try:
        checkpoint = open_checkpoint(model if isinstance(model, Checkpoint) else model_directory(model))
        tokenizer = Tokenizer.load(checkpoint.files)
        loaded = partial(LoadedEngine, tokenizer=tokenizer, grammars=Grammars(tokenizer))
        model_id = settings.model_id or served_name(settings.model)
        if settings.delay_profile is not None:
            costs = delay_costs(settings.delay_profile, ModelPart.DECODER)
            info = checkpoint.model_info(model_id=model_id, dtype=DTYPES[settings.compute.dtype])
            sleeping = DelayTextEngine(info, checkpoint.family, costs, settings.engine_options)
            return loaded(sleeping, _part(costs.profile.identity, settings))
        if settings.engine.engine == "vllm":
            return _load_vllm(settings, checkpoint, model_id, loaded)
        from triptych.engine.decoder.text_engine import TransformersTextEngine
        from triptych.engine.part_identity import part_identity

        engine = TransformersTextEngine(
            checkpoint,
            settings.engine_options,
            model_id=model_id,
            max_embedding_bytes=settings.tensor_cache.max_embedding_bytes,
            compute=settings.compute,
            can_unload=can_unload,
        )
        return loaded(engine, _part(part_identity(checkpoint, ModelPart.DECODER, settings.compute), settings))
    except (BadModel, BadProfile) as error:
        raise CannotStart(str(error)) from None


def _part(identity: ProfileIdentity, settings: TextSettings) -> ServedPart:
    """With the largest token budget: the instances of a pool may measure different ones, which hardly change what a prompt takes."""
    return ServedPart(identity, settings.engine.max_sequences, token_budget=settings.engine.most_step_tokens)


def _load_vllm(
    settings: TextSettings, checkpoint: Checkpoint, model_id: str, loaded: Callable[..., LoadedEngine]
) -> LoadedEngine:
    from triptych.integrations.vllm.release import check_release

    check_release()
    from triptych.integrations.vllm.engine import VllmTextEngine

    engine = VllmTextEngine(
        checkpoint,
        settings.engine.vllm_args,
        model_id=model_id,
        max_embedding_bytes=settings.tensor_cache.max_embedding_bytes,
        compute=settings.compute,
        hands_over=not settings.role.serves(Stage.PREFILL, Stage.DECODE),
    )
    part = ServedPart(engine.identity, engine.max_sequences, token_budget=engine.token_budget)
    return loaded(engine, part, metrics=engine.metrics, close=engine.close, when_lost=engine.when_lost)
