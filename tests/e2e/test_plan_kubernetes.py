"""The overlay of a plan on a real API server, with processes in place of pods, held against the plan."""

import asyncio
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.contract.kubernetes_kit import ApiServer, api_server
from tests.contract.kubernetes_nodes import NAMESPACE, Nodes, apply
from tests.contract.manifests import MANIFESTS, kustomized
from tests.e2e.test_kubernetes import KEY, make_secrets, scale_by_hand, size_of
from tests.e2e.test_plan import predicted, sleeping_profiles, triptych, verified
from tests.unit.cli.plan.plans import placement, written

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

ROLES = {"E": 2, "P": 1, "D": 2}
OTHERS = 5
"""Two pool managers, Redis, a router and a gateway."""


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: overlays of plans are not run")
    with api_server(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


async def test_an_overlay_starts_and_does_what_the_plan_predicted(kubernetes: tuple[str, Path], tmp_path: Path) -> None:
    profiles, overlay = sleeping_profiles(tmp_path), tmp_path / "overlay"
    placed = placement(ROLES, prepare_cores=1, settings={"max-sequences": "8"})
    plan = written(tmp_path, await predicted(tmp_path, placed, profiles=str(profiles)))
    await triptych("plan", "apply", plan, "--to", "kubernetes", "--base", MANIFESTS / "base", "--out", overlay)
    server, documents = ApiServer(*kubernetes), await asyncio.to_thread(kustomized, overlay)

    def additions(component: str, address: str) -> Mapping[str, str]:
        prefix = f"TRIPTYCH_{component.upper().replace('-', '_')}_"
        found = {f"{prefix}ADMIN_HOST": address} if component != "redis" else {}
        if component in ("encoder", "text"):
            found[f"{prefix}DELAY_PROFILE"] = str(profiles)
        if component == "pool-manager":
            found[f"{prefix}KUBERNETES_API"] = server.url
            found[f"{prefix}KUBERNETES_CA_FILE"] = str(server.ca_file)
            found[f"{prefix}KUBERNETES_TOKEN_FILE"] = str(tmp_path / "token")
        return found

    nodes = Nodes(server, documents, tmp_path / "pods", additions)
    nodes.folder.mkdir()
    async with server.admin:
        await apply(server, documents)
        await make_secrets(server, tmp_path, gateways=[nodes.address(number) for number in range(1, 20)])
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/triptych-pool-manager/token"
        token = await server.request("POST", account, {"spec": {"expirationSeconds": 3600}})
        (tmp_path / "token").write_text(token["status"]["token"])
        for name in ("router", "gateway"):
            await scale_by_hand(server, f"triptych-{name}", 1)
        async with nodes.running():
            await nodes.until(
                lambda: len(nodes.ready) == sum(ROLES.values()) + OTHERS, "not all pods have become ready"
            )
            for role, name in (("E", "encoder"), ("P", "prefill"), ("D", "decode")):
                assert len(nodes.of(f"{name}-pool")) == ROLES[role] == await size_of(server, f"triptych-{name}-pool")
            (gateway,) = nodes.of("gateway").values()
            trusted = {"SSL_CERT_FILE": str(tmp_path / "certs" / "ca.pem"), "NO_PROXY": "*"}
            document = await verified(plan, f"https://{gateway}:8000", f"--api-key={KEY}", environ=trusted)
    assert {row["kind"] for row in document["figures"]} == {"all", "text", "image"}
    for log in nodes.folder.glob("*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()[-4000:]
