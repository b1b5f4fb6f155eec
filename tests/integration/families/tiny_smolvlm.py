"""SmolVLM: like Idefics3; its processor requires a video package that images do not need."""

from importlib import import_module
from typing import Any

from tests.integration.families.harness import (
    TinyFamily,
    image_processor_class,
    llama_sizes,
    siglip_sizes,
    transformers,
    without_video,
)
from tests.integration.families.tiny_idefics3 import IMAGE, marked_tokenizer
from triptych.domain.media import Modality


def provide_num2words() -> None:
    """The package spells numbers in prompts with videos; where it is not installed, they stay digits."""
    module: Any = import_module("transformers.models.smolvlm.processing_smolvlm")
    module.num2words = module.num2words or str


class TinySmolVlm(TinyFamily):
    """A tile has as many rows as a patch is pixels wide: transformers 5.20 uses that number as the tile's rows, and
    fails where it is not a divisor.
    """

    name = "smolvlm"
    seed = 2
    targets = ((Modality.IMAGE, IMAGE),)

    def processor(self) -> Any:
        images = image_processor_class("SmolVLMImageProcessorPil")(
            size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, return_row_col_info=True
        )
        provide_num2words()
        return without_video(transformers.SmolVLMProcessor)(
            images, marked_tokenizer(), None, image_seq_len=4, chat_template=self.template
        )

    def load_processor(self, directory: Any) -> Any:
        return self.processor()

    def model(self) -> Any:
        text = marked_tokenizer()
        config = transformers.SmolVLMConfig(
            vision_config=transformers.SmolVLMVisionConfig(**siglip_sizes(image_size=16, patch_size=4)),
            text_config=transformers.LlamaConfig(**llama_sizes(len(text), **self.text)),
            image_token_id=text.convert_tokens_to_ids(IMAGE),
            scale_factor=2,
            tie_word_embeddings=False,
        )
        return transformers.SmolVLMForConditionalGeneration(config)


TINIES = (TinySmolVlm(),)
