"""Members from a pool manager (``ports.Membership``)."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from itertools import cycle

from triptych.domain.membership import MemberKind, MembershipSnapshot
from triptych.domain.pool import MembershipDelta, Watch
from triptych.errors import TriptychError
from triptych.machine.membership_view import MembershipView, ViewLimits
from triptych.ports import Clock, PoolManagerClient
from triptych.runtime.manager_access import ManagerAccess

logger = logging.getLogger(__name__)


class ManagedMembership:
    """Follows the first pool manager that answers. While none does, the last snapshot stays valid."""

    def __init__(
        self,
        connect: Callable[[str], PoolManagerClient],
        access: ManagerAccess,
        limits: ViewLimits,
        *,
        clock: Clock,
        name: str,
        model: str = "",
        kinds: Sequence[MemberKind] = (),
    ) -> None:
        """Members of one ``model`` and some ``kinds``; empty for all. Pauses are jittered by ``name``."""
        self.fault = "no pool manager has answered yet"
        self._connect = connect
        self._access = access
        self._view = MembershipView(limits)
        self._clock = clock
        self._name = name
        self._model = model
        self._kinds = tuple(kinds)

    async def snapshots(self) -> AsyncGenerator[MembershipSnapshot]:
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                if self._view.handle(delta, self._clock()):
                    yield self._view.snapshot

    async def _deltas(self) -> AsyncGenerator[MembershipDelta]:
        failures = 0
        for address in cycle(self._access.pool_manager):
            try:
                async with aclosing(self._followed(address)) as deltas:
                    async for delta in deltas:
                        if self.fault:
                            logger.info("members come from pool manager %s", address)
                        failures, self.fault = 0, ""
                        yield delta
                reason = "it ended the stream"
            except TimeoutError:
                reason = "it is silent"
            except TriptychError as error:
                reason = error.code
            failures += 1
            if not self.fault or failures == 1:
                logger.warning("pool manager %s cannot be followed (%s); the last members stay", address, reason)
            self.fault = f"no pool manager answers: {reason}"
            await asyncio.sleep(self._access.pause_s(self._name, failures))

    async def _followed(self, address: str) -> AsyncGenerator[MembershipDelta]:
        """Deltas of one pool manager. Raises TimeoutError when it is silent, and errors of the call."""
        client = self._connect(address)
        try:
            async with aclosing(client.watch(Watch(*self._view.known, self._model, self._kinds))) as deltas:
                while True:
                    async with asyncio.timeout(self._access.manager_silence_s):
                        delta = await anext(deltas, None)
                    if delta is None:
                        return
                    yield delta
        finally:
            await client.close()
