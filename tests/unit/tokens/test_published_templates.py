"""Prompts equal those of transformers, for templates with the structure of published ones and all kinds of turns."""

import json
from itertools import product
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from tests.unit.tokens.conftest import LLAVA_TEMPLATE
from tests.unit.tokens.published_templates import TEMPLATES
from triptych.domain.chat import MediaPart, Message, SpeakerRole, TextPart, ToolCall
from triptych.domain.media import Modality
from triptych.errors import InvalidRequest
from triptych.tokens.template import ChatTemplate

IMAGE, AUDIO = MediaPart(Modality.IMAGE, b""), MediaPart(Modality.AUDIO, b"")
PLACEHOLDERS = {Modality.IMAGE: "<image>", Modality.AUDIO: "<audio>"}
SPECIAL: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>"}
TOOLS = (
    '[{"type": "function", "function": {"name": "warm", "description": "Hőfok", "parameters": {"type": "object", '
    '"properties": {"city": {"type": "string"}}, "required": ["city"]}}}]'
)
ALL = TEMPLATES | {"llava": LLAVA_TEMPLATE}


class RefusedError(Exception):
    pass


def say(role: SpeakerRole, *parts: str | MediaPart) -> Message:
    return Message(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


CALLING = Message("assistant", (), (ToolCall("call12345", "warm", '{"city": "Bern é"}'),))
RESULT = Message("tool", (TextPart("21 degrees"),), tool_call_id="call12345")
PARTED_RESULT = Message("tool", (TextPart("21"), TextPart("degrees")), tool_call_id="call12345")

CONVERSATIONS: dict[str, list[Message]] = {
    "one turn": [say("user", "why?")],
    "white space and unicode": [
        say("user", "  \n数字 <&> {{ x }} \t"),
        say("assistant", " ü "),
        say("user", "a\n\nb "),
    ],
    "system": [say("system", " Be brief. "), say("user", "why?")],
    "system in parts": [say("system", "Be", "brief."), say("user", "why?"), say("assistant", "so"), say("user", "b")],
    "parts": [say("user", "one", "two")],
    "image": [say("user", "what", IMAGE, "is it?")],
    "images and system": [say("system", "Brief."), say("user", IMAGE, "a"), say("assistant", "b"), say("user", IMAGE)],
    "audio": [say("user", AUDIO, "what is it?")],
    "several turns": [
        say("user", "a1"),
        say("assistant", "b1"),
        say("user", "a2"),
        say("assistant", "b2"),
        say("user", "a3"),
    ],
    "answer in parts": [say("user", "a1"), say("assistant", "b1", "b2"), say("user", "a2")],
    "system later": [say("user", "a1"), say("assistant", "b1"), say("system", "Now rhyme."), say("user", "a2")],
    "empty texts": [say("system", ""), say("user", ""), say("assistant", ""), say("user", "")],
    "call": [say("user", "warm?"), CALLING, RESULT],
    "call, with system": [say("system", "Brief."), say("user", "warm?"), CALLING, RESULT],
    "result in parts": [say("user", "warm?"), CALLING, PARTED_RESULT],
}


def in_form(message: Message, form: str) -> dict[str, Any]:
    """A message as a user of transformers passes it. ``text``: a list of one text, with placeholders."""
    turn: dict[str, Any] = {"role": message.role}
    texts = [PLACEHOLDERS[part.modality] if isinstance(part, MediaPart) else part.text for part in message.parts]
    if message.tool_calls:
        arguments: object = {"city": "Bern é"} if form != "text" else '{"city": "Bern é"}'
        calls = [{"name": call.name, "arguments": arguments} for call in message.tool_calls]
        turn["tool_calls"] = [{"id": "call12345", "type": "function", "function": call} for call in calls]
    elif form == "parts":
        turn["content"] = [
            {"type": part.modality.value, part.modality.value: "x"}
            if isinstance(part, MediaPart)
            else {"type": "text", "text": part.text}
            for part in message.parts
        ]
    else:
        turn["content"] = "\n".join(texts) if form == "string" else [{"type": "text", "text": "\n".join(texts)}]
    if message.role == "tool":
        turn |= {"tool_call_id": "call12345", "name": "warm"}
    return turn


def as_transformers(source: str, conversation: list[dict[str, Any]], tools: str) -> str | None:
    """None if the template fails. Raises RefusedError if it refuses the conversation."""
    try:
        rendered: Any = render_jinja_template(
            [conversation],
            tools=json.loads(tools) if tools else None,
            chat_template=source,
            add_generation_prompt=True,
            **SPECIAL,
        )
    except TemplateError as error:
        if type(error) is TemplateError:
            raise RefusedError from error
        return None
    except Exception:  # noqa: BLE001 - whatever else a template raises
        return None
    return str(rendered[0][0])


def is_right(messages: list[Message], prompt: str | None) -> bool:
    """Whether a prompt has all texts, items and calls, and nothing in Python's syntax."""
    if prompt is None or "{'" in prompt:
        return False
    parts = [part for message in messages for part in message.parts]
    texts = [part.text.strip() for part in parts if isinstance(part, TextPart)]
    items = [PLACEHOLDERS[part.modality] for part in parts if isinstance(part, MediaPart)]
    calls = [call for message in messages for call in message.tool_calls]
    return (
        all(text in prompt for text in texts)
        and all(prompt.count(item) == items.count(item) for item in PLACEHOLDERS.values())
        and all("warm" in prompt and "Bern" in prompt for _ in calls)
    )


def places(source: str, messages: list[Message]) -> bool:
    """Whether the template knows the messages' items, or takes only strings."""
    items = [
        PLACEHOLDERS[part.modality] for message in messages for part in message.parts if isinstance(part, MediaPart)
    ]
    return all(item in source or "type" not in source for item in items)


@pytest.mark.parametrize("tools", ["", TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("name", ALL)
def test_prompts_equal_those_of_transformers(name: str, tools: str) -> None:
    """With the client's own form if that gives a right prompt, else another that does; refused only if none does."""
    template = ChatTemplate(ALL[name], SPECIAL, placeholders=PLACEHOLDERS)
    if tools and not template.takes_tools:
        pytest.skip("the template does not support tools")
    for what, messages in CONVERSATIONS.items():
        if not places(ALL[name], messages):
            continue
        own = [
            "string" if len(message.parts) == 1 and isinstance(message.parts[0], TextPart) else "parts"
            for message in messages
        ]
        right: list[str] = []
        try:
            others = [("string", "text") if form == "string" else ("parts", "string", "text") for form in own]
            for forms in ([*own], *product(*others)):
                prompt = as_transformers(ALL[name], list(map(in_form, messages, forms)), tools)
                if prompt is not None and is_right(messages, prompt):
                    right.append(prompt)
                    if list(forms) == own and what != "empty texts":
                        break
        except RefusedError:
            right = []
        if right:
            assert template.render(messages, 10_000, tools) in right, what
            continue
        with pytest.raises(InvalidRequest):
            template.render(messages, 10_000, tools)
