"""Vision preprocessing shared by the Qwen families: patches, pixel limits, and video sampling.

An image keeps its aspect ratio. It is resized to multiples of a token's side, within pixel limits, and cut into
patches; ``merge`` x ``merge`` patches become one token. Video frames are cut alike, several frames per patch.

There is no attention between patches of different times (the encoders' ``cu_seqlens`` end with each). So a video can be
split there without changing its embedding. Within one time, and so within an image, all patches attend to each other.
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
"""Name of the tensor [tokens, 3] of rotary positions (time, height, width), relative to the start of their run."""

MAX_ASPECT = 200
"""Highest ratio of the longer to the shorter side."""


class Grid(NamedTuple):
    """The number of patches of an item in time, height and width."""

    frames: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Patches:
    """A patch has ``side`` by ``side`` pixels and ``frames`` frames; ``merge`` x ``merge`` patches make a token."""

    side: int
    frames: int
    merge: int

    @classmethod
    def load(cls, vision: Json, files: ModelFiles, *, image_side: int, video_side: int) -> Self:
        """The vision encoder's patches; ``image_side`` and ``video_side`` are the processors' default patch sizes.

        Raises BadModel unless both processors match the encoder.
        """
        patches = cls(
            integer(vision, "patch_size"), integer(vision, "temporal_patch_size"), integer(vision, "spatial_merge_size")
        )
        for name, processor, side in (
            ("image", files.image_processor, image_side),
            ("video", files.video_processor, video_side),
        ):
            fields = {"patch_size": side, "temporal_patch_size": 2, "merge_size": 2} | _given(processor)
            for field, wanted in (
                ("patch_size", patches.side),
                ("temporal_patch_size", patches.frames),
                ("merge_size", patches.merge),
            ):
                if fields[field] != wanted:
                    raise BadModel(
                        f"the {name} processor's {field} is {fields[field]!r}, the vision encoder takes {wanted}"
                    )
            if fields.get("do_resize") is False:
                raise BadModel(f"the {name} processor's do_resize is false: its output would not fit the patches")
        return patches

    def pixels(self, grid: Grid) -> int:
        """Pixels of all frames of the grid."""
        return grid.frames * self.frames * grid.rows * grid.columns * self.side**2

    @property
    def token_side(self) -> int:
        """Width and height of one token, in pixels."""
        return self.side * self.merge

    def grid(self, frames: int, height: int, width: int) -> Grid:
        """The patches of frames of ``height`` x ``width``; the last frame is repeated to fill the last patch."""
        return Grid(-(-frames // self.frames), height // self.side, width // self.side)

    def tokens_per_frame(self, grid: Grid) -> int:
        """Tokens per patch in time."""
        return grid.rows * grid.columns // self.merge**2

    def tokens(self, grid: Grid) -> int:
        return grid.frames * self.tokens_per_frame(grid)


class PixelRange(NamedTuple):
    """Limits on the pixels of a processed image or frame."""

    least: int
    most: int

    @classmethod
    def load(cls, processor: Json, default: Self) -> Self:
        """Load the limits from ``size``, or the older ``min_pixels`` and ``max_pixels``, which take precedence. Raises
        BadModel.
        """
        fields = _given(processor)
        size = fields.get("size", {"shortest_edge": default.least, "longest_edge": default.most})
        if not isinstance(size, Mapping):
            raise BadModel(f"the processor's size is {size!r}: shortest_edge and longest_edge are required")
        older = {"shortest_edge": fields.get("min_pixels"), "longest_edge": fields.get("max_pixels")}
        size = {**size, **_given(older)}
        return cls(integer(size, "shortest_edge"), integer(size, "longest_edge"))

    def fit(self, height: int, width: int, multiple: int, *, frames: int = 1, counted: int = 1) -> tuple[int, int]:
        """Height and width after preprocessing, like transformers' ``smart_resize``: multiples of ``multiple`` pixels.

        A family that limits whole videos compares with ``counted`` frames (``frames``, rounded), but corrects with
        ``frames``. Raises InvalidMedia.
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
    """Rules of sampling a video (``fps`` frames per second, within limits), and the limits of its frames' size.
    ``capped`` adds the reference implementation's limit ``max_tokens`` for long videos.
    """

    fps: float
    min_frames: int
    max_frames: int
    pixels: PixelRange
    capped: bool
    max_tokens: int

    @classmethod
    def load(cls, files: ModelFiles, *, pixels: PixelRange, max_tokens: int) -> Self:
        """Load the rules of the video processor; ``pixels`` and ``max_tokens`` are its defaults. Raises BadModel.
        ``do_sample_frames`` is ignored: it is for callers that pass frames they have already sampled.
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
    """The fields of the language model that the families need, and the placeholder ids."""

    image_id: int
    video_id: int
    hidden_size: int
    context_length: int

    @classmethod
    def load(cls, config: Json, defaults: Json, width_made: int) -> Self:
        """``made`` is the width of the vision encoder's output. Raises BadModel.

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
        if width_made != language.hidden_size:
            raise BadModel(
                f"the vision encoder makes embeddings of {width_made}, the language model takes {language.hidden_size}: "
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
        """The specs of an item's embeddings and rotary positions."""
        return (
            TensorSpec(EMBEDS, dtype, (tokens, self.hidden_size)),
            TensorSpec(ROTARY, DType.I32, (tokens, 3)),
        )


@dataclass(frozen=True, slots=True)
class QwenVision(ABC):
    """The parts of ``base.Family`` and ``base.Shardable`` shared by the Qwen families, given an item's ``grid``."""

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
        """The tensors of an item with ``tokens`` tokens."""
        return self.language.rows(tokens, dtype)

    def units(self, info: MediaInfo) -> tuple[int, ...]:
        """Units of an item: one per patch in time, as there is no attention between them."""
        grid = self.grid(info)
        return (self.patches.tokens_per_frame(grid),) * grid.frames

    def seen_pixels(self, info: MediaInfo) -> int:
        """Includes the frames that fill up the last patch."""
        return self.patches.pixels(self.grid(info))

    def patch_grid(self, info: MediaInfo) -> tuple[int, int, int]:
        """Grid of patches, as in ``base.Gridded``."""
        return self.grid(info)

    @abstractmethod
    def grid(self, info: MediaInfo) -> Grid:
        """The grid of patches of a processed item. Raises InvalidMedia."""
        ...


def frame_rate(info: MediaInfo) -> float:
    """Frames per second of a video, from its header. Raises InvalidMedia."""
    if info.frames < 1 or not 0 < info.duration_s < float("inf"):
        raise InvalidMedia(f"the video's header says {info.frames} frames in {info.duration_s} s")
    return info.frames / info.duration_s


def is_video(info: MediaInfo) -> bool:
    """Raises InvalidMedia for an item that is neither video nor image."""
    refuse_unless(info, Modality.IMAGE, Modality.VIDEO)
    return info.modality is Modality.VIDEO


def _given(fields: Json) -> dict[str, Any]:
    """The fields that are not null: saved configurations contain all fields."""
    return {name: value for name, value in fields.items() if value is not None}
