"""Server side of the error tree: whatever a handler raises leaves as a status, in one place."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import grpc.aio

from triptych import errors
from triptych.rpc.observer import CallObserver
from triptych.wire.status import Status, error_to_status

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic only to the type checker


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns errors of the tree into their status, and everything else into a bare INTERNAL that is logged here.

    It tells the observer of every call: one wrapper around a stream is as much as a token should have to pass.
    """

    def __init__(self, observer: CallObserver) -> None:
        self._observer = observer

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        method, metadata, observer = (
            handler_call_details.method,
            handler_call_details.invocation_metadata,
            self._observer,
        )
        if handler.response_streaming:
            inner_stream = cast("Callable[[Any, Context], AsyncGenerator[Any]]", handler.unary_stream)

            async def stream(request: object, context: Context) -> AsyncGenerator[Any]:
                call = observer.begin(method, metadata)
                try:
                    async with aclosing(inner_stream(request, context)) as answers:
                        async for answer in answers:
                            yield answer
                    call.code = "OK"
                except Exception as error:  # noqa: BLE001 - the boundary of the process
                    call.code = "UNKNOWN"  # to us, where a standard service answers for itself
                    status = _status(error, method)
                    call.code = status.grpc_code
                    await _abort(context, status)
                finally:
                    call.end()

            return grpc.unary_stream_rpc_method_handler(
                stream, handler.request_deserializer, handler.response_serializer
            )
        inner = cast("Callable[[Any, Context], Awaitable[Any]]", handler.unary_unary)

        async def unary(request: object, context: Context) -> object:
            call = observer.begin(method, metadata)
            try:
                answer = await inner(request, context)
                call.code = "OK"
                return answer  # noqa: TRY300 - what follows must not be taken for an answer
            except Exception as error:  # noqa: BLE001 - the boundary of the process
                call.code = "UNKNOWN"  # to us, where a standard service answers for itself
                status = _status(error, method)
                call.code = status.grpc_code
                await _abort(context, status)
            finally:
                call.end()

        return grpc.unary_unary_rpc_method_handler(unary, handler.request_deserializer, handler.response_serializer)


def _status(error: Exception, method: str) -> Status:
    if isinstance(error, grpc.aio.AbortError):  # a standard service (health, reflection) answered for itself
        raise error
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        error = errors.DeadlineExceeded("the request did not end within its deadline")
    if not isinstance(error, errors.TriptychError):
        logger.error("%s failed", method, exc_info=error)
        error = errors.InternalError("internal error")
    return error_to_status(error)


async def _abort(context: Context, status: Status) -> NoReturn:
    await context.abort(grpc.StatusCode[status.grpc_code], status.message, status.metadata)
