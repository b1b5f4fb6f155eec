"""Service process: uvloop, one root task scope, an orderly shutdown.

Shutdown is: stop accepting, drain with a deadline, cancel, close. SIGTERM and SIGINT start it; a second signal cuts the
drain short. During startup they end the process at once.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NoReturn, Protocol

import uvloop

from triptych.domain.profile import BadProfile
from triptych.domain.reasons import reason_of
from triptych.errors import TriptychError
from triptych.runtime import logs, open_files
from triptych.runtime.profiles import KnownProfiles
from triptych.runtime.settings import ServiceSettings, SettingsT, load_or_exit
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import TlsIdentity

logger = logging.getLogger(__name__)

_ALLOCATIONS_WHILE_STARTING = 100_000
"""New objects between two collections of garbage during startup. Most of them stay: importing torch and transformers alone takes a
quarter longer with Python's usual number.
"""


class CannotStart(Exception):
    """The process cannot start for a reason outside the program, which the message names."""


def tls_identity(settings: ServiceSettings, telemetry: Telemetry) -> TlsIdentity | None:
    """The TLS identity from the settings; None without TLS. ``telemetry`` tells when it expires. Raises CannotStart."""
    if settings.tls.files is None:
        return None
    try:
        identity = TlsIdentity.load(*settings.tls.files, name=settings.tls.tls_name)
    except ValueError as error:
        raise CannotStart(str(error)) from None
    telemetry.certificates.watch("services", lambda: identity.validity)
    return identity


def known_profiles(path: Path | None) -> KnownProfiles:
    """The profiles of setting ``profiles``. Raises CannotStart."""
    try:
        return KnownProfiles.read(path)
    except BadProfile as error:
        raise CannotStart(f"--profiles: {error}") from None


class App(Protocol):
    """A service wired up from its settings."""

    async def missing(self) -> Sequence[str]:
        """Facts that the service lacks to do its work; empty when it is ready."""
        ...

    async def drain(self) -> None:
        """Stop accepting and wait for running requests to end."""
        ...

    async def failed(self) -> str:
        """Return the name of the first vital part that ends."""
        ...


def main(
    name: str,
    settings_class: type[SettingsT],
    app: Callable[[SettingsT, Telemetry], AbstractAsyncContextManager[App]],
) -> NoReturn:
    """A service's entry point: load its settings and run its app."""
    settings = load_or_exit(settings_class, sys.argv[1:])
    telemetry = Telemetry.of(name, settings)
    run(
        name,
        app(settings, telemetry),
        log_level=settings.log_level,
        drain_s=settings.drain_s,
        log_format=settings.log_format,
        telemetry=telemetry,
    )


def run(
    name: str,
    app: AbstractAsyncContextManager[App],
    *,
    log_level: str,
    drain_s: float,
    log_format: str = "text",
    telemetry: Telemetry | None = None,
) -> NoReturn:
    """Run ``app`` until a stop signal, close everything, and exit.

    ``telemetry`` starts before the app, so that a slow start can be observed. The exit status is 0 after an orderly end
    and 1 when the app cannot start or a vital part failed. Then the last line on standard error is the reason, after the
    process's name. A thread that hangs in foreign code does not keep the process alive.
    """
    logs.configure(log_level, log_format)
    open_files.allow_many()
    status = 1
    try:
        failure = uvloop.run(_serve(name, app, drain_s, telemetry or Telemetry()), debug=False)
        status, reason = (0, "") if failure is None else (1, f"{failure} has failed")
    except (CannotStart, TriptychError) as error:
        reason = str(error)
    except Exception as error:
        logger.exception("%s failed", name)
        reason = reason_of(error)
    if reason:
        sys.stderr.write(f"{name}: {reason}\n")
    _leave(status)


def _leave(status: int) -> NoReturn:
    """Exit without waiting for threads that may hang or for libraries' exit handlers."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def _serve(name: str, app: AbstractAsyncContextManager[App], drain_s: float, telemetry: Telemetry) -> str | None:
    """Return the name of what failed, or None."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    up = False

    def on_signal(number: signal.Signals) -> None:
        if not up:
            logger.info("%s was told to stop while it started", name)
            _leave(128 + number)
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    usual = gc.get_threshold()
    gc.set_threshold(_ALLOCATIONS_WHILE_STARTING)
    async with telemetry.running(), app as running:
        up = True
        telemetry.ready_when(running.missing)
        # Exclude startup's long-lived objects from garbage collection, whose pauses are noticeable.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*usual)
        logger.info("%s is up", name)
        failure = await _until_stopped(stop, running)
        if failure is not None:
            logger.critical("%s ends: %s has failed", name, failure)
        logger.info("%s drains for up to %.0f s", name, drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s), asyncio.TaskGroup() as group:
                drained = group.create_task(running.drain())
                hurried = group.create_task(hurry.wait())
                await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
                drained.cancel()
                hurried.cancel()
    logger.info("%s is down", name)
    return failure


async def _until_stopped(stop: asyncio.Event, app: App) -> str | None:
    async with asyncio.TaskGroup() as group:
        stopped, failed = group.create_task(stop.wait()), group.create_task(app.failed())
        await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        failure = failed.result() if failed.done() else None
        stopped.cancel()
        failed.cancel()
    return failure
