"""Tiny models of types whose images become tiles, crops or rows of patches, and of types that hear."""

from dataclasses import replace
from typing import Any

from tests.integration.families.harness import siglip_sizes, transformers
from tests.integration.families.tiny_granite_speech import provide_torchaudio
from tests.models.zoo import VOCABULARY, ZooModel, decoder
from triptych.domain.media import Modality


provide_torchaudio()


def vision(model_type: str | None = None, **changes: Any) -> dict[str, Any]:
    """The configuration of a small encoder."""
    named = {} if model_type is None else {"model_type": model_type}
    return named | siglip_sizes(**changes)


def sliding(window: int, *others: str, **changes: Any) -> dict[str, Any]:
    """Three layers with a sliding window, then a full one, as in most published models with windows."""
    types = ["sliding_attention"] * 3 + ["full_attention"]
    return {"sliding_window": window, "layer_types": types, "num_hidden_layers": 4, **changes}


# --- Pixtral's encoder: rows of patches -------------------------------------------------------------------------------

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
LIGHTON_OCR = ZooModel(
    name="lighton_ocr",
    seed=1,
    target="<|image_pad|>",
    processor_name="LightOnOcrProcessor",
    parts={"image_processor": PIXTRAL},
    options={"patch_size": 4, "spatial_merge_size": 2},
    named={
        "image_token": "<|image_pad|>",
        "image_break_token": "<|vision_pad|>",
        "image_end_token": "<|vision_end|>",
    },
    config={
        "text_config": decoder("qwen3", head_dim=16, sliding_window=None, tie_word_embeddings=True),
        "vision_config": PIXTRAL_VISION | {"hidden_act": "silu"},
        "image_token_id": "<|image_pad|>",
        "tie_word_embeddings": True,
    },
)

# --- Gemma 4 ----------------------------------------------------------------------------------------------------------

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
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    sizes = {
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
        chunk_tokens=71,
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
        "subsampling_conv_channels": [8, 4],
        "output_proj_dims": 48,
    },
)
GEMMA4_MOE = gemma4(
    "gemma4--moe",
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

TILE = {"height": 32, "width": 32}
PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]
LLAVA_NEXT = (
    "LlavaNextImageProcessorPil",
    {"size": {"shortest_edge": 32}, "crop_size": TILE, "image_grid_pinpoints": PINPOINTS},
)
CLIP = ("CLIPImageProcessorPil", {"size": {"shortest_edge": 32}, "crop_size": TILE})

# --- tiles ------------------------------------------------------------------------------------------------------------


def without_image_outputs(whole: Any) -> None:
    """Llama 4's forward reads an attribute that its output lacks in transformers 5.24."""
    transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None


LLAMA4 = ZooModel(
    name="llama4",
    seed=1,
    target="<|image|>",
    processor_name="Llama4Processor",
    parts={"image_processor": ("Llama4ImageProcessor", {"size": {"height": 32, "width": 32}, "max_patches": 4})},
    options={"patch_size": 8},
    special=(
        "<|image|>",
        "<|image_start|>",
        "<|image_end|>",
        "<|patch|>",
        "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    ),
    config={
        "text_config": decoder(
            num_hidden_layers=4,
            head_dim=16,
            intermediate_size=32,
            intermediate_size_mlp=96,
            num_local_experts=4,
            num_experts_per_tok=1,
            attention_chunk_size=32,
        ),
        "vision_config": vision(
            image_size=32,
            patch_size=8,
            intermediate_size=128,
            vision_output_dim=64,
            projector_input_dim=64,
            projector_output_dim=64,
        ),
        "boi_token_index": "<|image_start|>",
        "eoi_token_index": "<|image_end|>",
        "image_token_index": "<|patch|>",
    },
    adapt=without_image_outputs,
    needs_torchvision=True,
)
COHERE_TOKENS = {
    "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>",
    "image_token": "<|IMG_PATCH|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}
COHERE2 = decoder("cohere2", **sliding(16), logit_scale=0.25, tie_word_embeddings=True)
COHERE2_VISION = ZooModel(
    name="cohere2_vision",
    target="<|IMG_PATCH|>",
    processor_name="Cohere2VisionProcessor",
    parts={
        "image_processor": (
            "Cohere2VisionImageProcessor",
            {"size": {"height": 32, "width": 32}, "max_patches": 4, "patch_size": 4},
        )
    },
    named=COHERE_TOKENS,
    config={
        "text_config": COHERE2,
        "vision_config": vision("siglip_vision_model", image_size=32, patch_size=4, vision_use_head=False),
        "image_token_id": "<|IMG_PATCH|>",
        "alignment_intermediate_size": 96,
        "tie_word_embeddings": True,
    },
    needs_torchvision=True,
)
MOLMO2 = ZooModel(
    name="molmo2",
    target="<|image|>",
    processor_name="Molmo2Processor",
    parts={
        "image_processor": (
            "Molmo2ImageProcessor",
            {"size": {"height": 32, "width": 32}, "patch_size": 4, "overlap_margins": [1, 1], "max_crops": 4},
        ),
        "video_processor": ("Molmo2VideoProcessor", {"size": {"height": 32, "width": 32}, "patch_size": 4}),
    },
    options={"use_single_crop_col_tokens": False},
    special=(
        *("<|image|>", "<|video|>", "<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>"),
        *("<im_end>", "<frame_start>", "<frame_end>", "<im_low>"),
    ),
    config={
        "text_config": decoder(head_dim=16, additional_vocab_size=8),
        "vision_config": vision(
            num_hidden_layers=3, num_key_value_heads=2, head_dim=16, image_size=[32, 32], patch_size=4
        ),
        "adapter_config": vision(
            vision_feature_layer=[-1, -2],
            num_key_value_heads=2,
            head_dim=16,
            text_hidden_size=64,
        ),
        "image_patch_id": "<im_patch>",
        "image_start_token_id": "<im_start>",
        "image_end_token_id": "<im_end>",
        "low_res_image_start_token_id": "<low_res_im_start>",
        "frame_start_token_id": "<frame_start>",
        "frame_end_token_id": "<frame_end>",
    },
    needs_torchvision=True,
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
PHI4_MULTIMODAL = ZooModel(
    name="phi4_multimodal",
    seed=4,
    target="<|image|>",
    processor_name="Phi4MultimodalProcessor",
    parts={
        # The image processor counts on 16 x 16 tokens, hence patches of two pixels.
        "image_processor": (
            "Phi4MultimodalImageProcessor",
            {"size": {"height": 64, "width": 64}, "patch_size": 2, "dynamic_hd": 2},
        ),
        "audio_processor": ("Phi4MultimodalFeatureExtractor", {}),
    },
    named={"image_token": "<|image|>", "audio_token": "<|audio|>"},
    config=decoder(
        max_position_embeddings=16_384,
        original_max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0] * 6,
            "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
        },
    )
    | {
        "vision_config": vision(
            num_hidden_layers=3, image_size=64, crop_size=64, patch_size=2, image_token_id="<|image|>"
        ),
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 2,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 8,
            "bias_max_distance": 100,
            "audio_token_id": "<|audio|>",
        },
    },
    needs_torchvision=True,
    context=4096,
    gains={"qkv_proj": 2.0},
)

AYA_VISION = ZooModel(
    name="aya_vision",
    target="<image>",
    processor_name="AyaVisionProcessor",
    parts={"image_processor": ("GotOcr2ImageProcessorPil", {"size": TILE, "max_patches": 4})},
    options={"patch_size": 4, "downsample_factor": 2, "img_size": 32},
    special=("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>")
    + ("TILE", "TILE_GLOBAL"),
    config={
        "text_config": COHERE2,
        "vision_config": vision("siglip_vision_model", image_size=32, patch_size=4, vision_use_head=False),
        "image_token_index": "<|IMG_PATCH|>",
        "alignment_intermediate_size": 96,
        "tie_word_embeddings": True,
    },
)
GOT_OCR2 = ZooModel(
    name="got_ocr2",
    target="<img><imgpad></img>",
    processor_name="GotOcr2Processor",
    # Its processor counts on 16 x 16 tokens, each of 4 x 4 patches.
    parts={"image_processor": ("GotOcr2ImageProcessorPil", {"size": {"height": 128, "width": 128}})},
    special=("<img>", "<imgpad>", "</img>"),
    config={
        "text_config": decoder("qwen2", num_key_value_heads=4, tie_word_embeddings=True),
        "vision_config": vision(
            image_size=128,
            patch_size=2,
            output_channels=16,
            mlp_dim=48,
            window_size=14,
            global_attn_indexes=[1],
        ),
        "image_token_index": "<imgpad>",
        "image_seq_length": 256,
        "tie_word_embeddings": True,
    },
    needs_images=True,
)
OVIS2_TOKENS = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
OVIS2 = ZooModel(
    name="ovis2",
    seed=1,
    target="<image>",
    processor_name="Ovis2Processor",
    parts={"image_processor": ("Ovis2ImageProcessorPil", {"size": TILE, "max_patches": 4, "crop_to_patches": True})},
    options={"image_seq_length": 16},
    special=("<image>", "<IMG_ATOM>", *OVIS2_TOKENS),
    config={
        "text_config": decoder("qwen2", tie_word_embeddings=True),
        "vision_config": vision(image_size=32, patch_size=4, vocab_size=40, hidden_stride=2),
        "image_token_id": "<IMG_ATOM>",
        "visual_indicator_token_ids": OVIS2_TOKENS,
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "tie_word_embeddings": True,
    },
    gains={"head_linear": 4.0, "visual_embeddings_table": 4.0},
)
ARIA = ZooModel(
    name="aria",
    seed=1,
    target="<fim_prefix><|img|><fim_suffix>",
    processor_name="AriaProcessor",
    # Its processor makes images of 980 pixels, hence patches of 98.
    parts={"image_processor": ("AriaImageProcessorPil", {})},
    options={"size_conversion": {490: 4, 980: 8}},
    special=("<fim_prefix>", "<fim_suffix>"),
    named={"image_token": "<|img|>"},
    config={
        "text_config": decoder("aria_text", moe_num_experts=8, moe_topk=2, moe_num_shared_experts=2),
        "vision_config": vision("idefics3_vision", image_size=980, patch_size=98, hidden_size=16),
        "projector_patch_to_query_dict": {25: 4, 100: 8},
        "image_token_index": "<|img|>",
    },
)
GRANITE4_VISION = ZooModel(
    name="granite4_vision",
    target="<image>",
    processor_name="Granite4VisionProcessor",
    parts={"image_processor": LLAVA_NEXT},
    options={"patch_size": 4, "vision_feature_select_strategy": "full", "downsample_rate": "4/8"},
    special=("<image>",),
    config={
        "text_config": decoder(
            num_hidden_layers=6,
            embedding_multiplier=2.0,
            logits_scaling=2.0,
            residual_multiplier=0.6,
            attention_multiplier=0.25,
        ),
        "vision_config": vision(
            "siglip_vision_model", hidden_size=64, image_size=32, patch_size=4, vision_use_head=False
        ),
        "qformer_config": {
            "model_type": "blip_2_qformer",
            "num_hidden_layers": 1,
            "intermediate_size": 96,
            "cross_attention_frequency": 1,
            "max_position_embeddings": 64,
            "vocab_size": 8,
        },
        "image_token_index": "<image>",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "downsample_rate": "4/8",
        "deepstack_layer_map": [[-2, 1], [-1, 0]],
        "spatial_vision_layer": -1,
        "spatial_target_layers": [2, 3, 4, 5],
        "image_grid_pinpoints": PINPOINTS,
        "image_seq_length": 16,
    },
)
QIANFAN_OCR = ZooModel(
    name="qianfan_ocr",
    target="<image>",
    processor_name="QianfanOCRProcessor",
    parts={"image_processor": ("GotOcr2ImageProcessorPil", {"size": TILE, "max_patches": 4})},
    options={"image_seq_length": 4},
    special=("<image>",),
    named={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
    },
    config={
        "text_config": decoder("qwen3", head_dim=16),
        "vision_config": vision(image_size=[32, 32], patch_size=[8, 8]),
        "image_token_id": "<IMG_CONTEXT>",
        "image_seq_length": 4,
        "tie_word_embeddings": False,
    },
)
FAST_VLM = ZooModel(
    name="fast_vlm",
    seed=1,
    target="<image>",
    processor_name="LlavaProcessor",
    parts={"image_processor": CLIP},
    options={"patch_size": 8, "vision_feature_select_strategy": "full"},
    special=("<image>",),
    config={
        "text_config": decoder("qwen2"),
        # The published one is of timm; this one makes maps of features as well.
        "vision_config": {
            "model_type": "resnet",
            "embedding_size": 16,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "layer_type": "basic",
            "hidden_size": 32,
        },
        "image_token_index": "<image>",
        "image_seq_length": 16,
        "tie_word_embeddings": False,
    },
)
VIPLLAVA = ZooModel(
    name="vipllava",
    target="<image>\n",
    processor_name="LlavaProcessor",
    parts={"image_processor": CLIP},
    options={"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    special=("<image>",),
    config={
        "text_config": decoder("llama"),
        "vision_config": vision("clip_vision_model", num_hidden_layers=4, image_size=32, patch_size=8),
        "vision_feature_layer": [-1, -2, -3, 1],
        "image_token_index": "<image>",
        "image_seq_length": 16,
        "tie_word_embeddings": False,
    },
)
LLAVA_NEXT_VIDEO = ZooModel(
    name="llava_next_video",
    seed=1,
    target="<image>\n",
    processor_name="LlavaNextVideoProcessor",
    parts={"image_processor": LLAVA_NEXT},
    options={"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    special=("<image>", "<video>"),
    config={
        "text_config": decoder("llama"),
        "vision_config": vision("clip_vision_model", image_size=32, patch_size=8),
        "image_token_index": "<image>",
        "video_token_index": "<video>",
        "image_grid_pinpoints": PINPOINTS,
        "image_seq_length": 16,
        "tie_word_embeddings": False,
    },
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
        "text_config": decoder(
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
        ),
        "vision_config": vision(image_size=64, patch_size=4),
        "image_token_index": "]<]image[>[",
        "video_token_index": "]<]video[>[",
        "projector_hidden_size": 64,
    },
    needs_torchvision=True,
)
LFM2_VL = ZooModel(
    name="lfm2_vl",
    seed=1,
    target="<image>",
    processor_name="Lfm2VlProcessor",
    parts={
        "image_processor": (
            "Lfm2VlImageProcessor",
            {
                "encoder_patch_size": 4,
                "tile_size": 32,
                "max_tiles": 4,
                "min_image_tokens": 4,
                "max_image_tokens": 16,
                "size": TILE,
            },
        )
    },
    special=("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
    + tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
    config={
        "text_config": decoder(
            "lfm2",
            num_hidden_layers=4,
            layer_types=["conv", "conv", "full_attention", "conv"],
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=True,
        ),
        "vision_config": vision("siglip2_vision_model", num_patches=64, patch_size=4, vision_use_head=False),
        "image_token_id": "<image>",
        "projector_hidden_size": 64,
        "tie_word_embeddings": True,
    },
    needs_torchvision=True,
)
PERCEPTION_LM = ZooModel(
    name="perception_lm",
    target="<|image|>",
    processor_name="PerceptionLMProcessor",
    parts={
        "image_processor": ("PerceptionLMImageProcessor", {"tile_size": 32, "max_num_tiles": 4, "size": TILE}),
        "video_processor": ("PerceptionLMVideoProcessor", {"size": TILE}),
    },
    options={"patch_size": 4, "pooling_ratio": 2},
    named={"image_token": "<|image|>", "video_token": "<|video|>"},
    config={
        "text_config": decoder("llama"),
        # The published one is of timm; this one has a token for the class as well.
        "vision_config": vision("clip_vision_model", image_size=32, patch_size=4) | {"model_args": {"embed_dim": 32}},
        "vision_use_cls_token": True,
        "projector_pooling_ratio": 2,
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "tie_word_embeddings": False,
    },
    needs_torchvision=True,
    most_items=1,
)
UNLIMITED_OCR = ZooModel(
    name="unlimited_ocr",
    seed=1,
    target="<image>",
    processor_name="UnlimitedOcrProcessor",
    parts={
        "image_processor": (
            "UnlimitedOcrImageProcessor",
            {"size": {"height": 64, "width": 64}, "tile_size": 32, "max_patches": 4},
        )
    },
    options={"patch_size": 4},
    special=("<image>",),
    config={
        "text_config": decoder(
            num_key_value_heads=4,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            mlp_layer_types=["dense", "sparse", "sparse"],
            sliding_window=16,
        ),
        "vision_config": {
            "sam_config": vision(
                image_size=64,
                patch_size=4,
                output_channels=16,
                mlp_dim=48,
                window_size=6,
                global_attn_indexes=[1],
                downsample_channels=[24, 32],
            ),
            "encoder_config": vision(image_size=16, patch_size=4),
        },
        "image_token_id": "<image>",
    },
    needs_torchvision=True,
)
STEP3P7 = ZooModel(
    name="step3p7",
    target="<im_patch>",
    processor_name="Step3p7Processor",
    parts={
        "image_processor": (
            "Step3p7ImageProcessor",
            {
                "size": {"height": 64, "width": 64},
                "patch_size": 48,
                "vision_patch_size": 4,
                "max_image_size": 192,
            },
        )
    },
    special=("<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
    config={
        "text_config": decoder(
            **sliding(16),
            head_dim=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            share_expert_dim=32,
            num_sliding_attention_heads=6,
            moe_router_scaling_factor=3.0,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        ),
        "vision_config": vision(image_size=64, patch_size=4, mlp_ratio=2.0, max_position_embeddings=256),
        "image_token_id": "<im_patch>",
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
)
MUSE_GLIMMER = ZooModel(
    name="muse_glimmer",
    target="<|patch|>",
    processor_name="MuseGlimmerProcessor",
    parts={
        "image_processor": ("MuseGlimmerImageProcessor", {"patch_size": 4, "max_image_tokens": 64}),
        "video_processor": ("MuseGlimmerVideoProcessor", {"patch_size": 4}),
    },
    special=("<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>", "<|vid_frame_separator|>")
    + ("<|vid_start|>", "<|vid_end|>"),
    config={
        "text_config": decoder(**sliding(16), head_dim=16),
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
INKLING = ZooModel(
    name="inkling_mm_model",
    seed=3,
    target="<|content_image|><|unused_200054|>",
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

# --- one run of tokens for each image ---------------------------------------------------------------------------------

PLACEHOLDER = {"image_token": "<image_placeholder>"}
DEEPSEEK_VL = ZooModel(
    name="deepseek_vl",
    seed=1,
    target="<image_placeholder>",
    processor_name="DeepseekVLProcessor",
    parts={"image_processor": ("DeepseekVLImageProcessorPil", {"size": TILE, "min_size": 2})},
    options={"num_image_tokens": 16},
    named=PLACEHOLDER,
    config={
        "text_config": decoder("llama"),
        "vision_config": vision("siglip_vision_model", image_size=32, patch_size=8),
        "image_token_id": "<image_placeholder>",
        "tie_word_embeddings": False,
    },
)
DEEPSEEK_VL_HYBRID = replace(
    DEEPSEEK_VL,
    name="deepseek_vl_hybrid",
    processor_name="DeepseekVLHybridProcessor",
    parts={
        "image_processor": (
            "DeepseekVLHybridImageProcessorPil",
            {"size": TILE, "min_size": 2, "high_res_size": {"height": 64, "width": 64}},
        )
    },
    config={
        **DEEPSEEK_VL.config,
        "high_res_vision_config": vision(
            "sam_vision_model",
            image_size=64,
            patch_size=8,
            output_channels=16,
            mlp_dim=48,
            window_size=3,
            global_attn_indexes=[1],
        ),
    },
)
JANUS = ZooModel(
    name="janus",
    target="<image_placeholder>\n",
    processor_name="JanusProcessor",
    parts={"image_processor": ("JanusImageProcessorPil", {"size": TILE, "min_size": 2})},
    options={"num_image_tokens": 16},
    named=PLACEHOLDER | {"boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
    config={
        "text_config": decoder("llama"),
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "mlp_ratio": 2.0,
            "image_size": 32,
            "patch_size": 8,
            "projection_dim": 64,
            "num_image_tokens": 16,
        },
        "vq_config": {
            "base_channels": 32,
            "latent_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "num_embeddings": 16,
            "projection_dim": 64,
            "image_token_embed_dim": 64,
        },
        "image_token_id": "<image_placeholder>",
        "tie_word_embeddings": False,
    },
)
CHAMELEON_TOKENS = ("<image>", "<racm3:break>", "<eoss>", "<reserved08706>") + tuple(
    f"IMGIMG{''.join(chr(ord('A') + int(digit)) for digit in str(index))}Z" for index in range(32)
)
CHAMELEON = ZooModel(
    name="chameleon",
    target="<image>",
    processor_name="ChameleonProcessor",
    parts={
        "image_processor": (
            "ChameleonImageProcessorPil",
            {"size": {"shortest_edge": 32}, "crop_size": TILE},
        )
    },
    options={"image_seq_length": 64},
    special=CHAMELEON_TOKENS,
    names={"sep_token": "<reserved08706>"},
    config=decoder(num_key_value_heads=4)
    | {
        "vq_config": {
            "embed_dim": 16,
            "num_embeddings": 32,
            "latent_channels": 16,
            "resolution": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 2],
            "num_res_blocks": 1,
        },
        "vocabulary_map": {token: token for token in CHAMELEON_TOKENS},
    },
)
IDEFICS2 = ZooModel(
    name="idefics2",
    target="<image>",
    processor_name="Idefics2Processor",
    parts={
        "image_processor": (
            "Idefics2ImageProcessorPil",
            {"size": {"shortest_edge": 16, "longest_edge": 32}, "do_image_splitting": True},
        )
    },
    options={"image_seq_len": 8},
    special=("<fake_token_around_image>", "<image>", "<end_of_utterance>"),
    config={
        "text_config": decoder("mistral", sliding_window=None),
        "vision_config": vision(image_size=32, patch_size=4),
        "perceiver_config": {
            "hidden_size": 64,
            "resampler_n_latents": 8,
            "resampler_depth": 2,
            "resampler_n_heads": 4,
            "resampler_head_dim": 16,
            "num_key_value_heads": 2,
        },
        "image_token_id": "<image>",
    },
)
GRANITE_DOCLING = ZooModel(
    name="granite_docling",
    target="<image>",
    processor_name="GraniteDoclingProcessor",
    parts={"image_processor": ("GraniteDoclingImageProcessorPil", {"size": TILE, "max_patches": 4})},
    options={"image_seq_len": 4},
    special=("<image>", "<fake_token_around_image>", "<global-img>")
    + tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    config={
        "text_config": decoder(
            num_hidden_layers=4,
            tie_word_embeddings=True,
            embedding_multiplier=2.0,
            logits_scaling=2.0,
            residual_multiplier=0.6,
            attention_multiplier=0.25,
        ),
        "vision_config": vision(
            num_hidden_layers=4,
            image_size=32,
            patch_size=4,
            out_hidden_size=64,
            scale_factor=4,
            deepstack_visual_indexes=[0, 1, 2],
        ),
        "image_token_id": "<image>",
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    },
)

# --- clips ------------------------------------------------------------------------------------------------------------

MEL = {"feature_size": 16}
QWEN3_ASR = ZooModel(
    name="qwen3_asr",
    seed=1,
    modality=Modality.AUDIO,
    target="<|audio_start|><|audio_pad|><|audio_end|>",
    processor_name="Qwen3ASRProcessor",
    parts={"feature_extractor": ("Qwen3ASRFeatureExtractor", MEL)},
    named={
        "audio_token": "<|audio_pad|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    },
    config={
        "audio_config": {
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "d_model": 32,
            "n_window_infer": 100,
            "output_dim": 64,
            "downsample_hidden_size": 8,
        },
        "text_config": decoder("qwen3", head_dim=16, tie_word_embeddings=True),
        "audio_token_id": "<|audio_pad|>",
        "timestamp_token_id": 5,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    },
    most_items=1,
)
GLMASR = ZooModel(
    name="glmasr",
    seed=4,
    modality=Modality.AUDIO,
    target="<|begin_of_audio|><|pad|><|end_of_audio|>",
    processor_name="GlmAsrProcessor",
    parts={"feature_extractor": ("WhisperFeatureExtractor", MEL | {"chunk_length": 2})},
    special=("<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>"),
    config={
        "audio_config": {
            "num_mel_bins": 16,
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 100,
        },
        "text_config": decoder("llama"),
        "audio_token_id": "<|pad|>",
        "tie_word_embeddings": False,
    },
    most_items=1,
)
MOSS_TRANSCRIBE_DIARIZE = ZooModel(
    name="moss_transcribe_diarize",
    seed=1,
    modality=Modality.AUDIO,
    target="<|audio_start|><|audio_pad|><|audio_end|>",
    processor_name="MossTranscribeDiarizeProcessor",
    parts={"feature_extractor": ("MossTranscribeDiarizeFeatureExtractor", MEL | {"chunk_length": 2})},
    special=("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
    config={
        "audio_config": {
            "num_mel_bins": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "hidden_size": 32,
            "max_source_positions": 100,
        },
        "text_config": decoder("qwen3", head_dim=16, tie_word_embeddings=True),
        "audio_token_id": "<|audio_pad|>",
        "audio_chunk_size": 32_000,
        "tie_word_embeddings": True,
    },
)
GRANITE_SPEECH_PLUS = ZooModel(
    name="granite_speech_plus",
    seed=3,
    modality=Modality.AUDIO,
    target="<|audio|>",
    processor_name="GraniteSpeechProcessor",
    parts={"audio_processor": ("GraniteSpeechFeatureExtractor", {})},
    special=("<|audio|>",),
    config={
        "text_config": decoder("granite", logits_scaling=2.0, tie_word_embeddings=True),
        "encoder_config": {
            "num_layers": 2,
            "hidden_dim": 32,
            "feedforward_mult": 2,
            "num_heads": 2,
            "dim_head": 16,
            "output_dim": 16,
            "context_size": 12,
            "max_pos_emb": 32,
            "cat_hidden_layers": [1],
        },
        "projector_config": vision(
            "blip_2_qformer",
            num_hidden_layers=1,
            encoder_hidden_size=64,
            cross_attention_frequency=1,
            max_position_embeddings=64,
            vocab_size=8,
        ),
        "audio_token_index": "<|audio|>",
        "has_lora_adapter": False,
        "tie_word_embeddings": True,
    },
    most_items=1,  # transformers lets a clip attend to the padding that a longer one asks for
)


def without_noise(whole: Any) -> None:
    """VibeVoice adds noise to what it hears, except where it is asked not to."""
    heard = whole.model.get_audio_features
    whole.model.get_audio_features = lambda *args, **options: heard(*args, **options | {"sample": False})


CODEC = {"num_filters": 2, "depths": [1] * 7, "ffn_expansion": 2}
VIBEVOICE_ASR = ZooModel(
    name="vibevoice_asr",
    seed=1,
    modality=Modality.AUDIO,
    rate_hz=24_000,
    target="<|object_ref_start|><|box_start|><|object_ref_end|>\nThis is a <|AUDIO_DURATION|> seconds audio.",
    processor_name="VibeVoiceAsrProcessor",
    parts={"feature_extractor": ("VibeVoiceAcousticTokenizerFeatureExtractor", {})},
    special=("<|object_ref_start|>", "<|box_start|>", "<|object_ref_end|>"),
    config={
        "acoustic_tokenizer_encoder_config": CODEC | {"hidden_size": 16},
        "semantic_tokenizer_encoder_config": CODEC | {"hidden_size": 32},
        "text_config": decoder("qwen2"),
        "audio_token_id": "<|box_start|>",
        "audio_bos_token_id": "<|object_ref_start|>",
        "audio_eos_token_id": "<|object_ref_end|>",
        "acoustic_tokenizer_chunk_size": 64_000,
    },
    adapt=without_noise,
)

ZOO = (
    MISTRAL3,
    LIGHTON_OCR,
    GEMMA4,
    GEMMA4_MOE,
    LLAMA4,
    COHERE2_VISION,
    MOLMO2,
    KIMI_K25,
    PHI4_MULTIMODAL,
    AYA_VISION,
    GOT_OCR2,
    OVIS2,
    ARIA,
    GRANITE4_VISION,
    QIANFAN_OCR,
    FAST_VLM,
    VIPLLAVA,
    LLAVA_NEXT_VIDEO,
    MINIMAX_M3_VL,
    LFM2_VL,
    PERCEPTION_LM,
    UNLIMITED_OCR,
    STEP3P7,
    MISTRAL_LARGE4,
    GEMMA4_UNIFIED,
    MUSE_GLIMMER,
    INKLING,
    NEMOTRON_H_OMNI,
    DEEPSEEK_VL,
    DEEPSEEK_VL_HYBRID,
    JANUS,
    CHAMELEON,
    IDEFICS2,
    GRANITE_DOCLING,
    QWEN3_ASR,
    GLMASR,
    MOSS_TRANSCRIBE_DIARIZE,
    GRANITE_SPEECH_PLUS,
    VIBEVOICE_ASR,
)
