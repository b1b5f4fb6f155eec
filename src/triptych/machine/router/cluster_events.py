"""What the router's memory of its instances is told, and what it says is to be done."""

from dataclasses import dataclass

from triptych.domain.instance import EncoderLoad, InstanceInfo, TextLoad
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
class InstanceSeen:
    """An instance answered; it is reachable again."""

    name: str
    info: InstanceInfo


@dataclass(frozen=True, slots=True)
class LoadReported:
    name: str
    load: EncoderLoad | TextLoad


@dataclass(frozen=True, slots=True)
class InstanceSuspected:
    """A call to it failed in a way that says it is down: it gets nothing more until it is seen again."""

    name: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that a WakeAt named has come."""


ClusterEvent = (
    InstanceSeen
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


ClusterEffect = Answer | AskAgain | WakeAt | Noticed
