"""Training data of the demo model: handwritten digits, questions about them, and small talk.

The digits are the 1,797 images of 8 x 8 pixels in scikit-learn (UCI optical recognition of handwritten digits). The
split is fixed in this module, so that training, evaluation and tests agree.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image

HELDOUT_SIZE = 360
SPLIT_SEED = 0
MAX_IMAGES = 8
IMAGE_SIZE_PX = 56
DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, slots=True)
class Digits:
    """All digits, and which of them are for training and which are held out.

    `pixels` is `uint8 [1797, 8, 8]` (0 is background, 255 is ink), `labels` is `int64 [1797]`.
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    train: tuple[int, ...]
    heldout: tuple[int, ...]


@cache
def load() -> Digits:
    """Load the digits and split them, stratified by label; the same split on every call and machine."""
    from sklearn.datasets import load_digits  # half a second, which those who only draw do not need
    from sklearn.model_selection import train_test_split

    flat, labels = load_digits(return_X_y=True)
    pixels = (flat.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    train, heldout = train_test_split(
        np.arange(len(labels)), test_size=HELDOUT_SIZE, stratify=labels, random_state=SPLIT_SEED
    )
    return Digits(pixels, labels.astype(np.int64), tuple(map(int, train)), tuple(sorted(map(int, heldout))))


def render(pixels: NDArray[np.uint8], size_px: int = IMAGE_SIZE_PX) -> Image.Image:
    """Enlarge one `[8, 8]` digit to a grayscale image of `size_px` x `size_px`, bicubic."""
    return Image.fromarray(pixels).resize((size_px, size_px), Image.Resampling.BICUBIC)


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of question about digits: its phrasings, its answer, and its share in training."""

    name: str
    questions: tuple[str, ...]
    answer: Callable[[Sequence[int]], str]
    share: float


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer; its images surround `text`, `images_before` of them in front."""

    text: str
    answer: str
    images_before: int = 0
    images_after: int = 0


def _read(digits: Sequence[int]) -> str:
    return " ".join(map(str, digits))


def _spell(digits: Sequence[int]) -> str:
    return " ".join(DIGIT_NAMES[digit] for digit in digits)


def _count(digits: Sequence[int]) -> str:
    return f"There is {len(digits)} image." if len(digits) == 1 else f"There are {len(digits)} images."


def _largest(digits: Sequence[int]) -> str:
    return f"The largest digit is {max(digits)}."


def _smallest(digits: Sequence[int]) -> str:
    return f"The smallest digit is {min(digits)}."


def _sum(digits: Sequence[int]) -> str:
    """Read, then add one digit at a time: a model this small cannot add eight numbers in one step."""
    totals = list(accumulate(digits))
    steps = [
        f"{before} + {digit} = {total}" for before, digit, total in zip(totals, digits[1:], totals[1:], strict=False)
    ]
    return " ".join([f"{_read(digits)}.", *([f"{', '.join(steps)}."] if steps else []), f"The sum is {totals[-1]}."])


READ = Task(
    "read",
    (
        "What digits are shown?",
        "Which digits do you see?",
        "Read the digits.",
        "What digit is this?",
        "What digits are these?",
        "What do you see?",
        "What is in the image?",
        "What is in these images?",
        "Describe the image.",
        "Describe these images.",
        "Which digits are in the images?",
        "Read the digits in order.",
        "What numbers are shown?",
    ),
    _read,
    share=0.36,
)
LARGEST = Task(
    "largest",
    (
        "Which is the largest digit?",
        "What is the largest digit?",
        "Which digit is the largest?",
        "What is the biggest digit?",
        "Find the largest digit.",
        "Which is the highest digit?",
    ),
    _largest,
    share=0.15,
)
SMALLEST = Task(
    "smallest",
    (
        "Which is the smallest digit?",
        "What is the smallest digit?",
        "Which digit is the smallest?",
        "What is the lowest digit?",
        "Find the smallest digit.",
    ),
    _smallest,
    share=0.13,
)
COUNT = Task(
    "count",
    (
        "How many images are there?",
        "How many images do you see?",
        "How many digits are there?",
        "How many images?",
        "Count the images.",
    ),
    _count,
    share=0.07,
)
SUM = Task(
    "sum",
    (
        "What is the sum?",
        "What is the sum of the digits?",
        "Add the digits.",
        "Sum the digits.",
        "What do the digits add up to?",
        "What is the total?",
    ),
    _sum,
    share=0.24,
)
SPELL = Task(
    "spell",
    ("Spell the digits.", "Write the digits as words.", "Spell the digits in words."),
    _spell,
    share=0.05,
)
TASKS = (READ, LARGEST, SMALLEST, COUNT, SUM, SPELL)

NO_IMAGES = "There are no images. Show me some digits."
_INTRODUCTION = "I am a tiny vision language model that reads handwritten digits."
_ABILITIES = "I can read digits, add them, count images and find the largest or smallest digit."
_GREETING = "Hello! Show me some digits and ask about them."
SMALL_TALK: tuple[tuple[str, str], ...] = (
    ("Hello!", _GREETING),
    ("Hi!", _GREETING),
    ("Hi there!", _GREETING),
    ("Good morning!", _GREETING),
    ("Who are you?", _INTRODUCTION),
    ("What are you?", _INTRODUCTION),
    ("What is your name?", _INTRODUCTION),
    ("What can you do?", _ABILITIES),
    ("What do you know?", _ABILITIES),
    ("Help!", _ABILITIES),
    ("How are you?", "I am fine, thank you!"),
    ("Thank you!", "You are welcome!"),
    ("Thanks!", "You are welcome!"),
    ("Goodbye!", "Goodbye!"),
    ("Bye!", "Goodbye!"),
    ("Say the alphabet.", " ".join(string.ascii_lowercase)),
)
COUNT_LIMIT = 40
ADDEND_LIMIT = 63


def count_to(limit: int) -> str:
    """The answer to "Count to `limit`."."""
    return " ".join(map(str, range(1, limit + 1)))


def small_talk(rng: Random) -> Turn:
    """One turn without images: counting, adding, courtesies, or a question that lacks its images."""
    kind = rng.random()
    if kind < 0.3:
        limit = rng.randint(1, COUNT_LIMIT)
        return Turn(f"Count to {limit}.", count_to(limit))
    if kind < 0.65:
        pair = [rng.randint(0, ADDEND_LIMIT), rng.randint(0, 9)]
        if rng.random() < 0.3:
            pair.reverse()
        return Turn(f"What is {pair[0]} + {pair[1]}?", f"{pair[0]} + {pair[1]} = {sum(pair)}.")
    return Turn(*rng.choice(SMALL_TALK))


def _casually(text: str, rng: Random) -> str:
    """Sometimes drop the closing mark or use lower case, as people do."""
    if rng.random() < 0.15:
        text = text.rstrip("?.!")
    return text.lower() if rng.random() < 0.15 else text


def _typed(turn: Turn, rng: Random) -> Turn:
    return Turn(_casually(turn.text, rng), turn.answer, turn.images_before, turn.images_after)


def _about_digits(digits: Sequence[int], rng: Random) -> Turn:
    """A question about the digits shown; if there are none, the answer says so."""
    task = rng.choices(TASKS, [task.share for task in TASKS])[0]
    return Turn(rng.choice(task.questions), task.answer(digits) if digits else NO_IMAGES)


def _showing(count: int, turn: Turn, rng: Random) -> Turn:
    """Put `count` images around the turn's text: mostly in front, sometimes behind or on both sides."""
    before = count if rng.random() < 0.75 else rng.randint(0, count)
    return Turn(turn.text, turn.answer, before, count - before)


def conversation(digits: Sequence[int], rng: Random) -> list[Turn]:
    """Draw one to three turns; the images of `digits` (perhaps none) all come with one of the first two.

    `digits` are the labels of the images in the order in which they are shown.
    """
    turns: list[Turn] = []
    if not digits:
        turns.append(small_talk(rng) if rng.random() < 0.85 else _about_digits((), rng))
    else:
        if rng.random() < 0.05:
            turns.append(small_talk(rng))
        turns.append(_showing(len(digits), _about_digits(digits, rng), rng))
    while len(turns) < 3 and rng.random() < 0.3:
        turns.append(_about_digits(digits, rng) if digits and rng.random() < 0.85 else small_talk(rng))
    return [_typed(turn, rng) for turn in turns]


def messages(turns: Sequence[Turn]) -> list[dict[str, object]]:
    """Write turns as chat messages with content parts, as chat templates take them."""
    written: list[dict[str, object]] = []
    for turn in turns:
        image = {"type": "image"}
        text = {"type": "text", "text": turn.text}
        content = [*[image] * turn.images_before, text, *[image] * turn.images_after]
        written.append({"role": "user", "content": content})
        written.append({"role": "assistant", "content": [{"type": "text", "text": turn.answer}]})
    return written
