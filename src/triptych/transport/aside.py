"""Calls that may not come back, made aside from the event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


class Aside:
    """Runs blocking calls, ``limit`` at a time, on threads that do not keep the process from ending.

    The threads of an executor are waited for when the interpreter exits, so that one call that hangs would keep the
    process for ever.
    """

    def __init__(self, name: str, *, limit: int) -> None:
        self._name = name
        self._turns = asyncio.Semaphore(limit)
        self.calls = 0
        """Under way now."""

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

        self.calls += 1
        ended.add_done_callback(self._one_has_ended)
        threading.Thread(target=call, name=self._name, daemon=True).start()
        value, error = await asyncio.shield(ended)
        if error is not None:
            raise error
        return value

    def _one_has_ended(self, _: object) -> None:
        self.calls -= 1
        self._turns.release()
