"""Real processes that share one CUDA device: answers in float32 equal those of ``generate`` on the CPU, token for token."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.e2e.client import rest, stream
from tests.e2e.reference import answer, questions
from tests.e2e.test_answers import assert_no_stacks
from tests.e2e.test_continuations import timeline
from tests.e2e.test_switching import Orders, streams_while_it_switches, text_1
from tests.e2e.test_switching import stream as text_stream
from triptych.cli.cluster import LocalCluster
from triptych.domain.stage import Role
from triptych.rpc.stubs import PoolManagerStub, RouterStub

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: services are not tested on CUDA here"),
]
CUDA = ("--device", "cuda")


@pytest.mark.parametrize(
    ("roles", "more"),
    [
        pytest.param("E:2,PD:1", (), id="apart, host memory"),
        pytest.param("E:2,PD:1", ("--arena", "device"), id="apart, memory of the device"),
        pytest.param("EPD:2", (), id="hybrid"),
        pytest.param("E:1,P:1,D:2", (), id="prefill and decode apart"),
    ],
)
async def test_answers_are_those_of_generate(roles: str, more: tuple[str, ...], tmp_path: Path) -> None:
    options = {"encoder": (*CUDA, *more), "text": (*CUDA, *more)}
    asked = questions((0, 1, 2, 8), 12)
    async with (
        LocalCluster(roles=roles, options=options, log_dir=tmp_path) as cluster,
        rest(cluster.url) as client,
    ):
        router = RouterStub(cluster.router_target)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream(router, f"cuda-{i}", question)) for i, question in enumerate(asked)]
        await router.close()
        told = [await timeline(client, f"cuda-{index}") for index in range(len(asked))]
    assert_no_stacks(tmp_path)
    for task, question in zip(tasks, asked, strict=True):
        assert task.result().token_ids == answer(question).token_ids, question
    if "D:2" in roles and "P:1" in roles:
        assert all(record["kv_pulled_tokens"] + record["kv_cached_tokens"] > 0 for record in told)


async def test_an_instance_loads_the_part_that_its_next_role_needs_while_streams_run(tmp_path: Path) -> None:
    orders = Orders((Role.E, Role.PD, Role.E, Role.PD))
    options = {"encoder": CUDA, "text": (*CUDA, "--switchable", "EPD", "--resident", "role")}
    async with LocalCluster(roles="E:1,PD:2", options=options, log_dir=tmp_path) as cluster:
        manager = PoolManagerStub(cluster.manager_target)
        async with rest(cluster.url) as client:
            _, whole = await text_stream(client)
            got = await streams_while_it_switches(client, manager, orders)
        assert all(switch.opens_s > 0 and not switch.fault for switch in (await text_1(manager)).load.closed)
        await manager.close()
    assert_no_stacks(tmp_path)
    assert whole
    assert {text for _, text in got} == {whole}
    assert (tmp_path / "text-1.log").read_text().count("the encoder is loaded") == orders.roles.count(Role.E)
