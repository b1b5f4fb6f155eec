"""Holders and readers for the transport suite, in this process and in others."""

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.domain.embedding import DType, Tensor, TensorSpec, Ticket
from triptych.domain.instance import TransportOffer
from triptych.machine.arena.arena import ArenaMachine
from triptych.ports import Arena, Transport
from triptych.runtime.tls import TlsIdentity
from triptych.transport import slot
from triptych.transport.arena import HostArena
from triptych.transport.memory import MemoryNetwork, MemoryTransport
from triptych.transport.start import STARTERS, Surroundings
from triptych.transport.tcp import TcpTransport
from triptych.transport.tcp_holder import TcpLimits

NIXL_IS_HERE = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))
MACHINE = "test-host"
MAX_PULL_S = 20.0


def tensor_of(name: str, dtype: DType, shape: tuple[int, ...], seed: int) -> Tensor:
    spec = TensorSpec(name, dtype, shape)
    return Tensor(spec, memoryview(random.Random(seed).randbytes(spec.nbytes)))


@dataclass
class Site:
    """One instance: arena, leases, and transport."""

    arena: Arena
    machine: ArenaMachine
    transport: Transport
    leases: int = 0

    def put(self, key: bytes, tensors: Sequence[Tensor]) -> Ticket:
        """Creates an embedding and grants one lease on it."""
        specs = tuple(tensor.spec for tensor in tensors)
        placed = self.machine.reserve(key, specs, 3, 0.0)
        checksum = slot.seal(self.arena, placed.offset, placed.generation, tensors)
        self.machine.commit(key, placed.generation, checksum)
        return self.grant(key)

    def grant(self, key: bytes) -> Ticket:
        self.leases += 1
        return self.machine.grant(key, self.leases.to_bytes(16, "big"), 60.0, 0.0)

    def release(self, ticket: Ticket) -> None:
        self.machine.release((ticket.lease_id,))


class Kit:
    """Builds sites of one backend.

    Memory sites are connected through ``network``. ``device``: the torch device of their arenas; None for host memory,
    the default of the services.
    """

    def __init__(self, backend: str, *, tls: TlsIdentity | None = None, device: str | None = None) -> None:
        self.backend = backend
        self.device = device
        self.tls = tls
        self.network = MemoryNetwork()

    def arena(self, nbytes: int, instance_id: str, epoch: int) -> Arena:
        if self.device is None:
            return HostArena(nbytes, instance_id=instance_id, epoch=epoch)
        from triptych.engine.device_arena import DeviceArena

        return DeviceArena(nbytes, instance_id=instance_id, epoch=epoch, device=self.device)

    @contextlib.asynccontextmanager
    async def site(
        self,
        instance_id: str,
        *,
        nbytes: int = 1 << 20,
        epoch: int = 1,
        max_pull_s: float = MAX_PULL_S,
        idle_s: float = 600.0,
        max_connections: int = 1024,
    ) -> AsyncIterator[Site]:
        arena = self.arena(nbytes, instance_id, epoch)
        machine = ArenaMachine(
            start=arena.base, end=arena.nbytes, holder=instance_id, epoch=epoch, max_pull_s=max_pull_s
        )

        def check(lease_id: bytes, offset: int, nbytes: int) -> bool:
            return machine.may_read(lease_id, offset, nbytes, 0.0)

        transport: Transport
        if self.backend == "memory":
            transport = MemoryTransport(self.network, arena, host=MACHINE, check=check)
        elif self.backend == "tcp":
            transport = await TcpTransport.listen(
                arena,
                machine=MACHINE,
                check=check,
                limits=TcpLimits(max_pull_s=max_pull_s, idle_s=idle_s, max_connections=max_connections),
                tls=self.tls,
            )
        else:
            near = Surroundings(arena, MACHINE, "", "", check, max_pull_s, self.tls, lambda *_: None, lambda _: None)
            transport = await STARTERS[self.backend](near)
        try:
            yield Site(arena, machine, transport)
        finally:
            await transport.close()
            machine.validate()


@dataclass(frozen=True)
class Holder:
    """A process that holds embeddings; ``tickets`` are of growing size."""

    process: subprocess.Popen[str]
    offer: TransportOffer
    tickets: tuple[Ticket, ...]

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


SIZES = (64 << 10, 48 << 20)
"""Payload bytes of a holder process's embeddings."""


@contextlib.contextmanager
def holder_process(backend: str, *, name: str = "holder", **environment: str) -> Iterator[Holder]:
    """A holder in a separate process, killed at the end. Blocks while it starts."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), backend, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},  # noqa: TID251 - a child process gets all of it
    )
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        tickets = tuple(
            Ticket(
                key=bytes([index]),
                holder=name,
                epoch=1,
                offset=offset,
                payload_nbytes=SIZES[index],
                generation=generation,
                checksum=checksum,
                tensors=(TensorSpec("embedding", DType.U8, (SIZES[index],)),),
                tokens=3,
                lease_id=bytes.fromhex(lease_id),
                lease_s=60.0,
            )
            for index, (offset, generation, checksum, lease_id) in enumerate(said["tickets"])
        )
        yield Holder(process, TransportOffer(backend, MACHINE, bytes.fromhex(said["metadata"])), tickets)
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


async def serve(backend: str, name: str) -> None:
    """The holder process: prints its offer and serves until its input ends."""
    async with Kit(backend).site(name, nbytes=64 << 20) as site:
        tickets = [
            site.put(bytes([index]), [tensor_of("embedding", DType.U8, (nbytes,), seed=index)])
            for index, nbytes in enumerate(SIZES)
        ]
        said = {
            "metadata": site.transport.offer().metadata.hex(),
            "tickets": [[t.offset, t.generation, t.checksum, t.lease_id.hex()] for t in tickets],
        }
        print(json.dumps(said), flush=True)  # noqa: T201 - this is how the parent hears of it
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
