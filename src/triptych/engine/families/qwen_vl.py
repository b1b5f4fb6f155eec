"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: items of any shape in one pass, rotary positions in time, height and width.

Rotary positions are computed during preprocessing and transferred with the embedding. So the decoder adapter only
places them, and a shard of a video brings its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import PreTrainedModel

from triptych.domain.embedding import TensorSpec
from triptych.domain.media import MediaInfo, Modality, Shard
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.families.adapters import (
    Features,
    ForwardPart,
    ImageEncoder,
    PlacedItem,
    PromptPlan,
    embedding_rows,
    layer_rows,
    layer_rows_of_pass,
)
from triptych.engine.families.plain import PlainDecoder
from triptych.engine.media.image_processor import ImagePreparer
from triptych.engine.media.item import MediaItem
from triptych.engine.media.videos import Frame
from triptych.engine.tensors import domain_dtype
from triptych.errors import InvalidRequest
from triptych.families.model_files import Json, ModelFiles
from triptych.families.qwen2_vl import Qwen2VL
from triptych.families.qwen3_vl import Qwen3VL, deepstack
from triptych.families.qwen_vision import ROTARY, Grid

QwenVL = Qwen2VL | Qwen3VL

_PIXEL_SETTINGS = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "resample")
_HALVES = [0.5, 0.5, 0.5]
_BICUBIC = 3
_CHANNELS = "RGB"


class QwenEncoder:
    def __init__(self, model: PreTrainedModel | ImageEncoder, checkpoint: Checkpoint) -> None:
        self._model: Any = model
        if isinstance(model, nn.Module):
            _embed_patches_by_product(model)
        self._family = _qwen(checkpoint)
        self._images = ImagePreparer(checkpoint.files)
        self._frames = _FramePreparer(checkpoint.files, self._family)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {**self._images.settings, "videos": {**self._frames.settings, **asdict(self._family.videos)}}

    def prepare(self, item: MediaItem) -> Features:
        frames = self._family.grid(item.info).frames
        return self.prepare_shard(item, Shard(0, frames, frames))

    def prepare_shard(self, item: MediaItem, shard: Shard) -> Features:
        """A unit is a temporal patch; an image has one."""
        info = item.info
        whole = self._family.grid(info)
        grid = whole._replace(frames=shard.count)
        if info.modality is Modality.VIDEO:
            length = self._family.patches.frames
            numbers = self._family.sampled_frames(info)[shard.first * length :][: shard.count * length]
            pixels = self._frames.prepare(item.frames(numbers), grid)
        else:
            pixels = self._images.process([self._images.open(item)])["pixel_values"]
        if len(pixels) != grid.frames * grid.rows * grid.columns:
            raise ValueError(f"the processor made {len(pixels)} patches, not the {grid} that were counted")
        per_unit = self._family.patches.tokens_per_frame(grid)
        rotary = _rotary(self._family, info, whole)[shard.first * per_unit :][: shard.count * per_unit]
        return {"pixel_values": pixels, "grid": torch.tensor(grid), ROTARY: rotary}

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        """Images and videos alike: the encoder only needs their grids."""
        pixels = torch.cat([features["pixel_values"] for features in batch])
        grids = torch.stack([features["grid"] for features in batch])
        encoded = self._model.get_image_features(
            pixels.to(device=self._model.device, dtype=self._model.dtype),
            image_grid_thw=grids.to(self._model.device),
            return_dict=True,
        )
        rows = [len(rows_of_image) for rows_of_image in encoded.pooler_output]
        # One tensor per item; up to transformers 5.17 DeepStack's are a single one.
        layers = [
            torch.split(layer, rows) if isinstance(layer, torch.Tensor) else layer
            for layer in getattr(encoded, "deepstack_features", ())
        ]
        rotary = [features[ROTARY] for features in batch]
        return list(zip(encoded.pooler_output, rotary, *layers, strict=True))


class _PatchEmbedding(nn.Module):
    """Patches, [n, values of a patch], to [n, width]: the product that a convolution over whole patches is.

    On a CPU it takes under a third of the convolution's time, which is a twentieth of a small encoder's.
    """

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        weight = convolution.weight.data.flatten(1)
        self.proj = nn.Linear(weight.shape[1], weight.shape[0], bias=convolution.bias is not None, device="meta")
        self.proj.weight = nn.Parameter(weight, requires_grad=False)
        if convolution.bias is not None:
            self.proj.bias = nn.Parameter(convolution.bias.data, requires_grad=False)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.proj(patches.to(self.proj.weight.dtype))
        return embedded


def _embed_patches_by_product(model: nn.Module) -> None:
    """Replace the modules that embed patches."""
    for module in list(model.modules()):
        convolution = getattr(getattr(module, "patch_embed", None), "proj", None)
        if isinstance(convolution, nn.Conv3d):
            module.patch_embed = _PatchEmbedding(convolution)


class _FramePreparer:
    """Preprocesses video frames by the families' image processor with the settings for videos."""

    def __init__(self, files: ModelFiles, family: QwenVL) -> None:
        defaults: Json = {"image_mean": _HALVES, "image_std": _HALVES} if isinstance(family, Qwen3VL) else {}
        given = {**defaults, **files.video_processor}
        settings = {name: given[name] for name in _PIXEL_SETTINGS if given.get(name) is not None}
        self._patches = family.patches
        self._resample = Image.Resampling(settings.get("resample", _BICUBIC))
        self._images = ImagePreparer(
            replace(files, image_processor={**settings, "image_processor_type": "Qwen2VLImageProcessor"}),
            {
                "patch_size": self._patches.side,
                "merge_size": self._patches.merge,
                "temporal_patch_size": 1,  # ``prepare`` joins frames
                "do_resize": False,  # resized by the bounds for videos
            },
        )

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._images.settings

    def prepare(self, frames: Iterable[Frame], grid: Grid) -> torch.Tensor:
        """[patches, values of a patch], in the encoder's order.

        Each temporal patch is finished before the next frames are read, so that memory is bounded by the result.
        """
        side, length = self._patches.side, self._patches.frames
        size = (grid.columns * side, grid.rows * side)
        places = grid.rows * grid.columns
        pixels = torch.empty(grid.frames, places, len(_CHANNELS) * length * side**2)
        resized = (Image.fromarray(frame).resize(size, self._resample) for frame in frames)
        at = 0
        while patch := list(islice(resized, length)):
            patch += patch[-1:] * (length - len(patch))
            patches = self._images.process(patch)["pixel_values"].view(length, places, len(_CHANNELS), side**2)
            # Within a channel, the frames of a temporal patch are adjacent at each place.
            pixels[at] = patches.permute(1, 2, 0, 3).flatten(1)
            at += 1
        return pixels.flatten(0, 1)


def _rotary(family: QwenVL, info: MediaInfo, grid: Grid) -> torch.Tensor:
    """[tokens, 3] int32: each token's time, height and width, relative to the start of its placeholders."""
    times = torch.arange(grid.frames)
    if isinstance(family, Qwen3VL):
        times = torch.zeros_like(times)  # each temporal patch is a separate run
    elif family.tokens_per_second is not None and info.modality is Modality.VIDEO:
        # In single precision, as in transformers, since rounding decides for nearly integral products.
        seconds = torch.tensor(family.patch_seconds(info), dtype=torch.float32)
        times = (times * (family.tokens_per_second * seconds)).long()
    merge = family.patches.merge
    axes = (times, torch.arange(grid.rows // merge), torch.arange(grid.columns // merge))
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2).int()


class QwenDecoder:
    """Places rotary positions; for Qwen3-VL, passes DeepStack features to the decoder's further layers."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._plain = PlainDecoder(model, checkpoint)
        self._family = _qwen(checkpoint)
        self._dtype = domain_dtype(model.dtype)

    @property
    def decoder(self) -> PreTrainedModel:
        return self._plain.decoder

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        return tuple(tensors) == self._family.tensors(tokens, self._dtype)

    def plan(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> PromptPlan:
        if not items:
            return PromptPlan(extra={})
        in_order = sorted(items, key=lambda item: item.positions)
        rows = embedding_rows(in_order)
        positions = _positions(len(token_ids), embedding_rows(in_order, ROTARY))
        depth = self._family.deepstack_layers if isinstance(self._family, Qwen3VL) else 0
        return PromptPlan(
            rows=rows,
            positions=positions,
            next_position=int(positions.max()) + 1,
            extra=layer_rows(in_order, [deepstack(layer) for layer in range(depth)]),
        )

    @property
    def looks_ahead(self) -> bool:
        return False

    @property
    def has_spans(self) -> bool:
        return False

    @property
    def supports_cuda_graphs(self) -> bool:
        return True

    def inputs(self, parts: Sequence[ForwardPart], rows: int) -> Mapping[str, Any]:
        """The positions of items in a pass, and the features added per layer; empty for families without DeepStack."""
        found = layer_rows_of_pass([(part, part.plan.extra) for part in parts], rows)
        return {} if found is None else {"visual_pos_masks": found[0], "deepstack_visual_embeds": found[1]}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._plain.logits(hidden)


def _positions(length: int, rotary: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """[3, length] for a prompt with items whose positions are ``rotary``, by the start of each run.

    Text continues after the height and width of what precedes it, whatever its time. Raises InvalidRequest for
    impossible positions.
    """
    columns: list[torch.Tensor] = []
    at = following = 0
    for start, rows in rotary.items():
        axes = rows.T.long().cpu()
        if int(axes.min()) < 0 or int(axes[1:].max()) >= len(rows):
            raise InvalidRequest(f"the item at position {start} of the prompt has rotary positions that none has")
        columns += [_text(following, start - at), axes + following + start - at]
        following += start - at + int(axes[1:].max()) + 1
        at = start + len(rows)
    return torch.cat([*columns, _text(following, length - at)], dim=1)


def _text(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count).expand(3, -1)


def _qwen(checkpoint: Checkpoint) -> QwenVL:
    if not isinstance(checkpoint.family, QwenVL):
        raise TypeError(f"{checkpoint.family.model_type} is not of the families that this module serves")
    return checkpoint.family
