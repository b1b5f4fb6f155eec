"""Plans that run: from a prediction to a cluster of engines that sleep, and back to the prediction."""

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.cli.plan.plans import placement, plan_of, written
from triptych.cli import ports
from triptych.demo import MODEL_DIR
from triptych.engine.delay import synthetic_profiles
from triptych.planning.calibration import Calibration, kinds_of
from triptych.runtime.host import cpu_name
from triptych.runtime.plans import Figures, KindFigures, Placement, PlanRecord
from triptych.runtime.profiles import write_profile
from triptych.workload.report import Latency, Objectives

READY_S = 120.0
WORKLOAD = {
    "rate": "4",
    "duration": "6",
    "images": "0:0.5,1:0.5",
    "image-size": "112x112",
    "text-tokens": "16",
    "output-tokens": "12",
}
"""Half of it with images, of which an encoder bears about five in a second."""


async def ran(*arguments: object, environ: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """The status of a command, and what it prints on both outputs. ``environ``: added to this process's."""
    command = (sys.executable, "-m", "triptych.cli", *map(str, arguments))
    pipe, added = asyncio.subprocess.PIPE, {**os.environ, **(environ or {})}  # noqa: TID251 - a child gets it
    process = await asyncio.create_subprocess_exec(*command, env=added, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def triptych(*arguments: object, status: int = 0) -> str:
    """What a command prints on its output."""
    got, out, err = await ran(*arguments)
    assert got == status, f"{shlex.join(map(str, arguments))}: {got}\n{out}{err}"
    return out


async def verified(plan: Path, url: str, *options: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What ``triptych plan verify`` says of a cluster. It passes, unless this machine is too busy to send in time."""
    status, out, err = await ran("plan", "verify", plan, "--url", url, "--json", *options, environ=environ)
    document: dict[str, Any] = json.loads(out or "{}")
    assert document, err
    assert document["passed"] is (status == 0)
    assert document["passed"] or not document["report"]["kept_up"], out
    return document


def sleeping_profiles(folder: Path) -> Path:
    """Profiles of the demo model as if they were measured here."""
    profiles = folder / "profiles"
    for profile in synthetic_profiles(MODEL_DIR, image_s=0.2, side_px=112, step_s=0.02, load_s=0.1):
        identity = replace(profile.identity, hardware=cpu_name())
        write_profile(profiles / f"{identity.part.value}.json", replace(profile, identity=identity))
    return profiles


def figures_of(report: dict[str, Any]) -> KindFigures:
    ttft, tpot = Latency(**report["ttft"]), Latency(**report["tpot"])
    return KindFigures(report["requests"], report["answered"], ttft, tpot, report["attainment"])


async def predicted(folder: Path, placed: Placement, **common: str) -> PlanRecord:
    """A plan with what the simulation says of the placement."""
    objectives = Objectives(20.0, 2.0)
    plan = plan_of(placed, common=common, workload=WORKLOAD, objectives=objectives)
    line = shlex.split(plan.simulate_line(placed))[1:]
    out = folder / "simulated.json"
    await triptych(*line, "--slo-ttft-ms=20000", "--slo-tpot-ms=2000", "--json", out)
    (run,) = json.loads(out.read_text())["runs"]
    by_kind = {kind: figures_of(report) for kind, report in run["report"]["by_kind"].items()}
    figures = Figures(run["report"]["rate"], figures_of(run["report"]), by_kind)
    candidate = replace(plan.candidates[0], predicted=replace(plan.candidates[0].predicted, figures=figures))
    return replace(plan, candidates=(candidate,), made=replace(plan.made, expected_error=1.0))


@asynccontextmanager
async def started(*arguments: object) -> AsyncIterator[str]:
    """A cluster that a command runs, by its URL, once it is ready."""
    (port,) = ports.free(1)
    url = f"http://127.0.0.1:{port}"
    command = (
        sys.executable,
        "-m",
        "triptych.cli",
        *map(str, arguments),
        f"--port={port}",
        "--router-port=0",
        "--no-live",
    )
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(READY_S), httpx.AsyncClient(trust_env=False) as client:
            while not await is_ready(client, url):
                assert process.returncode is None, "the cluster has ended"
                await asyncio.sleep(0.2)
        yield url
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/ready")).is_success
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize(
    "roles", [{"E": 2, "PD": 1}, pytest.param({"E": 1, "P": 1, "D": 1}, marks=pytest.mark.extended)]
)
async def test_a_plan_is_applied_and_does_what_it_predicted(tmp_path: Path, roles: dict[str, int]) -> None:
    profiles = sleeping_profiles(tmp_path)
    placed = placement(roles, prepare_cores=1, settings={"max-sequences": "8"})
    plan = written(tmp_path, await predicted(tmp_path, placed, profiles=str(profiles)))
    async with started("plan", "apply", plan, "--start", f"--delay-profile={profiles}") as url:
        document = await verified(plan, url)
    assert {row["kind"] for row in document["figures"]} == {"all", "text", "image"}
    assert Path(document["calibration"]) == profiles / "verified.jsonl"
    assert Calibration.read(profiles / "verified.jsonl").factor(kinds_of(placed), "ttft") > 0.5


async def test_a_wrong_prediction_is_noticed_and_corrects_the_next(tmp_path: Path) -> None:
    profiles = sleeping_profiles(tmp_path)
    placed = placement({"EPD": 1}, prepare_cores=1)
    right = await predicted(tmp_path, placed, profiles=str(profiles))
    figures = right.candidates[0].predicted.figures
    ttft = figures.all.ttft
    hopeful = replace(
        figures.all, ttft=Latency(*(value and value / 8 for value in (ttft.mean_s, ttft.p50_s, ttft.p90_s, ttft.p99_s)))
    )
    wrong = replace(right.candidates[0].predicted, figures=replace(figures, all=hopeful, by_kind={}))
    plan = written(tmp_path, replace(right, candidates=(replace(right.candidates[0], predicted=wrong),)))
    async with started("plan", "apply", plan, "--start", f"--delay-profile={profiles}") as url:
        said = await triptych("plan", "verify", plan, "--url", url, "--error", 0.5, status=1)
    assert "failed: " in said
    assert Calibration.read(profiles / "verified.jsonl").factor(kinds_of(placed), "ttft") > 4
