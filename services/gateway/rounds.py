"""While the router refuses a key, its gateway asks it about that key's requests in rounds: those that come within a moment go together.

Most of what a refusal costs is the way to the router and back: a gRPC message each way, whatever is in them. Requests that are asked about in one
step of the event loop share both (ADR 21), and so do their refusals. So the first of them goes at once, and those that come within ``ROUND_S``
of it together afterwards. The router decides on each as before, by the time that it has left then.
"""

import asyncio

from triptych.domain.limits import Seconds

ROUND_S = 0.02
"""Time between two rounds, and the longest that a request waits."""
MOST_OF_TIME = 0.01
"""A request does not wait if that could be more than this share of the time that it has left."""


class Rounds:
    """Owner of the requests that wait for the next round. Runs in an event loop."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self._next_s: Seconds = 0.0
        """When the next round may begin, by the event loop's clock."""
        self.count = 0
        """Requests that have waited for a round."""

    async def turn(self, left_s: Seconds) -> None:
        """Return when a request with this much time may be asked about."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if MOST_OF_TIME * left_s < ROUND_S:
            return
        if not self._waiting:
            if now_s >= self._next_s:
                self._next_s = now_s + ROUND_S
                return
            loop.call_at(self._next_s, self._begin)
        self.count += 1
        waits = loop.create_future()
        self._waiting.append(waits)
        await waits

    def _begin(self) -> None:
        self._next_s = asyncio.get_running_loop().time() + ROUND_S
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():  # its client is still there
                one.set_result(None)
