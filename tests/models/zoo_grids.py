"""Tiny models of types whose items are grids of patches, as large as items are."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.integration.families.harness import llama_sizes, siglip_sizes
from tests.models.zoo import Part, ZooModel
from triptych.domain.media import Modality

# --- what types with one processor share ------------------------------------------------------------------------------


def grids(
    images: str, settings: Mapping[str, Any], videos: str | None = None, of_videos: Mapping[str, Any] | None = None
) -> dict[str, Part]:
    """A processor's parts for images and videos, by how their classes' names begin."""
    parts: dict[str, Part] = {"image_processor": (f"{images}ImageProcessorPil", settings)}
    return parts if videos is None else parts | {"video_processor": (f"{videos}VideoProcessor", of_videos or {})}


def edges(patch: int, *, merge: int = 2, frames: int = 1) -> dict[str, Any]:
    """Settings for images of one to twelve tokens, of ``merge`` by ``merge`` patches each."""
    area = frames * (merge * patch) ** 2
    return {"patch_size": patch, "size": {"shortest_edge": area, "longest_edge": 12 * area}}


QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
QWEN = ZooModel(
    target="<|vision_start|><|image_pad|><|vision_end|>",
    processor_name="Qwen3VLProcessor",
    parts=grids("Qwen2VL", edges(16), "Qwen3VL"),
    named=QWEN_TOKENS,
)
HEARING: dict[str, Part] = {
    "feature_extractor": ("WhisperFeatureExtractor", {"feature_size": 16, "return_attention_mask": True})
}
QWEN3_OMNI = replace(
    QWEN,
    also={Modality.AUDIO: "<|audio_start|><|audio_pad|><|audio_end|>"},
    processor_name="Qwen3OmniMoeProcessor",
    parts=grids("Qwen2VL", edges(16), "Qwen2VL", {"patch_size": 16}) | HEARING,
    named={
        **QWEN_TOKENS,
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_token": "<|audio_pad|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    },
    config={"audio_start_token_id": "<|audio_start|>", "audio_end_token_id": "<|audio_end|>"},
)
QWEN2_5_OMNI = replace(
    QWEN3_OMNI,
    target="<|vision_bos|><|IMAGE|><|vision_eos|>",
    also={Modality.AUDIO: "<|audio_bos|><|AUDIO|><|audio_eos|>"},
    processor_name="Qwen2_5OmniProcessor",
    parts=grids("Qwen2VL", edges(14), "Qwen2VL") | HEARING,
    named={
        "image_token": "<|IMAGE|>",
        "video_token": "<|VIDEO|>",
        "audio_token": "<|AUDIO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    },
    config={
        "vision_start_token_id": "<|vision_bos|>",
        "vision_end_token_id": "<|vision_eos|>",
        "audio_start_token_id": "<|audio_bos|>",
        "audio_end_token_id": "<|audio_eos|>",
    },
)
EXAONE = ZooModel(
    target="<vision><|image_pad|></vision>",
    processor_name="Exaone4_5_Processor",
    parts=grids("Qwen2VL", edges(14), "Qwen2VL"),
    named={
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<vision>",
        "vision_end_token": "</vision>",
    },
)
HYPERCLOVA = ZooModel(
    target="<|image_start|><|IMAGE_PAD|><|image_end|>",
    processor_name="HyperCLOVAXVisionV2Processor",
    parts=grids("Qwen2VL", edges(14), "Qwen2VL"),
    named={
        "image_token": "<|IMAGE_PAD|>",
        "video_token": "<|VIDEO_PAD|>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
    },
)
COMPASS = ZooModel(
    target="<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
    processor_name="CohereCompassProcessor",
    parts=grids("CohereCompass", edges(16), "CohereCompass"),
    named={name: token.upper() for name, token in QWEN_TOKENS.items()},
)
COSMOS_EDGE = replace(
    QWEN,
    processor_name="Cosmos3EdgeProcessor",
    parts=grids("Cosmos3Edge", edges(16), "Cosmos3Edge"),
    call={"return_mm_token_type_ids": True},
)
HUNYUAN_V4 = replace(QWEN, processor_name="HYV4VLProcessor", parts=grids("HYV4VL", edges(16), "HYV4VL"))
VIDEO_LLAMA = ZooModel(
    target="<|image_pad|>",
    processor_name="VideoLlama3Processor",
    parts=grids("VideoLlama3", edges(14, merge=1), "VideoLlama3"),
    named={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
)
DOTS = ZooModel(
    target="<|img|><|imgpad|><|endofimg|>",
    also={Modality.AUDIO: "<|audio_comp_pad|>"},
    processor_name="Dots3NoteProcessor",
    parts=grids("Qwen2VL", edges(14) | {"temporal_patch_size": 1}, "Qwen3VL")
    | {"feature_extractor": ("Dots3NoteFeatureExtractor", {"feature_size": 16})},
    named={
        "image_token": "<|imgpad|>",
        "video_token": "<|video_pad|>",
        "audio_token": "<|audio_comp_pad|>",
        "image_start_token": "<|img|>",
        "image_end_token": "<|endofimg|>",
    },
)
GLM4V = ZooModel(
    target="<|begin_of_image|><|image|><|end_of_image|>",
    processor_name="Glm4vProcessor",
    parts=grids("Glm4v", edges(14, frames=2), "Glm4v"),
    named={
        "image_token": "<|image|>",
        "video_token": "<|video|>",
        "image_start_token": "<|begin_of_image|>",
        "image_end_token": "<|end_of_image|>",
        "video_start_token": "<|begin_of_video|>",
        "video_end_token": "<|end_of_video|>",
    },
)
GLM46V = replace(
    GLM4V,
    processor_name="Glm46VProcessor",
    parts=grids("Glm46V", edges(14, frames=2), "Glm46V"),
)
GLM5 = replace(
    GLM4V,
    processor_name="Glm5NextProcessor",
    parts=grids("Glm5Next", {"patch_size": 14, "min_image_tokens": 2, "max_image_tokens": 12}, "Glm5Next"),
)
ERNIE = ZooModel(
    target="Picture {number}:<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    processor_name="Ernie4_5_VLMoeProcessor",
    parts=grids("Ernie4_5_VLMoe", edges(14), "Ernie4_5_VLMoe", {"font": "", "draw_on_frames": False}),
    named={
        "image_token": "<|IMAGE_PLACEHOLDER|>",
        "image_start_token": "<|IMAGE_START|>",
        "image_end_token": "<|IMAGE_END|>",
        "video_token": "<|VIDEO_PLACEHOLDER|>",
        "video_start_token": "<|VIDEO_START|>",
        "video_end_token": "<|VIDEO_END|>",
    },
)
PADDLE = ZooModel(
    target="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    processor_name="PaddleOCRVLProcessor",
    parts=grids("PaddleOCRVL", edges(14)),
    named={
        "image_token": "<|IMAGE_PLACEHOLDER|>",
        "video_token": "<|VIDEO_PLACEHOLDER|>",
        "vision_start_token": "<|IMAGE_START|>",
        "vision_end_token": "<|IMAGE_END|>",
    },
)
HUNYUAN_START, HUNYUAN_END, HUNYUAN_IMAGE = (
    f"<\uff5chy_place\u2581holder\u2581no\u2581{number}\uff5c>" for number in (100, 101, 102)
)
HUNYUAN = ZooModel(
    target=HUNYUAN_START + HUNYUAN_IMAGE + HUNYUAN_END,
    processor_name="HunYuanVLProcessor",
    parts=grids("HunYuanVL", edges(16)),
    named={
        "image_token": HUNYUAN_IMAGE,
        "image_start_token": HUNYUAN_START,
        "image_end_token": HUNYUAN_END,
    },
    config={"im_start_id": HUNYUAN_START, "im_end_id": HUNYUAN_END},
)
MINICPM = ZooModel(
    target="<|image_pad|>",
    processor_name="MiniCPMV4_6Processor",
    parts=grids(
        "MiniCPMV4_6",
        {"patch_size": 4, "scale_resolution": 32},
        "MiniCPMV4_6",
        {"slice_mode": True, "downsample_mode": "16x"},
    ),
    named={
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    },
)
MINICPM4_7 = replace(
    MINICPM,
    processor_name="MiniCPMV4_7Processor",
    config={
        "image_start_id": "<image>",
        "image_end_id": "</image>",
        "slice_start_id": "<slice>",
        "slice_end_id": "</slice>",
        "newline_id": "\N{LATIN CAPITAL LETTER C WITH DOT ABOVE}",
    },
)
DEEPSEEK = ZooModel(
    target="<image>",
    processor_name="DeepseekOcr2Processor",
    # As many patches as in the published sizes, which the learned queries fix: 64 by 64, and 48 by 48 of a tile.
    parts={
        "image_processor": (
            "DeepseekOcr2ImageProcessorPil",
            {"size": {"height": 64, "width": 64}, "tile_size": 48},
        )
    },
    options={"patch_size": 1},
    named={"image_token": "<image>"},
)


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
    QWEN.of("qwen3_5", text=_QWEN3_5_TEXT, vision=_QWEN_VISION),
    replace(
        QWEN,
        also={Modality.VIDEO: "<|vision_start|><|video_pad|><|vision_end|>"},
        parts=grids("Qwen2VL", edges(16), "Qwen3VL", {"patch_size": 16, **_SMALL_VIDEOS}),
        needs_torchvision=True,
    ).of(
        "qwen3_5--video",
        text=_QWEN3_5_TEXT,
        vision=_QWEN_VISION,
    ),
    QWEN.of("qwen3_5_moe", text=_QWEN3_5_MOE_TEXT, vision=_QWEN_VISION),
    QWEN.of("qwen3_vl_moe", text=_QWEN3_MOE_TEXT, vision=_DEEPSTACK_VISION),
    QWEN.of(
        "qwen4_exp",
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
    QWEN.of("cosmos3_omni", text=_QWEN3_TEXT, vision=_DEEPSTACK_VISION, seed=1),
    replace(QWEN, processor_name="Lfm3VlProcessor").of(
        "lfm3_vl",
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
    COSMOS_EDGE.of(
        "cosmos3_edge",
        text={"head_dim": 16, **_rope(4, 2, 2)},
        vision={**siglip_sizes(), "num_patches": 64},
        projector_hidden_size=128,
        seed=1,
    ),
    COMPASS.of(
        "cohere_compass",
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
    QWEN2_5_OMNI.of(
        "qwen2_5_omni_thinker",
        text=_rope(2, 3, 3),
        vision=_WINDOW_VISION,
        audio_config=_OMNI_AUDIO,
        seed=1,
    ),
    replace(
        QWEN2_5_OMNI,
        also={Modality.VIDEO: "<|vision_bos|><|VIDEO|><|vision_eos|>", **QWEN2_5_OMNI.also},
        parts=grids("Qwen2VL", edges(14), "Qwen2VL", _FEW_PIXELS) | HEARING,
        fps=2.0,
        needs_torchvision=True,
    ).of(
        "qwen2_5_omni_thinker--video",
        text=_rope(2, 3, 3),
        vision=_WINDOW_VISION,
        audio_config=_OMNI_AUDIO,
        seed=1,
    ),
    QWEN3_OMNI.of(
        "qwen3_omni_moe_thinker",
        text=_QWEN3_MOE_TEXT,
        vision=_DEEPSTACK_VISION,
        audio_config={**_OMNI_AUDIO, "downsample_hidden_size": 16},
    ),
    EXAONE.of(
        "exaone4_5",
        text={"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 4},
        vision={**_WINDOW_VISION, "num_key_value_heads": 1},
    ),
    HYPERCLOVA.of(
        "hyperclovax_vision_v2",
        text={
            "model_type": "hyperclovax",
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.0625,
            "logits_scaling": 0.5,
        },
        vision=_WINDOW_VISION,
        seed=3,
    ),
    VIDEO_LLAMA.of(
        "video_llama_3",
        text={"model_type": "qwen2"},
        vision=siglip_sizes(patch_size=14),
        tied=True,
        seed=1,
    ),
    GLM4V.of("glm4v", text=_GLM_TEXT, vision=_GLM_VISION, seed=1),
    replace(
        GLM4V,
        target="<|begin_of_video|><|video|><|end_of_video|>",
        modality=Modality.VIDEO,
        parts=grids("Glm4v", edges(14, frames=2), "Glm4v", _SMALL_VIDEOS),
        needs_torchvision=True,
    ).of(
        "glm4v--video",  # apart from images, beside which transformers refuses videos
        text=_GLM_TEXT,
        vision=_GLM_VISION,
        seed=1,
    ),
    GLM46V.of("glm46v", text={"model_type": "glm4v_text", **_GLM_TEXT}, vision=_GLM_VISION, seed=1),
    GLM4V.of(
        "glm4v_moe",
        text={**_GLM_TEXT, **_ROUTED_EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        vision=_GLM_VISION,
    ),
    GLM46V.of(
        "glm_ocr",
        text={"head_dim": 16, **_rope(2, 3, 3)},
        vision={**_GLM_VISION, "attention_bias": True},
        seed=2,
    ),
    GLM5.of(
        "glm5_next",
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
    ERNIE.of(
        "ernie4_5_vl_moe",
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
    PADDLE.of("paddleocr_vl", text={"head_dim": 16, **_rope(2, 3, 3)}, vision=siglip_sizes(image_size=112), seed=1),
    HUNYUAN.of(
        "hunyuan_vl",
        text={"head_dim": 16, **_rope(2, 2, 2, 2, rope_type="dynamic", alpha=1000.0, factor=1.0)},
        vision=_HUNYUAN_VISION,
        tied=True,
    ),
    HUNYUAN_V4.of(
        "hy_v4_vl",
        text={**_ROUTED_EXPERTS, **_LATENT_ATTENTION, **_INDEXER, "qk_rope_head_dim": 16, **_rope(4, 2, 2)},
        vision=_HUNYUAN_VISION,
    ),
    DOTS.of(
        "dots3_note",
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
    MINICPM.of("minicpmv4_6", text=_MINICPM_TEXT, vision=_MINICPM_VISION, insert_layer_id=1, tied=True),
    MINICPM4_7.of("minicpmv4_7", text=_MINICPM_TEXT, vision=_MINICPM_VISION, insert_layer_id=1, tied=True),
    DEEPSEEK.of(
        "deepseek_ocr2",
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
