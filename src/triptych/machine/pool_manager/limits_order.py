"""An order of limits: whether a member has got it, and what it answered."""

from dataclasses import dataclass

from triptych.domain.instance import InstanceLimits, LimitsReport


@dataclass(slots=True)
class LimitsOrder:
    """The last order of limits for a member. Part of ``MembersMachine``."""

    limits: InstanceLimits
    by_hand: bool
    reason: str
    version: int = 0
    """0 until it is sent: the member's last version must be known."""
    answered: bool = False

    def is_overtaken(self, report: LimitsReport) -> bool:
        """Whether another manager has ordered something else since."""
        return bool(self.version) and report.version > self.version

    def is_unknown(self, report: LimitsReport) -> bool:
        """Whether the member has not got it."""
        return not self.version or self.version > report.version

    def again(self) -> "LimitsOrder":
        """The order for another process with the member's id."""
        return LimitsOrder(self.limits, self.by_hand, self.reason)
