"""The router's gRPC servicer: converts messages and calls the service."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc.aio

from triptych.ports import Router
from triptych.rpc.loras import LoraCalls
from triptych.rpc.server import remaining_s
from triptych.v1 import router_pb2, router_pb2_grpc
from triptych.wire import common, router

SERVICE_NAME = "triptych.v1.Router"
Context = grpc.aio.ServicerContext[Any, Any]


class RouterServicer(LoraCalls, router_pb2_grpc.RouterServicer):
    """Serves any ``ports.Router``."""

    def __init__(self, service: Router) -> None:
        self._service: Router = service

    def register(self, server: grpc.aio.Server) -> None:
        router_pb2_grpc.add_RouterServicer_to_server(self, server)

    async def Chat(self, request: router_pb2.ChatRequest, context: Context) -> AsyncGenerator[router_pb2.ChatEvents]:  # noqa: N802 - the name is the wire's
        work = router.chat_request_from_wire(request, remaining_s(context))
        async with aclosing(self._service.chat(work)) as answer:
            async for events in answer:
                yield router.chat_events_to_wire(events)

    async def Models(self, request: router_pb2.ModelsRequest, context: Context) -> router_pb2.ModelsResponse:  # noqa: N802
        del request, context
        models = map(common.MODEL.to_wire, await self._service.models())
        return router_pb2.ModelsResponse(models=models, continues=True)

    async def Tokenize(self, request: router_pb2.TokenizeRequest, context: Context) -> router_pb2.TokenizeResponse:  # noqa: N802
        work = router.chat_request_from_wire(request.chat, remaining_s(context))
        tokenized = await self._service.tokenize(work, return_token_strs=request.return_token_strs)
        return router.TOKENIZED.to_wire(tokenized)

    async def Resolve(  # noqa: N802
        self, request: router_pb2.ResolveRequest, context: Context
    ) -> AsyncGenerator[router_pb2.ResolveResponse]:
        work = router.resolve_request_from_wire(request, remaining_s(context))
        async with aclosing(self._service.resolve(work)) as answer:
            async for items in answer:
                yield router.resolved_to_wire(items)

    async def GetTimeline(self, request: router_pb2.TimelineRequest, context: Context) -> router_pb2.Timeline:  # noqa: N802
        del context
        return router.TIMELINE.to_wire(await self._service.timeline(request.request_id))

    async def Readiness(  # noqa: N802
        self, request: router_pb2.ReadinessRequest, context: Context
    ) -> router_pb2.ReadinessResponse:
        del request, context
        return router.READINESS.to_wire(await self._service.readiness())
