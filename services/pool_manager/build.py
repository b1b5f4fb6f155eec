"""Wires up a pool manager: the same in a process and in a simulation, which differ by their ``World``, store and scaler."""

from triptych.ports import Clock, Scaler, Store
from triptych.runtime.profiles import KnownProfiles
from triptych.runtime.world import World
from triptych.store.memory import MemoryStore

from .record import NO_RECORD, Record
from .service import PoolManagerService
from .settings import PoolManagerSettings


def build(
    settings: PoolManagerSettings,
    world: World,
    *,
    hour: Clock,
    store: Store | None = None,
    scaler: Scaler | None = None,
    profiles: KnownProfiles | None = None,
    record: Record = NO_RECORD,
) -> PoolManagerService:
    """A pool manager, started. ``hour``: the time in hours since the beginning of 1970.

    Without ``store`` it has one of its own, in memory: it always leads, and forgets sizes when it ends. Without ``scaler`` it only
    advises.
    """
    service = PoolManagerService(
        settings,
        world,
        store=MemoryStore(clock=world.clock, first_revision=world.epoch // 1000) if store is None else store,
        scaler=scaler,
        profiles=KnownProfiles() if profiles is None else profiles,
        hour=hour,
        record=record,
    )
    service.start()
    return service
