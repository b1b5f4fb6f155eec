"""Events exchanged by the router's two machines: an effect of one is an event of the other. A request is identified by
its number, a call by the number of its credit (an item at an encoder, or the request at a text instance).
"""

from dataclasses import dataclass
from math import inf

from triptych.domain.embedding import LeaseId
from triptych.domain.encoding import EncodeResult
from triptych.errors import TriptychError
from triptych.policy.routing import Want

# --- requests and answers
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreditsWanted:
    """A request wants a credit for each item. Without ``wait`` it is answered at once."""

    request: int
    wants: tuple[Want, ...]
    wait: bool
    priority: int = 0
    deadline_s: float = inf
    """Priority and deadline order the waiting requests."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CreditsAbandoned:
    """The request no longer waits for credits."""

    request: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TextWanted:
    """A request wants a text instance for ``tokens`` (prompt and answer). ``holders`` hold its embeddings.

    It is answered at once.
    """

    request: int
    tokens: int
    avoid: frozenset[str] = frozenset()
    holders: frozenset[str] = frozenset()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """One credit: the instance, and why it was chosen."""

    credit: int
    item: int | None
    """None for the request's place at a text instance."""
    name: str
    """The instance's address."""
    instance_id: str
    """The id that the instance reports."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Granted:
    """All credits that the request wanted."""

    request: int
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The request cannot have what it wanted: not now if it did not wait, else not at all."""

    request: int
    error: TriptychError


@dataclass(frozen=True, slots=True)
class TextPoolLost:
    """No text instance has been usable for the whole grace period: requests that need one fail."""

    error: TriptychError


Answer = Granted | Refused | TextPoolLost

# --- results of calls
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ItemEncoded:
    """An encoder has encoded the item of this credit and holds its embedding."""

    credit: int
    name: str
    result: EncodeResult


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call for this credit (encode, lease or generate) failed at the instance ``name``."""

    credit: int
    name: str
    error: TriptychError


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The text instance of this credit has produced its first token."""

    credit: int


# --- credits and embeddings ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EmbeddingGone:
    """The encoder of this credit no longer has the embedding."""

    credit: int


@dataclass(frozen=True, slots=True)
class CreditReturned:
    """The credit's leases are released or were never granted, or its text instance's call has ended."""

    credit: int


@dataclass(frozen=True, slots=True)
class Release:
    """Release leases at the instance ``name``, then return the credit. ``credit`` is None if already returned."""

    name: str
    credit: int | None
    lease_ids: tuple[LeaseId, ...]
    reason: str = ""
