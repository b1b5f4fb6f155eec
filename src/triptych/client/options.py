"""Keyword arguments of a request."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from triptych.domain.chat import ToolChoice
from triptych.domain.sampling import ResponseFormat
from triptych.errors import InvalidRequest


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
    stop: str | Sequence[str]
    """One, or several."""
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]
    """By token id."""
    logprobs: int | None
    response_format: ResponseFormat | Mapping[str, Any] | None
    """A mapping is as the OpenAI API has it: of type ``text``, ``json_object`` or ``json_schema``."""


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


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a request: None is what is left out. Raises InvalidRequest for a name that means nothing."""
    for name in options:
        if name not in ChatOptions.__annotations__:
            raise InvalidRequest(
                f"{name} is no argument; there are {', '.join(sorted(ChatOptions.__annotations__))}", param=name
            )
    return {name: value for name, value in options.items() if value is not None}
