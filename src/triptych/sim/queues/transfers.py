"""Pulls of embeddings, keys and values over links that transfers share. Each request has one flow at a time."""

from collections import Counter
from collections.abc import Callable, Mapping

from ..agenda import Agenda  # noqa: TID252 - of the simulator
from ..network import Flows, LinkSpeed, TimedLinks  # noqa: TID252


class Transfers:
    """Owner of the transfers between instances."""

    def __init__(self, speeds: Mapping[str, LinkSpeed], agenda: Agenda, *, control_s: float) -> None:
        """``speeds``: of each instance's link, in either direction, by its name."""
        self._speeds = speeds
        self._links = TimedLinks(
            Flows({f"{way} {name}": speed for name, speed in speeds.items() for way in ("into", "out of")}), agenda
        )
        self._control_s = control_s
        self._open: set[tuple[str, str]] = set()
        """Instances that have a connection: who reads, and whose memory."""
        self.moved: Counter[str] = Counter()
        """Bytes by link."""

    def delay_s(self, into: str, holders: Mapping[str, int]) -> float:
        """Before the bytes of a pull begin to travel: a connection where there is none, and the links' latency."""
        delay_s = 0.0
        for holder in holders:
            own_s = self._speeds[holder].latency_s + self._speeds[into].latency_s
            if (into, holder) not in self._open:
                self._open.add((into, holder))
                own_s += 2 * self._control_s
            delay_s = max(delay_s, own_s)
        return delay_s

    def pull(self, into: str, holders: Mapping[str, int], then: Callable[[], None]) -> None:
        """Pull so many bytes from each holder, none of which is ``into``, and call ``then`` when all are there."""
        for holder, nbytes in holders.items():
            self.moved[f"out of {holder}"] += nbytes
            self.moved[f"into {into}"] += nbytes
        links = (f"into {into}", *[f"out of {holder}" for holder in holders])
        self._links.transfer(links, sum(holders.values()), then)
