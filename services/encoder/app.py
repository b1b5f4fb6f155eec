"""Wires up the encoder: engine, memory, transports, threads.

Engines that compute are imported when they are loaded: torch and transformers take seconds, and engines that delay need neither.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
from triptych.engine.delay import DelayEncoderEngine, delay_costs

from triptych.domain.instance import ServedPart
from triptych.domain.profile import BadProfile, ProfileIdentity
from triptych.domain.stage import ModelPart
from triptych.engine.arenas import open_arena
from triptych.engine.checkpoint import DTYPES, Checkpoint, open_checkpoint
from triptych.engine.first_pass import encode_first
from triptych.engine.media.decoders import DecoderProcesses
from triptych.engine.media.item import Decoding
from triptych.families.base import Family
from triptych.families.model_files import BadModel
from triptych.machine.encoder.batch_queue import BatchLimits
from triptych.machine.stage_states import StageStates
from triptych.ports import EncoderEngine, Offload
from triptych.rpc import instance
from triptych.rpc.app import RpcApp, server_of
from triptych.rpc.encoder import SERVICE_NAME, EncoderServicer
from triptych.rpc.instance import InstanceServicer
from triptych.rpc.registered import instance_registered
from triptych.rpc.server import check_port
from triptych.runtime.clock import monotonic
from triptych.runtime.cores import nodes, pinning, spread, usable_cores
from triptych.runtime.host import instance_name, machine_name, new_epoch
from triptych.runtime.hub import model_directory, served_name
from triptych.runtime.offload import ThreadOffload
from triptych.runtime.process import CannotStart, tls_identity
from triptych.runtime.tasks import TaskScope
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import TlsIdentity
from triptych.transport.arena_store import ArenaStore
from triptych.transport.start import start_transports
from triptych.transport.transport_set import TransportSet

from .embedding_files import EmbeddingFiles
from .file_tier import FileTier
from .gauges import watch
from .record import EncoderRecord
from .service import EncoderService
from .settings import EncoderSettings

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
"""An encoder's transports are only read from; they connect to nothing."""
_FILE_READERS = 2
"""Threads that read embeddings from files."""


@dataclass(frozen=True, slots=True)
class _LoadedEngine:
    """An engine, and what it runs: one that sleeps runs what its profile is of."""

    engine: EncoderEngine[Any]
    family: Family
    identity: ProfileIdentity
    close: Callable[[], None] | None = None
    """Ends what the engine has started, in the thread that loaded it."""


@dataclass(frozen=True, slots=True)
class OpenEncoder:
    """A wired encoder that is not listening yet and whose service is not started."""

    service: EncoderService[Any]
    store: ArenaStore
    engine: EncoderEngine[Any]
    scope: TaskScope


@asynccontextmanager
async def app(
    settings: EncoderSettings, telemetry: Telemetry | None = None
) -> AsyncGenerator[RpcApp[EncoderService[Any]]]:
    """Load the engine, register the arena, listen. Raises CannotStart, and Unavailable if the port is in use."""
    check_port(settings.host, settings.port)
    telemetry = telemetry or Telemetry()
    tls = tls_identity(settings, telemetry)
    epoch = new_epoch()
    instance_id = settings.instance_id or instance_name("encoder", settings.port, epoch)
    async with AsyncExitStack() as stack:
        compute = ThreadOffload(1, name="encoder-compute")
        stack.callback(compute.close)
        one = await stack.enter_async_context(
            opened(
                settings,
                telemetry,
                model=settings.model,
                compute=compute,
                instance_id=instance_id,
                epoch=epoch,
                tls=tls,
            )
        )
        one.service.start()

        def register(server: grpc.aio.Server) -> None:
            EncoderServicer(one.service).register(server)
            InstanceServicer(one.service).register(server)

        server = await stack.enter_async_context(
            server_of(settings, (SERVICE_NAME, instance.SERVICE_NAME), register, telemetry=telemetry, tls=tls)
        )
        running = RpcApp(one.service, server, one.scope)
        async with instance_registered(settings, one.service, running, telemetry=telemetry, tls=tls):
            yield running


@asynccontextmanager
async def opened(
    settings: EncoderSettings,
    telemetry: Telemetry,
    *,
    model: Path | Checkpoint,
    compute: Offload,
    instance_id: str,
    epoch: int,
    tls: TlsIdentity | None,
    states: StageStates | None = None,
    unloads: bool = False,
) -> AsyncGenerator[OpenEncoder]:
    """Load the engine of ``model``, which ``compute`` runs, and register the arena. ``states``: of an instance that switches.
    ``unloads``: its weights can leave the memory. Raises CannotStart.
    """
    async with AsyncExitStack() as stack:
        copy = ThreadOffload(1, name="encoder-copy")  # a separate thread, so that sealing never waits for preprocessing
        stack.callback(copy.close)
        cores = usable_cores()
        threads = settings.prepare_threads or max(2, len(cores))
        prepare = ThreadOffload(threads, name="encoder-prepare", starting=pinning(spread(threads, nodes(cores))))
        stack.callback(prepare.close)
        decoders = DecoderProcesses(settings.decoding)
        stack.callback(decoders.close)
        loaded = await compute.run(partial(_load, settings, model, decoders, can_unload=unloads))
        if loaded.close is not None:
            stack.push_async_callback(compute.run, loaded.close)
        if settings.delay_profile is None:
            await prepare.run(decoders.start)
        try:
            await encode_first(loaded.engine, loaded.family, prepare=prepare, compute=compute)
        except BadModel as error:
            raise CannotStart(f"engine {settings.engine.engine}: {error}") from error
        settings = settings.model_copy(update={"batches": await compute.run(_batches, settings, loaded.engine)})

        record = EncoderRecord(telemetry.metrics)
        opening = partial(open_arena, instance_id=instance_id, epoch=epoch, device=settings.compute.device)
        arena = await compute.run(opening, settings.transfers.arena, settings.arena_bytes)
        store = ArenaStore(arena, settings.leases, max_pull_s=settings.transfers.max_pull_s, clock=monotonic, copy=copy)
        scope = TaskScope("encoder")
        transports = await _transports(settings, store, record, tls, scope)
        stack.push_async_callback(transports.close)

        files = await _file_tier(settings, store, record, scope, stack)
        await stack.enter_async_context(scope)
        service = EncoderService(
            loaded.engine,
            store,
            settings,
            offers=transports.offers,
            scope=scope,
            prepare=prepare,
            compute=compute,
            copy=copy,
            clock=monotonic,
            max_preparing=threads,
            record=record,
            part=ServedPart(loaded.identity, settings.batches.max_batch_items, prepare_cores=threads),
            files=files,
            states=states,
        )
        watch(telemetry.metrics, service, store, files)
        yield OpenEncoder(service, store, loaded.engine, scope)


async def _file_tier(
    settings: EncoderSettings, store: ArenaStore, record: EncoderRecord, scope: TaskScope, stack: AsyncExitStack
) -> FileTier | None:
    """The second tier, if there is one. Its threads end with ``stack``. Raises CannotStart."""
    directory = settings.embedding_files
    if directory is None:
        return None
    reads = ThreadOffload(_FILE_READERS, name="encoder-read-files")
    stack.callback(reads.close)
    writes = ThreadOffload(1, name="encoder-write-files")
    stack.callback(writes.close)
    try:
        files = await writes.run(EmbeddingFiles, directory, settings.embedding_files_bytes)
    except OSError as error:
        raise CannotStart(f"embedding_files {directory}: {error.strerror}") from None
    except ValueError as error:
        raise CannotStart(f"embedding_files {directory}: {error}") from None
    return FileTier(files, store, scope=scope, reads=reads, writes=writes, clock=monotonic, record=record)


async def _transports(
    settings: EncoderSettings, store: ArenaStore, record: EncoderRecord, tls: TlsIdentity | None, scope: TaskScope
) -> TransportSet:
    try:
        return await start_transports(
            settings.transfers,
            store.arena,
            machine=machine_name(),
            host=settings.host,
            check=store.may_read,
            connect_timeout_s=_CONNECT_S,
            tls=tls,
            on_reset=record.transport_reset,
            on_failure=scope.fail,
        )
    except ValueError as error:
        raise CannotStart(str(error)) from None


def _load(
    settings: EncoderSettings, model: Path | Checkpoint, decoding: Decoding, *, can_unload: bool
) -> _LoadedEngine:
    """Runs in the thread that encodes. Raises CannotStart."""
    try:
        checkpoint = open_checkpoint(model if isinstance(model, Checkpoint) else model_directory(model))
        model_id = settings.model_id or served_name(settings.model)
        if settings.delay_profile is not None:
            info = checkpoint.model_info(model_id=model_id, dtype=DTYPES[settings.compute.dtype])
            costs = delay_costs(settings.delay_profile, ModelPart.ENCODER)
            delays = DelayEncoderEngine(info, checkpoint.family, costs)
            return _LoadedEngine(delays, checkpoint.family, costs.profile.identity)
        if settings.engine.engine == "vllm":
            return _load_vllm(settings, checkpoint, model_id, decoding)
        from triptych.engine.encoder import TransformersEncoderEngine
        from triptych.engine.part_identity import part_identity

        engine = TransformersEncoderEngine(
            checkpoint, model_id=model_id, compute=settings.compute, decoding=decoding, can_unload=can_unload
        )
        identity = part_identity(checkpoint, ModelPart.ENCODER, settings.compute)
        return _LoadedEngine(engine, checkpoint.family, identity)
    except (BadModel, BadProfile) as error:
        raise CannotStart(str(error)) from None


def _batches(settings: EncoderSettings, engine: EncoderEngine[Any]) -> BatchLimits:
    """Runs in the thread that encodes. The limits of one pass, measured where that is left to the encoder."""
    limits = settings.batches
    if limits.max_batch_tokens is not None or settings.compute.device != "cpu" or settings.delay_profile is not None:
        return limits
    from triptych.engine.encoder import TransformersEncoderEngine
    from triptych.engine.image_budget import tokens_worth_batching

    if not isinstance(engine, TransformersEncoderEngine):
        return limits
    tokens = tokens_worth_batching(engine, most_items=limits.max_batch_items)
    logger.info("a pass encodes up to %d tokens: more are not encoded faster", tokens)
    return replace(limits, max_batch_tokens=tokens)


def _load_vllm(settings: EncoderSettings, checkpoint: Checkpoint, model_id: str, decoding: Decoding) -> _LoadedEngine:
    from triptych.integrations.vllm.release import check_release

    check_release()
    from triptych.integrations.vllm.encoder import VllmEncoderEngine

    engine = VllmEncoderEngine(
        checkpoint,
        settings.engine.vllm_args,
        model_id=model_id,
        compute=settings.compute,
        decoding=decoding,
    )
    return _LoadedEngine(engine, checkpoint.family, engine.identity, engine.close)
