"""Releases leases at their holders, in the background and in batches."""

import asyncio
import logging

from triptych.domain.embedding import HolderRef, LeaseId, Ticket
from triptych.errors import TriptychError
from triptych.runtime.tasks import TaskScope
from triptych.transport.peer_pool import PeerPool

logger = logging.getLogger(__name__)

_MAX_PENDING = 16_384


class Releases:
    """Best effort: a lease that cannot be released expires. There is one call per holder at a time; later leases go
    with the next call. At most ``_MAX_PENDING`` leases per holder are queued; further ones are left to expire.
    """

    def __init__(self, peers: PeerPool, *, scope: TaskScope, timeout_s: float) -> None:
        self._peers = peers
        self._scope = scope
        self._timeout_s = timeout_s
        self._pending: dict[HolderRef, list[LeaseId]] = {}
        self._all_released = asyncio.Event()
        self._all_released.set()

    def add(self, ticket: Ticket) -> None:
        holder = ticket.held_by
        pending = self._pending.get(holder)
        if pending is None:
            try:
                self._scope.spawn(self._flush(holder), name="release-leases")
            except RuntimeError:  # the process ends, and leases expire
                return
            pending = self._pending[holder] = []
            self._all_released.clear()
        if len(pending) < _MAX_PENDING:
            pending.append(ticket.lease_id)

    async def released(self) -> None:
        """Return once no lease is being released. A call to a holder takes ``timeout_s`` at most."""
        await self._all_released.wait()

    async def _flush(self, holder: HolderRef) -> None:
        try:
            while lease_ids := self._pending[holder]:
                self._pending[holder] = []
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await self._peers.release(holder, lease_ids)
                except (TriptychError, TimeoutError) as error:
                    logger.info("%d leases could not be released and will expire: %s", len(lease_ids), error)
        finally:
            del self._pending[holder]
            if not self._pending:
                self._all_released.set()
