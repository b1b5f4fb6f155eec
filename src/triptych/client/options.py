"""How a request is sampled, as keyword arguments."""

from typing import TypedDict

from triptych.domain.sampling import ResponseFormat


class SamplingOptions(TypedDict, total=False):
    """The fields of ``domain.sampling.SamplingParams``, where each is explained and has its default."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    n: int
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    logprobs: int | None
    response_format: ResponseFormat | None
