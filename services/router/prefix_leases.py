"""Leases on segments of a prompt's prefix that other instances hold, for the text instance that the prompt goes to."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence

from triptych.domain.embedding import LEASE_ID_NBYTES, LeaseId, Ticket
from triptych.domain.encoding import LeaseRequest
from triptych.domain.kv_segment import KnownSegment, KvPlacement
from triptych.errors import TriptychError
from triptych.machine.router.shared_events import LeasesReturned, LeasesTaken
from triptych.ports import Rng

from .cluster import Cluster

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.1
"""The prompt waits for leases no longer than this."""


class PrefixLeases:
    """Of one call. ``release`` must follow ``take``, however that ended."""

    def __init__(self, cluster: Cluster, rng: Rng) -> None:
        """``rng`` makes lease ids, which are secrets."""
        self._cluster = cluster
        self._rng = rng
        self._asked: defaultdict[str, list[LeaseId]] = defaultdict(list)
        """By holder: those that may be held and that the reader does not release."""

    async def take(self, segments: Sequence[KnownSegment], lease_s: float) -> tuple[KvPlacement, ...]:
        """The segments up to the first that cannot be leased in time: hints may be wrong, and holders gone."""
        if not segments:
            return ()
        lease_ids = [self._rng.getrandbits(8 * LEASE_ID_NBYTES).to_bytes(LEASE_ID_NBYTES, "little") for _ in segments]
        for one, lease_id in zip(segments, lease_ids, strict=True):
            self._asked[one.name].append(lease_id)
        for name, asked in self._asked.items():
            self._cluster.feed(LeasesTaken(name, tuple(asked)))
        tickets: list[Ticket | None] = [None] * len(segments)

        async def lease(place: int, one: KnownSegment) -> None:
            request = LeaseRequest(one.key, None, lease_ids[place], lease_s, _PATIENCE_S)
            try:
                with self._cluster.call(one.name) as holder:
                    ticket = await holder.lease(request)
            except TriptychError as error:
                logger.debug("a segment at %s: %s", one.name, error.code)
                return
            named = (ticket.key, ticket.lease_id, ticket.holder, ticket.tokens)
            if named == (one.key, lease_ids[place], one.holder, one.tokens):
                tickets[place] = ticket.at(one.name)  # an instance's name is its address

        try:
            async with asyncio.timeout(_PATIENCE_S), asyncio.TaskGroup() as group:
                for place, one in enumerate(segments):
                    group.create_task(lease(place, one), name=f"lease {place}")
        except TimeoutError:
            logger.debug("leases on segments took too long")
        placements: list[KvPlacement] = []
        for one, ticket in zip(segments, tickets, strict=True):
            if ticket is None:
                break
            placements.append(KvPlacement(one.first, ticket))
        self._cluster.prefix_leases["granted"] += len(placements)
        self._cluster.prefix_leases["refused"] += len(segments) - len(placements)
        self._release_from(segments, lease_ids, len(placements))
        return tuple(placements)

    def read(self) -> None:
        """The reader has released what it got."""
        for name, lease_ids in self._asked.items():
            self._cluster.feed(LeasesReturned(name, tuple(lease_ids)))
        self._asked.clear()

    def release(self) -> None:
        """The call is over."""
        for name, lease_ids in self._asked.items():
            self._cluster.release(name, tuple(lease_ids), ())
        self._asked.clear()

    def _release_from(self, segments: Sequence[KnownSegment], lease_ids: Sequence[LeaseId], taken: int) -> None:
        """Those that are not passed on: what lies behind a gap is of no use."""
        wanted, self._asked = self._asked, defaultdict(list)
        for one, lease_id in zip(segments[:taken], lease_ids, strict=False):
            self._asked[one.name].append(lease_id)
        for name, asked in wanted.items():
            if unused := tuple([one for one in asked if one not in self._asked[name]]):
                self._cluster.release(name, unused, ())
