"""The stages of an instance: which are open, while it switches from one role to another.


    CLOSED -> OPENING -> OPEN -> CLOSING -> CLOSED
       ^-------+  ^------------------+

All wanted stages are open before another one closes, so that the instance always serves some. A closing stage takes nothing new; it is
closed when nothing of it runs any more. A newer order may come at any time. An opening stage may fail: then the order is given up, and what
was open stays so.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

from triptych.domain.instance import MAX_FAULT, ClosedStage
from triptych.domain.stage import Role, Stage
from triptych.errors import Conflict, InvalidRequest, TriptychError


class StageState(Enum):
    CLOSED = "closed"
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SwitchWanted:
    """Stages are to be open: these, and no others. ``version`` rises with each order of an epoch."""

    stages: frozenset[Stage]
    version: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The stage has what it needs."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class OpeningFailed:
    """The stage cannot have what it needs."""

    stage: Stage
    error: TriptychError


@dataclass(frozen=True, slots=True)
class OpensIn:
    """The stage gets what it needs after so long, whenever it is not there."""

    stage: Stage
    seconds: float


@dataclass(frozen=True, slots=True)
class Emptied:
    """Nothing of a closing stage runs any more."""

    stage: Stage


SwitchEvent = SwitchWanted | Opened | OpeningFailed | OpensIn | Emptied

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Get what the stage needs; then ``Opened``, or ``OpeningFailed``."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class Close:
    """Refuse what waits for the stage, and end or transfer what runs; then ``Emptied``."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class RefuseOrder:
    """The order is not obeyed."""

    error: TriptychError


@dataclass(frozen=True, slots=True)
class OrderOvertaken:
    """A newer order is obeyed before all was as the last one wanted it."""


@dataclass(frozen=True, slots=True)
class Switched:
    """All is as the last order wants it, so long after it."""

    took_s: float


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The last order cannot be obeyed: the stages that are open now stay so."""

    error: TriptychError


SwitchEffect = Open | Close | RefuseOrder | OrderOvertaken | Switched | GivenUp


class StageStates:
    """Owner of the stages' states. ``handle`` is the only mutator."""

    def __init__(self, role: Role, widest: Role) -> None:
        """``widest`` has all stages that can be open. Those of ``role`` are open first."""
        self._widest = widest
        self._wanted: AbstractSet[Stage] = role.stages
        self._states = {stage: StageState.OPEN if stage in role.stages else StageState.CLOSED for stage in Stage}
        self._since_s: float | None = None
        """When the last order came, until all is as it wants."""
        self._is_given_up = False
        """The last order could not be obeyed."""
        self._opens_s = dict.fromkeys(Stage, 0.0)
        self._faults: dict[Stage, str] = {}
        self.version = 0
        """Of the last order; for reading."""

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def open(self) -> frozenset[Stage]:
        """The stages that take work; at least one."""
        return self._in(StageState.OPEN)

    @property
    def opening(self) -> frozenset[Stage]:
        return self._in(StageState.OPENING)

    @property
    def closing(self) -> frozenset[Stage]:
        return self._in(StageState.CLOSING)

    @property
    def in_use(self) -> frozenset[Stage]:
        """The stages that need something, or will."""
        return frozenset(Stage) - self._in(StageState.CLOSED)

    @property
    def closed(self) -> tuple[ClosedStage, ...]:
        """Stages that could be opened and are not, where it is known what that takes."""
        closed = (stage for stage in Stage if stage in self._widest.stages - self.open)
        found = (ClosedStage(stage, self._opens_s[stage], self._faults.get(stage, "")) for stage in closed)
        return tuple(stage for stage in found if stage.opens_s or stage.fault)

    @property
    def widest(self) -> Role:
        return self._widest

    def pending_s(self, now_s: float) -> float:
        """Since the last order came; 0 once all is as it wants."""
        return 0.0 if self._since_s is None else now_s - self._since_s

    def _in(self, state: StageState) -> frozenset[Stage]:
        return frozenset([stage for stage, current in self._states.items() if current is state])

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        assert self.open, "no stage is open"
        assert self._wanted <= self._widest.stages, "a stage is wanted that cannot be open"
        for stage, state in self._states.items():
            assert state is StageState.CLOSED or stage in self._widest.stages, f"{stage.value} is {state.value}"
            wanted = stage in self._wanted
            coming = state in {StageState.OPENING, StageState.OPEN}
            assert coming or not wanted, f"{stage.value} is wanted, and {state.value}"
        settled = all((state is StageState.OPEN) == (stage in self._wanted) for stage, state in self._states.items())
        settled = settled and not (self.closing or self.opening)
        assert settled == (self._since_s is None), "switching for ever, or not at all"

    # --- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: SwitchEvent, now_s: float) -> list[SwitchEffect]:
        """Apply one event and return the effects. Those about what is not so any more are ignored."""
        effects: list[SwitchEffect] = []
        match event:
            case SwitchWanted(stages, version):
                if (error := self._why_not(stages, version)) is not None:
                    return [RefuseOrder(error)]
                if self._since_s is not None and not self._is_given_up:
                    effects.append(OrderOvertaken())
                self._wanted, self.version, self._since_s, self._is_given_up = stages, version, now_s, False
                self._faults = {stage: fault for stage, fault in self._faults.items() if stage not in stages}
            case Opened(stage):
                if self._states[stage] is StageState.OPENING:
                    self._states[stage] = StageState.OPEN
            case OpensIn(stage, seconds):
                self._opens_s[stage] = seconds
                return []
            case OpeningFailed(stage, error):
                return self._failed(stage, error, now_s)
            case Emptied(stage):
                if self._states[stage] is StageState.CLOSING:
                    self._states[stage] = StageState.CLOSED
        return effects + self._advance(now_s)

    def _why_not(self, stages: frozenset[Stage], version: int) -> TriptychError | None:
        if version <= self.version:
            return Conflict(f"the order has version {version}, the last one had {self.version}")
        if not stages or not stages <= self._widest.stages:
            names = ", ".join(sorted(stage.value for stage in stages)) or "none"
            return InvalidRequest(f"stages {names} are not among those of role {self._widest.value}", param="role")
        return None

    def _failed(self, stage: Stage, error: TriptychError, now_s: float) -> list[SwitchEffect]:
        if self._states[stage] is not StageState.OPENING:
            return []
        self._states[stage] = StageState.CLOSED
        self._faults[stage] = error.message[:MAX_FAULT]
        if stage not in self._wanted:
            return self._advance(now_s)
        self._wanted, self._is_given_up = self.open, True
        return [GivenUp(error), *self._advance(now_s)]

    def _advance(self, now_s: float) -> list[SwitchEffect]:
        effects: list[SwitchEffect] = []
        for stage in Stage:
            if stage in self._wanted and self._states[stage] in {StageState.CLOSED, StageState.CLOSING}:
                self._states[stage] = StageState.OPENING
                effects.append(Open(stage))
        if not self._wanted <= self.open:
            return effects
        for stage in Stage:
            if stage in self.open and stage not in self._wanted:
                self._states[stage] = StageState.CLOSING
                effects.append(Close(stage))
        busy = self.closing or self.opening
        if self._since_s is not None and not busy:
            if not self._is_given_up:
                effects.append(Switched(now_s - self._since_s))
            self._since_s = None
        return effects
