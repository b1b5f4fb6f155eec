"""Tiny models of types whose images become rows of patches, as many as their sizes ask for."""

from dataclasses import replace
from typing import Any

from tests.models.zoo import SLIDING, VOCABULARY, ZooModel, decoder, vision
from triptych.domain.media import Modality

PIXTRAL = ("PixtralImageProcessorPil", {"size": {"longest_edge": 64}, "patch_size": {"height": 4, "width": 4}})

PIXTRAL_VISION = vision("pixtral", head_dim=16, image_size=64, patch_size=4)

MISTRAL3 = ZooModel(
    name="mistral3",
    target="[IMG]",
    processor_name="PixtralProcessor",
    parts={"image_processor": PIXTRAL},
    options={"patch_size": 4, "spatial_merge_size": 2},
    special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    config={
        "text_config": decoder("mistral", head_dim=16, sliding_window=None),
        "vision_config": PIXTRAL_VISION,
        "image_token_index": "[IMG]",
        "tie_word_embeddings": False,
    },
    needs_torchvision=True,
)

MISTRAL_LARGE4 = ZooModel(
    name="mistral_large4",
    target="[IMG]",
    processor_name="PixtralProcessor",
    parts={"image_processor": PIXTRAL},
    options={"patch_size": 4, "spatial_merge_size": 2},
    special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    config={
        "text_config": decoder(
            num_hidden_layers=4,
            num_key_value_heads=4,
            moe_intermediate_size=32,
            n_routed_experts=8,
            num_experts_per_tok=2,
            kv_lora_rank=32,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            index_topk=16,
            index_head_dim=16,
            index_n_heads=2,
            kv_source_layers=[0, 1, 1, 3],
            indexer_types=["full", "full", "shared", "full"],
        ),
        "vision_config": PIXTRAL_VISION | {"hidden_act": "silu"},
        "image_token_index": "[IMG]",
    },
    needs_torchvision=True,
)

LIGHTON_OCR = ZooModel(
    name="lighton_ocr",
    seed=1,
    target="<|image_pad|>",
    processor_name="LightOnOcrProcessor",
    parts={"image_processor": PIXTRAL},
    options={"patch_size": 4, "spatial_merge_size": 2},
    named={"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"},
    config={
        "text_config": decoder("qwen3", head_dim=16, sliding_window=None, tie_word_embeddings=True),
        "vision_config": PIXTRAL_VISION | {"hidden_act": "silu"},
        "image_token_id": "<|image_pad|>",
        "tie_word_embeddings": True,
    },
)

GEMMA4_TOKENS = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}

GEMMA4_IDS = {
    "boi_token_id": "<|image>",
    "eoi_token_id": "<image|>",
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "boa_token_id": "<|audio>",
    "eoa_token_index": "<audio|>",
    "audio_token_id": "<|audio|>",
}


def gemma4(name: str, text: dict[str, Any], **changes: Any) -> ZooModel:
    """Gemma 4 with ``text`` in its language model's configuration, and ``vision`` and other parts in the rest."""
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    sizes: dict[str, Any] = {
        "num_hidden_layers": 6,
        "layer_types": layers,
        "sliding_window": 16,
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCABULARY,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    encoder = vision(
        num_key_value_heads=2,
        head_dim=16,
        patch_size=4,
        pooling_kernel_size=3,
        position_embedding_size=512,
        **changes.pop("vision", {}),
    )
    return ZooModel(
        name=name,
        target="<|image|>",
        also={Modality.AUDIO: "<|audio|>"} if changes["audio_config"] is not None else {},
        processor_name="Gemma4Processor",
        parts={
            "image_processor": ("Gemma4ImageProcessorPil", {"patch_size": 4, "max_soft_tokens": 70}),
            "feature_extractor": ("Gemma4AudioFeatureExtractor", {}),
        },
        options={"image_seq_length": 70},
        special=("<|video|>",),
        named=GEMMA4_TOKENS,
        config={
            "text_config": decoder(**sizes | text),
            "vision_config": encoder,
            "tie_word_embeddings": True,
            **GEMMA4_IDS,
            **changes,
        },
        gains={"post_": 8.0},  # layer outputs outweigh the token's embedding, which tied weights would repeat forever
        chunk_tokens=71 if "use_bidirectional_attention" in text else 7,
    )


GEMMA4 = gemma4(
    "gemma4",
    {
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    vision={"use_clipped_linears": True},
    audio_config={
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [128, 4],
        "output_proj_dims": 48,
    },
)

GEMMA4_VIDEO = replace(
    GEMMA4,
    name="gemma4--video",
    also={Modality.VIDEO: "<|video|>", Modality.AUDIO: "<|audio|>"},
    parts={
        **GEMMA4.parts,
        "video_processor": ("Gemma4VideoProcessor", {"patch_size": 4, "max_soft_tokens": 70, "num_frames": 3}),
    },
    needs_torchvision=True,
)

GEMMA4_MOE = gemma4(
    "gemma4-moe",
    {
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    vision={"standardize": True},
    audio_config=None,
)

GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="gemma4_unified",
    seed=2,
    processor_name="Gemma4UnifiedProcessor",
    parts={
        "image_processor": ("Gemma4UnifiedImageProcessor", {"patch_size": 4, "max_soft_tokens": 70}),
        "feature_extractor": ("Gemma4UnifiedAudioFeatureExtractor", {}),
        "video_processor": ("Gemma4UnifiedVideoProcessor", {"patch_size": 4}),
    },
    config={
        "text_config": decoder(
            num_hidden_layers=6,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            sliding_window=16,
            head_dim=16,
            global_head_dim=32,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            final_logit_softcapping=30.0,
            use_bidirectional_attention="vision",
            tie_word_embeddings=True,
        ),
        "vision_config": {
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "mm_embed_dim": 64,
            "mm_posemb_size": 80,
            "output_proj_dims": 64,
        },
        "audio_config": {},
        "tie_word_embeddings": True,
        **GEMMA4_IDS,
    },
    needs_torchvision=True,
    chunk_tokens=71,
)

KIMI_K25 = ZooModel(
    name="kimi_k25",
    target="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
    processor_name="Kimi_K25Processor",
    parts={
        "image_processor": ("Kimi_K25ImageProcessor", {"patch_size": 4}),
        "video_processor": ("Kimi_K25VideoProcessor", {"patch_size": 4}),
    },
    special=(
        *("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
        "<|kimi_k25_video_placeholder|>",
    ),
    config={
        "text_config": decoder(
            "deepseek_v3",
            num_key_value_heads=4,
            moe_intermediate_size=32,
            n_shared_experts=1,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=2.8,
            kv_lora_rank=32,
            q_lora_rank=48,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 50_000.0,
                "factor": 64.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        ),
        "vision_config": vision(patch_size=4, pos_emb_height=8, pos_emb_width=8),
        "projection_hidden_size": 32,
        "image_token_id": "<|media_pad|>",
        "video_token_id": "<|kimi_k25_video_placeholder|>",
        "vision_start_token_id": "<|media_begin|>",
        "vision_end_token_id": "<|media_end|>",
        "tie_word_embeddings": False,
    },
    needs_torchvision=True,
)

MINIMAX_M3_TEXT = decoder(
    num_hidden_layers=4,
    head_dim=16,
    num_local_experts=8,
    num_experts_per_tok=2,
    intermediate_size=32,
    dense_intermediate_size=96,
    shared_intermediate_size=32,
    rotary_dim=8,
    index_n_heads=2,
    index_head_dim=16,
    index_block_size=8,
    index_topk_blocks=2,
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    layer_types=["full_attention", *["minimax_m3_sparse"] * 3],
)

MINIMAX_M3_VL = ZooModel(
    name="minimax_m3_vl",
    target="]<]image[>[",
    processor_name="MiniMaxM3VLProcessor",
    parts={
        "image_processor": (
            "MiniMaxM3VLImageProcessor",
            {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 2048}},
        ),
        "video_processor": ("MiniMaxM3VLVideoProcessor", {"patch_size": 4}),
    },
    special=("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
    config={
        "text_config": MINIMAX_M3_TEXT,
        "vision_config": vision(image_size=64, patch_size=4),
        "image_token_index": "]<]image[>[",
        "video_token_index": "]<]video[>[",
        "projector_hidden_size": 64,
    },
    needs_torchvision=True,
)

MINIMAX_M3_VL_DENSE = replace(
    MINIMAX_M3_VL,
    name="minimax_m3_vl-dense",
    seed=3,
    config={**MINIMAX_M3_VL.config, "text_config": MINIMAX_M3_TEXT | {"layer_types": ["full_attention"] * 4}},
)

MUSE_GLIMMER = ZooModel(
    name="muse_glimmer",
    target="<|patch|>",
    processor_name="MuseGlimmerProcessor",
    parts={
        "image_processor": ("MuseGlimmerImageProcessor", {"patch_size": 4, "max_image_tokens": 64}),
        "video_processor": ("MuseGlimmerVideoProcessor", {"patch_size": 4}),
    },
    special=(
        *("<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>"),
        *("<|vid_frame_separator|>", "<|vid_start|>", "<|vid_end|>"),
    ),
    config={
        "text_config": decoder(**SLIDING, head_dim=16),
        "vision_config": vision(
            num_hidden_layers=4, patch_size=4, pos_emb_height=8, pos_emb_width=8, max_position_embeddings=64
        ),
        "out_hidden_size": 128,
        "projector_hidden_size": 96,
        "image_token_id": "<|patch|>",
        "video_token_id": "<|video|>",
    },
    needs_torchvision=True,
)

NEMOTRON_H_OMNI = ZooModel(
    name="nemotron_h_omni",
    target="<image>",
    processor_name="NemotronH_Omni_Reasoning_V3Processor",
    parts={
        "image_processor": (
            "NemotronH_Omni_Reasoning_V3ImageProcessor",
            {"patch_size": 4, "min_num_patches": 16, "max_num_patches": 128, "max_model_len": 2048},
        ),
        "video_processor": ("NemotronH_Omni_Reasoning_V3VideoProcessor", {"patch_size": 4}),
        "feature_extractor": ("ParakeetFeatureExtractor", {"feature_size": 16}),
    },
    special=("<image>", "<video>", "<img>", "</img>", "<so_embedding>", "<so_start>", "<so_end>"),
    config={
        "text_config": decoder(
            "nemotron_h",
            head_dim=16,
            layer_types=["linear_attention", "moe", "full_attention", "moe"],
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=2,
            chunk_size=32,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
        ),
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "mlp_ratio": 2.0,
            "patch_size": 4,
            "image_size": 32,
            "max_img_size": 128,
            "video_temporal_patch_size": 2,
        },
        "audio_config": None,
        "vision_hidden_size": 32,
        "projector_hidden_size": 96,
        "image_token_id": "<image>",
        "video_token_id": "<video>",
        "audio_token_id": "<so_embedding>",
    },
    needs_torchvision=True,
)

INKLING = ZooModel(
    name="inkling_mm_model",
    seed=3,
    target="<|content_image|><|unused_200054|>",
    also={Modality.AUDIO: "<|content_audio_input|><|unused_200053|>"},
    processor_name="InklingProcessor",
    parts={
        "image_processor": ("InklingImageProcessor", {"size": {"height": 16, "width": 16}}),
        "feature_extractor": ("InklingFeatureExtractor", {"feature_size": 16}),
    },
    special=("<|content_image|>", "<|unused_200054|>", "<|content_audio_input|>", "<|unused_200053|>"),
    config={
        "text_config": decoder(
            num_hidden_layers=4,
            head_dim=16,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            swa_head_dim=16,
            sliding_window_size=16,
            d_rel=4,
            rel_extent=32,
            local_layer_ids=[0, 1, 2],
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            moe_intermediate_size=32,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_shared_experts=2,
            route_scale=2.0,
            logits_mup_width_multiplier=2.0,
        ),
        "vision_config": vision(patch_size=16),
        "audio_config": {"n_mel_bins": 16, "mel_vocab_size": 16},
        "image_token_id": "<|unused_200054|>",
        "audio_token_id": "<|unused_200053|>",
        "image_bos_token_id": "<|content_image|>",
        "audio_bos_token_id": "<|content_audio_input|>",
    },
    needs_torchvision=True,
)

ZOO = (
    MISTRAL3,
    MISTRAL_LARGE4,
    LIGHTON_OCR,
    GEMMA4,
    GEMMA4_VIDEO,
    GEMMA4_MOE,
    GEMMA4_UNIFIED,
    KIMI_K25,
    MINIMAX_M3_VL,
    MINIMAX_M3_VL_DENSE,
    MUSE_GLIMMER,
    NEMOTRON_H_OMNI,
    INKLING,
)
