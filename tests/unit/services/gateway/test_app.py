"""The gateway as a real server on loopback, with the official client."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

import httpx
import openai
import pytest

from tests.unit.services.gateway.fakes import FINISH, HELLO, FakeRouter
from triptych.domain.generation import TokenChunk
from triptych.errors import ModelNotFound, Overloaded
from triptych.runtime.process import CannotStart
from triptych.services.gateway.app import serve
from triptych.services.gateway.settings import GatewaySettings

ASK: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}


@asynccontextmanager
async def served(router: FakeRouter, **settings: object) -> AsyncGenerator[str]:
    async with serve(GatewaySettings(port=0, **settings), router) as app:  # type: ignore[arg-type]
        yield f"http://127.0.0.1:{app.port}"


@asynccontextmanager
async def official(router: FakeRouter) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with (
        served(router) as url,
        openai.DefaultAsyncHttpxClient(trust_env=False) as http,
        openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield client


async def test_a_limit_of_files_below_that_of_connections_is_told(
    router: FakeRouter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, told in ((None, False), (4096 + 128, False), (4096, True)):
        monkeypatch.setattr("triptych.runtime.open_files.allowed", lambda most=most: most)
        caplog.clear()
        async with served(router):
            assert ("ulimit -Hn" in caplog.text) == told


async def test_the_official_client_gets_an_answer(router: FakeRouter) -> None:
    async with official(router) as client:
        answer = await client.chat.completions.create(**ASK)
        assert answer.choices[0].message.content == "Hello"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 22
        assert [model.id async for model in client.models.list()] == ["demo"]


async def test_the_official_client_gets_a_stream(router: FakeRouter) -> None:
    async with official(router) as client:
        stream = await client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 19


async def test_the_official_client_raises_its_own_errors(router: FakeRouter) -> None:
    async with official(router) as client:
        router.script = [ModelNotFound("no such model", param="model")]
        with pytest.raises(openai.NotFoundError) as not_found:
            await client.chat.completions.create(**ASK)
        assert not_found.value.code == "model_not_found"
        router.script = [TokenChunk((1,), "x"), Overloaded("full")]
        with pytest.raises(openai.APIError, match="full"):
            async for _ in await client.chat.completions.create(**ASK, stream=True):
                pass
        router.script = [Overloaded("full", retry_after_s=3)]
        with pytest.raises(openai.RateLimitError) as overloaded:
            await client.chat.completions.create(**ASK, stream=True)
        assert overloaded.value.response.headers["retry-after"] == "3"


async def test_the_official_synchronous_client_works(router: FakeRouter) -> None:
    def ask(url: str) -> tuple[str | None, str]:
        with (
            openai.DefaultHttpxClient(trust_env=False) as http,
            openai.OpenAI(base_url=url + "/v1", api_key="none", http_client=http, max_retries=0) as client,
        ):
            whole = client.chat.completions.create(**ASK)
            with client.chat.completions.create(**ASK, stream=True) as stream:
                return whole.choices[0].message.content, "".join(
                    chunk.choices[0].delta.content or "" for chunk in stream
                )

    async with served(router) as url:
        assert await asyncio.to_thread(ask, url) == ("Hello", "Hello")


async def test_tokens_are_streamed_as_they_are_generated(router: FakeRouter) -> None:
    gate = asyncio.Event()
    router.script = [TokenChunk((1,), "first"), gate, *FINISH]
    async with official(router) as client:
        stream = await client.chat.completions.create(**ASK, stream=True)
        texts = []
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content)
            if texts[-1] == "first":
                gate.set()
        assert texts == ["", "first", None]


async def test_closing_the_connection_cancels_the_request(router: FakeRouter) -> None:
    router.script = [TokenChunk((1,), "x"), asyncio.Event()]
    async with official(router) as client, asyncio.timeout(60):
        stream = await client.chat.completions.create(**ASK, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await router.closed.wait()


async def test_closing_the_connection_while_waiting_cancels_the_request(router: FakeRouter) -> None:
    router.script = [asyncio.Event()]
    async with served(router) as url, httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(60):
        with pytest.raises(httpx.ReadTimeout):
            await client.post(url + "/v1/chat/completions", json=ASK, timeout=0.2)
        await router.closed.wait()


async def test_a_body_above_the_limit_is_refused_before_it_is_sent(router: FakeRouter) -> None:
    async with served(router, max_body_bytes=1024) as url, httpx.AsyncClient(trust_env=False, timeout=60) as client:
        answer = await client.post(url + "/v1/chat/completions", content=b"x" * 3_000_000)
        assert answer.status_code == 413
        assert (await client.get(url + "/health")).status_code == 200


HEAD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
REFUSED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "trickle"),
    [(b"", b""), (b"", HEAD), (HEAD + b"\r\n", b""), (HEAD + b"\r\n", HEAD), (REFUSED, b"x" * 1000)],
    ids=["nothing", "a head", "nothing after an answer", "a head after an answer", "the rest of what was refused"],
)
async def test_a_connection_without_a_request_is_closed(router: FakeRouter, before: bytes, trickle: bytes) -> None:
    async with (
        served(router, head_timeout_s=1, keep_alive_s=1, max_body_bytes=1024) as url,
        asyncio.timeout(60),
        asyncio.TaskGroup() as group,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)

        async def send_on() -> None:
            for byte in trickle:
                writer.write(bytes((byte,)))
                await asyncio.sleep(0.1)

        began_s = asyncio.get_running_loop().time()
        writer.write(before)
        sending = group.create_task(send_on())
        answer = b""
        # A byte that arrives while the server closes is never read, and TCP then sends a reset: closed all the same.
        with suppress(ConnectionResetError) if trickle else nullcontext():
            while piece := await reader.read(65536):
                answer += piece
        took_s = asyncio.get_running_loop().time() - began_s
        sending.cancel()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 " if before else b"")
        assert 0.9 < took_s < 15, "the usual limit is 20 s"


@pytest.mark.slow
async def test_a_slow_answer_and_punctual_requests_keep_their_connection(router: FakeRouter) -> None:
    gate = asyncio.Event()
    router.script = [gate, *HELLO]
    async with (
        served(router, head_timeout_s=1) as url,
        httpx.AsyncClient(trust_env=False, timeout=60, limits=httpx.Limits(max_connections=1)) as client,
    ):
        asyncio.get_running_loop().call_later(1.5, gate.set)
        assert (await client.post(url + "/v1/chat/completions", json=ASK)).status_code == 200
        for _ in range(3):
            await asyncio.sleep(0.4)
            assert (await client.get(url + "/health")).status_code == 200


async def test_a_shutdown_waits_for_running_answers(router: FakeRouter) -> None:
    gate = asyncio.Event()
    router.script = [gate, *HELLO]
    async with serve(GatewaySettings(port=0), router) as app, httpx.AsyncClient(trust_env=False, timeout=60) as client:
        url = f"http://127.0.0.1:{app.port}"
        async with asyncio.TaskGroup() as group:
            running = group.create_task(client.post(url + "/v1/chat/completions", json=ASK))
            await router.next_request()
            group.create_task(app.drain())
            await asyncio.sleep(0)
            gate.set()
        assert (await running).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await client.get(url + "/health")


async def test_a_shutdown_ends_unfinished_answers_with_an_error(router: FakeRouter) -> None:
    router.script = [TokenChunk((1,), "x"), asyncio.Event()]
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
        asyncio.TaskGroup() as group,
        served(router) as url,
    ):
        body = {**ASK, "stream": True}
        running = group.create_task(client.post(url + "/v1/chat/completions", json=body))
        await router.next_request()
    assert '"code":"unavailable"' in (await running).text
    assert "[DONE]" not in (await running).text


async def test_a_taken_port_is_one_clear_line(router: FakeRouter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotStart, match=f"cannot listen on 127.0.0.1:{port}"):
            async with serve(GatewaySettings(port=port), router):
                pass


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "localhost"},
        {"port": 70_000},
        {"router": "nowhere"},
        {"max_body_bytes": 2048, "max_buffered_bytes": 1024},
        {"request_timeout_s": 700},
        {"unknown": 1},
    ],
    ids=str,
)
def test_invalid_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GatewaySettings(**wrong)
