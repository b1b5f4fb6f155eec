"""What the router's two machines say to each other: an effect of the one is, as it stands, an event of the other.

A request is known by its number, a call by the number of its credit: the place of an item at an encoder, or of the
whole request at a text instance.
"""

from dataclasses import dataclass
from math import inf

from triptych.domain.embedding import LeaseId
from triptych.domain.encoding import EncodeResult
from triptych.errors import TriptychError
from triptych.policy.routing import Want

# --- a request asks, the cluster answers -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreditsWanted:
    """A request asks for a place for each item. With ``wait`` False it is answered at once, for or against."""

    request: int
    wants: tuple[Want, ...]
    wait: bool
    priority: int = 0
    deadline_s: float = inf
    """By these two its place among requests that wait is told."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CreditsAbandoned:
    """The request no longer waits."""

    request: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TextWanted:
    """A request asks for a text instance for ``tokens`` (prompt with images, and answer), whose embeddings ``holders`` hold.

    It is answered at once.
    """

    request: int
    tokens: int
    avoid: frozenset[str] = frozenset()
    holders: frozenset[str] = frozenset()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """One place: where, why there, and the credit to return."""

    credit: int
    item: int | None
    """None for the request's place at a text instance."""
    name: str
    """What the router calls the instance."""
    instance_id: str
    """What it calls itself."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Granted:
    """All that was asked for."""

    request: int
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """What the request asked for cannot be had: now, if it did not want to wait; at all, if it did."""

    request: int
    error: TriptychError


@dataclass(frozen=True, slots=True)
class TextPoolLost:
    """There has been no text instance for the whole grace: whoever still needs one will not get it."""

    error: TriptychError


Answer = Granted | Refused | TextPoolLost

# --- both are told of calls ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ItemEncoded:
    """An encoder has done the item of this credit and holds its embedding."""

    credit: int
    name: str
    result: EncodeResult


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call for this credit (an encode, a lease, an answer) failed at the instance ``name``."""

    credit: int
    name: str
    error: TriptychError


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The text instance of this credit has begun to answer."""

    credit: int


# --- credits and embeddings ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EmbeddingGone:
    """The encoder of this credit does not have the embedding that it was believed to hold."""

    credit: int


@dataclass(frozen=True, slots=True)
class CreditReturned:
    """The leases of this credit are released, or it never had any; the call of a text instance's has ended."""

    credit: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give leases back to the instance ``name``, then the credit. ``credit`` is None where it went back before."""

    name: str
    credit: int | None
    lease_ids: tuple[LeaseId, ...]
    reason: str = ""
