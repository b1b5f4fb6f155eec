"""What every text engine promises of an answer that goes on after tokens that another engine generated.

Triptych's own gives the identical answer. Others give a valid one: with its limits, and in its response format.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from tests.contract.test_text_engine import ONE, SCHEMA, TEXT, TWO
from tests.contract.text_engine_kit import (
    ENGINES,
    Answered,
    Answers,
    ask,
    ask_one,
    assert_idle,
    collect,
    drawn,
    finish,
    greedy,
    no_white_space,
    opened,
    request,
    tokenizer,
)
from tests.e2e.reference import answer
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.engine import EngineRequest
from triptych.domain.generation import FinishReason
from triptych.errors import InvalidRequest
from triptych.ports import TextEngine

pytestmark = pytest.mark.timeout(300)

TOGETHER = 4


@pytest.fixture(scope="module", params=sorted(ENGINES))
def loaded(request: pytest.FixtureRequest) -> Iterator[tuple[str, TextEngine]]:
    with opened(request.param) as engine:
        yield request.param, engine


@pytest.fixture
def engine(loaded: tuple[str, TextEngine]) -> Iterator[TextEngine]:
    yield loaded[1]
    assert_idle(loaded[1])


@pytest.fixture
def own(loaded: tuple[str, TextEngine]) -> Iterator[TextEngine]:
    if loaded[0] != "triptych":
        pytest.skip("NOT PROMISED: another engine may go on with other tokens")
    yield loaded[1]
    assert_idle(loaded[1])


def of_choices(answers: Answers, name: str) -> dict[int, Answered]:
    return {choice: answered for (whose, choice), answered in answers.items() if whose == name}


def cut(asked: EngineRequest, whole: dict[int, Answered], position: int, *, shared: bool = True) -> EngineRequest:
    """The rest of a request after ``position`` steps. Without ``shared`` it finds no prefix in the cache."""
    continued = tuple(
        ContinuedChoice(choice, tuple(answered.token_ids[:position]))
        for choice, answered in sorted(whole.items())
        if position < len(answered.token_ids)
    )
    name = f"{asked.request_id} from {position}"
    return replace(
        asked,
        request_id=name,
        tenant_salt=b"" if shared else name.encode(),
        grammar=None if asked.grammar is None else asked.grammar.fork(),
        continued=continued,
    )


def check_same(rest: dict[int, Answered], whole: dict[int, Answered], position: int) -> None:
    """Assert that the rest goes on as the whole answer does."""
    assert sorted(rest) == [choice for choice in sorted(whole) if position < len(whole[choice].token_ids)]
    for choice, after in rest.items():
        before = whole[choice]
        assert after.token_ids == before.token_ids[position:], f"choice {choice} from {position}"
        assert (after.reason, after.error) == (before.reason, None)
        expected = before.scores[position:]
        assert len(after.scores) == len(expected)
        for scores, other in zip(after.scores, expected, strict=True):
            assert [top.token_id for top in scores.top] == [top.token_id for top in other.top]
            assert np.allclose(
                [scored.logprob for scored in (scores.chosen, *scores.top)],
                [scored.logprob for scored in (other.chosen, *other.top)],
                atol=1e-3,
            )


def check_all(own: TextEngine, asked: EngineRequest, whole: dict[int, Answered], *, shared: bool = True) -> None:
    """From every position, some of them in one batch."""
    steps = max(len(answered.token_ids) for answered in whole.values())
    for first in range(0, steps, TOGETHER):
        rests = {at: cut(asked, whole, at, shared=shared) for at in range(first, min(first + TOGETHER, steps))}
        answers = ask(own, *rests.values())
        for position, rest in rests.items():
            check_same(of_choices(answers, rest.request_id), whole, position)


SAMPLING = {
    "greedy": greedy(),
    "greedy to the limit": greedy(20, ignore_eos=True),
    "seeded": drawn(20),
    "seeded and filtered": drawn(20, temperature=1.2, top_p=0.9, top_k=40, min_p=0.01),
    "log-probabilities": drawn(16, logprobs=3),
    "greedy log-probabilities": greedy(logprobs=2),
    "repetition penalty": greedy(20, repetition_penalty=1.5, ignore_eos=True),
    "frequency and presence penalties": drawn(20, frequency_penalty=1.5, presence_penalty=0.7),
    "bias": greedy(16, ignore_eos=True, logit_bias=((9, 4.0), (17, -100.0))),
    "no end before some tokens": greedy(30, min_tokens=18),
    "three choices": drawn(14, n=3, ignore_eos=False),
    "three choices with penalties": drawn(14, n=3, frequency_penalty=1.5, logprobs=1),
}


def cases() -> Iterator[ParameterSet]:
    """Each sampling of both questions, with cached prefixes and without; one of these two, in turn, is ``extended``."""
    for number, (name, sampling) in enumerate(SAMPLING.items()):
        for at, (asked, question) in enumerate({"text": TEXT, "two images": TWO}.items()):
            for shared, cached in ((True, "with cached prefixes"), (False, "with nothing cached")):
                marks = () if shared is ((number + at) % 2 == 0) else pytest.mark.extended
                yield pytest.param(sampling, question, shared, id=f"{name}-{asked}-{cached}", marks=marks)


@pytest.mark.parametrize(("sampling", "question", "shared"), list(cases()))
def test_an_answer_goes_on_from_every_position_as_if_it_had_never_stopped(
    own: TextEngine, sampling: Any, question: Any, shared: bool
) -> None:
    asked = request("whole", question, sampling)
    whole = of_choices(ask(own, asked), "whole")
    check_all(own, asked, whole, shared=shared)


def test_answers_in_a_response_format_go_on_from_every_position(own: TextEngine) -> None:
    sampling = drawn(100, seed=0, n=2, ignore_eos=False, logit_bias=no_white_space())
    asked = request("whole", TWO, sampling, schema=SCHEMA)
    fresh = asked.grammar
    assert fresh is not None
    whole = of_choices(ask(own, replace(asked, grammar=fresh.fork())), "whole")
    assert {answered.reason for answered in whole.values()} == {FinishReason.STOP}
    check_all(own, asked, whole)


def test_choices_go_on_from_different_positions(own: TextEngine) -> None:
    asked = request("whole", ONE, drawn(12, n=4))
    whole = of_choices(ask(own, asked), "whole")
    begun = {0: 5, 2: 0, 3: 11}
    continued = tuple(
        ContinuedChoice(choice, tuple(whole[choice].token_ids[:length])) for choice, length in begun.items()
    )
    rest = of_choices(ask(own, replace(asked, request_id="rest", continued=continued)), "rest")
    assert {choice: answered.token_ids for choice, answered in rest.items()} == {
        choice: whole[choice].token_ids[length:] for choice, length in begun.items()
    }


def test_greedy_answers_go_on_on_every_engine(engine: TextEngine) -> None:
    expected = answer(TWO).token_ids
    asked = request("whole", TWO)
    for position in range(len(expected)):
        rest = replace(
            asked, request_id=f"from {position}", continued=(ContinuedChoice(0, tuple(expected[:position])),)
        )
        assert tuple(ask_one(engine, rest).token_ids) == expected[position:]


def test_a_limit_counts_the_tokens_before(engine: TextEngine) -> None:
    begun = tuple(ask_one(engine, request("whole", TEXT, drawn(12))).token_ids)
    rest = replace(request("rest", TEXT, drawn(20)), continued=(ContinuedChoice(0, begun),))
    answered = ask_one(engine, rest)
    assert (len(answered.token_ids), answered.reason) == (8, FinishReason.LENGTH)


def test_a_response_format_goes_on_on_every_engine(engine: TextEngine) -> None:
    sampling = drawn(100, seed=0, ignore_eos=False, logit_bias=no_white_space())
    asked = request("whole", TWO, sampling, schema=SCHEMA)
    fresh = asked.grammar
    assert fresh is not None
    whole = of_choices(ask(engine, replace(asked, grammar=fresh.fork())), "whole")
    for position in range(1, len(whole[0].token_ids)):
        rest = cut(asked, whole, position)
        token_ids = whole[0].token_ids[:position] + ask_one(engine, rest).token_ids
        json.loads(tokenizer().backend.decode(token_ids, skip_special_tokens=True))


def test_pending_tokens_of_an_answer_that_goes_on_fall_to_nothing(engine: TextEngine) -> None:
    begun = tuple(ask_one(engine, request("whole", TEXT, drawn(8))).token_ids)
    engine.add(replace(request("rest", TEXT, drawn(20)), continued=(ContinuedChoice(0, begun),)))
    seen = [engine.pending_tokens]
    answers: Answers = {}
    while engine.has_work:
        collect(answers, engine.step())
        seen.append(engine.pending_tokens)
    assert seen == sorted(seen, reverse=True)
    assert seen[0] >= len(request("rest", TEXT).token_ids) + 12
    assert len(answers["rest", 0].token_ids) == 12


def test_a_token_outside_of_the_vocabulary_is_refused(engine: TextEngine) -> None:
    for token in (-1, 1 << 30):
        with pytest.raises(InvalidRequest, match="choice 0 has a token outside of the vocabulary"):
            engine.add(replace(request("rest", TEXT), continued=(ContinuedChoice(0, (token,)),)))


def test_tokens_that_a_response_format_does_not_take_are_refused(own: TextEngine) -> None:
    class Refusing:
        def fork(self) -> "Refusing":
            return Refusing()

        def allowed(self) -> bytes:
            return b"\xff" * 1024

        def accept(self, token_id: int) -> None:
            raise InvalidRequest(f"{token_id} does not follow", param="response_format")

    asked = replace(request("rest", TEXT), grammar=Refusing(), continued=(ContinuedChoice(0, (5, 6)),))
    with pytest.raises(InvalidRequest, match="5 does not follow"):
        own.add(asked)
    assert finish(own) == {}
