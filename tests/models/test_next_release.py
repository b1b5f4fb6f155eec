"""A model type that no release of transformers has: registered here as a release would, it is served without a change."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.families.harness import (
    Case,
    TinyFamily,
    encode_here,
    finish,
    image_processor_class,
    llama_sizes,
    tokenizer,
    transformers,
)
from triptych.domain.media import Modality

pytestmark = pytest.mark.timeout(180)

SIDE = 8
"""Pixels of a patch's side, of which an image of the processor has four by four."""
ANSWER_TOKENS = 12


class NextConfig(transformers.PretrainedConfig):  # type: ignore[misc]  # transformers is untyped
    model_type = "next_vl"
    sub_configs = {"text_config": transformers.LlamaConfig}  # noqa: RUF012 - as transformers declares them

    def __init__(self, text_config: Any = None, image_token_id: int = 0, **kwargs: Any) -> None:
        self.text_config = (
            transformers.LlamaConfig(**text_config)
            if isinstance(text_config, dict)
            else text_config or transformers.LlamaConfig()
        )
        self.image_token_id = image_token_id
        super().__init__(**kwargs)


class NextTower(transformers.PreTrainedModel):  # type: ignore[misc]
    config_class = NextConfig

    def __init__(self, config: NextConfig) -> None:
        super().__init__(config)
        self.patches = nn.Linear(3 * SIDE * SIDE, 32)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        patches = pixel_values.unfold(2, SIDE, SIDE).unfold(3, SIDE, SIDE)
        flat = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return torch.tanh(self.patches(flat))


class NextModel(transformers.PreTrainedModel):  # type: ignore[misc]
    """Positions stand still within an image, whose rows are a mixture of patches and of their mean."""

    config_class = NextConfig

    def __init__(self, config: NextConfig) -> None:
        super().__init__(config)
        self.tower = NextTower(config)
        self.projector = nn.Linear(32, config.text_config.hidden_size)
        self.language_model = transformers.AutoModel.from_config(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.language_model.get_input_embeddings()
        return embeddings

    def forward(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        kwargs.pop("position_ids", None)
        embeds = self.get_input_embeddings()(input_ids)
        is_image = input_ids == self.config.image_token_id
        if pixel_values is not None:
            patches = self.tower(pixel_values)
            rows = self.projector(patches + patches.mean(1, keepdim=True)).flatten(0, 1)
            embeds = embeds.masked_scatter(is_image[..., None], rows)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        before = 0 if cache is None else cache.get_seq_length()
        if not before:
            inside = is_image & is_image.roll(1, dims=1)
            self.stood_still = int(inside.sum())
            position_ids = (~inside).long().cumsum(-1) - 1
        else:
            position_ids = torch.arange(input_ids.shape[1])[None] + before - self.stood_still
        return self.language_model(
            inputs_embeds=embeds, position_ids=position_ids, attention_mask=attention_mask, **kwargs
        )


class NextForConditionalGeneration(transformers.PreTrainedModel, transformers.GenerationMixin):  # type: ignore[misc]
    config_class = NextConfig
    _tied_weights_keys: dict[str, str] = {}  # noqa: RUF012 - as transformers declares them

    def __init__(self, config: NextConfig) -> None:
        super().__init__(config)
        self.model = NextModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> Any:
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        logits = 3 * self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        cache = getattr(outputs, "past_key_values", None)
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def prepare_inputs_for_generation(self, input_ids: Any, pixel_values: Any = None, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs["pixel_values"] = pixel_values if kwargs.get("is_first_iteration", True) else None
        return inputs


class NextProcessor(transformers.ProcessorMixin):  # type: ignore[misc]
    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token = "<picture>"  # noqa: S105 - not a secret
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
        texts = [text] if isinstance(text, str) else list(text)
        texts = [text.replace(self.image_token, "[" + 16 * self.image_token + "]\n") for text in texts]
        made = self.tokenizer(texts, return_tensors="pt")
        return (
            made
            if images is None
            else transformers.BatchFeature({**made, **self.image_processor(images, return_tensors="pt")})
        )


class TinyNext(TinyFamily):
    name = "next_vl"
    targets = ((Modality.IMAGE, "<picture>"),)

    def processor(self) -> Any:
        size = {"height": 4 * SIDE, "width": 4 * SIDE}
        images = image_processor_class("CLIPImageProcessorPil")(size=size, do_center_crop=False)
        return NextProcessor(images, tokenizer("<picture>"), chat_template=self.template)

    def load_processor(self, directory: Path) -> Any:
        return self.processor()

    def model(self) -> Any:
        text = tokenizer("<picture>")
        config = NextConfig(
            text_config=llama_sizes(len(text)),
            image_token_id=text.convert_tokens_to_ids("<picture>"),
            tie_word_embeddings=False,
        )
        model = NextForConditionalGeneration(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 2:
                    weight.normal_(0, weight.shape[1] ** -0.5)
        return model


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NextConfig", "NextForConditionalGeneration", "NextProcessor"):
        # The module replaces itself while it is imported: whoever imported it first has another one.
        for module in (transformers, sys.modules["transformers"]):
            monkeypatch.setattr(module, name, globals()[name], raising=False)
    transformers.AutoConfig.register("next_vl", NextConfig, exist_ok=True)


@pytest.mark.usefixtures("registered")
def test_a_type_of_the_next_release_answers_as_generate_does(tmp_path: Path) -> None:
    tiny = TinyNext()
    tiny.make(tmp_path)
    case = Case(tiny, tmp_path, encode_here)
    questions = {f"r{items}": case.question(items, items) for items in (0, 1, 3)}
    engine = case.engine()
    for name, question in questions.items():
        engine.add(case.request(name, question, ANSWER_TOKENS))
    assert finish(engine) == {name: case.answer(question, ANSWER_TOKENS) for name, question in questions.items()}
