"""Tools that a model may call, and the syntaxes in which models write calls.

The chat template teaches the model its syntax, so the template's text identifies it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Json:
    """Arguments as a JSON object."""


@dataclass(frozen=True, slots=True)
class Tags:
    """Each argument between marks: ``key`` (``@`` stands for its name) and ``value_end``; then ``end``.

    Strings are written as they are, other values as JSON. With ``on_lines`` a value has a line break before and after it.
    """

    key: str
    value_end: str
    end: str
    on_lines: bool = False


@dataclass(frozen=True, slots=True)
class Literals:
    """Arguments as names with literals, up to ``end``: ``a=1, b='x'`` of Python, or ``a:1,b:<q>x<q>`` of Gemma."""

    end: str
    separator: str
    quotes: tuple[str, ...]
    has_escapes: bool


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are written: ``opening``, ``first``, a call, further ones after ``between``, ``closing``.

    A call is one of ``heads`` (``@`` stands for a name, ``#`` for a number), the arguments, ``tail``. White space in these
    stands for any.
    """

    name: str
    opening: str
    """Empty: the answer begins with a call, or has none."""
    heads: tuple[str, ...]
    arguments: Json | Tags | Literals
    closing: str = ""
    first: str = ""
    tail: str = ""
    between: str = "\n"
    is_list: bool = False
    """Whether several calls share the marks around them; else each has its own."""
    envelope: str = ""
    """Name of the field with the arguments, where a call is a JSON object."""

    @property
    def needs_names(self) -> bool:
        """Whether what looks like a call is one only if it names a tool."""
        return not self.opening or self.heads == ("@",)

    @property
    def text(self) -> str:
        """All its marks."""
        form = self.arguments
        inner: tuple[str, ...] = ()
        if isinstance(form, Tags):
            inner = form.key, form.value_end, form.end
        elif isinstance(form, Literals):
            inner = form.quotes
        return " ".join((self.opening, self.first, *self.heads, *inner, self.tail, self.between, self.closing))


def _gemma(name: str, opening: str, closing: str, quote: str) -> CallSyntax:
    return CallSyntax(name, opening, ("call:@{",), Literals("}", ":", (quote, '"'), False), closing, between="")


def _deepseek(name: str, head: str, tail: str, between: str) -> CallSyntax:
    texts = ("<|tool_calls_begin|>", head, "<|tool_calls_end|>", tail)
    opening, head, closing, tail = (
        text.replace("|", "\N{FULLWIDTH VERTICAL LINE}").replace("_", "\N{LOWER ONE EIGHTH BLOCK}") for text in texts
    )
    return CallSyntax(name, opening, (head,), Json(), closing, tail=tail, between=between, is_list=True)


SYNTAXES = {
    syntax.name: syntax
    for syntax in (
        CallSyntax(
            "minimax_m2",
            "<minimax:tool_call>",
            ('\n<invoke name="@">',),
            Tags('\n<parameter name="@">', "</parameter>", "\n</invoke>"),
            "\n</minimax:tool_call>",
            is_list=True,
        ),
        CallSyntax(
            "kimi_k2",
            "<|tool_calls_section_begin|>",
            ("<|tool_call_begin|>functions.@:#<|tool_call_argument_begin|>",),
            Json(),
            "<|tool_calls_section_end|>",
            tail="<|tool_call_end|>",
            between="",
            is_list=True,
        ),
        _deepseek(
            "deepseek_v3",
            "<|tool_call_begin|>function<|tool_sep|>@\n```json\n",
            "\n```<|tool_call_end|>",
            "\n",
        ),
        _deepseek("deepseek_v31", "<|tool_call_begin|>@<|tool_sep|>", "<|tool_call_end|>", ""),
        CallSyntax("mistral_args", "[TOOL_CALLS]", ("@[ARGS]", "@[CALL_ID]@[ARGS]", "@"), Json(), between=""),
        CallSyntax(
            "mistral",
            "[TOOL_CALLS]",
            ('{"name": "@", "arguments": ',),
            Json(),
            "]",
            first=" [",
            between=", ",
            is_list=True,
            envelope="arguments",
        ),
        _gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
        _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
        CallSyntax(
            "glm45",
            "<tool_call>",
            ("@",),
            Tags("\n<arg_key>@</arg_key>\n<arg_value>", "</arg_value>", "\n</tool_call>"),
        ),
        CallSyntax(
            "qwen3_coder",
            "<tool_call>",
            ("\n<function=@>",),
            Tags("\n<parameter=@>", "</parameter>", "\n</function>", on_lines=True),
            "\n</tool_call>",
        ),
        CallSyntax(
            "hermes",
            "<tool_call>",
            ('\n{"name": "@", "arguments": ',),
            Json(),
            "\n</tool_call>",
            envelope="arguments",
        ),
        CallSyntax(
            "pythonic",
            "",
            ("@(",),
            Literals(")", "=", ('"', "'"), True),
            "]",
            first="[",
            between=", ",
            is_list=True,
        ),
        CallSyntax(
            "llama3_json",
            "",
            ('{"name": "@", "parameters": ',),
            Json(),
            between="; ",
            is_list=True,
            envelope="parameters",
        ),
    )
}
"""By name."""

_DEEPSEEK = re.escape(SYNTAXES["deepseek_v3"].opening)
_SIGNS = {
    "minimax_m2": r"<minimax:tool_call>",
    "kimi_k2": r"<\|tool_calls_section_begin\|>",
    "deepseek_v3": _DEEPSEEK + r"(?s:.*)```json",
    "deepseek_v31": _DEEPSEEK,
    "mistral_args": r"\[TOOL_CALLS\](?s:.*)\[ARGS\]",
    "mistral": r"\[TOOL_CALLS\]",
    "functiongemma": r"<start_function_call>",
    "gemma4": r"<tool_call\|>",
    "glm45": r"<tool_call>(?s:.*)<arg_key>|<arg_key>(?s:.*)<tool_call>",
    "qwen3_coder": r"<tool_call>(?s:.*)<function=|<function=(?s:.*)<tool_call>",
    "hermes": r"<tool_call>(?s:.*)</tool_call>",
    "pythonic": r"\[func_name1\(",
    "llama3_json": r'"name":(?s:.{0,40})"parameters":',
}
"""What only the templates of a syntax contain; the first that matches counts."""


def find_syntax(template: str) -> CallSyntax | None:
    """The syntax that a chat template teaches; None if it is unknown, or there are no tools."""
    return next((SYNTAXES[name] for name, sign in _SIGNS.items() if re.search(sign, template)), None)


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


def possible_prefix(text: str, tag: str) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of ``tag``, and not all of it."""
    return next((length for length in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-length:])), 0)
