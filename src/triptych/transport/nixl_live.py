"""A running agent: its thread, its unfinished reads, and the peers it knows."""

import asyncio
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

from triptych.errors import Overloaded, TransferFailed
from triptych.ports import Arena
from triptych.transport.daemon_threads import DaemonThreadPool
from triptych.transport.nixl_agent import NixlAgent, agent_name
from triptych.transport.nixl_driver import NixlDriver, Read
from triptych.transport.nixl_offer import NixlOffer

logger = logging.getLogger(__name__)

_CONNECT_THREADS = 2
_FORGET_S = 1.0
_WAIT_S = 1.0
"""A peer with an abandoned read that has not ended after this time gets no more reads."""
_MAX_READS = 4096
"""Unfinished reads; further ones are refused."""
_PEERS_FAULT = frozenset({"nixlRemoteDisconnectError", "nixlNotFoundError", "nixlInvalidParamError"})
"""Read errors that are not the fault of this process's agent."""

_kept_alive: list[object] = []
"""Agents and arenas closed while UCX could still write for an unresponsive peer. They are never freed: memory under a
running transfer must stay.
"""


class LiveAgent:
    """``worked`` and ``failed`` are called with each call's outcome. All methods belong to the event loop."""

    def __init__(
        self, agent: NixlAgent, arena: Arena, *, worked: Callable[[], None], failed: Callable[[], None]
    ) -> None:
        self.number = agent.incarnation
        region = arena.region
        self.offer = NixlOffer(
            agent.rdma, agent.incarnation, region.device, arena.probe, region.address, agent.metadata
        )
        self.retired = False
        """Replaced: finishes what it has begun."""
        self._agent: NixlAgent | None = agent
        self._handle = weakref.ref(agent.agent)
        self._arena = arena
        self._base = region.address
        self._worked = worked
        self._failed = failed
        self._driver = NixlDriver(agent.nixl, agent.agent, agent.ucx, device=region.device, on_end=self._ended)
        self._threads = DaemonThreadPool("nixl-connect", limit=_CONNECT_THREADS)
        self._reads: set[Read] = set()
        """Unfinished reads."""
        self._unposted: list[Read] = []
        """Reads of this turn of the event loop, posted together in the next one."""
        self._links: Counter[str] = Counter()
        """Links by agent name: NIXL knows an agent once, however many links there are."""
        self._unlinked: set[str] = set()
        """Agents without a link that NIXL still knows."""
        self._peer_locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._warm: set[str] = set()
        """Agents that have been read."""

    # --- what it knows -----------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._reads and not self._threads.calls and (self.retired or not self._unlinked)

    def stuck_s(self, now_s: float) -> float:
        """Age of the oldest abandoned read that has not ended."""
        return max((now_s - read.given_up_s for read in self._reads if read.given_up_s is not None), default=0.0)

    def hanging_s(self, now_s: float) -> float:
        """Time for which the oldest call into NIXL has been running, seconds."""
        return max(self._driver.hanging_s, self._threads.hanging_s(now_s))

    def abandoned(self) -> list[tuple[int, int]]:
        """Offset and size of the destinations of abandoned reads that have not ended."""
        return [(read.local_address - self._base, read.nbytes) for read in self._reads if not read.wanted]

    # --- peers -------------------------------------------------------------------------------------------------------

    async def load_peer(self, theirs: NixlOffer) -> str:
        """Load a peer's agent and return its name; ``unload_peer`` must follow. Raises TransferFailed."""
        name = agent_name(theirs.probe, theirs.incarnation)
        if self._has_stuck_read(name):
            raise TransferFailed("earlier reads from the holder were given up and are not over")
        agent = self._open_agent()
        async with self._peer_lock(name):
            try:
                peer_name = await self._threads.run(agent.agent.loadRemoteMD, theirs.agent)
            except agent.errors:
                self._failed()
                raise TransferFailed("NIXL cannot reach the holder") from None
            if peer_name != name.encode():
                raise TransferFailed("the holder's NIXL metadata is not of the instance that its probe names")
            self._links[name] += 1
        return name

    async def unload_peer(self, name: str) -> None:
        """Drop one link. After the last one the agent is forgotten, once no read from it is left (``unload_idle_peers``)."""
        self._links[name] -= 1
        if self._links[name] == 0:
            del self._links[name]
            self._warm.discard(name)
            self._unlinked.add(name)
            await self.unload_idle_peers()

    @property
    def has_idle_peers(self) -> bool:
        """Whether ``unload_idle_peers`` has a peer to unload."""
        busy = {read.peer for read in self._reads}
        return not self.retired and any(name not in busy for name in self._unlinked)

    async def unload_idle_peers(self) -> None:
        """Make NIXL forget peers without links, which frees their memory and connections."""
        busy = {read.peer for read in self._reads}
        for name in self._unlinked - busy:
            self._unlinked.discard(name)
            async with self._peer_lock(name):
                agent = self._agent
                if agent is None or self.retired or name in self._links:
                    continue
                try:
                    async with asyncio.timeout(_FORGET_S):
                        await self._threads.run(agent.agent.invalidateRemoteMD, name)
                except TimeoutError:
                    logger.warning("NIXL's call to forget a peer has not returned")
                except agent.errors:
                    logger.warning("NIXL could not forget a peer", exc_info=True)

    def _peer_lock(self, name: str) -> asyncio.Lock:
        """Serializes loading and forgetting of one peer."""
        return self._peer_locks.setdefault(name, asyncio.Lock())

    def _has_stuck_read(self, name: str) -> bool:
        now_s = asyncio.get_running_loop().time()
        return any(
            read.peer == name and read.given_up_s is not None and now_s - read.given_up_s > _WAIT_S
            for read in self._reads
        )

    # --- reads -------------------------------------------------------------------------------------------------------

    async def read(self, peer: str, theirs: NixlOffer, at: int, offset: int, nbytes: int, *, within_s: float) -> None:
        """Read from ``at`` in a peer's arena to ``offset`` in this process's arena. Raises TransferFailed."""
        loop = asyncio.get_running_loop()
        read = self._add_read(peer, theirs, at, offset, nbytes)
        try:
            try:
                await asyncio.sleep(0)  # let others join this turn
            finally:
                self._post()  # whoever resumes first posts for all
            if read.outcome.done():
                error = read.outcome.result()
            else:
                async with asyncio.timeout(within_s):
                    error = await asyncio.shield(read.outcome)
        except TimeoutError:
            raise TransferFailed(f"{nbytes} bytes did not arrive within {within_s} s") from None
        finally:
            read.wanted = False
            if not read.outcome.done():
                read.given_up_s = loop.time()
        if error is not None:
            raise TransferFailed(f"NIXL could not read {nbytes} bytes ({error})")

    def when_read(self, offset: int, then: Callable[[], None]) -> None:
        """Call ``then`` once nothing can write to this offset: now, if nothing does."""
        address = self._base + offset
        late = next((read for read in self._reads if read.local_address == address), None)
        if late is None:
            then()
        else:
            late.outcome.add_done_callback(lambda _: then())

    def _add_read(self, peer: str, theirs: NixlOffer, at: int, offset: int, nbytes: int) -> Read:
        self._open_agent()
        if len(self._reads) >= _MAX_READS:
            raise Overloaded("too many NIXL reads wait")
        finished = asyncio.get_running_loop().create_future()
        read = Read(peer, theirs.device, self._base + offset, theirs.address + at, nbytes, finished)
        self._reads.add(read)
        self._unposted.append(read)
        return read

    def _post(self) -> None:
        if not self._unposted:
            return
        reads, self._unposted = [read for read in self._unposted if not read.outcome.done()], []
        if self._agent is None:
            for read in reads:
                read.wanted = False
        # While another thread connects inside NIXL, a call from the event loop could block on it.
        self._driver.submit(reads, warm=frozenset() if self._threads.calls else self._warm)

    def _ended(self, reads: Sequence[Read], error: str | None) -> None:
        """Handle the end of one transfer. It counts once for the agent's health, however many reads it joined."""
        self._reads.difference_update(reads)
        wanted = [read for read in reads if read.wanted]
        if wanted and error is None:
            self._warm.add(wanted[0].peer)
            self._worked()
        elif wanted and error not in _PEERS_FAULT:
            self._failed()

    def _open_agent(self) -> NixlAgent:
        if self._agent is None:
            raise TransferFailed("the NIXL transport is closed")
        return self._agent

    # --- its end -----------------------------------------------------------------------------------------------------

    async def close(self, wait_s: float) -> None:
        """Fail running reads at process exit. The arena stays registered while anything may still write to it."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for read in self._reads:
            read.wanted = False
        finished = await asyncio.to_thread(self._driver.stop, wait_s)
        self._end_reads("closed")
        if finished:
            self._driver.drop_agent()
        else:
            _kept_alive.append((agent, self._arena))

    async def take_down(self, wait_s: float) -> bool:
        """Close the agent while the process goes on, ending all its writes. Return whether it is gone.

        While a call into it has not returned, it is left untouched.
        """
        if self._agent is not None:
            await asyncio.to_thread(self._driver.stop, wait_s)
            if not self._driver.ended or self._threads.calls:
                return False
            # UCX closes its connections in the agent's destructor (11 ms), after which nothing can arrive.
            self._driver.drop_agent()
            self._agent = None
        if self._handle() is not None:
            return False
        self._end_reads("the agent was replaced")
        return True

    def _end_reads(self, why: str) -> None:
        for read in list(self._reads):
            if not read.outcome.done():
                read.outcome.set_result(why)
        self._reads.clear()
