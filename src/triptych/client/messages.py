"""What is said in a conversation, by whom."""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.client.images import Image, Media, image_bytes, media_bytes
from triptych.domain.chat import MediaPart, Message, TextPart, ToolCall
from triptych.domain.media import Modality
from triptych.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """Text to be continued as it stands: no chat template is applied, and it has no images."""

    text: str


Prompt = str | Sequence[Message] | RawPrompt
"""A question, a conversation, or text to go on with."""


def user(
    text: str, images: Sequence[Image] = (), *, videos: Sequence[Media] = (), audio: Sequence[Media] = ()
) -> Message:
    """A user's turn: images, videos, audio, then the text. Reads files; raises InvalidMedia.

    What a model does not take, the router refuses.
    """
    for name, several in (("images", images), ("videos", videos), ("audio", audio)):
        if isinstance(several, str | bytes):
            raise InvalidRequest(f"{name} is a list, not one of them", param=name)
    return Message(
        "user",
        (
            *(MediaPart(Modality.IMAGE, image_bytes(image)) for image in images),
            *(MediaPart(Modality.VIDEO, media_bytes(video, "video")) for video in videos),
            *(MediaPart(Modality.AUDIO, media_bytes(clip, "audio")) for clip in audio),
            TextPart(text),
        ),
    )


def assistant(text: str, tool_calls: Sequence[ToolCall] = ()) -> Message:
    """An earlier answer, with the calls that it made, as part of the conversation so far."""
    return Message("assistant", (TextPart(text),), tuple(tool_calls))


def tool(call: ToolCall, result: str) -> Message:
    """What came of a call that the turn before it made."""
    return Message("tool", (TextPart(result),), tool_call_id=call.call_id)


def system(text: str) -> Message:
    """What the model should keep in mind throughout."""
    return Message("system", (TextPart(text),))
