"""Bounds of numbers, texts, bytes and lists. NaN and infinities are out of every range."""

import sys
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, Protocol

MAX_INT31 = 2**31 - 1
UNBOUNDED = sys.float_info.max
"""Upper bound that admits every number but infinity."""


class Bound(Protocol):
    def fault(self, name: str, value: Any) -> str | None:
        """Fault of ``value`` as a sentence that starts with ``name``; None if it is valid."""
        ...


@dataclass(frozen=True, slots=True)
class Between:
    """A number from ``low`` to ``high``, inclusive; with ``above``, ``low`` is excluded."""

    low: float
    high: float = UNBOUNDED
    above: bool = False

    def fault(self, name: str, value: float) -> str | None:
        if self.low <= value <= self.high and not (self.above and value == self.low):
            return None
        if self.high == UNBOUNDED:
            wanted = f"above {self.low}" if self.above else f"at least {self.low}"
        else:
            wanted = f"above {self.low} and at most {self.high}" if self.above else f"from {self.low} to {self.high}"
        return f"{name} is {value}, must be {wanted}"


@dataclass(frozen=True, slots=True)
class Anything:
    """Bound that admits any value of the type: it is only compared, never used as a size."""

    def fault(self, name: str, value: Any) -> str | None:
        del name, value
        return None


@dataclass(frozen=True, slots=True)
class OneOf:
    values: tuple[int, ...]

    def fault(self, name: str, value: int) -> str | None:
        return None if value in self.values else f"{name} is {value}, must be one of {self.values}"


@dataclass(frozen=True, slots=True)
class Size:
    """Length of a text or bytes."""

    high: int
    low: int = 0
    unit: str = "characters"

    def fault(self, name: str, value: Sized) -> str | None:
        if self.low <= len(value) <= self.high:
            return None
        wanted = f"exactly {self.low}" if self.low == self.high else f"from {self.low} to {self.high}"
        return f"{name} has {len(value)} {self.unit}, must have {wanted}"


@dataclass(frozen=True, slots=True)
class Many:
    """A list with at most ``high`` entries, each within ``each``; None if its bound is declared elsewhere."""

    high: int
    each: Bound | None = None
    unit: str = "entries"

    def fault(self, name: str, value: Any) -> str | None:
        if len(value) > self.high:
            return f"{name} has {len(value)} {self.unit}, at most {self.high} are allowed"
        if self.each is None or not value:
            return None
        if isinstance(self.each, Between):  # there may be a million
            return self.each.fault(name, min(value)) or self.each.fault(name, max(value))
        return next(filter(None, (self.each.fault(name, item) for item in value)), None)


@dataclass(frozen=True, slots=True)
class Pair:
    """A key and a value."""

    first: Bound
    second: Bound

    def fault(self, name: str, value: tuple[Any, Any]) -> str | None:
        return self.first.fault(f"a key of {name}", value[0]) or self.second.fault(f"{name} of {value[0]!r}", value[1])
