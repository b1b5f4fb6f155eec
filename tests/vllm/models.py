"""The models of these tests: the demo model, and tiny random ones that both vLLM and Triptych's encoders load."""

import random
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, Protocol

from PIL import Image

from tests.e2e.reference import DIGITS
from tests.integration.families.harness import Item, Question, TinyFamily, transformers
from tests.integration.families.tiny_qwen_vl import TinyQwen3VL, TinyQwen25VL, TinyQwenVL
from triptych.demo import MODEL_DIR
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.testing import clips

Kind = tuple[int, ...]
"""Which image is in each place of a question; the same number is the same image."""
KINDS: Mapping[str, Kind] = {"text": (), "one": (0,), "two": (0, 1), "mixed": (0, 1, 2, 1), "twice": (0, 0)}
_LETTERS = "abcdefgh .:"


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
    """Images have sizes that no processor changes: vLLM resizes with torchvision, and Triptych with Pillow, whose pixels differ
    a little. That matters to the answers of random models, and not to those of the demo model.
    """

    def __init__(self, family: TinyQwenVL) -> None:
        self.name = family.name
        self._family = family

    def make(self, directory: Path) -> Path:
        self._family.make(directory)
        return directory

    def question(self, kind: Kind, seed: int) -> Question:
        rng = random.Random(seed)
        images = [item(noise(rng, tokens * 2 * self._family.patch)) for tokens in (3, 2, 1)]
        parts: list[str | Item] = [_text(rng)]
        for number in kind:
            parts += [images[number], _text(rng)]
        return tuple(parts)


def item(media: bytes) -> Item:
    return Item(media, inspect_media(media, MediaLimits()))


def noise(rng: random.Random, side_px: int) -> bytes:
    """Coarse, so that it survives resizing."""
    out = BytesIO()
    coarse = Image.frombytes("RGB", (6, 6), rng.randbytes(3 * 6 * 6))
    coarse.resize((side_px, side_px), Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()


def video(rng: random.Random) -> Item:
    """A short clip that has several units in the families that cut videos."""
    return item(clips.video(56, 84, frames=rng.randrange(8, 24), frames_per_s=8, seed=rng.randrange(1000)))


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randrange(3, 16))) + "!"


class _WithVideos(TinyQwenVL):
    """Saved with its processor of videos, without which vLLM does not start. Heads of 32, the smallest of vLLM's attention
    on CPUs.
    """

    def processor(self) -> Any:
        images = super().processor()
        videos = getattr(transformers, self.video_processor_type)(patch_size=self.patch, **self.videos)
        cls = getattr(transformers, f"{self._prefix}Processor")
        return cls(images.image_processor, images.tokenizer, videos, chat_template=self.template)

    def load_processor(self, directory: Path) -> Any:
        return TinyFamily.load_processor(self, directory)

    def _rope(self) -> dict[str, Any]:
        return {**super()._rope(), "mrope_section": [6, 5, 5]}


_TEXT: Mapping[str, Any] = {"hidden_size": 128, "intermediate_size": 192}
_VISION: Mapping[str, Any] = {"hidden_size": 64, "out_hidden_size": 128}


class _Qwen25VL(_WithVideos, TinyQwen25VL):
    text: ClassVar[Mapping[str, Any]] = _TEXT
    encoder: ClassVar[Mapping[str, Any]] = {**TinyQwen25VL.encoder, **_VISION}


class _Qwen3VL(_WithVideos, TinyQwen3VL):
    text: ClassVar[Mapping[str, Any]] = {**_TEXT, "head_dim": 32}
    encoder: ClassVar[Mapping[str, Any]] = {**TinyQwen3VL.encoder, **_VISION}


MODELS: Mapping[str, ServedModel] = {
    model.name: model for model in (Demo(), Tiny(_Qwen25VL("qwen2_5_vl", seed=2)), Tiny(_Qwen3VL("qwen3_vl")))
}
