"""LLaVA 1.5: every image has the same number of rows."""

from typing import Any

from tests.integration.families.harness import TinyFamily, llama_sizes, tokenizer, transformers
from triptych.domain.media import Modality


class TinyLlava(TinyFamily):
    name = "llava"
    targets = ((Modality.IMAGE, "<image>"),)

    def processor(self) -> Any:
        images = transformers.CLIPImageProcessorPil(size={"height": 32, "width": 32}, do_center_crop=False)
        return transformers.LlavaProcessor(
            images,
            self._tokenizer(),
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=self.template,
        )

    def model(self) -> Any:
        text = self._tokenizer()
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=32,
                patch_size=8,
                initializer_range=0.5,
                initializer_factor=4.0,
            ),
            text_config=transformers.LlamaConfig(**llama_sizes(len(text), **self.text)),
            image_token_id=text.convert_tokens_to_ids("<image>"),
            vision_feature_layer=-2,
            image_seq_length=16,
            tie_word_embeddings=False,
            initializer_range=0.25,
        )
        return transformers.LlavaForConditionalGeneration(config)

    @staticmethod
    def _tokenizer() -> Any:
        return tokenizer("<image>")


TINIES = (TinyLlava(),)
