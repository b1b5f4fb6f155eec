"""Client calls: the one place where gRPC errors become errors of the tree."""

from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from triptych import errors
from triptych.wire.status import error_from_status

Wire = TypeVar("Wire")
Domain = TypeVar("Domain")
MessageT = TypeVar("MessageT", bound=Message)


def translate(error: grpc.aio.AioRpcError) -> errors.TriptychError:
    """The error of the tree for a failed call.

    Cancelling on this side raises asyncio's CancelledError, so CANCELLED here comes from the peer.
    """
    trailing = error.trailing_metadata() or ()
    pairs = [(str(key), value) for key, value in trailing]
    return from_peer(error_from_status(error.code().name, error.details() or "", pairs))


def from_peer(error: errors.TriptychError) -> errors.TriptychError:
    return errors.InstanceLost("the peer cancelled the call") if isinstance(error, errors.Cancelled) else error


async def unary(call: "grpc.aio.UnaryUnaryCall[Any, Wire]", convert: Callable[[Wire], Domain]) -> Domain:
    """Await the answer."""
    try:
        message = await call
    except grpc.aio.AioRpcError as error:
        raise translate(error) from None
    return converted(message, convert)


def reader(message: type[MessageT], convert: Callable[[MessageT], Domain]) -> Callable[[bytes], Domain]:
    """A function that parses and converts an answer. It raises InternalError for an invalid one."""
    parse = message.FromString

    def read(data: bytes) -> Domain:
        try:
            return convert(parse(data))
        except DecodeError:
            raise errors.InternalError("a peer sent an answer that is not a valid message") from None
        except errors.InvalidRequest as error:
            raise _fault(error) from None

    return read


def converted(message: Wire, convert: Callable[[Wire], Domain]) -> Domain:
    """Raises InternalError for an invalid answer."""
    try:
        return convert(message)
    except errors.InvalidRequest as error:
        raise _fault(error) from None


def _fault(error: errors.InvalidRequest) -> errors.InternalError:
    """The peer's answer is invalid, which is not this caller's fault."""
    return errors.InternalError(f"a peer sent an invalid answer: {error.message}")


async def stream(
    call: grpc.aio.UnaryStreamCall[Any, Wire] | grpc.aio.StreamStreamCall[Any, Wire], convert: Callable[[Wire], Domain]
) -> AsyncGenerator[Domain]:
    """Yield answers as they arrive; closing the generator cancels the call."""
    try:
        async for message in call:
            yield convert(message)
    except grpc.aio.AioRpcError as error:
        raise translate(error) from None
    except errors.InvalidRequest as error:
        raise _fault(error) from None
    finally:
        call.cancel()
