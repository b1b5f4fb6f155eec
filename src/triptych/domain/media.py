"""Items: the images, videos and audio clips of a request."""

from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

DIGEST_NBYTES = 32


class Modality(Enum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


def digest_of(media: bytes) -> bytes:
    """The whole BLAKE2b digest of an item's bytes. Router and encoder each compute it, and have to agree."""
    return blake2b(media, digest_size=DIGEST_NBYTES).digest()


@dataclass(frozen=True, slots=True)
class MediaInfo:
    """What is known of an item from its bytes alone, without decoding pixels.

    ``width`` and ``height`` are in pixels, after the orientation is applied; 0 for audio. ``digest`` is that
    of ``digest_of``: never truncated, never a client's. ``frames`` are all that a video has
    (1 for an image), shown over ``duration_s``; each has been turned by ``rotation_deg`` clockwise (0, 90, 180 or 270)
    to be ``width`` by ``height``. ``samples`` are those of one channel of audio at ``sample_rate_hz``.
    Decoders hold an item to what stands here: one that turns out otherwise is refused.

    ``options`` are no property of the bytes: they say how the family wants the item encoded in this request, where that
    is not always the same.
    """

    modality: Modality
    format: str
    width: int
    height: int
    nbytes: int
    digest: bytes
    frames: int = 1
    duration_s: float = 0.0
    samples: int = 0
    sample_rate_hz: int = 0
    rotation_deg: int = 0
    options: tuple[tuple[str, str], ...] = ()

    @property
    def pixels(self) -> int:
        """Of one frame."""
        return self.width * self.height

    @property
    def frames_per_s(self) -> float:
        """Of a video, on average; 0 for what has no duration."""
        return self.frames / self.duration_s if self.duration_s else 0.0

    def samples_at(self, sample_rate_hz: int) -> int:
        """Samples of one channel once the audio is brought to another rate: any that has begun counts."""
        return -(-self.samples * sample_rate_hz // self.sample_rate_hz)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one item that one encoder does: ``count`` of its units (tiles, frames) from unit ``first`` on.

    The item has ``of`` units. What a unit is, and that units do not depend on each other, is the family's to say.
    """

    first: int
    count: int
    of: int

    def __str__(self) -> str:
        """For people, who count from one."""
        return f"{self.first + 1}-{self.first + self.count}/{self.of}"
