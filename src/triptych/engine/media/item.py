"""An item before preprocessing: its bytes, and how they are decoded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from triptych.domain.media import MediaInfo
from triptych.engine.media.audio import Samples, decode_audio
from triptych.engine.media.images import Pixels, decode_image
from triptych.engine.media.videos import Frame, decode_video
from triptych.ports import StopSignal


class MediaItem(Protocol):
    """Call the method of the item's modality. Raises InvalidMedia, and Cancelled when decoding was stopped."""

    @property
    def info(self) -> MediaInfo: ...

    @property
    def stopped(self) -> bool:
        """Whether nobody waits for the item any more."""
        ...

    def pixels(self) -> Pixels:
        """Pixels of an image, as ``images.decode_image`` returns them."""
        ...

    def frames(self, indices: Sequence[int]) -> Iterator[Frame]:
        """Frames of a video, as ``videos.decode_video`` yields them."""
        ...

    def samples(self, sample_rate_hz: int) -> Samples:
        """Samples of audio, as ``audio.decode_audio`` returns them."""
        ...


class Decoding(Protocol):
    """Place where items are decoded."""

    def item(self, media: bytes, info: MediaInfo, stop: StopSignal | None = None) -> MediaItem:
        """``stop`` ends a running decode, if possible."""
        ...


@dataclass(frozen=True, slots=True)
class LocalItem:
    """Decoded in this process and thread without a way to stop: for trusted bytes, or a process that may be lost."""

    media: bytes
    info: MediaInfo

    @property
    def stopped(self) -> bool:
        return False

    def pixels(self) -> Pixels:
        return decode_image(self.media, self.info)

    def frames(self, indices: Sequence[int]) -> Iterator[Frame]:
        return decode_video(self.media, self.info, indices)

    def samples(self, sample_rate_hz: int) -> Samples:
        return decode_audio(self.media, self.info, sample_rate_hz)


class LocalDecoding:
    """``Decoding`` in the caller's own process: measurements at start, tests, benchmarks."""

    def item(self, media: bytes, info: MediaInfo, stop: StopSignal | None = None) -> MediaItem:  # noqa: ARG002 - cannot be stopped
        return LocalItem(media, info)
