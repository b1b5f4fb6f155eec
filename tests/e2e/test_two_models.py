"""Two models in one local cluster: one gateway and one pool manager, a router and instances for each."""

import asyncio

import httpx

from tests.e2e.client import post, rest, text_of
from tests.e2e.reference import Question, answer
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role
from triptych.rpc.stubs import PoolManagerStub

OTHER = "other/digits"
QUESTION = Question("What digits are shown?", ("9_c",))
BODY = QUESTION.body()


async def test_one_address_serves_both_models_and_the_death_of_one_router_does_not_touch_the_other() -> None:
    async with (
        LocalCluster(("demo", f"{OTHER}=demo"), roles="E:1,PD:1", restart=True) as cluster,
        rest(cluster.url) as client,
    ):
        assert [listed["id"] for listed in (await client.get("/v1/models")).json()["data"]] == sorted((MODEL_ID, OTHER))
        for model in (MODEL_ID, OTHER):
            assert text_of(await post(client, {**BODY, "model": model})) == answer(QUESTION).text
        manager = PoolManagerStub(cluster.manager_target)
        pools = {(pool.model, pool.role): len(pool.members) for pool in (await manager.status()).pools}
        assert pools == {(model, role): 1 for model in (MODEL_ID, OTHER) for role in (Role.E, Role.PD, None)}
        await manager.close()

        cluster.kill("digits-router")
        ended = await cluster.next_exit()
        assert cluster.consequence(ended).startswith(f"new requests for {OTHER} fail until the digits-router is back")
        assert text_of(await post(client, BODY)) == answer(QUESTION).text
        async with asyncio.timeout(240):
            while (await post(client, {**BODY, "model": OTHER})).status_code != httpx.codes.OK:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.2)

        await cluster.scaler.scale(PoolName(OTHER, Role.E), 2, 1)
        async with asyncio.timeout(240):
            while "digits-encoder-2: ready" not in (await client.get("/ready")).json()["instances"]:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert [name for name in cluster.processes if name.startswith(f"{MODEL_ID}-encoder")] == [
            f"{MODEL_ID}-encoder-1"
        ], "the pools of the other model stay as they are"
