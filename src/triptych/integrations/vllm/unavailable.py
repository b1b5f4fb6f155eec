"""Middleware of a vLLM that runs by itself: requests whose items cannot be had are answered 503, not 500.

vLLM ends such a request alone, and says no more of it than that generation failed. Some that end so fail whenever they are sent:
a response format that does not compile, an item of another size than its prompt has room for, or of another model or data type. So
no time for a retry is given.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_FAILED, _UNAVAILABLE = 500, 503
_GENERATION_FAILED = "Internal server error"
"""Message of vLLM for a request that has failed alone; failures of its engine have others."""
_ERROR = {
    "message": "the request failed alone; the server's log has the reason. If it has items, resolve them and send it again",
    "type": "ServiceUnavailableError",
    "code": _UNAVAILABLE,
}
"""Fields of the answer's error: Anthropic's has no code."""


class Unavailable:
    """``--middleware triptych.integrations.vllm.unavailable.Unavailable`` of ``vllm serve``. Streams that have begun stay as they are."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        held: list[Message] = []
        """The answer of a failure, until it is whole."""

        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == _FAILED:
                held.append(message)
                return
            if not held:
                await send(message)
                return
            held.append(message)
            if not message.get("more_body"):
                for part in _answer(held):
                    await send(part)

        await self._app(scope, receive, pass_on)


def _answer(failure: list[Message]) -> list[Message]:
    """What is sent in place of a failure: itself, if it is not that of one request alone; else the same with another error."""
    start, *parts = failure
    try:
        answer = json.loads(b"".join(part.get("body", b"") for part in parts))
        message = answer["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return failure
    if message != _GENERATION_FAILED:
        return failure
    answer["error"] |= {name: value for name, value in _ERROR.items() if name in answer["error"]}
    body = json.dumps(answer).encode()
    headers = [(name, value) for name, value in start.get("headers", ()) if name.lower() != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    return [{**start, "status": _UNAVAILABLE, "headers": headers}, {"type": "http.response.body", "body": body}]
