"""Items: the images, videos and audio clips of a request."""

from dataclasses import dataclass
from enum import Enum


class Modality(Enum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class MediaInfo:
    """What is known of an item from its bytes alone, without decoding pixels.

    ``width`` and ``height`` are in pixels, after the EXIF orientation is applied. ``digest`` is the whole 32-byte
    BLAKE2b digest of the bytes: never truncated, never a client's.
    """

    modality: Modality
    format: str
    width: int
    height: int
    nbytes: int
    digest: bytes

    @property
    def pixels(self) -> int:
        return self.width * self.height


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a request: its bytes, what they are, and how many positions it takes in the prompt."""

    index: int
    media: bytes
    info: MediaInfo
    tokens: int
