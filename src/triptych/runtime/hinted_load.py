"""Load reports with hints of the embeddings that the instance holds."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from triptych.domain.instance import InstanceLoad
from triptych.machine.arena.published import HintReader
from triptych.runtime.watched_value import WatchedValue


async def watch_with_hints(load: WatchedValue[InstanceLoad], hints: HintReader) -> AsyncGenerator[InstanceLoad]:
    """The load as ``load.watch``, for one watcher, which ``hints`` is for."""
    async with aclosing(load.watch(more=hints.is_behind)) as loads:
        async for current in loads:
            report = hints.report()
            yield current if report is None else replace(current, hints=report)
