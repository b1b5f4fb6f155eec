"""Every scaler refuses a deposed leader's orders and follows the newest size; those that act start and stop instances."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.contract.kubernetes_kit import api_server
from tests.contract.scaler_kit import (
    GRACE_S,
    OTHER,
    POOL,
    Kit,
    kubernetes_kit,
    none_kit,
    process_kit,
    remote_kit,
    served,
    simulated_kit,
)
from triptych.cli import ports
from triptych.domain.scaling import PoolName, ProcessPhase, ScaledInstance, ScaledPool
from triptych.domain.stage import Role
from triptych.errors import Deposed, InternalError, InvalidRequest, NotFound, Unavailable
from triptych.rpc.stubs import ScalerStub
from triptych.scaling.none import NoScaler


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    with api_server(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


def kit_of(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Kit]:
    folder: Path = request.getfixturevalue("tmp_path")
    match request.param:
        case "none":
            return none_kit(folder)
        case "simulated":
            return simulated_kit()
        case "kubernetes":
            return kubernetes_kit(folder, *request.getfixturevalue("kubernetes"))
        case "remote":
            return remote_kit(folder, request.getfixturevalue("monkeypatch"))
        case _:
            return process_kit(folder, request.getfixturevalue("monkeypatch"))


@pytest.fixture(params=["none", "processes", "remote", "kubernetes", "simulated"])
async def kit(request: pytest.FixtureRequest) -> AsyncIterator[Kit]:
    async with kit_of(request) as made:
        yield made


@pytest.fixture(params=["processes", "remote", "kubernetes", "simulated"])
async def acting(request: pytest.FixtureRequest) -> AsyncIterator[Kit]:
    async with kit_of(request) as made:
        yield made


# --- orders ---


async def test_the_newest_size_is_the_wanted_one(kit: Kit) -> None:
    for size in (1, 3, 2):
        await kit.scaler.scale(POOL, size, 7)
        assert (await kit.pool()).wanted == size
    await kit.scaler.scale(OTHER, 1, 7)
    assert (await kit.pool()).wanted == 2
    assert (await kit.pool(OTHER)).wanted == 1


async def test_orders_of_a_deposed_leader_are_refused_in_every_pool(kit: Kit) -> None:
    await kit.scaler.scale(POOL, 1, 7)
    with pytest.raises(Deposed, match="token is 6"):
        await kit.scaler.scale(POOL, 2, 6)
    with pytest.raises(Deposed):
        await kit.scaler.scale(OTHER, 2, 6)
    with pytest.raises(Deposed):
        await kit.scaler.remove(POOL, "encoder-1", 6)
    assert (await kit.pool()).wanted == 1
    await kit.scaler.scale(POOL, 2, 7)
    await kit.scaler.scale(POOL, 1, 8)
    assert (await kit.pool()).wanted == 1


async def test_a_size_out_of_bounds_is_refused_and_changes_nothing(kit: Kit) -> None:
    await kit.scaler.scale(POOL, 1, 7)
    for size in (-1, kit.max_size + 1):
        with pytest.raises(InvalidRequest, match=f"must be 0 to {kit.max_size}"):
            await kit.scaler.scale(POOL, size, 8)
    await kit.scaler.scale(POOL, 1, 7)  # the refused order's token does not count
    assert (await kit.pool()).wanted == 1


# --- what is done about them ---


async def test_a_degree_that_instances_cannot_have_is_refused_with_the_reason_and_changes_nothing(kit: Kit) -> None:
    await kit.scaler.scale(POOL, 1, 7)
    with pytest.raises(InvalidRequest, match=r"degree|tensor_parallel|devices"):
        await kit.scaler.set_degree(POOL, 16, 7)
    assert (await kit.pool()).wanted == 1


async def test_a_larger_size_starts_instances(acting: Kit) -> None:
    await acting.scaler.scale(POOL, 3, 1)
    assert (await acting.pool()).count(ProcessPhase.ORDERED, ProcessPhase.STARTING, ProcessPhase.RUNNING) == 3, (
        "what is ordered counts"
    )
    pool = await acting.until(lambda pool: pool.count(ProcessPhase.RUNNING) == 3)
    assert len({instance.name for instance in pool.instances}) == 3
    assert pool.fault == ""


async def test_a_smaller_size_stops_nothing_that_runs_until_it_is_named(acting: Kit) -> None:
    await acting.scaler.scale(POOL, 3, 1)
    pool = await acting.until(lambda pool: pool.count(ProcessPhase.RUNNING) == 3)
    await acting.scaler.scale(POOL, 1, 1)
    await asyncio.sleep(0.3)
    assert (await acting.pool()).count(ProcessPhase.RUNNING) == 3
    first, second, third = (instance.name for instance in pool.instances)
    await acting.scaler.remove(POOL, first, 1)
    await acting.scaler.remove(POOL, third, 1)
    pool = await acting.until(lambda pool: len(pool.instances) == 1)
    assert [instance.name for instance in pool.instances] == [second]
    await acting.until_gone(first)
    assert acting.is_alive(second)


async def test_a_removed_instance_is_replaced_while_the_size_wants_it(acting: Kit) -> None:
    (former,) = (await acting.pool()).instances
    await acting.scaler.scale(POOL, 1, 1)
    await acting.scaler.remove(POOL, former.name, 1)

    def is_replaced(pool: ScaledPool) -> bool:
        return [(instance.name != former.name, instance.phase) for instance in pool.instances] == [
            (True, ProcessPhase.RUNNING)
        ]

    await acting.until(is_replaced)
    await acting.until_gone(former.name)


async def test_a_newer_size_takes_back_what_an_older_one_ordered(acting: Kit) -> None:
    acting.slow.touch()
    await acting.scaler.scale(POOL, 4, 1)
    await acting.until(lambda pool: pool.count(ProcessPhase.STARTING) == 3)
    await acting.scaler.scale(POOL, 1, 1)
    pool = await acting.until(lambda pool: len(pool.instances) == 1)
    assert pool.count(ProcessPhase.RUNNING) == 1


async def test_instances_that_cannot_start_are_reported_with_the_reason_and_a_newer_size_heals(acting: Kit) -> None:
    acting.broken.touch()
    await acting.scaler.scale(POOL, 2, 1)
    pool = await acting.until(lambda pool: pool.fault != "")
    assert "crash" in pool.fault.lower()
    assert pool.count(ProcessPhase.RUNNING) == 1
    (failed,) = [instance for instance in pool.instances if instance.phase is ProcessPhase.FAILED]
    assert failed.reason in pool.fault
    acting.broken.unlink()
    await acting.scaler.scale(POOL, 3, 1)
    pool = await acting.until(lambda pool: pool.count(ProcessPhase.RUNNING) == 3)
    assert pool.fault == ""


async def test_unknown_pools_and_instances_are_refused(acting: Kit) -> None:
    with pytest.raises(NotFound):
        await acting.scaler.scale(type(POOL)("another-model", POOL.role), 1, 1)
    with pytest.raises(NotFound):
        await acting.scaler.remove(POOL, "encoder-99", 1)
    with pytest.raises(NotFound):
        await acting.scaler.remove(POOL, "text-1", 1)


# --- processes only ---


async def test_an_instance_that_still_works_is_not_killed_before_the_grace_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with process_kit(tmp_path, monkeypatch, "--stubborn") as kit:
        loop = asyncio.get_running_loop()
        await kit.scaler.scale(POOL, 0, 1)
        await kit.scaler.remove(POOL, "encoder-1", 1)
        asked_s = loop.time()
        while kit.is_alive("encoder-1"):
            assert (await kit.pool()).count(ProcessPhase.STOPPING) == 1
            await asyncio.sleep(0.02)
        assert GRACE_S - 0.1 <= loop.time() - asked_s < GRACE_S + 10
        await kit.until(lambda pool: pool.instances == ())


# --- in another process ---


async def test_a_scaler_that_is_away_is_unavailable_and_serves_again_when_it_is_back() -> None:
    scaler = NoScaler()
    (port,) = ports.free(1)
    async with served(scaler, port=port) as stub:
        await stub.scale(POOL, 2, 5)
    away = ScalerStub(ports.address(port), timeout_s=2)
    for call in (away.scale(POOL, 3, 5), away.remove(POOL, "encoder-1", 5), away.pools()):
        with pytest.raises(Unavailable, match="the scaler cannot be reached"):
            await call
    async with served(scaler, port=port):
        async with asyncio.timeout(60):
            while True:
                try:
                    (pool,) = await away.pools()
                    break
                except Unavailable:
                    await asyncio.sleep(0.05)
        assert pool.wanted == 2
        with pytest.raises(Deposed, match="token is 4"):
            await away.scale(POOL, 3, 4)
    await away.close()


class Hanging(NoScaler):
    async def pools(self) -> tuple[ScaledPool, ...]:
        await asyncio.Event().wait()
        return ()


async def test_a_scaler_that_does_not_answer_in_time_is_unavailable() -> None:
    async with served(Hanging(), timeout_s=0.1) as stub:
        with pytest.raises(Unavailable, match=r"did not answer within 0\.1 s"):
            await stub.pools()


class Verbose(NoScaler):
    def __init__(self, *pools: ScaledPool) -> None:
        super().__init__()
        self._pools = pools

    async def pools(self) -> tuple[ScaledPool, ...]:
        return self._pools


@pytest.mark.parametrize(
    "pools",
    [
        (ScaledPool(POOL, 1, ()), ScaledPool(POOL, 2, ())),
        tuple(ScaledPool(PoolName(f"m{number}", Role.E), 1, ()) for number in range(1025)),
        (ScaledPool(POOL, 4097, tuple(ScaledInstance(f"e-{number}", ProcessPhase.RUNNING) for number in range(4097))),),
        (ScaledPool(POOL, 1, (), "x" * 4097),),
        (ScaledPool(PoolName("m" * 513, Role.E), 1, ()),),
    ],
    ids=["a pool twice", "many pools", "many instances", "a long fault", "a long name"],
)
async def test_a_report_of_another_process_that_is_out_of_bounds_is_refused(pools: tuple[ScaledPool, ...]) -> None:
    async with served(Verbose(*pools)) as stub:
        with pytest.raises(InternalError, match="invalid answer"):
            await stub.pools()
