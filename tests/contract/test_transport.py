"""One suite for all transport backends: the contract of ``ports.Transport``, and the documented exceptions."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
import uvloop

from tests.contract.transport_kit import MACHINE, MAX_PULL_S, NIXL_IS_HERE, Kit, Site, holder_process, tensor_of
from triptych.domain.embedding import DType, Tensor, Ticket
from triptych.domain.instance import TransportOffer
from triptych.errors import LeaseLost, TransferFailed
from triptych.ports import Peer
from triptych.transport import slot
from triptych.transport.arena import PROBE_NBYTES, probe_bytes
from triptych.transport.tcp import TcpTransport
from triptych.transport.tcp_wire import NO_LEASE, REPLY, REPLY_MAGIC, Read, Status, TcpOffer

nixl_is_here = pytest.mark.skipif(not NIXL_IS_HERE, reason="NIXL is not installed: its backend was NOT tested")
nixl = pytest.param("nixl", marks=nixl_is_here)
nixl_device = pytest.param("nixl/device", marks=nixl_is_here)
BACKENDS = ["memory", "shm", "tcp", nixl, "memory/device", "tcp/device", nixl_device]
"""With ``/device``: over arenas whose bytes only their interface reaches, as a GPU's."""
PROCESSES = ["shm", "tcp", nixl]
"""Backends that reach another process."""
ONE_SIDED = {"shm", "nixl"}
"""Backends whose holders take no part in a read."""


@pytest.fixture(params=BACKENDS)
def kit(request: pytest.FixtureRequest) -> Kit:
    backend, _, device = request.param.partition("/")
    return Kit(backend, device="cpu" if device else None)


@pytest.fixture
async def holder(kit: Kit) -> AsyncIterator[Site]:
    async with kit.site("holder", nbytes=48 << 20) as site:
        yield site


@pytest.fixture
async def reader(kit: Kit) -> AsyncIterator[Site]:
    async with kit.site("reader", nbytes=48 << 20) as site:
        yield site


@pytest.fixture
async def peer(holder: Site, reader: Site) -> AsyncIterator[Peer]:
    connected = await reader.transport.connect(holder.transport.offer())
    yield connected
    await connected.close()


async def pull(peer: Peer, reader: Site, ticket: Ticket, at: int | None = None) -> dict[str, Tensor]:
    at = reader.arena.base if at is None else at
    await peer.pull(ticket, at)
    slot.verify(reader.arena, at, ticket)
    return slot.tensors(reader.arena, at, ticket)


async def pull_for_ever(peer: Peer, ticket: Ticket, at: int) -> None:
    while True:
        await peer.pull(ticket, at)


async def until_terminal(reader: Site) -> None:
    """Polls the transport until no late write is possible."""
    async with asyncio.timeout(60):
        while reader.transport.quarantined():  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)


async def test_every_dtype_arrives_unchanged(holder: Site, reader: Site, peer: Peer) -> None:
    sent = [tensor_of(dtype.value, dtype, (3, 5, 7), seed) for seed, dtype in enumerate(DType)]
    arrived = await pull(peer, reader, holder.put(b"k", sent))
    assert list(arrived) == [tensor.spec.name for tensor in sent]
    for tensor in sent:
        assert arrived[tensor.spec.name].spec == tensor.spec
        assert arrived[tensor.spec.name].data == tensor.data


async def test_a_tensor_without_elements_arrives(holder: Site, reader: Site, peer: Peer) -> None:
    sent = [tensor_of("none", DType.F32, (0, 8), 1), tensor_of("some", DType.U8, (3,), 2)]
    arrived = await pull(peer, reader, holder.put(b"k", sent))
    assert arrived["none"].data.nbytes == 0
    assert arrived["some"].data == sent[1].data
    assert (await pull(peer, reader, holder.put(b"nothing", []))) == {}


@pytest.mark.parametrize(
    "nbytes", [1, 1000, (64 << 10) + 1, 1 << 20, pytest.param(16 << 20, marks=pytest.mark.extended)]
)
async def test_every_size_arrives(holder: Site, reader: Site, peer: Peer, nbytes: int) -> None:
    sent = tensor_of("t", DType.U8, (nbytes,), nbytes)
    arrived = await pull(peer, reader, holder.put(b"k", [sent]))
    assert arrived["t"].data == sent.data


async def test_nothing_outside_the_destination_is_touched(holder: Site, reader: Site, peer: Peer) -> None:
    at, ticket = reader.arena.base + 64, holder.put(b"k", [tensor_of("t", DType.U8, (1000,), 1)])
    reader.arena.write(at - 8, b"before..")
    reader.arena.write(at + ticket.slot_nbytes, b"..behind")
    await pull(peer, reader, ticket, at)
    assert bytes(reader.arena.read(at - 8, 8)) == b"before.."
    assert bytes(reader.arena.read(at + ticket.slot_nbytes, 8)) == b"..behind"


async def test_an_unknown_or_expired_lease_reads_nothing(kit: Kit, holder: Site, reader: Site, peer: Peer) -> None:
    ticket = holder.put(b"k", [tensor_of("t", DType.U8, (1000,), 1)])
    forged = replace(ticket, lease_id=b"x" * 16)
    holder.release(ticket)
    if kit.backend in ONE_SIDED:
        # The holder does not see a one-sided read: bytes that are still there can be read (docs: isolated network).
        await pull(peer, reader, forged)
        return
    for lost in (ticket, forged):
        with pytest.raises(LeaseLost):
            await peer.pull(lost, reader.arena.base)


async def test_a_lease_gives_access_to_its_own_slot_only(kit: Kit, holder: Site, reader: Site, peer: Peer) -> None:
    if kit.backend in ONE_SIDED:
        pytest.skip("the holder does not see a one-sided read")
    mine = holder.put(b"mine", [tensor_of("t", DType.U8, (1000,), 1)])
    theirs = holder.put(b"theirs", [tensor_of("t", DType.U8, (1000,), 2)])
    with pytest.raises(LeaseLost):
        await peer.pull(replace(theirs, lease_id=mine.lease_id), reader.arena.base)


async def test_a_recycled_slot_is_detected(kit: Kit, holder: Site, reader: Site, peer: Peer) -> None:
    old = holder.put(b"old", [tensor_of("t", DType.U8, (30 << 20,), 1)])
    holder.release(old)
    new = holder.put(b"new", [tensor_of("t", DType.U8, (30 << 20,), 2)])
    assert (new.offset, new.generation > old.generation) == (old.offset, True)
    with pytest.raises(LeaseLost):
        await pull(peer, reader, old)


async def test_damaged_bytes_are_detected(holder: Site, reader: Site, peer: Peer) -> None:
    ticket = holder.put(b"k", [tensor_of("t", DType.U8, (1000,), 1)])
    holder.arena.write(ticket.offset + 500, bytes([holder.arena.read(ticket.offset + 500, 1)[0] ^ 1]))
    with pytest.raises(TransferFailed, match="checksum"):
        await pull(peer, reader, ticket)


async def test_ranges_outside_either_arena_are_refused(holder: Site, reader: Site, peer: Peer) -> None:
    ticket = holder.put(b"k", [tensor_of("t", DType.U8, (1000,), 1)])
    for offset in (0, reader.arena.nbytes - 500, reader.arena.nbytes + 1, -64):
        with pytest.raises(TransferFailed, match="own arena"):
            await peer.pull(ticket, offset)
    for offset in (holder.arena.nbytes - 500, 1 << 60, -64):
        with pytest.raises(TransferFailed, match="holder's arena"):
            await peer.pull(replace(ticket, offset=offset), reader.arena.base)
    with pytest.raises(TransferFailed, match="payload"):
        await peer.pull(replace(ticket, payload_nbytes=999), reader.arena.base)


async def test_two_readers_share_one_slot(kit: Kit, holder: Site, reader: Site, peer: Peer) -> None:
    sent = tensor_of("t", DType.F32, (1000, 64), 1)
    first = holder.put(b"k", [sent])
    second = holder.grant(b"k")
    async with kit.site("other", nbytes=1 << 20) as other:
        other_peer = await other.transport.connect(holder.transport.offer())
        mine, theirs = await asyncio.gather(pull(peer, reader, first), pull(other_peer, other, second))
        assert mine["t"].data == sent.data == theirs["t"].data
        await other_peer.close()


async def test_many_pulls_at_once_each_get_their_own_bytes(holder: Site, reader: Site, peer: Peer) -> None:
    sizes = [(index % 8 + 1) * 20_011 for index in range(64)]
    sent = [tensor_of("t", DType.U8, (nbytes,), index) for index, nbytes in enumerate(sizes)]
    tickets = [holder.put(bytes([index]), [tensor]) for index, tensor in enumerate(sent)]
    places = [reader.arena.base + index * (256 << 10) for index in range(64)]
    arrived = await asyncio.gather(*(pull(peer, reader, t, at) for t, at in zip(tickets, places, strict=True)))
    assert all(got["t"].data == tensor.data for got, tensor in zip(arrived, sent, strict=True))


async def test_nothing_is_written_after_a_cancelled_pull_unless_it_is_quarantined(
    holder: Site, reader: Site, peer: Peer
) -> None:
    rng = random.Random(5)
    ticket = holder.put(b"k", [tensor_of("t", DType.U8, (16 << 20,), 1)])
    at, end = reader.arena.base, reader.arena.base + ticket.slot_nbytes
    for _ in range(8):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.random() * 0.01):
                await peer.pull(ticket, at)
        assert all(start >= at and start + nbytes <= end for start, nbytes in reader.transport.quarantined())
        await until_terminal(reader)
        reader.arena.write(at, bytes(end - at))
        await asyncio.sleep(0.02)
        assert reader.arena.read(at, end - at) == bytes(end - at)
    again = await pull(peer, reader, holder.grant(b"k"))
    assert again["t"].data.nbytes == 16 << 20


async def test_close_ends_running_pulls(holder: Site, reader: Site, peer: Peer) -> None:
    ticket = holder.put(b"k", [tensor_of("t", DType.U8, (16 << 20,), 1)])
    pulls = [asyncio.ensure_future(peer.pull(ticket, reader.arena.base)) for _ in range(8)]  # noqa: TID251 - awaited below
    await asyncio.sleep(0)
    await reader.transport.close()
    async with asyncio.timeout(60):
        ended = await asyncio.gather(*pulls, return_exceptions=True)
    assert all(end is None or isinstance(end, TransferFailed) for end in ended)
    with pytest.raises(TransferFailed):
        await peer.pull(ticket, reader.arena.base)


async def test_a_closed_peer_refuses(holder: Site, reader: Site, peer: Peer) -> None:
    ticket = holder.put(b"k", [tensor_of("t", DType.U8, (1000,), 1)])
    await peer.close()
    with pytest.raises(TransferFailed):
        await peer.pull(ticket, reader.arena.base)
    again = await reader.transport.connect(holder.transport.offer())
    await pull(again, reader, ticket)
    await again.close()


@pytest.fixture
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends waits a second for NIXL's thread. On a busy machine that is too short, and memory stays readable."""
    monkeypatch.setattr("triptych.transport.nixl._CLOSE_S", 30.0)


@pytest.mark.usefixtures("patient_close")
async def test_pulls_from_a_closed_holder_fail_fast(holder: Site, reader: Site, peer: Peer) -> None:
    ticket = holder.put(b"k", [tensor_of("t", DType.U8, (1000,), 1)])
    await holder.transport.close()

    async def pull_until_noticed() -> None:
        """The reader's NIXL learns in a thread of its own that the holder is gone. A read that comes before succeeds."""
        while True:
            await peer.pull(ticket, reader.arena.base)
            await asyncio.sleep(0.001)

    async with asyncio.timeout(MAX_PULL_S / 2):
        with pytest.raises(TransferFailed):
            await pull_until_noticed()


async def test_a_restarted_holder_and_its_earlier_incarnation_can_both_be_read(kit: Kit, reader: Site) -> None:
    async with kit.site("restarted", epoch=1) as old:
        earlier = await reader.transport.connect(old.transport.offer())
        await pull(earlier, reader, old.put(b"k", [tensor_of("t", DType.U8, (1000,), 1)]))
        await old.transport.close()
    async with kit.site("restarted", epoch=2) as new:
        later = await reader.transport.connect(new.transport.offer())
        sent = tensor_of("t", DType.U8, (1000,), 2)
        assert (await pull(later, reader, new.put(b"k", [sent])))["t"].data == sent.data
        await earlier.close()
        await pull(later, reader, new.grant(b"k"))
        await later.close()


async def test_an_offer_of_an_earlier_incarnation_is_not_connected_to(kit: Kit, reader: Site) -> None:
    async with kit.site("restarted", epoch=1) as old:
        offer = old.transport.offer()
    async with kit.site("restarted", epoch=2):
        async with asyncio.timeout(60):
            with pytest.raises(TransferFailed):
                await reader.transport.connect(offer)


@pytest.mark.parametrize("length", [0, 1, 40, 66, 67, 80, 200, 5000])
async def test_malformed_offers_are_refused(kit: Kit, reader: Site, length: int) -> None:
    good = reader.transport.offer()
    junk = random.Random(length).randbytes(length)
    for metadata in (
        junk,
        good.metadata[: min(length, len(good.metadata) - 1)],
        good.metadata + b"\x00",
        good.metadata[:1] + junk,
    ):
        with pytest.raises(TransferFailed):
            await reader.transport.connect(replace(good, metadata=metadata))


# --- holders in other processes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", PROCESSES)
async def test_pulls_from_another_process(backend: str) -> None:
    with holder_process(backend) as holder:
        async with Kit(backend).site("reader", nbytes=64 << 20) as reader:
            peer = await reader.transport.connect(holder.offer)
            for index, ticket in enumerate(holder.tickets):
                arrived = await pull(peer, reader, ticket)
                assert arrived["embedding"].data == tensor_of("e", DType.U8, (ticket.payload_nbytes,), index).data
            await peer.close()


@pytest.mark.parametrize("backend", PROCESSES)
async def test_a_killed_holder_fails_pulls_and_connects(backend: str) -> None:
    async with Kit(backend).site("reader", nbytes=64 << 20) as reader:
        loop = asyncio.get_running_loop()
        with holder_process(backend) as holder:
            peer = await reader.transport.connect(holder.offer)
            loop.call_later(0.05, holder.signal, signal.SIGKILL)
            began_s = loop.time()
            with pytest.raises(TransferFailed):
                await pull_for_ever(peer, holder.tickets[1], reader.arena.base)
            with pytest.raises(TransferFailed):
                await peer.pull(holder.tickets[0], reader.arena.base)
            with pytest.raises(TransferFailed):
                await reader.transport.connect(holder.offer)
            assert loop.time() - began_s < 3.0
            await peer.close()
            await until_terminal(reader)


async def test_a_stopped_holder_costs_no_more_than_the_callers_deadline() -> None:
    """A stopped holder looks like a slow one. NIXL can still read it through shared memory; TCP has its own tests."""
    with holder_process("tcp") as holder:
        async with Kit("tcp").site("reader", nbytes=64 << 20) as reader:
            peer = await reader.transport.connect(holder.offer)
            holder.signal(signal.SIGSTOP)
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await peer.pull(holder.tickets[1], reader.arena.base)
            assert asyncio.get_running_loop().time() - began_s < 1.0
            holder.signal(signal.SIGCONT)
            arrived = await pull(peer, reader, holder.tickets[0])
            assert arrived["embedding"].data.nbytes == holder.tickets[0].payload_nbytes
            await peer.close()


async def test_a_pull_ends_after_its_maximum_duration() -> None:
    with holder_process("tcp") as holder:
        async with Kit("tcp").site("reader", nbytes=64 << 20, max_pull_s=0.3) as reader:
            peer = await reader.transport.connect(holder.offer)
            holder.signal(signal.SIGSTOP)
            with pytest.raises(TransferFailed, match=r"0\.3 s"):
                await peer.pull(holder.tickets[1], reader.arena.base)
            await peer.close()


# --- TCP under uvloop, the event loop of the services -----------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario",
    [
        test_every_dtype_arrives_unchanged,
        test_a_tensor_without_elements_arrives,
        test_nothing_outside_the_destination_is_touched,
        test_many_pulls_at_once_each_get_their_own_bytes,
        test_nothing_is_written_after_a_cancelled_pull_unless_it_is_quarantined,
        test_close_ends_running_pulls,
        test_a_closed_peer_refuses,
        test_pulls_from_a_closed_holder_fail_fast,
    ],
)
def test_tcp_works_under_uvloop(scenario: Callable[[Site, Site, Peer], Awaitable[None]]) -> None:
    async def run() -> None:
        kit = Kit("tcp")
        async with kit.site("holder", nbytes=48 << 20) as holder, kit.site("reader", nbytes=48 << 20) as reader:
            peer = await reader.transport.connect(holder.transport.offer())
            await scenario(holder, reader, peer)
            await peer.close()

    with asyncio.Runner(debug=True, loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


# --- TCP: unauthenticated and slow readers ---------------------------------------------------------------------------


@pytest.fixture
async def listening() -> AsyncIterator[Site]:
    async with Kit("tcp").site("holder", nbytes=32 << 20, max_pull_s=0.5) as site:
        yield site


def address(site: Site) -> tuple[str, int]:
    offer = TcpOffer.parse(site.transport.offer())
    return offer.host, offer.port


async def still_serves(holder: Site) -> None:
    async with Kit("tcp").site("reader") as reader:
        peer = await reader.transport.connect(holder.transport.offer())
        await pull(peer, reader, holder.put(b"after", [tensor_of("t", DType.U8, (1000,), 1)]))
        await peer.close()


async def test_tcp_disconnects_malformed_requests_and_keeps_serving(listening: Site) -> None:
    rng = random.Random(3)
    for length in (1, 39, 40, 41, 5000):
        stranger, writer = await asyncio.open_connection(*address(listening))
        writer.write(rng.randbytes(length))
        writer.write_eof()
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                assert await stranger.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    await still_serves(listening)


async def test_tcp_an_unauthenticated_reader_reads_only_the_probe(listening: Site) -> None:
    ticket = listening.put(b"k", [tensor_of("t", DType.U8, (1000,), 1)])
    stranger, writer = await asyncio.open_connection(*address(listening))
    asked = [
        (Read(1, NO_LEASE, 0, PROBE_NBYTES), Status.OK, PROBE_NBYTES),
        (Read(2, NO_LEASE, ticket.offset, ticket.slot_nbytes), Status.LEASE_LOST, 0),
        (Read(3, NO_LEASE, 0, 4096), Status.LEASE_LOST, 0),
        (Read(4, b"?" * 16, ticket.offset, ticket.slot_nbytes), Status.LEASE_LOST, 0),
        (Read(5, ticket.lease_id, 0, PROBE_NBYTES), Status.OUT_OF_RANGE, 0),
        (Read(6, ticket.lease_id, 2**64 - 1, 2**64 - 1), Status.OUT_OF_RANGE, 0),
        (Read(7, ticket.lease_id, ticket.offset, ticket.slot_nbytes + 1), Status.LEASE_LOST, 0),
    ]
    for read, status, nbytes in asked:
        writer.write(read.pack())
        magic, tag, said, length = REPLY.unpack(await stranger.readexactly(REPLY.size))
        assert (magic, tag, said, length) == (b"TRPA", read.tag, status, nbytes)
        await stranger.readexactly(nbytes)
    writer.close()
    await writer.wait_closed()


async def test_tcp_disconnects_a_reader_that_does_not_read(listening: Site) -> None:
    ticket = listening.put(b"k", [tensor_of("t", DType.U8, (30 << 20,), 1)])
    _, writer = await asyncio.open_connection(*address(listening), limit=1)
    writer.write(Read(1, ticket.lease_id, ticket.offset, ticket.slot_nbytes).pack())
    assert isinstance(listening.transport, TcpTransport)
    async with asyncio.timeout(60):
        while listening.transport.connections == 0:  # noqa: ASYNC110 - the holder does not tell
            await asyncio.sleep(0.01)
        while listening.transport.connections:  # noqa: ASYNC110 - the holder does not tell
            await asyncio.sleep(0.05)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    await still_serves(listening)


async def test_tcp_disconnects_too_many_pipelined_requests(listening: Site) -> None:
    ticket = listening.put(b"k", [tensor_of("t", DType.U8, (30 << 20,), 1)])
    stranger, writer = await asyncio.open_connection(*address(listening), limit=1)
    for tag in range(200):
        writer.write(Read(tag, ticket.lease_id, ticket.offset, ticket.slot_nbytes).pack())
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await stranger.read(1 << 20):
                pass
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    await still_serves(listening)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        REPLY.pack(REPLY_MAGIC, 9, Status.OK, PROBE_NBYTES) + bytes(PROBE_NBYTES),
        REPLY.pack(REPLY_MAGIC, 1, Status.OK, 1 << 62) + bytes(1000),
        REPLY.pack(REPLY_MAGIC, 1, 77, 0),
        REPLY.pack(REPLY_MAGIC, 1, Status.OK, PROBE_NBYTES) + bytes(PROBE_NBYTES),
        REPLY.pack(REPLY_MAGIC, 1, Status.OK, PROBE_NBYTES) + bytes(10),
        b"",
    ],
)
async def test_tcp_invalid_responses_of_a_holder_are_refused(reply: bytes) -> None:
    async def lie(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stream.readexactly(40)
        writer.write(reply)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(lie, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Kit("tcp").site("reader") as reader:
        base, slots_nbytes = reader.arena.base, reader.arena.nbytes - reader.arena.base
        before = bytes(reader.arena.read(base, slots_nbytes))
        metadata = TcpOffer(probe_bytes("holder", 1, 1 << 20), "127.0.0.1", port).pack()
        with pytest.raises(TransferFailed):
            await reader.transport.connect(TransportOffer("tcp", MACHINE, metadata))
        assert reader.arena.read(base, slots_nbytes) == before
    server.close()
    await server.wait_closed()


async def test_tcp_reconnects_after_the_holder_closes_an_idle_connection() -> None:
    async with Kit("tcp").site("holder", max_pull_s=0.1, idle_s=0.1) as holder, Kit("tcp").site("reader") as reader:
        peer = await reader.transport.connect(holder.transport.offer())
        ticket = holder.put(b"k", [tensor_of("t", DType.U8, (1000,), 1)])
        assert isinstance(holder.transport, TcpTransport)
        async with asyncio.timeout(60):
            while holder.transport.connections:  # noqa: ASYNC110 - the holder does not tell
                await asyncio.sleep(0.02)
        await pull(peer, reader, ticket)
        await peer.close()


# --- NIXL only -------------------------------------------------------------------------------------------------------


def run_nixl_child(code: str, **environment: str) -> str:
    """Runs code in a separate process, since UCX reads its environment only once. Returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},  # noqa: TID251 - a child process gets all of it
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.skipif(not NIXL_IS_HERE, reason="NIXL is not installed: NOT tested")
def test_nixl_uses_no_cpu_while_idle_and_exits_cleanly() -> None:
    printed = run_nixl_child(
        """
        import asyncio, time
        from tests.contract.transport_kit import Kit

        async def main():
            async with Kit("nixl").site("a", nbytes=1 << 20), Kit("nixl").site("b", nbytes=1 << 20):
                await asyncio.sleep(0.3)
                cpu_s, wall_s = time.process_time(), time.perf_counter()
                await asyncio.sleep(2)
                print((time.process_time() - cpu_s) / (time.perf_counter() - wall_s))

        asyncio.run(main())
        """
    )
    assert float(printed) < 2 * 0.02  # two agents, under 2 % of a core each


@pytest.mark.skipif(not NIXL_IS_HERE, reason="NIXL is not installed: NOT tested")
def test_nixl_refuses_reads_that_need_the_holders_cpu() -> None:
    """UCX over TCP would allow them, and abort a holder whose reader dies during one."""
    printed = run_nixl_child(
        """
        import asyncio
        from tests.contract.transport_kit import Kit, holder_process
        from triptych.errors import TransferFailed

        async def main():
            with holder_process("nixl") as holder:
                async with Kit("nixl").site("reader", nbytes=64 << 20) as reader:
                    for _ in range(3):
                        try:
                            await reader.transport.connect(holder.offer)
                        except TransferFailed as error:
                            print("refused:", error.message)

        asyncio.run(main())
        """,
        UCX_TLS="tcp",
    )
    assert printed.count("refused: NIXL could not read 64 bytes") == 3


@pytest.mark.skipif(not NIXL_IS_HERE, reason="NIXL is not installed: NOT tested")
def test_nixl_over_tcp_quarantines_memory_that_a_stopped_holder_may_still_write() -> None:
    printed = run_nixl_child(
        """
        import asyncio, signal
        from tests.contract.transport_kit import Kit, holder_process
        from triptych.errors import TransferFailed
        from triptych.transport import slot

        async def main():
            with holder_process("nixl") as holder:
                async with Kit("nixl").site("reader", nbytes=64 << 20, max_pull_s=0.3) as reader:
                    peer = await reader.transport.connect(holder.offer)
                    at, ticket = reader.arena.base, holder.tickets[1]
                    holder.signal(signal.SIGSTOP)
                    try:
                        await peer.pull(ticket, at)
                    except TransferFailed as error:
                        print(error.message)
                    print(reader.transport.quarantined() == ((at, ticket.slot_nbytes),))
                    holder.signal(signal.SIGCONT)
                    async with asyncio.timeout(60):
                        while reader.transport.quarantined():
                            await asyncio.sleep(0.01)
                    await peer.pull(holder.tickets[0], at)
                    slot.verify(reader.arena, at, holder.tickets[0])
                    print("terminal")
                    await peer.close()

        asyncio.run(main())
        """,
        UCX_TLS="tcp",
        UCX_PROTO_EMULATION_ENABLE="y",
    )
    assert printed.splitlines() == [f"{(48 << 20) + 16} bytes did not arrive within 0.3 s", "True", "terminal"]


@pytest.mark.skipif(not NIXL_IS_HERE, reason="NIXL is not installed: NOT tested")
def test_nixl_over_tcp_a_killed_holder_fails_the_running_pull() -> None:
    printed = run_nixl_child(
        """
        import asyncio, signal
        from tests.contract.transport_kit import Kit, holder_process
        from triptych.errors import TransferFailed

        async def main():
            with holder_process("nixl") as holder:
                async with Kit("nixl").site("reader", nbytes=64 << 20) as reader:
                    peer = await reader.transport.connect(holder.offer)
                    loop = asyncio.get_running_loop()
                    loop.call_later(0.05, holder.signal, signal.SIGKILL)
                    began_s = loop.time()
                    try:
                        while True:
                            await peer.pull(holder.tickets[1], reader.arena.base)
                    except TransferFailed:
                        print(loop.time() - began_s < 2)
                    await peer.close()

        asyncio.run(main())
        """,
        UCX_TLS="tcp",
        UCX_PROTO_EMULATION_ENABLE="y",
    )
    assert printed.splitlines()[0] == "True"  # UCX prints a warning about the lost request on stdout
