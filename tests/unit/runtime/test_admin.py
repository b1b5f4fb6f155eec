"""The admin port serves three paths, and tolerates anything else that connects."""

import asyncio
import json
import os
from contextlib import suppress
from http import HTTPStatus

import httpx
import pytest

from triptych.errors import Unavailable
from triptych.runtime import admin
from triptych.runtime.telemetry import Telemetry


async def _ok(_: admin.Query) -> admin.Answer:
    return admin.Answer.json(HTTPStatus.OK, {"status": "ok"})


async def _broken(_: admin.Query) -> admin.Answer:
    raise RuntimeError("a defect")


ROUTES = {"/health": _ok, "/broken": _broken}


async def exchange(port: int, request: bytes) -> bytes:
    """The whole response; empty when the connection was cut."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        writer.write_eof()
        return await reader.read()
    except OSError:
        return b""
    finally:
        writer.transport.abort()


async def test_get_and_head_are_served_and_other_methods_refused() -> None:
    async with (
        admin.serve("127.0.0.1", 0, ROUTES) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client,
    ):
        answer = await client.get("/health?verbose=1")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        head = await client.head("/health")
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "16")
        assert (await client.post("/health", content=b"x" * 100_000)).status_code == 405
        missing = await client.get("/etc/passwd")
        assert (missing.status_code, missing.json()) == (404, {"paths": ["/broken", "/health"]})
        broken = await client.get("/broken")
        assert (broken.status_code, broken.json()) == (500, {"error": "see the log"})
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 10_000],
)
async def test_malformed_input_ends_only_its_connection(nonsense: bytes) -> None:
    async with admin.serve("127.0.0.1", 0, ROUTES) as port:
        assert b"200" not in await exchange(port, nonsense)
        assert (await exchange(port, b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_connections_are_bounded_and_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "_REQUEST_S", 600.0)  # idle connections stay, however slow this machine is
    async with admin.serve("127.0.0.1", 0, ROUTES) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(16)]
        assert await exchange(port, b"GET /health HTTP/1.1\r\n\r\n") == b""
        for _, writer in idle:
            writer.transport.abort()
        async with asyncio.timeout(60):
            while not (await exchange(port, b"GET /health HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200"):
                pass


async def test_the_server_stops_at_once_despite_open_connections() -> None:
    async with admin.serve("127.0.0.1", 0, ROUTES) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        with suppress(ConnectionError):
            assert await reader.read() == b""
    writer.transport.abort()


async def test_a_taken_port_is_one_clear_error() -> None:
    async with admin.serve("127.0.0.1", 0, ROUTES) as port:
        with pytest.raises(Unavailable, match=f"admin port {port}"):
            async with admin.serve("127.0.0.1", port, ROUTES):
                pass


async def test_ready_names_what_is_missing_and_health_ignores_it() -> None:
    telemetry = Telemetry()
    async with (
        admin.serve("127.0.0.1", 0, telemetry.routes()) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client,
    ):
        starting = await client.get("/ready")
        assert (starting.status_code, starting.json()) == (
            503,
            {"ready": False, "missing": ["it is starting"], "pid": os.getpid()},
        )
        assert (await client.get("/health")).status_code == 200

        async def nothing() -> tuple[str, ...]:
            return ()

        telemetry.ready_when(nothing)
        assert json.loads((await client.get("/ready")).text) == {"ready": True, "missing": [], "pid": os.getpid()}
        assert "process_cpu_seconds_total" in (await client.get("/metrics")).text

        async def pools(query: admin.Query) -> object:
            return {"pools": [], **query}

        assert (await client.get("/pools")).status_code == 404
        telemetry.show("/pools", pools)
        assert (await client.get("/pools")).json() == {"pools": []}
        assert (await client.get("/pools?after=7&name=a%20b")).json() == {"pools": [], "after": "7", "name": "a b"}
