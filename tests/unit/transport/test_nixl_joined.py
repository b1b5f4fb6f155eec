"""Many pulls from one peer at once are few transfers: counted where NIXL is asked for them."""

import asyncio
import importlib.util
from typing import Any

import pytest

from tests.contract.transport_kit import MACHINE, Kit, holder_process, tensor_of
from triptych.domain.embedding import DType, Ticket
from triptych.ports import Arena
from triptych.transport import slot
from triptych.transport.arena import HostArena
from triptych.transport.nixl import NixlTransport
from triptych.transport.nixl_agent import NixlAgent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed: joining was NOT tested"
)
PULLS = 32


class Counting:
    """NIXL's own agent; counts the transfers it is asked for."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.transfers = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def createXferReq(self, *asked: Any) -> Any:  # noqa: N802 - as NIXL says
        self.transfers += 1
        return self._inner.createXferReq(*asked)


async def test_many_tickets_of_one_peer_travel_in_few_transfers_and_several_tensors_in_one() -> None:
    counting: list[Counting] = []

    def open_agent(arena: Arena, incarnation: int) -> NixlAgent:
        agent = NixlAgent(arena, incarnation)
        counting.append(Counting(agent.agent))
        agent.agent = counting[0]
        return agent

    arena = HostArena(16 << 20, instance_id="reader", epoch=1)
    with holder_process("nixl") as holder:
        transport = await NixlTransport.start(arena, machine=MACHINE, max_pull_s=60.0, open_agent=open_agent)
        peer = await transport.connect(holder.offer)
        ticket: Ticket = holder.tickets[0]
        places = [arena.base + index * (256 << 10) for index in range(PULLS)]
        before = counting[0].transfers
        await asyncio.gather(*(peer.pull(ticket, at) for at in places))
        for at in places:
            slot.verify(arena, at, ticket)
        # The first may go by itself at once; what comes up meanwhile goes together, up to 16 at a time.
        assert counting[0].transfers - before <= 1 + PULLS // 4
        alone = counting[0].transfers
        await peer.pull(ticket, places[0])
        assert counting[0].transfers - alone == 1
        await peer.close()
        await transport.close()


async def test_all_tensors_of_an_embedding_are_one_pull() -> None:
    """A ticket's tensors lie in one slot: one range, one transfer, whichever backend; here the one without a socket."""
    kit = Kit("memory")
    async with kit.site("holder") as holder, kit.site("reader") as reader:
        sent = [tensor_of(f"t{index}", DType.F32, (index + 1, 64), index) for index in range(5)]
        ticket = holder.put(b"k", sent)
        peer = await reader.transport.connect(holder.transport.offer())
        await peer.pull(ticket, reader.arena.base)
        found = slot.tensors(reader.arena, reader.arena.base, ticket)
        assert [found[tensor.spec.name].data for tensor in sent] == [tensor.data for tensor in sent]
        await peer.close()
