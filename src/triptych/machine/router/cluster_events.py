"""Events and effects of the router's cluster machine."""

from collections.abc import Mapping
from dataclasses import dataclass

from triptych.domain.instance import InstanceInfo, InstanceLoad
from triptych.domain.membership import Member
from triptych.machine.router.embedding_directory import KnownSlot
from triptych.machine.router.shared_events import (
    Answer,
    AnswerEnded,
    CallFailed,
    CreditReturned,
    CreditsAbandoned,
    CreditsWanted,
    EmbeddingGone,
    EmbeddingsRead,
    FirstToken,
    HedgeWanted,
    ItemEncoded,
    Overtaken,
    TextWanted,
)

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """A member was added or updated, or is no longer leaving."""

    member: Member


@dataclass(frozen=True, slots=True)
class MemberLeaving:
    """The member gets no new work. It is forgotten once it has no credits."""

    name: str


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """The member is gone: its credits and calls are lost."""

    name: str


@dataclass(frozen=True, slots=True)
class InstanceSeen:
    """An instance described itself, so it is reachable."""

    name: str
    info: InstanceInfo


@dataclass(frozen=True, slots=True)
class LoadReported:
    name: str
    load: InstanceLoad


@dataclass(frozen=True, slots=True)
class KeysTold:
    """Callers know these keys, or have read their embeddings."""

    slots: Mapping[bytes, KnownSlot]


@dataclass(frozen=True, slots=True)
class KeyGone:
    """The encoder no longer has the embedding of this key there."""

    key: bytes
    slot: KnownSlot


@dataclass(frozen=True, slots=True)
class InstanceSuspected:
    """A call failed as if the instance were down: it gets no work until it is seen again."""

    name: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of a WakeAt has come."""


ClusterEvent = (
    MemberJoined
    | MemberLeaving
    | MemberLeft
    | InstanceSeen
    | LoadReported
    | KeysTold
    | KeyGone
    | InstanceSuspected
    | CreditsWanted
    | CreditsAbandoned
    | TextWanted
    | ItemEncoded
    | CallFailed
    | FirstToken
    | AnswerEnded
    | EmbeddingGone
    | EmbeddingsRead
    | HedgeWanted
    | Overtaken
    | CreditReturned
    | Tick
)

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to this member and watch it."""

    name: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The member is forgotten: give up its calls, then close the connection."""

    name: str


@dataclass(frozen=True, slots=True)
class DescribeAgain:
    """Describe the instance again at once, as a call to it failed."""

    name: str


@dataclass(frozen=True, slots=True)
class WatchAgain:
    """Start the watch of its load again: a report of what it holds is missing. It is no failure."""

    name: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a Tick at that time. Replaces any earlier WakeAt."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Logged:
    """A line for the log."""

    name: str
    what: str


ClusterEffect = Answer | Connect | Disconnect | DescribeAgain | WatchAgain | WakeAt | Logged
