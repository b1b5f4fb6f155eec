"""transformers' own video processors without torchvision, which they require.

They use one import of it, resizing and normalizing; Pillow and torch do the last two here. Sampling, sizes, patches and
metadata are transformers' code.
"""

import importlib
import sys
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import video_processing_utils

_base: Any = video_processing_utils.BaseVideoProcessor


class _OnPillow(_base):  # type: ignore[misc]
    """Inserted between a processor's class and transformers' base class."""

    def convert_to_rgb(self, video: torch.Tensor) -> torch.Tensor:
        return video

    def resize(self, image: torch.Tensor, size: Any, resample: int, **options: Any) -> torch.Tensor:
        """[videos, frames, 3, height, width] of bytes, frame by frame."""
        frames = image.flatten(0, 1).permute(0, 2, 3, 1).numpy()
        resized = [Image.fromarray(frame).resize((size.width, size.height), resample) for frame in frames]
        made = torch.from_numpy(np.stack([np.asarray(frame) for frame in resized])).permute(0, 3, 1, 2)
        return made.reshape(*image.shape[:2], *made.shape[1:])

    def normalize(self, image: torch.Tensor, mean: Any, std: Any, **options: Any) -> torch.Tensor:
        return (image - torch.as_tensor(mean).view(-1, 1, 1)) / torch.as_tensor(std).view(-1, 1, 1)


class _Sizes(_base):  # type: ignore[misc]
    """Records the size to which frames would be resized."""

    def resize(self, image: torch.Tensor, size: Any, **options: Any) -> tuple[int, int]:
        return size.height, size.width


def video_processor(name: str, **settings: Any) -> Any:
    """``Qwen2VLVideoProcessor`` or the like, with these settings."""
    return _derived(name, _OnPillow)(**settings)


def sizing_processor(name: str, **settings: Any) -> Any:
    """The same, for ``processed_size`` alone."""
    return _derived(name, _Sizes)(**settings)


def processed_size(processor: Any, frames: int, height: int, width: int) -> tuple[int, int]:
    """Height and width after a processor resizes ``frames`` frames. Raises ValueError for refused sizes."""
    video = torch.empty(1, dtype=torch.uint8).expand(1, frames, 3, height, width)
    size: tuple[int, int] = processor.resize(
        video,
        size=processor.size,
        resample=processor.resample,
        factor=processor.patch_size * processor.merge_size,
        temporal_factor=processor.temporal_patch_size,
        cap_pixels_per_frame=processor.cap_pixels_per_frame,
    )
    return size


@cache
def _derived(name: str, replaced: type) -> type:
    found = getattr(_module(name), name)
    return type(name, (found, replaced), {})


@cache
def _module(name: str) -> ModuleType:
    family = {"Qwen2VLVideoProcessor": "qwen2_vl", "Qwen3VLVideoProcessor": "qwen3_vl"}[name]
    path = (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    )
    stubs = {part: ModuleType(part) for part in path if part not in sys.modules}
    for part, stub in stubs.items():
        parent, _, child = part.rpartition(".")
        if parent:
            setattr(stubs[parent], child, stub)
    sys.modules.update(stubs)
    try:
        return importlib.import_module(f"transformers.models.{family}.video_processing_{family}")
    finally:
        for part in stubs:
            del sys.modules[part]
