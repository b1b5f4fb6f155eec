"""The gRPC servicer of a scaler, which pool managers in other processes call."""

from typing import Any

import grpc.aio

from triptych.ports import Scaler
from triptych.v1 import scaler_pb2, scaler_pb2_grpc
from triptych.wire import scaler

SERVICE_NAME = "triptych.v1.Scaler"
Context = grpc.aio.ServicerContext[Any, Any]


class ScalerServicer(scaler_pb2_grpc.ScalerServicer):
    """Serves any ``ports.Scaler``."""

    def __init__(self, service: Scaler) -> None:
        self._service = service

    def register(self, server: grpc.aio.Server) -> None:
        scaler_pb2_grpc.add_ScalerServicer_to_server(self, server)

    async def Scale(self, request: scaler_pb2.ScaleRequest, context: Context) -> scaler_pb2.ScaleResponse:  # noqa: N802 - the name is the wire's
        del context
        await self._service.scale(*scaler.scale_from_wire(request))
        return scaler_pb2.ScaleResponse()

    async def Remove(self, request: scaler_pb2.RemoveRequest, context: Context) -> scaler_pb2.RemoveResponse:  # noqa: N802
        del context
        await self._service.remove(*scaler.remove_from_wire(request))
        return scaler_pb2.RemoveResponse()

    async def SetDegree(self, request: scaler_pb2.SetDegreeRequest, context: Context) -> scaler_pb2.SetDegreeResponse:  # noqa: N802
        del context
        await self._service.set_degree(*scaler.degree_from_wire(request))
        return scaler_pb2.SetDegreeResponse()

    async def Pools(self, request: scaler_pb2.PoolsRequest, context: Context) -> scaler_pb2.ScaledPools:  # noqa: N802
        del request, context
        return scaler.pools_to_wire(await self._service.pools())
