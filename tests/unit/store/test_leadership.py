"""Leadership: one leader at a time, which knows by its own clock when it no longer is."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest

from triptych.domain.store import Fence
from triptych.errors import Deposed
from triptych.store.leadership import Leadership, LeaseTimes
from triptych.store.memory import MemoryStore
from triptych.testing.store import StoreLink
from triptych.virtual import virtual_time

TIMES = LeaseTimes(lease_ttl_s=10, lease_margin_s=2, lease_retry_s=2)


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Process:
    """A process that may lead, over its own connection to the store, with its own clock."""

    def __init__(self, store: MemoryStore, name: str, *, timeout_s: float = 2.0) -> None:
        self.link = StoreLink(store, timeout_s=timeout_s)
        self.leadership = Leadership(self.link, lease="leader", owner=name, times=TIMES, clock=now_s)
        self.changes: list[tuple[float, bool]] = []
        self.leadership.on_change = lambda fence: self.changes.append((round(now_s(), 1), fence is not None))

    @property
    def fence(self) -> Fence | None:
        return self.leadership.fence

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.leadership.run())
            yield
            task.cancel()


def run(program: Callable[[MemoryStore], Coroutine[object, object, None]]) -> None:
    async def main() -> None:
        await program(MemoryStore(clock=now_s))

    virtual_time.run(main(), seed=1)


def test_one_of_two_leads_and_the_other_follows_when_it_stops() -> None:
    async def program(store: MemoryStore) -> None:
        one, two = Process(store, "one"), Process(store, "two")
        async with two.running():
            async with one.running():
                await asyncio.sleep(60)
                led = [process for process in (one, two) if process.fence is not None]
                assert len(led) == 1
                assert len(one.changes) + len(two.changes) == 1  # kept, not taken turn by turn
            await asyncio.sleep(TIMES.lease_retry_s + 0.1)
            assert one.fence is None
            assert two.fence is not None

    run(program)


def test_a_leader_that_dies_is_replaced_after_its_lease() -> None:
    async def program(store: MemoryStore) -> None:
        assert await store.acquire("leader", "dead", TIMES.lease_ttl_s) is not None
        one = Process(store, "one")
        async with one.running():
            await asyncio.sleep(TIMES.lease_ttl_s - 0.5)
            assert one.fence is None
            await asyncio.sleep(TIMES.lease_retry_s + 0.6)
            assert one.fence is not None

    run(program)


def test_a_leader_without_the_store_stops_before_its_lease_ends_there() -> None:
    async def program(store: MemoryStore) -> None:
        one, two = Process(store, "one"), Process(store, "two")
        async with one.running():
            await asyncio.sleep(1)
            async with two.running():
                await asyncio.sleep(20)
                one.link.cut = True
                cut_s = now_s()
                while two.fence is None:
                    assert await store.holder("leader") == "one" or one.fence is None
                    await asyncio.sleep(0.01)
                stopped_s = one.changes[-1][0]
                assert one.changes[-1][1] is False
                assert stopped_s <= cut_s + TIMES.lease_ttl_s - TIMES.lease_margin_s + 0.1
                assert two.changes[-1][0] >= stopped_s + TIMES.lease_margin_s - 0.1
                one.link.cut = False
                await asyncio.sleep(20)
                assert one.fence is None
                assert two.fence is not None

    run(program)


def test_a_leader_that_reaches_the_store_again_in_time_goes_on_leading() -> None:
    async def program(store: MemoryStore) -> None:
        one = Process(store, "one")
        async with one.running():
            await asyncio.sleep(20.5)
            fence = one.fence
            one.link.cut = True
            await asyncio.sleep(4)
            one.link.cut = False
            await asyncio.sleep(60)
            assert one.fence == fence
            assert len(one.changes) == 1

    run(program)


def test_a_leader_paused_past_its_lease_does_not_act_when_it_continues() -> None:
    """The leader's tasks stand still while time passes, as under SIGSTOP: nothing tells it before its next action."""

    async def program(store: MemoryStore) -> None:
        one, two = Process(store, "one", timeout_s=1e6), Process(store, "two")
        async with one.running():
            await asyncio.sleep(5)
            old = one.fence
            assert old is not None
            one.link.cut = True  # its next call stands still for ever
            async with two.running():
                await asyncio.sleep(TIMES.lease_ttl_s + TIMES.lease_retry_s)
                assert [led for _, led in one.changes] == [True]  # nothing has told it
                assert one.fence is None
                assert two.fence is not None
                with pytest.raises(Deposed):  # what it had sent before it was paused arrives now
                    await store.put("sizes", "a", b"9", fence=old)
                one.link.cut = False

    run(program)


def test_the_lease_counts_from_before_the_call_that_got_it() -> None:
    async def program(store: MemoryStore) -> None:
        one = Process(store, "one")
        one.link.latency_s = 1.5
        async with one.running():
            await asyncio.sleep(1.6)
            assert one.fence is not None
            one.link.cut = True
            await asyncio.sleep(TIMES.lease_ttl_s - TIMES.lease_margin_s - 1.6 + 0.01)
            assert one.fence is None

    run(program)


def test_an_emptied_store_deposes_the_leader_and_elects_one_again() -> None:
    async def program(store: MemoryStore) -> None:
        one = Process(store, "one")
        async with one.running():
            await asyncio.sleep(5)
            old = one.fence
            assert old is not None
            await store.release(old)  # as FLUSHALL does
            await asyncio.sleep(TIMES.lease_retry_s + 0.1)
            new = one.fence
            assert new is not None
            assert new.token > old.token

    run(program)


@pytest.mark.parametrize(
    ("ttl_s", "margin_s", "retry_s"), [(10, 0, 2), (10, 10, 2), (10, 8, 2), (10, 2, 0), (7200, 2, 2)]
)
def test_times_that_cannot_work_are_refused(ttl_s: float, margin_s: float, retry_s: float) -> None:
    with pytest.raises(ValueError, match="must hold"):
        LeaseTimes(ttl_s, margin_s, retry_s)
