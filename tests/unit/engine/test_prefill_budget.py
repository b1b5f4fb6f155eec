"""The token budget of a text engine that nothing else bounds."""

from collections.abc import Callable

import pytest

from triptych.engine import prefill_budget
from triptych.engine.measuring import TextProbe
from triptych.engine.prefill_budget import measured_budget


class Steps(TextProbe):
    """Steps that take a time of their own and as long again for each token of a prompt."""

    def __init__(self, step_s: float, token_s: float, *, decodes: bool = True) -> None:
        self._step_s, self._token_s, self._decodes = step_s, token_s, decodes
        self.now_s = 0.0
        self.measured: list[tuple[int, int]] = []

    def compute(self, prompts: int, tokens: int) -> None:
        self.measured.append((prompts, tokens))
        self.now_s += self._step_s + self._token_s * prompts * tokens

    def decode_s(self, batch: int, context: int, steps: int = 1) -> list[float] | None:
        self.now_s += (steps + 1) * self._step_s
        return [self._step_s, *[2 * self._step_s] * (steps - 1)] if self._decodes else None

    def timed_s(self, work: Callable[[], object]) -> float:
        began_s = self.now_s
        work()
        return self.now_s - began_s


@pytest.mark.parametrize(
    ("step_s", "token_s", "longest", "tokens"),
    [
        (0.0, 1e-5, 4096, 2048),
        (0.0, 1e-4, 4096, 512),
        (0.0, 1e-4, 32, 512),
        (0.0, 4e-4, 4096, 128),
        (4e-3, 4e-4, 4096, 256),
        (2e-2, 4e-4, 4096, 512),
        (1.0, 1e-5, 4096, 128),
    ],
)
def test_a_step_is_as_long_as_more_tokens_make_it_faster_or_short(
    monkeypatch: pytest.MonkeyPatch, step_s: float, token_s: float, longest: int, tokens: int
) -> None:
    steps = Steps(step_s, token_s)
    monkeypatch.setattr(prefill_budget, "timed_s", steps.timed_s)
    assert measured_budget(steps, most=2048, longest_prompt=longest).tokens == tokens
    assert {tokens for _, tokens in steps.measured} == {min(128, longest)}


@pytest.mark.parametrize(
    ("step_s", "token_s", "tokens"),
    [
        pytest.param(1e-3, 1e-5, 2048, id="the largest step is short"),
        pytest.param(5e-3, 3.9e-4, 179, id="75 ms"),
        pytest.param(32e-3, 14e-4, 62, id="3.75 times as long as the answer alone"),
        pytest.param(0.5, 0.2, 6, id="a large model"),
        pytest.param(0.5, 2.0, 1, id="a token of a prompt takes longer than that"),
    ],
)
def test_beside_answers_a_step_keeps_the_objective_of_their_tokens_or_is_short(
    monkeypatch: pytest.MonkeyPatch, step_s: float, token_s: float, tokens: int
) -> None:
    steps = Steps(step_s, token_s)
    monkeypatch.setattr(prefill_budget, "timed_s", steps.timed_s)
    assert measured_budget(steps, most=2048, longest_prompt=4096).beside_decodes == tokens


def test_an_engine_with_room_for_no_answer_takes_75_ms_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(0.0, 2e-3, decodes=False)
    monkeypatch.setattr(prefill_budget, "timed_s", steps.timed_s)
    assert measured_budget(steps, most=2048, longest_prompt=4096).beside_decodes == 37


@pytest.mark.parametrize("token_s", [1e-4, 1e-3, 1e-2])
def test_large_models_are_measured_for_about_a_second_or_with_one_step(
    monkeypatch: pytest.MonkeyPatch, token_s: float
) -> None:
    steps = Steps(1e-2, token_s)
    monkeypatch.setattr(prefill_budget, "timed_s", steps.timed_s)
    assert measured_budget(steps, most=2048, longest_prompt=4096).tokens >= 128
    assert steps.now_s < 1.2 or len(steps.measured) == 1


def test_the_budget_is_within_what_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(1e-2, 1e-6)
    monkeypatch.setattr(prefill_budget, "timed_s", steps.timed_s)
    budget = measured_budget(steps, most=300, longest_prompt=4096)
    assert (budget.tokens, budget.beside_decodes) == (256, 256)
