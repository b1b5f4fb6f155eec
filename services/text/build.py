"""Wires up an instance of any role but E: the same in a process and in a simulation, which differ by their ``World`` and engines."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from triptych.domain.stage import ModelPart, Stage
from triptych.errors import TriptychError
from triptych.machine.arena.published import PublishedContents
from triptych.machine.stage_states import StageStates
from triptych.ports import Offload, TextEngine
from triptych.runtime.process import CannotStart
from triptych.runtime.world import World
from triptych.transport.arena_store import ArenaStore
from triptych.transport.data_plane import DataPlane, OwnHolder
from triptych.transport.receiver import TensorReceiver, open_receiver

from .device_scheduler import DeviceScheduler, turns_of
from .hybrid import HybridInstance
from .kv_store import MOST_PUBLISHED, KvStore
from .record import NO_RECORD, NO_SWITCH_RECORD, Record, SwitchRecord
from .service import LoadedText, TextService
from .settings import TextSettings
from .switching import Switching
from .weight_offloading import Unloadable, WeightOffloading, checked_weights, parts_of

if TYPE_CHECKING:
    from .encoder_part import BuiltEncoder, EncoderPart

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance that works and is not listening."""

    service: TextService | HybridInstance
    """Of all stages."""
    text: TextService
    receiver: TensorReceiver
    store: ArenaStore | None
    """The arena of keys and values; None where they lie in the encoder's arena, or are not exported."""
    encoder: "BuiltEncoder | None"
    switching: Switching | None


@asynccontextmanager
async def build(
    settings: TextSettings,
    world: World,
    data_plane: DataPlane,
    loaded: LoadedText,
    encoder: "EncoderPart | None" = None,
    *,
    record: Record = NO_RECORD,
    switch_record: SwitchRecord = NO_SWITCH_RECORD,
) -> AsyncGenerator[Instance]:
    """An instance, started. ``encoder``: of roles with E. At the end, the tasks of the world end before the transports.

    Raises CannotStart for a role that needs what an engine cannot do.
    """
    engine = loaded.engine
    _check_role(settings, engine)
    states = None if settings.switchable is None else StageStates(settings.role, settings.switchable)
    async with AsyncExitStack() as stack:
        built = None
        if encoder is not None:
            built = await stack.enter_async_context(encoder.build(world, data_plane, states, text_thread=loaded.thread))
        checks = world.threads(settings.check_threads, name="text-check")
        own_store = None
        if built is None and settings.kv_arena_bytes and engine.kv is not None:
            own_store = await _own_store(settings, world, data_plane, loaded.thread)
        is_holder = built is not None or own_store is not None
        opening = partial(
            data_plane.arena,
            settings.transfers.arena,
            settings.image_cache_bytes,
            instance_id=world.name,
            epoch=world.epoch,
            device=settings.compute.device,
            part="pulled" if is_holder else "",
        )
        arena = await loaded.thread.run(opening)
        offering = None
        if own_store is not None:
            offering = await data_plane.open(own_store.arena, own_store.may_read)
            stack.push_async_callback(offering.close)
        receiver = await stack.enter_async_context(
            open_receiver(
                settings,
                world,
                data_plane,
                arena,
                offload=checks,
                record=record,
                own=None if built is None else OwnHolder(built.service, built.store),
            )
        )
        text = TextService(
            settings,
            world,
            loaded,
            receiver,
            offers=(offering or receiver.transports).offers,
            offload=checks,
            record=record,
            scheduler=_scheduler(settings, world, loaded, encoder, built),
            kv=_kv_store(settings, world, engine, own_store, built),
            states=states,
        )
        text.start()
        await text.loras.load_at_start(settings.lora)
        if loaded.when_lost is not None:
            loaded.when_lost(partial(_call_soon, asyncio.get_running_loop(), text.lose_engine))
        service: TextService | HybridInstance = text
        switching = None
        if encoder is not None and built is not None:
            service = HybridInstance(text, built.service, settings)
            if encoder.offloading is not None:
                await _offload(encoder.offloading, settings, text, engine)
                world.scope.spawn(encoder.offloading.run(), name="weight-offloading", vital=True)
        if states is not None:
            switching = Switching(
                states,
                [text] if built is None else [text, built.service],
                clock=world.clock,
                record=switch_record,
                offloading=None if encoder is None else encoder.offloading,
            )
        yield Instance(service, text, receiver, own_store, built, switching)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From any thread; nothing if the loop has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


async def _offload(offloading: WeightOffloading, settings: TextSettings, text: TextService, engine: TextEngine) -> None:
    """Add the decoder, and have in memory what the role needs. Raises CannotStart."""
    decoder = Unloadable(checked_weights(engine.weights), call=text.between_steps)
    offloading.add(ModelPart.DECODER, decoder)
    offloading.need(parts_of(settings.role.stages))
    try:
        await offloading.settle()
    except TriptychError as error:
        raise CannotStart(error.message) from None


def _check_role(settings: TextSettings, engine: TextEngine) -> None:
    """Raises CannotStart for a role that needs what the engine cannot do."""
    apart = settings.switchable is not None or not settings.role.serves(Stage.PREFILL, Stage.DECODE)
    if apart and engine.kv is None:
        what = f"role {settings.role.value}" if settings.switchable is None else "an instance that switches"
        raise CannotStart(
            f"{what} needs keys and values that can be copied, and those of this engine and model cannot: prefill and decode run in "
            "one instance (PD or EPD)"
        )


async def _own_store(settings: TextSettings, world: World, data_plane: DataPlane, thread: Offload) -> ArenaStore:
    """For keys and values, as there is no encoder whose arena can have them."""
    opening = partial(
        data_plane.arena, "host", settings.kv_arena_bytes, instance_id=world.name, epoch=world.epoch, device="cpu"
    )
    return ArenaStore(
        await thread.run(opening),
        settings.leases,
        max_pull_s=settings.transfers.max_pull_s,
        clock=world.clock,
        copy=world.threads(1, name="text-copy"),
    )


def _scheduler(
    settings: TextSettings,
    world: World,
    loaded: LoadedText,
    encoder: "EncoderPart | None",
    built: "BuiltEncoder | None",
) -> DeviceScheduler | None:
    """None if no encoder shares the engine's thread. Raises CannotStart."""
    if encoder is None or built is None or not encoder.in_turns(loaded.thread):
        return None
    if loaded.engine.sharing is None:
        raise CannotStart(f"engine {settings.engine.engine} cannot share its device with an encoder")
    return DeviceScheduler(
        loaded.engine.sharing, built.service.batcher, encoder.budget, turns_of(settings, encoder.budget), world.clock
    )


def _kv_store(
    settings: TextSettings,
    world: World,
    engine: TextEngine,
    own: ArenaStore | None,
    encoder: "BuiltEncoder | None",
) -> KvStore | None:
    """Where exported keys and values lie; None if they are not exported."""
    store = own if encoder is None or not settings.kv_arena_bytes else encoder.store
    if engine.kv is None or store is None:
        return None
    if store.arena.window(store.arena.base, 0) is None:
        logger.warning(
            "keys and values are not transferred: the arena lies on a device, and they are copied by way of the host"
        )
        return None
    published = None
    if settings.kv_prefixes and not engine.kv.kind.is_whole:  # named with the embeddings, where they lie beside them
        published = PublishedContents(MOST_PUBLISHED) if encoder is None else encoder.service.published
    kv = KvStore(store, engine.kv.kind, shared=own is None, rng=world.rng, clock=world.clock, published=published)
    logger.info("the arena holds keys and values of up to %d tokens", kv.capacity_tokens)
    return kv
