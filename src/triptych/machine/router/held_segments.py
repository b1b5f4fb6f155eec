"""The keys and values that an instance has handed over for one request, and the router's leases on them (docs/adr/0044).

They are worth computation only. So nothing that happens to them fails a request: what is lost is not sent, and computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from triptych.domain.embedding import KEY_NBYTES, LeaseId, Ticket
from triptych.domain.kv_segment import KvPlacement, SealedSegment
from triptych.machine.router.request_events import Abort, RenewSegments, RequestEffect
from triptych.machine.router.shared_events import Grant, LeasesTaken, Release


@dataclass(slots=True)
class HeldSegments:
    """Part of ``machine.router.request.RequestMachine``, which alone changes it.

    Their leases are not extended, as the answer goes on at once, but renewed before they are sent to another reader. No credit
    covers them, as that of the call that sealed them is returned at its end.
    """

    grant: Grant | None = None
    """Of the call that sealed them; None without any."""
    placements: tuple[KvPlacement, ...] = ()
    """With the last reader's leases."""
    renewing: bool = False
    _lease_ids: tuple[LeaseId, ...] = ()
    """All leases that may be held, answered or not."""
    _asked: tuple[LeaseId, ...] = ()
    """Those that are being requested."""
    _sent: bool = False
    _until_s: float = 0.0
    """When the readers' leases end, as far as is known."""
    _requested_until_s: float = 0.0

    @property
    def name(self) -> str:
        """The address of the instance that holds them."""
        return "" if self.grant is None else self.grant.name

    @property
    def tokens(self) -> int:
        """Positions that they cover from the first one on, of every choice."""
        return max([one.end for one in self.placements if not one.choices], default=0)

    def nbytes_by_holder(self) -> dict[str, int]:
        """Their bytes, by the id of the instance that holds them."""
        nbytes = sum([one.ticket.payload_nbytes for one in self.placements])
        return {} if self.grant is None else {self.grant.instance_id: nbytes}

    def take(self, grant: Grant, segments: Sequence[SealedSegment], until_s: float) -> list[RequestEffect]:
        """The instance of ``grant`` has sealed these, with leases until then at least. What it sealed wrongly is not used."""
        effects = self.release("others were handed over")
        if segments:
            self.grant, self._until_s, self._sent = grant, until_s, False
            self._lease_ids = leases_of(segments)
            self.placements = _beginning([one.placement for one in segments], grant.instance_id)
            effects.append(LeasesTaken(grant.name, self._lease_ids))
        return effects

    def stale(self, needed_until_s: float) -> bool:
        """Whether a reader needs new leases, if it is to have them until then."""
        return bool(self.placements) and (self._sent or self._until_s < needed_until_s)

    def renew(self, new_lease: Callable[[], LeaseId], now_s: float, lease_s: float, reason: str) -> list[RequestEffect]:
        """Request new leases for another reader."""
        if self.grant is None:
            raise AssertionError("nothing was handed over")
        self._asked = tuple([new_lease() for _ in self.placements])
        self._lease_ids += self._asked
        self.renewing, self._requested_until_s = True, now_s + lease_s
        tickets = tuple([one.ticket for one in self.placements])
        name = self.grant.name
        renew = RenewSegments(self.grant.credit, name, tickets, self._asked, lease_s, reason)
        return [LeasesTaken(name, self._asked), renew]

    def renewed(self, credit: int, tickets: Sequence[Ticket | None]) -> bool:
        """Keep the segments up to the first that is lost. Returns whether these leases are those that were requested last."""
        if self.grant is None or self.grant.credit != credit or not self.renewing:
            return False
        kept: list[KvPlacement] = []
        for placement, ticket, asked in zip(self.placements, tickets, self._asked, strict=False):
            known = placement.ticket
            if ticket is None or (ticket.key, ticket.tensors, ticket.lease_id) != (known.key, known.tensors, asked):
                break
            kept.append(replace(placement, ticket=ticket))
        self.placements, self.renewing, self._sent = tuple(kept), False, False
        self._until_s = self._requested_until_s
        return True

    def send(self) -> tuple[KvPlacement, ...]:
        """For a reader, with the address where it will connect."""
        self._sent = True
        name = self.name
        return tuple([KvPlacement(one.first, one.ticket.at(name), one.choices) for one in self.placements])

    def release(self, reason: str) -> list[RequestEffect]:
        """Give all leases back."""
        grant, lease_ids, renewing = self.grant, self._lease_ids, self.renewing
        self.grant, self.placements, self._lease_ids, self.renewing = None, (), (), False
        if grant is None or not lease_ids:
            return []
        release = Release(grant.name, None, lease_ids, reason)
        return [Abort(grant.credit, reason), release] if renewing else [release]

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        assert self.grant is not None or not (self.placements or self._lease_ids), "segments of nobody"  # noqa: S101
        assert len(self._lease_ids) >= len(self.placements), "segments without leases"  # noqa: S101
        assert not self.renewing or self.placements, "nothing is renewed"  # noqa: S101


def leases_of(segments: Sequence[SealedSegment]) -> tuple[LeaseId, ...]:
    """Those of the router and of the reader."""
    return tuple([lease for one in segments for lease in (one.router_lease, one.placement.ticket.lease_id)])


def _beginning(placements: Sequence[KvPlacement], holder: str) -> tuple[KvPlacement, ...]:
    """Up to the first that is none of this holder's, or that does not follow those before."""
    ends: dict[tuple[int, ...], int] = {}
    for count, one in enumerate(placements):
        ticket, follows = one.ticket, max(ends.get(one.choices, 0), ends.get((), 0))
        if ticket.holder != holder or len(ticket.key) != KEY_NBYTES or one.first > follows:
            return tuple(placements[:count])
        ends[one.choices] = one.end
    return tuple(placements)
