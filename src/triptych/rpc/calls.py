"""Client calls: the one place where gRPC errors become errors of the tree."""

from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

import grpc
import grpc.aio

from triptych import errors
from triptych.wire.status import error_from_status

Wire = TypeVar("Wire")
Domain = TypeVar("Domain")


def translate(error: grpc.aio.AioRpcError) -> errors.TriptychError:
    """The error of the tree for a failed call.

    Cancelling on this side raises asyncio's CancelledError, so CANCELLED here comes from the peer.
    """
    trailing = error.trailing_metadata() or ()
    pairs = [(str(key), value) for key, value in trailing]
    known = error_from_status(error.code().name, error.details() or "", pairs)
    return errors.InstanceLost("the peer cancelled the call") if isinstance(known, errors.Cancelled) else known


async def unary(call: grpc.aio.UnaryUnaryCall[object, Wire], convert: Callable[[Wire], Domain]) -> Domain:
    """Await the answer."""
    try:
        message = await call
    except grpc.aio.AioRpcError as error:
        raise translate(error) from None
    return _converted(message, convert)


def _converted(message: Wire, convert: Callable[[Wire], Domain]) -> Domain:
    try:
        return convert(message)
    except errors.InvalidRequest as error:  # the peer's answer is invalid, which is not this caller's fault
        raise errors.InternalError(f"a peer sent an invalid answer: {error.message}") from None


async def stream(
    call: grpc.aio.UnaryStreamCall[object, Wire], convert: Callable[[Wire], Domain]
) -> AsyncGenerator[Domain]:
    """Yield answers as they arrive; closing the generator cancels the call."""
    try:
        async for message in call:
            yield _converted(message, convert)
    except grpc.aio.AioRpcError as error:
        raise translate(error) from None
    finally:
        call.cancel()
