"""Tiny models of types whose images become one run of tokens, always as long."""

from dataclasses import replace

from tests.models.zoo import TILE, ZooModel, decoder, vision

PLACEHOLDER = {"image_token": "<image_placeholder>"}

CLIP = ("CLIPImageProcessorPil", {"size": {"shortest_edge": 32}, "crop_size": TILE})

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

CHAMELEON_TOKENS = (
    *("<image>", "<racm3:break>", "<eoss>", "<reserved08706>"),
    *(f"IMGIMG{''.join('ABCDEFGHIJ'[int(digit)] for digit in str(index))}Z" for index in range(32)),
)

CHAMELEON = ZooModel(
    name="chameleon",
    target="<image>",
    processor_name="ChameleonProcessor",
    parts={"image_processor": ("ChameleonImageProcessorPil", {"size": {"shortest_edge": 32}, "crop_size": TILE})},
    options={"image_seq_length": 64},
    special=CHAMELEON_TOKENS,
    roles={"sep_token": "<reserved08706>"},
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
            image_size=128, patch_size=2, output_channels=16, mlp_dim=48, window_size=14, global_attn_indexes=[1]
        ),
        "image_token_index": "<imgpad>",
        "image_seq_length": 256,
        "tie_word_embeddings": True,
    },
    needs_images=True,
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

ZOO = (
    DEEPSEEK_VL,
    DEEPSEEK_VL_HYBRID,
    JANUS,
    CHAMELEON,
    GOT_OCR2,
    ARIA,
    FAST_VLM,
    VIPLLAVA,
)
