"""Pool managers that scale a cluster while everything around them fails: each request has one end, and the pools heal."""

import asyncio
import os
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.simulation.cluster import Scaled, SimCluster, World
from tests.simulation.faults import ON_REQUESTS, Faults, Kind, plan, set_by_hand
from tests.simulation.test_pool_manager import known, members, simulate
from tests.simulation.workload import Ask, Reply, make_asks, make_bursts, make_replay, play
from triptych.domain.decision import Bounds
from triptych.domain.pool import MemberCondition
from triptych.domain.scaling import ProcessPhase
from triptych.errors import DeadlineExceeded, EngineFailure, Overloaded, Unavailable
from triptych.workload.traces import Span, load

MINUTE_S = 60.0
SEEDS, SMALL_SEEDS = 60, 20
"""The first have 64 instances from the start, the others 4 to 10."""
USUAL = (0, SEEDS, SEEDS + 1)
"""Seeds in ``make test``."""
REQUESTS = 500
BOUNDS = Bounds(2, 40)
"""At least two, so that draining one never leaves none."""


def world_of(seed: int) -> World:
    size = 32 if seed < SEEDS else Random(seed).randint(2, 5)
    return World(
        seed=seed,
        encoders=size,
        texts=size,
        managers=2,
        scaled=True,
        bounds=BOUNDS,
        encode_token_s=0.015,
        text_step_s=0.02,
        router={"slo": ("ttft=1s",)},
        encoder=QUIET,
        text=QUIET,
        manager={
            "scaler": "127.0.0.1:1",
            "autoscale": True,
            "control": {"min_instances": BOUNDS.least, "max_instances": BOUNDS.most, "start_s": 5.0, "adopt_s": 2.0},
            "scaling": {"period_s": 10.0, "low_periods": 1, "settle_s": 10.0},
        },
    )


QUIET = {"load_reports": {"load_min_interval_s": 0.1}}
"""Fewer load reports than usual, as 64 instances make many."""


def check_ends(replies: list[Reply], *, right: bool) -> Counter[str]:
    """Every request has its one right answer or, unless all must be right, one clear error; returns how many ended how."""
    ends = Counter[str]()
    for reply in replies:
        if reply.error is None or right:
            reply.check_right()
        else:
            assert reply.finished is None, f"{reply.ask.request.request_id} has an answer and an error"
            clear = (
                Unavailable | Overloaded | DeadlineExceeded | EngineFailure
            )  # the last if two instances died with it
            assert isinstance(reply.error, clear), repr(reply.error)
        ends["right" if reply.error is None else reply.error.code] += 1
    return ends


async def healed(cluster: SimCluster, scaled: Scaled) -> None:
    """Wait until every pool has its wanted size, at the scaler, at every manager and at the router."""
    async with asyncio.timeout(300):
        while await unhealed(cluster, scaled):
            for pool in await scaled.scaler.pools():
                if "gave up" in pool.fault and pool.wanted is not None:  # as documented, that takes a person
                    await set_by_hand(cluster, pool.name, pool.wanted, 5.0)
            await asyncio.sleep(1)


async def unhealed(cluster: SimCluster, scaled: Scaled) -> str:
    running = set[str]()
    for pool in await scaled.scaler.pools():
        names = {instance.name for instance in pool.instances if instance.phase is ProcessPhase.RUNNING}
        if not len(names) == len(pool.instances) == pool.wanted:
            return f"{pool}"
        running |= names
    for address in cluster.managers:
        listed = await members(cluster, address)
        active = {
            name
            for name, member in listed.items()
            if member.condition is MemberCondition.ACTIVE and not member.suspected
        }
        if not active == listed.keys() == running:
            return f"{address} lists {listed}"
    if await known(cluster) != dict.fromkeys(running, "ready"):
        return "the router knows others"
    return ""


def run(seed: int, world: World, asks: list[Ask], duration_s: float) -> None:
    """Requests and faults for this long; then everything must become well by itself."""
    troubles = plan(seed, duration_s)
    harmless = not ON_REQUESTS & {trouble.kind for trouble in troubles}

    async def scenario(cluster: SimCluster) -> None:
        assert cluster.scaled is not None
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(play(cluster.router, asks))
            group.create_task(Faults(cluster, cluster.scaled).run(troubles))
        check_ends(playing.result(), right=harmless)
        await healed(cluster, cluster.scaled)
        check_ends(await play(cluster.router, make_asks(seed + 1000, 8)), right=True)
        assert not cluster.scaled.book.violations, cluster.scaled.book.violations

    simulate(world, scenario, limit_s=duration_s + 1200)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed in USUAL else pytest.mark.extended) for seed in range(SEEDS + SMALL_SEEDS)],
)
def test_whatever_fails_while_pools_scale_every_request_has_one_right_answer_or_one_clear_error(seed: int) -> None:
    run(seed, world_of(seed), make_bursts(seed, REQUESTS, MINUTE_S), MINUTE_S)


@pytest.mark.extended
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2, 6))
def test_the_same_holds_for_the_requests_of_a_trace(seed: int) -> None:
    root = os.environ.get("TRIPTYCH_TEST_TRACES")  # noqa: TID251  # where a machine has them is not the project's to say
    if not root:
        pytest.skip("TRIPTYCH_TEST_TRACES does not name a directory with servegen-mm-image/")
    span = Span(3600.0 * Random(seed).randrange(24), MINUTE_S, rate=1.3 * REQUESTS / MINUTE_S)
    trace = load(Path(root) / "servegen-mm-image", span, None, Random(seed))
    assert len(trace.requests) >= REQUESTS
    run(seed, world_of(seed), make_replay(seed, trace), MINUTE_S)


def test_every_kind_of_fault_is_in_at_least_ten_of_the_seeds() -> None:
    seeds = Counter(kind for seed in range(60) for kind in {trouble.kind for trouble in plan(seed, MINUTE_S)})
    assert {kind: seeds[kind] for kind in Kind if seeds[kind] < 10} == {}
    assert all(len(make_bursts(seed, REQUESTS, MINUTE_S)) >= REQUESTS for seed in (0, 1))
