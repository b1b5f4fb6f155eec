"""Weight offloading: which parts of the model are in memory, of an instance that has only those in memory that its open stages need.

Parts are loaded and unloaded in a thread of their own, one after the other, while the engine's thread goes on with the other part.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from prometheus_client.core import Metric

from triptych.domain.stage import ModelPart, Stage
from triptych.errors import TriptychError
from triptych.ports import Clock, Offload, UnloadableWeights
from triptych.runtime.metrics import gauge
from triptych.runtime.process import CannotStart

logger = logging.getLogger(__name__)

PART_OF: Mapping[Stage, ModelPart] = {
    Stage.ENCODE: ModelPart.ENCODER,
    Stage.PREFILL: ModelPart.DECODER,
    Stage.DECODE: ModelPart.DECODER,
}
"""The part of the model that each stage needs."""


def parts_of(stages: Iterable[Stage]) -> frozenset[ModelPart]:
    return frozenset(PART_OF[stage] for stage in stages)


async def _at_once(call: Callable[[], None]) -> None:
    call()


@dataclass(frozen=True, slots=True)
class Unloadable:
    """A part that can leave the memory."""

    weights: UnloadableWeights
    call: Callable[[Callable[[], None]], Awaitable[None]] = _at_once
    """Calls ``before_unload`` and ``after_load`` in the thread that computes with the part."""


class WeightOffloading:
    """Owner of which parts of the model are in memory.

    ``run`` loads those that are needed, and unloads the others; ``need`` may be called at any time.
    """

    def __init__(self, *, thread: Offload, clock: Clock) -> None:
        """``thread`` runs one call at a time."""
        self._clock = clock
        self._after_load_s: dict[ModelPart, float] = {}
        """Of the last time."""
        self._parts: dict[ModelPart, Unloadable] = {}
        self._thread = thread
        self._needed: AbstractSet[ModelPart] = frozenset()
        self._changed = asyncio.Event()
        self._on_change: Callable[[ModelPart, TriptychError | None], None] = lambda *_: None
        self._leaving: ModelPart | None = None
        """Is being unloaded."""
        self._kept: set[ModelPart] = set()
        """Not needed, and not to be unloaded: that has failed."""

    def add(self, part: ModelPart, unloadable: Unloadable) -> None:
        """Before ``settle`` or ``run``."""
        self._parts[part] = unloadable

    def on_change(self, listener: Callable[[ModelPart, TriptychError | None], None]) -> None:
        """Call ``listener`` when a part is loaded or unloaded, and with the error when it cannot be loaded: then it must not be needed any
        more when the call returns.
        """
        self._on_change = listener

    def has(self, part: ModelPart) -> bool:
        """Whether the part is in memory, and stays there if it is needed."""
        return self._parts[part].weights.resident and part is not self._leaving

    def opens_s(self, stage: Stage) -> float:
        """How long it would take until what the stage needs is in memory."""
        part = PART_OF[stage]
        weights = self._parts[part].weights
        return 0.0 if weights.resident else weights.load_s + self._after_load_s.get(part, 0.0)

    def need(self, parts: AbstractSet[ModelPart]) -> None:
        """Have these parts in memory, and no others. One that is being unloaded is loaded again."""
        if parts != self._needed:
            self._needed = parts
            self._kept.clear()
            self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._changed.clear()
            await self.settle()
            await self._changed.wait()

    async def settle(self) -> None:
        """Until all is as needed. Parts are unloaded before others are loaded, which may need their memory."""
        while (part := self._next()) is not None:
            if part in self._needed:
                await self._load(part)
            else:
                await self._unload(part)

    def _next(self) -> ModelPart | None:
        """Choose what to unload, else what to load."""
        resident = {part for part, unloadable in self._parts.items() if unloadable.weights.resident}
        leaving = (part for part in self._parts if part in resident - self._needed - self._kept)
        coming = (part for part in self._parts if part in self._needed - resident)
        return next(leaving, next(coming, None))

    async def _load(self, part: ModelPart) -> None:
        unloadable = self._parts[part]
        try:
            await self._thread.run(unloadable.weights.load)
            began_s = self._clock()
            await unloadable.call(unloadable.weights.after_load)
            self._after_load_s[part] = self._clock() - began_s
        except TriptychError as error:
            logger.warning("the %s is not loaded: %s", part.value, error.message)
            self._on_change(part, error)
            if part in self._needed:
                raise
            return
        logger.info(
            "the %s is loaded: %d bytes within %.3f s", part.value, unloadable.weights.nbytes, unloadable.weights.load_s
        )
        self._on_change(part, None)

    async def _unload(self, part: ModelPart) -> None:
        unloadable = self._parts[part]
        try:
            await unloadable.call(unloadable.weights.before_unload)
        except TriptychError as error:
            logger.warning("the %s stays in memory: %s", part.value, error.message)
            self._kept.add(part)
            return
        if part in self._needed:
            return
        self._leaving = part
        await self._thread.run(unloadable.weights.unload)
        self._leaving = None
        logger.info("the %s is unloaded: %d bytes", part.value, unloadable.weights.nbytes)
        self._on_change(part, None)

    def metrics(self) -> Iterable[Metric]:
        """Read at every scrape."""
        resident: dict[tuple[str, ...], float] = {
            (part.value,): unloadable.weights.nbytes if unloadable.weights.resident else 0
            for part, unloadable in self._parts.items()
        }
        yield gauge("triptych_resident_weight_bytes", "Weights of the part in memory", resident, ("part",))


def checked_weights(weights: UnloadableWeights | None) -> UnloadableWeights:
    """Raises CannotStart where an engine's always stay in memory."""
    if weights is None:
        raise CannotStart("resident=role needs engines whose weights can be unloaded")
    return weights
