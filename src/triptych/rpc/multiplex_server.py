"""Server of ``triptych.v1.Calls``: serves each call of a stream like one that came by itself (ADR 21)."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from math import inf
from typing import NoReturn, cast

import grpc
import grpc.aio

from triptych import errors
from triptych.rpc import limits
from triptych.rpc.interceptors import Context, ErrorInterceptor, Handler
from triptych.runtime.clock import monotonic
from triptych.v1 import calls_pb2, calls_pb2_grpc
from triptych.wire.status import error_to_status

logger = logging.getLogger(__name__)

SERVICE_NAME = "triptych.v1.Calls"


class Handlers:
    """The handlers that ``register`` adds to ``server``, by rpc path."""

    def __init__(self, server: grpc.aio.Server, register: Callable[[grpc.aio.Server], None]) -> None:
        self._server = server
        self._by_path: dict[str, Handler] = {}
        register(cast("grpc.aio.Server", self))

    def __iter__(self) -> Iterator[tuple[str, Handler]]:
        return iter(self._by_path.items())

    def add_registered_method_handlers(self, service: str, handlers: "Mapping[str, Handler]") -> None:
        """Add handlers as on a server; generated code calls both methods."""
        self._server.add_registered_method_handlers(service, handlers)
        self._by_path.update((f"/{service}/{name}", handler) for name, handler in handlers.items())

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(handlers)


class CallsServicer(calls_pb2_grpc.CallsServicer):
    """Serves calls of ``handlers``, behind ``boundary`` like those that come by themselves; at most ``limit`` at once."""

    def __init__(self, handlers: Handlers, boundary: ErrorInterceptor, limit: int | None) -> None:
        self.handlers = {
            path: boundary.wrap(handler, path) for path, handler in handlers if not handler.request_streaming
        }
        """Handlers by rpc path."""
        self.limit = inf if limit is None else limit
        self.open = 0
        """Calls of all streams."""

    def register(self, server: grpc.aio.Server) -> None:
        calls_pb2_grpc.add_CallsServicer_to_server(self, server)

    async def Exchange(self, requests: object, context: Context) -> None:  # noqa: N802 - the name is the wire's
        del requests
        await _Exchange(context, self).run()


class _Exchange:
    """Exchange over one stream: reads requests, runs a task per call, and sends what they have answered."""

    def __init__(self, context: Context, servicer: CallsServicer) -> None:
        self._context = context
        self._servicer = servicer
        self._calls: dict[int, _Call] = {}
        self._last = 0
        self._unsent = _Unsent()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write())
            error = await self._read(group)
            tasks = [call.task for call in self._calls.values()]
            if error is not None:
                for task in tasks:
                    task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            self._unsent.close()  # gRPC does not allow to abort during a write
        if error is not None:
            raise error

    async def _read(self, group: asyncio.TaskGroup) -> errors.InvalidRequest | None:
        """Read until the client sends no more or something invalid, or the server stops.

        A client that leaves cancels the stream.
        """
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:
                for number, request in enumerate(message.requests, 1):
                    if request.HasField("start"):
                        self._start(request.call, request.start, group)
                    else:
                        self._take(request)
                    if number % limits.MOST_AT_ONCE == 0:
                        await asyncio.sleep(0)
                await self._unsent.settle()
        except errors.InvalidRequest as error:
            return error
        except grpc.aio.BaseError as error:  # the server has stopped: gRPC cancels this stream
            logger.debug("the stream is over: %s", error)
        return None

    def _take(self, request: calls_pb2.CallRequest) -> None:
        """What the client says of a call that it has started."""
        call = self._calls.get(request.call)
        match request.WhichOneof("request"):
            case "cancel" if call is not None:
                call.task.cancel()
            case "received_nbytes" if call is not None:
                call.add_room(request.received_nbytes)

    def _start(self, number: int, start: calls_pb2.StartCall, group: asyncio.TaskGroup) -> None:
        if number <= self._last:
            raise errors.InvalidRequest(f"call {number} started after call {self._last}", param="call")
        self._last = number
        if self._servicer.open >= self._servicer.limit:
            status = error_to_status(errors.Overloaded(f"{self._servicer.limit} calls are open, which is the limit"))
            self._unsent.end(number, status.grpc_code, status.message, status.metadata)
            return
        call = self._calls[number] = _Call(number, start, self._context)
        self._servicer.open += 1
        call.task = group.create_task(self._serve(call, start))
        call.task.add_done_callback(partial(self._ended, call))

    def _ended(self, call: "_Call", task: asyncio.Task[None]) -> None:
        if call.late and task.cancelled():  # perhaps before it ran
            self._unsent.end(call.number, "DEADLINE_EXCEEDED", "", ())
        call.timer.cancel()
        self._servicer.open -= 1
        del self._calls[call.number]

    async def _serve(self, call: "_Call", start: calls_pb2.StartCall) -> None:
        handler = self._servicer.handlers.get(start.method)
        try:
            if handler is None:
                await call.abort(grpc.StatusCode.UNIMPLEMENTED)
            elif handler.response_streaming:
                await self._stream(handler, call, start.request)
            else:
                serve = cast("Callable[[bytes, _Call], Awaitable[object]]", handler.unary_unary)
                serialize = cast("Callable[[object], bytes]", handler.response_serializer)
                message = serialize(await serve(start.request, call))
                self._unsent.answer(call.number, len(message)).messages.append(message)
            call.code = "OK"
        except grpc.aio.AbortError:
            pass  # the handler has set the status
        except Exception:
            logger.exception("%s failed", start.method)
            call.code = "INTERNAL"
        self._unsent.end(call.number, call.code, call.message, call.metadata)

    async def _stream(self, handler: Handler, call: "_Call", request: bytes) -> None:
        serialize = cast("Callable[[object], bytes]", handler.response_serializer)
        serve = cast("Callable[[bytes, _Call], AsyncGenerator[object]]", handler.unary_stream)
        async with aclosing(serve(request, call)) as answers:
            async for answer in answers:
                message = serialize(answer)
                if call.room_nbytes <= 0:
                    await call.has_room()
                call.room_nbytes -= len(message) + limits.MESSAGE_NBYTES
                self._unsent.answer(call.number, len(message)).messages.append(message)

    async def _write(self) -> None:
        try:
            while (batch := await self._unsent.next()) is not None:
                await self._context.write(batch)
        except Exception as error:  # noqa: BLE001 - the client is gone, and gRPC cancels this stream
            logger.debug("the stream is over: %s", error)


class _Call:
    """Call at the server, and its ``ServicerContext``."""

    task: asyncio.Task[None]

    def __init__(self, number: int, start: calls_pb2.StartCall, stream: Context) -> None:
        self.number = number
        self.auth_context = stream.auth_context
        self.peer = stream.peer
        self.invocation_metadata = start.metadata.items
        self.code = "UNKNOWN"
        self.message = ""
        self.metadata: tuple[tuple[str, str], ...] = ()
        self.late = False
        """Whether it was cancelled at its deadline."""
        self._deadline_s = monotonic() + start.timeout_s
        self.timer = asyncio.get_running_loop().call_later(start.timeout_s, self._expire)
        self.room_nbytes = limits.WINDOW_NBYTES
        """Bytes that may be sent before the client has taken more."""
        self._roomy = asyncio.Event()

    def time_remaining(self) -> float:
        return max(0.0, self._deadline_s - monotonic())

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, str], ...] = ()
    ) -> NoReturn:
        self.code, self.message, self.metadata = code.name, details, trailing_metadata
        raise grpc.aio.AbortError

    async def has_room(self) -> None:
        """Wait until the client has taken enough of what was sent."""
        while self.room_nbytes <= 0:
            self._roomy.clear()
            await self._roomy.wait()

    def add_room(self, nbytes: int) -> None:
        self.room_nbytes = min(limits.WINDOW_NBYTES, self.room_nbytes + nbytes)
        self._roomy.set()

    def _expire(self) -> None:
        self.late = True
        self.task.cancel()


class _Unsent:
    """Answers that wait to be sent, in batches. The windows of the calls bound them."""

    def __init__(self) -> None:
        self._batches: deque[calls_pb2.CallAnswers] = deque()
        """Full ones, and one that is not."""
        self._answers: dict[int, calls_pb2.CallAnswer] = {}
        """Answers in the last batch, by their calls."""
        self._nbytes = 0
        """Size of its messages."""
        self._closed = False
        self._ready = asyncio.Event()
        self._taken = asyncio.Event()

    def answer(self, number: int, nbytes: int) -> calls_pb2.CallAnswer:
        """The answer that is sent next to a call; ``nbytes`` are about to be added to it."""
        if not self._batches or self._nbytes >= limits.BATCH_NBYTES:
            self._batches.append(calls_pb2.CallAnswers())
            self._nbytes, self._answers = 0, {}
            self._ready.set()
        self._nbytes += nbytes
        answer = self._answers.get(number)
        if answer is None:
            answer = self._answers[number] = self._batches[-1].answers.add(call=number)
        return answer

    def end(self, number: int, code: str, message: str, metadata: tuple[tuple[str, str], ...]) -> None:
        end = self.answer(number, 0).end
        end.code, end.message = code, message
        for key, value in metadata:
            end.metadata[key] = value

    def close(self) -> None:
        """End the requests: no more will come."""
        self._closed = True
        self._ready.set()

    async def next(self) -> calls_pb2.CallAnswers | None:
        """The next batch; None after the last."""
        while not self._batches:
            if self._closed:
                return None
            self._ready.clear()
            await self._ready.wait()
        batch = self._batches.popleft()
        if not self._batches:
            self._answers = {}
        self._taken.set()
        return batch

    async def settle(self) -> None:
        """Wait while there are too many answers, so that a client which reads nothing cannot start further calls."""
        while len(self._answers) > limits.MAX_UNSENT_ANSWERS or len(self._batches) > 1:
            self._taken.clear()
            await self._taken.wait()
