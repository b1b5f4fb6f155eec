"""Batched sampling, against the reference implementation, definitions, and transformers' own processors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as untyped_hf

from tests.examples import examples
from tests.unit.engine.decoder.reference_sampling import Logits, Sampler, candidates, choose
from tests.unit.engine.decoder.reference_sampling import uniform as reference_uniform
from triptych.domain.bounds import Between
from triptych.domain.sampling import PARAMETERS, SamplingParams
from triptych.engine.decoder.sampling import Sampled, sample, uniform
from triptych.engine.decoder.sequence import EngineSequence
from triptych.engine.families.adapters import PromptPlan
from triptych.ports import TokenGrammar

hf: Any = untyped_hf

LOGITS = np.log(np.array([0.5, 0.05, 0.3, 0.15], dtype=np.float32))


def sequence(
    sampling: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int] = (),
    *,
    choice: int = 0,
    eos_ids: frozenset[int] = frozenset(),
    grammar: TokenGrammar | None = None,
) -> EngineSequence:
    return EngineSequence(
        request_id="r",
        choice=choice,
        token_ids=[*prompt, *answer],
        prompt_tokens=len(prompt),
        max_tokens=1000,
        plan=PromptPlan(),
        sampling=sampling,
        end_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_ids),
        prompt_ids=np.unique(np.array(prompt, dtype=np.intp)),
        grammar=grammar,
    )


def drawn(sampling: SamplingParams, logits: npt.NDArray[np.float32] = LOGITS, draws: int = 400) -> list[float]:
    """Token frequencies over many positions in one batch; equal to the reference's."""
    rows = torch.from_numpy(np.tile(logits, (draws, 1)))
    sampled = sample(rows, [sequence(sampling, [0] * position) for position in range(draws)])
    tokens = [scored.token_id for scored in sampled if isinstance(scored, Sampled)]
    assert tokens == [choose(logits, sampling, position) for position in range(draws)]
    return [tokens.count(token) / draws for token in range(len(logits))]


def test_temperature_zero_is_greedy() -> None:
    assert drawn(SamplingParams(temperature=0)) == [1, 0, 0, 0]


def test_samples_follow_the_distribution() -> None:
    assert drawn(SamplingParams(seed=1), draws=4000) == pytest.approx([0.5, 0.05, 0.3, 0.15], abs=0.03)


def test_a_low_temperature_is_nearly_greedy_without_overflow() -> None:
    assert drawn(SamplingParams(temperature=1e-6, seed=1)) == [1, 0, 0, 0]
    assert choose(np.array([3e38, -3e38], dtype=np.float32), SamplingParams(temperature=1e-6, seed=1), 0) == 0


@pytest.mark.parametrize(
    ("top_k", "kept"),
    [(-1, {0, 1, 2, 3}), (0, {0, 1, 2, 3}), (1, {0}), (2, {0, 2}), (3, {0, 2, 3}), (99, {0, 1, 2, 3})],
)
def test_top_k_keeps_the_most_likely(top_k: int, kept: set[int]) -> None:
    shares = drawn(SamplingParams(top_k=top_k, seed=1))
    assert {token for token, share in enumerate(shares) if share} == kept


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1.0, {0, 1, 2, 3}), (0.96, {0, 1, 2, 3}), (0.9, {0, 2, 3}), (0.79, {0, 2}), (0.4, {0}), (1e-9, {0}), (0.0, {0})],
)
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float, kept: set[int]) -> None:
    shares = drawn(SamplingParams(top_p=top_p, seed=1))
    assert {token for token, share in enumerate(shares) if share} == kept


def test_top_p_applies_after_top_k() -> None:
    # Of the two most likely (0.5 and 0.3) the first holds 0.625.
    assert drawn(SamplingParams(top_k=2, top_p=0.6, seed=1)) == [1, 0, 0, 0]


def test_ties_go_to_the_lower_id() -> None:
    equal = np.zeros(4, dtype=np.float32)
    assert choose(equal, SamplingParams(temperature=0), 0) == 0
    assert drawn(SamplingParams(top_k=1, seed=1), equal) == [1, 0, 0, 0]


@given(st.lists(st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 128), st.integers(0, 2**40)), min_size=1))
def test_samples_depend_on_seed_choice_and_position_only(draws: list[tuple[int, int, int]]) -> None:
    numbers = uniform(*zip(*draws, strict=True))
    assert numbers.tolist() == [reference_uniform(*draw) for draw in draws]
    assert all(0 <= number < 1 for number in numbers)
    for seed, choice, position in draws:
        others = uniform(
            [seed, seed + 1, seed, seed], [choice, choice, choice + 1, choice], [position] * 3 + [position + 1]
        )
        assert len(set(others.tolist())) == 4


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20),
    st.floats(0, 2),
    st.floats(0, 1),
    st.integers(0, 25),
    st.integers(0, 1000),
)
@example([0.0, -1.0], 2.3e-309, 0.0, 0, 0)
def test_at_least_one_token_remains(
    logits: list[float], temperature: float, top_p: float, top_k: int, seed: int
) -> None:
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    assert 0 <= choose(np.array(logits, dtype=np.float32), sampling, 3) < len(logits)


def test_min_p_is_a_fraction_of_the_likeliest() -> None:
    shares = drawn(SamplingParams(min_p=0.2, seed=1))  # 0.2 of 0.5 is 0.1
    assert {token for token, share in enumerate(shares) if share} == {0, 2, 3}
    assert drawn(SamplingParams(min_p=1.0, seed=1)) == [1, 0, 0, 0]


def test_choices_of_one_seed_are_sampled_independently() -> None:
    sequences = [
        sequence(SamplingParams(seed=1), [0] * position, choice=choice) for choice in range(8) for position in range(40)
    ]
    sampled = sample(torch.from_numpy(np.tile(LOGITS, (len(sequences), 1))), sequences)
    answers = [tuple(sampled[at : at + 40]) for at in range(0, len(sampled), 40)]
    assert len({str(answer) for answer in answers}) == 8


# --- against transformers' own processors ----------------------------------------------------------------------------


def warped(logits: Logits, *processors: Any) -> npt.NDArray[np.float64]:
    """The distribution that transformers would sample from."""
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
def test_the_candidates_equal_those_of_transformers(fields: dict[str, Any], processors: list[Any], seed: int) -> None:
    logits = (np.random.default_rng(seed).standard_normal(3000) * 3).astype(np.float32)
    tokens, weights = candidates(logits, SamplingParams(**fields))
    expected = warped(logits, *processors)
    assert tokens.tolist() == np.flatnonzero(expected).tolist()
    assert weights / weights.sum() == pytest.approx(expected[tokens], rel=1e-4)


def test_a_nucleus_may_hold_most_of_a_large_vocabulary() -> None:
    logits = (np.random.default_rng(1).standard_normal(40_000) * 0.1).astype(np.float32)
    for top_p in (0.02, 0.3, 0.95):
        tokens, _ = candidates(logits, SamplingParams(top_p=top_p))
        assert tokens.tolist() == np.flatnonzero(warped(logits, hf.TopPLogitsWarper(top_p))).tolist()


# --- logits processors -----------------------------------------------------------------------------------------------

VOCABULARY = 50
RAW = np.random.default_rng(5).standard_normal(VOCABULARY).astype(np.float32)
PROMPT, ANSWER = [3, 4, 4, 9], [4, 7, 7, 7]


def chosen(
    sampling: SamplingParams, answer: Sequence[int] = (), *, grammar: Callable[[], TokenGrammar] | None = None
) -> int:
    """The token after an answer, sampled alone; equal to the reference's."""
    ours, theirs = (None, None) if grammar is None else (grammar(), grammar())
    asked = sequence(sampling, PROMPT, answer, eos_ids=frozenset({1}), grammar=ours)
    (sampled,) = sample(torch.from_numpy(RAW[None].copy()), [asked])
    if isinstance(sampled, Exception):
        raise sampled
    token, _ = Sampler(sampling, prompt=PROMPT, eos_ids=frozenset({1}), grammar=theirs).choose(
        RAW, answer, len(PROMPT) + len(answer)
    )
    assert sampled.token_id == token
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_the_smallest_repetition_penalty_a_token_of_the_prompt_or_the_answer_is_chosen(temperature: float) -> None:
    bound = PARAMETERS["repetition_penalty"].bound
    assert isinstance(bound, Between)
    assert bound.fault("it", bound.low) is None
    sampling = SamplingParams(temperature=temperature, seed=1, repetition_penalty=bound.low)
    assert chosen(sampling, ANSWER) in {*PROMPT, *ANSWER}


def test_a_large_bias_determines_the_token() -> None:
    assert chosen(SamplingParams(temperature=0, logit_bias=((17, 100.0),))) == 17
    best = int(RAW.argmax())
    assert chosen(SamplingParams(temperature=0, logit_bias=((best, -100.0),))) == int(np.argsort(RAW)[-2])


def test_end_tokens_are_forbidden_before_min_tokens() -> None:
    ends = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(8,), logit_bias=((1, 100.0), (8, 90.0)))
    assert chosen(ends, [5]) not in (1, 8)
    assert chosen(ends, [5, 6]) == 1
    assert chosen(replace(ends, ignore_eos=True), [5]) == 1  # which then does not end the answer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_is_ignored_if_every_token_ends_the_answer(temperature: float) -> None:
    every = SamplingParams(temperature=temperature, seed=1, min_tokens=2, stop_token_ids=tuple(range(len(RAW))))
    without = replace(every, min_tokens=0)
    assert chosen(every, []) == chosen(without, [])


# --- grammar ---------------------------------------------------------------------------------------------------------


class Only:
    """A ``ports.TokenGrammar`` that always allows the same tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.accepted: list[int] = []

    def fork(self) -> Self:
        return type(self)(*self.tokens)

    def allowed(self) -> bytes:
        return sum(1 << token for token in self.tokens).to_bytes(4, "little")  # reaches token 31 of 50

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_tokens_allowed_by_the_grammar_are_chosen(temperature: float) -> None:
    grammar = Only(11, 23)
    sampling = SamplingParams(temperature=temperature, seed=1, logit_bias=((40, 100.0),))
    tokens = [chosen(sampling, [0] * length, grammar=lambda: grammar) for length in range(30)]
    assert set(tokens) <= {11, 23}
    assert grammar.accepted == [token for token in tokens for _ in range(2)], "once by the batch, once by the reference"


def test_a_finished_grammar_overrides_min_tokens() -> None:
    assert chosen(SamplingParams(temperature=0, min_tokens=5), grammar=lambda: Only(1)) == 1
    assert chosen(SamplingParams(temperature=0, min_tokens=5), grammar=lambda: Only(1, 6)) == 6


def test_a_grammar_without_allowed_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token"):
        chosen(SamplingParams(temperature=0), grammar=Only)


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alternatives", [0, 1, 20, 60])
def test_log_probabilities_are_those_of_the_raw_logits(alternatives: int) -> None:
    sampling = SamplingParams(temperature=0.5, seed=3, logprobs=alternatives, logit_bias=((17, 100.0),))
    (sampled,) = sample(torch.from_numpy(RAW[None].copy()), [sequence(sampling, PROMPT)])
    assert isinstance(sampled, Sampled)
    token, scores = sampled.token_id, sampled.scores
    expected = torch.from_numpy(RAW).double().log_softmax(-1)
    assert scores is not None
    assert (token, scores.chosen.token_id) == (17, 17)
    assert scores.chosen.logprob == pytest.approx(float(expected[17]))
    best = expected.topk(min(alternatives, VOCABULARY))
    assert [scored.token_id for scored in scores.top] == best.indices.tolist()
    assert [scored.logprob for scored in scores.top] == pytest.approx(best.values.tolist())


def test_logprobs_are_returned_only_on_request() -> None:
    rows = torch.from_numpy(np.tile(RAW, (2, 1)))
    greedy = SamplingParams(temperature=0)
    plain, scored = sample(rows, [sequence(greedy, PROMPT), sequence(replace(greedy, logprobs=0), PROMPT)])
    assert isinstance(plain, Sampled)
    assert isinstance(scored, Sampled)
    assert plain == Sampled(int(RAW.argmax()), None)
    assert scored.scores is not None


# --- a batch equals its rows ------------------------------------------------------------------------------------------


class Allowing(Only):
    """Allows a set of tokens by a mask over the whole vocabulary, and fails on demand."""

    def __init__(self, *tokens: int, error: Exception | None = None) -> None:
        super().__init__(*tokens)
        self.error = error

    def allowed(self) -> bytes:
        if self.error is not None:
            raise self.error
        return sum(1 << token for token in self.tokens).to_bytes(40, "little")


SIZE = 300
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 64, 299, 300, 10_000]),
    min_p=st.sampled_from([0.0, 1e-3, 0.1, 0.9, 1.0]),
    seed=st.none() | st.integers(-5, 2**64),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.sampled_from([(), (7,), (7, 9)]),
    ignore_eos=st.booleans(),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    frequency_penalty=st.sampled_from([0.0, -1.5, 0.4]),
    presence_penalty=st.sampled_from([0.0, -0.7, 2.0]),
    logit_bias=st.sampled_from([(), ((3, 5.0),), ((3, -100.0), (299, 100.0))]),
    logprobs=st.sampled_from([None, 0, 1, 20]),
)
rows = st.tuples(
    params,
    st.lists(st.integers(0, SIZE - 1), max_size=8),
    st.lists(st.integers(0, SIZE - 1), max_size=8),
    st.integers(0, 3),
    st.none() | st.sets(st.integers(0, SIZE - 1), max_size=5),
    st.sampled_from(["normal", "peaked", "flat", "equal", "coarse"]),
)


def logits_of(kind: str, generator: np.random.Generator) -> Logits:
    values = generator.standard_normal(SIZE) * {"peaked": 12, "flat": 0.01, "equal": 0}.get(kind, 3)
    return (np.round(values) if kind == "coarse" else values).astype(np.float32)  # coarse: many are equal


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(st.lists(rows, min_size=1, max_size=12), st.integers(0, 2**32))
def test_a_mixed_batch_equals_its_rows_sampled_alone(
    batch: list[tuple[SamplingParams, list[int], list[int], int, set[int] | None, str]], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    logits = np.stack([logits_of(kind, generator) for *_, kind in batch])
    eos_ids = frozenset({1, 2})
    sequences, expected = list[EngineSequence](), list[Any]()
    for row, (sampling, prompt, answer, choice, allowed, _) in zip(logits, batch, strict=True):
        ours, theirs = (None if allowed is None else Allowing(*allowed) for _ in range(2))
        sequences.append(sequence(sampling, prompt, answer, choice=choice, eos_ids=eos_ids, grammar=ours))
        reference = Sampler(sampling, prompt=prompt, eos_ids=eos_ids, choice=choice, grammar=theirs)
        try:
            expected.append(reference.choose(row, answer, len(prompt) + len(answer)))
        except ValueError as error:
            expected.append(error)
    for scored, wanted in zip(sample(torch.from_numpy(logits), sequences), expected, strict=True):
        if isinstance(wanted, Exception):
            assert isinstance(scored, ValueError)
            assert str(scored) == str(wanted)
            continue
        assert isinstance(scored, Sampled)
        token, scores = wanted
        assert scored.token_id == token
        assert (scored.scores is None) == (scores is None)
        if scored.scores is not None:
            assert [scored_token.token_id for scored_token in scored.scores.top] == [
                scored_token.token_id for scored_token in scores.top
            ]
            told = [scored_token.logprob for scored_token in (scored.scores.chosen, *scored.scores.top)]
            assert told == pytest.approx(
                [scored_token.logprob for scored_token in (scores.chosen, *scores.top)], rel=1e-9, abs=1e-9
            )


@pytest.mark.parametrize("scale", [0.1, 3.0, 20.0])
def test_a_batch_over_a_large_vocabulary_equals_its_rows(scale: float) -> None:
    """Larger than a CPU cache, with nuclei from a few tokens to most of the vocabulary."""
    logits = (np.random.default_rng(7).standard_normal((24, 40_000)) * scale).astype(np.float32)
    fields: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 50},
        {"top_k": 2000, "top_p": 0.7},
        {"min_p": 0.02},
        {"min_p": 1e-5, "top_p": 0.99},
    ]
    sequences = [
        sequence(SamplingParams(seed=row, temperature=0.8, **fields[row % len(fields)]), [0] * row) for row in range(24)
    ]
    sampled = sample(torch.from_numpy(logits.copy()), sequences)
    expected = [choose(row, asked.sampling, asked.length) for row, asked in zip(logits, sequences, strict=True)]
    assert sampled == [Sampled(token) for token in expected]


def test_a_failing_grammar_affects_only_its_row() -> None:
    sampling = SamplingParams(seed=1)
    failure = RuntimeError("too complex")
    grammars = [None, Allowing(error=failure), Allowing(5), Allowing()]
    batch = [sequence(sampling, PROMPT, grammar=grammar) for grammar in grammars]
    first, second, third, fourth = sample(torch.zeros(4, SIZE), batch)
    assert first == sample(torch.zeros(1, SIZE), batch[:1])[0]
    assert second is failure
    assert third == Sampled(5)
    assert isinstance(fourth, ValueError)
