"""How fast instances are, from the profiles of what they run or from times that were measured while they ran."""

from functools import lru_cache
from math import ceil

from triptych.policy.backlog import Alone, Work
from triptych.policy.costs import Costs
from triptych.policy.interpolation import Line
from triptych.policy.transport import TRANSPORTS, far_first

_CACHED = 4096
"""Lookups that a speed remembers: sizes are rounded, so that those of load reports recur."""
_STEP_TOKENS = 8


def _each(tokens: int, number: int) -> int:
    """Tokens of each of so many, up to whole steps."""
    return -(-tokens // (number * _STEP_TOKENS)) * _STEP_TOKENS


class Pulls:
    """How long pulls take, by the transports that a profile of an encoder has."""

    def __init__(self, costs: Costs | None) -> None:
        self._costs = costs
        self._near = _first_measured(costs, tuple(TRANSPORTS))
        self._far = _first_measured(costs, far_first())

    def pull_s(self, near_nbytes: int, far_nbytes: int) -> float:
        """From the same host and from others; 0 where it was not measured."""
        return self._over(self._near, near_nbytes) + self._over(self._far, far_nbytes)

    def _over(self, backend: str, nbytes: int) -> float:
        return self._costs.transfer_s(backend, nbytes).value if self._costs is not None and backend and nbytes else 0.0


def _first_measured(costs: Costs | None, backends: tuple[str, ...]) -> str:
    measured = set() if costs is None else {row.backend for row in costs.profile.transfer}
    return next((backend for backend in backends if backend in measured), "")


class EncodeSpeed:
    """``policy.backlog.Speed`` of an encoder, by its profile."""

    def __init__(self, costs: Costs, pulls: Pulls, *, max_batch: int, cores: int) -> None:
        self._costs = costs
        self._max_batch = max(1, max_batch)
        self._cores = max(1, cores)
        self._pulls = pulls
        self._encode_s = lru_cache(_CACHED)(lambda tokens, items: costs.encode_s(tokens, items).value)

    def alone(self, work: Work) -> Alone:
        batch, ready_s = self._max_batch, self.prepare_s(work)
        idle_s = self._encode_s(work.tokens, 1)
        beside_s = self._encode_s(work.tokens, batch) / batch if batch > 1 else idle_s
        return Alone(idle_s, min(idle_s, beside_s), ready_s=ready_s, core_s=ready_s / self._cores)

    def pull_s(self, near_nbytes: int, far_nbytes: int) -> float:
        return self._pulls.pull_s(near_nbytes, far_nbytes)

    def prepare_s(self, work: Work) -> float:
        """Decoding and preprocessing of an item, on one core."""
        return self._costs.prepare_s(work.media_nbytes, work.pixels).value if work.media_nbytes else 0.0

    def prepared_s(self, prepare_s: float) -> float:
        """For work that takes one core so long."""
        return prepare_s / self._cores

    def wait_s(self, tokens: int, items: int) -> float:
        """To encode these items, in full batches."""
        if not items:
            return 0.0
        full, rest = divmod(items, self._max_batch)
        each = _each(tokens, items)
        batches_s = full * self._encode_s(each, self._max_batch) if full else 0.0
        return batches_s + (self._encode_s(each, rest) if rest else 0.0)

    def pass_s(self, tokens: int, items: int) -> float:
        """One pass of the engine, with as many of these items as it takes."""
        return self._encode_s(_each(tokens, items), min(items, self._max_batch)) if items else 0.0


class TextSpeed:
    """``policy.backlog.Speed`` of a text instance, by its profile."""

    def __init__(self, costs: Costs, pulls: Pulls, *, max_sequences: int, token_budget: int) -> None:
        """``token_budget`` is 0 if prompts are not divided."""
        self._pulls = pulls
        self._max_sequences = max(1, max_sequences)
        self._token_budget = token_budget
        self._prefill_s = lru_cache(_CACHED)(lambda tokens: costs.prefill_s(tokens).value)
        self._decode_s = lru_cache(_CACHED)(lambda batch, context: costs.decode_s(batch, context).value)

    def alone(self, work: Work) -> Alone:
        prefill_s = self._prefill_s(work.tokens)
        return Alone(prefill_s, prefill_s, steps=self._chunks(work.tokens) + max(0, work.answer_tokens - 1))

    def pull_s(self, near_nbytes: int, far_nbytes: int) -> float:
        return self._pulls.pull_s(near_nbytes, far_nbytes)

    def step_s(self, requests: int, context: int) -> float:
        """One step that decodes one sequence more than these."""
        return self._decode_s(min(requests + 1, self._max_sequences), context)

    def wait_s(self, prefill_tokens: int, requests: int, decode_tokens: int, step_s: float) -> float:
        """Until another prompt can begin: those before it are computed, and one of ``requests`` has left a place.

        ``prefill_tokens`` are of prompts without a first token, ``decode_tokens`` those that answers will still have.
        """
        wait_s = 0.0
        if prefill_tokens:
            chunks = self._chunks(prefill_tokens)
            wait_s = chunks * (self._prefill_s(_each(prefill_tokens, chunks)) + step_s)
        excess = requests - self._max_sequences + 1
        if excess > 0:
            wait_s += excess * decode_tokens / requests * step_s / self._max_sequences
        return wait_s

    def _chunks(self, tokens: int) -> int:
        return ceil(tokens / self._token_budget) if self._token_budget else 1


class LearnedSpeed:
    """``policy.backlog.Speed`` of the instances of a pool, by what their items or first tokens took.

    ``line`` gives seconds for the tokens that were pending when an item or request was given, its own included. Nothing is
    known of preprocessing, pulls and decoding apart.
    """

    def __init__(self, line: Line) -> None:
        self._line = line

    def alone(self, work: Work) -> Alone:
        idle_s = self._line.at(work.tokens)
        return Alone(idle_s, self._line.at(2 * work.tokens) - idle_s)

    def pull_s(self, near_nbytes: int, far_nbytes: int) -> float:
        del near_nbytes, far_nbytes
        return 0.0

    def wait_s(self, tokens: int) -> float:
        return self._line.at(tokens) if tokens else 0.0
