"""A Qwen2.5-VL with random weights, in the files of a published model, which transformers, vLLM and Triptych load."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as untyped_transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

transformers: Any = untyped_transformers
HEAD = 64
PATCH_PX, MERGE = 14, 2
CONTEXT_TOKENS = 4096
_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers and widths of the vision encoder and of the language model; widths are multiples of 64."""

    vision_layers: int = 12
    vision_width: int = 768
    text_layers: int = 8
    text_width: int = 768
    vocabulary: int = 32_000
    queries_per_key: int = 3
    """Query heads of the language model that share a key head, at most."""


FIFTY_MILLION = Shape(vision_layers=4, vision_width=256, text_layers=8, text_width=512, vocabulary=16_000)
"""Parameters, of which the language model has 47 million."""


def image_tokens(side_px: int) -> int:
    """Tokens of a square image whose side is a multiple of 28 pixels."""
    return (side_px // (PATCH_PX * MERGE)) ** 2


def make(directory: Path, shape: Shape) -> None:
    """Write the model, in float32, with its tokenizer and processors."""
    torch.manual_seed(0)
    tokenizer = _tokenizer(shape.vocabulary)
    ids = dict(zip(_SPECIAL, tokenizer.convert_tokens_to_ids(list(_SPECIAL)), strict=True))
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.text_width,
            "intermediate_size": 4 * shape.text_width,
            "num_hidden_layers": shape.text_layers,
            "num_attention_heads": shape.text_width // HEAD,
            "num_key_value_heads": max(1, shape.text_width // HEAD // shape.queries_per_key),
            "max_position_embeddings": CONTEXT_TOKENS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": shape.vision_layers,
            "hidden_size": shape.vision_width,
            "intermediate_size": 4 * shape.vision_width,
            "num_heads": shape.vision_width // HEAD,
            "patch_size": PATCH_PX,
            "spatial_merge_size": MERGE,
            "out_hidden_size": shape.text_width,
            "window_size": 112,
            "fullatt_block_indexes": list(range(shape.vision_layers - 1, 0, -4)),
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).float()
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"], do_sample=False
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _write_processors(directory)


def byte_tokenizer(vocabulary: int, special: Sequence[str]) -> Tokenizer:
    """Bytes, and as many further tokens as the vocabulary has: every id is text. The first ids are the special tokens'."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*special, *alphabet]
    tokens += [f"w{number}" for number in range(vocabulary - len(tokens))]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend


def _tokenizer(vocabulary: int) -> Any:
    return transformers.Qwen2Tokenizer(
        tokenizer_object=byte_tokenizer(vocabulary, _SPECIAL),
        eos_token=_SPECIAL[2],
        pad_token=_SPECIAL[0],
        extra_special_tokens=list(_SPECIAL),
        chat_template=_TEMPLATE,
    )


def _write_processors(directory: Path) -> None:
    processor = "Qwen2_5_VLProcessor"
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor,
        "patch_size": PATCH_PX,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    videos = {**images, "video_processor_type": "Qwen2VLVideoProcessor"}
    del videos["image_processor_type"]
    files = {
        "preprocessor_config": images,
        "video_preprocessor_config": videos,
        "processor_config": {"processor_class": processor},
    }
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
