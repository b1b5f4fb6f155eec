"""A cluster of processes whose engines sleep follows its plan while the mix of requests changes."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.e2e.test_plan import sleeping_profiles
from tests.unit.cli.plan.plans import placement, plan_of, written
from triptych.cli.bench import load as bench
from triptych.cli.bench.payload import Style
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID
from triptych.domain.mix import Form
from triptych.domain.replanning import PlanOutcome, PlanStatus
from triptych.domain.stage import Role
from triptych.errors import TriptychError
from triptych.rpc.stubs import PoolManagerStub
from triptych.runtime.plans import Budget, PlacedPool, Placement
from triptych.workload.report import Objectives, Record
from triptych.workload.requests import Planned, Size

RATE, MOST = 5.0, 4
TEXT_S, IMAGES_S, AGAIN_S = 30.0, 110.0, 110.0
OBJECTIVES = Objectives(1.5, 0.3)
IMAGE = Size(112, 112)
MIX = (Form("text", 300, 300, prompt_tokens=600 * 20, output_tokens=300 * 12),)
SETTINGS = {"max-sequences": "16", "max-batch-items": "1"}
FOLLOWING = (
    "--replan",
    "--drift-persists-s=5",
    "--drift-requests=60",
    "--replan-rest-s=20",
)


@dataclass
class Watched:
    """What a pool manager said while a load was served."""

    instance_s: float = 0.0
    most: int = 0
    last: PlanStatus | None = None
    seen: set[PlanOutcome] = field(default_factory=set)


async def watch(manager: PoolManagerStub, watched: Watched) -> None:
    """Until cancelled."""
    loop = asyncio.get_running_loop()
    before_s = loop.time()
    while True:
        await asyncio.sleep(0.5)
        try:
            status = await manager.status()
        except TriptychError:
            continue
        now_s = loop.time()
        members = sum(len(pool.members) for pool in status.pools if pool.role is not None)
        starting = sum(pool.scaling.starting for pool in status.pools if pool.scaling is not None)
        watched.instance_s += (members + starting) * (now_s - before_s)
        watched.most = max(watched.most, members + starting)
        watched.last, before_s = status.plan, now_s
        if status.plan is not None:
            watched.seen |= {decision.outcome for decision in status.plan.decisions}


def requests() -> list[Planned]:
    """Text, then images, then text again."""
    planned, at_s, rng = [], 0.0, Random(1)
    while at_s < TEXT_S + IMAGES_S + AGAIN_S:
        is_image = TEXT_S <= at_s < TEXT_S + IMAGES_S
        planned.append(Planned(at_s, 8, (IMAGE,) if is_image else (), 12))
        at_s += rng.expovariate(RATE)
    return planned


async def served(
    folder: Path, placed: Placement, devices: Mapping[str, int | None], **common: str
) -> tuple[list[Record], Watched]:
    """What a cluster that follows a plan has answered. ``common``: options of the plan beside its profiles."""
    profiles = sleeping_profiles(folder)
    common |= {"profiles": str(profiles)}
    made = plan_of(placed, common=common, objectives=OBJECTIVES, budget=Budget(devices, None, RATE))
    plan = written(folder, replace(made, mix=MIX))
    delayed, known = (f"--delay-profile={profiles}",), (f"--profiles={profiles}",)
    options = {
        "encoder": (*delayed, "--max-batch-items=1"),
        "mounted_encoder": ("--max-batch-items=1",),
        "text": (*delayed, "--max-sequences=16"),
        "router": (*known, "--slo=ttft=1.5s,tbt=300ms"),
        "pool_manager": (*known, f"--plan={plan}", *FOLLOWING),
    }
    records: list[Record] = []
    watched = Watched()
    async with LocalCluster(
        roles=placed.roles_text,
        switchable=True,
        autoscale=True,
        options=options,
        log_dir=folder / "logs",
        drain_s=20.0,
    ) as cluster:
        manager = PoolManagerStub(cluster.manager_target)
        endpoint = bench.Endpoint(cluster.url, timeout_s=120.0)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch(manager, watched))
            await bench.run(endpoint, requests(), Style(MODEL_ID, ignore_eos=True), Random(1), records.append)
            watching.cancel()
        await manager.close()
    return records, watched


@pytest.mark.extended
@pytest.mark.timeout(600)
async def test_instances_follow_the_mix_and_no_request_fails(tmp_path: Path) -> None:
    placed = placement({"EPD": 1}, prepare_cores=1, settings=SETTINGS)
    records, watched = await served(tmp_path, placed, {"cpu": MOST})
    failed = [record.error for record in records if not record.ok]
    assert not failed
    assert watched.last is not None
    story = json.dumps([_said(watched.last), watched.instance_s, watched.most])
    outcomes = [decision.outcome for decision in watched.last.decisions]
    assert outcomes.count(PlanOutcome.MOVED) >= 2, story
    assert PlanOutcome.FAILED not in watched.seen, story
    assert watched.most > 1, story
    assert watched.instance_s <= 0.8 * watched.most * (TEXT_S + IMAGES_S + AGAIN_S), story
    assert sum(entry.count for entry in watched.last.present) < watched.most, story


@pytest.mark.extended
@pytest.mark.timeout(600)
async def test_counts_move_within_tiers_and_the_dear_one_is_given_up(tmp_path: Path) -> None:
    catalogue = tmp_path / "catalogue.toml"
    catalogue.write_text(
        "".join(
            f'[device.{name}]\nlike = "cpu"\nprice = {{ usd_per_hour = {usd}, date = "2026-11-30", source = "a test" }}\n'
            for name, usd in (("cheap", 1), ("dear", 3))
        )
    )
    placed = placement(
        {"EPD": 1}, "cheap", prepare_cores=1, settings=SETTINGS, more=(PlacedPool(Role.EPD, 1, "dear", 1),)
    )
    records, watched = await served(tmp_path, placed, {"cheap": 3, "dear": 2}, catalogue=str(catalogue))
    assert watched.last is not None
    story = json.dumps([_said(watched.last), watched.instance_s, watched.most])
    assert not [record.error for record in records if not record.ok], story
    assert PlanOutcome.FAILED not in watched.seen, story
    moved = [decision for decision in watched.last.decisions if decision.outcome is PlanOutcome.MOVED]
    assert moved, story
    cheap = [sum(entry.count for entry in move.wanted if entry.tier == "cheap") for move in moved]
    assert max(cheap) > 1, story
    assert {entry.tier for entry in watched.last.present} == {"cheap"}, story


def _said(plan: PlanStatus) -> list[Any]:
    return [[decision.outcome.value, decision.reason] for decision in plan.decisions]
