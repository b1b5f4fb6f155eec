"""Idefics3: tiles with row and column tokens, and the whole image as one more tile."""

from typing import Any

from tests.integration.families.harness import (
    TinyFamily,
    image_processor_class,
    llama_sizes,
    siglip_sizes,
    tokenizer,
    transformers,
)
from triptych.domain.media import Modality

IMAGE = "<image>"


def marked_tokenizer() -> Any:
    """Some row and column markers are single tokens, others are tokenized as text."""
    marks = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    return tokenizer(IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *marks)


class TinyIdefics3(TinyFamily):
    name = "idefics3"
    targets = ((Modality.IMAGE, IMAGE),)

    def processor(self) -> Any:
        images = image_processor_class("Idefics3ImageProcessorPil")(
            size={"longest_edge": 84}, max_image_size={"longest_edge": 28}, return_row_col_info=True
        )
        return transformers.Idefics3Processor(images, marked_tokenizer(), image_seq_len=4, chat_template=self.template)

    def load_processor(self, directory: Any) -> Any:
        return self.processor()

    def model(self) -> Any:
        text = marked_tokenizer()
        config = transformers.Idefics3Config(
            vision_config=transformers.Idefics3VisionConfig(**siglip_sizes(image_size=28, patch_size=7)),
            text_config=transformers.LlamaConfig(**llama_sizes(len(text), **self.text)),
            image_token_id=text.convert_tokens_to_ids(IMAGE),
            scale_factor=2,
            tie_word_embeddings=False,
        )
        return transformers.Idefics3ForConditionalGeneration(config)


TINIES = (TinyIdefics3(),)
