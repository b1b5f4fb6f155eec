"""What a registrar is given of the process that it registers, in tests of pool managers."""

from collections.abc import Callable, Mapping

from triptych.domain.instance import InstanceLimits, InstanceLoad, LimitsReport, StageLoad
from triptych.domain.stage import Stage


class LoadedProcess:
    """A process's load (``runtime.registrar.Loaded``), whether it was told to drain, and what to switch to."""

    def __init__(self, stages: Mapping[Stage, StageLoad] | None = None) -> None:
        self.draining = False
        self._stages = {} if stages is None else stages
        self._listeners: list[Callable[[], None]] = []
        self.stages_version = 0
        self.switched_for = ""
        """The reason of the last switch."""
        self.limits: LimitsReport | None = None

    def load(self) -> InstanceLoad:
        return InstanceLoad(self._stages, self.draining, stages_version=self.stages_version, limits=self.limits)

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def drain(self) -> None:
        self.draining = True
        for listener in self._listeners:
            listener()

    def set_stages(self, stages: frozenset[Stage], version: int, reason: str) -> None:
        """Serve these stages at once."""
        self.stages_version, self.switched_for = version, reason
        self.reports(dict.fromkeys(stages, StageLoad(0, 0)))

    def reports(self, stages: Mapping[Stage, StageLoad]) -> None:
        """Report this load from now on."""
        self._stages = stages
        for listener in self._listeners:
            listener()

    def set_limits(self, wanted: InstanceLimits, version: int, by_hand: bool, reason: str) -> None:
        """Have these limits at once."""
        del reason
        assert self.limits is not None
        self.limits = LimitsReport(wanted.over(self.limits.limits), version, by_hand)
        self.reports(self._stages)
