"""Llama 3.2 Vision: text after an image attends to the states of its tiles in cross-attention layers."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from triptych.domain.embedding import TensorSpec
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.decoder.cross_attention import (
    CROSS_ATTENTION,
    CrossCache,
    CrossPass,
    CrossStates,
    KeysValues,
    Zone,
    cross_parts,
)
from triptych.engine.families.adapters import Features, ForwardPart, PlacedItem, PromptPlan
from triptych.engine.families.plain import PlainDecoder
from triptych.engine.media.image_processor import ImagePreparer
from triptych.engine.media.item import MediaItem
from triptych.engine.tensors import domain_dtype
from triptych.families.mllama import PADDING, TILES, Mllama
from triptych.families.model_files import BadModel


class MllamaEncoder:
    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._model: Any = model
        self._images = ImagePreparer(checkpoint.files)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._images.settings

    def prepare(self, item: MediaItem) -> Features:
        features = self._images.prepare(item)
        return {name: features[name][0] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        """The encoder always takes ``max_tiles`` tiles per image; the image's own come first."""
        device, base = self._model.device, self._model.model
        stacked = {name: torch.stack([features[name] for features in batch])[:, None].to(device) for name in batch[0]}
        states = base.multi_modal_projector(base.vision_model(**stacked).last_hidden_state)[:, 0]
        tiles = [int(features["aspect_ratio_mask"].sum()) for features in batch]
        return [(state[:count], state[count:]) for state, count in zip(states, tiles, strict=True)]


class MllamaDecoder(PlainDecoder):
    """The states of a request's images are concatenated: all tiles, then all padding.

    So each position attends to one contiguous range. Text before all images attends to everything, padding included,
    since transformers drops a mask that allows nothing.
    """

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        super().__init__(model, checkpoint)
        if not isinstance(checkpoint.family, Mllama):
            raise BadModel(f"{checkpoint.family.model_type} is not Llama 3.2 Vision")
        self._family = checkpoint.family
        decoder: Any = self.decoder
        crossing = set(decoder.config.cross_attention_layers)
        layers = [layer.cross_attn for index, layer in enumerate(decoder.layers) if index in crossing]
        for layer in layers:  # the others use packed attention, by their shared configuration
            layer.config = copy(layer.config)
            layer.config._attn_implementation = CROSS_ATTENTION  # noqa: SLF001 - transformers' documented switch
        self_attentions = [layer.self_attn for index, layer in enumerate(decoder.layers) if index not in crossing]
        for index, layer in enumerate(self_attentions):  # only these use the KV cache
            layer.layer_idx = index
        decoder.config.num_hidden_layers = len(self_attentions)
        self._cache = CrossCache(layers=len(layers), project=_keys_values)

    def keep_at_most(self, nbytes: int) -> None:
        self._cache.nbytes = nbytes

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        names, shapes = [tensor.name for tensor in tensors], [tensor.shape for tensor in tensors]
        if tokens != 1 or names != [TILES, PADDING] or any(len(shape) != 3 for shape in shapes):
            return False
        family, dtype = self._family, domain_dtype(self._model.dtype)
        return (
            all(tensor.dtype is dtype for tensor in tensors)
            and all(shape[1:] == (family.states_per_tile, family.hidden_size) for shape in shapes)
            and shapes[0][0] >= 1
            and shapes[0][0] + shapes[1][0] == family.max_tiles
        )

    def plan(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> PromptPlan:  # noqa: ARG002
        if not items:
            return PromptPlan()
        placed = sorted(items, key=lambda item: item.positions)
        tiles, padding = ([item.tensors[name].flatten(0, 1) for item in placed] for name in (TILES, PADDING))
        ends = torch.tensor([len(states) for states in tiles]).cumsum(0).tolist()
        states = torch.cat([*tiles, *padding])
        zones = _zones([item.positions[0] for item in placed], ends)
        return PromptPlan(extra=CrossStates(states, (Zone(0, 0, len(states)), *zones)))

    @property
    def looks_ahead(self) -> bool:
        return True

    @property
    def supports_cuda_graphs(self) -> bool:
        """False: the states that a position attends to are looked up in every pass."""
        return False

    def inputs(self, parts: Sequence[ForwardPart], rows: int) -> Mapping[str, Any]:
        """Empty in a pass without images: the decoder skips its cross-attention layers."""
        weights: Any = self._model.lm_head.weight
        sighted = torch.zeros(1, 1, rows, 1, dtype=weights.dtype, device=weights.device)
        cross = []
        for part in parts:
            if isinstance(part.plan.extra, CrossStates):
                cross += cross_parts(part.plan.extra, part.first, part.count, part.row)
                seeing = max(part.first, part.plan.extra.zones[1].first) - part.first
                sighted[0, 0, part.row + seeing : part.row + part.count] = 1
        if not cross:
            return {}
        return {
            "cross": CrossPass(self._cache, cross),
            "cross_attention_states": weights.new_zeros(1, 1, self._family.hidden_size),
            "full_text_row_masked_out_mask": sighted,
        }


def _keys_values(layer: Any, states: torch.Tensor) -> KeysValues:
    shape = (len(states), layer.num_key_value_heads, layer.head_dim)
    keys = layer.k_norm(layer.k_proj(states).view(shape).transpose(0, 1))
    return keys, layer.v_proj(states).view(shape).transpose(0, 1)


def _zones(places: Sequence[int], ends: Sequence[int]) -> Iterator[Zone]:
    """Zones of text: after each image it attends to that image, as in transformers' ``get_cross_attention_token_mask``.
    Text after adjacent images attends to all of them. ``ends`` are the ends of the images' states.
    """
    begin = 0
    for index, place in enumerate(places):
        if index and place != places[index - 1] + 1:
            begin = ends[index - 1]
        yield Zone(place, begin, ends[index])
