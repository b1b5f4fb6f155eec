"""Registers this process as a member with every pool manager, and keeps it registered."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Protocol

from triptych.domain.instance import InstanceLoad
from triptych.domain.pool import Farewell, Heartbeat, MemberReport, Order, OrderKind, Registration
from triptych.domain.stage import Stage
from triptych.domain.windows import WindowReport
from triptych.errors import TriptychError
from triptych.ports import PoolManagerClient
from triptych.runtime.batch_limits import SetLimits
from triptych.runtime.manager_access import ManagerAccess
from triptych.runtime.tasks import TaskScope
from triptych.runtime.watched_value import ReportIntervals, WatchedValue

logger = logging.getLogger(__name__)

_FAREWELL_S = 1.0
"""Longest wait of an ending process for pool managers that do not read, seconds."""
_SOONEST = 0.25
"""A change of the load is reported after this share of the heartbeat's interval."""


class Loaded(Protocol):
    """A service that reports load."""

    def load(self) -> InstanceLoad: ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the load may have changed."""
        ...


class Reporting(Protocol):
    """A router, which also reports windows of load and attainment."""

    def reports(self, after: int) -> Sequence[WindowReport]:
        """The recent windows with a sequence number above ``after``, oldest first."""
        ...


SetStages = Callable[[frozenset[Stage], int, str], None]
"""Switches to these stages, by an order with this version, for a reason. Raises Conflict, InvalidRequest."""


class _Stream:
    """Stream to one pool manager."""

    def __init__(self) -> None:
        self.register_again = False
        self.ended = False


class Registrar:
    """A member's side of ``PoolManager.attend``. Trouble with a pool manager is logged and retried, never raised."""

    def __init__(
        self,
        service: Loaded,
        introduce: Callable[[], Awaitable[Registration]],
        drain: Callable[[], Awaitable[None]],
        connect: Callable[[str], PoolManagerClient],
        access: ManagerAccess,
        scope: TaskScope,
        windows: Reporting | None = None,
        set_stages: SetStages | None = None,
        set_limits: SetLimits | None = None,
    ) -> None:
        """``introduce`` describes the process, ``drain``, ``set_stages`` and ``set_limits`` obey orders; ``scope`` owns the streams."""
        self._set_stages = set_stages
        self._set_limits = set_limits
        self._windows = windows
        self._introduce = introduce
        self._drain = drain
        self._connect = connect
        self._access = access
        self._scope = scope
        intervals = ReportIntervals(_SOONEST * access.heartbeat_s, access.heartbeat_s)
        self._load = WatchedValue(service.load, intervals)
        service.on_change(self._load.notify)
        self._registered: set[str] = set()
        self._draining = False
        self._drained = False
        self._leaving = False

    @property
    def registered(self) -> int:
        """Pool managers that have accepted the registration."""
        return len(self._registered)

    def start(self) -> None:
        for address in self._access.pool_manager:
            self._scope.spawn(self._attend(address), name=f"pool manager {address}")

    async def leave(self) -> None:
        """Say farewell to every pool manager that listens, for a bounded time."""
        self._leaving = True
        self._load.notify()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await self._load.wait_until(lambda _: not self._registered)

    async def _attend(self, address: str) -> None:
        client, failures = self._connect(address), 0
        try:
            while not self._leaving:
                stream = _Stream()
                try:
                    async with aclosing(client.attend(self._reports(stream))) as orders:
                        async for order in orders:
                            failures = 0
                            self._obey(order, address, stream)
                    reason = "it ended the stream"
                except TriptychError as error:
                    reason = f"{error.code}: {error.message}"
                finally:
                    stream.ended = True
                    self._registered.discard(address)
                    self._load.notify()
                if not self._leaving:
                    failures += 1
                    level = logging.WARNING if failures == 1 else logging.DEBUG
                    logger.log(level, "not registered with pool manager %s (%s); trying again", address, reason)
                    await asyncio.sleep(self._access.pause_s(address, failures))
        finally:
            await client.close()

    def _obey(self, order: Order, address: str, stream: _Stream) -> None:
        match order.kind:
            case OrderKind.REGISTERED:
                self._registered.add(address)
                logger.info("registered with pool manager %s", address)
            case OrderKind.REREGISTER:
                stream.register_again = True
                self._load.notify()
            case OrderKind.DRAIN if not self._draining:
                logger.info("pool manager %s orders to drain: %s", address, order.reason)
                self._draining = True
                self._scope.spawn(self._drain_as_ordered(), name="drain")
            case OrderKind.SWITCH if order.role is not None and self._set_stages is not None:
                _refusing(address, partial(self._set_stages, order.role.stages, order.version, order.reason))
            case OrderKind.LIMITS if order.limits is not None and self._set_limits is not None:
                _refusing(address, partial(self._set_limits, order.limits, order.version, order.by_hand, order.reason))

    async def _drain_as_ordered(self) -> None:
        await self._drain()
        self._drained = True
        logger.info("drained")
        self._load.notify()

    async def _reports(self, stream: _Stream) -> AsyncGenerator[MemberReport]:
        yield await self._introduce()
        sequence = window = 0
        async with aclosing(self._load.watch()) as loads:
            async for load in loads:
                if stream.ended:
                    return
                if stream.register_again:
                    stream.register_again = False
                    yield await self._introduce()
                sequence += 1
                yield Heartbeat(sequence, load, self._drained)
                for report in self._windows.reports(window) if self._windows is not None else ():
                    window = report.sequence
                    yield report
                if self._leaving:
                    yield Farewell("the process ends")
                    return


def _refusing(address: str, obey: Callable[[], None]) -> None:
    try:
        obey()
    except TriptychError as error:
        logger.warning("an order of pool manager %s is refused: %s", address, error.message)
