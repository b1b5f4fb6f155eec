"""Builds the gateway's answers in the OpenAI API's format: completions, chunks, errors, models."""

import json
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, ClassVar, Protocol

from triptych.domain.chat import Tokenized, ToolCall
from triptych.domain.generation import (
    Alternative,
    ChoiceFinished,
    Reasoned,
    TokenChunk,
    TokenLogprobs,
    ToolArguments,
    ToolCallMade,
    Usage,
)
from triptych.domain.instance import ModelInfo
from triptych.errors import TriptychError

from . import answer_types as api
from .open_answer import WholeChoice
from .request_ids import CHAT_PREFIX, COMPLETION_PREFIX

MIN_LOGPROB = -9999.0
"""Stands in for minus infinity, which JSON lacks."""
_TYPES: Mapping[int, api.ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_SERVER_ERROR = 500


def error_body(error: TriptychError) -> api.Error:
    default_type: api.ErrorType = "server_error" if error.http_status >= _SERVER_ERROR else "invalid_request_error"
    kind = _TYPES.get(error.http_status, default_type)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_headers(error: TriptychError) -> dict[str, str]:
    """Retry-After in whole seconds, for errors that may go away; at least 1, as 0 would mean immediately."""
    if error.retry_after_s is None and not error.retryable:
        return {}
    return {"retry-after": str(max(1, ceil(error.retry_after_s or 0.0)))}


def usage_body(usage: Usage) -> api.Usage:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "image_tokens": usage.image_tokens,
            "audio_tokens": usage.audio_tokens,
            "video_tokens": usage.video_tokens,
        },
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


class Form(Protocol):
    """Formats one kind of answer, complete or as server-sent events."""

    def whole(self, whole: Sequence[WholeChoice], usage: Usage) -> Mapping[str, object]: ...

    def begin(self, choices: int) -> bytes:
        """Sent before the first text."""
        ...

    def chunk(self, event: TokenChunk) -> bytes:
        """b"" if there is nothing to send yet: a character or a possible stop string is incomplete."""
        ...

    def thought(self, event: Reasoned) -> bytes: ...

    def call(self, event: ToolCallMade | ToolArguments) -> bytes: ...

    def finish(self, event: ChoiceFinished) -> bytes: ...

    def end(self, usage: Usage) -> bytes:
        """Sent last."""
        ...

    def failed(self, error: TriptychError) -> bytes:
        """Sent last instead, if the answer ends early."""
        ...


class _CompletionsForm:
    """What chat completions and plain ones have in common."""

    _prefix: ClassVar[str]
    """How ids of answers begin."""

    def __init__(self, request_id: str, model: str, created: int, *, include_usage: bool, logprobs: bool) -> None:
        self._id = self._prefix + request_id
        self._model = model
        self._created = created
        self._include_usage = include_usage
        self._logprobs = logprobs

    def end(self, usage: Usage) -> bytes:
        """With the usage, if the request asked for it."""
        return (_event({**self._around([]), "usage": usage_body(usage)}) if self._include_usage else b"") + DONE

    def failed(self, error: TriptychError) -> bytes:
        """Without [DONE]."""
        return _event(error_body(error))

    def _around(self, choices: list[Any]) -> Mapping[str, object]:
        """A chunk with these choices."""
        raise NotImplementedError


class ChatForm(_CompletionsForm):
    """Chat completions. JSON is written in ASCII, as some clients split lines at Unicode line separators."""

    _prefix = CHAT_PREFIX
    _opening = _closing = b""

    def whole(self, whole: Sequence[WholeChoice], usage: Usage) -> api.ChatCompletion:
        choices: list[api.ChatChoice] = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": self._logprobs_body(choice.logprobs),
                "finish_reason": choice.reason.value,
            }
            for index, choice in enumerate(whole)
        ]
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage_body(usage),
        }

    def begin(self, choices: int) -> bytes:
        # Chunks share most of their bytes: serialize one, and use it as a template for the others.
        self._opening, rest = self._chunk(0, {}).rsplit(b'"index":0', 1)
        self._closing = rest[rest.index(b"}]") :]
        return b"".join(self._plain(choice, b'{"role":"assistant","content":""}') for choice in range(choices))

    def chunk(self, event: TokenChunk) -> bytes:
        if not event.text and not (self._logprobs and event.logprobs):
            return b""
        if self._logprobs:
            return self._chunk(event.choice, {"content": event.text}, self._logprobs_body(event.logprobs))
        return self._plain(event.choice, b'{"content":%b}' % json.dumps(event.text).encode())

    def thought(self, event: Reasoned) -> bytes:
        """By both names that clients read."""
        text = json.dumps(event.text).encode()
        return self._plain(event.choice, b'{"reasoning":%b,"reasoning_content":%b}' % (text, text))

    def call(self, event: ToolCallMade | ToolArguments) -> bytes:
        if isinstance(event, ToolArguments):
            written = event.index, json.dumps(event.text).encode()
            return self._plain(event.choice, b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % written)
        function: api.FunctionDelta = {"name": event.call.name, "arguments": event.call.arguments}
        call: api.ToolCallDelta = {
            "index": event.index,
            "id": event.call.call_id,
            "type": "function",
            "function": function,
        }
        return self._chunk(event.choice, {"tool_calls": [call]})

    def finish(self, event: ChoiceFinished) -> bytes:
        return self._plain(event.choice, b"{}", b'"%b"' % event.reason.value.encode())

    def _plain(self, index: int, delta: bytes, reason: bytes = b"null") -> bytes:
        """The same bytes as ``_chunk`` for a choice without logprobs, from the template."""
        choice = b'"index":%d,"delta":%b,"logprobs":null,"finish_reason":%b' % (index, delta, reason)
        return self._opening + choice + self._closing

    def _logprobs_body(self, logprobs: Sequence[TokenLogprobs]) -> api.ChatLogprobs | None:
        if not self._logprobs:
            return None
        return {"content": [token_logprob(entry) for entry in logprobs], "refusal": None}

    def _chunk(
        self,
        index: int,
        delta: api.Delta,
        logprobs: api.ChatLogprobs | None = None,
    ) -> bytes:
        return _event(self._around([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}]))

    def _around(self, choices: list[api.ChatChunkChoice]) -> api.ChatCompletionChunk:
        chunk: api.ChatCompletionChunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if self._include_usage:
            chunk["usage"] = None
        return chunk


class CompletionForm(_CompletionsForm):
    """Plain completions; a chunk has the same type as a complete answer."""

    _prefix = COMPLETION_PREFIX

    def __init__(self, request_id: str, model: str, created: int, *, include_usage: bool, logprobs: bool) -> None:
        super().__init__(request_id, model, created, include_usage=include_usage, logprobs=logprobs)
        self._offsets: dict[int, int] = {}

    def whole(self, whole: Sequence[WholeChoice], usage: Usage) -> api.Completion:
        choices = [
            self._choice(index, choice.text, choice.logprobs, choice.reason.value) for index, choice in enumerate(whole)
        ]
        return {**self._around(choices), "usage": usage_body(usage)}

    def begin(self, choices: int) -> bytes:
        del choices
        return b""

    def chunk(self, event: TokenChunk) -> bytes:
        if not event.text and not (self._logprobs and event.logprobs):
            return b""
        return self._chunk(self._choice(event.choice, event.text, event.logprobs, None))

    def thought(self, event: Reasoned) -> bytes:
        del event
        raise AssertionError("reasoning is part of a raw prompt's text")

    def call(self, event: ToolCallMade | ToolArguments) -> bytes:
        del event
        raise AssertionError("a raw prompt has no tools")

    def finish(self, event: ChoiceFinished) -> bytes:
        return self._chunk(self._choice(event.choice, "", (), event.reason.value))

    def _chunk(self, choice: api.CompletionChoice) -> bytes:
        chunk = self._around([choice])
        if self._include_usage:
            chunk["usage"] = None
        return _event(chunk)

    def _around(self, choices: list[api.CompletionChoice]) -> api.Completion:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprobs], finish_reason: str | None
    ) -> api.CompletionChoice:
        logprobs_body = self._logprobs_body(index, logprobs) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs_body, "finish_reason": finish_reason}

    def _logprobs_body(self, index: int, logprobs: Sequence[TokenLogprobs]) -> api.CompletionLogprobs:
        tokens = [_token(entry.chosen) for entry in logprobs]
        offsets = []
        at = self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token)
        self._offsets[index] = at
        return {
            "tokens": tokens,
            "token_logprobs": [_logprob(entry.chosen) for entry in logprobs],
            "top_logprobs": [{_token(top): _logprob(top) for top in entry.top} for entry in logprobs],
            "text_offset": offsets,
        }


encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
DONE = b"data: [DONE]\n\n"


def _event(document: Mapping[str, object]) -> bytes:
    return b"data: " + encode(document).encode() + b"\n\n"


def _message(choice: WholeChoice) -> api.AssistantMessage:
    """Content is null when there are tool calls or reasoning, and no text."""
    if not (choice.calls or choice.thoughts):
        return {"role": "assistant", "content": choice.text, "refusal": None}
    message: api.AssistantMessage = {"role": "assistant", "content": choice.text or None, "refusal": None}
    if choice.thoughts:
        message["reasoning"] = message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [_call(call) for call in choice.calls]
    return message


def _call(call: ToolCall) -> api.ToolCall:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _token(alternative: Alternative) -> str:
    return alternative.token.decode("utf-8", "replace")


def _logprob(alternative: Alternative) -> float:
    return max(alternative.logprob, MIN_LOGPROB)


def token_logprob(entry: TokenLogprobs) -> api.TokenLogprob:
    return {**_alternative(entry.chosen), "top_logprobs": [_alternative(top) for top in entry.top]}


def _alternative(alternative: Alternative) -> api.TopLogprob:
    return {"token": _token(alternative), "logprob": _logprob(alternative), "bytes": list(alternative.token)}


def model_body(model: ModelInfo, created: int) -> api.Model:
    """``max_model_len`` and ``parent`` are common extensions: the context length in tokens, and the base model of a LoRA adapter."""
    return {
        "id": model.model_id,
        "object": "model",
        "created": created,
        "owned_by": "triptych",
        "parent": model.parent or None,
        "max_model_len": model.context_length,
    }


def tokens_body(tokenized: Tokenized, model: ModelInfo, *, return_token_strs: bool) -> api.Tokens:
    """``token_strs`` is null unless requested."""
    return {
        "count": len(tokenized.token_ids),
        "max_model_len": model.context_length,
        "tokens": list(tokenized.token_ids),
        "token_strs": list(tokenized.token_strs) if return_token_strs else None,
    }
