"""An encoder as queues: items are prepared on cores in the order in which they come, and encoded in batches."""

from collections.abc import Callable, Sequence
from heapq import heapreplace

from triptych.domain.queue_position import QueuePosition
from triptych.machine.encoder.batch_queue import MOST_BATCH_TOKENS
from triptych.policy.costs import Costs
from triptych.policy.iteration import ImageBudget
from triptych.policy.queueing import batch_length
from triptych.services.encoder.settings import EncoderSettings

from ..agenda import Agenda  # noqa: TID252 - of the simulator
from ..engines import Activity, EncoderTimes  # noqa: TID252
from .line import Line
from .request import Item


class QueueEncoder:
    """Owner of the items at one encoder."""

    def __init__(
        self,
        settings: EncoderSettings,
        costs: Costs,
        agenda: Agenda,
        activity: Activity,
        *,
        cores: int,
        bytes_per_pixel: float,
    ) -> None:
        self.encoded: Callable[[Item], None]
        """Called for each item whose embedding is there. Its router sets it."""
        self._limits = settings.batches
        self._agenda = agenda
        self._activity = activity
        self._times = EncoderTimes(costs, bytes_per_pixel)
        self.on_ready: Callable[[], None] = self._wake
        """Called when another item can be encoded. Of an instance that has a batch of text as well, its loop calls ``encode_batch``."""
        self.items = 0
        """That have come and are not encoded."""
        self._free_s = [0.0] * cores
        """When each core is free, as a heap."""
        self._line: Line[Item] = Line()
        self._since_s: dict[Item, float] = {}
        """Since when each item waits that is prepared, in that order."""
        self._is_busy = self._is_woken = False

    def take(self, item: Item, at_s: float) -> None:
        """An item comes at this time."""
        self.items += 1
        pixels = item.size.pixels
        took_s = self._times.prepare_s(pixels)
        start_s = max(at_s, self._free_s[0])
        heapreplace(self._free_s, start_s + took_s)
        self._activity.did("prepare", start_s, start_s + took_s, pixels)
        self._agenda.at(start_s + took_s, self._prepared, item)

    def leave(self, item: Item) -> None:
        """Its request is over."""
        if self._line.remove(item):
            del self._since_s[item]
            self.items -= 1

    def _prepared(self, item: Item) -> None:
        if item.request.is_over:
            self.items -= 1
            return
        now_s = self._agenda.now_s
        self._line.add(item, now_s)
        self._since_s[item] = now_s
        self.on_ready()

    @property
    def waiting_since_s(self) -> float | None:
        """Since when the first prepared item waits; None if there is none."""
        return next(iter(self._since_s.values()), None)

    @property
    def first_position(self) -> QueuePosition | None:
        """Of the prepared item that is encoded next; None if there is none."""
        now_s = self._agenda.now_s
        item = self._line.first(now_s)
        return None if item is None else item.position.at(now_s)

    def _wake(self) -> None:
        if not (self._is_busy or self._is_woken):
            self._is_woken = True
            self._agenda.soon(self._run)

    def _run(self) -> None:
        self._is_woken = False
        self._is_busy = self.encode_batch(self._run)

    def encode_batch(self, then: Callable[[], None], budget: ImageBudget | None = None) -> bool:
        """Encode one batch within ``budget``, and call ``then`` when it is done. False if there is none."""
        limits, now_s, line = self._limits, self._agenda.now_s, self._line
        batch: list[Item] = []
        while len(batch) < limits.max_batch_items and (item := line.pop(now_s)) is not None:
            batch.append(item)
        if not batch:
            return False
        max_tokens = limits.max_batch_tokens or MOST_BATCH_TOKENS
        length = batch_length(
            [(item.size.embedding_tokens, item.size.prepared_nbytes) for item in batch],
            max_items=limits.max_batch_items,
            max_tokens=min(max_tokens, budget.tokens) if budget else max_tokens,
            max_nbytes=min(limits.max_batch_bytes, budget.nbytes) if budget else limits.max_batch_bytes,
        )
        for item in batch[length:]:
            line.add(item, now_s)
        del batch[length:]
        for item in batch:
            del self._since_s[item]
        took_s = self._times.encode_s([item.size.embedding_tokens for item in batch])
        self._activity.did("encode", now_s, now_s + took_s, length)
        self._agenda.after(took_s, self._done, batch, then)
        return True

    def _done(self, batch: Sequence[Item], then: Callable[[], None]) -> None:
        self.items -= len(batch)
        for item in batch:
            if not item.request.is_over:
                self.encoded(item)
        then()
