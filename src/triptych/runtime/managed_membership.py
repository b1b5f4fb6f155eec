"""Members from a pool manager (``ports.Membership``)."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from itertools import cycle

from prometheus_client.core import Metric

from triptych.domain.membership import MemberKind, MembershipSnapshot
from triptych.domain.pool import MembershipDelta, Watch
from triptych.errors import TriptychError
from triptych.machine.membership_view import MembershipView, ViewLimits
from triptych.ports import Clock, PoolManagerClient
from triptych.runtime.manager_access import ManagerAccess
from triptych.runtime.metrics import gauge

logger = logging.getLogger(__name__)


def membership_gauges(version: int, fault: str) -> Iterable[Metric]:
    """Metrics of any source of members: the version of its last snapshot, and whether it can be read."""
    yield gauge("triptych_membership_version", "Membership snapshots so far", version)
    yield gauge(
        "triptych_membership_stale",
        "1 while the source of members cannot be read and the last snapshot stays in use",
        bool(fault),
    )


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
        metrics: str = "",
    ) -> None:
        """Members of one ``model`` and some ``kinds``; empty for all. Pauses are jittered by ``name``. ``metrics`` is the address of the
        admin port of a process that is no member.
        """
        self.fault = "no pool manager has answered yet"
        self._connect = connect
        self._access = access
        self._view = MembershipView(limits)
        self._clock = clock
        self._name = name
        self._model = model
        self._kinds = tuple(kinds)
        self._metrics = metrics
        self._heard_s: float | None = None

    @property
    def version(self) -> int:
        """Version of the last snapshot."""
        return self._view.snapshot.version

    def metrics(self) -> Iterable[Metric]:
        """Metric of the list's age, seconds. A manager confirms the list at least every second."""
        if self._heard_s is not None:
            yield gauge(
                "triptych_membership_age_seconds",
                "Time since a pool manager last confirmed the list of members",
                self._clock() - self._heard_s,
            )

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
                        failures, self.fault, self._heard_s = 0, "", self._clock()
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
            watch = Watch(*self._view.known, self._model, self._kinds, self._metrics)
            async with aclosing(client.watch(watch)) as deltas:
                while True:
                    async with asyncio.timeout(self._access.manager_silence_s):
                        delta = await anext(deltas, None)
                    if delta is None:
                        return
                    yield delta
        finally:
            await client.close()
