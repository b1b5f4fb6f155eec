"""gRPC stubs that satisfy ``ports.py``, so that callers use a remote service like a local one."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from triptych.domain.chat import ChatRequest, Tokenized
from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.generation import ChatEvent, TextEvent, TextRequest
from triptych.domain.instance import InstanceInfo, InstanceLimits, InstanceLoad, ModelInfo
from triptych.domain.lora import LoadedLora, LoadLora
from triptych.domain.pool import ManagerStatus, ManualSize, MemberReport, MembershipDelta, Order, Watch
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.scaling import PoolName, ScaledPool
from triptych.domain.stage import Role
from triptych.domain.timeline import Readiness, Timeline
from triptych.errors import DeadlineExceeded, InstanceLost, Unavailable
from triptych.rpc import calls, limits
from triptych.rpc.channel import Channel
from triptych.rpc.context import outgoing
from triptych.rpc.multiplex import Multiplexer
from triptych.runtime.tls import INSTANCE, POOL_MANAGER, ROUTER, SCALER, TlsIdentity
from triptych.v1 import (
    common_pb2,
    encoder_pb2,
    instance_pb2,
    instance_pb2_grpc,
    pool_manager_pb2,
    pool_manager_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    scaler_pb2,
    scaler_pb2_grpc,
    text_pb2,
)
from triptych.wire import common, encoder, instance, pool_manager, router, scaler, text

T = TypeVar("T")

_CHAT_EVENTS = calls.reader(router_pb2.ChatEvents, router.chat_events_from_wire)
_RESOLVED = calls.reader(router_pb2.ResolveResponse, router.resolved_from_wire)
_TEXT_EVENTS = calls.reader(text_pb2.TextEvents, text.text_events_from_wire)
_ENCODED = calls.reader(encoder_pb2.EncodeResponse, encoder.encode_result_from_wire)
_LEASED = calls.reader(encoder_pb2.LeaseResponse, encoder.lease_response_from_wire)
_LORA = calls.reader(common_pb2.LoadLoraResponse, lambda answer: common.LORA.from_wire(answer.lora))
_UNLOADED = calls.reader(common_pb2.UnloadLoraResponse, lambda _: None)
_RELEASED = calls.reader(encoder_pb2.ReleaseResponse, lambda _: None)


class RouterStub(Channel):
    """``ports.Router`` at ``target``."""

    kind = ROUTER
    stub_class = router_pb2_grpc.RouterStub
    continues = False
    """Whether the router goes on with answers that another router began, as far as it has said so with its models."""

    def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        return self._connection.calls.stream(
            "/triptych.v1.Router/Chat",
            router.chat_request_to_wire(request).SerializeToString(),
            _CHAT_EVENTS,
            timeout_s=request.timeout_s,
            metadata=outgoing(request.request_id),
        )

    async def models(self) -> tuple[ModelInfo, ...]:
        call = self._connection.stub.Models(router_pb2.ModelsRequest(), timeout=limits.QUERY_TIMEOUT_S)
        return await calls.unary(call, self._models_from_wire)

    def _models_from_wire(self, answer: router_pb2.ModelsResponse) -> tuple[ModelInfo, ...]:
        self.continues = answer.continues
        return tuple(map(common.MODEL.from_wire, answer.models))

    async def tokenize(self, request: ChatRequest, *, return_token_strs: bool = False) -> Tokenized:
        message = router_pb2.TokenizeRequest(
            chat=router.chat_request_to_wire(request), return_token_strs=return_token_strs
        )
        call = self._connection.stub.Tokenize(message, timeout=request.timeout_s, metadata=outgoing(request.request_id))
        return await calls.unary(call, router.TOKENIZED.from_wire)

    def resolve(self, request: ResolveRequest) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        return self._connection.calls.stream(
            "/triptych.v1.Router/Resolve",
            router.resolve_request_to_wire(request).SerializeToString(),
            _RESOLVED,
            timeout_s=request.timeout_s,
            metadata=outgoing(request.request_id),
        )

    async def timeline(self, request_id: str) -> Timeline:
        message = router_pb2.TimelineRequest(request_id=request_id)
        call = self._connection.stub.GetTimeline(message, timeout=limits.QUERY_TIMEOUT_S, metadata=outgoing())
        return await calls.unary(call, router.TIMELINE.from_wire)

    async def readiness(self) -> Readiness:
        call = self._connection.stub.Readiness(router_pb2.ReadinessRequest(), timeout=limits.QUERY_TIMEOUT_S)
        return await calls.unary(call, router.READINESS.from_wire)

    async def load_lora(self, order: LoadLora) -> LoadedLora:
        return await _load_lora(self._connection.calls, "/triptych.v1.Router/LoadLora", order)

    async def unload_lora(self, name: str) -> None:
        await _unload_lora(self._connection.calls, "/triptych.v1.Router/UnloadLora", name)


class InstanceStub(Channel):
    """``ports.Encoder`` and ``ports.Text`` at ``target``, for the stages that the instance serves."""

    kind = INSTANCE
    stub_class = instance_pb2_grpc.InstanceStub

    async def describe(self) -> InstanceInfo:
        call = self._connection.stub.Describe(instance_pb2.DescribeRequest(), timeout=limits.DESCRIBE_TIMEOUT_S)
        return await calls.unary(call, instance.INSTANCE.from_wire)

    def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        call = self._connection.stub.WatchLoad(instance_pb2.WatchLoadRequest(), timeout=limits.WATCH_TIMEOUT_S)
        return calls.stream(call, instance.LOAD.from_wire)

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        return await self._connection.calls.unary(
            "/triptych.v1.Encoder/Encode",
            encoder.ENCODE_REQUEST.to_wire(request).SerializeToString(),
            _ENCODED,
            timeout_s=request.timeout_s,
            metadata=outgoing(request.request_id),
        )

    async def lease(self, request: LeaseRequest) -> Ticket:
        return await self._connection.calls.unary(
            "/triptych.v1.Encoder/Lease",
            encoder.LEASE_REQUEST.to_wire(request).SerializeToString(),
            _LEASED,
            timeout_s=request.timeout_s,
            metadata=outgoing(),
        )

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        await self._connection.calls.unary(
            "/triptych.v1.Encoder/Release",
            encoder_pb2.ReleaseRequest(lease_ids=lease_ids).SerializeToString(),
            _RELEASED,
            timeout_s=limits.RELEASE_TIMEOUT_S,
            metadata=outgoing(),
        )

    def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        return self._connection.calls.stream(
            "/triptych.v1.Text/Generate",
            text.TEXT_REQUEST.to_wire(request).SerializeToString(),
            _TEXT_EVENTS,
            timeout_s=request.timeout_s,
            metadata=outgoing(request.request_id),
        )

    async def load_lora(self, order: LoadLora) -> LoadedLora:
        return await _load_lora(self._connection.calls, "/triptych.v1.Instance/LoadLora", order)

    async def unload_lora(self, name: str) -> None:
        await _unload_lora(self._connection.calls, "/triptych.v1.Instance/UnloadLora", name)


class PoolManagerStub(Channel):
    """``ports.PoolManagerClient`` at ``target``."""

    kind = POOL_MANAGER
    stub_class = pool_manager_pb2_grpc.PoolManagerStub

    def attend(self, reports: AsyncGenerator[MemberReport]) -> AsyncGenerator[Order]:
        call = self._connection.stub.Attend(_reports_to_wire(reports), timeout=limits.WATCH_TIMEOUT_S)
        return calls.stream(call, pool_manager.ORDER.from_wire)

    def watch(self, watch: Watch) -> AsyncGenerator[MembershipDelta]:
        call = self._connection.stub.Watch(pool_manager.WATCH.to_wire(watch), timeout=limits.WATCH_TIMEOUT_S)
        return calls.stream(call, pool_manager.delta_from_wire)

    async def status(self) -> ManagerStatus:
        call = self._connection.stub.Status(pool_manager_pb2.StatusRequest(), timeout=limits.QUERY_TIMEOUT_S)
        return await calls.unary(call, pool_manager.STATUS.from_wire)

    async def drain_instance(self, instance_id: str, *, force: bool) -> None:
        message = pool_manager_pb2.DrainRequest(instance_id=instance_id, force=force)
        await calls.unary(self._connection.stub.Drain(message, timeout=limits.QUERY_TIMEOUT_S), lambda _: None)

    async def switch_instance(self, instance_id: str, role: Role, *, force: bool) -> None:
        message = pool_manager.switch_to_wire(instance_id, role, force=force)
        await calls.unary(self._connection.stub.Switch(message, timeout=limits.QUERY_TIMEOUT_S), lambda _: None)

    async def set_limits(self, instance_id: str, wanted: InstanceLimits) -> None:
        message = pool_manager.limits_to_wire(instance_id, wanted)
        await calls.unary(self._connection.stub.SetLimits(message, timeout=limits.QUERY_TIMEOUT_S), lambda _: None)

    async def set_size(self, order: ManualSize) -> None:
        call = self._connection.stub.SetSize(pool_manager.MANUAL_SIZE.to_wire(order), timeout=limits.QUERY_TIMEOUT_S)
        await calls.unary(call, lambda _: None)

    async def roll(self, pool: PoolName, degree: int) -> None:
        message = pool_manager.roll_to_wire(pool, degree)
        await calls.unary(self._connection.stub.Roll(message, timeout=limits.QUERY_TIMEOUT_S), lambda _: None)


async def _load_lora(shared: Multiplexer, method: str, order: LoadLora) -> LoadedLora:
    message = common.LOAD_LORA.to_wire(order).SerializeToString()
    return await shared.unary(method, message, _LORA, timeout_s=limits.LOAD_LORA_TIMEOUT_S, metadata=outgoing())


async def _unload_lora(shared: Multiplexer, method: str, name: str) -> None:
    message = common_pb2.UnloadLoraRequest(name=name).SerializeToString()
    await shared.unary(method, message, _UNLOADED, timeout_s=limits.QUERY_TIMEOUT_S, metadata=outgoing())


async def _reports_to_wire(reports: AsyncGenerator[MemberReport]) -> AsyncGenerator[pool_manager_pb2.MemberReport]:
    async with aclosing(reports):
        async for report in reports:
            yield pool_manager.report_to_wire(report)


class ScalerStub(Channel):
    """``ports.Scaler`` at ``target``. Every method raises Unavailable when it is away. ``close`` leaves the scaler running."""

    kind = SCALER
    stub_class = scaler_pb2_grpc.ScalerStub

    def __init__(
        self, target: str, tls: TlsIdentity | None = None, *, timeout_s: float = limits.QUERY_TIMEOUT_S
    ) -> None:
        """``timeout_s`` bounds each call."""
        super().__init__(target, tls)
        self._timeout_s = timeout_s

    async def scale(self, pool: PoolName, size: int, token: int) -> None:
        await self._call(self._connection.stub.Scale, scaler.scale_to_wire(pool, size, token), lambda _: None)

    async def remove(self, pool: PoolName, instance: str, token: int) -> None:
        await self._call(self._connection.stub.Remove, scaler.remove_to_wire(pool, instance, token), lambda _: None)

    async def set_degree(self, pool: PoolName, degree: int, token: int) -> None:
        await self._call(self._connection.stub.SetDegree, scaler.degree_to_wire(pool, degree, token), lambda _: None)

    async def pools(self) -> tuple[ScaledPool, ...]:
        return await self._call(self._connection.stub.Pools, scaler_pb2.PoolsRequest(), scaler.pools_from_wire)

    async def _call(self, method: Any, message: object, convert: Callable[[Any], T]) -> T:
        try:
            return await calls.unary(method(message, timeout=self._timeout_s), convert)
        except InstanceLost:
            raise Unavailable("the scaler cannot be reached") from None
        except DeadlineExceeded:
            raise Unavailable(f"the scaler did not answer within {self._timeout_s:g} s") from None
