"""Measures, at start, how many tokens of prompts a text engine computes in one step where nothing else bounds a step."""

from dataclasses import dataclass
from functools import partial

from triptych.domain.slo import USUAL_FACTOR
from triptych.engine.measuring import TextProbe
from triptych.engine.timing import timed_s
from triptych.policy.batching import MEASURED_SHARE, smallest_efficient

_PROMPT_TOKENS = 128
_SHORT_S = 0.05
"""Time of a step whose end nothing waits long for, seconds."""
_LONG_S = 0.1
"""Time from which on a step is measured once, seconds: a disturbance is a small part of it."""
_ENOUGH_S = 0.15
"""Time from which on a step is not measured twice as large, seconds. Large products on a CPU are no faster for more
rows.
"""
_WORTHWHILE = 0.97
_DECODE_STEPS = 3
_FLUENT_S = 0.075
"""Answers are read more slowly than a token in this time."""


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    tokens: int
    """Most tokens of a step."""
    beside_decodes: int | None = None
    """Most tokens of prompts in a step that has decodes; None: as many as ``tokens`` leaves."""


def measured_budget(probe: TextProbe, *, most: int, longest_prompt: int) -> PrefillBudget:
    """How many tokens of prompts a step computes: up to ``most`` where no answer waits for it, and no more than those beside answers.

    *Without answers*: the smallest step of 50 ms or more that twice as many tokens would hardly make faster per token. All prompts of a
    step are done at its end: on a CPU a longer step only makes them wait. Steps of one, two, four, ... prompts of 128 tokens are measured,
    for about a second at most where one takes less than that.

    *Beside answers*, each of which gets one token of a step: a step of about 75 ms, or of 3.75 times that of one answer alone, which is the
    measured share of an objective of 5 times that for each token. The time of a step is taken to be that of the answer, and the same for each
    token of the prompts: weights are read once, and rows cost time each.
    """
    prompt_tokens = min(_PROMPT_TOKENS, longest_prompt)
    measured_s: dict[int, float] = {}

    def step_s(prompts: int) -> float:
        step = partial(probe.compute, prompts, prompt_tokens)
        first_s = timed_s(step)
        measured_s[prompts] = first_s if first_s >= _LONG_S else min(first_s, timed_s(step), timed_s(step))
        return measured_s[prompts]

    prompts = smallest_efficient(
        max(1, most // prompt_tokens), step_s, enough_s=_ENOUGH_S, worthwhile=_WORTHWHILE, short_s=_SHORT_S
    )
    tokens = prompts * prompt_tokens
    decode_s = min(probe.decode_s(1, 1, _DECODE_STEPS) or [0.0])
    token_s = max(0.0, measured_s[1] - decode_s) / prompt_tokens
    objective_s = max(_FLUENT_S, MEASURED_SHARE * USUAL_FACTOR * decode_s)
    return PrefillBudget(tokens, _affordable(objective_s - decode_s, token_s, tokens))


def _affordable(left_s: float, token_s: float, most: int) -> int:
    """Tokens of ``token_s`` each within ``left_s``, from 1 to ``most``."""
    return most if left_s >= most * token_s else max(1, int(left_s / token_s))
