"""Admission: limits of parameters, of a request's size against the context, and of the load.

Pure functions. Each refusal names the value, its limit, and the request field at fault in ``param``.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from triptych.domain.bounds import Between, Bound, Many, Size
from triptych.domain.chat import PRIORITY, ToolChoice
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.limits import Count, Positive, PositiveSeconds, check_limits
from triptych.domain.sampling import PARAMETERS, SCHEMA, Grammar, ResponseFormat, SamplingParams
from triptych.errors import ContextTooLong, InvalidRequest, Overloaded

WAIT_CAUTION = 1.25
"""A predicted wait may turn out longer by this factor: requests that come later may pass."""

_BOUNDED = [(row.name, row.default, row.api_name, row.bound) for row in PARAMETERS.values() if row.bound is not None]


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Limits of one request."""

    max_items_per_request: Count = 64
    """Most images, videos and audio clips in one request."""
    max_stop_strings: Count = 16
    """Most stop strings in one request."""
    max_stop_chars: Positive = 256
    """Longest stop string."""
    max_top_k: Count = 1_000_000
    """Largest top_k."""
    max_stop_token_ids: Count = 64
    """Most stop token ids in one request; at most 4096."""
    max_logit_bias: Count = 1024
    """Most tokens whose logits one request may bias; at most 4096."""
    max_schema_chars: Positive = 32_768
    """Longest JSON schema."""

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """Limits over all requests."""

    max_concurrent_requests: Positive = 2048
    """Most requests at the same time; one more is refused as overload."""
    max_media_bytes: Positive = 2 << 30
    """Most bytes of media over all requests; they are kept for retries."""
    retry_after_s: PositiveSeconds = 1.0
    """Retry-After of a refused request; the least, where it is known how fast requests end."""

    def __post_init__(self) -> None:
        check_limits(self)


def check_sampling(sampling: SamplingParams, bounds: RequestBounds) -> None:
    """``check_parameters``, and the settings' tighter limits. Raises InvalidRequest."""
    check_parameters(sampling)
    if sampling.top_k > 0:
        _hold("top_k", sampling.top_k, Between(-1, bounds.max_top_k))
    if sampling.stop:
        _hold("stop", sampling.stop, Many(bounds.max_stop_strings, Size(bounds.max_stop_chars), "strings"))
    if sampling.stop_token_ids:
        _hold("stop_token_ids", sampling.stop_token_ids, Many(bounds.max_stop_token_ids, unit="tokens"))
    if sampling.logit_bias:
        _hold("logit_bias", sampling.logit_bias, Many(bounds.max_logit_bias, unit="tokens"))
    if (wanted := sampling.response_format) is not None:
        if wanted.grammar is Grammar.LARK:
            raise InvalidRequest("response_format: grammars are not supported", param="response_format")
        _hold("response_format", wanted.schema, Size(bounds.max_schema_chars))


def check_parameters(sampling: SamplingParams) -> None:
    """Check what an engine relies on. Raises InvalidRequest for the first parameter that is out of bounds or
    contradicts another. Whether a schema is supported is checked in ``tokens.grammar``.
    """
    for name, default, api_name, bound in _BOUNDED:
        value = getattr(sampling, name)
        # Most parameters have their defaults.
        if value != default and value is not None and (fault := bound.fault(api_name, value)) is not None:
            raise InvalidRequest(fault, param=api_name)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}, more than max_tokens, which is {sampling.max_tokens}",
            param="min_tokens",
        )
    if len(sampling.logit_bias) > 1:
        token_id, times = Counter(token_id for token_id, _ in sampling.logit_bias).most_common(1)[0]
        if times > 1:
            raise InvalidRequest(f"logit_bias: token {token_id} is named twice", param="logit_bias")
    if sampling.response_format is not None:
        _check_format(sampling, sampling.response_format)


def check_continued(sampling: SamplingParams, continued: Sequence[ContinuedChoice], context_length: int) -> None:
    """Check that each choice is one of the request's, is named once, and has tokens left to generate. Raises InvalidRequest."""
    choices = [choice.choice for choice in continued]
    if choices != sorted(set(choices)) or choices[-1] >= sampling.n:
        raise InvalidRequest(f"choices {choices} are not some of {sampling.n} in their order", param="continued")
    if sampling.seed is None:
        raise InvalidRequest("an answer without a seed cannot be continued", param="seed")
    most = min(sampling.max_tokens or context_length, context_length)
    for choice in continued:
        if len(choice.token_ids) >= most:
            raise InvalidRequest(
                f"choice {choice.choice} has ended already, with {len(choice.token_ids)} tokens", param="continued"
            )


def _check_format(sampling: SamplingParams, wanted: ResponseFormat) -> None:
    if sampling.ignore_eos:
        raise InvalidRequest("ignore_eos and response_format exclude each other", param="ignore_eos")
    takes_schema = wanted.grammar is not Grammar.JSON_OBJECT
    if takes_schema != bool(wanted.schema):
        needed = f"{wanted.grammar.value} {'needs a' if takes_schema else 'takes no'} schema"
        raise InvalidRequest(f"response_format: {needed}", param="response_format")
    _hold("response_format", wanted.schema, SCHEMA)


def check_tool_choice(choice: ToolChoice, tools: str, sampling: SamplingParams) -> None:
    """Raise InvalidRequest if a call is required but impossible."""
    if not choice.forces:
        return
    if not tools:
        raise InvalidRequest("tool_choice: there are no tools to call", param="tool_choice")
    if sampling.response_format is not None:
        raise InvalidRequest("tool_choice: a forced call and response_format exclude each other", param="tool_choice")
    if sampling.ignore_eos:
        raise InvalidRequest("ignore_eos and a forced tool call exclude each other", param="ignore_eos")


def check_items(count: int, bounds: RequestBounds, param: str = "messages") -> None:
    """Raise InvalidRequest when a request brings too many items; ``param`` is the field that has them."""
    if count > bounds.max_items_per_request:
        raise InvalidRequest(f"{count} images, at most {bounds.max_items_per_request} are allowed", param=param)


def check_priority(priority: int) -> None:
    """Raise InvalidRequest if the priority is out of bounds."""
    if not PRIORITY.low <= priority <= PRIORITY.high:
        _hold("priority", priority, PRIORITY)


def check_timeout(timeout_s: float, max_timeout_s: float) -> float:
    """The time limit of a request: the requested one, capped. Raises InvalidRequest."""
    if not isfinite(timeout_s) or timeout_s <= 0:
        raise InvalidRequest(f"timeout is {timeout_s} s, must be above 0", param="timeout")
    return min(timeout_s, max_timeout_s)


def complete(
    sampling: SamplingParams, *, prompt_tokens: int, context_length: int, kv_tokens: int = 0, kv_block_tokens: int = 0
) -> SamplingParams:
    """The parameters with ``max_tokens`` set: as requested, or what is left of the context and of ``kv_tokens``.

    ``kv_tokens`` is the capacity of a text instance for one request (prompt and answer, per choice); 0 if unknown.
    Each choice takes whole blocks of ``kv_block_tokens`` of it; 0 if unknown.

    Raises ContextTooLong if the prompt and the requested tokens (at least one) exceed the context; InvalidRequest if
    they exceed ``kv_tokens``, or if ``min_tokens`` exceeds what is left.
    """
    left = context_length - prompt_tokens
    if left < 1:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens, the model's context is {context_length} with the answer",
            param="messages",
        )
    if kv_tokens:
        share = kv_tokens // sampling.n
        kept = share - share % max(1, kv_block_tokens) - prompt_tokens
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


def most_of_one(max_requests: int) -> int:
    """Most requests of one tenant, if there are several: the last eighth is left to others."""
    return max(1, max_requests - max_requests // 8)


def check_capacity(
    *, requests: int, media_bytes: int, new_media_bytes: int, bounds: ServerBounds, own_requests: int = 0
) -> None:
    """Raise Overloaded if one more request with this much media exceeds the limits.

    ``own_requests`` are those of its tenant, if there are others.
    """
    if new_media_bytes > bounds.max_media_bytes:
        raise InvalidRequest(
            f"the request's media have {new_media_bytes} bytes, the limit is {bounds.max_media_bytes}",
            param="messages",
        )
    if requests >= bounds.max_concurrent_requests:
        raise Overloaded(
            f"{requests} requests are running, the limit is {bounds.max_concurrent_requests}",
            retry_after_s=bounds.retry_after_s,
        )
    if own_requests >= (most := most_of_one(bounds.max_concurrent_requests)):
        raise Overloaded(
            f"{own_requests} requests of this tenant are running, others are left all above {most}",
            retry_after_s=bounds.retry_after_s,
        )
    if media_bytes + new_media_bytes > bounds.max_media_bytes:
        raise Overloaded(
            f"running requests hold {media_bytes} bytes of media, the limit is {bounds.max_media_bytes}",
            retry_after_s=bounds.retry_after_s,
        )


def check_wait(*, left_s: float, wait_s: float, service_s: float, promised_s: float = 0.0) -> None:
    """Raise Overloaded if a request with ``left_s`` until its deadline cannot be answered by then.

    It waits for ``wait_s`` and then takes ``service_s``; both are predicted, and the wait is put ``WAIT_CAUTION`` times
    higher. ``promised_s`` is what others were promised that come back until then. Without a wait nothing is refused, as the request
    may be faster than others of its class. Retry-After is when the queue will be short enough.
    """
    late_s = WAIT_CAUTION * wait_s + promised_s + service_s - left_s
    if wait_s > 0 and late_s > 0:
        raise Overloaded(
            f"the answer would take about {wait_s + promised_s + service_s:.1f} s, of which {wait_s + promised_s:.1f} s in queues; "
            f"{left_s:.1f} s are left",
            retry_after_s=min(late_s, wait_s + promised_s),
        )


def admit_anyway(*, left_s: float, wait_s: float, service_s: float, promised_s: float = 0.0) -> None:
    """Refuse nothing."""
    del left_s, wait_s, service_s, promised_s


def _hold(param: str, value: object, bound: Bound) -> None:
    if (fault := bound.fault(param, value)) is not None:
        raise InvalidRequest(fault, param=param)
