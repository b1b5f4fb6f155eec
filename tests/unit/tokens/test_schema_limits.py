"""Schemas that the grammar library would not keep, not compile in bounded time, or not survive are refused."""

import json
from typing import Any

import pytest

from triptych.tokens.schema_limits import MAX_CHARS, MAX_LITERAL, check_schema

SAFE = 2**53 - 1
LONG = "a" * (MAX_LITERAL + 1)
NAMED = {"patternProperties": {f"^x{number}-": {"type": "integer"} for number in range(40)}}


def check(schema: object) -> None:
    check_schema(schema, len(json.dumps(schema)))


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def chained(links: int) -> dict[str, Any]:
    """Each schema refers to the next one: the library recurses through all of them."""
    links_to = {f"s{link}": {"type": "array", "items": {"$ref": f"#/$defs/s{link + 1}"}} for link in range(links)}
    return {"$ref": "#/$defs/s0", "$defs": links_to | {f"s{links}": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "integer", "minimum": -SAFE, "maximum": SAFE, "enum": [SAFE], "const": {"a": [-SAFE]}},
        {"type": "object", "properties": {"minimum": {"default": 2**70}, "const": {"type": "integer"}, "enum": {}}},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 0.25, "exclusiveMaximum": 0.5},
        {"type": "object", "properties": {"a": {"exclusiveMinimum": 0, "maximum": 1}, "b": {"maximum": 0.5}}},
        {"type": "string", "pattern": r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-.{1,100000}\d{9999}[\[\]-]$"},
        {"properties": {"a": {"multipleOf": 9973}, "b": {"multipleOf": 9967}, "c": {"multipleOf": 0.01}}},
        {"allOf": [{"multipleOf": 60}, {"multipleOf": 0.25}]},
        {"description": LONG, "title": LONG, "$comment": LONG, "default": LONG, "examples": [LONG]},
        {"type": "object", "properties": {"title": {"type": "string", "description": LONG}}},
        NAMED,
        {"properties": {f"{n}": {"multipleOf": 100} for n in range(400)}},
        nested(60),
        chained(200),
        {"type": "array", "items": {"$ref": "#"}},
    ],
)
def test_ordinary_schemas_pass(schema: object) -> None:
    check(schema)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "integer", "minimum": 10**20, "maximum": 10**21}, rf"#: minimum 10{{20}} is beyond ±{SAFE}"),
        ({"items": {"maximum": -SAFE - 1}}, rf"#/items: maximum -{SAFE + 1} is beyond"),
        ({"exclusiveMinimum": 1e20}, r"exclusiveMinimum 1e\+20 is beyond"),
        ({"anyOf": [{"const": {"a": [-(2**63)]}}]}, "#/anyOf/0: const -9223372036854775808 is beyond"),
        ({"enum": [1, 1e400]}, "enum inf is beyond"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum 0 with the other bound less than 1 away"),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, "exclusiveMaximum -1 with the other bound less than 1 away"),
        ({"allOf": [{"exclusiveMinimum": 2}, {"maximum": 2.5}]}, "exclusiveMinimum 2 with the other bound"),
        ({"multipleOf": 123_456_789}, "multipleOf 123456789: 123456789 steps, the limit is 10000"),
        ({"multipleOf": 0.00123456789}, "multipleOf 0.00123456789: 123456789 steps, the limit is 10000"),
        ({"multipleOf": 9973, "allOf": [{"multipleOf": 9967}]}, "multipleOf 9967: 99400891 steps, the limit"),
        ({"items": {"anyOf": [{"multipleOf": 9000 + n} for n in range(6)]}}, "steps together, the limit is 50000"),
        (
            {"properties": {f"{n}": NAMED for n in range(3)}},
            "its patternProperties have 120 patterns, the limit is 100",
        ),
        ({"pattern": "^(a{1000}){1000}$"}, "a pattern repeats a text 1000000 times, the limit is 4096"),
        ({"patternProperties": {"^a{5000}": {}}}, "a pattern repeats a text 5000 times"),
        ({"pattern": "a{" + "9" * 5000 + "}"}, "#: a text has 5003 characters, the limit is 4096"),
        ({"pattern": "^[[:alpha:]]$"}, r"a pattern has '\[' within a character class"),
        ({"pattern": "^[a-z&&[^b]]$"}, "a pattern has '&&' within a character class"),
        ({"const": {"title": LONG}}, "#/const/title: a text has 4097 characters, the limit is 4096"),
        ({"enum": [{"examples": [LONG]}]}, "#/enum/0/examples/0: a text has 4097 characters"),
        ({"const": LONG}, "#/const: a text has 4097 characters, the limit is 4096"),
        ({"properties": {LONG: {}}}, "#/properties: a text has 4097 characters"),
        ({"anyOf": [{}] * 600, "allOf": [{}] * 600}, "its anyOf and allOf have 1200 schemas, the limit is 1000"),
        (nested(64), "it has more than 64 levels"),
        (chained(400), "levels with the schemas it refers to, the limit is 800"),
        ({"enum": ["x"] * MAX_CHARS}, "characters, the limit is 131072"),
    ],
)
def test_a_schema_beyond_a_limit_is_refused_with_the_place_and_the_limit(schema: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check(schema)


def test_places_with_long_names_are_shortened() -> None:
    with pytest.raises(ValueError, match="is beyond") as caught:
        check({"properties": {"a" * 4000: {"minimum": 10**20}}})
    assert len(str(caught.value)) < 200
