"""A prompt whose beginning another instance has computed: its keys and values are pulled, and the answer is that of generate."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.e2e.client import rest, stream
from tests.e2e.reference import Question, answer
from tests.e2e.test_answers import assert_no_stacks
from tests.e2e.test_continuations import timeline
from triptych.cli.cluster import LocalCluster
from triptych.rpc.stubs import RouterStub

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.asyncio]

LONG = "Add the digits and tell the sum. " * 30
SEGMENT = 256
"""Positions of a segment of the demo model."""
REPORTED_S = 0.5


async def pulled_segments(cluster: LocalCluster, name: str) -> int:
    async with rest(cluster.admin_urls[name]) as admin:
        text = (await admin.get("/metrics")).text
    return sum(
        int(float(one))
        for one in re.findall(r"^triptych_kv_prefix_segments_total{outcome=\"pulled\"} (\S+)$", text, re.MULTILINE)
    )


async def test_a_beginning_is_pulled_instead_of_computed(tmp_path: Path) -> None:
    """The image comes first, so that it is part of the beginning."""
    asked = [Question(LONG + last, ("3_a",), 12) for last in ("Why?", "How?", "Who is it?", "When?")]
    options = {"text": ("--kv-prefixes",), "router": ("--prefixes", "always", "--text-routing", "round-robin")}
    async with LocalCluster(roles="E:1,PD:2", log_dir=tmp_path / "logs", options=options) as cluster:
        router = RouterStub(cluster.router_target)
        instances, prefixes = list[str](), list[int]()
        async with rest(cluster.url) as client:
            for index, question in enumerate(asked):
                got = await stream(router, f"prefix-{index}", question)
                assert got.token_ids == answer(question).token_ids, question
                told = await timeline(client, f"prefix-{index}")
                instances.append(told["text_instance"])
                prefixes.append(told["prefix_tokens"])
                await asyncio.sleep(REPORTED_S)
        await router.close()
        tokens = answer(asked[0]).prompt_tokens // SEGMENT * SEGMENT
        assert tokens >= SEGMENT
        assert set(instances[:2]) == {"text-1", "text-2"}
        assert prefixes == [0, tokens, 0, 0], "the second instance pulls it, then both have it"
        assert await pulled_segments(cluster, instances[1]) == tokens // SEGMENT
    assert_no_stacks(tmp_path / "logs")
