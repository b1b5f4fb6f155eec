"""Pulls from one peer that start together become few transfers, and each ends separately.

Over fake bindings that copy within this process, count calls, and fail on demand.
"""

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from tests.contract.transport_kit import tensor_of
from triptych.domain.embedding import DType, Ticket, payload_nbytes
from triptych.domain.instance import TransportOffer
from triptych.errors import TransferFailed
from triptych.machine.agent_health import HealthLimits
from triptych.ports import Arena, Peer
from triptych.transport import slot
from triptych.transport.arena import HostArena
from triptych.transport.nixl import NixlTransport
from triptych.transport.nixl_agent import NixlAgent, agent_name
from triptych.transport.nixl_offer import NixlOffer

PULLS = 32
FEW = PULLS // 8
MACHINE = "test-host"
STRIDE = 128 << 10
HEALTH = HealthLimits(stuck_s=60.0, hanging_s=60.0, max_failures=3, min_retired_s=0.0, first_pause_s=0.0)

Parts = list[tuple[int, int, int]]


@dataclass
class Bindings:
    """NIXL's module and agent in one. A transfer finishes in the call that posts it, unless it is held back."""

    DRAM_SEG = "dram"
    NIXL_READ, NIXL_IN_PROG, NIXL_SUCCESS = "read", 1, 0

    go_on: threading.Event = field(default_factory=threading.Event)
    fails: bool = False
    transfers: list[tuple[str, Parts, Parts]] = field(default_factory=list)
    """Of each its peer and its parts here and there."""
    on_loop: list[bool] = field(default_factory=list)
    """For each call, whether the event loop's thread made it."""
    metadata: bytes = b"reader"
    done: set[int] = field(default_factory=set)

    def loadRemoteMD(self, metadata: bytes) -> bytes:  # noqa: N802 - as NIXL says
        return metadata

    def invalidateRemoteMD(self, _: str) -> None:  # noqa: N802
        return None

    def nixlXferDList(self, _: str, parts: Parts) -> Parts:  # noqa: N802
        return parts

    def createXferReq(self, _: str, local: Parts, remote: Parts, peer: str, *__: object) -> int:  # noqa: N802
        self.transfers.append((peer, local, remote))
        self.on_loop.append(threading.current_thread() is threading.main_thread())
        return len(self.transfers) - 1

    def postXferReq(self, handle: int) -> int:  # noqa: N802
        if self.fails:
            raise ValueError
        return self.getXferStatus(handle)

    def getXferStatus(self, handle: int) -> int:  # noqa: N802
        if not self.go_on.is_set():
            return self.NIXL_IN_PROG
        if handle not in self.done:
            self.done.add(handle)
            _, local, remote = self.transfers[handle]
            for (to, nbytes, _), (at, _, _) in zip(local, remote, strict=True):
                ctypes.memmove(to, at, nbytes)
        return self.NIXL_SUCCESS

    def releaseXferReq(self, _: int) -> None:  # noqa: N802
        return None

    def agent(self, incarnation: int) -> NixlAgent:
        made: Any = _Agent(self, incarnation)
        return cast("NixlAgent", made)


class _Agent:
    """The content of ``NixlAgent`` with the fake bindings."""

    rdma, ucx, metadata = False, 0, b"reader"
    errors: tuple[type[Exception], ...] = (ValueError,)

    def __init__(self, bindings: Bindings, incarnation: int) -> None:
        self.incarnation = incarnation
        self.nixl = bindings
        self.agent = bindings


class Holder:
    """An arena with embeddings of different sizes, one per pull."""

    def __init__(self, name: str) -> None:
        self.arena = HostArena(8 << 20, instance_id=name, epoch=1)
        metadata = agent_name(self.arena.probe, 0).encode()
        packed = NixlOffer(False, 0, None, self.arena.probe, self.arena.address, metadata).pack()
        self.offer = TransportOffer("nixl", MACHINE, packed)
        self.tickets = [self._put(name, index) for index in range(PULLS)]

    def _put(self, name: str, index: int) -> Ticket:
        sent = [tensor_of(f"t{part}", DType.U8, (500 + 100 * index,), seed=7 * index + part) for part in range(3)]
        specs = tuple(tensor.spec for tensor in sent)
        at = self.arena.base + index * STRIDE
        checksum = slot.seal(self.arena, at, index + 1, sent)
        return Ticket(
            key=bytes([index]),
            holder=name,
            epoch=1,
            offset=at,
            payload_nbytes=payload_nbytes(specs),
            generation=index + 1,
            checksum=checksum,
            tensors=specs,
            tokens=3,
            lease_id=bytes(16),
            lease_s=60.0,
        )


@dataclass
class Reader:
    bindings: Bindings
    arena: HostArena
    transport: NixlTransport
    resets: list[str]

    def place(self, index: int) -> int:
        return self.arena.base + index * STRIDE

    async def meet(self, holder: Holder) -> Peer:
        peer = await self.transport.connect(holder.offer)
        self.bindings.transfers.clear()
        self.bindings.on_loop.clear()
        self.bindings.done.clear()
        return peer

    def arrived(self, index: int, ticket: Ticket) -> None:
        slot.verify(self.arena, self.place(index), ticket)


@pytest.fixture
def holder() -> Holder:
    return Holder("holder")


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    bindings = Bindings()
    bindings.go_on.set()
    arena = HostArena(16 << 20, instance_id="reader", epoch=1)
    resets: list[str] = []

    def open_agent(_: Arena, incarnation: int) -> NixlAgent:
        return bindings.agent(incarnation)

    transport = await NixlTransport.start(
        arena,
        machine=MACHINE,
        max_pull_s=20.0,
        health=HEALTH,
        open_agent=open_agent,
        on_reset=lambda _, cause: resets.append(cause),
    )
    yield Reader(bindings, arena, transport, resets)
    bindings.go_on.set()
    await transport.close()


async def results(*pulls: asyncio.Task[None]) -> list[BaseException | None]:
    async with asyncio.timeout(60):
        return await asyncio.gather(*pulls, return_exceptions=True)


def start(reader: Reader, peer: Peer, tickets: list[Ticket]) -> list[asyncio.Task[None]]:
    return [
        asyncio.get_running_loop().create_task(_pull(peer, ticket, reader.place(index)))
        for index, ticket in enumerate(tickets)
    ]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the driver's thread wakes no task
            await asyncio.sleep(0.001)


async def _pull(peer: Peer, ticket: Ticket, at: int) -> None:
    await peer.pull(ticket, at)


async def test_pulls_started_together_are_few_transfers_and_each_gets_its_own_bytes(
    reader: Reader, holder: Holder
) -> None:
    peer = await reader.meet(holder)
    assert await results(*start(reader, peer, holder.tickets)) == [None] * PULLS
    for index, ticket in enumerate(holder.tickets):
        reader.arrived(index, ticket)
    assert len(reader.bindings.transfers) <= FEW
    parts = [part for _, local, _ in reader.bindings.transfers for part in local]
    assert len(parts) == PULLS, "an embedding's tensors, three here, are one part"
    assert reader.transport.quarantined() == ()


async def test_a_lone_pull_is_posted_by_the_event_loop_one_turn_later(reader: Reader, holder: Holder) -> None:
    peer = await reader.meet(holder)
    [pull] = start(reader, peer, holder.tickets[:1])
    await asyncio.sleep(0)  # the pull starts
    assert not reader.bindings.transfers
    await asyncio.sleep(0)  # it is posted and finishes
    assert pull.done()
    assert reader.bindings.on_loop == [True]
    reader.arrived(0, holder.tickets[0])


async def test_pulls_from_two_peers_are_a_transfer_each(reader: Reader, holder: Holder) -> None:
    other = Holder("other")
    first, second = await reader.meet(holder), await reader.meet(other)
    pulls = start(reader, first, holder.tickets[:4])
    pulls += [
        asyncio.get_running_loop().create_task(_pull(second, ticket, reader.place(4 + index)))
        for index, ticket in enumerate(other.tickets[:4])
    ]
    assert await results(*pulls) == [None] * 8
    for index, ticket in enumerate(holder.tickets[:4] + other.tickets[:4]):
        reader.arrived(index, ticket)
    assert len(reader.bindings.transfers) == 2
    assert len({name for name, _, _ in reader.bindings.transfers}) == 2


async def test_queued_pulls_are_merged(reader: Reader, holder: Holder) -> None:
    peer = await reader.meet(holder)
    reader.bindings.go_on.clear()
    before = start(reader, peer, holder.tickets[:1])
    await until(lambda: reader.bindings.transfers)
    pulls = start(reader, peer, holder.tickets[1:])
    for _ in range(3):  # the pulls start, and are queued
        await asyncio.sleep(0)
    reader.bindings.go_on.set()
    assert await results(*before, *pulls) == [None] * PULLS
    assert len(reader.bindings.transfers) <= 1 + FEW


@pytest.mark.parametrize("begun", [False, True])
async def test_a_cancelled_pull_does_not_affect_the_others(reader: Reader, holder: Holder, begun: bool) -> None:
    peer = await reader.meet(holder)
    reader.bindings.go_on.clear()
    pulls = start(reader, peer, holder.tickets[:8])
    if begun:
        await until(lambda: reader.bindings.transfers)
    else:
        await asyncio.sleep(0)
    pulls[0].cancel()
    pulls[5].cancel()
    kept = {reader.place(0), reader.place(5)}
    await until(lambda: {at for at, _ in reader.transport.quarantined()} == kept)
    assert not any(pull.done() for index, pull in enumerate(pulls) if index not in (0, 5))
    reader.bindings.go_on.set()
    ended = await results(*pulls)
    assert [index for index, end in enumerate(ended) if end is not None] == [0, 5]
    assert isinstance(ended[0], asyncio.CancelledError)
    assert reader.transport.quarantined() == ()
    for index in (1, 2, 3, 4, 6, 7):
        reader.arrived(index, holder.tickets[index])
    assert len(reader.bindings.transfers) == 1


async def test_each_pull_has_its_own_deadline_and_only_its_destination_is_quarantined(
    reader: Reader, holder: Holder
) -> None:
    peer = await reader.meet(holder)
    reader.bindings.go_on.clear()
    impatient, patient = start(reader, peer, holder.tickets[:2])

    async def within(pull: asyncio.Task[None]) -> None:
        async with asyncio.timeout(0.05):
            await pull

    with pytest.raises(TimeoutError):
        await within(impatient)
    assert reader.transport.quarantined() == ((reader.place(0), holder.tickets[0].slot_nbytes),)
    assert not patient.done()
    reader.bindings.go_on.set()
    assert await results(patient) == [None]
    assert reader.transport.quarantined() == ()
    reader.arrived(1, holder.tickets[1])
    assert len(reader.bindings.transfers) == 1


async def test_invalid_tickets_do_not_affect_other_pulls(reader: Reader, holder: Holder) -> None:
    peer = await reader.meet(holder)
    tickets = list(holder.tickets)
    tickets[3] = replace(tickets[3], offset=holder.arena.nbytes)
    tickets[9] = replace(tickets[9], payload_nbytes=1)
    tickets[20] = replace(tickets[20], generation=99)
    ended = await results(*start(reader, peer, tickets))
    assert [index for index, end in enumerate(ended) if isinstance(end, TransferFailed)] == [3, 9]
    for index in range(PULLS):
        if index not in (3, 9, 20):
            reader.arrived(index, holder.tickets[index])
    assert len(reader.bindings.transfers) <= FEW


async def test_a_failed_transfer_fails_its_pulls_and_counts_once(reader: Reader, holder: Holder) -> None:
    peer, bindings = await reader.meet(holder), reader.bindings
    bindings.fails = True
    ended = await results(*start(reader, peer, holder.tickets[:8]))
    assert all(isinstance(end, TransferFailed) for end in ended)
    assert len(bindings.transfers) == 1
    assert reader.transport.quarantined() == ()
    bindings.fails = False
    assert await results(*start(reader, peer, holder.tickets)) == [None] * PULLS
    assert reader.resets == []
    bindings.fails = True
    for _ in range(HEALTH.max_failures - 1):
        await results(*start(reader, peer, holder.tickets[:8]))
    await asyncio.sleep(0.6)
    assert reader.resets == [], "fewer transfers failed than an agent is replaced for"
    await results(*start(reader, peer, holder.tickets[:8]))
    await until(lambda: reader.resets)
    assert reader.resets == ["failing"]


async def test_closing_the_transport_fails_unposted_pulls(reader: Reader, holder: Holder) -> None:
    peer = await reader.meet(holder)
    pulls = start(reader, peer, holder.tickets)
    closing = asyncio.get_running_loop().create_task(reader.transport.close())
    ended = await results(*pulls)
    await closing
    for index, end in enumerate(ended):
        if end is None:
            reader.arrived(index, holder.tickets[index])
        else:
            assert isinstance(end, TransferFailed)
    assert reader.transport.quarantined() == ()
