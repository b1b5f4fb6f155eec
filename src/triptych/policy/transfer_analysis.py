"""Bytes at every place where a model can be cut between instances, and what links make of them (HeteroServe sections 4.1 and 4.2).

A cut lies between two stages. A request moves its media, its decoded pixels or its embeddings to the encode or the prefill
stage, or the keys and values of its prompt to the decode stage. The bytes are those of the model's own tensors. So they
include what the paper's equations leave out: several tensors of an item, states of cross-attention, another dtype of keys and
values, and tokens that the reader already has.

A link bears a cut if a transfer takes a small share of the stage that computes what is moved. That share is also how busy the
link is while the stage never rests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from triptych.domain.architecture import DecoderArchitecture
from triptych.domain.device import Link
from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.stage import Stage
from triptych.families.base import Family, SamplesFrames, count_tokens

LIGHT = 0.1
"""Largest share of a stage's time that a transfer takes where the link bears the cut."""
MEDIA, PIXELS, EMBEDDINGS, KEYS_AND_VALUES = "media", "pixels", "embeddings", "keys and values"
STATES = "states of items"
"""What moves beside the keys and values of a text with cross-attention: the reader computes keys and values of the states again."""
_COLOURS = 3
_SAMPLE_NBYTES = 4


@dataclass(frozen=True, slots=True)
class MovedItem:
    """One item of a request, in bytes."""

    media_nbytes: int
    """As it came, not decoded."""
    pixels_nbytes: int
    """Decoded: three bytes for each pixel, or four for each sample."""
    positions: int
    """Of the prompt that it fills."""
    tensors: tuple[TensorSpec, ...]
    """What the encoder makes of it."""

    @classmethod
    def of(cls, family: Family, info: MediaInfo, dtype: DType) -> "MovedItem":
        """Raises InvalidMedia for an item that the model does not take."""
        tensors = family.outputs(info, dtype)
        if info.modality is Modality.AUDIO:
            decoded = _SAMPLE_NBYTES * info.samples
        elif info.modality is Modality.VIDEO and isinstance(family, SamplesFrames):
            decoded = _COLOURS * family.seen_pixels(info)
        else:
            decoded = _COLOURS * info.samples_or_pixels
        return cls(info.nbytes, decoded, count_tokens(family, info), tensors)


@dataclass(frozen=True, slots=True)
class Cut:
    """A place where a model can be cut, and what one request moves across it."""

    name: str
    stage: Stage
    """The stage whose time a transfer is held against: it computes what is moved, or from it."""
    parts: Mapping[str, int]
    """Bytes by what they are."""
    transfers: int
    """Transfers that follow each other: one of each item, or of all keys and values."""

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())


def cuts(
    decoder: DecoderArchitecture,
    items: Sequence[MovedItem],
    *,
    text_tokens: int,
    cached_tokens: int = 0,
    kv_dtype: DType,
) -> tuple[Cut, ...]:
    """The cuts from the client's side to the last stage; those of items only if there are some.

    ``cached_tokens`` of the prompt are known to whoever reads keys and values. Their dtype may be another than the model's.
    """
    positions = text_tokens + sum(item.positions for item in items)
    moved = max(0, positions - cached_tokens)
    embeddings = _by_name(items)
    keys_and_values = {KEYS_AND_VALUES: moved * decoder.kv_token_nbytes(kv_dtype)}
    if decoder.cross is not None and items:
        keys_and_values[STATES] = sum(embeddings.values())
    last = Cut(KEYS_AND_VALUES, Stage.PREFILL, keys_and_values, 1)
    if not items:
        return (last,)
    return (
        Cut(MEDIA, Stage.ENCODE, {MEDIA: sum(item.media_nbytes for item in items)}, len(items)),
        Cut(PIXELS, Stage.ENCODE, {PIXELS: sum(item.pixels_nbytes for item in items)}, len(items)),
        Cut(EMBEDDINGS, Stage.ENCODE, embeddings, len(items)),
        last,
    )


def _by_name(items: Sequence[MovedItem]) -> dict[str, int]:
    """Bytes of the tensors of all items, by the names of the tensors."""
    nbytes: dict[str, int] = {}
    for item in items:
        for spec in item.tensors:
            nbytes[spec.name] = nbytes.get(spec.name, 0) + spec.nbytes
    return nbytes


class Verdict(Enum):
    """What a link is to a cut."""

    BEARS = "bears it"
    SLOWS = "slows the stage"
    """A transfer takes more than ``LIGHT`` of the stage's time."""
    WORSE = "computing again is faster"


@dataclass(frozen=True, slots=True)
class Moved:
    """A cut over a link, beside the stage."""

    seconds: float
    stage_s: float

    @property
    def share(self) -> float:
        """Of the stage's time."""
        return self.seconds / self.stage_s if self.stage_s else inf

    @property
    def verdict(self) -> Verdict:
        if self.share <= LIGHT:
            return Verdict.BEARS
        return Verdict.SLOWS if self.share < 1 else Verdict.WORSE


def moved(cut: Cut, link: Link, stage_s: float) -> Moved:
    """The transfers of a request over an idle link; ``stage_s``: what the stage computes for that request."""
    return Moved(cut.transfers * link.transfer_s + cut.nbytes / link.nbytes_per_s, stage_s)


def needed_nbytes_per_s(cut: Cut, stage_s: float, transfer_s: float, share: float = 1.0) -> float:
    """The rate of a link over which a request's transfers take ``share`` of the stage's time; infinite if none is fast enough.

    With a share of 1 it is the break-even: over slower links computing again is faster.
    """
    left_s = share * stage_s - cut.transfers * transfer_s
    return cut.nbytes / left_s if left_s > 0 else inf
