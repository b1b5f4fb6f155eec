"""An encoder's queue: which items wait, are being prepared or encoded, and which callers want them.

Equal items (same embedding key) share one entry with several waiters, so each is encoded once. An entry exists from its
first ``Arrive`` to ``Done``:


    Arrive -> ARRIVED -> PREPARING -- Prepared -> WAITING -- Take -> ENCODING -- Done -> gone

Both preparing and encoding follow the order of ``policy.queueing``; an item has the queue position of its most urgent waiter.
Entries and bytes are limited: a full queue refuses and never blocks. Decoding a video or audio clip may take minutes, so
a share of entries, bytes and threads is reserved for images. An entry without waiters is dropped at once while
it waits; while a thread works on it, its memory is in use, so it is dropped when the thread is done.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import Annotated

from triptych.domain.bounds import Between
from triptych.domain.limits import Positive, check_limits
from triptych.domain.media import Modality
from triptych.domain.queue_position import BY_TIME_LIMIT, QueuePosition, RelativeQueuePosition
from triptych.domain.record import record
from triptych.policy.iteration import ImageBudget
from triptych.policy.queueing import as_called, batch_length, longest_waits

MOST_BATCH_TOKENS = 2048
"""Embedding tokens of one pass, where nothing else is said."""

Key = bytes
"""Full digest of an embedding's identity."""


class Phase(Enum):
    ARRIVED = "arrived"
    PREPARING = "preparing"
    WAITING = "waiting"
    ENCODING = "encoding"


# --- events ----------------------------------------------------------------------------------------------------------


@record
class Arrive:
    """A caller (``waiter``) wants an item until ``deadline_s``; ``nbytes`` is the peak memory of preparing it."""

    key: Key
    waiter: int
    tokens: int
    nbytes: int
    deadline_s: float
    priority: int = 0
    modality: Modality = Modality.IMAGE
    position: RelativeQueuePosition = BY_TIME_LIMIT


@record
class ItemPrepared:
    """Preprocessing is done and memory for the embedding is reserved; from now on the item takes ``nbytes``."""

    key: Key
    tokens: int
    nbytes: int


@record
class CallerLeft:
    """A caller left, or has its answer."""

    key: Key
    waiter: int


@record
class Take:
    """The encoder is free and takes the next batch, within ``budget`` if given."""

    budget: ImageBudget | None = None


@record
class Done:
    """The item is no longer being worked on, whether it succeeded or not."""

    key: Key


Event = Arrive | ItemPrepared | CallerLeft | Take | Done

# --- effects ---------------------------------------------------------------------------------------------------------


@record
class StartPreparing:
    key: Key


@record
class RefuseCaller:
    """The caller is refused, and there is no entry. ``fits`` tells whether the item could ever be accepted."""

    key: Key
    fits: bool
    reason: str


@record
class Drop:
    """The entry ends without an embedding: release its reservation and answer its remaining waiters."""

    key: Key
    expired: bool
    reason: str


@record
class EncodeBatch:
    """Encode these items as one batch, in this order."""

    keys: tuple[Key, ...]


Effect = StartPreparing | RefuseCaller | Drop | EncodeBatch


@dataclass(slots=True)
class _Entry:
    tokens: int
    nbytes: int
    modality: Modality
    phase: Phase = Phase.ARRIVED
    waiters: dict[int, "_Waiter"] = field(default_factory=dict)

    def queue_position(self, now_s: float) -> QueuePosition:
        return min(waiter.queue_position.at(now_s) for waiter in self.waiters.values())

    def expired(self, now_s: float) -> bool:
        return all(waiter.deadline_s <= now_s for waiter in self.waiters.values())


@record
class _Waiter:
    queue_position: QueuePosition
    arrived_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class BatchLimits:
    max_waiting_items: Positive = 256
    """Most items that are prepared, wait, or are encoded at the same time; one more is refused."""
    max_prepared_bytes: Positive = 1 << 30
    """Most memory of these items together, decoded and preprocessed."""
    reserved_image_share: Annotated[float, Between(0, 0.9)] = 0.25
    """Share of these items and bytes, and of the threads that prepare, that videos and audio never take."""
    max_batch_items: Positive = 8
    """Most items in one pass of the encoder."""
    max_batch_tokens: Positive | None = None
    """Most embedding tokens in one pass of the encoder; a larger item runs alone. All items of a pass are done at its end, and
    what is due earlier waits until then. Empty: on a CPU as many as are encoded faster together, measured at start; else 2048."""
    max_batch_bytes: Positive = 256 << 20
    """Most bytes of preprocessed items (pixels, features) in one pass of the encoder; a larger item runs alone."""

    def __post_init__(self) -> None:
        check_limits(self)

    def without_image_share(self, limit: int) -> int:
        """What videos and audio together may take of a limit: at least 1."""
        return max(1, limit - ceil(self.reserved_image_share * limit))


class BatchQueue:
    """Owner of the items that wait for a batch or are in one.

    ``handle`` is the only mutator. ``now_s`` and deadlines use the same clock.
    """

    def __init__(self, limits: BatchLimits, *, max_preparing: int) -> None:
        """``max_preparing`` limits the entries in PREPARING."""
        self._limits = limits
        self._max_preparing = max_preparing
        self._entries: dict[Key, _Entry] = {}
        self._arrived: dict[Key, None] = {}
        """The ARRIVED entries, in that order."""
        self._queue: dict[Key, float] = {}
        """When each entry became WAITING, in that order."""
        self.pending_tokens = 0
        """Of all entries; kept, as load is asked for often and many may wait."""
        self.nbytes = 0
        """Of all entries; kept likewise."""
        self._arrivals = 0

    @property
    def pending_items(self) -> int:
        return len(self._entries)

    @property
    def waiting_since_s(self) -> float | None:
        """Since when the first WAITING entry waits; None if there is none."""
        return next(iter(self._queue.values()), None)

    @property
    def unbegun(self) -> list[Key]:
        """The entries that are in no batch."""
        return [key for key, entry in self._entries.items() if entry.phase is not Phase.ENCODING]

    def first_queue_position(self, now_s: float) -> QueuePosition | None:
        """Of the WAITING entry that is taken next; None if there is none."""
        return min((self._entries[key].queue_position(now_s) for key in self._queue), default=None)

    def longest_waits_s(self, now_s: float) -> dict[int, float]:
        """By priority, the longest wait of a caller for an item that is not being encoded."""
        entries = (entry for entry in self._entries.values() if entry.phase is not Phase.ENCODING)
        waiters = (waiter for entry in entries for waiter in entry.waiters.values())
        return longest_waits((waiter.queue_position.priority, now_s - waiter.arrived_s) for waiter in waiters)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case Arrive():
                effects = self._arrive(event, now_s)
            case ItemPrepared():
                effects = self._prepared(event, now_s)
            case CallerLeft():
                effects = self._leave(event)
            case Take(budget):
                effects = self._take(budget, now_s)
            case Done(key):
                self._forget(key)
                effects = []
        return effects + self._start_preparing(now_s) if self._arrived else effects

    def _arrive(self, event: Arrive, now_s: float) -> list[Effect]:
        waits = as_called(
            priority=event.priority,
            deadline_s=event.deadline_s,
            arrived_s=now_s,
            arrival=self._arrivals,
            position=event.position,
        )
        self._arrivals += 1
        waiter = _Waiter(waits, now_s, event.deadline_s)
        if (entry := self._entries.get(event.key)) is not None:
            entry.waiters[event.waiter] = waiter
            return []
        most = self._limit_of(self._limits.max_prepared_bytes, event.modality)
        if event.nbytes > most:
            reason = f"the item takes {event.nbytes} bytes to prepare, the limit is {most}"
            return [RefuseCaller(event.key, fits=False, reason=reason)]
        if (full := self._why_full(event.nbytes, event.modality)) is not None:
            return [RefuseCaller(event.key, fits=True, reason=full)]
        self._entries[event.key] = _Entry(event.tokens, event.nbytes, event.modality, waiters={event.waiter: waiter})
        self._arrived[event.key] = None
        self.pending_tokens += event.tokens
        self.nbytes += event.nbytes
        return []

    def _limit_of(self, limit: int, modality: Modality) -> int:
        return limit if modality is Modality.IMAGE else self._limits.without_image_share(limit)

    def _why_full(self, nbytes: int, modality: Modality, own: _Entry | None = None) -> str | None:
        """Why an item of ``nbytes`` has no room beside the other entries than its ``own``; None if it has."""
        items, taken, limits = len(self._entries), self.nbytes, self._limits
        if own is not None:
            items, taken = items - 1, taken - own.nbytes
        full = _why_full("items", nbytes, items, taken, limits.max_waiting_items, limits.max_prepared_bytes)
        if full is not None or modality is Modality.IMAGE:
            return full
        clips = [entry for entry in self._entries.values() if entry is not own and entry.modality is not Modality.IMAGE]
        max_items, most = map(limits.without_image_share, (limits.max_waiting_items, limits.max_prepared_bytes))
        taken = sum(entry.nbytes for entry in clips)
        return _why_full("videos and audio clips", nbytes, len(clips), taken, max_items, most)

    def _start_preparing(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        preparing = self._preparing
        for key in self._in_order(self._arrived, now_s):
            entry = self._entries[key]
            if self._is_thread_free(entry.modality, preparing):
                del self._arrived[key]
                entry.phase = Phase.PREPARING
                preparing.append(entry.modality)
                effects.append(StartPreparing(key))
        return effects

    def _in_order(self, keys: Iterable[Key], now_s: float) -> list[Key]:
        """The keys by the queue positions of their entries."""
        return sorted(keys, key=lambda key: (self._entries[key].queue_position(now_s), key))

    @property
    def _preparing(self) -> list[Modality]:
        return [entry.modality for entry in self._entries.values() if entry.phase is Phase.PREPARING]

    def _is_thread_free(self, modality: Modality, preparing: list[Modality]) -> bool:
        clips = len(preparing) - preparing.count(Modality.IMAGE)
        free = modality is Modality.IMAGE or clips < self._limit_of(self._max_preparing, modality)
        return free and len(preparing) < self._max_preparing

    def _prepared(self, event: ItemPrepared, now_s: float) -> list[Effect]:
        entry = self._entries[event.key]
        assert entry.phase is Phase.PREPARING, f"an item in phase {entry.phase.value} was prepared again"
        if not entry.waiters:
            self._forget(event.key)
            return [Drop(event.key, expired=False, reason="it has no waiters")]
        if (full := self._why_full(event.nbytes, entry.modality, entry)) is not None:
            self._forget(event.key)
            return [Drop(event.key, expired=False, reason=full)]
        self.pending_tokens += event.tokens - entry.tokens
        self.nbytes += event.nbytes - entry.nbytes
        entry.tokens, entry.nbytes, entry.phase = event.tokens, event.nbytes, Phase.WAITING
        self._queue[event.key] = now_s
        return []

    def _leave(self, event: CallerLeft) -> list[Effect]:
        entry = self._entries.get(event.key)
        if entry is None:
            return []
        entry.waiters.pop(event.waiter, None)
        if entry.waiters or entry.phase not in (Phase.ARRIVED, Phase.WAITING):
            return []
        self._forget(event.key)
        return [Drop(event.key, expired=False, reason="it has no waiters")]

    def _take(self, budget: ImageBudget | None, now_s: float) -> list[Effect]:
        if not self._queue:
            return []
        limits = self._limits
        max_tokens = limits.max_batch_tokens or MOST_BATCH_TOKENS
        effects: list[Effect] = []
        for key in [key for key in self._queue if self._entries[key].expired(now_s)]:
            self._forget(key)
            effects.append(Drop(key, expired=True, reason="the time that its callers gave is over"))
        waiting = self._in_order(self._queue, now_s)
        count = batch_length(
            [(self._entries[key].tokens, self._entries[key].nbytes) for key in waiting],
            max_items=limits.max_batch_items,
            max_tokens=min(max_tokens, budget.tokens) if budget else max_tokens,
            max_nbytes=min(limits.max_batch_bytes, budget.nbytes) if budget else limits.max_batch_bytes,
        )
        for key in waiting[:count]:
            del self._queue[key]
            self._entries[key].phase = Phase.ENCODING
        if count:
            effects.append(EncodeBatch(tuple(waiting[:count])))
        return effects

    def _forget(self, key: Key) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self.pending_tokens -= entry.tokens
            self.nbytes -= entry.nbytes
        self._arrived.pop(key, None)
        self._queue.pop(key, None)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        waiting = {key for key, entry in self._entries.items() if entry.phase is Phase.WAITING}
        assert waiting == set(self._queue), "the queue is exactly the waiting entries"
        arrived = {key for key, entry in self._entries.items() if entry.phase is Phase.ARRIVED}
        assert arrived == set(self._arrived), "what has arrived is known"
        assert self.pending_tokens == sum(entry.tokens for entry in self._entries.values()), "tokens do not add up"
        assert len(self._entries) <= self._limits.max_waiting_items, "too many entries"
        assert self.nbytes == sum(entry.nbytes for entry in self._entries.values()), "bytes do not add up"
        assert self.nbytes <= self._limits.max_prepared_bytes, "too many bytes"
        entries = self._entries.values()
        preparing = self._preparing
        clips = [entry for entry in entries if entry.modality is not Modality.IMAGE]
        assert len(preparing) <= self._max_preparing, "too many are prepared"
        for entry in entries:
            idle = entry.phase is Phase.ARRIVED and self._is_thread_free(entry.modality, preparing)
            assert not idle, "an entry waits although a thread is free"
        limited = self._limits.without_image_share
        assert len(clips) <= limited(self._limits.max_waiting_items), "too many videos"
        nbytes = sum(entry.nbytes for entry in clips)
        assert nbytes <= limited(self._limits.max_prepared_bytes), "too many bytes of videos"
        in_threads = len(preparing) - preparing.count(Modality.IMAGE)
        assert in_threads <= limited(self._max_preparing), "too many videos are prepared"
        wanted = (entry.waiters for entry in self._entries.values() if entry.phase in (Phase.ARRIVED, Phase.WAITING))
        assert all(wanted), "a waiting entry has no waiters"


def _why_full(what: str, nbytes: int, items: int, taken: int, max_items: int, most: int) -> str | None:
    """Why there is no room for ``nbytes`` beside so many items, which take ``taken`` of ``most`` bytes; None if there is."""
    if items >= max_items:
        return f"{max_items} {what} are waiting, which is the limit"
    return f"waiting {what} take {taken} of {most} bytes, this one takes {nbytes}" if taken + nbytes > most else None
