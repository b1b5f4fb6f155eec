"""Train the demo model: a LLaVA of 1.7 million parameters that reads handwritten digits.

    python examples/demo_model/train.py --out DIR [--steps N] [--threads T] [--seed S]

Two stages. First the vision encoder and the projector learn to classify digits, each image token through an
auxiliary head that is then dropped: without this the second stage stays on a plateau for a long time. Then the whole
model learns to answer (`data.py`), the loss taken on answers only. Weights are stored in float16.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from examples.demo_model import data

# The annotations of transformers are incomplete and change between versions, so its objects are not type-checked here.
hf: Any = transformers
HfTokenizer: TypeAlias = Any
HfProcessor: TypeAlias = Any
HfModel: TypeAlias = Any

PAD, END, USER, ASSISTANT, IMAGE = SPECIAL_TOKENS = ("<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<image>")
CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8").strip()
VOCABULARY_SIZE = 512
CONTEXT_TOKENS = 1024
PATCH_PX = 14
IMAGE_TOKENS = (data.IMAGE_SIZE_PX // PATCH_PX) ** 2
HIDDEN_SIZE = 128
HEAD_SIZE = 64

WARM_UP_STEPS = 50
CLASSIFIER_STEPS = 800
CLASSIFIER_BATCH = 96
CLASSIFIER_RATE = 1.5e-3
ANSWER_RATE = 1e-3
TEXT_ONLY_SHARE = 0.12
RENDERED_SIZES_PX = (8, 28, 56, 112, 224)


@dataclass(frozen=True, slots=True)
class Settings:
    """The command line."""

    out: Path
    steps: int
    threads: int
    seed: int


def build_tokenizer(rng: Random) -> HfTokenizer:
    """Train a byte-level BPE on drawn conversations; every number up to 72 becomes one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [" ".join(map(str, range(73)))] * 500
    for _ in range(4000):
        digits = [rng.randrange(10) for _ in range(rng.randint(0, data.MAX_IMAGES))]
        corpus += [f"{turn.text}\n{turn.answer}" for turn in data.conversation(digits, rng)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[USER, ASSISTANT, IMAGE],
        padding_side="left",
        model_max_length=CONTEXT_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


def build_processor(tokenizer: HfTokenizer) -> HfProcessor:
    """Combine the tokenizer with an image processor that needs only Pillow."""
    side = {"height": data.IMAGE_SIZE_PX, "width": data.IMAGE_SIZE_PX}
    image_processor = CLIPImageProcessorPil(
        size=side,
        crop_size=side,
        do_resize=True,
        do_center_crop=False,
        do_convert_rgb=True,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return hf.LlavaProcessor(
        image_processor,
        tokenizer,
        patch_size=PATCH_PX,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: HfTokenizer) -> HfModel:
    """A LLaVA small enough for a repository: 3 vision layers, 4 text layers, 128 wide, heads of 64."""
    vision = hf.CLIPVisionConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=3,
        num_attention_heads=HIDDEN_SIZE // HEAD_SIZE,
        image_size=data.IMAGE_SIZE_PX,
        patch_size=PATCH_PX,
        projection_dim=HIDDEN_SIZE,
    )
    text = hf.LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_SIZE,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = hf.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    return hf.LlavaForConditionalGeneration(config)


def rendered_digits(digits: data.Digits) -> torch.Tensor:
    """Render every digit as the processor receives it from files of several sizes: `uint8 [sizes, digits, 56, 56]`."""
    side = (data.IMAGE_SIZE_PX, data.IMAGE_SIZE_PX)
    rendered = [
        [np.asarray(data.render(pixels, size).resize(side, Image.Resampling.BICUBIC)) for pixels in digits.pixels]
        for size in RENDERED_SIZES_PX
    ]
    return torch.from_numpy(np.array(rendered))


def distorted(images: torch.Tensor) -> torch.Tensor:
    """Turn, stretch, shift, dim and blur with noise; `[n, 1, 56, 56]` in [-1, 1] in and out."""
    count = len(images)
    angle = (torch.rand(count) - 0.5) * 0.5
    stretch = 1 + (torch.rand(count, 2) - 0.5) * 0.3
    shift = (torch.rand(count, 2) - 0.5) * 0.25
    top = torch.stack([angle.cos() * stretch[:, 0], -angle.sin(), shift[:, 0]], dim=1)
    bottom = torch.stack([angle.sin(), angle.cos() * stretch[:, 1], shift[:, 1]], dim=1)
    grid = F.affine_grid(torch.stack([top, bottom], dim=1), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    contrast = 0.8 + 0.4 * torch.rand(count, 1, 1, 1)
    return (moved * contrast + 0.1 * torch.randn(count, 1, 1, 1)).clamp(-1, 1)


class Examples:
    """Draws training batches from the training part of the digits."""

    def __init__(self, tokenizer: HfTokenizer, rng: Random) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._digits = data.load()
        self._rendered = rendered_digits(self._digits)
        self._labels = torch.from_numpy(self._digits.labels)
        self._pad_id, self._user_id, self._assistant_id = tokenizer.convert_tokens_to_ids([PAD, USER, ASSISTANT])

    def images(self, indices: Sequence[int]) -> torch.Tensor:
        """Distorted pixel values of the digits at `indices`: `float32 [n, 3, 56, 56]`."""
        sizes = [self._rng.randrange(len(RENDERED_SIZES_PX)) for _ in indices]
        plain = self._rendered[sizes, list(indices)].float()[:, None] / 127.5 - 1
        return distorted(plain).expand(-1, 3, -1, -1)

    def labelled(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixel values and labels for the classifier stage."""
        indices = self._rng.choices(self._digits.train, k=count)
        return self.images(indices), self._labels[indices]

    def conversations(self, images: int, count: int) -> dict[str, torch.Tensor]:
        """`count` conversations of `images` images each, as the model's forward arguments."""
        shown, texts = [], []
        for _ in range(count):
            indices = self._rng.choices(self._digits.train, k=images)
            turns = data.conversation(self._digits.labels[indices].tolist(), self._rng)
            shown += indices
            texts.append(self._tokenizer.apply_chat_template(data.messages(turns), tokenize=False))
        expanded = [text.replace(IMAGE, IMAGE * IMAGE_TOKENS) for text in texts]
        encoded = self._tokenizer(expanded, padding=True, padding_side="right", return_tensors="pt")
        batch = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
        batch["labels"] = self.answers_only(batch["input_ids"])
        if shown:
            batch["pixel_values"] = self.images(shown)
        return batch

    def answers_only(self, ids: torch.Tensor) -> torch.Tensor:
        """Labels of the assistant's tokens, including end tokens; the rest is masked (-100)."""
        place = torch.arange(1, ids.shape[1] + 1).expand_as(ids)
        last_user = (place * (ids == self._user_id)).cummax(dim=1).values
        last_assistant = (place * (ids == self._assistant_id)).cummax(dim=1).values
        answering = (last_assistant > last_user) & (last_assistant < place) & (ids != self._pad_id)
        return ids.masked_fill(~answering, -100)


def train_classifier(model: HfModel, examples: Examples) -> None:
    """Teach every image token its digit; rate falls linearly."""
    head = torch.nn.Linear(HIDDEN_SIZE, 10)
    tower = [*model.model.vision_tower.parameters(), *model.model.multi_modal_projector.parameters()]
    optimizer = torch.optim.AdamW([*tower, *head.parameters()], lr=CLASSIFIER_RATE)
    for step in range(CLASSIFIER_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = CLASSIFIER_RATE * (1 - step / CLASSIFIER_STEPS)
        pixel_values, labels = examples.labelled(CLASSIFIER_BATCH)
        features = torch.stack(list(model.model.get_image_features(pixel_values, return_dict=True).pooler_output))
        loss = F.cross_entropy(head(features).flatten(0, 1), labels.repeat_interleave(IMAGE_TOKENS))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if step % 100 == 99:
            print(f"classifier {step + 1}/{CLASSIFIER_STEPS} loss {loss.item():.3f}", flush=True)


def answer_rate(step: int, steps: int) -> float:
    """Learning rate of the answer stage: a short warm-up, then a half cosine."""
    return ANSWER_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * (0.51 + 0.5 * math.cos(math.pi * step / steps))


def most_images(step: int, steps: int) -> int:
    """The curriculum: up to 2 images in the first fifth of the steps, then up to 4, then all."""
    done = step / steps
    return 2 if done < 0.2 else 4 if done < 0.4 else data.MAX_IMAGES


def conversations_per_batch(images: int) -> int:
    """Smaller batches where each conversation is longer: about the same time for every step."""
    return max(12, 32 // max(1, images))


def train_answers(model: HfModel, examples: Examples, steps: int, rng: Random) -> None:
    """Teach the whole model to answer; every batch holds conversations of one number of images."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=ANSWER_RATE, weight_decay=0.02, betas=(0.9, 0.98))
    started_s, average = time.perf_counter(), math.nan
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = answer_rate(step, steps)
        images = 0 if rng.random() < TEXT_ONLY_SHARE else rng.randint(1, most_images(step, steps))
        loss = model(**examples.conversations(images, conversations_per_batch(images))).loss
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if images:
            average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
        if step % 100 == 99:
            print(f"answers {step + 1}/{steps} {time.perf_counter() - started_s:.0f} s loss {average:.4f}", flush=True)


def save(model: HfModel, processor: HfProcessor, out: Path) -> None:
    """Write the model as a directory that transformers and vLLM load: float16 weights under published key names."""
    tokenizer = processor.tokenizer
    model.generation_config = hf.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_new_tokens=160, do_sample=False
    )
    model.to(torch.float16).save_pretrained(out)
    processor.save_pretrained(out)
    processor.image_processor.save_pretrained(out)
    weights = {published_key(key): tensor.contiguous() for key, tensor in load_file(out / "model.safetensors").items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "heldout.json").write_text(json.dumps(data.load().heldout) + "\n", encoding="utf-8")


def published_key(key: str) -> str:
    """The name of a weight in published LLaVA checkpoints, which vLLM expects."""
    return key if ".vision_model." in key else key.replace("vision_tower.", "vision_tower.vision_model.")


def parse_arguments() -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--steps", type=int, default=4000, help="steps of the answer stage")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return Settings(**vars(parser.parse_args()))


def main() -> None:
    """Train and save."""
    settings = parse_arguments()
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    rng = Random(settings.seed)
    tokenizer = build_tokenizer(rng)
    model = build_model(tokenizer)
    examples = Examples(tokenizer, rng)
    train_classifier(model, examples)
    train_answers(model, examples, settings.steps, rng)
    save(model.eval(), build_processor(tokenizer), settings.out)


if __name__ == "__main__":
    main()
