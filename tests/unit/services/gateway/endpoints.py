"""The endpoints that generate, for tests that hold for each of them: how to ask, and how to read what comes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Endpoint:
    """``text`` reads an answer, ``delta`` the text of a stream's event. ``ends`` are the types of the last event of a good stream."""

    path: str
    ask: dict[str, Any]
    text: Callable[[Any], str]
    delta: Callable[[Any], str]
    ends: tuple[str, ...]

    @property
    def is_anthropics(self) -> bool:
        return self.path.startswith("/v1/messages")

    def events(self, body: str) -> list[Any]:
        """The stream's events; "[DONE]" for the mark at the end."""
        assert body.endswith("\n\n")
        found: list[Any] = []
        for block in body.removesuffix("\n\n").split("\n\n"):
            *names, data = block.split("\n")
            event: Any = "[DONE]" if data == "data: [DONE]" else json.loads(data.removeprefix("data: "))
            if names:
                assert names == [f"event: {event['type']}"]
            found.append(event)
        return found

    def streamed(self, body: str) -> str:
        """The text of a stream that has ended well."""
        events = self.events(body)
        assert (events[-1] if events[-1] == "[DONE]" else events[-1]["type"]) in self.ends
        return "".join(self.delta(event) for event in events if event != "[DONE]")

    def failure(self, body: str) -> str:
        """The message of the error that has ended a stream."""
        events = self.events(body)
        if self.path == "/v1/responses":
            assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.failed", "failed")
            assert events[-2]["type"] == "error"
            message: str = events[-1]["response"]["error"]["message"]
            assert events[-2]["message"] == message
            return message
        return self.refusal(events[-1])

    def refusal(self, answer: Any) -> str:
        """The message of an error's body, in the form of the API."""
        if self.is_anthropics:
            assert (answer["type"], set(answer)) == ("error", {"type", "error"})
            assert set(answer["error"]) == {"type", "message"}
        else:
            assert set(answer["error"]) == {"message", "type", "param", "code"}
        message: str = answer["error"]["message"]
        return message


def _text_of_response(answer: Any) -> str:
    return "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])


def _delta_of_response(event: Any) -> str:
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def _delta_of_message(event: Any) -> str:
    return str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else ""


_MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT = Endpoint(
    "/v1/chat/completions",
    {"model": "demo", "messages": _MESSAGES},
    lambda answer: str(answer["choices"][0]["message"]["content"]),
    lambda event: event["choices"][0]["delta"].get("content", ""),
    ("[DONE]",),
)
COMPLETIONS = Endpoint(
    "/v1/completions",
    {"model": "demo", "prompt": "Hi"},
    lambda answer: str(answer["choices"][0]["text"]),
    lambda event: event["choices"][0]["text"],
    ("[DONE]",),
)
RESPONSES = Endpoint(
    "/v1/responses",
    {"model": "demo", "input": "Hi"},
    _text_of_response,
    _delta_of_response,
    ("response.completed", "response.incomplete"),
)
MESSAGES = Endpoint(
    "/v1/messages",
    {"model": "demo", "messages": _MESSAGES, "max_tokens": 100},
    lambda answer: "".join(block["text"] for block in answer["content"] if block["type"] == "text"),
    _delta_of_message,
    ("message_stop",),
)
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
each_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path.rpartition("/")[2])
