"""The common family: one placeholder token, and one row of embeddings per position."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from triptych.domain.embedding import EMBEDS, DType, TensorSpec
from triptych.domain.media import MediaInfo, Modality
from triptych.families.base import PromptReplacement, filled


@dataclass(frozen=True, slots=True)
class Plain(ABC):
    """Family without ``load``, ``model_type`` and ``prompt_replacement``, for items of one modality."""

    modality: ClassVar[Modality] = Modality.IMAGE

    placeholder_id: int
    hidden_size: int
    context_length: int

    @property
    def replacement_targets(self) -> Mapping[Modality, tuple[int, ...]]:
        return {self.modality: (self.placeholder_id,)}

    @property
    def placeholder_ids(self) -> frozenset[int]:
        return frozenset({self.placeholder_id})

    @abstractmethod
    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement: ...

    def outputs(self, info: MediaInfo, dtype: DType) -> tuple[TensorSpec, ...]:
        return (TensorSpec(EMBEDS, dtype, (filled(self.prompt_replacement(info)), self.hidden_size)),)
