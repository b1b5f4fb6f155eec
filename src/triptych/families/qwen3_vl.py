"""Qwen3-VL: Qwen2-VL with DeepStack (arXiv 2406.04334): features of vision layers are added in the first layers.

In a prompt, each temporal patch of a video is enclosed in vision markers, after its timestamp as text. The rotary
positions contain no time. For independent units see ``qwen_vision``.
"""

from dataclasses import dataclass
from typing import Self

from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import MediaInfo
from triptych.errors import InvalidMedia
from triptych.families.base import Placeholders, PromptReplacement
from triptych.families.defaults import TEXT_DEFAULTS, VISION_DEFAULTS
from triptych.families.fields import integer
from triptych.families.model_files import BadModel, ModelFiles
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

_IMAGE_PIXELS = PixelRange(56 * 56, 28 * 28 * 1280)  # the image processor is Qwen2-VL's
_VIDEO_PIXELS = PixelRange(128 * 32 * 32, 32 * 32 * 768)
_VISION_START, _VISION_END = "<|vision_start|>", "<|vision_end|>"


def deepstack(layer: int) -> str:
    """Name of the tensor [tokens, hidden size] that is added to the output of the language model's layer ``layer``."""
    return f"deepstack_{layer}"


@dataclass(frozen=True, slots=True)
class Qwen3VL(QwenVision):
    """``deepstack_layers`` is the number of first layers of the language model that get DeepStack features."""

    deepstack_layers: int
    model_type: str = "qwen3_vl"

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        vision = {**VISION_DEFAULTS[files.model_type], **files.config.get("vision_config", {})}
        indexes = vision["deepstack_visual_indexes"]
        if not isinstance(indexes, list | tuple):
            raise BadModel(f"vision_config.deepstack_visual_indexes is {indexes!r}, not a list")
        return cls(
            language=Language.load(
                files.config, TEXT_DEFAULTS[f"{files.model_type}_text"], integer(vision, "out_hidden_size")
            ),
            patches=Patches.load(vision, files, image_side=14, video_side=16),
            images=PixelRange.load(files.image_processor, _IMAGE_PIXELS),
            videos=VideoRules.load(files, pixels=_VIDEO_PIXELS, max_tokens=768),
            deepstack_layers=len(indexes),
        )

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        grid = self.grid(info)
        tokens = self.patches.tokens_per_frame(grid)
        if not is_video(info):
            return (Placeholders(self.language.image_id, tokens),)
        prompt_replacement: list[str | Placeholders] = []
        mark = ""
        for seconds in self.patch_times(info):
            prompt_replacement += [
                f"{mark}<{seconds:.1f} seconds>{_VISION_START}",
                Placeholders(self.language.video_id, tokens),
            ]
            mark = _VISION_END
        return (*prompt_replacement, mark)

    def tensors(self, tokens: int, dtype: DType) -> tuple[TensorSpec, ...]:
        """The tensors of an item with ``tokens`` tokens."""
        shape = (tokens, self.language.hidden_size)
        stacked = (TensorSpec(deepstack(layer), dtype, shape) for layer in range(self.deepstack_layers))
        return (*self.language.rows(tokens, dtype), *stacked)

    def grid(self, info: MediaInfo) -> Grid:
        """The grid of patches of a processed item. Raises InvalidMedia."""
        side = self.patches.token_side
        if not is_video(info):
            return self.patches.grid(1, *self.images.fit(info.height, info.width, side))
        count = len(self.sampled_frames(info))
        pixels = self.videos.pixels
        if self.videos.capped:
            share = min(self.videos.max_tokens * side**2, pixels.most // count)
            pixels = PixelRange(pixels.least, max(share, int(pixels.least * 1.05)) * count)
        height, width = info.height, info.width
        if 0 < min(height, width) < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        counted = round(count / self.patches.frames) * self.patches.frames
        return self.patches.grid(count, *pixels.fit(height, width, side, frames=count, counted=counted))

    def sampled_frames(self, info: MediaInfo) -> tuple[int, ...]:
        """The indices of the frames that the vision encoder sees, ascending, including the first and last.

        Raises InvalidMedia.
        """
        rules = self.videos
        wanted = info.frames / frame_rate(info) * rules.fps
        count = int(min(max(wanted, rules.min_frames), rules.max_frames, info.frames))
        if count < self.patches.frames:
            raise InvalidMedia(
                f"a video of {info.frames} frames is too short: the model takes {self.patches.frames} at least"
            )
        step = (info.frames - 1) / max(1, count - 1)
        return (*(round(at * step) for at in range(count - 1)), info.frames - 1)

    def patch_times(self, info: MediaInfo) -> tuple[float, ...]:
        """The time of each temporal patch in seconds: midway between its first and last frame."""
        rate = frame_rate(info)
        frames, patch = self.sampled_frames(info), self.patches.frames
        frames += (frames[-1],) * (-len(frames) % patch)
        return tuple((frames[at] / rate + frames[at + patch - 1] / rate) / 2 for at in range(0, len(frames), patch))
