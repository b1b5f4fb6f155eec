"""A text instance switches between roles while it answers: no stream notices."""

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.e2e.client import post, rest, text_of
from tests.e2e.delayed import delayed
from tests.e2e.reference import Question
from tests.e2e.test_answers import assert_no_stacks
from tests.e2e.test_continuations import timeline
from tests.e2e.test_metrics import scraped
from triptych.cli.cluster import LocalCluster
from triptych.cli.cluster_settings import ClusterSettings
from triptych.cli.model import Model
from triptych.cli.placement import placed
from triptych.cli.service_options import parse
from triptych.domain.pool import MemberStatus
from triptych.domain.stage import Role, Stage
from triptych.errors import FailedPrecondition
from triptych.rpc.stubs import PoolManagerStub

STREAMS = 16
"""At a time, one after the other until the last switch."""
TOKENS = 120
BODY = Question("What digits are shown?", ("9_c",), max_tokens=TOKENS).body(
    temperature=1.2, seed=11, ignore_eos=True, stream=True
)
ROLES = (Role.D, Role.P, Role.PD)
GAP_S, TBT_S = 0.25, 0.05
SHIFT = [4] * 8 + [60] * 28
"""Output tokens of the requests, one after the other. Of the long ones four come per second, and one instance bears less than two: it
decodes four at a time within the TBT objective.
"""


async def test_an_instance_serves_one_role_after_another_while_streams_run(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    switchable = {"text": ("--switchable", "PD")}
    async with LocalCluster(roles="E:1,P:1,D:1,PD:1", options=switchable, log_dir=logs) as cluster:
        manager = PoolManagerStub(cluster.manager_target)
        async with rest(cluster.url) as client:
            _, whole = await stream(client)
            assert whole
            orders = Orders(ROLES, used={Role.P, Role.PD}, enough=partial(has_transferred_kv, cluster, client))
            got = await streams_while_it_switches(client, manager, orders)
            told = [await timeline(client, request_id) for request_id, _ in got]
        await manager.switch_instance("prefill-1", Role.D, force=False)
        with pytest.raises(FailedPrecondition, match="text-1 is the last prefill instance"):
            await manager.switch_instance("text-1", Role.D, force=False)
        async with rest(cluster.url) as client:
            metrics = await scraped(cluster, client)
        await manager.close()
    assert_no_stacks(logs)
    assert {text for _, text in got} == {whole}
    assert {record["outcome"] for record in told} == {"done"}
    assert any(record["prefill_instance"] == "text-1" for record in told), "it handed answers over"
    took_s = re.findall(r"has switched within ([\d.]+) s", (logs / "text-1.log").read_text())
    assert len(took_s) == orders.given >= len(ROLES)
    sys.stdout.write(f"switches took {', '.join(took_s)} s\n")
    assert metrics.total("triptych_switches_total", "text-1", outcome="done") == orders.given
    assert metrics.total("triptych_switch_seconds_sum", "text-1") == pytest.approx(sum(map(float, took_s)), abs=0.01)
    assert metrics.total("triptych_switch_pending_seconds", "text-1") == 0
    assert metrics.total("triptych_stage_open", "text-1") == len(ROLES[-1].stages)
    for source, target in (("PD", "D"), ("D", "P"), ("P", "PD")):
        labels = {"from_role": source, "to_role": target, "outcome": "obeyed"}
        assert metrics.total("triptych_pool_switches_total", **labels) >= 1, labels
    assert metrics.total("triptych_pool_switches_total", outcome="overtaken") == 0
    assert metrics.total("triptych_pool_switch_seconds_count") >= orders.given
    assert metrics.total("triptych_pool_switch_first_request_seconds_count") >= 1
    assert metrics.total("triptych_pool_switch_unserved_seconds") == 0


@pytest.mark.extended
async def test_an_instance_loads_the_part_that_its_next_role_needs_while_streams_run(tmp_path: Path) -> None:
    """Requests with an image, through an instance that has only the encoder or only the language model in memory."""
    logs, orders = tmp_path / "logs", Orders((Role.E, Role.PD, Role.E, Role.PD))
    loading = {"text": ("--switchable", "EPD", "--resident", "role")}
    async with LocalCluster(roles="E:1,PD:2", options=loading, log_dir=logs) as cluster:
        manager = PoolManagerStub(cluster.manager_target)
        async with rest(cluster.url) as client:
            _, whole = await stream(client)
            assert whole
            got = await streams_while_it_switches(client, manager, orders)
            told = [await timeline(client, request_id) for request_id, _ in got]
        assert all(switch.opens_s > 0 and not switch.fault for switch in (await text_1(manager)).load.closed)
        await manager.close()
    assert_no_stacks(logs)
    assert {text for _, text in got} == {whole}
    assert {record["outcome"] for record in told} == {"done"}
    said = (logs / "text-1.log").read_text()
    assert said.count("the encoder is loaded") == orders.roles.count(Role.E)
    assert said.count("the decoder is unloaded") >= orders.roles.count(Role.E)
    took_s = re.findall(r"has switched within ([\d.]+) s", said)
    assert len(took_s) == orders.given == len(orders.roles)
    sys.stdout.write(f"switches with a load took {', '.join(took_s)} s\n")


async def at_once() -> bool:
    return True


@dataclass
class Orders:
    """Roles to switch to, one after the other, and all again until ``enough``: whether an answer is under way on the instance at the
    moment of one switch is not known before.
    """

    roles: Sequence[Role]
    used: Collection[Role] = ()
    """Roles in which it has served what they open before the next order. A role that opens no stage cannot be one."""
    enough: Callable[[], Awaitable[bool]] = at_once
    given: int = 0


async def streams_while_it_switches(
    client: httpx.AsyncClient, manager: PoolManagerStub, orders: Orders
) -> list[tuple[str, str]]:
    """The id and the text of each stream."""
    await until(partial(answers, manager), False)  # the manager's last report may be from an earlier stream
    got: list[tuple[str, str]] = []
    has_switched = asyncio.Event()

    async def streams() -> None:
        while not has_switched.is_set():
            got.append(await stream(client))

    async with asyncio.TaskGroup() as group:
        for _ in range(STREAMS):
            group.create_task(streams())
        await until(partial(answers, manager), True)
        async with asyncio.timeout(240):
            while not (orders.given and await orders.enough()):
                for role in orders.roles:
                    await manager.switch_instance("text-1", role, force=False)
                    await until(partial(serves, manager, role), True)
                    if role in orders.used:
                        await until(partial(has_served, manager), True)
                    orders.given += 1
        await until(partial(has_served, manager), True)
        has_switched.set()
    return got


async def stream(client: httpx.AsyncClient) -> tuple[str, str]:
    """The request's id and the text of its answer."""
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=BODY) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        return response.headers["x-request-id"], text


async def text_1(manager: PoolManagerStub) -> MemberStatus:
    members = [member for pool in (await manager.status()).pools for member in pool.members]
    return next(member for member in members if member.registration.instance_id == "text-1")


async def serves(manager: PoolManagerStub, role: Role) -> bool:
    return (await text_1(manager)).open == role.stages


async def has_transferred_kv(cluster: LocalCluster, client: httpx.AsyncClient) -> bool:
    """Whether a switch has moved an answer."""
    return (await scraped(cluster, client)).total("triptych_kv_transfers_total", "text-1", why="switch") > 0


async def has_served(manager: PoolManagerStub) -> bool:
    """Whether each stage that the last order opened has served something."""
    return (await text_1(manager)).served_s is not None


async def until(asked: Callable[[], Awaitable[bool]], wanted: bool) -> None:
    async with asyncio.timeout(240):
        while True:
            if await asked() is wanted:
                return
            await asyncio.sleep(0.1)


async def answers(manager: PoolManagerStub) -> bool:
    """Whether it has answers under way that it will have to transfer."""
    decoding = (await text_1(manager)).load.stages.get(Stage.DECODE)
    return decoding is not None and decoding.pending > 0


@pytest.mark.extended
async def test_the_manager_orders_a_switch_when_answers_become_long(tmp_path: Path) -> None:
    """Encoders have little to do, and one decode instance is short of room: an encoder goes there."""
    logs = tmp_path / "logs"
    (_, profiles) = delayed(tmp_path, sequence_s=0.01)["text"]
    roles, slo = "E:2,P:1,D:1", f"ttft=4s,tbt={TBT_S:g}s"
    given = parse([f"--delay-profile={profiles}", f"--slo={slo}"])
    flags = ClusterSettings([Model.named("demo")], placed(roles), given, switch_roles=True).flags()
    async with LocalCluster(roles=roles, switch_roles=True, options=flags, log_dir=logs) as cluster:
        manager = PoolManagerStub(cluster.manager_target)
        async with rest(cluster.url) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(sleeping(client, GAP_S * number, tokens)) for number, tokens in enumerate(SHIFT)]
            async with asyncio.timeout(240):
                while not await encoders_that_decode(manager):
                    assert not all(task.done() for task in tasks), "nothing has switched"
                    await asyncio.sleep(0.2)
            metrics = await scraped(cluster, client)
        await manager.close()
    assert_no_stacks(logs)
    got = [task.result() for task in tasks]
    assert [tokens for tokens, _ in got] == SHIFT
    assert len(set(got)) == len(set(SHIFT)), "answers of one length are equal"
    model = {"model_name": "triptych-demo"}
    moved = metrics.total("triptych_pool_switches_total", from_role="E", to_role="D", outcome="obeyed", **model)
    assert moved >= 1
    assert metrics.total("triptych_pool_serving_instances", stage="decode", **model) >= 2
    assert metrics.total("triptych_pool_stage_pressure", stage="decode", **model) > 0
    assert metrics.total("triptych_stage_open", "encoder", stage="decode") >= 1


async def sleeping(client: httpx.AsyncClient, at_s: float, tokens: int) -> tuple[int, str]:
    """The number of tokens and the text of an answer that is asked for later."""
    await asyncio.sleep(at_s)
    response = await post(client, Question("What digit?", ("3_a",)).body(max_tokens=tokens))
    return response.json()["usage"]["completion_tokens"], text_of(response)


async def encoders_that_decode(manager: PoolManagerStub) -> list[str]:
    members = [member for pool in (await manager.status()).pools for member in pool.members if pool.role is Role.E]
    return [member.registration.instance_id for member in members if member.open == Role.D.stages]
