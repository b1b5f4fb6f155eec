import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.slo import ChargedStage, Isolated
from triptych.policy.attainment import charged, wilson

ALONE = Isolated(prepare_s=0.0, encode_s=0.3, prefill_s=0.1, tbt_s=0.02)


@pytest.mark.parametrize(
    ("encode_s", "prefill_s", "stages"),
    [
        (2.0, 0.1, (ChargedStage.ENCODE,)),
        (0.3, 1.9, (ChargedStage.PREFILL,)),
        (1.6, 0.6, (ChargedStage.ENCODE, ChargedStage.PREFILL)),
    ],
)
def test_a_miss_is_charged_to_the_stages_beyond_their_share(
    encode_s: float, prefill_s: float, stages: tuple[ChargedStage, ...]
) -> None:
    assert charged(2.0, ALONE, prepare_s=0.0, encode_s=encode_s, prefill_s=prefill_s) == stages


def test_nothing_is_charged_while_the_shares_are_unknown() -> None:
    assert charged(2.0, None, prepare_s=0.0, encode_s=9.0, prefill_s=9.0) == ()


seconds = st.floats(0.001, 10)


@given(seconds, seconds, seconds, seconds, seconds, seconds, st.floats(0.1, 50))
def test_every_miss_is_charged_to_some_stage(
    a: float, b: float, c: float, x: float, y: float, z: float, limit_s: float
) -> None:
    alone = Isolated(a, b, c, 0.01)
    missed = x + y + z > limit_s * 1.0001
    assert bool(charged(limit_s, alone, prepare_s=x, encode_s=y, prefill_s=z)) or not missed


def test_the_interval_narrows_with_the_number_of_requests() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(1, 100)
    assert (round(low, 4), round(high, 4)) == (0.0022, 0.0436)
    assert wilson(100, 10_000)[0] > low
    assert wilson(100, 10_000)[1] < high


@given(st.integers(0, 100), st.integers(1, 100))
def test_the_interval_contains_the_share(part: int, whole: int) -> None:
    low, high = wilson(min(part, whole), whole)
    assert 0 <= low <= min(part, whole) / whole + 1e-9
    assert min(part, whole) / whole - 1e-9 <= high <= 1
