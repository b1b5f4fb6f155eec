"""The encoder engine: towers and projectors of a transformers model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import PIL
import torch
import transformers

import triptych
from triptych.domain.embedding import Tensor, TensorSpec
from triptych.domain.instance import ModelInfo
from triptych.domain.media import MediaInfo
from triptych.engine.checkpoint import DTYPES, Checkpoint, open_checkpoint
from triptych.engine.images import decode_image
from triptych.engine.registry import halves_of
from triptych.engine.split import Half, load_half
from triptych.engine.tensors import is_finite, to_bytes
from triptych.errors import EngineFailure, InvalidMedia
from triptych.families.model_files import BadModel


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image after preprocessing: float32 features on the CPU."""

    features: Mapping[str, torch.Tensor]
    tokens: int
    outputs: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.features.values())


class TransformersEncoderEngine:
    """An ``EncoderEngine``. Reads ``model_dir`` once, at construction. Raises BadModel."""

    def __init__(
        self,
        model_dir: Path,
        *,
        model_id: str,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
    ) -> None:
        """``threads`` is how many torch uses, in the whole process."""
        torch.set_num_threads(threads)
        checkpoint = open_checkpoint(model_dir)
        halves = halves_of(checkpoint)
        self._device = torch.device(device)
        model = load_half(checkpoint, Half.ENCODER, dtype=DTYPES[dtype], device=self._device)
        self._half = halves.encoder(model, checkpoint.family)
        self._processor = _load_processor(checkpoint)
        self._model_info = checkpoint.model_info(model_id=model_id, dtype=DTYPES[dtype])
        settings = json.dumps(self._processor.to_dict(), sort_keys=True, default=str)
        self._processor_digest = blake2b(settings.encode(), digest_size=32, person=b"triptych-proc").digest()

    @property
    def model(self) -> ModelInfo:
        return self._model_info

    @property
    def version(self) -> str:
        """All software that takes part: another decoder or kernel may round another way."""
        parts = {
            "triptych": triptych.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "pillow": PIL.__version__,
            "device": self._device.type,
        }
        return " ".join(f"{name}/{value}" for name, value in parts.items())

    @property
    def processor_digest(self) -> bytes:
        return self._processor_digest

    def prepare(self, media: bytes, info: MediaInfo) -> PreparedImage:
        """Decode and preprocess one image, as the checkpoint's own processor does. Thread-safe. Raises InvalidMedia."""
        image = decode_image(media, info)
        if not getattr(self._processor, "do_convert_rgb", False) and image.mode != "RGB":
            image = image.convert("RGB")
        try:
            batch = self._processor(images=[image], return_tensors="pt")
            features = {name: value[0] for name, value in batch.items() if isinstance(value, torch.Tensor)}
            tokens = self._half.tokens(features)
        except (ValueError, OSError, ArithmeticError) as error:
            raise InvalidMedia(f"the {info.width}x{info.height} image cannot be processed") from error
        return PreparedImage(features=features, tokens=tokens, outputs=self._half.outputs(tokens))

    @torch.inference_mode()
    def encode(self, batch: Sequence[PreparedImage]) -> list[tuple[Tensor, ...]]:
        """One pass over a batch. The tensors are views that keep the pass's memory alive until they are dropped.

        Raises EngineFailure when any item fails; encode the items one by one to find out which.
        """
        if not batch:
            return []
        try:
            encoded = self._half.encode([item.features for item in batch])
            if not all(is_finite(tensor) for tensors in encoded for tensor in tensors):
                raise EngineFailure("the encoder made an embedding that is not finite")
            return [
                tuple(to_bytes(spec, tensor) for spec, tensor in zip(item.outputs, tensors, strict=True))
                for item, tensors in zip(batch, encoded, strict=True)
            ]
        except (RuntimeError, ValueError) as error:
            raise EngineFailure(f"the encoder failed on a batch of {len(batch)}") from error


def _load_processor(checkpoint: Checkpoint) -> Any:
    """The checkpoint's image processor on Pillow: the same on every machine, where torchvision rounds another way.

    By its class rather than through ``AutoImageProcessor``, which some releases refuse to import without torchvision.
    """
    settings = dict(checkpoint.files.image_processor)
    name = str(settings.get("image_processor_type", "none at all")).removesuffix("Fast").removesuffix("Pil") + "Pil"
    processor: Any = getattr(transformers, name, None)
    if processor is None:
        raise BadModel(f"transformers {transformers.__version__} has no image processor {name}")
    try:
        return processor.from_dict(settings)
    except (ValueError, TypeError, ImportError) as error:
        raise BadModel(f"the image processor {name} cannot be made: {error}") from error
