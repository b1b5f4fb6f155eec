"""What the router's memory of its instances is told, and what it says is to be done."""

from dataclasses import dataclass

from triptych.domain.instance import InstanceInfo, InstanceLoad
from triptych.domain.membership import Member
from triptych.machine.router.shared_events import (
    Answer,
    CallFailed,
    CreditReturned,
    CreditsAbandoned,
    CreditsWanted,
    EmbeddingGone,
    FirstToken,
    ItemEncoded,
    TextWanted,
)

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """There is one more, or the source knows more about one, or it stays after all."""

    member: Member


@dataclass(frozen=True, slots=True)
class MemberLeaving:
    """It gets nothing new. Once nothing of this router is there any more, it is forgotten."""

    name: str


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """It is gone: its credits are returned, its calls are over."""

    name: str


@dataclass(frozen=True, slots=True)
class InstanceSeen:
    """An instance answered; it is reachable again."""

    name: str
    info: InstanceInfo


@dataclass(frozen=True, slots=True)
class LoadReported:
    name: str
    load: InstanceLoad


@dataclass(frozen=True, slots=True)
class InstanceSuspected:
    """A call to it failed in a way that says it is down: it gets nothing more until it is seen again."""

    name: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that a WakeAt named has come."""


ClusterEvent = (
    MemberJoined
    | MemberLeaving
    | MemberLeft
    | InstanceSeen
    | LoadReported
    | InstanceSuspected
    | CreditsWanted
    | CreditsAbandoned
    | TextWanted
    | ItemEncoded
    | CallFailed
    | FirstToken
    | EmbeddingGone
    | CreditReturned
    | Tick
)

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Watch this member from now on."""

    name: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The member is forgotten: give up the calls to it that still run, then let go of the connection."""

    name: str


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Ask the instance who it is, rather than wait until its load reports break off: a call to it failed."""

    name: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a Tick at that time; replaces the one asked for before."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """For the log."""

    name: str
    what: str


ClusterEffect = Answer | Connect | Disconnect | AskAgain | WakeAt | Noticed
