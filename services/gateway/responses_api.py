"""Requests of OpenAI's Responses API: read into the same form as chats, and joined to the conversation before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from triptych.domain.chat import ANY_TOOL, Message, TextPart, ToolCall, ToolChoice
from triptych.domain.media import Modality
from triptych.domain.sampling import Grammar, ResponseFormat
from triptych.errors import InvalidRequest

from .blobs import ExtractedBody
from .openai_api import (
    MAX_PARTS,
    ParsedRequest,
    document_of,
    json_schema,
    named,
    sampling_of,
    template_kwargs,
    validated,
    with_blobs,
)
from .openai_models import MAX_MESSAGES
from .request_fields import On, undeclared
from .responses_models import (
    FormatObject,
    FormatSchema,
    InputAudio,
    InputCall,
    InputCallOutput,
    InputContent,
    InputImage,
    InputItem,
    InputMessage,
    InputReasoning,
    InputText,
    ResponsesNamedTool,
    ResponsesRequest,
    ResponsesTool,
)
from .turns import Turns, shifted

_MEDIA_FIELDS = (b'"image_url"', b'"data"')
_LOGPROBS = "message.output_text.logprobs"
_ECHOED = {
    "instructions",
    "max_output_tokens",
    "metadata",
    "model",
    "previous_response_id",
    "service_tier",
    "temperature",
    "top_logprobs",
    "top_p",
}
_FIELDS = {
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""This API's fields by their names in chat."""


@dataclass(frozen=True, slots=True)
class ParsedResponses(ParsedRequest):
    """Until ``continued``, ``messages`` are those of the request itself."""

    instructions: str = ""
    previous: str = ""
    """Id of the response before; empty for none."""
    store: bool = True
    echo: dict[str, Any] = field(default_factory=dict)
    """Fields that the answer repeats."""


def parse_responses(body: bytes | bytearray, max_item_bytes: int) -> ParsedResponses:
    """Parse the body of ``POST /v1/responses``. Raises InvalidRequest or InvalidMedia, naming the field in ``param``."""
    return with_blobs(body, _responses, max_item_bytes, _MEDIA_FIELDS)


def continued(request: ParsedResponses, before: Sequence[Message]) -> ParsedResponses:
    """The request with its instructions and the messages before its own. Raises InvalidRequest for too many."""
    if not (request.instructions or before):
        return request
    first = (Message("system", (TextPart(request.instructions),)),) if request.instructions else ()
    messages = (*first, *before, *request.messages)
    parts = sum(len(message.parts) for message in messages)
    if len(messages) > MAX_MESSAGES or parts > MAX_PARTS:
        raise InvalidRequest(
            f"previous_response_id: with it the conversation has {len(messages)} messages and {parts} content parts, the "
            f"limits are {MAX_MESSAGES} and {MAX_PARTS}",
            param="previous_response_id",
        )
    fields = shifted(request.fields, len(first) + len(before))
    if first:
        fields["messages[0]"] = "instructions"
    return replace(request, messages=messages, fields=fields)


def _responses(extracted: ExtractedBody, max_item_bytes: int) -> ParsedResponses:
    request = validated(document_of(extracted.rest, "input"), ResponsesRequest)
    ignored = named(_ignored(request))
    turns = Turns("input", max_item_bytes, extracted)
    if isinstance(request.input, str):
        turns.begin("user", "input")
        turns.text(request.input)
    for index, item in enumerate(request.input if not isinstance(request.input, str) else ()):
        _read_item(turns, item, f"input[{index}]")
    shown = request.tools if request.tools and request.tool_choice != "none" else []
    logprobs = request.top_logprobs
    if logprobs is None and _LOGPROBS in (request.include or ()):
        logprobs = 0
    return ParsedResponses(
        model=request.model,
        messages=turns.messages,
        sampling=sampling_of(
            request,
            max_tokens=request.max_output_tokens,
            logprobs=logprobs,
            response_format=_format(request),
            special_tokens=request.skip_special_tokens is False,
        ),
        stream=bool(request.stream),
        tools=turns.functions(shown, "parameters"),
        tool_choice=_tool_choice(request),
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
        service_tier="" if request.priority is not None else request.service_tier or "",
        template_kwargs=template_kwargs(
            request.chat_template_kwargs, reasoning_effort=request.reasoning and request.reasoning.effort
        ),
        separates_reasoning=True,
        includes_reasoning=request.include_reasoning is not False,
        ignored=ignored,
        remote=tuple(turns.remote),
        fields={**_FIELDS, **turns.fields},
        instructions=request.instructions or "",
        previous=request.previous_response_id or "",
        store=request.store is not False,
        echo=_echo(request, shown),
    )


def _ignored(request: ResponsesRequest) -> Iterator[str]:
    yield from undeclared(request, On.RESPONSES)
    if set(request.include or ()) - {_LOGPROBS}:
        yield "include"


def _read_item(turns: Turns, item: InputItem, param: str) -> None:
    match item:
        case InputMessage(role="assistant"):
            _begin_answer(turns, param)
            _read_content(turns, item.content, f"{param}.content")
        case InputMessage(role=role):
            turns.begin("user" if role == "user" else "system", param)
            _read_content(turns, item.content, f"{param}.content")
        case InputReasoning(content=content, summary=summary):
            _begin_answer(turns, param)
            for text in content or summary or ():
                turns.think(text.text)
        case InputCall():
            if turns.newest is None or turns.newest.role != "assistant":
                turns.begin("assistant", param)
            turns.call(ToolCall(item.call_id, item.name, item.arguments), f"{param}.arguments")
        case InputCallOutput():
            turns.begin("tool", param, item.call_id)
            _read_content(turns, item.output, f"{param}.output")


def _begin_answer(turns: Turns, param: str) -> None:
    """Begin a message of the assistant, or go on with one that so far has reasoning alone."""
    newest = turns.newest
    if newest is None or newest.role != "assistant" or newest.parts or newest.calls:
        turns.begin("assistant", param)


def _read_content(turns: Turns, content: InputContent, param: str) -> None:
    if isinstance(content, str):
        turns.text(content)
        return
    for place, part in enumerate(content):
        match part:
            case InputImage(image_url=url):
                turns.item(Modality.IMAGE, url, f"{param}[{place}].image_url")
            case InputAudio(input_audio=audio):
                turns.item(Modality.AUDIO, audio.data, f"{param}[{place}].input_audio.data", inline=True)
            case InputText(text=text):
                turns.text(text)


def _tool_choice(request: ResponsesRequest) -> ToolChoice:
    parallel, choice = request.parallel_tool_calls is not False, request.tool_choice
    if isinstance(choice, ResponsesNamedTool):
        return ToolChoice(name=choice.name, parallel=parallel)
    return replace(ANY_TOOL, required=choice == "required", parallel=parallel)


def _format(request: ResponsesRequest) -> ResponseFormat | None:
    match request.text and request.text.format:
        case FormatObject():
            return ResponseFormat(Grammar.JSON_OBJECT)
        case FormatSchema(json_schema=schema):
            return json_schema(schema, "text.format.schema")
    return None


def _echo(request: ResponsesRequest, shown: Sequence[ResponsesTool]) -> dict[str, Any]:
    """The fields of the request that its answer repeats: those whose size the model's context bounds."""
    choice = request.tool_choice or "auto"
    wanted: dict[str, Any] = {"type": "text"}
    if request.text and request.text.format:
        wanted = request.text.format.model_dump(
            include={"type", "name", "json_schema"}, by_alias=True, exclude_none=True
        )
    return {
        **{name: getattr(request, name) for name in sorted(_ECHOED)},
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
        "text": {"format": wanted},
        "tool_choice": choice if isinstance(choice, str) else {"type": "function", "name": choice.name},
        "tools": [
            {"strict": None, **tool.model_dump(include={"type", "name", "description", "parameters"})} for tool in shown
        ],
        "truncation": "disabled",
        "background": False,
    }
