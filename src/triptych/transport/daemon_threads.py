"""Calls that may not come back, on threads of their own beside the event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


class DaemonThreadPool:
    """Runs blocking calls, ``limit`` at a time, on threads that do not keep the process from ending.

    The threads of an executor are waited for when the interpreter exits, so that one call that hangs would keep the
    process for ever.
    """

    def __init__(self, name: str, *, limit: int) -> None:
        self._name = name
        self._turns = asyncio.Semaphore(limit)
        self._began_s: list[float] = []
        """When each call that is under way began, on the event loop's clock."""

    @property
    def calls(self) -> int:
        """Under way now."""
        return len(self._began_s)

    def hanging_s(self, now_s: float) -> float:
        """For how long the oldest call has been under way; 0 when there is none."""
        return now_s - min(self._began_s, default=now_s)

    async def run(self, fn: Callable[..., Any], *args: object) -> Any:
        """What ``fn`` returns or raises. A caller that is cancelled leaves; the call goes on and keeps its turn."""
        await self._turns.acquire()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

        def call() -> None:
            try:
                outcome: tuple[Any, Exception | None] = (fn(*args), None)
            except Exception as error:  # noqa: BLE001 - it is raised where it was called
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
                loop.call_soon_threadsafe(ended.set_result, outcome)

        began_s = loop.time()
        self._began_s.append(began_s)
        ended.add_done_callback(lambda _: self._one_has_ended(began_s))
        threading.Thread(target=call, name=self._name, daemon=True).start()
        value, error = await asyncio.shield(ended)
        if error is not None:
            raise error
        return value

    def _one_has_ended(self, began_s: float) -> None:
        self._began_s.remove(began_s)
        self._turns.release()
