"""Tool calls: how a model writes them, reading them out of what it says, and holding it to making one.

A model is taught its syntax by its chat template, so the template's own text tells which one it is. Two are known:

- ``TAGGED``, of Hermes and Qwen: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, anywhere in a text;
- ``BARE``, of Llama 3: the whole answer is ``{"name": "f", "parameters": {...}}``, several apart by semicolons.

Pure: text in, text and calls out.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from triptych.errors import InvalidRequest

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OTHER_TAGGED = ("<function=", "<arg_key>")
"""Templates that put something else than JSON between the same tags."""
_GUIDANCE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "lenient": False}
"""How arguments are written under a grammar: as templates write them, without any choice of white space."""


class CallSyntax(Enum):
    """The value is the field that a call's arguments are in."""

    TAGGED = "arguments"
    BARE = "parameters"


def find_syntax(template: str) -> CallSyntax | None:
    """The syntax that a chat template teaches; None for one that is not known here, or where there are no tools."""
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
    """The functions of a JSON array in the OpenAI API's form. Raises InvalidRequest."""
    try:
        given = json.loads(tools)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, list):
        raise InvalidRequest("tools: must be a JSON array", param="tools")
    return tuple(_tool(one, f"tools[{place}]") for place, one in enumerate(given))


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


# --- holding a model to a call ---------------------------------------------------------------------------------------


def call_grammar(syntax: CallSyntax, tools: Sequence[Tool], *, parallel: bool) -> str:
    """A grammar in Lark's form, as llguidance reads it, of one call of one of the tools; or more, where ``parallel``."""
    opening, closing, between = (f"{_OPEN}\n", f"\n{_CLOSE}", "\n") if syntax is CallSyntax.TAGGED else ("", "", "; ")
    lines = [
        f"start: call ({json.dumps(between)} call)*" if parallel else "start: call",
        "call: " + " | ".join(f"call{number}" for number in range(len(tools))),
    ]
    for number, tool in enumerate(tools):
        before = f'{opening}{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{syntax.value}": '
        schema = {**tool.parameters, "x-guidance": _GUIDANCE}
        lines.append(f"call{number}: {json.dumps(before)} arguments{number} {json.dumps('}' + closing)}")
        lines.append(f"arguments{number}: %json {json.dumps(schema)}")
    return "\n".join(lines) + "\n"


# --- reading calls ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """``arguments`` is a JSON object as text."""

    name: str
    arguments: str


class CallReader:
    """Tells one answer's calls from its text, however it is cut into pieces.

    A call is told once it is complete. What only looked like the beginning of one is text after all, to the letter;
    white space next to a call is neither. No more is held back than may still turn out to be a call.
    """

    def __init__(self, syntax: CallSyntax, names: frozenset[str]) -> None:
        """``names`` of the tools: where calls have no tags, only an object that names one of them is a call."""
        self._syntax = syntax
        self._names = names
        self._held = ""
        self._gap = ""
        """What comes back as text if the object that has begun is no call."""
        self._object: _ObjectScan | None = None
        self._closing = False
        """A call has been read, and its closing tag may follow."""
        self._after_call = False
        self._plain = False
        """Nothing more can be a call."""

    def feed(self, text: str) -> list[str | Call]:
        """What this piece completes, in order."""
        self._held += text
        told: list[str | Call] = []
        while self._step(told):
            pass
        return told

    def flush(self) -> list[str | Call]:
        """What is still held back, when the answer has ended."""
        text, self._held, self._gap, self._object = self._gap + self._held, "", "", None
        separators = " \t\r\n;" if self._syntax is CallSyntax.BARE else " \t\r\n"
        return [text] if text and not (self._after_call and not text.strip(separators)) else []

    def _step(self, told: list[str | Call]) -> bool:
        """One thing at the head of what is held; whether there may be more."""
        if self._plain:
            _tell(told, self._held)
            self._held = ""
            return False
        if self._object is not None:
            return self._in_object(self._object, told)
        if self._closing:
            return self._at_close()
        return self._between_tagged(told) if self._syntax is CallSyntax.TAGGED else self._between_bare()

    def _between_tagged(self, told: list[str | Call]) -> bool:
        at = self._held.find(_OPEN)
        if at < 0:
            keep = _possible_prefix(self._held, _OPEN)
            said = self._held[: len(self._held) - keep].rstrip()
            _tell(told, said)
            self._held = self._held[len(said) :]
            return False
        said = self._held[:at].rstrip()
        _tell(told, said)
        self._gap = self._held[len(said) : at + len(_OPEN)]
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

    def _in_object(self, scan: "_ObjectScan", told: list[str | Call]) -> bool:
        end = scan.end(self._held)
        if end is None:
            return False
        call = self._parse(self._held[:end]) if end else None
        self._object = None
        if call is None:
            # Not looked into once more: what nests tags and braces would cost the square of its length.
            _tell(told, self._gap + self._held[:end])
            self._held, self._gap = self._held[end:], ""
            self._plain = self._syntax is CallSyntax.BARE
            return True
        told.append(call)
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
            told = json.loads(text, parse_constant=_refuse)
            name, arguments = told.get("name"), told.get(self._syntax.value, {})
            if not isinstance(name, str) or not name or not isinstance(arguments, dict):
                return None
            name.encode()
            written = json.dumps(arguments, ensure_ascii=False)
        except (ValueError, RecursionError):
            return None
        if self._syntax is CallSyntax.BARE and name not in self._names:
            return None
        # A lone surrogate can be written as an escape alone.
        return Call(name, written if _is_unicode(written) else json.dumps(arguments))


class _ObjectScan:
    """Finds where a JSON object ends in a text that grows. Looks at every character once."""

    _OUTSIDE = re.compile(r'[{}\[\]"]')
    _INSIDE = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._in_string = False

    def end(self, text: str) -> int | None:
        """The position after the object; 0 when the text does not begin with one; None when it is still open."""
        if not self._depth:
            self._at = len(text) - len(text.lstrip())
            if self._at == len(text):
                return None
            if text[self._at] != "{":
                return 0
        while (found := (self._INSIDE if self._in_string else self._OUTSIDE).search(text, self._at)) is not None:
            mark = found[0]
            if mark == "\\":
                if found.end() == len(text):  # what is escaped is still to come
                    self._at = found.start()
                    return None
                self._at = found.end() + 1
                continue
            self._at = found.end()
            if mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == 0:
                    return self._at
        self._at = len(text)
        return None


def _tell(told: list[str | Call], text: str) -> None:
    if text:
        told.append(text)


def _possible_prefix(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` with which ``tag`` begins."""
    return next((length for length in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-length:])), 0)


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
