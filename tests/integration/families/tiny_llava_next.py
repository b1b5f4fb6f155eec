"""LLaVA-NeXT: grids of tiles without their padding, a newline embedding after each row."""

from typing import Any

from tests.integration.families.harness import TinyFamily, llama_sizes, siglip_sizes, tokenizer, transformers
from triptych.domain.media import Modality

PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]


class TinyLlavaNext(TinyFamily):
    name = "llava_next"
    targets = ((Modality.IMAGE, "<image>"),)

    def processor(self) -> Any:
        images = transformers.LlavaNextImageProcessorPil(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, image_grid_pinpoints=PINPOINTS
        )
        return transformers.LlavaNextProcessor(
            images,
            tokenizer("<image>"),
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=self.template,
        )

    def model(self) -> Any:
        text = tokenizer("<image>")
        config = transformers.LlavaNextConfig(
            vision_config=transformers.CLIPVisionConfig(
                **siglip_sizes(image_size=32, patch_size=8, initializer_factor=4.0)
            ),
            text_config=transformers.LlamaConfig(**llama_sizes(len(text), **self.text)),
            image_token_index=text.convert_tokens_to_ids("<image>"),
            image_grid_pinpoints=PINPOINTS,
            tie_word_embeddings=False,
            initializer_range=0.25,
        )
        return transformers.LlavaNextForConditionalGeneration(config)


TINIES = (TinyLlavaNext(),)
