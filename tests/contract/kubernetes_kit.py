"""A real Kubernetes API server over etcd, and stand-ins for the controllers that make pods of Deployments.

Binaries: ``kube-apiserver`` and ``etcd`` in the directory KUBEBUILDER_ASSETS, or on the PATH.
"""

import asyncio
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import yaml

from triptych.cli import ports
from triptych.integrations.kubernetes.api import DELETION_COST
from triptych.integrations.kubernetes.settings import KubernetesSettings

ROOT = Path(__file__).parents[2]
RIGHTS = ROOT / "deploy" / "kubernetes" / "base" / "scaling.yaml"
ACCOUNT = "triptych-pool-manager"
READY_S = 200.0
_ADMIN = "admin-of-the-test"
_numbers = count(1)


@dataclass
class ApiServer:
    """``request`` is made by an administrator, without rights being checked."""

    url: str
    ca_file: Path
    admin: httpx.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        self.admin = self._client()

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            verify=ssl.create_default_context(cafile=str(self.ca_file)),
            headers={"Authorization": f"Bearer {_ADMIN}"},
            timeout=30.0,
            trust_env=False,
        )

    async def request(self, method: str, path: str, body: Any = None, *, kind: str = "application/json") -> Any:
        answer = await self.admin.request(method, path, json=body, headers={"Content-Type": kind})
        answer.raise_for_status()
        return answer.json()


@contextmanager
def api_server(folder: Path) -> Iterator[tuple[str, Path]]:
    """URL and CA file of a server that runs meanwhile."""
    etcd, apiserver = _binary("etcd"), _binary("kube-apiserver")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "server.pem")
    issued.private_key_pem.write_to_path(folder / "server.key")
    (folder / "tokens.csv").write_text(f'{_ADMIN},admin,admin,"system:masters"\n')
    client_port, peer_port, port = ports.free(3)
    processes: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with (folder / f"{Path(command[0]).name}.log").open("ab") as log:
            processes.append(subprocess.Popen(command, cwd=folder, stdout=log, stderr=log))

    try:
        start(
            etcd,
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{client_port}",
            f"--advertise-client-urls=http://127.0.0.1:{client_port}",
            f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            "--unsafe-no-fsync",
        )
        start(
            apiserver,
            f"--etcd-servers=http://127.0.0.1:{client_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            f"--tls-cert-file={folder / 'server.pem'}",
            f"--tls-private-key-file={folder / 'server.key'}",
            "--service-cluster-ip-range=10.0.0.0/24",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            f"--service-account-key-file={folder / 'server.key'}",
            f"--service-account-signing-key-file={folder / 'server.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--disable-admission-plugins=ServiceAccount",
        )
        _until_ready(f"https://127.0.0.1:{port}", folder / "ca.pem", processes)
        yield f"https://127.0.0.1:{port}", folder / "ca.pem"
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(60)


def _binary(name: str) -> str:
    assets = os.environ.get("KUBEBUILDER_ASSETS")  # noqa: TID251 - where such tests look for it by convention
    found = shutil.which(name, path=assets) if assets else None
    found = found or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is neither in KUBEBUILDER_ASSETS nor on the PATH: the scaler of Kubernetes is not tested")
    return found


def _until_ready(url: str, ca_file: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    end_s = time.monotonic() + READY_S  # noqa: TID251 - real processes
    context = ssl.create_default_context(cafile=str(ca_file))
    while True:
        try:
            ready = httpx.get(f"{url}/readyz", verify=context, headers={"Authorization": f"Bearer {_ADMIN}"})
        except httpx.HTTPError:
            pass
        else:
            if ready.is_success:
                return
        ended = [process.args for process in processes if process.poll() is not None]
        late = time.monotonic() > end_s  # noqa: TID251
        if ended or late:
            said = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in ca_file.parent.glob("*.log"))
            pytest.fail(f"ended: {ended}\n{said}" if ended else f"not ready after {READY_S} s\n{said}")
        time.sleep(0.1)


@dataclass
class Controllers:
    """What the controllers of Deployments and ReplicaSets and the kubelets do, for one namespace."""

    server: ApiServer
    namespace: str
    deployments: tuple[str, ...]
    broken: Path
    slow: Path
    alive: set[str] = field(default_factory=set)
    paused: bool = False

    async def run(self) -> None:
        while True:
            if not self.paused:
                for deployment in self.deployments:
                    await self._control(deployment)
                self.alive = {pod["metadata"]["name"] for pod in await self.pods()}
            await asyncio.sleep(0.03)

    async def _control(self, deployment: str) -> None:
        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{deployment}"
        wanted = (await self.server.request("GET", path))["spec"]["replicas"]
        pods = [pod for pod in await self.pods() if pod["metadata"]["labels"]["app"] == deployment]
        for pod in sorted(pods, key=_rank)[: max(0, len(pods) - wanted)]:
            await self.server.request("DELETE", f"{self._path}/{pod['metadata']['name']}")
        for _ in range(wanted - len(pods)):
            metadata = {"name": f"{deployment}-{next(_numbers)}", "labels": {"app": deployment}}
            spec = {"containers": [{"name": "main", "image": "unused"}]}
            await self.server.request("POST", self._path, {"metadata": metadata, "spec": spec})
        for pod in pods[: max(0, wanted)]:
            await self._start(pod)
        status = {"status": {"replicas": wanted}}
        await self.server.request("PATCH", f"{path}/status", status, kind="application/merge-patch+json")

    async def _start(self, pod: Any) -> None:
        if _is_ready(pod) or self.slow.exists():
            return
        status: dict[str, Any] = {"conditions": [{"type": "Ready", "status": "True"}]}
        if self.broken.exists():
            waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
            image = {"image": "unused", "imageID": "", "name": "main", "ready": False, "restartCount": 3}
            status = {"containerStatuses": [{**image, "state": waiting}]}
        path = f"{self._path}/{pod['metadata']['name']}/status"
        answer = await self.server.admin.patch(
            path, json={"status": status}, headers={"Content-Type": "application/merge-patch+json"}
        )
        assert answer.status_code in (httpx.codes.OK, httpx.codes.NOT_FOUND)

    async def pods(self) -> list[Any]:
        items: list[Any] = (await self.server.request("GET", self._path))["items"]
        return items

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"


def _is_ready(pod: Any) -> bool:
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in pod["status"].get("conditions", ())
    )


def _rank(pod: Any) -> tuple[bool, int, int]:
    """The order in which a ReplicaSet deletes: not ready first, then by deletion cost, then the newest."""
    cost = int((pod["metadata"].get("annotations") or {}).get(DELETION_COST, "0"))
    return _is_ready(pod), cost, -int(pod["metadata"]["name"].rsplit("-", 1)[1])


@asynccontextmanager
async def namespace(
    server: ApiServer, folder: Path, deployments: tuple[str, ...]
) -> AsyncIterator[tuple[Controllers, KubernetesSettings]]:
    """A namespace with Deployments of one ready pod each, and settings for the service account of the manifest."""
    name = f"test-{next(_numbers)}"
    await server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    for document in yaml.safe_load_all(RIGHTS.read_text()):
        await server.request("POST", _collection(document, name), _in_namespace(document, name))
    for deployment in deployments:
        labels = {"app": deployment}
        pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "unused"}]}}
        spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": pod}
        path = f"/apis/apps/v1/namespaces/{name}/deployments"
        await server.request("POST", path, {"metadata": {"name": deployment}, "spec": spec})
    token_path = f"/api/v1/namespaces/{name}/serviceaccounts/{ACCOUNT}/token"
    token = await server.request("POST", token_path, {"spec": {"expirationSeconds": 3600}})
    (folder / "token").write_text(token["status"]["token"] + "\n")
    controllers = Controllers(server, name, deployments, folder / "broken", folder / "slow")
    settings = KubernetesSettings(server.url, name, folder / "token", server.ca_file)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(controllers.run())
        async with asyncio.timeout(60):
            while sum(map(_is_ready, await controllers.pods())) < len(deployments):  # noqa: ASYNC110 - a real server
                await asyncio.sleep(0.02)
        yield controllers, settings
        running.cancel()


_COLLECTIONS = {
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Lease": "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
}


def _collection(document: Any, name: str) -> str:
    return _COLLECTIONS[document["kind"]].format(name)


def _in_namespace(document: Any, name: str) -> Any:
    """As ``kubectl apply --namespace`` completes it."""
    subjects = [{**subject, "namespace": name} for subject in document.get("subjects", ())]
    return {**document, "subjects": subjects} if subjects else document
