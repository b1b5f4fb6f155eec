"""Wires up an encoder: the same in a process and in a simulation, which differ by their ``World`` and engine."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from triptych.machine.stage_states import StageStates
from triptych.runtime.world import World
from triptych.transport.arena_store import ArenaStore
from triptych.transport.data_plane import DataPlane

from .file_tier import FileTier
from .record import NO_RECORD, Record
from .service import EncoderService, LoadedEncoder
from .settings import EncoderSettings

_FILE_READERS = 2
"""Threads that read embeddings from files."""


@dataclass(frozen=True, slots=True)
class BuiltEncoder:
    """An encoder that works and is not listening."""

    service: EncoderService[Any]
    store: ArenaStore
    """The instance's arena. In an instance of other stages too, also that of keys and values."""
    files: FileTier | None


@asynccontextmanager
async def build(
    settings: EncoderSettings,
    world: World,
    data_plane: DataPlane,
    loaded: LoadedEncoder[Any],
    *,
    record: Record = NO_RECORD,
    states: StageStates | None = None,
    runs_batches: bool = True,
) -> AsyncGenerator[BuiltEncoder]:
    """An encoder, started. ``states``: of an instance that switches. Without ``runs_batches`` the text engine's loop runs them.

    At the end, the tasks of the world end before the transports.
    """
    copy = world.threads(1, name="encoder-copy")  # of its own, so that sealing never waits for preprocessing
    opening = partial(
        data_plane.arena,
        settings.transfers.arena,
        settings.arena_bytes,
        instance_id=world.name,
        epoch=world.epoch,
        device=settings.compute.device,
    )
    arena = await loaded.compute.run(opening)
    store = ArenaStore(arena, settings.leases, max_pull_s=settings.transfers.max_pull_s, clock=world.clock, copy=copy)
    async with AsyncExitStack() as stack:
        transports = await data_plane.open(arena, store.may_read)
        stack.push_async_callback(transports.close)
        stack.push_async_callback(world.scope.close)
        files = None
        if loaded.files is not None:
            files = FileTier(
                loaded.files,
                store,
                scope=world.scope,
                reads=world.threads(_FILE_READERS, name="encoder-read-files"),
                writes=world.threads(1, name="encoder-write-files"),
                clock=world.clock,
                record=record,
            )
        service = EncoderService(
            settings,
            world,
            loaded,
            store,
            offers=transports.offers,
            copy=copy,
            record=record,
            files=files,
            states=states,
        )
        service.start(runs_batches=runs_batches)
        await service.loras.load_at_start(settings.lora)
        yield BuiltEncoder(service, store, files)
