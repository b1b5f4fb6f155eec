"""Collects the messages of a request in another form than chat's, and where each comes from."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triptych.domain.chat import MediaPart, Message, Part, SpeakerRole, TextPart, ToolCall
from triptych.domain.media import Modality
from triptych.errors import InvalidRequest

from .blobs import ExtractedBody
from .openai_api import Remote, check_number_of_parts, inline_item, item_at, json_text
from .openai_models import MAX_MESSAGES

_MESSAGE = re.compile(r"^messages\[(\d+)\]")


@dataclass(slots=True)
class Turn:
    """A message so far."""

    role: SpeakerRole
    call_id: str
    parts: list[Part] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)


class Turns:
    """Messages so far. ``listed`` is the body's field that has them, by which errors name it."""

    def __init__(self, listed: str, max_item_bytes: int, extracted: ExtractedBody) -> None:
        self._listed = listed
        self._max_item_bytes = max_item_bytes
        self._extracted = extracted
        self._turns: list[Turn] = []
        self._parts = 0
        self.remote: list[Remote] = []
        self.fields: dict[str, str] = {"messages": listed}
        """The body's fields by their names in the router's errors, which are those of chats."""

    @property
    def newest(self) -> Turn | None:
        """The newest message."""
        return self._turns[-1] if self._turns else None

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(
            Message(turn.role, tuple(turn.parts), tuple(turn.calls), turn.call_id, "\n".join(turn.thoughts))
            for turn in self._turns
        )

    def begin(self, role: SpeakerRole, param: str, call_id: str = "") -> None:
        """Begin a message that is in the field ``param``. Raises InvalidRequest."""
        if len(self._turns) >= MAX_MESSAGES:
            raise InvalidRequest(f"{self._listed}: more than {MAX_MESSAGES} messages", param=self._listed)
        name = f"messages[{len(self._turns)}]"
        self.fields |= {name: param, f"{name}.role": param, f"{name}.tool_calls": param}
        self._turns.append(Turn(role, call_id))

    def text(self, text: str) -> None:
        self._add(TextPart(text))

    def item(self, modality: Modality, data: str, param: str, *, inline: bool = False) -> None:
        """Add an item at a URL, or ``inline`` in base64. Raises InvalidRequest or InvalidMedia about ``param``."""
        message, place = len(self._turns) - 1, len(self._turns[-1].parts)
        given = self._extracted.get(data)
        if inline:
            item: MediaPart | None = inline_item(modality, given, param, self._max_item_bytes)
        else:
            item = item_at(modality, given, param, self._max_item_bytes)
        if item is None:
            self.remote.append(Remote(message, place, modality, data, param))
        self.fields[f"messages[{message}].content[{place}]"] = param
        self._add(item or MediaPart(modality, b""))

    def call(self, call: ToolCall, param: str) -> None:
        """Add a call whose arguments are in the field ``param``."""
        turn = self._turns[-1]
        self.fields[f"messages[{len(self._turns) - 1}].tool_calls[{len(turn.calls)}].function.arguments"] = param
        turn.calls.append(call)

    def functions(self, tools: Sequence[Any], parameters: str) -> str:
        """Functions as the tools of chats, JSON; empty for none. ``parameters`` is their field with the schema. Raises InvalidRequest."""
        written = []
        for place, tool in enumerate(tools):
            self.fields[f"tools[{place}].function.parameters"] = f"tools[{place}].{parameters}"
            given = {"name": tool.name, "description": tool.description, "parameters": getattr(tool, parameters)}
            function = {name: value for name, value in given.items() if value is not None}
            written.append({"type": "function", "function": function})
        return json_text(written, "tools") if written else ""

    def think(self, text: str) -> None:
        self._turns[-1].thoughts.append(text)

    def _add(self, part: Part) -> None:
        self._parts += 1
        check_number_of_parts(self._parts, self._listed)
        self._turns[-1].parts.append(part)


def shifted(fields: Mapping[str, str], by: int) -> dict[str, str]:
    """``Turns.fields`` of messages that have come behind as many others."""
    return {
        _MESSAGE.sub(lambda match: f"messages[{int(match[1]) + by}]", name): param for name, param in fields.items()
    }
