"""The models of these tests: the demo model, and tiny random ones that both vLLM and Triptych's encoders load."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from safetensors.torch import load_file, save_file

from tests.e2e.reference import DIGITS
from tests.integration.families.clips import RATE_HZ, random_clip
from tests.integration.families.harness import (
    Item,
    Question,
    TinyFamily,
    random_image,
    tokenizer,
    transformers,
    without_video,
)
from tests.integration.families.tiny_gemma3 import NAMES as GEMMA3_NAMES
from tests.integration.families.tiny_gemma3 import TinyGemma3
from tests.integration.families.tiny_idefics3 import TinyIdefics3
from tests.integration.families.tiny_internvl import TinyInternVl
from tests.integration.families.tiny_llava_next import TinyLlavaNext
from tests.integration.families.tiny_llava_onevision import TinyLlavaOneVision
from tests.integration.families.tiny_qwen2_audio import TinyQwen2Audio
from tests.integration.families.tiny_qwen_vl import TinyQwen2VL, TinyQwen3VL, TinyQwen25VL, TinyQwenVL
from tests.integration.families.tiny_smolvlm import TinySmolVlm
from tests.models.conftest import ZOO
from tests.models.zoo import VIDEOS, Part, ZooModel
from tests.unit.families.video_processors import video_processor
from triptych.demo import MODEL_DIR
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.testing import clips

Kind = tuple[int, ...]
"""The image in each place of a question; the same number is the same image."""
KINDS: Mapping[str, Kind] = {"text": (), "one": (0,), "two": (0, 1), "mixed": (0, 1, 2, 1), "twice": (0, 0)}
VIDEO_KINDS: Mapping[str, Kind] = {"video": (3,), "image and videos": (0, 3, 4, 3)}
"""The same with videos, of models that take them."""
_LETTERS = "abcdefgh .:"
Change = Callable[[str, Any], Any]
"""Changes a weight, by its name."""


class ServedModel(Protocol):
    @property
    def name(self) -> str: ...

    def make(self, directory: Path) -> Path:
        """The model's directory: that one, with the model written to it, or the model's own."""
        ...

    def question(self, kind: Kind, seed: int) -> Question:
        """Texts around random images. Those of one place in ``KINDS`` have one size for all seeds."""
        ...


class Demo:
    name = "demo"
    _TEXTS = ("What digits are shown?", "Which digit is the largest?", "How many images are there?")

    def make(self, directory: Path) -> Path:
        del directory
        return MODEL_DIR

    def question(self, kind: Kind, seed: int) -> Question:
        rng = random.Random(seed)
        chosen = rng.sample(sorted(DIGITS.glob("*.png")), 3)
        return (*(item(chosen[number].read_bytes()) for number in kind), rng.choice(self._TEXTS))


class Tiny:
    """A tiny random model. Items of one place in ``KINDS`` have one size for all seeds.

    ``vllm_prepares``: most items of a request that vLLM prepares as transformers does; -1 if vLLM by itself is not asked.
    ``published`` changes saved weights to the form of published ones.
    """

    def __init__(
        self,
        family: TinyFamily,
        items: Callable[[random.Random], Sequence[Item]],
        *,
        vllm_prepares: int = 99,
        published: Change | None = None,
    ) -> None:
        self.name = family.name
        self._published = published
        self.family = family
        self.vllm_prepares = vllm_prepares
        self._items = items

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """The questions that it takes."""
        return {**KINDS, **VIDEO_KINDS} if isinstance(self.family, TinyQwenVL) else KINDS

    def make(self, directory: Path) -> Path:
        self.family.make(directory)
        if self._published is not None:
            file = directory / "model.safetensors"
            weights = {name: self._published(name, weight) for name, weight in load_file(file).items()}
            save_file(weights, file, {"format": "pt"})
        return directory

    def question(self, kind: Kind, seed: int) -> Question:
        rng = random.Random(seed)
        items = self._items(rng)
        parts: list[str | Item] = [_text(rng)]
        for number in kind:
            parts += [items[number], _text(rng)]
        return tuple(parts)


def images(*sizes: tuple[int, int]) -> Callable[[random.Random], Sequence[Item]]:
    """Random images of these widths and heights in pixels."""
    return lambda rng: [random_image(rng, *size) for size in sizes]


def sounds(*seconds: float) -> Callable[[random.Random], Sequence[Item]]:
    """Random clips of these lengths."""
    return lambda rng: [random_clip(rng, int(length * RATE_HZ), RATE_HZ) for length in seconds]


def item(media: bytes) -> Item:
    return Item(media, inspect_media(media, MediaLimits()))


def video(rng: random.Random) -> Item:
    """A short clip that has several units in the families that cut videos."""
    return item(clips.video(56, 84, frames=rng.randrange(8, 24), frames_per_s=8, seed=rng.randrange(1000)))


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randrange(3, 16))) + "!"


_TEXT: Mapping[str, Any] = {"hidden_size": 128, "intermediate_size": 192}
"""Heads of 32, the smallest of vLLM's attention on CPUs."""
_VISION: Mapping[str, Any] = {"hidden_size": 64, "out_hidden_size": 128}


class _QwenVL(TinyQwenVL):
    """Saved with its processor of videos, without which vLLM does not start."""

    text: ClassVar[Mapping[str, Any]] = _TEXT

    def processor(self) -> Any:
        images = super().processor()
        videos = getattr(transformers, self.video_processor_type)(patch_size=self.patch, **self.videos)
        cls = getattr(transformers, f"{self._prefix}Processor")
        return cls(images.image_processor, images.tokenizer, videos, chat_template=self.template)

    def load_processor(self, directory: Path) -> Any:
        """On Pillow, as Triptych's encoders."""
        cls = without_video(getattr(transformers, f"{self._prefix}Processor"))
        processor = cls.from_pretrained(directory, backend="pil")
        processor.video_processor = video_processor(self.video_processor_type, **self.videos)
        return processor

    def _rope(self) -> dict[str, Any]:
        return {**super()._rope(), "mrope_section": [6, 5, 5]}


class _Qwen2VL(_QwenVL, TinyQwen2VL):
    encoder: ClassVar[Mapping[str, Any]] = {**TinyQwen2VL.encoder, "embed_dim": 64, "hidden_size": 128}


class _NarrowHeads(_QwenVL, TinyQwen2VL):
    """Heads of 16: vLLM loads it, and its attention on CPUs does not have that size."""

    text: ClassVar[Mapping[str, Any]] = {}

    def _rope(self) -> dict[str, Any]:
        return TinyQwen2VL._rope(self)


class _Qwen25VL(_QwenVL, TinyQwen25VL):
    encoder: ClassVar[Mapping[str, Any]] = {**TinyQwen25VL.encoder, **_VISION}


class _Qwen3VL(_QwenVL, TinyQwen3VL):
    text: ClassVar[Mapping[str, Any]] = {**_TEXT, "head_dim": 32}
    encoder: ClassVar[Mapping[str, Any]] = {**TinyQwen3VL.encoder, **_VISION}


class _Published(TinyFamily):
    """Saved with the names of published weights, which vLLM expects; transformers loads these and its own."""

    renamed: ClassVar[tuple[str, str]] = ("vision_tower.", "vision_tower.vision_model.")

    def make(self, directory: Path) -> None:
        super().make(directory)
        file = directory / "model.safetensors"
        weights = {name.replace(*self.renamed): weight for name, weight in load_file(file).items()}
        save_file(weights, file, {"format": "pt"})


class _Gemma3(_Published, TinyGemma3):
    """Gemma 3, whose tokens for blank lines are in the vocabulary as text, where vLLM looks for them."""

    text: ClassVar[Mapping[str, Any]] = {**_TEXT, "head_dim": 32}

    @staticmethod
    def tokenizer() -> Any:
        return tokenizer(*("\n" * count for count in range(1, 5)), named=GEMMA3_NAMES)


class _InternVl(TinyInternVl):
    text: ClassVar[Mapping[str, Any]] = _TEXT

    def processor(self) -> Any:
        images = super().processor()
        return transformers.InternVLProcessor(
            images.image_processor,
            images.tokenizer,
            transformers.InternVLVideoProcessor(),
            image_seq_length=4,
            chat_template=self.template,
        )


class _LlavaNext(_Published, TinyLlavaNext):
    text: ClassVar[Mapping[str, Any]] = _TEXT


class _LlavaOneVision(_Published, TinyLlavaOneVision):
    text: ClassVar[Mapping[str, Any]] = _TEXT
    anyres = "anyres_max_9"
    """VLLM knows no other."""

    def processor(self) -> Any:
        images = super().processor()
        return transformers.LlavaOnevisionProcessor(
            images.image_processor,
            images.tokenizer,
            transformers.LlavaOnevisionVideoProcessor(),
            num_image_tokens=images.num_image_tokens,
            vision_feature_select_strategy=images.vision_feature_select_strategy,
            vision_aspect_ratio=images.vision_aspect_ratio,
            chat_template=self.template,
        )


class _Idefics3(TinyIdefics3):
    text: ClassVar[Mapping[str, Any]] = _TEXT


class _SmolVlm(TinySmolVlm):
    text: ClassVar[Mapping[str, Any]] = _TEXT

    def processor(self) -> Any:
        images = super().processor()
        return transformers.SmolVLMProcessor(
            images.image_processor,
            images.tokenizer,
            transformers.SmolVLMVideoProcessor(),
            image_seq_len=images.image_seq_len,
            chat_template=self.template,
        )


class _Qwen2Audio(_Published, TinyQwen2Audio):
    text: ClassVar[Mapping[str, Any]] = _TEXT
    renamed = ("language_model.model.model.", "language_model.model.")
    window_s = 30
    """VLLM knows no other."""


_IMAGES = images((90, 40), (64, 64), (31, 70))
_SOUNDS = sounds(0.9, 0.6, 0.3)


def _images_and_videos(rng: random.Random) -> Sequence[Item]:
    return [*_IMAGES(rng), _wide_video(rng), _wide_video(rng)]


def _wide_video(rng: random.Random) -> Item:
    """A clip whose times are below its width in tokens: after others vLLM and transformers count positions differently."""
    return item(clips.video(224, 28, frames=rng.randrange(8, 24), frames_per_s=8, seed=rng.randrange(1000)))


def _of_zoo(
    name: str,
    *,
    vllm_prepares: int = 99,
    videos: Part | None = None,
    vision: Mapping[str, Any] | None = None,
    published: Change | None = None,
    **text: Any,
) -> Tiny:
    """A model of ``tests.models`` with heads of 32. ``videos``: its processor of videos, without which vLLM does not start;
    ``vision`` and ``text``: what published configurations of those parts say besides.
    """
    tiny = ZOO[name]
    assert isinstance(tiny, ZooModel)
    parts = dict(tiny.parts)
    if VIDEOS in parts:
        kind, settings = parts[VIDEOS]
        parts[VIDEOS] = kind, {"size": {"shortest_edge": 784, "longest_edge": 6272}, **settings}
    if videos is not None:
        parts[VIDEOS] = videos
    config = {
        **tiny.config,
        "text_config": {**_wide(tiny.config["text_config"]), **text},
        "vision_config": {**tiny.config["vision_config"], **(vision or {})},
    }
    made = replace(tiny, parts=parts, config=config)
    return Tiny(made, _IMAGES, vllm_prepares=vllm_prepares, published=published)


def _wide(text: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a language model with heads of 32, and as many more rotary frequencies."""
    given = dict(text)
    if given.get("head_dim") != 32 and "rope_parameters" in given:
        given["rope_parameters"] = _doubled(given["rope_parameters"])
    return {**given, "head_dim": 32}


def _doubled(rope: Any) -> Any:
    """With twice the frequencies of each axis, also where layers have their own."""
    if not isinstance(rope, Mapping):
        return rope
    return {
        key: [2 * axis for axis in value] if key == "mrope_section" else _doubled(value) for key, value in rope.items()
    }


def _transposed(name: str, weight: Any) -> Any:
    """Experts in the form of published weights, which vLLM expects; transformers loads both."""
    return weight.transpose(1, 2).contiguous() if ".experts." in name else weight


_WHOLE_ROPE: Mapping[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "mrope_section": [4, 6, 6],
    "partial_rotary_factor": 1.0,  # without it vLLM takes half
}
_GEMMA4_VIDEOS: Part = ("Gemma4VideoProcessor", {"patch_size": 4, "max_soft_tokens": 70, "num_frames": 3})

TINIES: Mapping[str, Tiny] = {
    model.name: model
    for model in (
        Tiny(_Qwen2VL("qwen2_vl", seed=2), _images_and_videos),
        Tiny(_Qwen25VL("qwen2_5_vl", seed=2), _images_and_videos),
        Tiny(_Qwen3VL("qwen3_vl"), _images_and_videos),
        Tiny(_Gemma3(), _IMAGES),
        Tiny(_InternVl(), _IMAGES),
        Tiny(_LlavaOneVision(), _IMAGES, vllm_prepares=1),
        Tiny(_LlavaNext(), _IMAGES),
        Tiny(_Qwen2Audio(), _SOUNDS),
        Tiny(_Idefics3(), _IMAGES),
        Tiny(_SmolVlm(), _IMAGES),
        _of_zoo("aria", vllm_prepares=-1),
        _of_zoo("cohere_compass"),
        _of_zoo("exaone4_5", vllm_prepares=-1),
        _of_zoo("gemma4", videos=_GEMMA4_VIDEOS, vision={"default_output_length": 70}, global_head_dim=64),
        _of_zoo("glm4v"),
        _of_zoo("glm4v_moe", use_qk_norm=False),
        _of_zoo("glm_ocr", vllm_prepares=-1, rope_parameters=_WHOLE_ROPE),
        _of_zoo("llama4"),
        _of_zoo("llava_next_video", vllm_prepares=-1, videos=("LlavaNextVideoVideoProcessor", {})),
        _of_zoo("mistral3"),
        _of_zoo("paddleocr_vl", vllm_prepares=-1),
        _of_zoo("qwen3_vl_moe", moe_intermediate_size=48, published=_transposed),
    )
}
NARROW_HEADS = Tiny(_NarrowHeads("qwen2_vl", seed=2), _IMAGES)
MODELS: Mapping[str, ServedModel] = {"demo": Demo(), "qwen2_5_vl": TINIES["qwen2_5_vl"], "qwen3_vl": TINIES["qwen3_vl"]}
