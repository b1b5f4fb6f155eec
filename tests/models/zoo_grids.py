"""Tiny random models of types whose items are grids of patches, for tests of the generic family.

An entry of ``ZOO`` says what sets its type apart: the shapes of its published configuration at small widths, with the
same kinds of layers, flags and ratios, and the tokens that its processor needs and its chat template writes.
"""

import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as untyped_transformers
from transformers.utils.hub import PushToHubMixin

from tests.integration.families.harness import (
    Item,
    TinyFamily,
    image_processor_class,
    llama_sizes,
    siglip_sizes,
    tokenizer,
)
from tests.models.zoo import arguments_of, random_item
from triptych.domain.media import Modality

transformers: Any = untyped_transformers
_Settings = Mapping[str, Any]


# --- what types with one processor share ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Processing:
    """The processor of a model type: its classes, their settings and their tokens."""

    cls: str
    image: str | None
    """What the chat template writes for an image, where ``{number}`` counts the images from 1."""
    images: _Settings
    """Settings of the image processor."""
    tokens: Mapping[str, str]
    """By name. The tokenizer has the token as an attribute, the model's configuration its id as ``<name>_id``."""
    ids: Mapping[str, str] = field(default_factory=dict)
    """Tokens whose ids have other names in the configuration."""
    image_cls: str = "Qwen2VLImageProcessorPil"
    video_cls: str | None = None
    """None for a processor without videos."""
    videos: _Settings = field(default_factory=dict)
    """Settings of the video processor."""
    audio: Any = None
    """Makes the feature extractor of a processor with audio."""
    clip: str | None = None
    """What the chat template writes for a clip."""
    video: str | None = None
    """What the chat template writes for a video."""
    fps: float | None = None
    """Frames that are sampled a second, where the video processor has no setting for it."""
    options: _Settings = field(default_factory=dict)
    """Further arguments of the processor."""
    call: _Settings = field(default_factory=dict)
    """Further arguments of its calls."""

    def tokenizer(self) -> Any:
        return tokenizer(named=self.tokens)

    def token_ids(self) -> dict[str, int]:
        """The configuration's ids."""
        vocabulary = self.tokenizer()
        named = {f"{name}_id": token for name, token in self.tokens.items()} | dict(self.ids)
        return {name: vocabulary.convert_tokens_to_ids(token) for name, token in named.items()}

    def build(self, template: str) -> Any:
        return self._assemble(image_processor_class(self.image_cls)(**self.images), self.tokenizer(), template)

    def load(self, directory: Path, template: str) -> Any:
        """The processor of a saved model directory, without its video processor, which has no Pillow backend."""
        if self.video_cls is None:
            return transformers.AutoProcessor.from_pretrained(directory, backend="pil")
        images = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
        return self._assemble(images, transformers.AutoTokenizer.from_pretrained(directory), template)

    def _assemble(self, images: Any, vocabulary: Any, template: str) -> Any:
        parts = {"image_processor": images, "tokenizer": vocabulary, **self.options}
        if self.video_cls is not None:
            parts["video_processor"] = (
                _VideoSettings(video_processor_type=self.video_cls, **self.videos)
                if self.video is None
                else getattr(transformers, self.video_cls)(**self.videos)
            )
        if self.audio is not None:
            parts["feature_extractor"] = self.audio()
        return _with_any_videos(image_processor_class(self.cls))(**parts, chat_template=template)


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
            return None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)

    AnyVideos.__name__ = cls.__name__
    return AnyVideos


def _edges(patch: int, *, merge: int = 2, frames: int = 1) -> dict[str, Any]:
    """Settings for images of one to twelve tokens, of ``merge`` by ``merge`` patches each."""
    area = frames * (merge * patch) ** 2
    return {"patch_size": patch, "size": {"shortest_edge": area, "longest_edge": 12 * area}}


_QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
QWEN = Processing(
    "Qwen3VLProcessor",
    "<|vision_start|><|image_pad|><|vision_end|>",
    _edges(16),
    _QWEN_TOKENS,
    video_cls="Qwen3VLVideoProcessor",
)
QWEN3_OMNI = replace(
    QWEN,
    cls="Qwen3OmniMoeProcessor",
    tokens={
        **_QWEN_TOKENS,
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_token": "<|audio_pad|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    },
    ids={"audio_start_token_id": "<|audio_start|>", "audio_end_token_id": "<|audio_end|>"},
    video_cls="Qwen2VLVideoProcessor",
    videos={"patch_size": 16},
    audio=partial(transformers.WhisperFeatureExtractor, feature_size=16, return_attention_mask=True),
    clip="<|audio_start|><|audio_pad|><|audio_end|>",
)
QWEN2_5_OMNI = replace(
    QWEN3_OMNI,
    cls="Qwen2_5OmniProcessor",
    image="<|vision_bos|><|IMAGE|><|vision_eos|>",
    clip="<|audio_bos|><|AUDIO|><|audio_eos|>",
    images=_edges(14),
    tokens={
        "image_token": "<|IMAGE|>",
        "video_token": "<|VIDEO|>",
        "audio_token": "<|AUDIO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    },
    ids={
        "vision_start_token_id": "<|vision_bos|>",
        "vision_end_token_id": "<|vision_eos|>",
        "audio_start_token_id": "<|audio_bos|>",
        "audio_end_token_id": "<|audio_eos|>",
    },
    videos={},
)
EXAONE = replace(
    QWEN,
    cls="Exaone4_5_Processor",
    image="<vision><|image_pad|></vision>",
    images=_edges(14),
    tokens={
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<vision>",
        "vision_end_token": "</vision>",
    },
    video_cls="Qwen2VLVideoProcessor",
)
HYPERCLOVA = replace(
    EXAONE,
    cls="HyperCLOVAXVisionV2Processor",
    image="<|image_start|><|IMAGE_PAD|><|image_end|>",
    tokens={
        "image_token": "<|IMAGE_PAD|>",
        "video_token": "<|VIDEO_PAD|>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
    },
)
COMPASS = replace(
    QWEN,
    cls="CohereCompassProcessor",
    image="<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
    tokens={name: token.upper() for name, token in _QWEN_TOKENS.items()},
    image_cls="CohereCompassImageProcessorPil",
    video_cls="CohereCompassVideoProcessor",
)
COSMOS_EDGE = replace(
    QWEN,
    cls="Cosmos3EdgeProcessor",
    image_cls="Cosmos3EdgeImageProcessorPil",
    video_cls="Cosmos3EdgeVideoProcessor",
    call={"return_mm_token_type_ids": True},
)
HUNYUAN_V4 = replace(QWEN, cls="HYV4VLProcessor", image_cls="HYV4VLImageProcessorPil", video_cls="HYV4VLVideoProcessor")
VIDEO_LLAMA = Processing(
    "VideoLlama3Processor",
    "<|image_pad|>",
    _edges(14, merge=1),
    {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    image_cls="VideoLlama3ImageProcessorPil",
    video_cls="VideoLlama3VideoProcessor",
)
DOTS = Processing(
    "Dots3NoteProcessor",
    "<|img|><|imgpad|><|endofimg|>",
    _edges(14) | {"temporal_patch_size": 1},
    {
        "image_token": "<|imgpad|>",
        "video_token": "<|video_pad|>",
        "audio_token": "<|audio_comp_pad|>",
        "image_start_token": "<|img|>",
        "image_end_token": "<|endofimg|>",
    },
    video_cls="Qwen3VLVideoProcessor",
    audio=lambda: transformers.Dots3NoteFeatureExtractor(feature_size=16),  # not in every release
    clip="<|audio_comp_pad|>",
)
GLM4V = Processing(
    "Glm4vProcessor",
    "<|begin_of_image|><|image|><|end_of_image|>",
    _edges(14, frames=2),
    {
        "image_token": "<|image|>",
        "video_token": "<|video|>",
        "image_start_token": "<|begin_of_image|>",
        "image_end_token": "<|end_of_image|>",
        "video_start_token": "<|begin_of_video|>",
        "video_end_token": "<|end_of_video|>",
    },
    image_cls="Glm4vImageProcessorPil",
    video_cls="Glm4vVideoProcessor",
)
GLM46V = replace(GLM4V, cls="Glm46VProcessor", image_cls="Glm46VImageProcessorPil", video_cls="Glm46VVideoProcessor")
GLM5 = replace(
    GLM4V,
    cls="Glm5NextProcessor",
    images={"patch_size": 14, "min_image_tokens": 2, "max_image_tokens": 12},
    image_cls="Glm5NextImageProcessorPil",
    video_cls="Glm5NextVideoProcessor",
)
ERNIE = Processing(
    "Ernie4_5_VLMoeProcessor",
    "Picture {number}:<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    _edges(14),
    {
        "image_token": "<|IMAGE_PLACEHOLDER|>",
        "image_start_token": "<|IMAGE_START|>",
        "image_end_token": "<|IMAGE_END|>",
        "video_token": "<|VIDEO_PLACEHOLDER|>",
        "video_start_token": "<|VIDEO_START|>",
        "video_end_token": "<|VIDEO_END|>",
    },
    image_cls="Ernie4_5_VLMoeImageProcessorPil",
    video_cls="Ernie4_5_VLMoeVideoProcessor",
    videos={"font": "", "draw_on_frames": False},
)
PADDLE = Processing(
    "PaddleOCRVLProcessor",
    "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    _edges(14),
    {
        "image_token": "<|IMAGE_PLACEHOLDER|>",
        "video_token": "<|VIDEO_PLACEHOLDER|>",
        "vision_start_token": "<|IMAGE_START|>",
        "vision_end_token": "<|IMAGE_END|>",
    },
    image_cls="PaddleOCRVLImageProcessorPil",
)
_HUNYUAN_START, _HUNYUAN_END, _HUNYUAN_IMAGE = (
    f"<\uff5chy_place\u2581holder\u2581no\u2581{number}\uff5c>" for number in (100, 101, 102)
)
HUNYUAN = Processing(
    "HunYuanVLProcessor",
    _HUNYUAN_START + _HUNYUAN_IMAGE + _HUNYUAN_END,
    _edges(16),
    {"image_token": _HUNYUAN_IMAGE, "image_start_token": _HUNYUAN_START, "image_end_token": _HUNYUAN_END},
    ids={"im_start_id": _HUNYUAN_START, "im_end_id": _HUNYUAN_END},
    image_cls="HunYuanVLImageProcessorPil",
)
MINICPM = Processing(
    "MiniCPMV4_6Processor",
    "<|image_pad|>",
    {"patch_size": 4, "scale_resolution": 32},
    {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    },
    image_cls="MiniCPMV4_6ImageProcessorPil",
    video_cls="MiniCPMV4_6VideoProcessor",
    videos={"slice_mode": True, "downsample_mode": "16x"},
)
MINICPM4_7 = replace(
    MINICPM,
    cls="MiniCPMV4_7Processor",
    ids={
        "image_start_id": "<image>",
        "image_end_id": "</image>",
        "slice_start_id": "<slice>",
        "slice_end_id": "</slice>",
        "newline_id": "\N{LATIN CAPITAL LETTER C WITH DOT ABOVE}",  # a line feed, in the bytes of the vocabulary
    },
)
DEEPSEEK = Processing(
    "DeepseekOcr2Processor",
    "<image>",
    # As many patches as in the published sizes, which the learned queries fix: 64 by 64, and 48 by 48 of a tile.
    {"size": {"height": 64, "width": 64}, "tile_size": 48},
    {"image_token": "<image>"},
    image_cls="DeepseekOcr2ImageProcessorPil",
    options={"patch_size": 1},
)


# --- a model type -----------------------------------------------------------------------------------------------------


class Grids(TinyFamily):
    """A tiny random model of the type ``name``."""

    def __init__(
        self,
        name: str,
        processing: Processing,
        *,
        text: _Settings,
        vision: _Settings,
        tied: bool = False,
        seed: int = 0,
        context: int = TinyFamily.context,
        **config: Any,
    ) -> None:
        self.name = name
        self.processing = processing
        written = (
            (Modality.IMAGE, processing.image),
            (Modality.VIDEO, processing.video),
            (Modality.AUDIO, processing.clip),
        )
        self.targets = tuple((modality, target) for modality, target in written if target is not None)
        self.seed = seed
        self.context = context
        self._text = {"max_position_embeddings": context, "tie_word_embeddings": tied, **text}
        self._config = {"vision_config": dict(vision), "tie_word_embeddings": tied, **config}

    @property
    def needs_torchvision(self) -> bool:
        return self.processing.video is not None

    @property
    def template(self) -> str:
        """The usual one, which also counts images."""
        counted = super().template.replace("{number}", "' ~ images.number ~ '")
        return "{%- set images = namespace(number=0) -%}" + counted.replace(
            "== 'image' -%}", "== 'image' -%}{%- set images.number = images.number + 1 -%}"
        )

    def processor(self) -> Any:
        return self.processing.build(self.template)

    def load_processor(self, directory: Path) -> Any:
        return self.processing.load(directory, self.template)

    def inputs(self, processor: Any, text: str, items: Sequence[Item]) -> Any:
        with warnings.catch_warnings():
            # Some processors of transformers 5.24 pass a tensor of tokens to numpy.
            warnings.filterwarnings("ignore", "__array", DeprecationWarning)
            return processor(
                text=text, **arguments_of(items, fps=self.processing.fps), return_tensors="pt", **self.processing.call
            )

    def item(self, rng: random.Random, modality: Modality) -> Item:
        return random_item(rng, modality)

    def model(self) -> Any:
        sizes = llama_sizes(len(self.processing.tokenizer()), **self._text)
        ids = self.processing.token_ids()
        config = transformers.AutoConfig.for_model(self.model_type, text_config=sizes, **ids, **self._config)
        return _with_clear_answers(transformers.AutoModelForImageTextToText.from_config(config).float())


@torch.no_grad()
def _with_clear_answers(model: Any) -> Any:
    """The model with weights scaled by their fan-in; the usual narrow range makes all tokens alike."""
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
    return model


# --- parts of configurations ------------------------------------------------------------------------------------------


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary positions of several axes: the numbers of frequencies of time, height and width."""
    more = {"rope_type": "default", "rope_theta": 10_000.0, **more}
    return {"rope_parameters": {**more, "mrope_section": list(sections)}}


_VISION = {"depth": 4, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
_QWEN_VISION = {**_VISION, "num_position_embeddings": 64}
_DEEPSTACK_VISION = {**_QWEN_VISION, "deepstack_visual_indexes": [0, 1, 2]}
_WINDOW_VISION = {**_VISION, "depth": 2, "window_size": 56, "fullatt_block_indexes": [1]}
_GLM_VISION = {**_VISION, "depth": 2, "image_size": 112}
_HUNYUAN_VISION = {**siglip_sizes(), "max_image_size": 128, "out_hidden_size": 64}
_MINICPM_VISION = {**siglip_sizes(num_hidden_layers=4), "image_size": 64, "patch_size": 4}

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED_EXPERTS = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_QWEN3_TEXT = _rope(4, 2, 2, mrope_interleaved=True)
_QWEN3_MOE_TEXT = {**_QWEN3_TEXT, **_EXPERTS, "norm_topk_prob": True}
_QWEN3_5_TEXT = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    **_rope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25),
}
_QWEN3_5_MOE_TEXT = {
    **_QWEN3_5_TEXT,
    **_EXPERTS,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 32,
}
_MINICPM_TEXT = {**_QWEN3_5_TEXT, "model_type": "qwen3_5_text", "linear_num_value_heads": 2}
_GLM_TEXT = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "attention_bias": True,
    **_rope(2, 3, 3, partial_rotary_factor=0.5),
}
_LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_INDEXER = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 4}
_OMNI_AUDIO = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "output_dim": 64,
}

_SMALL_VIDEOS = {"size": {"shortest_edge": 2048, "longest_edge": 32768}}
_FEW_PIXELS = {"size": {"shortest_edge": 784, "longest_edge": 6272}}
"""Limits of videos, and of frames."""

ZOO = (
    Grids("qwen3_5", QWEN, text=_QWEN3_5_TEXT, vision=_QWEN_VISION),
    Grids(
        "qwen3_5--video",
        replace(QWEN, video="<|vision_start|><|video_pad|><|vision_end|>", videos={"patch_size": 16, **_SMALL_VIDEOS}),
        text=_QWEN3_5_TEXT,
        vision=_QWEN_VISION,
    ),
    Grids("qwen3_5_moe", QWEN, text=_QWEN3_5_MOE_TEXT, vision=_QWEN_VISION),
    Grids("qwen3_vl_moe", QWEN, text=_QWEN3_MOE_TEXT, vision=_DEEPSTACK_VISION),
    Grids(
        "qwen4_exp",
        QWEN,
        text={
            **_QWEN3_5_MOE_TEXT,
            "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
            "hc_count": 4,
            "hc_lowrank": 8,
            "ple_layer_ids": [2],
            "ngram_vocab_size_base": 50,
            "split_ngram_parts": 1,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
        vision=_QWEN_VISION,
        seed=1,
    ),
    Grids("cosmos3_omni", QWEN, text=_QWEN3_TEXT, vision=_DEEPSTACK_VISION, seed=1),
    Grids(
        "lfm3_vl",
        replace(QWEN, cls="Lfm3VlProcessor"),
        text={
            "model_type": "lfm3",
            "num_hidden_layers": 5,
            "layer_types": ["conv", "conv", "full_attention", "conv", "sliding_attention"],
            "sliding_window": 16,
            "head_dim": 16,
        },
        vision={
            **siglip_sizes(num_hidden_layers=4, num_key_value_heads=1),
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
        projector_hidden_size=64,
        tied=True,
    ),
    Grids(
        "cosmos3_edge",
        COSMOS_EDGE,
        text={"head_dim": 16, **_rope(4, 2, 2)},
        vision={**siglip_sizes(), "num_patches": 64},
        projector_hidden_size=128,
        seed=1,
    ),
    Grids(
        "cohere_compass",
        COMPASS,
        text={
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "sliding_window": 16,
            "logit_scale": 0.5,
            "rope_parameters": {
                "sliding_attention": _QWEN3_TEXT["rope_parameters"],
                "full_attention": _QWEN3_TEXT["rope_parameters"],
            },
        },
        vision=_DEEPSTACK_VISION,
        tied=True,
        seed=1,
    ),
    Grids(
        "qwen2_5_omni_thinker",
        QWEN2_5_OMNI,
        text=_rope(2, 3, 3),
        vision=_WINDOW_VISION,
        audio_config=_OMNI_AUDIO,
        seed=1,
    ),
    Grids(
        "qwen2_5_omni_thinker--video",
        replace(QWEN2_5_OMNI, video="<|vision_bos|><|VIDEO|><|vision_eos|>", videos=_FEW_PIXELS, fps=2.0),
        text=_rope(2, 3, 3),
        vision=_WINDOW_VISION,
        audio_config=_OMNI_AUDIO,
        seed=1,
    ),
    Grids(
        "qwen3_omni_moe_thinker",
        QWEN3_OMNI,
        text=_QWEN3_MOE_TEXT,
        vision=_DEEPSTACK_VISION,
        audio_config={**_OMNI_AUDIO, "downsample_hidden_size": 16},
    ),
    Grids(
        "exaone4_5",
        EXAONE,
        text={"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 4},
        vision={**_WINDOW_VISION, "num_key_value_heads": 1},
    ),
    Grids(
        "hyperclovax_vision_v2",
        HYPERCLOVA,
        text={
            "model_type": "hyperclovax",
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.0625,
            "logits_scaling": 0.5,
        },
        vision=_WINDOW_VISION,
        seed=3,
    ),
    Grids(
        "video_llama_3",
        VIDEO_LLAMA,
        text={"model_type": "qwen2"},
        vision=siglip_sizes(patch_size=14),
        tied=True,
        seed=1,
    ),
    Grids("glm4v", GLM4V, text=_GLM_TEXT, vision=_GLM_VISION, seed=1),
    Grids(
        "glm4v--video",  # apart from images, beside which transformers refuses videos
        replace(GLM4V, image=None, video="<|begin_of_video|><|video|><|end_of_video|>", videos=_SMALL_VIDEOS),
        text=_GLM_TEXT,
        vision=_GLM_VISION,
        seed=1,
    ),
    Grids("glm46v", GLM46V, text={"model_type": "glm4v_text", **_GLM_TEXT}, vision=_GLM_VISION, seed=1),
    Grids(
        "glm4v_moe",
        GLM4V,
        text={**_GLM_TEXT, **_ROUTED_EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        vision=_GLM_VISION,
    ),
    Grids(
        "glm_ocr",
        GLM46V,
        text={"head_dim": 16, **_rope(2, 3, 3)},
        vision={**_GLM_VISION, "attention_bias": True},
        seed=2,
    ),
    Grids(
        "glm5_next",
        GLM5,
        text={
            **_ROUTED_EXPERTS,
            **_LATENT_ATTENTION,
            **_INDEXER,
            "num_hidden_layers": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "index_kpool": 4,
            "hc_mult": 4,
        },
        vision={**_GLM_VISION, "projection_intermediate_size": 64},
    ),
    Grids(
        "ernie4_5_vl_moe",
        ERNIE,
        text={
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": [48, 16],
            **_rope(3, 3, 2),
        },
        vision={**_VISION, "depth": 2},
        tied=True,
        seed=1,
    ),
    Grids("paddleocr_vl", PADDLE, text={"head_dim": 16, **_rope(2, 3, 3)}, vision=siglip_sizes(image_size=112), seed=1),
    Grids(
        "hunyuan_vl",
        HUNYUAN,
        text={"head_dim": 16, **_rope(2, 2, 2, 2, rope_type="dynamic", alpha=1000.0, factor=1.0)},
        vision=_HUNYUAN_VISION,
        tied=True,
    ),
    Grids(
        "hy_v4_vl",
        HUNYUAN_V4,
        text={**_ROUTED_EXPERTS, **_LATENT_ATTENTION, **_INDEXER, "qk_rope_head_dim": 16, **_rope(4, 2, 2)},
        vision=_HUNYUAN_VISION,
    ),
    Grids(
        "dots3_note",
        DOTS,
        text={
            **_ROUTED_EXPERTS,
            **_LATENT_ATTENTION,
            **_INDEXER,
            "num_hidden_layers": 6,
            "shared_experts_intermediate_size": 32,
            "head_dim": 32,
            "qk_rope_head_dim": 8,
            "sliding_window": 16,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_q_lora_rank": 32,
            "swa_kv_lora_rank": 32,
            "swa_head_dim": 32,
            "swa_qk_nope_head_dim": 24,
            "swa_v_head_dim": 16,
        },
        vision={
            **siglip_sizes(),
            "moe_intermediate_size": 32,
            "pyramid_num_routed": [-1, 4],
            "adapter_in_dim": 32,
            "adapter_out_dim": 64,
        },
        audio_config={
            **siglip_sizes(),
            "feature_size": 16,
            "downsample_hidden_size": 16,
            "adapter_input_size": 32,
            "adapter_out_dim": 64,
        },
        seed=1,
    ),
    Grids("minicpmv4_6", MINICPM, text=_MINICPM_TEXT, vision=_MINICPM_VISION, insert_layer_id=1, tied=True),
    Grids("minicpmv4_7", MINICPM4_7, text=_MINICPM_TEXT, vision=_MINICPM_VISION, insert_layer_id=1, tied=True),
    Grids(
        "deepseek_ocr2",
        DEEPSEEK,
        text={
            **_ROUTED_EXPERTS,
            "num_key_value_heads": 4,
            "n_shared_experts": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        vision={
            "sam_config": {
                **siglip_sizes(),
                "output_channels": 16,
                "image_size": 64,
                "patch_size": 1,
                "global_attn_indexes": [1],
                "downsample_channels": [32, 64],
            },
            "encoder_config": llama_sizes(8, num_hidden_layers=2),
        },
        context=4096,
    ),
)
