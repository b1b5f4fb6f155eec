"""Blocking calls that may hang, run on daemon threads."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


class DaemonThreadPool:
    """Runs at most ``limit`` blocking calls at a time, each on a daemon thread.

    The interpreter joins an executor's threads at exit, so one hanging call would keep the process alive for ever.
    """

    def __init__(self, name: str, *, limit: int) -> None:
        self._name = name
        self._slots = asyncio.Semaphore(limit)
        self._began_s: list[float] = []
        """Start time of each running call, on the event loop's clock."""

    @property
    def calls(self) -> int:
        """Calls that are running."""
        return len(self._began_s)

    def hanging_s(self, now_s: float) -> float:
        """Time for which the oldest call has been running, seconds; 0 when there is none."""
        return now_s - min(self._began_s, default=now_s)

    async def run(self, fn: Callable[..., Any], *args: object) -> Any:
        """Return or raise what ``fn`` does. When the caller is cancelled, the call runs on and keeps its place."""
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

        def call() -> None:
            try:
                outcome: tuple[Any, Exception | None] = (fn(*args), None)
            except Exception as error:  # noqa: BLE001 - re-raised in the caller
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(ended.set_result, outcome)

        began_s = loop.time()
        self._began_s.append(began_s)
        ended.add_done_callback(lambda _: self._release(began_s))
        threading.Thread(target=call, name=self._name, daemon=True).start()
        value, error = await asyncio.shield(ended)
        if error is not None:
            raise error
        return value

    def _release(self, began_s: float) -> None:
        self._began_s.remove(began_s)
        self._slots.release()
