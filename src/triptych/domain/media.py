"""Items: the images, videos and audio clips of a request."""

from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b

from triptych.domain.record import record

DIGEST_NBYTES = 32
LORA = "lora"
"""Name of the option with the digest of a LoRA adapter."""


class Modality(Enum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs in Python on every lookup


def digest_of(media: bytes) -> bytes:
    """The full BLAKE2b digest of an item's bytes. Router and encoder both compute it."""
    return blake2b(media, digest_size=DIGEST_NBYTES).digest()


@record
class MediaInfo:
    """Properties of an item, read from its header without decoding it.

    ``width`` and ``height`` are in pixels, after orientation; 0 for audio. ``digest`` is ``digest_of`` the bytes, never
    client-supplied. ``frames`` is a video's total (1 for an image) over ``duration_s``; each frame must be rotated by
    ``rotation_deg`` clockwise (0, 90, 180 or 270) to be ``width`` by ``height``. ``samples`` counts one audio channel
    at ``sample_rate_hz``. Decoders refuse an item that deviates from its MediaInfo.

    ``options`` come from the family, or name a LoRA adapter: how this request wants the item encoded, where that varies.
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
    def lora(self) -> str:
        """Digest of the LoRA adapter that it is encoded with; empty without one."""
        return dict(self.options).get(LORA, "") if self.options else ""

    def with_lora(self, digest: str) -> "MediaInfo":
        """The same item, encoded with the adapter of this digest."""
        return replace(self, options=(*self.options, (LORA, digest)))

    @property
    def pixels(self) -> int:
        """Pixels of one frame."""
        return self.width * self.height

    @property
    def samples_or_pixels(self) -> int:
        """Samples of a sound, or pixels of all frames: the size that its preprocessing is measured by."""
        return self.samples if self.modality is Modality.AUDIO else self.pixels * self.frames

    @property
    def frames_per_s(self) -> float:
        """Average frame rate of a video; 0 without a duration."""
        return self.frames / self.duration_s if self.duration_s else 0.0

    def samples_at(self, sample_rate_hz: int) -> int:
        """Samples of one channel after resampling, rounded up."""
        return -(-self.samples * sample_rate_hz // self.sample_rate_hz)


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of one item for one encoder: ``count`` of its ``of`` units (tiles, frames), from unit ``first`` on.

    The family defines units so that they do not depend on each other.
    """

    first: int
    count: int
    of: int

    def __str__(self) -> str:
        """Text for messages, counting from one."""
        return f"{self.first + 1}-{self.first + self.count}/{self.of}"
