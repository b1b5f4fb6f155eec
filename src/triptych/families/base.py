"""What differs between model architectures, as far as the router needs it: counts and placeholders, never tensors."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

from triptych.domain.media import MediaInfo
from triptych.errors import InvalidRequest
from triptych.families.model_files import ModelFiles


class Run(NamedTuple):
    """The prompt positions ``start`` to ``start + tokens`` that one item's embedding replaces."""

    start: int
    tokens: int


class Family(Protocol):
    """One architecture, configured by the files of one model directory."""

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        """Raises BadModel, naming the field, for what this family cannot serve."""
        ...

    @property
    def model_type(self) -> str:
        """The architecture's name in ``config.json``."""
        ...

    @property
    def placeholder_id(self) -> int:
        """The token id that stands for an item in a templated prompt, once before and n times after ``expand``."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the language model, and of the embeddings that it takes."""
        ...

    @property
    def context_length(self) -> int:
        """Positions that the language model can attend to."""
        ...

    @property
    def max_tokens_per_item(self) -> int:
        """The most positions that any item takes."""
        ...

    @property
    def shardable(self) -> bool:
        """Whether an item may be cut into shards, encoded apart, without changing the result."""
        ...

    def count_tokens(self, info: MediaInfo) -> int:
        """Positions that an item takes in the prompt, from its size alone. Raises InvalidMedia for what it refuses."""
        ...

    def expand(self, token_ids: Sequence[int], counts: Sequence[int]) -> tuple[tuple[int, ...], tuple[Run, ...]]:
        """Replace the i-th single placeholder by ``counts[i]`` of them; also tells where each run lies.

        Raises InvalidRequest unless there are exactly as many placeholders as counts.
        """
        ...


def expand_runs(
    token_ids: Sequence[int], placeholder_id: int, counts: Sequence[int]
) -> tuple[tuple[int, ...], tuple[Run, ...]]:
    """``Family.expand`` for families whose items are plain runs of one placeholder id."""
    places = sum(1 for token_id in token_ids if token_id == placeholder_id)
    if places != len(counts):
        raise InvalidRequest(f"the prompt has places for {places} items, the request brings {len(counts)}")
    expanded: list[int] = []
    runs: list[Run] = []
    for token_id in token_ids:
        if token_id == placeholder_id:
            tokens = counts[len(runs)]
            runs.append(Run(len(expanded), tokens))
            expanded.extend([placeholder_id] * tokens)
        else:
            expanded.append(token_id)
    return tuple(expanded), tuple(runs)
