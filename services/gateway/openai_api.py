"""Parses request bodies into domain types.

The fields are declared in ``openai_models``, ``openai_parts``, ``openai_tools``.
"""

import hashlib
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from triptych.domain.chat import (
    ANY_TOOL,
    MAX_TEMPLATE_KWARGS_CHARS,
    MediaPart,
    Message,
    Part,
    SpeakerRole,
    TextPart,
    ToolCall,
    ToolChoice,
)
from triptych.domain.lora import LoadLora
from triptych.domain.media import Modality
from triptych.domain.sampling import Grammar, ResponseFormat, SamplingParams
from triptych.errors import InvalidRequest, RequestTooLarge, TriptychError
from triptych.media.data_url import decode_base64, decode_data_url

from .blobs import MEDIA_FIELDS, ExtractedBody, extract_blobs
from .openai_fields import Api, shown
from .openai_models import (
    ApiAssistantMessage,
    ApiMessage,
    ApiResponseFormat,
    ApiToolMessage,
    ChatCompletionRequest,
    CompletionRequest,
    Generation,
    LoadLoraRequest,
    ResponseFormatObject,
    ResponseFormatSchema,
    SamplingFields,
    StreamOptions,
    TokenizeRequest,
    UnloadLoraRequest,
)
from .openai_parts import ApiAudioPart, ApiAudioUrlPart, ApiImagePart, ApiMediaPart, ApiTextPart, ApiVideoPart
from .openai_tools import ApiFunction, ApiNamedTool, ApiToolChoice
from .request_fields import MAX_NAMED, On, is_ignored

MAX_PARTS = 4096
"""Limit over all messages of a request, so that their number is bounded too, not only their bytes."""
MAX_JSON_BYTES = 16 << 20
"""Limit for a body without its media: parsing JSON holds the GIL."""
MAX_PARAM_STEP_CHARS = 60
_WITH_PARTS = ("content", "output", "summary")
"""Fields of messages, and of other items, that list parts."""
_JSON_WORDS = {"model_type": "must be an object", "list_type": "must be an array"}
_REFUSED_WITH_REASON = ("missing", "part_type")

_LEAST_MESSAGE = frozenset({"role", "content"})
_OF_ROLE = {"assistant": ApiAssistantMessage.model_fields.keys(), "tool": ApiToolMessage.model_fields.keys()}
_CALL, _CALLED = frozenset({"id", "type", "function"}), frozenset({"name", "arguments"})
_TOOL = frozenset({"type", "function"})
_ITEM = frozenset({"url", "data"})
_FUNCTION = frozenset(ApiFunction.model_fields)
_NESTED = {"stream_options": frozenset(StreamOptions.model_fields), "structured_outputs": {"json", "json_object"}}
_JSON_SCHEMA = frozenset({"name", "schema"})
_SERVED: Mapping[type[Generation], AbstractSet[str]] = {
    model: frozenset(model.model_fields) for model in (ChatCompletionRequest, CompletionRequest)
}

ModelT = TypeVar("ModelT", bound=Api)
GenerationT = TypeVar("GenerationT", bound=Generation)
ParsedT = TypeVar("ParsedT", bound="ParsedRequest")


@dataclass(frozen=True, slots=True)
class Remote:
    """An item still to be fetched, for ``parts[part]`` of ``messages[message]``."""

    message: int
    part: int
    modality: Modality
    url: str
    param: str


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request in domain types, without what the server adds (id, time limit, fetched media)."""

    model: str
    messages: tuple[Message, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    include_usage: bool = False
    prompt: str | tuple[int, ...] | None = None
    """A raw prompt, or its token ids, instead of messages."""
    further: tuple[str | tuple[int, ...], ...] = ()
    """Prompts whose choices follow."""
    tools: str = ""
    """The tools as JSON text; empty for none."""
    tool_choice: ToolChoice = ANY_TOOL
    cache_salt: str = ""
    priority: int = 0
    service_tier: str = ""
    """The tier, where it decides on the priority."""
    template_kwargs: str = ""
    """Further variables of the chat template, a JSON object; empty for none."""
    separates_reasoning: bool = False
    includes_reasoning: bool = True
    """Whether reasoning that is separated is part of the answer."""
    ignored: tuple[str, ...] = ()
    """Fields without effect."""
    remote: tuple[Remote, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields that hold the media parts, by part: the router's errors name only the part."""
    return_token_strs: bool = False
    """Whether ``/tokenize`` also returns each token's string in the vocabulary."""

    @property
    def choices(self) -> int:
        """Number of choices of all prompts together."""
        return self.sampling.n * (1 + len(self.further))

    def with_media(self, media: Sequence[bytes]) -> "ParsedRequest":
        """Request with the media fetched for ``remote``, in the same order."""
        messages = list(self.messages)
        for remote, data in zip(self.remote, media, strict=True):
            parts = list(messages[remote.message].parts)
            parts[remote.part] = MediaPart(remote.modality, data)
            messages[remote.message] = replace(messages[remote.message], parts=tuple(parts))
        return replace(self, messages=tuple(messages), remote=())


def parse_chat(body: bytes | bytearray, max_item_bytes: int) -> ParsedRequest:
    """Parse the body of a chat completion, data URLs included. CPU time is proportional to the body.

    Raises InvalidRequest or InvalidMedia, naming the field at fault in ``param``.
    """
    return with_blobs(body, _chat, max_item_bytes)


def _chat(extracted: ExtractedBody, max_item_bytes: int) -> ParsedRequest:
    request, ignored = _read_generation(extracted.rest, ChatCompletionRequest, On.CHAT)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    messages, remote, fields = _messages(request.messages, max_item_bytes, extracted)
    limit = _max_tokens(request.max_tokens, request.max_completion_tokens)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    shown_tools = request.tools if request.tools and request.tool_choice != "none" else []
    return ParsedRequest(
        model=request.model,
        messages=messages,
        sampling=_sampling(request, limit, logprobs),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        tools=json_text([tool.model_dump(exclude_none=True) for tool in shown_tools], "tools") if shown_tools else "",
        tool_choice=_tool_choice(request.tool_choice, parallel=request.parallel_tool_calls is not False),
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
        service_tier=_service_tier(request),
        template_kwargs=template_kwargs(request.chat_template_kwargs, reasoning_effort=request.reasoning_effort),
        separates_reasoning=request.separate_reasoning is not False,
        includes_reasoning=request.include_reasoning is not False,
        ignored=ignored,
        remote=remote,
        fields=fields,
    )


def parse_completion(body: bytes | bytearray, max_item_bytes: int) -> ParsedRequest:
    """Parse the body of a plain completion. Raises InvalidRequest."""
    del max_item_bytes  # a raw prompt has no media
    request, ignored = _read_generation(body, CompletionRequest, On.COMPLETIONS)
    if request.best_of is not None and request.best_of not in (1, request.n):
        raise InvalidRequest("best_of: this is not supported; leave it out", param="best_of")
    return ParsedRequest(
        model=request.model,
        messages=(),
        prompt=request.prompt[0],
        further=request.prompt[1:],
        sampling=_sampling(request, request.max_tokens, request.logprobs),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
        service_tier=_service_tier(request),
        ignored=ignored,
    )


def parse_tokenize(body: bytes | bytearray, max_item_bytes: int) -> ParsedRequest:
    """Parse the body of ``/tokenize``; ``model`` is "" if none is given. Raises InvalidRequest or InvalidMedia."""
    return with_blobs(body, _tokenize, max_item_bytes)


def _tokenize(extracted: ExtractedBody, max_item_bytes: int) -> ParsedRequest:
    request = _read(extracted.rest, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    messages, remote, fields = _messages(request.messages or [], max_item_bytes, extracted)
    return ParsedRequest(
        model=request.model or "",
        messages=messages,
        prompt=request.prompt,
        remote=remote,
        fields=fields,
        return_token_strs=bool(request.return_token_strs),
    )


def parse_load_lora(body: bytes | bytearray) -> LoadLora:
    """Parse an order to load an adapter. Raises InvalidRequest."""
    request = _read(body, LoadLoraRequest)
    return LoadLora(request.lora_name, request.lora_path, request.parent or "")


def parse_unload_lora(body: bytes | bytearray) -> str:
    """The name of the adapter to unload. Raises InvalidRequest."""
    return _read(body, UnloadLoraRequest).lora_name


def tenant_salt(tenant: str, cache_salt: str) -> bytes:
    """Salt that separates cached embeddings by tenant and ``cache_salt``. Empty if all may share."""
    if not tenant and not cache_salt:
        return b""
    pair = json.dumps([tenant, cache_salt]).encode()  # unambiguous: distinct pairs give distinct JSON
    return hashlib.blake2b(pair, digest_size=32).digest()


def with_blobs(
    body: bytes | bytearray,
    read: Callable[[ExtractedBody, int], ParsedT],
    max_item_bytes: int,
    fields: Sequence[bytes] = MEDIA_FIELDS,
) -> ParsedT:
    """Parse a body with its blobs extracted, or as plain JSON if a blob is in a field that takes no media."""
    extracted = extract_blobs(body, fields)
    request = read(extracted, max_item_bytes)
    return request if extracted.is_used_up else read(ExtractedBody(body, {}), max_item_bytes)


def _read(body: bytes | bytearray, model: type[ModelT]) -> ModelT:
    return validated(document_of(body), model)


def _read_generation(
    body: bytes | bytearray, model: type[GenerationT], route: On
) -> tuple[GenerationT, tuple[str, ...]]:
    """The request, and its fields without effect."""
    document = document_of(body)
    request = validated(document, model)
    return request, named(_ignored(document, model, route))


def named(ignored: Iterable[str]) -> tuple[str, ...]:
    """The fields without effect, as many as are named. Takes all, as any may be refused."""
    names: set[str] = set()
    for name in ignored:
        if len(names) <= MAX_NAMED:
            names.add(name)
    return tuple(sorted(names))


def document_of(body: bytes | bytearray, listed: str = "messages") -> dict[str, Any]:
    """A body as JSON. ``listed`` is its field with messages. Raises InvalidRequest or RequestTooLarge."""
    body = body.removeprefix(BOM_UTF8)
    if len(body) > MAX_JSON_BYTES:
        raise RequestTooLarge(f"the body has {len(body)} bytes without its media, the limit is {MAX_JSON_BYTES}")
    try:
        document = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    _check_parts([document], "system", ("system",))
    _check_parts(document.get(listed), listed, _WITH_PARTS)
    return document


def validated(document: dict[str, Any], model: type[ModelT]) -> ModelT:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise _translate(error.errors(include_url=False, include_context=False)[0]) from None


def _ignored(document: dict[str, Any], model: type[Generation], route: On) -> Iterator[str]:
    """Fields of a valid document that have no effect. Raises InvalidRequest for those that are refused."""
    yield from _others(document, _SERVED[model], "", route)
    if route is On.CHAT:
        yield from _ignored_of_chat(document)
    for name, served in _NESTED.items():
        if given := document.get(name):
            yield from _others(given, served, f"{name}.", route)
    if wanted := document.get("response_format"):
        schema = wanted.get("json_schema") if wanted["type"] == "json_schema" else None
        yield from _others(wanted, {"type"} if schema is None else {"type", "json_schema"}, "response_format.", route)
        yield from _others(schema or {}, _JSON_SCHEMA, "response_format.json_schema.", route)


def _ignored_of_chat(document: dict[str, Any]) -> Iterator[str]:
    """As ``_ignored``, within messages, tools and the choice of one."""
    for message in document["messages"]:
        if message.keys() != _LEAST_MESSAGE:
            yield from _others(message, _OF_ROLE.get(message["role"], _LEAST_MESSAGE), "messages[].", On.CHAT)
        for call in (message.get("tool_calls") or ()) if message["role"] == "assistant" else ():
            yield from _others(call, _CALL, "messages[].tool_calls[].", On.CHAT)
            yield from _others(call["function"], _CALLED, "messages[].tool_calls[].function.", On.CHAT)
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part["type"]
            if len(part) > len(("type", kind)):
                yield from _others(part, {"type", kind}, "messages[].content[].", On.CHAT)
            if kind != "text" and len(part[kind]) > 1:
                yield from _others(part[kind], _ITEM, f"messages[].content[].{kind}.", On.CHAT)
    for tool in document.get("tools") or ():
        yield from _others(tool, _TOOL, "tools[].", On.CHAT)
        yield from _others(tool["function"], _FUNCTION, "tools[].function.", On.CHAT)
    if isinstance(choice := document.get("tool_choice"), dict):
        yield from _others(choice, _TOOL, "tool_choice.", On.CHAT)
        yield from _others(choice["function"], {"name"}, "tool_choice.function.", On.CHAT)


def _others(given: dict[str, Any], served: AbstractSet[str], path: str, route: On) -> Iterator[str]:
    for name in given.keys() - served:
        if is_ignored(path + name, given[name], route):
            yield path + name


def _check_parts(items: object, name: str, fields: Sequence[str]) -> None:
    count = 0
    for parts in _lists_of_parts(items, fields):
        count += len(parts)
        check_number_of_parts(count, name)


def _lists_of_parts(items: object, fields: Sequence[str]) -> Iterator[list[Any]]:
    """The lists in these fields of items, and of their own items."""
    for item in items if isinstance(items, list) else ():
        for field_name in fields if isinstance(item, dict) else ():
            if isinstance(parts := item.get(field_name), list):
                yield parts
                yield from _lists_of_parts(parts, fields)


def check_number_of_parts(count: int, name: str) -> None:
    """Raises InvalidRequest about the field of this name."""
    if count > MAX_PARTS:
        raise InvalidRequest(f"{name}: {count} content parts, the limit is {MAX_PARTS}", param=name)


def _translate(detail: ErrorDetails) -> InvalidRequest:
    param = ""
    for step in detail["loc"]:
        if isinstance(step, int):
            param += f"[{step}]"
        elif not step.startswith("#"):
            name = step if len(step) <= MAX_PARAM_STEP_CHARS else "..."  # a key chosen by the client
            param += f".{name}" if param else name
    message = _JSON_WORDS.get(detail["type"], detail["msg"].replace(" after validation", ""))
    if detail["type"] not in _REFUSED_WITH_REASON:
        message = f"{message} (got {shown(detail['input'])})"
    return InvalidRequest(f"{param}: {message}" if param else message, param=param or None)


def _messages(
    given: Sequence[ApiMessage], max_item_bytes: int, extracted: ExtractedBody
) -> tuple[tuple[Message, ...], tuple[Remote, ...], dict[str, str]]:
    """The messages, what is to be fetched for them, and ``ParsedRequest.fields``."""
    remote: list[Remote] = []
    fields: dict[str, str] = {}
    messages = []
    for index, message in enumerate(given):
        role: SpeakerRole = "system" if message.role == "developer" else message.role
        calls = (message.tool_calls or ()) if isinstance(message, ApiAssistantMessage) else ()
        if message.content is None and not calls:
            param = f"messages[{index}].content"
            raise InvalidRequest(f"{param}: Field required", param=param)
        parts: list[Part] = []
        if isinstance(message.content, str):
            parts.append(TextPart(message.content))
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ApiTextPart):
                parts.append(TextPart(part.text))
                continue
            place_name = f"messages[{index}].content[{place}]"
            fields[place_name] = f"{place_name}.{part.type}." + ("data" if isinstance(part, ApiAudioPart) else "url")
            read_part = _part(part, index, place, fields[place_name], max_item_bytes, extracted)
            if isinstance(read_part, Remote):
                remote.append(read_part)
                read_part = MediaPart(read_part.modality, b"")
            parts.append(read_part)
        tool_calls = tuple([ToolCall(call.id, call.function.name, call.function.arguments) for call in calls])
        answered = message.tool_call_id if isinstance(message, ApiToolMessage) else ""
        reasoning = ""
        if isinstance(message, ApiAssistantMessage):
            reasoning = message.reasoning or message.reasoning_content or ""
        messages.append(Message(role, tuple(parts), tool_calls, answered, reasoning))
    return tuple(messages), tuple(remote), fields


def _part(
    part: ApiMediaPart, message: int, place: int, param: str, max_item_bytes: int, extracted: ExtractedBody
) -> MediaPart | Remote:
    """``param`` is the field that holds the item."""
    match part:
        case ApiAudioPart(input_audio=audio):
            return inline_item(Modality.AUDIO, extracted.get(audio.data), param, max_item_bytes)
        case ApiImagePart(image_url=where):
            modality, url = Modality.IMAGE, where.url
        case ApiVideoPart(video_url=where):
            modality, url = Modality.VIDEO, where.url
        case ApiAudioUrlPart(audio_url=where):
            modality, url = Modality.AUDIO, where.url
    item = item_at(modality, extracted.get(url), param, max_item_bytes)
    return Remote(message, place, modality, url, param) if item is None else item


def inline_item(modality: Modality, data: str | memoryview, param: str, max_item_bytes: int) -> MediaPart:
    """The item in base64, or in a data: URL. Raises InvalidMedia about ``param``, the field that holds it."""
    with _naming(param):
        decode = decode_data_url if _begin(data).startswith("data:") else decode_base64
        return MediaPart(modality, decode(data, max_item_bytes))


def item_at(modality: Modality, url: str | memoryview, param: str, max_item_bytes: int) -> MediaPart | None:
    """The item in a data: URL; None for one to be fetched. Raises InvalidRequest or InvalidMedia about ``param``."""
    if _begin(url).startswith("data:"):
        return inline_item(modality, url, param, max_item_bytes)
    if isinstance(url, str) and _begin(url).startswith(("https:", "http:")):
        return None
    given = url if isinstance(url, str) else bytes(url).decode("utf-8", "replace")
    raise InvalidRequest(f"{param}: only data:, https: and http: URLs are supported, got {shown(given)}", param=param)


def _begin(text: str | memoryview) -> str:
    """The scheme of a URL, and what follows, in lower case."""
    return (text[:8] if isinstance(text, str) else bytes(text[:8]).decode("latin-1")).lower()


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """Prefix errors of the body with the field that they are about."""
    try:
        yield
    except TriptychError as error:
        raise type(error)(f"{param}: {error.message}", param=param) from None


def _tool_choice(given: ApiToolChoice | None, *, parallel: bool) -> ToolChoice:
    if isinstance(given, ApiNamedTool):
        return ToolChoice(name=given.function.name, parallel=parallel)
    if given != "required" and parallel:
        return ANY_TOOL
    return ToolChoice(required=given == "required", parallel=parallel)


def _max_tokens(old: int | None, new: int | None) -> int | None:
    if None not in (old, new) and old != new:
        raise InvalidRequest(
            f"max_tokens ({old}) and max_completion_tokens ({new}) differ; give one of them", param="max_tokens"
        )
    return old if new is None else new


def _service_tier(request: Generation) -> str:
    return "" if request.priority is not None else request.service_tier or ""


def template_kwargs(given: Mapping[str, Any] | None, **others: object) -> str:
    """Variables of the chat template, those that are not None, as JSON; the ``given`` ones go first. Raises InvalidRequest."""
    variables = {**(given or {})}
    for name, value in others.items():
        if value is not None:
            variables.setdefault(name, value)
    written = json_text(variables, "chat_template_kwargs") if variables else ""
    if len(written) > MAX_TEMPLATE_KWARGS_CHARS:
        message = f"chat_template_kwargs: {len(written)} characters, the limit is {MAX_TEMPLATE_KWARGS_CHARS}"
        raise InvalidRequest(message, param="chat_template_kwargs")
    return written


def _format(request: Generation) -> ResponseFormat | None:
    """What the answer must match, by whichever field asks for it."""
    if request.structured_outputs is None and request.guided_json is None:
        return _response_format(request.response_format)
    formats = {"response_format": _response_format(request.response_format)}
    if (outputs := request.structured_outputs) is not None:
        formats["structured_outputs"] = json_schema(outputs.json_schema, "structured_outputs.json")
        if outputs.json_object:
            formats["structured_outputs.json_object"] = ResponseFormat(Grammar.JSON_OBJECT)
    formats["guided_json"] = json_schema(request.guided_json, "guided_json")
    given = {name: wanted for name, wanted in formats.items() if wanted is not None}
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} exclude each other", param=next(iter(given)))
    return next(iter(given.values()), None)


def json_schema(schema: dict[str, Any] | str | None, param: str) -> ResponseFormat | None:
    if schema is None:
        return None
    return ResponseFormat(Grammar.JSON_SCHEMA, schema if isinstance(schema, str) else json_text(schema, param))


def json_text(value: object, param: str) -> str:
    """A client's value as JSON. Raises InvalidRequest about ``param`` for a number beyond floats, which was read as infinite."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidRequest(f"{param}: has a number that is out of range", param=param) from None


def _response_format(given: ApiResponseFormat | None) -> ResponseFormat | None:
    match given:
        case ResponseFormatObject():
            return ResponseFormat(Grammar.JSON_OBJECT)
        case ResponseFormatSchema(json_schema=wanted):
            param = "response_format.json_schema.schema"
            if wanted.json_schema is None:
                raise InvalidRequest(f"{param}: Field required", param=param)
            return json_schema(wanted.json_schema, param)
    return None


def _sampling(request: Generation, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    return sampling_of(
        request,
        max_tokens=max_tokens,
        logprobs=logprobs,
        response_format=_format(request),
        special_tokens=request.skip_special_tokens is False,
    )


def sampling_of(request: Api, **others: Any) -> SamplingParams:
    """The sampling parameters among the fields of a request, and ``others``."""
    given: dict[str, Any] = {}
    for name in SamplingFields.model_fields.keys() & request.model_fields_set:
        value = getattr(request, name)
        if isinstance(value, list):
            given[name] = tuple(value)
        elif isinstance(value, dict):  # logit_bias
            given[name] = tuple((int(token), bias) for token, bias in value.items())
        elif value is not None:
            given[name] = value
    return SamplingParams(**{**given, **others})
