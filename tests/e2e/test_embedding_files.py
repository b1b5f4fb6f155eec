"""Embeddings in files: an encoder that was killed and started again encodes no image a second time."""

import asyncio
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.client import post, rest, text_of, timeline_of
from tests.e2e.reference import Question, answer
from triptych.cli.cluster import LocalCluster

RESTARTED_S = 300.0
QUESTION = Question("Read the digits in order.", ("4_a", "9_b"))


async def counted(cluster: LocalCluster, name: str, **labels: str) -> float:
    """A metric of the encoder."""
    async with rest(cluster.admin_urls["encoder-1"]) as admin:
        text = (await admin.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name and sample.labels == labels)


async def test_an_encoder_killed_and_started_again_encodes_no_image_twice(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    options = {"encoder": ("--embedding-files", str(kept), "--embedding-files-bytes", str(1 << 20))}
    async with (
        LocalCluster(roles="E:1,PD:1", restart=True, options=options) as cluster,
        rest(cluster.url) as client,
    ):
        assert text_of(await post(client, QUESTION.body())) == answer(QUESTION).text
        async with asyncio.timeout(RESTARTED_S):
            while len(list(kept.glob("*.embedding"))) < 2:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
            cluster.kill("encoder-1")
            await cluster.next_exit()
            again = await answered(client)
        assert text_of(again) == answer(QUESTION).text
        timeline = await timeline_of(client, again)
        assert [item["encoder_cached"] for item in timeline["items"]] == [True, True]
        assert await counted(cluster, "triptych_embedding_file_reads_total", outcome="hit") == 2
        assert await counted(cluster, "triptych_encoder_items_total", cached="no") == 0
        blocks = sum(-(-file.stat().st_size // 4096) for file in kept.glob("*.embedding"))
        assert await counted(cluster, "triptych_embedding_file_bytes") == 4096 * blocks


async def answered(client: httpx.AsyncClient) -> httpx.Response:
    """The answer, once the encoder is there again."""
    while (response := await post(client, QUESTION.body())).status_code != httpx.codes.OK:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.2)
    return response
