"""Contents of an arena, as its instance tells routers: the embeddings that it holds or is encoding, and its segments of keys and values.

Every change goes to a log of bounded length. Each watcher has a reader with a place in it. A reader that is new, or that
the log has left behind, starts over with all that is published now.
"""

from collections import OrderedDict, deque

from triptych.domain.embedding_hints import MAX_HINTS, EmbeddingHints, hint_of, hint_of_segment
from triptych.domain.item_plan import Content

_LOG = 8 * MAX_HINTS
"""Changes that a reader may be behind."""


class PublishedContents:
    """Owner of what routers are told that an arena holds: the contents that were made or used last, at most ``limit``; 0 publishes nothing at all."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.publishes = limit > 0
        self._hints: OrderedDict[bytes, bytes] = OrderedDict()
        """By key, those used longest ago first."""
        self.by_hint: dict[bytes, bool] = {}
        """Whether it is being encoded, else it is held; for reading."""
        self._log: deque[bytes] = deque(maxlen=_LOG)
        """The hints that have changed."""
        self.changes = 0
        """All so far."""

    def __len__(self) -> int:
        return len(self._hints)

    def encoding(self, key: bytes, content: Content) -> None:
        """Note that an embedding is being encoded; ``over`` follows."""
        self._set(key, hint_of(content), encoding=True)

    def held(self, key: bytes, content: Content) -> None:
        """Note that an embedding is held and has been used."""
        self._hold(key, hint_of(content))

    def segment(self, key: bytes) -> None:
        """A segment of keys and values is held and has been used."""
        self._hold(key, hint_of_segment(key))

    def encoding_ended(self, key: bytes, *, held: bool) -> None:
        """Note that its encoding is over."""
        hint = self._hints.get(key)
        if hint is None or not held:
            self.gone(key)
        elif self.by_hint.get(hint) is not False:
            self.by_hint[hint] = False
            self._changed(hint)

    def gone(self, key: bytes) -> None:
        """Note that it is not held."""
        hint = self._hints.pop(key, None)
        if hint is not None and self.by_hint.pop(hint, None) is not None:
            self._changed(hint)

    def reader(self) -> "HintReader":
        """For one watcher."""
        return HintReader(self)

    def _hold(self, key: bytes, hint: bytes) -> None:
        known = self._hints.get(key)
        if known is None or self.by_hint.get(known) is not False:
            self._set(key, hint, encoding=False)
        else:
            self._hints.move_to_end(key)

    def _set(self, key: bytes, hint: bytes, *, encoding: bool) -> None:
        if not self.publishes:
            return
        self._hints[key] = hint
        self._hints.move_to_end(key)
        self.by_hint[hint] = encoding
        self._changed(hint)
        while len(self._hints) > self._limit:
            self.gone(next(iter(self._hints)))

    def _changed(self, hint: bytes) -> None:
        self._log.append(hint)
        self.changes += 1

    # --- for readers -------------------------------------------------------------------------------------------------

    def all(self) -> list[bytes]:
        """What is published now, used longest ago first."""
        return list(self._hints.values())

    def logged_since(self, change: int, most: int) -> list[bytes] | None:
        """The hints of the ``most`` changes after that one; None if the log no longer has all of them."""
        behind = self.changes - change
        if behind > len(self._log):
            return None
        return [self._log[-place] for place in range(behind, max(0, behind - most), -1)]

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        assert len(self._hints) <= self._limit, "more is published than the limit"
        assert self.by_hint.keys() <= set(self._hints.values()), "a hint without a key"


class HintReader:
    """The reports to one watcher."""

    def __init__(self, source: PublishedContents) -> None:
        self._source = source
        self._sequence = 0
        self._change = 0
        """The last one that has been told or is in ``_first``."""
        self._first: list[bytes] | None = None
        """What there was at the start and has not been told yet, the last one first; None before the start."""

    def is_behind(self) -> bool:
        """Whether there is more to tell at once."""
        return self._source.publishes and (bool(self._first) or self._change < self._source.changes)

    def report(self) -> EmbeddingHints | None:
        """The next report; None if nothing has changed since the last one."""
        if not self._source.publishes or (self._first is not None and not self.is_behind()):
            return None
        logged = self._source.logged_since(self._change, MAX_HINTS)
        if self._first is None or logged is None:
            self._sequence, self._change = 0, self._source.changes
            self._first, logged = self._source.all()[::-1], []
        hinted = self._first[-MAX_HINTS:][::-1]
        del self._first[-MAX_HINTS:]
        logged = logged[: MAX_HINTS - len(hinted)]
        self._change += len(logged)
        hinted += logged
        self._sequence += 1
        hints: dict[bool | None, list[bytes]] = {False: [], True: [], None: []}
        for hint in dict.fromkeys(hinted):
            hints[self._source.by_hint.get(hint)].append(hint)
        return EmbeddingHints(self._sequence, tuple(hints[False]), tuple(hints[True]), tuple(hints[None]))
