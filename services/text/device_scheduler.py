"""Schedules the engine's thread between text engine and encoder, if the instance also encodes.

``triptych.policy.iteration`` decides; the engine loop asks before each iteration.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from triptych.domain.engine import EngineOutput
from triptych.domain.queue_position import QueuePosition
from triptych.policy.iteration import ImageBudget, Iteration, by_queue_position, encode_first, plan_iteration
from triptych.ports import Clock, DeviceSharing


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


@dataclass(slots=True)
class DeviceScheduler:
    """Owner of which stage runs next on a device that stages share.

    Used by the engine loop; ``step`` in the engine's thread.
    """

    engine: DeviceSharing
    vision_encoder: VisionEncoder
    budget: ImageBudget | None
    """Limit of one batch of the encoder; None for only its own limits."""
    patience_s: float
    """After this wait an item goes before prompts; or prompts before items, where these go first."""
    clock: Clock
    by_queue_position: bool = False
    """Both stages go in the order in which they are due: nothing is decoded (role EP)."""
    encode_first: bool = False
    """Items go before prompts, whatever the role, and before the decodes of their iteration."""
    encode_share: float = 1.0
    """Where prompts and answers can be computed, items take at most this share of the time; 1 does not bound it. Without a budget, one batch
    may take longer than many steps.
    """
    _owed_s: float = field(init=False, default=0.0)
    """What steps are to take before the next batch."""
    _held_back: bool = field(init=False, default=False)
    _held_back_since_s: float | None = field(init=False, default=None)
    """Since when items go before a prompt that could be computed."""

    @property
    def encode_ready(self) -> bool:
        """Whether an item waits to be encoded."""
        return self.vision_encoder.waiting_since_s is not None

    def next(self, *, prefill_queue_position: QueuePosition | None, can_step: bool) -> Iteration:
        """What the next iteration does besides decodes. Call it once per iteration, with the engine's ``prefill_queue_position`` and ``can_step``."""
        if self.encode_first:
            return self._encode_first(prefill_ready=prefill_queue_position is not None)
        if self.by_queue_position:
            return by_queue_position(prompt=prefill_queue_position, item=self.vision_encoder.first_queue_position)
        if can_step and self._owed_s > 0:
            self._held_back = False
            return Iteration(prefill=True, encode=False)
        prefill_ready = prefill_queue_position is not None
        since_s = self.vision_encoder.waiting_since_s
        iteration = plan_iteration(
            prefill_ready=prefill_ready,
            encode_waited_s=None if since_s is None else self.clock() - since_s,
            patience_s=self.patience_s,
            held_back=self._held_back,
        )
        self._held_back = prefill_ready and not iteration.prefill
        return iteration

    def _encode_first(self, *, prefill_ready: bool) -> Iteration:
        now_s, since_s = self.clock(), self._held_back_since_s
        iteration = encode_first(
            encode_ready=self.encode_ready,
            held_back_s=None if since_s is None or not prefill_ready else now_s - since_s,
            patience_s=self.patience_s,
        )
        if iteration.prefill or not prefill_ready:
            self._held_back_since_s = None
        elif since_s is None:
            self._held_back_since_s = now_s
        return iteration

    async def encode(self) -> None:
        """Run the encoder's part of an iteration."""
        began_s = self.clock()
        await self.vision_encoder.encode_batch(self.budget)
        self._owed_s = (self.clock() - began_s) * (1 / self.encode_share - 1)

    def step(self, iteration: Iteration) -> list[EngineOutput]:
        """Run the engine's part."""
        began_s = self.clock()
        try:
            return self.engine.step() if iteration.prefill else self.engine.decode_step()
        finally:
            self._owed_s -= self.clock() - began_s
