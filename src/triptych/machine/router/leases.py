"""The leases of a request on what its attempts have left at instances."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from triptych.domain.embedding import KEY_NBYTES, LeaseId, Ticket, payload_nbytes
from triptych.domain.item_plan import ItemPlan
from triptych.domain.kv_segment import KvPlacement, SealedSegment
from triptych.machine.router.request_events import Abort, Renew, RequestEffect
from triptych.machine.router.shared_events import Grant, LeasesTaken, Release

_EXTEND_MARGIN_S = 0.5
"""A lease that ends this shortly before the request's deadline is not extended."""
_LAST_TRY_S = 0.5
"""A lease with less time left is not extended again."""


@dataclass(slots=True)
class AttemptLeases:
    """Owner of the leases on what one attempt has left at its instance: an embedding, or segments of keys and values.

    Part of ``machine.router.request.RequestMachine``, which alone changes it. The router holds leases of its own; each reader
    gets one with every ticket. Their ids are chosen before the call (docs/adr/0002), so that they can be released without an
    answer.
    """

    grant: Grant
    """The attempt's place."""
    is_covered: bool
    """The attempt's credit is held as long as the leases. Without that, the cluster counts the leases themselves."""
    readers: tuple[LeaseId, ...]
    """The newest ones that were requested for a reader, in the order of the tickets."""
    lease_ids: tuple[LeaseId, ...]
    """Leases that may be held, answered or not; the router's own first."""
    requested_s: float
    """When the newest leases were requested, so that their end is never overestimated ..."""
    lease_s: float
    """... and for how long."""
    is_pending: bool = False
    """Leases for a reader have been requested and not answered."""
    tickets: tuple[Ticket, ...] = ()
    """As granted last; empty until then."""
    is_sent: bool = False
    """A reader has the tickets. Another one needs leases of its own."""
    is_renewed: bool = False
    """Leases are renewed once for each reader, however short they are."""
    reader_until_s: float = 0.0
    """When the reader's leases end, as far as is known."""
    router_until_s: float = 0.0
    extend_s: float = inf
    """When to extend the leases; never if they last as long as the request may, and never those on segments."""

    @classmethod
    def requested(cls, grant: Grant, new_lease: Callable[[], LeaseId], now_s: float, lease_s: float) -> "AttemptLeases":
        """Choose the ids of leases on an embedding, which are about to be requested with it."""
        router, reader = new_lease(), new_lease()
        return cls(grant, True, (reader,), (router, reader), now_s, lease_s, is_pending=True)

    @classmethod
    def kv_transferred(
        cls, grant: Grant, segments: Sequence[SealedSegment], used: int, until_s: float
    ) -> "AttemptLeases":
        """AttemptLeases that were granted with these segments until then at least. The first ``used`` are sent to readers."""
        placements = [sealed.placement for sealed in segments[:used]]
        readers = tuple([placement.ticket.lease_id for placement in placements])
        return cls(
            grant,
            False,
            readers,
            leases_of(segments),
            until_s,
            0.0,
            tickets=tuple([placement.ticket for placement in placements]),
            reader_until_s=until_s,
        )

    @property
    def is_renewing(self) -> bool:
        return self.is_pending and bool(self.tickets)

    # --- an embedding ------------------------------------------------------------------------------------------------

    def granted(self, ticket: Ticket, router_lease: LeaseId, plan: ItemPlan, deadline_s: float) -> str | None:
        """Store both leases. Returns what is wrong with them, if anything, as wrong memory must never be read."""
        self.tickets, self.is_pending = (ticket,), False
        if (router_lease, ticket.lease_id) != self.lease_ids:
            self.lease_ids += (router_lease, ticket.lease_id)
            return "other leases than those requested"
        self.extended(self.lease_ids, self.requested_s, self.lease_s, deadline_s)
        if len(ticket.key) != KEY_NBYTES:
            return f"a key of {len(ticket.key)} bytes instead of {KEY_NBYTES}"
        if ticket.holder != self.grant.instance_id:
            return f"a ticket of {ticket.holder}"
        if ticket.tokens != plan.tokens:
            return f"{ticket.tokens} tokens for an item of {plan.tokens}"
        if ticket.tensors != plan.tensors:
            return "tensors of another form than the item's"
        fits = payload_nbytes(ticket.tensors) == ticket.payload_nbytes
        return None if fits else f"tensors that do not sum to {ticket.payload_nbytes} bytes"

    def not_granted(self) -> None:
        """Note that the call was answered without granting leases."""
        self.lease_ids = ()

    def extend(self, now_s: float, lease_s: float) -> Renew:
        """Extend the leases of router and reader. If that fails, it is retried at half of the time left."""
        left_s = self.router_until_s - now_s
        self.extend_s = now_s + left_s / 2 if left_s > _LAST_TRY_S else inf
        lease_ids = self.lease_ids[:1] + self.readers
        return self._renew(
            self.tickets * len(lease_ids), lease_ids, lease_s, "half of its time has passed", extends=True
        )

    def extended(self, lease_ids: Sequence[LeaseId], requested_s: float, lease_s: float, deadline_s: float) -> None:
        """Note that these, the router's own included, last longer. They are extended at half of that, if the request may outlast it."""
        self.router_until_s = end_s = requested_s + lease_s
        if self.readers[0] in lease_ids:
            self.reader_until_s = end_s
        self.extend_s = requested_s + lease_s / 2 if end_s < deadline_s - _EXTEND_MARGIN_S else inf

    # --- another reader ----------------------------------------------------------------------------------------------

    def is_stale(self, needed_until_s: float) -> bool:
        """Whether a reader needs new leases, if it is to have them until then."""
        return bool(self.tickets) and (self.is_sent or (not self.is_renewed and self.reader_until_s < needed_until_s))

    def renew(self, new_lease: Callable[[], LeaseId], now_s: float, lease_s: float, reason: str) -> list[RequestEffect]:
        """Request new leases for another reader."""
        self.readers = tuple([new_lease() for _ in self.tickets])
        self.lease_ids += self.readers
        self.is_pending, self.is_sent, self.requested_s, self.lease_s = True, False, now_s, lease_s
        renew = self._renew(self.tickets, self.readers, lease_s, reason)
        return [renew] if self.is_covered else [LeasesTaken(self.grant.name, self.readers), renew]

    def renewed(self, tickets: Sequence[Ticket]) -> int:
        """Keep the tickets up to the first that is missing, or of something else. Returns how many these are."""
        kept: list[Ticket] = []
        for ticket, known, lease_id in zip(tickets, self.tickets, self.readers, strict=False):
            granted = (ticket.key, ticket.tokens, ticket.tensors, ticket.lease_id)
            if granted != (known.key, known.tokens, known.tensors, lease_id):
                self.lease_ids += (ticket.lease_id,)
                break
            kept.append(ticket)
        self.is_pending, self.is_renewed = False, True
        self.tickets, self.reader_until_s = tuple(kept), self.requested_s + self.lease_s
        return len(kept)

    def _renew(
        self,
        tickets: tuple[Ticket, ...],
        lease_ids: tuple[LeaseId, ...],
        lease_s: float,
        reason: str,
        *,
        extends: bool = False,
    ) -> Renew:
        return Renew(self.grant.credit, self.grant.name, tickets, lease_ids, lease_s, reason, extends)

    # --- the end -----------------------------------------------------------------------------------------------------

    def release(self, reason: str) -> list[RequestEffect]:
        """Return them, and the credit that covers them."""
        grant = self.grant
        release = Release(grant.name, grant.credit if self.is_covered else None, self.lease_ids, reason)
        return [Abort(grant.credit, reason), release] if self.is_pending else [release]

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        assert self.lease_ids, "a place without leases"
        assert self.is_pending or self.tickets or not self.is_covered, "neither asked for nor granted"
        assert not self.is_renewing or not self.is_sent, "renewed, and sent already"


def leases_of(segments: Sequence[SealedSegment]) -> tuple[LeaseId, ...]:
    """The ids of router and reader of each segment."""
    return tuple([lease for sealed in segments for lease in (sealed.router_lease, sealed.placement.ticket.lease_id)])


def usable(placements: Sequence[KvPlacement], holder: str) -> tuple[KvPlacement, ...]:
    """The placements up to the first that is none of this holder's, or that does not follow those before."""
    ends: dict[tuple[int, ...], int] = {}
    for count, placement in enumerate(placements):
        ticket, follows = placement.ticket, max(ends.get(placement.choices, 0), ends.get((), 0))
        if ticket.holder != holder or len(ticket.key) != KEY_NBYTES or placement.first > follows:
            return tuple(placements[:count])
        ends[placement.choices] = placement.end
    return tuple(placements)
