"""InternVL: grids of up to four tiles, and the whole image as one more tile."""

import warnings
from collections.abc import Sequence
from typing import Any

from tests.integration.families.harness import (
    Item,
    TinyFamily,
    llama_sizes,
    siglip_sizes,
    tokenizer,
    transformers,
    without_video,
)
from triptych.domain.media import Modality

IMAGE = "<IMG_CONTEXT>"


class TinyInternVl(TinyFamily):
    name = "internvl"
    targets = ((Modality.IMAGE, IMAGE),)

    def processor(self) -> Any:
        images = transformers.GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, max_patches=4)
        return without_video(transformers.InternVLProcessor)(
            images, self._tokenizer(), None, image_seq_length=4, chat_template=self.template
        )

    def load_processor(self, directory: Any) -> Any:
        return self.processor()

    def inputs(self, processor: Any, text: str, items: Sequence[Item]) -> Any:
        with warnings.catch_warnings():
            # transformers 5.17 sums a tensor with a numpy function.
            warnings.filterwarnings("ignore", "__array_wrap__", DeprecationWarning)
            return super().inputs(processor, text, items)

    def model(self) -> Any:
        text = self._tokenizer()
        config = transformers.InternVLConfig(
            vision_config=siglip_sizes(image_size=[32, 32], patch_size=[8, 8]),
            text_config=transformers.Qwen2Config(**llama_sizes(len(text), **self.text)),
            image_token_id=text.convert_tokens_to_ids(IMAGE),
            image_seq_length=4,
            tie_word_embeddings=False,
        )
        return transformers.InternVLForConditionalGeneration(config)

    @staticmethod
    def _tokenizer() -> Any:
        named = {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": IMAGE,
            "video_token": "<video>",
        }
        return tokenizer(named=named)


TINIES = (TinyInternVl(),)
