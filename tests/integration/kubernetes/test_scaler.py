"""The scaler of Kubernetes when calls are denied, conflict or fail, and two managers that give orders."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from tests.contract.kubernetes_kit import ApiServer, Controllers, api_server, namespace
from triptych.domain.scaling import PoolName, ProcessPhase, ScaledPool
from triptych.domain.stage import Role
from triptych.errors import Conflict, Deposed, NotFound, PermissionDenied, Unavailable
from triptych.integrations.kubernetes.api import KubernetesApi
from triptych.integrations.kubernetes.scaler import KubernetesScaler
from triptych.integrations.kubernetes.settings import KubernetesSettings

POOL = PoolName("model", Role.E)
DEPLOYMENT = "triptych-encoder"


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    with api_server(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


@dataclass
class Site:
    server: ApiServer
    controllers: Controllers
    settings: KubernetesSettings

    @asynccontextmanager
    async def manager(self, settings: KubernetesSettings | None = None) -> AsyncIterator[KubernetesScaler]:
        """A scaler, which runs meanwhile."""
        api = KubernetesApi(settings or self.settings)
        scaler = KubernetesScaler(api, {POOL: DEPLOYMENT}, interval_s=0.1)
        async with asyncio.TaskGroup() as group:
            group.create_task(scaler.run())
            yield scaler
            await scaler.close()
        await api.close()

    @asynccontextmanager
    async def api(self, settings: KubernetesSettings | None = None) -> AsyncIterator[KubernetesApi]:
        api = KubernetesApi(settings or self.settings)
        yield api
        await api.close()

    async def replicas(self) -> int:
        path = f"/apis/apps/v1/namespaces/{self.settings.kubernetes_namespace}/deployments/{DEPLOYMENT}"
        return int((await self.server.request("GET", path))["spec"]["replicas"])

    async def set_rights(self, rules: list[object]) -> None:
        path = (
            f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.settings.kubernetes_namespace}/roles/triptych-scaling"
        )
        await self.server.request("PATCH", path, {"rules": rules}, kind="application/merge-patch+json")

    async def rights(self) -> list[object]:
        path = (
            f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.settings.kubernetes_namespace}/roles/triptych-scaling"
        )
        return list((await self.server.request("GET", path))["rules"])


@pytest.fixture
async def site(kubernetes: tuple[str, Path], tmp_path: Path) -> AsyncIterator[Site]:
    server = ApiServer(*kubernetes)
    async with server.admin, namespace(server, tmp_path, (DEPLOYMENT,)) as (controllers, settings):
        yield Site(server, controllers, settings)


async def pool_when(scaler: KubernetesScaler, *, running: int | None = None, fault: str | None = None) -> ScaledPool:
    """The pool, once it has as many running instances, or such a fault."""
    async with asyncio.timeout(60):
        while True:
            (pool,) = await scaler.pools()
            if running in (None, pool.count(ProcessPhase.RUNNING)) and (fault is None or fault in pool.fault):
                return pool
            await asyncio.sleep(0.05)


@pytest.mark.extended
async def test_two_managers_refuse_each_others_outdated_orders(site: Site) -> None:
    async with site.manager() as old, site.manager() as new:
        await old.scale(POOL, 2, 5)
        await pool_when(old, running=2)
        await new.scale(POOL, 3, 6)
        with pytest.raises(Deposed, match="token is 5, a later leader has 6"):
            await old.scale(POOL, 1, 5)
        with pytest.raises(Deposed):
            await old.remove(POOL, (await pool_when(new, running=3)).instances[0].name, 5)
        await asyncio.sleep(0.5)
        assert await site.replicas() == 3, "the old one no longer enforces its size"
        (pool,) = await old.pools()
        assert pool.wanted is None


async def test_pods_are_named_for_removal_while_others_are_being_marked(site: Site) -> None:
    """Orders come at any moment: here, one between any two calls of the round that carries out another."""
    async with site.manager() as scaler, site.api() as api:
        await scaler.scale(POOL, 4, 1)
        first, *others, last = sorted(instance.name for instance in (await pool_when(scaler, running=4)).instances)
        await scaler.scale(POOL, 1, 1)
        api_of_scaler = scaler._api
        mark = api_of_scaler.mark

        async def mark_while_more_are_named(pod: str, cost: str) -> None:
            await mark(pod, cost)
            if others:
                await scaler.remove(POOL, others.pop(), 1)

        api_of_scaler.mark = mark_while_more_are_named  # type: ignore[method-assign]
        await scaler.remove(POOL, first, 1)
        pool = await pool_when(scaler, running=1)
        assert [instance.name for instance in pool.instances if instance.phase is ProcessPhase.RUNNING] == [last]
        assert (await api.scale(DEPLOYMENT)).replicas == 1


async def test_an_order_under_a_higher_token_of_the_same_manager_is_neither_forgotten_nor_a_fault(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """A manager may lose its lease and get it again, while its scaler compares the token before with that in Kubernetes."""
    async with site.manager() as scaler:
        await scaler.scale(POOL, 1, 1)
        await pool_when(scaler, running=1)
        api_of_scaler = scaler._api
        lease = api_of_scaler.lease

        async def lease_when_it_has_more(name: str) -> tuple[dict[str, str], str]:
            api_of_scaler.lease = lease  # type: ignore[method-assign]
            await scaler.scale(POOL, 2, 2)
            return await lease(name)

        api_of_scaler.lease = lease_when_it_has_more  # type: ignore[method-assign]
        assert (await pool_when(scaler, running=2)).wanted == 2
    assert [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING] == []


async def test_a_size_that_somebody_else_changed_is_set_again(site: Site) -> None:
    async with site.manager() as scaler, site.api() as api:
        await scaler.scale(POOL, 2, 1)
        await pool_when(scaler, running=2)
        async with asyncio.timeout(60):
            while True:
                try:
                    await api.set_replicas(DEPLOYMENT, 4, (await api.scale(DEPLOYMENT)).version)
                    break
                except Conflict:  # the controllers write as well
                    continue
        # Pods that are not ready yet go at once; ready ones are not deleted unnamed, so they stay until they have drained.
        async with asyncio.timeout(60):
            while (running := (await pool_when(scaler)).count(ProcessPhase.RUNNING)) != await site.replicas():  # noqa: ASYNC110 - a real server
                await asyncio.sleep(0.05)
        assert 2 <= running <= 4
        assert (await pool_when(scaler)).wanted == 2


async def test_a_rollout_does_not_add_its_extra_pod_to_the_size(site: Site) -> None:
    """Two templates are there at once: the new pod is ready before the Deployment deletes the old one."""
    async with site.manager() as scaler:
        await scaler.scale(POOL, 1, 1)
        await pool_when(scaler, running=1)
        site.controllers.paused = True
        await asyncio.sleep(0.2)
        labels = {"app": DEPLOYMENT, "pod-template-hash": "new"}
        pods = f"/api/v1/namespaces/{site.settings.kubernetes_namespace}/pods"
        body = {
            "metadata": {"name": f"{DEPLOYMENT}-0", "labels": labels},
            "spec": {"containers": [{"name": "main", "image": "unused"}]},
        }
        await site.server.request("POST", pods, body)
        ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        merge = "application/merge-patch+json"
        await site.server.request("PATCH", f"{pods}/{DEPLOYMENT}-0/status", ready, kind=merge)
        await pool_when(scaler, running=2)
        await asyncio.sleep(0.5)  # several rounds of the scaler
        assert await site.replicas() == 1
        await scaler.scale(POOL, 3, 1)  # growing does not wait for its end
        async with asyncio.timeout(60):
            while await site.replicas() != 3:  # noqa: ASYNC110 - a real server
                await asyncio.sleep(0.05)
        await scaler.scale(POOL, 1, 1)  # shrinking does
        await asyncio.sleep(0.5)
        assert await site.replicas() == 3
        await scaler.scale(POOL, 3, 1)
        await site.server.request("DELETE", f"{pods}/{DEPLOYMENT}-0")
        site.controllers.paused = False
        await pool_when(scaler, running=3)


async def test_a_write_after_somebody_elses_is_a_conflict(site: Site) -> None:
    site.controllers.paused = True
    await asyncio.sleep(0.2)
    async with site.api() as api:
        scale = await api.scale(DEPLOYMENT)
        await api.set_replicas(DEPLOYMENT, 2, scale.version)
        with pytest.raises(Conflict):
            await api.set_replicas(DEPLOYMENT, 5, scale.version)
        assert await site.replicas() == 2
        (pod,) = await api.pods(scale.selector)
        with pytest.raises(Conflict):
            await api.delete_pod(pod.name, "another-uid")


async def test_a_missing_right_is_named_and_the_order_is_carried_out_once_it_is_given(site: Site) -> None:
    rules = await site.rights()
    async with site.manager() as scaler:
        await scaler.scale(POOL, 1, 1)
        reading = [{**rule, "verbs": ["get", "list"]} if "apps" in rule["apiGroups"] else rule for rule in rules]  # type: ignore[index,dict-item]
        await site.set_rights(reading)
        await scaler.scale(POOL, 2, 1)
        await pool_when(scaler, fault="the service account lacks a right: patch deployments/scale")
        assert await site.replicas() == 1
        await scaler.scale(POOL, 3, 1)
        await site.set_rights(rules)
        pool = await pool_when(scaler, running=3)
        assert (await pool_when(scaler, running=3, fault="")).name == pool.name


async def test_the_manifest_gives_no_more_rights_than_are_needed(site: Site) -> None:
    namespace_path = f"/api/v1/namespaces/{site.settings.kubernetes_namespace}"
    token = site.settings.kubernetes_token_file.read_text().strip()
    denied = (
        ("GET", f"{namespace_path}/secrets"),
        ("POST", f"{namespace_path}/pods"),
        ("GET", f"/apis/apps/v1/namespaces/{site.settings.kubernetes_namespace}/deployments/{DEPLOYMENT}"),
        ("PATCH", f"/apis/apps/v1/namespaces/{site.settings.kubernetes_namespace}/deployments/{DEPLOYMENT}"),
        ("GET", f"/apis/apps/v1/namespaces/{site.settings.kubernetes_namespace}/deployments/other/scale"),
        ("GET", "/api/v1/namespaces/default/pods"),
    )
    for method, path in denied:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"}
        answer = await site.server.admin.request(method, path, headers=headers, content=b"{}")
        assert answer.status_code == httpx.codes.FORBIDDEN, path


async def test_a_replaced_token_is_read_and_a_wrong_one_is_told(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "rotated"
    file.write_text("of-nobody")
    async with site.api(replace(site.settings, kubernetes_token_file=file)) as api:
        with pytest.raises(PermissionDenied, match="does not accept the token"):
            await api.scale(DEPLOYMENT)
        file.write_text(site.settings.kubernetes_token_file.read_text())
        assert (await api.scale(DEPLOYMENT)).replicas == 1
        file.unlink()
        with pytest.raises(Unavailable, match="token of the service account does not exist"):
            await api.scale(DEPLOYMENT)


async def test_what_is_not_there_is_told(site: Site) -> None:
    async with site.api() as api:
        with pytest.raises(NotFound):
            await api.mark("no-such-pod", "1")
        missing = KubernetesScaler(api, {POOL: DEPLOYMENT}, lease="triptych-scaling")
        path = f"/apis/coordination.k8s.io/v1/namespaces/{site.settings.kubernetes_namespace}/leases/triptych-scaling"
        await site.server.request("DELETE", path)
        with pytest.raises(Unavailable, match="no Lease triptych-scaling"):
            await missing.scale(POOL, 2, 1)


async def test_an_api_that_does_not_answer_costs_its_deadline(site: Site) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        away = replace(site.settings, kubernetes_api=url, kubernetes_timeout_s=0.3)
        async with site.api(away) as api:
            with pytest.raises(Unavailable, match=r"did not answer within 0\.3 s"):
                await api.scale(DEPLOYMENT)
    async with site.api(away) as api:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await api.scale(DEPLOYMENT)


def answering(*answers: httpx.Response) -> httpx.MockTransport:
    left = list(answers)
    return httpx.MockTransport(lambda _: left.pop(0))


async def test_a_list_that_expired_between_two_pages_is_read_from_the_beginning(site: Site) -> None:
    def page(name: str, following: str = "") -> httpx.Response:
        pod = {"metadata": {"name": name, "uid": name}}
        return httpx.Response(200, json={"metadata": {"continue": following}, "items": [pod]})

    async with site.api() as api:
        api._http = httpx.AsyncClient(
            base_url=site.settings.kubernetes_api,
            transport=answering(page("a", "next"), httpx.Response(410), page("b", "next"), page("c")),
        )
        assert [pod.name for pod in await api.pods("app=x")] == ["b", "c"]
        for status in (429, 500, 503):
            api._http = httpx.AsyncClient(
                base_url=site.settings.kubernetes_api, transport=answering(httpx.Response(status))
            )
            with pytest.raises(Unavailable, match=f"answers {status}"):
                await api.pods("app=x")


def test_a_missing_ca_file_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.pem"):
        KubernetesApi(KubernetesSettings(kubernetes_ca_file=tmp_path / "absent.pem"))
