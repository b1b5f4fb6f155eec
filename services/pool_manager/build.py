"""Wires up a pool manager: the same in a process and in a simulation, which differ by their ``World``, store and scaler."""

from triptych.ports import Clock, Replanner, Scaler, Store
from triptych.runtime.profiles import KnownProfiles
from triptych.runtime.world import World
from triptych.store.memory import MemoryStore

from .plan import FollowedPlan
from .record import NO_RECORD, Record
from .replanner import ChildReplanner
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
    replanner: Replanner | None = None,
    record: Record = NO_RECORD,
) -> PoolManagerService:
    """A pool manager, started. ``hour``: the time in hours since the beginning of 1970. ``replanner``: of searches for better placements,
    by default in processes of their own. Raises BadPlan.

    Without ``store`` it has one of its own, in memory: it always leads, and forgets sizes when it ends. Without ``scaler`` it only
    advises.
    """
    plan = None if settings.plan is None else FollowedPlan.read(settings.plan)
    service = PoolManagerService(
        settings,
        world,
        store=MemoryStore(clock=world.clock, first_revision=world.epoch // 1000) if store is None else store,
        scaler=scaler,
        profiles=KnownProfiles() if profiles is None else profiles,
        plan=plan,
        replanner=ChildReplanner(settings.plan) if replanner is None and settings.plan is not None else replanner,
        hour=hour,
        record=record,
    )
    service.start()
    return service
