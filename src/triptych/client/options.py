"""Keyword arguments of a request."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from triptych.domain.chat import ToolChoice
from triptych.domain.sampling import ResponseFormat
from triptych.domain.tenant import Tenant
from triptych.errors import InvalidRequest


class SamplingOptions(TypedDict, total=False):
    """The fields of ``domain.sampling.SamplingParams``, which documents them and their defaults."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    n: int
    max_tokens: int | None
    min_tokens: int
    stop: str | Sequence[str]
    """Stop string, or several."""
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]
    """Bias by token id."""
    special_tokens: bool
    logprobs: int | None
    response_format: ResponseFormat | Mapping[str, Any] | None
    """A mapping has the OpenAI API's form: type ``text``, ``json_object`` or ``json_schema``."""


class ChatOptions(SamplingOptions, total=False):
    """Options of a request."""

    model: str | None
    """Default: the client's own model, or the first one served."""
    timeout_s: float | None
    """Deadline over all attempts. Default: the client's own."""
    tenant_salt: bytes
    """Separates cached embeddings from those with other salts."""
    priority: int
    """Requests with lower values leave queues first. Default: 0."""
    tenant: Tenant | str | None
    """Tenant whose share of encoders and text instances the request counts against; a name has weight 1. Default:
    nobody's.
    """
    tools: Sequence[Mapping[str, Any]]
    """Tools in the OpenAI API's form, for models whose chat template supports tools."""
    tool_choice: ToolChoice
    """Whether the model must call one of ``tools``. Default: it decides."""
    template_kwargs: Mapping[str, Any]
    """Further variables of the chat template, as ``{"enable_thinking": False}``."""


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not None. Raises InvalidRequest for an unknown name."""
    for name in options:
        if name not in ChatOptions.__annotations__:
            raise InvalidRequest(
                f"{name} is no argument; there are {', '.join(sorted(ChatOptions.__annotations__))}", param=name
            )
    return {name: value for name, value in options.items() if value is not None}
