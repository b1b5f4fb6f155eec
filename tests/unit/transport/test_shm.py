"""Specifics of shared memory: access to an arena, its permissions, and cleanup."""

import asyncio
import contextlib
import ctypes
import errno
import gc
import mmap
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.transport_kit import Kit, Site, tensor_of
from triptych.domain.embedding import DType
from triptych.errors import TransferFailed
from triptych.runtime import listening
from triptych.transport.arena import HostArena
from triptych.transport.shm import ShmTransport
from triptych.transport.shm_holder import ShmListener, ShmOffer


@pytest.fixture
async def holder() -> AsyncIterator[Site]:
    async with Kit("shm").site("holder") as site:
        yield site


@pytest.fixture
async def reader() -> AsyncIterator[Site]:
    async with Kit("shm").site("reader") as site:
        yield site


def offered(site: Site) -> ShmOffer:
    return ShmOffer.parse(site.transport.offer())


async def ask(site: Site, said: bytes) -> tuple[bytes, list[int]]:
    """The response to a connection that sends ``said``."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.setblocking(False)
        await loop.sock_connect(stranger, offered(site).address)
        await loop.sock_sendall(stranger, said)
        async with asyncio.timeout(60):
            while True:
                try:
                    data, fds, _, _ = socket.recv_fds(stranger, 100, 4)
                except BlockingIOError:
                    await asyncio.sleep(0.001)
                else:
                    return data, fds


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_only_the_nonce_opens_an_arena(holder: Site) -> None:
    for said in (b"?" * 16, offered(holder).nonce + b"x", offered(holder).nonce[:15], b"\0"):
        with contextlib.suppress(ConnectionError):
            assert await ask(holder, said) == (b"", [])
    data, fds = await ask(holder, offered(holder).nonce)
    assert (data, len(fds)) == (holder.arena.probe, 1)
    os.close(fds[0])


async def test_a_readers_mapping_can_be_read_but_neither_written_nor_resized(holder: Site) -> None:
    _, [fd] = await ask(holder, offered(holder).nonce)
    try:
        with mmap.mmap(fd, holder.arena.nbytes, prot=mmap.PROT_READ) as mapped:
            assert mapped[:64] == holder.arena.probe
        with pytest.raises(PermissionError):
            mmap.mmap(fd, holder.arena.nbytes)
        for nbytes in (0, 2 * holder.arena.nbytes):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
    finally:
        os.close(fd)


async def test_a_process_of_another_user_is_disconnected(holder: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with contextlib.suppress(ConnectionError):
        assert await ask(holder, offered(holder).nonce) == (b"", [])


async def test_unsealed_memory_is_not_mapped(reader: Site) -> None:
    class Unsealed(HostArena):
        @property
        def fd(self) -> int:
            return loose

    arena = Unsealed(1 << 20, instance_id="loose", epoch=1)
    loose = os.memfd_create("loose", os.MFD_CLOEXEC)
    os.ftruncate(loose, arena.nbytes)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(os.close, loose)
        transport = await ShmTransport.listen(arena, machine="m", max_pull_s=5.0)
        stack.push_async_callback(transport.close)
        with pytest.raises(TransferFailed, match="sealed"):
            await reader.transport.connect(transport.offer())


async def test_without_sealed_files_the_backend_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    arena = HostArena(1 << 20, instance_id="anonymous", epoch=1)
    assert arena.fd is None
    with pytest.raises(RuntimeError, match="sealed memory files"):
        await ShmTransport.listen(arena, machine="m", max_pull_s=5.0)


async def test_an_offer_with_another_nonce_or_name_cannot_connect(holder: Site, reader: Site) -> None:
    theirs, offer = offered(holder), holder.transport.offer()
    for wrong in (replace(theirs, nonce=b"n" * 16), replace(theirs, name=b"n" * 16), replace(theirs, probe=_other())):
        with pytest.raises(TransferFailed):
            await reader.transport.connect(replace(offer, metadata=wrong.pack()))


def _other() -> bytes:
    return HostArena(1 << 20, instance_id="other", epoch=7).probe


async def test_descriptors_connections_and_mappings_are_gone_after_a_hundred_links(holder: Site, reader: Site) -> None:
    ticket = holder.put(b"k", [tensor_of("t", DType.U8, (1000,), 1)])
    await (await reader.transport.connect(holder.transport.offer())).close()
    gc.collect()  # garbage of other tests must not be collected while this test counts
    before = descriptors(), _mappings()
    for _ in range(100):
        peer = await reader.transport.connect(holder.transport.offer())
        await peer.pull(ticket, reader.arena.base)
        await peer.close()
    assert isinstance(holder.transport, ShmTransport)
    async with asyncio.timeout(60):
        while holder.transport.connections:  # noqa: ASYNC110 - the holder does not tell
            await asyncio.sleep(0.001)
    assert descriptors() <= before[0]
    assert _mappings() == before[1]


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("triptych-arena")


async def test_a_reader_that_disconnects_during_the_handshake_leaves_nothing(holder: Site, reader: Site) -> None:
    before = descriptors()
    for delay_s in (0.0, 0.0002, 0.0005, 0.001, 0.002):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await (await reader.transport.connect(holder.transport.offer())).close()
    async with asyncio.timeout(60):
        while descriptors() > before + 1:  # noqa: ASYNC110 - one may be the thread pool's
            await asyncio.sleep(0.01)


async def test_a_connection_without_a_request_is_not_a_reader(holder: Site) -> None:
    assert isinstance(holder.transport, ShmTransport)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(offered(holder).address)
        async with asyncio.timeout(60):
            while holder.transport.connections == 0:  # noqa: ASYNC110 - the holder does not tell
                await asyncio.sleep(0.001)
    async with asyncio.timeout(60):
        while holder.transport.connections:  # noqa: ASYNC110 - the holder does not tell
            await asyncio.sleep(0.001)


async def test_a_lack_of_files_pauses_accepting(
    holder: Site, reader: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The socket stays readable: without a pause the event loop would do nothing else."""
    tries = 0

    def accept(_: socket.socket) -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(listening, "_AGAIN_S", 0.5)
    with monkeypatch.context() as patch, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        patch.setattr(socket.socket, "accept", accept)
        stranger.connect(offered(holder).address)
        async with asyncio.timeout(60):
            while not tries:  # noqa: ASYNC110 - the holder does not tell
                await asyncio.sleep(0)
        for _ in range(10):  # turns of the loop, which sees that somebody connects
            await asyncio.sleep(0)
        assert tries == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"readers cannot connect: [Errno {errno.EMFILE}] {os.strerror(errno.EMFILE)}"
    ]
    await (await reader.transport.connect(holder.transport.offer())).close()


async def test_closing_a_listener_frees_its_name() -> None:
    arena = HostArena(1 << 20, instance_id="h", epoch=1)
    listener = ShmListener(arena)
    listener.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as again:
        again.bind(listener.offer.address)


def test_memory_is_freed_with_its_last_owner() -> None:
    gc.collect()
    before = _mappings(), descriptors()
    arena = HostArena(1 << 20, instance_id="h", epoch=1)
    assert ctypes.string_at(arena.address, 8) == b"TRIPTYCH"
    del arena
    assert (_mappings(), descriptors()) == before
