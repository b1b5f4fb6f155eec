"""Two pool managers as processes with a real Redis: one leads, and another takes over when it dies or is paused."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.store_kit import RedisServer
from tests.integration.store.manager_kit import LIMIT_S, Managers
from triptych.errors import TriptychError

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
async def managers(tmp_path: Path) -> AsyncIterator[Managers]:
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        async with Managers(redis, tmp_path).running() as running:
            yield running
    finally:
        redis.kill()


@pytest.mark.extended
async def test_when_the_leader_is_killed_another_goes_on_with_the_size_that_was_set(managers: Managers) -> None:
    first = await managers.leader()
    await managers.set_size(first, 3)
    await managers.until(first, lambda pool: pool.ready == 3)
    token = managers.scaler.token
    managers.processes[first].kill()
    second = await managers.leader(first)
    pool = await managers.pool(second)
    assert pool is not None
    assert pool.override is not None
    assert (pool.wanted, pool.ready, pool.override.size) == (3, 3, 3)
    assert 500 < pool.override.left_s < 600
    await managers.until(second, lambda _: managers.scaler.token > token)
    await managers.set_size(second, 1)
    await managers.until(second, lambda pool: (pool.ready, pool.draining) == (1, 0))
    assert len(managers.scaler.running) == 1


@pytest.mark.extended
async def test_a_leader_that_is_paused_past_its_lease_orders_nothing_more(managers: Managers) -> None:
    first = await managers.leader()
    await managers.set_size(first, 4)
    managers.processes[first].send_signal(signal.SIGSTOP)
    second = await managers.leader(first)
    token = managers.scaler.token
    await managers.set_size(second, 3)
    managers.processes[first].send_signal(signal.SIGCONT)
    await managers.until(first, lambda pool: pool.fault == "another manager leads")
    await managers.until(
        second, lambda pool: (pool.ready, pool.draining) == (3, 0) and len(managers.scaler.running) == 3
    )
    await asyncio.sleep(1)
    tokens = [given for given, _ in managers.scaler.accepted]
    assert tokens == sorted(tokens)
    assert tokens[-1] == token, "the second one still leads"
    assert len(managers.scaler.running) == 3


@pytest.mark.extended
async def test_while_redis_is_gone_or_empty_nothing_is_ordered_and_it_heals_by_itself(managers: Managers) -> None:
    first = await managers.leader()
    await managers.set_size(first, 3)
    await managers.until(first, lambda pool: pool.ready == 3)
    managers.redis.kill()
    for name in managers.targets:
        await managers.until(name, lambda pool: "the store does not answer" in pool.fault)
    with pytest.raises(TriptychError, match="the store does not answer"):
        await managers.set_size(first, 1)
    status = await managers.status(first)
    assert status is not None
    assert status.store_fault
    assert sum(len(pool.members) for pool in status.pools) == 3, "members do not notice"
    orders = len(managers.scaler.accepted)
    await asyncio.sleep(2)
    assert len(managers.scaler.accepted) == orders
    managers.redis.start()  # without its data
    leader = await managers.leader()
    pool = await managers.pool(leader)
    assert pool is not None
    assert (pool.wanted, pool.ready) == (3, 3)
    await managers.set_size(leader, 2)
    await managers.until(leader, lambda pool: (pool.ready, pool.draining) == (2, 0))
    async with managers.redis.admin() as admin:
        await admin.flushall()
        await managers.leader()
        async with asyncio.timeout(LIMIT_S):
            while not await admin.hexists("triptych:1:table:pools", "m/E"):  # noqa: ASYNC110 - asked over TCP
                await asyncio.sleep(0.1)
    tokens = [given for given, _ in managers.scaler.accepted]
    assert tokens == sorted(tokens)
    assert managers.scaler.refused == []
