"""Tiers of hardware in ``triptych up``: what people write, what processes get, and engines that sleep at the speed of their tier."""

from pathlib import Path

import pytest

from triptych.cli.model import Model
from triptych.cli.outcome import CliError, ClusterError
from triptych.cli.placement import placed, placed_kinds
from triptych.cli.process_plan import ClusterPlan, with_gpus
from triptych.cli.service_options import SERVICES, Flags, parse
from triptych.cli.tiers import Tiers, check_tiers, read_tiers, sleeping, with_gpu_bounds
from triptych.demo import MODEL_DIR
from triptych.domain.profile import Profile
from triptych.domain.scaling import Kind, PoolName
from triptych.domain.stage import ModelPart, Role
from triptych.domain.tier import Tier
from triptych.engine.delay import synthetic_profiles
from triptych.runtime.profiles import KnownProfiles, the_profile, write_profile

FAST, SLOW, E = Kind(Role.PD, "fast"), Kind(Role.PD, "slow"), Kind(Role.E)
KINDS = {E: 1, FAST: 1, SLOW: 2}
NOTHING: Flags = dict.fromkeys(SERVICES, ())


def tiers_of(*described: str, settings: tuple[str, ...] = ()) -> Tiers:
    return read_tiers(KINDS, described, settings)


def test_a_role_may_have_several_tiers() -> None:
    assert placed_kinds("E:1,PD@fast:1, PD@slow:2") == KINDS
    assert [str(kind) for kind in KINDS] == ["E", "PD@fast", "PD@slow"]


@pytest.mark.parametrize(
    ("roles", "fault"),
    [
        ("E:1,PD@Fast:1", "'Fast' is no name of a tier"),
        ("E:1,PD@:1", "'' is no name of a tier"),
        ("E:1,PD@fast:1,PD@fast:2", "PD@fast is there more than once"),
        ("E:1,PD:1,PD@fast:2", "PD has a tier in one place and none in another"),
        ("E:1,PD@fast:0", "with a count of 1 to 64"),
        ("E@fast:1", "nothing would prefill and decode"),
    ],
)
def test_roles_that_are_wrong_are_refused(roles: str, fault: str) -> None:
    with pytest.raises(ClusterError, match=fault):
        placed_kinds(roles)


def test_where_there_are_no_tiers_they_are_refused() -> None:
    with pytest.raises(ClusterError, match="there are no tiers here, leave out @ in PD@fast"):
        placed("E:1,PD@fast:1")


def test_tiers_are_described_for_one_role_or_for_all() -> None:
    tiers = tiers_of("fast:price=4,speed=2,gpus=0+1/2+3", "PD@slow:device=L4", settings=("slow:--max-sequences=4",))
    assert tiers.keys() == {FAST, SLOW}
    assert (tiers[FAST].tier, tiers[FAST].gpus) == (Tier("fast", "", 4.0, 2.0), ("0,1", "2,3"))
    assert (tiers[SLOW].tier, tiers[SLOW].of("text")) == (
        Tier("slow", "L4"),
        ("--tier=slow:device=L4", "--max-sequences=4"),
    )
    assert tiers_of()[FAST].tier == Tier("fast")


@pytest.mark.parametrize(
    ("described", "settings", "fault"),
    [
        (("gold:price=1",), (), "--tier gold: --roles has no such tier; there are: PD@fast, PD@slow"),
        (("E@fast:price=1",), (), "--tier E@fast: --roles has no such tier"),
        (("fast:price=1", "fast:price=2"), (), "--tier names fast more than once"),
        (("fast:price=dear",), (), "the price of tier fast is 'dear', which is no number"),
        (("fast:gpus=0//1",), (), "gpus of each instance are written as gpus=0/1"),
        ((), ("fast:--nothing=1",), "there is no option --nothing"),
        ((), ("fast:--slo=ttft=1s",), "--slo=ttft=1s is no setting of instances"),
        ((), ("fast:--dtype='",), "No closing quotation"),
    ],
)
def test_what_is_wrong_with_a_tier_is_said(described: tuple[str, ...], settings: tuple[str, ...], fault: str) -> None:
    with pytest.raises(CliError, match=fault) as caught:
        tiers_of(*described, settings=settings)
    assert caught.value.caller


def test_tiers_need_gpus_for_all_instances_valid_settings_and_fixed_roles() -> None:
    few = tiers_of("slow:gpus=0")
    with pytest.raises(CliError, match="PD@slow:2: --tier slow has GPUs for 1"):
        check_tiers(few, KINDS, NOTHING, MODEL_DIR, switch_roles=False)
    with pytest.raises(CliError, match="instances of tiers keep their roles"):
        check_tiers(tiers_of(), KINDS, NOTHING, MODEL_DIR, switch_roles=True)
    wrong = tiers_of(settings=("slow:--max-sequences=0",))
    with pytest.raises(CliError, match=r"text: .*max_sequences"):
        check_tiers(wrong, KINDS, NOTHING, MODEL_DIR, switch_roles=False)
    check_tiers(tiers_of("slow:gpus=0/1"), KINDS, NOTHING, MODEL_DIR, switch_roles=False)


def test_a_tier_grows_as_far_as_it_has_gpus_unless_sizes_are_given() -> None:
    tiers = tiers_of("slow:gpus=0/1/2")
    assert with_gpu_bounds(tiers, NOTHING)["pool_manager"] == ("--pool-sizes=PD@slow=1-3",)
    given = {**NOTHING, "pool_manager": ("--pool-sizes=E=1-2",)}
    assert with_gpu_bounds(tiers, given)["pool_manager"][-1] == "--pool-sizes=E=1-2,PD@slow=1-3"
    for entry in ("PD@slow=0-2", "PD=1-2"):
        sized = {**NOTHING, "pool_manager": (f"--pool-sizes={entry}",)}
        assert with_gpu_bounds(tiers, sized) == sized
    assert with_gpu_bounds(tiers_of(), NOTHING) == NOTHING


def plan_with(tiers: Tiers) -> ClusterPlan:
    return ClusterPlan.make(
        Model.all_named(["demo"]),
        scaled=True,
        autoscale=True,
        threads=1,
        options={"text": ("--dtype=float32",)},
        tiers=tiers,
        roles="E:1,PD@fast:1,PD@slow:2",
    )


def test_processes_have_the_names_settings_and_gpus_of_their_tier() -> None:
    tiers = tiers_of("fast:price=4,gpus=0+1", "slow:gpus=2/3/4", settings=("slow:--max-sequences=4",))
    plans = {plan.name: plan for plan in plan_with(tiers).processes if plan.role is not None}
    assert plans.keys() == {"encoder-1", "text-fast-1", "text-slow-1", "text-slow-2"}
    slow = plans["text-slow-2"]
    assert slow.pool == PoolName("triptych-demo", Role.PD, "slow")
    assert str(slow.pool) == "triptych-demo/PD@slow"
    assert slow.options == ("--dtype=float32", "--tier=slow", "--max-sequences=4")
    assert plans["text-fast-1"].options == ("--dtype=float32", "--tier=fast:price=4")
    gpus = {name: plan.environment().get("CUDA_VISIBLE_DEVICES") for name, plan in plans.items()}
    assert (gpus["text-fast-1"], gpus["text-slow-1"], gpus["text-slow-2"]) == ("0,1", "2", "3")


def test_another_instance_of_a_tier_gets_gpus_that_nobody_has() -> None:
    tiers = tiers_of("fast:gpus=0+1", "slow:gpus=1/2/3")
    plan = plan_with(tiers)
    running = list(plan.processes)
    assert [process.gpus for process in running if process.gpus] == ["0,1", "2", "3"], "device 1 is taken"
    ended = next(process for process in running if process.name == "text-slow-1")
    (again,) = with_gpus([ended], plan.tiers, [process for process in running if process is not ended])
    assert again.gpus == "2"
    with pytest.raises(ClusterError, match="all GPUs of tier slow are in use: 1, 2, 3"):
        with_gpus([again], plan.tiers, running)


@pytest.fixture
def delays(tmp_path: Path) -> Path:
    for name, profile in zip(("encoder", "decoder"), synthetic_profiles(MODEL_DIR), strict=True):
        write_profile(tmp_path / "delays" / f"{name}.json", profile)
    return tmp_path / "delays"


def test_engines_that_sleep_do_so_at_the_speed_of_their_tier_and_everyone_knows_their_costs(
    delays: Path, tmp_path: Path
) -> None:
    given = parse((f"--delay-profile={delays}",))
    options = {**NOTHING, **given, "router": (f"--profiles={delays}",), "pool_manager": (f"--profiles={delays}",)}
    tiers, made = sleeping(tiers_of("fast:speed=2"), options, given, tmp_path / "tiers")
    before = the_profile(delays, ModelPart.DECODER)
    slept = {kind: _slept(tiers, kind) for kind in (FAST, SLOW)}
    assert slept[SLOW] == before
    assert slept[FAST].decode[0].seconds == before.decode[0].seconds / 2
    assert slept[FAST].identity.hardware == "fast synthetic"
    for service in ("router", "pool_manager"):
        known = KnownProfiles.read(Path(made[service][-1].removeprefix("--profiles=")))
        for profile in slept.values():
            costs = known.costs(profile.identity)
            assert costs is not None
            assert costs.profile == profile


def _slept(tiers: Tiers, kind: Kind) -> Profile:
    (flag,) = [flag for flag in tiers[kind].of("text") if flag.startswith("--delay-profile=")]
    return the_profile(Path(flag.removeprefix("--delay-profile=")), ModelPart.DECODER)


def test_nothing_changes_without_speeds_or_without_engines_that_sleep(delays: Path, tmp_path: Path) -> None:
    given = parse((f"--delay-profile={delays}",))
    options = {**NOTHING, **given}
    for tiers, flags in ((tiers_of("fast:price=4"), options), (tiers_of("fast:speed=2"), NOTHING)):
        assert sleeping(tiers, flags, given, tmp_path / "tiers") == (tiers, flags)
    assert not (tmp_path / "tiers").exists()


def test_profiles_cannot_be_given_beside_speeds_of_engines_that_sleep(delays: Path, tmp_path: Path) -> None:
    given = parse((f"--delay-profile={delays}", f"--profiles={delays}"))
    with pytest.raises(CliError, match="--profiles: those of tiers follow from --delay-profile"):
        sleeping(tiers_of("fast:speed=2"), {**NOTHING, **given}, given, tmp_path / "tiers")
