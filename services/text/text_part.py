"""The text part of an instance: engine, memory, transports, and the text service over them."""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from triptych.domain.stage import Stage
from triptych.engine.arenas import open_arena
from triptych.engine.checkpoint import Checkpoint
from triptych.machine.arena.published import PublishedContents
from triptych.machine.stage_states import StageStates
from triptych.ports import Arena, Offload, TextEngine
from triptych.rpc.identity import InstanceIdentity
from triptych.rpc.stubs import holder_stub
from triptych.runtime.clock import monotonic
from triptych.runtime.offload import ThreadOffload
from triptych.runtime.process import CannotStart
from triptych.runtime.tasks import TaskScope
from triptych.tokens.detokenize import IncrementalDetokenizer
from triptych.transport.arena import HostArena
from triptych.transport.arena_store import ArenaStore
from triptych.transport.peer_pool import PeerPool
from triptych.transport.receiver import TensorReceiver
from triptych.transport.releases import Releases
from triptych.transport.start import nobody_reads
from triptych.transport.transport_set import TransportSet

from .device_scheduler import DeviceScheduler
from .engines import load, try_out
from .gauges import watch
from .kv_store import MOST_PUBLISHED, KvStore
from .record import TextRecord
from .service import TextService
from .settings import TextSettings

if TYPE_CHECKING:
    from .encoder_part import EncoderPart

logger = logging.getLogger(__name__)

_MAX_HOLDERS = 1024
"""Limit on concurrent connections."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A running text service that is not listening yet."""

    service: TextService
    engine: TextEngine
    scope: TaskScope
    own_store: ArenaStore | None
    """The arena of keys and values; None where they lie in an encoder's arena, or are not exported."""


@asynccontextmanager
async def open_text(
    settings: TextSettings,
    identity: InstanceIdentity,
    checkpoint: Checkpoint,
    *,
    thread: Offload,
    states: StageStates | None = None,
    encoder: "EncoderPart | None" = None,
) -> AsyncGenerator[TextPart]:
    """Load the engine, which ``thread`` runs, and start the service. ``states``: of an instance that switches. ``encoder``: the part of
    the same instance that encodes. Raises CannotStart.
    """
    metrics = identity.telemetry.metrics
    async with AsyncExitStack() as stack:
        checks = ThreadOffload(settings.check_threads, name="text-check")
        stack.callback(checks.close)
        unloads = encoder is not None and encoder.offloading is not None
        loaded = await thread.run(partial(load, settings, checkpoint, can_unload=unloads))
        if loaded.close is not None:
            stack.push_async_callback(thread.run, loaded.close)
        engine = loaded.engine
        await thread.run(try_out, settings, engine)
        _check_role(settings, engine)
        record = TextRecord(metrics, engine.model, counts_tokens=loaded.metrics is None)
        own_store = None
        if encoder is None and settings.kv_arena_bytes and engine.kv is not None:
            own_store = await _own_store(settings, identity, thread, stack)
        is_holder = encoder is not None or own_store is not None
        opening = partial(
            open_arena,
            instance_id=identity.instance_id,
            epoch=identity.epoch,
            device=settings.compute.device,
            part="pulled" if is_holder else "",
        )
        arena = await thread.run(opening, settings.transfers.arena, settings.image_cache_bytes)
        scope = TaskScope("text")
        start = partial(
            identity.transports,
            settings,
            connect_timeout_s=settings.connect_timeout_s,
            on_reset=record.transport_reset,
            scope=scope,
            preferred=settings.prefer_transport,
        )
        transports = await start(arena, nobody_reads, network=None if encoder is None else encoder.network)
        stack.push_async_callback(transports.close)
        offering = transports
        if own_store is not None:
            offering = await start(own_store.arena, own_store.may_read)
            stack.push_async_callback(offering.close)
        receiver = _receiver(settings, identity, arena, transports, encoder, checks=checks, scope=scope, record=record)
        stack.push_async_callback(receiver.peers.close)
        await stack.enter_async_context(scope)
        service = TextService(
            engine,
            receiver,
            settings,
            offers=offering.offers,
            new_detokenizer=lambda: IncrementalDetokenizer(loaded.tokenizer),
            new_grammar=loaded.grammars.start,
            scope=scope,
            offload=checks,
            engine_thread=thread,
            rng=random.SystemRandom(),
            clock=monotonic,
            record=record,
            part=loaded.part,
            scheduler=await _scheduler(settings, engine, encoder, thread),
            kv=_kv_store(settings, engine, own_store, encoder),
            states=states,
        )
        watch(
            metrics,
            service,
            receiver,
            engine,
            engine_has_metrics=loaded.metrics is not None,
            preferred=transports.preferred,
            held=None if own_store is None else own_store.memory,
        )
        if loaded.metrics is not None:
            metrics.watch(loaded.metrics)
        service.start()
        if loaded.when_lost is not None:
            loaded.when_lost(partial(_call_soon, asyncio.get_running_loop(), service.lose_engine))
        yield TextPart(service, engine, scope, own_store)


def _receiver(
    settings: TextSettings,
    identity: InstanceIdentity,
    arena: Arena,
    transports: TransportSet,
    encoder: "EncoderPart | None",
    *,
    checks: Offload,
    scope: TaskScope,
    record: TextRecord,
) -> TensorReceiver:
    tls = identity.tls
    peers = PeerPool(
        partial(holder_stub, tls=tls, beyond_loopback=settings.allow_network or tls is not None),
        transports.connect,
        limit=_MAX_HOLDERS,
        clock=monotonic,
        own=None if encoder is None else (identity.instance_id, identity.epoch, encoder.own),
    )
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


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From any thread; nothing if the loop has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def _check_role(settings: TextSettings, engine: TextEngine) -> None:
    """Raises CannotStart for a role that needs what the engine cannot do."""
    apart = settings.switchable is not None or not settings.role.serves(Stage.PREFILL, Stage.DECODE)
    if apart and engine.kv is None:
        what = f"role {settings.role.value}" if settings.switchable is None else "an instance that switches"
        raise CannotStart(
            f"{what} needs keys and values that can be copied from and to KV blocks, and those of this engine and model "
            "cannot: prefill and decode run in one instance (PD or EPD)"
        )


async def _scheduler(
    settings: TextSettings, engine: TextEngine, encoder: "EncoderPart | None", thread: Offload
) -> DeviceScheduler | None:
    """None if no encoder shares the engine's thread."""
    if encoder is None or encoder.vision_encoder is None:
        return None
    if engine.sharing is None:
        raise CannotStart(f"engine {settings.engine.engine} cannot share its device with an encoder")
    budget = await thread.run(encoder.image_budget, engine)
    by_queue_position = not settings.widest.serves(Stage.DECODE)
    return DeviceScheduler(
        engine.sharing,
        encoder.vision_encoder,
        budget,
        settings.encode_patience_s,
        monotonic,
        by_queue_position,
        settings.encode_first,
        settings.encode_share if budget is None else 1.0,
    )


async def _own_store(
    settings: TextSettings, identity: InstanceIdentity, thread: Offload, stack: AsyncExitStack
) -> ArenaStore:
    """For keys and values, as there is no encoder whose arena can have them."""
    opening = partial(HostArena, settings.kv_arena_bytes, instance_id=identity.instance_id, epoch=identity.epoch)
    copy = ThreadOffload(1, name="text-copy")
    stack.callback(copy.close)
    return ArenaStore(
        await thread.run(opening),
        settings.leases,
        max_pull_s=settings.transfers.max_pull_s,
        clock=monotonic,
        copy=copy,
    )


def _kv_store(
    settings: TextSettings, engine: TextEngine, own: ArenaStore | None, encoder: "EncoderPart | None"
) -> KvStore | None:
    """Where exported keys and values lie; None if they are not exported."""
    store = own if encoder is None or not settings.kv_arena_bytes else encoder.store
    if engine.kv is None or store is None:
        return None
    if not isinstance(store.arena, HostArena):
        logger.warning(
            "keys and values are not handed over: the arena lies on a device, and they are copied by way of the host"
        )
        return None
    published = None
    if settings.kv_prefixes:  # named with the embeddings, where they lie beside them
        published = PublishedContents(MOST_PUBLISHED) if encoder is None else encoder.service.published
    kv = KvStore(
        store,
        engine.kv.kind,
        shared=own is None,
        rng=random.SystemRandom(),
        clock=monotonic,
        published=published,
    )
    logger.info("the arena holds keys and values of up to %d tokens", kv.capacity_tokens)
    return kv
