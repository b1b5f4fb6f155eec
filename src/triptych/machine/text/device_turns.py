"""Whose turn it is on a device that a text engine and an encoder share. ``policy.iteration`` decides; this remembers what it is asked with."""

from dataclasses import dataclass, field

from triptych.domain.queue_position import QueuePosition
from triptych.policy.iteration import Iteration, by_queue_position, encode_first, plan_iteration


@dataclass(slots=True)
class DeviceTurns:
    """Owner of which stage runs next."""

    patience_s: float
    """After this wait an item goes before prompts; or prompts before items, where these go first."""
    by_queue_position: bool = False
    """Whether both stages go in the order in which they are due: nothing is decoded (role EP)."""
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

    def next(
        self,
        now_s: float,
        *,
        prompt: QueuePosition | None,
        can_step: bool,
        item: QueuePosition | None,
        item_waits_since_s: float | None,
    ) -> Iteration:
        """Choose what the next iteration does besides decodes. Call it once per iteration.

        ``prompt`` and ``item`` are the first that could be computed, and ``can_step`` tells whether there are prompts or answers at all;
        None if there are none. ``item`` is asked for with ``by_queue_position`` only.
        """
        if self.encode_first:
            return self._encode_first(
                now_s, prefill_ready=prompt is not None, encode_ready=item_waits_since_s is not None
            )
        if self.by_queue_position:
            return by_queue_position(prompt=prompt, item=item)
        if can_step and self._owed_s > 0:
            self._held_back = False
            return Iteration(prefill=True, encode=False)
        prefill_ready = prompt is not None
        iteration = plan_iteration(
            prefill_ready=prefill_ready,
            encode_waited_s=None if item_waits_since_s is None else now_s - item_waits_since_s,
            patience_s=self.patience_s,
            held_back=self._held_back,
        )
        self._held_back = prefill_ready and not iteration.prefill
        return iteration

    def _encode_first(self, now_s: float, *, prefill_ready: bool, encode_ready: bool) -> Iteration:
        since_s = self._held_back_since_s
        iteration = encode_first(
            encode_ready=encode_ready,
            held_back_s=None if since_s is None or not prefill_ready else now_s - since_s,
            patience_s=self.patience_s,
        )
        if iteration.prefill or not prefill_ready:
            self._held_back_since_s = None
        elif since_s is None:
            self._held_back_since_s = now_s
        return iteration

    def encoded(self, took_s: float) -> None:
        """A batch of the encoder has taken so long."""
        self._owed_s = took_s * (1 / self.encode_share - 1)

    def stepped(self, took_s: float) -> None:
        """Steps of the text engine have taken so long."""
        self._owed_s -= took_s
