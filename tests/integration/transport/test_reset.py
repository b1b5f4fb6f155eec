"""A NIXL agent that hangs or fails is replaced; pulls from healthy peers work again, and memory that the old agent
could still write is not reused before it is gone.
"""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.contract.transport_kit import MACHINE, NIXL_IS_HERE, Holder, holder_process
from tests.integration.transport.remote import UCX_OVER_TCP
from triptych.domain.embedding import Ticket
from triptych.errors import TransferFailed
from triptych.machine.agent_health import HealthLimits
from triptych.ports import Arena, Peer
from triptych.transport import slot
from triptych.transport.arena import HostArena
from triptych.transport.nixl import NixlTransport
from triptych.transport.nixl_agent import NixlAgent

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not NIXL_IS_HERE, reason="NIXL is not installed: its reset was NOT tested"),
]

IN_TIME_S = 20.0
"""For what has to work: the machine may be busy."""
SHORT_PULL_S = 1.0
"""Where a pull has to run into its deadline. Others may as well, on a busy machine, and are tried again."""
NEVER_S = 600.0
MAX_FAILURES = 3
LINGER_S = 1.0


class Patience:
    """Time limits of a transport under test.

    A slow call on a busy machine must not count as a fault, so the limit of a call's duration applies only from a
    test's fault until the reset.
    """

    def __init__(self) -> None:
        self.limits = HealthLimits(
            stuck_s=NEVER_S,
            hanging_s=NEVER_S,
            max_failures=MAX_FAILURES,
            min_retired_s=0.5,
            linger_s=LINGER_S,
            first_pause_s=0.2,
            longest_pause_s=1.0,
        )

    def end(self, *, stuck_s: float = NEVER_S, hanging_s: float = NEVER_S) -> None:
        for name, limit_s in (("stuck_s", stuck_s), ("hanging_s", hanging_s)):
            object.__setattr__(self.limits, name, limit_s)  # they are frozen for all other code

    def restore(self) -> None:
        self.end()


SMALL_AT, LARGE_AT = 4096, 1 << 20


@dataclass
class Faults:
    """The faults of the first agent, and whether further agents can be created."""

    posts_fail: bool = False
    posts_hang: bool = False
    opens_fail: bool = False
    go_on: threading.Event = field(default_factory=threading.Event)
    opened: int = 0


class _Faulty:
    """NIXL's agent with a fault in the call that starts a transfer."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def postXferReq(self, handle: Any) -> Any:  # noqa: N802 - as NIXL says
        if self._faults.posts_hang:
            self._faults.go_on.wait()
        if self._faults.posts_fail:
            raise ValueError
        return self._inner.postXferReq(handle)


def opener(faults: Faults) -> Any:
    def open_agent(arena: Arena, incarnation: int) -> NixlAgent:
        faults.opened += 1
        if incarnation and faults.opens_fail:
            raise RuntimeError("no device is left")
        agent = NixlAgent(arena, incarnation)
        if incarnation == 0:
            agent.agent = _Faulty(agent.agent, faults)
        return agent

    return open_agent


@pytest.fixture(scope="module")
def holder() -> Iterator[Holder]:
    with holder_process("nixl") as process:
        yield process


@dataclass
class Reader:
    transport: NixlTransport
    arena: HostArena
    peer: Peer
    resets: list[str]
    patience: Patience

    async def pull(self, ticket: Ticket, at: int) -> None:
        await self.peer.pull(ticket, at)
        slot.verify(self.arena, at, ticket)

    async def pull_again(self, ticket: Ticket, at: int) -> None:
        """Retries a failed pull until it succeeds."""
        async with asyncio.timeout(IN_TIME_S):
            while True:
                try:
                    return await self.pull(ticket, at)
                except TransferFailed:
                    await asyncio.sleep(0.05)

    async def until_reset(self, number: int = 1) -> None:
        async with asyncio.timeout(IN_TIME_S):
            while len(self.resets) < number:  # noqa: ASYNC110 - it is logged and counted, nobody is woken
                await asyncio.sleep(0.02)

    async def until_gone(self) -> None:
        async with asyncio.timeout(IN_TIME_S):
            while self.transport.retired or self.transport.quarantined():  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)


@asynccontextmanager
async def reading(holder: Holder, faults: Faults, *, max_pull_s: float = IN_TIME_S) -> AsyncIterator[Reader]:
    arena = HostArena(64 << 20, instance_id="reader", epoch=1)
    resets: list[str] = []
    patience = Patience()

    def on_reset(backend: str, cause: str) -> None:
        patience.restore()
        resets.append(f"{backend}: {cause}")

    transport = await NixlTransport.start(
        arena,
        machine=MACHINE,
        max_pull_s=max_pull_s,
        health=patience.limits,
        open_agent=opener(faults),
        on_reset=on_reset,
    )
    try:
        yield Reader(transport, arena, await connect_again(transport, holder), resets, patience)
    finally:
        faults.go_on.set()
        await transport.close()


async def connect_again(transport: NixlTransport, holder: Holder) -> Peer:
    """Retries until the holder can be reached."""
    async with asyncio.timeout(IN_TIME_S):
        while True:
            try:
                return await transport.connect(holder.offer)
            except TransferFailed:
                await asyncio.sleep(0.05)


@pytest.mark.extended
async def test_an_agent_whose_calls_fail_is_replaced_and_its_links_keep_working(holder: Holder) -> None:
    faults = Faults()
    async with reading(holder, faults) as reader:
        await reader.pull_again(holder.tickets[1], LARGE_AT)
        before = reader.transport.offer()
        faults.posts_fail = True
        for _ in range(MAX_FAILURES):
            with pytest.raises(TransferFailed):
                await reader.pull(holder.tickets[0], SMALL_AT)
        await reader.until_reset()
        assert reader.resets == ["nixl: failing"]
        assert reader.transport.offer() != before, "the offer is of an agent that is no longer in use"
        await reader.pull_again(holder.tickets[0], SMALL_AT)  # over the same link, through the new agent
        await reader.pull_again(holder.tickets[1], LARGE_AT)
        await reader.until_gone()
        await reader.pull_again(holder.tickets[1], LARGE_AT)
        assert reader.resets == ["nixl: failing"]


async def test_a_hanging_agent_is_replaced_and_its_destination_quarantined_until_the_call_returns(
    holder: Holder,
) -> None:
    faults = Faults()
    async with reading(holder, faults, max_pull_s=SHORT_PULL_S) as reader:
        faults.posts_hang = True
        reader.patience.end(hanging_s=0.5)
        large = holder.tickets[1]
        with pytest.raises(TransferFailed):
            await reader.pull(large, LARGE_AT)
        await reader.until_reset()
        assert reader.resets == ["nixl: hanging"]
        await reader.pull_again(holder.tickets[0], SMALL_AT)
        await asyncio.sleep(LINGER_S + 1.0)
        assert reader.transport.quarantined() == ((LARGE_AT, large.slot_nbytes),), "the call may still write there"
        assert reader.transport.retired == 1
        faults.posts_hang = False
        faults.go_on.set()
        await reader.until_gone()
        reader.arena.write(LARGE_AT, bytes(large.slot_nbytes))
        await asyncio.sleep(0.3)
        assert not any(reader.arena.read(LARGE_AT, large.slot_nbytes))
        await reader.pull_again(large, LARGE_AT)


@pytest.mark.extended
async def test_failed_replacements_are_retried_with_growing_pauses(holder: Holder) -> None:
    faults = Faults(opens_fail=True)
    async with reading(holder, faults) as reader:
        faults.posts_fail = True
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while (took_s := loop.time() - began_s) < 4.0 or faults.opened == 1:
            with pytest.raises(TransferFailed):
                await reader.pull(holder.tickets[0], SMALL_AT)
            await asyncio.sleep(0.02)
        assert faults.opened - 1 <= 3.6 + took_s, "pauses of 0.2, 0.4, 0.8, 1, 1 s"
        faults.opens_fail = False
        await reader.pull_again(holder.tickets[0], SMALL_AT)
        assert reader.resets == ["nixl: failing"]


async def test_a_holder_whose_agent_was_replaced_is_reached_by_its_new_offer(holder: Holder) -> None:
    """Pulls in both directions, as hybrid instances are."""
    faults = Faults()
    async with reading(holder, faults) as both:
        out = textwrap.dedent(
            """
            import asyncio, sys
            from tests.contract.transport_kit import MACHINE
            from triptych.domain.instance import TransportOffer
            from triptych.errors import TransferFailed
            from triptych.transport.arena import HostArena
            from triptych.transport.nixl import NixlTransport

            async def main():
                arena = HostArena(1 << 20, instance_id="other", epoch=1)
                transport = await NixlTransport.start(arena, machine=MACHINE, max_pull_s=20)
                for line in sys.stdin:
                    try:
                        peer = await transport.connect(TransportOffer("nixl", MACHINE, bytes.fromhex(line.strip())))
                        print("met", flush=True)
                    except TransferFailed as error:
                        print(error.message, flush=True)
                await transport.close()

            asyncio.run(main())
            """
        )
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-c", out, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert other.stdin is not None
        assert other.stdout is not None

        async def meets(offer: bytes) -> bytes:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write(offer.hex().encode() + b"\n")
            async with asyncio.timeout(2 * IN_TIME_S):  # it has not started yet
                return await other.stdout.readline()

        before = both.transport.offer().metadata
        assert await meets(before) == b"met\n"
        faults.posts_fail = True
        for _ in range(MAX_FAILURES):
            with pytest.raises(TransferFailed):
                await both.pull(holder.tickets[0], SMALL_AT)
        await both.until_reset()
        await both.until_gone()
        assert await meets(both.transport.offer().metadata) == b"met\n"
        other.stdin.close()
        await other.wait()


STOPPED = """
import asyncio, signal
from tests.contract.transport_kit import MACHINE, holder_process
from tests.integration.transport.test_reset import IN_TIME_S, SHORT_PULL_S, Patience, connect_again
from triptych.errors import TransferFailed
from triptych.transport import slot
from triptych.transport.arena import HostArena
from triptych.transport.nixl import NixlTransport

AT, ELSEWHERE = 1 << 20, 64 << 20

async def pull_again(peer, ticket, arena):
    async with asyncio.timeout(IN_TIME_S):
        while True:
            try:
                await peer.pull(ticket, ELSEWHERE)
                return slot.verify(arena, ELSEWHERE, ticket)
            except TransferFailed:
                await asyncio.sleep(0.05)

async def turn(number, transport, resets, healthy, steady, patience):
    arena = transport.arena
    with holder_process("nixl", name=f"stopped-{number}") as stopped:
        large = stopped.tickets[1]
        peer = await connect_again(transport, stopped)
        stopped.signal(signal.SIGSTOP)
        patience.end(stuck_s=0.5)
        try:
            await peer.pull(large, AT)
            raise AssertionError("a holder that stands still was read")
        except TransferFailed:
            pass
        assert transport.quarantined() == ((AT, large.slot_nbytes),)
        await peer.close()
        async with asyncio.timeout(IN_TIME_S):
            while len(resets) <= number:
                await asyncio.sleep(0.02)
        await pull_again(steady, healthy.tickets[0], arena)
        async with asyncio.timeout(IN_TIME_S):
            while transport.quarantined():
                await asyncio.sleep(0.02)
        arena.write(AT, bytes(large.slot_nbytes))
        stopped.signal(signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert not any(arena.read(AT, large.slot_nbytes)), "a late write reached memory that is used again"

async def main():
    resets, patience = [], Patience()

    def on_reset(_, cause):
        patience.restore()
        resets.append(cause)

    with holder_process("nixl", name="healthy") as healthy:
        transport = await NixlTransport.start(
            HostArena(128 << 20, instance_id="reader", epoch=1),
            machine=MACHINE,
            max_pull_s=SHORT_PULL_S,
            health=patience.limits,
            on_reset=on_reset,
        )
        steady = await connect_again(transport, healthy)
        for number in range(3):
            await turn(number, transport, resets, healthy, steady, patience)
        await pull_again(steady, healthy.tickets[0], transport.arena)
        async with asyncio.timeout(IN_TIME_S):
            while transport.retired:
                await asyncio.sleep(0.05)
        print("resets:", len(resets), *set(resets))
        await transport.close()

asyncio.run(main())
"""


@pytest.mark.extended
def test_repeatedly_stopped_holders_cost_one_agent_each_and_no_memory() -> None:
    """As between hosts; through shared memory NIXL can read a stopped holder."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPED],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, **UCX_OVER_TCP},  # noqa: TID251 - a child process gets all of it
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-3000:]}"
    assert "resets: 3 stuck" in done.stdout  # UCX prints lost requests to stdout
