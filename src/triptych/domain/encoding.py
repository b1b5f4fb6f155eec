"""What an encoder is asked to do, and what it answers."""

from dataclasses import dataclass

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.media import MediaInfo, Shard


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """One item, or a shard of one. The encoder grants two leases: one to the caller, one (in the ticket) to the text instance.

    The caller names both, 16 random bytes each, so that it can give them back without having seen the answer.
    """

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
    reader_lease: LeaseId
    """Of the text instance."""
    router_lease: LeaseId
    """The caller's own; it keeps the embedding alive until it is released or expires."""
    shard: Shard | None = None
    """The part of the item to encode; None for all of it. ``tokens`` and the embedding are the part's."""
    priority: int = 0
    """Lower goes first, whatever time is left."""


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """``ticket.lease_id`` and ``router_lease`` are the leases that the request named."""

    ticket: Ticket
    router_lease: LeaseId
    cached: bool
    queue_s: float
    encode_s: float


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A lease for a further reader of an embedding (a second attempt, another text instance), named by the caller; or
    more time for one that is out.
    """

    key: bytes
    generation: int
    lease_id: LeaseId
    lease_s: float
    timeout_s: float
