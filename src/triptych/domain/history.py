"""The load of a pool by hour of the week, as managers keep it for the first size of the pool (ModServe section 4.2)."""

from dataclasses import dataclass

HOURS_OF_WEEK = 168
WEEKS = 4
"""Weeks that are kept."""


@dataclass(frozen=True, slots=True)
class HourLoad:
    hour: int
    """Hours since the beginning of 1970, UTC."""
    peak_per_s: float
    """Highest load over 30 s in this hour, in the unit of ``domain.decision.PoolLoad``."""


@dataclass(frozen=True, slots=True)
class KeptHistory:
    hours: tuple[HourLoad, ...] = ()
    """Loads by hour, at most ``WEEKS`` times ``HOURS_OF_WEEK``, oldest first."""
    capacity_per_s: float | None = None
    """Capacity of one replica when it was known last."""
