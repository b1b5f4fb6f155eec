"""Any model of transformers without a family of its own: its own processor says how an item enters a prompt.

What a processor writes for an item depends on the item's size alone. So it is applied to a blank item of that size, once
per size, where transformers is loaded (``ItemProcessing``): in an engine's own process, or in a process beside a router.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from triptych.domain.embedding import EMBEDS, DType, TensorSpec
from triptych.domain.media import MediaInfo, Modality
from triptych.families.base import PromptReplacement, filled, refuse_unless
from triptych.families.model_files import ModelFiles
from triptych.families.qwen3_vl import deepstack
from triptych.families.qwen_vision import frame_rate

MOST_EXTRA_VALUES = 64
"""Values of a tensor that is transferred beside rows, such as a grid of patches."""
BESIDE_IMAGES: Mapping[str, str] = {"phi4_multimodal": "image_pixel_values"}
"""Models that encode clips otherwise in requests with images, and the argument of their forward method that tells them."""
_BESIDE = "beside_images"
"""Name of the option of such a clip."""
_KEPT_SIZES = 4096
_PLACE = "place"
"""Name of the option that says how many items of its modality precede an item."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's configuration and processor say of it, whatever the item."""

    model_type: str
    hidden_size: int
    context_length: int
    targets: Mapping[Modality, tuple[int, ...]]
    """Token ids that the chat template writes for an item, by supported modality."""
    placeholder_ids: frozenset[int]
    token_types: Mapping[str, Mapping[int, int]]
    """Inputs of the model's forward method that have a number per token, such as its modality: those that are not 0, by token id."""
    layers: Mapping[Modality, int]
    """Tensors beside the embedding that have a row per placeholder, for layers of the decoder (DeepStack)."""
    sample_rate_hz: int = 0
    """Rate that audio is resampled to; 0 without audio."""
    numbered: frozenset[Modality] = frozenset()
    """Modalities of which an item's replacement depends on how many of them precede it in the request."""
    prompt_prefix: str = ""
    """Text that the processor writes before a prompt which does not begin with it."""


@dataclass(frozen=True, slots=True)
class BlankItem:
    """The size of an item: what its replacement depends on. ``samples`` are at the model's own rate."""

    modality: Modality
    width: int = 0
    height: int = 0
    samples: int = 0
    place: int = 0
    """How many items of its modality precede it, where that matters."""
    frames: int = 0
    """Of a video, ``duration_s`` long."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Processed:
    """The text and placeholders that an item's target becomes, and the small tensors that the decoder's positions need."""

    replacement: PromptReplacement
    extras: tuple[TensorSpec, ...]
    frames: tuple[int, ...] = ()
    """Indices of the frames that are sampled of a video, ascending."""
    seen_pixels: int = 0
    """Pixels of a video whose size is that of its sampled frames and of what the processor makes of them."""


class ItemProcessing(Protocol):
    """The model's own processor. Thread-safe."""

    @property
    def facts(self) -> ModelFacts: ...

    def processed(self, blank: BlankItem) -> Processed:
        """Process a blank item; takes 4 to 400 ms. Raises InvalidMedia for a size that the processor refuses."""
        ...

    def close(self) -> None: ...


class GenericFamily:
    """``Family`` of a model that only its processor knows. ``load`` needs an ``ItemProcessing``, unlike other families."""

    def __init__(self, processing: ItemProcessing) -> None:
        self.facts = processing.facts
        self.processing = processing
        self._processed = lru_cache(_KEPT_SIZES)(self._process)

    @property
    def model_type(self) -> str:
        return self.facts.model_type

    @property
    def hidden_size(self) -> int:
        return self.facts.hidden_size

    @property
    def context_length(self) -> int:
        return self.facts.context_length

    @property
    def replacement_targets(self) -> Mapping[Modality, tuple[int, ...]]:
        return self.facts.targets

    @property
    def placeholder_ids(self) -> frozenset[int]:
        return self.facts.placeholder_ids

    @property
    def prompt_prefix(self) -> str:
        return self.facts.prompt_prefix

    @property
    def sample_rate_hz(self) -> int:
        return self.facts.sample_rate_hz

    def together(self, infos: Sequence[MediaInfo]) -> tuple[MediaInfo, ...]:
        """``families.base.RequestDependent``: an item's place among those of its modality, and images beside it, where they matter."""
        if self.model_type in BESIDE_IMAGES and any(info.modality is Modality.IMAGE for info in infos):
            infos = [_with_option(info, _BESIDE) if info.modality is Modality.AUDIO else info for info in infos]
        if not self.facts.numbered:
            return tuple(infos)
        places: Counter[Modality] = Counter()
        placed: list[MediaInfo] = []
        for info in infos:
            place = places[info.modality]
            places[info.modality] += 1
            numbered = info.modality in self.facts.numbered and place
            placed.append(_with_option(info, _PLACE, str(place)) if numbered else info)
        return tuple(placed)

    def prompt_replacement(self, info: MediaInfo) -> PromptReplacement:
        return self._of(info).replacement

    def outputs(self, info: MediaInfo, dtype: DType) -> tuple[TensorSpec, ...]:
        processed = self._of(info)
        rows = filled(processed.replacement)
        names = (EMBEDS, *map(deepstack, range(self.facts.layers.get(info.modality, 0))))
        return (*(TensorSpec(name, dtype, (rows, self.hidden_size)) for name in names), *processed.extras)

    def _of(self, info: MediaInfo) -> Processed:
        refuse_unless(info, *self.replacement_targets)
        return self._processed(self.blank(info))

    def blank(self, info: MediaInfo) -> BlankItem:
        """What the replacement of an item depends on."""
        place = int(dict(info.options).get(_PLACE, 0))
        if info.modality is Modality.AUDIO:
            samples = info.samples_at(self.facts.sample_rate_hz)
            return BlankItem(info.modality, samples=samples, place=place)
        if info.modality is Modality.VIDEO:
            frame_rate(info)  # refuses a header without one
            return BlankItem(
                info.modality, info.width, info.height, place=place, frames=info.frames, duration_s=info.duration_s
            )
        return BlankItem(info.modality, info.width, info.height, place=place)

    def is_beside_images(self, info: MediaInfo) -> bool:
        """Whether an item is a clip that the model encodes as in requests with images, where that matters."""
        is_clip = info.modality is Modality.AUDIO
        return is_clip and self.model_type in BESIDE_IMAGES and _BESIDE in dict(info.options)

    def sampled_frames(self, info: MediaInfo) -> tuple[int, ...]:
        """``families.base.SamplesFrames``, of a video."""
        return self._of(info).frames

    def seen_pixels(self, info: MediaInfo) -> int:
        return self._of(info).seen_pixels

    def _process(self, blank: BlankItem) -> Processed:
        return self.processing.processed(blank)


def _with_option(info: MediaInfo, name: str, value: str = "") -> MediaInfo:
    return replace(info, options=(*info.options, (name, value)))


StartProcessing = Callable[[ModelFiles], ItemProcessing]
"""Loads a model's processor. Raises BadModel if transformers has none for it, or it says too little."""
