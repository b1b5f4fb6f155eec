from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy.profiles import DECODER, ENCODER
from triptych.domain.profile import TransferRow
from triptych.policy.backlog import Work
from triptych.policy.costs import Costs
from triptych.policy.interpolation import Line
from triptych.policy.speeds import EncodeSpeed, LearnedSpeed, Pulls, TextSpeed

ENCODE = EncodeSpeed(Costs(ENCODER), Pulls(Costs(ENCODER)), max_batch=4, cores=2)
TEXT = TextSpeed(Costs(DECODER), Pulls(Costs(ENCODER)), max_sequences=4, token_budget=256)


def test_an_item_shares_a_pass_with_others_and_is_preprocessed_on_one_core() -> None:
    alone = ENCODE.alone(Work(200, media_nbytes=100_000, pixels=1_000_000))
    assert alone.idle_s == pytest.approx(0.02 + 1e-4 * 200)
    assert alone.beside_s == pytest.approx((0.02 + 1e-4 * 800) / 4)
    assert alone.ready_s == pytest.approx(1e-3 + 1e-3)
    assert alone.core_s == pytest.approx(alone.ready_s / 2)
    assert ENCODE.prepared_s(1.0) == 0.5


@pytest.mark.parametrize(
    ("tokens", "items", "wait_s"), [(0, 0, 0), (200, 1, 0.04), (800, 4, 0.1), (1200, 6, 0.1 + 0.06), (1600, 8, 0.2)]
)
def test_items_wait_for_full_passes(tokens: int, items: int, wait_s: float) -> None:
    assert ENCODE.wait_s(tokens, items) == pytest.approx(wait_s)
    assert ENCODE.pass_s(tokens, items) == pytest.approx(min(wait_s, 0.1))


def test_prompts_wait_for_those_before_them_in_chunks_beside_the_decodes() -> None:
    step_s = TEXT.step_s(2, 64)
    assert step_s == pytest.approx(0.01 + 0.001 * 3 + 1e-6 * 3 * 64, rel=0.05)
    assert TEXT.wait_s(0, 2, 100, step_s) == 0.0
    assert TEXT.wait_s(512, 2, 100, step_s) == pytest.approx(2 * (0.01 + 1e-4 * 256 + step_s))


def test_with_every_place_taken_a_request_waits_for_one() -> None:
    """Four sequences have 25 tokens each to come, so that a place is free after 25 / 4 steps."""
    step_s = TEXT.step_s(4, 64)
    assert TEXT.wait_s(0, 3, 100, step_s) == 0.0
    assert TEXT.wait_s(0, 4, 100, step_s) == pytest.approx(25 / 4 * step_s)
    assert TEXT.wait_s(0, 7, 175, step_s) == pytest.approx(4 * 25 / 4 * step_s)


def test_an_answer_takes_a_step_per_token_after_the_first() -> None:
    alone = TEXT.alone(Work(300, answer_tokens=21))
    assert alone.idle_s == pytest.approx(0.01 + 1e-4 * 300, rel=0.01)
    assert alone.steps == 2 + 20


def test_pulls_take_the_best_transport_that_was_measured() -> None:
    assert TEXT.pull_s(1 << 20, 1 << 20) == pytest.approx(0.001), "nothing was measured between hosts"
    both = replace(ENCODER, transfer=(*ENCODER.transfer, TransferRow("tcp", 1 << 20, 0.01)))
    pulls = Pulls(Costs(both))
    assert pulls.pull_s(0, 1 << 20) == pytest.approx(0.01)
    assert pulls.pull_s(1 << 20, 1 << 20) == pytest.approx(0.011)
    assert Pulls(None).pull_s(5, 5) == 0.0


@given(st.integers(1, 10_000), st.integers(1, 40), st.integers(0, 500))
def test_more_work_never_waits_less(tokens: int, number: int, more: int) -> None:
    assert ENCODE.wait_s(tokens + more, number) >= ENCODE.wait_s(tokens, number)
    step_s = TEXT.step_s(number, 64)
    assert TEXT.step_s(number + 1, 64) >= step_s
    assert TEXT.wait_s(tokens + more, number, 100, step_s) >= TEXT.wait_s(tokens, number, 100, step_s) * (1 - 1e-9)


def test_what_was_learned_is_the_time_for_the_pending_tokens() -> None:
    speed = LearnedSpeed(Line([(100, 1.0), (200, 1.5)]))
    assert speed.wait_s(0) == 0.0
    assert speed.wait_s(200) == 1.5
    assert speed.alone(Work(100))[:2] == (1.0, 0.5)
    assert speed.pull_s(5, 5) == 0.0
