"""Gemma 3: bidirectional attention within images, sliding windows in most layers."""

from typing import Any

import torch

from tests.integration.families.harness import TinyFamily, llama_sizes, siglip_sizes, tokenizer, transformers
from triptych.domain.media import Modality

NAMES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}


class TinyGemma3(TinyFamily):
    name = "gemma3"
    targets = ((Modality.IMAGE, NAMES["boi_token"]),)
    chunk_tokens = 9

    def processor(self) -> Any:
        images = transformers.Gemma3ImageProcessorPil(size={"height": 42, "width": 42})
        return transformers.Gemma3Processor(images, self.tokenizer(), image_seq_length=9, chat_template=self.template)

    def model(self) -> Any:
        text = self.tokenizer()
        ids = {name: text.convert_tokens_to_ids(token) for name, token in NAMES.items()}
        sizes = llama_sizes(len(text), num_hidden_layers=4, **{"head_dim": 16, "sliding_window": 16, **self.text})
        config = transformers.Gemma3Config(
            vision_config=transformers.SiglipVisionConfig(
                **siglip_sizes(image_size=42, patch_size=7, vision_use_head=False)
            ),
            text_config=transformers.Gemma3TextConfig(
                **sizes,
                query_pre_attn_scalar=16,
                layer_types=["sliding_attention", "full_attention"] * 2,
            ),
            mm_tokens_per_image=9,
            image_token_index=ids["image_token"],
            boi_token_index=ids["boi_token"],
            eoi_token_index=ids["eoi_token"],
            tie_word_embeddings=True,
            initializer_range=0.25,
        )
        model = transformers.Gemma3ForConditionalGeneration(config)
        for name, weight in model.named_parameters():
            if "post_" in name:  # layer outputs outweigh the token's embedding, which tied weights would repeat forever
                torch.nn.init.constant_(weight, 8.0)
            if "mm_input_projection" in name:  # initialized to zeros
                torch.nn.init.normal_(weight, std=0.5)
        return model

    @staticmethod
    def tokenizer() -> Any:
        return tokenizer(named=NAMES)


TINIES = (TinyGemma3(),)
