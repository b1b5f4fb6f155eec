"""The limits within which ``llguidance`` keeps a JSON Schema, compiles it in bounded time, and does not crash.

The library reads bounds as 64-bit floats, recurses once per level of a schema, and copies long literals at each token.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from math import floor, lcm
from typing import Any

MAX_CHARS = 128 * 1024
"""Characters of a schema as JSON."""
MAX_NUMBER = 2**53 - 1
"""Largest magnitude of bounds and constants; integers beyond would be rounded."""
MAX_DEPTH = 64
"""Levels of objects and arrays within each other."""
MAX_LEVELS = 800
"""Levels of a schema and of all the schemas that it refers to, together."""
MAX_LITERAL = 4096
"""Characters of one string, and how often a pattern repeats one."""
MAX_ALTERNATIVES = 1000
"""Schemas in all ``anyOf`` and ``allOf`` together."""
MAX_MULTIPLE = 10_000
"""A ``multipleOf``, or the least common multiple of several that may apply to one value, in steps of the last decimal
place."""
MAX_MULTIPLES = 50_000
"""Most steps of all ``multipleOf`` together."""
MAX_NAME_PATTERNS = 100
"""Patterns in all ``patternProperties`` together. Each is compared with all the others."""

_LOWS = ("minimum", "exclusiveMinimum")
_BOUNDS = (*_LOWS, "maximum", "exclusiveMaximum")
_PATTERN = re.compile(r"\\.|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|.", re.DOTALL)
_SET_OPERATORS = re.compile(r"(?<!\\)(?:\\\\)*\[\^?\]?(?:\\.|[^\]\\])*?(\[|&&|--|~~)", re.DOTALL)
"""Operators between classes to the library, which are characters to JSON Schema."""
_COMBINED = frozenset(("allOf", "anyOf", "$ref"))
_ANNOTATIONS = frozenset(
    ("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples", "title")
)
_CONSTANTS = frozenset(("const", "enum"))
_TEXTS = frozenset(("$comment", "default", "description", "title"))
"""Annotations that are texts, mostly. They cost nothing."""
_CLASSES = frozenset(("\\d", "\\D", "\\w", "\\W", "\\s", "\\S", ".", "]"))
_MAX_SHOWN = 40

_Bound = tuple[str, Fraction]
"""A keyword and its value."""


def check_schema(schema: object, chars: int) -> None:
    """Raise ValueError, with the place and the limit, for a schema beyond one. ``chars`` is its length as JSON."""
    if chars > MAX_CHARS:
        raise ValueError(f"it has {chars} characters, the limit is {MAX_CHARS}")
    _Check(schema).run()


@dataclass(slots=True)
class _Check:
    schema: object
    trail: list[str] = field(default_factory=list)
    """The names of the place that is visited."""
    heights: dict[int, int] = field(default_factory=dict)
    """Levels of each object and array, by its ``id``."""
    references: set[str] = field(default_factory=set)
    multiples: list[Decimal] = field(default_factory=list)
    lows: list[_Bound] = field(default_factory=list)
    highs: list[_Bound] = field(default_factory=list)
    alternatives: int = 0
    name_patterns: int = 0
    combines: bool = False
    """Whether several schemas may apply to one value."""

    def run(self) -> None:
        height = self._visit(self.schema)
        levels = height + sum(self.heights.get(id(self._target(name)), height) for name in self.references)
        if levels > MAX_LEVELS:
            raise ValueError(f"it has {levels} levels with the schemas it refers to, the limit is {MAX_LEVELS}")
        if self.alternatives > MAX_ALTERNATIVES:
            raise ValueError(f"its anyOf and allOf have {self.alternatives} schemas, the limit is {MAX_ALTERNATIVES}")
        if self.name_patterns > MAX_NAME_PATTERNS:
            raise ValueError(
                f"its patternProperties have {self.name_patterns} patterns, the limit is {MAX_NAME_PATTERNS}"
            )
        if self.combines:
            _refuse_open(self.lows, self.highs)
        self._check_multiples()

    def _check_multiples(self) -> None:
        finest = max((_places(multiple) for multiple in self.multiples), default=0)
        least, total = 1, 0
        for multiple in self.multiples:
            steps = int(Fraction(multiple) * 10 ** (finest if self.combines else _places(multiple)))
            least = lcm(least, steps) if self.combines else steps
            if least > MAX_MULTIPLE:
                raise ValueError(f"multipleOf {multiple}: {least} steps, the limit is {MAX_MULTIPLE}")
            total += least
            if total > MAX_MULTIPLES:
                raise ValueError(f"its multipleOf have {total} or more steps together, the limit is {MAX_MULTIPLES}")

    def _visit(self, value: object) -> int:
        """Check a value and all below it. Returns its levels."""
        if len(self.trail) >= MAX_DEPTH:
            raise self._beyond(f"it has more than {MAX_DEPTH} levels")
        if isinstance(value, str) and not self._annotates():
            self._check_length(value)
        below: Iterable[tuple[str, object]] = ()
        if isinstance(value, dict):
            self._check_keywords(value)
            below = value.items()
        elif isinstance(value, list):
            below = ((str(at), item) for at, item in enumerate(value))
        height = 0
        for name, item in below:
            self._check_length(name)
            self.trail.append(name)
            height = max(height, self._visit(item))
            self.trail.pop()
        if isinstance(value, dict | list):
            self.heights[id(value)] = height + 1
        return height + 1

    def _check_keywords(self, schema: Mapping[str, Any]) -> None:
        bounds = {name: number for name in _BOUNDS if (number := _number(schema.get(name))) is not None}
        for name, given in (*bounds.items(), ("const", schema.get("const")), ("enum", schema.get("enum"))):
            for number in _numbers(given):
                if abs(number) > MAX_NUMBER:
                    raise self._beyond(f"{name} {str(number)[:_MAX_SHOWN]} is beyond ±{MAX_NUMBER}, the limit")
        named = schema.get("patternProperties")
        self.name_patterns += len(named) if isinstance(named, dict) else 0
        for pattern in (schema.get("pattern"), *(named if isinstance(named, dict) else ())):
            if isinstance(pattern, str):
                self._check_pattern(pattern)
        for name in ("anyOf", "allOf"):
            if isinstance(schema.get(name), list):
                self.alternatives += len(schema[name])
        if isinstance(schema.get("$ref"), str):
            self.references.add(schema["$ref"])
        combined = sum(
            len(schema[name]) if isinstance(schema[name], list) and name == "allOf" else 1
            for name in _COMBINED
            if name in schema
        )
        self.combines |= combined > 1 or (combined > 0 and not schema.keys() <= _COMBINED | _ANNOTATIONS)
        if schema.get("type") != "integer":
            exact = [(name, Fraction(Decimal(str(number)))) for name, number in bounds.items()]
            lows = [bound for bound in exact if bound[0] in _LOWS]
            highs = [bound for bound in exact if bound[0] not in _LOWS]
            _refuse_open(lows, highs)
            self.lows += lows
            self.highs += highs
        if (multiple := _number(schema.get("multipleOf"))) is not None and multiple > 0:
            self.multiples.append(Decimal(str(multiple)))

    def _annotates(self) -> bool:
        """Whether the text that is visited is an annotation, and not part of a constant."""
        is_annotation = not _TEXTS.isdisjoint(self.trail[-1:]) or self.trail[-2:-1] == ["examples"]
        return is_annotation and _CONSTANTS.isdisjoint(self.trail)

    def _check_length(self, text: str) -> None:
        if len(text) > MAX_LITERAL:
            raise self._beyond(f"a text has {len(text)} characters, the limit is {MAX_LITERAL}")

    def _check_pattern(self, pattern: str) -> None:
        self._check_length(pattern)
        if (repeats := _repeats(pattern)) > MAX_LITERAL:
            raise self._beyond(f"a pattern repeats a text {repeats} times, the limit is {MAX_LITERAL}")
        if (operator := _SET_OPERATORS.search(pattern)) is not None:
            raise self._beyond(f"a pattern has {operator[1]!r} within a character class, escape it")

    def _target(self, reference: str) -> object:
        """Target that a reference names by a plain JSON pointer, else None."""
        value = self.schema
        for name in reference.removeprefix("#").split("/")[1:]:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def _beyond(self, what: str) -> ValueError:
        place = "/".join(("#", *self.trail))
        shown = place if len(place) <= 2 * _MAX_SHOWN else place[:_MAX_SHOWN] + "..." + place[-_MAX_SHOWN:]
        return ValueError(f"{shown}: {what}")


def _refuse_open(lows: Sequence[_Bound], highs: Sequence[_Bound]) -> None:
    """Refuse a range within one unit of an integer that it excludes, as the library includes it. Raises ValueError."""
    low_units = {floor(value) for _, value in lows if value.denominator > 1}
    high_units = {floor(value) for _, value in highs if value.denominator > 1}
    for name, value in (*lows, *highs):
        units, unit = (high_units, value) if name == "exclusiveMinimum" else (low_units, value - 1)
        if name.startswith("exclusive") and value.denominator == 1 and unit in units:
            raise ValueError(f"{name} {value} with the other bound less than 1 away is not supported")


def _places(number: Decimal) -> int:
    """Decimal places."""
    return max(0, -int(number.as_tuple().exponent))


def _number(value: object) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _numbers(value: object) -> Iterator[int | float]:
    """Numbers in a value."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value
        elif (number := _number(value)) is not None:
            yield number


def _repeats(pattern: str) -> int:
    """Most repetitions of a character or group by a pattern. Classes do not count: they cost nothing."""
    repeats = 1
    before = ""
    for match in _PATTERN.finditer(pattern):
        if match["least"] is not None and before not in _CLASSES:
            repeats *= max(1, int(match["most"] or match["least"]))
        before = match[0]
    return repeats
