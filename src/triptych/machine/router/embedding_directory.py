"""The directory of which encoders hold which embeddings, or are encoding them, and which instances hold which segments of keys and values, as a router
knows it.

Two sources: what encoders publish in their load reports (``domain.embedding_hints``), and what the router has sent them
itself and they have not reported yet. All of it are hints; nothing depends on their being right.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from triptych.domain.embedding_hints import EmbeddingHints, hint_of, hint_of_segment
from triptych.domain.item_plan import Content
from triptych.policy.placement.affinity import Holding

_NONE: tuple[Holding, ...] = ()
_OUT_OF_STEP = 0
"""A report is missing: nothing is believed until the reports start over at 1."""


@dataclass(frozen=True, slots=True)
class KnownSlot:
    """Where the embedding of a key is that a caller has been told."""

    name: str
    """The encoder's address."""
    generation: int
    content: Content
    nbytes: int


class EmbeddingDirectory:
    """Owner of which encoder is believed to hold or encode which embedding.

    Part of ``machine.router.cluster.ClusterMachine``, which alone changes it.

    It remembers at most ``limit`` embeddings, one at two encoders counting twice; those told or encoded longest ago are
    forgotten first. What the router's own calls are encoding is not counted: its credits bound it.
    """

    def __init__(self, limit: int, max_keys: int = 0) -> None:
        """``max_keys``: the keys that callers are told, and those read last, are remembered apart from that."""
        self._limit = limit
        self._max_keys = max_keys
        self._keys: OrderedDict[bytes, KnownSlot] = OrderedDict()
        self._size = 0
        self._held: OrderedDict[bytes, tuple[Holding, ...]] = OrderedDict()
        """By hint, at most one for each encoder."""
        self._of: defaultdict[str, set[bytes]] = defaultdict(set)
        """The hints with an entry of this encoder."""
        self._sequences: dict[str, int] = {}
        """The number of the last report of each encoder that publishes."""
        self.followed = {"hit": 0, "joined": 0, "stale": 0}
        """Items that were sent to an encoder because of what is known here, and have been encoded, by what came of it."""
        self._calls: dict[Content, tuple[str, ...]] = {}
        """The encoders of the router's own calls that encode a content, once for each call."""

    def __len__(self) -> int:
        """Embeddings remembered."""
        return self._size

    def holders(self, content: Content) -> Sequence[Holding]:
        """The encoders that hold it first, then those that are encoding it."""
        known = self._held.get(hint_of(content), _NONE)
        own = self._calls.get(content)
        if own is None:
            return known if len(known) < 2 else sorted(known, key=_encoding_last)
        holders = {holding.name: holding for holding in known}
        for name in own:
            if name not in holders:
                holders[name] = _holding(name, True, name in self._sequences)
        return sorted(holders.values(), key=_encoding_last)

    def segment_holders(self, key: bytes) -> Sequence[Holding]:
        """The instances that hold a segment of keys and values, those that told it first."""
        return self._held.get(hint_of_segment(key), _NONE)

    # --- what encoders publish ---------------------------------------------------------------------------------------

    def apply_hints(self, name: str, hints: EmbeddingHints) -> bool:
        """Apply a report. Returns whether the reports must start over, as one is missing; this is returned once."""
        known = self._sequences.get(name)
        if hints.sequence == 1:
            self.forget(name)
        elif known is not None and (hints.sequence <= known or known == _OUT_OF_STEP):
            return False  # it comes late
        elif known is None or hints.sequence != known + 1:
            self.forget(name)
            self._sequences[name] = _OUT_OF_STEP
            return True
        self._sequences[name] = hints.sequence
        for hint in hints.dropped:
            self._drop(hint, name)
        for hints_, encoding in ((hints.held, False), (hints.encoding, True)):
            holding = _holding(name, encoding, True)
            for hint in hints_:
                self._put(hint, holding)
        if self._size > self._limit:
            self._evict()
        return False

    # --- what the router knows by itself -----------------------------------------------------------------------------

    def began(self, content: Content, name: str) -> None:
        """A call that encodes it there begins."""
        self._calls[content] = (*self._calls.get(content, ()), name)

    def ended(self, content: Content, name: str) -> None:
        """The call is over, whatever came of it."""
        calls = self._calls.get(content, ())
        if calls == (name,):
            del self._calls[content]
        elif name in calls:
            at = calls.index(name)
            self._calls[content] = calls[:at] + calls[at + 1 :]

    def remember(self, content: Content, name: str) -> None:
        """Note that an instance holds this embedding."""
        self._put(hint_of(content), _holding(name, False, name in self._sequences))
        if self._size > self._limit:
            self._evict()

    def answered(self, *, encoding: bool, cached: bool) -> None:
        """An item was sent where its embedding was believed to be, or to be encoded, and was ``cached`` there or not."""
        self.followed["joined" if encoding else "hit" if cached else "stale"] += 1

    def gone(self, content: Content, name: str) -> None:
        """Note that an instance does not hold it."""
        self._drop(hint_of(content), name)

    def forget(self, name: str) -> None:
        """Forget all that an instance held."""
        self._sequences.pop(name, None)
        for hint in self._of.pop(name, ()):
            self._keep(hint, tuple([holding for holding in self._held[hint] if holding.name != name]))

    # --- keys that callers were told ---------------------------------------------------------------------------------

    def slot_of(self, key: bytes) -> KnownSlot | None:
        """Where its embedding is; None for a key that no caller was told, or too long ago."""
        return self._keys.get(key)

    def told_key(self, key: bytes, slot: KnownSlot) -> None:
        """A caller knows it, or has read it."""
        self._keys[key] = slot
        self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def key_gone(self, key: bytes, slot: KnownSlot) -> None:
        """Note that it is not there: nobody is sent there for it, nor for its content."""
        if self._keys.get(key) == slot:
            del self._keys[key]
            self.gone(slot.content, slot.name)

    def forget_keys(self, name: str) -> None:
        """The encoder has left or restarted. While it is only leaving, it can still be read."""
        for key in [key for key, slot in self._keys.items() if slot.name == name]:
            del self._keys[key]

    # --- entries -----------------------------------------------------------------------------------------------------

    def _put(self, hint: bytes, holding: Holding) -> None:
        self._of[holding.name].add(hint)
        if hint not in self._held:
            self._held[hint] = _alone(holding)
            self._size += 1
            return
        others = tuple([other for other in self._held[hint] if other.name != holding.name])
        self._keep(hint, (*others, holding) if others else _alone(holding))
        self._held.move_to_end(hint)

    def _drop(self, hint: bytes, name: str) -> None:
        if hint in (hints := self._of[name]):
            hints.remove(hint)
            self._keep(hint, tuple([holding for holding in self._held[hint] if holding.name != name]))

    def _keep(self, hint: bytes, holdings: tuple[Holding, ...]) -> None:
        self._size += len(holdings) - len(self._held.get(hint, ()))
        if holdings:
            self._held[hint] = holdings
        else:
            self._held.pop(hint, None)

    def _evict(self) -> None:
        while self._size > self._limit:
            hint, holdings = self._held.popitem(last=False)
            self._size -= len(holdings)
            for holding in holdings:
                self._of[holding.name].remove(hint)

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        entries = {(holding.name, hint) for hint, holdings in self._held.items() for holding in holdings}
        assert entries == {(name, hint) for name, hints in self._of.items() for hint in hints}, "entries and index"
        assert len(entries) == self._size <= self._limit, "remembered embeddings above their bound"
        assert all(self._held.values()), "an entry without an encoder"
        assert len(self._keys) <= self._max_keys, "keys above their bound"
        assert all(self._calls.values()), "a content without calls"

    @property
    def encoders(self) -> set[str]:
        """The encoders of which anything is known."""
        return {*(name for name, hints in self._of.items() if hints), *self._sequences}


def _encoding_last(holding: Holding) -> bool:
    return holding.encoding


@lru_cache(maxsize=4096)
def _holding(name: str, encoding: bool, published: bool, /) -> Holding:
    """One object for all entries that say the same, as there may be many."""
    return Holding(name, encoding, published)


@lru_cache(maxsize=4096)
def _alone(holding: Holding) -> tuple[Holding, ...]:
    return (holding,)
