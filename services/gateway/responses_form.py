"""Answers of OpenAI's Responses API: a response with its items, complete or as events."""

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, cast

from typing_extensions import TypedDict

from triptych.domain.chat import MediaPart, Message, Part, TextPart, ToolCall
from triptych.domain.generation import (
    ChoiceFinished,
    FinishReason,
    Reasoned,
    TokenChunk,
    ToolArguments,
    ToolCallMade,
    Usage,
)
from triptych.domain.media import Modality
from triptych.errors import InvalidRequest, TriptychError

from . import answer_types as api
from .answers import encode, token_logprob
from .open_answer import WholeChoice
from .responses_api import ParsedResponses

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[api.TokenLogprob]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[OutputReasoningText]


class OutputCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputTokensDetails(TypedDict):
    cached_tokens: api.Count
    """Found in a prefix cache."""
    cache_write_tokens: api.Count
    image_tokens: api.Count
    audio_tokens: api.Count
    video_tokens: api.Count


class OutputTokensDetails(TypedDict):
    reasoning_tokens: api.Count


class ResponseUsage(TypedDict):
    input_tokens: api.Count
    input_tokens_details: InputTokensDetails
    output_tokens: api.Count
    output_tokens_details: OutputTokensDetails
    total_tokens: api.Count


class ResponseFault(TypedDict):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: api.Count
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    store: bool
    instructions: NotRequired[str | None]
    """This and the following are those of the request."""
    max_output_tokens: NotRequired[int | None]
    metadata: NotRequired[dict[str, str]]
    parallel_tool_calls: NotRequired[bool]
    previous_response_id: NotRequired[str | None]
    reasoning: NotRequired[dict[str, Any]]
    service_tier: NotRequired[str | None]
    temperature: NotRequired[float | None]
    text: NotRequired[dict[str, Any]]
    tool_choice: NotRequired[str | dict[str, str]]
    tools: NotRequired[list[dict[str, Any]]]
    top_logprobs: NotRequired[int | None]
    top_p: NotRequired[float | None]
    truncation: NotRequired[Literal["disabled"]]
    background: NotRequired[Literal[False]]


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


Keep = Callable[[bytes, Message], bool]
"""(the response as JSON, the answer as a message) -> whether it is stored."""


class ResponsesForm:
    """``answers.Form`` of one response. Each kind of text in turn is an item of its own, as each call is."""

    def __init__(self, response_id: str, request: ParsedResponses, created: int, keep: Keep) -> None:
        self._request = request
        self._keep = keep
        self._suffix = response_id.partition("_")[2]
        self._sequence = -1
        self._reason = FinishReason.STOP
        self._pending: list[api.TokenLogprob] = []
        """Log-probabilities of tokens since the last text."""
        self._open: OutputItem | None = None
        self._pieces: list[str] = []
        """Text or arguments of the open item."""
        self._output: list[OutputItem] = []
        body: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": self._output,
            "usage": None,
            "store": request.store,
            **request.echo,
        }
        self._body = cast(Response, body)

    def whole(self, whole: Sequence[WholeChoice], usage: Usage) -> Response:
        (choice,) = whole
        if choice.thoughts:
            self.thought(Reasoned(choice.reasoning))
        if choice.text:
            self.chunk(TokenChunk((), choice.text, 0, tuple(choice.logprobs)))
        for index, call in enumerate(choice.calls):
            self.call(ToolCallMade(call, index))
        self.finish(ChoiceFinished(choice.reason))
        self._complete(usage)
        return self._body

    def begin(self, choices: int) -> bytes:
        del choices
        return self._of_response("response.created") + self._of_response("response.in_progress")

    def chunk(self, event: TokenChunk) -> bytes:
        if self._request.sampling.logprobs is not None:
            self._pending += [token_logprob(entry) for entry in event.logprobs]
        if not event.text:
            return b""
        item, out = self._item("message")
        logprobs, self._pending = self._pending, []
        part: Any = item["content"][0]
        part["logprobs"] += logprobs
        self._pieces.append(event.text)
        return out + self._of_part("response.output_text.delta", delta=event.text, logprobs=logprobs)

    def thought(self, event: Reasoned) -> bytes:
        _, out = self._item("reasoning")
        self._pieces.append(event.text)
        return out + self._of_part("response.reasoning_text.delta", delta=event.text)

    def call(self, event: ToolCallMade | ToolArguments) -> bytes:
        if isinstance(event, ToolArguments):
            return self._arguments(event.text)
        out, call = self._close("completed"), event.call
        item: OutputCall = {
            "id": self._id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": "",
        }
        self._open = item
        self._output.append(item)
        out += self._of_item("response.output_item.added", item=item)
        return out + (self._arguments(call.arguments) if call.arguments else b"")

    def _arguments(self, text: str) -> bytes:
        self._pieces.append(text)
        return self._of_open("response.function_call_arguments.delta", delta=text)

    def finish(self, event: ChoiceFinished) -> bytes:
        self._reason = event.reason
        return self._close("incomplete" if event.reason is FinishReason.LENGTH else "completed")

    def end(self, usage: Usage) -> bytes:
        self._complete(usage)
        return self._of_response(f"response.{self._body['status']}")

    def failed(self, error: TriptychError) -> bytes:
        code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = "server_error"
        if isinstance(error, InvalidRequest):
            code = "invalid_prompt"
        elif error.http_status == 429:
            code = "rate_limit_exceeded"
        closing = self._close("incomplete")
        self._body["status"], self._body["error"] = "failed", {"code": code, "message": error.message}
        refusal = self._event("error", code=error.code, message=error.message, param=error.param)
        return closing + refusal + self._of_response("response.failed")

    def _complete(self, usage: Usage) -> None:
        """Fill in how it has ended, and store it."""
        body = self._body
        body["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
                "image_tokens": usage.image_tokens,
                "audio_tokens": usage.audio_tokens,
                "video_tokens": usage.video_tokens,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }
        body["status"] = "completed"
        if self._reason is FinishReason.LENGTH:
            body["status"], body["incomplete_details"] = "incomplete", {"reason": "max_output_tokens"}
        if self._request.store:
            body["store"] = self._keep(encode(body).encode(), self._as_message())

    def _as_message(self) -> Message:
        texts: list[Part] = []
        thoughts, calls = [], []
        for item in self._output:
            if item["type"] == "message":
                texts += [TextPart(part["text"]) for part in item["content"]]
            elif item["type"] == "reasoning":
                thoughts += [part["text"] for part in item["content"]]
            else:
                calls.append(ToolCall(item["call_id"], item["name"], item["arguments"]))
        if not (texts or calls):
            texts.append(TextPart(""))
        return Message("assistant", tuple(texts), tuple(calls), reasoning="\n".join(thoughts))

    def _item(self, kind: Literal["message", "reasoning"]) -> tuple[OutputMessage | OutputReasoning, bytes]:
        """The open item of this kind, and the events that open it if it is new."""
        if self._open is not None and self._open["type"] == kind:
            return self._open, b""
        out = self._close("completed")
        item: OutputMessage | OutputReasoning
        if kind == "message":
            item = {
                "id": self._id("msg"),
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        else:
            item = {"id": self._id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        self._open = item
        self._output.append(item)
        out += self._of_item("response.output_item.added", item=item)
        part: Any = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"].append(part)
        return item, out + self._of_part("response.content_part.added", part=part)

    def _close(self, status: Status) -> bytes:
        """End the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return b""
        text, self._pieces = "".join(self._pieces), []
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            out = self._of_item(
                "response.function_call_arguments.done", item_id=item["id"], name=item["name"], arguments=text
            )
            return out + self._of_item("response.output_item.done", item=item)
        part: Any = item["content"][0]
        part["text"] = text
        about = {"item_id": item["id"], "content_index": 0}
        if item["type"] == "message":
            out = self._of_item("response.output_text.done", **about, text=part["text"], logprobs=part["logprobs"])
        else:
            out = self._of_item("response.reasoning_text.done", **about, text=part["text"])
        out += self._of_item("response.content_part.done", **about, part=part)
        return out + self._of_item("response.output_item.done", item=item)

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}_{len(self._output)}"

    def _of_part(self, kind: str, **fields: object) -> bytes:
        """An event about the open item's text."""
        return self._of_open(kind, content_index=0, **fields)

    def _of_open(self, kind: str, **fields: object) -> bytes:
        assert self._open is not None, "an event about no item"  # noqa: S101
        return self._of_item(kind, item_id=self._open["id"], **fields)

    def _of_item(self, kind: str, **fields: object) -> bytes:
        """An event about the newest item."""
        return self._event(kind, output_index=len(self._output) - 1, **fields)

    def _of_response(self, kind: str) -> bytes:
        return self._event(kind, response=self._body)

    def _event(self, kind: str, **fields: object) -> bytes:
        self._sequence += 1
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        return f"event: {kind}\ndata: {encode(event)}\n\n".encode()


@dataclass(frozen=True, slots=True)
class RequestItem:
    """Item of a request. ``message`` has nothing but what the item shows: content, reasoning, a call or a result."""

    item_id: str
    message: Message

    def body(self) -> dict[str, Any]:
        """The item as the request may have sent it. Media at URLs have become data: URLs."""
        message = self.message
        fields: dict[str, Any]
        if message.role == "tool":
            content = [_input_part(part, "input_text") for part in message.parts]
            fields = {"type": "function_call_output", "call_id": message.tool_call_id, "output": content}
        elif message.reasoning:
            texts = [{"type": "reasoning_text", "text": message.reasoning}]
            fields = {"type": "reasoning", "summary": [], "content": texts}
        elif message.tool_calls:
            (call,) = message.tool_calls
            fields = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        else:
            text_type = "output_text" if message.role == "assistant" else "input_text"
            content = [_input_part(part, text_type) for part in message.parts]
            fields = {"type": "message", "role": message.role, "content": content}
        return {"id": self.item_id, "status": "completed", **fields}


def input_items(messages: Sequence[Message], response_id: str) -> list[RequestItem]:
    """The items of a request, in order. Nothing is encoded yet."""
    found: list[tuple[str, Message]] = []
    for message in messages:
        if message.role == "tool":
            found.append(("fco", message))
            continue
        if message.reasoning:
            found.append(("rs", Message(message.role, (), reasoning=message.reasoning)))
        if message.parts:
            found.append(("msg", Message(message.role, message.parts)))
        found += [("fc", Message(message.role, (), (call,))) for call in message.tool_calls]
    suffix = response_id.partition("_")[2]
    return [RequestItem(f"{prefix}_{suffix}_in{place}", message) for place, (prefix, message) in enumerate(found)]


def _input_part(part: Part, text_type: str) -> Mapping[str, object]:
    if isinstance(part, TextPart):
        more: dict[str, object] = {"annotations": []} if text_type == "output_text" else {}
        return {"type": text_type, "text": part.text, **more}
    data = b64encode(part.data).decode()
    if part.modality is Modality.AUDIO:
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return {"type": "input_image", "detail": "auto", "image_url": f"data:{_media_type(part)};base64,{data}"}


def _media_type(part: MediaPart) -> str:
    """By the first bytes; the gateway does not decode images."""
    for begin, media_type in ((b"\xff\xd8", "image/jpeg"), (b"GIF8", "image/gif"), (b"RIFF", "image/webp")):
        if part.data.startswith(begin):
            return media_type
    return "image/png"
