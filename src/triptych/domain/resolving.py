"""Resolving: from media, or from the keys of embeddings, to tickets. For readers that are no instances of the router."""

from dataclasses import dataclass

from triptych.domain.chat import MediaPart
from triptych.domain.embedding import Ticket


@dataclass(frozen=True, slots=True)
class ResolveRequest:
    """Media, which is encoded first, or keys that an earlier request has returned; not both."""

    request_id: str
    model: str
    media: tuple[MediaPart, ...] = ()
    keys: tuple[bytes, ...] = ()
    """Keys of embeddings: ``Ticket.key``."""
    timeout_s: float = 120.0
    """Time limit from when it is sent, in which the embeddings are encoded and then held."""
    tenant_salt: bytes = b""
    """Salt as in a ``ChatRequest``. Keys include it."""
    priority: int = 0
    """Priority as in a ``ChatRequest``."""


@dataclass(frozen=True, slots=True)
class ResolvedItem:
    """An item's embedding. Its ticket is a capability, and valid while the call lasts."""

    ticket: Ticket
    cached: bool = True
    """Whether it was not encoded for this request."""
    grid: tuple[int, ...] = ()
    """The number of patches in time, height and width. Only of media, and of families that compute positions from it."""

    @property
    def uuid(self) -> str:
        """The key in hexadecimal: the item's name in other systems."""
        return self.ticket.key.hex()
