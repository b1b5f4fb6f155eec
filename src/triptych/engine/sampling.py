"""How the next token is chosen from logits."""

import numpy as np
import numpy.typing as npt

from triptych.domain.sampling import SamplingParams

_WORD = (1 << 64) - 1


def choose(logits: npt.NDArray[np.float32], sampling: SamplingParams, position: int) -> int:
    """The token at ``position`` of a sequence, from its finite ``logits`` [vocabulary].

    The draw depends on (seed, position) alone (a counter-based generator), so neither the sequences that happen to
    share a batch nor a restart in the middle of an answer change it.
    """
    if sampling.temperature <= 0:
        return int(logits.argmax())
    tokens, probabilities = _candidates(logits, sampling)
    cumulative = probabilities.cumsum()
    drawn = uniform(sampling.seed or 0, position) * cumulative[-1]
    return int(tokens[min(int(cumulative.searchsorted(drawn, side="right")), len(tokens) - 1)])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that (seed, position) decides."""
    key = np.array([seed & _WORD, position & _WORD], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def _candidates(
    logits: npt.NDArray[np.float32], sampling: SamplingParams
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """Token ids that may be drawn, in the order of the vocabulary, and their weights.

    Temperature first, then the k most likely, then the smallest set that holds ``top_p`` of what is left; ties go to
    the lower id, and one token always stays.
    """
    tokens = np.arange(len(logits))
    scaled = (logits.astype(np.float64) - float(logits.max())) / sampling.temperature
    probabilities = np.exp(scaled)
    keep_k = sampling.top_k if 0 < sampling.top_k < len(logits) else len(logits)
    if keep_k < len(logits) or sampling.top_p < 1:
        ranked = np.argsort(-scaled, kind="stable")[:keep_k]
        if sampling.top_p < 1:
            share = probabilities[ranked].cumsum()
            before = np.concatenate(([0.0], share[:-1]))
            ranked = ranked[: max(1, int((before < sampling.top_p * share[-1]).sum()))]
        tokens = np.sort(ranked)
    return tokens, probabilities[tokens]
