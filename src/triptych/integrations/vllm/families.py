"""Adapters of each family: how vLLM encodes its items, and how they enter a text engine of vLLM."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from vllm.platforms import current_platform

from triptych.domain.embedding import EMBEDS, DType, TensorSpec
from triptych.domain.media import Modality
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.families.adapters import EncoderAdapter, ImageEncoder
from triptych.engine.families.qwen_vl import QwenEncoder
from triptych.engine.families.tiles import TileEncoder
from triptych.errors import InvalidRequest
from triptych.families.base import Family
from triptych.families.model_files import BadModel
from triptych.families.plain import Plain
from triptych.families.qwen2_vl import Qwen2VL
from triptych.families.qwen3_vl import Qwen3VL, deepstack
from triptych.families.qwen_vision import ROTARY

logger = logging.getLogger(__name__)

Tensors = Mapping[str, torch.Tensor]


class ItemAdapter(Protocol):
    """Adapter of a family's items once they are encoded."""

    @property
    def modality(self) -> str:
        """The kind of item, by its name in vLLM."""
        ...

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        """Whether an item of ``tokens`` positions may have such tensors."""
        ...

    def embedding(self, tensors: Tensors) -> torch.Tensor:
        """The rows [tokens, width] that vLLM's encoder of this family would make."""
        ...

    def fields(self, token_id: int, tensors: Tensors) -> Tensors:
        """Fields that vLLM needs beside the rows to compute positions; ``token_id`` is the item's placeholder. Raises
        InvalidRequest.
        """
        ...


class PlainItems:
    """Families whose items are rows of embeddings only."""

    def __init__(self, family: Plain, dtype: DType) -> None:
        self.modality = family.modality.value
        self._hidden_size = family.hidden_size
        self._dtype = dtype

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        return tuple(tensors) == (TensorSpec(EMBEDS, self._dtype, (tokens, self._hidden_size)),)

    def embedding(self, tensors: Tensors) -> torch.Tensor:
        return tensors[EMBEDS]

    def fields(self, token_id: int, tensors: Tensors) -> Tensors:  # noqa: ARG002
        return {}


class QwenItems:
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: vLLM computes rotary positions from an image's grid of patches."""

    modality = Modality.IMAGE.value

    def __init__(self, family: Qwen2VL | Qwen3VL, dtype: DType) -> None:
        self._family = family
        self._dtype = dtype
        layers = family.deepstack_layers if isinstance(family, Qwen3VL) else 0
        self._parts = (EMBEDS, *(deepstack(layer) for layer in range(layers)))

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        return tuple(tensors) == self._family.tensors(tokens, self._dtype)

    def embedding(self, tensors: Tensors) -> torch.Tensor:
        """DeepStack rows follow the others in the last dimension, as vLLM's encoder returns them."""
        parts = [tensors[name] for name in self._parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def fields(self, token_id: int, tensors: Tensors) -> Tensors:
        if token_id != self._family.language.image_id:
            raise InvalidRequest("with vLLM as the engine, this model takes images, not videos")
        rotary = tensors[ROTARY]
        rows, columns = (int(rotary[:, axis].max()) + 1 for axis in (1, 2))
        if rows * columns != len(rotary) or not torch.equal(rotary, _grid(rows, columns)):
            raise InvalidRequest("an image has rotary positions that none has")
        merge = self._family.patches.merge
        return {"image_grid_thw": torch.tensor([1, rows * merge, columns * merge])}


def _grid(rows: int, columns: int) -> torch.Tensor:
    """[rows * columns, 3] int32: time, height and width of each token of an image."""
    axes = (torch.zeros(1, dtype=torch.int32), torch.arange(rows).int(), torch.arange(columns).int())
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)


def _plain(family: Family, dtype: DType) -> ItemAdapter:
    assert isinstance(family, Plain)  # by the table
    return PlainItems(family, dtype)


def _gemma3(family: Family, dtype: DType) -> ItemAdapter:
    if current_platform.is_cpu():
        logger.warning("on a CPU, vLLM's attention within an image is causal: answers differ from those on a GPU")
    return _plain(family, dtype)


def _qwen(family: Family, dtype: DType) -> ItemAdapter:
    assert isinstance(family, Qwen2VL | Qwen3VL)  # by the table
    return QwenItems(family, dtype)


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a family."""

    items: Callable[[Family, DType], ItemAdapter]
    encoder: Callable[[ImageEncoder, Checkpoint], EncoderAdapter] | None = None
    """None where only text instances have vLLM as their engine."""
    by_itself: bool = False
    """Whether a vLLM that runs by itself may pull its items."""


ADAPTERS: Mapping[str, Adapters] = {
    "gemma3": Adapters(_gemma3),
    "idefics3": Adapters(_plain),
    "internvl": Adapters(_plain),
    "llava": Adapters(_plain, TileEncoder, by_itself=True),
    "llava_next": Adapters(_plain),
    "llava_onevision": Adapters(_plain),
    "qwen2_5_vl": Adapters(_qwen, QwenEncoder, by_itself=True),
    "qwen2_audio": Adapters(_plain),
    "qwen2_vl": Adapters(_qwen),
    "qwen3_vl": Adapters(_qwen, QwenEncoder, by_itself=True),
    "smolvlm": Adapters(_plain),
}
"""Adapters by ``model_type``: the families whose answers equal vLLM's own in tests."""


def item_adapter(family: Family, dtype: DType) -> ItemAdapter:
    """Adapter by which items enter a text engine. Raises BadModel for a family that is not served by vLLM."""
    _check_served(family, ADAPTERS)
    return ADAPTERS[family.model_type].items(family, dtype)


def pulled_adapter(family: Family, dtype: DType) -> ItemAdapter:
    """Adapter by which items enter a vLLM that runs by itself. Raises BadModel for a family whose items it cannot pull."""
    _check_served(family, [name for name, adapters in ADAPTERS.items() if adapters.by_itself])
    return item_adapter(family, dtype)


def encoder_adapter(family: Family) -> Callable[[ImageEncoder, Checkpoint], EncoderAdapter]:
    """Adapter by which items are encoded. Raises BadModel for a family that is not encoded by vLLM."""
    encoders = {name: adapters.encoder for name, adapters in ADAPTERS.items() if adapters.encoder is not None}
    _check_served(family, encoders)
    return encoders[family.model_type]


def _check_served(family: Family, served: Collection[str]) -> None:
    if family.model_type not in served:
        raise BadModel(
            f"engine vllm does not serve model_type {family.model_type!r}; it serves: {', '.join(sorted(served))}"
        )
