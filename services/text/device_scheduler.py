"""The stages that share the engine's thread, where an instance encodes as well: who has it next, and for how much.

What is next is decided by ``triptych.policy.iteration``; the engine's loop asks before each of its iterations.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from triptych.policy.iteration import ImageBudget, Iteration, plan_iteration
from triptych.ports import Clock, EngineOutput, StagedTextEngine


class VisionEncoder(Protocol):
    """Items that wait to be encoded, and what encodes them. It works in its turns only."""

    @property
    def waiting_since_s(self) -> float | None:
        """When the first of them began to wait, on the clock; None where none waits."""
        ...

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` from now on when one more waits."""
        ...

    async def turn(self, budget: ImageBudget | None = None) -> bool:
        """Encode one batch within the budget; whether there was one. Tells those who wait when it fails."""
        ...


@dataclass(slots=True)
class DeviceScheduler:
    """Belongs to the engine's loop; ``prefill_ready`` and ``step`` to the engine's thread."""

    engine: StagedTextEngine
    tower: VisionEncoder
    budget: ImageBudget | None
    """Of one turn of the vision encoder; None for no other bounds than its own."""
    patience_s: float
    """After so long an item goes before prompts."""
    clock: Clock
    _held_back: bool = field(init=False, default=False)

    @property
    def encode_ready(self) -> bool:
        """Whether an item waits for the vision encoder."""
        return self.tower.waiting_since_s is not None

    def next(self, *, prefill_ready: bool) -> Iteration:
        """What the next iteration does beside decodes; to be asked once for each."""
        since_s = self.tower.waiting_since_s
        iteration = plan_iteration(
            prefill_ready=prefill_ready,
            encode_waited_s=None if since_s is None else self.clock() - since_s,
            patience_s=self.patience_s,
            held_back=self._held_back,
        )
        self._held_back = prefill_ready and not iteration.prefill
        return iteration

    async def encode(self) -> None:
        """The vision encoder's share of an iteration."""
        await self.tower.turn(self.budget)

    def step(self, iteration: Iteration) -> list[EngineOutput]:
        """The engine's share."""
        return self.engine.step() if iteration.prefill else self.engine.decode_step()
