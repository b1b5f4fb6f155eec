import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.sampling import SamplingParams
from triptych.engine.sampling import choose, uniform

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
