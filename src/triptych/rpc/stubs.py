"""gRPC stubs that satisfy ``ports.py``, so that callers use a remote service like a local one."""

from collections.abc import AsyncGenerator, Sequence

import grpc.aio

from triptych.domain.chat import ChatRequest, Tokenized
from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.generation import ChatEvent, TextEvent, TextRequest
from triptych.domain.instance import InstanceInfo, InstanceLoad, ModelInfo
from triptych.domain.timeline import Readiness, Timeline
from triptych.rpc import calls, limits
from triptych.rpc.context import outgoing
from triptych.rpc.credentials import channel_credentials
from triptych.runtime.tls import TlsIdentity
from triptych.v1 import (
    encoder_pb2,
    encoder_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    text_pb2_grpc,
)
from triptych.wire import common, encoder, instance, router, text


class _Channel:
    """A connection to ``target`` (``host:port``), with mutual TLS if ``tls`` is given. It reconnects automatically."""

    def __init__(self, target: str, tls: TlsIdentity | None = None) -> None:
        if tls is None:
            self._channel = grpc.aio.insecure_channel(target, options=limits.CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, channel_credentials(tls), options=limits.CHANNEL_OPTIONS)

    @property
    def refused(self) -> bool:
        """Whether the last connection attempt failed, so that a call fails without being sent."""
        return self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    @property
    def connected(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def close(self) -> None:
        await self._channel.close()


class RouterStub(_Channel):
    """``ports.Router`` at ``target``."""

    def __init__(self, target: str, tls: TlsIdentity | None = None) -> None:
        super().__init__(target, tls)
        self._stub = router_pb2_grpc.RouterStub(self._channel)

    def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        call = self._stub.Chat(
            router.chat_request_to_wire(request), timeout=request.timeout_s, metadata=outgoing(request.request_id)
        )
        return calls.stream(call, router.chat_events_from_wire)

    async def models(self) -> tuple[ModelInfo, ...]:
        call = self._stub.Models(router_pb2.ModelsRequest(), timeout=limits.QUERY_TIMEOUT_S)
        return await calls.unary(call, lambda answer: tuple(map(common.MODEL.from_wire, answer.models)))

    async def tokenize(self, request: ChatRequest, *, return_token_strs: bool = False) -> Tokenized:
        message = router_pb2.TokenizeRequest(
            chat=router.chat_request_to_wire(request), return_token_strs=return_token_strs
        )
        call = self._stub.Tokenize(message, timeout=request.timeout_s, metadata=outgoing(request.request_id))
        return await calls.unary(call, router.TOKENIZED.from_wire)

    async def timeline(self, request_id: str) -> Timeline:
        message = router_pb2.TimelineRequest(request_id=request_id)
        call = self._stub.GetTimeline(message, timeout=limits.QUERY_TIMEOUT_S, metadata=outgoing())
        return await calls.unary(call, router.TIMELINE.from_wire)

    async def readiness(self) -> Readiness:
        call = self._stub.Readiness(router_pb2.ReadinessRequest(), timeout=limits.QUERY_TIMEOUT_S)
        return await calls.unary(call, router.READINESS.from_wire)


class InstanceStub(_Channel):
    """``ports.Encoder`` and ``ports.Text`` at ``target``, for the stages that the instance serves."""

    def __init__(self, target: str, tls: TlsIdentity | None = None) -> None:
        super().__init__(target, tls)
        self._instance = instance_pb2_grpc.InstanceStub(self._channel)
        self._encoder = encoder_pb2_grpc.EncoderStub(self._channel)
        self._text = text_pb2_grpc.TextStub(self._channel)

    async def describe(self) -> InstanceInfo:
        call = self._instance.Describe(instance_pb2.DescribeRequest(), timeout=limits.DESCRIBE_TIMEOUT_S)
        return await calls.unary(call, instance.INSTANCE.from_wire)

    def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        call = self._instance.WatchLoad(instance_pb2.WatchLoadRequest(), timeout=limits.WATCH_TIMEOUT_S)
        return calls.stream(call, instance.LOAD.from_wire)

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        call = self._encoder.Encode(
            encoder.ENCODE_REQUEST.to_wire(request), timeout=request.timeout_s, metadata=outgoing(request.request_id)
        )
        return await calls.unary(call, encoder.encode_result_from_wire)

    async def lease(self, request: LeaseRequest) -> Ticket:
        call = self._encoder.Lease(
            encoder.LEASE_REQUEST.to_wire(request), timeout=request.timeout_s, metadata=outgoing()
        )
        return await calls.unary(call, encoder.lease_response_from_wire)

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        message = encoder_pb2.ReleaseRequest(lease_ids=lease_ids)
        await calls.unary(
            self._encoder.Release(message, timeout=limits.RELEASE_TIMEOUT_S, metadata=outgoing()), lambda _: None
        )

    def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        call = self._text.Generate(
            text.TEXT_REQUEST.to_wire(request), timeout=request.timeout_s, metadata=outgoing(request.request_id)
        )
        return calls.stream(call, text.text_events_from_wire)
