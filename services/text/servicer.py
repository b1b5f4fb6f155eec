"""The text instance's gRPC servicer: converts messages and calls the service."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc.aio

from triptych.ports import Text
from triptych.rpc.server import remaining_s
from triptych.v1 import text_pb2, text_pb2_grpc
from triptych.wire import text

SERVICE_NAME = "triptych.v1.Text"
Context = grpc.aio.ServicerContext[Any, Any]


class TextServicer(text_pb2_grpc.TextServicer):
    """Serves any ``ports.Text``."""

    def __init__(self, service: Text) -> None:
        self._service = service

    def register(self, server: grpc.aio.Server) -> None:
        text_pb2_grpc.add_TextServicer_to_server(self, server)

    async def Generate(self, request: text_pb2.TextRequest, context: Context) -> AsyncGenerator[text_pb2.TextEvents]:  # noqa: N802 - the name is the wire's
        work = text.TEXT_REQUEST.from_wire(request, remaining_s(context))
        async with aclosing(self._service.generate(work)) as answer:
            async for events in answer:
                yield text.text_events_to_wire(events)
