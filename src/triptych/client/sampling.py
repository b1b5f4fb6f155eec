"""Sampling parameters from keyword arguments."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from triptych.client import checks
from triptych.domain.bounds import Between
from triptych.domain.sampling import PARAMETERS, Grammar, Parameter, ResponseFormat, SamplingParams
from triptych.errors import InvalidRequest

_FORMATS = "a triptych.domain.sampling.ResponseFormat or a mapping whose type is text, json_object or json_schema"


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters among ``given``, validated and converted. Raises InvalidRequest."""
    return SamplingParams(**{name: _converted(row, given[name]) for name, row in PARAMETERS.items() if name in given})


def _converted(row: Parameter, value: Any) -> Any:
    """Convert to the row's type and check its bounds."""
    if isinstance(row.bound, Between) and row.kind is not float:
        return checks.integer(row.name, value, int(row.bound.low), int(row.bound.high))
    converted = _BY_KIND[row.kind](row.name, value)
    if row.bound is not None and (fault := row.bound.fault(row.name, converted)) is not None:
        raise InvalidRequest(fault, param=row.name)
    return converted


def _switch(name: str, value: Any) -> bool:
    return checks.of_type(name, value, bool, "True or False")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    """A single string counts as a list of one, as in the OpenAI API."""
    if isinstance(value, str):
        value = (value,)
    return tuple(
        checks.text(name, entry, "a string or a list of strings")
        for entry in checks.several(name, value, "a string or a list of strings")
    )


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(checks.integer(name, entry) for entry in checks.several(name, value, "a list of token ids"))


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Token ids and biases, from a mapping (ids may be strings, as in JSON) or pairs."""
    wanted = "a mapping from token ids to biases, or pairs of both"
    pairs = value.items() if isinstance(value, Mapping) else checks.several(name, value, wanted)
    biases = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise checks.wrong(name, wanted, value)
        token_id, bias = pair
        if isinstance(token_id, str) and token_id.isascii() and token_id.isdigit() and len(token_id) <= 10:
            token_id = int(token_id)
        biases.append((checks.integer(name, token_id), checks.number(name, bias)))
    return tuple(biases)


def _response_format(name: str, value: Any) -> ResponseFormat | None:
    if isinstance(value, ResponseFormat):
        checks.of_type(name, value.grammar, Grammar, "of a triptych.domain.sampling.Grammar")
        checks.text(name, value.schema)
        return value
    if isinstance(value, Mapping):
        match value.get("type"):
            case "text":
                return None
            case "json_object":
                return ResponseFormat(Grammar.JSON_OBJECT)
            case "json_schema":
                return ResponseFormat(Grammar.JSON_SCHEMA, _schema(name, value.get("json_schema")))
    raise checks.wrong(name, _FORMATS, value)


def _schema(name: str, described: Any) -> str:
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        wanted = "of type json_schema and needs {'json_schema': {'schema': {...}}}"
        raise checks.wrong(name, wanted, described)
    try:
        return checks.text(name, json.dumps(schema, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name}: the schema cannot be written as JSON: {error}", param=name) from None


_BY_KIND: Mapping[Any, Callable[[str, Any], Any]] = {
    float: checks.number,
    bool: _switch,
    tuple[str, ...]: _strings,
    tuple[int, ...]: _token_ids,
    tuple[tuple[int, float], ...]: _biases,
    ResponseFormat | None: _response_format,
}
"""Converters by type; integers are converted with their bounds."""
