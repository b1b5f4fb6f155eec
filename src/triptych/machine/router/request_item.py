"""One item of a request, or one shard of it: where it is encoded, and which leases on it may be held."""

from dataclasses import dataclass
from math import inf

from triptych.domain.embedding import KEY_NBYTES, LeaseId, Ticket, payload_nbytes
from triptych.domain.encoding import EncodeResult
from triptych.domain.generation import Ready
from triptych.domain.timeline import ItemTimeline
from triptych.errors import EngineFailure
from triptych.machine.router.cluster_events import Grant
from triptych.machine.router.request_events import Abort, CountedItem, Release, RequestEffect

_AS_GOOD_AS_S = 0.5
"""A lease that ends so much before the request must is not worth more time."""


@dataclass(slots=True)
class RequestItem:
    """A part of ``machine.router.request.RequestMachine``, which alone changes it."""

    counted: CountedItem
    grant: Grant | None = None
    result: EncodeResult | None = None
    """Of the embedding that is held now."""
    served: EncodeResult | None = None
    """Of the embedding that was held last, for the timeline."""
    ticket: Ticket | None = None
    """A reader's ticket that no text instance has had yet."""
    lease_ids: tuple[LeaseId, ...] = ()
    """Every lease on this item that may be held, answered or not: the router's own first."""
    reader_lease: LeaseId = b""
    """The newest that was asked for on behalf of a text instance."""
    expires_s: float = 0.0
    """When that ends, as far as is known."""
    extend_s: float = inf
    """When more time is to be asked for; never, where leases last as long as the request may."""
    held_until_s: float = 0.0
    """When the router's own lease ends."""
    renewing: bool = False
    renewed: bool = False
    """The ticket that is there was renewed: a lease is renewed once per attempt, however short it is."""
    attempts: int = 0
    losses: int = 0
    """Attempts after which the item had to be encoded again."""
    refusals: int = 0
    avoid: frozenset[str] = frozenset()
    engine_failure: EngineFailure | None = None
    """An engine may fail an item once; it goes to another encoder then, or nowhere."""
    exclude: frozenset[str] = frozenset()
    encoder_id: str = ""

    @property
    def encoding(self) -> bool:
        return self.grant is not None and self.result is None

    def fault(self, ticket: Ticket, instance_id: str) -> str | None:
        """What is wrong with a ticket, if anything: it came over a wire, and wrong memory must never be spliced in."""
        if len(ticket.key) != KEY_NBYTES:
            return f"a key of {len(ticket.key)} bytes instead of {KEY_NBYTES}"
        if ticket.holder != instance_id:
            return f"a ticket of {ticket.holder}"
        if ticket.tokens != self.counted.tokens:
            return f"{ticket.tokens} tokens for an item that was counted as {self.counted.tokens}"
        if not ticket.tensors or payload_nbytes(ticket.tensors) != ticket.payload_nbytes:
            return f"tensors that do not make up {ticket.payload_nbytes} bytes"
        return None

    def lasts(self, lease_ids: tuple[LeaseId, ...], asked_s: float, lease_s: float, deadline_s: float) -> None:
        """What was granted or extended, and when to ask again: at half its time, unless it outlasts the request."""
        end_s = asked_s + lease_s
        self.held_until_s = end_s
        if self.reader_lease in lease_ids:
            self.expires_s = end_s
        self.extend_s = asked_s + lease_s / 2 if end_s < deadline_s - _AS_GOOD_AS_S else inf

    def stale(self, needed_until_s: float) -> bool:
        """Whether there is no ticket that a text instance could use for so long."""
        return self.ticket is None or (not self.renewed and self.expires_s < needed_until_s)

    def let_go(self, index: int, reason: str) -> list[RequestEffect]:
        """Give the item's place and leases back; nothing where it has none."""
        if self.grant is None:
            return []
        effects: list[RequestEffect] = []
        if self.encoding or self.renewing:
            effects.append(Abort(index, self.grant.credit, reason))
        effects.append(Release(self.grant.encoder, self.grant.credit, self.lease_ids, reason))
        self.grant = self.ticket = self.result = None
        self.lease_ids, self.extend_s = (), inf
        self.renewing = self.renewed = False
        return effects

    def timeline(self, index: int, ready: Ready | None) -> ItemTimeline:
        """``index`` is the item's among the request's placements, by which ``ready`` reports its pull."""
        pull = next((pull for pull in ready.pulls if pull.item == index), None) if ready else None
        served = self.served
        return ItemTimeline(
            item=self.counted.item,
            shard=str(self.counted.shard or ""),
            modality=self.counted.info.modality.value,
            width=self.counted.info.width,
            height=self.counted.info.height,
            tokens=self.counted.tokens,
            encoder=self.encoder_id,
            encode_attempts=self.attempts,
            encoder_cached=served.cached if served else False,
            queue_s=served.queue_s if served else 0.0,
            encode_s=served.encode_s if served else 0.0,
            pull_backend=pull.backend if pull else "",
            pull_bytes=pull.nbytes if pull else 0,
            pull_s=pull.duration_s if pull else 0.0,
            text_cached=pull.cached if pull else False,
        )
