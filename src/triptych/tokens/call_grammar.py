"""Grammars that force a model to call a tool, in the syntax of its chat template."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from triptych.errors import InvalidRequest
from triptych.tokens.call_arguments import KEY, NAME, resolved, types_of
from triptych.tokens.schema_limits import check_schema
from triptych.tokens.tool_calls import CallSyntax, Json, Literals, Tags, Tool

_GUIDANCE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "lenient": False}
"""Form of JSON under a grammar: as templates write it, without optional white space."""
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "x-guidance"})
_OF_PARAMETERS = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_MAX_FIELDS = 64
_SCALARS = frozenset({"number", "integer", "boolean", "null"})


def call_grammar(
    syntax: CallSyntax,
    tools: Sequence[Tool],
    *,
    parallel: bool,
    special_ids: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """A Lark grammar, for llguidance, of one call of one of the tools; or several with ``parallel``.

    ``special_ids`` are the special tokens among the marks. Raises InvalidRequest for parameters beyond ``schema_limits``,
    which all the tools share, and for what the syntax cannot be held to.
    """
    return "\n".join(_Writer(syntax, special_ids).lines(tools, parallel=parallel)) + "\n"


class _Writer:
    def __init__(self, syntax: CallSyntax, special_ids: Mapping[str, int]) -> None:
        self._syntax = syntax
        self._special_ids = special_ids
        longest_first = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._lines: list[str] = []

    def lines(self, tools: Sequence[Tool], *, parallel: bool) -> list[str]:
        syntax, chars = self._syntax, 0
        before, after = self._mark(syntax.opening + syntax.first), self._mark(syntax.closing)
        several = f"call ({self._mark(syntax.between)} call)*" if parallel else "call"
        start = f"{before} {several} {after}" if syntax.is_list else several
        numbers = range(len(tools))
        self._lines = [f"start: {start}", "call: " + " | ".join(f"call{number}" for number in numbers)]
        for number, tool in enumerate(tools):
            chars += len(json.dumps({**tool.parameters, "x-guidance": _GUIDANCE}))
            try:
                check_schema(tool.parameters, chars)
            except ValueError as error:
                raise _refusal(tool, str(error)) from error
            call = f"{self._head(tool)} {self._arguments(tool, f'call{number}')} {self._tail()}"
            self._lines.append(f"call{number}: {call if syntax.is_list else f'{before} {call} {after}'}")
            self._lines += self._rules
        return self._lines

    def _head(self, tool: Tool) -> str:
        name, head = tool.name, self._syntax.heads[0]
        if self._syntax.envelope:
            name = json.dumps(name, ensure_ascii=False)[1:-1]
        elif not NAME.fullmatch(name):
            raise _refusal(tool, f"the syntax {self._syntax.name} cannot write this name")
        before, number, rest = head.partition("#")
        return f"{self._mark(before.replace('@', name))} {'/[0-9]{1,3}/' if number else ''} {self._mark(rest.replace('@', name))}"

    def _tail(self) -> str:
        return self._mark("}" * bool(self._syntax.envelope) + self._syntax.tail)

    def _mark(self, text: str) -> str:
        pieces = self._special.split(text) if self._special is not None else [text]
        return " ".join(
            f"<[{self._special_ids[piece]}]>" if piece in self._special_ids else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )

    def _arguments(self, tool: Tool, rule: str) -> str:
        """A reference to the rule of the arguments, which is added with those that it needs."""
        self._rules: list[str] = []
        form = self._syntax.arguments
        if isinstance(form, Json):
            self._rules = [f"{rule}_arguments: {_json(tool.parameters)}"]
            return f"{rule}_arguments"
        fields = list(self._fields(tool, form, rule))
        if isinstance(form, Tags):
            each = [name if needed else f"{name}?" for name, needed in fields]
        else:
            each = [_with_commas(fields)]
        end = form.end
        return " ".join((*each, self._mark(end)))

    def _fields(self, tool: Tool, form: Tags | Literals, rule: str) -> Iterator[tuple[str, bool]]:
        """The rule of each parameter, and whether it is required."""
        schema = resolved(tool.parameters, tool.parameters)
        if not isinstance(schema, dict):
            raise _refusal(tool, f"the syntax {self._syntax.name} cannot be held to $ref")
        if others := sorted(schema.keys() - _OF_PARAMETERS):
            raise _refusal(tool, f"the syntax {self._syntax.name} cannot be held to {others[0][:64]}")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if missing := [name for name in required if name not in properties]:
            raise _refusal(tool, f"{missing[0][:64]!r} is required, and not among the properties")
        if len(properties) > _MAX_FIELDS:
            raise _refusal(tool, f"{len(properties)} properties, the limit is {_MAX_FIELDS}")
        for number, (name, value) in enumerate(properties.items()):
            if not (KEY if isinstance(form, Tags) else NAME).fullmatch(name):
                raise _refusal(tool, f"the syntax {self._syntax.name} cannot write the name {name[:64]!r}")
            field = f"{rule}_field{number}"
            written = self._value(tool, form, name, value, field)
            self._rules.append(f"{field}: {written}")
            yield field, name in required

    def _value(self, tool: Tool, form: Tags | Literals, name: str, schema: Any, field: str) -> str:
        kinds = types_of(schema, tool.parameters)
        definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        line = "\n" if isinstance(form, Tags) and form.on_lines else ""
        if isinstance(form, Tags):
            before, end = form.key.replace("@", name) + line, line + form.value_end
        elif form.has_escapes:
            return f"{self._mark(name + form.separator)} {self._json_rule({**schema, **definitions}, field)}"
        else:
            before, end = f"{name}{form.separator}", ""
        if kinds is not None and "string" not in kinds and (isinstance(form, Tags) or kinds <= _SCALARS):
            return f"{self._mark(before)} {self._json_rule({**schema, **definitions}, field)} {self._mark(end)}"
        if isinstance(form, Literals):
            before, end = before + form.quotes[0], form.quotes[0]
        choices = schema.get("enum") if isinstance(schema, dict) else None
        if isinstance(choices, list) and all(isinstance(choice, str) and end not in choice for choice in choices):
            return f"{self._mark(before)} ({' | '.join(map(self._mark, choices))}) {self._mark(end)}"
        constraints = sorted(schema.keys() - _NOTES - {"type"}) if isinstance(schema, dict) else []
        is_free = not constraints and (kinds is None or "string" in kinds)
        if not is_free or (isinstance(form, Literals) and kinds != frozenset(("string",))):
            what = constraints[0] if constraints else "its type"
            raise _refusal(tool, f"#/properties/{name}: the syntax {self._syntax.name} cannot be held to {what[:64]}")
        self._rules.append(self._text_rule(f"{field}_text", end.strip()))
        return f"{self._mark(before)} {field}_text"

    def _json_rule(self, schema: Mapping[str, Any], field: str) -> str:
        self._rules.append(f"{field}_json: {_json(schema)}")
        return f"{field}_json"

    def _text_rule(self, rule: str, end: str) -> str:
        """Any text, up to the mark that ends it."""
        if end in self._special_ids:
            number = self._special_ids[end]
            return f"{rule}: (<[^{number}]>)* <[{number}]>"
        return f"{rule}[suffix={json.dumps(end, ensure_ascii=False)}]: /(.|\\n)*/"


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _GUIDANCE})}"


def _with_commas(fields: Sequence[tuple[str, bool]]) -> str:
    """Required fields, and any of the others after them."""
    needed = [name for name, is_needed in fields if is_needed]
    others = [name for name, is_needed in fields if not is_needed]
    if needed:
        return " ".join(('"," '.join(f"{name} " for name in needed), *(f'("," {name})?' for name in others)))
    starts = [
        " ".join((name, *(f'("," {later})?' for later in others[number + 1 :]))) for number, name in enumerate(others)
    ]
    return f"({' | '.join(starts)})?" if starts else ""


def _refusal(tool: Tool, reason: str) -> InvalidRequest:
    return InvalidRequest(f"tools: the parameters of {tool.name[:64]!r}: {reason}", param="tools")
