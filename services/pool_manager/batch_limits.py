"""Sets the limits of batches on running instances as profiles say, or only says it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from triptych.domain.instance import InstanceLimits
from triptych.domain.pool import MemberCondition, MemberStatus
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role
from triptych.domain.windows import ClassWindow
from triptych.policy.sizing import BatchChange
from triptych.ports import Clock

BatchLimitsMode = Literal["set", "advise"]

_EVERY_S = 30.0
"""Between two decisions on a pool: the mix is that of the last 30 s."""


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """A decision on the limits of a pool's batches, and why."""

    reason: str
    advised: bool


class BatchDecisions:
    """Owner of when the limits of each pool's batches were decided upon."""

    def __init__(
        self,
        better: Callable[[PoolName, Mapping[str, ClassWindow]], BatchChange | None],
        order: Callable[[str, InstanceLimits, str], None],
        *,
        advises: bool,
        clock: Clock,
    ) -> None:
        """``better`` is what profiles say of a pool under a mix. ``order`` orders limits of an instance, for a reason."""
        self._better = better
        self._order = order
        self._advises = advises
        self._clock = clock
        self._decided_s: dict[PoolName, float] = {}
        self._advised: dict[PoolName, int] = {}
        """The batch that was advised last for a pool."""

    def decide(
        self,
        name: PoolName,
        members: Sequence[MemberStatus],
        classes: Callable[[], Mapping[str, ClassWindow]],
        *,
        may_order: bool,
    ) -> BatchDecision | None:
        """Decide on a pool now, if it is time to. Limits that a person has set stay. ``classes``: the mix. ``may_order``: this manager
        leads.
        """
        now_s = self._clock()
        free = [member for member in members if _is_free(member)]
        if not free or now_s - self._decided_s.get(name, -_EVERY_S) < _EVERY_S or not (may_order or self._advises):
            return None
        self._decided_s[name] = now_s
        change = self._better(name, classes())
        if change is None or (self._advises and self._advised.get(name) == change.best):
            return None
        if self._advises:
            self._advised[name] = change.best
            return BatchDecision(str(change), advised=True)
        wanted = InstanceLimits(change.best) if name.role is Role.E else InstanceLimits(max_sequences=change.best)
        for member in free:
            self._order(member.registration.instance_id, wanted, str(change))
        return BatchDecision(f"{wanted} on {len(free)} of {len(members)} instances: {change}", advised=False)

    def forget(self, name: PoolName) -> None:
        """The pool is gone."""
        self._decided_s.pop(name, None)
        self._advised.pop(name, None)


def _is_free(member: MemberStatus) -> bool:
    """Whether the manager may set its limits. One that has refused the last ones is left alone."""
    limits = member.load.limits
    active = member.condition is MemberCondition.ACTIVE
    return active and limits is not None and not limits.by_hand and not limits.fault
