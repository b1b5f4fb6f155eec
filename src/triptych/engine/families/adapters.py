"""Adapters: what differs between model families inside the engines.

An encoder adapter (vision or audio) turns an item's bytes into features and those into the tensors that are transferred
(``Family.outputs``). A decoder adapter defines how such tensors enter a prompt, and turns hidden states into logits.
Loading, batching, attention, memory and sampling are common to all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from triptych.domain.embedding import EMBEDS, TensorSpec
from triptych.domain.engine import TokenGrammar
from triptych.domain.media import Shard
from triptych.engine.media.item import MediaItem
from triptych.families.base import Span

Features = Mapping[str, torch.Tensor]
"""Features of one item after preprocessing: named tensors on the CPU, without a batch dimension."""


class ImageEncoder(Protocol):
    """Encoder of a model, as the adapters that can also be used with vLLM need it. Those of transformers fulfil it."""

    @property
    def config(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def get_image_features(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor | None = None, *, return_dict: bool
    ) -> Any:
        """Rows per image in ``pooler_output`` and, with DeepStack, those of each layer in ``deepstack_features``."""
        ...


class EncoderAdapter(Protocol):
    """Vision or audio encoder, and projector."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the processor, as JSON values: part of an embedding's identity."""
        ...

    def prepare(self, item: MediaItem) -> Features:
        """Decode and preprocess one item, as the checkpoint's own processor does. Thread-safe.

        Raises InvalidMedia for undecodable media, ValueError for what the encoder cannot take.
        """
        ...

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        """The tensors of ``Family.outputs`` per item or shard, whatever else is in the batch."""
        ...


@runtime_checkable
class ShardingEncoderAdapter(EncoderAdapter, Protocol):
    """An encoder adapter of a family whose items can be sharded (``families.base.Shardable``)."""

    def prepare_shard(self, item: MediaItem, shard: Shard) -> Features:
        """Prepare some of the item's units like ``prepare``. ``encode`` then makes exactly their rows."""
        ...


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item's tensors and the prompt positions that it fills, in order."""

    positions: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Plan of a prompt's way into the decoder, computed once when its request is added."""

    rows: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Embeddings [n, hidden] that replace those of tokens, by the first position of each contiguous run."""
    positions: torch.Tensor | None = None
    """Rotary positions [axes, prompt length]; None: one axis, 0, 1, 2, ..."""
    next_position: int | None = None
    """Rotary position of the first generated token, the same on every axis; None: the prompt's length."""
    bidirectional: tuple[Span, ...] = ()
    """Spans whose positions attend to each other in both directions; a chunk contains all of one or nothing."""
    indivisible: int = 0
    """Positions from the first one on that are computed in one pass, which computes nothing else; 0 where any may be."""
    grammar: TokenGrammar | None = None
    """The model's own rule of what its answer may be; None: any tokens."""
    extra: Any = None
    """The adapter's own read-only data for ``inputs``."""


@dataclass(frozen=True, slots=True)
class ForwardPart:
    """Share of one sequence in a pass: positions ``first`` to ``first + count`` are rows from ``row`` on."""

    plan: PromptPlan
    first: int
    token_ids: Sequence[int]
    row: int

    @property
    def count(self) -> int:
        return len(self.token_ids)


class DecoderAdapter(Protocol):
    """Language model and head."""

    @property
    def decoder(self) -> PreTrainedModel:
        """Takes ``inputs_embeds`` [1, n, hidden] and ``position_ids`` ([1, n], or [axes, 1, n] if plans have axes) of
        packed sequences.
        """
        ...

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        """Whether an item of ``tokens`` positions may have such tensors."""
        ...

    def plan(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> PromptPlan:
        """Plan how this prompt enters the decoder. Raises InvalidRequest for items that contradict the prompt."""
        ...

    @property
    def looks_ahead(self) -> bool:
        """Whether positions before an item depend on it; then no prefix can be reused without it."""
        ...

    @property
    def supports_cuda_graphs(self) -> bool:
        """Whether passes for which ``inputs`` has nothing differ only in tokens and positions, so that graphs can be captured, and layers
        fused on a CPU.
        """
        ...

    @property
    def has_spans(self) -> bool:
        """Whether plans may have bidirectional spans."""
        ...

    def inputs(self, parts: Sequence[ForwardPart], rows: int) -> Mapping[str, Any]:
        """Further arguments of the decoder for a pass of ``rows`` rows; most families have none."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocabulary]."""
        ...


@runtime_checkable
class UnprovenDecoderAdapter(DecoderAdapter, Protocol):
    """A decoder adapter of any decoder: its passes over packed sequences are compared with transformers' at start."""

    @property
    def is_packable(self) -> bool:
        """Whether such passes may be tried; else each sequence has a cache of its own."""
        ...

    @property
    def embedding_parts(self) -> frozenset[str]:
        """Parts of the base model that embed tokens too, so that no LoRA adapter may change them for items alone."""
        ...


@runtime_checkable
class CachingDecoderAdapter(DecoderAdapter, Protocol):
    """A decoder adapter with its own cache of what it computes of items, for the lifetime of their prompts."""

    def keep_at_most(self, nbytes: int) -> None:
        """Bound the cache. What does not fit is recomputed in every pass."""
        ...


def embedding_rows(items: Sequence[PlacedItem], name: str = EMBEDS) -> dict[int, torch.Tensor]:
    """``PromptPlan.rows`` for items with one row of a tensor per position."""
    rows: dict[int, torch.Tensor] = {}
    for item in items:
        begin = 0
        for at in range(1, len(item.positions) + 1):
            if at == len(item.positions) or item.positions[at] != item.positions[at - 1] + 1:
                rows[item.positions[begin]] = item.tensors[name][begin:at]
                begin = at
    return rows


LayerRows = Mapping[int, Sequence[torch.Tensor]]
"""Rows of a prompt's items that are added after layers of the decoder (DeepStack): for each layer [n, hidden], by the first
position of each contiguous run.
"""


def layer_rows(items: Sequence[PlacedItem], names: Sequence[str]) -> LayerRows:
    """Rows for layers, from the tensors of these names, one for each layer."""
    layers = [embedding_rows(items, name) for name in names]
    return {start: [layer[start] for layer in layers] for start in (layers[0] if layers else ())}


def layer_rows_of_pass(
    parts: Sequence[tuple[ForwardPart, LayerRows]], rows: int
) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """What a pass of ``rows`` rows needs of each part's ``LayerRows``: where they belong, a mask [1, rows] on their device, and
    those of each layer together. None if there are none.
    """
    places = torch.zeros(1, rows, dtype=torch.bool)
    added: list[list[torch.Tensor]] = []
    for part, prompt_rows in parts:
        for start, layers in prompt_rows.items():
            begin, end = max(part.first, start), min(part.first + part.count, start + len(layers[0]))
            if begin < end:
                places[0, part.row + begin - part.first : part.row + end - part.first] = True
                added.append([layer[begin - start : end - start] for layer in layers])
    if not added:
        return None
    embeds = [torch.cat(layer) for layer in zip(*added, strict=True)]
    return places.to(embeds[0].device), embeds
