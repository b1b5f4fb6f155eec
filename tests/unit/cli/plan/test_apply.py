"""``triptych plan apply``: command lines, files for docker compose, and overlays that kustomize renders."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import pytest
import yaml

from tests.contract.manifests import (
    Document,
    PodIdentity,
    container_of,
    environment,
    image_environment,
    kustomized,
    of_kind,
    pod_of,
    selects,
)
from tests.unit.cli.plan.plans import config, placement, plan_of, triptych, written
from tests.unit.deploy.test_compose_file import FILE, SCHEMA, resolved
from triptych.cli.cluster_settings import ClusterSettings
from triptych.cli.model import Model
from triptych.cli.placement import placed, placed_kinds
from triptych.cli.plan.cluster import planned_cluster
from triptych.cli.plan.followed import followed_files
from triptych.cli.service_options import parse
from triptych.cli.tiers import check_tiers, read_tiers
from triptych.domain.decision import Bounds
from triptych.domain.mix import Form
from triptych.domain.pool_sizes import parse_bounds
from triptych.domain.profile import Origin
from triptych.domain.scaling import Kind, PoolName
from triptych.domain.stage import Role
from triptych.policy.costs import Costs
from triptych.runtime.plans import Budget, PlacedPool, Placement, PlanRecord, read
from triptych.runtime.profiles import read_profiles
from triptych.runtime.settings import ServiceSettings
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.pool_manager.plan import FollowedPlan
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.services.router.settings import RouterSettings
from triptych.services.text.settings import TextSettings

ROOT = Path(__file__).parents[4]
BASE = ROOT / "deploy" / "kubernetes" / "base"
POD = PodIdentity("pod-1", "10.1.2.3")
SETTINGS: dict[str, type[ServiceSettings]] = {"encoder": EncoderSettings, "text": TextSettings}
HYBRID = {"E": 1, "P": 1, "D": 2}
GPUS = placement({"E": 2, "PD": 2}, devices={"E": "l4", "PD": "h100"}, settings={"max-sequences": "48"})


def applied(folder: Path, plan: PlanRecord, *arguments: object) -> str:
    return triptych("plan", "apply", written(folder, plan), *arguments)


def command_in(said: str) -> list[str]:
    """The command that was printed last."""
    return shlex.split(said.strip().splitlines()[-1])


# --- up ------------------------------------------------------------------------------------------------------------------


def options_of(line: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in line[2:]:
        name, _, value = word.partition("=")
        options[name] = (
            f"{options[name]}\n{value}" if name in ("--tier", "--tier-settings") and name in options else value
        )
    return options


def test_a_plan_becomes_a_command_line_that_up_takes(tmp_path: Path) -> None:
    plan = plan_of(placement({"E": 2, "PD": 1}, settings={"max-sequences": "8", "encoder-routing": "least-loaded"}))
    line = command_in(applied(tmp_path, plan, "--log-level=WARNING"))
    options = options_of(line)
    assert line[:2] == ["triptych", "up"]
    assert (options["--model"], options["--roles"], options["--threads"]) == ("demo", "E:2,PD:1", "2")
    assert (options["--max-sequences"], options["--encoder-routing"]) == ("8", "least-loaded")
    assert (options["--dtype"], options["--prepare-threads"], options["--log-level"]) == ("float32", "2", "WARNING")
    assert options["--slo"] == "ttft=1s,tbt=5x"
    assert "--no-switch-roles" in options
    own = {"--model", "--roles", "--threads", "--no-switch-roles"}
    flags = parse([word for word in line[2:] if word.partition("=")[0] not in own])
    ClusterSettings(Model.all_named(["demo"]), placed(options["--roles"]), flags).flags()


def test_up_knows_the_profiles_that_the_plan_was_made_with(tmp_path: Path) -> None:
    options = options_of(command_in(applied(tmp_path, plan_of(placement({"EPD": 1})))))
    profiles, faults = read_profiles(Path(options["--profiles"]))
    assert not faults
    assert all(Costs(profile).profile.measured.method.startswith("triptych simulate") for profile in profiles)


def test_start_runs_the_command_that_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(os, "execv", lambda _, line: ran.append(tuple(line)))
    plan = plan_of(placement({"EPD": 1}))
    line = command_in(applied(tmp_path, plan, "--start", "--port=0", "--no-live"))
    assert ran == [(sys.executable, "-m", "triptych.cli", *line[1:])]
    assert line[-2:] == ["--port=0", "--no-live"]


def test_pools_that_scale_have_the_bounds_of_the_budget(tmp_path: Path) -> None:
    budget = Budget({"cpu": 6}, None, 2.0)
    plan = plan_of(placement({"E": 3, "PD": 1}), budget=budget)
    options = options_of(command_in(applied(tmp_path, plan, "--autoscale")))
    assert "--autoscale" in options
    assert options["--pool-sizes"] == "E=2-5,PD=1-3"


def test_a_plan_that_is_followed_has_the_sizes_of_its_pools(tmp_path: Path) -> None:
    plan = plan_of(placement({"E": 3, "PD": 1}), budget=Budget({"cpu": 6}, None, 2.0))
    options = options_of(command_in(applied(tmp_path, plan, "--autoscale", "--plan=plan.json", "--replan")))
    assert options["--plan"] == "plan.json"
    assert {"--replan", "--autoscale"} <= options.keys()
    assert "--no-switch-roles" not in options, "so all instances can switch"
    assert "--pool-sizes" not in options


def test_answers_go_on_elsewhere_when_an_instance_drains_if_there_is_another(tmp_path: Path) -> None:
    alone, two = (
        options_of(command_in(applied(tmp_path, plan_of(placement({"E": 1, "P": 1, "D": count}))))) for count in (1, 2)
    )
    assert "--transfer-kv-on-drain" not in alone
    assert "--transfer-kv-on-drain" in two
    shrinking = applied(tmp_path, plan_of(placement({"E": 1, "P": 1, "D": 2})), "--autoscale")
    assert "--transfer-kv-on-drain" not in options_of(command_in(shrinking)), "the pool may have one at times"


def test_vllm_divides_a_model_over_devices(tmp_path: Path) -> None:
    settings = {"engine": "vllm", "vllm-args": "--max-num-seqs 16"}
    degrees = {Role.E: 1, Role.PD: 2}
    plan = plan_of(
        placement({"E": 1, "PD": 1}, "h100", degrees=degrees, settings=settings), model=str(config(tmp_path))
    )
    options = options_of(command_in(applied(tmp_path, plan, "--model", "/models/llava")))
    assert options["--vllm-args"] == "--max-num-seqs 16"
    (text,) = [flags["text"] for key, flags in tier_settings(options) if key == "PD@h100"]
    assert "--tensor-parallel=2" in text
    assert not any(flag.startswith(("--device", "--kv-cache-bytes")) for flag in text)
    assert "PD@h100:device=" in options["--tier"]
    assert options["--tier"].endswith("gpus=1+2")


def tier_settings(options: dict[str, str]) -> list[tuple[str, dict[str, tuple[str, ...]]]]:
    """What each tier sets, by service; ``options`` have all occurrences joined by newlines."""
    found = []
    for entry in options["--tier-settings"].splitlines():
        key, _, line = entry.partition(":")
        found.append((key, dict(parse(shlex.split(line)))))
    return found


def test_pools_on_several_kinds_of_gpus_are_tiers_with_gpus_prices_and_settings_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path, plan_of(GPUS, model=str(config(tmp_path))))
    line = command_in(triptych("plan", "apply", path, "--model", "/models/llava"))
    options = options_of(line)
    kinds = placed_kinds(options["--roles"])
    settings = [word.partition("=")[2] for word in line if word.startswith("--tier-settings=")]
    tiers = read_tiers(kinds, [word.partition("=")[2] for word in line if word.startswith("--tier=")], settings)
    of_e, of_pd = tiers[Kind(Role.E, "l4")], tiers[Kind(Role.PD, "h100")]
    assert (of_e.gpus, of_pd.gpus) == (("0", "1"), ("2", "3"))
    assert of_e.tier.usd_per_hour is not None
    assert of_pd.tier.usd_per_hour is not None
    assert of_pd.tier.usd_per_hour > of_e.tier.usd_per_hour
    assert {"--device=cuda", "--dtype=float16"} <= {*of_e.of("encoder")} & {*of_pd.of("text")}
    (kv,) = [int(flag.partition("=")[2]) for flag in of_pd.of("text") if flag.startswith("--kv-cache-bytes=")]
    assert kv > 40 << 30
    own = {"--model", "--roles", "--tier", "--tier-settings", "--no-switch-roles"}
    flags = parse([word for word in line[2:] if word.partition("=")[0] not in own])
    check_tiers(tiers, kinds, flags, Path("/models/llava"), switch_roles=False)


MIXED = replace(GPUS, more=(PlacedPool(Role.PD, 1, "l4", 1),))


def test_a_role_on_two_kinds_of_gpus_is_two_tiers_of_up(tmp_path: Path) -> None:
    text = (Form("text", 300, 300, prompt_tokens=60_000, output_tokens=15_000),)
    path = written(tmp_path, replace(plan_of(MIXED, model=str(config(tmp_path))), mix=text))
    line = command_in(triptych("plan", "apply", path, "--model", "/models/llava"))
    options = options_of(line)
    assert options["--roles"] == "E@l4:2,PD@h100:2,PD@l4:1"
    kinds = placed_kinds(options["--roles"])
    words = {name: [word.partition("=")[2] for word in line if word.startswith(f"{name}=")] for name in options}
    tiers = read_tiers(kinds, words["--tier"], words["--tier-settings"])
    assert [plan.gpus for plan in tiers.values()] == [("0", "1"), ("2", "3"), ("4",)]
    memory = {
        str(kind): int(flag.partition("=")[2])
        for kind, plan in tiers.items()
        for flag in plan.of("text")
        if flag.startswith("--kv-cache-bytes=")
    }
    assert memory["PD@h100"] > 5 * memory["PD@l4"]
    own = {"--model", "--roles", "--tier", "--tier-settings", "--no-switch-roles"}
    flags = parse([word for word in line[2:] if word.partition("=")[0] not in own])
    check_tiers(tiers, kinds, flags, Path("/models/llava"), switch_roles=False)
    followed = triptych("plan", "apply", path, "--model", "/models/llava", "--autoscale", f"--plan={path}", "--replan")
    assert options_of(command_in(followed))["--roles"] == options["--roles"]
    known = FollowedPlan.read(path)
    bounds = {str(kind): known.bounds_of(PoolName("llava", *kind), replans=False) for kind in kinds}
    assert bounds == {"E@l4": Bounds(1, 4), "PD@h100": Bounds(1, 4), "PD@l4": Bounds(1, 2)}


def test_a_plan_that_scales_or_lends_is_run_so(tmp_path: Path) -> None:
    settings = {"pool-sizes": "EPD=1-4,PD=1-2", "lending": "idle", "encode-first": "yes"}
    placed = placement({"EPD": 2, "PD": 1}, settings=settings, autoscale=True)
    options = options_of(command_in(applied(tmp_path, plan_of(placed))))
    assert {"--autoscale", "--encode-first"} <= options.keys()
    assert (options["--pool-sizes"], options["--lending"]) == ("EPD=1-4,PD=1-2", "idle")


def test_pools_that_scale_share_the_gpus_that_the_plan_leaves(tmp_path: Path) -> None:
    budget = Budget({"l4": 4, "h100": 2}, None, 2.0)
    path = written(tmp_path, plan_of(GPUS, model=str(config(tmp_path)), budget=budget))
    line = command_in(triptych("plan", "apply", path, "--model", "/models/llava", "--autoscale"))
    described = [word for word in line if word.startswith("--tier=")]
    assert [word.rpartition("gpus=")[2] for word in described] == ["0/1/4/5", "2/3"]


def test_a_configuration_alone_needs_the_model_to_run(tmp_path: Path) -> None:
    path = written(tmp_path, plan_of(GPUS, model=str(config(tmp_path))))
    assert "name the model with --model" in triptych("plan", "apply", path, status=2)
    said = triptych("plan", "apply", path, "--model", "/models/llava")
    options = options_of(command_in(said))
    assert options["--model"] == "llava=/models/llava"
    assert options["--roles"] == "E@l4:2,PD@h100:2"
    assert "GPUs are numbered in the order of the roles" in said


# --- compose -------------------------------------------------------------------------------------------------------------


def override_of(folder: Path, plan: PlanRecord, *arguments: object) -> dict[str, Any]:
    said = applied(folder, plan, "--to", "compose", "--compose-file", ROOT / "docker-compose.yml", *arguments)
    line = command_in(said)
    path = Path(line[len(line) - 1 - line[::-1].index("-f") + 1])
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    return document


def merged(override: dict[str, Any]) -> dict[str, Any]:
    """Services of both files, as compose merges what is used here: mappings by key, lists added."""
    services = {name: dict(definition) for name, definition in FILE["services"].items()}
    for name, definition in override["services"].items():
        old = services.setdefault(name, {})
        for key, value in definition.items():
            if isinstance(value, dict):
                old[key] = {**old.get(key, {}), **value}
            else:
                old[key] = [*old.get(key, []), *value] if isinstance(value, list) and key == "volumes" else value
    return services


def test_an_override_replaces_the_instances_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.rpc.settings.own_address", lambda: "172.18.0.7")
    plan = plan_of(placement(HYBRID, settings={"max-sequences": "8"}))
    override = override_of(tmp_path, plan)
    validator = jsonschema_rs.validator_for(SCHEMA)
    whole = {**FILE, "services": merged(override)}
    for document in (override, whole):
        assert [(error.instance_path, error.message) for error in validator.iter_errors(document)] == []
    services = whole["services"]
    planned = {name: services[name] for name in services if name.startswith("planned-")}
    assert {name: definition["scale"] for name, definition in planned.items()} == {
        "planned-encoder": 1,
        "planned-prefill": 1,
        "planned-decode": 2,
    }
    assert services["encoder"]["scale"] == services["text"]["scale"] == 0
    for name, definition in planned.items():
        service = "encoder" if name == "planned-encoder" else "text"
        given = {key: resolved(str(value)) for key, value in definition["environment"].items()}
        settings: Any = SETTINGS[service].load([], image_environment(service) | given)
        assert settings.compute.torch_threads == definition["cpus"] == 2
        if service == "text":
            assert settings.engine.max_sequences == 8
            assert settings.role is Role("P" if name == "planned-prefill" else "D")
        assert definition["read_only"]
        assert definition["networks"] == {"cluster": {"aliases": [service]}}
        assert "profiles" not in definition


def test_what_reads_profiles_in_containers_finds_them(tmp_path: Path) -> None:
    services = merged(override_of(tmp_path, plan_of(placement({"EPD": 1}))))
    readers: dict[str, type[ServiceSettings]] = {"router": RouterSettings, "pool-manager": PoolManagerSettings}
    for name, cls in readers.items():
        settings: Any = cls.load(
            [], {key: resolved(str(value)) for key, value in services[name]["environment"].items()}
        )
        assert str(settings.profiles) == "/profiles"
        (mount,) = (volume for volume in services[name]["volumes"] if volume.endswith(":/profiles:ro"))
        assert len(read_profiles(Path(mount.partition(":")[0]))[0]) == 2


def followed_plan(folder: Path, *arguments: object) -> tuple[PlanRecord, PlanRecord]:
    """A plan with a catalogue and a trace, and what a pool manager in a container reads of it."""
    catalogue, trace = folder / "own.toml", folder / "trace.jsonl"
    catalogue.write_text("")
    trace.write_text("")
    plan = plan_of(
        placement({"EPD": 1}, "a100-80"),
        model=str(config(folder)),
        common={"catalogue": str(catalogue), "control-ms": "0.3"},
        workload={"rate": "2", "trace": str(trace)},
    )
    path = written(folder, plan)
    triptych("plan", "apply", path, "--out", folder / "out", f"--plan={path}", "--replan", *arguments)
    assert (folder / "out" / "plan" / "catalogue.toml").read_text() == ""
    return plan, read(folder / "out" / "plan" / "plan.json")


def test_a_pool_manager_in_a_container_follows_a_copy_with_the_paths_of_the_container(tmp_path: Path) -> None:
    plan, copy = followed_plan(tmp_path, "--to", "compose", "--compose-file", ROOT / "docker-compose.yml")
    assert copy.model == f"/models/{config(tmp_path).parent.name}"
    assert copy.common == {"catalogue": "/plan/catalogue.toml", "control-ms": "0.3"}
    assert copy.workload == {"rate": "2"}
    assert copy.candidates == plan.candidates
    override = yaml.safe_load((tmp_path / "out" / "docker-compose.plan.yml").read_text())
    manager = merged(override)["pool-manager"]
    given = {key: resolved(str(value)) for key, value in manager["environment"].items()}
    settings = PoolManagerSettings.load([], given)
    assert (str(settings.plan), settings.replan) == ("/plan/plan.json", True)
    assert f"{tmp_path / 'out' / 'plan'}:/plan:ro" in manager["volumes"]
    assert any(volume.endswith(":/models:ro") for volume in manager["volumes"])


@pytest.mark.parametrize("origin", Origin)
def test_a_plan_that_is_followed_has_the_profiles_of_the_container_if_they_were_measured(
    tmp_path: Path, origin: Origin
) -> None:
    plan = plan_of(placement({"EPD": 1}))
    path = written(tmp_path, plan)
    cluster = planned_cluster(plan, plan.candidates[0].placement, model=None, autoscale=False, given=[f"--plan={path}"])
    profiles = [replace(profile, measured=replace(profile.measured, origin=origin)) for profile in cluster.profiles]
    copy = PlanRecord.parse(followed_files(replace(cluster, profiles=profiles))["plan/plan.json"].encode())
    assert copy.common.get("profiles") == ("/profiles" if origin is Origin.MEASURED else None)


def test_a_plan_to_follow_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, plan_of(placement({"EPD": 1})))
    options = ("--to", "compose", "--compose-file", ROOT / "docker-compose.yml", "--plan=none.json")
    assert "--plan=none.json" in triptych("plan", "apply", path, *options, status=2)


def test_each_instance_on_gpus_has_its_own(tmp_path: Path) -> None:
    services = override_of(tmp_path, plan_of(GPUS, model=str(config(tmp_path))))["services"]
    planned = {name: services[name] for name in services if name.startswith("planned-")}
    assert set(planned) == {"planned-encoder-1", "planned-encoder-2", "planned-text-1", "planned-text-2"}
    numbers = []
    for definition in planned.values():
        (devices,) = definition["deploy"]["resources"]["reservations"]["devices"]
        numbers += devices["device_ids"]
        assert devices["capabilities"] == ["gpu"]
        assert definition["image"].endswith("-cuda")
    assert numbers == ["0", "1", "2", "3"]


def test_the_command_names_the_model(tmp_path: Path) -> None:
    said = applied(
        tmp_path,
        plan_of(GPUS, model=str(config(tmp_path))),
        "--to",
        "compose",
        "--compose-file",
        ROOT / "docker-compose.yml",
    )
    assert "TRIPTYCH_MODEL=/models/llava TRIPTYCH_MODEL_ID=llava docker compose -f" in said


def test_instances_that_switch_are_text_processes_with_every_stage(tmp_path: Path) -> None:
    placed = placement(HYBRID, switch_roles=True, settings={"slo": "ttft=5x,tbt=5x"})
    services = override_of(tmp_path, plan_of(placed))["services"]
    encoder = services["planned-encoder"]["environment"]
    assert (encoder["TRIPTYCH_TEXT_ROLE"], encoder["TRIPTYCH_TEXT_SWITCHABLE"]) == ("E", "EPD")
    assert "--prepare-threads=2" in encoder["TRIPTYCH_TEXT_MOUNT_ENCODER"]
    assert services["pool-manager"]["environment"]["TRIPTYCH_POOL_MANAGER_SWITCH_ROLES"] == "true"


# --- kubernetes ----------------------------------------------------------------------------------------------------------


def overlay_of(folder: Path, plan: PlanRecord, *arguments: object) -> list[Document]:
    applied(folder, plan, "--to", "kubernetes", "--base", BASE, "--out", folder / "overlay", *arguments)
    return kustomized(folder / "overlay")


def pools(documents: list[Document]) -> dict[str, Document]:
    return {name: workload for name, workload in of_kind(documents, "Deployment").items() if name.endswith("-pool")}


def settings_in(workload: Document, documents: list[Document]) -> Any:
    container = container_of(workload)
    service = container["name"]
    return SETTINGS[service].load((), image_environment(service) | environment(container, documents, POD))


def manager_of(documents: list[Document]) -> Any:
    container = container_of(of_kind(documents, "StatefulSet")["triptych-pool-manager"])
    given = image_environment("pool-manager") | environment(container, documents, POD)
    return PoolManagerSettings.load((), given)


@pytest.mark.slow
def test_an_overlay_has_a_pool_for_each_role(tmp_path: Path) -> None:
    documents = overlay_of(tmp_path, plan_of(placement(HYBRID, settings={"max-sequences": "8"})))
    assert {*of_kind(documents, "Deployment")} == {
        "triptych-encoder-pool",
        "triptych-prefill-pool",
        "triptych-decode-pool",
        "triptych-router",
        "triptych-gateway",
    }
    found = pools(documents)
    assert {name: workload["spec"]["replicas"] for name, workload in found.items()} == {
        "triptych-encoder-pool": 1,
        "triptych-prefill-pool": 1,
        "triptych-decode-pool": 2,
    }
    roles = {name: getattr(settings_in(workload, documents), "role", Role.E) for name, workload in found.items()}
    assert roles == {"triptych-encoder-pool": Role.E, "triptych-prefill-pool": Role.P, "triptych-decode-pool": Role.D}
    assert settings_in(found["triptych-decode-pool"], documents).engine.max_sequences == 8
    for name, workload in found.items():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        choosing = [other for other in found.values() if selects(other["spec"]["selector"], labels)]
        assert choosing == [workload], name
        assert container_of(workload)["resources"]["limits"]["cpu"] == "2"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_objects_of_an_overlay_fit_the_strict_schema(tmp_path: Path, version: str) -> None:
    placed = placement(HYBRID, switch_roles=True, settings={"slo": "ttft=5x,tbt=5x"})
    for document in overlay_of(tmp_path, plan_of(placed), "--autoscale"):
        assert kubernetes_validate.validate(document, version, strict=True) == version


@pytest.mark.slow
def test_the_pool_manager_may_scale_these_pools_alone(tmp_path: Path) -> None:
    plan = plan_of(placement(HYBRID), budget=Budget({"cpu": 6}, None, 2.0))
    documents = overlay_of(tmp_path, plan, "--autoscale")
    manager = manager_of(documents)
    assert {pool.role: name for pool, name in manager.named_deployments.items()} == {
        Role.E: "triptych-encoder-pool",
        Role.P: "triptych-prefill-pool",
        Role.D: "triptych-decode-pool",
    }
    assert {pool.model for pool in manager.named_deployments} == {"triptych-demo"}
    assert (manager.autoscale, manager.switch_roles) == (True, False)
    assert [str(parse_bounds(entry)[0]) for entry in manager.control.pool_sizes] == ["E", "P", "D"]
    assert manager.control.pool_sizes == ("E=1-3", "P=1-3", "D=1-4")
    (role,) = of_kind(documents, "Role").values()
    assert role["rules"][0]["resourceNames"] == [*manager.named_deployments.values()]
    assert not any("replicas" in workload["spec"] for workload in pools(documents).values())


@pytest.mark.slow
def test_roles_switch_with_the_profiles_that_are_in_the_overlay(tmp_path: Path) -> None:
    placed = placement(HYBRID, switch_roles=True, settings={"slo": "ttft=5x,tbt=5x"})
    documents = overlay_of(tmp_path, plan_of(placed))
    manager = manager_of(documents)
    assert (manager.switch_roles, str(manager.profiles)) == (True, "/profiles")
    (name,) = (name for name in of_kind(documents, "ConfigMap") if name.startswith("triptych-profiles"))
    for kind, workload in (("StatefulSet", "triptych-pool-manager"), ("Deployment", "triptych-router")):
        found = of_kind(documents, kind)[workload]
        assert {"name": "profiles", "mountPath": "/profiles", "readOnly": True} in container_of(found)["volumeMounts"]
        (volume,) = (volume for volume in pod_of(found)["volumes"] if volume["name"] == "profiles")
        assert volume["configMap"]["name"] == name
    encoder = settings_in(pools(documents)["triptych-encoder-pool"], documents)
    assert (encoder.role, encoder.switchable, encoder.transfer_kv_on_drain) == (Role.E, Role.EPD, False)


@pytest.mark.slow
def test_the_pool_manager_of_an_overlay_finds_the_plan_that_it_follows(tmp_path: Path) -> None:
    followed_plan(tmp_path, "--to", "kubernetes", "--base", BASE, "--autoscale")
    documents = kustomized(tmp_path / "out")
    manager = manager_of(documents)
    assert (str(manager.plan), manager.replan, manager.autoscale) == ("/plan/plan.json", True, True)
    assert manager.control.pool_sizes == (), "the plan has them"
    found = of_kind(documents, "StatefulSet")["triptych-pool-manager"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container_of(found)["volumeMounts"]}
    assert (mounts["plan"], mounts["models"]) == ("/plan", "/models")
    (name,) = (name for name in of_kind(documents, "ConfigMap") if name.startswith("triptych-plan"))
    (volume,) = (volume for volume in pod_of(found)["volumes"] if volume["name"] == "plan")
    assert volume["configMap"]["name"] == name
    assert {*of_kind(documents, "ConfigMap")[name]["data"]} == {"plan.json", "catalogue.toml"}


@pytest.mark.slow
def test_a_role_on_two_kinds_of_gpus_is_two_deployments(tmp_path: Path) -> None:
    documents = overlay_of(tmp_path, plan_of(MIXED, model=str(config(tmp_path))), "--autoscale")
    found = pools(documents)
    assert {name: pod_of(workload)["nodeSelector"]["nvidia.com/gpu.product"] for name, workload in found.items()} == {
        "triptych-encoder-pool": "NVIDIA-L4",
        "triptych-text-h100-pool": "NVIDIA-H100-80GB-HBM3",
        "triptych-text-l4-pool": "NVIDIA-L4",
    }
    manager = manager_of(documents)
    assert [pool.kind for pool in manager.named_deployments] == ["E", "PD@h100", "PD@l4"]
    assert [parse_bounds(entry)[0] for entry in manager.control.pool_sizes] == ["E", "PD@h100", "PD@l4"]
    for tier in ("h100", "l4"):
        assert settings_in(found[f"triptych-text-{tier}-pool"], documents).hardware_tier.name == tier
    services = override_of(tmp_path, plan_of(MIXED, model=str(config(tmp_path))))["services"]
    assert {"planned-text-h100-1", "planned-text-h100-2", "planned-text-l4-1"} <= services.keys()


@pytest.mark.slow
def test_pools_on_gpus_choose_nodes_by_their_kind(tmp_path: Path) -> None:
    documents = overlay_of(tmp_path, plan_of(GPUS, model=str(config(tmp_path))))
    found = pools(documents)
    products = {name: pod_of(workload)["nodeSelector"]["nvidia.com/gpu.product"] for name, workload in found.items()}
    assert products == {"triptych-encoder-pool": "NVIDIA-L4", "triptych-text-pool": "NVIDIA-H100-80GB-HBM3"}
    for workload in found.values():
        container = container_of(workload)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert re.fullmatch(r"triptych-(encoder|text):.*-cuda", container["image"])
        assert (settings := settings_in(workload, documents)).compute.device == "cuda"
        assert (settings.compute.dtype, str(settings.model)) == ("float16", "/models/llava")
    text = settings_in(found["triptych-text-pool"], documents)
    assert text.engine.max_sequences == 48
    assert text.engine.kv_cache_bytes > 40 << 30
    assert text.transfer_kv_on_drain


# --- what cannot be applied -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placed", "arguments", "message"),
    [
        (placement({"PD": 1, "E": 1}, "mi300x"), (), "run on CPUs and NVIDIA's GPUs"),
        (placement({"EPD": 1}, "h100", degrees={Role.EPD: 2}), (), "only --engine vllm divides a language model"),
        (placement({"EPD": 1}), ("--candidate", 2), "--candidate 2: the plan has 1"),
        (placement({"EPD": 1}), ("--max-sequence=3",), "did you mean --max-sequences"),
        (placement({"EPD": 1}), ("--max-sequences", "3"), "3: write further options in one word"),
        (placement({"EPD": 1}), ("--to", "compose", "--port=0"), "--port=0 is an option of triptych up"),
        (placement({"EPD": 1}), ("--to", "kubernetes", "--start"), "--start goes with --to up"),
        (placement({"EPD": 1}), ("--to", "compose", "--compose-file", "nowhere.yml"), "nowhere.yml does not exist"),
        (placement({"EPD": 1}), ("--to", "kubernetes", "--base", "nowhere"), "nowhere/text.yaml does not exist"),
        (
            placement({"E": 1, "PD": 1}, settings={"engine": "vllm"}),
            ("--to", "compose"),
            "the images of Triptych have no vLLM",
        ),
        (placement({"EPD": 2}, switch_roles=True), (), "--switch-roles moves instances between roles"),
    ],
)
def test_what_cannot_be_applied_says_why(
    tmp_path: Path, placed: Placement, arguments: tuple[object, ...], message: str
) -> None:
    path = written(tmp_path, plan_of(placed))
    assert message in " ".join(triptych("plan", "apply", path, *arguments, status=2).split())
    assert not list(tmp_path.rglob("*.y*ml"))


def test_a_file_that_is_no_plan_or_has_no_choice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    assert "Field required" in triptych("plan", "apply", path, status=2)
    plan = json.loads(plan_of(placement({"EPD": 1})).dump())
    plan["candidates"][0]["meets"] = False
    path.write_text(json.dumps(plan))
    assert "no candidate of the plan meets the objectives" in triptych("plan", "apply", path, status=2)
    assert "triptych up" in triptych("plan", "apply", path, "--candidate", 1)


def test_a_search_that_is_applied_writes_its_plan() -> None:
    said = triptych("plan", "--rate", 1, "--slo", "ttft=1s", "--apply", "up", status=2)
    assert "--apply reads the plan from a file: name it with --json" in said


@pytest.mark.slow
def test_the_command_imports_no_torch_before_it_runs() -> None:
    code = "import sys, triptych.cli.planned; sys.exit('torch' in sys.modules or 'yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
