"""Embeddings in files under virtual time: they outlive encoders, whatever happens to these, and answers stay right."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, play_while, simulate
from tests.simulation.workload import make_asks, play

MIB = 1 << 20


def keeping(directory: Path, nbytes: int = 64 * MIB) -> dict[str, object]:
    return {"embedding_files": directory, "embedding_files_bytes": nbytes}


def test_an_encoder_that_is_killed_and_started_again_encodes_no_image_twice(tmp_path: Path) -> None:
    async def scenario(cluster: SimCluster) -> None:
        asks = make_asks(1, 40, images=(1, 3), distinct_images=15)
        check_right(await play(cluster.router, asks))
        await asyncio.sleep(1)
        for node in cluster.encoders:
            assert node.engine.encoded_items > 0
            await node.kill()
            await node.start()
        await asyncio.sleep(5)
        check_right(await play(cluster.router, asks))
        assert [node.engine.encoded_items for node in cluster.encoders] == [0, 0], "since they were started again"

    simulate(World(seed=1, encoder=keeping(tmp_path / "kept")), scenario)


@pytest.mark.parametrize("seed", range(4))
def test_files_damaged_and_encoders_killed_during_100_requests_lose_no_answer(seed: int, tmp_path: Path) -> None:
    """The bound is a fifth of what the images take, so that files are removed all the time."""
    rng = Random(seed)
    kept = tmp_path / "kept"

    async def scenario(cluster: SimCluster) -> None:
        async def harm() -> None:
            for _ in range(2):
                await asyncio.sleep(0.2)
                there = sorted(kept.glob("*.embedding"))
                for file in rng.sample(there, k=min(3, len(there))):
                    file.write_bytes(file.read_bytes()[: rng.randrange(200)])
                victim = rng.choice(cluster.encoders)
                await victim.kill()
                await victim.start()

        check_right(await play_while(cluster, make_asks(seed, 100, rate_per_s=200, distinct_images=80), harm()))
        assert sum(file.stat().st_size for file in kept.glob("*.embedding")) <= 60_000

    simulate(World(seed=seed, encoder_arena_bytes=1 << 15, encoder=keeping(kept, 60_000)), scenario)
