"""What an encoder is asked to do, and what it answers."""

from dataclasses import dataclass

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.media import MediaInfo


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """One item. The encoder grants two leases: one to the caller, one (in the ticket) to the text instance."""

    request_id: str
    item: int
    model: str
    media: bytes
    info: MediaInfo
    tokens: int
    """Positions that the router counted from the header; the encoder refuses the item when it finds more."""
    tenant_salt: bytes
    timeout_s: float
    lease_s: float


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """``holder_lease`` is the caller's own; it keeps the embedding alive until it is released or expires."""

    ticket: Ticket
    holder_lease: LeaseId
    cached: bool
    queue_s: float
    encode_s: float


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A further reader of an embedding (a second attempt, another text instance)."""

    key: bytes
    generation: int
    lease_s: float
    timeout_s: float
