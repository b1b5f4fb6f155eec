"""What a processor is given for an item: an image of Pillow, samples, or a video. Blank ones of a size, and noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

from triptych.domain.media import Modality
from triptych.engine.media.item import MediaItem
from triptych.families.generic import BlankItem

_SHAPES_ONLY = "meta"
"""Device of tensors without values."""
_LOUDNESS = 0.1


@dataclass(frozen=True, slots=True)
class Video:
    """Frames [n, 3, height, width] of bytes, and the header of their video."""

    frames: torch.Tensor
    header: BlankItem
    indices: tuple[int, ...] | None = None
    """Places of the frames in the video, which were sampled; None for all, of which the processor samples some."""

    def metadata(self) -> VideoMetadata:
        """The header as processors take it."""
        header = self.header
        return VideoMetadata(
            total_num_frames=header.frames,
            fps=header.frames / header.duration_s,
            width=header.width,
            height=header.height,
            duration=header.duration_s,
            frames_indices=None if self.indices is None else np.array(self.indices),  # type: ignore[arg-type]
        )


def blank_medium(blank: BlankItem) -> Any:
    """A medium of this size; frames of a video have a shape, and no values."""
    if blank.modality is Modality.AUDIO:
        return np.zeros(blank.samples, dtype=np.float32)
    if blank.modality is Modality.VIDEO:
        return Video(torch.empty(_shape(blank, blank.frames), dtype=torch.uint8, device=_SHAPES_ONLY), blank)
    return Image.new("RGB", (blank.width, blank.height))


def noise(blank: BlankItem) -> Any:
    """A medium of this size, always the same."""
    rng = np.random.default_rng(0)
    if blank.modality is Modality.AUDIO:
        return (_LOUDNESS * rng.standard_normal(blank.samples)).astype(np.float32)
    if blank.modality is Modality.VIDEO:
        return Video(torch.from_numpy(rng.integers(0, 256, _shape(blank, blank.frames), dtype=np.uint8)), blank)
    return Image.fromarray(rng.integers(0, 256, (blank.height, blank.width, 3), dtype=np.uint8))


def decoded(item: MediaItem, header: BlankItem, *, sample_rate_hz: int, frames: Sequence[int]) -> Any:
    """The medium of an item: samples at this rate, or these frames of a video."""
    if header.modality is Modality.AUDIO:
        return item.samples(sample_rate_hz)
    if header.modality is Modality.VIDEO:
        sampled = np.empty(_shape(header, len(frames)), dtype=np.uint8)
        for place, frame in zip(sampled, item.frames(frames), strict=True):
            place[...] = frame.transpose(2, 0, 1)
        return Video(torch.from_numpy(sampled), header, tuple(frames))
    return Image.fromarray(item.pixels())


def _shape(header: BlankItem, frames: int) -> tuple[int, ...]:
    return frames, 3, header.height, header.width
