import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from triptych.cli.bench import load
from triptych.cli.bench.load import Endpoint, EndpointError
from triptych.cli.bench.payload import Style
from triptych.workload.report import Record
from triptych.workload.requests import Planned

Handle = Callable[[asyncio.StreamWriter, int], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def chunk(text: str = "", finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def endpoint(handle: Handle, **options: float) -> AsyncIterator[Endpoint]:
    """An HTTP server that reads a request and calls ``handle`` with its number for the answer."""
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        number, count = count, count + 1
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
        await reader.readexactly(int(length.split(b":")[1]))
        try:
            await handle(writer, number)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield Endpoint(f"http://127.0.0.1:{port}/v1", **options)  # type: ignore[arg-type]


def plan(*arrivals_s: float) -> list[Planned]:
    return [Planned(at_s, 4, (), 3) for at_s in arrivals_s]


async def send(target: Endpoint, requests: Sequence[Planned]) -> list[Record]:
    records: list[Record] = []
    await load.run(target, requests, Style("m"), random.Random(0), records.append)
    return records


def answers(*events: bytes) -> Handle:
    async def handle(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(OK + b"".join(events))

    return handle


async def test_an_answer_is_timed_and_counted() -> None:
    async def handle(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(OK + chunk("a"))
        await writer.drain()
        await asyncio.sleep(0.5)  # longer than the reader of the first chunk may be late, on a busy machine
        writer.write(chunk("b") + chunk("c", "stop") + USAGE + DONE)

    async with endpoint(handle) as target:
        (record,) = await send(target, plan(0))
    assert record.ok
    assert (record.tokens, record.prompt_tokens) == (3, 5)
    assert record.ttft_s is not None
    assert record.end_s - record.ttft_s >= 0.09
    assert record.tpot_s == pytest.approx((record.end_s - record.ttft_s) / 2)


async def test_chunks_are_counted_when_the_server_sends_no_usage() -> None:
    async with endpoint(answers(chunk("a"), chunk("b"), chunk("", "stop"), DONE)) as target:
        (record,) = await send(target, plan(0))
    assert (record.ok, record.tokens) == (True, 2)


async def test_requests_are_sent_without_waiting_for_earlier_ones() -> None:
    """The time of a late request includes its whole wait (open loop)."""
    last = asyncio.Event()

    async def handle(writer: asyncio.StreamWriter, number: int) -> None:
        if number == 2:
            last.set()
        await last.wait()
        writer.write(OK + chunk("a", "stop") + DONE)

    async with endpoint(handle) as target:
        records = await send(target, plan(0, 0.1, 0.2))
    assert [record.ok for record in records] == [True] * 3
    assert max(record.end_s for record in records) >= 0.19


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n",), "HTTP 429"),
        ((OK, chunk("a"), event({"error": {"message": "x"}}), DONE), "error in the stream: x"),
        ((OK, chunk("a"), event({"error": {"message": "x" * 1000}}), DONE), f"error in the stream: {'x' * 179}"),
        ((OK, event({"error": "x"})), "not an OpenAI stream"),
        ((OK, chunk("a")), "broke off"),
        ((OK, DONE), "broke off"),
        ((OK, b"data: {\n\n"), "not an OpenAI stream"),
        ((OK, event({"choices": 7})), "not an OpenAI stream"),
        ((b"nonsense\r\n\r\n",), "connection broke"),
        ((), "connection broke"),
    ],
)
async def test_every_failure_is_recorded(answer: tuple[bytes, ...], error: str) -> None:
    async def handle(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(b"".join(answer))

    async with endpoint(handle) as target:
        records = await send(target, plan(0, 0.01))
    assert [record.error for record in records] == [error] * 2


async def test_a_request_timeout_is_recorded() -> None:
    async def handle(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(OK)
        await writer.drain()
        await asyncio.sleep(1)

    async with endpoint(handle, timeout_s=0.2) as target:
        (record,) = await send(target, plan(0))
    assert record.error == "timeout"


async def test_a_refused_connection_is_recorded() -> None:
    (record,) = await send(Endpoint("http://127.0.0.1:1"), plan(0))
    assert record.error == "cannot connect"


async def test_requests_in_flight_are_bounded_and_the_rest_counted() -> None:
    done = asyncio.Event()

    async def handle(writer: asyncio.StreamWriter, _: int) -> None:
        await done.wait()
        writer.write(OK + chunk("a", "stop") + DONE)

    records: list[Record] = []

    def note(record: Record) -> None:
        records.append(record)
        if len(records) == 3:
            done.set()

    async with endpoint(handle, max_in_flight=2) as target:
        await load.run(target, plan(0, 0.01, 0.02, 0.03, 0.04), Style("m"), random.Random(0), note)
    assert [record.error for record in records[:3]] == ["not sent: too many in flight"] * 3
    assert [record.ok for record in records[3:]] == [True, True]


async def test_the_first_model_is_looked_up() -> None:
    body = b'{"data": [{"id": "one"}, {"id": "two"}]}'
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def handle(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(head + body if number == 0 else b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n")

    async with endpoint(handle) as target:
        assert await load.model_to_ask(target, None) == "one"
        with pytest.raises(EndpointError, match="answers 401"):
            await load.model_to_ask(target, None)
    with pytest.raises(EndpointError, match="nothing answers"):
        await load.model_to_ask(Endpoint("http://127.0.0.1:1"), None)
