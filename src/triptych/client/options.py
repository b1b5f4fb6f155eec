"""What a request may say beside its prompt, as keyword arguments."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from triptych.domain.chat import ToolChoice
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


class ChatOptions(SamplingOptions, total=False):
    """How a request is sampled, and what else is asked of the servers."""

    model: str | None
    """The client's own model if left out, or else the first that is served."""
    timeout_s: float | None
    """The deadline over all attempts; the client's own if left out."""
    tenant_salt: bytes
    """Keeps embeddings in caches apart from those of other salts."""
    priority: int
    """Where requests wait, lower ones go first; 0 if left out."""
    tools: Sequence[Mapping[str, Any]]
    """As the OpenAI API has them, for models whose chat template has a place for them."""
    tool_choice: ToolChoice
    """Whether the model is to call one of ``tools``; it decides by itself if left out."""
