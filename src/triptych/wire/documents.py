"""The pool manager's status as a JSON document, for people and scripts."""

from dataclasses import asdict
from typing import Any

from triptych.domain.decision import DecisionSummary, ScalingStatus
from triptych.domain.pool import ManagerStatus, MemberStatus, PoolStatus
from triptych.domain.stage import Role
from triptych.domain.windows import Judged


def manager_document(status: ManagerStatus) -> dict[str, Any]:
    """Times are in seconds before now, loads in tokens per second, shares from 0 to 1. None where something is unknown."""
    return {
        "up_s": round(status.up_s, 1),
        "watchers": status.watchers,
        "leads": status.leads,
        "leader": status.leader,
        "store_fault": status.store_fault,
        "pools": [pool_document(pool) for pool in status.pools],
    }


def pool_document(pool: PoolStatus) -> dict[str, Any]:
    """``role`` is None for routers."""
    return {
        "model": pool.model,
        "role": None if pool.role is None else pool.role.value,
        "members": [_member(member) for member in pool.members],
        "scaling": None if pool.scaling is None else _scaling(pool.scaling),
    }


def _member(member: MemberStatus) -> dict[str, Any]:
    loads = member.load.stages.items()
    return {
        "instance_id": member.registration.instance_id,
        "address": member.registration.address,
        "state": member.condition.value,
        "suspected": member.suspected,
        "since_s": round(member.since_s, 1),
        "heard_s": round(member.heard_s, 1),
        "pending": {stage.value: load.pending for stage, load in loads},
        "pending_tokens": {stage.value: load.pending_tokens for stage, load in loads},
        "leased_bytes": sum(load.leased_bytes for _, load in loads),
        "serves": Role.of(member.open).value if member.open else None,
        "serves_s": round(member.open_s, 1),
        "wanted": None if member.wanted is None else member.wanted.value,
        "first_served_s": None if member.served_s is None else round(member.served_s, 2),
        "closed": {
            closed.stage.value: {"opens_s": closed.opens_s, "fault": closed.fault} for closed in member.load.closed
        },
    }


def _scaling(scaling: ScalingStatus) -> dict[str, Any]:
    return {
        **asdict(scaling),
        "attainment": _judged(scaling.attainment),
        "decisions": [_decision(decision) for decision in scaling.decisions],
    }


def _decision(decision: DecisionSummary) -> dict[str, Any]:
    return {**asdict(decision), "age_s": round(decision.age_s, 1), "attainment": _judged(decision.attainment)}


def _judged(judged: Judged) -> dict[str, Any]:
    return {"met": judged.met, "missed": judged.missed, "share": judged.attainment}
