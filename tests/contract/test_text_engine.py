"""What every text engine promises (``ports.TextEngine``): the same suite over Triptych's own and vLLM."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.contract.text_engine_kit import (
    ENGINES,
    MAX_EMBEDDING_BYTES,
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
from tests.e2e.reference import Question, answer, questions
from triptych.domain.embedding import DType, Tensor, TensorSpec
from triptych.domain.engine import EmbeddingInput, EngineRequest
from triptych.domain.generation import FinishReason
from triptych.domain.queue_position import QueuePosition
from triptych.errors import ContextTooLong, EngineFailure, InvalidRequest, Overloaded, TriptychError
from triptych.ports import TextEngine

pytestmark = pytest.mark.timeout(300)

TEXT = Question("Which is the largest digit?")
ONE = Question("What digits are shown?", ("3_a",))
TWO = Question("What digits are shown?", ("3_a", "7_b"))
TWICE = Question("What digits are shown?", ("5_c", "5_c"))
LONG = 200


@pytest.fixture(scope="module", params=sorted(ENGINES))
def loaded(request: pytest.FixtureRequest) -> Iterator[TextEngine]:
    with opened(request.param) as engine:
        yield engine


@pytest.fixture
def engine(loaded: TextEngine) -> Iterator[TextEngine]:
    yield loaded
    assert_idle(loaded)


def first_embedding(asked: EngineRequest) -> EmbeddingInput:
    return asked.embeddings[0]


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [TEXT, ONE, TWO, TWICE], ids=["text", "one", "two", "same image twice"])
def test_greedy_answers_equal_generate(engine: TextEngine, question: Question) -> None:
    answered = ask_one(engine, request("one", question))
    assert tuple(answered.token_ids) == answer(question).token_ids
    assert answered.reason is FinishReason.STOP


def test_sixteen_mixed_requests_that_arrive_one_by_one_each_equal_generate(engine: TextEngine) -> None:
    asked = {f"r{number}": question for number, question in enumerate(questions((0, 1, 2, 8), 16))}
    answers: Answers = {}
    for name, question in asked.items():
        engine.add(request(name, question))
        collect(answers, engine.step())
    while engine.has_work:
        collect(answers, engine.step())
    for name, question in asked.items():
        assert tuple(answers[name, 0].token_ids) == answer(question).token_ids, question


def test_ignore_eos_continues_to_max_tokens(engine: TextEngine) -> None:
    answered = ask_one(engine, request("one", TWO, greedy(30, ignore_eos=True)))
    assert len(answered.token_ids) == 30
    assert answered.reason is FinishReason.LENGTH


def test_a_stop_id_ends_the_answer_and_is_part_of_it(engine: TextEngine) -> None:
    expected = answer(TEXT).token_ids
    answered = ask_one(engine, request("one", TEXT, greedy(stop_token_ids=(expected[2],))))
    assert tuple(answered.token_ids) == expected[:3]
    assert answered.reason is FinishReason.STOP


def test_no_end_before_min_tokens(engine: TextEngine) -> None:
    shortest = len(answer(TWO).token_ids) + 3
    answered = ask_one(engine, request("one", TWO, greedy(40, min_tokens=shortest)))
    assert len(answered.token_ids) > shortest
    end = answer(TWO).token_ids[-1]
    assert end not in answered.token_ids[:shortest]


# --- sampling --------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_answer_in_any_batch(engine: TextEngine) -> None:
    alone = ask_one(engine, request("one", TWO, drawn()))
    others = [request(f"other-{number}", TEXT, drawn(seed=number)) for number in range(5)]
    among = ask(engine, *others, request("one", TWO, drawn()))["one", 0]
    assert among.token_ids == alone.token_ids
    assert ask_one(engine, request("one", TWO, drawn(seed=8))).token_ids != alone.token_ids


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_every_seed_is_reproducible(engine: TextEngine, seed: int) -> None:
    first, second = (ask_one(engine, request("one", TEXT, drawn(seed=seed))).token_ids for _ in range(2))
    assert first == second


def test_choices_differ_and_are_the_same_for_any_n(engine: TextEngine) -> None:
    of_three = ask(engine, request("one", TWO, drawn(n=3)))
    of_two = ask(engine, request("one", TWO, drawn(n=2)))
    assert sorted(of_three) == [("one", 0), ("one", 1), ("one", 2)]
    drawn_tokens = [tuple(of_three["one", choice].token_ids) for choice in range(3)]
    assert len(set(drawn_tokens)) == 3
    assert [tuple(of_two["one", choice].token_ids) for choice in range(2)] == drawn_tokens[:2]


def test_top_k_of_one_and_the_smallest_top_p_are_greedy(engine: TextEngine) -> None:
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"top_p": 0.0}, {"min_p": 1.0}):
        answered = ask_one(engine, request("one", TWO, drawn(40, ignore_eos=False, **options)))
        assert tuple(answered.token_ids) == answer(TWO).token_ids, options


def test_bias_and_penalties_change_the_choice(engine: TextEngine) -> None:
    plain = ask_one(engine, request("one", TEXT, greedy(20, ignore_eos=True))).token_ids
    banned = ask_one(engine, request("one", TEXT, greedy(20, ignore_eos=True, logit_bias=((plain[0], -100.0),))))
    assert plain[0] not in banned.token_ids
    unpenalized = ask_one(engine, request("one", TEXT, drawn(40))).token_ids
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 5.0}):
        answered = ask_one(engine, request("one", TEXT, drawn(40, **penalty)))
        assert answered.token_ids != unpenalized, penalty


def test_log_probabilities_are_those_of_the_model(engine: TextEngine) -> None:
    plain = ask_one(engine, request("one", TWO, greedy(logprobs=3)))
    warm = ask_one(engine, request("one", TWO, drawn(1, temperature=1.7, logprobs=3, logit_bias=((9, 5.0),))))
    assert len(plain.scores) == len(plain.token_ids)
    for token, scores in zip(plain.token_ids, plain.scores, strict=True):
        assert scores.chosen.token_id == token
        assert scores.chosen == scores.top[0], "greedy"
        assert [scored.logprob for scored in scores.top] == sorted(
            (scored.logprob for scored in scores.top), reverse=True
        )
        assert len(scores.top) == 3
    assert [scored.token_id for scored in warm.scores[0].top] == [scored.token_id for scored in plain.scores[0].top]
    assert np.allclose(
        [scored.logprob for scored in warm.scores[0].top], [scored.logprob for scored in plain.scores[0].top], atol=1e-3
    )
    none = ask_one(engine, request("one", TWO, greedy(logprobs=0)))
    assert [scores.top for scores in none.scores] == [()] * len(none.token_ids)


# --- response formats ------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "digits": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3}
    },
    "required": ["digits"],
    "additionalProperties": False,
}


def test_answers_follow_their_response_formats_beside_free_ones(engine: TextEngine) -> None:
    sampling = drawn(100, n=2, ignore_eos=False, logit_bias=no_white_space())
    asked = [request(f"r{seed}", TWO, replace(sampling, seed=seed), schema=SCHEMA) for seed in range(3)]
    answers = ask(engine, *asked, request("free", TWO))
    assert tuple(answers["free", 0].token_ids) == answer(TWO).token_ids
    for seed in range(3):
        for choice in range(2):
            answered = answers[f"r{seed}", choice]
            assert answered.reason is FinishReason.STOP, answered.text
            text = tokenizer().backend.decode(answered.token_ids, skip_special_tokens=True)
            assert len(json.loads(text)["digits"]) <= 3


def test_a_response_format_outweighs_min_tokens(engine: TextEngine) -> None:
    """Once the format allows nothing but the end, the answer ends."""
    constant = {"const": 7}
    answered = ask_one(engine, request("one", TWO, greedy(40, min_tokens=30), schema=constant))
    assert answered.reason is FinishReason.STOP
    assert json.loads(tokenizer().backend.decode(answered.token_ids, skip_special_tokens=True)) == 7


class _Failing:
    """A grammar that becomes too complex."""

    def __init__(self, after: int) -> None:
        self.left = after

    def fork(self) -> "_Failing":
        return _Failing(self.left)

    def allowed(self) -> bytes:
        if not self.left:
            raise InvalidRequest("too complex", param="response_format")
        return b"\xff" * 1024

    def accept(self, token_id: int) -> None:
        self.left -= 1


def test_a_grammar_that_fails_ends_its_request_only(engine: TextEngine) -> None:
    failing = replace(request("failing", TWO, greedy(40, ignore_eos=True)), grammar=_Failing(3))
    answers = ask(engine, failing, request("other", TWO))
    error = answers["failing", 0].error
    assert isinstance(error, InvalidRequest)
    assert error.param == "response_format"
    assert tuple(answers["other", 0].token_ids) == answer(TWO).token_ids


# --- cancellation, order and memory ----------------------------------------------------------------------------------


def test_cancelled_requests_and_choices_free_their_memory_at_once(engine: TextEngine) -> None:
    engine.add(request("gone", TWO, drawn(LONG)))
    engine.add(request("some", TWO, drawn(20, n=3)))
    answers: Answers = {}
    for _ in range(4):
        collect(answers, engine.step())
    engine.cancel("gone")
    engine.cancel("some", 1)
    engine.cancel("some", 1)
    engine.cancel("unknown")
    while engine.has_work:
        outputs = engine.step()
        assert not [output for output in outputs if output.request_id == "gone" or output.choice == 1]
        collect(answers, outputs)
    assert [len(answers["some", choice].token_ids) for choice in (0, 2)] == [20, 20]


def test_a_request_that_was_never_started_can_be_cancelled(engine: TextEngine) -> None:
    engine.add(request("one", TWO))
    assert engine.waiting == {"one"}
    assert engine.pending_tokens == len(request("one", TWO).token_ids) + TWO.max_tokens
    engine.cancel("one")


def test_an_id_that_ended_may_come_again_and_a_running_one_may_not(engine: TextEngine) -> None:
    engine.add(request("one", TEXT))
    with pytest.raises(InvalidRequest, match="already"):
        engine.add(request("one", TEXT))
    finish(engine)
    assert tuple(ask_one(engine, request("one", TWO)).token_ids) == answer(TWO).token_ids


def test_pending_tokens_fall_to_nothing(engine: TextEngine) -> None:
    asked = request("one", TWO, greedy(10, ignore_eos=True))
    engine.add(asked)
    seen = [engine.pending_tokens]
    while engine.has_work:
        engine.step()
        seen.append(engine.pending_tokens)
    assert seen[0] == len(asked.token_ids) + 10
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 0


def test_the_lower_priority_number_starts_first(engine: TextEngine) -> None:
    """More requests than can run at once: the last to come goes first."""
    many = [
        request(f"r{number}", TEXT, drawn(8), queue_position=QueuePosition(5, 0.0, number)) for number in range(260)
    ]
    urgent = request("urgent", TEXT, drawn(8), queue_position=QueuePosition(-1, 0.0, len(many)))
    for asked in (*many, urgent):
        engine.add(asked)
    engine.step()
    engine.step()
    assert "urgent" not in engine.waiting
    assert len(engine.waiting) > 100
    for asked in (*many, urgent):
        engine.cancel(asked.request_id)


# --- prefixes --------------------------------------------------------------------------------------------------------


def test_images_of_equal_size_share_no_prefix_and_equal_ones_do(engine: TextEngine) -> None:
    """Eight images, so that the prompt has several blocks."""
    names = tuple(f"{digit}_a" for digit in range(8))
    question = Question("What digits are shown?", names)
    first = ask_one(engine, request("first", question, tenant_salt=b"prefixes"))
    hits = engine.prefix_hits_tokens
    other = Question(question.text, tuple(f"{digit}_b" for digit in range(8)))
    answered = ask_one(engine, request("other", other, tenant_salt=b"prefixes"))
    assert tuple(answered.token_ids) == answer(other).token_ids
    assert engine.prefix_hits_tokens == hits, "the first block has an image already"
    hits = engine.prefix_hits_tokens
    again = ask_one(engine, request("again", question, tenant_salt=b"prefixes"))
    assert again.token_ids == first.token_ids
    assert (first.cached_tokens, again.cached_tokens) == (0, engine.prefix_hits_tokens - hits)
    assert again.cached_tokens >= 64
    assert engine.prefix_queries_tokens >= engine.prefix_hits_tokens


def test_tenants_and_items_without_identity_share_no_prefix(engine: TextEngine) -> None:
    question = Question("What digits are shown?", tuple(f"{digit}_c" for digit in range(8)))
    ask_one(engine, request("first", question, tenant_salt=b"a"))
    hits = engine.prefix_hits_tokens
    ask_one(engine, request("other", question, tenant_salt=b"b"))
    assert engine.prefix_hits_tokens == hits
    for name in ("unknown", "unknown too"):
        asked = request(name, question, tenant_salt=b"a")
        nameless = replace(asked, embeddings=tuple(replace(embedding, key=b"") for embedding in asked.embeddings))
        assert tuple(ask_one(engine, nameless).token_ids) == answer(question).token_ids
    assert engine.prefix_hits_tokens == hits


# --- what can never run ----------------------------------------------------------------------------------------------


def refused(engine: TextEngine, asked: EngineRequest, error: type[TriptychError], text: str) -> None:
    with pytest.raises(error, match=text):
        engine.add(asked)
    assert_idle(engine)
    assert tuple(ask_one(engine, request("next", TWO)).token_ids) == answer(TWO).token_ids


def test_an_answer_beyond_the_context_is_refused(engine: TextEngine) -> None:
    context = engine.model.context_length
    asked = request("one", TEXT, greedy(context))
    said = f"a prompt of {len(asked.token_ids)} tokens and {context} tokens to generate exceed the context of {context}"
    refused(engine, asked, ContextTooLong, said)


def test_an_answer_without_a_length_is_refused(engine: TextEngine) -> None:
    asked = request("one", TEXT)
    endless = replace(asked, sampling=replace(asked.sampling, max_tokens=None))
    refused(engine, endless, InvalidRequest, "max_tokens is None, at least 1 is needed")


def test_a_prompt_without_tokens_is_refused(engine: TextEngine) -> None:
    refused(engine, replace(request("one", TEXT), token_ids=()), InvalidRequest, "the prompt is empty")


@pytest.mark.parametrize("options", [{"logit_bias": ((1 << 20, 1.0),)}, {"stop_token_ids": (1 << 20,)}])
def test_tokens_outside_of_the_vocabulary_are_refused(engine: TextEngine, options: dict[str, Any]) -> None:
    refused(engine, request("one", TEXT, greedy(**options)), InvalidRequest, "outside of the vocabulary")


def test_a_prompt_outside_of_the_vocabulary_is_refused(engine: TextEngine) -> None:
    asked = request("one", TEXT)
    refused(engine, replace(asked, token_ids=(*asked.token_ids, 1 << 20)), InvalidRequest, "outside of the vocabulary")


def changed(asked: EngineRequest, **changes: object) -> EngineRequest:
    return replace(asked, embeddings=(replace(asked.embeddings[0], **changes), *asked.embeddings[1:]))  # type: ignore[arg-type]


def tensor_of(values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> dict[str, Tensor]:
    return {"embeds": Tensor(TensorSpec("embeds", DType.F32, values.shape), memoryview(values.tobytes()))}


def test_an_embedding_of_another_width_is_refused(engine: TextEngine) -> None:
    asked = request("one", TWO)
    given = first_embedding(asked)
    width = engine.model.hidden_size + 1
    assert not engine.accepts(given.tokens, [TensorSpec("embeds", DType.F32, (given.tokens, width))])
    other = tensor_of(np.zeros((given.tokens, width), np.float32))
    refused(engine, changed(asked, tensors=other), InvalidRequest, "not of the form")


def test_an_embedding_of_another_length_is_refused(engine: TextEngine) -> None:
    asked = request("one", TWO)
    given = first_embedding(asked)
    other = tensor_of(np.zeros((given.tokens - 1, engine.model.hidden_size), np.float32))
    refused(engine, changed(asked, tensors=other), InvalidRequest, "not of the form")


def test_an_embedding_that_is_not_finite_fails_its_request_only(engine: TextEngine) -> None:
    asked = request("one", TWO)
    values = np.zeros((first_embedding(asked).tokens, engine.model.hidden_size), np.float32)
    values[1, 2] = np.nan
    refused(engine, changed(asked, tensors=tensor_of(values)), EngineFailure, "not finite")


def test_a_placeholder_without_an_item_is_refused(engine: TextEngine) -> None:
    asked = request("one", TWO)
    refused(engine, replace(asked, embeddings=asked.embeddings[:1]), InvalidRequest, "has no item")
    refused(engine, replace(asked, embeddings=asked.embeddings[:1] * 2), InvalidRequest, "overlaps")


def test_an_item_where_the_prompt_has_none_is_refused(engine: TextEngine) -> None:
    asked = request("one", TWO)
    tokens = first_embedding(asked).tokens
    misplaced = replace(asked, embeddings=(*asked.embeddings, replace(first_embedding(asked), start=0)))
    refused(engine, misplaced, InvalidRequest, f"there is no item of {tokens} tokens at position 0 of the prompt")


def test_items_may_come_in_any_order(engine: TextEngine) -> None:
    asked = request("one", TWO)
    turned = replace(asked, embeddings=tuple(reversed(asked.embeddings)))
    assert tuple(ask_one(engine, turned).token_ids) == answer(TWO).token_ids


def test_embeddings_beyond_the_memory_for_them_are_refused(engine: TextEngine) -> None:
    """The memory holds those of two such requests."""
    nbytes = sum(tensor.spec.nbytes for tensor in first_embedding(request("one", ONE)).tensors.values())
    many = Question("What?", ("1_a",) * (MAX_EMBEDDING_BYTES // nbytes // 2))
    engine.add(request("first", many, greedy(2)))
    engine.add(request("second", many, greedy(2)))
    with pytest.raises(Overloaded, match="bytes of embeddings"):
        engine.add(request("third", many, greedy(2)))
    engine.cancel("first")
    engine.add(request("third", many, greedy(2)))
    answers = finish(engine)
    assert {name for name, _ in answers} == {"second", "third"}
