"""docker-compose.yml: valid, confined, and with settings that its services take. ``make test-compose`` runs it."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import typer
import yaml

from tests.contract.manifests import image_environment
from triptych.cli.main import app
from triptych.domain.stage import Role
from triptych.runtime.settings import ServiceSettings
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.gateway.settings import GatewaySettings
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.services.router.settings import RouterSettings
from triptych.services.text.settings import TextSettings

ROOT = Path(__file__).parents[3]
FILE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
SCHEMA = json.loads((Path(__file__).parent / "compose_spec" / "schema.json").read_text())
SETTINGS: dict[str, type[ServiceSettings]] = {
    "encoder": EncoderSettings,
    "decode": TextSettings,
    "encoder-gpu": EncoderSettings,
    "gateway": GatewaySettings,
    "pool-manager": PoolManagerSettings,
    "prefill": TextSettings,
    "router": RouterSettings,
    "text": TextSettings,
    "text-gpu": TextSettings,
}
ONCE = {"init", "model"}
OF_TEXT = {"prefill": Role.P, "decode": Role.D, "text": Role.PD, "text-gpu": Role.PD}
"""Services with text instances, and their roles."""


def kind(service: str) -> str:
    """The service whose image and identity it has."""
    return "text" if service in OF_TEXT else service.removesuffix("-gpu")


def resolved(text: str) -> str:
    """With the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def loaded(service: str) -> Any:
    environment = {name: resolved(str(value)) for name, value in SERVICES[service]["environment"].items()}
    return SETTINGS[service].load([], image_environment(kind(service)) | environment)


def test_it_is_valid_by_the_specification_of_compose() -> None:
    validator = jsonschema_rs.validator_for(SCHEMA)
    assert [(error.instance_path, error.message) for error in validator.iter_errors(FILE)] == []
    wrong = {"services": {"gateway": {"image": "x", "memory_limit": "1g"}}}
    assert not validator.is_valid(wrong), "the schema would accept anything"


@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_takes_its_settings(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.rpc.settings.own_address", lambda: "172.18.0.7")
    settings = loaded(service)
    assert settings.tls.tls_name == "triptych.internal"
    grace_s = int(SERVICES[service]["stop_grace_period"].removesuffix("s"))
    assert settings.drain_s + 5 <= grace_s, "Docker would kill it while it drains"


@pytest.mark.parametrize(("service", "role"), OF_TEXT.items())
def test_text_instances_have_their_roles(service: str, role: Role) -> None:
    assert loaded(service).role is role
    assert ("profiles" in SERVICES[service]) is (service != "text")


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_confined(service: str) -> None:
    definition = SERVICES[service]
    assert definition["read_only"] is True
    assert definition["cap_drop"] == ["ALL"]
    assert definition.get("cap_add", []) == ([] if service != "init" else ["CHOWN", "DAC_OVERRIDE"])
    assert definition["security_opt"] == ["no-new-privileges:true"]
    assert definition["pids_limit"] > 0
    assert definition["mem_limit"]
    assert definition["logging"]["options"]["max-size"]
    assert not {"privileged", "ipc", "pid", "devices"} & set(definition)
    assert not [mount for mount in definition.get("volumes", ()) if mount.startswith("/") or "docker.sock" in mount]


def test_four_ports_are_published_and_on_loopback_only() -> None:
    published = {
        name: [resolved(port) for port in definition["ports"]]
        for name, definition in SERVICES.items()
        if "ports" in definition
    }
    assert published == {
        "gateway": ["127.0.0.1:8000:8000"],
        "router": ["127.0.0.1:50051:50051"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }


def test_instances_reach_nothing_outside() -> None:
    assert FILE["networks"]["cluster"] == {"internal": True}
    outside = {name for name, definition in SERVICES.items() if "edge" in definition.get("networks", ())}
    assert outside == {"model", "gateway", "router", "prometheus", "grafana"}


@pytest.mark.parametrize("service", sorted(set(SERVICES) - ONCE))
def test_a_service_mounts_its_own_secrets_only(service: str) -> None:
    mounted = {mount.split(":")[0] for mount in SERVICES[service].get("volumes", ())}
    secret = {name for name in mounted if name.startswith(("identity-", "authority"))}
    assert secret <= {f"identity-{kind(service)}"}
    assert all(mount.endswith(":/identity:ro") for mount in SERVICES[service]["volumes"] if "identity-" in mount)


def test_no_secret_is_in_the_environment() -> None:
    names = {name for definition in SERVICES.values() for name in definition.get("environment", ())}
    assert {name for name in names if re.search("PASSWORD|SECRET|TOKEN", name)} == {
        "TRIPTYCH_POOL_MANAGER_REDIS_PASSWORD_FILE",
        "GF_SECURITY_ADMIN_PASSWORD__FILE",
    }


def test_the_command_in_the_pool_managers_container_reaches_the_cluster() -> None:
    status: Any = typer.main.get_command(app).commands["status"]  # type: ignore[attr-defined]
    read = {option.envvar for option in status.params if option.envvar}
    environment = SERVICES["pool-manager"]["environment"]
    given = {name: value for name, value in environment.items() if not name.startswith("TRIPTYCH_POOL_MANAGER_")}
    assert set(given) == read - {"TRIPTYCH_API_KEY"}
    assert given["TRIPTYCH_POOL_MANAGER"] == SERVICES["router"]["environment"]["TRIPTYCH_ROUTER_POOL_MANAGER"]
    assert {given[f"TRIPTYCH_TLS_{file}"] for file in ("CERT", "KEY", "CA", "NAME")} == {
        environment[f"TRIPTYCH_POOL_MANAGER_TLS_{file}"] for file in ("CERT", "KEY", "CA", "NAME")
    }


def test_services_start_by_health() -> None:
    for name, definition in SERVICES.items():
        for needed, how in definition.get("depends_on", {}).items():
            ends = needed in ONCE
            wanted = "service_completed_successfully" if ends else "service_healthy"
            assert how == {"condition": wanted}, f"{name} after {needed}"


def test_images_of_others_are_pinned_and_the_rest_is_built_here() -> None:
    for name, definition in SERVICES.items():
        if "build" in definition:
            assert (ROOT / definition["build"]["dockerfile"]).is_file()
            assert definition["image"].startswith("triptych-")
        else:
            assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+[\w.-]*", definition["image"]), name
    kubernetes = yaml.safe_load_all((ROOT / "deploy/kubernetes/base/redis.yaml").read_text())
    (redis,) = next(iter(kubernetes))["spec"]["template"]["spec"]["containers"]
    assert redis["image"] == SERVICES["redis"]["image"]


def test_what_is_mounted_from_the_repository_is_there_and_read_only() -> None:
    mounts = [
        mount for definition in SERVICES.values() for mount in definition.get("volumes", ()) if mount.startswith("./")
    ]
    assert mounts
    for mount in mounts:
        source, _, mode = mount.split(":")
        assert (ROOT / source).exists(), mount
        assert mode == "ro", mount


def test_the_gpu_images_are_built_by_the_same_dockerfiles() -> None:
    for name in ("encoder", "text"):
        plain, gpu = SERVICES[name], SERVICES[f"{name}-gpu"]
        assert gpu["build"]["dockerfile"] == plain["build"]["dockerfile"]
        assert gpu["profiles"] == ["gpu"]
        devices = gpu["deploy"]["resources"]["reservations"]["devices"]
        assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
        assert gpu["networks"] == {"cluster": {"aliases": [name]}}
        assert set(gpu["environment"]) - set(plain["environment"]) == {f"TRIPTYCH_{name.upper()}_DEVICE"}
