"""A cluster whose engines sleep as profiles predict."""

from pathlib import Path

import pytest

from tests.e2e.client import post, rest, timeline_of
from tests.e2e.delayed import delayed
from tests.e2e.reference import Question
from triptych.cli.cluster import LocalCluster


@pytest.mark.parametrize("roles", ["E:1,PD:1", pytest.param("EPD:1", marks=pytest.mark.extended)])
async def test_requests_take_as_long_as_the_profiles_predict(tmp_path: Path, roles: str) -> None:
    options = delayed(tmp_path, pass_s=0.5, step_s=0.05)
    async with (
        LocalCluster(roles=roles, options=options, log_dir=tmp_path / "logs") as cluster,
        rest(cluster.url) as client,
    ):
        response = await post(client, Question("What digit?", ("3_a",)).body(max_tokens=11))
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 11
        timeline = await timeline_of(client, response)
    assert 0.5 <= timeline["items"][0]["encode_s"] < 5
    assert timeline["total_s"] >= 0.5 + 11 * 0.05
    assert not any("Traceback" in log.read_text() for log in (tmp_path / "logs").iterdir())


async def test_a_process_whose_engine_delays_loads_no_torch(tmp_path: Path) -> None:
    async with LocalCluster(roles="E:1,PD:1,EPD:1", options=delayed(tmp_path)) as cluster:
        for name in ("encoder-1", "text-1", "hybrid-1"):
            assert "libtorch" not in mapped_by(cluster.processes[name]), name


def mapped_by(pid: int) -> str:
    """The files in a process's memory."""
    return Path(f"/proc/{pid}/maps").read_text()
