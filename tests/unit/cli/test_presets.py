"""Every preset is something else to start, in each of its columns."""

from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from services.router.settings import RouterSettings
from services.text.settings import TextSettings
from triptych.cli.cluster import LocalCluster
from triptych.cli.main import app
from triptych.cli.model import Model
from triptych.cli.outcome import CliError
from triptych.cli.placement import NAMES, placed
from triptych.cli.plan import ClusterPlan
from triptych.cli.presets import PRESETS, Preset, PresetName
from triptych.cli.scaling import options_of
from triptych.demo import MODEL_DIR
from triptych.domain.stage import Role

DEMO = [Model.named("demo")]
OTHER: dict[str, Any] = {
    "roles": "E:1,PD:1,D:1",
    "routing": "round-robin",
    "sharding": "earliest-end",
    "ordering": "deadline",
    "tpot_slo_s": 0.5,
    "lending": "idle",
}
"""Another value for each column than any preset's that is tested with it."""
PAGE = Path(__file__).parents[3] / "docs" / "roles.md"


def started(preset: Preset, slo: str | None = None) -> list[tuple[str, ...]]:
    """Name and flags of each process, without its ports."""
    sizes = placed(preset.roles)
    options = options_of(DEMO, sizes, preset=preset, slo=slo)
    made = ClusterPlan.made(DEMO, scaled=False, autoscale=False, threads=1, options=options, roles=preset.roles)
    return [(one.name, *(() if one.role is None else (one.role.value,)), *one.options) for one in made.processes]


def test_no_two_presets_start_the_same() -> None:
    assert set(PRESETS) == set(get_args(PresetName))
    for (one, first), (other, second) in combinations(PRESETS.items(), 2):
        assert started(first) != started(second), (one, other)


@pytest.mark.parametrize("column", [one.name for one in fields(Preset)])
def test_each_column_has_an_effect_on_what_is_started(column: str) -> None:
    plain = PRESETS["modserve"]
    assert getattr(plain, column) != OTHER[column]
    assert started(replace(plain, **{column: OTHER[column]})) != started(plain)


@pytest.mark.parametrize("name", PRESETS)
def test_the_services_accept_what_a_preset_tells_them(name: PresetName) -> None:
    options = options_of(DEMO, placed(PRESETS[name].roles), preset=PRESETS[name])
    router = RouterSettings.load(["--model", str(MODEL_DIR), *options["router"]], {})
    assert (router.policies.ordering, router.policies.sharding) == (PRESETS[name].ordering, PRESETS[name].sharding)
    assert router.policies.lending == PRESETS[name].lending
    assert router.policies.encoder_routing == router.policies.text_routing == PRESETS[name].routing
    text = TextSettings.load(["--model", str(MODEL_DIR), *options["text"]], {})
    assert text.engine.tpot_slo_s == PRESETS[name].tpot_slo_s
    assert text.encode_first is (router.policies.lending == "idle")


def test_an_objective_in_seconds_replaces_that_of_the_preset() -> None:
    preset = PRESETS["hydra-e-p-d"]
    assert ("--tpot-slo-s", "0.08") in [one[-2:] for one in started(preset, "tbt=5x")]
    assert ("--tpot-slo-s", "0.03") in [one[-2:] for one in started(preset, "ttft=1s,tbt=30ms")]


def test_another_count_of_the_same_roles_may_be_asked_for() -> None:
    PRESETS["epd"].placed_as("D:3,P:1,E:4", "epd")
    with pytest.raises(CliError, match="preset epd has roles E, P, D; only their counts can change") as caught:
        PRESETS["epd"].placed_as("E:1,P:1,D:1,PD:1", "epd")
    assert caught.value.caller


def test_up_starts_the_preset_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def made(models: object, **shape: Any) -> LocalCluster:
        seen.append([shape["roles"], *shape["options"]["router"][-2:]])
        raise CliError("enough", caller=True)

    monkeypatch.setattr("triptych.cli.cluster.LocalCluster", made)
    for arguments in (["--preset", "hetero"], ["--preset", "hetero", "--roles", "EPD:5,PD:2"], []):
        assert CliRunner().invoke(app, ["up", *arguments]).stderr == "triptych: enough\n"
    assert seen[0] == ["EPD:2,PD:1", "--ordering", "first-come"]
    assert seen[1] == ["EPD:5,PD:2", "--ordering", "first-come"]
    assert seen[2] == ["E:2,PD:1"]


def test_the_table_in_the_docs_is_the_one_that_is_started() -> None:
    rows = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    shown = {row[0]: row[1:7] for row in rows if row and row[0] in PRESETS}
    assert shown == {
        name: [
            one.roles,
            one.routing,
            one.sharding,
            one.ordering,
            "" if one.tpot_slo_s is None else f"{one.tpot_slo_s:g} s",
            "" if one.lending == "always" else one.lending,
        ]
        for name, one in PRESETS.items()
    }


def test_roles_are_placed_in_the_order_in_which_they_start() -> None:
    assert list(placed("D:1, EPD:2,E:3").items()) == [(Role.E, 3), (Role.D, 1), (Role.EPD, 2)]
    assert set(NAMES) == set(Role)
