"""The server's error boundary: turns every exception of a handler into a gRPC status."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from triptych import errors
from triptych.rpc.authorization import Authorization
from triptych.rpc.observer import CallObserver
from triptych.runtime.clock import monotonic
from triptych.wire.decode import OWN_SERVICES, REQUESTS
from triptych.wire.status import Status, error_to_status

logger = logging.getLogger(__name__)

MAX_STANDARD_NBYTES = 4096
"""Request size limit of standard services."""

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic only for the type checker


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns errors of the tree into their status, and any other into a bare INTERNAL that is logged here.

    Requests are decoded here too, so that invalid bytes are refused in the same way. Authorization and the observer are
    called here as well, as one wrapper around a stream is enough overhead per token.
    """

    def __init__(self, observer: CallObserver, authorization: Authorization) -> None:
        self._observer = observer
        self._authorization = authorization
        self._wrapped: dict[str, Handler] = {}
        """Wrapped handlers by rpc path, of the methods that the server has."""

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        return self.wrap(handler, handler_call_details.method)

    def wrap(self, handler: "Handler", method: str) -> "Handler":
        """The handler of ``method``, which the server has: it takes bytes and aborts with the status of an error."""
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            wrapped = self._wrapped[method] = self._wrap(handler, method)
        return wrapped

    def _wrap(self, handler: "Handler", method: str) -> "Handler":
        observed = self._observer.of(method)
        is_own = method.startswith(OWN_SERVICES)
        decode = REQUESTS[method] if is_own else _standard(handler.request_deserializer)
        check = self._authorization.check_of(method) if is_own else None  # standard services are for everyone
        if handler.response_streaming:
            streaming = handler.request_streaming
            inner_stream = cast(
                "Callable[[Any, Context], AsyncGenerator[Any] | Awaitable[None]]",
                handler.stream_stream if streaming else handler.unary_stream,
            )

            async def stream(request: Any, context: Context) -> AsyncGenerator[Any]:
                began_s, code = monotonic(), "CANCELLED"
                span = observed.begin(context.invocation_metadata())
                try:
                    if check is not None:
                        check(context)
                    answers = inner_stream(request if streaming else decode(request), context)
                    if isinstance(answers, Awaitable):  # health's Watch, and streams of calls, write their answers
                        await answers
                    else:
                        async with aclosing(answers):
                            async for answer in answers:
                                yield answer
                    code = "OK"
                except Exception as error:  # noqa: BLE001 - the boundary of the process
                    code = "UNKNOWN"  # what we record if a standard service sets its own status
                    status = _status(error, method)
                    code = status.grpc_code
                    await _abort(context, status)
                finally:
                    observed.end(code, began_s, span)

            if streaming:  # its requests are decoded as they come
                return grpc.stream_stream_rpc_method_handler(stream, decode, handler.response_serializer)
            return grpc.unary_stream_rpc_method_handler(stream, None, handler.response_serializer)
        inner = cast("Callable[[Any, Context], Awaitable[Any]]", handler.unary_unary)

        async def unary(request: bytes, context: Context) -> object:
            began_s, code = monotonic(), "CANCELLED"
            span = observed.begin(context.invocation_metadata())
            try:
                if check is not None:
                    check(context)
                answer = await inner(decode(request), context)
                code = "OK"
                return answer  # noqa: TRY300 - only a returned answer counts as OK
            except Exception as error:  # noqa: BLE001 - the boundary of the process
                code = "UNKNOWN"  # what we record if a standard service sets its own status
                status = _status(error, method)
                code = status.grpc_code
                await _abort(context, status)
            finally:
                observed.end(code, began_s, span)

        return grpc.unary_unary_rpc_method_handler(unary, None, handler.response_serializer)


def _standard(parse: Any) -> Callable[[bytes], Any]:
    """Decoder for requests of standard services (health, reflection), which are small."""

    def decode(data: bytes) -> Any:
        if len(data) > MAX_STANDARD_NBYTES:
            raise errors.InvalidRequest(f"the request has {len(data)} bytes, the limit is {MAX_STANDARD_NBYTES}")
        try:
            return parse(data)
        except DecodeError:
            raise errors.InvalidRequest("the request is not valid") from None

    return decode


def _status(error: Exception, method: str) -> Status:
    if isinstance(error, grpc.aio.AbortError):  # a standard service (health, reflection) set its own status
        raise error
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        error = errors.DeadlineExceeded("the request did not end within its deadline")
    if not isinstance(error, errors.TriptychError):
        logger.error("%s failed", method, exc_info=error)
        error = errors.InternalError("internal error")
    return error_to_status(error)


async def _abort(context: Context, status: Status) -> NoReturn:
    await context.abort(grpc.StatusCode[status.grpc_code], status.message, status.metadata)
