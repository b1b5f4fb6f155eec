"""The demo model in separate encoder and text engines gives ``generate``'s answers, and they are right."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.unit.engine.tiny import Question, Reference, encoder_engine, engine_request, greedy, run, text_engine
from triptych.demo import MODEL_DIR

PICTURES = Path(__file__).parents[3] / "examples" / "digits"


@pytest.fixture(scope="module")
def demo() -> Reference:
    return Reference(MODEL_DIR)


def question(demo: Reference, text: str, names: list[str]) -> Question:
    content: list[dict[str, Any]] = [*({"type": "image"} for _ in names), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    prompt = demo.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return Question(prompt, tuple((PICTURES / name).read_bytes() for name in names))


@pytest.mark.slow
def test_sixteen_concurrent_questions_are_answered_as_generate_does(demo: Reference) -> None:
    rng = Random(3)
    names = sorted(file.name for file in PICTURES.glob("*.png"))
    asked: dict[str, tuple[Question, list[str]]] = {}
    for number in range(16):
        chosen = rng.sample(names, (0, 1, 2, 3, 8)[number % 5])
        text = "What digits are shown?" if chosen else "Count to 12."
        asked[str(number)] = question(demo, text, chosen), chosen
    encoder = encoder_engine(MODEL_DIR)
    engine = text_engine(MODEL_DIR, kv_cache_bytes=16 << 20, token_budget=48)
    outputs = []
    for name, (wanted, _) in asked.items():
        engine.add(engine_request(name, wanted, demo, encoder, greedy(40)))
        outputs += engine.step()
    answers = run(engine, outputs)
    assert answers == {name: demo.answer(wanted, 40) for name, (wanted, _) in asked.items()}
    texts = {name: demo.processor.decode(tokens, skip_special_tokens=True) for name, tokens in answers.items()}
    right = {name: " ".join(file[0] for file in files) or texts[name] for name, (_, files) in asked.items()}
    assert sum(texts[name] == right[name] for name in asked) >= 14
