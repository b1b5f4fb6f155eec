"""What differs between families inside the engines: the seam that a new family fills.

An encoder adapter (of a vision or an audio encoder) turns an item's bytes into features and those into the tensors that
cross the boundary (``Family.outputs`` says which). A decoder adapter says how such tensors enter a prompt, and turns hidden
states into logits. Loading, batching, attention, memory and sampling are the same for all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from triptych.domain.embedding import EMBEDS, TensorSpec
from triptych.domain.media import Shard
from triptych.engine.media.item import MediaItem
from triptych.families.base import Span

Features = Mapping[str, torch.Tensor]
"""One item after preprocessing: named tensors on the CPU, without a batch dimension."""


class EncoderAdapter(Protocol):
    """Vision or audio encoder, and projector."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings of the processor, as JSON can hold them: part of an embedding's identity."""
        ...

    def prepare(self, item: MediaItem) -> Features:
        """Decode and preprocess one item, as the checkpoint's own processor does. Thread-safe.

        Raises InvalidMedia for what cannot be decoded, ValueError for what the encoder cannot take.
        """
        ...

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        """Per item, or shard, the tensors of ``Family.outputs``; an item's neighbours in the batch do not change its result."""
        ...


@runtime_checkable
class ShardingEncoderAdapter(EncoderAdapter, Protocol):
    """An encoder adapter whose family says where items can be cut (``families.base.Shardable``)."""

    def prepare_shard(self, item: MediaItem, shard: Shard) -> Features:
        """As ``prepare``, of some of the item's units: ``encode`` makes their rows of it, and only those."""
        ...


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item's tensors and the prompt positions that it fills, in order."""

    positions: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """How a prompt goes into the decoder, worked out once when its request is added."""

    rows: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """By the first position of each run of neighbours: [n, hidden], the embeddings that replace those of the tokens."""
    positions: torch.Tensor | None = None
    """[axes, prompt length] of rotary positions; None: one axis, 0, 1, 2, ..."""
    next_position: int | None = None
    """Rotary position of the first generated token, the same on every axis; None: the prompt's length."""
    bidirectional: tuple[Span, ...] = ()
    """Spans whose positions attend to each other in both directions; a chunk of a prompt contains all of one or nothing."""
    extra: Any = None
    """What else the adapter keeps for ``inputs``: its own, read-only."""
    looks_ahead: bool = False
    """Whether positions before an item depend on it: then no prefix of the prompt can be reused without it."""


@dataclass(frozen=True, slots=True)
class ForwardPart:
    """One sequence's share of a pass: its positions ``first`` to ``first + count`` are rows ``row`` and following."""

    plan: PromptPlan
    first: int
    count: int
    row: int


class DecoderAdapter(Protocol):
    """Language model and head."""

    @property
    def decoder(self) -> PreTrainedModel:
        """Takes ``inputs_embeds`` [1, n, hidden] and ``position_ids`` ([1, n], or [axes, 1, n] where a plan has axes)
        of sequences packed one behind the other.
        """
        ...

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        """Whether an item that fills so many positions may bring such tensors."""
        ...

    def plan(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> PromptPlan:
        """How this prompt enters the decoder. Raises InvalidRequest for items that contradict the prompt."""
        ...

    @property
    def supports_cuda_graphs(self) -> bool:
        """Whether decode steps, one position behind the items of each sequence, differ in tokens and positions alone, so
        that one graph can be captured for all.
        """
        ...

    def inputs(self, parts: Sequence[ForwardPart], rows: int) -> Mapping[str, Any]:
        """Further arguments for the decoder in a pass of so many rows; most families have none."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocabulary]."""
        ...


@runtime_checkable
class CachingDecoderAdapter(DecoderAdapter, Protocol):
    """A decoder adapter with a cache of its own, for what it computes of items, kept while their prompts are there."""

    def keep_at_most(self, nbytes: int) -> None:
        """Bound the cache from now on. What does not fit is computed again in every pass."""
        ...


def embedding_rows(items: Sequence[PlacedItem], name: str = EMBEDS) -> dict[int, torch.Tensor]:
    """``PromptPlan.rows`` where each item brings one row of a tensor for each position that it fills."""
    rows: dict[int, torch.Tensor] = {}
    for item in items:
        begin = 0
        for at in range(1, len(item.positions) + 1):
            if at == len(item.positions) or item.positions[at] != item.positions[at - 1] + 1:
                rows[item.positions[begin]] = item.tensors[name][begin:at]
                begin = at
    return rows
