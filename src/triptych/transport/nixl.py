"""NIXL over UCX: one-sided reads from the holder's memory, by RDMA, by shared memory on one host, or over TCP.

The holder takes no part in a read and cannot check leases. Whoever has an arena's metadata can read all of it, so this
backend belongs on an isolated network. Generation and checksum protect a reader from a recycled slot.

A stuck agent is replaced (``machine/agent_health.py``): the arena is registered again and peers are reconnected. Other
instances see the new offer the next time they call ``describe``.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Self

from triptych.domain.embedding import Ticket
from triptych.domain.instance import TransportOffer
from triptych.errors import TransferFailed
from triptych.machine.agent_health import (
    AgentHealth,
    Down,
    Event,
    Failed,
    HealthLimits,
    Look,
    NotDown,
    NotReplaced,
    Replace,
    Replaced,
    TakeDown,
    Worked,
)
from triptych.policy.transport import NIXL
from triptych.ports import Arena
from triptych.runtime.tasks import TaskScope
from triptych.transport.arena import PROBE_NBYTES
from triptych.transport.daemon_threads import DaemonThreadPool
from triptych.transport.nixl_agent import NixlAgent, OpenAgent
from triptych.transport.nixl_live import LiveAgent
from triptych.transport.nixl_offer import NixlOffer
from triptych.transport.slot import check_ticket

logger = logging.getLogger(__name__)

BACKEND = NIXL

_CLOSE_S = 1.0
_LOOK_S = 0.25
_OPEN_S = 10.0

OnReset = Callable[[str, str], None]
"""Called for each replacement with the backend and its cause: ``stuck``, ``hanging`` or ``failing``."""


class NixlTransport:
    """The agent in use, the replaced agents that are not gone yet, and the peers."""

    def __init__(
        self,
        agent: NixlAgent,
        arena: Arena,
        *,
        machine: str,
        max_pull_s: float,
        health: HealthLimits | None = None,
        open_agent: OpenAgent = NixlAgent,
        on_reset: OnReset = lambda _backend, _cause: None,
    ) -> None:
        """Use ``start``, unless there is an agent already. Must be called in the event loop."""
        self._arena = arena
        self._machine = machine
        self._max_pull_s = max_pull_s
        self._open_agent = open_agent
        self._on_reset = on_reset
        self._health = AgentHealth(health or HealthLimits(stuck_s=max_pull_s, hanging_s=max_pull_s))
        self._live = self._use_agent(agent)
        self._retired: dict[int, LiveAgent] = {}
        self._peers: set[NixlPeer] = set()
        self._opening = DaemonThreadPool("nixl-open", limit=1)
        self._closed = False
        self._busy = asyncio.Event()
        self._scope = TaskScope("nixl")
        self._scope.spawn(self._watch(), name="health")

    @classmethod
    async def start(
        cls,
        arena: Arena,
        *,
        machine: str,
        max_pull_s: float,
        health: HealthLimits | None = None,
        open_agent: OpenAgent = NixlAgent,
        on_reset: OnReset = lambda _backend, _cause: None,
    ) -> Self:
        """Load NIXL and register ``arena``. Raises RuntimeError as ``NixlAgent`` does."""
        agent = await asyncio.to_thread(open_agent, arena, 0)
        return cls(
            agent,
            arena,
            machine=machine,
            max_pull_s=max_pull_s,
            health=health,
            open_agent=open_agent,
            on_reset=on_reset,
        )

    @property
    def backend(self) -> str:
        return BACKEND

    @property
    def arena(self) -> Arena:
        return self._arena

    @property
    def retired(self) -> int:
        """Replaced agents that are not gone yet."""
        return len(self._retired)

    def offer(self) -> TransportOffer:
        """The offer of the agent in use; it changes with a replacement."""
        return TransportOffer(BACKEND, self._machine, self._live.offer.pack())

    async def connect(self, offer: TransportOffer) -> "NixlPeer":
        theirs = NixlOffer.parse(offer)
        if theirs.probe == self._arena.probe:
            raise TransferFailed("the holder is this process: NIXL reads other processes only")
        self._check_open()
        peer = NixlPeer(self, theirs)
        await peer.link()
        self._peers.add(peer)
        return peer

    def quarantined(self) -> tuple[tuple[int, int], ...]:
        """Destinations of abandoned reads that have not ended, of all agents that are not gone."""
        return tuple(part for live in (self._live, *self._retired.values()) for part in live.abandoned())

    async def close(self) -> None:
        """Fail running reads. The arena stays registered while anything may still write to it."""
        if self._closed:
            return
        self._closed = True
        await self._scope.close()
        for live in (self._live, *self._retired.values()):
            await live.close(_CLOSE_S)

    # --- for its peers -----------------------------------------------------------------------------------------------

    @property
    def live(self) -> LiveAgent:
        """The agent in use."""
        self._check_open()
        return self._live

    async def read(self, live: LiveAgent, name: str, theirs: NixlOffer, at: int, offset: int, nbytes: int) -> None:
        """Read from ``at`` in a peer's arena to ``offset`` in this process's arena. Raises TransferFailed."""
        self._busy.set()
        await live.read(name, theirs, at, offset, nbytes, within_s=self._max_pull_s)

    async def prove(self, live: LiveAgent, name: str, theirs: NixlOffer) -> None:
        """Read a peer's probe. Raises TransferFailed when it differs from the one offered."""
        at = self._arena.take_scratch()
        try:
            await self.read(live, name, theirs, 0, at, PROBE_NBYTES)
            if self._arena.read(at, PROBE_NBYTES) != theirs.probe:
                raise TransferFailed("the holder's memory does not start with its probe: it was restarted")
        finally:
            live.when_read(at, lambda: self._arena.give_scratch(at))

    def remove(self, peer: "NixlPeer") -> None:
        self._peers.discard(peer)

    # --- health ------------------------------------------------------------------------------------------------------

    def _use_agent(self, agent: NixlAgent) -> LiveAgent:
        """Feed call outcomes to the health machine for the agent in use only."""
        number = agent.incarnation

        def report(event: Event) -> Callable[[], None]:
            return lambda: self._handle(event) if self._live.number == number else None

        return LiveAgent(agent, self._arena, worked=report(Worked()), failed=report(Failed()))

    def _handle(self, event: Event) -> None:
        self._health.handle(event, asyncio.get_running_loop().time())
        self._busy.set()

    async def _watch(self) -> None:
        """Poll the agents while any needs watching."""
        loop = asyncio.get_running_loop()
        while True:
            self._busy.clear()
            now_s = loop.time()
            idle = frozenset(number for number, live in self._retired.items() if live.idle)
            look = Look(self._live.stuck_s(now_s), self._live.hanging_s(now_s), idle)
            for effect in self._health.handle(look, now_s):
                match effect:
                    case Replace():
                        self._scope.spawn(self._replace(effect), name="replace")
                    case TakeDown():
                        self._scope.spawn(self._take_down(effect), name="take-down")
            if self._live.has_idle_peers:
                self._scope.spawn(self._live.unload_idle_peers(), name="unload")
            if self._live.idle and not self._retired:
                await self._busy.wait()
            await asyncio.sleep(_LOOK_S)

    async def _replace(self, effect: Replace) -> None:
        logger.warning("the NIXL agent is replaced (%s): %s", effect.cause.value, effect.reason)
        former, loop = self._live, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_OPEN_S):
                agent = await self._opening.run(self._open_agent, self._arena, former.number + 1)
        except (RuntimeError, TimeoutError) as error:
            logger.warning("no new NIXL agent could be opened: %s", str(error) or f"timed out after {_OPEN_S:g} s")
            self._health.handle(NotReplaced(), loop.time())
            return
        former.retired = True
        self._retired[former.number] = former
        self._live = self._use_agent(agent)
        self._health.handle(Replaced(former.number), loop.time())
        self._on_reset(BACKEND, effect.cause.value)
        for peer in list(self._peers):
            self._scope.spawn(_linked(peer), name="reconnect")

    async def _take_down(self, effect: TakeDown) -> None:
        number, loop = effect.number, asyncio.get_running_loop()
        if await self._retired[number].take_down(_CLOSE_S):
            logger.info("a replaced NIXL agent is gone: %s", effect.reason)
            del self._retired[number]
            self._health.handle(Down(number), loop.time())
        else:
            logger.warning("a replaced NIXL agent cannot be closed yet: a call into it has not returned")
            self._health.handle(NotDown(number), loop.time())

    def _check_open(self) -> None:
        if self._closed:
            raise TransferFailed("the NIXL transport is closed")


async def _linked(peer: "NixlPeer") -> None:
    try:
        await peer.link()
    except TransferFailed as error:
        logger.info("the new NIXL agent cannot reach a holder: %s", error)


class NixlPeer:
    """A holder's agent. It is introduced again to the agent that replaces this process's own."""

    def __init__(self, transport: NixlTransport, offer: NixlOffer) -> None:
        self._transport = transport
        self._offer = offer
        self._nbytes = offer.nbytes
        self._linking = asyncio.Lock()
        self._link: tuple[LiveAgent, str] | None = None
        self._closed = False

    @property
    def backend(self) -> str:
        return BACKEND

    async def link(self) -> tuple[LiveAgent, str]:
        """Introduce the holder to the agent in use and prove the link by a read. Raises TransferFailed."""
        async with self._linking:
            if (link := self._ready()) is not None:
                return link
            live = self._transport.live
            await self._unlink()
            name = await live.load_peer(self._offer)
            try:
                await self._transport.prove(live, name, self._offer)
            except BaseException:
                await live.unload_peer(name)
                raise
            self._link = live, name
            return self._link

    async def pull(self, ticket: Ticket, destination_offset: int) -> None:
        """Pull like ``Peer.pull``, without a question to the holder. Only ``slot.verify`` notices a lease that has
        ended.
        """
        check_ticket(ticket)
        nbytes = ticket.slot_nbytes
        self._check_open()
        if not self._transport.arena.holds(destination_offset, nbytes):
            raise TransferFailed(f"{nbytes} bytes at {destination_offset} are not inside the own arena")
        if ticket.offset < 0 or ticket.offset + nbytes > self._nbytes:
            raise TransferFailed(f"{nbytes} bytes at {ticket.offset} are not inside the holder's arena")
        live, name = self._ready() or await self.link()
        await self._transport.read(live, name, self._offer, ticket.offset, destination_offset, nbytes)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._transport.remove(self)
            await self._unlink()

    def _ready(self) -> tuple[LiveAgent, str] | None:
        """The link, if it belongs to the agent in use. Raises TransferFailed after ``close``."""
        self._check_open()
        link = self._link
        return link if link is not None and link[0] is self._transport.live else None

    async def _unlink(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link[0].unload_peer(link[1])

    def _check_open(self) -> None:
        if self._closed:
            raise TransferFailed("the link to the holder is closed")
