"""Plans as JSON: what is written is read again, and anything else is refused with the place where it is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from triptych.domain.stage import Role
from triptych.runtime.plans import (
    BadPlan,
    Budget,
    Candidate,
    Figures,
    Goodput,
    KindFigures,
    Made,
    PlacedPool,
    Placement,
    PlanRecord,
    Predicted,
    Rejected,
    ShadowPrice,
    read,
    write,
)
from triptych.workload.prices import Prices
from triptych.workload.report import Latency, Objectives

PLACEMENT = Placement(
    roles={Role.E: 2, Role.PD: 1},
    devices={Role.E: "l4", Role.PD: "h100"},
    degrees={Role.E: 1, Role.PD: 2},
    prepare_cores=4,
    settings={"max-sequences": "128", "encode-first": "yes"},
)
KIND = KindFigures(30, 29, Latency(0.5, 0.4, 0.9, 1.2), Latency(None, None, None, None), 0.95)
PREDICTED = Predicted(
    figures=Figures(2.0, KIND, {"image": KIND}),
    goodput=Goodput(3.0, 2.5, 3.5),
    headroom={"-20 %": 1.0, "+20 %": 0.9},
    utilization={"encode": 0.6, "prefill": 0.4, "decode": 0.4},
    binds="encode",
    prices=Prices(7.64, 1.5, 1.06),
    fidelity="queues",
    seeds=2,
)
PLAN = PlanRecord(
    model="config.json",
    model_id="llava",
    common={"dtype": "float16"},
    workload={"rate": "2", "images": "0:0.5,1:0.5"},
    objectives=Objectives(1.0, None),
    attainment=0.9,
    budget=Budget({"h100": 2, "l4": None}, 12.0, 2.0),
    candidates=(Candidate(PLACEMENT, PREDICTED, meets=True),),
    winners={"cheapest": 0},
    front=(0,),
    why=("the only one",),
    rejected=(Rejected(replace(PLACEMENT, prepare_cores=1), "too slow"),),
    shadow_prices=(ShadowPrice("l4", Role.E, 0.2, 0.47),),
    infeasible=None,
    made=Made("0.1.0", "2026-11-29T00:00:00+00:00", 3.0, 40, 2, (0, 1), False, ("computed for L4",), 0.15, "catalogue"),
)


def test_a_plan_that_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write(path, PLAN)
    assert read(path) == PLAN
    assert PLAN.chosen == PLAN.candidates[0]


def test_a_placement_is_a_list_of_options() -> None:
    assert PLACEMENT.cluster_options == (
        "--roles=E:2,PD:1",
        "--no-switch-roles",
        "--max-sequences=128",
        "--encode-first",
    )
    assert PLACEMENT.hardware_options == ("--device=E=l4,PD=h100", "--tensor-parallel=E=1,PD=2", "--prepare-cores=4")
    assert PLACEMENT.device_counts == {"l4": 2, "h100": 2}
    line = PLAN.simulate_line(PLACEMENT)
    assert line.startswith("triptych simulate --model=config.json --roles=E:2,PD:1 ")
    assert line.endswith("--dtype=float16 --rate=2 --images=0:0.5,1:0.5")


def test_a_role_with_two_kinds_of_devices_has_a_tier_for_each(tmp_path: Path) -> None:
    mixed = replace(PLACEMENT, more=(PlacedPool(Role.PD, 3, "l4", 1),))
    assert str(mixed) == "E:2 l4, PD:1 2xh100, PD:3 l4"
    assert mixed.cluster_options[0] == "--roles=E:2,PD@2xh100:1,PD@l4:3"
    assert mixed.hardware_options[:2] == (
        "--device=E=l4,PD@2xh100=h100,PD@l4=l4",
        "--tensor-parallel=E=1,PD@2xh100=2,PD@l4=1",
    )
    assert mixed.device_counts == {"l4": 5, "h100": 2}
    assert mixed.sizes == {Role.E: 2, Role.PD: 4}
    plan = replace(PLAN, candidates=(Candidate(mixed, PREDICTED, meets=True),))
    write(tmp_path / "plan.json", plan)
    assert read(tmp_path / "plan.json") == plan
    with pytest.raises(ValueError, match="two pools on the same devices"):
        replace(PLACEMENT, more=(PlacedPool(Role.PD, 3, "h100", 2),))
    with pytest.raises(ValueError, match="not of the same roles"):
        replace(PLACEMENT, more=(PlacedPool(Role.D, 3, "l4", 1),))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"winners"', '"winers"', "winners: Field required"),
        ('"cheapest": 0', '"cheapest": 3', "winners or front name a candidate that is not there"),
        ('"PD": 1\n', '"D": 1\n', "candidates.0.placement: roles, devices and degrees are not of the same roles"),
        ('"prepare_cores": 4', '"prepare_cores": 0', "candidates.0.placement: a number of instances, devices or cores"),
        ('"E": "l4"', '"X": "l4"', "candidates.0.placement.devices.X"),
        ('"interrupted": false', '"interrupted": "no"', "made.interrupted: Input should be a valid boolean"),
        ('"version": 1\n', '"version": 2\n', "version: Input should be 1"),
        ("{", "[", "Invalid JSON"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "plan.json"
    text = PLAN.dump()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(BadPlan) as error:
        read(path)
    assert message in str(error.value)


def test_a_cluster_without_a_stage_is_none() -> None:
    with pytest.raises(ValueError, match="nothing would decode"):
        Placement({Role.EP: 1}, {Role.EP: "l4"}, {Role.EP: 1}, 1)


def test_a_file_that_cannot_be_read_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(BadPlan, match="does not exist"):
        read(tmp_path / "plan.json")
