"""Runs docs/adding_a_policy.md unchanged, as a plug-in."""

import re
from pathlib import Path

import pytest

from tests.plugins import offer
from tests.unit.services.router.fakes import ask, bench, collect, image
from tests.unit.services.router.test_service import virtual
from triptych.domain.generation import ChatFinished
from triptych.policy.placement.policy import PLACEMENTS
from triptych.policy.policies import ADMISSIONS, DEADLINES, ORDERINGS, SHARDINGS
from triptych.services.router.settings import RouterSettings

PAGE = (Path(__file__).parents[4] / "docs" / "adding_a_policy.md").read_text()


async def encoders_used(settings: RouterSettings) -> set[str]:
    async with bench(encoders=3, settings=settings) as made:
        for number in range(6):
            answer = await collect(made.router, ask(f"r{number}", [image(number)]))
            assert isinstance(answer[-1], ChatFinished)
        return {encoder.instance_id for encoder in made.encoders if encoder.encoded}


@virtual
async def test_the_policy_of_the_guide_routes_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(await encoders_used(RouterSettings())) == 3
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    points = {"triptych.policies.encoder_routing": {"fill-up": "fill_up_plugin:FILL_UP"}}
    offer(tmp_path, monkeypatch, "fill_up_plugin", code, points)
    assert await encoders_used(RouterSettings.load(["--encoder-routing", "fill-up"], {})) == {"encoder-0"}


def test_the_guide_names_all_policies() -> None:
    for table in (PLACEMENTS, SHARDINGS, ORDERINGS, ADMISSIONS, DEADLINES):
        for name in table:
            assert f"`{name}`" in PAGE
