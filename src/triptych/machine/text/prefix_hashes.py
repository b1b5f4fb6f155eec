"""Hashes of a sequence's prefixes: equal hashes mean equal keys and values in the KV cache."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import pack
from typing import NamedTuple, Self

MAX_SALT_NBYTES = 256
"""Bytes of a tenant's salt, at most."""
_DIGEST_BYTES = 32
_GRID_TOKENS = 64
"""Tokens of a link of the chain of ``PrefixHashes``; a part of every key of a sealed segment."""


class KeyedItem(NamedTuple):
    """An item of a prompt: its full identity, and the positions that it fills, in order."""

    key: bytes
    positions: tuple[int, ...]


def salt_of(tenant_salt: bytes, lora: str) -> bytes:
    """The salt of a sequence that is computed with the LoRA adapter of this digest; its tenant's if that is empty.

    With an adapter it is longer than any tenant's, and so never equal to one.
    """
    if not lora:
        return tenant_salt
    return b"".join((pack("<H", len(tenant_salt)), tenant_salt.ljust(MAX_SALT_NBYTES, b"\0"), bytes.fromhex(lora)))


class BlockHashes:
    """The hashes of a sequence's full blocks, each over the previous hash, the block's tokens, and its items.

    So a hash covers everything from the first token on. An item is hashed by its full identity, which includes the
    tenant's salt; ``salt`` separates text of different tenants.
    """

    def __init__(self, block_tokens: int, token_ids: Sequence[int], items: Sequence[KeyedItem], *, salt: bytes) -> None:
        self._block_tokens = block_tokens
        self._tail: list[int] = []
        self._items: dict[int, list[bytes]] = {}
        for item in items:
            for position, part in _parts(item):
                self._items.setdefault(position // block_tokens, []).append(part)
        self.root = blake2b(salt, digest_size=_DIGEST_BYTES, person=b"triptych-prefix").digest()
        """The hash before the first token."""
        self.hashes: list[bytes] = []
        """Of the full blocks, in order."""
        for token in token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        self._tail.append(token)
        if len(self._tail) == self._block_tokens:
            last = self.hashes[-1] if self.hashes else self.root
            self.hashes.append(_hash(last, self._tail, self._items.pop(len(self.hashes), ())))
            self._tail = []

    def fork(self) -> Self:
        """An independent copy."""
        other = object.__new__(type(self))
        other._block_tokens = self._block_tokens
        other._tail, other._items = list(self._tail), dict(self._items)
        other.root, other.hashes = self.root, list(self.hashes)
        return other


class PrefixHashes:
    """The hashes of a sequence's prefixes of any length, whatever the size of its blocks. Nothing is hashed before it is asked."""

    def __init__(self, items: Sequence[KeyedItem], *, salt: bytes) -> None:
        self._items = tuple(items)
        self._salt = salt
        self._full: BlockHashes | None = None

    def hash_before(self, end: int, token_ids: Sequence[int]) -> bytes:
        """Over everything before position ``end`` of the sequence, whose tokens are ``token_ids``: so far, and as in calls before."""
        if self._full is None:
            self._full = BlockHashes(_GRID_TOKENS, (), self._items, salt=self._salt)
        hashes, full = self._full.hashes, end // _GRID_TOKENS
        for token in token_ids[len(hashes) * _GRID_TOKENS : full * _GRID_TOKENS]:
            self._full.append(token)
        last = hashes[full - 1] if full else self._full.root
        rest = range(full * _GRID_TOKENS, end)
        if not rest:
            return last
        parts = [part for item in self._items for position, part in _parts(item) if position in rest]
        return _hash(last, token_ids[rest.start : end], parts, person=b"triptych-rest")


def _parts(item: KeyedItem) -> Iterable[tuple[int, bytes]]:
    """Positions of an item, and what is hashed of it at each."""
    identity = blake2b(item.key, digest_size=_DIGEST_BYTES).digest()
    for offset, position in enumerate(item.positions):
        yield position, identity + pack("<qq", position, offset)


def _hash(last: bytes, tokens: Sequence[int], parts: Iterable[bytes], *, person: bytes = b"") -> bytes:
    digest = blake2b(last, digest_size=_DIGEST_BYTES, person=person)
    digest.update(pack(f"<{len(tokens)}q", *tokens))
    for part in parts:
        digest.update(part)
    return digest.digest()
