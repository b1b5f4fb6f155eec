"""Events and effects of the pool manager's members. A *session* is one stream of reports from a member."""

from dataclasses import dataclass
from enum import StrEnum

from triptych.domain.instance import InstanceLimits
from triptych.domain.pool import Heartbeat, Order, Registration
from triptych.domain.stage import Role

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    session: int
    registration: Registration


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    session: int
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class FarewellReceived:
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The stream is closed, by either side."""

    session: int


@dataclass(frozen=True, slots=True)
class DrainWanted:
    """Someone wants the instance to drain; unknown ones are ignored."""

    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class MemberSwitchWanted:
    """Someone wants the instance to serve the stages of this role; one that is unknown, or cannot, is ignored."""

    instance_id: str
    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class MemberLimitsWanted:
    """Someone wants the instance to have these limits of its batches; one that is unknown, or reports none, is ignored."""

    instance_id: str
    limits: InstanceLimits
    by_hand: bool
    reason: str


@dataclass(frozen=True, slots=True)
class MembersTick:
    """Time has passed. Comes at least every ``MemberLimits.tick_s`` while the process runs."""


MemberEvent = (
    Registered
    | HeartbeatReceived
    | FarewellReceived
    | SessionEnded
    | DrainWanted
    | MemberSwitchWanted
    | MemberLimitsWanted
    | MembersTick
)

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendOrder:
    session: int
    order: Order


@dataclass(frozen=True, slots=True)
class EndSession:
    """Close the stream with this reason."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """Watchers have something to learn."""

    version: int


@dataclass(frozen=True, slots=True)
class MemberLogged:
    instance_id: str
    what: str


class SwitchOutcome(StrEnum):
    OBEYED = "obeyed"
    """The member serves the stages of the order."""
    OVERTAKEN = "overtaken"
    """A manager, this or another one, has ordered something else before that."""
    GIVEN_UP = "given_up"
    """The member could not load what it needs, and serves what it served."""
    LOST = "lost"
    """The member has left or is lost, or its process was replaced, before that."""


@dataclass(frozen=True, slots=True)
class SwitchEnded:
    """Outcome of an order to switch. ``after_s`` counts from the order."""

    model: str
    source: Role
    """Role that the member served when the order came."""
    target: Role
    outcome: SwitchOutcome
    after_s: float


@dataclass(frozen=True, slots=True)
class SwitchServed:
    """First work of all stages that an order has opened. ``after_s`` counts from the order."""

    after_s: float


MemberEffect = SendOrder | EndSession | MembersChanged | MemberLogged | SwitchEnded | SwitchServed
