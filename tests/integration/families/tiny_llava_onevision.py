"""LLaVA-OneVision: tiles for a single image, none for several; more tiles than the model supports are scaled down."""

from collections.abc import Sequence
from typing import Any

from tests.integration.families.harness import (
    Item,
    TinyFamily,
    llama_sizes,
    pixels_of,
    siglip_sizes,
    tokenizer,
    transformers,
    without_video,
)
from triptych.domain.media import Modality

PINPOINTS = [[28 * rows, 28 * columns] for rows in range(1, 4) for columns in range(1, 4)]


class TinyLlavaOneVision(TinyFamily):
    name = "llava_onevision"
    targets = ((Modality.IMAGE, "<image>"),)
    anyres = "anyres_max_2"

    def processor(self) -> Any:
        images = transformers.LlavaOnevisionImageProcessorPil(
            size={"height": 28, "width": 28}, image_grid_pinpoints=PINPOINTS
        )
        return without_video(transformers.LlavaOnevisionProcessor)(
            images,
            tokenizer("<image>", "<video>"),
            None,
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            vision_aspect_ratio=self.anyres,
            chat_template=self.template,
        )

    def load_processor(self, directory: Any) -> Any:
        return self.processor()

    def inputs(self, processor: Any, text: str, items: Sequence[Item]) -> Any:
        """Nested, as ``apply_chat_template`` passes the images of a conversation."""
        images = [[pixels_of(item) for item in items]] if items else None
        return processor(text=text, images=images, return_tensors="pt")

    def model(self) -> Any:
        text = tokenizer("<image>", "<video>")
        config = transformers.LlavaOnevisionConfig(
            vision_config=transformers.SiglipVisionConfig(
                **siglip_sizes(image_size=28, patch_size=7, vision_use_head=False)
            ),
            text_config=transformers.Qwen2Config(**llama_sizes(len(text), **self.text)),
            image_token_index=text.convert_tokens_to_ids("<image>"),
            video_token_index=text.convert_tokens_to_ids("<video>"),
            image_grid_pinpoints=PINPOINTS,
            vision_aspect_ratio=self.anyres,
            tie_word_embeddings=False,
            initializer_range=0.25,
        )
        return transformers.LlavaOnevisionForConditionalGeneration(config)


TINIES = (TinyLlavaOneVision(),)
