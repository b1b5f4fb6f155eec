"""Two models in one local cluster: one gateway and one pool manager, a router and instances for each."""

import asyncio
from pathlib import Path

import httpx

from tests.e2e.client import post, rest, text_of, timeline_of
from tests.e2e.delayed import delayed
from tests.e2e.reference import Question
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role
from triptych.rpc.stubs import PoolManagerStub

OTHER = "other/digits"
INSTANCES = {
    MODEL_ID: {f"{MODEL_ID}-encoder-1", f"{MODEL_ID}-text-1"},
    OTHER: {"digits-encoder-1", "digits-text-1"},
}
BODY = Question("What digits are shown?", ("9_c",)).body()


async def test_one_address_serves_both_models_and_the_death_of_one_router_does_not_touch_the_other(
    tmp_path: Path,
) -> None:
    async with (
        LocalCluster(("demo", f"{OTHER}=demo"), roles="E:1,PD:1", restart=True, options=delayed(tmp_path)) as cluster,
        rest(cluster.url) as client,
    ):
        assert [listed["id"] for listed in (await client.get("/v1/models")).json()["data"]] == sorted((MODEL_ID, OTHER))
        for model in (MODEL_ID, OTHER):
            answered = await post(client, {**BODY, "model": model})
            assert text_of(answered)
            told = await timeline_of(client, answered)
            assert {told["text_instance"], *(item["encoder"] for item in told["items"])} == INSTANCES[model]
        manager = PoolManagerStub(cluster.manager_target)
        pools = {(pool.model, pool.role): len(pool.members) for pool in (await manager.status()).pools}
        assert pools == {(model, role): 1 for model in (MODEL_ID, OTHER) for role in (Role.E, Role.PD, None)}
        await manager.close()

        cluster.kill("digits-router")
        ended = await cluster.next_exit()
        assert cluster.consequence(ended).startswith(f"new requests for {OTHER} fail until the digits-router is back")
        assert text_of(await post(client, BODY))
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
