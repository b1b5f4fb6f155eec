"""What differs between model architectures, as far as it can be told without tensors.

Placeholders and their counts (for the router, from sizes alone), and what crosses the boundary between encoder and
text instances (for the router's credits, the encoder's reservations and the text instance's checks alike).
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from triptych.domain.chat import MediaPart
from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import MediaInfo, Modality
from triptych.errors import InvalidMedia, InvalidRequest
from triptych.families.model_files import ModelFiles


class Run(NamedTuple):
    """Where an item is in a prompt: the first ``tokens`` placeholders at or after position ``start``.

    They are neighbours in most families; some put marks between the parts of an item (rows of tiles, frames).
    """

    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Positions:
    """``count`` times the placeholder ``token_id``, one behind the other."""

    token_id: int
    count: int


Layout = tuple[str | Positions, ...]
"""What stands for one item in a prompt: texts (marks, timestamps) and the positions that its embedding fills."""


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
    def hidden_size(self) -> int:
        """Width of the language model, and of the embeddings that it takes."""
        ...

    @property
    def context_length(self) -> int:
        """Positions that the language model can attend to."""
        ...

    @property
    def anchors(self) -> Mapping[Modality, tuple[int, ...]]:
        """For each modality that the model takes, the token ids that a chat template writes for an item.

        ``layout`` replaces them. Most are one token; some templates write marks around it that belong to the item.
        """
        ...

    @property
    def placeholder_ids(self) -> AbstractSet[int]:
        """The token ids of all ``Positions``."""
        ...

    def layout(self, info: MediaInfo) -> Layout:
        """What stands for an item in the prompt, from its size alone. Raises InvalidMedia for what it refuses.

        As text, so that it is tokenized together with its surroundings, exactly as transformers' processors do.
        """
        ...

    def outputs(self, info: MediaInfo, dtype: DType) -> tuple[TensorSpec, ...]:
        """The tensors that an encoder makes of an item, of a model that runs in ``dtype``. Raises InvalidMedia."""
        ...


def count_tokens(family: Family, info: MediaInfo) -> int:
    """Positions that an item's embedding fills. Raises InvalidMedia."""
    return sum(part.count for part in family.layout(info) if isinstance(part, Positions))


_PLURALS = {Modality.IMAGE: "images", Modality.VIDEO: "videos", Modality.AUDIO: "audio"}


def refuse_unless(item: MediaInfo | MediaPart, *modalities: Modality) -> None:
    """Raises InvalidMedia for an item of a modality that the model does not take."""
    if item.modality not in modalities:
        taken = " and ".join(_PLURALS[modality] for modality in modalities)
        raise InvalidMedia(f"the model takes {taken}, not {_PLURALS[item.modality]}")


def filled_positions(token_ids: Sequence[int], run: Run, placeholder_ids: AbstractSet[int]) -> tuple[int, ...]:
    """The prompt positions that an item fills, in order.

    Raises InvalidRequest unless ``run.start`` is a placeholder's and the prompt has as many from there on.
    """
    start, tokens = run
    if start < 0 or tokens < 1 or start >= len(token_ids) or token_ids[start] not in placeholder_ids:
        raise InvalidRequest(f"there is no item of {tokens} tokens at position {start} of the prompt")
    filled: list[int] = []
    for position in range(start, len(token_ids)):
        if token_ids[position] in placeholder_ids:
            filled.append(position)
            if len(filled) == tokens:
                return tuple(filled)
    raise InvalidRequest(
        f"an item of {tokens} tokens starts at position {start}, the prompt has {len(filled)} placeholders from there on"
    )
