"""A real Prometheus scrapes a cluster that serves, scales and drains: every panel shows data, and no alert fires."""

import asyncio
import json
import math
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.client import post, rest, text_of
from tests.e2e.reference import Question
from tests.e2e.test_sizes_by_hand import PATIENT, Manager, encoders
from triptych.cli import ports
from triptych.cli.cluster import LocalCluster

pytestmark = pytest.mark.extended

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRAPE_S = 0.5
VARIABLES = {"$__rate_interval": "1m", "$model": ".*"}


class Prometheus:
    """Asks a running Prometheus."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def is_ready(self) -> bool:
        try:
            return (await self._client.get("/-/ready")).is_success
        except httpx.TransportError:
            return False

    async def get(self, path: str, **parameters: str) -> Any:
        answer = (await self._client.get(f"/api/v1/{path}", params=parameters)).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def values(self, expression: str) -> list[float]:
        """What the series of an expression are now, those without a value left out."""
        found = [float(series["value"][1]) for series in (await self.get("query", query=expression))["result"]]
        return [value for value in found if not math.isnan(value)]


@asynccontextmanager
async def prometheus(targets: dict[str, str], folder: Path) -> AsyncIterator[Prometheus]:
    """Scrapes admin ports, by name of the process, with the jobs and rules of ``deploy/prometheus``."""
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S * 1000:g}ms", "evaluation_interval": f"{SCRAPE_S * 1000:g}ms"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yml")]
    for job in config["scrape_configs"]:
        del job["dns_sd_configs" if job["job_name"] == "pool-manager" else "http_sd_configs"]
        of_job = [target for name, target in targets.items() if name.startswith(job["job_name"])]
        assert of_job, job["job_name"]
        job["static_configs"] = [{"targets": of_job}]
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(config))
    (port,) = ports.free(1)
    flags = (
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec("prometheus", *flags, stdout=log, stderr=log)
        try:
            async with rest(f"http://127.0.0.1:{port}") as client:
                asking = Prometheus(client)
                async with asyncio.timeout(240):
                    while not await up(asking):  # noqa: ASYNC110 - another process
                        await asyncio.sleep(0.1)
                yield asking
        except BaseException:
            sys.stderr.write((folder / "log").read_text())
            raise
        finally:
            process.kill()
            await process.wait()


async def up(asking: Prometheus) -> bool:
    """Whether every target was scraped twice."""
    if not await asking.is_ready():
        return False
    scraped = await asking.values("min(count_over_time(up[1m]))")
    return bool(scraped) and scraped[0] >= 2 and await asking.values("min(up)") == [1]


async def serve(client: httpx.AsyncClient, *images: str) -> None:
    """Answers with several images, first computed, then cached; a stream; a few errors."""
    several, text_only = Question("What digits are shown?", images, max_tokens=16), Question("Hello!", ())
    answers = [await post(client, question.body()) for question in (several, several, text_only)]
    assert all(text_of(answer) for answer in answers)
    streamed = await post(client, several.body(stream=True))
    assert streamed.text.rstrip().endswith("data: [DONE]")
    assert (await post(client, several.body() | {"model": "no-such-model"})).status_code == 404
    assert (await post(client, several.body(max_tokens=-1))).status_code == 400


def targets_of_dashboards() -> list[tuple[str, str]]:
    """(where, expression) of every query to Prometheus."""
    found = []
    for path in sorted(DEPLOY.glob("grafana/dashboards/*.json")):
        listed = json.loads(path.read_text())["panels"]
        for panel in [*listed, *(inner for row in listed for inner in row.get("panels", ()))]:
            if panel.get("datasource", {}).get("type") != "prometheus":
                assert panel["type"] in ("row", "text", "traces"), panel["title"]
                continue
            for target in panel["targets"]:
                expression = target["expr"]
                for variable, value in VARIABLES.items():
                    expression = expression.replace(variable, value)
                assert "$" not in expression
                found.append((f"{path.stem}: {panel['title']}", expression))
    return found


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is missing: install Debian's package")
async def test_every_panel_shows_data_of_a_cluster_that_serves_and_scales_and_no_alert_fires(tmp_path: Path) -> None:
    queries = targets_of_dashboards()
    assert len(queries) > 80
    async with (
        LocalCluster(roles="E:2,PD:1", autoscale=True, options=PATIENT) as cluster,
        rest(cluster.url) as client,
    ):
        manager = Manager(cluster)
        await manager.until_ready(2)
        admin = {name: url.removeprefix("http://") for name, url in cluster.admin_urls.items()}
        async with prometheus(admin, tmp_path) as asking:
            await serve(client, "0_a", "1_a", "2_a", "3_a")
            await manager.set_size(1)  # one of them drains
            async with asyncio.timeout(240):
                while len(encoders(cluster)) != 1:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
            await serve(client, "4_a", "5_a", "6_a", "7_a")
            await asyncio.sleep(4 * SCRAPE_S)
            empty = [(where, query) for where, query in queries if not await asking.values(query)]
            assert not empty, "\n".join(map(str, empty))
            models = await asking.values("count by (model_name) (vllm:num_requests_running)")
            assert len(models) == 1, "the variable $model"

            rules = [rule for group in (await asking.get("rules"))["groups"] for rule in group["rules"]]
            assert [rule for rule in rules if rule["health"] != "ok"] == []
            assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []
        await manager.stub.close()
