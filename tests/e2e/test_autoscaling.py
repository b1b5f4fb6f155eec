"""Autoscaling of real processes, whose engines sleep as a synthetic profile says: two cores add no capacity.

With TRIPTYCH_TEST_TRACES the burst is that of the published workload, compressed in time; otherwise it has the same form and
Poisson arrivals.
"""

import asyncio
import os
from pathlib import Path

import pytest

from benchmarks.burst import MANAGER
from benchmarks.bursts import FIRST_S, Outcome, Served, Shape, System, Workload, from_trace, poisson_burst, replayed
from triptych.domain.stage import Role
from triptych.testing.delay_models import Attention

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
async def _load_generator_without_debugging() -> None:
    """Debug mode costs more than the requests do, and the load generator has to keep up."""
    asyncio.get_running_loop().set_debug(False)


LATE_S = 2.0
"""The load generator shares two cores with processes that start. Latencies count from when a request is due, so this makes the
objective harder to meet; but the burst has to remain one.
"""
SHAPE = Shape(before_s=8.0, burst_s=48.0, after_s=60.0)


@pytest.fixture
def burst() -> Workload:
    root = os.environ.get("TRIPTYCH_TEST_TRACES")  # noqa: TID251  # where a machine has them is not the project's to say
    if root is None or not (directory := Path(root) / "servegen-mm-image").is_dir():
        return poisson_burst(SHAPE, seed=1)
    return from_trace(directory, SHAPE, seed=1)


@pytest.mark.extended
async def test_a_burst_of_images_is_met_by_more_encoders_and_few_more_text_instances(
    tmp_path: Path, burst: Workload
) -> None:
    served = Served.written(tmp_path, Attention.DECODER_ONLY)
    assert burst.burst_per_s >= 4 * served.encoder_per_s
    unscaled = System("unscaled", autoscale=False, until_s=burst.begins_s + FIRST_S + 10)
    async with asyncio.TaskGroup() as group:
        with_it, without = [
            group.create_task(
                replayed(served, system, burst, manager_options=MANAGER, log_dir=tmp_path / f"logs-{system.name}")
            )
            for system in (System("autoscaled"), unscaled)
        ]
    outcome = with_it.result()
    explain = told(outcome)
    assert outcome.late_s < LATE_S, explain
    assert not outcome.failed, explain
    assert outcome.attainment(0, burst.begins_s) == 1, explain
    assert (outcome.settled or 0) >= 0.99, explain
    assert (without.result().settled or 0) < 0.5
    encoders, text = outcome.largest(Role.E), outcome.largest(Role.PD)
    assert encoders >= 5, explain
    assert text - 1 < encoders - 1, explain
    assert outcome.sizes(Role.E)[-1] < encoders, explain


@pytest.mark.extended
async def test_a_burst_at_one_model_changes_no_pool_of_the_other_and_no_text_pool_with_cross_attention(
    tmp_path: Path,
) -> None:
    served = Served.written(tmp_path, Attention.CROSS_ATTENTION)
    burst = poisson_burst(Shape(before_s=6.0, burst_s=30.0, after_s=0.0), seed=2)
    outcome = await replayed(
        served, System("two models", beside=True), burst, manager_options=MANAGER, log_dir=tmp_path / "logs"
    )
    explain = told(outcome)
    assert not outcome.failed, explain
    assert outcome.largest(Role.E) >= 3, explain
    assert outcome.largest(Role.PD) == 1, explain
    assert {(sample.beside[Role.E], sample.beside[Role.PD]) for sample in outcome.samples} == {(1, 1)}
    assert outcome.beside
    assert all(record.ok for record in outcome.beside)


def told(outcome: Outcome) -> str:
    """For the message of a failed assertion."""
    shares = {name: outcome.attainment(*phase) for name, phase in outcome.phases.items()}
    sizes = {role.value: outcome.sizes(role) for role in (Role.E, Role.PD)}
    return f"{shares}, sizes {sizes}, failed {outcome.failed}, objective {outcome.slo_s:.3f} s, late {outcome.late_s:.3f} s"
