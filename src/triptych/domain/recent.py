"""Chats that have ended lately: what they asked for and got, without contents."""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.domain.media import MediaInfo
from triptych.domain.record import record
from triptych.domain.timeline import Timeline


@record
class ChatShape:
    """Sizes of a request, known once it is prepared."""

    prompt_tokens: int
    """With those of the items."""
    item_tokens: int
    """Placeholders of the items."""
    media: tuple[MediaInfo, ...]
    choices: int


@record
class EndedChat:
    """A chat that was served, whatever came of it."""

    started_s: float
    """When the router got it, on the router's clock."""
    tenant: str
    shape: ChatShape
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class RecentChats:
    """Chats that have ended since a position. All counts are since the router's start."""

    position: int
    """From where to go on."""
    missed: int
    """Chats since the position asked for that are no longer kept."""
    chats: Sequence[EndedChat]
    left: int
    """Further ones that are kept."""
    refused: int
    unprepared: int
    """Chats that failed or were cancelled before their sizes were known."""
    running_since_s: Sequence[float]
    """When the chats came that run, on the router's clock."""
    now_s: float
