"""Answers of Anthropic's Messages API: a message with its blocks, complete or as events; and its errors."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from triptych.domain.generation import (
    ChoiceFinished,
    FinishReason,
    Reasoned,
    TokenChunk,
    ToolArguments,
    ToolCallMade,
    Usage,
)
from triptych.errors import TriptychError

from . import answer_types as api
from .answers import encode
from .open_answer import WholeChoice
from .request_ids import MESSAGE_PREFIX

MessagesErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "overloaded_error",
    "api_error",
]
StopReason = Literal["end_turn", "max_tokens", "tool_use"]
_ERRORS: Mapping[int, MessagesErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOPS: Mapping[FinishReason, StopReason] = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


class MessagesErrorDetail(TypedDict):
    type: MessagesErrorType
    message: str


class MessagesError(TypedDict):
    type: Literal["error"]
    error: MessagesErrorDetail


class AnswerText(TypedDict):
    type: Literal["text"]
    text: str
    citations: None


class AnswerThinking(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str
    """The message's id: nothing is signed."""


class AnswerToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class ThinkingTokens(TypedDict):
    thinking_tokens: api.Count


class MessageUsage(TypedDict):
    input_tokens: api.Count
    """Those that were not found in a prefix cache."""
    cache_creation_input_tokens: api.Count
    cache_read_input_tokens: api.Count
    output_tokens: api.Count
    output_tokens_details: ThinkingTokens


class AnswerMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: None
    usage: MessageUsage


class TokenCount(TypedDict):
    input_tokens: api.Count


def messages_error(error: TriptychError) -> MessagesError:
    """The body of an error. Its message begins with the field at fault, for which there is no other place."""
    default: MessagesErrorType = "api_error" if error.http_status >= 500 else "invalid_request_error"
    message, param = error.message, error.param
    if param is not None and not message.startswith(param):
        message = f"{param}: {message}"
    return {"type": "error", "error": {"type": _ERRORS.get(error.http_status, default), "message": message}}


class MessagesForm:
    """``answers.Form`` of one message. Each kind of text in turn is a block of its own, as each call is."""

    def __init__(self, request_id: str, model: str) -> None:
        self._id = MESSAGE_PREFIX + request_id
        self._model = model
        self._open: Literal["text", "thinking", "tool_use"] | None = None
        self._blocks = 0
        self._reason = FinishReason.STOP

    def whole(self, whole: Sequence[WholeChoice], usage: Usage) -> AnswerMessage:
        (choice,) = whole
        content: list[AnswerBlock] = []
        if choice.thoughts:
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": self._id})
        if choice.text:
            content.append({"type": "text", "text": choice.text, "citations": None})
        for call in choice.calls:
            given = _input(call.arguments)
            content.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": given})
        return self._message(content, choice.reason, usage)

    def begin(self, choices: int) -> bytes:
        del choices
        message = self._message([], None, Usage(0, 0))
        return _event("message_start", message=message) + _event("ping")

    def chunk(self, event: TokenChunk) -> bytes:
        if not event.text:
            return b""
        opening = self._begin("text", {"type": "text", "text": "", "citations": None})
        return opening + self._delta({"type": "text_delta", "text": event.text})

    def thought(self, event: Reasoned) -> bytes:
        opening = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        return opening + self._delta({"type": "thinking_delta", "thinking": event.text})

    def call(self, event: ToolCallMade | ToolArguments) -> bytes:
        if isinstance(event, ToolArguments):
            return self._delta({"type": "input_json_delta", "partial_json": event.text})
        out, call = self._close(), event.call
        out += self._start({"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}})
        self._open = "tool_use"
        return out + self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def finish(self, event: ChoiceFinished) -> bytes:
        self._reason = event.reason
        return self._close()

    def end(self, usage: Usage) -> bytes:
        delta = {"stop_reason": _STOPS[self._reason], "stop_sequence": None}
        return _event("message_delta", delta=delta, usage=_usage(usage)) + _event("message_stop")

    def failed(self, error: TriptychError) -> bytes:
        return _event("error", **messages_error(error))

    def _message(self, content: list[AnswerBlock], reason: FinishReason | None, usage: Usage) -> AnswerMessage:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None if reason is None else _STOPS[reason],
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _begin(self, kind: Literal["text", "thinking"], block: AnswerBlock) -> bytes:
        """The events that open a block of this kind, unless it is open."""
        if self._open == kind:
            return b""
        out = self._close() + self._start(block)
        self._open = kind
        return out

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": self._id}) if self._open == "thinking" else b""
        self._open = None
        return signed + self._stop()

    def _start(self, block: AnswerBlock) -> bytes:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: Mapping[str, str]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop(self) -> bytes:
        return _event("content_block_stop", index=self._blocks - 1)


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; as text if they are no JSON object, or one that an answer cannot hold."""
    try:
        given = json.loads(arguments)
        json.dumps(given, allow_nan=False)
    except (ValueError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {"arguments": arguments}


def _usage(usage: Usage) -> MessageUsage:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: {encode({**fields, 'type': kind})}\n\n".encode()
