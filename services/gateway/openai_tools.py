"""Tools: their definitions, the tool choice, and calls made."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from .openai_fields import Api, shown

MAX_TOOLS = 128
MAX_TOOL_NAME_CHARS = 64
MAX_CALL_ID_CHARS = 256


class ApiFunction(Api):
    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ApiTool(Api):
    type: Literal["function"]
    function: ApiFunction


ApiTools = TypeAliasType("ApiTools", Annotated[list[ApiTool], FailFast(), Field(max_length=MAX_TOOLS)])


class ApiNamedFunction(Api):
    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)


class ApiNamedTool(Api):
    type: Literal["function"]
    function: ApiNamedFunction


def _choice_tag(value: Any) -> str:
    return "#word" if isinstance(value, str) else "#named"


def _check_choice(value: object) -> object:
    if value not in ("none", "auto", "required") and not isinstance(value, dict):
        message = "must be 'none', 'auto', 'required' or an object of type 'function', not {got}"
        raise PydanticCustomError("part_type", message, {"got": shown(value)})
    return value


ApiToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#word")] | Annotated[ApiNamedTool, Tag("#named")],
    Discriminator(_choice_tag),
    BeforeValidator(_check_choice),
]


class ApiCalledFunction(Api):
    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)
    arguments: str
    """A JSON object, as text."""


class ApiToolCall(Api):
    id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    type: Literal["function"]
    function: ApiCalledFunction


ApiToolCalls = TypeAliasType("ApiToolCalls", Annotated[list[ApiToolCall], FailFast(), Field(max_length=MAX_TOOLS)])
