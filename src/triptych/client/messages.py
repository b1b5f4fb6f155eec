"""Messages of a conversation, by role."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from triptych.client import checks
from triptych.client.images import Image, Media, image_bytes, media_bytes
from triptych.domain.chat import MediaPart, Message, SpeakerRole, TextPart, ToolCall
from triptych.domain.media import Modality
from triptych.errors import InvalidMedia, InvalidRequest


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """Text to continue as it is: without a chat template and images."""

    text: str


Prompt = str | Sequence[Message] | RawPrompt
"""A question, a conversation, or text to continue."""


def user(
    text: str, images: Sequence[Image] = (), *, videos: Sequence[Media] = (), audio: Sequence[Media] = ()
) -> Message:
    """A user's turn: images, videos, audio, then the text. Reads files; raises InvalidMedia.

    The router refuses media that the model does not take.
    """
    return Message(
        "user",
        (
            *_media("images", Modality.IMAGE, images),
            *_media("videos", Modality.VIDEO, videos),
            *_media("audio", Modality.AUDIO, audio),
            TextPart(checks.text("text", text)),
        ),
    )


def assistant(text: str, tool_calls: Sequence[ToolCall] = (), *, reasoning: str = "") -> Message:
    """An earlier answer, with its tool calls and, for templates that show it, its reasoning."""
    calls = checks.several("tool_calls", tool_calls)
    for call in calls:
        checks.of_type("tool_calls", call, ToolCall, "a list of triptych.client.ToolCall")
    thought = checks.text("reasoning", reasoning)
    return Message("assistant", (TextPart(checks.text("text", text)),), calls, reasoning=thought)


def tool(call: ToolCall, result: str) -> Message:
    """The result of a tool call that the previous turn made."""
    call = checks.of_type("call", call, ToolCall, "a triptych.client.ToolCall")
    return Message("tool", (TextPart(checks.text("result", result)),), tool_call_id=call.call_id)


def system(text: str) -> Message:
    """Instructions for the whole conversation."""
    return Message("system", (TextPart(checks.text("text", text)),))


def conversation(prompt: Any) -> tuple[Message, ...]:
    """The turns of a conversation. Raises InvalidRequest for anything else, or what cannot be sent."""
    turns = checks.several("prompt", prompt, "a question, a list of turns, or a RawPrompt")
    if not turns:
        raise InvalidRequest("prompt is a conversation without a turn", param="prompt")
    for number, turn in enumerate(turns):
        _check_turn(f"prompt[{number}]", turn)
    return turns


def _check_turn(where: str, turn: Any) -> None:
    if not isinstance(turn, Message):
        raise _no_turn(where, "a turn as triptych.client.user, assistant, system and tool make them", turn)
    if turn.role not in get_args(SpeakerRole):
        raise _no_turn(f"the role of {where}", f"one of {', '.join(get_args(SpeakerRole))}", turn.role)
    if not isinstance(turn.parts, tuple | list) or not all(map(_is_part, turn.parts)):
        raise _no_turn(where, "made of TextPart and MediaPart", turn.parts)
    if not isinstance(turn.tool_calls, tuple | list) or not all(isinstance(call, ToolCall) for call in turn.tool_calls):
        raise _no_turn(f"tool_calls of {where}", "made of ToolCall", turn.tool_calls)
    texts = [part.text for part in turn.parts if isinstance(part, TextPart)]
    for call in turn.tool_calls:
        texts += (call.call_id, call.name, call.arguments)
    for text in (*texts, turn.tool_call_id, turn.reasoning):
        checks.text("prompt", text)


def _is_part(part: object) -> bool:
    if isinstance(part, MediaPart):
        return isinstance(part.modality, Modality) and isinstance(part.data, bytes)
    return isinstance(part, TextPart)


def _no_turn(where: str, wanted: str, value: object) -> InvalidRequest:
    return InvalidRequest(checks.wrong(where, wanted, value).message, param="prompt")


def _media(name: str, modality: Modality, several: Sequence[Any]) -> list[MediaPart]:
    """Read the files; errors name the argument."""
    try:
        return [
            MediaPart(modality, image_bytes(item) if modality is Modality.IMAGE else media_bytes(item, modality.value))
            for item in checks.several(name, several)
        ]
    except InvalidMedia as error:
        raise InvalidMedia(error.message, param=name) from None
