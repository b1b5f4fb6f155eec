"""The one place where real time is read."""

import time

from triptych.ports import Clock

monotonic: Clock = time.monotonic  # noqa: TID251 - the place that the rule allows
"""Seconds on a monotonic clock with an arbitrary zero."""


unix_s: Clock = time.time  # noqa: TID251 - the place that the rule allows
"""Seconds since the beginning of 1970, UTC, by the clock of this machine."""


def hours() -> float:
    """Hours since the beginning of 1970, UTC, by the clock of this machine."""
    return unix_s() / 3600
