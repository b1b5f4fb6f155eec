"""An item of a request on its way through the router: computed once, when the prompt is laid out, and carried to the end."""

from dataclasses import dataclass, field

from triptych.domain.embedding import TensorSpec
from triptych.domain.media import MediaInfo, Shard

Content = tuple[bytes, bytes]
"""What tells one item's embedding from another's within one model: (digest of the media, tenant's salt)."""


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """An item, or a shard of one: where its placeholders are, and what its embedding takes."""

    item: int
    """Which of the request's items it is, or belongs to."""
    param: str
    """The request field that brought it: ``messages[0].content[1]``."""
    media: bytes = field(repr=False)
    info: MediaInfo
    content: Content
    start: int
    """Position of its first placeholder in the prompt."""
    tokens: int
    tensors: tuple[TensorSpec, ...]
    nbytes: int
    """What the tensors take in an arena."""
    units: tuple[int, ...]
    """Tokens of each part into which the item can be cut, in order; one number where it cannot be cut."""
    unit_starts: tuple[int, ...] = ()
    """Position of each unit's first placeholder; empty where the item cannot be cut."""
    shard: Shard | None = None
