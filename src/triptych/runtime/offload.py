"""Runs blocking work in a bounded pool of threads, off the event loop."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

T = TypeVar("T")


class ThreadOffload:
    """``ports.Offload`` over ``workers`` threads of its own.

    When a caller is cancelled, its work still runs to the end. The number of waiting calls is bounded by the callers'
    admission, not here.
    """

    def __init__(self, workers: int, *, name: str, starting: Callable[[], None] | None = None) -> None:
        """``starting`` is called by each thread as it starts."""
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix=name, initializer=starting)

    async def run(self, fn: Callable[..., T], /, *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, fn, *args)

    def close(self) -> None:
        """Drop work that has not started. Running work continues until it or the process ends."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Stop:
    """``ports.StopSignal`` for work in a thread. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._calls: list[Callable[[], object]] = []
        self.stopped = False
        """For reading."""

    def stop(self) -> None:
        """The registered calls are short, so this may run on an event loop."""
        with self._lock:
            self.stopped = True
            while self._calls:
                self._calls.pop()()

    @contextmanager
    def on_stop(self, call: Callable[[], object]) -> Iterator[None]:
        with self._lock:
            if self.stopped:
                call()
            else:
                self._calls.append(call)
        try:
            yield
        finally:
            with self._lock:
                if call in self._calls:
                    self._calls.remove(call)
