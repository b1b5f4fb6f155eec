"""Preset ``hetero`` as real processes: an encoder with the language model takes text requests while it has no images."""

import asyncio
from pathlib import Path

import httpx

from tests.e2e.client import post, rest, timeline_of
from tests.e2e.delayed import delayed
from tests.e2e.reference import Question
from triptych.cli.cluster import LocalCluster
from triptych.cli.presets import PRESETS
from triptych.domain.slo import Slo

TEXTS, TOKENS = 10, 20
STEP_S = 0.05


async def test_an_encoder_takes_text_that_waits_and_lets_images_pass_it(tmp_path: Path) -> None:
    own = PRESETS["hetero"].options(Slo())
    one_at_a_time = (*delayed(tmp_path, pass_s=0.1, step_s=STEP_S)["text"], "--max-sequences", "1")
    options = {"router": (*own["router"], "--lend-above", "2"), "text": (*own["text"], *one_at_a_time)}
    async with (
        LocalCluster(roles="EPD:1,PD:1", options=options, log_dir=tmp_path / "logs") as cluster,
        rest(cluster.url) as client,
        asyncio.TaskGroup() as group,
    ):
        texts = [
            group.create_task(post(client, Question(f"What is {number}?").body(max_tokens=TOKENS)))
            for number in range(TEXTS)
        ]
        await until_it_is_lent(cluster, client)
        image = await post(client, Question("What digit?", ("3_a",)).body(max_tokens=2))
        (item,) = (await timeline_of(client, image))["items"]
        told = [await timeline_of(client, await text) for text in texts]
    assert {timeline["text_instance"] for timeline in told} == {"text-1", "hybrid-1"}
    assert all((timeline["outcome"], timeline["text_attempts"]) == ("done", 1) for timeline in told)
    waited_s = max(timeline["queue_s"] for timeline in told if timeline["text_instance"] == "hybrid-1")
    assert waited_s > TOKENS * STEP_S, "several were lent at the same time"
    assert item["encoder"] == "hybrid-1"
    assert item["queue_s"] < waited_s / 2, "the image passed those that waited"
    assert not any("Traceback" in log.read_text() for log in (tmp_path / "logs").iterdir())


async def until_it_is_lent(cluster: LocalCluster, client: httpx.AsyncClient) -> None:
    """The encoder has computed a prompt and has more requests, none of which has an image."""
    async with asyncio.timeout(240):
        while True:
            lines = (await client.get(f"{cluster.admin_urls['hybrid-1']}/metrics")).text.splitlines()
            if sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_")) > 1:
                return
            await asyncio.sleep(STEP_S)
