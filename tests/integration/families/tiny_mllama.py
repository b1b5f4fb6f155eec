"""Llama 3.2 Vision: cross-attention to tiles."""

from typing import Any

import torch

from tests.integration.families.harness import TinyFamily, llama_sizes, tokenizer, transformers
from triptych.domain.media import Modality
from triptych.families.mllama import arrangements


class TinyMllama(TinyFamily):
    name = "mllama"
    targets = ((Modality.IMAGE, "<|image|>"),)
    chunk_tokens = 5
    seed = 1
    tiles = 4

    def processor(self) -> Any:
        images = transformers.MllamaImageProcessorPil(
            size={"height": 28, "width": 28}, max_image_tiles=self.tiles, image_mean=[0.5] * 3, image_std=[0.5] * 3
        )
        return transformers.MllamaProcessor(images, self._tokenizer(), chat_template="<begin>" + self.template)

    def model(self) -> Any:
        text = self._tokenizer()
        config = transformers.MllamaConfig(
            vision_config=transformers.MllamaVisionConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_global_layers=1,
                attention_heads=2,
                image_size=28,
                patch_size=14,
                vision_output_dim=64,
                intermediate_layers_indices=[0],
                max_num_tiles=self.tiles,
                supported_aspect_ratios=[list(ratio) for ratio in arrangements(self.tiles)],
                initializer_range=0.3,
            ),
            text_config=transformers.MllamaTextConfig(
                **llama_sizes(len(text) - 1, num_hidden_layers=5, bos_token_id=text.convert_tokens_to_ids("<begin>")),
                cross_attention_layers=[1, 3],
                rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            ),
            image_token_index=text.convert_tokens_to_ids("<|image|>"),
            initializer_range=0.25,
        )
        model = transformers.MllamaForConditionalGeneration(config)
        for name, parameter in model.named_parameters():
            if "gate" in name and parameter.numel() == 1:  # closed in a new model
                torch.nn.init.constant_(parameter, 0.8)
        return model

    @staticmethod
    def _tokenizer() -> Any:
        """The image token has the last id: published models have an embedding for it, but no logit."""
        text = tokenizer(named={"bos_token": "<begin>"})
        text.add_special_tokens({"extra_special_tokens": ["<|image|>"]}, replace_extra_special_tokens=False)
        return text


TINIES = (TinyMllama(),)
