"""Wires up a router: the same in a process and in a simulation, which differ by their ``World`` and the ways to instances."""

from collections.abc import Callable

from triptych.domain.membership import MemberKind
from triptych.ports import InstanceClient, Membership, PoolManagerClient
from triptych.runtime.managed_membership import ManagedMembership
from triptych.runtime.profiles import KnownProfiles
from triptych.runtime.world import World

from .prepare import Prepare, SmallInline
from .record import NO_RECORD, Record
from .service import RouterService
from .settings import RouterSettings


def build(
    settings: RouterSettings,
    world: World,
    *,
    membership: Membership,
    connect: Callable[[str], InstanceClient],
    prepare: Prepare,
    profiles: KnownProfiles | None = None,
    record: Record = NO_RECORD,
) -> RouterService:
    """A router of the instances in ``membership``, started. ``connect`` makes a client for an address."""
    threads = world.threads(settings.prepare_threads, name="router-prepare")
    service = RouterService(
        settings,
        world,
        membership,
        connect,
        prepare=prepare,
        offload=SmallInline(
            threads,
            settings.prepare_inline_chars,
            settings.prepare_inline_media_bytes if prepare.counts_at_once else 0,
        ),
        record=record,
        profiles=KnownProfiles() if profiles is None else profiles,
    )
    service.start()
    return service


def managed_membership(
    settings: RouterSettings, world: World, model: str, connect: Callable[[str], PoolManagerClient]
) -> ManagedMembership:
    """The instances of ``model`` that the pool managers of the settings know. ``connect`` makes a client for a manager's address."""
    return ManagedMembership(
        connect,
        settings.managers,
        settings.lost_members,
        clock=world.clock,
        name=world.name,
        model=model,
        kinds=(MemberKind.INSTANCE,),
    )
