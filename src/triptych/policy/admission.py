"""What is let in: bounds of parameters, of a request's size against the context, and of how much runs at once.

Pure functions; each refusal names the thing, its value and its limit, and the request field at fault in ``param``.
"""

from dataclasses import dataclass, replace
from math import isfinite

from triptych.domain.sampling import SamplingParams
from triptych.errors import ContextTooLong, InvalidRequest, Overloaded

MAX_TEMPERATURE = 2.0
"""The OpenAI API's."""
MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """How large one request may be."""

    max_items: int
    max_stop_strings: int
    max_stop_chars: int
    max_top_k: int


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """How much the router takes on at once."""

    max_requests: int
    max_media_bytes: int
    retry_after_s: float


def check_sampling(sampling: SamplingParams, bounds: RequestBounds) -> None:
    """Raise InvalidRequest for the first parameter that is out of bounds; NaN is out of every bound."""
    _within("temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p is {sampling.top_p}, must be above 0 and at most 1", param="top_p")
    _within("top_k", sampling.top_k, 0, bounds.max_top_k)
    if sampling.seed is not None:
        _within("seed", sampling.seed, MIN_SEED, MAX_SEED)
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {sampling.max_tokens}, must be at least 1", param="max_tokens")
    if len(sampling.stop) > bounds.max_stop_strings:
        raise InvalidRequest(
            f"{len(sampling.stop)} stop strings, at most {bounds.max_stop_strings} are allowed", param="stop"
        )
    for stop in sampling.stop:
        if not 1 <= len(stop) <= bounds.max_stop_chars:
            raise InvalidRequest(
                f"a stop string has {len(stop)} characters, must have 1 to {bounds.max_stop_chars}", param="stop"
            )


def check_items(count: int, bounds: RequestBounds) -> None:
    """Raise InvalidRequest when a request brings too many items."""
    if count > bounds.max_items:
        raise InvalidRequest(f"{count} images, at most {bounds.max_items} are allowed", param="messages")


def check_timeout(timeout_s: float, max_timeout_s: float) -> float:
    """The time that a request gets: what it asks for, but not more than the limit. Raises InvalidRequest."""
    if not isfinite(timeout_s) or timeout_s <= 0:
        raise InvalidRequest(f"timeout is {timeout_s} s, must be above 0", param="timeout")
    return min(timeout_s, max_timeout_s)


def complete(sampling: SamplingParams, *, prompt_tokens: int, context_length: int) -> SamplingParams:
    """The parameters with ``max_tokens`` set: as asked, or what the context leaves.

    Raises ContextTooLong when the prompt leaves no room for one token, or for as many as were asked for.
    """
    left = context_length - prompt_tokens
    if left < 1:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens, the model's context is {context_length} with the answer",
            param="messages",
        )
    if sampling.max_tokens is None:
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
