"""An agent at work: its thread, the reads that are not over, and the peers that it knows."""

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
"""After a read from a peer was given up and did not end for so long, nothing more is asked of that peer."""
_MAX_READS = 4096
"""That are not over; further ones are refused."""
_PEERS_FAULT = frozenset({"nixlRemoteDisconnectError", "nixlNotFoundError", "nixlInvalidParamError"})
"""Failures of a read that say nothing of the own agent."""

_kept_alive: list[object] = []
"""Agents and arenas that were closed while a peer that does not answer could still make UCX write: they are never
freed, because memory under a running transfer must not go away."""


class LiveAgent:
    """``worked`` and ``failed`` are told how calls end; all methods belong to the event loop."""

    def __init__(
        self, agent: NixlAgent, arena: Arena, *, worked: Callable[[], None], failed: Callable[[], None]
    ) -> None:
        self.number = agent.incarnation
        region = arena.region
        self.offer = NixlOffer(
            agent.rdma, agent.incarnation, region.device, arena.probe, region.address, agent.metadata
        )
        self.retired = False
        """Another one is in use: this one only ends what it has begun."""
        self._agent: NixlAgent | None = agent
        self._handle = weakref.ref(agent.agent)
        self._arena = arena
        self._base = region.address
        self._worked = worked
        self._failed = failed
        self._driver = NixlDriver(agent.nixl, agent.agent, agent.ucx, device=region.device, on_end=self._ended)
        self._threads = DaemonThreadPool("nixl-connect", limit=_CONNECT_THREADS)
        self._reads: set[Read] = set()
        """That are not over."""
        self._gathered: list[Read] = []
        """Those among them that came in this turn of the event loop: they are posted together in the next one."""
        self._links: Counter[str] = Counter()
        """By agent name: NIXL knows one agent once, however often it was connected to."""
        self._leaving: set[str] = set()
        """Agents without a link that NIXL still knows."""
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._warm: set[str] = set()
        """Agents that were read before."""

    # --- what it knows -----------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._reads and not self._threads.calls and (self.retired or not self._leaving)

    def stuck_s(self, now_s: float) -> float:
        """How long ago the oldest read was given up that is not over."""
        return max((now_s - read.given_up_s for read in self._reads if read.given_up_s is not None), default=0.0)

    def hanging_s(self, now_s: float) -> float:
        """For how long the oldest call into NIXL has not returned."""
        return max(self._driver.hanging_s, self._threads.hanging_s(now_s))

    def unwanted(self) -> list[tuple[int, int]]:
        """Offset and size of destinations of reads that nobody waits for any more, but that are not over."""
        return [(read.local_address - self._base, read.nbytes) for read in self._reads if not read.wanted]

    # --- peers -------------------------------------------------------------------------------------------------------

    async def meet(self, theirs: NixlOffer) -> str:
        """Make a peer's agent known, and return its name; ``forget`` must follow. Raises TransferFailed."""
        name = agent_name(theirs.probe, theirs.incarnation)
        if self._is_stuck(name):
            raise TransferFailed("earlier reads from the holder were given up and are not over")
        agent = self._open_agent()
        async with self._turn(name):
            try:
                said = await self._threads.run(agent.agent.loadRemoteMD, theirs.agent)
            except agent.errors:
                self._failed()
                raise TransferFailed("NIXL cannot reach the holder") from None
            if said != name.encode():
                raise TransferFailed("the holder's NIXL metadata is not of the instance that its probe names")
            self._links[name] += 1
        return name

    async def forget(self, name: str) -> None:
        """A link less; with the last one goes the peer's agent, once no read from it is left (``tidy``)."""
        self._links[name] -= 1
        if self._links[name] == 0:
            del self._links[name]
            self._warm.discard(name)
            self._leaving.add(name)
            await self.tidy()

    @property
    def untidy(self) -> bool:
        """Whether there is a peer to be forgotten, and nothing in its way any more."""
        busy = {read.peer for read in self._reads}
        return not self.retired and any(name not in busy for name in self._leaving)

    async def tidy(self) -> None:
        """Make NIXL forget peers that nobody is linked to: what it keeps of each holds memory and connections."""
        busy = {read.peer for read in self._reads}
        for name in self._leaving - busy:
            self._leaving.discard(name)
            async with self._turn(name):
                agent = self._agent
                if agent is None or self.retired or name in self._links:
                    continue
                try:
                    async with asyncio.timeout(_FORGET_S):
                        await self._threads.run(agent.agent.invalidateRemoteMD, name)
                except TimeoutError:
                    logger.warning("NIXL does not forget a peer: the call has not returned")
                except agent.errors:
                    logger.warning("NIXL could not forget a peer", exc_info=True)

    def _turn(self, name: str) -> asyncio.Lock:
        """What is said of one peer is said one after the other."""
        return self._turns.setdefault(name, asyncio.Lock())

    def _is_stuck(self, name: str) -> bool:
        now_s = asyncio.get_running_loop().time()
        return any(
            read.peer == name and read.given_up_s is not None and now_s - read.given_up_s > _WAIT_S
            for read in self._reads
        )

    # --- reads -------------------------------------------------------------------------------------------------------

    async def read(self, peer: str, theirs: NixlOffer, at: int, offset: int, nbytes: int, *, within_s: float) -> None:
        """Read from ``at`` in a peer's arena to ``offset`` in the own one. Raises TransferFailed."""
        loop = asyncio.get_running_loop()
        read = self._gather(peer, theirs, at, offset, nbytes)
        try:
            try:
                await asyncio.sleep(0)  # others may come in this turn
            finally:
                self._post()  # by whom it is resumed first
            if read.over.done():
                error = read.over.result()
            else:
                async with asyncio.timeout(within_s):
                    error = await asyncio.shield(read.over)
        except TimeoutError:
            raise TransferFailed(f"{nbytes} bytes did not arrive within {within_s} s") from None
        finally:
            read.wanted = False
            if not read.over.done():
                read.given_up_s = loop.time()
        if error is not None:
            raise TransferFailed(f"NIXL could not read {nbytes} bytes ({error})")

    def when_over(self, offset: int, then: Callable[[], None]) -> None:
        """Call ``then`` once nothing writes to this offset any more: now, if nothing does."""
        address = self._base + offset
        late = next((read for read in self._reads if read.local_address == address), None)
        if late is None:
            then()
        else:
            late.over.add_done_callback(lambda _: then())

    def _gather(self, peer: str, theirs: NixlOffer, at: int, offset: int, nbytes: int) -> Read:
        self._open_agent()
        if len(self._reads) >= _MAX_READS:
            raise Overloaded("too many NIXL reads wait")
        over = asyncio.get_running_loop().create_future()
        read = Read(peer, theirs.device, self._base + offset, theirs.address + at, nbytes, over)
        self._reads.add(read)
        self._gathered.append(read)
        return read

    def _post(self) -> None:
        if not self._gathered:
            return
        reads, self._gathered = [read for read in self._gathered if not read.over.done()], []
        if self._agent is None:
            for read in reads:
                read.wanted = False
        # While another thread is inside NIXL to connect, a call from the event loop could wait for it.
        self._driver.submit(reads, warm=frozenset() if self._threads.calls else self._warm)

    def _ended(self, reads: Sequence[Read], error: str | None) -> None:
        """Of one transfer: however many reads were joined in it, it says one thing of the agent."""
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
        """With the process: fail what runs. The arena stays registered for as long as anything may write to it."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for read in self._reads:
            read.wanted = False
        finished = await asyncio.to_thread(self._driver.stop, wait_s)
        self._end_reads("closed")
        if finished:
            self._driver.let_go()
        else:
            _kept_alive.append((agent, self._arena))

    async def take_down(self, wait_s: float) -> bool:
        """While the process goes on: end the agent, and with it all that it could still write. Whether it is gone.

        It is not while a call into it has not returned; then nothing of it is touched.
        """
        if self._agent is not None:
            await asyncio.to_thread(self._driver.stop, wait_s)
            if not self._driver.ended or self._threads.calls:
                return False
            # UCX closes its connections in the agent's destructor (11 ms), after which nothing arrives any more.
            self._driver.let_go()
            self._agent = None
        if self._handle() is not None:
            return False
        self._end_reads("the agent was replaced")
        return True

    def _end_reads(self, why: str) -> None:
        for read in list(self._reads):
            if not read.over.done():
                read.over.set_result(why)
        self._reads.clear()
