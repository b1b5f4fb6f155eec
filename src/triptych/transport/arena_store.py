"""Memory that an instance holds for others: its arena, with its slots and leases."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from triptych.domain.embedding import GENERATION_NBYTES, LeaseId, Tensor, TensorSpec, Ticket
from triptych.domain.encoding import LeaseRequest
from triptych.errors import EngineFailure, InvalidRequest
from triptych.machine.arena.arena import ArenaMachine
from triptych.machine.arena.leases import LeaseLimits
from triptych.machine.arena.slots import Slot
from triptych.ports import Arena, Clock, Offload
from triptych.transport.slot import seal, seal_in_place

logger = logging.getLogger(__name__)


class ArenaStore:
    """Writes what slots contain, and tells of changes. All methods run on the event loop."""

    def __init__(
        self,
        arena: Arena,
        limits: LeaseLimits,
        *,
        max_pull_s: float,
        clock: Clock,
        copy: Offload,
    ) -> None:
        """``copy`` copies embeddings into the arena; use a pool without slow work."""
        self.arena = arena
        self._copy = copy
        self._listeners: list[Callable[[], None]] = []
        self._on_evicted: Callable[[bytes], None] = lambda _: None
        self._awaited: dict[LeaseId, asyncio.Event] = {}
        """Leases whose release somebody waits for."""
        self._clock = clock
        self.memory = ArenaMachine(
            start=arena.base,
            end=arena.nbytes,
            holder=arena.instance_id,
            epoch=arena.epoch,
            max_pull_s=max_pull_s,
            limits=limits,
            on_evicted=self._evicted,
        )
        """The machine's state. Read-only for others."""
        self._lapsed = 0
        """Lapsed leases that were logged."""

    def on_change(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change`` whenever embeddings or leases may have changed."""
        self._listeners.append(on_change)

    def on_evicted(self, on_evicted: Callable[[bytes], None]) -> None:
        """Call ``on_evicted`` with the key of each embedding that is evicted."""
        self._on_evicted = on_evicted

    def may_read(self, lease_id: LeaseId, offset: int, nbytes: int) -> bool:
        """``ports.LeaseCheck`` for this instance's transports."""
        return self.memory.may_read(lease_id, offset, nbytes, self._clock())

    def tokens(self, key: bytes) -> int | None:
        """Tokens of the embedding if it can be granted, else None."""
        slot = self.memory.find(key)
        return None if slot is None else slot.tokens

    def reserve(self, key: bytes, tensors: tuple[TensorSpec, ...], tokens: int) -> Slot:
        """Reserve memory for an embedding. Raises ArenaFull (not now), InvalidMedia (never), InternalError if it has a slot already."""
        try:
            return self.memory.reserve(key, tensors, tokens, self._clock())
        finally:
            self._notify()

    async def fill(self, slot: Slot, tensors: Sequence[Tensor]) -> None:
        """Write the embedding to its slot; from then on it can be granted. Raises EngineFailure if the tensors do not
        match the reservation. Then, and when cancelled, the slot stays reserved.
        """
        if tuple([tensor.spec for tensor in tensors]) != slot.tensors:
            raise EngineFailure("the engine returned other tensors than announced")
        checksum = await self._copy.run(seal, self.arena, slot.offset, slot.generation, tensors)
        self.memory.commit(slot.key, slot.generation, checksum)
        self._notify()

    def window(self, slot: Slot) -> memoryview | None:
        """Memory in which the payload of a reserved slot is written. None in the memory of a device."""
        return self.arena.window(slot.offset + GENERATION_NBYTES, slot.payload_nbytes)

    async def seal(self, slot: Slot, named: bytes) -> None:
        """Publish what was written through ``window``; from then on ``named`` can be granted. If there is another slot of this
        name, that one is granted and this one is freed. When cancelled, the slot stays reserved.
        """
        checksum = await self._copy.run(seal_in_place, self.arena, slot.offset, slot.generation, slot.payload_nbytes)
        self.memory.commit(slot.key, slot.generation, checksum, named)
        self._notify()

    def abandon(self, slot: Slot) -> None:
        """Free a slot that will not be filled."""
        self.memory.abandon(slot.key, slot.generation)
        self._notify()

    def grant(
        self,
        key: bytes,
        lease_id: LeaseId,
        lease_s: float,
        generation: int | None = None,
        *,
        router_lease: LeaseId | None = None,
    ) -> Ticket:
        """Grant or extend one reader's lease, and the router's with it if there is one: both or none. Returns the reader's ticket. Raises LeaseLost if the embedding (of that
        generation) is gone or a lease was released, InvalidRequest if an id belongs to another embedding, Overloaded.
        """
        try:
            return self.memory.grant(
                key, lease_id, lease_s, self._clock(), generation=generation, router_lease=router_lease
            )
        finally:
            self._notify()

    def lease(self, request: LeaseRequest) -> Ticket:
        """``Encoder.lease``. Also while draining, as issued tickets may still be used."""
        return self.grant(request.key, request.lease_id, checked_lease_s(request.lease_s), request.generation)

    def release(self, lease_ids: Sequence[LeaseId]) -> None:
        if self._awaited:
            for lease_id in lease_ids:
                if (released := self._awaited.get(lease_id)) is not None:
                    released.set()
        self.memory.release(lease_ids)
        self._notify()

    @contextmanager
    def first_release(self, lease_ids: Sequence[LeaseId]) -> Iterator[asyncio.Event]:
        """An event that is set when one of these leases is released."""
        released = asyncio.Event()
        self._awaited.update(dict.fromkeys(lease_ids, released))
        try:
            yield released
        finally:
            for lease_id in lease_ids:
                del self._awaited[lease_id]

    def sweep(self) -> None:
        """Expire leases."""
        self.memory.sweep(self._clock())
        if lapsed := self.memory.lapsed - self._lapsed:
            self._lapsed += lapsed
            logger.warning("%d leases ended without being released", lapsed)
        self._notify()

    def _evicted(self, slot: Slot, reason: str) -> None:
        self._on_evicted(slot.key)
        logger.debug("evicted an embedding of %d bytes: %s", slot.payload_nbytes, reason)

    def _notify(self) -> None:
        for on_change in self._listeners:
            on_change()


def checked_lease_s(lease_s: float) -> float:
    """Raises InvalidRequest."""
    if not lease_s > 0:
        raise InvalidRequest(f"a lease must be longer than 0 s, got {lease_s:g}")
    return lease_s
