"""Links between simulated instances: which of them a pull takes, and how pulls share their bandwidth, as flows do."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .agenda import Agenda


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """A link that all transfers over it share alike."""

    bytes_per_s: float
    latency_s: float = 0.0
    """Of each transfer, beside its bytes, seconds."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts of equal size. Each instance gets devices of one of them: of the first with enough that are free."""

    devices: int
    """Of each host."""
    network: LinkSpeed | None = None
    """What a host's instances share for transfers to and from others, in each direction; None: only their own links bound them."""


@dataclass(slots=True)
class Topology:
    """Owner of where instances are, and of the speeds of the links between them.

    Each instance has a link for each direction, and a second one to those on its host. Hosts may have links too.
    """

    hosts: Hosts | None = None
    speeds: dict[str, LinkSpeed] = field(default_factory=dict)
    """By link."""
    _free: list[int] = field(default_factory=list)
    """Devices of each host that no instance has."""
    _hosts: dict[str, int] = field(default_factory=dict)
    """Of each instance with devices of its own; of one that has left, the last one."""
    _neighbours: dict[str, str] = field(default_factory=dict)
    """Of each of the others: whose devices it has."""

    def enter(self, instance: str, devices: int, link: LinkSpeed, within_host: LinkSpeed, neighbour: str) -> None:
        """An instance starts, on devices of one host: at most as many as a host has. If it has none, on those of its ``neighbour``."""
        if instance != neighbour:
            self._neighbours[instance] = neighbour
            self._add(_within_host(neighbour), within_host)
            return
        self._add(instance, link)
        if self.hosts is None:
            return
        self._add(_within_host(instance), within_host)
        host = next((host for host, free in enumerate(self._free) if free >= devices), None)
        if host is None:
            host = len(self._free)
            self._free.append(self.hosts.devices)
            if self.hosts.network is not None:
                self._add(_name(host), self.hosts.network)
        self._free[host] -= devices
        self._hosts[instance] = host

    def leave(self, instance: str, devices: int) -> None:
        """Its devices are free."""
        if instance in self._hosts:
            self._free[self._hosts[instance]] += devices

    def host(self, instance: str) -> str:
        """The name of its host; empty without ``hosts``."""
        return "" if self.hosts is None else _name(self._hosts[self._neighbours.get(instance, instance)])

    def path(self, holder: str, reader: str) -> tuple[str, ...]:
        """The links that a pull takes."""
        source, target = (self._neighbours.get(instance, instance) for instance in (holder, reader))
        if source == target or (self.hosts is not None and self._hosts[source] == self._hosts[target]):
            return f"out of {_within_host(source)}", f"into {_within_host(target)}"
        if self.hosts is None or self.hosts.network is None:
            return f"out of {source}", f"into {target}"
        hosts = self.host(source), self.host(target)
        return f"out of {source}", f"out of {hosts[0]}", f"into {hosts[1]}", f"into {target}"

    def _add(self, end: str, speed: LinkSpeed) -> None:
        for direction in ("out of", "into"):
            self.speeds[f"{direction} {end}"] = speed


def _name(host: int) -> str:
    return f"host-{host + 1}"


def _within_host(instance: str) -> str:
    return f"{instance} (within its host)"


@dataclass(eq=False, slots=True)
class Flow:
    """A running transfer."""

    links: tuple[str, ...]
    nbytes: int
    left: float
    """Bytes."""
    rate: float = 0.0
    """Bytes per second."""


@dataclass(slots=True)
class Flows:
    """Owner of the running transfers. Each gets the smallest of its links' equal shares, recomputed when one begins or ends.

    (Not max-min fair: what a transfer leaves of a share, as another link bounds it, is given to nobody.)
    """

    speeds: Mapping[str, LinkSpeed]
    moved: Counter[str] = field(default_factory=Counter)
    """Bytes by link, of transfers that ended."""
    _flows: dict[Flow, None] = field(default_factory=dict)
    _loads: Counter[str] = field(default_factory=Counter)
    _since_s: float = 0.0

    def latency_s(self, links: Sequence[str]) -> float:
        """Time that a transfer over all of them takes beside its bytes."""
        return sum(self.speeds[link].latency_s for link in links)

    def begin(self, links: tuple[str, ...], nbytes: int, now_s: float) -> Flow:
        flow = Flow(links, nbytes, nbytes)
        self._advance(now_s)
        self._flows[flow] = None
        for link in links:
            self._loads[link] += 1
        self._share()
        return flow

    def end(self, flow: Flow, now_s: float) -> None:
        """End a flow without its bytes."""
        self._advance(now_s)
        self._remove(flow)
        self._share()

    def ended(self, now_s: float) -> list[Flow]:
        """End those that have all their bytes."""
        self._advance(now_s)
        ended = [flow for flow in self._flows if flow.left <= flow.rate * 1e-9 + 0.5]
        for flow in ended:
            self._remove(flow)
            for link in flow.links:
                self.moved[link] += flow.nbytes
        self._share()
        return ended

    def next_end_s(self) -> float | None:
        """How long it takes from the last change until the first one ends; None without any."""
        return min((max(0.0, flow.left) / flow.rate for flow in self._flows), default=None)

    def __contains__(self, flow: Flow) -> bool:
        return flow in self._flows

    def _advance(self, now_s: float) -> None:
        took_s, self._since_s = now_s - self._since_s, now_s
        for flow in self._flows:
            flow.left -= flow.rate * took_s

    def _remove(self, flow: Flow) -> None:
        del self._flows[flow]
        for link in flow.links:
            self._loads[link] -= 1

    def _share(self) -> None:
        for flow in self._flows:
            flow.rate = min([self.speeds[link].bytes_per_s / self._loads[link] for link in flow.links])


class SharedLinks:
    """The links as tasks use them."""

    def __init__(self, speeds: Mapping[str, LinkSpeed]) -> None:
        self.flows = Flows(speeds)
        """For reading."""
        self._done: dict[Flow, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def transfer(self, links: Sequence[str], nbytes: int) -> None:
        """Wait for as long as a transfer over all of ``links`` takes. It ends early, without its bytes, when cancelled."""
        flows, loop = self.flows, asyncio.get_running_loop()
        await asyncio.sleep(flows.latency_s(links))
        if not nbytes:
            return
        flow = flows.begin(tuple(links), nbytes, loop.time())
        done = self._done[flow] = loop.create_future()
        self._reschedule()
        try:
            await done
        finally:
            del self._done[flow]
            if flow in flows:
                flows.end(flow, loop.time())
                self._reschedule()

    def _reschedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (next_s := self.flows.next_end_s()) is not None:
            self._timer = asyncio.get_running_loop().call_later(next_s, self._finish)

    def _finish(self) -> None:
        self._timer = None
        for flow in self.flows.ended(asyncio.get_running_loop().time()):
            if not (done := self._done[flow]).done():
                done.set_result(None)
        self._reschedule()


class TimedLinks:
    """The links as events use them: each transfer is told when it has ended."""

    def __init__(self, topology: Topology, agenda: Agenda) -> None:
        self.path = topology.path
        self.flows = Flows(topology.speeds)
        self._agenda = agenda
        self._then: dict[Flow, Callable[[], None]] = {}
        self._changes = 0

    def transfer(self, links: tuple[str, ...], nbytes: int, then: Callable[[], None]) -> Flow:
        """Begin one, after the links' latency."""
        flow = self.flows.begin(links, nbytes, self._agenda.now_s)
        self._then[flow] = then
        self._reschedule()
        return flow

    def cancel(self, flow: Flow) -> None:
        if self._then.pop(flow, None) is not None:
            self.flows.end(flow, self._agenda.now_s)
            self._reschedule()

    def _reschedule(self) -> None:
        self._changes += 1
        if (next_s := self.flows.next_end_s()) is not None:
            self._agenda.at(self._agenda.now_s + next_s, self._finish, self._changes)

    def _finish(self, changes: int) -> None:
        if changes != self._changes:
            return
        for flow in self.flows.ended(self._agenda.now_s):
            self._agenda.soon(self._then.pop(flow))
        self._reschedule()
