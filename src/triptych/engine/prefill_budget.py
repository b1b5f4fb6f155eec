"""Measures, at start, how many tokens of prompts a text engine computes in one step where nothing else bounds a step."""

from functools import partial

from triptych.engine.measuring import TextProbe
from triptych.engine.timing import timed_s
from triptych.policy.batching import smallest_efficient

_PROMPT_TOKENS = 128
_SHORT_S = 0.05
"""Nothing waits long for the end of a step that takes less."""
_LONG_S = 0.1
"""What takes so long is measured once: a disturbance is a small part of it."""
_ENOUGH_S = 0.15
"""What is so long is not measured twice as large: large products on a CPU are no faster for more rows."""
_WORTHWHILE = 0.97


def tokens_worth_computing(probe: TextProbe, *, most: int, longest_prompt: int) -> int:
    """Tokens of the smallest step of 50 ms or more, up to ``most``, that twice as many would hardly make faster per token.

    All prompts of a step are done at its end, and no answer gets a token meanwhile: on a CPU a longer step only makes them wait. Steps of
    one, two, four, ... prompts of 128 tokens are measured, for about a second at most where one takes less than that.
    """
    prompt_tokens = min(_PROMPT_TOKENS, longest_prompt)

    def step_s(prompts: int) -> float:
        step = partial(probe.compute, prompts, prompt_tokens)
        first_s = timed_s(step)
        return first_s if first_s >= _LONG_S else min(first_s, timed_s(step), timed_s(step))

    prompts = smallest_efficient(
        max(1, most // prompt_tokens), step_s, enough_s=_ENOUGH_S, worthwhile=_WORTHWHILE, short_s=_SHORT_S
    )
    return prompts * prompt_tokens
