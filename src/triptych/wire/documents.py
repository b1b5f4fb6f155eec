"""Documents that admin ports and commands show as JSON: the pool manager's status, and the chats that have ended at a router."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from triptych.domain.decision import DecisionSummary, ScalingStatus
from triptych.domain.media import Modality
from triptych.domain.pool import ManagerStatus, MemberStatus, PoolStatus, Registration
from triptych.domain.recent import EndedChat, RecentChats
from triptych.domain.replanning import PlanStatus, in_letters
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
        "plan": None if status.plan is None else _plan(status.plan),
        "pools": [pool_document(pool) for pool in status.pools],
    }


def discovery_document(members: Iterable[Registration], gateways: Iterable[str], manager: str) -> list[dict[str, Any]]:
    """Targets of Prometheus' ``http_sd_configs``: members, gateways and the manager itself, by the addresses of their metrics.

    The label ``job`` is the service. Instances have ``role`` (at their start), ``pool`` and ``model``, routers ``model``. What has no
    address is left out.
    """
    found: list[tuple[str, dict[str, str]]] = []
    for member in members:
        labels = {"job": member.service, "model": member.model}
        if member.role is not None:
            labels |= {"role": member.role.value, "pool": str(member.pool)}
        found.append((member.metrics, labels))
    found += [(address, {"job": "gateway"}) for address in gateways]
    found.append((manager, {"job": "pool-manager"}))
    return [{"targets": [address], "labels": labels} for address, labels in found if address]


def _plan(plan: PlanStatus) -> dict[str, Any]:
    return {
        "model": plan.model,
        "replans": plan.replans,
        "present": in_letters(plan.present),
        "state": plan.state,
        "drifts": [{**asdict(drift), "is_one": drift.is_one} for drift in plan.drifts],
        "decisions": [
            {
                **asdict(decision),
                "age_s": round(decision.age_s, 1),
                "present": in_letters(decision.present),
                "wanted": in_letters(decision.wanted),
            }
            for decision in plan.decisions
        ],
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


def recent_document(recent: RecentChats) -> dict[str, Any]:
    """Times are in seconds before now. Nothing of what a chat said is in it, nor a request id or a digest."""
    return {
        "position": recent.position,
        "left": recent.left,
        "missed": recent.missed,
        "refused": recent.refused,
        "unprepared": recent.unprepared,
        "running_for_s": [round(recent.now_s - since_s, 6) for since_s in recent.running_since_s],
        "requests": [_chat(chat, recent.now_s) for chat in recent.chats],
    }


def _chat(chat: EndedChat, now_s: float) -> dict[str, Any]:
    media = chat.shape.media
    return {
        "came_s": round(now_s - chat.started_s, 6),
        "outcome": chat.timeline.outcome.value,
        "tenant": chat.tenant,
        "prompt_tokens": chat.shape.prompt_tokens,
        "item_tokens": chat.shape.item_tokens,
        "output_tokens": chat.timeline.completion_tokens,
        "choices": chat.shape.choices,
        "images": [[info.width, info.height] for info in media if info.modality is Modality.IMAGE],
        "videos": [
            {"size": [info.width, info.height], "seconds": info.duration_s, "frames": info.frames}
            for info in media
            if info.modality is Modality.VIDEO
        ],
        "sounds_s": [info.samples / info.sample_rate_hz for info in media if info.modality is Modality.AUDIO],
    }
