"""The gateway's REST as the command line uses it: ask, stream, look up a timeline."""

import base64
import json
import mimetypes
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from triptych.cli.outcome import CliError

_CONNECT_TIMEOUT_S = 5.0
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class RestError(CliError):
    """The question was not answered."""


@dataclass(slots=True)
class Answer:
    """An answer that has begun. Iterate ``texts`` once; then ``usage`` is known."""

    request_id: str
    _response: httpx.Response
    usage: dict[str, Any] | None = None

    async def texts(self) -> AsyncGenerator[str]:
        """The text as it comes. Raises RestError when the stream breaks off."""
        done = False
        async for line in self._response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RestError(f"the answer broke off: {event['error']['message']}", caller=False)
            self.usage = event.get("usage") or self.usage
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    yield text
        if not done:
            raise RestError("the answer broke off before its end", caller=False)


class RestClient:
    """A gateway at ``url``. Every method raises RestError, in one line that a person can act on."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 120.0) -> None:
        self._url = url.rstrip("/")
        try:
            trust_env = httpx.URL(url).host not in _LOOPBACK  # no proxy stands in front of this machine
        except httpx.InvalidURL as error:
            raise RestError(f"{url!r} is not a URL: {error}", caller=True) from None
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
            trust_env=trust_env,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """The ids of what is served."""
        return [str(model["id"]) for model in (await self._get("/v1/models"))["data"]]

    async def readiness(self) -> dict[str, Any]:
        """What ``/ready`` says: also while not everything is there."""
        with _translated(self._url):
            response = await self._http.get(f"{self._url}/ready")
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                _check(response, self._url)
            document: dict[str, Any] = response.json()
            return {name: document[name] for name in ("ready", "missing", "instances")}

    async def first_model(self) -> str:
        """The id of the model that the gateway lists first."""
        models = await self.models()
        if not models:
            raise RestError(f"{self._url} serves no model yet", caller=False)
        return models[0]

    async def timeline(self, request_id: str) -> dict[str, Any]:
        return await self._get(f"/v1/requests/{request_id}/timeline")

    def ask(
        self, question: str, images: Sequence[Path] = (), *, model: str, max_tokens: int | None = None
    ) -> AbstractAsyncContextManager[Answer]:
        """Ask one question about images, as ``converse`` does."""
        return self.converse([user_turn(question, images)], model=model, max_tokens=max_tokens)

    @asynccontextmanager
    async def converse(
        self, turns: Sequence[dict[str, Any]], *, model: str, max_tokens: int | None = None, temperature: float = 0.0
    ) -> AsyncGenerator[Answer]:
        """Have the next turn; the answer has begun, or RestError is raised, when the context is entered."""
        body = {
            "model": model,
            "messages": turns,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if max_tokens is not None:
            body["max_completion_tokens"] = max_tokens
        with _translated(self._url):
            async with self._http.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
                if response.is_error:
                    await response.aread()
                _check(response, self._url)
                yield Answer(response.headers.get("x-request-id", ""), response)

    async def _get(self, path: str) -> dict[str, Any]:
        with _translated(self._url):
            response = await self._http.get(self._url + path)
            _check(response, self._url)
            document: dict[str, Any] = response.json()
            return document


def user_turn(text: str, images: Sequence[Path] = ()) -> dict[str, Any]:
    """Images, then text, as a message. Raises RestError when an image cannot be read."""
    return {"role": "user", "content": [*map(image_part, images), {"type": "text", "text": text}]}


def assistant_turn(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def image_part(path: Path) -> dict[str, Any]:
    """An image file as a content part. Raises RestError when it cannot be read."""
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise RestError(f"cannot read {path}: {error.strerror}", caller=True) from None
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


class _translated:  # noqa: N801 - used as a statement
    """Turns what httpx raises, and what is no answer of a gateway, into RestError."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        match exc:
            case httpx.ConnectError() | httpx.ConnectTimeout():
                message = f"nothing answers at {self._url}; start a cluster with: triptych up"
                raise RestError(message, caller=False) from None
            case httpx.TimeoutException():
                raise RestError(f"{self._url} took too long to answer", caller=False) from None
            case httpx.UnsupportedProtocol():
                raise RestError(f"{self._url!r} is not a URL that starts with http://", caller=True) from None
            case httpx.TransportError():
                raise RestError(f"the connection to {self._url} broke: {exc}", caller=False) from None
            case json.JSONDecodeError() | KeyError() | TypeError():
                raise RestError(f"what answers at {self._url} is not a triptych gateway", caller=False) from None


def _check(response: httpx.Response, url: str) -> None:
    """Raises RestError with the gateway's own words where there are any."""
    if not response.is_error:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        message = f"what answers at {url} is not a triptych gateway"
    raise RestError(f"{response.status_code}: {message}", caller=response.is_client_error)
