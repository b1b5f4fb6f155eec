"""A service behind a stub and a server behaves as the service itself: results, errors, deadlines, cancellation."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from triptych import errors
from triptych.domain.embedding import DType, LeaseId, TensorSpec, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.generation import Finished, FinishReason, TextEvent, TextRequest, TokenChunk
from triptych.domain.instance import InstanceInfo, InstanceLoad, ModelInfo, StageLoad
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import Role, Stage
from triptych.rpc import encoder as encoder_servicer
from triptych.rpc import instance as instance_servicer
from triptych.rpc.server import RpcServer
from triptych.rpc.stubs import InstanceStub
from triptych.services.text import servicer as text_servicer
from triptych.testing.loras import NoLoras

MODEL = ModelInfo("m", "r", DType.F32, 8, 128)
INFO = MediaInfo(Modality.IMAGE, "png", 2, 2, 1, bytes(32))
TICKET = Ticket(
    key=bytes(32),
    holder="encoder-0",
    epoch=1,
    offset=0,
    payload_nbytes=32,
    generation=1,
    checksum=2,
    tensors=(TensorSpec("embeds", DType.F32, (1, 8)),),
    tokens=1,
    lease_id=bytes(16),
    lease_s=3.0,
)
LOAD = InstanceLoad({Stage.ENCODE: StageLoad(1, 2, 3), Stage.PREFILL: StageLoad(4, 5)}, draining=True)


class ScriptedEncoder(NoLoras):
    """Fails with ``error`` if set; otherwise answers, or blocks forever if the item's media says so."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.cancelled = asyncio.Event()
        self.watchers_gone = asyncio.Event()

    async def describe(self) -> InstanceInfo:
        return InstanceInfo("encoder-0", 1, Role.E, MODEL, 64, ())

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        if self.error is not None:
            raise self.error
        if request.media == b"wait":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        assert 4.0 < request.timeout_s < 5.5
        return EncodeResult(TICKET, bytes(16), cached=False, queue_s=0.1, encode_s=0.2)

    async def lease(self, request: LeaseRequest) -> Ticket:
        raise errors.LeaseLost(f"generation {request.generation} is gone")

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        pass

    async def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        try:
            while True:
                yield LOAD
                await asyncio.sleep(0.01)
        finally:
            self.watchers_gone.set()


class ScriptedText(NoLoras):
    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def describe(self) -> InstanceInfo:
        return InstanceInfo("text-0", 1, Role.PD, MODEL, 64, ())

    async def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        try:
            yield (TokenChunk((1,), "a"),)
            if request.request_id == "fails":
                raise errors.EngineFailure("the engine failed")
            if request.request_id == "waits":
                await asyncio.Event().wait()
            yield TokenChunk((2,), "b"), Finished(FinishReason.STOP, 1, 0.0, 0.0)
        finally:
            self.closed.set()

    async def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        yield InstanceLoad({})


def _encode(media: bytes = b"x", timeout_s: float = 5.0) -> EncodeRequest:
    return EncodeRequest("r", 0, "m", media, INFO, 1, b"", timeout_s, 1.0, b"r" * 16, b"h" * 16)


def _generate(request_id: str) -> TextRequest:
    return TextRequest(request_id, "m", (1,), (), SamplingParams(max_tokens=1), 5.0)


@asynccontextmanager
async def encoder_pair() -> AsyncIterator[tuple[ScriptedEncoder, InstanceStub, RpcServer]]:
    service = ScriptedEncoder()

    def register(server: grpc.aio.Server) -> None:
        encoder_servicer.EncoderServicer(service).register(server)
        instance_servicer.InstanceServicer(service).register(server)

    names = (encoder_servicer.SERVICE_NAME, instance_servicer.SERVICE_NAME)
    async with RpcServer(host="127.0.0.1", port=0, service_names=names, register=register) as server:
        stub = InstanceStub(f"127.0.0.1:{server.port}")
        try:
            yield service, stub, server
        finally:
            await stub.close()


@asynccontextmanager
async def text_pair(max_concurrent_calls: int | None = None) -> AsyncIterator[tuple[ScriptedText, InstanceStub]]:
    service = ScriptedText()
    server = RpcServer(
        host="127.0.0.1",
        port=0,
        service_names=(text_servicer.SERVICE_NAME,),
        register=text_servicer.TextServicer(service).register,
        max_concurrent_calls=max_concurrent_calls,
    )
    async with server:
        stub = InstanceStub(f"127.0.0.1:{server.port}")
        try:
            yield service, stub
        finally:
            await stub.close()


async def test_results_are_forwarded_unchanged() -> None:
    async with encoder_pair() as (service, stub, _):
        assert await stub.describe() == await service.describe()
        assert (await stub.encode(_encode())).ticket == TICKET
        await stub.release([bytes(16)])


@pytest.mark.parametrize("cls", [cls for cls in errors.tree().values() if cls is not errors.Cancelled])
async def test_every_error_of_the_tree_survives_the_wire(cls: type[errors.TriptychError]) -> None:
    async with encoder_pair() as (service, stub, _):
        service.error = cls("said so", retry_after_s=2.0)
        with pytest.raises(cls, match="said so") as caught:
            await stub.encode(_encode())
        assert type(caught.value) is cls
        assert caught.value.retry_after_s == 2.0


async def test_an_unexpected_error_is_sent_without_details() -> None:
    async with encoder_pair() as (service, stub, _):
        service.error = ValueError("a secret at /some/path")
        with pytest.raises(errors.InternalError) as caught:
            await stub.encode(_encode())
        assert caught.value.message == "internal error"


async def test_a_deadline_ends_the_call_on_both_sides() -> None:
    async with encoder_pair() as (service, stub, _):
        with pytest.raises(errors.DeadlineExceeded):
            await stub.encode(_encode(b"wait", timeout_s=0.2))
        async with asyncio.timeout(60):
            await service.cancelled.wait()


async def test_cancelling_the_caller_cancels_the_service() -> None:
    async with encoder_pair() as (service, stub, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await stub.encode(_encode(b"wait"))
        async with asyncio.timeout(60):
            await service.cancelled.wait()


async def test_an_unreachable_service_is_an_instance_lost() -> None:
    async with encoder_pair() as (_, stub, server):
        await server.stop(0.0)
        with pytest.raises(errors.InstanceLost) as caught:
            await stub.encode(_encode())
        assert "127.0.0.1" not in caught.value.message


async def test_a_call_cancelled_by_the_server_is_not_reported_as_cancelled_by_the_caller() -> None:
    async with encoder_pair() as (service, stub, _):
        service.error = errors.Cancelled("the caller went away")
        with pytest.raises(errors.InstanceLost):
            await stub.encode(_encode())


@pytest.mark.timeout(60)
async def test_the_server_cancels_none_of_many_concurrent_calls() -> None:
    asyncio.get_running_loop().set_debug(False)

    async def ask(stub: InstanceStub, number: int) -> None:
        async for _ in stub.generate(replace(_generate(f"r{number}"), timeout_s=50.0)):
            pass

    async with text_pair() as (_, stub):
        outcomes = await asyncio.gather(*(ask(stub, number) for number in range(3000)), return_exceptions=True)
    assert [outcome for outcome in outcomes if outcome is not None] == []


async def test_a_call_above_the_limit_gets_retry_after() -> None:
    async with text_pair(max_concurrent_calls=1) as (_, stub), aclosing(stub.generate(_generate("waits"))) as events:
        await anext(events)
        with pytest.raises(errors.Overloaded) as caught:
            await anext(stub.generate(_generate("another")))
    assert caught.value.retry_after_s is not None


async def test_a_stream_is_ordered_and_fails_at_the_same_event() -> None:
    async with text_pair() as (_, stub):
        events = [event async for event in stub.generate(_generate("ok"))]
        assert events == [
            (TokenChunk((1,), "a"),),
            (TokenChunk((2,), "b"), Finished(FinishReason.STOP, 1, 0.0, 0.0)),
        ]
        async with aclosing(stub.generate(_generate("fails"))) as failing:
            assert await anext(failing) == (TokenChunk((1,), "a"),)
            with pytest.raises(errors.EngineFailure):
                await anext(failing)


async def test_closing_a_stream_closes_the_generator_at_the_service() -> None:
    async with text_pair() as (service, stub):
        async with aclosing(stub.generate(_generate("waits"))) as events:
            assert await anext(events) == (TokenChunk((1,), "a"),)
        async with asyncio.timeout(60):
            await service.closed.wait()


async def test_a_cancelled_watch_ends_at_the_service() -> None:
    async with encoder_pair() as (service, stub, _):
        async with aclosing(stub.watch_load()) as loads:
            assert await anext(loads) == LOAD
            assert not service.watchers_gone.is_set()
        async with asyncio.timeout(60):
            await service.watchers_gone.wait()


async def test_malformed_messages_are_refused_without_side_effects() -> None:
    async with encoder_pair() as (_, stub, server):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            raw: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/triptych.v1.Encoder/Encode")
            health: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
            for method, data in (
                (raw, b"\xff\xff\xff"),
                (raw, b""),
                (health, b"\xff\xff\xff"),
                (health, bytes(1 << 20)),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await method(data, timeout=60)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await stub.encode(_encode())).ticket == TICKET


async def test_reflection_works_and_refuses_malformed_messages() -> None:
    async with (
        encoder_pair() as (_, _, server),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        )
        asked = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
        answer = await anext(aiter(method(iter([asked]), timeout=60)))
        assert b"triptych.v1.Encoder" in answer
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(method(iter([b"\xff\xff"]), timeout=60)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_health_can_be_watched() -> None:
    async with (
        encoder_pair() as (_, _, server),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)  # type: ignore[attr-defined]
        answer = await anext(aiter(watch))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


async def test_health_reports_serving_and_a_taken_port_is_a_clear_error() -> None:
    async with encoder_pair() as (service, _, server):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            request = health_pb2.HealthCheckRequest(service=encoder_servicer.SERVICE_NAME)
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)  # type: ignore[attr-defined]
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        second = RpcServer(
            host="127.0.0.1",
            port=server.port,
            service_names=(encoder_servicer.SERVICE_NAME,),
            register=encoder_servicer.EncoderServicer(service).register,
        )
        with pytest.raises(errors.Unavailable, match=f"port {server.port}"):
            async with second:
                pass
