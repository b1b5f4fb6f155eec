"""The text instance's gRPC servicer: converts messages and calls the service."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc.aio

from triptych.ports import Text
from triptych.rpc.server import remaining_s
from triptych.v1 import common_pb2, text_pb2, text_pb2_grpc
from triptych.wire import common, text

SERVICE_NAME = "triptych.v1.Text"
Context = grpc.aio.ServicerContext[Any, Any]


class TextServicer(text_pb2_grpc.TextServicer):
    """Serves any ``ports.Text``."""

    def __init__(self, service: Text) -> None:
        self._service = service

    def register(self, server: grpc.aio.Server) -> None:
        text_pb2_grpc.add_TextServicer_to_server(self, server)

    async def Describe(self, request: common_pb2.DescribeRequest, context: Context) -> common_pb2.InstanceInfo:  # noqa: N802 - the name is the wire's
        del request, context
        return common.INSTANCE.to_wire(await self._service.describe())

    async def Generate(self, request: text_pb2.TextRequest, context: Context) -> AsyncGenerator[text_pb2.TextEvents]:  # noqa: N802
        work = text.TEXT_REQUEST.from_wire(request, remaining_s(context))
        async with aclosing(self._service.generate(work)) as answer:
            async for events in answer:
                yield text.text_events_to_wire(events)

    async def WatchLoad(  # noqa: N802
        self, request: common_pb2.WatchLoadRequest, context: Context
    ) -> AsyncGenerator[text_pb2.TextLoad]:
        del request, context
        async with aclosing(self._service.watch_load()) as loads:
            async for load in loads:
                yield text.TEXT_LOAD.to_wire(load)
