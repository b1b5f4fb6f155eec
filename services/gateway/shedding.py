"""Requests that the gateway refuses by itself, while the router refuses those of the same key and the way to it is behind.

The router knows best what can be answered in time, but each request that it is asked about costs both processes some milliseconds. At several
times the capacity that takes more than there is: requests then wait unread, those that could be answered among them, and clients are
refused when they have given up. A request that is refused here costs a fraction, as its body is neither read nor parsed.

Admission by the delay of the queue is CoDel's idea (Nichols and Jacobson, ACM Queue 2012), as in Envoy's overload manager. The delay here is that of the event
loop, or of the router's last refusal. A key that the router has not refused lately is never refused here, whatever others send.
"""

import asyncio
from dataclasses import dataclass
from random import Random

from triptych.domain.limits import Seconds
from triptych.errors import Overloaded
from triptych.ports import Clock

BEHIND_S = 0.01
"""Delay from which on requests are refused here."""
RECENT_S = 1.0
"""How long a refusal of the router counts."""
PROBE_S = 0.01
"""Time between two measurements of the event loop's delay."""
_SPREAD = 0.5
"""Share of Retry-After that is added at random, so that clients do not return together."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    at_s: Seconds
    took_s: Seconds
    retry_after_s: Seconds


class Shedding:
    """Owner of what the gateway knows of the router's refusals. Runs in an event loop."""

    def __init__(self, clock: Clock, rng: Random) -> None:
        self._clock = clock
        self._rng = rng
        self._last: dict[str, _Refusal] = {}
        """By key, of which there are as many as the settings name."""
        self._latest_s = 0.0
        self._lag_s = 0.0
        self._measures = False
        self.count = 0
        """Requests refused here."""

    def refused(self, key: str, error: Overloaded, took_s: Seconds) -> None:
        """The router refused a request of ``key``, ``took_s`` after it was asked."""
        self._latest_s = self._clock()
        self._last[key] = _Refusal(self._latest_s, took_s, error.retry_after_s or RECENT_S)
        if not self._measures:
            self._measures = True
            self._measure()

    def check(self, key: str) -> None:
        """Raises Overloaded if a new request of ``key`` is to be refused."""
        last = self._last.get(key)
        if last is None:
            return
        since_s = self._clock() - last.at_s
        # What waits at the router becomes less by one second per second, as nothing is added.
        if since_s < RECENT_S and max(self._lag_s, last.took_s - since_s) > BEHIND_S:
            self.count += 1
            raise Overloaded(
                "requests are refused as they could not be answered in time, and more come than can be looked at",
                retry_after_s=last.retry_after_s * (1 + _SPREAD * self._rng.random()),
            )

    def _measure(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + PROBE_S
        loop.call_at(due_s, self._measured, due_s)

    def _measured(self, due_s: Seconds) -> None:
        self._lag_s = asyncio.get_running_loop().time() - due_s
        if self._clock() - self._latest_s < RECENT_S:
            self._measure()
        else:
            self._measures = False
