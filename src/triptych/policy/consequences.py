"""What no longer works without the last process of a kind."""

from collections.abc import Collection, Sequence

from triptych.domain.pool import MemberCondition, MemberStatus, PoolStatus
from triptych.domain.stage import Stage

_ALL = "all requests{} wait or fail"
_WITHOUT = (
    ({Stage.PREFILL, Stage.DECODE}, "text instance", _ALL),
    ({Stage.PREFILL}, "prefill instance", _ALL),
    ({Stage.DECODE}, "decode instance", _ALL),
    ({Stage.ENCODE}, "encoder", "requests{} with images, video or audio wait or fail"),
)
"""The first row whose stages are all lost counts."""


def without(stages: Collection[Stage], of_model: str = "") -> tuple[str, str] | None:
    """The kind of instance that is not there when nothing serves these stages, and what happens to requests.

    ``of_model`` follows the word requests. None if it does not matter.
    """
    return next(((kind, what.format(of_model)) for lost, kind, what in _WITHOUT if lost <= set(stages)), None)


def loss(instance_id: str, pools: Sequence[PoolStatus]) -> str:
    """What no longer works when this member drains; empty if others of its model do the same, or it is no active member."""
    found = next(
        (pool for pool in pools for one in pool.members if one.registration.instance_id == instance_id and _works(one)),
        None,
    )
    if found is None:
        return ""
    others = [
        one.role
        for one in pools
        if one.model == found.model
        for member in one.members
        if member.registration.instance_id != instance_id and _works(member) and not member.suspected
    ]
    if found.role is None:
        if None in others:
            return ""
        return f"{instance_id} is the last router of {found.model}: requests for it fail until there is another"
    served = {stage for role in others if role is not None for stage in role.stages}
    lost = without(found.role.stages - served, f" for {found.model}")
    if lost is None:
        return ""
    return f"{instance_id} is the last {lost[0]} of {found.model}: {lost[1]} until there is another"


def _works(member: MemberStatus) -> bool:
    return member.condition is MemberCondition.ACTIVE
