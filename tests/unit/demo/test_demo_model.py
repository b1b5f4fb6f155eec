"""The demo model is complete, small, safe to load, and reads digits outside its training set."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image

from examples.demo_model import data, write_digits
from examples.demo_model.evaluate import Query, Reader, digits_right
from triptych.demo import MODEL_DIR

pytestmark = pytest.mark.slow
PICTURES = Path(__file__).parents[3] / "examples" / "digits"
FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "heldout.json",
    "model.safetensors",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
SIZE_LIMIT_BYTES = 10 * 1024 * 1024
QUESTION = data.READ.questions[0]


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(MODEL_DIR)


def read_json(name: str) -> Any:
    return json.loads((MODEL_DIR / name).read_text(encoding="utf-8"))


def picture(name: str) -> Image.Image:
    return Image.open(PICTURES / name)


def ask(reader: Reader, question: str, *images: Image.Image) -> str:
    return reader.ask([Query(images, question)])[0].text


def converse(reader: Reader, messages: list[dict[str, Any]], images: list[Image.Image]) -> str:
    """Answer a whole conversation, written as chat messages."""
    prompt = reader.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = reader.processor(text=prompt, images=images, return_tensors="pt")
    output = reader.model.generate(**inputs, max_new_tokens=64)
    text: str = reader.processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_the_files_are_few_small_and_without_pickles() -> None:
    files = list(MODEL_DIR.iterdir())
    assert {file.name for file in files} == FILES
    assert sum(file.stat().st_size for file in files) <= SIZE_LIMIT_BYTES


def test_the_card_names_data_licence_and_recipe() -> None:
    card = (MODEL_DIR / "README.md").read_text(encoding="utf-8")
    for fact in ("CC BY 4.0", "scikit-learn", "examples/demo_model/train.py", "examples/demo_model/evaluate.py"):
        assert fact in card


def test_weights_have_the_published_key_names() -> None:
    header = (MODEL_DIR / "model.safetensors").read_bytes()
    keys = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    vision = [key for key in keys if key.startswith("vision_tower.")]
    assert vision
    assert all(key.startswith("vision_tower.vision_model.") for key in vision)


def test_heldout_digits_were_not_trained_on() -> None:
    digits = data.load()
    assert read_json("heldout.json") == list(digits.heldout)
    assert not set(digits.heldout) & set(digits.train)
    assert len(digits.heldout) + len(digits.train) == len(digits.labels)
    training = {digits.pixels[index].tobytes() for index in digits.train}
    assert not any(digits.pixels[index].tobytes() in training for index in digits.heldout)


def test_token_ids_agree_between_model_and_processor(reader: Reader) -> None:
    config, tokenizer = reader.model.config, reader.processor.tokenizer
    assert config.image_token_id == tokenizer.convert_tokens_to_ids("<image>")
    assert config.text_config.eos_token_id == tokenizer.eos_token_id
    assert config.text_config.max_position_embeddings == tokenizer.model_max_length == 1024


@pytest.mark.parametrize(("images", "least"), [(1, 0.95), (2, 0.95), (8, 0.97)])
def test_it_reads_heldout_digits(reader: Reader, images: int, least: float) -> None:
    digits, rng = data.load(), Random(images)
    drawn = [rng.sample(digits.heldout, images) for _ in range(20)]
    shown = [Query(tuple(data.render(digits.pixels[i]) for i in indices), QUESTION) for indices in drawn]
    labels = [digits.labels[indices].tolist() for indices in drawn]
    right = [digits_right(answer.text, label) for answer, label in zip(reader.ask(shown), labels, strict=True)]
    assert sum(right) / len(right) >= least


def test_the_example_images_show_heldout_digits_named_in_their_file_names() -> None:
    digits = data.load()
    written = write_digits.chosen()
    assert {path.name for path in PICTURES.glob("*.png")} == set(written)
    for name, index in written.items():
        assert index in digits.heldout
        assert str(digits.labels[index]) == name[0]
        assert picture(name).tobytes() == data.render(digits.pixels[index], write_digits.SIZE_PX).tobytes()


def test_it_reads_every_example_image_in_several_orders(reader: Reader) -> None:
    names = sorted(write_digits.chosen())
    rng = Random(0)
    orders = [rng.sample(names, len(names)) for _ in range(3)]
    for count in (1, 3, 5):
        groups = [order[start : start + count] for order in orders for start in range(0, len(names), count)]
        answers = reader.ask([Query(tuple(map(picture, group)), QUESTION) for group in groups])
        assert [answer.text for answer in answers] == [" ".join(name[0] for name in group) for group in groups]


def test_the_answer_follows_the_order_of_images(reader: Reader) -> None:
    for order in permutations(["3_a.png", "7_a.png", "1_a.png"]):
        assert ask(reader, QUESTION, *map(picture, order)) == " ".join(name[0] for name in order)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "P"])
@pytest.mark.parametrize("size_px", [(40, 40), (56, 56), (64, 60), (300, 300)])
def test_it_reads_other_modes_and_sizes(reader: Reader, mode: str, size_px: tuple[int, int]) -> None:
    images = [picture(name).resize(size_px).convert(mode) for name in ("2_a.png", "0_a.png", "6_a.png")]
    assert ask(reader, QUESTION, *images) == "2 0 6"


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Which is the largest digit?", "The largest digit is 7."),
        ("What is the smallest digit?", "The smallest digit is 1."),
        ("How many images are there?", "There are 3 images."),
        ("What is the sum?", "3 7 1. 3 + 7 = 10, 10 + 1 = 11. The sum is 11."),
        ("which digits do you see", "3 7 1"),
    ],
)
def test_it_answers_questions_about_images(reader: Reader, question: str, answer: str) -> None:
    assert ask(reader, question, *map(picture, ("3_a.png", "7_a.png", "1_a.png"))) == answer


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        *data.SMALL_TALK[:1],
        ("Who are you?", dict(data.SMALL_TALK)["Who are you?"]),
        ("What can you do?", dict(data.SMALL_TALK)["What can you do?"]),
        ("Thank you!", "You are welcome!"),
        ("Count to 12.", data.count_to(12)),
        ("Count to 30.", data.count_to(30)),
        ("What is 7 + 8?", "7 + 8 = 15."),
        ("What digits are shown?", data.NO_IMAGES),
    ],
)
def test_it_answers_without_images(reader: Reader, question: str, answer: str) -> None:
    assert ask(reader, question) == answer


def test_content_parts_are_rendered_in_the_order_given(reader: Reader) -> None:
    image: dict[str, str] = {"type": "image"}
    content = [image, {"type": "text", "text": QUESTION}, image]
    assert converse(reader, [{"role": "user", "content": content}], [picture("4_a.png"), picture("9_a.png")]) == "4 9"


def test_it_follows_several_turns_and_ignores_system_messages(reader: Reader) -> None:
    image: dict[str, str] = {"type": "image"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You read digits."},
        {"role": "user", "content": [image, image, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": "4 9"},
        {"role": "user", "content": "Which is the largest digit?"},
    ]
    images = [picture("4_a.png"), picture("9_a.png")]
    assert converse(reader, messages, images) == converse(reader, messages[1:], images) == "The largest digit is 9."
