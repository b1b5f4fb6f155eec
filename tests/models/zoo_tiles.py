"""Tiny models of types whose images become tiles."""

from dataclasses import replace
from typing import Any

from tests.integration.families.harness import transformers
from tests.models.zoo import SLIDING, TILE, VOCABULARY, ZooModel, decoder, places, vision
from triptych.domain.media import Modality

PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]

LLAVA_NEXT = (
    "LlavaNextImageProcessorPil",
    {"size": {"shortest_edge": 32}, "crop_size": TILE, "image_grid_pinpoints": PINPOINTS},
)


def without_image_outputs(whole: Any) -> None:
    """Llama 4's forward reads an attribute that its output lacks in transformers 5.24."""
    transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None


LLAMA4 = ZooModel(
    name="llama4",
    seed=1,
    target="<|image|>",
    processor_name="Llama4Processor",
    parts={"image_processor": ("Llama4ImageProcessor", {"size": TILE, "max_patches": 4})},
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

COHERE2 = decoder("cohere2", **SLIDING, logit_scale=0.25, tie_word_embeddings=True)

COHERE2_VISION = ZooModel(
    name="cohere2_vision",
    target="<|IMG_PATCH|>",
    processor_name="Cohere2VisionProcessor",
    parts={
        "image_processor": (
            "Cohere2VisionImageProcessor",
            {"size": TILE, "max_patches": 4, "patch_size": 4},
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
            {"size": TILE, "patch_size": 4, "overlap_margins": [1, 1], "max_crops": 4},
        ),
        "video_processor": ("Molmo2VideoProcessor", {"size": TILE, "patch_size": 4}),
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
            vision_feature_layer=[-1, -2], num_key_value_heads=2, head_dim=16, text_hidden_size=64
        ),
        "image_patch_id": "<im_patch>",
        "image_start_token_id": "<im_start>",
        "image_end_token_id": "<im_end>",
        "low_res_image_start_token_id": "<low_res_im_start>",
        "frame_start_token_id": "<frame_start>",
        "frame_end_token_id": "<frame_end>",
    },
    needs_torchvision=True,
    chunk_tokens=128,
)

PHI4_MULTIMODAL = ZooModel(
    name="phi4_multimodal",
    seed=4,
    target="<|image|>",
    also={Modality.AUDIO: "<|audio|>"},
    clip_s=1.5,
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
        original_max_position_embeddings=256,
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
            num_hidden_layers=3,
            image_size=64,
            crop_size=64,
            patch_size=2,
            image_token_id="<|image|>",  # noqa: S106
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
    unspoken=("<|image|>", "<|audio|>"),
)

PHI4_MULTIMODAL_AUDIO = replace(
    PHI4_MULTIMODAL,
    name="phi4_multimodal--audio",
    target="<|audio|>",
    modality=Modality.AUDIO,
    also={},
    clip_s=None,
    most_items=1,
)

AYA_VISION = ZooModel(
    name="aya_vision",
    target="<image>",
    processor_name="AyaVisionProcessor",
    parts={"image_processor": ("GotOcr2ImageProcessorPil", {"size": TILE, "max_patches": 4})},
    options={"patch_size": 4, "downsample_factor": 2, "img_size": 32},
    special=("<image>", *COHERE_TOKENS.values(), "TILE", "TILE_GLOBAL"),
    config={
        "text_config": COHERE2,
        "vision_config": vision("siglip_vision_model", image_size=32, patch_size=4, vision_use_head=False),
        "image_token_index": "<|IMG_PATCH|>",
        "alignment_intermediate_size": 96,
        "tie_word_embeddings": True,
    },
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
    named={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
    config={
        "text_config": decoder("qwen3", head_dim=16),
        "vision_config": vision(image_size=[32, 32], patch_size=[8, 8]),
        "image_token_id": "<IMG_CONTEXT>",
        "image_seq_length": 4,
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
    special=("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *places("<|img_row_{}_col_{}|>")),
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
            {"size": {"height": 64, "width": 64}, "patch_size": 48, "vision_patch_size": 4, "max_image_size": 192},
        )
    },
    special=("<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
    config={
        "text_config": decoder(
            **SLIDING,
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
    special=("<image>", "<fake_token_around_image>", "<global-img>", *places("<row_{}_col_{}>")),
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

ZOO = (
    LLAMA4,
    COHERE2_VISION,
    MOLMO2,
    PHI4_MULTIMODAL,
    PHI4_MULTIMODAL_AUDIO,
    AYA_VISION,
    OVIS2,
    GRANITE4_VISION,
    QIANFAN_OCR,
    LLAVA_NEXT_VIDEO,
    LFM2_VL,
    PERCEPTION_LM,
    UNLIMITED_OCR,
    STEP3P7,
    IDEFICS2,
    GRANITE_DOCLING,
)
