"""Views that decisions on switches are made from: members of one model by stage, and what is known of its pools."""

from collections.abc import Iterable, Mapping, Sequence

from triptych.domain.decision import PoolView
from triptych.domain.pool import MemberCondition, MemberStatus
from triptych.domain.stage import Role, Stage
from triptych.policy.switching import Movable, StageView

_ALONE = {Stage.ENCODE: Role.E, Stage.PREFILL: Role.P, Stage.DECODE: Role.D}
"""The pool whose facts are those of a stage by itself."""
_STALE_S = 5.0
"""Loads that are older decide nothing here."""
_LEAST_BUSY = 0.5
"""Share of what an instance works off that it is taken to bear in any case. Where its objectives permit less, waits come from requests
that differ much in length. In seconds under such a load, the little that is there would look like a long queue.
"""
_BURST = 1.5
"""A load of 5 s counts if it is this multiple of that of 30 s: less may be chance."""


def switched(role: Role, members: Iterable[MemberStatus]) -> int:
    """Number of instances that serve all stages of a role, and no others, beyond those that have registered with it."""
    return sum((member.open == role.stages) - (member.registration.role is role) for member in members)


def stage_views(members: Sequence[MemberStatus], pools: Mapping[Role, PoolView]) -> list[StageView]:
    """Views of the stages of one model, by its usable members.

    Facts of a stage come from the pool with the role of that stage alone. A stage without such a pool is left out: it
    neither gives instances nor gets any.
    """
    usable = [member for member in members if member.condition is MemberCondition.ACTIVE and not member.suspected]
    views = (_view(stage, usable, pools[role]) for stage, role in _ALONE.items() if role in pools)
    return [view for view in views if view is not None]


def _view(stage: Stage, usable: Sequence[MemberStatus], known: PoolView) -> StageView | None:
    serving = [member for member in usable if stage in member.open]
    staying = sum(stage in member.stays_open for member in serving)
    if stage is Stage.DECODE:
        if not known.facts.batch:
            return None
        held = [float(member.load.at(stage).pending) for member in serving]
        return StageView(stage, staying, sum(held), float(known.facts.batch), 0.0, 0.0, _movable(stage, serving, held))
    facts, load, age_s = known.facts, known.load, known.report_age_s
    if load is None or age_s is None or age_s > _STALE_S or not facts.wait_objective_s:
        return None
    if not facts.capacity_per_s or not facts.busy_per_s:
        return None
    per_s = max(facts.capacity_per_s, _LEAST_BUSY * facts.busy_per_s)
    held = [member.load.at(stage).pending_tokens / per_s for member in serving]
    return StageView(
        stage,
        staying,
        max(sum(held), load.waiting / per_s),
        facts.wait_objective_s,
        (load.burst_per_s if load.burst_per_s >= _BURST * load.short_per_s else load.short_per_s) / per_s,
        1.0,
        _movable(stage, serving, held),
    )


def _movable(stage: Stage, serving: Sequence[MemberStatus], held: Sequence[float]) -> tuple[Movable, ...]:
    """Instances that may switch to another stage: they serve this stage alone, as others would lose two, and are not
    switching already.

    A stage that an instance could not open on its last order counts as one that it cannot serve, until a person has it
    open that.
    """
    return tuple(
        Movable(
            member.registration.instance_id,
            member.registration.switchable.stages.difference(
                closed.stage for closed in member.load.closed if closed.fault
            ),
            part,
            {closed.stage: closed.opens_s for closed in member.load.closed},
        )
        for member, part in zip(serving, held, strict=True)
        if member.registration.switchable is not None and member.open == {stage} and member.is_as_wanted
    )
