"""REST client of the gateway for the command line: ask, stream, look up a timeline."""

import base64
import json
import mimetypes
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import httpx

from triptych.cli.outcome import CliError
from triptych.domain.limits import MAX_MESSAGE_NBYTES
from triptych.files import BadFile, read_bytes

_CONNECT_TIMEOUT_S = 5.0
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_PLACE = re.compile(r"messages\[(\d{1,9})\]\.content\[(\d{1,9})\]")


class RestError(CliError):
    """A request to the gateway failed."""

    def __init__(self, message: str, *, caller: bool, param: str = "", status: int = 0, code: str = "") -> None:
        super().__init__(message, caller=caller)
        self.param = param
        """The invalid field of the request, as the gateway names it."""
        self.status = status
        """HTTP status; 0 without an answer."""
        self.code = code
        """The gateway's error code."""

    def with_message(self, message: str) -> "RestError":
        """The same error with another message."""
        return RestError(message, caller=self.caller, param=self.param, status=self.status, code=self.code)


class Attachment(NamedTuple):
    """A file attached to a question."""

    path: Path
    kind: Literal["image", "video", "audio"] = "image"

    def part(self) -> dict[str, Any]:
        """The file as a content part. Raises RestError when it cannot be read."""
        media_type = mimetypes.guess_type(self.path.name)[0] or "application/octet-stream"
        try:
            data = base64.b64encode(read_bytes(self.path, MAX_MESSAGE_NBYTES)).decode()
        except BadFile as error:
            raise RestError(f"{self.path} {error}", caller=True) from None
        return {"type": f"{self.kind}_url", f"{self.kind}_url": {"url": f"data:{media_type};base64,{data}"}}


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and the files before its text."""

    message: dict[str, Any]
    files: tuple[Attachment, ...] = ()

    @classmethod
    def user(cls, text: str, files: Sequence[Attachment] = ()) -> Self:
        """Files, then text. Raises RestError when one cannot be read."""
        content = [*(file.part() for file in files), {"type": "text", "text": text}]
        return cls({"role": "user", "content": content}, tuple(files))

    @classmethod
    def assistant(cls, text: str) -> Self:
        return cls({"role": "assistant", "content": text})


@dataclass(slots=True)
class Answer:
    """A streaming answer. Iterate ``texts`` once; then ``usage`` is known."""

    request_id: str
    _url: str
    _response: httpx.Response
    usage: dict[str, Any] | None = None

    async def texts(self) -> AsyncGenerator[str]:
        """Stream the text. Raises RestError when the stream breaks off."""
        done = False
        async for line in self._response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                continue
            for text in self._texts(line.removeprefix("data: ")):
                yield text
        if not done:
            raise RestError("the answer ended early", caller=False)

    def _texts(self, data: str) -> list[str]:
        with _parsing_answer(self._url):
            event = json.loads(data)
            if "error" in event:
                raise RestError(f"the answer was aborted: {event['error']['message']}", caller=False)
            self.usage = event.get("usage") or self.usage
            return [text for choice in event["choices"] if (text := choice["delta"].get("content"))]


def base_url(url: str) -> str:
    """Normalize a server's URL, with or without ``/v1`` at its end. Raises RestError when it is invalid."""
    try:
        parsed = httpx.URL(url.strip())
    except (httpx.InvalidURL, UnicodeError) as error:
        raise RestError(f"{url!r} is not a URL: {error}", caller=True) from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise RestError(f"{url!r} is not a URL that starts with http:// or https://", caller=True)
    return url.strip().rstrip("/").removesuffix("/v1").rstrip("/")


def http_client(url: str, *, api_key: str | None, timeout: httpx.Timeout, limits: httpx.Limits) -> httpx.AsyncClient:
    """An HTTP client for ``url``. Raises RestError for an invalid key or proxy."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise RestError("the API key has characters that are not allowed in a header", caller=True)
    try:
        parsed = httpx.URL(url)
        return httpx.AsyncClient(
            timeout=timeout,
            limits=limits,
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
            trust_env=parsed.host not in _LOOPBACK,  # no proxy for loopback
            verify=parsed.scheme != "http",  # authorities take 20 ms to read
        )
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        raise RestError(f"the proxy set in the environment cannot be used: {error}", caller=True) from None


class RestClient:
    """A client of the gateway at ``url``. Every method raises RestError with a one-line message."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 120.0) -> None:
        self._url = base_url(url)
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S)
        self._http = http_client(self._url, api_key=api_key, timeout=timeout, limits=httpx.Limits())

    @property
    def url(self) -> str:
        return self._url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Ids of the models served."""
        document = await self._get("/v1/models")
        with _parsing_answer(self._url):
            return [str(model["id"]) for model in document["data"]]

    async def loras(self) -> list[tuple[str, str]]:
        """Names of the LoRA adapters served, each with its base model."""
        document = await self._get("/v1/models")
        with _parsing_answer(self._url):
            return [(str(model["id"]), str(model["parent"])) for model in document["data"] if model.get("parent")]

    async def load_lora(self, name: str, directory: str, parent: str | None) -> dict[str, Any]:
        """The model that the adapter is served as."""
        order = {"lora_name": name, "lora_path": directory, "parent": parent}
        return await self._post("/v1/load_lora_adapter", order)

    async def unload_lora(self, name: str) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def readiness(self) -> dict[str, Any]:
        """``ready``, ``missing`` and ``instances`` from ``/ready``, also while the cluster is not ready."""
        document = await self._get("/ready", also=httpx.codes.SERVICE_UNAVAILABLE)
        with _parsing_answer(self._url):
            names = {name: [str(name) for name in document[name]] for name in ("missing", "instances")}
            return {"ready": bool(document["ready"]), **names}

    async def first_model(self) -> str:
        """Id of the first model that the gateway lists."""
        models = await self.models()
        if not models:
            raise RestError(f"{self._url} serves no model yet", caller=False)
        return models[0]

    async def timeline(self, request_id: str) -> dict[str, Any]:
        return await self._get(f"/v1/requests/{request_id}/timeline")

    def ask(
        self, question: str, images: Sequence[Path] = (), *, model: str, max_tokens: int | None = None
    ) -> AbstractAsyncContextManager[Answer]:
        """Ask a single question; see ``converse``."""
        return self.converse(
            [Turn.user(question, [Attachment(image) for image in images])], model=model, max_tokens=max_tokens
        )

    @asynccontextmanager
    async def converse(
        self, turns: Sequence[Turn], *, model: str, max_tokens: int | None = None, temperature: float = 0.0
    ) -> AsyncGenerator[Answer]:
        """Take the next turn. On entering the context the answer has begun, or RestError is raised."""
        body = {
            "model": model,
            "messages": [turn.message for turn in turns],
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if max_tokens is not None:
            body["max_completion_tokens"] = max_tokens
        with _translated(self._url), _naming_files(turns):
            async with self._http.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
                if not response.is_success:
                    await response.aread()
                _check(response, self._url)
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    raise _not_a_gateway(self._url)
                yield Answer(response.headers.get("x-request-id", ""), self._url, response)

    async def _get(self, path: str, *, also: int = httpx.codes.OK) -> dict[str, Any]:
        """The JSON object of a success, or of status ``also``."""
        with _translated(self._url):
            response = await self._http.get(self._url + path)
        if response.status_code != also:
            _check(response, self._url)
        return self._document(response)

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object of a success."""
        with _translated(self._url):
            response = await self._http.post(self._url + path, json=body)
        _check(response, self._url)
        return self._document(response)

    def _document(self, response: httpx.Response) -> dict[str, Any]:
        with _parsing_answer(self._url):
            document = response.json()
        if not isinstance(document, dict):
            raise _not_a_gateway(self._url)
        return document


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """Translates httpx's exceptions into RestError."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise RestError(f"nothing answers at {url}; start a cluster with: triptych up", caller=False) from None
    except httpx.TimeoutException:
        raise RestError(f"{url} took too long to answer", caller=False) from None
    except httpx.RemoteProtocolError as error:
        raise RestError(
            f"the server at {url} does not speak HTTP, or closed the connection: {error}", caller=False
        ) from None
    except httpx.HTTPError as error:
        raise RestError(f"the connection to {url} broke: {error}", caller=False) from None


class _parsing_answer:  # noqa: N801 - used as a statement
    """Translates errors in parsing an answer that no gateway would give into RestError."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(exc, ValueError | KeyError | TypeError | AttributeError):
            raise _not_a_gateway(self._url) from None


@contextmanager
def _naming_files(turns: Sequence[Turn]) -> Iterator[None]:
    """Replaces the field in a gateway's error by the name of the invalid file."""
    try:
        yield
    except RestError as error:
        place = _PLACE.match(error.param)
        files = turns[int(place[1])].files if place and int(place[1]) < len(turns) else ()
        if place is None or int(place[2]) >= len(files):
            raise
        reason = re.sub(rf"{re.escape(place[0])}[^:\s]*: ", "", str(error), count=1)
        raise error.with_message(f"{files[int(place[2])].path}: {reason}") from None


def _not_a_gateway(url: str) -> RestError:
    return RestError(f"the server at {url} is not a triptych gateway", caller=False)


def refusal(response: httpx.Response) -> RestError | None:
    """The error in a response, with the server's message; None when it has another form."""
    try:
        error = response.json()["error"]
        message, param, code = str(error["message"]), str(error.get("param") or ""), str(error.get("code") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if response.status_code == httpx.codes.UNAUTHORIZED:
        message += "; give a key with --api-key or TRIPTYCH_API_KEY"
    text = f"{response.status_code}: {message}"
    return RestError(text, caller=response.is_client_error, param=param, status=response.status_code, code=code)


def _check(response: httpx.Response, url: str) -> None:
    """Raises RestError for an error status, with the gateway's message if there is one."""
    if response.is_success:
        return
    raise refusal(response) or RestError(
        f"the server at {url} is not a triptych gateway (status {response.status_code})", caller=False
    )
