"""The base classes of all request bodies, and helpers for error messages."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict

_INT64 = 2**63
_SHOWN_CHARS = 60


class Api(BaseModel):
    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Keeping(Api):
    """A body, or a part of one, that keeps what it does not declare in ``model_extra``: it is refused or named later."""

    model_config = ConfigDict(extra="allow")


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


def type_tag(value: Any) -> str:
    """The discriminator tag of a union value, from its ``type``.

    Tags start with "#" so that error paths can tell them from field names.
    """
    return f"#{value['type'] if isinstance(value, dict) else value.type}"
