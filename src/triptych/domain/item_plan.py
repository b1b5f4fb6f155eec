"""The plan of one item of a request, computed once with the prompt and passed on unchanged."""

from dataclasses import field, replace

from triptych.domain.embedding import TensorSpec
from triptych.domain.media import MediaInfo, Shard
from triptych.domain.record import record

Content = tuple[bytes, bytes]
"""Identifies an item's embedding within one model: (digest of the media, tenant's salt with the LoRA adapter's digest)."""


def content_of(media_digest: bytes, shard: Shard | None, tenant_salt: bytes, lora: str = "") -> Content:
    """Shards of one item have different contents, and so has an item that is encoded with the LoRA adapter of this digest."""
    salt = tenant_salt + bytes.fromhex(lora)
    return (media_digest if shard is None else media_digest + str(shard).encode(), salt)


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

    def with_lora(self, digest: str) -> "ItemPlan":
        """The same item, encoded with the LoRA adapter of this digest; unchanged if that is empty."""
        if not digest:
            return self
        media, salt = self.content
        return replace(self, info=self.info.with_lora(digest), content=(media, salt + bytes.fromhex(digest)))
