"""The forms in which a chat template takes messages' content, found by rendering probes when a model is loaded.

A template may take a string from one role and a list of parts from another, or print a list as Python does.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from jinja2 import TemplateError

from triptych.domain.chat import MediaPart, Message, SpeakerRole, TextPart, ToolCall
from triptych.domain.media import Modality
from triptych.errors import InvalidRequest
from triptych.tokens.call_arguments import read_json

FAILURES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""Exceptions that a template's code can raise, besides jinja2's own errors."""

_BEGIN, _END, _OTHER = "triptych-probe-begin", "triptych-probe-end", "triptych-other"
_CALL, _ARGUMENT, _VALUE = "triptych_probe_call", "triptych_probe_argument", "triptych-probe-value"
_TOOL, _PARAMETER = "triptych_probe_tool", "triptych_probe_parameter"
_CALL_ID = "probe1234"
"""Nine letters and digits: Mistral's templates refuse others."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates read what an assistant thought."""
PROBE_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {_PARAMETER: {"type": "string", "description": "A probe."}},
                "required": [_PARAMETER],
            },
        },
    }
]


class RefusedByTemplate(TemplateError):
    """The template called ``raise_exception``: it does not support the conversation."""


class PrintedByTemplate(TemplateError):
    """The template prints a list or an object as Python would, where it expects text."""


class _List(list[Any]):
    def __repr__(self) -> NoReturn:
        raise PrintedByTemplate("a list is printed")


class _Object(dict[str, Any]):
    def __repr__(self) -> NoReturn:
        raise PrintedByTemplate("an object is printed")


class Form(Enum):
    """A form of a message's content."""

    STRING = "one string, with placeholders for items"
    PARTS = "a list of parts"
    ONE_TEXT = "a list of one text, with placeholders for items"


class _Nothing(Enum):
    """The content of an assistant's message that has only calls."""

    MISSING = "no field, like transformers"
    STRING = "an empty string"
    PARTS = "an empty list"


@dataclass(frozen=True, slots=True)
class _Calls:
    """Form in which the template takes calls. ``as_text``: their arguments as JSON text; else as an object."""

    nothing: _Nothing
    as_text: bool


@dataclass(frozen=True, slots=True)
class _Place:
    """Place that decides on the form of a message: templates treat the first ones, and those after them, differently."""

    role: SpeakerRole
    first: bool = False
    """The first message, if a system's; the first one of a user, if a user's."""
    after_system: bool = False
    """A user's first message, after a system prompt."""


_FIRST, _FOLLOWING = _Place("user", first=True), _Place("user", first=True, after_system=True)
_LATER, _ANSWER = _Place("user"), _Place("assistant")
_SYSTEM, _LATER_SYSTEM = _Place("system", first=True), _Place("system")
_RESULT = _Place("tool")

_PROBES: Mapping[_Place, tuple[_Place, ...]] = {
    _FIRST: (_FIRST,),
    _SYSTEM: (_SYSTEM, _FOLLOWING),
    _FOLLOWING: (_SYSTEM, _FOLLOWING),
    _ANSWER: (_FIRST, _ANSWER, _LATER),
    _LATER: (_FIRST, _ANSWER, _LATER),
    _LATER_SYSTEM: (_FIRST, _ANSWER, _LATER_SYSTEM, _LATER),
}
"""The conversation by which each place is probed, in this order."""


@dataclass(frozen=True, slots=True)
class ContentForms:
    """Forms in which one template takes messages, with tools or without. ``refused`` are places that it refuses itself."""

    forms: Mapping[_Place, tuple[Form, ...]]
    refused: frozenset[_Place]
    calls: _Calls | None
    placeholders: Mapping[Modality, str]

    @property
    def takes_calls(self) -> bool:
        """Whether the template renders calls and their results."""
        return self.calls is not None

    @property
    def takes_users(self) -> bool:
        """Whether a first user message can be rendered."""
        return bool(self.forms.get(_FIRST)) or _FIRST in self.refused

    def conversation(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages in the template's forms. Raises InvalidRequest for what the template would not show."""
        conversation = _List()
        names: dict[str, str] = {}
        for at, (message, place) in enumerate(zip(messages, _places(messages), strict=True)):
            param = f"messages[{at}]"
            calls = self.calls
            if (message.tool_calls or message.role == "tool") and calls is None:
                param += ".tool_calls" if message.tool_calls else ".role"
                raise InvalidRequest(
                    f"{param}: the model's chat template does not support tool calls and their results", param=param
                )
            turn = _Object(role=message.role)
            if calls is not None and message.tool_calls:
                names |= {call.call_id: call.name for call in message.tool_calls}
                all_calls = [_call(call, f"{param}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls)]
                turn |= _turn_of_calls(calls, all_calls)
            if message.parts or not message.tool_calls:
                turn["content"] = self._content(message, self._form(message, place, param))
            if message.reasoning:
                turn |= dict.fromkeys(_REASONING, message.reasoning)
            if message.role == "tool":
                turn["tool_call_id"] = message.tool_call_id
                turn["name"] = names.get(message.tool_call_id, "")
            conversation.append(turn)
        return conversation

    def _form(self, message: Message, place: _Place, param: str) -> Form:
        forms = self.forms.get(place, ())
        if not forms:
            is_blank = all(isinstance(part, TextPart) and not part.text.strip() for part in message.parts)
            if place not in self.refused and not is_blank:
                raise InvalidRequest(
                    f"{param}: the model's chat template does not show the text of {_described(place)}", param=param
                )
            forms = self.forms.get(_FIRST, ()) or (Form.STRING,)  # the template says why not
        is_text = len(message.parts) == 1 and isinstance(message.parts[0], TextPart)
        order = (Form.STRING, Form.PARTS, Form.ONE_TEXT) if is_text else (Form.PARTS, Form.STRING, Form.ONE_TEXT)
        return next(form for form in order if form in forms)

    def _content(self, message: Message, form: Form) -> object:
        if form is Form.PARTS:
            return _List(
                _Object({"type": part.modality.value, part.modality.value: part.modality.value})
                if isinstance(part, MediaPart)
                else _text(part.text)
                for part in message.parts
            )
        text = "\n".join(
            self.placeholders.get(part.modality, "") if isinstance(part, MediaPart) else part.text
            for part in message.parts
        )
        return text if form is Form.STRING else _List([_text(text)])


def find_forms(
    render: Callable[[list[dict[str, Any]]], str], placeholders: Mapping[Modality, str]
) -> tuple[ContentForms, str]:
    """Probe a template. ``render`` raises ``FAILURES``. Returns also why a user's message failed last, or ""."""
    forms: dict[_Place, tuple[Form, ...]] = {}
    refused: set[_Place] = set()
    reason = ""
    for place, conversation in _PROBES.items():
        taken: list[Form] = []
        first = forms.get(_FIRST, ())
        for form in Form:
            turns = _List(
                _Object(role=turn.role, content=_probe(form) if turn == place else _other(forms.get(turn) or first))
                for turn in conversation
            )
            try:
                if _shows(render(turns), _BEGIN, _END):
                    taken.append(form)
            except RefusedByTemplate:
                refused.add(place)
            except FAILURES as error:
                reason = str(error) if place == _FIRST else reason
        forms[place] = tuple(taken)
    calls, forms[_RESULT] = _find_calls(render, forms)
    return ContentForms(forms, frozenset(refused), calls, placeholders), reason


def _find_calls(
    render: Callable[[list[dict[str, Any]]], str], forms: Mapping[_Place, tuple[Form, ...]]
) -> tuple[_Calls | None, tuple[Form, ...]]:
    """Find how the template takes calls, and the forms of results; None if it does not show a call and its result."""
    asked = _Object(role="user", content=_other(forms[_FIRST]))
    call = (_CALL_ID, _CALL, _Object({_ARGUMENT: _VALUE}))
    for calls in (_Calls(nothing, as_text) for as_text in (False, True) for nothing in _Nothing):
        taken: list[Form] = []
        for form in Form:
            result = _Object(role="tool", content=_probe(form), tool_call_id=_CALL_ID, name=_CALL)
            turns = _List([asked, _Object(role="assistant", **_turn_of_calls(calls, [call])), result])
            try:
                if _shows(render(turns), _CALL, _VALUE, _BEGIN, _END):
                    taken.append(form)
            except FAILURES:
                continue
        if taken:
            return calls, tuple(taken)
    return None, ()


def _shows(rendered: str, *texts: str) -> bool:
    """Whether all the texts appear, in this order."""
    at = 0
    for text in texts:
        at = rendered.find(text, at)
        if at < 0:
            return False
    return True


def _probe(form: Form) -> object:
    texts = [_BEGIN, _END]
    match form:
        case Form.STRING:
            return "\n".join(texts)
        case Form.PARTS:
            return _List(map(_text, texts))
        case Form.ONE_TEXT:
            return _List([_text("\n".join(texts))])


def _other(forms: Sequence[Form]) -> object:
    """Content for a message that is not probed."""
    return _OTHER if not forms or Form.STRING in forms else _List([_text(_OTHER)])


def _text(text: str) -> _Object:
    return _Object({"type": "text", "text": text})


def _places(messages: Sequence[Message]) -> Iterator[_Place]:
    begun = False
    for at, message in enumerate(messages):
        match message.role:
            case "system":
                yield _SYSTEM if at == 0 else _LATER_SYSTEM
            case "user" if not begun:
                begun = True
                yield _FOLLOWING if messages[0].role == "system" else _FIRST
            case role:
                yield _Place(role)


def _described(place: _Place) -> str:
    if place == _LATER_SYSTEM:
        return "a system message that is not the first message"
    if place.role == "system":
        return "system messages; put it into a user message"
    return f"such a {place.role} message"


def _call(call: ToolCall, param: str) -> tuple[str, str, _Object]:
    """Id, name and arguments. Raises InvalidRequest."""
    try:
        arguments = read_json(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        param += ".function.arguments"
        raise InvalidRequest(f"{param}: must be a JSON object, as text", param=param)
    return call.call_id, call.name, _Object(arguments)


def _turn_of_calls(how: _Calls, calls: Sequence[tuple[str, str, _Object]]) -> dict[str, Any]:
    """The fields of an assistant's message with calls, and no other content."""
    turn: dict[str, Any] = {}
    if how.nothing is not _Nothing.MISSING:
        turn["content"] = "" if how.nothing is _Nothing.STRING else _List()
    turn["tool_calls"] = [
        {
            "id": call_id,
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments, ensure_ascii=False) if how.as_text else arguments,
            },
        }
        for call_id, name, arguments in calls
    ]
    return turn
