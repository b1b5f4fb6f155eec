"""transformers' defaults for these architectures, which published configuration files leave out.

A number that a configuration computes from another one by default is left out here as well.
"""

from collections.abc import Mapping

from triptych.families.model_files import Json

_LLAMA: Json = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_QWEN: Json = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_QWEN2_VL_TEXT: Json = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
}

TEXT_DEFAULTS: Mapping[str, Json] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "granite": _LLAMA,
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "mllama_text_model": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "cross_attention_layers": (3, 8, 13, 18, 23, 28, 33, 38),
    },
    "qwen2": {**_QWEN, "max_window_layers": 28},
    "qwen2_5_vl_text": _QWEN2_VL_TEXT,
    "qwen2_vl_text": _QWEN2_VL_TEXT,
    "qwen3": {**_QWEN, "head_dim": 128, "max_window_layers": 28},
    "qwen3_moe": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    },
    "qwen3_vl_text": {**_QWEN, "head_dim": 128, "max_position_embeddings": 128_000},
}
"""Language models, by ``model_type``."""
VOXTRAL_TEXT_DEFAULTS: Mapping[str, Json] = {
    "llama": {
        **_LLAMA,
        "vocab_size": 131072,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
    }
}

_CLIP: Json = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
}
_IDEFICS: Json = {**_CLIP, "hidden_size": 1152, "num_attention_heads": 16}

VISION_DEFAULTS: Mapping[str, Json] = {
    "clip_vision_model": _CLIP,
    "idefics3_vision": _IDEFICS,
    "internvl_vision": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_channels": 3,
        "image_size": [448, 448],
        "patch_size": [14, 14],
        "attention_bias": False,
        "use_qk_norm": False,
        "norm_type": "layer_norm",
        "use_mask_token": False,
        "use_absolute_position_embeddings": True,
        "use_mean_pooling": True,
    },
    "mllama_vision_model": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_global_layers": 8,
        "num_channels": 3,
        "vision_output_dim": 7680,
        "image_size": 448,
        "patch_size": 14,
        "max_num_tiles": 4,
        "supported_aspect_ratios": None,
    },
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 4,
        "window_size": 112,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": (7, 15, 23, 31),
    },
    "qwen2_vl": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "mlp_ratio": 4,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "qwen3_vl": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
    },
    "siglip_vision_model": {**_CLIP, "patch_size": 16, "vision_use_head": True},
    "smolvlm_vision": _IDEFICS,
}
"""Vision encoders, by ``model_type``; those of Qwen by that of the whole model."""

AUDIO_DEFAULTS: Mapping[str, Json] = {
    "granite_speech_encoder": {
        "input_dim": 160,
        "num_layers": 10,
        "hidden_dim": 1024,
        "feedforward_mult": 4,
        "num_heads": 8,
        "dim_head": 128,
        "output_dim": 42,
        "context_size": 200,
        "max_pos_emb": 512,
        "conv_kernel_size": 15,
        "conv_expansion_factor": 2,
    },
    "qwen2_audio_encoder": {
        "num_mel_bins": 128,
        "encoder_layers": 32,
        "encoder_ffn_dim": 5120,
        "d_model": 1280,
        "max_source_positions": 1500,
    },
    "voxtral_encoder": {
        "num_mel_bins": 128,
        "num_hidden_layers": 32,
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "max_source_positions": 1500,
    },
}
"""Audio encoders, by ``model_type``."""

WHISPER_DEFAULTS: Json = {
    "vocab_size": 51865,
    "num_mel_bins": 80,
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_ffn_dim": 1536,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "decoder_start_token_id": 50257,
}
"""Encoder and decoder of Whisper, whose configuration has no sections."""

QFORMER_DEFAULTS: Json = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "cross_attention_frequency": 2,
    "encoder_hidden_size": 1408,
    "use_qformer_text_input": False,
}
"""The projector of Granite Speech (``blip_2_qformer``)."""

TIED_BY_DEFAULT = frozenset({"gemma3", "granite_speech", "internvl", "whisper"})
"""Model types whose head is the embedding unless the configuration says otherwise."""

CLIP_PROCESSOR_DEFAULTS: Json = {
    "do_resize": True,
    "do_center_crop": True,
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
}
"""Defaults of CLIP's image processor and those derived from it."""

CLASS_TOKENS: Mapping[str, int] = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Rows that a vision encoder outputs in addition to its patches."""
