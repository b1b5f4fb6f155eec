"""Follows a plan: gives its machine what the members and reports of its model say, runs its searches, and carries out what it orders."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from triptych.domain.decision import Bounds, PlannedSize
from triptych.domain.mix import NO_REQUESTS, Mix
from triptych.domain.pool import MemberCondition, MemberStatus
from triptych.domain.replanning import Drift, PlanDecision, PlanOutcome, PlanQuestion, PlanStatus, in_letters
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role, Stage
from triptych.domain.windows import ClassWindow
from triptych.errors import TriptychError
from triptych.machine.pool_manager.plan import PlanMachine, ReplanLimits
from triptych.machine.pool_manager.plan_events import (
    HoldSizes,
    PlanDecided,
    PlanEvent,
    PlanFound,
    PlanPaused,
    PlanTick,
    SearchFailed,
    SearchPlan,
    SwitchTo,
)
from triptych.machine.pool_manager.reports import LONG_S, RouterReports
from triptych.policy.moving import Placed, PoolSize
from triptych.ports import Clock, Replanner
from triptych.runtime.tasks import TaskScope

from .plan import FollowedPlan

logger = logging.getLogger(__name__)

_CATCH_UP_S = 60.0
"""Time in which requests that wait are to be served, beside those that come."""
_BETTER = (PlanOutcome.ADVISED, PlanOutcome.MOVING)


class Replanning:
    """A plan that is followed. Pools read what it has for them (``size``)."""

    def __init__(
        self,
        plan: FollowedPlan,
        limits: ReplanLimits,
        *,
        replans: bool,
        replanner: Replanner,
        switch: Callable[[str, Role, str], None],
        clock: Clock,
        scope: TaskScope,
    ) -> None:
        """``replans``: whether it moves to what is better, or only says so. ``switch`` lets a member switch to a role, for a reason."""
        self.plan = plan
        self.replans = replans
        self._limits = limits
        self._machine = PlanMachine(plan.model, plan.mix, plan.rate, limits, replans=replans)
        self._replanner = replanner
        self._switch = switch
        self._clock = clock
        self._scope = scope
        self._held: HoldSizes | None = None
        self.outcomes: dict[PlanOutcome, int] = dict.fromkeys(PlanOutcome, 0)
        """Decisions by what came of them."""
        self.gain = 0.0
        """By how much what was found last is better, as a share; 0 if nothing is, or it is there."""

    def tick(
        self, members: Sequence[MemberStatus], pools: Mapping[PoolName, PoolSize], reports: RouterReports | None
    ) -> None:
        """Decide, given the members of the plan's model now. ``pools``: empty where nothing starts and stops instances."""
        instances = tuple(placed for member in members if (placed := self._placed(member)) is not None)
        sizes = {self.plan.kind_of(pool): size for pool, size in pools.items()}
        if len(sizes) < len(pools):
            self.pause("a role has more tiers than in the plan")
            return
        self._held = None
        self._feed(PlanTick(*self._seen(reports), instances, sizes))

    def pause(self, reason: str) -> None:
        """Nothing may be ordered now."""
        self._held = None
        self._feed(PlanPaused(reason))

    def size(self, pool: PoolName) -> PlannedSize | None:
        """The size that the plan has for a pool; None where it does not decide on it."""
        held = self._held
        if held is None or pool.model != self.plan.model or (kind := self.plan.kind_of(pool)) not in held.sizes:
            return None
        return PlannedSize(held.sizes[kind], held.reason, held.drain)

    def bounds_of(self, pool: PoolName) -> Bounds | None:
        """Sizes that the plan lets a pool have; None if it does not say it."""
        return self.plan.bounds_of(pool, replans=self.replans)

    def _placed(self, member: MemberStatus) -> Placed | None:
        """A member as an instance that can be moved; None for one that is not active, or serves nothing yet."""
        registration = member.registration
        if (pool := registration.pool) is None or member.condition is not MemberCondition.ACTIVE or not member.open:
            return None
        faulty = frozenset(closed.stage for closed in member.load.closed if closed.fault)
        wanted, serves = member.wanted, Role.of(member.open)
        settled = member.is_as_wanted or wanted is None or bool(wanted.stages & faulty)
        switchable = frozenset[Stage]() if registration.switchable is None else registration.switchable.stages - faulty
        return Placed(
            registration.instance_id,
            self.plan.kind_of(pool),
            serves if settled or wanted is None else wanted,
            settled,
            switchable,
            sum(load.pending for load in member.load.stages.values()),
        )

    def _seen(self, reports: RouterReports | None) -> tuple[Mix, float, float]:
        """The mix and the rate of the shortest window with enough requests, and its length. What waits is to be served as well. A rate that
        falls is that of the longest window: a placement that is too small by chance would make requests late.
        """
        window_s = self._limits.drift_persists_s
        if reports is None:
            return NO_REQUESTS, 0.0, window_s
        now_s = self._clock()
        while (mix := reports.mix(window_s, now_s)).requests < self._limits.drift_requests and window_s < LONG_S:
            window_s = min(2 * window_s, LONG_S)
        rates = (reports.per_s(seconds, now_s, _arrivals) or 0.0 for seconds in (window_s, LONG_S))
        return mix, max(rates) + reports.waiting(now_s) / _CATCH_UP_S, window_s

    def _feed(self, event: PlanEvent) -> None:
        for effect in self._machine.handle(event, self._clock()):
            match effect:
                case SearchPlan(question):
                    self._scope.spawn(self._search(question), name="search for a plan")
                case SwitchTo(instance_id, role, reason):
                    self._switch(instance_id, role, reason)
                case HoldSizes():
                    self._held = effect
                case PlanDecided(decision):
                    self.gain = decision.gain if decision.outcome in _BETTER else 0.0
                    self.outcomes[decision.outcome] += 1
                    _log(self.plan.model, decision)

    async def _search(self, question: PlanQuestion) -> None:
        limit_s = self._limits.replan_search_s
        logger.info(
            "plan of %s: a search begins: %s at %.3g requests/s",
            self.plan.model,
            in_letters(question.present),
            question.rate,
        )
        try:
            async with asyncio.timeout(limit_s):
                found: PlanEvent = PlanFound(await self._replanner.search(question))
        except TimeoutError:
            found = SearchFailed(f"the search has not ended within {limit_s:g} s")
        except TriptychError as error:
            found = SearchFailed(error.message)
        except Exception:
            logger.exception("plan of %s: the search has a defect", self.plan.model)
            found = SearchFailed("the search has a defect")
        self._feed(found)

    # --- readers -----------------------------------------------------------------------------------------------------

    @property
    def drifts(self) -> tuple[Drift, ...]:
        return self._machine.drifts

    @property
    def is_moving(self) -> bool:
        """Whether instances are switched by the plan now."""
        return self._machine.is_moving

    def status(self) -> PlanStatus:
        return self._machine.status(self._clock())

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        self._machine.validate()


def _arrivals(classes: Mapping[str, ClassWindow]) -> float:
    return sum(window.arrivals for window in classes.values())


def _log(model: str, decision: PlanDecision) -> None:
    better = f" ({decision.gain:.0%} better)" if decision.gain else ""
    level = logging.WARNING if decision.outcome is PlanOutcome.FAILED else logging.INFO
    logger.log(
        level,
        "plan of %s: decision %d, %s: %s, wanted %s%s: %s",
        model,
        decision.number,
        decision.outcome,
        in_letters(decision.present),
        in_letters(decision.wanted),
        better,
        decision.reason,
    )
