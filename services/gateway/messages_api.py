"""Requests of Anthropic's Messages API, read into the same form as chats."""

from triptych.domain.chat import ToolCall, ToolChoice
from triptych.domain.media import Modality
from triptych.errors import InvalidRequest

from .blobs import ExtractedBody
from .messages_models import (
    AssistantBlock,
    Base64Source,
    ClientMessage,
    CountTokensRequest,
    ImageBlock,
    MessagesRequest,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
    UserBlock,
)
from .openai_api import (
    ParsedRequest,
    document_of,
    json_schema,
    json_text,
    named,
    sampling_of,
    template_kwargs,
    validated,
    with_blobs,
)
from .request_fields import On, undeclared
from .turns import Turns

_FIELDS = {
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs.enable_thinking": "thinking.type",
    "chat_template_kwargs.thinking_budget": "thinking.budget_tokens",
}
"""This API's fields by their names in chat."""


def parse_messages(body: bytes | bytearray, max_item_bytes: int) -> ParsedRequest:
    """Parse the body of ``POST /v1/messages``. Raises InvalidRequest or InvalidMedia, naming the field in ``param``."""
    return with_blobs(body, lambda extracted, limit: _messages(extracted, limit, MessagesRequest), max_item_bytes)


def parse_count_tokens(body: bytes | bytearray, max_item_bytes: int) -> ParsedRequest:
    """Parse the body of ``POST /v1/messages/count_tokens``. Raises what ``parse_messages`` raises."""
    return with_blobs(body, lambda extracted, limit: _messages(extracted, limit, CountTokensRequest), max_item_bytes)


def _messages(extracted: ExtractedBody, max_item_bytes: int, model: type[CountTokensRequest]) -> ParsedRequest:
    request = validated(document_of(extracted.rest), model)
    ignored = named(undeclared(request, On.MESSAGES))
    turns = Turns("messages", max_item_bytes, extracted)
    if request.system is not None:
        turns.begin("system", "system")
        for text in [request.system] if isinstance(request.system, str) else [block.text for block in request.system]:
            turns.text(text)
    for index, message in enumerate(request.messages):
        _read_message(turns, message, f"messages[{index}]")
    if request.messages[-1].role == "assistant":
        param = f"messages[{len(request.messages) - 1}]"
        raise InvalidRequest(f"{param}: an answer that goes on with a message is not supported", param=param)
    choice, thinking, output = request.tool_choice, request.thinking, request.output_config
    shown = request.tools if request.tools and not (choice and choice.type == "none") else []
    generates = request if isinstance(request, MessagesRequest) else None
    return ParsedRequest(
        model=request.model,
        messages=turns.messages,
        sampling=sampling_of(
            request,
            max_tokens=generates.max_tokens if generates else None,
            stop=tuple((generates.stop_sequences if generates else None) or ()),
            response_format=json_schema(output.format.json_schema, "output_config.format.schema")
            if output and output.format
            else None,
        ),
        stream=generates is not None and bool(generates.stream),
        tools=turns.functions(shown, "input_schema"),
        tool_choice=_tool_choice(request),
        cache_salt=(generates.cache_salt if generates else None) or "",
        template_kwargs=template_kwargs(
            request.chat_template_kwargs,
            reasoning_effort=output and output.effort,
            enable_thinking=thinking and thinking.type != "disabled",
            thinking_budget=thinking and thinking.budget_tokens,
        ),
        separates_reasoning=True,
        ignored=ignored,
        remote=tuple(turns.remote),
        fields={**_FIELDS, **turns.fields},
    )


def _read_message(turns: Turns, message: ClientMessage, param: str) -> None:
    if isinstance(message.content, str):
        turns.begin(message.role, param)
        turns.text(message.content)
        return
    in_message = False
    for place, block in enumerate(message.content):
        at = f"{param}.content[{place}]"
        if isinstance(block, ToolResultBlock):
            turns.begin("tool", at, block.tool_use_id)
            in_message = False
            for number, part in enumerate(block.content if not isinstance(block.content, str) else ()):
                _read_block(turns, part, f"{at}.content[{number}]")
            if isinstance(block.content, str):
                turns.text(block.content)
            continue
        if not in_message:
            turns.begin(message.role, param)
            in_message = True
        _read_block(turns, block, at)


def _read_block(turns: Turns, block: UserBlock | AssistantBlock | ResultBlock, param: str) -> None:
    match block:
        case TextBlock(text=text):
            turns.text(text)
        case ImageBlock(source=Base64Source(data=data)):
            turns.item(Modality.IMAGE, data, f"{param}.source.data", inline=True)
        case ImageBlock(source=UrlSource(url=url)):
            turns.item(Modality.IMAGE, url, f"{param}.source.url")
        case ThinkingBlock(thinking=text):
            turns.think(text)
        case ToolUseBlock(id=call_id, name=name, input=given):
            turns.call(ToolCall(call_id, name, json_text(given, f"{param}.input")), f"{param}.input")


def _tool_choice(request: CountTokensRequest) -> ToolChoice:
    choice = request.tool_choice
    if choice is None:
        return ToolChoice()
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest("tool_choice.name: goes with type 'tool', and only with it", param="tool_choice.name")
    return ToolChoice(
        required=choice.type == "any", name=choice.name or "", parallel=not choice.disable_parallel_tool_use
    )
