"""The gRPC servicer shared by all instances: description, load and LoRA adapters."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc.aio

from triptych.ports import Instance
from triptych.rpc.loras import LoraCalls
from triptych.v1 import instance_pb2, instance_pb2_grpc
from triptych.wire import instance

SERVICE_NAME = "triptych.v1.Instance"
Context = grpc.aio.ServicerContext[Any, Any]


class InstanceServicer(LoraCalls, instance_pb2_grpc.InstanceServicer):
    """Serves any ``ports.Instance``."""

    def __init__(self, service: Instance) -> None:
        self._service: Instance = service

    def register(self, server: grpc.aio.Server) -> None:
        instance_pb2_grpc.add_InstanceServicer_to_server(self, server)

    async def Describe(self, request: instance_pb2.DescribeRequest, context: Context) -> instance_pb2.InstanceInfo:  # noqa: N802 - the name is the wire's
        del request, context
        return instance.INSTANCE.to_wire(await self._service.describe())

    async def WatchLoad(  # noqa: N802
        self, request: instance_pb2.WatchLoadRequest, context: Context
    ) -> AsyncGenerator[instance_pb2.InstanceLoad]:
        del request, context
        async with aclosing(self._service.watch_load()) as loads:
            async for load in loads:
                yield instance.LOAD.to_wire(load)
