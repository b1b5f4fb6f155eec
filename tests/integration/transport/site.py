"""An instance in a separate process, holder and reader in one, that executes commands given as JSON lines.

{"id": 1, "do": "pull", ...} on its input; {"id": 1, "done": ...} or {"id": 1, "error": [class, message]} as the
response. Commands run concurrently. It ends with its input.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import psutil

from triptych.domain.embedding import DType, Tensor, TensorSpec, Ticket
from triptych.domain.instance import TransportOffer
from triptych.errors import TriptychError
from triptych.machine.arena.arena import ArenaMachine
from triptych.ports import Peer
from triptych.transport import slot
from triptych.transport.arena import HostArena
from triptych.transport.options import TransferOptions
from triptych.transport.start import start_transports
from triptych.transport.transport_set import TransportSet

LEASE_S = 600.0
_PR_SET_PDEATHSIG = 1


def payload(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def digest(data: bytes | memoryview) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def ticket_to_json(ticket: Ticket) -> dict[str, Any]:
    return {
        "key": ticket.key.hex(),
        "holder": ticket.holder,
        "epoch": ticket.epoch,
        "offset": ticket.offset,
        "generation": ticket.generation,
        "checksum": ticket.checksum,
        "nbytes": ticket.payload_nbytes,
        "lease_id": ticket.lease_id.hex(),
    }


def ticket_from_json(said: dict[str, Any]) -> Ticket:
    return Ticket(
        key=bytes.fromhex(said["key"]),
        holder=said["holder"],
        epoch=said["epoch"],
        offset=said["offset"],
        payload_nbytes=said["nbytes"],
        generation=said["generation"],
        checksum=said["checksum"],
        tensors=(TensorSpec("embedding", DType.U8, (said["nbytes"],)),),
        tokens=3,
        lease_id=bytes.fromhex(said["lease_id"]),
        lease_s=LEASE_S,
    )


class Site:
    """The state of the process. Each public method is a command."""

    def __init__(self, arena: HostArena, max_pull_s: float) -> None:
        self.arena = arena
        self.memory = ArenaMachine(
            start=arena.base,
            end=arena.nbytes,
            holder=arena.instance_id,
            epoch=arena.epoch,
            max_pull_s=max_pull_s,
        )
        self.transports: TransportSet
        self._peers: dict[int, Peer] = {}
        self._numbers = 0
        self.resets = 0

    def check(self, lease_id: bytes, offset: int, nbytes: int) -> bool:
        return self.memory.may_read(lease_id, offset, nbytes, self._now_s())

    def was_reset(self, backend: str, cause: str) -> None:
        del backend, cause
        self.resets += 1

    # --- as a holder

    async def offers(self) -> list[list[str]]:
        return [[offer.backend, offer.host, offer.metadata.hex()] for offer in self.transports.offers()]

    async def put(self, key: str, seed: int, nbytes: int) -> dict[str, Any]:
        """Creates an embedding and grants a lease on it."""
        data = payload(seed, nbytes)
        tensor = Tensor(TensorSpec("embedding", DType.U8, (nbytes,)), memoryview(data))
        placed = self.memory.reserve(bytes.fromhex(key), (tensor.spec,), 3, self._now_s())
        checksum = slot.seal(self.arena, placed.offset, placed.generation, [tensor])
        self.memory.commit(placed.key, placed.generation, checksum)
        granted = await self.grant(key)
        return {"ticket": granted, "digest": digest(data)}

    async def grant(self, key: str, lease_s: float = LEASE_S) -> dict[str, Any]:
        return ticket_to_json(self.memory.grant(bytes.fromhex(key), os.urandom(16), lease_s, self._now_s()))

    async def release(self, lease_ids: list[str]) -> None:
        self.memory.release(tuple(map(bytes.fromhex, lease_ids)))
        self.memory.validate()

    # --- as a reader

    async def connect(self, offers: list[list[str]]) -> int:
        said = [TransportOffer(backend, host, bytes.fromhex(metadata)) for backend, host, metadata in offers]
        self._numbers += 1
        number = self._numbers
        self._peers[number] = await self.transports.connect(said)
        return number

    async def backend(self, peer: int) -> str:
        return self._peers[peer].backend

    async def disconnect(self, peer: int) -> None:
        await self._peers.pop(peer).close()

    async def pull(self, peer: int, ticket: dict[str, Any], at: int, *, patience_s: float | None = None) -> str:
        """Pulls to ``at``, verifies, and returns the bytes. Cancels the pull after ``patience_s``."""
        wanted = ticket_from_json(ticket)
        async with asyncio.timeout(patience_s):
            await self._peers[peer].pull(wanted, at)
        slot.verify(self.arena, at, wanted)
        return digest(slot.tensors(self.arena, at, wanted)["embedding"].data)

    async def fill(self, at: int, nbytes: int, value: int) -> None:
        self.arena.memory[at : at + nbytes] = bytes([value]) * nbytes

    async def is_filled(self, at: int, nbytes: int, value: int) -> bool:
        return self.arena.memory[at : at + nbytes] == bytes([value]) * nbytes

    async def quarantined(self) -> list[list[int]]:
        return [list(part) for part in self.transports.quarantined()]

    # --- as a process

    async def stats(self) -> dict[str, int]:
        process = psutil.Process()
        return {
            "fds": process.num_fds(),
            "rss": process.memory_info().rss,
            "threads": process.num_threads(),
            "resets": self.resets,
            "leases": self.memory.leases,
            "leased_bytes": self.memory.leased_bytes,
            "base": self.arena.base,
        }

    async def descriptors(self) -> dict[str, int]:
        """Open descriptors: sockets by kind and state, files by name."""
        return dict(Counter(_targets()))

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _targets() -> Iterator[str]:
    sockets = {
        connection.fd: f"{connection.family.name} {connection.type.name} {connection.status}"
        for connection in psutil.Process().net_connections("all")
    }
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the directory itself
            target = str(Path(entry.path).readlink())
            yield sockets.get(int(entry.name), re.sub(r"\d+", "N", target))


async def serve(say: Any, said: dict[str, Any]) -> None:
    arena = HostArena(said["nbytes"], instance_id=said["instance_id"], epoch=said["epoch"])
    site = Site(arena, said["max_pull_s"])
    site.transports = await start_transports(
        TransferOptions(tuple(said["backends"]), max_pull_s=said["max_pull_s"]),
        arena,
        machine=said["machine"],
        host=said["host"],
        check=site.check,
        connect_timeout_s=said["connect_timeout_s"],
        preferred=said["backends"][0],  # between hosts without RDMA, NIXL is tried only where it is preferred
        on_reset=site.was_reset,
    )

    async def run(number: int, do: str, arguments: dict[str, Any]) -> None:
        try:
            answer = {"id": number, "done": await getattr(site, do)(**arguments)}
        except TriptychError as error:
            answer = {"id": number, "error": [type(error).__name__, error.message]}
        except Exception as error:  # noqa: BLE001 - whatever it is, the test must hear of it
            answer = {"id": number, "error": [type(error).__name__, repr(error)]}
        say.write(json.dumps(answer) + "\n")

    lines = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    say.write("{}\n")
    async with asyncio.TaskGroup() as group:
        while line := await lines.readline():
            command = json.loads(line)
            group.create_task(run(command.pop("id"), command.pop("do"), command))
    pipe.close()
    await site.transports.close()


def end_with_parent() -> None:
    """Ends this process with its parent, even if it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    # UCX prints warnings to stdout, so responses use another descriptor.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    asyncio.run(serve(answers, json.loads(sys.argv[1])))
