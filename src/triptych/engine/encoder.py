"""Encoder engines: preparation and batches, which they have in common, and the one over models of transformers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import av
import PIL
import torch
import transformers
from torch import nn

import triptych
from triptych.domain.embedding import DType, Tensor, TensorSpec
from triptych.domain.instance import ModelInfo
from triptych.domain.lora import LoraLimits
from triptych.domain.media import MediaInfo, Modality, Shard
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import DTYPES, Checkpoint, open_checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.engine.encoder_attention import attend_by_products
from triptych.engine.families.adapters import EncoderAdapter, Features, ShardingEncoderAdapter
from triptych.engine.families.item_processor import ItemProcessor
from triptych.engine.families.registry import adapters_of
from triptych.engine.fastest_products import choose_products, load_copies, unload_copies
from triptych.engine.lora import LoraLayers
from triptych.engine.media.item import Decoding, LocalDecoding, MediaItem
from triptych.engine.part_weights import PartWeights
from triptych.engine.tensors import is_finite, to_bytes
from triptych.engine.torch_process import prepare_torch
from triptych.engine.weight_loading import base_of, encoder_names, load_part
from triptych.errors import EngineFailure, InstanceLost, InvalidMedia
from triptych.families.base import Resamples, SamplesFrames, shard_outputs
from triptych.ports import StopSignal

_NBYTES_PER_VALUE = 4
_CHANNELS = 3
_LEAST_ROWS = 33
"""Products of fewer rows hardly count: an image has at least some tens of patches."""


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """An item after preprocessing: float32 features on the CPU."""

    features: Mapping[str, torch.Tensor]
    tokens: int
    outputs: tuple[TensorSpec, ...]
    lora: str = ""
    """Digest of its LoRA adapter; empty without one."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.features.values())


class AdapterEncoderEngine:
    """An ``EncoderEngine`` over a loaded model and the adapter of its family. Subclasses load the model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        adapter: EncoderAdapter,
        weights: nn.Module,
        *,
        model_id: str,
        dtype: DType,
        decoding: Decoding | None = None,
        software: Mapping[str, str] | None = None,
    ) -> None:
        """``weights`` holds the parameters of the part. ``decoding`` decodes items; by default in the caller's thread.
        ``software`` is what else decides on rounding, by name.
        """
        self._decoding = decoding or LocalDecoding()
        self.module = weights
        """The part as a module of torch."""
        self._device = next(weights.parameters()).device
        self.weights_nbytes = sum(parameter.nbytes for parameter in weights.parameters())
        """Bytes of the part's weights as loaded."""
        self.weights: PartWeights | None = None
        """Weights of the part where they can be unloaded."""
        self.loras: LoraLayers | None = None
        """The adapters that items can be encoded with. None: with none."""
        self._adapter = adapter
        self._family = checkpoint.family
        self._model_info = checkpoint.model_info(model_id=model_id, dtype=dtype)
        self._software = dict(software or {})
        settings = json.dumps(dict(adapter.settings), sort_keys=True, default=str)
        self._processor_digest = blake2b(settings.encode(), digest_size=32, person=b"triptych-proc").digest()

    @property
    def model(self) -> ModelInfo:
        return self._model_info

    @property
    def version(self) -> str:
        """Version of all software involved: another decoder or kernel may round differently."""
        parts = {
            "triptych": triptych.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "pillow": PIL.__version__,
            "av": av.__version__,
            **self._software,
            "device": self._device.type,
        }
        return " ".join(f"{name}/{value}" for name, value in parts.items())

    @property
    def processor_digest(self) -> bytes:
        return self._processor_digest

    def decoded_nbytes(self, info: MediaInfo, shard: Shard | None = None) -> int:
        """Four bytes per pixel of an image, or per sample at the model's rate. Raises InvalidMedia.

        For a video: one frame as stored, and the sampled frames (the shard's) as ``prepare`` makes them.
        """
        values = info.pixels + info.samples
        if info.modality is Modality.AUDIO and isinstance(self._family, Resamples):
            values = info.samples_at(self._family.sample_rate_hz)
        if info.modality is Modality.VIDEO and isinstance(self._family, SamplesFrames):
            seen = self._family.seen_pixels(info)
            values += _CHANNELS * (seen if shard is None else -(-seen * shard.count // shard.of))
        return _NBYTES_PER_VALUE * values

    def prepare(
        self, media: bytes, info: MediaInfo, shard: Shard | None = None, stop: StopSignal | None = None
    ) -> PreparedMedia:
        """Decode and preprocess one item, or a shard of it, as the checkpoint's own processor does. Thread-safe.

        Raises InvalidMedia, InvalidRequest for a shard that the item does not have, and Cancelled after ``stop``.
        """
        tokens, outputs = shard_outputs(self._family, info, self._model_info.dtype, shard)
        try:
            features = self._features(self._decoding.item(media, info, stop), shard)
        except (ValueError, OSError, ArithmeticError) as error:
            raise InvalidMedia(f"the {info.width}x{info.height} {info.modality.value} cannot be processed") from error
        if not all(is_finite(tensor) for tensor in features.values()):  # else the engine would be blamed
            raise InvalidMedia(f"the {info.modality.value} has values that the model cannot take: they are not finite")
        return PreparedMedia(features, tokens, outputs, info.lora)

    def _features(self, item: MediaItem, shard: Shard | None) -> Features:
        if shard is None or shard.count == shard.of:
            return self._adapter.prepare(item)
        if not isinstance(self._adapter, ShardingEncoderAdapter):
            raise TypeError(
                f"{self._family.model_type} says where items can be cut, its encoder adapter does not cut them"
            )
        return self._adapter.prepare_shard(item, shard)

    @torch.inference_mode()
    def encode(self, batch: Sequence[PreparedMedia]) -> list[tuple[Tensor, ...]]:
        """Encode a batch in one pass for each adapter. The tensors are views that keep the pass's memory alive.

        Raises EngineFailure when any item fails; encode the items one by one to find out which. Raises InstanceLost if
        the device has failed.
        """
        if not batch:
            return []
        if self.weights is not None and not self.weights.resident:
            raise EngineFailure("the encoder is not loaded")
        try:
            encoded = self._encode(batch)
            if not all(is_finite(tensor) for tensors in encoded for tensor in tensors):
                raise EngineFailure("the encoder made an embedding that is not finite")
            return [
                tuple(to_bytes(spec, tensor) for spec, tensor in zip(item.outputs, tensors, strict=True))
                for item, tensors in zip(batch, encoded, strict=True)
            ]
        except (RuntimeError, ValueError) as error:
            self._check_device()
            raise EngineFailure(f"the encoder failed on a batch of {len(batch)}") from error

    def _encode(self, batch: Sequence[PreparedMedia]) -> list[tuple[torch.Tensor, ...]]:
        """Items of one adapter together: no row of a pass has another, however an encoder orders its rows."""
        if self.loras is None:
            return self._adapter.encode([item.features for item in batch])
        encoded: dict[int, tuple[torch.Tensor, ...]] = {}
        for lora in dict.fromkeys(item.lora for item in batch):
            if lora and lora not in self.loras.digests:
                raise EngineFailure("the LoRA adapter of an item is not loaded")
            places = [place for place, item in enumerate(batch) if item.lora == lora]
            with self.loras.applied_to_all(lora):
                done = self._adapter.encode([batch[place].features for place in places])
            encoded |= zip(places, done, strict=True)
        return [encoded[place] for place in range(len(batch))]

    def _check_device(self) -> None:
        """Raise InstanceLost if the GPU has failed. After some failures it computes nothing more for this process."""
        try:
            torch.ones(1, device=self._device).sum().item()
        except RuntimeError as error:
            raise InstanceLost(f"the {self._device.type} device has failed") from error


class TransformersEncoderEngine(AdapterEncoderEngine):
    """Runs the model of ``transformers``. Reads ``model_dir`` once, at construction. Raises BadModel."""

    def __init__(
        self,
        model_dir: Path | Checkpoint,
        *,
        model_id: str,
        compute: ComputeOptions,
        decoding: Decoding | None = None,
        loras: LoraLimits | None = None,
        can_unload: bool = False,
    ) -> None:
        """Make an engine. With ``can_unload`` its ``weights`` can leave the memory and come back, which is tried now."""
        prepare_torch(compute)
        checkpoint = open_checkpoint(model_dir, ItemProcessor)
        adapters = adapters_of(checkpoint)
        dtype = DTYPES[compute.dtype]
        model = load_part(checkpoint, ModelPart.ENCODER, dtype=dtype, device=torch.device(compute.device))
        weights = PartWeights(model, checkpoint) if can_unload else None
        adapter = adapters.encoder(model, checkpoint)
        choose_products(model, most_packed_nbytes=compute.packed_weight_bytes, least_rows=_LEAST_ROWS)
        if torch.device(compute.device).type == "cpu" and dtype is DType.F32:
            attend_by_products(model)
        super().__init__(checkpoint, adapter, model, model_id=model_id, dtype=dtype, decoding=decoding)
        base = base_of(model)
        self.loras = LoraLayers(base, loras or LoraLimits(), encoders=encoder_names(base), is_encoder=True)
        self.weights = weights
        if weights is not None:
            weights.also(load=partial(load_copies, model), unload=partial(unload_copies, model))
            weights.measure()
