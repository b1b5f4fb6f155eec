"""The plan of one item of a request, computed once with the prompt and passed on unchanged."""

from dataclasses import field

from triptych.domain.embedding import TensorSpec
from triptych.domain.media import MediaInfo, Shard
from triptych.domain.record import record

Content = tuple[bytes, bytes]
"""Identifies an item's embedding within one model: (digest of the media, tenant's salt)."""


def content_of(media_digest: bytes, shard: Shard | None, tenant_salt: bytes) -> Content:
    """Shards of one item have different contents."""
    return (media_digest if shard is None else media_digest + str(shard).encode(), tenant_salt)


@record
class ItemPlan:
    """An item or shard: its placeholders in the prompt, and the size of its embedding."""

    item: int
    """Index of the item in the request."""
    param: str
    """The request field that holds it: ``messages[0].content[1]``."""
    media: bytes = field(repr=False)
    info: MediaInfo
    content: Content
    start: int
    """Position of its first placeholder in the prompt."""
    tokens: int
    tensors: tuple[TensorSpec, ...]
    nbytes: int
    """Arena bytes of the tensors."""
    units: tuple[int, ...]
    """Tokens of each unit at whose borders the item can be split, in order; a single number if it cannot."""
    unit_starts: tuple[int, ...] = ()
    """Position of each unit's first placeholder; empty if the item cannot be split."""
    shard: Shard | None = None
    grid: tuple[int, ...] = ()
    """Patches in time, height and width, if positions follow from them and the request asks for them."""
