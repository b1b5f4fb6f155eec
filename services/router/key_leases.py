"""Leases on embeddings that callers name by their keys, for as long as they read them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.encoding import LeaseRequest
from triptych.domain.resolving import ResolvedItem
from triptych.errors import InternalError, LeaseLost, NotFound, TriptychError, Unavailable
from triptych.machine.router.cluster_events import KeyGone, KeysTold
from triptych.machine.router.shared_events import LeasesTaken

from .cluster import Cluster
from .held_share import HeldShare


class KeyLeases:
    """Asks the encoders that hold the keys' embeddings, as the cluster knows them."""

    def __init__(
        self, cluster: Cluster, new_lease: Callable[[], LeaseId], share: HeldShare, *, timeout_s: float
    ) -> None:
        """``timeout_s`` bounds the call to a holder."""
        self._cluster = cluster
        self._new_lease = new_lease
        self._share = share
        self._timeout_s = timeout_s

    async def resolve(self, keys: Sequence[bytes], lease_s: float) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        """Yield tickets with a lease each. The leases are released when the generator is closed, or after ``lease_s``.

        Raises NotFound for a key whose embedding is not held, Unavailable if its holder does not answer, Overloaded or
        InvalidRequest as ``HeldShare.take``.
        """
        known = [slot for key in keys if (slot := self._cluster.instances.directory.slot_of(key)) is not None]
        sizes = {slot.content: slot.nbytes for slot in known}
        self._share.take(sizes, "keys")
        try:
            async with aclosing(self._leased(keys, lease_s)) as leased:
                async for items in leased:
                    yield items
        finally:
            self._share.give_back(sizes)

    async def _leased(self, keys: Sequence[bytes], lease_s: float) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        held: list[tuple[str, LeaseId]] = []
        tickets: dict[int, Ticket] = {}
        errors: dict[int, TriptychError] = {}

        async def lease(place: int, key: bytes) -> None:
            try:
                tickets[place] = await self._lease(place, key, lease_s, held)
            except TriptychError as error:
                errors[place] = error

        try:
            async with asyncio.TaskGroup() as group:
                for place, key in enumerate(keys):
                    group.create_task(lease(place, key), name=f"lease {place}")
            if errors:
                raise errors[min(errors)]
            yield tuple(ResolvedItem(tickets[place]) for place in range(len(keys)))
            await asyncio.sleep(lease_s)
        finally:
            for name, lease_id in held:
                self._cluster.release(name, (lease_id,), ())

    async def _lease(self, place: int, key: bytes, lease_s: float, held: list[tuple[str, LeaseId]]) -> Ticket:
        """A ticket for one key. Its lease is in ``held`` before it is requested, as an answer may be lost."""
        param = f"keys[{place}]"
        gone = NotFound(f"{param}: no embedding of this key is held, resolve its media again", param=param)
        slot = self._cluster.instances.directory.slot_of(key)
        if slot is None:
            raise gone
        request = LeaseRequest(key, slot.generation, self._new_lease(), lease_s, self._timeout_s)
        held.append((slot.name, request.lease_id))
        self._cluster.feed(LeasesTaken(slot.name, (request.lease_id,)))
        try:
            async with asyncio.timeout(self._timeout_s):
                with self._cluster.call(slot.name) as encoder:
                    ticket = await encoder.lease(request)
        except LeaseLost:
            self._cluster.feed(KeyGone(key, slot))
            raise gone from None
        except TimeoutError:
            raise Unavailable(f"{param}: the encoder that holds the embedding does not answer") from None
        if (ticket.key, ticket.lease_id) != (key, request.lease_id):
            raise InternalError("an encoder leased another embedding than requested")
        self._cluster.feed(KeysTold({key: slot}))  # the latest to be forgotten
        return replace(ticket, address=slot.name)  # an instance's name is its address
