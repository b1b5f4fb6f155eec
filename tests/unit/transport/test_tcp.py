"""Both ends of TCP when closing is interrupted or the peer is gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.contract.transport_kit import Kit, tensor_of
from triptych.domain.embedding import DType
from triptych.errors import TransferFailed
from triptych.transport.arena import HostArena
from triptych.transport.tcp_holder import Serving, TcpLimits
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
        async with asyncio.timeout(5):
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
        async with asyncio.timeout(5):
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
    serving = Serving(arena, lambda *_: True, TcpLimits(max_pull_s=5), begun=lambda _: None)
    connection = Broken()
    serving.connection_made(connection)
    serving.data_received(Read(1, bytes(range(16)), arena.base, nbytes).pack())
    head, *payload = connection.written
    assert head < 100
    assert sum(payload) < nbytes
    assert len(payload) == 1
    serving.connection_lost(None)
