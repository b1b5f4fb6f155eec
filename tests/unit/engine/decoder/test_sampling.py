"""Choosing tokens: by the definitions, and as transformers' own processors do it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as untyped_hf

from triptych.domain.sampling import SamplingParams
from triptych.engine.decoder.sampling import Logits, Sampler, candidates, choose, uniform
from triptych.ports import TokenGrammar

hf: Any = untyped_hf

LOGITS = np.log(np.array([0.5, 0.05, 0.3, 0.15], dtype=np.float32))


def drawn(sampling: SamplingParams, logits: npt.NDArray[np.float32] = LOGITS, draws: int = 400) -> list[float]:
    """How often each token comes, over many positions."""
    tokens = [choose(logits, sampling, position) for position in range(draws)]
    return [tokens.count(token) / draws for token in range(len(logits))]


def test_temperature_zero_is_greedy() -> None:
    assert drawn(SamplingParams(temperature=0)) == [1, 0, 0, 0]


def test_draws_follow_the_distribution() -> None:
    assert drawn(SamplingParams(seed=1), draws=4000) == pytest.approx([0.5, 0.05, 0.3, 0.15], abs=0.03)


def test_a_low_temperature_is_nearly_greedy_and_never_overflows() -> None:
    assert drawn(SamplingParams(temperature=1e-6, seed=1)) == [1, 0, 0, 0]
    assert choose(np.array([3e38, -3e38], dtype=np.float32), SamplingParams(temperature=1e-6, seed=1), 0) == 0


@pytest.mark.parametrize(
    ("top_k", "kept"), [(0, {0, 1, 2, 3}), (1, {0}), (2, {0, 2}), (3, {0, 2, 3}), (99, {0, 1, 2, 3})]
)
def test_top_k_keeps_the_most_likely(top_k: int, kept: set[int]) -> None:
    shares = drawn(SamplingParams(top_k=top_k, seed=1))
    assert {token for token, share in enumerate(shares) if share} == kept


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1.0, {0, 1, 2, 3}), (0.96, {0, 1, 2, 3}), (0.9, {0, 2, 3}), (0.79, {0, 2}), (0.4, {0}), (1e-9, {0}), (0.0, {0})],
)
def test_top_p_keeps_the_smallest_set_that_holds_it(top_p: float, kept: set[int]) -> None:
    shares = drawn(SamplingParams(top_p=top_p, seed=1))
    assert {token for token, share in enumerate(shares) if share} == kept


def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    # Of the two most likely (0.5 and 0.3) the first holds 0.625.
    assert drawn(SamplingParams(top_k=2, top_p=0.6, seed=1)) == [1, 0, 0, 0]


def test_ties_go_to_the_lower_id() -> None:
    equal = np.zeros(4, dtype=np.float32)
    assert choose(equal, SamplingParams(temperature=0), 0) == 0
    assert drawn(SamplingParams(top_k=1, seed=1), equal) == [1, 0, 0, 0]


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_draws_depend_on_seed_and_position_alone(seed: int, position: int) -> None:
    value = uniform(seed, 0, position)
    assert value == uniform(seed, 0, position)
    assert 0 <= value < 1
    assert value != uniform(seed, 0, position + 1)
    assert value != uniform(seed + 1, 0, position)


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20),
    st.floats(0, 2),
    st.floats(0, 1),
    st.integers(0, 25),
    st.integers(0, 1000),
)
def test_there_is_always_a_token(logits: list[float], temperature: float, top_p: float, top_k: int, seed: int) -> None:
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    assert 0 <= choose(np.array(logits, dtype=np.float32), sampling, 3) < len(logits)


def test_min_p_is_a_fraction_of_the_likeliest() -> None:
    shares = drawn(SamplingParams(min_p=0.2, seed=1))  # 0.2 of 0.5 is 0.1
    assert {token for token, share in enumerate(shares) if share} == {0, 2, 3}
    assert drawn(SamplingParams(min_p=1.0, seed=1)) == [1, 0, 0, 0]


def test_choices_of_one_seed_draw_apart() -> None:
    answers = {
        tuple(choose(LOGITS, SamplingParams(seed=1), position, choice) for position in range(40)) for choice in range(8)
    }
    assert len(answers) == 8


# --- against transformers' own processors ----------------------------------------------------------------------------


def warped(logits: Logits, *processors: Any) -> npt.NDArray[np.float64]:
    """The distribution that transformers would draw from."""
    scores = torch.from_numpy(logits[None].copy())
    for processor in processors:
        scores = processor(torch.zeros((1, 0), dtype=torch.long), scores)
    return np.asarray(scores[0].double().softmax(-1).numpy())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("fields", "processors"),
    [
        ({}, []),
        ({"temperature": 0.7}, [hf.TemperatureLogitsWarper(0.7)]),
        ({"top_k": 30}, [hf.TopKLogitsWarper(30)]),
        ({"top_p": 0.8}, [hf.TopPLogitsWarper(0.8)]),
        ({"min_p": 0.05}, [hf.MinPLogitsWarper(0.05)]),
        (
            {"temperature": 1.3, "min_p": 0.01, "top_k": 500, "top_p": 0.9},
            [
                hf.TemperatureLogitsWarper(1.3),
                hf.MinPLogitsWarper(0.01),
                hf.TopKLogitsWarper(500),
                hf.TopPLogitsWarper(0.9),
            ],
        ),
    ],
)
def test_what_may_be_drawn_is_what_transformers_would_draw_from(
    fields: dict[str, Any], processors: list[Any], seed: int
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(3000) * 3).astype(np.float32)
    tokens, weights = candidates(logits, SamplingParams(**fields))
    expected = warped(logits, *processors)
    assert tokens.tolist() == np.flatnonzero(expected).tolist()
    assert weights / weights.sum() == pytest.approx(expected[tokens], rel=1e-4)


def test_a_nucleus_of_most_of_a_large_vocabulary_is_found() -> None:
    logits = (np.random.default_rng(1).standard_normal(40_000) * 0.1).astype(np.float32)
    for top_p in (0.02, 0.3, 0.95):
        tokens, _ = candidates(logits, SamplingParams(top_p=top_p))
        assert tokens.tolist() == np.flatnonzero(warped(logits, hf.TopPLogitsWarper(top_p))).tolist()


# --- what is done to the logits --------------------------------------------------------------------------------------

VOCABULARY = 50
RAW = np.random.default_rng(5).standard_normal(VOCABULARY).astype(np.float32)
PROMPT, ANSWER = [3, 4, 4, 9], [4, 7, 7, 7]


def chosen(sampling: SamplingParams, answer: Sequence[int] = (), *, grammar: TokenGrammar | None = None) -> int:
    sampler = Sampler(sampling, prompt=PROMPT, eos_ids=frozenset({1}), grammar=grammar)
    before = RAW.copy()
    token, _ = sampler.choose(RAW, answer, len(PROMPT) + len(answer))
    assert (before == RAW).all()
    return token


def reference(sampling: SamplingParams, answer: Sequence[int]) -> Logits:
    """By the definitions, one token at a time."""
    logits = RAW.copy()
    for token, bias in sampling.logit_bias:
        logits[token] += np.float32(bias)
    ids = torch.tensor([[*PROMPT, *answer]])
    scores = torch.from_numpy(logits[None])
    logits = hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)[0].numpy().copy()
    for token in set(answer):
        logits[token] -= answer.count(token) * sampling.frequency_penalty + sampling.presence_penalty
    return np.asarray(logits)


@given(
    st.floats(0.5, 2),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.floats(-5, 5)), max_size=4, unique_by=lambda entry: entry[0]),
    st.lists(st.integers(0, VOCABULARY - 1), max_size=12),
)
def test_penalties_and_bias_are_as_defined(
    repetition: float, frequency: float, presence: float, bias: list[tuple[int, float]], answer: list[int]
) -> None:
    sampling = SamplingParams(
        temperature=0,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=tuple(bias),
    )
    logits = reference(sampling, answer)
    assert logits[chosen(sampling, answer)] == pytest.approx(logits.max(), abs=1e-5)


def test_a_large_bias_decides() -> None:
    assert chosen(SamplingParams(temperature=0, logit_bias=((17, 100.0),))) == 17
    best = int(RAW.argmax())
    assert chosen(SamplingParams(temperature=0, logit_bias=((best, -100.0),))) == int(np.argsort(RAW)[-2])


def test_no_end_comes_before_min_tokens() -> None:
    ends = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(8,), logit_bias=((1, 100.0), (8, 90.0)))
    assert chosen(ends, [5]) not in (1, 8)
    assert chosen(ends, [5, 6]) == 1
    assert chosen(replace(ends, ignore_eos=True), [5]) == 1  # which is then no end
    sampler = Sampler(ends, prompt=PROMPT, eos_ids=frozenset({1}))
    assert [sampler.is_end(token) for token in (1, 8, 9)] == [True, True, False]


# --- grammar ---------------------------------------------------------------------------------------------------------


class Only:
    """A ``ports.TokenGrammar`` that always allows the same tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.accepted: list[int] = []

    def fork(self) -> "Only":
        return Only(*self.tokens)

    def allowed(self) -> bytes:
        return sum(1 << token for token in self.tokens).to_bytes(4, "little")  # reaches token 31 of 50

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_the_grammar_allows_is_chosen(temperature: float) -> None:
    grammar = Only(11, 23)
    sampling = SamplingParams(temperature=temperature, seed=1, logit_bias=((40, 100.0),))
    tokens = [chosen(sampling, [0] * length, grammar=grammar) for length in range(30)]
    assert set(tokens) <= {11, 23}
    assert grammar.accepted == tokens


def test_a_grammar_that_has_come_to_its_end_goes_before_min_tokens() -> None:
    assert chosen(SamplingParams(temperature=0, min_tokens=5), grammar=Only(1)) == 1
    assert chosen(SamplingParams(temperature=0, min_tokens=5), grammar=Only(1, 6)) == 6


def test_a_grammar_that_leaves_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token"):
        chosen(SamplingParams(temperature=0), grammar=Only())


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alternatives", [0, 1, 20, 60])
def test_log_probabilities_are_those_of_the_raw_logits(alternatives: int) -> None:
    sampling = SamplingParams(temperature=0.5, seed=3, logprobs=alternatives, logit_bias=((17, 100.0),))
    sampler = Sampler(sampling, prompt=PROMPT, eos_ids=frozenset())
    token, scores = sampler.choose(RAW, (), 4)
    expected = torch.from_numpy(RAW).double().log_softmax(-1)
    assert scores is not None
    assert (token, scores.chosen.token_id) == (17, 17)
    assert scores.chosen.logprob == pytest.approx(float(expected[17]))
    best = expected.topk(min(alternatives, VOCABULARY))
    assert [one.token_id for one in scores.top] == best.indices.tolist()
    assert [one.logprob for one in scores.top] == pytest.approx(best.values.tolist())


def test_log_probabilities_are_told_only_when_asked_for() -> None:
    sampler = Sampler(SamplingParams(temperature=0), prompt=PROMPT, eos_ids=frozenset())
    assert sampler.choose(RAW, (), 4) == (int(RAW.argmax()), None)
