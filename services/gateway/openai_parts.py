"""The content parts of a message: text, images, videos, audio."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, FailFast, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from .openai_fields import Api, shown, type_tag

_PART_TYPES = ("text", "image_url", "video_url", "audio_url", "input_audio")


def _check_part_type(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in _PART_TYPES:
        message = (
            f"must be an object of type {', '.join(map(repr, _PART_TYPES[:-1]))} or {_PART_TYPES[-1]!r}, not {{got}}"
        )
        raise PydanticCustomError("part_type", message, {"got": shown(value if kind is None else kind)})
    return value


def _content_tag(value: object) -> str:
    return "#parts" if isinstance(value, list) else "#text"


class ApiTextPart(Api):
    type: Literal["text"]
    text: str


class ApiImageUrl(Api):
    url: str
    """A data: URL, or an https: or http: URL that the server fetches."""


class ApiImagePart(Api):
    type: Literal["image_url"]
    image_url: ApiImageUrl


class ApiUrl(Api):
    url: str
    """A data: URL, or an https: or http: URL that the server fetches."""


class ApiVideoPart(Api):
    """MP4, MOV or WebM, for models that take videos. The format is detected from the bytes."""

    type: Literal["video_url"]
    video_url: ApiUrl


class ApiAudioUrlPart(Api):
    """WAV, FLAC, MP3, Ogg or M4A, for models that take audio. The format is detected from the bytes."""

    type: Literal["audio_url"]
    audio_url: ApiUrl


class ApiInputAudio(Api):
    data: str
    """The file in base64, or as a data: URL."""


class ApiAudioPart(Api):
    """Audio inline in the request, as in OpenAI's API, for models that take audio."""

    type: Literal["input_audio"]
    input_audio: ApiInputAudio


ApiMediaPart = ApiImagePart | ApiVideoPart | ApiAudioUrlPart | ApiAudioPart
ApiPart = Annotated[
    Annotated[ApiTextPart, Tag("#text")]
    | Annotated[ApiImagePart, Tag("#image_url")]
    | Annotated[ApiVideoPart, Tag("#video_url")]
    | Annotated[ApiAudioUrlPart, Tag("#audio_url")]
    | Annotated[ApiAudioPart, Tag("#input_audio")],
    Discriminator(type_tag),
    BeforeValidator(_check_part_type),
]
ApiParts = TypeAliasType("ApiParts", Annotated[list[ApiPart], FailFast()])
ApiContent = Annotated[
    Annotated[str, Tag("#text")] | Annotated[ApiParts, Tag("#parts")],
    Discriminator(_content_tag),
]
