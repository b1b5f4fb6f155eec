"""Hints of which embeddings an encoder holds or is encoding. Routers prefer it for items with these contents.

A hint may be wrong: then the item is encoded there, as it would be elsewhere.
"""

from dataclasses import dataclass
from hashlib import blake2b

from triptych.domain.item_plan import Content

HINT_NBYTES = 16
MAX_HINTS = 512
"""In one report."""


def hint_of(content: Content) -> bytes:
    """16 bytes that stand for the content: of other tenants' equal items it is another one.

    They are no embedding's key. Contents with equal hints would be sent to the same encoder, which tells them apart.
    """
    digest, salt = content
    return blake2b(b"%d %b %b" % (len(digest), digest, salt), digest_size=HINT_NBYTES, person=b"triptych-hint").digest()


@dataclass(frozen=True, slots=True)
class EmbeddingHints:
    """What has changed since the report before, at most ``MAX_HINTS`` in all.

    Reports to one watcher are numbered from 1. The first one, and each later one that is numbered 1, starts over: what was
    known of the instance before no longer counts.
    """

    sequence: int
    held: tuple[bytes, ...] = ()
    """Can be leased at once."""
    encoding: tuple[bytes, ...] = ()
    """Will be held, if nothing goes wrong. Whoever asks for it too waits for the same encoding."""
    dropped: tuple[bytes, ...] = ()
    """Neither any more."""
