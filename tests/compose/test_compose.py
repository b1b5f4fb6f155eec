"""docker-compose.yml on a real engine: ``make test-compose``, or the part ``make test-compose-quick`` of continuous integration.

The tests share one cluster and run in this order. Where nothing can be pulled, stand-ins have the names of the base
images, and Grafana, which cannot be had, is left out.
"""

import asyncio
import os
import re
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.compose.cluster import ANSWER, Cluster, build, new_images, under_load, wait_for, wait_until
from tests.compose.engine import ROOT, Engine, NoEngine, container_engine, image_sizes, pip_secrets, say, services
from tests.e2e.test_plan import predicted
from tests.unit.cli.plan.plans import placement, written
from triptych.cli import ports
from triptych.client import Client, TlsIdentity
from triptych.errors import TriptychError

_WANTED = os.environ.get("TRIPTYCH_TEST_COMPOSE", "")  # noqa: TID251 - an input of tests
if not _WANTED:
    pytest.skip("builds images and runs docker-compose.yml: make test-compose", allow_module_level=True)

pytestmark = pytest.mark.timeout(1800)

BUILT = ("pool-manager", "gateway", "router", "encoder", "text")
CONFINED = ("gateway", "router", "pool-manager", "encoder", "text", "redis", "prometheus")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    try:
        with container_engine() as engine:
            if not engine.pulls:
                say("no image can be pulled: stand-ins for Python, Redis and Prometheus; Grafana is left out")
            yield engine
    except NoEngine as error:
        if _WANTED == "required":
            raise
        pytest.skip(f"NOT TESTED: docker-compose.yml: {error}")


@pytest.fixture(scope="module")
def sizes(engine: Engine) -> dict[str, int]:
    """Built images and their sizes in bytes, beside the base image's."""
    say("building the images")
    with pip_secrets(engine) as secrets, ThreadPoolExecutor(2) as threads:
        names = list(threads.map(lambda service: build(engine, secrets, service), BUILT))
    sizes = image_sizes(engine, names)
    for name, size in sizes.items():
        say(f"{name}: {size / 1e6:.0f} MB over the base image")
    return sizes


@pytest.fixture(scope="module")
def cluster(engine: Engine, sizes: dict[str, int]) -> Iterator[Cluster]:
    cluster = Cluster.of(engine, f"triptych-test-{os.getpid()}")
    say(f"starting {', '.join(cluster.names)}")
    try:
        cluster.up(timeout_s=420)
        cluster.key = cluster("run", "--rm", "-T", "init", "key").strip()
        yield cluster
    except BaseException:
        say(cluster("logs", "--no-color", "--tail", "60"))
        raise
    finally:
        cluster("down", "--volumes", "--timeout", "5", timeout_s=300)
        assert cluster.left() == []


def test_images_are_small_and_three_hold_no_torch(engine: Engine, sizes: dict[str, int]) -> None:
    for service in ("gateway", "router", "pool-manager"):
        assert sizes[f"triptych-{service}"] < 250e6
        command = ("run", "--rm", "--network=none", "--entrypoint=python", f"triptych-{service}", "-c")
        found = engine.run(*command, "from importlib.util import find_spec; print(find_spec('torch'))")
        assert found.strip() == "None"


def test_every_service_is_healthy_without_further_steps(cluster: Cluster) -> None:
    running = [container for container in cluster.containers() if container["State"]["Running"]]
    names = sorted(container["Config"]["Labels"]["com.docker.compose.service"] for container in running)
    once = {"init", "model"}
    assert names == sorted([*(name for name in cluster.names if name not in once), "encoder"])
    assert all(container["State"]["Health"]["Status"] == "healthy" for container in running)


def test_a_question_about_several_images_is_answered(cluster: Cluster) -> None:
    answer, request_id = cluster.ask()
    assert answer == ANSWER
    timeline = cluster.timeline(request_id)
    assert {item["pull_backend"] for item in timeline["items"]} <= {"nixl", "tcp"}
    say(f"pulled over {', '.join(sorted({item['pull_backend'] for item in timeline['items']}))}")


def test_a_killed_encoder_costs_no_request(cluster: Cluster, engine: Engine) -> None:
    killed = cluster.containers("encoder")[0]["Id"]
    with under_load(cluster) as load:
        wait_for(load, 4)
        engine.run("kill", "--signal", "KILL", killed)
        wait_for(load, 8)
        engine.run("start", killed)
        cluster.wait_healthy(120)
    say(f"{load.right} answers while an encoder was killed and started again")


def test_containers_are_confined(cluster: Cluster) -> None:
    for service in CONFINED:
        for container in cluster.containers(service):
            host = container["HostConfig"]
            assert host["ReadonlyRootfs"], service
            assert host["CapDrop"] == ["ALL"], service
            assert not host["CapAdd"], service
            assert "no-new-privileges:true" in host["SecurityOpt"], service
            assert host["Memory"] > 0, service
            assert host["PidsLimit"] > 0, service
            assert re.match(r"[1-9]\d*", container["Config"]["User"]), service
    published = {
        (binding["HostIp"], port)
        for container in cluster.containers()
        for port, bindings in (container["NetworkSettings"]["Ports"] or {}).items()
        for binding in bindings or ()
    }
    wanted = {("127.0.0.1", "8000/tcp"), ("127.0.0.1", "50051/tcp"), ("127.0.0.1", "9090/tcp")}
    assert published == wanted | ({("127.0.0.1", "3000/tcp")} if "grafana" in cluster.names else set())


@pytest.mark.extended
def test_a_service_sees_its_own_identity_only(cluster: Cluster) -> None:
    for service in ("gateway", "router", "pool-manager", "encoder", "text", "redis"):
        for container in cluster.containers(service):
            mounted = {mount.get("Name", "") for mount in container["Mounts"]}
            secret = {name for name in mounted if "identity" in name or "authority" in name}
            assert {name.removeprefix(f"{cluster.project}_") for name in secret} == {f"identity-{service}"}


@pytest.mark.extended
def test_a_caller_without_a_key_is_refused(cluster: Cluster) -> None:
    for key in ("", "tt-wrong"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            cluster.http("/v1/models", key=key)
        with refused.value as answer:
            assert answer.code == 401


@pytest.mark.extended
def test_the_sdk_asks_with_the_certificate_of_a_user(cluster: Cluster, tmp_path: Path) -> None:
    target = f"127.0.0.1:{cluster.ports['ROUTER_PORT']}"
    identity = TlsIdentity.load(*cluster.certificate_of("user", tmp_path), name="triptych.internal")
    images = []
    for number, image in enumerate(new_images()):
        file = tmp_path / f"{number}.png"
        file.write_bytes(image)
        images.append(file)
    with Client(target, tls=identity) as client:
        assert client.chat("What digits are shown?", images=images, temperature=0).text == ANSWER
    with Client(target, timeout_s=3) as stranger, pytest.raises(TriptychError):
        stranger.models()


@pytest.mark.extended
def test_a_user_of_another_authority_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    command = (str(Path(sys.executable).with_name("triptych")), "certs", str(tmp_path))
    subprocess.run(command, check=True, capture_output=True)
    cluster.certificate_of("user", tmp_path)  # its authority, so that the router is trusted
    folder = tmp_path / "user"
    identity = TlsIdentity.load(folder / "cert.pem", folder / "key.pem", tmp_path / "ca.pem", name="triptych.internal")
    target = f"127.0.0.1:{cluster.ports['ROUTER_PORT']}"
    with Client(target, tls=identity, timeout_s=3) as stranger, pytest.raises(TriptychError):
        stranger.models()


@pytest.mark.extended
def test_encoders_are_added_and_drained_without_an_error(cluster: Cluster) -> None:
    with under_load(cluster) as load:
        wait_for(load, 4)
        cluster.up("--no-recreate", "--scale", "encoder=4")
        load.encoders.clear()
        wait_until(lambda: len(load.encoders) == 4 or load.wrong, "four encoders work")
        targets = "/api/v1/query?query=count(up{job=%22encoder%22}==1)"
        wait_until(
            lambda: (
                [series["value"][1] for series in cluster.http(targets, port="PROMETHEUS_PORT")["data"]["result"]]
                == ["4"]
            ),
            "Prometheus scrapes four encoders",
        )
        cluster.up("--no-recreate", "--scale", "encoder=2")
        wait_for(load, 8)
    assert len([container for container in cluster.containers("encoder") if container["State"]["Running"]]) == 2
    say(f"{load.right} answers while encoders went from 2 to 4 to 2")


@pytest.mark.extended
def test_every_service_is_scraped(cluster: Cluster) -> None:
    def up() -> dict[str, int]:
        answer = cluster.http("/api/v1/query?query=sum%20by%20(job)(up)", port="PROMETHEUS_PORT")
        return {series["metric"]["job"]: int(series["value"][1]) for series in answer["data"]["result"]}

    wanted = {"encoder": 2, "gateway": 1, "pool-manager": 1, "router": 1, "text": 1}
    wait_until(lambda: wanted.items() <= up().items(), f"Prometheus scrapes {wanted}")


@pytest.mark.extended
def test_a_restart_of_redis_costs_no_request(cluster: Cluster) -> None:
    with under_load(cluster) as load:
        wait_for(load, 4)
        cluster("restart", "redis")
        cluster.wait_healthy(120)
        wait_for(load, 8)
    logs = cluster("logs", "--no-color", "pool-manager")
    assert "Traceback" not in logs
    say(f"{load.right} answers while Redis was restarted")


@pytest.mark.extended
def test_renewed_certificates_are_used_under_load_without_an_error(cluster: Cluster, engine: Engine) -> None:
    before = cluster.certificates_in_use()
    assert before == cluster.certificates_on_disk()
    with under_load(cluster) as load:
        wait_for(load, 4)
        cluster("run", "--rm", "-T", "init", "renew")
        renewed = cluster.certificates_on_disk()
        wait_until(lambda: cluster.certificates_in_use() == renewed, "all services present their new certificates")
        wait_for(load, 8)
        # One that starts now is called, and calls others, with new certificates only.
        engine.run("restart", "--time", "60", cluster.containers("encoder")[0]["Id"], timeout_s=90)
        cluster.wait_healthy(120)
        load.encoders.clear()
        wait_until(lambda: len(load.encoders) == 2 or load.wrong, "both encoders work")
    assert not set(before.values()) & set(renewed.values())
    say(f"{load.right} answers while all certificates were renewed")


@pytest.mark.extended
def test_an_operator_drains_an_encoder_from_the_host(cluster: Cluster, tmp_path: Path) -> None:
    port = ports.free(1)[0]
    override = tmp_path / "override.yml"
    override.write_text(documented_override().replace("127.0.0.1:50041:", f"127.0.0.1:{port}:"))
    files = ("--file", "docker-compose.yml", "--file", str(override))

    def triptych(caller: str, *command: str) -> subprocess.CompletedProcess[str]:
        certificate, key, authority = map(str, cluster.certificate_of(caller, tmp_path / caller))
        identity = ("--tls-cert", certificate, "--tls-key", key, "--tls-ca", authority)
        at = ("--pool-manager", f"127.0.0.1:{port}", "--tls-name", "triptych.internal")
        whole = (str(Path(sys.executable).with_name("triptych")), *command, *at, *identity)
        return subprocess.run(whole, capture_output=True, text=True, timeout=120, check=False)

    with under_load(cluster) as load:
        cluster(*files, "up", "--detach", "--no-build", "--no-deps", "pool-manager")
        cluster.wait_healthy(120)
        load.encoders.clear()
        wait_until(lambda: len(load.encoders) == 2 or load.wrong, "both encoders work")
        name = min(load.encoders)
        refused = triptych("user", "drain", name)
        assert refused.returncode != 0
        assert "operator" in refused.stderr, refused
        drained = triptych("operator", "drain", name, "--wait", "90s")
        assert drained.returncode == 0, drained
        load.encoders.clear()
        wait_for(load, 8)
        assert name not in load.encoders
    say(f"{load.right} answers while the pool manager was replaced and an encoder drained")
    cluster("restart", "encoder")
    cluster.wait_healthy(180)
    cluster("up", "--detach", "--no-build", "--no-deps", "pool-manager")
    cluster.wait_healthy(180)


@pytest.mark.extended
def test_a_plan_replaces_the_instances_and_is_verified(cluster: Cluster, tmp_path: Path) -> None:
    placed = placement({"E": 1, "P": 1, "D": 1}, prepare_cores=1)
    plan = written(tmp_path, asyncio.run(predicted(tmp_path, placed)))

    def triptych(*command: str) -> subprocess.CompletedProcess[str]:
        whole = (str(Path(sys.executable).with_name("triptych")), "plan", *command)
        return subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    applied = triptych("apply", str(plan), "--to", "compose", "--out", str(tmp_path / "plan"))
    assert applied.returncode == 0, applied
    files = ("--file", "docker-compose.yml", "--file", str(tmp_path / "plan" / "docker-compose.plan.yml"))
    planned = ("planned-encoder", "planned-prefill", "planned-decode")
    cluster(*files, "config", "--quiet")
    cluster(*files, "up", "--detach", "--no-build", *cluster.names, *planned, timeout_s=300)
    cluster.wait_healthy(300)
    running = [container for container in cluster.containers() if container["State"]["Running"]]
    instances = sorted(container["Config"]["Labels"]["com.docker.compose.service"] for container in running)
    assert {*planned} <= {*instances}
    assert not {"encoder", "text"} & {*instances}
    assert cluster.ask()[0] == ANSWER
    url = f"http://127.0.0.1:{cluster.ports['GATEWAY_PORT']}"
    kept = str(tmp_path / "verified.jsonl")
    verified = triptych(
        "verify", str(plan), "--url", url, "--api-key", cluster.key, "--error", "10", "--calibration", kept
    )
    assert verified.returncode == 0, verified
    say(verified.stdout)
    cluster(*files, "rm", "--stop", "--force", *planned, timeout_s=300)
    cluster.up()


def documented_override() -> str:
    """What docs/deployment.md says to publish the pool manager's port with."""
    text = (ROOT / "docs" / "deployment.md").read_text()
    (found,) = (block for block in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL) if "pool-manager:" in block)
    return str(found)


@pytest.mark.extended
def test_services_log_json(cluster: Cluster) -> None:
    for service in ("gateway", "router", "pool-manager"):
        lines = [line.partition("|")[2].strip() for line in cluster("logs", "--no-color", service).splitlines()]
        of_grpc = re.compile(r"[IWE]\d{4} ")  # its core logs text, as of a handshake that failed
        own = [line for line in lines if line and not of_grpc.match(line)]
        assert own
        assert [line for line in own if not line.startswith("{")] == []


@pytest.mark.extended
def test_a_second_up_changes_nothing(cluster: Cluster) -> None:
    before = {
        container["Id"]: container["State"]["StartedAt"]
        for container in cluster.containers()
        if container["State"]["Running"]
    }
    cluster.up()
    after = {
        container["Id"]: container["State"]["StartedAt"]
        for container in cluster.containers()
        if container["State"]["Running"]
    }
    assert before == after
    assert cluster("run", "--rm", "-T", "init", "key").strip() == cluster.key


@pytest.mark.extended
def test_services_stop_in_order_at_once_when_idle(cluster: Cluster) -> None:
    cluster("stop", timeout_s=120)
    codes = {container["Name"]: container["State"]["ExitCode"] for container in cluster.containers()}
    named = {name: code for name, code in codes.items() if not re.search(r"prometheus|grafana", name)}
    assert set(named.values()) == {0}, named
    assert set(services()) > set(BUILT)
