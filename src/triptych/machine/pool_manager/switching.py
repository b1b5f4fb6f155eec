"""Switches of one model's instances to another stage: how the load of each stage changes, and which switches were
ordered.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import copysign, sqrt

from triptych.domain.stage import Stage
from triptych.policy.switching import StageView, Switch, SwitchLimits, decide

_TREND_S = 3.0
"""Over so long, or a second more, a trend is taken: long enough that a few requests more or less are none."""
_SURE = 1.0
"""Standard deviations of a number of answers that come at random. A smaller change of it is no trend."""
_LATE_S = 0.1
"""Calls may be late by so much."""
_MAX_SEEN = 64


class SwitchMachine:
    """Owner of the trends of what stages hold, and of when roles were switched.

    ``handle`` is the only mutator. It is called about once per second, as long as this manager may order something.

    Nothing has to be remembered of a switch that was ordered but the time: stages are seen anew each time, so one that was not carried
    out is decided upon again after the rest.
    """

    def __init__(self, limits: SwitchLimits) -> None:
        self._limits = limits
        self._seen: deque[tuple[float, dict[Stage, float]]] = deque(maxlen=_MAX_SEEN)
        """Times, and the load that each stage held then."""
        self._agreed: tuple[Stage, Stage] | None = None
        self._windows = 0
        """Number of windows in a row with the same decision."""
        self._switched_s: dict[frozenset[Stage], float] = {}
        self.pressures: dict[Stage, float] = {}
        """Load that each stage is going to hold, over what its instances may hold. Read only."""

    def handle(self, stages: Sequence[StageView], now_s: float) -> list[Switch]:
        """Decide what to order now. A stage that does not say how much it serves gets the trend of its load as
        ``arriving``.
        """
        while len(self._seen) > 1 and self._seen[1][0] < now_s - _TREND_S + _LATE_S:
            self._seen.popleft()
        viewed = [stage if stage.served else replace(stage, arriving=self._trend(stage, now_s)) for stage in stages]
        self._seen.append((now_s, {stage.stage: stage.held for stage in stages}))
        self.pressures = {stage.stage: stage.pressure(self._limits.switch_ahead_s, stage.instances) for stage in viewed}
        switch = decide(viewed, self._limits)
        pair = None if switch is None else (switch.source, switch.target)
        self._windows = self._windows + 1 if pair == self._agreed else 1
        self._agreed = pair
        if switch is None or self._windows < self._limits.switch_windows or self._rests(switch, now_s):
            return []
        self._switched_s[switch.pair] = now_s
        return [switch]

    def forget(self) -> None:
        """Forget the trends: another manager decides, or nothing was seen for a while. Orders are remembered."""
        self._seen.clear()
        self._agreed, self._windows = None, 0
        self.pressures = {}

    def _trend(self, stage: StageView, now_s: float) -> float:
        """Growth of the load that the stage holds, per second, less what may be chance."""
        for at_s, held in self._seen:
            if (before := held.get(stage.stage)) is not None and now_s > at_s:
                change = stage.held - before
                sure = max(0.0, abs(change) - _SURE * sqrt(max(before, stage.held)))
                return copysign(sure, change) / (now_s - at_s)
        return 0.0

    def _rests(self, switch: Switch, now_s: float) -> bool:
        last_s = self._switched_s.get(switch.pair)
        return last_s is not None and now_s - last_s < self._limits.switch_rest_s - _LATE_S

    def since_s(self, now_s: float) -> float | None:
        """Time since the last switch between any stages, seconds; None before the first."""
        return None if not self._switched_s else now_s - max(self._switched_s.values())
