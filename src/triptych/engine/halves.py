"""What differs between families inside the engines: the seam that a new family fills.

An encoder half turns the features of an item (what the checkpoint's processor makes of it) into the tensors that
cross the boundary; a text half puts such tensors into a prompt and turns hidden states into logits. Loading,
batching, attention, memory and sampling are the same for all.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from triptych.domain.embedding import TensorSpec

Features = Mapping[str, torch.Tensor]
"""One item after preprocessing: named tensors on the CPU, without a batch dimension."""


class EncoderHalf(Protocol):
    """Tower and projector."""

    def tokens(self, features: Features) -> int:
        """Prompt positions that the item takes. Raises ValueError for features that the tower cannot take."""
        ...

    def outputs(self, tokens: int) -> tuple[TensorSpec, ...]:
        """The tensors that an item of so many tokens turns into."""
        ...

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        """Per item the tensors of ``outputs``; an item's neighbours in the batch do not change its result."""
        ...


class TextHalf(Protocol):
    """Language model and head."""

    @property
    def decoder(self) -> PreTrainedModel:
        """Takes ``inputs_embeds`` [1, n, hidden] and ``position_ids`` [1, n] of sequences packed one by one."""
        ...

    def expected(self, tokens: int) -> tuple[TensorSpec, ...]:
        """What an item of so many tokens must bring."""
        ...

    def splice(self, rows: torch.Tensor, item: Features, first: int) -> None:
        """Write into ``rows`` [n, hidden], in place, what positions ``first`` to ``first + n`` of the item hold."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocabulary]."""
        ...
