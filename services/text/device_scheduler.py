"""Schedules the engine's thread between text engine and encoder, if the instance also encodes.

``machine.text.device_turns`` remembers whose turn it is; the engine loop asks before each iteration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from triptych.domain.engine import EngineOutput
from triptych.domain.queue_position import QueuePosition
from triptych.domain.stage import Stage
from triptych.machine.text.device_turns import DeviceTurns
from triptych.policy.iteration import ImageBudget, Iteration
from triptych.ports import Clock, DeviceSharing

from .settings import TextSettings


class VisionEncoder(Protocol):
    """The encoder and its queue. It computes only in ``encode_batch``."""

    @property
    def waiting_since_s(self) -> float | None:
        """Since when the first item waits, on the clock; None if there is none."""
        ...

    @property
    def first_queue_position(self) -> QueuePosition | None:
        """Of the item that is encoded next; None if there is none."""
        ...

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever another item is ready."""
        ...

    async def encode_batch(self, budget: ImageBudget | None = None) -> bool:
        """Encode one batch within the budget. Returns whether there was one. Reports errors to the items' callers."""
        ...


def turns_of(settings: TextSettings, budget: ImageBudget | None) -> DeviceTurns:
    """``budget``: of one batch of the encoder; None for only its own limits."""
    return DeviceTurns(
        settings.encode_patience_s,
        by_queue_position=not settings.widest.serves(Stage.DECODE),
        encode_first=settings.encode_first,
        encode_share=settings.encode_share if budget is None else 1.0,
    )


@dataclass(frozen=True, slots=True)
class DeviceScheduler:
    """Asks whose turn it is (``turns``), and runs the encoder's part of an iteration and the engine's.

    Used by the engine loop; ``step`` in the engine's thread.
    """

    engine: DeviceSharing
    vision_encoder: VisionEncoder
    budget: ImageBudget | None
    """Limit of one batch of the encoder; None for only its own limits."""
    turns: DeviceTurns
    clock: Clock

    @property
    def encode_ready(self) -> bool:
        """Whether an item waits to be encoded."""
        return self.vision_encoder.waiting_since_s is not None

    def next(self, *, prefill_queue_position: QueuePosition | None, can_step: bool) -> Iteration:
        """Choose what the next iteration does besides decodes. Call it once per iteration, with the engine's ``prefill_queue_position`` and ``can_step``."""
        return self.turns.next(
            self.clock(),
            prompt=prefill_queue_position,
            can_step=can_step,
            item=self.vision_encoder.first_queue_position if self.turns.by_queue_position else None,
            item_waits_since_s=self.vision_encoder.waiting_since_s,
        )

    async def encode(self) -> None:
        """Run the encoder's part of an iteration."""
        began_s = self.clock()
        await self.vision_encoder.encode_batch(self.budget)
        self.turns.encoded(self.clock() - began_s)

    def step(self, iteration: Iteration) -> list[EngineOutput]:
        """Run the engine's part."""
        began_s = self.clock()
        try:
            return self.engine.step() if iteration.prefill else self.engine.decode_step()
        finally:
            self.turns.stepped(self.clock() - began_s)
