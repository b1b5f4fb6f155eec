"""HTTP below the routes: bounded heads and framing, and refusals in the common error format."""

import asyncio
import gzip
import json
import socket
import time
import tracemalloc
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.unit.services.gateway.fakes import FINISH, FakeRouter
from triptych.domain.generation import TokenChunk
from triptych.services.gateway import half_closed, http
from triptych.services.gateway.app import serve
from triptych.services.gateway.keys import new_key
from triptych.services.gateway.settings import GatewaySettings

ASK = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}).encode()
HOST = b"host: localhost\r\n"
GET = b"GET /v1/models HTTP/1.1\r\n" + HOST
POST = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
ONE_CHUNK = b"%x\r\n%b\r\n" % (len(ASK), ASK)
GOOD = POST + b"content-length: %d\r\n\r\n" % len(ASK) + ASK


class Connection:
    """One connection to the gateway; ``answer`` reads the next response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON body."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        return (
            int(head[0].split()[1]),
            headers,
            json.loads(await self._reader.readexactly(int(headers["content-length"]))),
        )

    async def error(self) -> tuple[int, str]:
        """Status and code of a refusal, after which the gateway closes."""
        status, headers, body = await self.answer()
        assert headers["x-request-id"]
        assert headers["connection"] == "close"
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert await self._reader.read() == b""
        return status, body["error"]["code"]

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def connected(router: FakeRouter | None = None, **settings: object) -> AsyncGenerator[Connection]:
    async with (
        serve(GatewaySettings(port=0, **settings), router or FakeRouter()) as app,  # type: ignore[arg-type]
        asyncio.timeout(60),
    ):
        connection = Connection(*await asyncio.open_connection("127.0.0.1", app.port, limit=1 << 20))
        try:
            yield connection
        finally:
            connection.close()


def fields(number: int) -> bytes:
    return b"".join(b"x-%d: y\r\n" % at for at in range(number))


TOO_MUCH = {
    "one header": (GET + b"x: " + b"y" * http.MAX_HEAD_BYTES + b"\r\n\r\n", 431, "headers_too_large"),
    "large headers": (GET + (b"x: " + b"y" * 9000 + b"\r\n") * 8 + b"\r\n", 431, "headers_too_large"),
    "many headers": (GET + fields(100) + b"\r\n", 431, "headers_too_large"),
    "unfinished": (GET + b"x: " + b"y" * (1 << 20), 431, "headers_too_large"),
    "uri": (b"GET /" + b"y" * 9000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414, "uri_too_long"),
    "unfinished uri": (b"GET /" + b"y" * (1 << 20), 414, "uri_too_long"),
    "one trailer": (CHUNKED + ONE_CHUNK + b"0\r\nx: " + b"y" * (1 << 20), 431, "headers_too_large"),
    "many trailers": (CHUNKED + ONE_CHUNK + b"0\r\n" + fields(100) + b"\r\n", 431, "headers_too_large"),
    "chunk extension": (CHUNKED + b"1;x=" + b"y" * (1 << 20), 431, "headers_too_large"),
    "chunk extensions": (CHUNKED + (b"1;x=" + b"y" * 99 + b"\r\n \r\n") * 2000, 431, "headers_too_large"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
async def test_a_head_or_framing_that_is_too_large_is_refused(name: str) -> None:
    sent, status, code = TOO_MUCH[name]
    async with connected() as connection:
        await connection.send(sent)
        assert await connection.error() == (status, code)


@pytest.mark.parametrize(
    "sent",
    [
        GET + b"x: " + b"y" * 60_000 + b"\r\n\r\n",
        GET + fields(99) + b"\r\n",
        CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in ASK + b" " * 60_000) + b"0\r\nx: y\r\n\r\n",
        POST + b"content-length: %d\r\n\r\n" % (len(ASK) + 500_000) + ASK + b" " * 500_000,
    ],
    ids=["a large header", "many headers", "small chunks", "a large body"],
)
async def test_a_request_within_the_bounds_keeps_its_connection(sent: bytes) -> None:
    async with connected() as connection:
        for _ in range(3):
            await connection.send(sent)
            assert (await connection.answer())[0] == 200


async def test_an_endless_head_takes_no_memory() -> None:
    asyncio.get_running_loop().set_debug(False)
    async with connected(max_connections=64) as connection:
        tracemalloc.start()
        try:
            await connection.send(GET + b"x: ")
            for _ in range(60):
                await connection.send(b"y" * (1 << 20))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert (await connection.error())[0] == 431
    assert peak < 8 << 20


async def test_an_endless_head_in_small_pieces_is_refused() -> None:
    async with connected() as connection:
        await connection.send(GET)
        for _ in range(80):
            await connection.send(b"x: " + b"y" * 997)
            await asyncio.sleep(0)
        assert (await connection.error())[0] == 431


# --- malformed requests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"hello\r\n\r\n",
        GET + b"a b: c\r\n\r\n",
        GET + b"x: a\r\n folded\r\n\r\n",
        POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    ],
    ids=["tls", "words", "header name", "folded header", "two lengths", "url", "connect"],
)
async def test_a_malformed_request_is_answered_in_the_common_error_format(garbage: bytes) -> None:
    async with connected() as connection:
        await connection.send(garbage)
        assert await connection.error() == (400, "invalid_request")


async def test_good_requests_before_garbage_are_answered_first() -> None:
    gate = asyncio.Event()
    async with connected(FakeRouter((gate, TokenChunk((1,), "x"), *FINISH))) as connection:
        await connection.send(GOOD + GET + b"\r\n" + b"\x00garbage")
        gate.set()
        status, _, body = await connection.answer()
        assert (status, body["choices"][0]["message"]["content"]) == (200, "x")
        assert (await connection.answer())[2]["object"] == "list"
        assert await connection.error() == (400, "invalid_request")


async def test_a_framing_error_in_a_body_fails_its_own_request() -> None:
    async with connected() as connection:
        await connection.send(GET + b"\r\n" + CHUNKED + b"zz\r\n")
        assert (await connection.answer())[0] == 200
        assert await connection.error() == (400, "invalid_request")


async def test_pipelined_requests_of_a_connection_are_bounded() -> None:
    gate = asyncio.Event()
    async with connected(FakeRouter((gate, *FINISH))) as connection:
        await connection.send(GOOD + (GET + b"\r\n") * (http.MAX_PIPELINED + 50))
        gate.set()
        for _ in range(1 + http.MAX_PIPELINED):
            assert (await connection.answer())[0] == 200
        assert await connection.error() == (429, "overloaded")


async def test_a_disconnect_with_pipelined_requests_cancels_the_running_one() -> None:
    router = FakeRouter((asyncio.Event(),))
    async with connected(router) as connection:
        await connection.send(GOOD + GET + b"\r\n")
        await router.next_request()
        connection.close()
        await router.closed.wait()


async def test_connections_far_beyond_the_limit_are_refused_before_their_request() -> None:
    async with serve(GatewaySettings(port=0, max_connections=1), FakeRouter()) as app, asyncio.timeout(60):
        opened = [
            Connection(*await asyncio.open_connection("127.0.0.1", app.port))
            for _ in range(1 + http.SPARE_CONNECTIONS + 1)
        ]
        assert await opened[-1].error() == (429, "overloaded")
        await opened[-2].send(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
        assert (await opened[-2].answer())[0] == 200
        for connection in opened:
            connection.close()


# --- Upgrade, Expect, Content-Encoding ------------------------------------------------------------------------------


async def test_an_upgrade_request_is_ignored_and_its_body_is_read() -> None:
    """Java's client requests an upgrade to HTTP/2 in each request until it succeeds."""
    upgrade = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    async with connected() as connection:
        for _ in range(2):
            await connection.send(POST + upgrade + b"content-length: %d\r\n\r\n" % len(ASK) + ASK)
            status, _, body = await connection.answer()
            assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello")


@pytest.mark.parametrize(
    ("header", "body", "status", "code"),
    [
        (b"content-encoding: gzip", gzip.compress(ASK), 415, "unsupported_encoding"),
        (b"content-encoding: identity", ASK, 200, ""),
        (b"expect: 200-ok", ASK, 417, "expectation_failed"),
    ],
    ids=["gzip", "identity", "expect"],
)
async def test_unsupported_headers_are_refused_with_their_status(
    header: bytes, body: bytes, status: int, code: str
) -> None:
    async with connected() as connection:
        await connection.send(POST + header + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        got, headers, answer = await connection.answer()
        assert (got, answer.get("error", {}).get("code", "")) == (status, code)
        assert headers["x-request-id"]


async def test_a_client_that_waits_for_100_continue_gets_it() -> None:
    async with connected() as connection:
        await connection.send(POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(ASK))
        assert await connection._reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await connection.send(ASK)
        assert (await connection.answer())[0] == 200


# --- Host header -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "served"),
    [
        (b"localhost:8000", True),
        (b"LOCALHOST", True),
        (b"localhost.:8000", True),
        (b"127.0.0.1:1", True),
        (b"127.0.0.2", True),
        (b"[::1]:8000", True),
        (b"[0:0:0:0:0:0:0:1]", True),
        (b"my.name:80", True),
        (b"MY.name.", True),
        (b"localhost..", False),
        (b"[localhost]", False),
        (b"attacker.example", False),
        (b"localhost.attacker.example:8000", False),
        (b"169.254.169.254", False),
        (b"", False),
    ],
)
async def test_without_keys_on_loopback_only_known_host_names_are_served(host: bytes, served: bool) -> None:
    async with connected(allowed_hosts=("My.Name",)) as connection:
        await connection.send(b"GET /v1/models HTTP/1.1\r\nhost: " + host + b"\r\n\r\n")
        status, _, body = await connection.answer()
        assert (status, body.get("error", {}).get("code")) == ((200, None) if served else (403, "permission_denied"))


async def test_with_keys_or_allow_network_every_host_name_is_served(tmp_path: Path) -> None:
    key, lines = new_key("a")
    (tmp_path / "keys.toml").write_text(lines)
    for settings in ({"keys": tmp_path / "keys.toml"}, {"allow_anyone": True}):
        async with connected(**settings) as connection:
            line = b"authorization: Bearer " + key.encode()
            await connection.send(b"GET /v1/models HTTP/1.1\r\nhost: api.example\r\n" + line + b"\r\n\r\n")
            assert (await connection.answer())[0] == 200


@pytest.mark.slow
async def test_a_client_that_does_not_read_its_stream_is_cut_off() -> None:
    ask = ASK[:-1] + b', "stream": true}'
    request = POST + b"x-request-timeout: 0.2\r\ncontent-length: %d\r\n\r\n" % len(ask) + ask
    router = FakeRouter([TokenChunk((1,), "x" * 100_000)] * 200)
    settings = GatewaySettings(port=0, head_timeout_s=1, max_connections=1)
    async with serve(settings, router) as app, asyncio.timeout(60):
        with socket.create_connection(("127.0.0.1", app.port)) as client:
            client.sendall(request)
            await router.closed.wait()
            get = GET + b"connection: close\r\n\r\n"
            while await asyncio.to_thread(status_after_sending_all, app.port, get) != b"200":  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.05)


async def send_on(client: socket.socket) -> None:
    for _ in range(500):
        await asyncio.sleep(0.01)
        await asyncio.get_running_loop().sock_sendall(client, b"x")


async def test_a_refused_client_that_keeps_sending_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_LINGER_S", 0.1)
    async with serve(GatewaySettings(port=0), FakeRouter()) as app, asyncio.timeout(60):
        with socket.create_connection(("127.0.0.1", app.port)) as client:
            client.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(client, b"garbage\r\n\r\n")
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                await send_on(client)


def status_after_sending_all(port: int, request: bytes) -> bytes:
    """Reads the response only after sending the whole request, as blocking clients do."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(request)
        return client.recv(12).split()[1]


@pytest.mark.parametrize("head", [b"HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n", b"HTTP/1.0\r\n"])
async def test_an_early_refusal_reaches_a_client_that_is_still_sending(head: bytes, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(new_key("bob")[1])
    nbytes = 4 << 20
    request = b"POST /v1/chat/completions " + head + b"content-length: %d\r\n\r\n" % nbytes + bytes(nbytes)
    async with serve(GatewaySettings(port=0, keys=tmp_path / "keys.toml"), FakeRouter()) as app, asyncio.timeout(60):
        for _ in range(3):
            assert await asyncio.to_thread(status_after_sending_all, app.port, request) == b"401"


def answer_after_sending_slowly(port: int, request: bytes, lasts_s: float) -> bytes:
    """Everything that the gateway sent, read after sending a little of the body for ``lasts_s``."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(request)
        deadline_s = time.monotonic() + lasts_s  # noqa: TID251 - of a real socket
        while time.monotonic() < deadline_s:  # noqa: TID251
            time.sleep(0.1)
            client.sendall(b"x")
        answer = b""
        while piece := client.recv(65536):
            answer += piece
        return answer


@pytest.mark.slow
@pytest.mark.parametrize(("connection", "lasts_s"), [(b"", 2.7), (b"connection: close\r\n", 1.0)])
async def test_an_early_refusal_reaches_a_client_that_uploads_slowly(
    connection: bytes, lasts_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_LINGER_S", 0.1)
    request = POST + connection + b"content-length: 1000000\r\n\r\n"
    async with (
        serve(GatewaySettings(port=0, head_timeout_s=2, max_body_bytes=1024), FakeRouter()) as app,
        asyncio.timeout(60),
    ):
        answer = await asyncio.to_thread(answer_after_sending_slowly, app.port, request, lasts_s)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.endswith(b"}")


# --- half-closed connections -----------------------------------------------------------------------------------------


async def exchanged(port: int, request: bytes) -> bytes:
    """The bytes that come back for a request after which the sending side is closed, as ``nc -N`` does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def answered_after_half_close(script: Sequence[Any], request: bytes) -> bytes:
    """The same, of an answer that waits until the connection has been probed."""
    gate = asyncio.Event()
    filled = [gate if part is ... else part for part in script]
    async with serve(GatewaySettings(port=0), FakeRouter(filled)) as app, asyncio.timeout(20):
        asyncio.get_running_loop().call_later(0.2, gate.set)
        return await exchanged(app.port, request)


WORDS = [TokenChunk((1,), "one "), TokenChunk((2,), "two")]
ASK_STREAM = ASK[:-1] + b', "stream": true}'
GOOD_STREAM = POST + b"content-length: %d\r\n\r\n" % len(ASK_STREAM) + ASK_STREAM


async def test_a_client_that_closes_its_sending_side_gets_its_answer() -> None:
    answer = await answered_after_half_close([..., *WORDS, *FINISH], GOOD)
    interim, _, answer = answer.partition(b"\r\n\r\n")
    assert interim == b"HTTP/1.1 100 Continue"
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close\r\n" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == "one two"


async def test_an_answer_that_is_there_at_once_needs_no_interim_response() -> None:
    async with serve(GatewaySettings(port=0), FakeRouter()) as app, asyncio.timeout(20):
        for request in (GET + b"\r\n", b"GET /v1/models HTTP/1.0\r\n" + HOST + b"\r\n"):
            assert (await exchanged(app.port, request)).startswith(b"HTTP/1.1 200 OK\r\n")
        assert (await exchanged(app.port, b"garbage\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_a_stream_reaches_a_client_that_closes_its_sending_side() -> None:
    answer = await answered_after_half_close([WORDS[0], ..., WORDS[1], *FINISH], GOOD_STREAM)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\n3\r\n:\n\n\r\n" in answer, "a comment between two events"
    assert answer.index(b'"one "') < answer.index(b"\r\n3\r\n:\n\n\r\n") < answer.index(b'"two"')
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_pipelined_requests_are_answered_after_a_half_close() -> None:
    answer = await answered_after_half_close([..., *WORDS, *FINISH], GOOD + GET + b"\r\n")
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert answer.endswith(b"]}")


@pytest.mark.parametrize("rest", [GOOD[:-1], GOOD[:60], GET + b"\r\n" + GOOD[:-1]], ids=["body", "head", "both"])
async def test_a_half_close_within_a_request_leaves_the_answers_to_those_before_it(rest: bytes) -> None:
    whole = 2 if rest.startswith(GET) else 1
    answer = await answered_after_half_close([..., *WORDS, *FINISH], GOOD + rest)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == answer.count(b"HTTP/1.1 ") - answer.count(b"100 Continue") == whole
    assert b'"content":"one two"' in answer.replace(b": ", b":")


@pytest.mark.parametrize("script", [[asyncio.Event], [TokenChunk((1,), "x"), asyncio.Event]], ids=["waiting", "begun"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("request_", [GOOD, GOOD_STREAM], ids=["whole", "stream"])
async def test_a_client_that_leaves_is_noticed_although_nothing_is_to_be_sent(
    script: list[Any], version: bytes, request_: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_closed, "_UNPROBED_S", 0.1)
    router = FakeRouter([part() if part is asyncio.Event else part for part in script])
    async with connected(router) as connection:
        await connection.send(request_.replace(b"HTTP/1.1", b"HTTP/" + version))
        await router.next_request()
        connection.close()
        await router.closed.wait()


async def test_a_client_that_leaves_after_a_half_close_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_closed, "_PROBE_S", 0.1)
    router = FakeRouter((asyncio.Event(),))
    async with serve(GatewaySettings(port=0), router) as app, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(GOOD)
        writer.write_eof()
        assert await reader.readexactly(50) == b"HTTP/1.1 100 Continue\r\n\r\n" * 2
        assert not router.closed.is_set()
        writer.close()
        await router.closed.wait()


async def test_a_half_close_within_a_request_ends_the_connection() -> None:
    async with serve(GatewaySettings(port=0), FakeRouter()) as app, asyncio.timeout(20):
        for request in (GOOD[:-1], GET, b""):
            assert await exchanged(app.port, request) == b""


# --- HTTP/1.0, idle connections, hosts -------------------------------------------------------------------------------


async def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_the_connection() -> None:
    async with serve(GatewaySettings(port=0), FakeRouter([*WORDS, *FINISH])) as app, asyncio.timeout(20):
        answer = await exchanged(app.port, GOOD_STREAM.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"content-length" not in head
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
        answer = await exchanged(app.port, GOOD.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert b"content-length: " in answer


@pytest.mark.slow
async def test_an_idle_connection_is_kept_longer_than_a_slow_head() -> None:
    async with connected(head_timeout_s=1, keep_alive_s=20) as connection:
        await connection.send(GET + b"\r\n")
        assert (await connection.answer())[0] == 200
        await asyncio.sleep(1.5)
        await connection.send(GET + b"\r\n")
        assert (await connection.answer())[0] == 200
        began_s = asyncio.get_running_loop().time()
        await connection.send(GET)  # the first byte of a head ends the idle time
        assert await connection._reader.read() == b""
        assert asyncio.get_running_loop().time() - began_s > 0.9


@pytest.mark.parametrize(("lines", "status"), [(b"", 400), (HOST * 2, 400), (b"host: localhost.\r\n", 200)])
async def test_a_request_of_http_1_1_has_one_host(lines: bytes, status: int) -> None:
    async with connected() as connection:
        await connection.send(b"GET /v1/models HTTP/1.1\r\n" + lines + b"\r\n")
        assert (await connection.answer())[0] == status
    async with connected() as connection:
        await connection.send(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert (await connection.answer())[0] == 200


# --- late and waiting requests ---------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_request_that_waited_for_longer_than_its_timeout_is_refused_at_once() -> None:
    """The time counts from when the request could have been read."""
    router = FakeRouter()
    timeout = b"x-request-timeout: 2\r\n"
    asked = GOOD.replace(HOST, HOST + timeout)
    async with connected(router) as connection:
        await connection.send(asked)
        assert (await connection.answer())[0] == 200
        await connection.send(asked)
        time.sleep(2.5)  # noqa: ASYNC251 - the gateway, on the same loop, is to read late
        status, _, body = await connection.answer()
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        assert len(router.requests) == 1
        await connection.send(asked)
        assert (await connection.answer())[0] == 200


def test_clients_of_a_busy_gateway_do_not_wait_to_be_accepted_one_per_round() -> None:
    """By itself uvloop accepts one connection in each round of the event loop."""
    clients = 150

    async def rounds() -> int:
        async with serve(GatewaySettings(port=0), FakeRouter()) as app:
            opened = [socket.create_connection(("127.0.0.1", app.port)) for _ in range(clients)]
            for client in opened:
                client.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
                client.setblocking(False)
            waiting, number = set(opened), 0
            while waiting and number < 10 * clients:
                number += 1
                time.sleep(0.001)  # noqa: ASYNC251 - what a round does beside
                await asyncio.sleep(0)
                waiting -= {client for client in waiting if is_answered(client)}
            for client in opened:
                client.close()
            return number

    def is_answered(client: socket.socket) -> bool:
        try:
            return client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        except BlockingIOError:
            return False

    assert uvloop.run(rounds()) < clients / 3
