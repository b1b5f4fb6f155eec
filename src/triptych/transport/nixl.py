"""NIXL over UCX: a one-sided read out of the holder's memory, by RDMA where there is hardware for it, through shared
memory on one host, over TCP otherwise.

The holder takes no part in a read and cannot check leases: whoever has an arena's metadata can read all of it, so this
backend belongs on an isolated network. What keeps a reader from using a recycled slot is its generation and checksum.
"""

import asyncio
import logging
import os
import queue
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from triptych.domain.embedding import Ticket
from triptych.domain.instance import TransportOffer
from triptych.errors import Overloaded, TransferFailed
from triptych.policy.transport import NIXL
from triptych.transport.arena import PROBE_NBYTES, HostArena
from triptych.transport.aside import Aside
from triptych.transport.nixl_driver import NixlDriver, Read
from triptych.transport.nixl_offer import NixlOffer
from triptych.transport.slot import check_ticket

BACKEND = NIXL

_PROGRESS_DELAY_US = 20_000
"""Of NIXL's progress thread, which wakes up by itself for events. 0, its wrapper's value, burns a whole core."""
_CONNECT_THREADS = 2
_CLOSE_S = 1.0

_kept_alive: list[object] = []
"""Agents and arenas that were closed while a peer that does not answer could still make UCX write: they are never
freed, because memory under a running transfer must not go away."""


def has_rdma() -> bool:
    """Whether this host has an RDMA device."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def set_ucx_defaults(*, rdma: bool) -> None:
    """Choose UCX's modules before it is loaded; what the operator has set stays.

    Without RDMA hardware its verbs modules are useless, and can crash the process at exit.
    """
    if not rdma:
        os.environ.setdefault("UCX_MODULES", "^ib,ib_mlx5,ib_efa,mlx5")  # noqa: TID251 - UCX has no other switch


def load_bindings() -> Any:
    """NIXL's binding module. Raises RuntimeError when it is not installed."""
    for package in ("nixl_cu12", "nixl_cu13"):
        try:
            bindings = import_module(f"{package}._bindings")
        except ModuleNotFoundError:
            continue
        # Its package sets up a handler that prints to stdout: what it logs goes where everything goes.
        log = logging.getLogger("nixl")
        log.handlers.clear()
        log.propagate = True
        log.setLevel(logging.WARNING)
        return bindings
    raise RuntimeError("the NIXL transport needs the extra 'ucx'")


class NixlAgent:
    """What is created once per process: the agent, its UCX backend, the registration of the arena."""

    def __init__(self, arena: HostArena, *, rdma: bool) -> None:
        """Takes about 0.2 s. Raises RuntimeError when NIXL is not installed or UCX does not start."""
        set_ucx_defaults(rdma=rdma)
        nixl = load_bindings()
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.captureTelemetry = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _PROGRESS_DELAY_US
        errors = [error for error in vars(nixl).values() if isinstance(error, type) and issubclass(error, Exception)]
        self.errors: tuple[type[Exception], ...] = (*errors, RuntimeError)
        """All that the bindings raise."""
        self.nixl = nixl
        self.rdma = rdma
        try:
            self.agent = nixl.nixlAgent(_agent_name(arena.probe), config)
            self.ucx = int(self.agent.createBackend("UCX", {}))
            arena_list = nixl.nixlRegDList(nixl.DRAM_SEG, [(arena.address, arena.nbytes, 0, "")])
            self.agent.registerMem(arena_list, [self.ucx])
            self.metadata = bytes(self.agent.getLocalMD())
        except self.errors as error:
            raise RuntimeError(f"NIXL could not start UCX ({type(error).__name__})") from error


class NixlTransport:
    """One agent per process, with the arena registered once."""

    def __init__(self, agent: NixlAgent, arena: HostArena, *, machine: str, max_pull_s: float) -> None:
        """Use ``start``, unless there is an agent already. Must be called in the event loop."""
        self._agent: NixlAgent | None = agent
        self._arena = arena
        self._machine = machine
        self._max_pull_s = max_pull_s
        self._offer = NixlOffer(agent.rdma, arena.probe, arena.address, agent.metadata)
        self._driver = NixlDriver(agent.nixl, agent.agent, agent.ucx)
        self._aside = Aside("nixl-connect", limit=_CONNECT_THREADS)
        self._reads: set[Read] = set()
        self._peers: dict[str, int] = {}
        """Links by agent name: NIXL knows one agent once, however often it was connected to."""
        self._warm: set[str] = set()
        """Agents that were read before."""

    @classmethod
    async def start(cls, arena: HostArena, *, machine: str, max_pull_s: float) -> Self:
        """Load NIXL and register ``arena``. Raises RuntimeError as ``NixlAgent`` does."""
        agent = await asyncio.to_thread(NixlAgent, arena, rdma=has_rdma())
        return cls(agent, arena, machine=machine, max_pull_s=max_pull_s)

    @property
    def backend(self) -> str:
        return BACKEND

    @property
    def arena(self) -> HostArena:
        return self._arena

    def offer(self) -> TransportOffer:
        return TransportOffer(BACKEND, self._machine, self._offer.pack())

    async def connect(self, offer: TransportOffer) -> "NixlPeer":
        theirs = NixlOffer.parse(offer)
        if theirs.probe == self._arena.probe:
            raise TransferFailed("the holder is this process: NIXL reads other processes only")
        agent = self._open_agent()
        try:
            name = await self._aside.run(agent.agent.loadRemoteMD, theirs.agent)
        except agent.errors:
            raise TransferFailed("NIXL cannot reach the holder") from None
        if name != _agent_name(theirs.probe).encode():
            raise TransferFailed("the holder's NIXL metadata is not of the instance that its probe names")
        peer = NixlPeer(self, name.decode(), theirs)
        self._peers[peer.name] = self._peers.get(peer.name, 0) + 1
        try:
            await self._prove(peer, theirs)
        except BaseException:
            await peer.close()
            raise
        return peer

    def quarantined(self) -> tuple[tuple[int, int], ...]:
        """Destinations of reads that nobody waits for any more, but that are not over."""
        base = self._arena.address
        return tuple((read.local_address - base, read.nbytes) for read in self._reads if not read.wanted)

    async def read(self, peer: str, remote_address: int, offset: int, nbytes: int) -> None:
        """Read from a peer's address to ``offset`` of the own arena. Raises TransferFailed."""
        read = self._submit(peer, remote_address, offset, nbytes)
        try:
            if read.over.done():
                error = read.over.result()
            else:
                error = await self._until_over(read)
        finally:
            read.wanted = False
        if error is not None:
            raise TransferFailed(f"NIXL could not read {nbytes} bytes ({error})")

    async def _until_over(self, read: Read) -> str | None:
        try:
            async with asyncio.timeout(self._max_pull_s):
                return await asyncio.shield(read.over)
        except TimeoutError:
            raise TransferFailed(f"{read.nbytes} bytes did not arrive within {self._max_pull_s} s") from None

    def _submit(self, peer: str, remote_address: int, offset: int, nbytes: int) -> Read:
        self._open_agent()
        over: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        read = Read(peer, self._arena.address + offset, remote_address, nbytes, over)
        # While another thread is inside NIXL to connect, a call from the event loop could wait for it.
        warm = peer in self._warm and self._aside.calls == 0
        try:
            self._driver.submit(read, warm=warm)
        except queue.Full:
            raise Overloaded("too many NIXL reads wait") from None
        self._reads.add(read)
        over.add_done_callback(lambda _: self._reads.discard(read))
        return read

    async def _prove(self, peer: "NixlPeer", theirs: NixlOffer) -> None:
        at = self._arena.take_scratch()
        try:
            await self.read(peer.name, theirs.address, at, PROBE_NBYTES)
            if self._arena.memory[at : at + PROBE_NBYTES] != theirs.probe:
                raise TransferFailed("the holder's memory does not start with its probe: it was restarted")
            self._warm.add(peer.name)
        finally:
            late = [read for read in self._reads if read.local_address == self._arena.address + at]
            if late:
                late[0].over.add_done_callback(lambda _: self._arena.give_scratch(at))
            else:
                self._arena.give_scratch(at)

    async def drop(self, peer: "NixlPeer") -> None:
        """Forget a peer's agent with its last link; as long as a read from it is not over, it stays."""
        self._peers[peer.name] -= 1
        if self._peers[peer.name] > 0:
            return
        del self._peers[peer.name]
        self._warm.discard(peer.name)
        agent = self._agent
        if agent is None or any(read.peer == peer.name for read in self._reads):
            return
        try:
            await self._aside.run(agent.agent.invalidateRemoteMD, peer.name)
        except agent.errors:
            logging.getLogger(__name__).warning("NIXL could not forget a peer", exc_info=True)

    async def close(self) -> None:
        """Fails what runs. The arena stays registered for as long as anything may write to it."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for read in self._reads:
            read.wanted = False
        finished = await asyncio.to_thread(self._driver.stop, _CLOSE_S)
        for read in list(self._reads):
            if not read.over.done():
                read.over.set_result("closed")
        if not finished:
            _kept_alive.append((agent, self._arena))

    def _open_agent(self) -> NixlAgent:
        if self._agent is None:
            raise TransferFailed("the NIXL transport is closed")
        return self._agent


class NixlPeer:
    """A holder's agent, known to the own one."""

    def __init__(self, transport: NixlTransport, name: str, offer: NixlOffer) -> None:
        self._transport = transport
        self._offer = offer
        self._closed = False
        self.name = name

    @property
    def backend(self) -> str:
        return BACKEND

    async def pull(self, ticket: Ticket, destination_offset: int) -> None:
        """As ``Peer.pull``, but a lease that is over is noticed only by ``slot.verify``: the holder is not asked."""
        check_ticket(ticket)
        nbytes = ticket.slot_nbytes
        if self._closed:
            raise TransferFailed("the link to the holder is closed")
        if not self._transport.arena.holds(destination_offset, nbytes):
            raise TransferFailed(f"{nbytes} bytes at {destination_offset} are not inside the own arena")
        if ticket.offset < 0 or ticket.offset + nbytes > self._offer.nbytes:
            raise TransferFailed(f"{nbytes} bytes at {ticket.offset} are not inside the holder's arena")
        await self._transport.read(self.name, self._offer.address + ticket.offset, destination_offset, nbytes)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._transport.drop(self)


def _agent_name(probe: bytes) -> str:
    """Unique for an incarnation of an instance, and derived, so that no peer can take another's name by accident."""
    return blake2b(probe, digest_size=16, person=b"triptych-nixl").hexdigest()
