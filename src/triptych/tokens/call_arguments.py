"""Arguments of a call, converted to JSON while the model writes them. Every reader looks at each character once."""

import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from math import isfinite
from typing import Any, NamedTuple, Protocol

from triptych.tokens.tool_calls import Json, Literals, Tags, possible_prefix

_MAX_WORD_CHARS = 256
_MAX_REFERENCES = 16
_MAX_ALTERNATIVES = 256
NAME = re.compile(rf"[^\s:<>{{}}\[\]()\"'=,]{{1,{_MAX_WORD_CHARS}}}")
KEY = re.compile(rf"[^<>\"\n]{{1,{_MAX_WORD_CHARS}}}")
_NUMBER = re.compile(r"[0-9]{1,9}")
_SPACE = re.compile(r"\s*")


class ArgumentsReader(Protocol):
    """``ended`` is None while the arguments are incomplete, and False once they are malformed."""

    ended: bool | None

    def feed(self, text: str) -> tuple[str, int]:
        """The JSON that this text completes, and how much of it was read: the rest comes again with what follows it."""
        ...


def reader_of(form: Json | Tags | Literals, schema: Mapping[str, Any]) -> ArgumentsReader:
    """A reader of the arguments of a tool, whose parameters have this JSON Schema."""
    match form:
        case Json():
            return JsonReader()
        case Tags():
            return TagsReader(form, schema)
        case Literals():
            return LiteralsReader(form)


# --- marks with names -------------------------------------------------------------------------------------------------


class Matched(NamedTuple):
    end: int
    """Position after the marks."""
    name: str


class Marks:
    """Marks with a name, as in ``CallSyntax``: ``@`` is a name, ``#`` a number, white space any of at most 256 characters."""

    def __init__(self, marks: str, name: re.Pattern[str] = NAME) -> None:
        kinds = {"@": name, "#": _NUMBER}
        pieces = [piece for piece in re.split(r"(\s+|[@#])", marks) if piece]
        self._pieces = [None if piece.isspace() else kinds.get(piece, piece) for piece in pieces]

    def match(self, text: str, at: int = 0) -> Matched | bool | None:
        """Where they end. False if the text differs, None while it may still be equal."""
        name = ""
        for piece in self._pieces:
            if piece is None:
                start, at = at, end_of_space(text, at)
                if at - start > _MAX_WORD_CHARS:
                    return False
            elif isinstance(piece, str):
                if not text.startswith(piece, at):
                    return None if piece.startswith(text[at : at + len(piece)]) else False
                at += len(piece)
            else:
                if at == len(text):
                    return None
                found = piece.match(text, at)
                if found is None:
                    return False
                if found.end() == len(text):
                    return None if len(found[0]) < _MAX_WORD_CHARS else False
                name, at = name or found[0], found.end()
        return Matched(at, name)


def end_of_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _escaped(text: str) -> str:
    """As within the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


# --- JSON -------------------------------------------------------------------------------------------------------------


class JsonReader:
    """Passes on a JSON object as it is written, up to its end; with ``depth``, the rest of the objects around it."""

    _OUTSIDE = re.compile(r'[{}\[\]"]')
    _INSIDE = re.compile(r'["\\]')

    def __init__(self, depth: int = 0) -> None:
        self.ended: bool | None = None
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> tuple[str, int]:
        at = 0
        if self._is_escaped and text:
            self._is_escaped, at = False, 1
        while (match := (self._INSIDE if self._in_string else self._OUTSIDE).search(text, at)) is not None:
            mark, at = match[0], match.end()
            if mark == "\\":
                self._is_escaped = at == len(text)
                at += 1
            elif mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    self.ended = True
                    return text[:at], at
        return text, len(text)


def is_object(text: str) -> bool:
    """Whether it is a JSON object that ``read_json`` takes."""
    try:
        return isinstance(read_json(text), dict)
    except (ValueError, RecursionError):
        return False


def read_json(text: str) -> Any:
    """A value from JSON. Raises RecursionError, or ValueError, also for NaN, infinities and numbers beyond floats."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(number: str) -> float:
    value = float(number)
    if not isfinite(value):
        raise ValueError(f"{number[:40]} is no JSON, or beyond floats")
    return value


# --- tags -------------------------------------------------------------------------------------------------------------


class TagsReader:
    """Reads arguments between marks. A string is passed on while it is written; another value when it is complete."""

    def __init__(self, form: Tags, schema: Mapping[str, Any]) -> None:
        self.ended: bool | None = None
        self._form = form
        self._key = Marks(form.key, KEY)
        self._end = Marks(form.end)
        self._schema = schema
        self._value: list[str] | None = None
        """The value so far, if it is not passed on at once."""
        self._in_value = self._has_begun = False
        self._types: frozenset[str] | None = None
        self._before = "{"

    def feed(self, text: str) -> tuple[str, int]:
        out: list[str] = []
        at, before = 0, -1
        while self.ended is None and at != before:
            before, at = at, (self._in_text if self._in_value else self._between)(text, at, out)
        return "".join(out), at

    def _between(self, text: str, at: int, out: list[str]) -> int:
        at = end_of_space(text, at)
        key, end = self._key.match(text, at), self._end.match(text, at)
        if isinstance(end, Matched):
            out.append("{}" if self._before == "{" else "}")
            self.ended = True
            return end.end
        if isinstance(key, Matched):
            self._types = types_of(self._properties.get(key.name), self._schema)
            is_text = self._types == frozenset(("string",))
            out.append(f"{self._before}{json.dumps(key.name, ensure_ascii=False)}: " + '"' * is_text)
            self._before = ", "
            self._value, self._in_value, self._has_begun = None if is_text else [], True, not self._form.on_lines
            return key.end
        if key is False and end is False:
            self.ended = False
        return at

    @property
    def _properties(self) -> Mapping[str, Any]:
        schema = resolved(self._schema, self._schema)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return properties if isinstance(properties, dict) else {}

    def _in_text(self, text: str, at: int, out: list[str]) -> int:
        if not self._has_begun:
            if at == len(text):
                return at
            self._has_begun = True
            at += text[at] == "\n"
        found = text.find(self._form.value_end, at)
        end = found if found >= 0 else len(text) - possible_prefix(text[at:], self._form.value_end)
        piece = text[at:end]
        if self._form.on_lines:
            piece = piece.removesuffix("\n")
        if self._value is None:
            out.append(_escaped(piece))
        else:
            self._value.append(piece)
        if found < 0:
            return at + len(piece)
        out.append('"' if self._value is None else _converted("".join(self._value), self._types))
        self._in_value = False
        return found + len(self._form.value_end)


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """What a schema refers to within ``root``, or itself."""
    for _ in range(_MAX_REFERENCES):
        name = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(name, str):
            return schema
        schema = root
        for step in name.removeprefix("#").strip("/").split("/"):
            schema = schema.get(step) if isinstance(schema, dict) else None
    return None


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str] | None:
    """The JSON types that a schema allows; None if it does not say, or refers to too many others."""
    kinds: set[str] = set()
    pending = [schema]
    for _ in range(_MAX_ALTERNATIVES):
        if not pending:
            return frozenset(kinds)
        found = resolved(pending.pop(), root)
        if not isinstance(found, dict):
            return None
        given, values = found.get("type"), found.get("enum", [found.get("const")])
        options = next((found[name] for name in ("anyOf", "oneOf", "allOf") if name in found), None)
        if given is not None:
            kinds.update(map(str, given if isinstance(given, list) else [given]))
        elif isinstance(values, list) and found.keys() & {"enum", "const"}:
            kinds.update(map(_type_of, values))
        elif isinstance(options, list):
            pending += options
        else:
            return None
    return None


_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_WORDS = {"True": "true", "False": "false", "None": "null"}


def _type_of(value: object) -> str:
    return _TYPES.get(type(value), "")


def _converted(text: str, types: frozenset[str] | None) -> str:
    """A value as JSON: what it says if its parameter may be that, else a string."""
    given = text.strip()
    written = _WORDS.get(given, given) if types is not None else given
    try:
        kind = _type_of(read_json(written))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types is None:
        fits = kind != "string"
    else:
        fits = "string" not in types or (kind != "string" and not types.isdisjoint({kind, _wider(kind)}))
    return written if fits else json.dumps(text, ensure_ascii=False)


def _wider(kind: str) -> str:
    return "number" if kind == "integer" else kind


# --- literals ---------------------------------------------------------------------------------------------------------


class _Next(Enum):
    KEY = auto()
    SEPARATOR = auto()
    VALUE = auto()
    MORE = auto()
    """A comma, or the end of what is open."""


class LiteralsReader:
    """Reads names with literals of Python or Gemma. Strings are passed on while they are written."""

    _WORD = re.compile(rf"[^\s,:=()\[\]{{}}\"'<>]{{1,{_MAX_WORD_CHARS}}}")
    _JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
    _ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([^xuU]))", re.DOTALL)
    _PART_OF_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?")
    _ESCAPES: Mapping[str, str] = dict(zip("ntrbfav0\\'\"/\n", (*"\n\t\r\b\f\a\v\0\\'\"/", ""), strict=True))

    def __init__(self, form: Literals) -> None:
        self.ended: bool | None = None
        self._form = form
        self._open = [form.end]
        """The marks that close what is open."""
        self._next = _Next.KEY
        self._quote = ""
        """The mark that ends the string that is being read."""
        self._stops = re.compile("")
        """What ends the string, or begins an escape in it."""
        self._is_key = False
        self._before = "{"
        self._text, self._at = "", 0
        self._out: list[str] = []

    def feed(self, text: str) -> tuple[str, int]:
        self._text, self._at = text, 0
        while self.ended is None and (self._in_string() if self._quote else self._outside()):
            pass
        written, self._out = "".join(self._out), []
        return written, self._at

    def _outside(self) -> bool:
        """Process one element. Returns whether to go on."""
        self._at = end_of_space(self._text, self._at)
        if self._at == len(self._text):
            return False
        mark = self._text[self._at]
        match self._next:
            case _Next.MORE:
                if mark != ",":
                    return self._close(mark)
                self._before, self._next = ", ", _Next.VALUE if self._open[-1] == "]" else _Next.KEY
            case _Next.SEPARATOR:
                if mark != (self._form.separator if len(self._open) == 1 else ":"):
                    self.ended = False
                    return False
                self._before, self._next = ": ", _Next.VALUE
            case _Next.KEY | _Next.VALUE:
                return self._key_or_value(mark)
        self._at += 1
        return True

    def _key_or_value(self, mark: str) -> bool:
        is_key = self._next is _Next.KEY
        if mark == self._open[-1] and (is_key or mark == "]"):
            return self._close(mark)
        rest = self._text[self._at : self._at + max(map(len, self._form.quotes))]
        quote = next((quote for quote in self._form.quotes if rest.startswith(quote)), "")
        if quote:
            self._write('"')
            self._quote, self._is_key = quote, is_key
            self._stops = re.compile(re.escape(quote) + (r"|\\" if self._form.has_escapes else ""))
            self._at += len(quote)
            return True
        if any(quote.startswith(rest) for quote in self._form.quotes):
            return False
        if not is_key and mark in "[{":
            self._write(mark)
            self._open.append("]" if mark == "[" else "}")
            self._before, self._next = "", _Next.VALUE if mark == "[" else _Next.KEY
            self._at += 1
            return True
        return self._word(is_key=is_key)

    def _word(self, *, is_key: bool) -> bool:
        found = self._WORD.match(self._text, self._at)
        if found is not None and found.end() == len(self._text) and len(found[0]) < _MAX_WORD_CHARS:
            return False
        word = "" if found is None else found[0]
        written = json.dumps(word, ensure_ascii=False) if is_key else _WORDS.get(word, word)
        if not word or not (is_key or written in _WORDS.values() or self._is_number(word)):
            self.ended = False
            return False
        self._write(written)
        self._next = _Next.SEPARATOR if is_key else _Next.MORE
        self._at += len(word)
        return True

    def _is_number(self, word: str) -> bool:
        return self._JSON_NUMBER.fullmatch(word) is not None and isfinite(float(word))

    def _write(self, text: str) -> None:
        self._out.append(self._before + text)
        self._before = ""

    def _close(self, mark: str) -> bool:
        if mark != self._open.pop():
            self.ended = False
            return False
        before = self._before if self._before == "{" else ""
        self._out.append(before + ("]" if mark == "]" else "}"))
        self._before, self._next = "", _Next.MORE
        self._at += 1
        self.ended = None if self._open else True
        return True

    def _in_string(self) -> bool:
        found = self._stops.search(self._text, self._at)
        end = found.start() if found else len(self._text) - possible_prefix(self._text[self._at :], self._quote)
        self._out.append(_escaped(self._text[self._at : end]))
        self._at = end
        if found is None:
            return False
        if found[0] != self._quote:
            return self._escape()
        self._out.append('"')
        self._at = found.end()
        self._quote, self._next = "", _Next.SEPARATOR if self._is_key else _Next.MORE
        return True

    def _escape(self) -> bool:
        found = self._ESCAPE.match(self._text, self._at)
        if found is None:
            if self._PART_OF_ESCAPE.fullmatch(self._text, self._at):
                return False
            self._out.append("\\\\")
            self._at += 1
            return True
        hexadecimal = found[1] or found[2]
        if hexadecimal:
            self._out.append(f"\\u{hexadecimal:0>4}")
        elif found[3]:
            code = int(found[3], 16)
            is_character = code <= 0x10FFFF and not 0xD800 <= code < 0xE000
            self._out.append(_escaped(chr(code) if is_character else found[0]))
        else:
            self._out.append(_escaped(self._ESCAPES.get(found[4], found[0])))
        self._at = found.end()
        return True
