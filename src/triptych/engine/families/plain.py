"""The decoder adapter of families whose items are only rows of embeddings."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from triptych.domain.embedding import EMBEDS, TensorSpec
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.decoder.model_runner import turns_long
from triptych.engine.families.adapters import ForwardPart, PlacedItem, PromptPlan, embedding_rows
from triptych.engine.tensors import domain_dtype
from triptych.engine.weight_loading import base_of, language_model_name


class PlainDecoder:
    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._model: Any = model
        self._hidden_size = checkpoint.family.hidden_size
        self._turns_long = turns_long(self.decoder.config)

    @property
    def decoder(self) -> PreTrainedModel:
        base = base_of(self._model)
        decoder: PreTrainedModel = getattr(base, language_model_name(base))
        return decoder

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        return tuple(tensors) == (TensorSpec(EMBEDS, domain_dtype(self._model.dtype), (tokens, self._hidden_size)),)

    def plan(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> PromptPlan:
        return PromptPlan(rows=embedding_rows(items), indivisible=len(token_ids) if self._turns_long else 0)

    @property
    def looks_ahead(self) -> bool:
        return False

    @property
    def has_spans(self) -> bool:
        return False

    @property
    def supports_cuda_graphs(self) -> bool:
        return True

    def inputs(self, parts: Sequence[ForwardPart], rows: int) -> Mapping[str, Any]:  # noqa: ARG002
        return {}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.lm_head(hidden)
        return logits
