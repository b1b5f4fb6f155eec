"""Giving leases back to their holders: in the background, many at once, and never waited for by a request."""

import asyncio
import logging

from triptych.domain.embedding import LeaseId, Ticket
from triptych.errors import TriptychError
from triptych.runtime.tasks import TaskScope

from .holders import HolderDirectory

logger = logging.getLogger(__name__)

_MAX_PENDING = 16_384


class Releases:
    """Best effort: a lease that cannot be given back ends by itself on its holder's clock.

    To each holder one call is made at a time; what comes up meanwhile goes with the next one. What waits is bounded:
    beyond ``_MAX_PENDING`` leases for one holder, leases are left to end by themselves.
    """

    def __init__(self, holders: HolderDirectory, *, scope: TaskScope, timeout_s: float) -> None:
        self._holders = holders
        self._scope = scope
        self._timeout_s = timeout_s
        self._pending: dict[tuple[str, int], list[LeaseId]] = {}

    def add(self, ticket: Ticket) -> None:
        holder = (ticket.holder, ticket.epoch)
        pending = self._pending.get(holder)
        if pending is None:
            pending = self._pending[holder] = []
            self._scope.spawn(self._flush(holder), name="release-leases")
        if len(pending) < _MAX_PENDING:
            pending.append(ticket.lease_id)

    async def _flush(self, holder: tuple[str, int]) -> None:
        try:
            while lease_ids := self._pending[holder]:
                self._pending[holder] = []
                await self._release(holder, lease_ids)
        finally:
            del self._pending[holder]

    async def _release(self, holder: tuple[str, int], lease_ids: list[LeaseId]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._holders.find(*holder)
                await found.encoder.release(lease_ids)
        except (TriptychError, TimeoutError) as error:
            logger.info("%d leases could not be given back and end by themselves: %s", len(lease_ids), error)
