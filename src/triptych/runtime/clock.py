"""The one place where real time is read."""

import time

from triptych.ports import Clock

monotonic: Clock = time.monotonic  # noqa: TID251 - this is where the rule points to
"""Seconds on a clock that never goes back; its zero means nothing."""
