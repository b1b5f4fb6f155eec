"""Events and effects of one pool (``machine.pool_manager.pool``)."""

from dataclasses import dataclass

from triptych.domain.decision import (
    NO_OTHER_TIERS,
    DecisionRecord,
    PlannedSize,
    PoolInstance,
    SavedPool,
    TierShare,
    Why,
)

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InstancesSeen:
    """Instances of a pool now. ``judged`` is filled in from the reports. ``cut_off``: so many members of all pools are
    silent that rather this manager is to blame.
    """

    instances: tuple[PoolInstance, ...]
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class RolesSeen:
    """Instances that serve the pool's stage beyond those that belong to it. ``since_switch_s`` is the time since the
    last order to switch there or away.
    """

    switched: int
    since_switch_s: float | None
    tiers: TierShare = NO_OTHER_TIERS
    """What the other tiers of its role leave to the pool."""


@dataclass(frozen=True, slots=True)
class Noted:
    """Something was decided that leaves the size as it is. ``advised``: nobody orders it."""

    why: Why
    reason: str
    advised: bool = False


@dataclass(frozen=True, slots=True)
class SizePlanned:
    """The size by the plan that is followed; None where plans do not decide on sizes."""

    planned: PlannedSize | None


@dataclass(frozen=True, slots=True)
class StartFailed:
    """An instance ended before it was ready."""

    reason: str


@dataclass(frozen=True, slots=True)
class OverrideSet:
    """Size that a person wants for a time. Ends giving up on the pool."""

    size: int
    for_s: float


@dataclass(frozen=True, slots=True)
class OverrideEnded:
    """The size by hand is taken back."""


@dataclass(frozen=True, slots=True)
class OrderFailed:
    """The scaler did not accept an order. Whoever gives it tries again, with the newest size."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class OrderTaken:
    """The scaler has accepted an order."""

    number: int


@dataclass(frozen=True, slots=True)
class PoolResumed:
    """State that the leader before has left (None: what is known here is newer). The size is ordered again, as this
    manager's.
    """

    kept: SavedPool | None = None
    records: tuple[DecisionRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Frozen:
    """Reason why nothing may be ordered (the store is away, another manager leads); empty: it may again."""

    reason: str


@dataclass(frozen=True, slots=True)
class PoolTick:
    """Time has passed: decide."""


PoolEvent = (
    InstancesSeen
    | RolesSeen
    | Noted
    | SizePlanned
    | StartFailed
    | OverrideSet
    | OverrideEnded
    | OrderFailed
    | OrderTaken
    | PoolResumed
    | Frozen
    | PoolTick
)

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScaleTo:
    """Declare the pool's size. A later order replaces it. May be answered by OrderFailed."""

    size: int
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class DrainInstance:
    """Let the instance finish what runs; ScaleTo and RemoveInstance follow when it has."""

    instance_id: str
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class RemoveInstance:
    """Stop an instance that has drained, or did not in time. It is replaced if the size wants it. Repeated until it has
    ended.
    """

    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """Store and log a decision. A record with the number of an earlier one replaces that."""

    record: DecisionRecord


PoolEffect = ScaleTo | DrainInstance | RemoveInstance | RecordDecision
