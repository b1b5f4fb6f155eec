"""Answers in bfloat16 against ``generate`` in bfloat16: their first tokens, where the reference is clear."""

from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tests.integration.families.harness import Case, Question, Unclear, encode_here, finish
from tests.models.conftest import made

pytestmark = pytest.mark.timeout(180)

FIRST_TOKENS = 6
CHUNK_TOKENS = 64
CLEAR = 0.25
"""How much likelier, in logits, the best token has to be where sums are rounded in another order: some steps of bfloat16."""
QUESTIONS = 2


def long_questions(case: Case) -> list[Question]:
    """Clear ones whose prompts need several chunks: of text, and with items."""
    found: list[Question] = []
    for seed in count():
        question = ("so it goes, " * 8, *case.question(seed, (len(found) % 2) * 3))
        try:
            case.answer(question, FIRST_TOKENS)
        except Unclear:
            assert seed < 60, "no question has a clear answer"
            continue
        found.append(question)
        if len(found) == QUESTIONS:
            return found
    raise AssertionError


@pytest.mark.parametrize("name", ["qwen3_5", "granite4_vision"])
def test_first_tokens_in_bfloat16_are_those_of_generate(name: str, tmp_path: Path) -> None:
    """Linear attention, whose prompts are not cut; and packed prompts, cut at multiples of 64."""
    case = made(name, tmp_path)
    case.dtype, case.encode, case.margin = "bfloat16", partial(encode_here, dtype="bfloat16"), CLEAR
    asked = {f"r{at}": question for at, question in enumerate(long_questions(case))}
    engine = case.engine(token_budget=CHUNK_TOKENS)
    for request_id, question in asked.items():
        request = case.request(request_id, question, FIRST_TOKENS)
        assert len(request.token_ids) > CHUNK_TOKENS
        engine.add(request)
        assert finish(engine) == {request_id: case.answer(question, FIRST_TOKENS)}
