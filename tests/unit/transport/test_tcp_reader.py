"""The reading end of TCP, where its owner is interrupted."""

import asyncio
from typing import Any

from tests.contract.transport_kit import Kit, tensor_of
from triptych.domain.embedding import DType


async def test_a_close_that_is_given_up_is_a_close_all_the_same() -> None:
    kit, complaints = Kit("tcp"), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with kit.site("holder") as holder, kit.site("reader") as reader:
        ticket = holder.put(b"k", [tensor_of("t", DType.U8, (1000,), 1)])
        peer = await reader.transport.connect(holder.transport.offer())
        await peer.pull(ticket, reader.arena.base)
        async with asyncio.TaskGroup() as group:
            closing = group.create_task(peer.close())
            await asyncio.sleep(0)
            closing.cancel()
        assert closing.cancelled()
        async with asyncio.timeout(5):
            again = await reader.transport.connect(holder.transport.offer())
            await again.pull(ticket, reader.arena.base)
            await reader.transport.close()
    assert not complaints
