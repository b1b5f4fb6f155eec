"""Tiny random models, stated as data: a ``ZooModel`` for each model type of transformers.

It has the processor that transformers ships for the type, the tokens that it needs, and a configuration with the
shapes of the published one: the same kinds of layers, flags and ratios at small widths. Types with one processor state
that once, and then what sets each apart (``ZooModel.of``).
"""

import inspect
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils.hub import PushToHubMixin

from tests.integration.families.clips import RATE_HZ, random_clip
from tests.integration.families.harness import (
    Item,
    TinyFamily,
    image_processor_class,
    llama_sizes,
    pixels_of,
    random_image,
    siglip_sizes,
    tokenizer,
    transformers,
    without_video,
)
from triptych.domain.media import Modality
from triptych.engine.media.audio import decode_audio
from triptych.engine.media.videos import decode_video
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.testing import clips

VOCABULARY = "|vocabulary|"
"""Stands for the number of tokens in a configuration. A special token stands for its id there."""
MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
)
"""In which transformers names the class that generates, for each model type."""
VIDEOS = "video_processor"
"""The processor's part for videos. Its settings stand for it where the model does not need torchvision."""

Part = tuple[str, Mapping[str, Any]]
"""The class of an image processor or feature extractor, and its settings."""


@dataclass(eq=False, kw_only=True)
class ZooModel(TinyFamily):
    """A model type by its processor and its configuration; all weights are random."""

    name: str = ""
    """Empty for what several types share."""
    target: str
    """The chat template's text for an item, where ``{number}`` counts images from 1."""
    modality: Modality = Modality.IMAGE
    also: Mapping[Modality, str] = field(default_factory=dict)
    """The chat template's texts for items of other modalities."""
    processor_name: str
    parts: Mapping[str, Part]
    """The processor's parts beside the tokenizer, by argument."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The processor's other arguments."""
    special: Sequence[str] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    """Special tokens, which the processor finds as attributes of the tokenizer. ``of`` gives the configuration their ids too."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Special tokens by attributes that every tokenizer has, as ``sep_token``."""
    rate_hz: int = RATE_HZ
    """At which the model hears."""
    clip_s: float | None = None
    """Length of all clips, where transformers lets one attend to the padding that a longer one asks for."""
    fps: float | None = None
    """Frames that are sampled a second, where the video processor has no setting for it."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the processor's calls."""
    config: Mapping[str, Any] = field(default_factory=dict)
    draw: Callable[[Any], None] | None = None
    """Draws the model's weights; None for ``randomize``."""
    gains: Mapping[str, float] = field(default_factory=dict)
    """Factors on the random weights of parameters whose names contain a key, and constants for norms."""
    unspoken: Sequence[str] = ()
    """Tokens that a model with tied embeddings never answers with, as published ones do not."""
    adapt: Callable[[Any], None] | None = None
    """Mends transformers' model before it answers."""
    needs_torchvision: bool = False
    """Whether the processor is to take videos, or transformers has it or its image processor only with torchvision."""
    needs_images: bool = False
    """Whether the processor refuses prompts without an item; the tokenizer takes them."""
    most_items: int | None = None
    """In one prompt, as far as the processor allows."""
    seed: int = 0
    context: int = 2048
    chunk_tokens: int = 7

    @property
    def targets(self) -> Sequence[tuple[Modality, str]]:  # type: ignore[override]
        return ((self.modality, self.target), *self.also.items())

    def of(
        self,
        name: str,
        *,
        text: Mapping[str, Any],
        vision: Mapping[str, Any],
        tied: bool = False,
        seed: int = 0,
        context: int = 2048,
        **config: Any,
    ) -> "ZooModel":
        """The model of a type with this processor, and these changes of its configuration."""
        sizes: dict[str, Any] = {"max_position_embeddings": context, "tie_word_embeddings": tied, **text}
        ids = {f"{token}_id": spelled for token, spelled in self.named.items()}
        parts = {"text_config": decoder(**sizes), "vision_config": dict(vision), "tie_word_embeddings": tied}
        whole = {**ids, **self.config, **parts, **config}
        return replace(self, name=name, seed=seed, context=context, config=whole, draw=draw_clear)

    @property
    def template(self) -> str:
        usual = super().template
        if "{number}" not in usual:
            return usual
        counted = usual.replace("{number}", "' ~ images.number ~ '")
        return "{%- set images = namespace(number=0) -%}" + counted.replace(
            "== 'image' -%}", "== 'image' -%}{%- set images.number = images.number + 1 -%}"
        )

    def processor(self) -> Any:
        cls = image_processor_class(self.processor_name)
        parts = {
            key: image_processor_class(name)(**settings)
            for key, (name, settings) in self.parts.items()
            if key != VIDEOS or self.needs_torchvision
        }
        if VIDEOS in self.parts and not self.needs_torchvision:
            kind, settings = self.parts[VIDEOS]
            cls, parts[VIDEOS] = _with_any_videos(cls), _VideoSettings(video_processor_type=kind, **settings)
        if self.lacks_video:
            cls = type(cls.__name__, (without_video(cls), _NoVideo), {})
            parts[VIDEOS] = None
        made = cls(**parts, tokenizer=self.tokenizer(), **self.options)
        made.chat_template = self.template
        return made

    @property
    def lacks_video(self) -> bool:
        """Whether the processor has a part for videos, which needs torchvision and is left out."""
        takes = inspect.signature(image_processor_class(self.processor_name).__init__).parameters
        return VIDEOS in takes and VIDEOS not in self.parts

    def load_processor(self, directory: Path) -> Any:
        pil = any(name.endswith("Pil") for name, _ in self.parts.values())
        if self.lacks_video or (pil and VIDEOS in self.parts):  # which is not on Pillow
            return self.processor()
        loaded = transformers.AutoProcessor.from_pretrained(directory, **({"backend": "pil"} if pil else {}))
        loaded.chat_template = self.template  # some processors do not take the one in the directory
        return loaded

    def item(self, rng: random.Random, modality: Modality) -> Item:
        if modality is Modality.AUDIO and self.clip_s is not None:
            return random_clip(rng, int(self.clip_s * RATE_HZ), RATE_HZ)
        return random_item(rng, modality)

    def inputs(self, processor: Any, text: str, items: Sequence[Item]) -> Any:
        if not items and self.needs_images:
            return processor.tokenizer(text, return_tensors="pt")
        # Without the argument Qwen3-ASR's takes no text.
        given: dict[str, Any] = {"audio": None} if self.modality is Modality.AUDIO else {}
        given |= {**arguments_of(items, self.rate_hz, self.fps), **self.call}
        with warnings.catch_warnings():
            # Some processors of transformers 5.24 pass a tensor of tokens to numpy.
            warnings.filterwarnings("ignore", "__array", DeprecationWarning)
            made = processor(text=text, **given, return_tensors="pt")
        return made.to(torch.float32)  # Llama 4's pixels are bfloat16

    def adjust(self, whole: Any) -> None:
        if self.adapt is not None:
            self.adapt(whole)

    def model(self) -> Any:
        text = self.tokenizer()
        values = _resolved(self.config, {VOCABULARY: len(text), **text.get_vocab()})
        values.get("text_config", values).update(self.text)
        config = transformers.AutoConfig.for_model(self.model_type, **values)
        names: Any = transformers.models.auto.modeling_auto
        name = next(found[self.model_type] for key in MAPPINGS if self.model_type in (found := getattr(names, key)))
        model = getattr(transformers, name)(config).float()
        with torch.no_grad():
            if self.draw is None:
                randomize(model, self.seed, self.gains)
            else:
                self.draw(model)
            if self.unspoken:
                model.get_input_embeddings().weight[[text.get_vocab()[token] for token in self.unspoken]] = 0
        return model

    def tokenizer(self) -> Any:
        text = tokenizer(*self.special, named=self.named or None)
        for name, token in self.roles.items():
            setattr(text, name, token)
        return text


def random_item(rng: random.Random, modality: Modality) -> Item:
    """An item of a random size; clips are of several rates."""
    if modality is Modality.AUDIO:
        rate_hz = rng.choice((RATE_HZ, RATE_HZ, 8_000, 22_050))
        return random_clip(rng, rng.randrange(rate_hz // 5, rate_hz * 5), rate_hz)
    if modality is Modality.VIDEO:
        width, height = 2 * rng.randrange(15, 50), 2 * rng.randrange(15, 50)
        frames, rate = rng.randrange(8, 34), rng.choice((5, 8, 12))
        media = clips.video(width, height, frames, rate, seed=rng.randrange(1000))
        return Item(media, inspect_media(media, MediaLimits()))
    return random_image(rng, rng.randrange(8, 90), rng.randrange(8, 90))


def arguments_of(items: Sequence[Item], rate_hz: int = RATE_HZ, fps: float | None = None) -> dict[str, Any]:
    """A processor's arguments for the items of a prompt. Sounds are heard at ``rate_hz``, and ``fps`` frames sampled a second."""
    images = [pixels_of(item) for item in items if item.info.modality is Modality.IMAGE]
    heard = [decode_audio(item.media, item.info, rate_hz) for item in items if item.info.modality is Modality.AUDIO]
    given: dict[str, Any] = {name: media for name, media in (("images", images), ("audio", heard)) if media}
    videos = [item for item in items if item.info.modality is Modality.VIDEO]
    if videos:
        given["videos"] = [
            np.stack(list(decode_video(item.media, item.info, range(item.info.frames)))) for item in videos
        ]
        given["video_metadata"] = [
            {
                "total_num_frames": item.info.frames,
                "fps": item.info.frames / item.info.duration_s,
                "duration": item.info.duration_s,
                "width": item.info.width,
                "height": item.info.height,
            }
            for item in videos
        ]
        given |= {"do_sample_frames": True} | ({} if fps is None else {"fps": fps})
    return given


class _VideoSettings(PushToHubMixin):
    """Stands for a video processor, which needs torchvision: its settings."""

    _auto_class = None

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def _with_any_videos(cls: Any) -> Any:
    """A processor class that accepts ``_VideoSettings``."""

    class AnyVideos(cls):  # type: ignore[misc]  # a class that is chosen at run time
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if name == VIDEOS else super().check_argument_for_proper_class(name, argument)

    AnyVideos.__name__ = cls.__name__
    return AnyVideos


class _NoVideo(transformers.ProcessorMixin):  # type: ignore[misc]  # transformers is untyped
    """Stands before ``ProcessorMixin`` and drops the argument."""

    def __init__(self, *args: Any, video_processor: None = None, **kwargs: Any) -> None:
        super().__init__(*(part for part in args if part is not None), **kwargs)


def _resolved(value: Any, ids: Mapping[str, int]) -> Any:
    """The configuration with ids in place of tokens."""
    if isinstance(value, Mapping):
        return {key: _resolved(inner, ids) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner, ids) for inner in value]
    return ids.get(value, value) if isinstance(value, str) else value


def randomize(model: Any, seed: int, gains: Mapping[str, float]) -> None:
    """Weights whose outputs are about as large as their inputs: the usual ones repeat a token forever."""
    generator = torch.Generator().manual_seed(seed)
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    usual = {"embed_tokens": 0.1 if tied else 0.5, "lm_head": 4.0, "q_proj": 2.0, "q_norm": 2.0}
    if tied:  # layers outweigh the last token, which tied weights would repeat forever
        usual |= dict.fromkeys(("o_proj", "down_proj", "out_proj", "feed_forward.w2"), 4.0)
    for key, weight in model.named_parameters():
        gain = next((gain for part, gain in {**gains, **usual}.items() if part in key), None)
        if weight.dim() >= 2:
            convolution = weight.dim() > 3 or "conv" in key
            fan = weight[0].numel() if convolution else weight.shape[-1]
            std = 1.0 if "embed_tokens" in key else fan**-0.5
            weight.normal_(0, std * (1.0 if gain is None else gain), generator=generator)
        elif key.endswith("bias"):
            weight.normal_(0, 0.1, generator=generator)
        elif gain is not None:
            weight.fill_(gain)
    norm = getattr(model.get_decoder(), "norm", None)
    if tied and norm is not None:
        norm.weight.fill_(4.0)  # clearer answers: there is no head to scale


def draw_clear(model: Any) -> None:
    """Weights scaled by their fan-in, embeddings small; the usual narrow range makes all tokens alike."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for name, weight in model.named_parameters():
        if id(weight) in embeddings:
            weight.normal_(0, 0.25)
        elif weight.dim() >= 2:
            inputs = weight.shape[-1] if ".experts." in name else weight[0].numel()
            weight.normal_(0, (4 if name == "lm_head.weight" else 1.5) * inputs**-0.5)
        elif name.endswith("bias"):
            weight.normal_(0, 0.1)
        elif name.endswith("linear_attn.A_log"):
            weight.uniform_(-5, -1)  # linear attention remembers some ten to a hundred tokens


def decoder(model_type: str | None = None, **changes: Any) -> dict[str, Any]:
    """The configuration of a small language model."""
    named = {} if model_type is None else {"model_type": model_type}
    return named | llama_sizes(0, vocab_size=VOCABULARY, **changes)


def vision(model_type: str | None = None, **changes: Any) -> dict[str, Any]:
    """The configuration of a small encoder."""
    named = {} if model_type is None else {"model_type": model_type}
    return named | siglip_sizes(**changes)


SLIDING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "sliding_window": 16,
}
"""Three layers with a window, then one without, as in most published models with windows."""


def places(token: str) -> list[str]:
    """Tokens of tiles by row and column, at most four of each."""
    return [token.format(row, column) for row in range(1, 5) for column in range(1, 5)]


TILE = {"height": 32, "width": 32}
