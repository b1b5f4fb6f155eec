"""Events and effects of the router's cluster machine."""

from collections.abc import Mapping

from triptych.domain.instance import InstanceInfo, InstanceLoad
from triptych.domain.membership import Member
from triptych.domain.record import record
from triptych.machine.router.embedding_directory import KnownSlot
from triptych.machine.router.request_events import TextReported
from triptych.machine.router.shared_events import (
    Answer,
    CallFailed,
    CreditReturned,
    CreditsAbandoned,
    CreditsWanted,
    EmbeddingGone,
    EmbeddingsRead,
    FirstToken,
    HedgeWanted,
    ItemEncoded,
    LeasesReturned,
    LeasesTaken,
    Overtaken,
    TextWanted,
)

# --- events ----------------------------------------------------------------------------------------------------------


@record
class MemberJoined:
    """A member was added or updated, or is no longer leaving."""

    member: Member


@record
class MemberLeaving:
    """The member gets no new work. It is forgotten once it has no credits."""

    name: str


@record
class MemberLeft:
    """The member is gone: its credits and calls are lost."""

    name: str


@record
class InstanceSeen:
    """An instance described itself, so it is reachable."""

    name: str
    info: InstanceInfo


@record
class LoadReported:
    name: str
    load: InstanceLoad


@record
class KeysTold:
    """Callers know these keys, or have read their embeddings."""

    slots: Mapping[bytes, KnownSlot]


@record
class KeyGone:
    """The encoder no longer has the embedding of this key there."""

    key: bytes
    slot: KnownSlot


@record
class InstanceSuspected:
    """A call failed as if the instance were down: it gets no work until it is seen again."""

    name: str


@record
class ClusterTick:
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
    | TextReported
    | FirstToken
    | EmbeddingGone
    | EmbeddingsRead
    | HedgeWanted
    | Overtaken
    | CreditReturned
    | LeasesTaken
    | LeasesReturned
    | ClusterTick
)

# --- effects ---------------------------------------------------------------------------------------------------------


@record
class Connect:
    """Connect to this member and watch it."""

    name: str


@record
class Disconnect:
    """The member is forgotten: give up its calls, then close the connection."""

    name: str


@record
class DescribeAgain:
    """Describe the instance again at once, as a call to it failed."""

    name: str


@record
class WatchAgain:
    """Start the watch of its load again: a report of what it holds is missing. It is no failure."""

    name: str


@record
class WakeAt:
    """Send a ClusterTick at that time. Replaces any earlier WakeAt."""

    at_s: float
    reason: str


@record
class Logged:
    """A line for the log."""

    name: str
    what: str


ClusterEffect = Answer | Connect | Disconnect | DescribeAgain | WatchAgain | WakeAt | Logged
