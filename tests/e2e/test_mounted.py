from pathlib import Path

from tests.e2e.client import post, rest, stream, text_of
from tests.e2e.delayed import delayed
from tests.e2e.reference import Question
from triptych.cli.cluster import LocalCluster
from triptych.rpc.stubs import RouterStub

TWO = Question("What digits are shown?", ("3_a", "1_a"))


async def test_a_mounted_router_answers_as_a_separate_one(tmp_path: Path) -> None:
    options = delayed(tmp_path)
    async with (
        LocalCluster(roles="E:1,PD:1", mount_router=True, options=options) as cluster,
        rest(cluster.url) as client,
    ):
        assert "router" not in cluster.processes
        by_rest = text_of(await post(client, TWO.body()))
        router = RouterStub(cluster.router_target)
        by_grpc = await stream(router, "by-grpc", TWO)
        assert (by_grpc.text, len(by_grpc.token_ids)) == (by_rest, TWO.max_tokens)
        await router.close()
        async with rest(cluster.admin_urls["gateway"]) as admin:
            recent = (await admin.get("/requests?after=0")).json()["requests"]
        assert [len(chat["images"]) for chat in recent] == [2, 2], "of the router, by the gateway's admin port"
