"""Gemma 3n, whose vision tower is one of timm, and whose projectors embed the tokens around items."""

from dataclasses import replace
from typing import Any

from tests.integration.families.harness import COMMON, tokenizer, transformers
from tests.models.zoo import VOCABULARY, ZooModel, decoder
from tests.models.zoo_patches import GEMMA4_IDS, GEMMA4_TOKENS
from triptych.domain.media import Modality

_NAMES = ("boi_token", "boa_token", "eoi_token", "image_token", "eoa_token", "audio_token")
"""The last tokens: two of the language model, two of the vision projector, two of the audio projector."""


class _Gemma3n(ZooModel):
    def tokenizer(self) -> Any:
        backend = tokenizer(*self.special).backend_tokenizer
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token=COMMON[0],
            eos_token=COMMON[1],
            extra_special_tokens={name: GEMMA4_TOKENS[name] for name in _NAMES},
        )


GEMMA3N = _Gemma3n(
    name="gemma3n",
    target="<|image|>",
    also={Modality.AUDIO: "<|audio|>"},
    clip_s=1.5,
    processor_name="Gemma3nProcessor",
    parts={
        "image_processor": ("SiglipImageProcessorPil", {"size": {"height": 64, "width": 64}}),
        "feature_extractor": ("Gemma3nAudioFeatureExtractor", {}),
    },
    options={"image_seq_length": 4, "audio_seq_length": 40},
    config={
        "text_config": decoder(
            num_hidden_layers=6,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            sliding_window=16,
            head_dim=16,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=3,
            laurel_rank=8,
            activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
            tie_word_embeddings=True,
        ),
        "vision_config": {
            "architecture": "resnet10t",  # the published one has no small variant
            "model_args": {"channels": [8, 8, 16, 32], "stem_width": 8},
            "hidden_size": 32,
            "vocab_size": 2,
            "vocab_offset": "<image|>",
        },
        "audio_config": {
            "hidden_size": 32,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": [8, 4],
            "vocab_size": 2,
            "vocab_offset": "<audio|>",
        },
        "vision_soft_tokens_per_image": 4,
        "audio_soft_tokens_per_image": 40,
        **{name: GEMMA4_IDS[name] for name in ("boi_token_id", "eoi_token_id", "image_token_id")},
        **{name: GEMMA4_IDS[name] for name in ("boa_token_id", "audio_token_id")},
        "eoa_token_id": "<audio|>",
        "tie_word_embeddings": True,
    },
    gains={"post_": 8.0},
    unspoken=[GEMMA4_TOKENS[name] for name in _NAMES[2:]],  # the projectors'
    needs_torchvision=True,
)

GEMMA3N_AUDIO = replace(
    GEMMA3N, name="gemma3n--audio", modality=Modality.AUDIO, target="<|audio|>", also={}, clip_s=None, most_items=1
)
ZOO = (GEMMA3N, GEMMA3N_AUDIO)
