"""Hybrid instances under virtual time: right answers, no leaks, no starvation."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from tests.simulation.cluster import SimCluster, TextNode, World, running
from tests.simulation.workload import make_asks, play
from triptych.domain.sampling import SamplingParams
from triptych.policy.iteration import ImageBudget
from triptych.virtual import virtual_time

Scenario = Callable[[SimCluster], Coroutine[Any, Any, None]]


def simulate(world: World, scenario: Scenario) -> None:
    async def main() -> None:
        async with running(world) as cluster:
            await scenario(cluster)
            await cluster.check_nothing_is_held()

    try:
        virtual_time.run(main(), seed=world.seed, limit_s=600)
    except BaseException as error:
        error.add_note(f"seed {world.seed}")
        raise


@dataclass(frozen=True)
class Batch:
    """One batch of the encoder."""

    at_s: float
    tokens: tuple[int, ...]
    waited_s: float
    """Wait of its first item, for this batch."""
    prompts: bool
    """Whether prompts could have been computed instead."""
    others: bool
    """Whether the text engine had any work."""


class Watched:
    """A record of what an instance's thread runs."""

    def __init__(self, node: TextNode) -> None:
        self.steps: list[float] = []
        """When each step of the text engine began."""
        self.batches: list[Batch] = []
        self._waiting_since_s: float | None = None
        engine, encoder, batcher = node.engine, node.encoder.engine, node.encoder.service.batcher
        clock = asyncio.get_running_loop().time
        decode_step, encode, encode_batch = engine.decode_step, encoder.encode, batcher.encode_batch

        def stepping() -> Any:
            self.steps.append(clock())
            return decode_step()

        async def encoding_batch(budget: ImageBudget | None = None) -> bool:
            self._waiting_since_s = batcher.waiting_since_s
            return await encode_batch(budget)

        def encoding(items: Any) -> Any:
            assert self._waiting_since_s is not None
            tokens = tuple(item.tokens for item in items)
            waited_s = clock() - self._waiting_since_s
            self.batches.append(
                Batch(clock(), tokens, waited_s, engine.prefill_queue_position is not None, engine.has_work)
            )
            return encode(items)

        engine.decode_step, batcher.encode_batch = stepping, encoding_batch  # type: ignore[method-assign]
        encoder.encode = encoding  # type: ignore[assignment, method-assign]


def alone(seed: int, **changes: Any) -> World:
    return World(seed=seed, encoders=0, texts=0, hybrids=1, **changes)


@pytest.mark.parametrize("seed", range(3))
def test_a_single_hybrid_instance_answers_a_mixed_workload_correctly(seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        for reply in await play(cluster.router, make_asks(seed, 100)):
            reply.check_right()
        assert cluster.hybrids[0].encoder.engine.encoded_items > 0
        assert (await cluster.router.readiness()).instances == ("h0: ready",)

    simulate(alone(seed), scenario)


@pytest.mark.parametrize("seed", range(3))
def test_hybrid_and_other_instances_work_together(seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        for reply in await play(cluster.router, make_asks(seed, 150)):
            reply.check_right()
        assert all(node.engine.encoded_items > 0 for node in cluster.encoding)

    simulate(World(seed=seed, encoders=1, texts=1, hybrids=2), scenario)


def test_an_idle_hybrid_instance_decodes_the_requests_it_encoded() -> None:
    async def scenario(cluster: SimCluster) -> None:
        asks = make_asks(8, 12, rate_per_s=0.1, images=(1, 1), distinct_images=500)
        for reply in await play(cluster.router, asks):
            reply.check_right()
        both: set[str] = set()
        for ask in asks:
            timeline = await cluster.router.timeline(ask.request.request_id)
            (item,) = timeline.items
            assert item.encoder == timeline.text_instance
            both.add(item.encoder)
        assert both == {"h0", "h1"}

    simulate(World(seed=8, encoders=0, texts=0, hybrids=2), scenario)


def test_a_killed_hybrid_instance_loses_no_request_and_returns_with_both_services() -> None:
    async def scenario(cluster: SimCluster) -> None:
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(play(cluster.router, make_asks(2, 200)))
            await asyncio.sleep(0.5)
            await cluster.hybrids[0].kill()
            await asyncio.sleep(0.5)
            await cluster.hybrids[0].start()
        for reply in playing.result():
            reply.check_right()
        await asyncio.sleep(5)
        assert (await cluster.router.readiness()).instances == ("h0: ready", "h1: ready")
        for reply in await play(cluster.router, make_asks(4, 40)):
            reply.check_right()
        assert cluster.hybrids[0].encoder.engine.encoded_items > 0

    simulate(World(seed=2, encoders=0, texts=0, hybrids=2), scenario)


def test_prompts_are_prefilled_before_items_are_encoded() -> None:
    async def scenario(cluster: SimCluster) -> None:
        watched = Watched(cluster.hybrids[0])
        for reply in await play(cluster.router, make_asks(3, 150, rate_per_s=60.0)):
            reply.check_right()
        assert len(watched.batches) > 20
        assert not any(batch.prompts for batch in watched.batches)

    simulate(alone(3, text={"encode_patience_s": 1e6, "encode_share": 1.0}), scenario)


def test_the_encoder_keeps_its_budget_and_decodes_run_between_its_batches() -> None:
    budget = ImageBudget(tokens=20, nbytes=1 << 20)

    async def scenario(cluster: SimCluster) -> None:
        watched = Watched(cluster.hybrids[0])
        for reply in await play(cluster.router, make_asks(5, 60, rate_per_s=None, distinct_images=500)):
            reply.check_right()
        batches = watched.batches
        assert len(batches) > 50
        assert any(len(batch.tokens) > 2 for batch in batches)
        assert all(sum(batch.tokens) <= budget.tokens for batch in batches)
        beside = 0
        for first, second in pairwise(batches):
            if first.others and second.others:
                assert sum(first.at_s <= at_s < second.at_s for at_s in watched.steps) >= 1, (
                    "two batches without a step between them"
                )
                beside += 1
        assert beside > 20

    simulate(alone(5, image_budget=budget), scenario)


PATIENCE_S = 0.1


@pytest.mark.parametrize("patience_s", [PATIENCE_S, 1e6])
def test_endless_prompts_do_not_starve_items(patience_s: float) -> None:
    """Every step there are new prompts, for more than a second; by the paper's rule items would wait for all of it."""

    async def scenario(cluster: SimCluster) -> None:
        (node,) = cluster.hybrids
        node.engine.max_running = 10_000
        watched = Watched(node)
        short = SamplingParams(temperature=0, max_tokens=1)
        texts = make_asks(6, 1200, rate_per_s=1000.0, images=(0, 0))
        texts = [replace(ask, request=replace(ask.request, sampling=short)) for ask in texts]
        asked = make_asks(7, 12, rate_per_s=12.0, images=(1, 2), distinct_images=500)
        for number, ask in enumerate(asked):
            asked[number] = replace(ask, request=replace(ask.request, request_id=f"with-image-{number}"))
        for reply in await play(cluster.router, [*texts, *asked]):
            reply.check_right()
        iteration_s = 0.005 + 60 * 0.00005 + 0.005 + 0.0002 * 48  # one step with prompts, and one batch
        waited_s = [batch.waited_s for batch in watched.batches]
        if patience_s == PATIENCE_S:
            assert any(batch.prompts for batch in watched.batches), "no item was ever encoded before waiting prompts"
            assert max(waited_s) <= PATIENCE_S + 2 * 2 * iteration_s
        else:
            assert max(waited_s) > 0.5

    settings = {"encode_patience_s": patience_s, "encode_share": 1.0}
    simulate(alone(6, text=settings), scenario)
