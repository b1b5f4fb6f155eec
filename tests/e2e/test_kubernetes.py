"""The manifests of ``deploy/kubernetes`` on a real API server, with processes in place of pods: sizes, drains, rights."""

import asyncio
import shutil
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from io import StringIO
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from tests.contract.kubernetes_kit import ApiServer, api_server
from tests.contract.kubernetes_nodes import NAMESPACE, Nodes, apply, make_secret
from tests.contract.manifests import rendered
from tests.e2e.delayed import delayed
from tests.e2e.reference import Question
from triptych.cli import pools
from triptych.cli.managers import Managers
from triptych.runtime.tls import TlsIdentity

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

KEY = "tt-of-the-test"
SERVICES = ("encoder", "text", "router", "gateway", "pool-manager", "redis")
DOMAIN = "triptych.internal"
CLIENTS = 2


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: the manifests for Kubernetes are not run")
    with api_server(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


async def make_secrets(server: ApiServer, folder: Path, gateways: Sequence[str] = ()) -> TlsIdentity:
    """As docs/kubernetes.md has it, with addresses that gateways may have. Returns the identity of an operator."""
    certs = folder / "certs"
    hosts = (f"--host=gateway={address}" for address in gateways)
    command = [sys.executable, "-m", "triptych.cli", "certs", str(certs), *hosts]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    for service in SERVICES:
        files = {"tls.crt": "cert.pem", "tls.key": "key.pem", "ca.crt": "ca.pem"}
        content = {name: (certs / service / file).read_bytes() for name, file in files.items()}
        await make_secret(server, f"triptych-tls-{service}", content)
    await make_secret(
        server, "triptych-keys", {"keys.toml": f'[keys.test]\nsha256 = "{sha256(KEY.encode()).hexdigest()}"\n'.encode()}
    )
    rights = "resetchannels ~triptych:* -@all +@read +@write +eval +evalsha +script|load +select +time"
    users = f"user default off\nuser manager on >secret {rights}\n"
    await make_secret(server, "triptych-redis-password", {"password": b"secret"})
    await make_secret(server, "triptych-redis-users", {"users.acl": users.encode()})
    own = certs / "operator"
    return TlsIdentity.load(own / "cert.pem", own / "key.pem", own / "ca.pem", name=DOMAIN)


class Load:
    """Clients of the gateway that ask about an image, one question after the other."""

    def __init__(self, url: str, ca_file: Path) -> None:
        self._url = url
        self._tls = ssl.create_default_context(cafile=str(ca_file))
        self.outcomes: Counter[str] = Counter()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        http = httpx.AsyncClient(base_url=self._url, verify=self._tls, timeout=60.0, trust_env=False)
        async with http as client, asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._ask(client, number, stop))
            yield
            stop.set()

    async def _ask(self, client: httpx.AsyncClient, number: int, stop: asyncio.Event) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        names = ("0_a", "1_a", "2_a", "3_a", "4_a", "5_a")
        at = number
        while not stop.is_set():
            body = Question("What digits?", (names[at % 6], names[at // 6 % 6])).body(max_tokens=8)
            named = {"sni_hostname": "localhost"}  # in the certificate, which the address is not
            answer = await client.post("/v1/chat/completions", json=body, headers=headers, extensions=named)
            text = "" if answer.is_success else f" {answer.text[:200]}"
            self.outcomes[f"{answer.status_code}{text}"] += 1
            at += CLIENTS
            await asyncio.sleep(0.1)


async def test_pools_grow_shrink_roll_and_lose_a_pod_and_no_request_fails(
    kubernetes: tuple[str, Path], tmp_path: Path
) -> None:
    server, documents = ApiServer(*kubernetes), rendered("demo")
    (_, profiles) = delayed(tmp_path, pass_s=0.1, step_s=0.02)["text"]

    def additions(component: str, address: str) -> Mapping[str, str]:
        prefix = f"TRIPTYCH_{component.upper().replace('-', '_')}_"
        found = {f"{prefix}ADMIN_HOST": address} if component != "redis" else {}
        if component in ("encoder", "text"):
            found[f"{prefix}DELAY_PROFILE"] = profiles
        if component == "pool-manager":  # what a node mounts for the service account
            found[f"{prefix}KUBERNETES_API"] = server.url
            found[f"{prefix}KUBERNETES_CA_FILE"] = str(server.ca_file)
            found[f"{prefix}KUBERNETES_TOKEN_FILE"] = str(tmp_path / "token")
        return found

    async with server.admin:
        assert await apply(server, documents) == {"PodDisruptionBudget"}, "and endPort, which 1.20 drops"
        operator = await make_secrets(server, tmp_path)
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/triptych-pool-manager/token"
        token = await server.request("POST", account, {"spec": {"expirationSeconds": 3600}})
        (tmp_path / "token").write_text(token["status"]["token"])
        for name, replicas in (("router", 1), ("gateway", 1), ("text", 2)):
            await scale_by_hand(server, f"triptych-{name}", replicas)
        nodes = Nodes(server, documents, tmp_path / "pods", additions)
        nodes.folder.mkdir()
        async with nodes.running():
            await nodes.until(lambda: len(nodes.ready) == 8, "not all pods have become ready")  # 2 managers, Redis
            (gateway,) = nodes.of("gateway").values()
            load = Load(f"https://{gateway}:8000", tmp_path / "certs" / "ca.pem")
            managers = Managers("", ",".join(f"{at}:50041" for at in nodes.of("pool-manager").values()), operator)
            async with load.running():
                await asyncio.sleep(1)
                await pools.scale("encoder", 3, 600.0, managers, quiet())
                await nodes.until(lambda: len(nodes.of("encoder")) == 3, "the pool does not grow")
                served = sum(load.outcomes.values())
                await nodes.until(lambda: sum(load.outcomes.values()) > served + 10, "requests do not go on")

                await pools.scale("encoder", 1, 600.0, managers, quiet())
                await nodes.until(lambda: len(nodes.ended) == 2, "the pool does not shrink")
                assert len(nodes.of("encoder")) == 1
                for name, end in nodes.ended.items():
                    assert name.startswith("triptych-encoder-")
                    assert (end.cost, end.hook_status, end.exit_status) == ("-1000", 0, 0), nodes.log(f"{name}-hook")

                (before,) = nodes.of("encoder")
                await restart(server, "triptych-encoder")
                await nodes.until(lambda: before in nodes.ended, "the rollout does not replace the pod")
                assert (nodes.ended[before].hook_status, nodes.ended[before].exit_status) == (0, 0)
                assert len(nodes.of("encoder")) == 1
                assert await size_of(server, "triptych-encoder") == 1, "the extra pod of the rollout is not wanted"

                deleted = min(nodes.of("text"))
                await server.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{deleted}")
                await nodes.until(lambda: deleted in nodes.ended, "the deleted pod does not end")
                await nodes.until(lambda: len(nodes.of("text")) == 2, "the deleted pod is not replaced")
                end = nodes.ended[deleted]
                assert (end.cost, end.hook_status, end.exit_status) == ("", 0, 0), nodes.log(f"{deleted}-hook")
                assert f"{deleted} has finished" in nodes.log(f"{deleted}-hook")
                served = sum(load.outcomes.values())
                await nodes.until(lambda: sum(load.outcomes.values()) > served + 10, "requests do not go on")
            await assert_nothing_else_is_allowed(server, token["status"]["token"])
        assert set(load.outcomes) == {"200"}, load.outcomes
        assert load.outcomes.total() > 30
        for log in nodes.folder.glob("*.log"):
            assert "Traceback" not in log.read_text(), log.read_text()[-4000:]


async def scale_by_hand(server: ApiServer, deployment: str, replicas: int) -> None:
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{deployment}/scale"
    await server.request("PATCH", path, {"spec": {"replicas": replicas}}, kind="application/merge-patch+json")


async def restart(server: ApiServer, deployment: str) -> None:
    """As ``kubectl rollout restart`` does it."""
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{deployment}"
    template = {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}
    await server.request("PATCH", path, {"spec": {"template": template}}, kind="application/merge-patch+json")


async def size_of(server: ApiServer, deployment: str) -> int:
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{deployment}/scale"
    return int((await server.request("GET", path))["spec"]["replicas"])


async def assert_nothing_else_is_allowed(server: ApiServer, token: str) -> None:
    """With the token of the pool manager."""
    own, apps = f"/api/v1/namespaces/{NAMESPACE}", f"/apis/apps/v1/namespaces/{NAMESPACE}"
    denied = (
        ("GET", f"{own}/secrets"),
        ("GET", f"{own}/secrets/triptych-keys"),
        ("GET", f"{own}/configmaps"),
        ("POST", f"{own}/pods"),
        ("POST", f"{own}/pods/any/exec"),
        ("DELETE", f"{own}/pods"),
        ("GET", f"{apps}/deployments/triptych-encoder"),
        ("PATCH", f"{apps}/deployments/triptych-encoder"),
        ("PATCH", f"{apps}/deployments/triptych-gateway/scale"),
        ("PATCH", f"{apps}/statefulsets/triptych-redis/scale"),
        ("POST", f"{own}/serviceaccounts/triptych-pool-manager/token"),
        ("POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings"),
        ("GET", "/api/v1/namespaces/kube-system/pods"),
        ("GET", "/api/v1/nodes"),
    )
    for method, path in denied:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"}
        answer = await server.admin.request(method, path, headers=headers, content=b"{}")
        assert answer.status_code == httpx.codes.FORBIDDEN, f"{method} {path}"


def quiet() -> Console:
    return Console(file=StringIO())
