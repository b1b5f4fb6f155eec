"""What is said in a conversation, by whom."""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.client.images import Image, image_bytes
from triptych.domain.chat import MediaPart, Message, TextPart
from triptych.domain.media import Modality


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """Text to be continued as it stands: no chat template is applied, and it has no images."""

    text: str


Prompt = str | Sequence[Message] | RawPrompt
"""A question, a conversation, or text to go on with."""


def user(text: str, images: Sequence[Image] = ()) -> Message:
    """A user's turn: images first, then the text. Reads files; raises InvalidMedia."""
    parts = (MediaPart(Modality.IMAGE, image_bytes(image)) for image in images)
    return Message("user", (*parts, TextPart(text)))


def assistant(text: str) -> Message:
    """An earlier answer, as part of the conversation so far."""
    return Message("assistant", (TextPart(text),))


def system(text: str) -> Message:
    """What the model should keep in mind throughout."""
    return Message("system", (TextPart(text),))
