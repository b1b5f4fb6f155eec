"""Something in an instance's arena that a request holds by leases: an embedding, and whatever else is held by tickets."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from triptych.domain.embedding import KEY_NBYTES, LeaseId, Ticket, payload_nbytes
from triptych.machine.router.request_events import Extend, Renew
from triptych.machine.router.shared_events import Grant

_AS_GOOD_AS_S = 0.5
"""A lease that ends so much before the request must is not worth more time."""
_LAST_TRY_S = 0.5
"""With less left of a lease it is not asked again for more."""


@dataclass(slots=True)
class HeldTicket:
    """The router's own lease, and one for a reader. A part of ``machine.router.request.RequestMachine``.

    Leases are named before they are asked for (docs/adr/0002), so that they can be given back unseen.
    """

    grant: Grant
    router_lease: LeaseId
    reader_lease: LeaseId
    """The newest that was asked for on behalf of a reader."""
    asked_s: float
    """When it was, so that no lease is overrated ..."""
    lease_s: float
    """... and for how long."""
    lease_ids: tuple[LeaseId, ...]
    """Every lease that may be held, answered or not: the router's own first."""
    sealed: Ticket | None = None
    """As it was granted first; None until then."""
    unsent: Ticket | None = None
    """A reader's ticket that no reader has had yet."""
    reader_until_s: float = 0.0
    """When the reader's lease ends, as far as is known."""
    router_until_s: float = 0.0
    extend_s: float = inf
    """When more time is to be asked for; never, where leases last as long as the request may."""
    renewing: bool = False
    renewed: bool = False
    """A lease is renewed once per attempt, however short it is."""

    @classmethod
    def asked(cls, grant: Grant, new_lease: Callable[[], LeaseId], now_s: float, lease_s: float) -> "HeldTicket":
        """Both leases named and asked for, none granted yet."""
        router, reader = new_lease(), new_lease()
        return cls(grant, router, reader, now_s, lease_s, (router, reader))

    @property
    def pending(self) -> bool:
        """Whether a call for it is under way."""
        return self.sealed is None or self.renewing

    def granted(self, ticket: Ticket, router_lease: LeaseId, tokens: int, deadline_s: float) -> str | None:
        """Take in both leases. What is wrong with them, if anything: wrong memory must never be read."""
        self.sealed = self.unsent = ticket
        if (router_lease, ticket.lease_id) != (self.router_lease, self.reader_lease):
            self.lease_ids += (router_lease, ticket.lease_id)
            return "other leases than those that were asked for"
        self._last(self.lease_ids, self.asked_s, self.lease_s, deadline_s)
        if len(ticket.key) != KEY_NBYTES:
            return f"a key of {len(ticket.key)} bytes instead of {KEY_NBYTES}"
        if ticket.holder != self.grant.instance_id:
            return f"a ticket of {ticket.holder}"
        if ticket.tokens != tokens:
            return f"{ticket.tokens} tokens for an item that was counted as {tokens}"
        if not ticket.tensors or payload_nbytes(ticket.tensors) != ticket.payload_nbytes:
            return f"tensors that do not make up {ticket.payload_nbytes} bytes"
        return None

    def not_granted(self) -> None:
        """The call was answered, and nothing was granted."""
        self.lease_ids = ()

    def stale(self, needed_until_s: float) -> bool:
        """Whether there is no ticket that a reader could use for so long."""
        return self.unsent is None or (not self.renewed and self.reader_until_s < needed_until_s)

    def renew(self, new_lease: Callable[[], LeaseId], now_s: float, lease_s: float, reason: str) -> Renew:
        """A fresh lease for a further reader."""
        ticket = self._ticket
        self.renewing, self.unsent = True, None
        self.reader_lease, self.asked_s, self.lease_s = new_lease(), now_s, lease_s
        self.lease_ids += (self.reader_lease,)
        return Renew(
            self.grant.credit, self.grant.name, ticket.key, ticket.generation, self.reader_lease, lease_s, reason
        )

    def renewed_as(self, ticket: Ticket) -> bool:
        """Take in what was renewed; False where it is not what is held."""
        known = self._ticket
        self.renewing, self.renewed, self.unsent = False, True, ticket
        self.reader_until_s = self.asked_s + self.lease_s
        if (ticket.key, ticket.tokens, ticket.tensors) == (known.key, known.tokens, known.tensors) and (
            ticket.lease_id == self.reader_lease
        ):
            return True
        self.lease_ids += (ticket.lease_id,)
        return False

    def extend(self, now_s: float, lease_s: float) -> Extend:
        """More time for both. Should it fail: once more at half of what is left then, until nothing is."""
        left_s = self.router_until_s - now_s
        self.extend_s = now_s + left_s / 2 if left_s > _LAST_TRY_S else inf
        ticket, lease_ids = self._ticket, (self.router_lease, self.reader_lease)
        return Extend(self.grant.credit, self.grant.name, ticket.key, ticket.generation, lease_ids, lease_s)

    def extended(self, lease_ids: tuple[LeaseId, ...], asked_s: float, lease_s: float, deadline_s: float) -> None:
        """These last longer now."""
        self._last(lease_ids, asked_s, lease_s, deadline_s)

    def _last(self, lease_ids: tuple[LeaseId, ...], asked_s: float, lease_s: float, deadline_s: float) -> None:
        """Asked again at half of the time, unless it outlasts the request."""
        self.router_until_s = end_s = asked_s + lease_s
        if self.reader_lease in lease_ids:
            self.reader_until_s = end_s
        self.extend_s = asked_s + lease_s / 2 if end_s < deadline_s - _AS_GOOD_AS_S else inf

    @property
    def _ticket(self) -> Ticket:
        if self.sealed is None:
            raise AssertionError("nothing is held yet")
        return self.sealed
