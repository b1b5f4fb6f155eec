"""A request's leases on something in an instance's arena, such as an embedding."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from triptych.domain.embedding import KEY_NBYTES, LeaseId, Ticket, payload_nbytes
from triptych.domain.item_plan import ItemPlan
from triptych.machine.router.request_events import Extend, Renew
from triptych.machine.router.shared_events import Grant

_EXTEND_MARGIN_S = 0.5
"""A lease that ends this shortly before the request's deadline is not extended."""
_LAST_TRY_S = 0.5
"""A lease with less time left is not extended again."""


@dataclass(slots=True)
class HeldTicket:
    """The router's own lease and the reader's. Part of ``machine.router.request.RequestMachine``.

    Lease ids are chosen before the call (docs/adr/0002), so that they can be released without an answer.
    """

    grant: Grant
    router_lease: LeaseId
    reader_lease: LeaseId
    """The newest one requested for a reader."""
    requested_s: float
    """When the leases were requested, so that their end is never overestimated ..."""
    lease_s: float
    """... and for how long."""
    lease_ids: tuple[LeaseId, ...]
    """All leases that may be held, answered or not; the router's own first."""
    sealed: Ticket | None = None
    """The ticket as first granted; None until then."""
    unsent: Ticket | None = None
    """A reader's ticket that has not been sent to a reader."""
    reader_until_s: float = 0.0
    """When the reader's lease ends, as far as is known."""
    router_until_s: float = 0.0
    extend_s: float = inf
    """When to extend the leases; never if they last as long as the request may."""
    renewing: bool = False
    renewed: bool = False
    """A lease is renewed once per attempt, however short it is."""

    @classmethod
    def requested(cls, grant: Grant, new_lease: Callable[[], LeaseId], now_s: float, lease_s: float) -> "HeldTicket":
        """Choose ids for both leases, which are about to be requested."""
        router, reader = new_lease(), new_lease()
        return cls(grant, router, reader, now_s, lease_s, (router, reader))

    @property
    def pending(self) -> bool:
        """Whether a call for it is running."""
        return self.sealed is None or self.renewing

    def granted(self, ticket: Ticket, router_lease: LeaseId, plan: ItemPlan, deadline_s: float) -> str | None:
        """Store both leases. Returns what is wrong with them, if anything, as wrong memory must never be read."""
        self.sealed = self.unsent = ticket
        if (router_lease, ticket.lease_id) != (self.router_lease, self.reader_lease):
            self.lease_ids += (router_lease, ticket.lease_id)
            return "other leases than those requested"
        self._last(self.lease_ids, self.requested_s, self.lease_s, deadline_s)
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
        """The call was answered without granting leases."""
        self.lease_ids = ()

    def stale(self, needed_until_s: float) -> bool:
        """Whether no ticket is usable by a reader until then."""
        return self.unsent is None or (not self.renewed and self.reader_until_s < needed_until_s)

    def renew(self, new_lease: Callable[[], LeaseId], now_s: float, lease_s: float, reason: str) -> Renew:
        """Request a new lease for another reader."""
        ticket = self._ticket
        self.renewing, self.unsent = True, None
        self.reader_lease, self.requested_s, self.lease_s = new_lease(), now_s, lease_s
        self.lease_ids += (self.reader_lease,)
        return Renew(
            self.grant.credit, self.grant.name, ticket.key, ticket.generation, self.reader_lease, lease_s, reason
        )

    def renewed_as(self, ticket: Ticket) -> bool:
        """Store the renewed ticket; False if it is not of the same embedding."""
        known = self._ticket
        self.renewing, self.renewed, self.unsent = False, True, ticket
        self.reader_until_s = self.requested_s + self.lease_s
        if (ticket.key, ticket.tokens, ticket.tensors) == (known.key, known.tokens, known.tensors) and (
            ticket.lease_id == self.reader_lease
        ):
            return True
        self.lease_ids += (ticket.lease_id,)
        return False

    def extend(self, now_s: float, lease_s: float) -> Extend:
        """Extend both leases. If that fails, it is retried at half of the time left."""
        left_s = self.router_until_s - now_s
        self.extend_s = now_s + left_s / 2 if left_s > _LAST_TRY_S else inf
        ticket, lease_ids = self._ticket, (self.router_lease, self.reader_lease)
        return Extend(self.grant.credit, self.grant.name, ticket.key, ticket.generation, lease_ids, lease_s)

    def extended(self, lease_ids: tuple[LeaseId, ...], requested_s: float, lease_s: float, deadline_s: float) -> None:
        """These leases last longer now."""
        self._last(lease_ids, requested_s, lease_s, deadline_s)

    def _last(self, lease_ids: tuple[LeaseId, ...], requested_s: float, lease_s: float, deadline_s: float) -> None:
        """Extend at half of the time, unless the lease outlasts the request."""
        self.router_until_s = end_s = requested_s + lease_s
        if self.reader_lease in lease_ids:
            self.reader_until_s = end_s
        self.extend_s = requested_s + lease_s / 2 if end_s < deadline_s - _EXTEND_MARGIN_S else inf

    @property
    def _ticket(self) -> Ticket:
        if self.sealed is None:
            raise AssertionError("nothing is held yet")
        return self.sealed
