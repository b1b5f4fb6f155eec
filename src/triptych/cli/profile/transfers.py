"""Measures pulls within this host: from one arena of this process to another, over each transport between processes."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median

from triptych.domain.embedding import DType, Tensor, TensorSpec, Ticket
from triptych.domain.profile import TransferRow
from triptych.errors import TriptychError
from triptych.policy.transport import between_processes
from triptych.ports import Arena
from triptych.runtime.host import machine_name
from triptych.transport.arena import HostArena
from triptych.transport.options import TransferOptions
from triptych.transport.slot import seal, verify
from triptych.transport.start import start_transports
from triptych.transport.transport_set import TransportSet

_MAX_PULL_S = 60.0
_CONNECT_S = 10.0
_REPEATS = 9
_MARGIN_NBYTES = 1 << 16
"""Room in an arena for its header and the words around a payload."""


def measure_transfers(sizes: Sequence[int]) -> list[TransferRow]:
    """The median time of a pull and its check, by backend and size. Backends that do not work here are left out."""
    return asyncio.run(_measure(sizes))


async def _measure(sizes: Sequence[int]) -> list[TransferRow]:
    rows: list[TransferRow] = []
    for backend in between_processes():
        arenas = [
            HostArena(max(sizes) + _MARGIN_NBYTES, instance_id=f"profile-{side}", epoch=1)
            for side in ("holder", "reader")
        ]
        try:
            async with AsyncExitStack() as stack:
                holder, reader = [await _started(stack, backend, arena) for arena in arenas]
                peer = await reader.connect(holder.offers())
                stack.push_async_callback(peer.close)
                for nbytes in sizes:
                    ticket = _sealed(arenas[0], nbytes)
                    times_s = []
                    for _ in range(_REPEATS):
                        began_s = time.perf_counter()
                        await peer.pull(ticket, arenas[1].base)
                        verify(arenas[1], arenas[1].base, ticket)
                        times_s.append(time.perf_counter() - began_s)
                    rows.append(TransferRow(backend, nbytes, median(times_s)))
        except (TriptychError, ValueError, RuntimeError):
            rows = [row for row in rows if row.backend != backend]
    return rows


async def _started(stack: AsyncExitStack, backend: str, arena: Arena) -> TransportSet:
    started = await start_transports(
        TransferOptions((backend,), max_pull_s=_MAX_PULL_S),
        arena,
        machine=machine_name(),
        host="127.0.0.1",
        check=lambda _lease_id, _offset, _nbytes: True,
        connect_timeout_s=_CONNECT_S,
    )
    stack.push_async_callback(started.close)
    return started


def _sealed(arena: HostArena, nbytes: int) -> Ticket:
    """A slot of one tensor at the start of the arena."""
    spec = TensorSpec("embeds", DType.U8, (nbytes,))
    checksum = seal(arena, arena.base, 1, [Tensor(spec, memoryview(bytes(range(256)) * (nbytes // 256)))])
    return Ticket(
        key=bytes(32),
        holder=arena.instance_id,
        epoch=arena.epoch,
        offset=arena.base,
        payload_nbytes=nbytes,
        generation=1,
        checksum=checksum,
        tensors=(spec,),
        tokens=1,
        lease_id=b"triptych-profile",
        lease_s=_MAX_PULL_S,
    )
