"""Memory of an encoder's queue: which items are being prepared, wait for the tower, or are in it, and who wants them.

Equal items (same embedding key) are one entry with several waiters, so each is encoded once. An entry lives from its
first ``Arrive`` until ``Done``:

    Arrive -> PREPARING -- Prepared -> WAITING -- Take -> ENCODING -- Done -> gone

Bounds are on entries and on bytes: a full queue refuses at the door and never makes anyone wait. An entry that nobody
wants any more leaves at once while it waits; while a thread works on it, it stays (its memory is still in use) and
goes with that thread's outcome.
"""

from dataclasses import dataclass, field
from enum import Enum

from triptych.domain.limits import check_positive
from triptych.policy.iteration import ImageBudget
from triptych.policy.queueing import batch_length

Key = bytes
"""Whole digest of an embedding's identity."""


class Phase(Enum):
    PREPARING = "preparing"
    WAITING = "waiting"
    ENCODING = "encoding"


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrive:
    """A caller (``waiter``) wants an item until ``deadline_s``; ``nbytes`` is the most that preparing it may take."""

    key: Key
    waiter: int
    tokens: int
    nbytes: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """Preprocessing is done and memory for the embedding is reserved; from now on the item takes ``nbytes``."""

    key: Key
    tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Leave:
    """A caller went away, or has its answer."""

    key: Key
    waiter: int


@dataclass(frozen=True, slots=True)
class Take:
    """The tower is free and takes the next batch, within ``budget`` too where there is one."""

    budget: ImageBudget | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing works on the item any more, whether it succeeded or not."""

    key: Key


Event = Arrive | Prepared | Leave | Take | Done

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartPreparing:
    key: Key


@dataclass(frozen=True, slots=True)
class Refuse:
    """The caller is not taken in. ``fits`` tells whether it ever could be."""

    waiter: int
    fits: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """The entry is gone without an embedding: give back what was reserved for it, answer who still waits."""

    key: Key
    expired: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Encode:
    """Run these through the tower as one batch, in this order."""

    keys: tuple[Key, ...]


Effect = StartPreparing | Refuse | Drop | Encode


@dataclass(slots=True)
class _Entry:
    tokens: int
    nbytes: int
    phase: Phase = Phase.PREPARING
    deadlines_s: dict[int, float] = field(default_factory=dict)
    """Of each waiter."""

    def expired(self, now_s: float) -> bool:
        return all(deadline_s <= now_s for deadline_s in self.deadlines_s.values())


@dataclass(frozen=True, slots=True)
class BatchLimits:
    max_waiting_items: int = 256
    """Most items that are prepared, wait, or are encoded at the same time; one more is refused."""
    max_prepared_bytes: int = 1 << 30
    """Most memory of these items together, decoded and preprocessed."""
    max_batch_items: int = 8
    """Most items in one pass of the encoder."""
    max_batch_tokens: int = 8192
    """Most embedding tokens in one pass of the encoder; a larger item runs alone."""
    max_batch_bytes: int = 256 << 20
    """Most bytes of preprocessed items (pixels, features) in one pass of the encoder; a larger item runs alone."""

    def __post_init__(self) -> None:
        check_positive(self)


class BatchQueue:
    """``handle`` is the only mutator. ``now_s`` is on the clock on which deadlines are given."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._entries: dict[Key, _Entry] = {}
        self._queue: dict[Key, float] = {}
        """When each WAITING entry became so, in that order."""

    @property
    def pending_items(self) -> int:
        return len(self._entries)

    @property
    def pending_tokens(self) -> int:
        return sum(entry.tokens for entry in self._entries.values())

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values())

    @property
    def waiting_since_s(self) -> float | None:
        """When the first of those that wait for the tower began to; None where none waits."""
        return next(iter(self._queue.values()), None)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case Arrive():
                return self._arrive(event)
            case Prepared():
                return self._prepared(event, now_s)
            case Leave():
                return self._leave(event)
            case Take(budget):
                return self._take(budget, now_s)
            case Done(key):
                self._forget(key)
                return []

    def _arrive(self, event: Arrive) -> list[Effect]:
        if (entry := self._entries.get(event.key)) is not None:
            entry.deadlines_s[event.waiter] = event.deadline_s
            return []
        limits = self._limits
        if event.nbytes > limits.max_prepared_bytes:
            reason = f"the item takes {event.nbytes} bytes to prepare, the limit is {limits.max_prepared_bytes}"
            return [Refuse(event.waiter, fits=False, reason=reason)]
        if len(self._entries) >= limits.max_waiting_items:
            return [
                Refuse(
                    event.waiter, fits=True, reason=f"{limits.max_waiting_items} items are waiting, which is the limit"
                )
            ]
        if self.nbytes + event.nbytes > limits.max_prepared_bytes:
            reason = (
                f"waiting items take {self.nbytes} of {limits.max_prepared_bytes} bytes, this one takes {event.nbytes}"
            )
            return [Refuse(event.waiter, fits=True, reason=reason)]
        self._entries[event.key] = _Entry(event.tokens, event.nbytes, deadlines_s={event.waiter: event.deadline_s})
        return [StartPreparing(event.key)]

    def _prepared(self, event: Prepared, now_s: float) -> list[Effect]:
        entry = self._entries[event.key]
        assert entry.phase is Phase.PREPARING, f"an item in phase {entry.phase.value} was prepared again"  # noqa: S101 - invariant
        if not entry.deadlines_s:
            self._forget(event.key)
            return [Drop(event.key, expired=False, reason="nobody wants it any more")]
        others = self.nbytes - entry.nbytes
        if others + event.nbytes > self._limits.max_prepared_bytes:
            self._forget(event.key)
            reason = (
                f"waiting items take {others} of {self._limits.max_prepared_bytes} bytes, this one takes {event.nbytes}"
            )
            return [Drop(event.key, expired=False, reason=reason)]
        entry.tokens, entry.nbytes, entry.phase = event.tokens, event.nbytes, Phase.WAITING
        self._queue[event.key] = now_s
        return []

    def _leave(self, event: Leave) -> list[Effect]:
        entry = self._entries.get(event.key)
        if entry is None:
            return []
        entry.deadlines_s.pop(event.waiter, None)
        if entry.deadlines_s or entry.phase is not Phase.WAITING:
            return []
        self._forget(event.key)
        return [Drop(event.key, expired=False, reason="nobody wants it any more")]

    def _take(self, budget: ImageBudget | None, now_s: float) -> list[Effect]:
        limits = self._limits
        effects: list[Effect] = []
        for key in [key for key in self._queue if self._entries[key].expired(now_s)]:
            self._forget(key)
            effects.append(Drop(key, expired=True, reason="the time that its callers gave is over"))
        waiting = list(self._queue)
        count = batch_length(
            [(self._entries[key].tokens, self._entries[key].nbytes) for key in waiting],
            max_items=limits.max_batch_items,
            max_tokens=min(limits.max_batch_tokens, budget.tokens) if budget else limits.max_batch_tokens,
            max_nbytes=min(limits.max_batch_bytes, budget.nbytes) if budget else limits.max_batch_bytes,
        )
        for key in waiting[:count]:
            del self._queue[key]
            self._entries[key].phase = Phase.ENCODING
        if count:
            effects.append(Encode(tuple(waiting[:count])))
        return effects

    def _forget(self, key: Key) -> None:
        self._entries.pop(key, None)
        self._queue.pop(key, None)

    def validate(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        waiting = {key for key, entry in self._entries.items() if entry.phase is Phase.WAITING}
        assert waiting == set(self._queue), "the queue is exactly the waiting entries"  # noqa: S101 - invariant
        assert len(self._entries) <= self._limits.max_waiting_items, "too many entries"  # noqa: S101 - invariant
        assert self.nbytes <= self._limits.max_prepared_bytes, "too many bytes"  # noqa: S101 - invariant
        assert all(self._entries[key].deadlines_s for key in waiting), "an entry waits for nobody"  # noqa: S101 - invariant
