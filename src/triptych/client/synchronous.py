"""``Client``: a synchronous wrapper around ``AsyncClient``, which documents the calls."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, Unpack

from triptych.client.answers import Answer
from triptych.client.asynchronous import DEFAULT_TIMEOUT_S, QUERY_TIMEOUT_S, AsyncClient, ChatStream
from triptych.client.background import BackgroundLoop
from triptych.client.images import Image
from triptych.client.messages import Prompt
from triptych.client.options import ChatOptions
from triptych.client.retries import RetryPolicy
from triptych.domain.chat import ToolCall
from triptych.domain.generation import FinishReason, TokenChunk, Usage
from triptych.domain.instance import ModelInfo
from triptych.domain.resolving import ResolvedItem
from triptych.domain.timeline import Readiness, Timeline
from triptych.errors import Cancelled
from triptych.runtime.tls import TlsIdentity


class SyncChatStream:
    """A streaming answer: iterate it once for its chunks; then ``usage`` and ``finish_reason`` are known."""

    def __init__(self, stream: ChatStream, loop: BackgroundLoop) -> None:
        self._stream = stream
        self._loop = loop

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TokenChunk:
        try:
            return self._loop.run(self._next())
        except StopAsyncIteration:
            raise StopIteration from None

    async def _next(self) -> TokenChunk:
        return await anext(self._stream)

    def collect(self) -> Answer:
        return self._loop.run(self._stream.collect())

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def usage(self) -> Usage | None:
        return self._stream.usage

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._stream.finish_reason

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self._stream.tool_calls

    def tool_calls_of(self, choice: int) -> tuple[ToolCall, ...]:
        return self._stream.tool_calls_of(choice)

    @property
    def reasoning(self) -> str:
        return self._stream.reasoning

    def reasoning_of(self, choice: int) -> str:
        return self._stream.reasoning_of(choice)


class Client:
    """Client of the routers at ``target``: ``host:port``, or several separated by commas.

    Threads may share one; close it, or use ``with``.
    """

    def __init__(
        self,
        target: str,
        *,
        model: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        tls: TlsIdentity | None = None,
    ) -> None:
        self._client = AsyncClient(target, model=model, timeout_s=timeout_s, retry=retry, tls=tls)
        self._background: BackgroundLoop | None = BackgroundLoop.shared()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Does nothing the second time, or in a forked child with its parent's client."""
        background, self._background = self._background, None
        if background is not None and background.is_here:
            background.run(self._client.close())

    @property
    def _loop(self) -> BackgroundLoop:
        if self._background is None:
            raise Cancelled("the client is closed")
        return self._background

    def chat(self, prompt: Prompt, images: Sequence[Image] = (), **options: Unpack[ChatOptions]) -> Answer:
        """Return the whole answer."""
        return self._loop.run(self._client.chat(prompt, images, **options))

    @contextmanager
    def stream(
        self, prompt: Prompt, images: Sequence[Image] = (), **options: Unpack[ChatOptions]
    ) -> Generator[SyncChatStream]:
        """Stream the answer; leaving the context cancels the rest."""
        context = self._client.stream(prompt, images, **options)
        stream = self._loop.run(context.__aenter__())
        try:
            yield SyncChatStream(stream, self._loop)
        finally:
            self._loop.run(context.__aexit__(None, None, None))

    @contextmanager
    def resolve(
        self,
        images: Sequence[Image],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        tenant_salt: bytes = b"",
        priority: int = 0,
    ) -> Generator[tuple[ResolvedItem, ...]]:
        """Have images encoded, and hold their embeddings within the context."""
        context = self._client.resolve(
            images, model=model, timeout_s=timeout_s, tenant_salt=tenant_salt, priority=priority
        )
        resolution = self._loop.run(context.__aenter__())
        try:
            yield resolution
        finally:
            self._loop.run(context.__aexit__(None, None, None))

    def tokenize(
        self,
        prompt: Prompt,
        images: Sequence[Image] = (),
        *,
        model: str | None = None,
        timeout_s: float = QUERY_TIMEOUT_S,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        return self._loop.run(self._client.tokenize(prompt, images, model=model, timeout_s=timeout_s, tools=tools))

    def models(self, *, timeout_s: float = QUERY_TIMEOUT_S) -> tuple[ModelInfo, ...]:
        return self._loop.run(self._client.models(timeout_s=timeout_s))

    def ready(self, *, timeout_s: float = QUERY_TIMEOUT_S) -> Readiness:
        return self._loop.run(self._client.ready(timeout_s=timeout_s))

    def timeline(self, request_id: str, *, timeout_s: float = QUERY_TIMEOUT_S) -> Timeline:
        return self._loop.run(self._client.timeline(request_id, timeout_s=timeout_s))
