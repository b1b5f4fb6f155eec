"""The health of a transport's agent: when to replace it, and when to shut down a replaced one.


    IN USE -- Replace -> (the next one is made) -- Replaced -> RETIRED -- TakeDown -> gone
                                                                  ^------ NotDown ----+

An agent is replaced when an abandoned transfer never ends, a call does not return, or several calls in a row fail. A
replaced agent finishes its transfers and is shut down when they end, or after ``linger_s``. Memory that it could still
write to is not reused until it is gone.

Replacements are separated by pauses that double, and stop while ``max_retired`` agents are not gone.
"""

from dataclasses import dataclass
from enum import Enum


class Cause(Enum):
    STUCK = "stuck"
    """An abandoned transfer did not end."""
    HANGING = "hanging"
    """A call did not return."""
    FAILING = "failing"
    """Several calls in a row failed."""


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Worked:
    """A call to the current agent succeeded."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A call to the current agent failed, possibly not because of the peer."""


@dataclass(frozen=True, slots=True)
class Look:
    """Periodic check. For the current agent: the age of its oldest abandoned transfer and of its oldest call; 0 if
    none. ``idle``: retired agents without transfers.
    """

    stuck_s: float
    hanging_s: float
    idle: frozenset[int]


@dataclass(frozen=True, slots=True)
class Replaced:
    """A new agent is in use; ``former`` is the number of the previous one."""

    former: int


@dataclass(frozen=True, slots=True)
class NotReplaced:
    """No new agent could be made: the old one stays in use."""


@dataclass(frozen=True, slots=True)
class Down:
    """A retired agent is gone."""

    number: int


@dataclass(frozen=True, slots=True)
class NotDown:
    """The agent cannot be shut down yet: a call has not returned."""

    number: int


Event = Worked | Failed | Look | Replaced | NotReplaced | Down | NotDown

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replace:
    """Make a new agent; ``Replaced`` or ``NotReplaced`` must follow."""

    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class TakeDown:
    """Shut down a retired agent; ``Down`` or ``NotDown`` must follow."""

    number: int
    reason: str


Effect = Replace | TakeDown


@dataclass(frozen=True, slots=True)
class HealthLimits:
    stuck_s: float
    """How long an abandoned transfer may go on."""
    hanging_s: float
    """How long a call may take."""
    max_failures: int = 4
    """Failures in a row that cause a replacement."""
    min_retired_s: float = 5.0
    """Shortest time before a replaced agent is shut down, so that peers learn of the new one."""
    linger_s: float = 30.0
    """A replaced agent is shut down after this, even with transfers running."""
    max_retired: int = 3
    first_pause_s: float = 1.0
    """First pause between two replacements; it doubles from there ..."""
    longest_pause_s: float = 60.0
    """... up to this, and resets once an agent has worked for as long."""


class AgentHealth:
    """Owner of which NIXL agent is in use, and which failed.

    ``handle`` is the only mutator.
    """

    def __init__(self, limits: HealthLimits) -> None:
        self._limits = limits
        self._failures = 0
        self._replacing = False
        self._replaced_s: float | None = None
        self._pause_s = limits.first_pause_s
        self._retired: dict[int, float] = {}
        """By number: when it was retired, or when shutting it down last failed."""
        self._going_down: set[int] = set()

    @property
    def retired(self) -> int:
        """Replaced agents that are not gone."""
        return len(self._retired)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case Worked():
                self._failures = 0
                if self._replaced_s is not None and now_s - self._replaced_s >= self._limits.longest_pause_s:
                    self._pause_s = self._limits.first_pause_s
            case Failed():
                self._failures += 1
            case Look():
                return [*self._take_down(event.idle, now_s), *self._replace(event, now_s)]
            case Replaced(former):
                self._retired[former] = now_s
                self._tried(now_s)
            case NotReplaced():
                self._tried(now_s)
            case Down(number):
                self._going_down.discard(number)
                del self._retired[number]
            case NotDown(number):
                self._going_down.discard(number)
                self._retired[number] = now_s
        return []

    def _tried(self, now_s: float) -> None:
        self._replacing = False
        self._failures = 0
        if self._replaced_s is not None:
            self._pause_s = min(2 * self._pause_s, self._limits.longest_pause_s)
        self._replaced_s = now_s

    def _replace(self, look: Look, now_s: float) -> list[Effect]:
        limits = self._limits
        if self._replacing or len(self._retired) >= limits.max_retired:
            return []
        if self._replaced_s is not None and now_s - self._replaced_s < self._pause_s:
            return []
        if look.hanging_s >= limits.hanging_s:
            effect = Replace(Cause.HANGING, f"a call has not returned for {look.hanging_s:.1f} s")
        elif look.stuck_s >= limits.stuck_s:
            effect = Replace(Cause.STUCK, f"a transfer was given up {look.stuck_s:.1f} s ago and is not over")
        elif self._failures >= limits.max_failures:
            effect = Replace(Cause.FAILING, f"{self._failures} calls in a row failed")
        else:
            return []
        self._replacing = True
        return [effect]

    def _take_down(self, idle: frozenset[int], now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for number, since_s in self._retired.items():
            retired_s = now_s - since_s
            if number in self._going_down or retired_s < self._limits.min_retired_s:
                continue
            if number in idle:
                effects.append(TakeDown(number, "no transfers are running"))
            elif retired_s >= self._limits.linger_s:
                effects.append(TakeDown(number, f"it had {retired_s:.1f} s to finish its transfers"))
        self._going_down.update(effect.number for effect in effects if isinstance(effect, TakeDown))
        return effects

    def validate(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        assert len(self._retired) <= self._limits.max_retired, "too many agents were replaced"
        assert self._going_down <= self._retired.keys(), "the current agent is being shut down"
        assert self._pause_s <= self._limits.longest_pause_s, "a pause without bound"
