"""Every store behaves the same: in memory and in Redis."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.contract.store_kit import LIMITS, Kit, RedisServer, memory_kit, redis_kit
from triptych.domain.store import Changes, Entry, Fence
from triptych.errors import Conflict, Deposed, InvalidRequest, Overloaded, StoreUnavailable
from triptych.ports import Store

BINARY = bytes(range(256))
TTL_S = 0.2


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["memory", "redis"])
async def kit(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kit]:
    if request.param == "memory":
        context = memory_kit()
    else:
        context = redis_kit(request.getfixturevalue("redis_server"), tmp_path.name)
    async with context as made:
        yield made


@pytest.fixture
def store(kit: Kit) -> Store:
    return kit.make()


# --- tables ---


@pytest.mark.parametrize("value", [b"", b"one", b" 1 two\r\n", BINARY])
async def test_an_entry_is_read_as_it_was_written(store: Store, value: bytes) -> None:
    version = await store.put("members", "encoder-1", value)
    assert await store.get("members", "encoder-1") == Entry("encoder-1", value, version)


async def test_an_entry_that_was_never_written_is_none(store: Store) -> None:
    assert await store.get("members", "encoder-1") is None
    assert await store.entries("members") == ()


async def test_entries_come_by_key_and_tables_are_apart(store: Store) -> None:
    for key in ("b", "a", "c d/é"):
        await store.put("members", key, key.encode())
    await store.put("profiles", "a", b"other")
    assert [(entry.key, entry.value) for entry in await store.entries("members")] == [
        ("a", b"a"),
        ("b", b"b"),
        ("c d/é", "c d/é".encode()),
    ]


async def test_each_write_has_a_higher_version_also_after_a_delete(store: Store) -> None:
    first = await store.put("members", "a", b"1")
    second = await store.put("members", "a", b"1")
    assert await store.delete("members", "a")
    third = await store.put("members", "a", b"1")
    assert 0 < first < second < third


async def test_a_write_that_expects_another_version_changes_nothing(store: Store) -> None:
    first = await store.put("members", "a", b"1", expected=0)
    with pytest.raises(Conflict, match=f"version {first}"):
        await store.put("members", "a", b"2", expected=0)
    second = await store.put("members", "a", b"2", expected=first)
    with pytest.raises(Conflict):
        await store.put("members", "a", b"3", expected=first)
    with pytest.raises(Conflict):
        await store.delete("members", "a", expected=first)
    assert await store.get("members", "a") == Entry("a", b"2", second)
    assert await store.delete("members", "a", expected=second)
    with pytest.raises(Conflict):
        await store.put("members", "a", b"3", expected=second)


async def test_deleting_what_is_not_there_says_so(store: Store) -> None:
    assert not await store.delete("members", "a")


async def test_of_concurrent_writes_that_expect_one_version_one_succeeds(kit: Kit) -> None:
    stores = [kit.make() for _ in range(4)]

    async def increment(store: Store) -> None:
        while True:
            entry = await store.get("members", "count")
            count, version = (0, 0) if entry is None else (int(entry.value), entry.version)
            try:
                await store.put("members", "count", str(count + 1).encode(), expected=version)
            except Conflict:
                continue
            return

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(increment(stores[number % 4]))
    entry = await stores[0].get("members", "count")
    assert entry is not None
    assert entry.value == b"20"


async def test_a_full_table_refuses_new_entries_only(store: Store) -> None:
    for number in range(LIMITS.max_entries):
        await store.put("members", str(number), b"")
    with pytest.raises(Overloaded, match=str(LIMITS.max_entries)):
        await store.put("members", "one more", b"")
    await store.put("members", "0", b"changed")
    await store.delete("members", "1")
    await store.put("members", "one more", b"")
    assert len(await store.entries("members")) == LIMITS.max_entries


async def test_names_keys_and_sizes_are_bounded(store: Store) -> None:
    for table in ("", "Members", "a:b", "a" * 65, "a\n"):
        with pytest.raises(InvalidRequest, match="is not a name"):
            await store.put(table, "a", b"")
    for key in ("", "a" * 257, "a\nb", "\ud800"):
        with pytest.raises(InvalidRequest, match="is not a key"):
            await store.put("members", key, b"")
    with pytest.raises(InvalidRequest, match="1001 bytes"):
        await store.put("members", "a", bytes(LIMITS.max_value_bytes + 1))
    with pytest.raises(InvalidRequest, match="1001 bytes"):
        await store.append("decisions", bytes(LIMITS.max_value_bytes + 1), keep=1)
    for number in (0, -1, LIMITS.max_log_records + 1):
        with pytest.raises(InvalidRequest, match="number of log records"):
            await store.append("decisions", b"", keep=number)
        with pytest.raises(InvalidRequest, match="number of log records"):
            await store.tail("decisions", number)
    for ttl_s in (0.0, -1.0, 3601.0, float("nan")):
        with pytest.raises(InvalidRequest, match="time to live"):
            await store.acquire("leader", "a", ttl_s)
    assert await store.entries("members") == ()
    await store.put("members", "a" * 256, bytes(LIMITS.max_value_bytes))


# --- logs ---


async def test_a_log_keeps_its_last_records_in_order(store: Store) -> None:
    assert await store.tail("decisions", 5) == ()
    numbers = [await store.append("decisions", str(number).encode() + BINARY, keep=3) for number in range(5)]
    records = await store.tail("decisions", 50)
    assert [record.value for record in records] == [str(number).encode() + BINARY for number in (2, 3, 4)]
    assert [record.number for record in records] == numbers[-3:] == sorted(numbers[-3:])
    assert await store.tail("decisions", 2) == records[-2:]


# --- leases ---


async def test_a_lease_has_one_holder_until_it_ends(kit: Kit) -> None:
    one, other = kit.make(), kit.make()
    fence = await one.acquire("leader", "one", TTL_S)
    assert fence is not None
    assert await other.acquire("leader", "other", TTL_S) is None
    assert await other.holder("leader") == "one"
    assert await other.acquire("another-lease", "other", TTL_S) is not None
    await kit.pass_time(TTL_S + 0.05)
    assert await other.holder("leader") is None
    assert not await one.renew(fence, TTL_S)
    later = await other.acquire("leader", "other", TTL_S)
    assert later is not None
    assert later.token > fence.token


async def test_renewing_moves_the_end(kit: Kit) -> None:
    store = kit.make()
    fence = await store.acquire("leader", "one", TTL_S)
    assert fence is not None
    for _ in range(3):
        await kit.pass_time(TTL_S / 2)
        assert await store.renew(fence, TTL_S)
    assert await store.acquire("leader", "other", TTL_S) is None


async def test_only_the_holder_can_release_and_then_another_acquires_at_once(store: Store) -> None:
    fence = await store.acquire("leader", "one", 60)
    assert fence is not None
    assert not await store.release(Fence("leader", fence.token - 1))
    assert not await store.release(Fence("other", fence.token))
    assert await store.holder("leader") == "one"
    assert await store.release(fence)
    assert not await store.release(fence)
    assert await store.acquire("leader", "other", 60) is not None


async def test_an_owner_that_acquires_again_gets_a_new_token_and_its_old_one_is_refused(store: Store) -> None:
    first = await store.acquire("leader", "one", 60)
    second = await store.acquire("leader", "one", 60)
    assert first is not None
    assert second is not None
    assert second.token > first.token
    assert not await store.renew(first, 60)
    with pytest.raises(Deposed):
        await store.put("members", "a", b"", fence=first)
    await store.put("members", "a", b"", fence=second)


async def test_of_concurrent_owners_one_acquires(kit: Kit) -> None:
    stores = [kit.make() for _ in range(4)]
    fences = await asyncio.gather(*(stores[n % 4].acquire("leader", f"owner {n}", 60) for n in range(20)))
    assert sum(fence is not None for fence in fences) == 1


async def test_a_write_of_a_deposed_holder_is_refused_and_changes_nothing(kit: Kit) -> None:
    old, new = kit.make(), kit.make()
    fence = await old.acquire("leader", "old", TTL_S)
    assert fence is not None
    version = await old.put("sizes", "a", b"2", fence=fence)
    await old.append("decisions", b"grow", keep=10, fence=fence)
    await kit.pass_time(TTL_S + 0.05)
    taken = await new.acquire("leader", "new", 60)
    assert taken is not None
    with pytest.raises(Deposed):
        await old.put("sizes", "a", b"9", fence=fence)
    with pytest.raises(Deposed):  # a version that matches does not help
        await old.put("sizes", "a", b"9", expected=version, fence=fence)
    with pytest.raises(Deposed):
        await old.delete("sizes", "a", fence=fence)
    with pytest.raises(Deposed):
        await old.append("decisions", b"shrink", keep=10, fence=fence)
    assert await new.get("sizes", "a") == Entry("a", b"2", version)
    assert [record.value for record in await new.tail("decisions", 10)] == [b"grow"]
    await new.put("sizes", "a", b"3", expected=version, fence=taken)


async def test_a_holder_whose_lease_ended_is_refused_also_when_nobody_took_it(kit: Kit) -> None:
    store = kit.make()
    ended = await store.acquire("leader", "one", TTL_S)
    assert ended is not None
    await kit.pass_time(TTL_S + 0.05)
    with pytest.raises(Deposed):
        await store.put("sizes", "a", b"", fence=ended)
    released = await store.acquire("leader", "one", 60)
    assert released is not None
    await store.release(released)
    with pytest.raises(Deposed):
        await store.put("sizes", "a", b"", fence=released)
    with pytest.raises(Deposed):
        await store.put("sizes", "a", b"", fence=Fence("never-acquired", 1))


# --- watching ---


async def test_a_watcher_sees_all_entries_and_then_each_change(kit: Kit) -> None:
    store, writer = kit.make(), kit.make()
    await writer.put("members", "b", b"1")
    await writer.put("members", "a", b"1")
    async with asyncio.timeout(60), aclosing(store.watch("members")) as changes:
        assert [entry.key for entry in (await anext(changes)).written] == ["a", "b"]
        await writer.put("profiles", "a", b"of another table")
        version = await writer.put("members", "a", b"2")
        assert await anext(changes) == Changes((Entry("a", b"2", version),))
        await writer.delete("members", "b")
        assert await anext(changes) == Changes((), ("b",))


async def test_the_first_changes_of_an_empty_table_are_empty(store: Store) -> None:
    async with asyncio.timeout(60), aclosing(store.watch("members")) as changes:
        assert await anext(changes) == Changes()


async def test_a_slow_watcher_gets_the_last_state_of_what_changed(kit: Kit) -> None:
    store, writer = kit.make(), kit.make()
    async with asyncio.timeout(60), aclosing(store.watch("members")) as changes:
        await anext(changes)
        for number in range(10):
            await writer.put("members", "a", str(number).encode())
        await writer.put("members", "b", b"")
        await writer.delete("members", "b")
        assert [entry.value for entry in (await anext(changes)).written] == [b"9"]


async def test_watchers_are_independent(kit: Kit) -> None:
    store = kit.make()
    async with (
        asyncio.timeout(60),
        aclosing(store.watch("members")) as first,
        aclosing(kit.make().watch("members")) as second,
    ):
        await anext(first)
        await anext(second)
        await store.put("members", "a", b"1")
        assert await anext(first) == await anext(second)


# --- the end ---


async def test_a_closed_store_refuses_every_call_and_ends_its_watchers(store: Store) -> None:
    async with aclosing(store.watch("members")) as changes:
        await anext(changes)
        await store.close()
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(anext(changes), 10)
    for call in (
        store.get("members", "a"),
        store.entries("members"),
        store.put("members", "a", b""),
        store.delete("members", "a"),
        store.append("decisions", b"", keep=1),
        store.tail("decisions", 1),
        store.acquire("leader", "a", 1),
        store.renew(Fence("leader", 1), 1),
        store.release(Fence("leader", 1)),
        store.holder("leader"),
    ):
        with pytest.raises(StoreUnavailable):
            await call
