"""The base class of all request bodies, and helpers for error messages."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

_INT64 = 2**63
_SHOWN_CHARS = 60


class Api(BaseModel):
    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True
    )


def shown(value: object) -> str:
    """A client's value for an error message, truncated; containers are not serialized."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, int) and abs(value) >= _INT64:
        return "an integer of more than 64 bits"
    if isinstance(value, str) and len(value) > _SHOWN_CHARS:
        return json.dumps(value[:_SHOWN_CHARS]) + f"... of {len(value)} characters"
    return json.dumps(value, default=str)


class Unless:
    """Accepts only values with no effect, for fields that are not supported."""

    def __init__(self, *harmless: object, hint: str = "this is not supported; leave it out") -> None:
        self._harmless = harmless
        self._hint = hint

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        del source, handler
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        del schema, handler
        return {"enum": list(self._harmless), "description": self._hint}

    def _check(self, value: object) -> object:
        if not any(type(value) is type(harmless) and value == harmless for harmless in self._harmless):
            raise PydanticCustomError("unsupported", "{hint}", {"hint": self._hint})
        return value


def type_tag(value: Any) -> str:
    """The discriminator tag of a union value, from its ``type``.

    Tags start with "#" so that error paths can tell them from field names.
    """
    return f"#{value['type'] if isinstance(value, dict) else value.type}"
