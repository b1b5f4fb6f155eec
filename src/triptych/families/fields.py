"""Fields of a model's configuration files, checked as they are read."""

from collections.abc import Mapping
from typing import Any

from triptych.families.model_files import BadModel, Json


def section(config: Json, name: str, default_type: str, defaults: Mapping[str, Json]) -> dict[str, Any]:
    """A nested configuration with the ``defaults`` of its ``model_type``, which may be left out itself. Raises BadModel."""
    found = config.get(name)
    if not isinstance(found, dict):
        raise BadModel(f"config.json has no {name}")
    model_type = found.get("model_type", default_type)
    return {**defaults.get(model_type, {}), **found, "model_type": model_type}


def integer(fields: Json, *names: str) -> int:
    """The first of the fields that is there, a positive integer. Raises BadModel."""
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadModel(f"{name} is {value!r}, not a positive integer")
        return value
    raise BadModel(f"the model's configuration has no {names[0]}")
