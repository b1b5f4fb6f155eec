from collections.abc import Callable
from typing import TypeVar

import pytest

from triptych.domain.chat import ChatRequest, MediaPart, Message, TextPart
from triptych.domain.media import Modality
from triptych.domain.sampling import Grammar, ResponseFormat, SamplingParams
from triptych.errors import InvalidMedia
from triptych.media.sniff import MediaLimits
from triptych.services.router.prepare import ModelPrepare, SmallInline
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.model import fake_prompt_builder, fake_tokenizer
from triptych.tokens.grammar import Grammars

T = TypeVar("T")


class Counted:
    """``ports.Offload`` that counts its calls."""

    def __init__(self) -> None:
        self.runs = 0

    async def run(self, fn: Callable[..., T], /, *args: object) -> T:
        self.runs += 1
        return fn(*args)


def request(text: str = "hello", media: bytes = b"", messages: int = 1, **more: object) -> ChatRequest:
    parts = (TextPart(text), *((MediaPart(Modality.IMAGE, media),) if media else ()))
    return ChatRequest("id", "model", (Message("user", parts),) * messages, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "kv_transferred"),
    [
        (request("x" * 100), False),
        (request("x" * 101), True),
        (request("x" * 51, messages=2), True),
        (request("", messages=17), True),
        (request(media=bytes(1000)), False),
        (request(media=bytes(1001)), True),
        (request(tools="[" + " " * 100 + "]"), True),
        (ChatRequest("id", "model", (), prompt="x" * 101), True),
        (request(sampling=SamplingParams(response_format=ResponseFormat(Grammar.JSON_OBJECT))), True),
    ],
)
async def test_only_small_requests_are_prepared_on_the_event_loop(asked: ChatRequest, kv_transferred: bool) -> None:
    threads = Counted()
    offload = SmallInline(threads, max_chars=100, max_media_bytes=1000)
    assert await offload.run(lambda question, model: (question, model), asked, "model") == (asked, "model")
    assert threads.runs == kv_transferred


async def test_other_work_runs_in_threads() -> None:
    threads = Counted()
    assert await SmallInline(threads, max_chars=100, max_media_bytes=1000).run(len, "abc") == 3
    assert threads.runs == 1


@pytest.mark.parametrize(
    ("modality", "message"),
    [
        (Modality.AUDIO, "the model takes images, not audio"),
        (Modality.VIDEO, "the model takes images, not videos"),
        (Modality.IMAGE, "format is not known"),
    ],
)
def test_an_unsupported_modality_is_named(modality: Modality, message: str) -> None:
    parts = (TextPart("w5"), MediaPart(modality, b"neither of them"))
    prepare = ModelPrepare(fake_prompt_builder(), MediaLimits(), Grammars(fake_tokenizer()))
    with pytest.raises(InvalidMedia, match=message) as refused:
        prepare(ChatRequest("request", "fake", (Message("user", parts),)), FAKE_MODEL)
    assert refused.value.param == "messages[0].content[1]"
