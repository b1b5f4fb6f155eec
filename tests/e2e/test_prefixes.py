"""A prompt whose beginning another instance has computed: its keys and values are pulled, and the answer is that of generate."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.e2e.client import rest, stream
from tests.e2e.reference import Question, answer
from tests.e2e.test_answers import assert_no_stacks
from tests.e2e.test_continuations import BODY, SEEN, timeline
from tests.e2e.test_continuations import stream as sampled
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID
from triptych.domain.pool import ManualSize
from triptych.domain.stage import Role
from triptych.machine.router.request import RequestLimits
from triptych.rpc.stubs import PoolManagerStub, RouterStub

LONG = "Add the digits and tell the sum. " * 30
SEGMENT = 256
"""Positions of a segment of the demo model."""
REPORTED_S = 0.5


async def pulled_segments(cluster: LocalCluster, name: str) -> int:
    async with rest(cluster.admin_urls[name]) as admin:
        text = (await admin.get("/metrics")).text
    return sum(
        int(float(tokens))
        for tokens in re.findall(r"^triptych_kv_prefix_segments_total{outcome=\"pulled\"} (\S+)$", text, re.MULTILINE)
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


@pytest.mark.extended
async def test_a_drain_transfers_kv_and_ends_long_before_the_leases_do(tmp_path: Path) -> None:
    """Segments are transferred, and kept for prompts that begin alike."""
    logs = tmp_path / "logs"
    options = {
        "text": ("--kv-prefixes", "--transfer-kv-on-drain"),
        "router": ("--prefixes", "always", "--text-routing", "round-robin"),
    }
    ordered = asyncio.Event()
    async with (
        LocalCluster(roles="E:1,PD:2", restart=True, log_dir=logs, options=options) as cluster,
        rest(cluster.url) as client,
    ):
        manager = PoolManagerStub(cluster.manager_target)

        async def shrink(request_id: str, tokens: int) -> None:
            del request_id
            if tokens >= SEEN and not ordered.is_set():
                ordered.set()
                await manager.set_size(ManualSize(MODEL_ID, Role.PD, 1, 600.0))

        async def ended() -> None:
            await ordered.wait()
            async with asyncio.timeout(RequestLimits().max_lease_s / 2):
                while {"text-1", "text-2"} <= cluster.processes.keys():  # noqa: ASYNC110 - of processes
                    await asyncio.sleep(0.1)

        async with asyncio.TaskGroup() as group:
            group.create_task(ended())
            answers = [group.create_task(sampled(client, shrink, BODY | {"max_tokens": 300})) for _ in range(2)]
        await manager.close()
    assert all(answer.result().texts == answers[0].result().texts for answer in answers), "the seed is the same"
    told = (logs / "router.log").read_text()
    assert "leaving" in told
    assert "did not release" not in told
    assert "left to expire" not in told
    assert_no_stacks(logs)
