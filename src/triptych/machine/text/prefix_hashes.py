"""Prefix hashes of a sequence's blocks: equal hashes mean equal keys and values in the KV cache."""

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack
from typing import NamedTuple, Self

_DIGEST_BYTES = 32


class KeyedItem(NamedTuple):
    """An item of a prompt: its full identity, and the positions that it fills, in order."""

    key: bytes
    positions: tuple[int, ...]


class PrefixHashes:
    """The hashes of a sequence's full blocks, each over the previous hash, the block's tokens, and its items.

    So a hash covers everything from the first token on. An item is hashed by its full identity, which includes the
    tenant's salt; ``salt`` separates text of different tenants.
    """

    def __init__(self, block_tokens: int, token_ids: Sequence[int], items: Sequence[KeyedItem], *, salt: bytes) -> None:
        self._block_tokens = block_tokens
        self._tail: list[int] = []
        self._items: dict[int, list[bytes]] = {}
        for item in items:
            identity = blake2b(item.key, digest_size=_DIGEST_BYTES).digest()
            for offset, position in enumerate(item.positions):
                at = self._items.setdefault(position // block_tokens, [])
                at.append(identity + pack("<qq", position, offset))
        self._last = blake2b(salt, digest_size=_DIGEST_BYTES, person=b"triptych-prefix").digest()
        self.hashes: list[bytes] = []
        """Of the full blocks, in order."""
        for token in token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        self._tail.append(token)
        if len(self._tail) == self._block_tokens:
            digest = blake2b(self._last, digest_size=_DIGEST_BYTES)
            digest.update(pack(f"<{len(self._tail)}q", *self._tail))
            for part in self._items.pop(len(self.hashes), ()):
                digest.update(part)
            self._last = digest.digest()
            self.hashes.append(self._last)
            self._tail = []

    def fork(self) -> Self:
        """An independent copy."""
        other = object.__new__(type(self))
        other._block_tokens = self._block_tokens
        other._tail, other._items, other._last = list(self._tail), dict(self._items), self._last
        other.hashes = list(self.hashes)
        return other
