"""What a router holds at instances, as its calls to them show: an account that is kept apart from the router's own."""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.generation import KvTransferred, TextEvent, TextRequest
from triptych.errors import Cancelled, DeadlineExceeded, LeaseLost, StageClosed, TriptychError, Unavailable
from triptych.machine.router.leases import leases_of
from triptych.virtual.links import Link, LinkedInstance


class HeldLeases:
    """Of one router: the leases that it has to give back."""

    def __init__(self) -> None:
        self._held: dict[LeaseId, tuple[str, int]] = {}
        """The instance and its incarnation."""
        self._released: set[LeaseId] = set()
        self.forgotten: list[str] = []
        """Instances that the router has forgotten although it held leases there."""

    def take(self, name: str, epoch: int, lease_ids: Iterable[LeaseId]) -> None:
        self._held.update((lease_id, (name, epoch)) for lease_id in lease_ids if lease_id not in self._released)

    def drop(self, lease_ids: Iterable[LeaseId]) -> None:
        """Drop leases that are not granted, or somebody else gives them back."""
        for lease_id in lease_ids:
            self._held.pop(lease_id, None)

    def release(self, lease_ids: Iterable[LeaseId]) -> None:
        self._released.update(lease_ids)
        self.drop(lease_ids)

    def lose(self, name: str) -> None:
        """Nothing can be released there any more."""
        self.drop([lease_id for lease_id, (holder, _) in self._held.items() if holder == name])

    def forget(self, name: str, epoch: int) -> None:
        """The router has closed its connection, to an instance that could take leases back."""
        if count := sum(where == (name, epoch) for where in self._held.values()):
            self.forgotten.append(f"{name} with {count} leases")


class WatchedInstance(LinkedInstance):
    """A router's way to an instance."""

    def __init__(self, link: Link[Any], name: str, held: HeldLeases, epoch: Callable[[], int | None]) -> None:
        """``epoch``: the incarnation that answers now; None if there is none, or the router may forget it at any time."""
        super().__init__(link)
        self._name = name
        self._leases = held
        self._epoch = epoch

    def _take(self, *lease_ids: LeaseId) -> None:
        if (epoch := self._epoch()) is not None:
            self._leases.take(self._name, epoch, lease_ids)

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        self._take(request.router_lease)
        try:
            return await super().encode(request)
        except TriptychError as error:
            if isinstance(error, StageClosed) or not isinstance(error, Unavailable | DeadlineExceeded | Cancelled):
                self._leases.drop((request.router_lease,))
            raise

    async def lease(self, request: LeaseRequest) -> Ticket:
        self._take(request.lease_id)
        try:
            return await super().lease(request)
        except LeaseLost:
            self._leases.drop((request.lease_id,))
            raise

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        try:
            await super().release(lease_ids)
        finally:
            self._leases.release(lease_ids)

    async def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        async with aclosing(super().generate(request)) as stream:
            async for events in stream:
                # The reader has released them.
                self._leases.drop([segment.ticket.lease_id for segment in request.kv_segments])
                if events and isinstance(events[-1], KvTransferred):
                    self._take(*leases_of(events[-1].segments))
                yield events

    async def close(self) -> None:
        if not self._link.stalled and (epoch := self._epoch()) is not None:
            self._leases.forget(self._name, epoch)
        await super().close()
