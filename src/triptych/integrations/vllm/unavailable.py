"""Middleware of a vLLM that runs by itself: requests whose items cannot be had are answered 503, not 500.

vLLM ends such a request alone, and says no more of it than that generation failed. All that ends one so may be tried again.
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
"""VLLM's message for a request that has failed alone; failures of its engine have others."""
_ERROR = {
    "error": {
        "message": "the request failed alone, such as for an item whose embedding cannot be had: resolve its items and send it again",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": _UNAVAILABLE,
    }
}


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
    """What is sent in place of a failure: itself, if it is not that of one request alone."""
    start, *parts = failure
    try:
        message = json.loads(b"".join(part.get("body", b"") for part in parts))["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return failure
    if message != _GENERATION_FAILED:
        return failure
    body = json.dumps(_ERROR).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"1"),
    ]
    return [{**start, "status": _UNAVAILABLE, "headers": headers}, {"type": "http.response.body", "body": body}]
