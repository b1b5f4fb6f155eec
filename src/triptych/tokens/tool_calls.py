"""Tool calls: their syntax, parsing them from the model's text, and forcing a call with a grammar.

The chat template teaches the model its syntax, so the template's text identifies it. Two are supported:

- ``TAGGED``, of Hermes and Qwen: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, anywhere in a text;
- ``BARE``, of Llama 3: the whole answer is ``{"name": "f", "parameters": {...}}``, several separated by semicolons.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from triptych.errors import InvalidRequest
from triptych.tokens.schema_limits import check_schema

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OTHER_TAGGED = ("<function=", "<arg_key>")
"""Templates that put something other than JSON between the same tags."""
_GUIDANCE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "lenient": False}
"""Form of arguments under a grammar: as templates write them, without optional white space."""


class CallSyntax(Enum):
    """The value is the name of the field with a call's arguments."""

    TAGGED = "arguments"
    BARE = "parameters"


def find_syntax(template: str) -> CallSyntax | None:
    """The syntax that a chat template teaches; None if it is unknown, or there are no tools."""
    if _OPEN in template and _CLOSE in template:
        return None if any(mark in template for mark in _OTHER_TAGGED) else CallSyntax.TAGGED
    if re.search(r'"name":.{0,40}"parameters":', template, re.DOTALL):
        return CallSyntax.BARE
    return None


@dataclass(frozen=True, slots=True)
class Tool:
    """``parameters`` is the JSON Schema of the arguments."""

    name: str
    parameters: Mapping[str, Any]


def read_tools(tools: str) -> tuple[Tool, ...]:
    """Parse a JSON array of functions in the OpenAI API's format. Raises InvalidRequest."""
    try:
        given = json.loads(tools)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, list):
        raise InvalidRequest("tools: must be a JSON array", param="tools")
    return tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(given))


def _tool(given: object, param: str) -> Tool:
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise InvalidRequest(f"{param}: must be an object with a function that has a name", param=param)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(
            f"{param}.function.parameters: must be a JSON Schema", param=f"{param}.function.parameters"
        )
    return Tool(name, parameters or {"type": "object"})


# --- forcing a call --------------------------------------------------------------------------------------------------


def call_grammar(syntax: CallSyntax, tools: Sequence[Tool], *, parallel: bool) -> str:
    """A Lark grammar, for llguidance, of one call of one of the tools; or several with ``parallel``.

    Raises InvalidRequest for parameters beyond ``schema_limits``, which all the tools share.
    """
    chars = 0
    opening, closing, between = (f"{_OPEN}\n", f"\n{_CLOSE}", "\n") if syntax is CallSyntax.TAGGED else ("", "", "; ")
    lines = [
        f"start: call ({json.dumps(between)} call)*" if parallel else "start: call",
        "call: " + " | ".join(f"call{number}" for number in range(len(tools))),
    ]
    for number, tool in enumerate(tools):
        before = f'{opening}{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{syntax.value}": '
        schema = json.dumps({**tool.parameters, "x-guidance": _GUIDANCE})
        chars += len(schema)
        try:
            check_schema(tool.parameters, chars)
        except ValueError as error:
            raise InvalidRequest(f"tools: the parameters of {tool.name[:64]!r}: {error}", param="tools") from error
        lines.append(f"call{number}: {json.dumps(before)} arguments{number} {json.dumps('}' + closing)}")
        lines.append(f"arguments{number}: %json {schema}")
    return "\n".join(lines) + "\n"


# --- parsing calls ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """``arguments`` is a JSON object as text."""

    name: str
    arguments: str


class CallReader:
    """Separates one answer's calls from its text, however it is chunked.

    A call is returned once it is complete. What only looked like a call is returned as text, unchanged; white space
    next to a call is dropped. Only text that may still become a call is held back.
    """

    def __init__(self, syntax: CallSyntax, names: frozenset[str]) -> None:
        """``names`` are the tools': without tags, only an object that names one of them is a call."""
        self._syntax = syntax
        self._names = names
        self._held = ""
        self._gap = ""
        """Text to return if the started object is no call."""
        self._object: _ObjectScan | None = None
        self._closing = False
        """A call has been read, and its closing tag may follow."""
        self._after_call = False
        self._plain = False
        """Whether no more of the text can be a call."""

    def feed(self, text: str) -> list[str | Call]:
        """Parts that this piece completes, in order."""
        self._held += text
        out: list[str | Call] = []
        while self._step(out):
            pass
        return out

    def flush(self) -> list[str | Call]:
        """The held text, at the end of the answer."""
        text, self._held, self._gap, self._object = self._gap + self._held, "", "", None
        separators = " \t\r\n;" if self._syntax is CallSyntax.BARE else " \t\r\n"
        return [text] if text and not (self._after_call and not text.strip(separators)) else []

    def _step(self, out: list[str | Call]) -> bool:
        """Process one element at the start of the held text. Returns whether to go on."""
        if self._plain:
            _append_text(out, self._held)
            self._held = ""
            return False
        if self._object is not None:
            return self._in_object(self._object, out)
        if self._closing:
            return self._at_close()
        return self._between_tagged(out) if self._syntax is CallSyntax.TAGGED else self._between_bare()

    def _between_tagged(self, out: list[str | Call]) -> bool:
        at = self._held.find(_OPEN)
        if at < 0:
            keep = possible_prefix(self._held, _OPEN)
            text = self._held[: len(self._held) - keep].rstrip()
            _append_text(out, text)
            self._held = self._held[len(text) :]
            return False
        text = self._held[:at].rstrip()
        _append_text(out, text)
        self._gap = self._held[len(text) : at + len(_OPEN)]
        self._held = self._held[at + len(_OPEN) :]
        self._object = _ObjectScan()
        return True

    def _between_bare(self) -> bool:
        rest = self._held.lstrip(" \t\r\n;" if self._after_call else None)
        if not rest:
            return False
        if rest[0] != "{":
            self._plain = True
            return True
        self._gap, self._held = self._held[: len(self._held) - len(rest)], rest
        self._object = _ObjectScan()
        return True

    def _in_object(self, scan: "_ObjectScan", out: list[str | Call]) -> bool:
        end = scan.end(self._held)
        if end is None:
            return False
        call = self._parse(self._held[:end]) if end else None
        self._object = None
        if call is None:
            # Not scanned again: nested tags and braces would cost quadratic time.
            _append_text(out, self._gap + self._held[:end])
            self._held, self._gap = self._held[end:], ""
            self._plain = self._syntax is CallSyntax.BARE
            return True
        out.append(call)
        self._held, self._gap, self._after_call = self._held[end:], "", True
        self._closing = self._syntax is CallSyntax.TAGGED
        return True

    def _at_close(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith(_CLOSE):
            self._held = rest.removeprefix(_CLOSE)
        elif _CLOSE.startswith(rest):
            return False
        self._closing = False
        return True

    def _parse(self, text: str) -> Call | None:
        try:
            fields = json.loads(text, parse_constant=_refuse)
            name, arguments = fields.get("name"), fields.get(self._syntax.value, {})
            if not isinstance(name, str) or not name or not isinstance(arguments, dict):
                return None
            name.encode()
            written = json.dumps(arguments, ensure_ascii=False)
        except (ValueError, RecursionError):
            return None
        if self._syntax is CallSyntax.BARE and name not in self._names:
            return None
        # A lone surrogate can be written only as an escape.
        return Call(name, written if _is_unicode(written) else json.dumps(arguments))


class _ObjectScan:
    """Finds the end of a JSON object in a growing text. Looks at every character once."""

    _OUTSIDE = re.compile(r'[{}\[\]"]')
    _INSIDE = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._in_string = False

    def end(self, text: str) -> int | None:
        """The position after the object; 0 if the text does not start with one; None if it is incomplete."""
        if not self._depth:
            self._at = len(text) - len(text.lstrip())
            if self._at == len(text):
                return None
            if text[self._at] != "{":
                return 0
        while (match := (self._INSIDE if self._in_string else self._OUTSIDE).search(text, self._at)) is not None:
            mark = match[0]
            if mark == "\\":
                if match.end() == len(text):  # the escaped character has not arrived yet
                    self._at = match.start()
                    return None
                self._at = match.end() + 1
                continue
            self._at = match.end()
            if mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == 0:
                    return self._at
        self._at = len(text)
        return None


def _append_text(out: list[str | Call], text: str) -> None:
    if text:
        out.append(text)


def possible_prefix(text: str, tag: str) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of ``tag``, and not all of it."""
    return next((length for length in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-length:])), 0)


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
