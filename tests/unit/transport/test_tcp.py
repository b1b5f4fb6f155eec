"""TCP at both ends when closing is interrupted or the peer is gone."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest
import uvloop

from tests.contract.transport_kit import Kit, tensor_of
from triptych.domain.embedding import DType
from triptych.errors import TransferFailed
from triptych.runtime import listening as listening_sockets
from triptych.transport import tcp
from triptych.transport.arena import HostArena
from triptych.transport.tcp_holder import ReaderConnection, TcpLimits
from triptych.transport.tcp_reader import TcpPeer
from triptych.transport.tcp_wire import Read


@pytest.fixture
async def complaints() -> list[dict[str, Any]]:
    """The event loop's reports of failed callbacks."""
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    return heard


async def give_up_at_once(work: Coroutine[Any, Any, None]) -> None:
    async with asyncio.TaskGroup() as group:
        begun = group.create_task(work)
        await asyncio.sleep(0)
        begun.cancel()
    assert begun.cancelled()


async def test_a_cancelled_close_of_a_reader_still_closes(complaints: list[dict[str, Any]]) -> None:
    kit = Kit("tcp")
    async with kit.site("holder") as holder, kit.site("reader") as reader:
        ticket = holder.put(b"k", [tensor_of("t", DType.U8, (1000,), 1)])
        peer = await reader.transport.connect(holder.transport.offer())
        await peer.pull(ticket, reader.arena.base)
        await give_up_at_once(peer.close())
        async with asyncio.timeout(60):
            again = await reader.transport.connect(holder.transport.offer())
            await again.pull(ticket, reader.arena.base)
            await reader.transport.close()
    assert not complaints


async def test_a_cancelled_close_of_a_holder_still_closes(complaints: list[dict[str, Any]]) -> None:
    kit = Kit("tcp")
    async with kit.site("holder") as holder, kit.site("reader") as reader:
        ticket = holder.put(b"k", [tensor_of("t", DType.U8, (1000,), 1)])
        peer = await reader.transport.connect(holder.transport.offer())
        await give_up_at_once(holder.transport.close())
        async with asyncio.timeout(60):
            with pytest.raises(TransferFailed):
                await peer.pull(ticket, reader.arena.base)
            await peer.close()
    assert not complaints


class Broken(asyncio.Transport):
    """A connection that breaks at the first write of a payload."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[int] = []

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(len(data))

    def is_closing(self) -> bool:
        return len(self.written) > 1


async def test_a_holder_stops_writing_when_its_reader_is_gone() -> None:
    nbytes = 4 << 20
    arena = HostArena(8 << 20, instance_id="holder", epoch=1)
    serving = ReaderConnection(arena, lambda *_: True, TcpLimits(max_pull_s=5), begun=lambda _: None)
    connection = Broken()
    serving.connection_made(connection)
    serving.data_received(Read(1, bytes(range(16)), arena.base, nbytes).pack())
    head, *payload = connection.written
    assert head < 100
    assert sum(payload) < nbytes
    assert len(payload) == 1
    serving.connection_lost(None)


LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)
HOUR_S = 3600.0


class Refusing(socket.socket):
    """A listening socket that fails with these errors first, each time that a reader connects."""

    errors: list[int]
    tries = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.tries += 1
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        return super().accept()


@contextlib.asynccontextmanager
async def listening(
    monkeypatch: pytest.MonkeyPatch, errors: Sequence[int], *, failures: list[str]
) -> AsyncIterator[tuple[tcp.TcpTransport, Refusing]]:
    bound = Refusing(socket.AF_INET, socket.SOCK_STREAM)
    bound.errors = list(errors)
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    arena = HostArena(1 << 20, instance_id="holder", epoch=1)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_server", lambda *_, **__: bound)
        transport = await tcp.TcpTransport.listen(
            arena,
            machine="here",
            check=lambda *_: True,
            limits=TcpLimits(max_pull_s=5),
            on_failure=failures.append,
        )
    try:
        yield transport, bound
    finally:
        await transport.close()


def run(new_loop: Callable[[], asyncio.AbstractEventLoop], work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(work, 30))


async def connects(monkeypatch: pytest.MonkeyPatch, errors: Sequence[int]) -> None:
    """To a holder whose accept fails like this first."""
    failures = list[str]()
    async with listening(monkeypatch, errors, failures=failures) as (holder, _), Kit("tcp").site("reader") as reader:
        peer = await reader.transport.connect(holder.offer())
        await peer.close()
    assert failures == []


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("error", [errno.ECONNABORTED, errno.EPROTO, errno.ENETDOWN, errno.EPERM])
def test_readers_connect_at_once_after_an_error_of_another_connection(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    error: int,
) -> None:
    monkeypatch.setattr(listening_sockets, "_AGAIN_S", HOUR_S)
    run(new_loop, connects(monkeypatch, [error] * 3))
    (said,) = (record.getMessage() for record in caplog.records if record.name == listening_sockets.__name__)
    assert said == f"a reader could not connect: [Errno {error}] {os.strerror(error)}"


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_a_lack_of_resources_pauses_accepting(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    error: int,
) -> None:
    async def waits() -> None:
        async with listening(monkeypatch, [error] * 1000, failures=[]) as (_, bound):
            with socket.create_connection(bound.getsockname()):
                while not caplog.records:  # noqa: ASYNC110 - a log tells nobody
                    await asyncio.sleep(0.01)
                for _ in range(10):  # turns of the loop, which sees that somebody connects
                    await asyncio.sleep(0)
                assert bound.tries == 1

    monkeypatch.setattr(listening_sockets, "_AGAIN_S", HOUR_S)
    run(new_loop, waits())
    assert [record.getMessage() for record in caplog.records] == [
        f"readers cannot connect: [Errno {error}] {os.strerror(error)}"
    ]
    monkeypatch.setattr(listening_sockets, "_AGAIN_S", 0.01)
    run(new_loop, connects(monkeypatch, [error] * 3))


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_listening_socket_that_is_dead_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Connected readers are still served."""
    failures = list[str]()

    async def dies() -> None:
        kit = Kit("tcp")
        async with listening(monkeypatch, (), failures=failures) as (holder, bound), kit.site("reader") as reader:
            peer = await reader.transport.connect(holder.offer())
            bound.shutdown(socket.SHUT_RDWR)  # accept(2) fails with EINVAL from now on
            while not failures:  # noqa: ASYNC110 - the holder tells a callback
                await asyncio.sleep(0.01)
            assert isinstance(peer, TcpPeer)
            await peer.prove()
            await peer.close()

    run(new_loop, dies())
    assert failures == ["the listening socket of tcp"]
    (said,) = (record for record in caplog.records if record.name == listening_sockets.__name__)
    assert (said.levelname, said.getMessage()) == (
        "ERROR",
        f"readers cannot connect any more: [Errno {errno.EINVAL}] {os.strerror(errno.EINVAL)}",
    )
