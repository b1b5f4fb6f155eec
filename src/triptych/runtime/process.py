"""One process: uvloop, one root scope, an orderly end.

Shutdown = stop accepting, drain with a deadline, cancel, close. SIGTERM and SIGINT start it; a second one cuts the
drain short.
"""

import asyncio
import contextlib
import logging
import signal
import sys
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import uvloop

from triptych.errors import TriptychError
from triptych.runtime import logs
from triptych.runtime.telemetry import Telemetry

logger = logging.getLogger(__name__)


class CannotStart(Exception):
    """Something outside the program keeps it from starting; the message says what, for whoever started it."""


class App(Protocol):
    """A service wired up from its settings."""

    async def drain(self) -> None:
        """Stop accepting and let what runs come to its end."""
        ...


def run(
    name: str,
    app: AbstractAsyncContextManager[App],
    *,
    log_level: str,
    drain_s: float,
    log_format: str = "text",
    telemetry: Telemetry | None = None,
) -> None:
    """Run ``app`` until the process is told to stop. Returns when everything is closed.

    ``telemetry`` is up before the app is, so that a process which takes long to start can already be asked.
    Ends the process with status 1 and one line when the app cannot start (CannotStart, or an error of the tree).
    """
    logs.configure(log_level, log_format)
    try:
        uvloop.run(_serve(name, app, drain_s, telemetry or Telemetry()), debug=False)
    except (CannotStart, TriptychError) as error:
        sys.stderr.write(f"{name}: {error}\n")
        raise SystemExit(1) from None


async def _serve(name: str, app: AbstractAsyncContextManager[App], drain_s: float, telemetry: Telemetry) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with telemetry.running(), app as running:
        logger.info("%s is up", name)
        await stop.wait()
        logger.info("%s drains for up to %.0f s", name, drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s), asyncio.TaskGroup() as group:
                drained = group.create_task(running.drain())
                hurried = group.create_task(hurry.wait())
                await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
                drained.cancel()
                hurried.cancel()
    logger.info("%s is down", name)
    sys.stderr.flush()
