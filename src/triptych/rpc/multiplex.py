"""Client of ``triptych.v1.Calls``: carries all calls to a server over one stream (ADR 21).

A gRPC operation takes more CPU time than everything else on the way of a token. So requests that are ready together
share a message, and so do answers.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from triptych import errors
from triptych.rpc import calls, limits
from triptych.rpc.context import Pairs
from triptych.runtime.tasks import TaskScope
from triptych.v1 import calls_pb2, calls_pb2_grpc
from triptych.wire.bounds import MAX_CALL_NBYTES, checker
from triptych.wire.status import error_from_status

logger = logging.getLogger(__name__)

_check = checker(calls_pb2.StartCall.DESCRIPTOR)

T = TypeVar("T")
_GrpcStream: TypeAlias = "grpc.aio.StreamStreamCall[calls_pb2.CallRequests, calls_pb2.CallAnswers]"


class Multiplexer:
    """Calls to the server of ``channel``. The stream is opened by the first call, and again after it was lost.

    Use it in one event loop only, and close it before the channel.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = calls_pb2_grpc.CallsStub(channel)
        self._scope = TaskScope("calls")
        self._stream: _Stream | None = None
        self._closed = False

    async def stream(
        self, method: str, request: bytes, read: Callable[[bytes], T], *, timeout_s: float, metadata: Pairs
    ) -> AsyncGenerator[T]:
        """Answers of a method (``/package.Service/Method``); closing the generator cancels the call.

        A large request gets a call of its own, as it would delay the others.
        """
        if len(request) > MAX_CALL_NBYTES:
            alone: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(method)
            async with aclosing(calls.stream(alone(request, timeout=timeout_s, metadata=metadata), read)) as answers:
                async for answer in answers:
                    yield answer
            return
        call = self._start(method, request, timeout_s, metadata)
        try:
            while (message := await call.next()) is not None:
                yield read(message)
        finally:
            call.close()

    async def unary(
        self, method: str, request: bytes, read: Callable[[bytes], T], *, timeout_s: float, metadata: Pairs
    ) -> T:
        """The answer of a method that has exactly one. Cancelling the caller cancels the call."""
        if len(request) > MAX_CALL_NBYTES:
            alone: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(method)
            return await calls.unary(alone(request, timeout=timeout_s, metadata=metadata), read)
        call = self._start(method, request, timeout_s, metadata)
        try:
            message = await call.next()
        finally:
            call.close()
        if message is None:
            raise errors.InternalError("a peer ended a call without an answer")
        return read(message)

    @property
    def busy(self) -> bool:
        """Whether calls that share the stream are running."""
        return self._stream is not None and self._stream.busy

    async def close(self) -> None:
        """Running calls fail."""
        self._closed = True
        await self._scope.close()

    def _start(self, method: str, request: bytes, timeout_s: float, metadata: Pairs) -> "_Call":
        if self._closed:
            raise errors.Cancelled("the client is closed")
        timeout_s = min(timeout_s, limits.MAX_CALL_TIMEOUT_S)
        start = calls_pb2.StartCall(method=method, request=request, timeout_s=timeout_s, metadata=dict(metadata))
        _check(start)  # the server would end the whole stream
        stream = self._stream
        if stream is None or stream.ended:
            stream = self._stream = _Stream(self._stub.Exchange)
            self._scope.spawn(stream.run(), name="stream")
        return stream.start(start)


class _Stream:
    """Stream with its calls. Of each call at most one request waits to be sent, so memory is bounded by them."""

    def __init__(self, open_: "Callable[[], _GrpcStream]") -> None:
        self.ended = False
        self._open = open_
        self._calls: dict[int, _Call] = {}
        self._last = 0
        self._unsent: dict[int, calls_pb2.CallRequest] = {}
        self._wanted = asyncio.Event()

    @property
    def busy(self) -> bool:
        return bool(self._calls)

    def start(self, start: calls_pb2.StartCall) -> "_Call":
        """Not once it has ended."""
        self._last += 1
        call = self._calls[self._last] = _Call(self, self._last, start.timeout_s)
        self._unsent[call.number] = calls_pb2.CallRequest(call=call.number, start=start)
        self._wanted.set()
        return call

    def cancel(self, number: int) -> None:
        """Forget a call; the server is told, unless it has not heard of it or has ended it."""
        if self._calls.pop(number, None) is None:
            return
        unsent = self._unsent.pop(number, None)
        if unsent is None or not unsent.HasField("start"):
            self._send(calls_pb2.CallRequest(call=number, cancel=True))

    def received(self, number: int, nbytes: int) -> None:
        """The reader has taken this much: the server may send as much again."""
        if number in self._calls:
            unsent = self._unsent.get(number)
            before = 0 if unsent is None else unsent.received_nbytes
            self._send(calls_pb2.CallRequest(call=number, received_nbytes=before + nbytes))

    async def run(self) -> None:
        # It has no deadline, as each call has its own; keepalive finds a dead server.
        stream = self._open()
        fail: Callable[[], errors.TriptychError] = _closed
        try:
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(self._write(stream))
                fail = await self._read(stream)
                self.ended = True
                writing.cancel()
        finally:
            self.ended = True
            stream.cancel()
            self._unsent.clear()
            for call in self._calls.values():
                call.fail(fail())
            self._calls.clear()

    async def _read(self, stream: "_GrpcStream") -> Callable[[], errors.TriptychError]:
        """Read until the stream is over. Returns the error of its calls."""
        try:
            while isinstance(message := await stream.read(), calls_pb2.CallAnswers):
                for number, answer in enumerate(message.answers, 1):
                    if (call := self._calls.get(answer.call)) is not None:
                        call.take(answer)
                        if call.has_ended:
                            del self._calls[answer.call]
                            self._unsent.pop(answer.call, None)
                    if number % limits.MOST_AT_ONCE == 0:
                        await asyncio.sleep(0)
        except grpc.aio.AioRpcError as raised:
            lost = raised  # unlike ``raised``, it outlives this block
            return lambda: calls.translate(lost)
        except DecodeError:
            return lambda: errors.InternalError("a peer sent an answer that is not a valid message")
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return _closed  # the channel was closed
        return lambda: errors.InstanceLost("the peer ended the call")

    def _send(self, request: calls_pb2.CallRequest) -> None:
        if not self.ended:
            self._unsent[request.call] = request
            self._wanted.set()

    async def _write(self, stream: "_GrpcStream") -> None:
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                while self._unsent:
                    await stream.write(self._batch())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            logger.debug("the stream is over: %s", error)  # its reader learns why

    def _batch(self) -> calls_pb2.CallRequests:
        batch, nbytes = calls_pb2.CallRequests(), 0
        while self._unsent and nbytes < limits.BATCH_NBYTES and len(batch.requests) < limits.MAX_BATCHED_REQUESTS:
            request = self._unsent.pop(next(iter(self._unsent)))
            batch.requests.append(request)
            nbytes += request.ByteSize()
        return batch


class _Call:
    """Call at the client: the stream writes, one reader reads."""

    def __init__(self, stream: _Stream, number: int, timeout_s: float) -> None:
        self.number = number
        self._stream = stream
        self._messages: deque[bytes] = deque()
        self._taken_nbytes = 0
        self.has_ended = False
        self._error: errors.TriptychError | None = None
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None
        """Set while the reader waits: an event would cost twice as much, for each token."""
        self._timer = self._loop.call_later(timeout_s, self._expire)

    async def next(self) -> bytes | None:
        """The next message, None after the last. Raises the call's error."""
        if not self._messages and not self.has_ended:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if not self._messages:
            if self._error is not None:
                raise self._error
            return None
        message = self._messages.popleft()
        self._taken_nbytes += len(message) + limits.MESSAGE_NBYTES
        if self._taken_nbytes >= limits.WINDOW_NBYTES // 2:
            self._stream.received(self.number, self._taken_nbytes)
            self._taken_nbytes = 0
        return message

    def close(self) -> None:
        """The reader has left."""
        self._timer.cancel()
        if not self.has_ended:
            self._stream.cancel(self.number)

    def _expire(self) -> None:
        self._stream.cancel(self.number)
        self.fail(errors.DeadlineExceeded("the call did not end within its deadline"))

    def take(self, answer: calls_pb2.CallAnswer) -> None:
        """Messages for the reader, and perhaps the end of the call."""
        self._messages.extend(answer.messages)
        if answer.HasField("end"):
            end = answer.end
            if end.code != "OK":
                self._error = calls.from_peer(error_from_status(end.code, end.message, end.metadata.items()))
            self.has_ended = True
            self._timer.cancel()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def fail(self, error: errors.TriptychError) -> None:
        """End the call with an error, after the messages that have come."""
        self.has_ended, self._error = True, error
        self._timer.cancel()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _closed() -> errors.TriptychError:
    return errors.Cancelled("the client is closed")
