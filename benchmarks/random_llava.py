"""A LLaVA with random weights, in the files of a published model, which transformers, vLLM and Triptych load."""

import re
from pathlib import Path
from typing import Any

import torch
import transformers as untyped_transformers
from safetensors.torch import load_file, save_file

from benchmarks.random_qwen import CONTEXT_TOKENS, HEAD, Shape, byte_tokenizer

transformers: Any = untyped_transformers
SIDE_PX, PATCH_PX = 224, 14
IMAGE_TOKENS = (SIDE_PX // PATCH_PX) ** 2
"""Of every image, whatever its size."""
_PUBLISHED = re.compile(r"^vision_tower\.(?!vision_model\.)")
_SPECIAL = ("<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<image>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<image>"
    "{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}<|assistant|>"
)


def make(directory: Path, shape: Shape) -> None:
    """Write the model, in float32, with its tokenizer and processor: CLIP's vision encoder, and a language model like Llama."""
    torch.manual_seed(0)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(shape.vocabulary, _SPECIAL),
        eos_token=_SPECIAL[1],
        pad_token=_SPECIAL[0],
        extra_special_tokens=list(_SPECIAL),
        chat_template=_TEMPLATE,
    )
    ids = dict(zip(_SPECIAL, range(len(_SPECIAL)), strict=True))
    heads = shape.text_width // HEAD
    text = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.text_width,
        intermediate_size=4 * shape.text_width,
        num_hidden_layers=shape.text_layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // shape.queries_per_key),
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=None,
        eos_token_id=ids["<|end|>"],
        pad_token_id=ids["<pad>"],
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=shape.vision_width,
        intermediate_size=4 * shape.vision_width,
        num_hidden_layers=shape.vision_layers,
        num_attention_heads=shape.vision_width // HEAD,
        image_size=SIDE_PX,
        patch_size=PATCH_PX,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=ids["<image>"],
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
    )
    model = transformers.LlavaForConditionalGeneration(config).float()
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=ids["<|end|>"], pad_token_id=ids["<pad>"], do_sample=False
    )
    model.save_pretrained(directory)
    # The names of published weights, which vLLM expects. Recent releases of transformers save others.
    weights = load_file(directory / "model.safetensors")
    renamed = {_PUBLISHED.sub("vision_tower.vision_model.", name): weight for name, weight in weights.items()}
    save_file(renamed, directory / "model.safetensors", {"format": "pt"})
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"height": SIDE_PX, "width": SIDE_PX}, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
        ),
        tokenizer=tokenizer,
        patch_size=PATCH_PX,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    ).save_pretrained(directory)
