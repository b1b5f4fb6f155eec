"""The world of one of several processes that run in this one, under virtual time."""

import asyncio
from collections.abc import Callable
from random import Random

from triptych.ports import Clock, Rng
from triptych.runtime.tasks import TaskScope
from triptych.runtime.world import World
from triptych.virtual.offload import InlineOffload


def virtual_world(
    name: str, epoch: int = 1, *, rng: Rng | None = None, scope: TaskScope | None = None, clock: Clock | None = None
) -> World:
    """``clock``: by default the loop's. Whoever makes a world closes its scope."""
    return World(
        name,
        epoch,
        clock or asyncio.get_running_loop().time,
        rng or Random(f"{name}.{epoch}"),  # noqa: S311
        inline_threads,
        TaskScope(name) if scope is None else scope,  # an empty one is false
    )


def inline_threads(workers: int, *, name: str, starting: Callable[[], None] | None = None) -> InlineOffload:
    """``runtime.world.Threads``."""
    del name, starting
    return InlineOffload(workers)
