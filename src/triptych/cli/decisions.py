"""Decisions of the pool manager about sizes and roles, as lines for ``triptych up``."""

import asyncio
from collections.abc import Callable

from triptych.domain.decision import DecisionOutcome, DecisionSummary
from triptych.domain.pool import ManagerStatus, MemberStatus
from triptych.domain.replanning import PlanDecision, PlanOutcome, in_letters
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
        """Last decision shown of each pool: its number, and whether its failure was shown."""
        self._plans: dict[int, PlanOutcome] = {}
        """Decisions on plans by number, with the outcome that was shown last."""
        self._served: dict[str, frozenset[Stage]] = {}
        """Stages that each switchable instance was last seen to serve."""

    def news(self, status: ManagerStatus) -> list[str]:
        """Lines on what has not been shown yet."""
        if status.incarnation != self._incarnation:  # another process, which counts from the start
            self._incarnation, self._told, self._plans = status.incarnation, {}, {}
        sizes = [
            line
            for pool in status.pools
            if pool.scaling is not None
            for decision in pool.scaling.decisions
            for line in self._of(pool.scaling.name, decision)
        ]
        members = {member.registration.instance_id: member for pool in status.pools for member in pool.members}
        switchable = {name: member for name, member in members.items() if member.registration.switchable is not None}
        self._served = {name: served for name, served in self._served.items() if name in switchable}
        plans = [] if status.plan is None else [line for each in status.plan.decisions for line in self._planned(each)]
        return [*plans, *sizes, *(line for name, member in switchable.items() for line in self._switched(name, member))]

    def _switched(self, name: str, member: MemberStatus) -> list[str]:
        """Lines on a switch that has ended. An instance that still closes stages has none."""
        if not member.is_as_wanted:
            return []
        first = member.registration.role
        before = self._served.get(name, frozenset() if first is None else first.stages)
        self._served[name] = member.open
        return [] if member.open == before else [f"{name} serves role {Role.of(member.open).value} now"]

    def _planned(self, decision: PlanDecision) -> list[str]:
        if self._plans.get(decision.number) is decision.outcome:
            return []
        self._plans[decision.number] = decision.outcome
        change = f"{in_letters(decision.present)} -> {in_letters(decision.wanted)}"
        return [f"plan {decision.number}, {decision.outcome}: {change}: {decision.reason}"]

    def _of(self, pool: str, decision: DecisionSummary) -> list[str]:
        if decision.target == decision.wanted or decision.outcome is DecisionOutcome.ADVISED:
            return []
        last, failure_told = self._told.get(pool, (0, False))
        lines: list[str] = []
        if decision.number > last:
            reasons = "; ".join(reason.text for reason in decision.reasons)
            drains = f", {decision.drain} drains" if decision.drain else ""
            lines.append(f"pool {pool}: {decision.wanted} -> {decision.target} instances{drains}: {reasons}")
            last, failure_told = decision.number, False
        if decision.number == last and decision.outcome in _FAILED and not failure_told:
            lines.append(
                f"pool {pool}: {decision.target} instances are not reached: {decision.detail or decision.outcome.value}"
            )
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
