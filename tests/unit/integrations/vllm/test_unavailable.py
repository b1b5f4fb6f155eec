"""The middleware of a vLLM that runs by itself, by what its application sends. It needs no vLLM."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from triptych.integrations.vllm.unavailable import Message, Unavailable


def answer(status: int, *bodies: bytes) -> list[Message]:
    parts = [
        {"type": "http.response.body", "body": body, "more_body": number < len(bodies)}
        for number, body in enumerate(bodies, 1)
    ]
    headers = [(b"x-request-id", b"7"), (b"Content-Length", b"1")]
    return [{"type": "http.response.start", "status": status, "headers": headers}, *parts]


async def sent(messages: Sequence[Message]) -> list[Message]:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    out: list[Message] = []

    async def send(message: Message) -> None:
        out.append(message)

    async def receive() -> Message:
        return {}

    await Unavailable(app)({"type": "http"}, receive, send)
    return out


async def test_a_request_that_failed_alone_can_be_sent_again() -> None:
    whole = json.dumps({"error": {"message": "Internal server error", "code": 500}}).encode()
    for bodies in ((whole,), (whole[:9], whole[9:])):
        start, body = await sent(answer(500, *bodies))
        assert start["status"] == 503
        assert start["headers"] == [(b"x-request-id", b"7"), (b"content-length", str(len(body["body"])).encode())]
        error = json.loads(body["body"])["error"]
        assert error["code"] == 503
        assert "resolve them and send it again" in error["message"]


async def test_the_answer_keeps_the_form_of_its_api() -> None:
    error = {"type": "InternalServerError", "message": "Internal server error"}
    _, body = await sent(answer(500, json.dumps({"type": "error", "error": error}).encode()))
    found = json.loads(body["body"])
    assert found["type"] == "error"
    assert found["error"].keys() == error.keys()
    assert found["error"]["type"] == "ServiceUnavailableError"


@pytest.mark.parametrize(
    "messages",
    [
        answer(200, b"data: 1", b"data: 2"),
        answer(400, b'{"error": {"message": "Internal server error"}}'),
        answer(500, b'{"error": {"message": "EngineCore encountered an issue."}}'),
        answer(500, b'{"error": "Internal server error"}'),
        answer(500, b"no JSON"),
        answer(500, b"[]"),
    ],
)
async def test_other_answers_stay_as_they_are(messages: list[Message]) -> None:
    assert await sent(messages) == messages
