"""An event loop in its own thread, for synchronous callers."""

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from triptych.client import process

T = TypeVar("T")
_CANCEL_S = 5.0
"""Time that an interrupted caller waits for the cancelled work to clean up, seconds."""


class BackgroundLoop:
    """Event loop that runs coroutines for any thread. It ends with its last reference, or with the interpreter.

    All clients of a process share one (``shared``): gRPC polls for all event loops at once. A loop that ends while
    another runs may be sent events that it can no longer take.
    """

    _lock = threading.Lock()
    _current: "weakref.ref[BackgroundLoop] | None" = None

    @classmethod
    def forget(cls) -> None:
        """Forget the loop in a forked child: neither the parent's thread nor the owner of its lock exists here."""
        cls._lock, cls._current = threading.Lock(), None

    @classmethod
    def shared(cls) -> "BackgroundLoop":
        """The running loop, or a new one."""
        with cls._lock:
            running = None if cls._current is None else cls._current()
            if running is None:
                running = cls()
                cls._current = weakref.ref(running)
            return running

    def __init__(self) -> None:
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        thread = threading.Thread(target=asyncio.run, args=(_serve(started),), name="triptych-client", daemon=True)
        thread.start()
        self._loop, stop = started.result()
        self._pid = os.getpid()
        weakref.finalize(self, _end, self._pid, thread, self._loop, stop)

    @property
    def is_here(self) -> bool:
        """Whether the thread belongs to this process."""
        return self._pid == os.getpid()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine's result. An interrupted wait (Ctrl-C) cancels the work first.

        Raises InvalidRequest in a process that was forked from the thread's.
        """
        if not self.is_here:
            work.close()
            raise process.forked()
        tasks: list[asyncio.Task[T]] = []
        done = threading.Event()

        def start() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(lambda _: done.set())

        def cancel() -> None:
            for task in tasks:  # set by now: the loop runs callbacks in order
                task.cancel()

        self._loop.call_soon_threadsafe(start)
        try:
            done.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(cancel)
            done.wait(_CANCEL_S)
            raise
        return tasks[0].result()


async def _serve(started: "Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]") -> None:
    stop = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), stop))
    await stop.wait()


os.register_at_fork(after_in_child=BackgroundLoop.forget)


def _end(pid: int, thread: threading.Thread, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    if pid != os.getpid():
        return
    loop.call_soon_threadsafe(stop.set)
    if threading.current_thread() is not thread:
        thread.join(_CANCEL_S)
