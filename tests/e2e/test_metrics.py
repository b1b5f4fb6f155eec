"""Every process of a cluster exports correct metrics, and no log contains prompts, media or answers."""

import asyncio
import base64
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.client import post, rest, text_of
from tests.e2e.reference import DIGITS, Question
from triptych.cli.cluster import LocalCluster
from triptych.cli.model import Model
from triptych.cli.process_plan import ClusterPlan

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.asyncio(loop_scope="module")

EIGHT = Question("What digits are shown?", tuple(f"{digit}_a" for digit in range(8)))
TEXT_ONLY = Question("Hello!", ())
MODEL = {"model_name": "triptych-demo"}
DASHBOARD = {
    "vllm:time_to_first_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
}
"""What dashboards for vLLM ask for, as families."""


class Scrape:
    """All samples of all processes."""

    def __init__(self) -> None:
        self.families: set[str] = set()
        self._samples: list[tuple[str, str, dict[str, str], float]] = []

    def add(self, process: str, text: str) -> None:
        for family in text_string_to_metric_families(text):
            assert family.documentation, family.name
            self.families.add(family.name)
            self._samples += [(process, s.name, s.labels, s.value) for s in family.samples]

    def total(self, name: str, process: str = "", **labels: str) -> float:
        """Sum over the processes whose name starts with ``process``, and over labels that are not given."""
        return sum(
            value
            for of_process, of_name, has, value in self._samples
            if of_name == name and of_process.startswith(process) and labels.items() <= has.items()
        )

    def label_values(self) -> set[str]:
        return {value for _, _, labels, _ in self._samples for value in labels.values()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    json_logs = dict.fromkeys(("router", "encoder"), ("--log-format", "json"))
    async with LocalCluster(roles="E:2,PD:1", options=json_logs, log_dir=tmp_path_factory.mktemp("logs")) as running:
        yield running


def logs_in(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.log"))}


async def scraped(cluster: LocalCluster, client: httpx.AsyncClient) -> Scrape:
    scrape = Scrape()
    for name, url in cluster.admin_urls.items():
        for path in ("/health", "/ready"):
            assert (await client.get(url + path)).status_code == 200, (name, path)
        answer = await client.get(f"{url}/metrics")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        scrape.add(name, answer.text)
    return scrape


async def test_prometheus_finds_every_process_by_the_configuration_in_the_docs(cluster: LocalCluster) -> None:
    block = re.search(r"```yaml\n(scrape_configs:.*?)```", (DOCS / "observability.md").read_text(), re.DOTALL)
    assert block is not None
    found, gateway = yaml.safe_load(block[1])["scrape_configs"]
    documented = ClusterPlan.make(
        Model.all_named(["demo"]), scaled=False, autoscale=False, threads=1, options={}, admin_port=9100
    )
    ports = {plan.name: plan.admin_port for plan in documented.processes}
    (discovery,), (static,) = found["http_sd_configs"], gateway["static_configs"]
    assert static["targets"] == [f"127.0.0.1:{ports['gateway']}"]
    url = httpx.URL(discovery["url"])
    assert (url.host, url.port) == ("127.0.0.1", ports["pool-manager"])

    at = {name: url.removeprefix("http://") for name, url in cluster.admin_urls.items()}
    async with rest(cluster.admin_urls["pool-manager"]) as client:
        answer = await client.get(url.raw_path.decode())
        encoders = (await client.get("/sd", params={"job": "encoder"})).json()
    assert answer.headers["content-type"] == "application/json"
    groups = {target: group["labels"] for group in answer.json() for target in group["targets"]}
    assert groups.keys() == {address for name, address in at.items() if name != "gateway"}
    assert {labels["job"] for labels in groups.values()} == {"router", "pool-manager", "encoder", "text"}
    text = {"job": "text", "role": "PD", "pool": "triptych-demo/PD", "model": "triptych-demo"}
    assert groups[at["text-1"]] == text
    assert [group["targets"] for group in encoders] == [[at["encoder-1"]], [at["encoder-2"]]]


async def test_counts_are_right_after_a_few_requests(cluster: LocalCluster) -> None:
    async with rest(cluster.url) as client:
        answers = [await post(client, question.body()) for question in (EIGHT, EIGHT, TEXT_ONLY)]
        wrong = await post(client, EIGHT.body() | {"model": "no-such-model"})
        assert wrong.status_code == 404
        got = await scraped(cluster, client)
        assert (await client.get("/metrics")).status_code == 200  # the gateway serves its own on the public port too
    usages = [answer.json()["usage"] for answer in answers]

    assert got.families >= DASHBOARD
    assert got.total("vllm:prompt_tokens_total", **MODEL) == sum(usage["prompt_tokens"] for usage in usages)
    looked_up = got.total("vllm:prefix_cache_queries_total")
    assert looked_up == sum(usage["prompt_tokens"] for usage in usages), "nothing of an engine's first pass is counted"
    assert got.total("vllm:generation_tokens_total", **MODEL) == sum(usage["completion_tokens"] for usage in usages)
    assert got.total("vllm:request_success_total", **MODEL) == 3
    assert got.total("vllm:time_to_first_token_seconds_count", **MODEL) == 3
    assert got.total("vllm:num_requests_running") == got.total("vllm:num_requests_waiting") == 0

    # The second time the images were cached, at their encoders and in the text instance.
    assert got.total("triptych_encoder_items_total", "encoder", cached="no") == 8
    assert got.total("triptych_encoder_items_total", "encoder", cached="yes") == 8
    assert got.total("triptych_encoder_stage_seconds_count", "encoder", stage="encode") == 8
    assert got.total("triptych_encoder_batch_items_sum", "encoder") == 8
    steps, took_s = (got.total(f"triptych_step_seconds_{part}", "text") for part in ("count", "sum"))
    computed = sum(usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    assert max(usage["completion_tokens"] for usage in usages) <= steps <= computed
    assert took_s > 0
    assert got.total("triptych_rpc_server_seconds_count", "encoder", method="Encoder/Encode", code="OK") == 16
    assert got.total("triptych_transfer_seconds_count", "text") == 8
    assert got.total("triptych_transfer_bytes_total", "text") > 8 * 1024
    assert got.total("triptych_transfer_failures_total", "text") == 0
    assert got.total("triptych_image_cache_total", "text", hit="yes") == 8
    assert got.total("triptych_connections", "text") == 2
    assert got.total("triptych_arena_leases", "encoder") == 0
    assert got.total("triptych_arena_leased_bytes") == 0
    assert got.total("triptych_arena_embeddings", "encoder") == got.total("triptych_arena_embeddings", "text") == 8
    assert got.total("triptych_arena_cached_bytes", "text") == got.total("triptych_arena_cached_bytes", "encoder") > 0

    assert got.total("triptych_requests_total", "router", outcome="done") == 3
    assert got.total("triptych_requests_refused_total", "router", code="model_not_found") == 1
    assert got.total("triptych_attempts_total", "router", kind="encode_again") == 0
    assert got.total("triptych_instances", "router", state="ready") == 3
    assert got.total("triptych_http_seconds_count", "gateway", route="/v1/chat/completions", status="200") == 3
    for name in cluster.admin_urls:
        assert got.total("triptych_event_loop_lag_seconds_count", name) > 0
        assert got.total("process_resident_memory_bytes", name) > 0

    labels = got.label_values()
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert not ids & labels
    assert not any("127.0.0.1" in value for value in labels)


async def test_logs_have_request_ids_but_no_prompt_or_media(cluster: LocalCluster) -> None:
    secret = "sesame-opens-at-midnight"  # noqa: S105 - it stands for what a user would not want to be logged
    question = Question(f"What is shown? {secret}", ("4_b",))
    async with rest(cluster.url) as client:
        answer = await client.post(
            "/v1/chat/completions", json=question.body(), headers={"x-request-id": "request-to-look-for"}
        )
        text_of(answer)
    image = (DIGITS / "4_b.png").read_bytes()
    async with asyncio.timeout(240):  # an answer reaches its client before it is logged
        while not all("to-look-for" in logs_in(cluster.log_dir)[name] for name in ("gateway", "router")):  # noqa: ASYNC110 - processes write
            await asyncio.sleep(0.05)
    logs = logs_in(cluster.log_dir)
    everything = "\n".join(logs.values())
    for never in (secret, base64.b64encode(image)[:64].decode(), repr(image[:32])[2:-1]):
        assert never not in everything
    assert "request-to-look-for" in logs["gateway"]
    (line,) = [line for line in logs["router"].splitlines() if '"outcome": "done"' in line and "to-look-for" in line]
    assert '"prompt_tokens": ' in line
    assert '"ttft_s": ' in line
