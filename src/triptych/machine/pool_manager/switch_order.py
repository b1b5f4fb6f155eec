"""An order to switch: whether a member obeys it, has given it up, and serves with what it opened."""

from dataclasses import dataclass

from triptych.domain.instance import InstanceLoad
from triptych.domain.stage import Role, Stage
from triptych.machine.pool_manager.member_events import SwitchServed


@dataclass(slots=True)
class SwitchOrder:
    """The last order to switch that a member got. Part of ``MembersMachine``."""

    source: Role
    """Role that the member served then."""
    role: Role
    reason: str
    since_s: float
    version: int = 0
    """0 until it is sent: the member's last version must be known."""
    obeyed: bool = False
    served_s: float | None = None
    """Time from the order until each stage that it opened had served something, seconds; None before."""
    waits_since_s: float | None = None
    """Time since which a stage that it opened has had work, and has served nothing."""

    @property
    def opened(self) -> frozenset[Stage]:
        return self.role.stages - self.source.stages

    def is_overtaken(self, load: InstanceLoad) -> bool:
        """Whether another manager has ordered something else since."""
        return bool(self.version) and load.stages_version > self.version

    def is_obeyed(self, load: InstanceLoad) -> bool:
        return bool(self.version) and load.stages_version == self.version and load.stages.keys() == self.role.stages

    def is_unknown(self, load: InstanceLoad) -> bool:
        """Whether the member has not got it."""
        return not self.version or self.version > load.stages_version

    def fault(self, load: InstanceLoad) -> str:
        """Why the member has given it up; empty if it has not."""
        if not self.version or load.stages_version != self.version:
            return ""
        return next((closed.fault for closed in load.closed if closed.fault and closed.stage in self.role.stages), "")

    def check_served(self, load: InstanceLoad, now_s: float) -> list[SwitchServed]:
        """See whether, once it is obeyed, the stages that it opened serve what comes."""
        if self.served_s is not None or not self.opened:
            return []
        loads = [load.at(stage) for stage in self.opened]
        if all(stage_load.served for stage_load in loads):
            self.served_s, self.waits_since_s = max(0.0, now_s - self.since_s), None
            return [SwitchServed(self.served_s)]
        if not any(stage_load.pending and stage_load.served == 0 for stage_load in loads):
            self.waits_since_s = None
        elif self.waits_since_s is None:
            self.waits_since_s = now_s
        return []
