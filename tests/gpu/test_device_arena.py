"""Arenas in a GPU's memory: the same interface, registered with NIXL as device memory. Skipped without a GPU."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from tests.contract.transport_kit import NIXL_IS_HERE, Kit, Site, tensor_of
from triptych.domain.embedding import DType
from triptych.engine.device_arena import DeviceArena
from triptych.errors import LeaseLost, TransferFailed
from triptych.ports import Peer
from triptych.transport import slot
from triptych.transport.nixl_agent import has_rdma

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device: arenas on a GPU were NOT tested"
)
needs_nixl = pytest.mark.skipif(not NIXL_IS_HERE, reason="NIXL is not installed: its reads of a GPU were NOT tested")
GPU = "cuda:0"
WAYS = [(GPU, GPU), (GPU, None), (None, GPU)]
"""Where holder and reader have their arenas; None is the host."""


async def connected(holder: Site, reader: Site) -> Peer:
    """Skips where UCX reads no memory of a GPU: neither GPUDirect RDMA nor ``cuda_ipc``. Instances take another transport there."""
    try:
        return await reader.transport.connect(holder.transport.offer())
    except TransferFailed as error:
        if "NIXL" in str(error) and not has_rdma():
            pytest.skip(f"UCX READS NO MEMORY OF A GPU HERE, so NIXL's reads of it are not tested ({error})")
        raise


async def pull(holder: Site, reader: Site, nbytes: int) -> None:
    peer = await connected(holder, reader)
    try:
        sent = tensor_of("t", DType.U8, (nbytes,), nbytes)
        ticket = holder.put(nbytes.to_bytes(8, "big"), [sent])
        await peer.pull(ticket, reader.arena.base)
        slot.verify(reader.arena, reader.arena.base, ticket)
        assert slot.tensors(reader.arena, reader.arena.base, ticket)["t"].data == sent.data
    finally:
        await peer.close()


@pytest.mark.parametrize(
    "backend", ["memory", "tcp", pytest.param("nixl", marks=needs_nixl)], ids=["memory", "tcp", "nixl"]
)
@pytest.mark.parametrize(("there", "here"), WAYS)
async def test_embeddings_are_pulled_from_and_into_gpu_memory(
    backend: str, there: str | None, here: str | None
) -> None:
    holding, reading = Kit(backend, device=there), Kit(backend, device=here)
    reading.network = holding.network
    async with holding.site("holder", nbytes=48 << 20) as holder, reading.site("reader", nbytes=48 << 20) as reader:
        for nbytes in (0, 1, 1000, 64 << 10, 1 << 20, 32 << 20):
            await pull(holder, reader, nbytes)


@pytest.fixture
async def alone() -> AsyncIterator[Site]:
    async with Kit("memory", device=GPU).site("alone", nbytes=16 << 20) as site:
        yield site


async def test_every_dtype_is_read_and_damage_and_reuse_are_detected(alone: Site) -> None:
    sent = [tensor_of(dtype.value, dtype, (3, 5, 7), seed) for seed, dtype in enumerate(DType)]
    ticket = alone.put(b"k", sent)
    slot.verify(alone.arena, ticket.offset, ticket)
    found = slot.tensors(alone.arena, ticket.offset, ticket)
    assert {name: bytes(tensor.data) for name, tensor in found.items()} == {t.spec.name: bytes(t.data) for t in sent}
    at = ticket.offset + 100
    byte = alone.arena.read(at, 1)[0]
    alone.arena.write(at, bytes([byte ^ 1]))
    with pytest.raises(TransferFailed, match="checksum"):
        slot.verify(alone.arena, ticket.offset, ticket)
    alone.arena.write(at, bytes([byte]))
    alone.release(ticket)
    slot.seal(alone.arena, ticket.offset, ticket.generation + 1, sent)
    with pytest.raises(LeaseLost):
        slot.verify(alone.arena, ticket.offset, ticket)


async def test_its_region_names_the_device(alone: Site) -> None:
    assert isinstance(alone.arena, DeviceArena)
    assert alone.arena.region.device == 0
    assert alone.arena.window(alone.arena.base, 64) is None


@needs_nixl
async def test_many_concurrent_reads_into_gpu_memory() -> None:
    kit = Kit("nixl", device=GPU)
    async with kit.site("holder", nbytes=48 << 20) as holder, kit.site("reader", nbytes=48 << 20) as reader:
        peer = await connected(holder, reader)
        sent = [tensor_of("t", DType.U8, ((index % 8 + 1) * 20_011,), index) for index in range(64)]
        tickets = [holder.put(bytes([index]), [tensor]) for index, tensor in enumerate(sent)]
        places = [reader.arena.base + index * (256 << 10) for index in range(64)]
        await asyncio.gather(*(peer.pull(t, at) for t, at in zip(tickets, places, strict=True)))
        for tensor, ticket, at in zip(sent, tickets, places, strict=True):
            slot.verify(reader.arena, at, ticket)
            assert slot.tensors(reader.arena, at, ticket)["t"].data == tensor.data
        await peer.close()
