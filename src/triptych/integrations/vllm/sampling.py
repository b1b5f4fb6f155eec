"""Sampling parameters and log-probabilities in vLLM's terms."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VllmParams

from triptych.domain.engine import ScoredToken, Scores
from triptych.domain.sampling import SamplingParams

_SEEDS = 1 << 63
_LEAST_TOP_P = 1e-9
"""vLLM refuses 0. With less than the precision of float32 it keeps the likeliest token alone."""
_STRIDE = 0x9E3779B97F4A7C15
"""Odd, and far from the few numbers of choices."""


def vllm_params(
    sampling: SamplingParams,
    choice: int,
    end_ids: Collection[int],
    grammar: str | None,
    *,
    begun: int = 0,
    most: int | None = None,
) -> VllmParams:
    """The parameters of one choice. ``end_ids`` end it; ``grammar`` names what constrains it (``grammars``).

    Choice ``i`` draws with seed + ``i``, as vLLM's own. With ``begun`` tokens, which vLLM gets as part of its prompt, it
    draws with another seed, as vLLM would begin with the first draws again. Stop strings are found in the text, outside of
    the engine. A grammar keeps end tokens back itself. ``most``: tokens that it gets at most, after these.
    """
    assert sampling.max_tokens is not None and sampling.seed is not None  # noqa: PT018 - by the port
    left = sampling.max_tokens - begun
    most = left if most is None else min(left, most)
    return VllmParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p or _LEAST_TOP_P,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=(sampling.seed + choice + begun * _STRIDE) % _SEEDS,
        max_tokens=most,
        min_tokens=0 if grammar is not None else max(0, min(sampling.min_tokens - begun, most)),
        stop_token_ids=sorted(end_ids),
        ignore_eos=True,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        logprobs=sampling.logprobs,
        structured_outputs=None if grammar is None else StructuredOutputsParams(grammar=grammar),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def scores(
    token_ids: Iterable[int], logprobs: Iterable[Mapping[int, Any]] | None, alternatives: int | None
) -> tuple[Scores, ...]:
    """Log-probabilities as vLLM returns them: for each token those of the token itself and of the likeliest ones."""
    if logprobs is None or alternatives is None:
        return ()
    all_scores: list[Scores] = []
    for token_id, by_id in zip(token_ids, logprobs, strict=True):
        ranked = sorted((score.rank, token_id) for token_id, score in by_id.items() if score.rank <= alternatives)
        top = tuple(ScoredToken(token_id, by_id[token_id].logprob) for _, token_id in ranked[:alternatives])
        all_scores.append(Scores(ScoredToken(token_id, by_id[token_id].logprob), top))
    return tuple(all_scores)
