"""The manifests of ``deploy/kubernetes``: valid for current versions of Kubernetes, and what they promise."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from scripts.lock import EXTRAS
from tests.contract.manifests import (
    IMAGES,
    OVERLAYS,
    SERVICES,
    Document,
    PodIdentity,
    container_of,
    dockerfile,
    environment,
    image_environment,
    of_kind,
    pod_of,
    rendered,
    selects,
    workloads,
)
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role
from triptych.rpc.settings import RpcServiceSettings
from triptych.runtime.settings import ServiceSettings
from triptych.runtime.tls import INSTANCE, POOL_MANAGER, REDIS, ROUTER
from triptych.services.encoder.settings import EncoderSettings
from triptych.services.gateway.settings import GatewaySettings
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.services.router.settings import RouterSettings
from triptych.services.text.settings import TextSettings

VERSIONS = ("1.31", "1.34", "1.37")
OF_OPERATORS = {"PodMonitor", "Certificate", "Issuer"}
"""Kinds of other projects, whose schemas are not in that of Kubernetes."""
SETTINGS: dict[str, type[ServiceSettings]] = {
    "encoder": EncoderSettings,
    "text": TextSettings,
    "router": RouterSettings,
    "gateway": GatewaySettings,
    "pool-manager": PoolManagerSettings,
}
POD = PodIdentity("pod-1", "10.1.2.3")
POOLS = ("encoder", "text")
DATA_PORTS = (61_000, 65_535)
"""Ports of pulls, by TCP and by UCX."""
ADMIN_PORT = 9100
DNS_PORT = 53


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def documents(overlay: str) -> list[Document]:
    return rendered(overlay)


def settings_of(service: str, documents: list[Document]) -> ServiceSettings:
    """As the service reads them in its pod: an unknown variable is an error."""
    container = container_of(workloads(documents)[service])
    return SETTINGS[service].load((), image_environment(service) | environment(container, documents, POD))


def service_settings(documents: list[Document]) -> Iterator[tuple[str, Any]]:
    for service in SERVICES:
        yield service, settings_of(service, documents)


# --- schemas -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each schema is read once: the definitions have megabytes."""
    read: dict[tuple[str, str], Any] = {}
    reading = kubernetes_validate.utils.schema_contents

    def remembered(filename: str, version: str) -> Any:
        if (filename, version) not in read:
            read[filename, version] = reading(filename, version)
        return read[filename, version]

    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", remembered)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_the_strict_schema(documents: list[Document], version: str, schemas: None) -> None:
    for document in documents:
        if document["kind"] not in OF_OPERATORS:
            assert kubernetes_validate.validate(document, version, strict=True) == version


def test_a_misspelt_field_would_be_noticed() -> None:
    document = workloads(rendered("demo"))["encoder"]
    pod_of(document)["terminationGracePeriod"] = 60
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


def test_the_objects_are_these(documents: list[Document], overlay: str) -> None:
    assert set(workloads(documents)) == {*SERVICES, "redis"}
    assert {*of_kind(documents, "Deployment")} == {
        f"triptych-{service}" for service in ("encoder", "text", "router", "gateway")
    }
    assert not of_kind(documents, "Secret"), "secrets are made by the operator, not kept in a repository"
    (space,) = of_kind(documents, "Namespace").values()
    level = "privileged" if overlay == "gpu" else "restricted"
    assert space["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == level


# --- settings ------------------------------------------------------------------------------------------------------------


def test_every_service_accepts_its_environment_with_mutual_tls(documents: list[Document]) -> None:
    for service, settings in service_settings(documents):
        mounts = {mount["mountPath"] for mount in container_of(workloads(documents)[service])["volumeMounts"]}
        files = settings.tls.files
        assert files is not None, service
        assert {str(path.parent) for path in files} == {"/tls"} <= mounts
        assert settings.tls.tls_name == "triptych.internal"
        assert service == "gateway" or not getattr(settings, "allow_network", False)
        assert not getattr(settings, "allow_anyone", False)


def test_the_settings_of_the_services_fit_each_other(documents: list[Document]) -> None:
    found: dict[str, Any] = dict(service_settings(documents))
    model = found["router"].model_id
    assert found["encoder"].model_id == found["text"].model_id == model
    assert found["encoder"].compute.dtype == found["text"].compute.dtype
    manager = found["pool-manager"]
    assert manager.scaler == "kubernetes"
    assert manager.kubernetes.kubernetes_namespace == POD.namespace
    assert manager.named_deployments == {
        PoolName(model, Role.E): "triptych-encoder",
        PoolName(model, Role.PD): "triptych-text",
    }
    stateful = workloads(documents)["pool-manager"]
    addresses = {
        f"{stateful['metadata']['name']}-{number}.{stateful['spec']['serviceName']}:{manager.port}"
        for number in range(stateful["spec"]["replicas"])
    }
    assert stateful["spec"]["replicas"] == 2
    for service in ("encoder", "text", "router", "gateway"):
        assert set(found[service].managers.pool_manager) == addresses
    # `triptych drain` in the hooks, `triptych status` and `triptych scale` find them too.
    for service in ("encoder", "text", "router", "pool-manager"):
        environ = environment(container_of(workloads(documents)[service]), documents, POD)
        assert set(environ["TRIPTYCH_POOL_MANAGER"].split(",")) == addresses
        files = tuple(Path(environ[f"TRIPTYCH_TLS_{file}"]) for file in ("CERT", "KEY", "CA"))
        assert files == found[service].tls.files
        assert environ["TRIPTYCH_TLS_NAME"] == found[service].tls.tls_name
    for service in ("encoder", "text", "router"):
        assert found[service].instance_id == POD.name, "the scaler names instances by their pods"
        assert found[service].advertise == f"{POD.ip}:{found[service].port}"
    for service in POOLS:
        assert found[service].transfers.advertise_host == POD.ip
        assert "shm" not in found[service].transfers.transports, "pods share no memory"


def test_embeddings_travel_encrypted_unless_over_rdma(documents: list[Document], overlay: str) -> None:
    for service in POOLS:
        settings: Any = settings_of(service, documents)
        assert settings.transfers.transports == (("nixl", "tcp") if overlay == "gpu" else ("tcp",))


def test_redis_has_a_password_and_tls(documents: list[Document]) -> None:
    manager: Any = settings_of("pool-manager", documents)
    assert manager.store.redis == "triptych-redis:6379"
    assert manager.store.redis_tls
    assert manager.store.redis_password_file == Path("/secrets/password")
    (config,) = (
        document for name, document in of_kind(documents, "ConfigMap").items() if name.startswith("triptych-redis")
    )
    lines = config["data"]["redis.conf"].splitlines()
    assert {"port 0", "tls-auth-clients yes", "aclfile /secrets/users.acl", "maxmemory-policy noeviction"} <= set(lines)


# --- pods ----------------------------------------------------------------------------------------------------------------


def test_no_container_has_more_rights_than_it_needs(documents: list[Document], overlay: str) -> None:
    for name, workload in workloads(documents).items():
        pod = pod_of(workload)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] >= 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod), name
        assert not any("hostPath" in volume for volume in pod["volumes"])
        assert pod["automountServiceAccountToken"] is (name == "pool-manager")
        assert pod["serviceAccountName"] == ("triptych-pool-manager" if name == "pool-manager" else "triptych")
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            added = ["IPC_LOCK"] if overlay == "gpu" and name in POOLS else []
            assert context["capabilities"].get("add", []) == added
            assert "privileged" not in context


def test_no_secret_is_in_an_environment(documents: list[Document]) -> None:
    for workload in workloads(documents).values():
        container = container_of(workload)
        assert not any("secretRef" in source for source in container.get("envFrom", ()))
        assert not any("secretKeyRef" in entry.get("valueFrom", {}) for entry in container.get("env", ()))
        secret = {volume["name"] for volume in pod_of(workload)["volumes"] if "secret" in volume}
        mounts = [mount for mount in container["volumeMounts"] if mount["name"] in secret]
        assert {mount["name"] for mount in mounts} == secret
        assert all("subPath" not in mount for mount in mounts), "files of a subPath are not replaced"
    for settings in of_kind(documents, "ConfigMap").values():
        assert not any("PASSWORD=" in key or "SECRET" in key for key in settings["data"])


def test_service_links_do_not_end_up_as_settings(documents: list[Document]) -> None:
    """Kubernetes would set TRIPTYCH_ROUTER_PORT=tcp://... for the Service triptych-router."""
    for workload in workloads(documents).values():
        assert pod_of(workload)["enableServiceLinks"] is False


def test_every_container_has_probes_requests_and_limits(documents: list[Document]) -> None:
    for name, workload in workloads(documents).items():
        container = container_of(workload)
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container), name
        for kind in ("requests", "limits"):
            assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"][kind])
        image, _, tag = container["image"].rpartition(":")
        assert image == (f"triptych-{name}" if name in SERVICES else name)
        assert tag
        assert tag != "latest"


def test_probes_ask_the_admin_port_from_within(documents: list[Document], overlay: str) -> None:
    for service, settings in service_settings(documents):
        container = container_of(workloads(documents)[service])
        asked = {
            name: container[f"{name}Probe"]["exec"]["command"][-1] for name in ("startup", "readiness", "liveness")
        }
        # An instance that drains must stay ready: the scaler takes one that is not for one that starts.
        assert asked == {"startup": "/ready", "readiness": "/health", "liveness": "/health"}
        assert settings.admin_port == ADMIN_PORT
        assert settings.admin_host == ("0.0.0.0" if overlay == "gpu" else "127.0.0.1")


def test_the_grace_period_fits_the_longest_request(documents: list[Document]) -> None:
    router: Any = settings_of("router", documents)
    gateway: Any = settings_of("gateway", documents)
    longest_s = max(router.max_timeout_s, gateway.max_request_timeout_s)
    for service in ("encoder", "text", "router", "gateway"):
        workload = workloads(documents)[service]
        grace_s = pod_of(workload)["terminationGracePeriodSeconds"]
        command = container_of(workload)["lifecycle"]["preStop"]["exec"]["command"]
        drain_s = settings_of(service, documents).drain_s
        assert drain_s >= longest_s
        if service == "gateway":  # the endpoints of its Service are removed meanwhile
            assert command[0] == "sleep"
            assert grace_s >= int(command[1]) + drain_s + 5
        else:
            assert command[-1] == f'exec triptych drain "$POD_NAME" --force --wait {longest_s:.0f}s'
            assert grace_s >= max(longest_s, drain_s) + 30


def test_the_scaler_owns_the_size_of_the_pools(documents: list[Document]) -> None:
    for name in POOLS:
        assert "replicas" not in workloads(documents)[name]["spec"], "it would be reset by each `kubectl apply`"
    for name in ("router", "gateway", "pool-manager"):
        assert workloads(documents)[name]["spec"]["replicas"] == 2


def test_what_is_there_twice_is_spread_and_kept_in_disruptions(documents: list[Document]) -> None:
    budgets = of_kind(documents, "PodDisruptionBudget")
    for service in SERVICES:
        workload = workloads(documents)[service]
        labels = workload["spec"]["template"]["metadata"]["labels"]
        keys = []
        for spread in pod_of(workload)["topologySpreadConstraints"]:
            keys.append(spread["topologyKey"])
            assert selects(spread["labelSelector"], labels)
        assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
        budget = budgets[f"triptych-{service}"]["spec"]
        assert budget["maxUnavailable"] == 1
        assert selects(budget["selector"], labels)


def test_gpus_and_rdma_are_asked_for_where_they_are_used() -> None:
    found = workloads(rendered("gpu"))
    for name, workload in found.items():
        limits = container_of(workload)["resources"]["limits"]
        pod = pod_of(workload)
        assert ("nvidia.com/gpu" in limits) is ("rdma/hca_shared_devices_a" in limits) is (name in POOLS)
        assert ("nodeSelector" in pod) is (name in POOLS)
    for name in POOLS:
        settings: Any = settings_of(name, rendered("gpu"))
        assert (settings.compute.device, settings.compute.dtype) == ("cuda", "bfloat16")
        volumes = {volume["name"]: volume for volume in pod_of(found[name])["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


# --- rights --------------------------------------------------------------------------------------------------------------


def test_the_only_rights_are_those_of_the_scaler(documents: list[Document]) -> None:
    assert not of_kind(documents, "ClusterRole")
    assert not of_kind(documents, "ClusterRoleBinding")
    (role,) = of_kind(documents, "Role").values()
    assert role["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": ["triptych-encoder", "triptych-text"],
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch", "delete"]},
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": ["triptych-scaling"],
            "verbs": ["get", "patch"],
        },
    ]
    (binding,) = of_kind(documents, "RoleBinding").values()
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "triptych-pool-manager", "namespace": POD.namespace}
    ]
    for account in of_kind(documents, "ServiceAccount").values():
        assert account["automountServiceAccountToken"] is False


# --- networks ------------------------------------------------------------------------------------------------------------

Edge = tuple[str, str, int]
"""Caller, callee and port; ``*`` for anybody."""


def ports_of(rule: Document) -> list[int]:
    """A range counts as its first port."""
    ports = []
    for port in rule["ports"]:
        assert (port["port"], port.get("endPort")) == DATA_PORTS or "endPort" not in port
        ports.append(port["port"])
    return ports


def edges(documents: list[Document], direction: str) -> set[Edge]:
    """What the policies allow in one direction, of pods to pods and of outsiders."""
    pods = {name: workload["spec"]["template"]["metadata"]["labels"] for name, workload in workloads(documents).items()}
    found: set[Edge] = set()
    for policy in of_kind(documents, "NetworkPolicy").values():
        owners = [name for name, labels in pods.items() if selects(policy["spec"]["podSelector"], labels)]
        for rule in policy["spec"].get(direction, ()):
            for peer in rule.get("from" if direction == "ingress" else "to", [{}]):
                if set(peer) == {"podSelector"}:
                    others = [name for name, labels in pods.items() if selects(peer["podSelector"], labels)]
                    assert others, f"{policy['metadata']['name']} names pods that are not there"
                elif "namespaceSelector" in peer:
                    others = list(peer["namespaceSelector"]["matchLabels"].values())
                else:
                    others = ["*"]
                for owner in owners:
                    for other in others:
                        for port in ports_of(rule):
                            found.add((other, owner, port) if direction == "ingress" else (owner, other, port))
    return found


def test_nothing_is_allowed_that_is_not_named(documents: list[Document]) -> None:
    deny = of_kind(documents, "NetworkPolicy")["triptych-default-deny"]["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_who_talks_to_whom(documents: list[Document], overlay: str) -> None:
    data = DATA_PORTS[0]
    between = {
        ("gateway", "router", 50051),
        ("router", "encoder", 50061),
        ("router", "text", 50071),
        ("text", "encoder", 50061),
        ("text", "encoder", data),
        ("text", "text", 50071),
        ("text", "text", data),
        *((member, "pool-manager", 50041) for member in ("gateway", "router", "encoder", "text")),
        ("pool-manager", "pool-manager", 50041),  # `triptych scale` in one of them
        ("pool-manager", "redis", 6379),
        *([("encoder", "text", data)] if overlay == "gpu" else []),
    }
    watched = {("monitoring", service, ADMIN_PORT) for service in SERVICES} if overlay == "gpu" else set()
    assert edges(documents, "ingress") == between | {("*", "gateway", 8000)} | watched
    assert edges(documents, "egress") == (
        between
        | {(service, "kube-system", DNS_PORT) for service in SERVICES}
        | {("pool-manager", "*", 443), ("pool-manager", "*", 6443)}  # the API server
        | {("gateway", "*", 80), ("gateway", "*", 443)}  # images by URL
    )


def test_the_gateway_fetches_from_public_addresses_only(documents: list[Document]) -> None:
    rules = of_kind(documents, "NetworkPolicy")["triptych-gateway"]["spec"]["egress"]
    (block,) = (peer["ipBlock"] for rule in rules for peer in rule["to"] if "ipBlock" in peer)
    assert {"10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"} <= set(block["except"])


def test_every_port_of_a_service_is_reached_by_somebody(documents: list[Document], overlay: str) -> None:
    reached = {(owner, port) for _, owner, port in edges(documents, "ingress")}
    for name, workload in workloads(documents).items():
        ports = {declared["name"]: declared["containerPort"] for declared in container_of(workload)["ports"]}
        for port in ports.values():
            inside = port == ADMIN_PORT and overlay == "demo"  # probes are commands in the container
            assert ((name, port) in reached) is not inside
        if name in SERVICES:
            settings: Any = settings_of(name, documents)
            assert settings.port in ports.values()
            assert settings.port == RpcServiceSettings.model_fields["port"].default or settings.port > 0
    listening = {
        (name, port["containerPort"])
        for name, workload in workloads(documents).items()
        for port in container_of(workload)["ports"]
    }
    assert {place for place in reached if place[1] != DATA_PORTS[0]} <= listening


def test_pulls_use_the_ports_that_the_policies_allow(documents: list[Document]) -> None:
    for name in POOLS:
        (sysctl,) = pod_of(workloads(documents)[name])["securityContext"]["sysctls"]
        assert sysctl == {"name": "net.ipv4.ip_local_port_range", "value": "{} {}".format(*DATA_PORTS)}


def test_services_lead_to_pods(documents: list[Document]) -> None:
    found = workloads(documents)
    for service in of_kind(documents, "Service").values():
        selected = [
            workload
            for workload in found.values()
            if selects({"matchLabels": service["spec"]["selector"]}, workload["spec"]["template"]["metadata"]["labels"])
        ]
        (workload,) = selected
        assert workload["metadata"]["name"] == service["metadata"]["name"]
        names = {port["name"] for port in container_of(workload)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
        stateful = workload["kind"] == "StatefulSet"
        assert (service["spec"].get("clusterIP") == "None") is stateful
        if stateful:
            assert workload["spec"]["serviceName"] == service["metadata"]["name"]


# --- certificates and metrics ----------------------------------------------------------------------------------------------


def test_cert_manager_makes_the_secrets_that_pods_mount() -> None:
    documents = rendered("gpu")
    called = {"encoder": INSTANCE, "text": INSTANCE, "router": ROUTER, "pool-manager": POOL_MANAGER, "redis": REDIS}
    issued = {
        certificate["spec"]["secretName"]: certificate["spec"]["dnsNames"]
        for certificate in of_kind(documents, "Certificate").values()
        if "dnsNames" in certificate["spec"]
    }
    for name, workload in workloads(documents).items():
        (secret,) = (
            volume["secret"]["secretName"] for volume in pod_of(workload)["volumes"] if volume["name"] == "tls"
        )
        names = issued.pop(secret)
        assert names[0] == f"{called.get(name, name)}.triptych.internal"
        # Clients know the gateway by its Service, or by a port forwarded to their own machine.
        rest = ["triptych-gateway", "triptych-gateway.triptych.svc", "localhost"] if name == "gateway" else []
        assert names[1:] == rest
    assert not issued


def test_the_pod_monitor_finds_the_admin_ports() -> None:
    documents = rendered("gpu")
    (monitor,) = of_kind(documents, "PodMonitor").values()
    selected = {
        name
        for name, workload in workloads(documents).items()
        if selects(monitor["spec"]["selector"], workload["spec"]["template"]["metadata"]["labels"])
    }
    assert selected == set(SERVICES)
    assert [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] == ["admin"]


def test_every_image_is_built_here() -> None:
    built = {f"triptych-{path.stem.replace('_', '-')}" for path in IMAGES.glob("*.Dockerfile")}
    used = {
        container_of(workload)["image"].rpartition(":")[0]
        for name, workload in workloads(rendered("demo")).items()
        if name in SERVICES
    }
    assert used == built


def test_images_have_what_the_manifests_call() -> None:
    for service in SERVICES:
        image = dockerfile(service)
        container = container_of(workloads(rendered("demo"))[service])
        assert "COPY deploy/images/ready.py /opt/triptych/ready.py" in image
        assert f"useradd --uid {pod_of(workloads(rendered('demo'))[service])['securityContext']['runAsUser']} " in image
        if "triptych drain" in str(container.get("lifecycle")):
            (installed,) = re.findall(r"--require-hashes --requirement (?!build)(\w+)\.txt", image)
            assert "cli" in EXTRAS[installed], "the command drain is in the extra cli"
    directory = environment(container_of(workloads(rendered("demo"))["text"]), rendered("demo"), POD)["MODEL_DIRECTORY"]
    assert re.search(r"^ARG PYTHON=python:3\.11-", image, re.MULTILINE)
    assert directory == "/opt/triptych/lib/python3.11/site-packages/triptych/demo/model"
