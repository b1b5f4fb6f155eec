"""Encoders of any model of vLLM's registry: what vLLM's processor makes of an item is what its model encodes."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import nn
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from triptych.domain.embedding import EMBEDS, DType, TensorSpec
from triptych.domain.media import Modality, Shard
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.families.adapters import Features
from triptych.engine.families.generic import processor_of
from triptych.engine.families.item_media import blank_medium
from triptych.engine.families.item_processor import extras
from triptych.engine.media.item import MediaItem
from triptych.engine.tensors import TORCH_DTYPES
from triptych.errors import Cancelled, InvalidMedia
from triptych.families.base import filled, units_of
from triptych.families.generic import GenericFamily
from triptych.policy.queueing import batch_length

_ROWS = (EMBEDS, "deepstack")
"""How names of tensors begin that have a row per placeholder."""


class _ItemFeatures(dict[str, torch.Tensor]):
    """The tensors of an item, beside the item as vLLM has made it."""

    def __init__(
        self, modality: Modality, item: MultiModalKwargsItem, rows: int, beside: Sequence[torch.Tensor]
    ) -> None:
        """``rows`` is the item's number of placeholders; ``beside`` are the tensors that follow the rows."""
        super().__init__(tensors_of(item.get_data()))
        self.modality, self.item = modality, item
        self.rows, self.beside = rows, tuple(beside)
        self.kept = slice(0, rows)
        """The rows of a shard, or all."""


class ItemEncoder:
    """``ShardingEncoderAdapter`` of images and audio."""

    def __init__(self, model: nn.Module, config: Any, checkpoint: Checkpoint) -> None:
        """``config`` is the model's, of vLLM. Raises ValueError for a model of which vLLM has loaded nothing."""
        first = next(model.parameters(), None)
        if first is None:
            raise ValueError("vLLM encodes neither images nor audio of this model")
        self._model: Any = model
        self._device = first.device
        self._family = checkpoint.family
        self._processor = MULTIMODAL_REGISTRY.create_processor(config)
        self._lock = threading.Lock()
        """Processors of vLLM are called by one thread at a time."""
        self._own = processor_of(checkpoint) if isinstance(checkpoint.family, GenericFamily) else None
        self._files = checkpoint.files

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"processor": self._files.processor, "image_processor": self._files.image_processor}

    def prepare(self, item: MediaItem) -> _ItemFeatures:
        modality, media = item.info.modality, self._medium(item)
        target = list(self._family.replacement_targets[modality])
        with self._lock:
            if item.stopped:
                raise Cancelled("nobody waits for the item any more")
            try:
                items = self._processor.info.parse_mm_data({modality.value: [media]}, validate=False)
                made = self._processor(target, items)
                (encoded,), (place,) = made["mm_kwargs"][modality.value], made["mm_placeholders"][modality.value]
            except Exception as error:
                raise ValueError("vLLM's processor refuses the item") from error
        specs = self._family.outputs(item.info, DType.F32)
        rows = filled(self._family.prompt_replacement(item.info))
        if (found := place.get_num_embeds()) != rows:
            raise ValueError(f"vLLM's processor made {found} rows, not the {rows} of the item's size")
        beside = self._beside(item, encoded, [spec for spec in specs if not spec.name.startswith(_ROWS)])
        return _ItemFeatures(modality, encoded, rows, beside)

    def prepare_shard(self, item: MediaItem, shard: Shard) -> Features:
        """Prepare the whole item, of which ``encode`` keeps the shard's rows: vLLM does not encode parts of items."""
        prepared = self.prepare(item)
        units = units_of(self._family, item.info)
        first = sum(units[: shard.first])
        prepared.kept = slice(first, first + sum(units[shard.first : shard.first + shard.count]))
        return prepared

    def _medium(self, item: MediaItem) -> Any:
        if item.info.modality is Modality.IMAGE:
            return Image.fromarray(item.pixels())
        if item.info.modality is Modality.AUDIO:
            rate = int(self._family.sample_rate_hz)  # type: ignore[attr-defined]  # families of audio have one
            return item.samples(rate), rate
        raise InvalidMedia("videos of this model are not encoded by engine vllm, which samples other frames")

    def _beside(self, item: MediaItem, made: MultiModalKwargsItem, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """The item's small tensors, from vLLM's processor, or from transformers' for a blank item of its size."""
        known = tensors_of(made.get_data())
        if any(not _fits(known.get(spec.name), spec) for spec in specs):
            if not isinstance(self._family, GenericFamily) or self._own is None:
                raise ValueError(f"vLLM's processor does not make {', '.join(spec.name for spec in specs)}")
            blank = self._family.blank(item.info)
            processed = self._own.process(blank.modality, blank_medium(blank), place=blank.place)
            known |= {spec.name: tensor for spec, tensor in extras(processed.tensors)}
        return [known[spec.name].reshape(spec.shape).to(TORCH_DTYPES[spec.dtype]) for spec in specs]

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        """Encode items as vLLM would together; with shards, in passes of no more rows than are kept, or of one item.

        Raises RuntimeError, whatever vLLM raises.
        """
        made: list[_ItemFeatures] = [features for features in batch if isinstance(features, _ItemFeatures)]
        embedded: list[torch.Tensor] = []
        try:
            for part in _passes(made):
                given = [(features.modality.value, features.item) for features in part]
                for _, _, arguments in group_and_batch_mm_kwargs(given, device=self._device):
                    embedded += list(self._model.embed_multimodal(**arguments))
        except Exception as error:
            raise RuntimeError("vLLM's encoder failed") from error
        if [len(rows) for rows in embedded] != [features.rows for features in made]:
            raise ValueError("vLLM's encoder made another number of rows than the items have")
        return [
            # Rows for layers follow the others in the last dimension.
            (*torch.split(rows[features.kept], self._family.hidden_size, dim=-1), *features.beside)
            for rows, features in zip(embedded, made, strict=True)
        ]


def tensors_of(data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of an item's data; those in a list have names of its name and their places, such as ``pixel_values.0``."""
    found: dict[str, torch.Tensor] = {}
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, list | tuple):
            found |= tensors_of({f"{name}.{place}": part for place, part in enumerate(value)})
    return found


def _passes(batch: Sequence[_ItemFeatures]) -> Iterator[Sequence[_ItemFeatures]]:
    """A batch's limit counts the rows that are kept, of items that are encoded whole."""
    kept = sum(features.kept.stop - features.kept.start for features in batch)
    while batch:
        sizes = [(features.rows, 0) for features in batch]
        count = batch_length(sizes, max_items=len(batch), max_tokens=kept, max_nbytes=0)
        yield batch[:count]
        batch = batch[count:]


def _fits(tensor: torch.Tensor | None, spec: TensorSpec) -> bool:
    return tensor is not None and tensor.numel() == torch.Size(spec.shape).numel()
