"""What the leading manager keeps in the store for the next one."""

import asyncio

import pytest

from triptych.domain.decision import (
    Bounds,
    Decision,
    DecisionOutcome,
    DecisionRecord,
    InstancePhase,
    Override,
    PoolInstance,
    PoolLoad,
    PoolView,
    Reason,
    SavedPool,
    Why,
)
from triptych.domain.store import Fence
from triptych.errors import Deposed, InvalidRequest, StoreUnavailable
from triptych.services.pool_manager.keeper import Keeper, Left, later
from triptych.store.limits import StoreLimits
from triptych.store.memory import MemoryStore
from triptych.testing.store import StoreLink
from triptych.virtual import virtual_time

POOL = SavedPool(3, Override(3, 60.0), "gave up", (10.0, 20.0), ((7, 1.5),))


def now_s() -> float:
    return asyncio.get_running_loop().time()


def record(number: int, *, instances: int = 1, outcome: DecisionOutcome = DecisionOutcome.PENDING) -> DecisionRecord:
    there = tuple(PoolInstance(f"e{index}", InstancePhase.READY) for index in range(instances))
    view = PoolView("m/E", 2, Bounds(1, 9), there, PoolLoad(1.0, 2.0, 3.0, 4.0, 5.0, 1.0))
    return DecisionRecord(number, view, Decision(3, (Reason(Why.LOAD, "much"),)), outcome)


async def led(store: MemoryStore) -> Fence:
    fence = await store.acquire("pool-manager", "me", 3600)
    assert fence is not None
    return fence


async def test_the_next_manager_reads_what_was_written() -> None:
    store = MemoryStore(clock=now_s)
    fence = await led(store)
    keeper = Keeper(store, now_s, "me")
    keeper.note(record(1))
    keeper.note(record(2))
    keeper.note(record(1, outcome=DecisionOutcome.DONE))
    await keeper.write({"m/E": POOL}, fence)
    other = Keeper(store, now_s, "me")
    assert await other.read() == {"m/E": Left("me", POOL)}
    assert await other.read_decisions() == {"m/E": (record(1, outcome=DecisionOutcome.DONE), record(2))}
    await keeper.write({}, fence)
    assert await other.read() == {}


def test_times_count_on() -> None:
    assert later(POOL, 5.0) == SavedPool(3, Override(3, 55.0), "gave up", (15.0, 25.0), ((7, 6.5),))


async def test_a_decision_that_is_too_large_is_kept_without_its_instances() -> None:
    store = MemoryStore(clock=now_s, limits=StoreLimits(max_value_bytes=2000))
    keeper = Keeper(store, now_s, "me")
    keeper.note(record(1, instances=100))
    await keeper.write({}, await led(store))
    (kept,) = (await keeper.read_decisions())["m/E"]
    assert (kept.view.instances, kept.decision) == ((), record(1).decision)


async def test_what_another_program_wrote_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore(clock=now_s)
    keeper = Keeper(store, now_s, "me")
    await store.put("pools", "m/E", b"[]")
    await store.append("decisions", b"{}", keep=10)
    assert await keeper.read() == {}
    assert await keeper.read_decisions() == {}
    assert "entry of m/E in pools cannot be used" in caplog.text
    fence = await led(store)
    await keeper.write({"m/E": POOL}, fence)
    assert await keeper.read() == {"m/E": Left("me", POOL)}


async def test_an_entry_that_cannot_be_used_is_logged_when_that_begins(caplog: pytest.LogCaptureFixture) -> None:
    """A leader of another release writes it every few seconds, and those that follow read it as often."""
    store = MemoryStore(clock=now_s)
    keeper, fence = Keeper(store, now_s, "me"), await led(store)
    logged = []
    for value in (b"[]", b"[1]", b"[2]", None, b"[]"):
        if value is None:
            await keeper.write({"m/E": POOL}, fence)
        else:
            await store.put("pools", "m/E", value)
        await keeper.read()
        logged.append(len(caplog.records))
    assert logged == [1, 1, 1, 1, 2]


async def test_a_deposed_manager_writes_nothing() -> None:
    store = MemoryStore(clock=now_s)
    fence = await led(store)
    await store.release(fence)
    with pytest.raises(Deposed):
        await Keeper(store, now_s, "me").write({"m/E": POOL}, fence)
    assert await store.entries("pools") == ()


def test_decisions_made_while_the_store_is_away_are_written_later_and_the_oldest_dropped() -> None:
    async def test() -> None:
        store = MemoryStore(clock=now_s)
        link = StoreLink(store)
        fence = await led(store)
        keeper = Keeper(link, now_s, "me")
        link.cut = True
        for number in range(1000):
            keeper.note(record(number))
        with pytest.raises(StoreUnavailable):
            await keeper.write({}, fence)
        link.cut = False
        await keeper.write({}, fence)
        numbers = [decision.number for decision in (await keeper.read_decisions())["m/E"]]
        assert numbers == list(range(1000 - 256, 1000))

    virtual_time.run(test())


def test_nothing_is_written_while_nothing_changes_but_times_now_and_then() -> None:
    async def test() -> None:
        store = MemoryStore(clock=now_s)
        fence = await led(store)
        keeper = Keeper(store, now_s, "me")

        async def version() -> int:
            await keeper.write({"m/E": POOL}, fence)
            (entry,) = await store.entries("pools")
            return entry.version

        first = await version()
        await asyncio.sleep(4)
        assert await version() == first
        await asyncio.sleep(2)
        assert await version() > first

    virtual_time.run(test())


async def test_what_the_store_does_not_take_is_an_error_at_once_and_a_warning_in_passing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore(clock=now_s)
    fence = await led(store)
    keeper = Keeper(store, now_s, "me")
    name = "x" * 300 + "/E"
    with pytest.raises(InvalidRequest):
        await keeper.keep(name, POOL, fence)
    await keeper.write({name: POOL, "m/E": POOL}, fence)
    await keeper.write({name: POOL, "m/E": POOL}, fence)
    assert list(await keeper.read()) == ["m/E"]
    assert caplog.text.count("cannot be kept in the store") == 1
    await keeper.write({}, fence)
    assert await keeper.read() == {}


def test_a_pool_of_which_it_is_not_known_what_the_store_has_is_written_again() -> None:
    async def test() -> None:
        store = MemoryStore(clock=now_s)
        fence = await led(store)
        link = StoreLink(store, timeout_s=0.05)
        keeper = Keeper(link, now_s, "me")
        await keeper.write({"m/E": POOL}, fence)
        link.cut = True
        with pytest.raises(StoreUnavailable):
            await keeper.keep("m/E", SavedPool(9), fence)
        link.cut = False
        await store.put("pools", "m/E", b"it was written after all", fence=fence)
        await keeper.write({"m/E": POOL}, fence)
        assert await keeper.read() == {"m/E": Left("me", POOL)}

    virtual_time.run(test())
