"""The world that a service lives in: time, randomness, threads and tasks. Real in a process, virtual in a simulation."""

import random
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from triptych.ports import Clock, Offload, Rng
from triptych.runtime.clock import monotonic
from triptych.runtime.offload import ThreadOffload
from triptych.runtime.tasks import TaskScope


class Threads(Protocol):
    """Makes pools of threads, which end with the world."""

    def __call__(self, workers: int, *, name: str, starting: Callable[[], None] | None = None) -> Offload:
        """As ``ThreadOffload``."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """The world of one process. A service takes all that is not decided by its settings from here, or as a parameter of its ``build``."""

    name: str
    """Name of the process, unique in the cluster: an instance's id."""
    epoch: int
    """Rises with each start under this name."""
    clock: Clock
    """Seconds, monotonic."""
    rng: Rng
    """Makes lease ids, which are secrets: it must be unpredictable where others are not trusted."""
    threads: Threads
    scope: TaskScope
    """Owns the tasks of the process."""


@asynccontextmanager
async def real_world(kind: str, name: str, epoch: int) -> AsyncGenerator[World]:
    """The world of this process, whose tasks and then threads end with the context. ``kind``: of service, for the names of tasks."""
    async with AsyncExitStack() as stack:

        def threads(workers: int, *, name: str, starting: Callable[[], None] | None = None) -> Offload:
            pool = ThreadOffload(workers, name=name, starting=starting)
            stack.callback(pool.close)
            return pool

        async with TaskScope(kind) as scope:
            yield World(name, epoch, monotonic, random.SystemRandom(), threads, scope)
