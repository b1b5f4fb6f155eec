"""Calls that share a stream are independent of each other, bounded, and behave like calls that come by themselves."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import uvloop

from triptych import errors
from triptych.domain.generation import Finished, FinishReason, TextEvent, TextRequest, TokenChunk
from triptych.domain.instance import InstanceInfo, InstanceLoad
from triptych.domain.sampling import SamplingParams
from triptych.rpc import limits
from triptych.rpc.authorization import Authorization
from triptych.rpc.interceptors import ErrorInterceptor
from triptych.rpc.multiplex_server import CallsServicer, Handlers
from triptych.rpc.observer import CallObserver
from triptych.rpc.server import RpcServer
from triptych.rpc.stubs import InstanceStub
from triptych.runtime import logs
from triptych.runtime.telemetry import Telemetry
from triptych.services.text.servicer import TextServicer
from triptych.testing.loras import NoLoras
from triptych.v1 import calls_pb2, calls_pb2_grpc, text_pb2, text_pb2_grpc
from triptych.wire.bounds import MAX_CALL_NBYTES

HOST = "127.0.0.1"
WAIT_S = 30.0
MOST_WRITES = 500
CALLS = 400
END = Finished(FinishReason.STOP, 1, 0.0, 0.0)
METHOD = "/triptych.v1.Text/Generate"


def request(request_id: str = "r", *, tokens: int = 1, timeout_s: float = WAIT_S) -> TextRequest:
    return TextRequest(request_id, "m", (1,) * tokens, (), SamplingParams(max_tokens=1), timeout_s)


@dataclass
class Script(NoLoras):
    """A text service: it answers ``chunks`` times, then waits if it is told to."""

    chunks: int = 1
    text: str = "a"
    waits: bool = False
    error: errors.TriptychError | None = None
    sent: int = 0
    running: set[str] = field(default_factory=set)
    seen: list[tuple[str, int, str, float]] = field(default_factory=list)

    async def describe(self) -> InstanceInfo:
        raise NotImplementedError

    async def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        yield InstanceLoad({})

    async def generate(self, asked: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        self.seen.append((asked.request_id, len(asked.token_ids), logs.request_id.get(), asked.timeout_s))
        self.running.add(asked.request_id)
        try:
            for _ in range(self.chunks):
                self.sent += 1
                yield (TokenChunk((1,), self.text),)
            if self.waits:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
            yield (END,)
        finally:
            self.running.discard(asked.request_id)


@asynccontextmanager
async def pair(
    script: Script, *, max_calls: int | None = None, telemetry: Telemetry | None = None
) -> AsyncIterator[tuple[InstanceStub, RpcServer]]:
    register = TextServicer(script).register
    server = RpcServer(
        host=HOST, port=0, service_names=(), register=register, max_concurrent_calls=max_calls, telemetry=telemetry
    )
    async with server:
        stub = InstanceStub(f"{HOST}:{server.port}")
        try:
            yield stub, server
        finally:
            await stub.close()


async def until(holds: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - what is waited for happens in the server
            await asyncio.sleep(0.005)


async def answer(stub: InstanceStub, asked: TextRequest) -> list[TextEvent]:
    return [event async for events in stub.generate(asked) for event in events]


async def test_a_message_for_many_calls_lets_other_work_run_in_between() -> None:
    go, turn, got = asyncio.Event(), 0, list[int]()

    class Held(Script):
        async def generate(self, asked: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
            self.sent += 1
            await go.wait()
            yield (END,)

    async def ask(stub: InstanceStub, number: int) -> None:
        async for _ in stub.generate(request(f"r{number}")):
            got.append(turn)

    async def turns() -> None:
        nonlocal turn
        while len(got) < CALLS:
            await asyncio.sleep(0)
            turn += 1

    script = Held()
    async with pair(script) as (stub, _), asyncio.TaskGroup() as group:
        for number in range(CALLS):
            group.create_task(ask(stub, number))
        await until(lambda: script.sent == CALLS)
        group.create_task(turns())
        go.set()
    assert max(Counter(got).values()) <= limits.MOST_AT_ONCE


async def test_a_call_carries_its_request_id_and_what_is_left_of_its_time() -> None:
    script, telemetry = Script(), Telemetry()
    async with pair(script, telemetry=telemetry) as (stub, _):
        await asyncio.gather(answer(stub, request("one")), answer(stub, request("two", timeout_s=3.0)))
    assert {(request_id, logged) for request_id, _, logged, _ in script.seen} == {("one", "one"), ("two", "two")}
    left_s = {request_id: timeout_s for request_id, _, _, timeout_s in script.seen}
    assert 2.0 < left_s["two"] <= 3.0 < left_s["one"] <= WAIT_S
    count = 'triptych_rpc_server_seconds_count{code="OK",method="Text/Generate"} 2.0'
    assert count in telemetry.metrics.render().decode()


async def test_leaving_one_call_cancels_it_alone() -> None:
    script = Script(waits=True)
    async with pair(script) as (stub, _), aclosing(stub.generate(request("stays"))) as stays:
        await anext(stays)
        async with aclosing(stub.generate(request("leaves"))) as leaves:
            await anext(leaves)
            assert script.running == {"stays", "leaves"}
        await until(lambda: script.running == {"stays"})


async def test_a_call_that_is_left_before_it_was_sent_does_not_reach_the_server() -> None:
    script = Script()
    async with pair(script) as (stub, _):
        left = asyncio.gather(answer(stub, request("left")))
        await asyncio.sleep(0)
        left.cancel()
        assert await answer(stub, request("asked")) == [TokenChunk((1,), "a"), END]
    assert [request_id for request_id, *_ in script.seen] == ["asked"]


async def test_the_deadline_of_one_call_ends_it_alone_on_both_sides() -> None:
    script = Script(waits=True)
    async with pair(script) as (stub, _), aclosing(stub.generate(request("stays"))) as stays:
        await anext(stays)
        with pytest.raises(errors.DeadlineExceeded):
            await answer(stub, request("late", timeout_s=0.1))
        await until(lambda: script.running == {"stays"})


async def test_a_server_ends_a_call_at_its_deadline_though_its_client_is_silent() -> None:
    script = Script(waits=True)
    async with exchange(script) as stream:
        await stream.write(started(1, timeout_s=0.1))
        ends = await ends_of(stream, 1)
    assert ends == {1: "DEADLINE_EXCEEDED"}
    assert not script.running


@pytest.mark.parametrize("cls", [cls for cls in errors.tree().values() if cls is not errors.Cancelled])
async def test_every_error_of_the_tree_arrives_with_its_details(cls: type[errors.TriptychError]) -> None:
    error = cls("said so", param="messages", retry_after_s=2.0)
    if isinstance(error, errors.TransferFailed):
        error.items = (1, 5)
    async with pair(Script(error=error)) as (stub, _):
        with pytest.raises(cls, match="said so") as caught:
            await answer(stub, request())
    assert type(caught.value) is cls
    assert (caught.value.param, caught.value.retry_after_s) == ("messages", 2.0)
    if isinstance(caught.value, errors.TransferFailed):
        assert caught.value.items == (1, 5)


async def test_an_error_of_one_call_is_not_one_of_another() -> None:
    script = Script(waits=True)
    async with pair(script) as (stub, _), aclosing(stub.generate(request("stays"))) as stays:
        await anext(stays)
        script.waits, script.error = False, errors.EngineFailure("the engine failed")
        with pytest.raises(errors.EngineFailure):
            await answer(stub, request("fails"))
        assert script.running == {"stays"}


async def test_a_stream_ends_without_an_error_when_the_server_stops_between_two_reads() -> None:
    class Stopped:
        async def read(self) -> None:
            raise grpc.aio.BaseError("Server already stopped.")

    server = grpc.aio.server()
    handlers = Handlers(server, TextServicer(Script()).register)
    servicer = CallsServicer(handlers, ErrorInterceptor(CallObserver(Telemetry()), Authorization(None)), None)
    await servicer.Exchange(None, cast("Any", Stopped()))
    assert servicer.open == 0


async def test_a_server_that_stops_loses_all_calls_and_later_ones_find_the_next_server() -> None:
    script = Script(waits=True)
    async with pair(script) as (stub, server):
        async with aclosing(stub.generate(request("a"))) as first, aclosing(stub.generate(request("b"))) as second:
            await anext(first)
            await anext(second)
            await server.stop(0.0)
            for stream in (first, second):
                with pytest.raises(errors.InstanceLost):
                    await anext(stream)
        with pytest.raises(errors.InstanceLost):
            await answer(stub, request("c"))
        assert not script.running
        script.waits = False
        async with RpcServer(host=HOST, port=server.port, service_names=(), register=TextServicer(script).register):
            async with asyncio.timeout(WAIT_S):
                while True:
                    try:
                        assert await answer(stub, request("d")) == [TokenChunk((1,), "a"), END]
                        break
                    except errors.InstanceLost:
                        await asyncio.sleep(0.02)  # gRPC waits between attempts to connect


async def test_calls_that_run_or_begin_when_a_server_stops_are_lost_whatever_grpc_was_doing() -> None:
    async def until_refused(stub: InstanceStub) -> errors.TriptychError:
        while True:
            try:
                await answer(stub, request())
            except errors.TriptychError as error:
                return error

    for grace_s in (0.0, 0.001, 0.01) * 8:
        async with pair(Script()) as (stub, server):
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(until_refused(stub)) for _ in range(20)]
                await asyncio.sleep(0.01)
                await server.stop(grace_s)
            assert {type(call.result()) for call in calls} == {errors.InstanceLost}


async def test_closing_the_client_fails_its_calls_and_ends_them_at_the_server() -> None:
    script = Script(waits=True)
    async with pair(script) as (stub, _):
        stream = stub.generate(request())
        await anext(stream)
        await stub.close()
        with pytest.raises(errors.Cancelled, match="the client is closed"):
            await anext(stream)
        with pytest.raises(errors.Cancelled, match="the client is closed"):
            await answer(stub, request())
        await until(lambda: not script.running)


async def test_a_reader_that_stops_stops_its_own_call_only() -> None:
    """What waits for it is bounded; it gets everything once it reads on."""
    chunk = "x" * 10_000
    script = Script(chunks=200, text=chunk)
    async with pair(script) as (stub, _), aclosing(stub.generate(request("slow"))) as slow:
        await anext(slow)
        for number in range(20):
            sent = script.sent
            assert len(await answer(stub, request(f"fast{number}"))) == 201
        assert sent + 200 == script.sent
        of_slow = script.sent - 20 * 200
        assert of_slow * len(chunk) <= limits.WINDOW_NBYTES + 2 * len(chunk)
        rest = [event async for events in slow for event in events]
    assert len(rest) == 200
    assert rest[-1] == END


async def test_a_large_request_has_a_call_of_its_own() -> None:
    script = Script(waits=True)
    large = replace(request("large"), token_ids=(1 << 20,) * (MAX_CALL_NBYTES // 3 + 1))
    async with pair(script, max_calls=1) as (stub, _), aclosing(stub.generate(large)) as events:
        assert await anext(events) == (TokenChunk((1,), "a"),)
        with pytest.raises(errors.Overloaded):  # there is no room for the stream itself
            await answer(stub, request("small"))
    assert [(request_id, tokens) for request_id, tokens, *_ in script.seen] == [("large", len(large.token_ids))]


async def test_metadata_that_the_server_would_refuse_fails_its_own_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(waits=True)
    async with pair(script) as (stub, _), aclosing(stub.generate(request("stays"))) as stays:
        await anext(stays)
        with monkeypatch.context() as patch:
            patch.setattr("triptych.rpc.stubs.outgoing", lambda _: (("tracestate", "x" * 5000),))
            with pytest.raises(errors.InvalidRequest, match="metadata"):
                await answer(stub, request("bad"))
        assert script.running == {"stays"}


async def test_calls_beyond_the_limit_of_all_streams_are_told_when_to_come_again() -> None:
    script = Script(waits=True)
    async with pair(script, max_calls=2) as (stub, server):
        other = InstanceStub(f"{HOST}:{server.port}")
        try:
            async with aclosing(stub.generate(request("a"))) as first, aclosing(other.generate(request("b"))) as second:
                await anext(first)
                await anext(second)
                with pytest.raises(errors.Overloaded, match="2 calls are open") as caught:
                    await answer(stub, request("c"))
            assert caught.value.retry_after_s is not None
            await until(lambda: not script.running)
            script.waits = False
            assert await answer(stub, request("d")) == [TokenChunk((1,), "a"), END]
        finally:
            await other.close()


async def test_a_connection_without_traffic_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server accepts the client's keepalive pings; else it would close the connection at the third."""
    monkeypatch.setattr(limits, "KEEPALIVE_MS", 100)
    monkeypatch.setattr(limits, "MIN_PING_INTERVAL_MS", 50)
    script = Script(waits=True)
    async with pair(script) as (stub, _), aclosing(stub.generate(request())) as events:
        await anext(events)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await anext(events)


# --- a client that is not ours -----------------------------------------------------------------------------------------


@asynccontextmanager
async def exchange(script: Script, **more: Any) -> AsyncIterator[Any]:
    async with (
        pair(script, **more) as (_, server),
        grpc.aio.insecure_channel(f"{HOST}:{server.port}") as channel,
    ):
        stream = calls_pb2_grpc.CallsStub(channel).Exchange()
        yield stream
        stream.cancel()


def started(call: int, *, method: str = METHOD, data: bytes | None = None, timeout_s: float = WAIT_S) -> Any:
    if data is None:
        sampling = {"temperature": 1, "top_p": 1, "n": 1, "repetition_penalty": 1, "max_tokens": 1}
        data = text_pb2.TextRequest(
            request_id=f"r{call}", model="m", token_ids=[1], sampling=sampling
        ).SerializeToString()
    start = calls_pb2.StartCall(method=method, request=data, timeout_s=timeout_s)
    return calls_pb2.CallRequests(requests=[calls_pb2.CallRequest(call=call, start=start)])


async def ends_of(stream: Any, number: int) -> dict[int, str]:
    """The codes of the first calls that end."""
    ends: dict[int, str] = {}
    async with asyncio.timeout(WAIT_S):
        while len(ends) < number:
            message = await stream.read()
            assert message is not grpc.aio.EOF
            ends |= {answer.call: answer.end.code for answer in message.answers if answer.HasField("end")}
    return ends


async def test_an_invalid_request_ends_its_call_and_no_other() -> None:
    async with exchange(Script()) as stream:
        await stream.write(started(1, data=b"\xff\xff"))
        await stream.write(started(2, method="/triptych.v1.Text/Nothing"))
        await stream.write(started(3, method="/grpc.health.v1.Health/Check", data=b""))
        await stream.write(started(4, method="/triptych.v1.Calls/Exchange", data=b""))
        await stream.write(started(5))
        ends = await ends_of(stream, 5)
    unknown = dict.fromkeys((2, 3, 4), "UNIMPLEMENTED")
    assert ends == {1: "INVALID_ARGUMENT", **unknown, 5: "OK"}


def test_a_call_whose_time_is_over_before_it_runs_ends_too() -> None:
    async def late() -> dict[int, str]:
        async with exchange(Script(waits=True)) as stream:
            await stream.write(started(1, timeout_s=0))
            return await ends_of(stream, 1)

    ends = uvloop.run(late())  # unlike asyncio's, its timers of no time run before new tasks
    assert ends == {1: "DEADLINE_EXCEEDED"}


async def test_what_names_no_call_is_ignored() -> None:
    async with exchange(Script()) as stream:
        await stream.write(calls_pb2.CallRequests(requests=[calls_pb2.CallRequest(call=7, cancel=True)]))
        await stream.write(calls_pb2.CallRequests(requests=[calls_pb2.CallRequest(call=7, received_nbytes=1 << 30)]))
        await stream.write(calls_pb2.CallRequests(requests=[calls_pb2.CallRequest(call=7)]))
        await stream.write(started(1))
        assert await ends_of(stream, 1) == {1: "OK"}


@pytest.mark.parametrize(
    "invalid",
    [
        started(1),
        calls_pb2.CallRequests(requests=[calls_pb2.CallRequest(cancel=True)]),
        started(2, method="x" * 129),
        started(2, data=bytes(MAX_CALL_NBYTES + 1)),
        started(2, timeout_s=float("nan")),
        calls_pb2.CallRequests(requests=[calls_pb2.CallRequest(call=1, received_nbytes=1 << 50)]),
    ],
)
async def test_an_invalid_message_ends_the_stream_with_its_calls(invalid: Any) -> None:
    script = Script(waits=True)
    async with exchange(script) as stream:
        await stream.write(started(1))
        await until(lambda: script.running)
        await stream.write(invalid)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ends_of(stream, 1)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: not script.running)


async def test_a_client_that_sends_no_more_gets_its_answers() -> None:
    async with exchange(Script(chunks=3)) as stream:
        await stream.write(started(1))
        await stream.done_writing()
        assert await ends_of(stream, 1) == {1: "OK"}
        async with asyncio.timeout(WAIT_S):
            assert await stream.read() is grpc.aio.EOF
            assert await stream.code() is grpc.StatusCode.OK


async def test_a_client_that_leaves_ends_its_calls() -> None:
    script = Script(waits=True)
    async with exchange(script) as stream:
        await stream.write(started(1))
        await until(lambda: script.running)
        stream.cancel()
        await until(lambda: not script.running)


async def test_a_client_that_reads_nothing_cannot_make_the_server_buffer_without_end() -> None:
    """The client is not read from either: its writes stop."""
    script = Script(chunks=100, text="x" * 10_000)
    async with exchange(script) as stream:
        written = await writes_until_stuck(stream)
        assert written < MOST_WRITES
        assert script.sent * 10_000 < 64 << 20


async def writes_until_stuck(stream: Any) -> int:
    data = text_pb2.TextRequest(request_id="r", token_ids=[1] * 200_000).SerializeToString()
    with contextlib.suppress(TimeoutError):
        for number in range(1, MOST_WRITES):
            async with asyncio.timeout(1.0):
                await stream.write(started(number, data=data))
    return number


async def test_answers_that_are_ready_together_share_a_message() -> None:
    async with exchange(Script()) as stream:
        requests = [started(number).requests[0] for number in (1, 2, 3)]
        await stream.write(calls_pb2.CallRequests(requests=requests))
        answers = (await stream.read()).answers
    assert [(answer.call, len(answer.messages), answer.end.code) for answer in answers] == [
        (n, 2, "OK") for n in (1, 2, 3)
    ]


# --- a server that is not ours -----------------------------------------------------------------------------------------


class Answering(calls_pb2_grpc.CallsServicer):
    """Sends ``answers`` to the first call."""

    def __init__(self, *answers: calls_pb2.CallAnswer) -> None:
        self._answers = calls_pb2.CallAnswers(answers=answers)
        self.request = calls_pb2.CallRequests()

    async def Exchange(self, requests: Any, context: Any) -> None:  # noqa: N802
        del requests
        self.request = await context.read()
        await context.write(self._answers)


@asynccontextmanager
async def answering(*answers: calls_pb2.CallAnswer) -> AsyncIterator[tuple[InstanceStub, Answering]]:
    server, servicer = grpc.aio.server(), Answering(*answers)
    calls_pb2_grpc.add_CallsServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    stub = InstanceStub(f"{HOST}:{port}")
    try:
        yield stub, servicer
    finally:
        await stub.close()
        await server.stop(None)


async def test_requests_that_are_ready_together_share_a_message() -> None:
    end = calls_pb2.CallEnd(code="OK")
    async with answering(*(calls_pb2.CallAnswer(call=number, end=end) for number in (1, 2, 3))) as (stub, servicer):
        await asyncio.gather(*(answer(stub, request()) for _ in range(3)))
    assert [(request.call, request.start.method) for request in servicer.request.requests] == [
        (n, METHOD) for n in (1, 2, 3)
    ]


async def test_a_stream_that_ends_in_the_middle_of_a_call_has_lost_it() -> None:
    async with answering() as (stub, _):
        with pytest.raises(errors.InstanceLost):
            await answer(stub, request())


async def test_a_server_without_the_service_is_not_the_fault_of_the_caller() -> None:
    """GRPC may find a write failed before it reads why: to it, and to us, that connection is lost."""
    server = grpc.aio.server()
    text_pb2_grpc.add_TextServicer_to_server(text_pb2_grpc.TextServicer(), server)
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    stub = InstanceStub(f"{HOST}:{port}")
    try:
        for _ in range(20):
            with pytest.raises((errors.InternalError, errors.InstanceLost)) as raised:
                await answer(stub, request())
            if raised.errisinstance(errors.InternalError):
                break
        assert raised.match("UNIMPLEMENTED")
    finally:
        await stub.close()
        await server.stop(None)


@pytest.mark.parametrize(
    "message", [b"\xff\xff", text_pb2.TextEvents(events=[text_pb2.TextEvent()]).SerializeToString()]
)
async def test_an_invalid_answer_is_not_the_fault_of_the_caller(message: bytes) -> None:
    async with answering(calls_pb2.CallAnswer(call=1, messages=[message])) as (stub, _):
        with pytest.raises(errors.InternalError, match="a peer sent"):
            await answer(stub, request())


async def test_an_answer_to_a_call_that_was_never_made_is_ignored() -> None:
    end = calls_pb2.CallEnd(code="OK")
    async with answering(calls_pb2.CallAnswer(call=99, end=end), calls_pb2.CallAnswer(call=1, end=end)) as (stub, _):
        assert await answer(stub, request()) == []


async def test_a_call_that_the_server_cancels_is_not_the_callers_doing() -> None:
    async with answering(calls_pb2.CallAnswer(call=1, end=calls_pb2.CallEnd(code="CANCELLED"))) as (stub, _):
        with pytest.raises(errors.InstanceLost):
            await answer(stub, request())


async def test_an_answer_that_lacks_is_not_the_fault_of_the_caller() -> None:
    async with answering(calls_pb2.CallAnswer(call=1, end=calls_pb2.CallEnd(code="OK"))) as (stub, _):
        with pytest.raises(errors.InternalError, match="without an answer"):
            await stub.release([bytes(16)])
