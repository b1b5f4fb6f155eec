"""Thousands of random operations on a real arena and backend, against a model in plain Python.

The model knows contents, lease expiries, and which of the reader's bytes are free: those hold a pattern that nothing
may overwrite.
"""

import asyncio
import gc
import random
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import psutil
import pytest

from tests.integration.transport.remote import nixl
from triptych.domain.embedding import DType, Tensor, TensorSpec, Ticket
from triptych.errors import ArenaFull, InternalError, InvalidMedia, LeaseLost, TransferFailed
from triptych.machine.arena.arena import ArenaMachine
from triptych.machine.arena.extents import Extents, round_up
from triptych.machine.arena.slots import Slot
from triptych.ports import Peer
from triptych.transport import slot
from triptych.transport.arena import HEADER_NBYTES, HostArena
from triptych.transport.memory import MemoryNetwork, MemoryTransport
from triptych.transport.options import TransferOptions
from triptych.transport.start import start_transports
from triptych.transport.transport_set import TransportSet

OPERATIONS = {"memory": 10_000, "tcp": 10_000, "shm": 10_000, "nixl": 2_000}
MAX_PULL_S = 5.0
FREE = b"\xa5"
ARENA_NBYTES = HEADER_NBYTES + (512 << 10)
MAX_NBYTES = 96 << 10
KEYS = [bytes([number]) for number in range(24)]
RECENT = 30
"""Tickets that may still be tried: some are over, as those of a reader that comes too late."""


class World:
    """A holder, a reader, a clock, and the model's knowledge of them."""

    def __init__(self, backend: str, seed: int) -> None:
        self.backend = backend
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.holder = HostArena(ARENA_NBYTES, instance_id="holder", epoch=1)
        self.reader = HostArena(ARENA_NBYTES, instance_id="reader", epoch=1)
        self.memory = ArenaMachine(
            start=self.holder.base,
            end=self.holder.nbytes,
            holder="holder",
            epoch=1,
            max_pull_s=MAX_PULL_S,
            on_evicted=self.evicted,
        )
        self.places = Extents(self.reader.base, self.reader.nbytes)
        self.reader.memory[self.reader.base :] = FREE * (self.reader.nbytes - self.reader.base)
        self.transports: list[TransportSet] = []
        self.peer: Peer
        self.writing: dict[bytes, tuple[Slot, bytes]] = {}
        self.ready: dict[bytes, tuple[Slot, bytes]] = {}
        self.leases: dict[bytes, tuple[bytes, int, float]] = {}
        """Not released: key, generation, when it ends."""
        self.tickets: deque[tuple[Ticket, bytes]] = deque(maxlen=RECENT)
        """With the bytes that were promised."""
        self.set_aside: set[int] = set()
        self.done: Counter[str] = Counter()

    # --- the holder

    def evicted(self, gone: Slot, _: str) -> None:
        assert self.ready.pop(gone.key)[0] == gone
        held = [until for key, _, until in self.leases.values() if key == gone.key]
        assert all(until_s + MAX_PULL_S <= self.now_s for until_s in held), "evicted under a lease"
        self.done["evicted"] += 1

    def reserve(self) -> None:
        key, nbytes = self.rng.choice(KEYS), int(self.rng.triangular(0, MAX_NBYTES, 4096))
        spec = TensorSpec("embedding", DType.U8, (nbytes,))
        if key in self.ready or key in self.writing:
            with pytest.raises(InternalError):
                self.memory.reserve(key, (spec,), 3, self.now_s)
            return
        had_room = self.largest_gap() >= round_up(nbytes + 16)
        try:
            self.writing[key] = (self.memory.reserve(key, (spec,), 3, self.now_s), self.rng.randbytes(nbytes))
        except (ArenaFull, InvalidMedia):
            self.done["refused"] += 1
            if had_room:
                raise

    def largest_gap(self) -> int:
        """The largest gap between slots that must stay: those being written, and those that a lease or a late read may
        need.
        """
        leased = {key for key, _, until_s in self.leases.values() if until_s + MAX_PULL_S > self.now_s}
        stay = [made for made, _ in self.writing.values()] + [self.ready[key][0] for key in leased]
        at, largest = self.holder.base, 0
        for made in sorted(stay, key=lambda extent: extent.offset):
            largest = max(largest, made.offset - at)
            at = made.offset + round_up(made.slot_nbytes)
        return max(largest, self.holder.nbytes - at)

    def finish(self) -> None:
        if not self.writing:
            return
        key = self.rng.choice(sorted(self.writing))
        made, data = self.writing.pop(key)
        if self.rng.random() < 0.1:
            self.memory.abandon(key, made.generation)
            return
        tensor = Tensor(made.tensors[0], memoryview(data))
        checksum = slot.seal(self.holder, made.offset, made.generation, [tensor])
        self.memory.commit(key, made.generation, checksum)
        self.ready[key] = (made, data)

    def grant(self) -> None:
        key = self.rng.choice(KEYS)
        lease_id, lease_s = self.rng.randbytes(16), self.rng.uniform(1, 20)
        if key not in self.ready:
            with pytest.raises(LeaseLost):
                self.memory.grant(key, lease_id, lease_s, self.now_s)
            return
        ticket = self.memory.grant(key, lease_id, lease_s, self.now_s)
        made, data = self.ready[key]
        assert (ticket.offset, ticket.generation) == (made.offset, made.generation)
        self.leases[lease_id] = (key, made.generation, self.now_s + lease_s)
        self.tickets.append((ticket, data))

    def release(self) -> None:
        if self.leases:
            lease_id = self.rng.choice(sorted(self.leases))
            del self.leases[lease_id]
            self.memory.release((lease_id,))

    def wait(self) -> None:
        self.now_s += self.rng.uniform(0, 3)
        self.done["lapsed"] += len(self.memory.sweep(self.now_s))

    def may_read(self, ticket: Ticket) -> bool:
        lease = self.leases.get(ticket.lease_id)
        return lease is not None and self.now_s < lease[2]

    # --- the reader

    async def pull(self, *, patience: int | None) -> None:
        """One pull; after ``patience`` iterations of the event loop, if set, it is cancelled."""
        if not self.tickets:
            return
        ticket, promised = self.tickets[-self.rng.choice((1, 2, 3, self.rng.randint(1, RECENT))) % len(self.tickets)]
        at = self.places.allocate(ticket.slot_nbytes)
        if at is None:
            self.end_quarantine()
            return
        self.must_be_free(at)
        readable = self.may_read(ticket)
        try:
            await self._pull(ticket, at, patience)
        except TimeoutError:
            self.set_aside.add(at)
            self.end_quarantine()
            self.done["cancelled"] += 1
            return
        except (LeaseLost, TransferFailed) as error:
            if readable and self.may_read(ticket):
                raise  # a good ticket was refused
            self.set_aside.add(at)
            self.end_quarantine()
            self.done[type(error).__name__] += 1
            return
        arrived = slot.tensors(self.reader, at, ticket)["embedding"]
        assert arrived.data == promised, "wrong bytes"
        self.done["right"] += 1
        self.free(at)

    async def _pull(self, ticket: Ticket, at: int, patience: int | None) -> None:
        async with asyncio.timeout(None) as deadline:
            if patience is not None:
                deadline.reschedule(asyncio.get_running_loop().time() + patience * 1e-4)
            await self.peer.pull(ticket, at)
        slot.verify(self.reader, at, ticket)

    async def slowly(self, _reader: str, _ticket: Ticket) -> None:
        """In one process a copy is a single step; this adds a few event loop iterations before it."""
        for _ in range(self.rng.randint(0, 4)):
            await asyncio.sleep(1e-4)

    async def several(self) -> None:
        """Concurrent pulls, while the holder's arena changes."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.rng.randint(2, 5)):
                group.create_task(self.pull(patience=None))
            for _ in range(4):
                await asyncio.sleep(0)
                self.rng.choice((self.reserve, self.finish, self.grant, self.release))()

    async def meet_again(self) -> None:
        await self.peer.close()
        self.peer = await self.transports[1].connect(self.transports[0].offers())
        self.done["links"] += 1

    def must_be_free(self, at: int) -> None:
        size = self.places.size(at)
        assert self.reader.memory[at : at + size] == FREE * size, "free memory was overwritten"

    def free(self, at: int) -> None:
        size = self.places.size(at)
        self.reader.memory[at : at + size] = FREE * size
        self.places.free(at)

    def end_quarantine(self) -> None:
        claimed = self.transports[1].quarantined()
        for at in sorted(self.set_aside):
            end = at + self.places.size(at)
            if not any(start < end and at < start + nbytes for start, nbytes in claimed):
                self.set_aside.remove(at)
                self.free(at)

    # --- all of it

    async def operate(self) -> None:
        kinds = {
            self.reserve: 20,
            self.finish: 18,
            self.grant: 20,
            self.release: 8,
            self.wait: 4,
        }
        draw = self.rng.random()
        if draw < 0.02:
            await self.several()
        elif draw < 0.2:
            await self.pull(patience=None)
        elif draw < 0.23:
            await self.pull(patience=self.rng.randint(0, 8))
        elif draw < 0.232:
            await self.meet_again()
        else:
            [operation] = self.rng.choices(list(kinds), list(kinds.values()))
            operation()

    async def end(self) -> None:
        """Releases everything: nothing may be left."""
        for key, (made, _) in self.writing.items():
            self.memory.abandon(key, made.generation)
        self.memory.release(tuple(self.leases))
        assert (self.memory.leases, self.memory.leased_bytes) == (0, 0)
        self.memory.validate()
        async with asyncio.timeout(60):
            while self.set_aside:
                await asyncio.sleep(0.01)
                self.end_quarantine()
        self.places.validate()
        assert self.places.free_bytes == self.places.capacity
        self.must_be_all_free()

    def must_be_all_free(self) -> None:
        own = self.reader.memory[self.reader.base :]
        assert own == FREE * len(own), "free memory was overwritten"


@dataclass(frozen=True)
class _Check:
    """The transport's access check; leases end by the model's clock."""

    world: World

    def __call__(self, lease_id: bytes, offset: int, nbytes: int) -> bool:
        return self.world.memory.may_read(lease_id, offset, nbytes, self.world.now_s)


@asynccontextmanager
async def world(backend: str, seed: int) -> AsyncIterator[World]:
    made = World(backend, seed)
    network = MemoryNetwork(made.slowly)
    async with AsyncExitStack() as stack:
        for arena in (made.holder, made.reader):
            if backend == "memory":
                memory = MemoryTransport(network, arena, host="here", check=_Check(made))
                transports = TransportSet([memory], connect_timeout_s=5.0)
            else:
                transports = await start_transports(
                    TransferOptions((backend,), max_pull_s=MAX_PULL_S),
                    arena,
                    machine="here",
                    host="127.0.0.1",
                    check=_Check(made),
                    connect_timeout_s=5.0,
                )
            stack.push_async_callback(transports.close)
            made.transports.append(transports)
        made.peer = await made.transports[1].connect(made.transports[0].offers())
        yield made
        await made.peer.close()


@pytest.mark.parametrize("backend", ["memory", "tcp", "shm", nixl])
async def test_any_order_of_operations_reads_what_was_promised_and_leaks_nothing(backend: str) -> None:
    descriptors = psutil.Process().num_fds()
    async with world(backend, seed=2026) as made:
        for number in range(OPERATIONS[backend]):
            await made.operate()
            if number % 250 == 0:
                made.memory.validate()
        await made.end()
        done = made.done
    assert done["right"] > OPERATIONS[backend] / 20, done
    kinds = ["evicted", "refused", "lapsed", "links", "LeaseLost"]
    if backend in ("memory", "tcp"):  # the others copy embeddings of this size in one step
        kinds.append("cancelled")
    for kind in kinds:
        assert done[kind], f"{kind} never happened: {done}"
    del made
    with suppress(TimeoutError):  # CPython keeps the last CancelledError, and so the arenas in its traceback's frames
        async with asyncio.timeout(0):
            await asyncio.sleep(1)
    gc.collect()  # an arena is closed with its last reference, and reference cycles hold some
    if backend != "nixl":  # its libraries keep theirs for reuse
        assert psutil.Process().num_fds() <= descriptors
