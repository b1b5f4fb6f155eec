"""Typed access to fields of a model's configuration files."""

from collections.abc import Mapping
from typing import Any

from triptych.families.model_files import BadModel, Json, ModelFiles

MOST_TILES = 256
"""Of an image; published models have 4 to 40."""


def section(config: Json, name: str, default_type: str, defaults: Mapping[str, Json]) -> dict[str, Any]:
    """A nested configuration with the ``defaults`` of its ``model_type``, which it may omit. Raises BadModel."""
    value = config.get(name)
    if not isinstance(value, dict):
        raise BadModel(f"config.json has no {name}")
    model_type = value.get("model_type", default_type)
    return {**defaults.get(model_type, {}), **value, "model_type": model_type}


def integer(fields: Json, *names: str) -> int:
    """The first field that is present, a positive integer. Raises BadModel."""
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadModel(f"{name} is {value!r}, not a positive integer")
        return value
    raise BadModel(f"the model's configuration has no {names[0]}")


def tile_limit(fields: Json, name: str) -> int:
    """The most tiles of an image. Raises BadModel, also beyond ``MOST_TILES``: every arrangement of so many is compared."""
    limit = integer(fields, name)
    if limit > MOST_TILES:
        raise BadModel(f"{name} is {limit}, more than {MOST_TILES}")
    return limit


def square(fields: Json, name: str) -> int:
    """The side of a square: a number, a pair, ``height`` and ``width``, or an edge. Raises BadModel."""
    value = fields.get(name)
    sides = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    sides = [side for side in sides if side is not None]
    if not sides or any(side != sides[0] for side in sides):
        raise BadModel(f"{name} is {value!r}, not a square")
    return integer({name: sides[0]}, name)


def named_token(files: ModelFiles, name: str, default: str | None = None) -> str:
    """A special token by its name in the tokenizer's configuration (``image_token``). Raises BadModel."""
    config = files.tokenizer_config
    for names in (config, config.get("model_specific_special_tokens"), config.get("extra_special_tokens")):
        token = names.get(name) if isinstance(names, dict) else None
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            return content
    if default is None:
        raise BadModel(f"tokenizer_config.json names no {name}")
    return default
