"""An encoder's queue: which items wait, are being prepared or encoded, and which callers want them.

Equal items (same embedding key) share one entry with several waiters, so each is encoded once. An entry exists from its
first ``arrive`` to ``done``:


    arrive -> ARRIVED -> PREPARING -- prepared -> WAITING -- take -> ENCODING -- done -> gone

Both preparing and encoding follow the order of ``policy.queueing``; an item has the queue position of its most urgent waiter.
Entries and bytes are limited: a full queue refuses and never blocks. Decoding a video or audio clip may take minutes, so
a share of entries, bytes and threads is reserved for images. An entry without waiters is dropped at once while
it waits; while a thread works on it, its memory is in use, so it is dropped when the thread is done.

Each call is answered at once, by what it returns or raises.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from math import ceil
from typing import Annotated

from triptych.domain.bounds import Between
from triptych.domain.limits import Positive, check_limits
from triptych.domain.media import Modality
from triptych.domain.queue_position import BY_TIME_LIMIT, QueuePosition, RelativeQueuePosition
from triptych.domain.record import record
from triptych.errors import InvalidMedia, Overloaded
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
    """Owner of the items that wait for a batch or are in one. ``now_s`` and deadlines use the same clock."""

    def __init__(self, limits: BatchLimits, *, max_preparing: int) -> None:
        """``max_preparing`` limits the entries in PREPARING."""
        self.limits = limits
        """For reading."""
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

    # --- the life of an item -----------------------------------------------------------------------------------------

    def arrive(
        self,
        key: Key,
        waiter: int,
        *,
        tokens: int,
        nbytes: int,
        deadline_s: float,
        now_s: float,
        priority: int = 0,
        modality: Modality = Modality.IMAGE,
        position: RelativeQueuePosition = BY_TIME_LIMIT,
    ) -> list[Key]:
        """A caller (``waiter``) wants an item until ``deadline_s``; ``nbytes`` is the peak memory of preparing it.

        Returns the items to prepare from now on. Raises Overloaded (not now) or InvalidMedia (never): there is no entry then.
        """
        waits = as_called(
            priority=priority, deadline_s=deadline_s, arrived_s=now_s, arrival=self._arrivals, position=position
        )
        self._arrivals += 1
        if (entry := self._entries.get(key)) is None:
            most = self._limit_of(self.limits.max_prepared_bytes, modality)
            if nbytes > most:
                raise InvalidMedia(f"the item takes {nbytes} bytes to prepare, the limit is {most}")
            if (full := self._why_full(nbytes, modality)) is not None:
                raise Overloaded(full)
            entry = self._entries[key] = _Entry(tokens, nbytes, modality)
            self._arrived[key] = None
            self.pending_tokens += tokens
            self.nbytes += nbytes
        entry.waiters[waiter] = _Waiter(waits, now_s, deadline_s)
        return self._start_preparing(now_s)

    def prepared(self, key: Key, tokens: int, nbytes: int, now_s: float) -> list[Key]:
        """Preprocessing is done and memory for the embedding is reserved; from now on the item takes ``nbytes``.

        Returns the items to prepare from now on. Raises Overloaded if it has no waiters or no room: then ``done`` must follow.
        """
        entry = self._entries[key]
        assert entry.phase is Phase.PREPARING, f"an item in phase {entry.phase.value} was prepared again"
        if not entry.waiters:
            raise Overloaded("it has no waiters")
        if (full := self._why_full(nbytes, entry.modality, entry)) is not None:
            raise Overloaded(full)
        self.pending_tokens += tokens - entry.tokens
        self.nbytes += nbytes - entry.nbytes
        entry.tokens, entry.nbytes, entry.phase = tokens, nbytes, Phase.WAITING
        self._queue[key] = now_s
        return self._start_preparing(now_s)

    def leave(self, key: Key, waiter: int) -> bool:
        """A caller left, or has its answer. Returns whether the entry is gone with it: nobody wants the item, and nothing works on it."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        entry.waiters.pop(waiter, None)
        if entry.waiters or entry.phase not in (Phase.ARRIVED, Phase.WAITING):
            return False
        self._forget(key)
        return True

    def limit_items(self, most: int) -> None:
        """From the next batch on, one has at most so many items."""
        self.limits = replace(self.limits, max_batch_items=most)

    def expired(self, now_s: float) -> list[Key]:
        """The WAITING items whose callers all wait no longer. They are to be ended by ``done`` before a batch is taken."""
        return [key for key in self._queue if self._entries[key].expired(now_s)]

    def take(self, now_s: float, budget: ImageBudget | None = None) -> list[Key]:
        """The next batch, in this order, within ``budget`` if given. Empty if nothing waits."""
        if not self._queue:
            return []
        limits = self.limits
        max_tokens = limits.max_batch_tokens or MOST_BATCH_TOKENS
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
        return waiting[:count]

    def done(self, key: Key, now_s: float) -> list[Key]:
        """The item is no longer being worked on, whether it succeeded or not. Returns the items to prepare from now on."""
        self._forget(key)
        return self._start_preparing(now_s)

    # --- room and threads --------------------------------------------------------------------------------------------

    def _limit_of(self, limit: int, modality: Modality) -> int:
        return limit if modality is Modality.IMAGE else self.limits.without_image_share(limit)

    def _why_full(self, nbytes: int, modality: Modality, own: _Entry | None = None) -> str | None:
        """Why an item of ``nbytes`` has no room beside the other entries than its ``own``; None if it has."""
        items, taken, limits = len(self._entries), self.nbytes, self.limits
        if own is not None:
            items, taken = items - 1, taken - own.nbytes
        full = _why_full("items", nbytes, items, taken, limits.max_waiting_items, limits.max_prepared_bytes)
        if full is not None or modality is Modality.IMAGE:
            return full
        clips = [entry for entry in self._entries.values() if entry is not own and entry.modality is not Modality.IMAGE]
        max_items, most = map(limits.without_image_share, (limits.max_waiting_items, limits.max_prepared_bytes))
        taken = sum(entry.nbytes for entry in clips)
        return _why_full("videos and audio clips", nbytes, len(clips), taken, max_items, most)

    def _start_preparing(self, now_s: float) -> list[Key]:
        if not self._arrived:
            return []
        started: list[Key] = []
        preparing = self._preparing
        for key in self._in_order(self._arrived, now_s):
            entry = self._entries[key]
            if self._is_thread_free(entry.modality, preparing):
                del self._arrived[key]
                entry.phase = Phase.PREPARING
                preparing.append(entry.modality)
                started.append(key)
        return started

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
        assert len(self._entries) <= self.limits.max_waiting_items, "too many entries"
        assert self.nbytes == sum(entry.nbytes for entry in self._entries.values()), "bytes do not add up"
        assert self.nbytes <= self.limits.max_prepared_bytes, "too many bytes"
        entries = self._entries.values()
        preparing = self._preparing
        clips = [entry for entry in entries if entry.modality is not Modality.IMAGE]
        assert len(preparing) <= self._max_preparing, "too many are prepared"
        for entry in entries:
            idle = entry.phase is Phase.ARRIVED and self._is_thread_free(entry.modality, preparing)
            assert not idle, "an entry waits although a thread is free"
        limited = self.limits.without_image_share
        assert len(clips) <= limited(self.limits.max_waiting_items), "too many videos"
        nbytes = sum(entry.nbytes for entry in clips)
        assert nbytes <= limited(self.limits.max_prepared_bytes), "too many bytes of videos"
        in_threads = len(preparing) - preparing.count(Modality.IMAGE)
        assert in_threads <= limited(self._max_preparing), "too many videos are prepared"
        wanted = (entry.waiters for entry in self._entries.values() if entry.phase in (Phase.ARRIVED, Phase.WAITING))
        assert all(wanted), "a waiting entry has no waiters"


def _why_full(what: str, nbytes: int, items: int, taken: int, max_items: int, most: int) -> str | None:
    """Why there is no room for ``nbytes`` beside so many items, which take ``taken`` of ``most`` bytes; None if there is."""
    if items >= max_items:
        return f"{max_items} {what} are waiting, which is the limit"
    return f"waiting {what} take {taken} of {most} bytes, this one takes {nbytes}" if taken + nbytes > most else None
