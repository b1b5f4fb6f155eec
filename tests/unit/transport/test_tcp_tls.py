"""TCP under TLS: encrypted pulls, refused without the right certificate."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from tests.contract.transport_kit import Kit, Site, tensor_of
from triptych.domain.embedding import DType
from triptych.errors import TransferFailed
from triptych.runtime.tls import TlsIdentity
from triptych.transport import slot, tcp_holder
from triptych.transport.arena import PROBE_NBYTES
from triptych.transport.tcp_wire import NO_LEASE, Read, TcpOffer

pytestmark = pytest.mark.slow


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for loopback, and its key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-days", "1", "-newkey", "ec", "-pkeyopt"),
            *("ec_paramgen_curve:prime256v1", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return cert, key


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> TlsIdentity:
    own = certificate(tmp_path_factory.mktemp("member"), "member")
    return TlsIdentity.load(*own, own[0])


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TlsIdentity:
    own = certificate(tmp_path_factory.mktemp("stranger"), "stranger")
    return TlsIdentity.load(*own, own[0])


async def pull(holder: Site, reader: Site, nbytes: int) -> None:
    peer = await reader.transport.connect(holder.transport.offer())
    try:
        sent = tensor_of("t", DType.U8, (nbytes,), nbytes)
        ticket = holder.put(nbytes.to_bytes(8, "big"), [sent])
        await peer.pull(ticket, reader.arena.base)
        slot.verify(reader.arena, reader.arena.base, ticket)
        assert slot.tensors(reader.arena, reader.arena.base, ticket)["t"].data == sent.data
    finally:
        await peer.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_embeddings_arrive_under_tls(member: TlsIdentity, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def run() -> None:
        kit = Kit("tcp", tls=member)
        async with kit.site("holder", nbytes=24 << 20) as holder, kit.site("reader", nbytes=24 << 20) as reader:
            for nbytes in (1, 1000, 64 << 10, 8 << 20):
                await pull(holder, reader, nbytes)

    with asyncio.Runner(debug=True, loop_factory=new_loop) as runner:
        runner.run(run())


async def test_a_cancelled_pull_under_tls_writes_nothing_more(member: TlsIdentity) -> None:
    kit = Kit("tcp", tls=member)
    async with kit.site("holder", nbytes=24 << 20) as holder, kit.site("reader", nbytes=24 << 20) as reader:
        peer = await reader.transport.connect(holder.transport.offer())
        ticket = holder.put(b"k", [tensor_of("t", DType.U8, (16 << 20,), 1)])
        at, end = reader.arena.base, reader.arena.base + ticket.slot_nbytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.003):
                await peer.pull(ticket, at)
        reader.arena.write(at, bytes(end - at))
        await asyncio.sleep(0.05)
        assert reader.arena.read(at, end - at) == bytes(end - at)
        await peer.pull(ticket, at)
        slot.verify(reader.arena, at, ticket)
        await peer.close()


async def test_an_untrusted_certificate_and_a_missing_holder_have_different_errors(
    member: TlsIdentity, stranger: TlsIdentity
) -> None:
    async with Kit("tcp", tls=member).site("holder") as holder, Kit("tcp", tls=stranger).site("reader") as reader:
        with pytest.raises(TransferFailed, match="TLS handshake with the holder failed: CERTIFICATE_VERIFY_FAILED"):
            await pull(holder, reader, 1000)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_handshake_that_ends_after_the_holder_has_closed_reads_nothing(
    member: TlsIdentity, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    def read_probe(plain: socket.socket) -> bytes:
        try:
            with member.current.caller.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
                connection.sendall(Read(1, NO_LEASE, 0, PROBE_NBYTES).pack())
                return connection.recv(1)
        except (ssl.SSLError, ConnectionError):
            return b""

    async def run() -> None:
        async with Kit("tcp", tls=member).site("holder") as holder:
            port = TcpOffer.parse(holder.transport.offer()).port
            with socket.create_connection(("127.0.0.1", port), 10) as plain:
                await asyncio.sleep(0.1)  # until it is accepted
                async with asyncio.TaskGroup() as group:
                    group.create_task(holder.transport.close())
                    await asyncio.sleep(0.1)
                    assert await asyncio.to_thread(read_probe, plain) == b""

    with asyncio.Runner(debug=True, loop_factory=new_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_connections_that_never_finish_their_handshake_count_in_the_limit(
    member: TlsIdentity,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    most, opened = 4, 40
    monkeypatch.setattr(tcp_holder, "TLS_HANDSHAKE_S", 60.0)  # longer than this may take

    async def hung_up(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""

    async def run() -> None:
        kit = Kit("tcp", tls=member)
        async with (
            kit.site("holder", max_connections=most) as holder,
            kit.site("reader") as reader,
            asyncio.timeout(60),
        ):
            port = TcpOffer.parse(holder.transport.offer()).port
            streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(opened)]
            async with asyncio.TaskGroup() as group:
                ends = [group.create_task(hung_up(stream)) for stream, _ in streams]
                while sum(map(asyncio.Task.done, ends)) < opened - most:  # noqa: ASYNC110 - any of them may be refused
                    await asyncio.sleep(0.01)
                with pytest.raises(TransferFailed):
                    await pull(holder, reader, 1000)
                assert sum(map(asyncio.Task.done, ends)) == opened - most
                assert "a reader was turned away: 4 are connected, which is the limit" in caplog.text
                for _, writer in streams:
                    writer.close()
            while True:
                with contextlib.suppress(TransferFailed):  # until the holder has seen that they left
                    await pull(holder, reader, 1000)
                    break
                await asyncio.sleep(0.01)

    with asyncio.Runner(debug=True, loop_factory=new_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("theirs", ["stranger", "plain"])
async def test_without_a_trusted_certificate_no_pull_succeeds(
    member: TlsIdentity, stranger: TlsIdentity, theirs: str
) -> None:
    outside = stranger if theirs == "stranger" else None
    async with (
        Kit("tcp", tls=member).site("in", max_pull_s=2) as inside,
        Kit("tcp", tls=member).site("also-in") as third,
        Kit("tcp", tls=outside).site("out", max_pull_s=2) as other,
    ):
        for holder, reader in ((inside, other), (other, inside)):
            with pytest.raises(TransferFailed):
                await pull(holder, reader, 1000)
        await pull(inside, third, 1000)
