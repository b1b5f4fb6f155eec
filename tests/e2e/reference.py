"""Reference answers by transformers' ``generate``, which the cluster must equal token for token."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from tests.unit.engine.loras import merge
from triptych.demo import MODEL_DIR, MODEL_ID

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
hf: Any = transformers


@dataclass(frozen=True)
class Question:
    """A question about some of the digits in ``examples/digits``."""

    text: str
    images: tuple[str, ...] = ()
    max_tokens: int = 40

    def body(self, **fields: object) -> dict[str, Any]:
        """The greedy request in the format of the OpenAI API."""
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": data_url((DIGITS / f"{name}.png").read_bytes())}}
            for name in self.images
        ]
        content.append({"type": "text", "text": self.text})
        message = {"role": "user", "content": content}
        return {
            "model": MODEL_ID,
            "messages": [message],
            "temperature": 0,
            "max_tokens": self.max_tokens,
            **fields,
        }


@dataclass(frozen=True)
class Answer:
    """``token_ids`` include the end token, if there is one."""

    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str


def data_url(image: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(image).decode()}"


@cache
def _model(lora: Path | None) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = hf.LlavaForConditionalGeneration.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    if lora is not None:
        merge(model, lora)
    return model, hf.AutoProcessor.from_pretrained(MODEL_DIR)


@cache
def answer(question: Question, lora: Path | None = None) -> Answer:
    """One request alone, in float32, greedily; by the model that an adapter is merged into."""
    model, processor = _model(lora)
    content: list[dict[str, str]] = [{"type": "image"}] * len(question.images)
    message = {"role": "user", "content": [*content, {"type": "text", "text": question.text}]}
    prompt = processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    images = [Image.open(DIGITS / f"{name}.png") for name in question.images] or None
    inputs = processor(text=prompt, images=images, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=question.max_tokens, do_sample=False)
    prompt_tokens = inputs["input_ids"].shape[1]
    generated = output[0, prompt_tokens:].tolist()
    return Answer(prompt_tokens, tuple(generated), processor.decode(generated, skip_special_tokens=True))


def questions(counts: Sequence[int], number: int) -> list[Question]:
    """``number`` different questions whose numbers of images cycle through ``counts``."""
    names = sorted(path.stem for path in DIGITS.glob("*.png"))
    texts = ("What digits are shown?", "Which digit is the largest?", "How many images are there?")
    return [
        Question(
            texts[index % len(texts)] if counts[index % len(counts)] else "Hello!",
            tuple(names[(7 * index + 5 * place) % len(names)] for place in range(counts[index % len(counts)])),
        )
        for index in range(number)
    ]
