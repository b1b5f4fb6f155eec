"""The simulated cluster of 64 instances for a long time (``make soak``: an hour of simulated time)."""

import os

import pytest

from tests.simulation.test_control_plane import run, world_of
from tests.simulation.workload import make_bursts

REQUESTS_PER_S = 8


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(3))
def test_64_instances_stay_well_through_an_hour_of_faults(number: int) -> None:
    told = os.environ.get("SOAK_SIMULATED_S")  # noqa: TID251 - whoever runs the tests chooses how long
    if not told:
        pytest.skip("SOAK_SIMULATED_S does not say for how many simulated seconds: make soak")
    duration_s = float(told)
    run(number, world_of(number), make_bursts(number, round(REQUESTS_PER_S * duration_s), duration_s), duration_s)
