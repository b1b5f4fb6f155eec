"""Open-loop load: send each request when it is due, and record its outcome."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import httpx

from triptych.cli.bench import payload
from triptych.cli.outcome import CliError
from triptych.cli.rest import base_url, http_client, refusal
from triptych.runtime.tasks import TaskScope
from triptych.workload.report import NOT_SENT, TIMEOUT, Record
from triptych.workload.requests import Planned

_AHEAD = 32
"""Request bodies prepared ahead."""
_NOT_ALLOWED = frozenset({httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN})
_MOST_NAMES = 8
_MAX_ERROR_CHARS = 200


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``url`` is the server's, with or without ``/v1``."""

    url: str
    api_key: str | None = None
    timeout_s: float = 300.0
    max_in_flight: int = 4096
    """Further requests are not sent but counted as errors, which keeps the load open and memory bounded."""

    @property
    def base(self) -> str:
        """Raises RestError when ``url`` is invalid."""
        return f"{base_url(self.url)}/v1"

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        return http_client(self.base, api_key=self.api_key, timeout=httpx.Timeout(self.timeout_s), limits=limits)


async def model_to_ask(endpoint: Endpoint, wanted: str | None) -> str:
    """Return ``wanted`` if the endpoint serves it; if None, the first model listed.

    An endpoint without a model list is not checked. Raises EndpointError, and RestError with the endpoint's message
    when it refuses.
    """
    try:
        async with endpoint.client() as client:
            response = await client.get(f"{endpoint.base}/models", timeout=10.0)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise EndpointError(f"nothing answers at {endpoint.url}") from None
    except httpx.HTTPError as error:
        raise EndpointError(f"{endpoint.url} does not answer as a web server does: {error}") from None
    if response.status_code in _NOT_ALLOWED or (wanted is None and response.is_client_error):
        refused = refusal(response)
        if refused is not None:
            raise refused
    if wanted is not None and not response.is_success:
        return wanted
    if not response.is_success:
        raise EndpointError(f"{endpoint.base}/models answers {response.status_code}")
    try:
        served = [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        if wanted is not None:
            return wanted
        raise EndpointError(f"{endpoint.url} is not an OpenAI endpoint: /v1/models is not a list") from None
    if wanted is None and not served:
        raise EndpointError(f"{endpoint.base}/models lists no model; name one with --model")
    if wanted is not None and served and wanted not in served:
        shown = ", ".join(served[:_MOST_NAMES]) + (", ..." if len(served) > _MOST_NAMES else "")
        raise EndpointError(f"{endpoint.url} does not serve {wanted!r}; it serves {shown}", caller=True)
    return wanted or served[0]


class EndpointError(CliError):
    """The endpoint cannot be used; the message says why."""

    def __init__(self, message: str, *, caller: bool = False) -> None:
        super().__init__(message, caller=caller)


async def run(
    endpoint: Endpoint,
    requests: Sequence[Planned],
    style: payload.Style,
    rng: random.Random,
    note: Callable[[Record], None],
) -> None:
    """Send all requests, with arrival times relative to now; ``note`` gets each record when its request ends."""
    now_s = asyncio.get_running_loop().time
    bodies: asyncio.Queue[tuple[Planned, bytes]] = asyncio.Queue(_AHEAD)

    async def make() -> None:
        for planned in requests:
            await bodies.put((planned, await asyncio.to_thread(payload.body, planned, style, rng)))

    async def send(client: httpx.AsyncClient, planned: Planned, content: bytes, due_s: float) -> None:
        late_s = max(0.0, now_s() - due_s)
        record = await ask(client, f"{endpoint.base}/chat/completions", planned, content, due_s)
        note(replace(record, sent_late_s=late_s))

    async with endpoint.client() as client, TaskScope("bench") as scope:
        scope.spawn(make(), name="bodies")
        start_s = now_s()
        for _ in requests:
            planned, content = await bodies.get()
            due_s = start_s + planned.arrival_s
            await asyncio.sleep(due_s - now_s())
            if len(scope) >= endpoint.max_in_flight:
                note(Record(planned, error=NOT_SENT))
            else:
                scope.spawn(send(client, planned, content, due_s), name="request")
        await scope.drain(endpoint.timeout_s + 60)


async def ask(client: httpx.AsyncClient, url: str, planned: Planned, content: bytes, due_s: float) -> Record:
    """Send one request now and read its answer. Times count from ``due_s`` on the event loop's clock; failures are in the record."""
    now_s = asyncio.get_running_loop().time
    timeout_s = client.timeout.read
    answer = _Answer()
    error = ""
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream("POST", url, content=content, headers={"content-type": "application/json"}) as response,
        ):
            if response.status_code != httpx.codes.OK:
                error = f"HTTP {response.status_code}"
            else:
                async for line in response.aiter_lines():
                    answer.take(line, now_s() - due_s)
                error = answer.error
    except (TimeoutError, httpx.TimeoutException):
        error = TIMEOUT
    except httpx.ConnectError:
        error = "cannot connect"
    except httpx.HTTPError:
        error = "connection broke"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        error = "not an OpenAI stream"
    end_s = now_s() - due_s
    return Record(planned, 0.0, answer.ttft_s, end_s, answer.prompt_tokens, answer.completion_tokens, error)


class _Answer:
    """Accumulates a stream of server-sent events."""

    def __init__(self) -> None:
        self.ttft_s: float | None = None
        self.prompt_tokens = 0
        self._chunks = 0
        self._counted = 0
        self._done = False
        self._failure = ""

    @property
    def completion_tokens(self) -> int:
        """The server's count; without one, the number of chunks."""
        return self._counted or self._chunks

    @property
    def error(self) -> str:
        if self._failure:
            return self._failure
        return "" if self._done and self.ttft_s is not None else "broke off"

    def take(self, line: str, at_s: float) -> None:
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            self._done = True
            return
        event = json.loads(data)
        if "error" in event:
            self._failure = f"error in the stream: {event['error']['message']}"[:_MAX_ERROR_CHARS]
            return
        if usage := event.get("usage"):
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self._counted = int(usage.get("completion_tokens") or 0)
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            if delta.get("content") or delta.get("reasoning_content") or choice.get("finish_reason"):
                self.ttft_s = at_s if self.ttft_s is None else self.ttft_s
                self._chunks += bool(delta.get("content") or delta.get("reasoning_content"))
