"""What the pool manager decides about sizes and roles, as lines for ``triptych up``."""

import asyncio
from collections.abc import Callable

from triptych.domain.decision import DecisionOutcome, DecisionSummary
from triptych.domain.pool import ManagerStatus, MemberStatus
from triptych.domain.stage import Role, Stage
from triptych.errors import TriptychError
from triptych.rpc.stubs import PoolManagerStub

_POLL_S = 1.0
_FAILED = (DecisionOutcome.FAILED, DecisionOutcome.TIMED_OUT)


class Changes:
    """Tells each decision that changes a size once, and each that failed; and when an instance serves other stages than before."""

    def __init__(self) -> None:
        self._incarnation = 0
        self._told: dict[str, tuple[int, bool]] = {}
        """By pool: the number of its last decision that was told, and whether it was told that it failed."""
        self._served: dict[str, frozenset[Stage]] = {}
        """By instance that can switch: what it was last seen to serve."""

    def news(self, status: ManagerStatus) -> list[str]:
        """What has not been told yet."""
        if status.incarnation != self._incarnation:  # another process, which counts from the start
            self._incarnation, self._told = status.incarnation, {}
        sizes = [
            line
            for pool in status.pools
            if pool.scaling is not None
            for one in pool.scaling.decisions
            for line in self._of(pool.scaling.name, one)
        ]
        members = {one.registration.instance_id: one for pool in status.pools for one in pool.members}
        switchable = {name: one for name, one in members.items() if one.registration.switchable is not None}
        self._served = {name: served for name, served in self._served.items() if name in switchable}
        return [*sizes, *(line for name, one in switchable.items() for line in self._switched(name, one))]

    def _switched(self, name: str, one: MemberStatus) -> list[str]:
        """Not of the time between, when it still closes stages."""
        if not one.is_as_wanted:
            return []
        first = one.registration.role
        before = self._served.get(name, frozenset() if first is None else first.stages)
        self._served[name] = one.open
        return [] if one.open == before else [f"{name} serves role {Role.of(one.open).value} now"]

    def _of(self, pool: str, one: DecisionSummary) -> list[str]:
        if one.target == one.wanted or one.outcome is DecisionOutcome.ADVISED:
            return []
        last, failure_told = self._told.get(pool, (0, False))
        lines: list[str] = []
        if one.number > last:
            reasons = "; ".join(reason.text for reason in one.reasons)
            drains = f", {one.drain} drains" if one.drain else ""
            lines.append(f"pool {pool}: {one.wanted} -> {one.target} instances{drains}: {reasons}")
            last, failure_told = one.number, False
        if one.number == last and one.outcome in _FAILED and not failure_told:
            lines.append(f"pool {pool}: {one.target} instances are not reached: {one.detail or one.outcome.value}")
            failure_told = True
        self._told[pool] = (last, failure_told)
        return lines


async def follow(manager: str, tell: Callable[[str], None]) -> None:
    """Tell the changes of the pool manager at ``host:port``, until cancelled. While it is away, there is nothing to tell."""
    stub, changes = PoolManagerStub(manager), Changes()
    try:
        while True:
            try:
                for line in changes.news(await stub.status()):
                    tell(line)
            except TriptychError:
                pass
            await asyncio.sleep(_POLL_S)
    finally:
        await stub.close()
