"""Qwen2-VL and Qwen2.5-VL: images of any shape, videos, and rotary positions in time, height and width.

They differ in the temporal positions of a video's patches: consecutive in Qwen2-VL; in Qwen2.5-VL spaced by
``tokens_per_second`` times the seconds between them. For independent units see ``qwen_vision``.
"""

from dataclasses import dataclass
from math import floor
from typing import Self

from triptych.domain.media import MediaInfo
from triptych.errors import InvalidMedia
from triptych.families.base import Placeholders, PromptReplacement
from triptych.families.defaults import TEXT_DEFAULTS, VISION_DEFAULTS
from triptych.families.fields import integer
from triptych.families.model_files import ModelFiles
from triptych.families.qwen_vision import (
    Grid,
    Language,
    Patches,
    PixelRange,
    QwenVision,
    VideoRules,
    frame_rate,
    is_video,
)

_IMAGE_PIXELS = PixelRange(56 * 56, 28 * 28 * 1280)
_VIDEO_PIXELS = PixelRange(128 * 28 * 28, 28 * 28 * 768)


@dataclass(frozen=True, slots=True)
class Qwen2VL(QwenVision):
    """``tokens_per_second`` is None for Qwen2-VL."""

    model_type: str
    tokens_per_second: int | None

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        timed = files.model_type == "qwen2_5_vl"
        vision = {**VISION_DEFAULTS[files.model_type], **files.config.get("vision_config", {})}
        return cls(
            model_type=files.model_type,
            language=Language.load(
                files.config,
                TEXT_DEFAULTS[f"{files.model_type}_text"],
                integer(vision, "out_hidden_size" if timed else "hidden_size"),
            ),
            patches=Patches.load(vision, files, image_side=14, video_side=14),
            images=PixelRange.load(files.image_processor, _IMAGE_PIXELS),
            videos=VideoRules.load(files, pixels=_VIDEO_PIXELS, max_tokens=128_000),
            tokens_per_second=integer(vision, "tokens_per_second") if timed else None,
        )

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        token_id = self.language.video_id if is_video(info) else self.language.image_id
        return (Placeholders(token_id, self.patches.tokens(self.grid(info))),)

    def grid(self, info: MediaInfo) -> Grid:
        """The grid of patches of a processed item. Raises InvalidMedia."""
        if not is_video(info):
            return self.patches.grid(1, *self.images.fit(info.height, info.width, self.patches.token_side))
        count = len(self.sampled_frames(info))
        pixels = self.videos.pixels
        if self.videos.capped:
            whole = int(self.videos.max_tokens * self.patches.token_side**2 * 0.9)
            share = min(pixels.most, whole * self.patches.frames // count)
            pixels = PixelRange(pixels.least, max(share, int(pixels.least * 1.05)))
        return self.patches.grid(count, *pixels.fit(info.height, info.width, self.patches.token_side))

    def sampled_frames(self, info: MediaInfo) -> tuple[int, ...]:
        """The indices of the frames that the vision encoder sees, ascending, in whole patches. Raises InvalidMedia.

        Like transformers' ``sample_frames``, which for some lengths steps in floating point past the last frame.
        """
        rules, patch = self.videos, self.patches.frames
        most = min(rules.max_frames, info.frames) // patch * patch
        wanted = info.frames / frame_rate(info) * rules.fps
        count = floor(min(max(wanted, rules.min_frames), most) / patch) * patch
        if not count:
            raise InvalidMedia(f"a video of {info.frames} frames is too short: the model takes {patch} at least")
        return tuple(at * info.frames // count for at in range(count))

    def patch_seconds(self, info: MediaInfo) -> float:
        """Seconds between adjacent patches in time. Raises InvalidMedia."""
        sampled_per_s = len(self.sampled_frames(info)) / info.frames * frame_rate(info)
        return self.patches.frames / sampled_per_s
