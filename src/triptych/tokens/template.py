"""Chat templates, rendered like transformers (``transformers.utils.chat_template_utils``)."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from triptych.domain.chat import MediaPart, Message, TextPart, ToolCall
from triptych.domain.media import Modality
from triptych.errors import InvalidRequest
from triptych.families.model_files import BadModel
from triptych.tokens.tool_calls import find_syntax

_FAILURES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What a template's code can raise, besides jinja2's own errors."""

_PROBE, _PROBE_CALL = "triptych-probe", "triptych_probe_call"
_PROBE_CHARS = 1_000_000


class RefusedByTemplate(TemplateError):
    """The template called ``raise_exception``: it does not support the conversation."""


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """``dict`` without the class's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


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
        for part in message.parts:
            size += 1 + (len(part.text) if isinstance(part, TextPart) else 0)
        for call in message.tool_calls:
            size += 1 + len(call.name) + len(call.arguments)
    return size


def _call(call: ToolCall, param: str) -> dict[str, Any]:
    """A call in the templates' format, with its arguments as an object. Raises InvalidRequest."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        param += ".function.arguments"
        raise InvalidRequest(f"{param}: must be a JSON object, as text", param=param)
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


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
    """The local wall clock, for templates' ``strftime_now``."""
    return datetime.now().astimezone().strftime(form)


class ChatTemplate:
    """A model's chat template, compiled. Rendering is thread-safe."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        placeholders: Mapping[Modality, str] | None = None,
        strftime_now: Callable[[str], str] = local_time,
    ) -> None:
        """``placeholders`` represent items in templates that support only string content. Raises BadModel."""
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
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in find_undeclared_variables(environment.parse(source))
            """Whether the template supports tools."""
        except TemplateSyntaxError as error:
            raise BadModel(f"the chat template has an error in line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        self._placeholders = dict(placeholders or {})
        self.call_syntax = find_syntax(source) if self.takes_tools else None
        """The tool call syntax that the template teaches the model; None if there is none, or it is unknown."""
        self.takes_parts = self._find_takes_parts()
        """Whether message content is a list of parts; else it is one string."""
        self.takes_calls = self._find_takes_calls()
        """Whether the template renders tool calls and their results."""

    def render(self, messages: Sequence[Message], max_chars: int, tools: str = "") -> str:
        """The prompt, up to the start of the assistant's turn. ``tools`` is a JSON array, or empty.

        Raises InvalidRequest if the template refuses the conversation, or the prompt would exceed ``max_chars``.
        """
        size = _size_chars(messages) + len(tools)
        offered = self._tools(tools) if tools else None
        if size > max_chars:
            raise InvalidRequest(f"the messages have {size} characters, the limit is {max_chars}", param="messages")
        conversation = self._conversation(messages)
        try:
            return self._render(conversation, max_chars, offered)
        except RefusedByTemplate as error:
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}", param="messages"
            ) from error
        except _FAILURES as error:
            raise InvalidRequest("the model's chat template cannot render these messages", param="messages") from error

    def _conversation(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages in the templates' format. Raises InvalidRequest for tool calls if the template has no support."""
        convert = self._as_parts if self.takes_parts else self._as_string
        conversation: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        for place, message in enumerate(messages):
            turn: dict[str, Any] = {"role": message.role, "content": convert(message)}
            if message.tool_calls or message.role == "tool":
                param = f"messages[{place}]" + (".tool_calls" if message.tool_calls else ".role")
                if not self.takes_calls:
                    raise InvalidRequest(
                        f"{param}: the model's chat template does not support tool calls and their results", param=param
                    )
            if message.tool_calls:
                names |= {call.call_id: call.name for call in message.tool_calls}
                turn["tool_calls"] = [_call(call, f"{param}[{n}]") for n, call in enumerate(message.tool_calls)]
            if message.role == "tool":
                turn["tool_call_id"] = message.tool_call_id
                turn["name"] = names.get(message.tool_call_id, "")
            conversation.append(turn)
        return conversation

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

    def _render(self, conversation: list[dict[str, Any]], max_chars: int, tools: list[Any] | None = None) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(
            messages=conversation, tools=tools, documents=None, add_generation_prompt=True, **self._special_tokens
        ):
            size += len(piece)
            if size > max_chars:
                raise InvalidRequest(f"the prompt has more than {max_chars} characters", param="messages")
            pieces.append(piece)
        return "".join(pieces)

    def _find_takes_parts(self) -> bool:
        """Render a list of parts: a template made for strings prints the list itself, drops it, or fails."""
        content = [{"type": "text", "text": _PROBE}]
        try:
            rendered = self._render([{"role": "user", "content": content}], _PROBE_CHARS)
        except (InvalidRequest, *_FAILURES):
            return False
        before, found, _ = rendered.partition(_PROBE)
        return bool(found) and "type" not in before[-len(str(content)) :]

    def _find_takes_calls(self) -> bool:
        """Render a call and its result: the template supports them if both appear."""
        function = {"name": _PROBE_CALL, "arguments": {}}
        call = {"id": "call", "type": "function", "function": function}
        text = [{"type": "text", "text": _PROBE}] if self.takes_parts else _PROBE
        nothing: object = [] if self.takes_parts else ""
        conversation: list[dict[str, Any]] = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": nothing, "tool_calls": [call]},
            {"role": "tool", "content": text, "tool_call_id": "call", "name": _PROBE_CALL},
        ]
        try:
            rendered = self._render(conversation, _PROBE_CHARS, [{"type": "function", "function": {"name": "f"}}])
        except (InvalidRequest, *_FAILURES):
            return False
        return _PROBE_CALL in rendered and _PROBE in rendered.partition(_PROBE_CALL)[2]

    @staticmethod
    def _as_parts(message: Message) -> list[dict[str, str]]:
        return [
            {"type": part.modality.value} if isinstance(part, MediaPart) else {"type": "text", "text": part.text}
            for part in message.parts
        ]

    def _as_string(self, message: Message) -> str:
        return "\n".join(
            self._placeholders.get(part.modality, "") if isinstance(part, MediaPart) else part.text
            for part in message.parts
        )
