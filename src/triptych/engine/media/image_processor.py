"""Preprocesses images as a checkpoint's own image processor does."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import transformers
from PIL import Image

from triptych.engine.media.item import MediaItem
from triptych.families.model_files import BadModel, ModelFiles


class ImagePreparer:
    """A checkpoint's image processor on Pillow, which gives the same result everywhere; torchvision rounds differently."""

    def __init__(self, files: ModelFiles, options: Mapping[str, Any] | None = None) -> None:
        """``options`` are those that a family's processor always passes to its image processor. Raises BadModel."""
        self._processor = _load_processor(files)
        self._options = dict(options or {})

    @property
    def settings(self) -> Mapping[str, Any]:
        settings: dict[str, Any] = self._processor.to_dict()
        return settings | self._options

    def prepare(self, item: MediaItem) -> dict[str, torch.Tensor]:
        """The processor's tensors for one image, without their batch dimension. Thread-safe. Raises InvalidMedia."""
        return {name: value[0] for name, value in self.process([self.open(item)]).items()}

    def open(self, item: MediaItem) -> Image.Image:
        """The image in RGB. Raises InvalidMedia."""
        return Image.fromarray(item.pixels())

    def process(self, images: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The processor's tensors for images, nested as it takes them. Thread-safe."""
        batch = self._processor(images=images, return_tensors="pt", **self._options)
        return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def _load_processor(files: ModelFiles) -> Any:
    """Load by class rather than through ``AutoImageProcessor``, which some releases cannot import without torchvision.

    The class is taken from its module: transformers 5.17 exports a placeholder for classes whose docstrings mention
    torchvision, even if they do not need it.
    """
    settings = dict(files.image_processor)
    if "image_processor_type" not in settings:
        raise BadModel("the model directory names no image_processor_type")
    name = str(settings["image_processor_type"]).removesuffix("Fast").removesuffix("Pil") + "Pil"
    exported: Any = getattr(transformers, name, None)
    if exported is None:
        raise BadModel(f"transformers {transformers.__version__} has no image processor {name}")
    try:
        processor: Any = getattr(import_module(exported.__module__), name)
        return processor.from_dict(settings)
    except (ValueError, TypeError, ImportError) as error:
        raise BadModel(f"the image processor {name} cannot be made: {error}") from error
