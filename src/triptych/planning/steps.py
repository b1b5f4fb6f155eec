"""Steps of a text engine in closed form: how long one takes where prompts and answers come at given rates.

Decodes go first in a step, and prompts fill what the token budget leaves. While answers run, one step follows the other: each takes what
comes during the one before. So the time of a step is that at which as much comes as it computes.
"""

from collections.abc import Sequence
from math import ceil, inf, sqrt
from typing import NamedTuple

from triptych.domain.stage import Role, Stage
from triptych.policy.costs import Costs

from .demand import Need

_HALVINGS = 16


class Stepping(NamedTuple):
    """Steps of one instance under a load."""

    step_s: float
    """Mean time of a step, with what else the device does meanwhile: between two tokens of an answer."""
    running: float
    """Answers that are decoded."""
    prompts: float
    """Prompts, or chunks of them, in a step."""
    deviation_s: float
    """Standard deviation of the time between two tokens, as more or fewer answers run."""


class Steps:
    """Steps of a role's text engine for requests of some forms."""

    def __init__(
        self, costs: Costs, needs: Sequence[Need], role: Role, *, max_sequences: int, budget: int, kv_tokens: int | None
    ) -> None:
        self._costs = costs
        self._needs = needs
        self._budget = budget
        self.prefills = role.serves(Stage.PREFILL)
        shares = [need.share for need in needs]
        prompt = sum(need.share * need.prompt_tokens for need in needs)
        self._chunks = sum(need.share * ceil(need.prompt_tokens / budget) for need in needs) if self.prefills else 0.0
        """Of a request, mean."""
        self._chunk_tokens = prompt / self._chunks if self._chunks else 0.0
        decoded = [max(0, need.output_tokens - 1) if role.serves(Stage.DECODE) else 0 for need in needs]
        self.decoded = sum(map(_product, shares, decoded))
        """Tokens after the first of a request, mean."""
        held = sum(
            need.share * many * (need.prompt_tokens + need.output_tokens / 2)
            for need, many in zip(needs, decoded, strict=True)
        )
        self._context = held / self.decoded if self.decoded else prompt
        reserved = sum(need.share * (need.prompt_tokens + need.output_tokens) for need in needs)
        self.most = float(max_sequences if kv_tokens is None else min(max_sequences, kv_tokens // max(1.0, reserved)))
        """Answers that run at once, at most."""

    def time_s(self, running: float, prompts: float) -> float:
        """A step with so many decodes and mean chunks of prompts."""
        whole = int(prompts)
        chunk = (self._chunk_tokens, 0)
        low_s = self._costs.step_seconds(running, self._context, [chunk] * whole) if running or whole else 0.0
        if prompts == whole:
            return low_s
        high_s = self._costs.step_seconds(running, self._context, [chunk] * (whole + 1))
        return low_s + (prompts - whole) * (high_s - low_s)

    def most_prompts(self, running: float) -> float:
        """Chunks that fit a step beside so many decodes."""
        return max(1.0, (self._budget - running) / self._chunk_tokens) if self._chunk_tokens else inf

    @property
    def prefill_s(self) -> float:
        """Time of the device that the prompt of a request adds to full steps."""
        if not self._chunks:
            return 0.0
        running = min(self.most, self._budget / 4) if self.decoded else 0.0
        most = self.most_prompts(running)
        return self._chunks * (self.time_s(running, most) - (self.time_s(running, 0) if running else 0.0)) / most

    @property
    def decode_s(self) -> float:
        """Time of the device that the answer of a request takes in the largest steps."""
        most = max(1.0, self.most)
        return self.decoded * self.time_s(most, 0) / most if self.decoded else 0.0

    def stepping(self, prefill_per_s: float, decode_per_s: float, left: float) -> Stepping | None:
        """The steps where other work leaves this share of the time; None if they do not keep up."""
        if left <= 0 or (self.decoded and self.most < 1):
            return None
        if not self.decoded or not decode_per_s:
            return self._of_prompts(prefill_per_s, left)
        chunks_per_s, tokens_per_s = prefill_per_s * self._chunks, decode_per_s * self.decoded

        def next_s(step_s: float) -> float:
            """A step that computes what comes during one of this time."""
            return self.time_s(tokens_per_s * step_s, chunks_per_s * step_s) / left

        all_tokens_per_s = tokens_per_s + chunks_per_s * self._chunk_tokens
        longest_s = min(self.most / tokens_per_s, self._budget / all_tokens_per_s)
        low_s, high_s = 0.0, next_s(longest_s)
        if high_s > longest_s:
            return None
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (middle_s, high_s) if next_s(middle_s) > middle_s else (low_s, middle_s)
        running, prompts = tokens_per_s * high_s, chunks_per_s * high_s
        more_s = self.time_s(running + sqrt(running), prompts) / left
        return Stepping(high_s, running, prompts, max(0.0, more_s - high_s))

    def _of_prompts(self, per_s: float, left: float) -> Stepping | None:
        """Steps without decodes: as few prompts in each as keep up."""
        chunks_per_s, most = per_s * self._chunks, self.most_prompts(0)
        prompts = 1.0
        while chunks_per_s * self.time_s(0, prompts) / left > prompts:
            if prompts >= most:
                return None
            prompts = min(2 * prompts, most)
        return Stepping(self.time_s(0, prompts) / left, 0.0, prompts, 0.0)

    def first_token_s(self, need: Need, stepping: Stepping) -> float:
        """From the first step with a prompt of this form to the end of its last, beside decodes and other prompts."""
        chunks = ceil(need.prompt_tokens / self._budget)
        tokens = need.prompt_tokens / chunks
        before = tokens * (chunks - 1) / 2
        own_s = self._costs.step_seconds(stepping.running, self._context, [(tokens, before)])
        alone_s = self._costs.step_seconds(stepping.running, self._context, []) if stepping.running else 0.0
        others = stepping.prompts if self.decoded else stepping.prompts - 1
        beside_s = others / max(1.0, stepping.prompts) * max(0.0, stepping.step_s - alone_s) if others > 0 else 0.0
        return chunks * own_s + beside_s

    def queued(self, stepping: Stepping) -> list[float]:
        """Time that the prompt of each form takes of the device, in steps as full as they can be: for those behind it."""
        full = self.most_prompts(stepping.running)
        token_s = self.time_s(stepping.running, full) / (full * self._chunk_tokens) if self._chunk_tokens else 0.0
        return [need.prompt_tokens * token_s for need in self._needs]


def _product(first: float, second: float) -> float:
    return first * second
