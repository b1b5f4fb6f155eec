"""Chat templates, rendered like transformers (``transformers.utils.chat_template_utils``)."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from triptych.domain.chat import Message, TextPart
from triptych.domain.media import Modality
from triptych.errors import InvalidRequest
from triptych.families.model_files import BadModel
from triptych.tokens.content_forms import FAILURES, PROBE_TOOLS, ContentForms, RefusedByTemplate, find_forms
from triptych.tokens.reasoning import find_reasoning
from triptych.tokens.tool_calls import find_syntax

_PROBE_CHARS = 1_000_000
_OWN_VARIABLES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "self"),
    }
)
"""Variables that requests set by fields of their own, or not at all."""


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training. Its variables are its own."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """``dict`` without the class's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """Refuses names with a leading underscore, and so Python's internal attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named ``self``, as in jinja2, so that ``namespace(self=...)`` works.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _size_chars(messages: Sequence[Message]) -> int:
    """Number of characters, plus one per message, part and call, as empty ones cost time too."""
    size = len(messages)
    for message in messages:
        size += len(message.reasoning)
        for part in message.parts:
            size += 1 + (len(part.text) if isinstance(part, TextPart) else 0)
        for call in message.tool_calls:
            size += 1 + len(call.name) + len(call.arguments)
    return size


def _raise_exception(message: str) -> None:
    raise RefusedByTemplate(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def local_time(form: str) -> str:
    """The local wall clock without its zone, for templates' ``strftime_now``."""
    return datetime.now().astimezone().replace(tzinfo=None).strftime(form)


def read_kwargs(text: str) -> dict[str, Any]:
    """Further variables for a template, from a JSON object; none for an empty text. Raises InvalidRequest."""
    param = "chat_template_kwargs"
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise InvalidRequest(f"{param}: must be a JSON object", param=param)
    for name in given:
        if name in _OWN_VARIABLES or name.startswith("_") or not name.isidentifier():
            raise InvalidRequest(f"{param}: {name[:64]!r} cannot be set", param=param)
    return given


def _compiled(source: str, strftime_now: Callable[[str], str]) -> tuple[Template, frozenset[str]]:
    """The template and its variables. Raises BadModel."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=[_Generation, loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    try:
        return environment.from_string(source), frozenset(find_undeclared_variables(environment.parse(source)))
    except TemplateSyntaxError as error:
        raise BadModel(f"the chat template has an error in line {error.lineno}: {error.message}") from error


class ChatTemplate:
    """A model's chat template, compiled. Rendering is thread-safe."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        tools_source: str | None = None,
        placeholders: Mapping[Modality, str] | None = None,
        strftime_now: Callable[[str], str] = local_time,
    ) -> None:
        """``tools_source`` is a template of its own for requests with tools.

        ``placeholders`` represent items where only string content is supported. Raises BadModel, also for a template
        that does not show a user's text.
        """
        self._special_tokens = dict(special_tokens)
        self._plain, variables = _compiled(source, strftime_now)
        self._with_tools = self._plain
        self.variables = variables
        """Variables that the template reads, those of the environment excepted."""
        if tools_source:
            self._with_tools, variables = _compiled(tools_source, strftime_now)
            self.variables |= variables
        self.takes_tools = "tools" in variables
        """Whether the template supports tools."""
        self.reasoning = find_reasoning(tools_source or source)
        """The syntax of the model's reasoning; None if there is none, or it is unknown."""
        self.call_syntax = find_syntax(tools_source or source) if self.takes_tools else None
        """The tool call syntax that the template teaches the model; None if there is none, or it is unknown."""
        self._forms, reason = self._find_forms(None, placeholders or {})
        if not self._forms.takes_users:
            raise BadModel(f"the chat template does not show the text of a user's message {reason}".rstrip())
        self._forms_with_tools = self._forms
        if self.takes_tools:
            self._forms_with_tools, _ = self._find_forms(PROBE_TOOLS, placeholders or {})

    @property
    def takes_calls(self) -> bool:
        """Whether the template renders tool calls and their results."""
        return self._forms_with_tools.takes_calls

    def render(self, messages: Sequence[Message], max_chars: int, tools: str = "", kwargs: str = "") -> str:
        """The prompt, up to the start of the assistant's turn. ``tools`` is a JSON array, ``kwargs`` a JSON object of further
        variables, or empty.

        Raises InvalidRequest if the template refuses the conversation or would not show a message's text, or if the
        prompt would exceed ``max_chars``; also for a variable that cannot be set.
        """
        size = _size_chars(messages) + len(tools)
        further = read_kwargs(kwargs) if kwargs else {}
        if taken := sorted(further.keys() & (self._plain.environment.globals.keys() | self._special_tokens)):
            param = "chat_template_kwargs"
            raise InvalidRequest(f"{param}: {taken[0][:64]!r} cannot be set", param=param)
        offered = self._tools(tools) if tools else None
        if size > max_chars:
            raise InvalidRequest(f"the messages have {size} characters, the limit is {max_chars}", param="messages")
        forms = self._forms if offered is None else self._forms_with_tools
        conversation = forms.conversation(messages)
        try:
            return self._render(conversation, max_chars, offered, further)
        except RefusedByTemplate as error:
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}", param="messages"
            ) from error
        except FAILURES as error:
            raise InvalidRequest("the model's chat template cannot render these messages", param="messages") from error

    def _tools(self, tools: str) -> list[Any]:
        if not self.takes_tools:
            raise InvalidRequest("tools: the model's chat template does not support tools", param="tools")
        try:
            offered = json.loads(tools)
        except (ValueError, RecursionError):
            offered = None
        if not isinstance(offered, list):
            raise InvalidRequest("tools: must be a JSON array", param="tools")
        return offered

    def _render(
        self,
        conversation: list[dict[str, Any]],
        max_chars: int,
        tools: list[Any] | None = None,
        further: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        template = self._plain if tools is None else self._with_tools
        pieces: list[str] = []
        size = 0
        for piece in template.generate(
            messages=conversation,
            tools=tools,
            documents=None,
            add_generation_prompt=True,
            **self._special_tokens,
            **further,
        ):
            size += len(piece)
            if size > max_chars:
                raise InvalidRequest(f"the prompt has more than {max_chars} characters", param="messages")
            pieces.append(piece)
        return "".join(pieces)

    def _find_forms(self, tools: list[Any] | None, placeholders: Mapping[Modality, str]) -> tuple[ContentForms, str]:
        def render(conversation: list[dict[str, Any]]) -> str:
            try:
                return self._render(conversation, _PROBE_CHARS, tools)
            except InvalidRequest:
                return ""

        return find_forms(render, placeholders)
