"""Leases that no credit covers: for one call, on what instances are known to hold."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.encoding import LeaseRequest
from triptych.domain.kv_segment import KnownSegment, KvPlacement
from triptych.domain.resolving import ResolvedItem
from triptych.errors import InternalError, LeaseLost, NotFound, TriptychError, Unavailable
from triptych.machine.router.cluster_events import KeyGone, KeysTold
from triptych.machine.router.shared_events import LeasesReturned, LeasesTaken, Release

from .cluster import Cluster
from .held_share import HeldShare

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.1
"""A prompt waits for leases on its prefix no longer than this."""


class CallLeases:
    """The leases of one call. ``release`` must follow, however the call ends.

    The cluster counts each lease from before it is requested, as an answer may be lost.
    """

    def __init__(self, cluster: Cluster, new_lease: Callable[[], LeaseId]) -> None:
        self._cluster = cluster
        self._new_lease = new_lease
        self._held: defaultdict[str, list[LeaseId]] = defaultdict(list)
        """By holder: those that may be held and that nobody else releases."""

    async def take(self, name: str, key: bytes, generation: int | None, lease_s: float, timeout_s: float) -> Ticket:
        """A ticket with a lease on what the instance holds under this key, with the address where a reader will connect.

        Raises TimeoutError after ``timeout_s``, LeaseLost if nothing is held, InternalError for a ticket of something else.
        """
        lease_id = self._new_lease()
        self._held[name].append(lease_id)
        self._cluster.feed(LeasesTaken(name, (lease_id,)))
        request = LeaseRequest(key, generation, lease_id, lease_s, timeout_s)
        async with asyncio.timeout(timeout_s):
            with self._cluster.call(name) as holder:
                ticket = await holder.lease(request)
        if (ticket.key, ticket.lease_id) != (key, lease_id):
            raise InternalError("an instance leased something else than requested")
        return ticket.at(name)  # an instance's name is its address

    async def take_prefix(self, segments: Sequence[KnownSegment], lease_s: float) -> tuple[KvPlacement, ...]:
        """The segments of a prompt's prefix up to the first that cannot be leased in time: hints may be wrong, and holders gone."""
        tickets: dict[int, Ticket] = {}

        async def lease(place: int, segment: KnownSegment) -> None:
            try:
                ticket = await self.take(segment.name, segment.key, None, lease_s, _PATIENCE_S)
            except (TriptychError, TimeoutError) as error:
                logger.debug("a segment at %s: %s", segment.name, error)
                return
            if (ticket.holder, ticket.tokens) == (segment.holder, segment.tokens):
                tickets[place] = ticket

        async with asyncio.TaskGroup() as group:
            for place, segment in enumerate(segments):
                group.create_task(lease(place, segment), name=f"lease {place}")
        taken = next((place for place in range(len(segments)) if place not in tickets), len(segments))
        self._cluster.prefix_leases["granted"] += taken
        self._cluster.prefix_leases["refused"] += len(segments) - taken
        self._release_but({tickets[place].lease_id for place in range(taken)})  # what lies behind a gap is of no use
        return tuple([KvPlacement(segments[place].first, tickets[place]) for place in range(taken)])

    def read(self) -> None:
        """Leave what is held to the reader, which has released it."""
        for name, lease_ids in self._held.items():
            self._cluster.feed(LeasesReturned(name, tuple(lease_ids)))
        self._held.clear()

    def release(self) -> None:
        """Release what is held, as the call is over."""
        self._release_but(frozenset())

    def _release_but(self, kept: set[LeaseId] | frozenset[LeaseId]) -> None:
        for name, lease_ids in list(self._held.items()):
            self._held[name] = [lease_id for lease_id in lease_ids if lease_id in kept]
            if released := tuple([lease_id for lease_id in lease_ids if lease_id not in kept]):
                self._cluster.release(Release(name, None, released))


class KeyLeases:
    """Leases on embeddings that callers name by their keys, at the encoders that hold them as far as the cluster knows."""

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
        known = [slot for key in keys if (slot := self._cluster.machine.instances.directory.slot_of(key)) is not None]
        sizes = {slot.content: slot.nbytes for slot in known}
        self._share.take(sizes, "keys")
        try:
            async with aclosing(self._leased(keys, lease_s)) as leased:
                async for items in leased:
                    yield items
        finally:
            self._share.give_back(sizes)

    async def _leased(self, keys: Sequence[bytes], lease_s: float) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        leases = CallLeases(self._cluster, self._new_lease)
        tickets: dict[int, Ticket] = {}
        errors: dict[int, TriptychError] = {}

        async def lease(place: int, key: bytes) -> None:
            try:
                tickets[place] = await self._lease(leases, place, key, lease_s)
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
            leases.release()

    async def _lease(self, leases: CallLeases, place: int, key: bytes, lease_s: float) -> Ticket:
        param = f"keys[{place}]"
        gone = NotFound(f"{param}: no embedding of this key is held, resolve its media again", param=param)
        slot = self._cluster.machine.instances.directory.slot_of(key)
        if slot is None:
            raise gone
        try:
            ticket = await leases.take(slot.name, key, slot.generation, lease_s, self._timeout_s)
        except LeaseLost:
            self._cluster.feed(KeyGone(key, slot))
            raise gone from None
        except TimeoutError:
            raise Unavailable(f"{param}: the encoder that holds the embedding does not answer") from None
        self._cluster.feed(KeysTold({key: slot}))  # the latest to be forgotten
        return ticket
