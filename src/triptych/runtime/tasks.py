"""Owned background tasks; no other module calls ``asyncio.create_task``."""

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Self

from triptych.domain.reasons import reason_of

logger = logging.getLogger(__name__)


class TaskScope:
    """Owns background tasks: each ends with the scope; a failure is logged and does not end the others.

    A scope that already runs ``limit`` tasks refuses another (RuntimeError). A *vital* task is one that the process
    cannot work without: when it ends while the scope is open, ``failed`` returns and the process ends. One that ``may_end``
    does so only by an error or a cancellation.
    """

    def __init__(self, name: str, *, limit: int = 100_000) -> None:
        self._name = name
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()
        self._vital: dict[asyncio.Task[None], bool] = {}
        """Tasks whose end ends the scope; True for those that may end without an error."""
        self._failed = asyncio.Event()
        self._failure = ""
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(
        self, work: Coroutine[object, object, None], *, name: str, vital: bool = False, may_end: bool = False
    ) -> None:
        """Start ``work``; closing the scope cancels it."""
        if self._closed or len(self._tasks) >= self._limit:
            work.close()
            reason = "closed" if self._closed else f"full ({self._limit} tasks)"
            raise RuntimeError(f"task scope {self._name!r} is {reason}, cannot start {name!r}")
        task = asyncio.get_running_loop().create_task(work, name=f"{self._name}/{name}")
        self._tasks.add(task)
        if vital:
            self._vital[task] = may_end
        task.add_done_callback(self._done)

    async def failed(self) -> str:
        """Return what failed first while the scope was open: a vital task, with the reason, or what ``fail`` was told."""
        await self._failed.wait()
        return self._failure

    def fail(self, what: str) -> None:
        """Let ``failed`` return ``what``: something that is no task, and that the process cannot work without, cannot go on."""
        if not self._closed and not self._failed.is_set():
            self._failure = what
            self._failed.set()

    async def drain(self, timeout_s: float) -> None:
        """Wait for running tasks to end, at most ``timeout_s``."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    async def close(self) -> None:
        """Cancel all tasks and wait for their end."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        ended_well, what = not task.cancelled(), task.get_name()
        if ended_well and (error := task.exception()) is not None:
            ended_well = False
            what = f"{what} ({reason_of(error)})"
            logger.error("task %s failed", task.get_name(), exc_info=error)
        if task in self._vital:
            may_end = self._vital.pop(task)
            if not (may_end and ended_well):
                self.fail(what)
