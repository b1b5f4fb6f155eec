"""The interface of model families: everything about an architecture that needs no tensors.

A family gives the placeholders of an item, from its size alone, and the tensors passed from encoder to text instance. Routers
need the former for prompts. The latter are for the router's credits, the encoder's reservations and the text instance's checks.
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
    """Place of an item in a prompt: the first ``tokens`` placeholders at or after position ``start``. In most families
    they are contiguous. Some write separators between parts of an item (rows of tiles, frames).
    """

    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Placeholders:
    """``count`` consecutive placeholders ``token_id``."""

    token_id: int
    count: int


PromptReplacement = tuple[str | Placeholders, ...]
"""Replacement of an item's target in a prompt: text (separators, timestamps) and the positions of its embedding."""


class Family(Protocol):
    """Architecture, configured by the files of one model directory."""

    @property
    def model_type(self) -> str:
        """The architecture's name in ``config.json``."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the language model and of its input embeddings."""
        ...

    @property
    def context_length(self) -> int:
        """The language model's maximum number of positions."""
        ...

    @property
    def replacement_targets(self) -> Mapping[Modality, tuple[int, ...]]:
        """Token ids that a chat template writes for an item, by supported modality. ``prompt_replacement`` replaces
        them. Most are one token; some templates add begin and end tokens.
        """
        ...

    @property
    def placeholder_ids(self) -> AbstractSet[int]:
        """The token ids of all ``Placeholders``."""
        ...

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        """The replacement of an item's target, computed from its size alone. Raises InvalidMedia.

        It contains text, which is tokenized together with its surroundings, exactly like transformers' processors do.
        """
        ...

    def outputs(self, info: MediaInfo, dtype: DType) -> tuple[TensorSpec, ...]:
        """The tensors that an encoder makes of an item, for a model that runs in ``dtype``. Raises InvalidMedia."""
        ...


class WrittenFamily(Family, Protocol):
    """A family that needs nothing but the files."""

    @classmethod
    def load(cls, files: ModelFiles) -> Self:
        """Raises BadModel, naming the field, for a configuration that is not supported."""
        ...


@runtime_checkable
class RequestDependent(Protocol):
    """A family that treats an item differently if its request has several."""

    def together(self, infos: Sequence[MediaInfo]) -> tuple[MediaInfo, ...]:
        """The items of one request, with the resulting ``options``. Raises InvalidMedia for items that do not go together."""
        ...


def as_in_request(family: Family, infos: Sequence[MediaInfo]) -> tuple[MediaInfo, ...]:
    """The items of one request, with the ``options`` that ``prompt_replacement``, ``outputs`` and the encoder need."""
    return family.together(infos) if _is_request_dependent(family) else tuple(infos)


@runtime_checkable
class Prefixed(Protocol):
    """A family whose processor writes a text before a prompt which does not begin with it."""

    @property
    def prompt_prefix(self) -> str: ...


@runtime_checkable
class Templated(Protocol):
    """A family whose models are published without a chat template. Prompts get no special tokens that it does not write."""

    @property
    def chat_template(self) -> str: ...


@runtime_checkable
class Shardable(Protocol):
    """A family whose items can be split into shards (tiles or time) without changing their embeddings."""

    def units(self, info: MediaInfo) -> tuple[int, ...]:
        """The number of positions of each unit of an item, in order; a single number if it cannot be split.

        The encoder computes each unit independently. All tensors of a divisible item have one row per position, and a
        shard's tensors are the rows of its units. Raises InvalidMedia.
        """
        ...


@runtime_checkable
class SamplesFrames(Protocol):
    """A family that samples frames of a video."""

    def sampled_frames(self, info: MediaInfo) -> tuple[int, ...]:
        """The indices of the frames to sample, ascending. Raises InvalidMedia."""
        ...

    def seen_pixels(self, info: MediaInfo) -> int:
        """Total pixels of the sampled frames after resizing. Raises InvalidMedia."""
        ...


@runtime_checkable
class Resamples(Protocol):
    """A family that takes audio at one sample rate."""

    @property
    def sample_rate_hz(self) -> int: ...


@runtime_checkable
class Gridded(Protocol):
    """A family whose items are cut into patches in time, height and width, from which positions are computed."""

    def patch_grid(self, info: MediaInfo) -> tuple[int, int, int]:
        """The number of an item's patches. Raises InvalidMedia."""
        ...


def grid_of(family: Family, info: MediaInfo) -> tuple[int, ...]:
    """The number of an item's patches in time, height and width, if positions depend on it. Raises InvalidMedia."""
    return tuple(family.patch_grid(info)) if isinstance(family, Gridded) else ()


def filled(replacement: PromptReplacement) -> int:
    """Positions that the item's embedding fills."""
    return sum(part.count for part in replacement if isinstance(part, Placeholders))


def count_tokens(family: Family, info: MediaInfo) -> int:
    """Positions that an item's embedding fills. Raises InvalidMedia."""
    return filled(family.prompt_replacement(info))


def units_of(family: Family, info: MediaInfo, tokens: int | None = None) -> tuple[int, ...]:
    """The number of positions of each unit of an item; ``tokens`` are those of all, if counted. Raises InvalidMedia."""
    if _is_shardable(family):
        return family.units(info)
    return (count_tokens(family, info) if tokens is None else tokens,)


# On the path of every request: ``isinstance`` checks each protocol member, ``issubclass`` is cached.


def _is_request_dependent(family: Family) -> TypeGuard[RequestDependent]:
    return issubclass(type(family), RequestDependent)


def _is_shardable(family: Family) -> TypeGuard[Shardable]:
    return issubclass(type(family), Shardable)


def shard_outputs(
    family: Family, info: MediaInfo, dtype: DType, shard: Shard | None
) -> tuple[int, tuple[TensorSpec, ...]]:
    """Positions and tensors of a shard, or of the whole item.

    Raises InvalidMedia; InvalidRequest for a shard that the item does not have.
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
    """Raises InvalidMedia for an item of a modality that the model does not support."""
    if item.modality not in modalities:
        taken = " and ".join(_PLURALS[modality] for modality in modalities)
        raise InvalidMedia(f"the model takes {taken}, not {_PLURALS[item.modality]}")


def filled_positions(token_ids: Sequence[int], run: Span, placeholder_ids: AbstractSet[int]) -> tuple[int, ...]:
    """The prompt positions that an item fills, in order.

    Raises InvalidRequest unless ``run.start`` is a placeholder and enough placeholders follow.
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
