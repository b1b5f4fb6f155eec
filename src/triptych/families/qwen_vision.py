"""What the vision encoders of the Qwen families have in common: patches, bounds on pixels, and what is known of a video.

An image keeps its shape: it is brought to multiples of a token's side, within bounds on its pixels, and cut into
patches; ``merge`` x ``merge`` of them become one token. Frames of a video are cut alike, a few of them into one patch.

Nothing attends from one patch in time to another (the encoders' ``cu_seqlens`` end with each), so that is where a video may
be cut without a change of its embedding; within one, and so within an image, all patches attend to each other.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Any, NamedTuple, Self

from triptych.domain.embedding import EMBEDS, DType, TensorSpec
from triptych.domain.media import MediaInfo, Modality
from triptych.errors import InvalidMedia
from triptych.families.base import refuse_unless
from triptych.families.fields import integer
from triptych.families.model_files import BadModel, Json, ModelFiles

ROTARY = "rotary"
"""Name of the tensor [tokens, 3] of rotary positions (time, height, width), relative to where their run starts."""

MAX_ASPECT = 200
"""How many times as long as the shorter side the longer one may be."""


class Grid(NamedTuple):
    """The patches of one item: in time, in height, in width."""

    frames: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Patches:
    """A patch is ``side`` pixels wide and high and ``frames`` frames long; ``merge`` x ``merge`` make a token."""

    side: int
    frames: int
    merge: int

    @classmethod
    def load(cls, vision: Json, files: ModelFiles, *, image_side: int, video_side: int) -> Self:
        """What the vision encoder takes; ``image_side`` and ``video_side`` are what the processors make by default.

        Raises BadModel unless both processors cut as the encoder does.
        """
        patches = cls(
            integer(vision, "patch_size"), integer(vision, "temporal_patch_size"), integer(vision, "spatial_merge_size")
        )
        for name, processor, side in (
            ("image", files.image_processor, image_side),
            ("video", files.video_processor, video_side),
        ):
            made = {"patch_size": side, "temporal_patch_size": 2, "merge_size": 2} | _given(processor)
            for field, wanted in (
                ("patch_size", patches.side),
                ("temporal_patch_size", patches.frames),
                ("merge_size", patches.merge),
            ):
                if made[field] != wanted:
                    raise BadModel(
                        f"the {name} processor's {field} is {made[field]!r}, the vision encoder takes {wanted}"
                    )
            if made.get("do_resize") is False:
                raise BadModel(f"the {name} processor's do_resize is false: what it makes would not fit the patches")
        return patches

    def pixels(self, grid: Grid) -> int:
        """Pixels of all frames of it."""
        return grid.frames * self.frames * grid.rows * grid.columns * self.side**2

    @property
    def token_side(self) -> int:
        """Pixels in width and height that one token stands for."""
        return self.side * self.merge

    def grid(self, frames: int, height: int, width: int) -> Grid:
        """The patches of what is ``height`` x ``width`` after preprocessing; the last frame fills up the last patch."""
        return Grid(-(-frames // self.frames), height // self.side, width // self.side)

    def tokens_per_frame(self, grid: Grid) -> int:
        """Tokens of one patch in time."""
        return grid.rows * grid.columns // self.merge**2

    def tokens(self, grid: Grid) -> int:
        return grid.frames * self.tokens_per_frame(grid)


class PixelRange(NamedTuple):
    """Bounds on the pixels of an image or a frame after preprocessing."""

    least: int
    most: int

    @classmethod
    def load(cls, processor: Json, default: Self) -> Self:
        """From ``size``, or the older ``min_pixels`` and ``max_pixels``, which come first. Raises BadModel."""
        fields = _given(processor)
        size = fields.get("size", {"shortest_edge": default.least, "longest_edge": default.most})
        if not isinstance(size, Mapping):
            raise BadModel(f"the processor's size is {size!r}: it has to give shortest_edge and longest_edge")
        older = {"shortest_edge": fields.get("min_pixels"), "longest_edge": fields.get("max_pixels")}
        size = {**size, **_given(older)}
        return cls(integer(size, "shortest_edge"), integer(size, "longest_edge"))

    def fit(self, height: int, width: int, multiple: int, *, frames: int = 1, counted: int = 1) -> tuple[int, int]:
        """Height and width after preprocessing, as transformers' ``smart_resize``: multiples of ``multiple`` pixels.

        The bounds hold for ``counted`` frames together where a family bounds whole videos; it rounds their number,
        ``frames``, for the comparison but not for the correction. Raises InvalidMedia.
        """
        shorter, longer = sorted((height, width))
        if shorter < 1:
            raise InvalidMedia(f"an item of {width}x{height} has no pixels")
        if longer / shorter > MAX_ASPECT:
            raise InvalidMedia(
                f"the longer side is {longer / shorter:.1f} times the shorter one, the model takes at most {MAX_ASPECT}"
            )
        rows, columns = round(height / multiple), round(width / multiple)
        if counted * rows * columns * multiple**2 > self.most:
            beta = sqrt(frames * height * width / self.most)
            rows, columns = (max(1, floor(side / beta / multiple)) for side in (height, width))
        elif counted * rows * columns * multiple**2 < self.least:
            beta = sqrt(self.least / (frames * height * width))
            rows, columns = (ceil(side * beta / multiple) for side in (height, width))
        return rows * multiple, columns * multiple


@dataclass(frozen=True, slots=True)
class VideoRules:
    """How a video is sampled, ``fps`` frames for each second within bounds, and how large its frames become.

    ``capped`` adds the reference implementation's bound on a video of many frames, given by ``max_tokens``.
    """

    fps: float
    min_frames: int
    max_frames: int
    pixels: PixelRange
    capped: bool
    max_tokens: int

    @classmethod
    def load(cls, files: ModelFiles, *, pixels: PixelRange, max_tokens: int) -> Self:
        """From the video processor; ``pixels`` and ``max_tokens`` are its defaults. Raises BadModel.

        ``do_sample_frames`` is for callers of the processor whose frames may be chosen already. Whoever sends a video
        here has chosen nothing, so it always is sampled.
        """
        fields = _given(files.video_processor)
        if "num_frames" in fields:
            raise BadModel("the video processor's num_frames is not supported: videos are sampled by fps")
        fps = fields.get("fps", 2.0)
        if not isinstance(fps, int | float) or not 0 < fps < float("inf"):
            raise BadModel(f"the video processor's fps is {fps!r}, not a positive number")
        sizes = {"min_frames": 4, "max_frames": 768, "max_video_tokens": max_tokens} | fields
        return cls(
            fps=fps,
            min_frames=integer(sizes, "min_frames"),
            max_frames=integer(sizes, "max_frames"),
            pixels=PixelRange.load(fields, pixels),
            capped=bool(fields.get("cap_pixels_per_frame", False)),
            max_tokens=integer(sizes, "max_video_tokens"),
        )


@dataclass(frozen=True, slots=True)
class Language:
    """What the families read of the language model, and of the tokens that stand for items."""

    image_id: int
    video_id: int
    hidden_size: int
    context_length: int

    @classmethod
    def load(cls, config: Json, defaults: Json, made: int) -> Self:
        """``made`` is the width of what the vision encoder makes. Raises BadModel.

        Older checkpoints have the language model's fields at the root of their configuration.
        """
        fields = {**defaults, **config.get("text_config", config)}
        ids = {"image_token_id": 151655, "video_token_id": 151656, **config}
        language = cls(
            image_id=integer(ids, "image_token_id"),
            video_id=integer(ids, "video_token_id"),
            hidden_size=integer(fields, "hidden_size"),
            context_length=integer(fields, "max_position_embeddings"),
        )
        if made != language.hidden_size:
            raise BadModel(
                f"the vision encoder makes embeddings of {made}, the language model takes {language.hidden_size}: "
                "text_config and vision_config must agree"
            )
        return language

    @property
    def replacement_targets(self) -> Mapping[Modality, tuple[int, ...]]:
        return {Modality.IMAGE: (self.image_id,), Modality.VIDEO: (self.video_id,)}

    @property
    def placeholder_ids(self) -> frozenset[int]:
        return frozenset({self.image_id, self.video_id})

    def rows(self, tokens: int, dtype: DType) -> tuple[TensorSpec, ...]:
        """An item's embeddings and rotary positions."""
        return (
            TensorSpec(EMBEDS, dtype, (tokens, self.hidden_size)),
            TensorSpec(ROTARY, DType.I32, (tokens, 3)),
        )


@dataclass(frozen=True, slots=True)
class QwenVision(ABC):
    """All of ``base.Family`` and ``base.Divides`` that the families agree on, given the ``grid`` of an item."""

    language: Language
    patches: Patches
    images: PixelRange
    videos: VideoRules

    @property
    def hidden_size(self) -> int:
        return self.language.hidden_size

    @property
    def context_length(self) -> int:
        return self.language.context_length

    @property
    def replacement_targets(self) -> Mapping[Modality, tuple[int, ...]]:
        return self.language.replacement_targets

    @property
    def placeholder_ids(self) -> frozenset[int]:
        return self.language.placeholder_ids

    def outputs(self, info: MediaInfo, dtype: DType) -> tuple[TensorSpec, ...]:
        return self.tensors(self.patches.tokens(self.grid(info)), dtype)

    def tensors(self, tokens: int, dtype: DType) -> tuple[TensorSpec, ...]:
        """What an item of so many tokens brings."""
        return self.language.rows(tokens, dtype)

    def units(self, info: MediaInfo) -> tuple[int, ...]:
        """Patches in time: no attention goes from one to another."""
        grid = self.grid(info)
        return (self.patches.tokens_per_frame(grid),) * grid.frames

    def seen_pixels(self, info: MediaInfo) -> int:
        """Frames that fill up the last patch included."""
        return self.patches.pixels(self.grid(info))

    @abstractmethod
    def grid(self, info: MediaInfo) -> Grid:
        """The patches that the processor cuts an item into. Raises InvalidMedia."""
        ...


def frame_rate(info: MediaInfo) -> float:
    """Frames per second of a video, from its header. Raises InvalidMedia."""
    if info.frames < 1 or not 0 < info.duration_s < float("inf"):
        raise InvalidMedia(f"the video's header says {info.frames} frames in {info.duration_s} s")
    return info.frames / info.duration_s


def is_video(info: MediaInfo) -> bool:
    """Raises InvalidMedia for what is neither a video nor an image."""
    refuse_unless(info, Modality.IMAGE, Modality.VIDEO)
    return info.modality is Modality.VIDEO


def _given(fields: Json) -> dict[str, Any]:
    """Without what is null: saved configurations have all fields."""
    return {name: value for name, value in fields.items() if value is not None}
