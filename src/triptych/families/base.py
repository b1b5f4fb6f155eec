"""What differs between model architectures, as far as it can be told without tensors.

Placeholders and their counts (for the router, from sizes alone), and what crosses the boundary between encoder and
text instances (for the router's credits, the encoder's reservations and the text instance's checks alike).
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeGuard, runtime_checkable

from triptych.domain.chat import MediaPart
from triptych.domain.embedding import DType, TensorSpec, with_rows
from triptych.domain.media import MediaInfo, Modality, Shard
from triptych.errors import InvalidMedia, InvalidRequest
from triptych.families.model_files import ModelFiles


class Span(NamedTuple):
    """Where an item is in a prompt: the first ``tokens`` placeholders at or after position ``start``.

    They are neighbours in most families; some put marks between the parts of an item (rows of tiles, frames).
    """

    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Placeholders:
    """``count`` times the placeholder ``token_id``, one behind the other."""

    token_id: int
    count: int


PromptReplacement = tuple[str | Placeholders, ...]
"""What replaces an item's target in a prompt: texts (separators, timestamps) and the positions that its embedding fills."""


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
    def replacement_targets(self) -> Mapping[Modality, tuple[int, ...]]:
        """For each modality that the model takes, the token ids that a chat template writes for an item.

        ``prompt_replacement`` replaces them. Most are one token; some templates write begin and end tokens around it.
        """
        ...

    @property
    def placeholder_ids(self) -> AbstractSet[int]:
        """The token ids of all ``Placeholders``."""
        ...

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        """What replaces an item's target, computed from its size alone. Raises InvalidMedia for what it refuses.

        As text, so that it is tokenized together with its surroundings, exactly as transformers' processors do.
        """
        ...

    def outputs(self, info: MediaInfo, dtype: DType) -> tuple[TensorSpec, ...]:
        """The tensors that an encoder makes of an item, of a model that runs in ``dtype``. Raises InvalidMedia."""
        ...


@runtime_checkable
class RequestDependent(Protocol):
    """A family that treats an item differently when its request has others."""

    def together(self, infos: Sequence[MediaInfo]) -> tuple[MediaInfo, ...]:
        """The items of one request, each with the ``options`` by which it is told apart from itself alone."""
        ...


def as_in_request(family: Family, infos: Sequence[MediaInfo]) -> tuple[MediaInfo, ...]:
    """The items of one request, as ``prompt_replacement``, ``outputs`` and the encoder take them."""
    return family.together(infos) if _is_request_dependent(family) else tuple(infos)


@runtime_checkable
class Shardable(Protocol):
    """A family with items that can be cut into shards without changing their embeddings: into tiles, or in time."""

    def units(self, info: MediaInfo) -> tuple[int, ...]:
        """The positions that each unit of an item fills, in order; of an item that cannot be cut, one number.

        The encoder computes each unit independently, and all tensors of an item that has several have one row
        for each position: those of a shard are the rows of its units. Raises InvalidMedia.
        """
        ...


@runtime_checkable
class SamplesFrames(Protocol):
    """A family that samples frames of a video."""

    def sampled_frames(self, info: MediaInfo) -> tuple[int, ...]:
        """Their numbers, ascending. Raises InvalidMedia."""
        ...

    def seen_pixels(self, info: MediaInfo) -> int:
        """Pixels of all of them together, in the size in which the encoder sees them. Raises InvalidMedia."""
        ...


def filled(replacement: PromptReplacement) -> int:
    """Positions that the item's embedding fills."""
    return sum(part.count for part in replacement if isinstance(part, Placeholders))


def count_tokens(family: Family, info: MediaInfo) -> int:
    """Positions that an item's embedding fills. Raises InvalidMedia."""
    return filled(family.prompt_replacement(info))


def units_of(family: Family, info: MediaInfo) -> tuple[int, ...]:
    """The positions of each unit into which an item can be cut. Raises InvalidMedia."""
    return family.units(info) if _is_shardable(family) else (count_tokens(family, info),)


# On the way of every request: ``isinstance`` of a protocol looks at each of its members, ``issubclass`` remembers.


def _is_request_dependent(family: Family) -> TypeGuard[RequestDependent]:
    return issubclass(type(family), RequestDependent)


def _is_shardable(family: Family) -> TypeGuard[Shardable]:
    return issubclass(type(family), Shardable)


def shard_outputs(
    family: Family, info: MediaInfo, dtype: DType, shard: Shard | None
) -> tuple[int, tuple[TensorSpec, ...]]:
    """Positions, and tensors, of a shard; of the whole item without one.

    Raises InvalidMedia, and InvalidRequest for a shard that the item does not have.
    """
    outputs = family.outputs(info, dtype)
    if shard is None:
        return count_tokens(family, info), outputs
    units = units_of(family, info)
    if shard.of != len(units) or not 0 <= shard.first < shard.first + shard.count <= len(units):
        raise InvalidRequest(f"units {shard.first} to {shard.first + shard.count} of {shard.of}: it has {len(units)}")
    tokens = sum(units[shard.first : shard.first + shard.count])
    return tokens, with_rows(outputs, tokens)


_PLURALS = {Modality.IMAGE: "images", Modality.VIDEO: "videos", Modality.AUDIO: "audio"}


def refuse_unless(item: MediaInfo | MediaPart, *modalities: Modality) -> None:
    """Raises InvalidMedia for an item of a modality that the model does not take."""
    if item.modality not in modalities:
        taken = " and ".join(_PLURALS[modality] for modality in modalities)
        raise InvalidMedia(f"the model takes {taken}, not {_PLURALS[item.modality]}")


def filled_positions(token_ids: Sequence[int], run: Span, placeholder_ids: AbstractSet[int]) -> tuple[int, ...]:
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
