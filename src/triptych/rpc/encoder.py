"""The gRPC servicer of instances that hold tensors for others: encoders, and text instances that export keys and values (KV transfer)."""

from typing import Any

import grpc.aio

from triptych.ports import Encoder
from triptych.rpc.server import remaining_s
from triptych.v1 import encoder_pb2, encoder_pb2_grpc
from triptych.wire import common, encoder

SERVICE_NAME = "triptych.v1.Encoder"
Context = grpc.aio.ServicerContext[Any, Any]


class EncoderServicer(encoder_pb2_grpc.EncoderServicer):
    """Serves any ``ports.Encoder``."""

    def __init__(self, service: Encoder) -> None:
        self._service = service

    def register(self, server: grpc.aio.Server) -> None:
        encoder_pb2_grpc.add_EncoderServicer_to_server(self, server)

    async def Encode(self, request: encoder_pb2.EncodeRequest, context: Context) -> encoder_pb2.EncodeResponse:  # noqa: N802 - the name is the wire's
        result = await self._service.encode(encoder.ENCODE_REQUEST.from_wire(request, remaining_s(context)))
        return encoder.ENCODE_RESULT.to_wire(result)

    async def Lease(self, request: encoder_pb2.LeaseRequest, context: Context) -> encoder_pb2.LeaseResponse:  # noqa: N802
        ticket = await self._service.lease(encoder.LEASE_REQUEST.from_wire(request, remaining_s(context)))
        return encoder_pb2.LeaseResponse(ticket=common.TICKET.to_wire(ticket))

    async def Release(self, request: encoder_pb2.ReleaseRequest, context: Context) -> encoder_pb2.ReleaseResponse:  # noqa: N802
        del context
        await self._service.release(tuple(request.lease_ids))
        return encoder_pb2.ReleaseResponse()
