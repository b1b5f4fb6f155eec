"""A connection to one instance: its stub, the running calls, and events about it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from triptych.errors import InstanceLost
from triptych.ports import InstanceClient

STOPPED_RESPONDING = "the instance stopped responding"
"""The message with which calls that are given up fail: nothing says that the instance has ended."""


class Connection:
    """Every call runs in a task, within ``call``."""

    def __init__(self, name: str, client: InstanceClient) -> None:
        self.name = name
        self.client = client
        self.suspect = asyncio.Event()
        """A call failed as if the instance were down: describe it again."""
        self.wanted = asyncio.Event()
        """A request needs the instance: retry at once if it is unreachable."""
        self.out_of_step = False
        """A report of what the instance holds is missing: start its watch again."""
        self.ended = asyncio.Event()
        """The cluster has forgotten the member."""
        self._calls: set[asyncio.Task[object]] = set()
        self._given_up: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def call(self) -> Iterator[InstanceClient]:
        """Context of a call. Raises InstanceLost inside when the call is given up."""
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("calls are made by tasks")
        self._calls.add(task)
        self._idle.clear()
        try:
            yield self.client
        except asyncio.CancelledError:
            if task not in self._given_up:
                raise
            task.uncancel()
            raise InstanceLost(STOPPED_RESPONDING) from None
        finally:
            self._calls.discard(task)
            self._given_up.discard(task)
            if not self._calls:
                self._idle.set()

    def give_up_calls(self) -> None:
        """Fail all running calls as if the instance had died."""
        for task in self._calls:
            self._given_up.add(task)
            task.cancel()

    async def idle(self) -> None:
        """Return once no call is running."""
        await self._idle.wait()
