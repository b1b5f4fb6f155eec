"""Measure a trained demo model on held-out digits.

    python examples/demo_model/evaluate.py [--model DIR] [--limit N] [--size PX] [--json FILE]

For 1 to 8 images: how often the whole answer is right, how often a digit is, and how often the largest and smallest
digit, the number of images and the sum are. The model runs in float32 and picks the likeliest token each time.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from examples.demo_model import data
from triptych.demo import MODEL_DIR

hf: Any = transformers
MAX_NEW_TOKENS = 160
BATCH_SIZE = 100


@dataclass(frozen=True, slots=True)
class Settings:
    """The command line."""

    model: Path
    limit: int
    size: int
    seed: int
    json: Path | None


@dataclass(frozen=True, slots=True)
class Query:
    """One user message: images, then a question."""

    images: tuple[Image.Image, ...]
    question: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer, and the smallest margin (in logits) of a chosen token over the next best."""

    text: str
    lead: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Fractions of right answers to requests with one number of images."""

    images: int
    whole: float
    digit: float
    largest: float
    smallest: float
    count: float
    sum: float
    lead_1_percent: float


class Reader:
    """The model and its processor, as transformers load them."""

    def __init__(self, directory: Path) -> None:
        self.model = hf.LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        self.processor = hf.AutoProcessor.from_pretrained(directory)

    def ask(self, queries: Sequence[Query]) -> list[Answer]:
        """Answer a batch of queries with the same number of images."""
        answers: list[Answer] = []
        for start in range(0, len(queries), BATCH_SIZE):
            answers += self._ask(queries[start : start + BATCH_SIZE])
        return answers

    def _ask(self, queries: Sequence[Query]) -> list[Answer]:
        prompts = [self._prompt(query) for query in queries]
        images = [list(query.images) for query in queries] if queries[0].images else None
        inputs = self.processor(text=prompts, images=images, padding=True, return_tensors="pt")
        with torch.inference_mode():
            output = self.model.generate(
                **inputs,
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        generated = output.sequences[:, inputs["input_ids"].shape[1] :]
        best = torch.stack(output.logits, dim=1).topk(2).values
        lead = (best[..., 0] - best[..., 1]).masked_fill(
            generated == self.model.config.text_config.pad_token_id, torch.inf
        )
        texts = self.processor.batch_decode(generated, skip_special_tokens=True)
        return [Answer(text, least) for text, least in zip(texts, lead.amin(dim=1).tolist(), strict=True)]

    def _prompt(self, query: Query) -> str:
        content = [{"type": "image"}] * len(query.images) + [{"type": "text", "text": query.question}]
        message = {"role": "user", "content": content}
        prompt: str = self.processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        return prompt


def last_number(text: str) -> str:
    """The last number in `text`, which is the result in every answer that has one; empty without."""
    numbers: list[str] = re.findall(r"\d+", text)
    return numbers[-1] if numbers else ""


def measure(reader: Reader, images: int, settings: Settings) -> Accuracy:
    """Ask every task about `settings.limit` drawn sequences of `images` held-out digits."""
    rng = Random(f"{settings.seed}:{images}")
    digits = data.load()
    drawn = [rng.sample(digits.heldout, images) for _ in range(settings.limit)]
    shown = [tuple(data.render(digits.pixels[index], settings.size) for index in indices) for indices in drawn]
    labels = [digits.labels[indices].tolist() for indices in drawn]

    def ask(task: data.Task) -> list[Answer]:
        return reader.ask([Query(pictures, task.questions[0]) for pictures in shown])

    def share_right(task: data.Task) -> float:
        expected = [last_number(task.answer(label)) for label in labels]
        return float(np.mean([last_number(a.text) == e for a, e in zip(ask(task), expected, strict=True)]))

    read = ask(data.READ)
    return Accuracy(
        images,
        whole=float(np.mean([a.text == data.READ.answer(label) for a, label in zip(read, labels, strict=True)])),
        digit=float(np.mean([digits_right(a.text, label) for a, label in zip(read, labels, strict=True)])),
        largest=share_right(data.LARGEST),
        smallest=share_right(data.SMALLEST),
        count=share_right(data.COUNT),
        sum=share_right(data.SUM),
        lead_1_percent=float(np.quantile([a.lead for a in read], 0.01)),
    )


def digits_right(text: str, digits: Sequence[int]) -> float:
    """The fraction of `digits` that `text` has at the right place."""
    said = text.split()
    return sum(place < len(said) and said[place] == str(digit) for place, digit in enumerate(digits)) / len(digits)


def parse_arguments() -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure the demo model on held-out digits.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--limit", type=int, default=300, help="sequences drawn for each number of images")
    parser.add_argument("--size", type=int, default=data.IMAGE_SIZE_PX, help="side of the rendered images in pixels")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return Settings(**vars(parser.parse_args()))


def main() -> None:
    """Measure and print a table in Markdown."""
    settings = parse_arguments()
    reader = Reader(settings.model)
    names = [field.name for field in fields(Accuracy)]
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names), flush=True)
    measured = []
    for images in range(1, data.MAX_IMAGES + 1):
        row = asdict(measure(reader, images, settings))
        print("| " + " | ".join(str(row[n]) if n == "images" else f"{row[n]:.3f}" for n in names) + " |", flush=True)
        measured.append(row)
    if settings.json is not None:
        report = {"limit": settings.limit, "size_px": settings.size, "seed": settings.seed, "accuracy": measured}
        settings.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
