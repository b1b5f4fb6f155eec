"""Pulls of embeddings, keys and values over links that transfers share. Each request has one flow at a time."""

from collections import Counter
from collections.abc import Callable, Mapping

from ..agenda import Agenda  # noqa: TID252 - of the simulator
from ..network import TimedLinks, Topology  # noqa: TID252


class Transfers:
    """Owner of the transfers between instances."""

    def __init__(self, topology: Topology, agenda: Agenda, *, control_s: float) -> None:
        self._links = TimedLinks(topology, agenda)
        self._control_s = control_s
        self._open: set[tuple[str, str]] = set()
        """Instances that have a connection: who reads, and whose memory."""
        self.moved: Counter[str] = Counter()
        """Bytes by link."""

    def delay_s(self, into: str, holders: Mapping[str, int]) -> float:
        """Before the bytes of a pull begin to travel: a connection where there is none, and the links' latency."""
        delay_s = 0.0
        for holder in holders:
            own_s = self._links.flows.latency_s(self._links.path(holder, into))
            if (into, holder) not in self._open:
                self._open.add((into, holder))
                own_s += 2 * self._control_s
            delay_s = max(delay_s, own_s)
        return delay_s

    def pull(self, into: str, holders: Mapping[str, int], then: Callable[[], None]) -> None:
        """Pull so many bytes from each holder, none of which is ``into``, and call ``then`` when all are there."""
        links: dict[str, None] = {}
        for holder, nbytes in holders.items():
            for link in self._links.path(holder, into):
                self.moved[link] += nbytes
                links[link] = None
        self._links.transfer(tuple(links), sum(holders.values()), then)
