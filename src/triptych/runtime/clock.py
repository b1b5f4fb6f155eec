"""The one place where real time is read."""

import time

from triptych.ports import Clock

monotonic: Clock = time.monotonic  # noqa: TID251 - the place that the rule allows
"""Seconds on a monotonic clock with an arbitrary zero."""
