"""The OpenAI chat completions API: what a request may say, and what it says in domain types.

Unknown fields pass unseen, as clients send ever new ones. Fields that are known and would change the answer, but are
not supported, are refused by name unless they ask for nothing (``n: 1``, ``tools: []``, ``logprobs: false``).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError, from_json
from typing_extensions import TypeAliasType

from triptych.domain.chat import MediaPart, Message, Part, SpeakerRole, TextPart
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.errors import InvalidRequest, TriptychError
from triptych.media.data_url import decode_data_url

MAX_STOP_STRINGS = 4
INT64 = 2**63
MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Over all messages of a request: what is parsed is bounded in number, not only in bytes."""
_SHOWN_CHARS = 60
_JSON_WORDS = {"model_type": "must be an object", "list_type": "must be an array"}


def _unless(*harmless: object, hint: str = "this is not supported; leave it out") -> AfterValidator:
    """Accept only values that ask for nothing."""

    def check(value: object) -> object:
        if value not in harmless:
            raise PydanticCustomError("unsupported", "{hint}", {"hint": hint})
        return value

    return AfterValidator(check)


def _as_list(value: object) -> object:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _check_part_type(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "image_url"):
        message = "must be an object of type 'text' or 'image_url', not {got}"
        raise PydanticCustomError("part_type", message, {"got": _shown(value if kind is None else kind)})
    return value


def _part_tag(value: Any) -> str:
    return f"#{value['type'] if isinstance(value, dict) else value.type}"


def _content_tag(value: object) -> str:
    return "#parts" if isinstance(value, list) else "#text"


class _Api(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class ApiTextPart(_Api):
    type: Literal["text"]
    text: str


class ApiImageUrl(_Api):
    url: str
    detail: Literal["auto", "low", "high"] | None = None
    """Taken and without effect: a model's own processor decides the resolution."""


class ApiImagePart(_Api):
    type: Literal["image_url"]
    image_url: ApiImageUrl


ApiPart = Annotated[
    Annotated[ApiTextPart, Tag("#text")] | Annotated[ApiImagePart, Tag("#image_url")],
    Discriminator(_part_tag),
    BeforeValidator(_check_part_type),
]
ApiParts = TypeAliasType("ApiParts", Annotated[list[ApiPart], FailFast()])
# Tags start with "#" so that they can be told from field names where an error says what it is about.
ApiContent = Annotated[
    Annotated[str, Tag("#text")] | Annotated[ApiParts, Tag("#parts")],
    Discriminator(_content_tag),
]


class ApiMessage(_Api):
    role: Literal["system", "developer", "user", "assistant"]
    content: ApiContent
    tool_calls: Annotated[object, _unless(None, [])] = None
    function_call: Annotated[object, _unless(None)] = None
    audio: Annotated[object, _unless(None)] = None


class StreamOptions(_Api):
    include_usage: bool | None = None


class ChatCompletionRequest(_Api):
    """``POST /v1/chat/completions``. ``top_k`` and ``ignore_eos`` are extensions, named as elsewhere in the field."""

    model: str
    messages: Annotated[list[ApiMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    seed: int | None = Field(default=None, ge=0, lt=INT64)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        FailFast(),
        Field(max_length=MAX_STOP_STRINGS),
        BeforeValidator(_as_list),
    ] = Field(default_factory=list)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, _unless(None, 1, hint="only one answer per request is supported")] = None
    tools: Annotated[object, _unless(None, [])] = None
    tool_choice: Annotated[object, _unless(None, "none", "auto")] = None
    functions: Annotated[object, _unless(None, [])] = None
    function_call: Annotated[object, _unless(None, "none", "auto")] = None
    logprobs: Annotated[object, _unless(None, False)] = None
    top_logprobs: Annotated[object, _unless(None, 0)] = None
    logit_bias: Annotated[object, _unless(None, {})] = None
    frequency_penalty: Annotated[object, _unless(None, 0)] = None
    presence_penalty: Annotated[object, _unless(None, 0)] = None
    response_format: Annotated[object, _unless(None, {"type": "text"})] = None
    modalities: Annotated[object, _unless(None, [], ["text"])] = None
    audio: Annotated[object, _unless(None)] = None
    prediction: Annotated[object, _unless(None)] = None
    web_search_options: Annotated[object, _unless(None)] = None


@dataclass(frozen=True, slots=True)
class ParsedChat:
    """A request in domain types, without what the server adds (id, time limit)."""

    model: str
    messages: tuple[Message, ...]
    sampling: SamplingParams
    stream: bool
    include_usage: bool


def parse(body: bytes, max_image_bytes: int) -> ParsedChat:
    """Read a request's body: JSON, its fields, the data URLs in it. Blocks in proportion to the body.

    Raises InvalidRequest or InvalidMedia, naming the field at fault in ``param``.
    """
    try:
        document = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    _check_parts(document.get("messages"))
    try:
        request = ChatCompletionRequest.model_validate(document)
    except ValidationError as error:
        raise _translate(error.errors(include_url=False, include_context=False)[0]) from None
    return ParsedChat(
        model=request.model,
        messages=tuple(_message(message, i, max_image_bytes) for i, message in enumerate(request.messages)),
        sampling=_sampling(request),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
    )


def _check_parts(messages: object) -> None:
    if not isinstance(messages, list):
        return
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    count = sum(len(content) for content in contents if isinstance(content, list))
    if count > MAX_PARTS:
        raise InvalidRequest(f"messages: {count} content parts, the limit is {MAX_PARTS}", param="messages")


def _translate(detail: ErrorDetails) -> InvalidRequest:
    param = ""
    for step in detail["loc"]:
        if isinstance(step, int):
            param += f"[{step}]"
        elif not step.startswith("#"):
            param += f".{step}" if param else step
    message = _JSON_WORDS.get(detail["type"], detail["msg"].replace(" after validation", ""))
    if detail["type"] not in ("missing", "part_type"):
        message = f"{message} (got {_shown(detail['input'])})"
    return InvalidRequest(f"{param}: {message}" if param else message, param=param or None)


def _shown(value: object) -> str:
    """A value of the caller's, cut to what a message can hold; no container is written out to be thrown away."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, int) and abs(value) >= INT64:
        return "an integer of more than 64 bits"
    if isinstance(value, str) and len(value) > _SHOWN_CHARS:
        return json.dumps(value[:_SHOWN_CHARS]) + f"... of {len(value)} characters"
    return json.dumps(value, default=str)


def _message(message: ApiMessage, index: int, max_image_bytes: int) -> Message:
    role: SpeakerRole = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return Message(role, (TextPart(message.content),))
    return Message(
        role,
        tuple(
            _part(part, f"messages[{index}].content[{i}]", max_image_bytes) for i, part in enumerate(message.content)
        ),
    )


def _part(part: ApiTextPart | ApiImagePart, where: str, max_image_bytes: int) -> Part:
    if isinstance(part, ApiTextPart):
        return TextPart(part.text)
    param = f"{where}.image_url.url"
    url = part.image_url.url
    if url[:5].lower() != "data:":
        raise InvalidRequest(f"{param}: only data: URLs are taken, got {_shown(url)}", param=param)
    try:
        _, data = decode_data_url(url, max_image_bytes)
    except TriptychError as error:
        raise type(error)(f"{param}: {error.message}", param=param) from None
    return MediaPart(Modality.IMAGE, data)


def _sampling(request: ChatCompletionRequest) -> SamplingParams:
    if None not in (request.max_tokens, request.max_completion_tokens) and (
        request.max_tokens != request.max_completion_tokens
    ):
        raise InvalidRequest(
            f"max_tokens ({request.max_tokens}) and max_completion_tokens ({request.max_completion_tokens}) differ; "
            "give one of them",
            param="max_tokens",
        )
    given: Mapping[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "max_tokens": request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens,
        "stop": tuple(request.stop),
        "ignore_eos": request.ignore_eos,
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})
