"""Reference sampling, one row at a time: the results that ``triptych.engine.decoder.sampling`` must give for a batch."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from triptych.domain.engine import ScoredToken, Scores
from triptych.domain.sampling import SamplingParams
from triptych.ports import TokenGrammar

_WORD = (1 << 64) - 1
_LIKELY = (1024, 16_384)
"""As many of the likeliest tokens are ranked before a whole vocabulary is sorted for top-p."""

Logits = npt.NDArray[np.float32]


class Sampler:
    """Chooses the tokens of one sequence; the grammar is its only state."""

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        prompt: Sequence[int],
        eos_ids: frozenset[int],
        choice: int = 0,
        grammar: TokenGrammar | None = None,
    ) -> None:
        """``prompt`` counts for the repetition penalty alone."""
        self._sampling = sampling
        self._choice = choice
        self._grammar = grammar
        self._end_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_ids)
        self._ends = np.array(sorted(self._end_ids), dtype=np.intp)
        self._biased = np.array([token_id for token_id, _ in sampling.logit_bias], dtype=np.intp)
        self._bias = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32)
        self._prompt = np.unique(np.array(prompt, dtype=np.intp))
        self._repeats = sampling.repetition_penalty != 1
        self._counts = bool(sampling.frequency_penalty or sampling.presence_penalty)
        self._adjusts = bool(sampling.logit_bias) or self._repeats or self._counts or grammar is not None

    def choose(self, logits: Logits, answer: Sequence[int], position: int) -> tuple[int, Scores | None]:
        """The token at ``position`` of the sequence, after ``answer``, from its finite ``logits`` [vocabulary].

        Raises ValueError when the grammar leaves no token.
        """
        early = len(answer) < self._sampling.min_tokens and len(self._ends)
        adjusted = self._adjust(logits.copy(), answer, early=bool(early)) if self._adjusts or early else logits
        token = choose(adjusted, self._sampling, position, self._choice)
        if self._grammar is not None:
            self._grammar.accept(token)
        if self._sampling.logprobs is None:
            return token, None
        return token, score(logits, token, self._sampling.logprobs)

    def _adjust(self, logits: Logits, answer: Sequence[int], *, early: bool) -> Logits:
        """Applies allowed tokens, then bias, then penalties; changes ``logits``."""
        if self._grammar is not None:
            logits[~_bits(self._grammar.allowed(), len(logits))] = -np.inf
            if not np.isfinite(logits).any():
                raise ValueError("the grammar leaves no token")
        if early:
            ends = logits[self._ends]
            logits[self._ends] = -np.inf
            if not np.isfinite(logits).any():
                logits[self._ends] = ends  # a finished grammar takes precedence over min_tokens
        logits[self._biased] += self._bias
        if self._repeats:
            seen = np.union1d(self._prompt, np.array(answer, dtype=np.intp))
            penalty = np.float32(self._sampling.repetition_penalty)
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        if self._counts:
            said, times = np.unique(np.array(answer, dtype=np.intp), return_counts=True)
            logits[said] -= (self._sampling.frequency_penalty * times + self._sampling.presence_penalty).astype("f4")
        return logits


def choose(logits: Logits, sampling: SamplingParams, position: int, choice: int = 0) -> int:
    """Greedy, or sampled after temperature, min-p, top-k and top-p.

    ``logits`` [vocabulary] are finite, or -inf for forbidden tokens. The result depends on (seed, choice, position)
    only (a counter-based generator), so neither the batch nor a preemption changes it.
    """
    if sampling.temperature <= 0:
        return int(logits.argmax())
    tokens, weights = candidates(logits, sampling)
    cumulative = weights.cumsum()
    drawn = uniform(sampling.seed or 0, choice, position) * cumulative[-1]
    return int(tokens[min(int(cumulative.searchsorted(drawn, side="right")), len(tokens) - 1)])


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) derived from (seed, choice, position)."""
    key = np.array([seed & _WORD, choice & _WORD], dtype=np.uint64)
    counter = np.array([0, position & _WORD, 0, 0], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def candidates(logits: Logits, sampling: SamplingParams) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """Candidate token ids in vocabulary order, and their weights (1 for the likeliest).

    Temperature first, then min-p, then top-k, then the smallest set that holds ``top_p`` of the rest; ties go to the
    lower id, and at least one token remains.
    """
    with np.errstate(over="ignore"):  # with a temperature near 0 all but the likeliest have weight exp(-inf) = 0
        weights = np.exp((logits.astype(np.float64) - float(logits.max())) / sampling.temperature)
    tokens = np.flatnonzero(weights >= sampling.min_p if sampling.min_p else weights)
    if 0 < sampling.top_k < len(tokens):
        tokens = np.sort(tokens[_ranked(weights[tokens], sampling.top_k)])
    if sampling.top_p < 1:
        tokens = np.sort(tokens[_nucleus(weights[tokens], sampling.top_p)])
    return tokens, weights[tokens]


def score(logits: Logits, token: int, alternatives: int) -> Scores:
    """Log-softmax of ``logits`` for ``token`` and for the likeliest ``alternatives``, best first."""
    highest = float(logits.max())
    total = highest + float(np.log(np.exp(logits.astype(np.float64) - highest).sum()))
    top = _ranked(logits, alternatives) if alternatives else ()
    return Scores(
        ScoredToken(token, float(logits[token]) - total),
        tuple(ScoredToken(int(other), float(logits[other]) - total) for other in top),
    )


def _ranked(values: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.intp]:
    """Indices of the ``count`` largest, largest first; of equal ones the lower index comes first."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    least = np.partition(values, len(values) - count)[len(values) - count]
    indices = np.flatnonzero(values >= least)
    return indices[np.argsort(-values[indices], kind="stable")][:count]


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.intp]:
    """Indices of the smallest set of largest weights that holds ``top_p`` of their sum."""
    wanted = top_p * float(weights.sum())
    for count in (*_LIKELY, len(weights)):
        ranked = _ranked(weights, count)
        share = weights[ranked].cumsum()
        if share[-1] >= wanted:
            break
    before = np.concatenate(([0.0], share[:-1]))
    return ranked[: max(1, int((before < wanted).sum()))]


def _bits(mask: bytes, count: int) -> npt.NDArray[np.bool_]:
    """A bit mask, least significant bit first, as ``count`` booleans; missing bits are False."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=min(count, 8 * len(mask)), bitorder="little")
    return np.pad(bits, (0, count - len(bits))).astype(bool)
