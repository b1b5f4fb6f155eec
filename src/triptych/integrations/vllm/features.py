"""A request's items in vLLM's terms."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from triptych.domain.engine import EmbeddingInput, EngineRequest
from triptych.engine.tensors import embedding_tensors
from triptych.errors import InvalidRequest
from triptych.integrations.vllm.families import ItemAdapter
from triptych.integrations.vllm.items import Item

_HOST = torch.device("cpu")
_KEPT = MultiModalBatchedField(keep_on_cpu=True)
"""Positions are computed on the host, and also for items that the prefix cache covers, whose other fields vLLM drops."""


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item and the prompt positions that it fills."""

    item: Item
    feature: MultiModalFeatureSpec


class Features:
    """Makes the items that enter a vLLM engine."""

    def __init__(self, adapter: ItemAdapter, largest_item: int) -> None:
        """``largest_item`` is in tokens."""
        self._adapter = adapter
        self._largest_item = largest_item
        self._nameless = count()
        """Numbers the items without identity, as vLLM's caches go by it."""

    def place(self, request: EngineRequest, positions: Sequence[Sequence[int]]) -> list[PlacedItem]:
        """The request's items, copied, in the order of the prompt; ``positions`` are those that each fills.

        Raises InvalidRequest for items that vLLM or the model does not take, EngineFailure for values that are not finite.
        """
        placed = [
            self._placed(request, given, filled) for given, filled in zip(request.embeddings, positions, strict=True)
        ]
        return sorted(placed, key=lambda item: item.feature.mm_position.offset)

    def _placed(self, request: EngineRequest, given: EmbeddingInput, positions: Sequence[int]) -> PlacedItem:
        if given.tokens > self._largest_item:
            raise InvalidRequest(
                f"an item has {given.tokens} tokens, vLLM's encoder cache takes {self._largest_item}: "
                "raise max_num_batched_tokens"
            )
        tensors = embedding_tensors(given, self._adapter.accepts, _HOST)
        identifier = given.key.hex() or f"nameless-{next(self._nameless)}"
        fields = self._adapter.fields(request.token_ids[positions[0]], tensors)
        feature = MultiModalFeatureSpec(
            data=MultiModalKwargsItem(
                {name: MultiModalFieldElem(data=field, field=_KEPT) for name, field in fields.items()}
            ),
            modality=self._adapter.modality,
            identifier=identifier,
            mm_position=_range_of(positions),
            mm_hash=identifier,
        )
        return PlacedItem(Item(identifier, self._adapter.embedding(tensors)), feature)


def _range_of(positions: Sequence[int]) -> PlaceholderRange:
    """The part of the prompt from an item's first position to its last, and which positions in it are the item's."""
    first, length = positions[0], positions[-1] + 1 - positions[0]
    if length == len(positions):
        return PlaceholderRange(offset=first, length=length)
    is_embed = torch.zeros(length, dtype=torch.bool)
    is_embed[[at - first for at in positions]] = True
    return PlaceholderRange(offset=first, length=length, is_embed=is_embed)
