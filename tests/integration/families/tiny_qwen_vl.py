"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images and videos of any shape, three axes of rotary positions, DeepStack."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tests.integration.families.harness import (
    Item,
    TinyFamily,
    llama_sizes,
    pixels_of,
    random_image,
    tokenizer,
    transformers,
    without_video,
)
from tests.unit.engine.rope_index import whole_seconds_only, with_parts_of_seconds
from tests.unit.families.video_processors import video_processor
from triptych.domain.media import Modality
from triptych.engine.media.videos import decode_video
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.testing import clips

_MARKS = ("<|vision_start|>", "<|vision_end|>")


class TinyQwenVL(TinyFamily):
    targets = tuple(
        (modality, f"{_MARKS[0]}<|{modality.value}_pad|>{_MARKS[1]}") for modality in (Modality.IMAGE, Modality.VIDEO)
    )
    patch = 14
    encoder: ClassVar[Mapping[str, Any]]
    videos: ClassVar[Mapping[str, Any]] = {"fps": 2.0, "size": {"shortest_edge": 784, "longest_edge": 6272}}
    video_processor_type = "Qwen2VLVideoProcessor"

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name = name
        self.seed = seed

    @property
    def _prefix(self) -> str:
        return {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[self.model_type]

    def processor(self) -> Any:
        side = self.patch * 2
        images = transformers.Qwen2VLImageProcessorPil(
            patch_size=self.patch, size={"shortest_edge": side**2, "longest_edge": 12 * side**2}
        )
        cls = without_video(getattr(transformers, f"{self._prefix}Processor"))
        return cls(images, self._tokenizer(), chat_template=self.template)

    def make(self, directory: Path) -> None:
        super().make(directory)
        settings = {"video_processor_type": self.video_processor_type, **self.videos}
        (directory / "video_preprocessor_config.json").write_text(json.dumps(settings))

    def load_processor(self, directory: Path) -> Any:
        processor = without_video(getattr(transformers, f"{self._prefix}Processor")).from_pretrained(directory)
        processor.video_processor = video_processor(self.video_processor_type, **self.videos)
        return processor

    def item(self, rng: random.Random, modality: Modality) -> Item:
        if modality is Modality.IMAGE:
            return random_image(rng, rng.randrange(30, 120), rng.randrange(30, 120))
        media = clips.video(
            2 * rng.randrange(15, 50),
            2 * rng.randrange(15, 50),
            frames=rng.randrange(3, 34),
            frames_per_s=rng.choice((5, 8, 12)),
            seed=rng.randrange(1000),
        )
        return Item(media, inspect_media(media, MediaLimits()))

    def inputs(self, processor: Any, text: str, items: Sequence[Item]) -> Any:
        images = [pixels_of(item) for item in items if item.info.modality is Modality.IMAGE]
        infos = [(item.media, item.info) for item in items if item.info.modality is Modality.VIDEO]
        whole = [np.stack(list(decode_video(media, info, range(info.frames)))) for media, info in infos]
        metadata = [{"total_num_frames": info.frames, "fps": info.frames / info.duration_s} for _, info in infos]
        of_videos = {"video_metadata": metadata, "do_sample_frames": True} if whole else {}
        return processor(text=text, images=images or None, videos=whole or None, return_tensors="pt", **of_videos)

    def model(self) -> Any:
        text = self._tokenizer()
        sizes = llama_sizes(len(text), rope_parameters=self._rope(), **self.text)
        encoder = {
            "depth": 2,
            "num_heads": 2,
            "patch_size": self.patch,
            "initializer_range": 0.3,
            **self.encoder,
        }
        ids = {
            f"{name}_token_id": text.convert_tokens_to_ids(token)
            for name, token in {
                "image": "<|image_pad|>",
                "video": "<|video_pad|>",
                "vision_start": _MARKS[0],
                "vision_end": _MARKS[1],
            }.items()
        }
        config = getattr(transformers, f"{self._prefix}Config")(
            text_config=sizes, vision_config=encoder, initializer_range=0.25, **ids
        )
        return getattr(transformers, f"{self._prefix}ForConditionalGeneration")(config)

    def _rope(self) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}

    @staticmethod
    def _tokenizer() -> Any:
        return tokenizer(*_MARKS, "<|image_pad|>", "<|video_pad|>")


class TinyQwen2VL(TinyQwenVL):
    encoder: ClassVar[Mapping[str, Any]] = {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}


class TinyQwen2VLWindow(TinyQwen2VL):
    """A possible published configuration: layers from the second on have a window of twelve positions."""

    text: ClassVar[Mapping[str, Any]] = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}


class TinyQwen25VL(TinyQwenVL):
    """A window of two tokens, so that most images have several; one of two layers attends to all tokens."""

    encoder: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 3,
    }

    def adjust(self, whole: Any) -> None:
        if whole_seconds_only():
            vision = whole.config.vision_config
            whole.model.get_rope_index = with_parts_of_seconds(
                whole.model.get_rope_index, vision.spatial_merge_size, vision.tokens_per_second
            )


class TinyQwen3VL(TinyQwenVL):
    patch = 16
    encoder: ClassVar[Mapping[str, Any]] = {
        "depth": 3,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    videos: ClassVar[Mapping[str, Any]] = {"size": {"shortest_edge": 2048, "longest_edge": 65536}}
    video_processor_type = "Qwen3VLVideoProcessor"

    def _rope(self) -> dict[str, Any]:
        return {**super()._rope(), "mrope_interleaved": True}


TINIES = (
    TinyQwen2VL("qwen2_vl", seed=2),
    TinyQwen2VLWindow("qwen2_vl-window", seed=2),
    TinyQwen25VL("qwen2_5_vl", seed=2),
    TinyQwen3VL("qwen3_vl"),
)
