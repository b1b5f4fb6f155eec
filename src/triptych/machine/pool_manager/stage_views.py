"""What decisions on switches are made from: the members of one model by the stages that they serve, and what is known of its pools."""

from collections.abc import Iterable, Mapping, Sequence

from triptych.domain.decision import PoolView
from triptych.domain.pool import MemberCondition, MemberStatus
from triptych.domain.stage import Role, Stage
from triptych.policy.switching import Movable, StageView

_ALONE = {Stage.ENCODE: Role.E, Stage.PREFILL: Role.P, Stage.DECODE: Role.D}
"""The pool whose facts are those of a stage by itself."""
_STALE_S = 5.0
"""Loads that are older decide nothing here."""
_BURST = 1.5
"""A load of 5 s counts if it is this multiple of that of 30 s: less may be chance."""


def switched(role: Role, members: Iterable[MemberStatus]) -> int:
    """How many more instances serve all stages of a role, and no others, than have registered with it."""
    return sum((one.open == role.stages) - (one.registration.role is role) for one in members)


def stage_views(members: Sequence[MemberStatus], pools: Mapping[Role, PoolView]) -> list[StageView]:
    """Of the members of one model that are there. What is known of a stage comes from the pool with the role of that stage alone;
    a stage without is left out: it neither gives instances nor gets any.
    """
    there = [one for one in members if one.condition is MemberCondition.ACTIVE and not one.suspected]
    found = (_view(stage, there, pools[role]) for stage, role in _ALONE.items() if role in pools)
    return [one for one in found if one is not None]


def _view(stage: Stage, there: Sequence[MemberStatus], known: PoolView) -> StageView | None:
    serving = [one for one in there if stage in one.open]
    staying = sum(stage in one.stays_open for one in serving)
    if stage is Stage.DECODE:
        if not known.facts.batch:
            return None
        held = [float(one.load.at(stage).pending) for one in serving]
        return StageView(stage, staying, sum(held), float(known.facts.batch), 0.0, 0.0, _movable(stage, serving, held))
    per_s, load, age_s = known.facts.capacity_per_s, known.load, known.report_age_s
    if not per_s or load is None or age_s is None or age_s > _STALE_S or not known.facts.wait_objective_s:
        return None
    held = [one.load.at(stage).pending_tokens / per_s for one in serving]
    return StageView(
        stage,
        staying,
        max(sum(held), load.waiting / per_s),
        known.facts.wait_objective_s,
        (load.burst_per_s if load.burst_per_s >= _BURST * load.short_per_s else load.short_per_s) / per_s,
        1.0,
        _movable(stage, serving, held),
    )


def _movable(stage: Stage, serving: Sequence[MemberStatus], held: Sequence[float]) -> tuple[Movable, ...]:
    """Those that serve this stage alone, as another would lose two, and that are not switching already. What one could not open when
    that was ordered last counts as what it cannot serve, until a person has it open that.
    """
    return tuple(
        Movable(
            one.registration.instance_id,
            one.registration.switchable.stages.difference(closed.stage for closed in one.load.closed if closed.fault),
            part,
            {closed.stage: closed.opens_s for closed in one.load.closed},
        )
        for one, part in zip(serving, held, strict=True)
        if one.registration.switchable is not None and one.open == {stage} and one.is_as_wanted
    )
