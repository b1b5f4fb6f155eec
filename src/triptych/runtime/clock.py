"""The one place where real time is read."""

import time

from triptych.ports import Clock

monotonic: Clock = time.monotonic  # noqa: TID251 - the place that the rule allows
"""Seconds on a monotonic clock with an arbitrary zero."""


def hours() -> float:
    """Hours since the beginning of 1970, UTC, by the clock of this machine."""
    return time.time() / 3600  # noqa: TID251 - the place that the rule allows
