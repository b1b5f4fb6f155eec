"""Controllers and kubelets for a real API server: what they make of Deployments and StatefulSets are local processes.

A pod is a process with the environment, files and hooks of its container, on a loopback address of its own. What a node
would add is made up: names are replaced by addresses, paths by directories, and images by the services of this
checkout. There are no networks, images or limits of resources.
"""

import asyncio
import base64
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from tests.contract.kubernetes_kit import ApiServer
from tests.contract.manifests import (
    COMPONENT,
    IMAGES,
    SERVICES,
    Document,
    PodIdentity,
    container_of,
    environment,
    image_environment,
    pod_of,
)
from triptych.demo import MODEL_DIR
from triptych.integrations.kubernetes.api import DELETION_COST

NAMESPACE = "triptych"
READY_S = 120.0
_TICK_S = 0.2
_MERGE = "application/merge-patch+json"
_DEMO_MODEL = "/opt/triptych/lib/python3.11/site-packages/triptych/demo/model"
_PROBE_S = 1.5
_PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "Lease": "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "PodDisruptionBudget": "/apis/policy/v1beta1/namespaces/{}/poddisruptionbudgets",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
}
_OLDER = {"policy/v1": "policy/v1beta1"}
"""Versions of kinds that Kubernetes 1.20 has under an older name. It also lacks ``endPort`` of network policies, which it drops."""


async def apply(server: ApiServer, documents: list[Document]) -> set[str]:
    """Create all objects. Returns the kinds that had to be converted."""
    converted = set()
    for document in documents:
        version = document["apiVersion"]
        if version in _OLDER:
            converted.add(document["kind"])
            document = document | {"apiVersion": _OLDER[version]}  # noqa: PLW2901
        await server.request("POST", _PATHS[document["kind"]].format(NAMESPACE), document)
    return converted


async def make_secret(server: ApiServer, name: str, files: Mapping[str, bytes]) -> None:
    data = {key: base64.b64encode(value).decode() for key, value in files.items()}
    await server.request("POST", _PATHS["Secret"].format(NAMESPACE), {"metadata": {"name": name}, "data": data})


@dataclass(frozen=True)
class Ended:
    """A pod that was deleted."""

    cost: str
    """The pod's deletion cost at that time."""
    hook_status: int | None
    """Of ``preStop``; None without one."""
    hook_s: float
    exit_status: int


@dataclass
class Nodes:
    server: ApiServer
    documents: list[Document]
    folder: Path
    additions: Callable[[str, str], Mapping[str, str]]
    """What a test adds to the environment of a component's pod, which has this address."""
    ended: dict[str, Ended] = field(default_factory=dict)
    ready: dict[str, str] = field(default_factory=dict)
    """Addresses of the ready pods by name."""
    _started: set[str] = field(default_factory=set)
    _deleted: dict[str, asyncio.Event] = field(default_factory=dict)
    _costs: dict[str, str] = field(default_factory=dict)
    _processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    _addresses: dict[str, str] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: count(1))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks.append(group.create_task(self._run(group)))
                yield
                for task in self._tasks:
                    task.cancel()
        finally:
            for process in self._processes.values():
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def of(self, component: str) -> dict[str, str]:
        """Addresses of a component's ready pods by name."""
        return {name: at for name, at in self.ready.items() if name.startswith(f"triptych-{component}-")}

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float = READY_S) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():  # noqa: ASYNC110 - other processes
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{what}; ready: {sorted(self.ready)}, ended: {self.ended}") from None

    # --- controllers ---

    async def _run(self, group: asyncio.TaskGroup) -> None:
        while True:
            for kind in ("Deployment", "StatefulSet"):
                for workload in (await self.server.request("GET", _PATHS[kind].format(NAMESPACE)))["items"]:
                    # Pods last: the scaler marks those that it wants deleted before it lowers the size.
                    await self._control(kind, workload, await self._pods())
            for pod in await self._pods():
                name = pod["metadata"]["name"]
                if name not in self._started:
                    self._started.add(name)
                    self._deleted[name] = asyncio.Event()
                    self._tasks.append(group.create_task(self._live(pod)))
                if "deletionTimestamp" in pod["metadata"]:
                    self._costs.setdefault(name, _cost(pod))
                    self._deleted[name].set()
            await asyncio.sleep(_TICK_S)

    async def _control(self, kind: str, workload: Document, pods: list[Any]) -> None:
        """As the controllers do: pods that end do not count."""
        name, wanted = workload["metadata"]["name"], workload["spec"]["replicas"]
        template = workload["spec"]["template"]
        selector = workload["spec"]["selector"]["matchLabels"].items()
        alive = [
            pod
            for pod in pods
            if selector <= pod["metadata"]["labels"].items() and "deletionTimestamp" not in pod["metadata"]
        ]
        digest = sha256(repr(template).encode()).hexdigest()[:8]
        old = [pod for pod in alive if pod["metadata"]["labels"]["pod-template-hash"] != digest]
        if old and len(alive) == wanted:  # a rollout with a surge of one
            wanted += 1
        elif old and not {pod["metadata"]["name"] for pod in alive} <= self.ready.keys():
            return
        for pod in sorted(old or alive, key=_rank)[: max(0, len(alive) - wanted)]:
            await self.server.request("DELETE", f"{self._path}/{pod['metadata']['name']}")
        names = {pod["metadata"]["name"] for pod in alive}
        for _ in range(wanted - len(alive)):
            if kind == "StatefulSet":
                new = next(f"{name}-{number}" for number in range(wanted) if f"{name}-{number}" not in names)
            else:
                new = f"{name}-{digest}-{next(self._numbers):04}"
            names.add(new)
            await self._make(new, template, workload["spec"].get("volumeClaimTemplates", ()), digest)
        status = {"replicas": wanted, "observedGeneration": workload["metadata"]["generation"]}
        if status.items() <= workload["status"].items():
            return
        path = f"{_PATHS[kind].format(NAMESPACE)}/{name}/status"
        await self.server.request("PATCH", path, {"status": status}, kind=_MERGE)

    async def _make(self, name: str, template: Document, claims: Any, digest: str) -> None:
        labels = template["metadata"]["labels"] | {"pod-template-hash": digest}
        claimed = [{"name": claim["metadata"]["name"], "emptyDir": {}} for claim in claims]
        # A pod with a node has its grace period; one without is gone at once.
        spec = pod_of({"spec": {"template": template}}) | {"nodeName": "node"}
        spec["volumes"] = [*spec.get("volumes", ()), *claimed]
        body = {"metadata": {"name": name, "labels": labels}, "spec": spec}
        await self.server.request("POST", self._path, body)

    async def _pods(self) -> list[Any]:
        items: list[Any] = (await self.server.request("GET", self._path))["items"]
        return items

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{NAMESPACE}/pods"

    # --- kubelets ---

    def _address(self, name: str) -> str:
        """Of a pod, the same for a StatefulSet's pod that comes back. Parallel tests have other networks."""
        if name not in self._addresses:
            self._addresses[name] = self.address(len(self._addresses) + 1)
        return self._addresses[name]

    @staticmethod
    def address(number: int) -> str:
        """Of the pod with a number from 1 on."""
        return f"127.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}.{number}"

    async def _live(self, pod: Document) -> None:
        """A pod from its creation to its end."""
        name, component = pod["metadata"]["name"], pod["metadata"]["labels"][COMPONENT]
        address, container = self._address(name), container_of({"spec": {"template": pod}})
        here = await self._places(name, address, pod)
        known = environment(container, self.documents, PodIdentity(name, address, NAMESPACE))
        image = image_environment(component) if component in SERVICES else {}
        environ = {key: _replaced(value, here) for key, value in (image | known).items()}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
        environ |= {"PATH": path, "HOME": str(self.folder), **self.additions(component, address)}
        command = [sys.executable, "-m", f"triptych.services.{component.replace('-', '_')}"]
        if component not in SERVICES:
            command = [*(_replaced(part, here) for part in container["command"]), "--bind", address]
        process = self._processes[name] = await self._start(command, environ, name)
        probe = [_replaced(part, here) for part in container["startupProbe"]["exec"]["command"]]
        await self._until_ready(process, name, probe, environ)
        await self._report(name, address, ready=True)
        self.ready[name] = address
        await self._until_deleted(process, name)
        del self.ready[name]
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        began_s = asyncio.get_running_loop().time()
        async with asyncio.timeout(pod["spec"]["terminationGracePeriodSeconds"]):
            hook_status = None
            if hook is not None:
                running = self._processes[f"{name}-hook"] = await self._start(hook, environ, f"{name}-hook")
                hook_status = await running.wait()
            hook_s = asyncio.get_running_loop().time() - began_s
            process.send_signal(signal.SIGTERM)
            exit_status = await process.wait()
        self.ended[name] = Ended(self._costs[name], hook_status, hook_s, exit_status)
        await self.server.request("DELETE", f"{self._path}/{name}", {"gracePeriodSeconds": 0})

    async def _places(self, name: str, address: str, pod: Document) -> dict[str, str]:
        """What stands for paths, names and addresses of the pod on this machine. Its files are written."""
        stateful = {"triptych-redis": "triptych-redis-0"} | {
            f"triptych-pool-manager-{number}.triptych-pool-manager": f"triptych-pool-manager-{number}"
            for number in range(2)
        }
        check = self.folder / name / "ready.py"
        check.parent.mkdir(parents=True, exist_ok=True)
        check.write_text((IMAGES / "ready.py").read_text().replace("127.0.0.1", address))
        here = {"0.0.0.0": address, "127.0.0.1": address, _DEMO_MODEL: str(MODEL_DIR)}
        here |= {"/opt/triptych/ready.py": str(check), "/opt/triptych/bin/python": sys.executable}
        here |= {host: self._address(of) for host, of in stateful.items()}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for mount in container_of({"spec": {"template": pod}})["volumeMounts"]:
            here[mount["mountPath"]] = str(self.folder / name / mount["name"])
        for mount in container_of({"spec": {"template": pod}})["volumeMounts"]:
            place = self.folder / name / mount["name"]
            place.mkdir(parents=True, exist_ok=True)
            for file, content in (await self._files(volumes[mount["name"]])).items():
                text = _replaced(content.decode(), here) if file.endswith(".conf") else content.decode()
                (place / file).write_text(text)
        return here

    async def _files(self, volume: Document) -> dict[str, bytes]:
        if "secret" in volume:
            found = await self.server.request(
                "GET", f"{_PATHS['Secret'].format(NAMESPACE)}/{volume['secret']['secretName']}"
            )
            return {name: base64.b64decode(value) for name, value in found["data"].items()}
        if "configMap" in volume:
            found = await self.server.request(
                "GET", f"{_PATHS['ConfigMap'].format(NAMESPACE)}/{volume['configMap']['name']}"
            )
            return {name: value.encode() for name, value in found["data"].items()}
        return {}

    async def _start(self, command: list[str], environ: Mapping[str, str], name: str) -> asyncio.subprocess.Process:
        program = shutil.which(command[0], path=environ["PATH"])
        assert program is not None, command[0]
        with (self.folder / f"{name}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(program, *command[1:], env=environ, stdout=log, stderr=log)

    async def _until_ready(
        self, process: asyncio.subprocess.Process, name: str, probe: list[str], environ: Mapping[str, str]
    ) -> None:
        async with asyncio.timeout(READY_S):
            while await (await self._start(probe, environ, f"{name}-probe")).wait() != 0:
                assert process.returncode is None, f"{name} has ended: {self.log(name)[-2000:]}"
                await asyncio.sleep(_PROBE_S)

    async def _until_deleted(self, process: asyncio.subprocess.Process, name: str) -> None:
        async with asyncio.TaskGroup() as group:
            ended, deleted = group.create_task(process.wait()), group.create_task(self._deleted[name].wait())
            await asyncio.wait((ended, deleted), return_when=asyncio.FIRST_COMPLETED)
            assert deleted.done(), f"{name} has ended by itself: {self.log(name)[-2000:]}"
            ended.cancel()

    async def _report(self, name: str, address: str, *, ready: bool) -> None:
        conditions = [{"type": "Ready", "status": str(ready)}]
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": conditions}
        await self.server.request("PATCH", f"{self._path}/{name}/status", {"status": status}, kind=_MERGE)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


def _replaced(text: str, here: Mapping[str, str]) -> str:
    """Replace whole names and beginnings of paths."""
    known = "|".join(re.escape(text) for text in sorted(here, key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])({known})(?![\w.-])", lambda match: here[match[1]], text)


def _cost(pod: Document) -> str:
    cost: str = (pod["metadata"].get("annotations") or {}).get(DELETION_COST, "")
    return cost


def _rank(pod: Document) -> tuple[bool, int, str]:
    """The order in which a ReplicaSet deletes: not ready first, then by deletion cost, then by age."""
    conditions = pod["status"].get("conditions", ())
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return ready, int(_cost(pod) or 0), pod["metadata"]["name"]
