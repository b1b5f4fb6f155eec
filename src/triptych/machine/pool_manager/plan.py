"""A plan that is followed: how far the mix of requests has drifted from the one that the placement is for, and the way to a better one.


    steady -- drift --> drifting -- it persists --> searching -- better --> moving -- all is there --> steady
       ^                   |                            |                                               (at rest)
       +--- drift is over -+------- nothing better -----+   (the mix that was seen is then the one that the placement is for)

A placement is looked for only when the drift persists. After a search, and after a move, the machine rests, so that it does not go to and
fro. A search or move that fails is tried again after that rest, if the drift is still there.
"""

from collections import Counter, deque
from dataclasses import dataclass, replace
from enum import StrEnum
from math import sqrt

from triptych.domain.durations import in_words
from triptych.domain.limits import Positive, PositiveSeconds, Ratio, Seconds, check_limits
from triptych.domain.mix import Mix
from triptych.domain.replanning import (
    Drift,
    PlanDecision,
    PlanOutcome,
    PlanQuestion,
    PlanStatus,
    RoleCount,
    by_kind,
    in_letters,
    role_counts,
)
from triptych.domain.scaling import Kind
from triptych.domain.stage import INSTANCE_NAMES, Stage
from triptych.machine.pool_manager.plan_events import (
    HoldSizes,
    PlanDecided,
    PlanEffect,
    PlanEvent,
    PlanFound,
    PlanPaused,
    PlanTick,
    SearchFailed,
    SearchPlan,
    SwitchTo,
)
from triptych.policy.drift import USUAL_INDEX, drifts
from triptych.policy.moving import next_steps

_SHOWN_DECISIONS = 10
_SURE = 3.0
"""Standard deviations of a number of requests that come at random: a smaller change of the rate is none."""
RATE, INSTANCES = "requests per second", "instances"
"""Beside the figures of the mix."""


@dataclass(frozen=True, slots=True)
class ReplanLimits:
    """When another placement is looked for, and how much better it must be."""

    drift_index: Ratio = USUAL_INDEX
    """Population stability index from which a figure of the mix has drifted."""
    drift_rate: Ratio = 0.25
    """Change of the rate, as a share, from which it has drifted. It counts with ``replan``, as do instances that came or went."""
    drift_requests: Positive = 50
    """Least requests that the mix is taken from: the last ones, of at most 300 s."""
    drift_persists_s: PositiveSeconds = 30.0
    """Time for which it must have drifted before a search; more where fewer requests come in it."""
    replan_gain: Ratio = 0.1
    """Share by which another placement must be better."""
    replan_rest_s: Seconds = 120.0
    """Shortest time after a search, and after a move, until the next search."""
    replan_move_s: PositiveSeconds = 600.0
    """Longest time of a move."""
    replan_search_s: PositiveSeconds = 120.0
    """Longest time of a search."""

    def __post_init__(self) -> None:
        check_limits(self)


class _Phase(StrEnum):
    STEADY = "steady"
    DRIFTING = "drifting"
    SEARCHING = "searching"
    MOVING = "moving"


@dataclass(slots=True)
class _Decided:
    at_s: float
    decision: PlanDecision


class PlanMachine:
    """Owner of the mix that the placement is for, of drifts from it, and of the move to another placement. ``handle`` is the only mutator."""

    def __init__(self, model: str, mix: Mix, rate: float, limits: ReplanLimits, *, replans: bool) -> None:
        """``mix`` and ``rate``: what the plan was made for. ``replans``: whether it moves, or only says so."""
        self._model = model
        self._mix = mix
        self._rate = rate
        self._limits = limits
        self._replans = replans
        self._phase = _Phase.STEADY
        self._paused = ""
        self._drifts: tuple[Drift, ...] = ()
        self._drifting: set[str] = set()
        """Figures that have drifted since the placement was for the mix."""
        self._since_s = 0.0
        """When the present phase began, or the last of these figures drifted."""
        self._rests_until_s = 0.0
        self._present: tuple[RoleCount, ...] = ()
        self._settled: tuple[RoleCount, ...] = ()
        """What there was when it was decided last."""
        self._asked: PlanQuestion | None = None
        """Of the search that runs, or of the move that it led to."""
        self._decisions: deque[_Decided] = deque(maxlen=_SHOWN_DECISIONS)
        self._number = 0

    # --- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: PlanEvent, now_s: float) -> list[PlanEffect]:
        match event:
            case PlanTick():
                return self._tick(event, now_s)
            case PlanPaused(reason):
                return self._pause(reason, now_s)
            case PlanFound(proposal) if self._asked is not None and self._phase is _Phase.SEARCHING:
                if proposal.wanted == self._asked.present:
                    effects = self._decided(proposal.wanted, 0.0, proposal.reason, PlanOutcome.KEPT, now_s)
                elif self._replans and not self._paused:
                    effects = self._decided(proposal.wanted, proposal.gain, proposal.reason, PlanOutcome.MOVING, now_s)
                    self._enter(_Phase.MOVING, now_s)
                    return effects
                else:
                    effects = self._decided(proposal.wanted, proposal.gain, proposal.reason, PlanOutcome.ADVISED, now_s)
                self._settle(now_s)
                return effects
            case SearchFailed(reason) if self._asked is not None and self._phase is _Phase.SEARCHING:
                effects = self._decided(self._asked.present, 0.0, reason, PlanOutcome.FAILED, now_s)
                self._rest(now_s)
                return effects
            case _:
                """Of a search that is over."""
        return []

    def _pause(self, reason: str, now_s: float) -> list[PlanEffect]:
        self._paused = reason
        if self._phase is _Phase.MOVING:
            effects = self._moved(PlanOutcome.FAILED, f"; {reason}")
            self._rest(now_s)
            return effects
        if self._phase is _Phase.DRIFTING:
            self._enter(_Phase.STEADY, now_s)
        return []

    def _tick(self, tick: PlanTick, now_s: float) -> list[PlanEffect]:
        self._paused = ""
        self._present = role_counts(Counter(instance.kind for instance in tick.instances))
        self._settled = self._settled or self._present
        if self._phase is _Phase.MOVING:
            return self._move(tick, now_s)
        hold = self._hold(tick, "the plan decides on sizes")
        if self._phase is _Phase.SEARCHING:
            return hold
        self._drifts = self._drifted(tick)
        drifted = {drift.figure for drift in self._drifts if drift.is_one}
        if not drifted or now_s < self._rests_until_s:
            self._enter(_Phase.STEADY, now_s)
            self._drifting.clear()
            return hold
        self._enter(_Phase.DRIFTING, now_s)
        if not drifted <= self._drifting:
            self._drifting |= drifted
            self._since_s = now_s
        # The mix that is searched for must not have requests from before the drift of any figure.
        if now_s - self._since_s < max(self._limits.drift_persists_s, tick.window_s) or not self._present:
            return hold
        self._enter(_Phase.SEARCHING, now_s)
        self._asked = self._question(tick)
        return [*hold, SearchPlan(self._asked)]

    def _enter(self, phase: _Phase, now_s: float) -> None:
        if phase is not self._phase:
            self._phase, self._since_s = phase, now_s

    def _drifted(self, tick: PlanTick) -> tuple[Drift, ...]:
        """None while there are too few requests."""
        if tick.mix.requests < self._limits.drift_requests:
            return ()
        found = drifts(self._mix, tick.mix, self._limits.drift_index)
        if not self._replans:
            return found
        change = max(tick.rate, 1e-9) / self._rate
        chance = _SURE * sqrt(1 / tick.mix.requests + 1 / self._mix.requests)
        before, now = by_kind(self._settled), by_kind(self._present)
        others = (before - now).total() + (now - before).total()
        return (
            *found,
            Drift(RATE, max(change, 1 / change) - 1, max(self._limits.drift_rate, chance)),
            Drift(INSTANCES, others / max(1, before.total()), self._limits.replan_gain),
        )

    def _question(self, tick: PlanTick) -> PlanQuestion:
        widest: dict[str, frozenset[Stage]] = {}
        most = Counter(instance.pool.tier for instance in tick.instances)
        for instance in tick.instances:
            tier = instance.pool.tier
            widest[tier] = widest.get(tier, frozenset()) | instance.switchable
        for (_, tier), size in tick.pools.items():
            most[tier] = max(most[tier], size.most)
        kinds = {
            Kind(role, tier) for tier, stages in widest.items() for role in INSTANCE_NAMES if role.stages <= stages
        }
        kinds |= {instance.pool for instance in tick.instances} | tick.pools.keys()
        return PlanQuestion(
            self._present, tick.mix, tick.rate, frozenset(kinds), most, bool(tick.pools), self._limits.replan_gain
        )

    def _hold(self, tick: PlanTick, reason: str) -> list[PlanEffect]:
        if not self._replans or not tick.pools:
            return []
        return [HoldSizes({kind: size.wanted for kind, size in tick.pools.items()}, "", reason)]

    # --- what is decided ---------------------------------------------------------------------------------------------

    def _decided(
        self, wanted: tuple[RoleCount, ...], gain: float, reason: str, outcome: PlanOutcome, now_s: float
    ) -> list[PlanEffect]:
        assert self._asked is not None
        self._number += 1
        because = ", ".join(str(drift) for drift in self._drifts if drift.is_one)
        text = f"{reason}; the mix has drifted: {because}" if because else reason
        decision = PlanDecision(self._number, 0.0, self._asked.present, wanted, gain, text, outcome)
        self._decisions.append(_Decided(now_s, decision))
        return [PlanDecided(decision)]

    def _settle(self, now_s: float) -> None:
        """From now on the placement is for the mix that was asked about."""
        if self._asked is not None:
            self._mix, self._rate, self._settled = self._asked.mix, self._asked.rate, self._present
        self._rest(now_s)

    def _rest(self, now_s: float) -> None:
        self._asked = None
        self._rests_until_s = now_s + self._limits.replan_rest_s
        self._enter(_Phase.STEADY, now_s)

    # --- the move ----------------------------------------------------------------------------------------------------

    def _move(self, tick: PlanTick, now_s: float) -> list[PlanEffect]:
        latest = self._decisions[-1].decision
        steps = next_steps(by_kind(latest.wanted), tick.instances, tick.pools)
        text = f"plan {latest.number}: {in_letters(latest.present)} becomes {in_letters(latest.wanted)}"
        effects: list[PlanEffect] = [SwitchTo(instance_id, role, text) for instance_id, role in steps.switches]
        if steps.sizes is not None:
            effects.append(HoldSizes(steps.sizes, steps.drain, text))
        late = now_s - self._since_s >= self._limits.replan_move_s
        if not steps.is_done and not late:
            return effects
        present = by_kind(self._present)
        reached = all(present[entry.kind] >= entry.count for entry in latest.wanted)
        detail = "" if self._present == latest.wanted else f"; there is {in_letters(self._present)}"
        if not steps.is_done:
            detail += f" after {in_words(self._limits.replan_move_s)}"
        effects += self._moved(PlanOutcome.MOVED if reached else PlanOutcome.FAILED, detail)
        if reached:
            self._settle(now_s)
        else:
            self._rest(now_s)
        return effects

    def _moved(self, outcome: PlanOutcome, detail: str) -> list[PlanEffect]:
        latest = self._decisions[-1]
        latest.decision = replace(latest.decision, reason=latest.decision.reason + detail, outcome=outcome)
        return [PlanDecided(latest.decision)]

    # --- readers -----------------------------------------------------------------------------------------------------

    @property
    def drifts(self) -> tuple[Drift, ...]:
        return self._drifts

    @property
    def is_moving(self) -> bool:
        return self._phase is _Phase.MOVING and not self._paused

    def status(self, now_s: float) -> PlanStatus:
        decisions = tuple(replace(entry.decision, age_s=now_s - entry.at_s) for entry in self._decisions)
        return PlanStatus(self._model, self._replans, self._present, self._drifts, self._state(now_s), decisions)

    def _state(self, now_s: float) -> str:
        if self._paused:
            return f"paused: {self._paused}"
        if self._phase is _Phase.STEADY and any(drift.is_one for drift in self._drifts):
            left_s = self._rests_until_s - now_s
            return f"rests for {in_words(left_s)}" if left_s > 0 else self._phase.value
        since = "" if self._phase is _Phase.STEADY else f" for {in_words(now_s - self._since_s)}"
        return f"{self._phase.value}{since}"

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        if (self._asked is None) != (self._phase in (_Phase.STEADY, _Phase.DRIFTING)):
            raise AssertionError(
                f"the plan is {self._phase.value} and {'has no' if self._asked is None else 'has a'} question"
            )
        if self._phase is _Phase.MOVING and (not self._replans or not self._decisions):
            raise AssertionError("a move has begun that nobody decided on")
