"""Every preset is something else to start, in each of its columns."""

from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.command_line import invoke
from triptych.cli.cluster import LocalCluster
from triptych.cli.cluster_settings import ClusterSettings
from triptych.cli.model import Model
from triptych.cli.outcome import CliError
from triptych.cli.placement import placed
from triptych.cli.presets import PRESETS, Preset, PresetName
from triptych.cli.process_plan import ClusterPlan
from triptych.cli.service_options import parse
from triptych.demo import MODEL_DIR
from triptych.domain.stage import INSTANCE_NAMES, Role
from triptych.services.router.settings import RouterSettings
from triptych.services.text.settings import TextSettings

DEMO = [Model.named("demo")]
OTHER: dict[str, Any] = {
    "roles": "E:1,PD:1,D:1",
    "routing": "round-robin",
    "sharding": "earliest-end",
    "ordering": "deadline",
    "tpot_slo_s": 0.5,
    "lending": "idle",
    "switching": True,
}
"""Another value for each column than any preset's that is tested with it."""
PLAIN = replace(PRESETS["modserve"], roles="E:2,P:1,D:1")
"""Of roles that can switch."""
PAGE = Path(__file__).parents[3] / "docs" / "roles.md"


def started(preset: Preset, profiles: Path, slo: str | None = None) -> list[tuple[str, ...]]:
    """Name and flags of each process, without its ports."""
    given = parse([f"--profiles={profiles}", *(() if slo is None else (f"--slo={slo}",))])
    sizes, switches = placed(preset.roles), preset.switching
    options = ClusterSettings(DEMO, sizes, given, preset, switch_roles=switches).flags()
    made = ClusterPlan.make(
        DEMO, scaled=False, autoscale=False, threads=1, options=options, roles=preset.roles, switch_roles=switches
    )
    flags = {"--role", "--switchable", "--switch-roles"}
    return [
        (process.name, process.service, *sorted(flags.intersection(process.arguments)), *process.options)
        for process in made.processes
    ]


def test_no_two_presets_start_the_same(profiles: Path) -> None:
    assert set(PRESETS) == set(get_args(PresetName))
    for (combination, first), (other, second) in combinations(PRESETS.items(), 2):
        assert started(first, profiles) != started(second, profiles), (combination, other)


@pytest.mark.parametrize("column", [field.name for field in fields(Preset)])
def test_each_column_has_an_effect_on_what_is_started(column: str, profiles: Path) -> None:
    assert getattr(PLAIN, column) != OTHER[column]
    assert started(replace(PLAIN, **{column: OTHER[column]}), profiles) != started(PLAIN, profiles)


@pytest.mark.parametrize("name", PRESETS)
def test_the_services_accept_what_a_preset_tells_them(name: PresetName) -> None:
    options = ClusterSettings(DEMO, placed(PRESETS[name].roles), parse(()), PRESETS[name]).flags()
    router = RouterSettings.load(["--model", str(MODEL_DIR), *options["router"]], {})
    assert (router.policies.ordering, router.policies.sharding) == (PRESETS[name].ordering, PRESETS[name].sharding)
    assert router.policies.lending == PRESETS[name].lending
    assert router.policies.encoder_routing == router.policies.text_routing == PRESETS[name].routing
    text = TextSettings.load(["--model", str(MODEL_DIR), *options["text"]], {})
    assert text.engine.tpot_slo_s == PRESETS[name].tpot_slo_s
    assert text.encode_first is (router.policies.lending == "idle")


def test_an_objective_in_seconds_replaces_that_of_the_preset(profiles: Path) -> None:
    preset = PRESETS["hydra-e-p-d"]
    assert "--tpot-slo-s=0.08" in [process[-1] for process in started(preset, profiles, "tbt=5x")]
    assert "--tpot-slo-s=0.03" in [process[-1] for process in started(preset, profiles, "ttft=1s,tbt=30ms")]


def test_a_preset_that_switches_needs_objectives_for_it(profiles: Path) -> None:
    with pytest.raises(CliError, match="to switch roles takes objectives"):
        started(PRESETS["epd"], profiles, "ttft=2s")
    assert started(replace(PRESETS["epd"], switching=False), profiles, "ttft=2s")


def test_another_count_of_the_same_roles_may_be_asked_for() -> None:
    PRESETS["epd"].placed_as("D:3,P:1,E:4", "epd")
    with pytest.raises(CliError, match="preset epd has roles E, P, D; only their counts can change") as caught:
        PRESETS["epd"].placed_as("E:1,P:1,D:1,PD:1", "epd")
    assert caught.value.caller


def test_up_starts_the_preset_that_is_named(monkeypatch: pytest.MonkeyPatch, profiles: Path) -> None:
    seen: list[list[Any]] = []

    def made(models: object, **shape: Any) -> LocalCluster:
        ordering = [flag for flag in shape["options"]["router"] if flag.startswith("--ordering")]
        seen.append([shape["roles"], shape["switch_roles"], *ordering[-1:]])
        raise CliError("enough", caller=True)

    monkeypatch.setattr("triptych.cli.cluster.LocalCluster", made)
    known = ["--profiles", str(profiles)]
    for arguments in (
        ["--preset", "hetero"],
        ["--preset", "hetero", "--roles", "EPD:5,PD:2"],
        [],
        ["--preset", "epd", *known],
        ["--preset", "epd", "--no-switch-roles"],
        ["--preset", "hydra-e-p-d", "--switch-roles", *known, "--ordering", "slo"],
    ):
        assert invoke(["up", *arguments]).stderr == "triptych: enough\n"
    assert seen == [
        ["EPD:2,PD:1", False, "--ordering=first-come"],
        ["EPD:5,PD:2", False, "--ordering=first-come"],
        ["E:2,PD:1", False],
        ["E:2,P:1,D:1", True, "--ordering=first-come"],
        ["E:2,P:1,D:1", False, "--ordering=first-come"],
        ["E:2,P:1,D:1", True, "--ordering=slo"],
    ]


def test_the_table_in_the_docs_is_the_one_that_is_started() -> None:
    rows = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    shown = {row[0]: row[1:8] for row in rows if row and row[0] in PRESETS}
    assert shown == {
        name: [
            preset.roles,
            preset.routing,
            preset.sharding,
            preset.ordering,
            "" if preset.tpot_slo_s is None else f"{preset.tpot_slo_s:g} s",
            "" if preset.lending == "always" else preset.lending,
            "yes" if preset.switching else "",
        ]
        for name, preset in PRESETS.items()
    }


def test_roles_are_placed_in_the_order_in_which_they_start() -> None:
    assert list(placed("D:1, EPD:2,E:3").items()) == [(Role.E, 3), (Role.D, 1), (Role.EPD, 2)]
    assert set(INSTANCE_NAMES) == set(Role)
