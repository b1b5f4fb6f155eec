"""The text instance wired up: where real engines, memory, transports, stubs and threads are made."""

import random
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from triptych.domain.embedding import LeaseId
from triptych.engine.device_arena import open_arena
from triptych.engine.text import TransformersTextEngine
from triptych.families.model_files import BadModel, ModelFiles
from triptych.ports import Arena
from triptych.rpc.app import RpcApp, server_of
from triptych.rpc.stubs import EncoderStub
from triptych.runtime.clock import monotonic
from triptych.runtime.host import instance_name, machine_name, new_epoch
from triptych.runtime.hub import model_directory, served_name
from triptych.runtime.offload import ThreadOffload
from triptych.runtime.process import CannotStart, tls_identity
from triptych.runtime.tasks import TaskScope
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import TlsIdentity
from triptych.tokens.detokenize import IncrementalDetokenizer
from triptych.tokens.grammar import Grammars
from triptych.tokens.tokenizer import Tokenizer
from triptych.transport.probe import PeerBook, TransportSet
from triptych.transport.start import start_transports

from .gauges import KvMemory, watch
from .holders import HolderDirectory
from .intake import Intake, IntakeLimits
from .neighbours import Neighbours
from .record import TextRecord
from .releases import Releases
from .service import TextService
from .servicer import SERVICE_NAME, TextServicer
from .settings import TextSettings


@asynccontextmanager
async def app(settings: TextSettings, telemetry: Telemetry | None = None) -> AsyncGenerator[RpcApp[TextService]]:
    """Load the engine, register the arena, connect to the encoders, listen. Raises CannotStart."""
    telemetry = telemetry or Telemetry()
    tls = tls_identity(settings)
    async with AsyncExitStack() as stack:
        engine_thread = ThreadOffload(1, name="text-engine")
        stack.callback(engine_thread.close)
        checks = ThreadOffload(settings.check_threads, name="text-check")
        stack.callback(checks.close)
        engine, tokenizer, grammars = await engine_thread.run(partial(_load, settings))

        record = TextRecord(telemetry.metrics, engine.model)
        epoch = new_epoch()
        instance_id = settings.instance_id or instance_name("text", settings.port, epoch)
        opening = partial(open_arena, instance_id=instance_id, epoch=epoch, device=settings.device)
        arena = await engine_thread.run(opening, settings.arena, settings.image_cache_bytes)
        transports = await _transports(settings, arena, record, tls)
        stack.push_async_callback(transports.close)
        peers = PeerBook(transports.connect, limit=max(1, len(settings.encoders)))
        stack.push_async_callback(peers.close)
        encoders = [EncoderStub(target, tls) for target in settings.encoders]
        for encoder in encoders:
            stack.push_async_callback(encoder.close)

        scope = await stack.enter_async_context(TaskScope("text"))
        holders = HolderDirectory(encoders, scope=scope, describe_timeout_s=settings.describe_timeout_s)
        intake = _intake(settings, arena, transports, peers, holders, scope=scope, checks=checks, record=record)
        service = TextService(
            engine,
            intake,
            settings,
            offers=transports.offers,
            new_detokenizer=lambda: IncrementalDetokenizer(tokenizer),
            new_grammar=grammars.start,
            scope=scope,
            offload=checks,
            engine_thread=engine_thread,
            chance=random.SystemRandom(),
            clock=monotonic,
            record=record,
        )
        watch(
            telemetry.metrics,
            service,
            intake,
            model=engine.model,
            kv=partial(_kv_memory, engine),
            connections=peers.by_backend,
            preferred=transports.preferred,
        )
        service.start()
        Neighbours(holders, peers, scope=scope, interval_s=settings.meet_interval_s).start()
        register = TextServicer(service).register
        server = await stack.enter_async_context(
            server_of(settings, SERVICE_NAME, register, telemetry=telemetry, tls=tls)
        )
        yield RpcApp(service, server, scope)


def _intake(
    settings: TextSettings,
    arena: Arena,
    transports: TransportSet,
    peers: PeerBook,
    holders: HolderDirectory,
    *,
    scope: TaskScope,
    checks: ThreadOffload,
    record: TextRecord,
) -> Intake:
    return Intake(
        arena=arena,
        transport=transports,
        peers=peers,
        holders=holders,
        releases=Releases(holders, scope=scope, timeout_s=settings.release_timeout_s),
        limits=IntakeLimits(
            max_waiting=settings.max_waiting_requests,
            max_pulls_per_holder=settings.max_pulls_per_encoder,
            max_pulling_nbytes=settings.max_pulling_bytes,
            max_pull_s=settings.max_pull_s,
            failure_grace_s=settings.failure_grace_s,
        ),
        scope=scope,
        offload=checks,
        clock=monotonic,
        record=record,
    )


def _kv_memory(engine: TransformersTextEngine) -> KvMemory:
    return KvMemory(
        1 - engine.kv_free_tokens / engine.kv_tokens,
        engine.prefix_queries_tokens,
        engine.prefix_hits_tokens,
        engine.preemptions,
    )


async def _transports(
    settings: TextSettings, arena: Arena, record: TextRecord, tls: TlsIdentity | None
) -> TransportSet:
    try:
        return await start_transports(
            settings.transports,
            arena,
            machine=machine_name(),
            host=settings.host,
            advertise_host=settings.advertise_host,
            check=_nobody_reads,
            max_pull_s=settings.max_pull_s,
            connect_timeout_s=settings.connect_timeout_s,
            preferred=settings.prefer_transport,
            tls=tls,
            on_reset=record.transport_reset,
        )
    except ValueError as error:
        raise CannotStart(str(error)) from None


def _nobody_reads(lease_id: LeaseId, offset: int, nbytes: int) -> bool:
    """What was pulled is not for others: this instance grants no leases."""
    del lease_id, offset, nbytes
    return False


def _load(settings: TextSettings) -> tuple[TransformersTextEngine, Tokenizer, Grammars]:
    try:
        directory = model_directory(settings.model)
        engine = TransformersTextEngine(
            directory,
            model_id=settings.model_id or served_name(settings.model),
            kv_cache_bytes=settings.kv_cache_bytes,
            max_sequences=settings.max_sequences,
            token_budget=settings.token_budget,
            tpot_slo_s=settings.tpot_slo_s,
            max_embedding_bytes=settings.max_embedding_bytes,
            cross_cache_bytes=settings.cross_cache_bytes,
            packed_weight_bytes=settings.packed_weight_bytes,
            device=settings.device,
            dtype=settings.dtype,
            threads=settings.torch_threads,
        )
        tokenizer = Tokenizer.load(ModelFiles.load(directory))
        return engine, tokenizer, Grammars(tokenizer)
    except BadModel as error:
        raise CannotStart(str(error)) from None
