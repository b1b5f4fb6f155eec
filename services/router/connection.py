"""A member of the cluster as this router calls it: one stub, the calls to it that run, and when it is done with."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from triptych.errors import InstanceLost
from triptych.ports import InstanceClient


class Connection:
    """Calls are made by tasks, within ``call``."""

    def __init__(self, name: str, client: InstanceClient) -> None:
        self.name = name
        self.client = client
        self.suspect = asyncio.Event()
        """A call failed in a way that says it is down: ask it again."""
        self.wanted = asyncio.Event()
        """A request needs it: ask it at once, if it is away."""
        self.over = asyncio.Event()
        """The member is forgotten."""
        self._calls: set[asyncio.Task[object]] = set()
        self._given_up: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def call(self) -> Iterator[InstanceClient]:
        """Around a call: raises InstanceLost within it once it is given up."""
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
            raise InstanceLost("the instance does not answer any more") from None
        finally:
            self._calls.discard(task)
            self._given_up.discard(task)
            if not self._calls:
                self._idle.set()

    def give_up_calls(self) -> None:
        """What waits for the instance waits no longer, as if it had died."""
        for task in self._calls:
            self._given_up.add(task)
            task.cancel()

    async def idle(self) -> None:
        """Return once no call runs."""
        await self._idle.wait()
