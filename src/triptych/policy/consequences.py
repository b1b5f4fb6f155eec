"""Consequences of the loss of the last process of a kind: what no longer works."""

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


def loss(instance_id: str, pools: Sequence[PoolStatus], *, keeps: frozenset[Stage] = frozenset()) -> str:
    """Words for what no longer works when this member drains, or switches to the stages that it ``keeps``; empty if others of its model do the
    same, or it is no active member.
    """
    working = [(pool, member) for pool in pools for member in pool.members if _works(member)]
    found = next((entry for entry in working if entry[1].registration.instance_id == instance_id), None)
    if found is None:
        return ""
    (pool, leaving), model = found, found[0].model
    others = [
        (other, member)
        for other, member in working
        if other.model == model and member is not leaving and not member.suspected
    ]
    if pool.role is None:
        if any(other.role is None for other, _ in others):
            return ""
        return f"{instance_id} is the last router of {model}: requests for it fail until there is another"
    served = frozenset(keeps).union(*[member.stays_open for _, member in others])
    lost = without(leaving.open - served, f" for {model}")
    if lost is None:
        return ""
    return f"{instance_id} is the last {lost[0]} of {model}: {lost[1]} until there is another"


def _works(member: MemberStatus) -> bool:
    return member.condition is MemberCondition.ACTIVE
