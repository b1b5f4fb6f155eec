"""The world of one of several processes that run in this one, under virtual time."""

import asyncio
from collections.abc import Callable
from random import Random

from triptych.ports import Clock, Rng
from triptych.runtime.tasks import TaskScope
from triptych.runtime.world import World
from triptych.virtual.offload import InlineOffload, billed_s


def virtual_world(
    name: str, epoch: int = 1, *, rng: Rng | None = None, scope: TaskScope | None = None, clock: Clock | None = None
) -> World:
    """``clock``: by default the loop's; within a piece of work, with what that has taken so far. Whoever makes a world closes its scope."""
    return World(
        name,
        epoch,
        clock or _working_clock(asyncio.get_running_loop().time),
        rng or Random(f"{name}.{epoch}"),  # noqa: S311
        inline_threads,
        TaskScope(name) if scope is None else scope,  # an empty one is false
    )


def _working_clock(now_s: Clock) -> Clock:
    return lambda: now_s() + billed_s()


def inline_threads(workers: int, *, name: str, starting: Callable[[], None] | None = None) -> InlineOffload:
    """``runtime.world.Threads``."""
    del name, starting
    return InlineOffload(workers)
