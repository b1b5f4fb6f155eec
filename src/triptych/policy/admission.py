"""What is let in: bounds of parameters, of a request's size against the context, and of how much runs at once.

Pure functions; each refusal names the thing, its value and its limit, and the request field at fault in ``param``.
"""

from dataclasses import dataclass, replace
from math import isfinite

from triptych.domain.chat import ToolChoice
from triptych.domain.sampling import Grammar, SamplingParams
from triptych.errors import ContextTooLong, InvalidRequest, Overloaded

MAX_TEMPERATURE = 2.0
"""The OpenAI API's."""
MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)
MAX_PENALTY = 2.0
"""Of frequency and presence penalties, in both directions: the OpenAI API's."""
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0
"""In both directions: the OpenAI API's."""
MAX_LOGPROBS = 20
"""Alternatives per token: the OpenAI API's."""
MAX_CHOICES = 16
"""Answers to one prompt."""
MAX_PRIORITY = 2**31 - 1
MIN_PRIORITY = -(2**31)


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """How large one request may be."""

    max_items: int
    max_stop_strings: int
    max_stop_chars: int
    max_top_k: int
    max_stop_token_ids: int
    max_logit_bias: int
    max_schema_chars: int


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """How much the router takes on at once."""

    max_requests: int
    max_media_bytes: int
    retry_after_s: float


def check_sampling(sampling: SamplingParams, bounds: RequestBounds) -> None:
    """Raise InvalidRequest for the first parameter that is out of bounds or contradicts another.

    NaN is out of every bound.
    """
    _check_draw(sampling, bounds)
    _check_penalties(sampling, bounds)
    _check_ends(sampling, bounds)
    _within("n", sampling.n, 1, MAX_CHOICES)
    if sampling.logprobs is not None:
        _within("top_logprobs", sampling.logprobs, 0, MAX_LOGPROBS)
    _check_format(sampling, bounds)


def _check_draw(sampling: SamplingParams, bounds: RequestBounds) -> None:
    _within("temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p is {sampling.top_p}, must be above 0 and at most 1", param="top_p")
    _within("top_k", sampling.top_k, 0, bounds.max_top_k)
    _within("min_p", sampling.min_p, 0, 1)
    if sampling.seed is not None:
        _within("seed", sampling.seed, MIN_SEED, MAX_SEED)


def _check_penalties(sampling: SamplingParams, bounds: RequestBounds) -> None:
    _within("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _within("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    if not 0 < sampling.repetition_penalty <= MAX_REPETITION_PENALTY:
        raise InvalidRequest(
            f"repetition_penalty is {sampling.repetition_penalty}, must be above 0 and at most {MAX_REPETITION_PENALTY}",
            param="repetition_penalty",
        )
    _at_most("logit_bias", len(sampling.logit_bias), bounds.max_logit_bias, "tokens")
    seen: set[int] = set()
    for token_id, bias in sampling.logit_bias:
        if token_id < 0 or token_id in seen:
            fault = "below 0" if token_id < 0 else "named twice"
            raise InvalidRequest(f"logit_bias: token {token_id} is {fault}", param="logit_bias")
        seen.add(token_id)
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(
                f"logit_bias of token {token_id} is {bias}, must be from {-MAX_BIAS} to {MAX_BIAS}", param="logit_bias"
            )


def _check_ends(sampling: SamplingParams, bounds: RequestBounds) -> None:
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {sampling.max_tokens}, must be at least 1", param="max_tokens")
    if sampling.min_tokens < 0:
        raise InvalidRequest(f"min_tokens is {sampling.min_tokens}, must be at least 0", param="min_tokens")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}, more than max_tokens, which is {sampling.max_tokens}",
            param="min_tokens",
        )
    _at_most("stop", len(sampling.stop), bounds.max_stop_strings, "strings")
    for stop in sampling.stop:
        if not 1 <= len(stop) <= bounds.max_stop_chars:
            raise InvalidRequest(
                f"a stop string has {len(stop)} characters, must have 1 to {bounds.max_stop_chars}", param="stop"
            )
    _at_most("stop_token_ids", len(sampling.stop_token_ids), bounds.max_stop_token_ids, "tokens")
    if any(token_id < 0 for token_id in sampling.stop_token_ids):
        raise InvalidRequest(f"stop_token_ids has {min(sampling.stop_token_ids)}, below 0", param="stop_token_ids")


def _check_format(sampling: SamplingParams, bounds: RequestBounds) -> None:
    """Whether a schema can be followed is for ``tokens.grammar`` to say."""
    if sampling.response_format is None:
        return
    if sampling.response_format.grammar is Grammar.LARK:
        raise InvalidRequest("response_format: grammars are not taken", param="response_format")
    if sampling.ignore_eos:
        raise InvalidRequest("ignore_eos and response_format exclude each other", param="ignore_eos")
    schema = sampling.response_format.schema
    has_schema = sampling.response_format.grammar is Grammar.JSON_SCHEMA
    if has_schema != bool(schema):
        needed = "json_schema needs a schema" if has_schema else "json_object takes no schema"
        raise InvalidRequest(f"response_format: {needed}", param="response_format")
    if len(schema) > bounds.max_schema_chars:
        raise InvalidRequest(
            f"the JSON schema has {len(schema)} characters, at most {bounds.max_schema_chars} are allowed",
            param="response_format",
        )


def check_tool_choice(choice: ToolChoice, tools: str, sampling: SamplingParams) -> None:
    """Raise InvalidRequest for a call that is wanted where there can be none."""
    if not choice.forces:
        return
    if not tools:
        raise InvalidRequest("tool_choice: there are no tools to call", param="tool_choice")
    if sampling.response_format is not None:
        raise InvalidRequest("tool_choice: a call and response_format exclude each other", param="tool_choice")
    if sampling.ignore_eos:
        raise InvalidRequest("ignore_eos and a tool_choice that asks for a call exclude each other", param="ignore_eos")


def check_items(count: int, bounds: RequestBounds) -> None:
    """Raise InvalidRequest when a request brings too many items."""
    if count > bounds.max_items:
        raise InvalidRequest(f"{count} images, at most {bounds.max_items} are allowed", param="messages")


def check_priority(priority: int) -> None:
    """Raise InvalidRequest for a number that no queue takes."""
    _within("priority", priority, MIN_PRIORITY, MAX_PRIORITY)


def check_timeout(timeout_s: float, max_timeout_s: float) -> float:
    """The time that a request gets: what it asks for, but not more than the limit. Raises InvalidRequest."""
    if not isfinite(timeout_s) or timeout_s <= 0:
        raise InvalidRequest(f"timeout is {timeout_s} s, must be above 0", param="timeout")
    return min(timeout_s, max_timeout_s)


def complete(
    sampling: SamplingParams, *, prompt_tokens: int, context_length: int, kv_tokens: int = 0
) -> SamplingParams:
    """The parameters with ``max_tokens`` set: as asked, or what is left of the context and of ``kv_tokens``.

    ``kv_tokens``: what the text pool keeps of one request, prompt and answer for each choice; 0 where that is not known.

    Raises ContextTooLong when the prompt leaves no room in the context for one token, or for as many as were asked for;
    and InvalidRequest when they are more than the pool keeps, or ``min_tokens`` is more than what is left.
    """
    left = context_length - prompt_tokens
    if left < 1:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens, the model's context is {context_length} with the answer",
            param="messages",
        )
    if kv_tokens:
        kept = kv_tokens // sampling.n - prompt_tokens
        asked = sampling.max_tokens or 1
        if asked > kept and asked <= left:
            times = f"{sampling.n} times " if sampling.n > 1 else ""
            raise InvalidRequest(
                f"{times}a prompt of {prompt_tokens} tokens and {asked} to generate are more than the {kv_tokens} "
                "that a text instance has memory for",
                param="n" if sampling.n > 1 else "max_tokens",
            )
        if sampling.max_tokens is None:
            left = min(left, kept)
    if sampling.max_tokens is None:
        if sampling.min_tokens > left:
            raise InvalidRequest(
                f"min_tokens is {sampling.min_tokens}, the context leaves {left} tokens", param="min_tokens"
            )
        return replace(sampling, max_tokens=left)
    if sampling.max_tokens > left:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {sampling.max_tokens}, "
            f"together more than the model's context of {context_length}",
            param="max_tokens",
        )
    return sampling


def check_capacity(*, requests: int, media_bytes: int, new_media_bytes: int, bounds: ServerBounds) -> None:
    """Raise Overloaded when one more request, with so many bytes of media, is more than the router may hold."""
    if new_media_bytes > bounds.max_media_bytes:
        raise InvalidRequest(
            f"the request's media have {new_media_bytes} bytes, the limit is {bounds.max_media_bytes}",
            param="messages",
        )
    if requests >= bounds.max_requests:
        raise Overloaded(
            f"{requests} requests are running, the limit is {bounds.max_requests}", retry_after_s=bounds.retry_after_s
        )
    if media_bytes + new_media_bytes > bounds.max_media_bytes:
        raise Overloaded(
            f"running requests hold {media_bytes} bytes of media, the limit is {bounds.max_media_bytes}",
            retry_after_s=bounds.retry_after_s,
        )


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}, must be from {low} to {high}", param=name)


def _at_most(name: str, count: int, limit: int, of_what: str) -> None:
    if count > limit:
        raise InvalidRequest(f"{name} has {count} {of_what}, at most {limit} are allowed", param=name)
