"""Hints of which embeddings an encoder holds or is encoding. Routers prefer it for items with these contents.

A hint may be wrong: then the item is encoded there, as it would be elsewhere. The same reports have hints of segments of keys and
values (docs/adr/0048).
"""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from triptych.domain.item_plan import Content
from triptych.domain.media import DIGEST_NBYTES

HINT_NBYTES = 16
MAX_HINTS = 512
"""Most hints in one report."""


@lru_cache(maxsize=4096)
def hint_of(content: Content) -> bytes:
    """16 bytes that stand for the content: for other tenants' equal items they are others.

    They are no embedding's key. Contents with equal hints would be sent to the same encoder, which tells them apart. The
    digest of the media is one already, so it is not hashed again: this is part of every routing decision.
    """
    digest, salt = content
    media = int.from_bytes(digest[:DIGEST_NBYTES], "little")
    folded = (media ^ media >> 8 * HINT_NBYTES) & _ALL
    return (folded ^ _mask(digest[DIGEST_NBYTES:], salt)).to_bytes(HINT_NBYTES, "little")


def hint_of_segment(key: bytes) -> bytes:
    """16 bytes that stand for a segment of keys and values. Its key is a digest already, also of what the tenant's salt is in."""
    return key[:HINT_NBYTES]


_ALL = (1 << 8 * HINT_NBYTES) - 1


@lru_cache(maxsize=1024)
def _mask(shard: bytes, salt: bytes) -> int:
    """Mask that tells shards and tenants apart."""
    data = b"%d %b %b" % (len(shard), shard, salt)
    return int.from_bytes(blake2b(data, digest_size=HINT_NBYTES, person=b"triptych-hint").digest(), "little")


@dataclass(frozen=True, slots=True)
class EmbeddingHints:
    """Changes since the report before, at most ``MAX_HINTS`` in all.

    Reports to one watcher are numbered from 1. The first one, and each later one that is numbered 1, starts over: what
    was known of the instance before no longer counts.
    """

    sequence: int
    held: tuple[bytes, ...] = ()
    """Can be leased at once."""
    encoding: tuple[bytes, ...] = ()
    """Will be held, if nothing goes wrong. Whoever asks for it too waits for the same encoding."""
    dropped: tuple[bytes, ...] = ()
    """Neither any more."""
