"""Requests that the gateway refuses by itself, before their bodies are read.

Each request that is read, parsed and passed on costs gateway and router some milliseconds. At several times the
capacity that is more than there is. Requests then wait unread, those that could be answered among them, and clients are
refused when they have given up. A request that is refused here costs a fraction. There are two reasons:

- **The gateway is behind**, whatever the router says. Its event loop is late, or bodies wait for a thread that parses
  them, for longer than a single pause (``SustainedDelay``). Then a request is refused if the delay is more than a part
  of its timeout. Keys that send less than their share of what is let in are not refused, so one that floods harms
  itself.
- **The router refuses the key**, and the gateway is late, if only by a little; or the router refuses late, or not even
  before the deadline. Then it is asked about some requests only. A key that the router has not refused lately is never
  refused for this reason.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from triptych.domain.limits import Seconds
from triptych.domain.tenant import Tenant
from triptych.errors import Overloaded
from triptych.machine.shedding import Arrivals, Probing, SustainedDelay
from triptych.machine.turnover import Turnover
from triptych.ports import Clock

logger = logging.getLogger(__name__)

TARGET_S = 0.05
"""Delay from which on the gateway is behind, if it lasts for ``INTERVAL_S``, seconds."""
INTERVAL_S = 0.25
"""Time for which the delay must last, seconds."""
URGENT_S = 30.0
"""Timeout below which a request is urgent."""
URGENT_BEARS, OTHERS_BEAR = 1 / 40, 1 / 8
"""Part of a request's timeout that the delay may take. A request has several such delays on its way. Refusals of urgent
ones are to be quick, while the others can wait until a burst has been worked off.
"""
SHARE_WINDOW_S = 1.0
"""Time over which keys are compared."""
BEHIND_S, BEHIND_FOR_S = 0.01, 0.05
"""Delay from which on requests of a key are refused that the router refuses, if it lasts for so long."""
LATE_S = 0.02
"""Time after which a refusal of the router is late."""
RECENT_S = 1.0
"""Time for which a refusal of the router counts that was not late, seconds. The delay is measured for as long after the
last request.
"""
LATE_COUNT, LATE_RECENT_S = 10, 5.0
"""Number of late refusals, and the seconds within which they say that a router is behind. A few deadlines may have been
too short for any router.
"""
LEAST_ASKED = 10.0
"""Requests of a key per second that a router is asked about whose refusals are late, at least ..."""
ASKED = 2.0
"""... else so many times those that it accepted in the last ..."""
PROBED_S = 2.0
"""... seconds."""
LEAST_LET_IN, LET_IN = 5.0, 0.5
"""The same of requests that are let in although the gateway's delay is more than they can bear, by those accepted before it was behind:
refusing alone may be all that it gets done, and half of what was accepted since would soon be nothing."""
PROBE_S = 0.01
"""Time between two measurements of the event loop's delay."""
_SPREAD = 0.5
"""Share of Retry-After that is added at random, so that clients do not return together."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    at_s: Seconds
    retry_after_s: Seconds


@dataclass(slots=True)
class Unbegun:
    """Work that waits for a thread."""

    since_s: Seconds
    begun: bool = False
    """True once the work has begun, or never will."""


class Shedding:
    """Owner of what the gateway knows of its own delay and of the router's refusals. Runs in an event loop."""

    def __init__(self, clock: Clock, rng: Random) -> None:
        self._clock = clock
        self._rng = rng
        self._last: dict[str, _Refusal] = {}
        """The router's refusals by key, of which there are as many as the settings name."""
        self._late_at_s: dict[str, deque[Seconds]] = {}
        """Times when the router lately said of a key too late that it refuses, or nothing, since it last refused in
        time.
        """
        self._probing: dict[str, Probing] = {}
        """Probing by key."""
        self._let_in_anyway = Probing(LET_IN, LEAST_LET_IN, PROBED_S, remembers=True)
        self._refuses_until_s = float("-inf")
        """Time until which the router's refusals count."""
        self._asked_s = 0.0
        """Time of the last request."""
        self._delay_s = 0.0
        """The last one measured."""
        self._due_s = float("inf")
        """Time when the next measurement is due; infinite if nothing is measured."""
        self._sustained = SustainedDelay(TARGET_S, INTERVAL_S)
        self._a_little = SustainedDelay(BEHIND_S, BEHIND_FOR_S)
        self._is_calm = True
        """Neither is behind, nor was the last delay above either: another one like it changes nothing."""
        self._arrivals = Arrivals(SHARE_WINDOW_S)
        self._turnover = Turnover()
        self._unbegun: deque[Unbegun] = deque()
        self.count = 0
        """Requests refused here."""

    @property
    def delay_s(self) -> Seconds:
        """Delay of the gateway, seconds: the one measured last, or that of a measurement that is overdue."""
        return max(self._delay_s, self._clock() - self._due_s)

    def came(self) -> bool:
        """Note that a request came. Returns whether it may have to be refused, which ``refusal`` says."""
        self._asked_s = self._clock()
        if self._due_s == float("inf"):
            self._measure()  # from now on
        self._note(self.delay_s, self._asked_s)
        return self._sustained.behind or self._asked_s < self._refuses_until_s

    def admit(self, sender: Tenant) -> None:
        """Count a request that is not refused here."""
        now_s = self._clock()
        self._arrivals.admit(sender.name, sender.weight, now_s)
        self._turnover.free(1, now_s)

    def refused(self, key: str, error: Overloaded, took_s: Seconds) -> None:
        """Note that the router refused a request of ``key``, ``took_s`` after it was asked."""
        now_s = self._clock()
        self._last[key] = _Refusal(now_s, error.retry_after_s or RECENT_S)
        self._refuses_until_s = max(self._refuses_until_s, now_s + RECENT_S)
        if took_s > LATE_S:
            self.unanswered(key)
        else:
            self._late_at_s.pop(key, None)

    def unanswered(self, key: str) -> None:
        """Note that the router said nothing of a request of ``key`` before its deadline: as late as a refusal can be."""
        self._late_at_s.setdefault(key, deque(maxlen=LATE_COUNT)).append(self._clock())
        self._refuses_until_s = self._clock() + LATE_RECENT_S

    def accepted(self, key: str) -> None:
        """Note that the router has begun to answer a request of ``key``."""
        self._probing_of(key).accepted(self._clock())
        if not self._sustained.behind:
            self._let_in_anyway.accepted(self._clock())

    def refusal(self, sender: Tenant | None, timeout_s: Seconds) -> Overloaded | None:
        """Why a new request is refused; None if it is not. ``sender`` is None for a request without a valid key."""
        now_s, delay_s = self._clock(), self.delay_s
        key, weight = (sender.name, sender.weight) if sender is not None else ("", 1.0)
        retry_after_s = None
        bears = URGENT_BEARS if timeout_s < URGENT_S else OTHERS_BEAR
        if self._sustained.behind and delay_s > bears * timeout_s:
            is_spared = sender is not None and self._arrivals.is_within_share(key, now_s)
            if not is_spared and (sender is None or not self._let_in_anyway.take(now_s)):
                retry_after_s = self._turnover.refuse(key, now_s)
        elif sender is not None and self._is_refused_by_router(key, delay_s, now_s):
            last = self._last.get(key)
            retry_after_s = (RECENT_S if last is None else last.retry_after_s) * (1 + _SPREAD * self._rng.random())
        if retry_after_s is None:
            return None
        self.count += 1
        if sender is not None:
            self._arrivals.refused(key, weight, now_s)
        return Overloaded(
            "requests are refused as they could not be answered in time, and more come than can be looked at",
            retry_after_s=retry_after_s,
        )

    @contextmanager
    def unbegun(self) -> Generator[Unbegun]:
        """Work that waits for a thread, and says when it has begun."""
        work = Unbegun(self._clock())
        self._unbegun.append(work)
        try:
            yield work
        finally:
            work.begun = True

    def _is_refused_by_router(self, key: str, delay_s: Seconds, now_s: Seconds) -> bool:
        """Whether the router is not even asked, as it refuses this key."""
        last = self._last.get(key)
        is_recent = last is not None and now_s - last.at_s < RECENT_S
        if is_recent and self._a_little.behind and delay_s > BEHIND_S:
            return True
        late = self._late_at_s.get(key)
        is_behind = late is not None and len(late) == LATE_COUNT and now_s - late[0] < LATE_RECENT_S
        return is_behind and not self._probing_of(key).take(now_s)

    def _probing_of(self, key: str) -> Probing:
        if (probing := self._probing.get(key)) is None:
            probing = self._probing[key] = Probing(ASKED, LEAST_ASKED, PROBED_S)
        return probing

    def _note(self, delay_s: Seconds, now_s: Seconds) -> None:
        if self._is_calm and delay_s <= BEHIND_S:
            return
        self._a_little.measured(delay_s, now_s)
        if self._sustained.measured(delay_s, now_s):
            if self._sustained.behind:
                logger.warning("the gateway is %.2f s behind: it refuses requests unread", delay_s)
            else:
                logger.info("the gateway is no longer behind; it has refused %d requests unread in all", self.count)
                self._turnover.rest()
        self._is_calm = delay_s <= BEHIND_S and not (self._a_little.behind or self._sustained.behind)

    def _measure(self) -> None:
        """Measure the delay, and do so again in ``PROBE_S`` while requests come."""
        now_s = self._clock()
        while self._unbegun and self._unbegun[0].begun:
            self._unbegun.popleft()
        waits_s = now_s - self._unbegun[0].since_s if self._unbegun else 0.0
        self._delay_s = max(0.0, now_s - self._due_s, waits_s)
        self._note(self._delay_s, now_s)
        if now_s - self._asked_s < RECENT_S or self._sustained.behind:
            self._due_s = now_s + PROBE_S
            asyncio.get_running_loop().call_later(PROBE_S, self._measure)
        else:
            self._delay_s, self._due_s = 0.0, float("inf")
