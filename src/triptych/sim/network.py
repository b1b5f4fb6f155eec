"""Links between simulated instances: pulls share their bandwidth, as flows do."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """A link that all transfers over it share alike."""

    bytes_per_s: float
    latency_s: float = 0.0
    """Of each transfer, beside its bytes, seconds."""


@dataclass(eq=False, slots=True)
class _Flow:
    links: tuple[str, ...]
    left: float
    """Bytes."""
    done: asyncio.Future[None]
    rate: float = 0.0
    """Bytes per second."""


@dataclass(slots=True)
class SharedLinks:
    """Owner of the running transfers. Each gets the smallest of its links' equal shares, recomputed when one begins or ends.

    (Not max-min fair: what a transfer leaves of a share, as another link bounds it, is given to nobody.)
    """

    speeds: Mapping[str, LinkSpeed]
    moved: Counter[str] = field(default_factory=Counter)
    """Bytes by link, of transfers that ended."""
    _flows: dict[_Flow, None] = field(default_factory=dict)
    _loads: Counter[str] = field(default_factory=Counter)
    _since_s: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    async def transfer(self, links: Sequence[str], nbytes: int) -> None:
        """Wait for as long as a transfer over all of ``links`` takes. It ends early, without its bytes, when cancelled."""
        known = tuple([link for link in links if link in self.speeds])
        await asyncio.sleep(sum(self.speeds[link].latency_s for link in known))
        if not known or not nbytes:
            return
        flow = _Flow(known, nbytes, asyncio.get_running_loop().create_future())
        self._advance()
        self._flows[flow] = None
        self._loads.update(known)
        self._reschedule()
        try:
            await flow.done
            self.moved.update(dict.fromkeys(known, nbytes))
        finally:
            if flow in self._flows:
                self._advance()
                self._end(flow)
                self._reschedule()

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        took_s, self._since_s = now_s - self._since_s, now_s
        for flow in self._flows:
            flow.left -= flow.rate * took_s

    def _end(self, flow: _Flow) -> None:
        del self._flows[flow]
        self._loads.subtract(flow.links)

    def _reschedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._flows:
            return
        for flow in self._flows:
            flow.rate = min(self.speeds[link].bytes_per_s / self._loads[link] for link in flow.links)
        first_s = min(max(0.0, flow.left) / flow.rate for flow in self._flows)
        self._timer = asyncio.get_running_loop().call_later(first_s, self._finish)

    def _finish(self) -> None:
        self._timer = None
        self._advance()
        for flow in [flow for flow in self._flows if flow.left <= flow.rate * 1e-9 + 0.5]:
            self._end(flow)
            if not flow.done.done():
                flow.done.set_result(None)
        self._reschedule()
