"""What the gateway answers, as the OpenAI API has it: completions, chunks, errors, models, timelines."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from math import ceil
from typing import Any

from triptych.domain.generation import FinishReason, Usage
from triptych.domain.instance import ModelInfo
from triptych.domain.timeline import Timeline
from triptych.errors import TriptychError

COMPLETION_PREFIX = "chatcmpl-"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_SERVER_ERROR = 500


def error_body(error: TriptychError) -> dict[str, Any]:
    kind = _TYPES.get(
        error.http_status, "server_error" if error.http_status >= _SERVER_ERROR else "invalid_request_error"
    )
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_headers(error: TriptychError) -> dict[str, str]:
    """Retry-After in whole seconds, where the error knows it; it is never 0, which would mean at once."""
    return {} if error.retry_after_s is None else {"retry-after": str(max(1, ceil(error.retry_after_s)))}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"image_tokens": usage.image_tokens},
    }


def completion(
    request_id: str, model: str, created: int, text: str, reason: FinishReason, usage: Usage
) -> dict[str, Any]:
    return {
        "id": COMPLETION_PREFIX + request_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason.value,
            }
        ],
        "usage": usage_body(usage),
    }


class Chunks:
    """The server-sent events of one streamed answer. JSON is written in ASCII: no client splits lines within it."""

    DONE = b"data: [DONE]\n\n"

    def __init__(self, request_id: str, model: str, created: int, *, include_usage: bool) -> None:
        self._head = {
            "id": COMPLETION_PREFIX + request_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._tail: Mapping[str, Any] = {"usage": None} if include_usage else {}

    def role(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def text(self, text: str) -> bytes:
        return self._chunk({"content": text})

    def finish(self, reason: FinishReason) -> bytes:
        return self._chunk({}, reason.value)

    def usage(self, usage: Usage) -> bytes:
        return _event({**self._head, "choices": [], "usage": usage_body(usage)})

    @staticmethod
    def error(error: TriptychError) -> bytes:
        return _event(error_body(error))

    def _chunk(self, delta: Mapping[str, str], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _event({**self._head, "choices": [choice], **self._tail})


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def model_body(model: ModelInfo, created: int) -> dict[str, Any]:
    """``max_model_len`` is the field's usual extension for the context length."""
    return {
        "id": model.model_id,
        "object": "model",
        "created": created,
        "owned_by": "triptych",
        "max_model_len": model.context_length,
    }


def timeline_body(timeline: Timeline) -> dict[str, Any]:
    return asdict(timeline, dict_factory=lambda pairs: {k: v.value if isinstance(v, Enum) else v for k, v in pairs})
