"""States kept for prefixes, of sequences whose layers overwrite their state: after the positions before fixed borders.

A prompt's last border is kept, for what comes after the prompt, unless the prompt is short. So is the last one that an earlier prompt
had as well: other prompts branch off there. The states take KV memory that sequences leave. When these need it, the least recently used ones go.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

BORDER_TOKENS = 64
"""Linear attention computes as many tokens together: passes that end there round as one pass does."""
LEAST_BORDERS = 2
"""Borders of a prompt whose last one is kept before another prompt has it: an additional pass is much of what a shorter one costs."""
_MOST_SEEN = 1 << 14
"""Borders of earlier prompts that are remembered: of a million tokens."""


class StateIn(NamedTuple):
    """Let a sequence go on from a state after so many positions."""

    sequence_id: str
    positions: int
    memory: bytearray


class KeptStates:
    """Owner of the kept states, by the hash of the prefix before their border. Hashes are those of a prompt's borders, in order."""

    def __init__(self, nbytes: int, state_nbytes: Callable[[int], int], *, border_tokens: int = BORDER_TOKENS) -> None:
        """At most ``nbytes``. ``state_nbytes``: bytes of a state after a number of positions."""
        self.nbytes, self.border_tokens = nbytes, border_tokens
        self._state_nbytes = state_nbytes
        self._kept: OrderedDict[bytes, bytearray] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self.held_nbytes = 0

    def find(self, hashes: Sequence[bytes]) -> tuple[int, bytearray] | None:
        """The state at the last border that has one, and its positions."""
        for border in range(len(hashes), 0, -1):
            if (memory := self._kept.get(hashes[border - 1])) is not None:
                self._kept.move_to_end(hashes[border - 1])
                return border * self.border_tokens, memory
        return None

    def borders(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Positions before the borders of a new prompt at which its state is to be kept."""
        shared = next((border for border in range(len(hashes), 0, -1) if hashes[border - 1] in self._seen), 0)
        for prefix_hash in hashes:
            self._seen[prefix_hash] = None
            self._seen.move_to_end(prefix_hash)
        while len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        borders = {shared, len(hashes)} if len(hashes) >= LEAST_BORDERS else {shared}
        positions = [border * self.border_tokens for border in sorted(borders)]
        return tuple(count for count in positions if count and self._state_nbytes(count) <= self.nbytes)

    def take(self, prefix_hash: bytes, positions: int, nbytes: int) -> bytearray | None:
        """Memory for a state to keep, so that all have at most ``nbytes``. None if it is here already, or larger."""
        wanted = self._state_nbytes(positions)
        if prefix_hash in self._kept or wanted > nbytes:
            return None
        self.shrink(nbytes - wanted)
        memory = self._kept[prefix_hash] = bytearray(wanted)
        self.held_nbytes += wanted
        return memory

    def shrink(self, nbytes: int) -> None:
        """Forget the least recently used states until all have at most ``nbytes``."""
        while self.held_nbytes > nbytes:
            self.held_nbytes -= len(self._kept.popitem(last=False)[1])

    def stop(self) -> None:
        """Keep nothing from now on."""
        self.nbytes = 0
        self.shrink(0)

    def validate(self) -> None:
        """Raises AssertionError unless all counts are consistent."""
        assert self.held_nbytes == sum(map(len, self._kept.values())), "bytes do not add up"

    def discard(self, hashes: Sequence[bytes]) -> None:
        """Forget states that are not sound."""
        for prefix_hash in hashes:
            self.held_nbytes -= len(self._kept.pop(prefix_hash, b""))
