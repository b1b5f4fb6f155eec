"""Requests to an encoder, and its results."""

from dataclasses import dataclass

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.item_plan import Content, content_of
from triptych.domain.media import MediaInfo, Shard
from triptych.domain.queue_position import BY_TIME_LIMIT, RelativeQueuePosition
from triptych.domain.record import record


@record
class EncodeRequest:
    """Request for one item or shard.

    The encoder grants two leases: one to the caller, and one, in the ticket, to the text instance. The caller chooses
    both ids, 16 random bytes each, so that it can release them even if it never sees the answer.
    """

    request_id: str
    item: int
    model: str
    media: bytes
    info: MediaInfo
    tokens: int
    """Positions that the router computed from the header; the encoder refuses the item if it has more."""
    tenant_salt: bytes
    timeout_s: float
    lease_s: float
    reader_lease: LeaseId
    """The text instance's lease."""
    router_lease: LeaseId
    """The caller's lease, which keeps the embedding until it is released or expires."""
    shard: Shard | None = None
    """The part of the item to encode; None for all of it. ``tokens`` and the embedding are the part's."""
    priority: int = 0
    """Lower goes first, whatever time is left."""
    position: RelativeQueuePosition = BY_TIME_LIMIT

    @property
    def content(self) -> Content:
        """Content key by which routers know the item, or shard."""
        return content_of(self.info.digest, self.shard, self.tenant_salt, self.info.lora)


@record
class EncodeResult:
    """``ticket.lease_id`` and ``router_lease`` are the ids given in the request."""

    ticket: Ticket
    router_lease: LeaseId
    cached: bool
    queue_s: float
    encode_s: float


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A lease for another reader of an embedding (a second attempt, another text instance), or an extension of a lease.

    The caller chooses the id.
    """

    key: bytes
    generation: int | None
    """Generation of the slot that the caller knows; None for any."""
    lease_id: LeaseId
    lease_s: float
    timeout_s: float
