"""Calls to instances that are under way, so that those to one whose heartbeat is lost can be given up."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from triptych.errors import InstanceLost


class OutgoingCalls:
    """Those of one request. Each is made by a task."""

    def __init__(self) -> None:
        self._to: dict[str, set[asyncio.Task[object]]] = {}
        self._given_up: set[asyncio.Task[object]] = set()

    @contextmanager
    def to(self, name: str) -> Iterator[None]:
        """Around a call to an instance: raises InstanceLost within it once it is given up."""
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("calls are made by tasks")
        self._to.setdefault(name, set()).add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._given_up:
                raise
            task.uncancel()
            raise InstanceLost("the instance does not answer any more") from None
        finally:
            self._to[name].discard(task)
            self._given_up.discard(task)

    def give_up(self, name: str) -> None:
        """What waits for the instance waits no longer, as if it had died."""
        for task in self._to.get(name, ()):
            self._given_up.add(task)
            task.cancel()
