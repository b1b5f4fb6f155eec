"""The system under virtual time: workloads and faults from seeds, every answer checked, no leaks."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.examples import seeds
from tests.simulation.cluster import SimCluster, World, running
from tests.simulation.workload import Ask, Reply, make_asks, play
from triptych.domain.chat import MediaPart, Message
from triptych.domain.embedding import Ticket
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import Stage
from triptych.errors import (
    DeadlineExceeded,
    EngineFailure,
    InstanceLost,
    InvalidMedia,
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.testing.fakes import BROKEN_MEDIA
from triptych.testing.media import png
from triptych.virtual import virtual_time

Scenario = Callable[[SimCluster], Coroutine[Any, Any, None]]


def simulate(world: World, scenario: Scenario, *, limit_s: float = 600) -> list[tuple[float, str, str]]:
    """Runs a scenario and returns its decisions; a failure names the seed."""

    async def main() -> list[tuple[float, str, str]]:
        async with running(world) as cluster:
            await scenario(cluster)
            await cluster.check_nothing_is_held()
            return cluster.decisions

    try:
        return virtual_time.run(main(), seed=world.seed, limit_s=limit_s)
    except BaseException as error:
        error.add_note(f"seed {world.seed}")
        raise


def check_right(replies: Sequence[Reply]) -> None:
    for reply in replies:
        reply.check_right()


def check_right_or(replies: Sequence[Reply], *errors: type[TriptychError]) -> list[Reply]:
    """Every request has its right answer or one of the errors; returns the requests with an error."""
    failed = [reply for reply in replies if reply.error is not None]
    for reply in failed:
        assert isinstance(reply.error, errors), f"{reply.ask.request.request_id}: {reply.error!r}"
    check_right([reply for reply in replies if reply.error is None])
    return failed


async def continuations(cluster: SimCluster, replies: Sequence[Reply]) -> int:
    """How often answers went on at another text instance."""
    told = [await cluster.router.timeline(reply.ask.request.request_id) for reply in replies]
    return sum(timeline.continuations for timeline in told)


async def play_while(cluster: SimCluster, asks: list[Ask], fault: Coroutine[Any, Any, None]) -> list[Reply]:
    """Sends the requests while ``fault`` runs."""
    async with asyncio.TaskGroup() as group:
        playing = group.create_task(play(cluster.router, asks))
        group.create_task(fault)
    return playing.result()


def now_s() -> float:
    return asyncio.get_running_loop().time()


def prioritized(asks: Sequence[Ask], priority: int, name: str, timeout_s: float = 60.0) -> list[Ask]:
    return [
        replace(
            ask,
            request=replace(
                ask.request, request_id=f"{name}{number}", priority=priority, timeout_s=timeout_s, sampling=LONG
            ),
        )
        for number, ask in enumerate(asks)
    ]


LONG = SamplingParams(temperature=0, max_tokens=40)


@pytest.mark.parametrize("images", [(0, 0), (2, 4)])
def test_a_lower_priority_number_overtakes_requests_waiting_at_a_full_text_instance(images: tuple[int, int]) -> None:
    """Late requests with later deadlines, which only their priority number puts first."""

    async def scenario(cluster: SimCluster) -> None:
        usual = prioritized(make_asks(4, 12, rate_per_s=None, images=images), 0, "usual")
        late = prioritized(make_asks(5, 3, rate_per_s=None, images=images), -1, "late", timeout_s=200.0)
        replies = await play(cluster.router, [*usual, *(replace(ask, at_s=0.03) for ask in late)])
        check_right(replies)
        order = [reply.ask.request for reply in sorted(replies, key=lambda reply: reply.ended_s)]
        places = [place for place, request in enumerate(order) if request.priority == -1]
        # Requests admitted before they arrive, or running when their pulls end, are not preempted.
        assert places[-1] < len(usual) - 4, [request.request_id for request in order]
        assert all(order[place].priority == 0 for place in range(places[-1] + 1, len(order)))

    simulate(World(seed=4, max_running=1), scenario)


def test_a_higher_priority_waits_no_longer_than_its_deadline() -> None:
    async def scenario(cluster: SimCluster) -> None:
        usual = prioritized(make_asks(6, 60, rate_per_s=None, images=(0, 0)), 0, "usual")
        patient = prioritized(make_asks(7, 2, rate_per_s=None, images=(0, 0)), 1, "patient", timeout_s=1.0)
        replies = await play(cluster.router, [*usual, *(replace(ask, at_s=0.03) for ask in patient)])
        failed = check_right_or(replies, DeadlineExceeded)
        assert {reply.ask.request.request_id for reply in failed} == {"patient0", "patient1"}
        for reply in failed:
            assert reply.ended_s - reply.ask.at_s == pytest.approx(1.0, abs=0.5)

    simulate(World(seed=6, max_running=1), scenario)


def test_a_mixed_workload_is_answered_correctly() -> None:
    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, make_asks(1, 300)))
        assert all(node.engine.encoded_items > 0 for node in cluster.encoders)

    simulate(World(seed=1), scenario)


def test_text_only_requests_call_no_encoder() -> None:
    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, make_asks(1, 20, images=(0, 0))))
        assert not [call for call in cluster.decisions if call[2] in ("encode", "lease")]

    simulate(World(seed=1), scenario)


def test_a_burst_of_200_loses_no_request() -> None:
    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, make_asks(2, 200, rate_per_s=None)))

    simulate(World(seed=2), scenario)


@pytest.mark.parametrize("concurrent", [1, 2, 4, 8, 16, 32, 64])
def test_any_number_of_concurrent_image_requests_is_answered(concurrent: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        for _ in range(3):
            check_right(await play(cluster.router, make_asks(concurrent, concurrent, rate_per_s=None, images=(1, 4))))

    simulate(World(seed=concurrent), scenario)


@pytest.mark.parametrize("back_after_s", [None, 0.2])
@pytest.mark.parametrize("seed", seeds(4, usual=2))
def test_an_encoder_killed_during_100_requests_loses_no_answer(seed: int, back_after_s: float | None) -> None:
    async def scenario(cluster: SimCluster) -> None:
        victim = cluster.encoders[0]

        async def kill() -> None:
            await asyncio.sleep(0.25)
            assert victim.service.load().at(Stage.ENCODE).pending > 0, "it is killed while requests run"
            await victim.kill()
            if back_after_s is not None:
                await asyncio.sleep(back_after_s)
                await victim.start()

        check_right(await play_while(cluster, make_asks(seed, 100, rate_per_s=200, distinct_images=400), kill()))

    simulate(World(seed=seed), scenario)


@pytest.mark.parametrize("seed", seeds(4, usual=2))
def test_killing_the_only_text_instance_ends_each_request_with_one_clear_error(seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        (victim,) = cluster.texts
        killed_s = now_s() + 0.3

        async def kill() -> None:
            await asyncio.sleep(killed_s - now_s())
            assert victim.service.load().at(Stage.DECODE).pending > 0, "it is killed while requests run"
            await victim.kill()

        replies = await play_while(cluster, make_asks(seed, 150, rate_per_s=250), kill())
        failed = check_right_or(replies, Unavailable)
        assert len(failed) > 20
        running_then = [reply for reply in failed if reply.ask.at_s < killed_s]
        assert max(reply.ended_s for reply in running_then) <= killed_s + 2
        later = (await play(cluster.router, make_asks(99, 5)))[-1]
        assert isinstance(later.error, Unavailable)
        await victim.start()
        await asyncio.sleep(2)
        check_right(await play(cluster.router, make_asks(100, 20)))

    simulate(World(seed=seed), scenario)


@pytest.mark.parametrize("seed", seeds(4, usual=2))
def test_killing_one_of_two_text_instances_loses_no_answer(seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        async def kill() -> None:
            await asyncio.sleep(0.3)
            while not cluster.texts[0].service.load().at(Stage.DECODE).pending:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)  # it is killed in mid-stream, some steps after a first token
            await cluster.texts[0].kill()

        replies = await play_while(cluster, make_asks(seed, 100, rate_per_s=200), kill())
        check_right(replies)
        assert await continuations(cluster, replies) > 0

    simulate(World(seed=seed, texts=2), scenario)


@pytest.mark.parametrize("seed", seeds(6, usual=2))
def test_streams_that_break_again_and_again_are_answered_right(seed: int) -> None:
    """Text instances crash and return in turn, one at a time, while embeddings are evicted from small arenas."""
    rng = Random(seed)

    async def scenario(cluster: SimCluster) -> None:
        async def crash_in_turn() -> None:
            for number in range(8):
                await asyncio.sleep(rng.uniform(0.1, 0.2))
                victim = cluster.texts[number % 3]
                await victim.kill()
                await asyncio.sleep(rng.uniform(0, 0.1))
                await victim.start()

        asks = make_asks(seed, 120, rate_per_s=100, distinct_images=400)
        replies = await play_while(cluster, asks, crash_in_turn())
        for reply in check_right_or(replies, InstanceLost):
            timeline = await cluster.router.timeline(reply.ask.request.request_id)
            assert timeline.text_attempts == 3, "it was given up too early"
        assert sum(reply.error is None for reply in replies) > 110
        assert await continuations(cluster, replies) > 0

    world = World(seed=seed, texts=3, encoder_arena_bytes=24 * 1024, text_arena_bytes=24 * 1024)
    simulate(world, scenario, limit_s=300)


def test_the_only_text_instance_that_returns_in_time_loses_no_stream() -> None:
    async def scenario(cluster: SimCluster) -> None:
        (text,) = cluster.texts

        async def crash() -> None:
            await asyncio.sleep(0.3)
            began = [reply for reply in replies if reply.answers and reply.finished is None]
            assert began
            await text.kill()
            await asyncio.sleep(0.2)
            await text.start()
            streams.extend(began)

        streams: list[Reply] = []
        asks = make_asks(3, 60, rate_per_s=200)
        replies = [Reply(ask) for ask in asks]
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(play(cluster.router, asks, replies))
            group.create_task(crash())
        check_right_or(playing.result(), Unavailable)
        check_right(streams)
        assert await continuations(cluster, streams) == len(streams)

    simulate(World(seed=3), scenario)


def test_pulls_that_fail_once_or_arrive_damaged_are_redone() -> None:
    failed: set[tuple[bytes, int]] = set()
    damaged: set[bytes] = set()
    rng = Random(5)

    async def before_pull(reader: str, ticket: Ticket) -> None:
        await asyncio.sleep(rng.uniform(0, 0.02))
        if rng.random() < 0.05 and (ticket.key, ticket.generation) not in failed:
            failed.add((ticket.key, ticket.generation))
            raise TransferFailed("on purpose")

    def damage(ticket: Ticket) -> bool:
        if rng.random() > 0.05 or ticket.key in damaged:
            return False
        damaged.add(ticket.key)
        return True

    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, make_asks(5, 150, distinct_images=400)))
        assert failed
        assert damaged

    world = World(seed=5, before_pull=before_pull, damage=damage)
    simulate(world, scenario)


def test_a_permanently_failing_pull_is_a_clear_error_for_its_requests_only() -> None:
    images = [png(30, 30, seed=seed) for seed in range(2)]
    doomed: set[bytes] = set()

    async def before_pull(reader: str, ticket: Ticket) -> None:
        doomed.add(min(doomed or {ticket.key}))
        if ticket.key in doomed:
            raise TransferFailed("on purpose")

    def ask(request_id: str, image: bytes) -> Ask:
        (template,) = make_asks(1, 1, images=(0, 0))
        message = template.request.messages[0]
        parts = (*message.parts, MediaPart(Modality.IMAGE, image))
        return Ask(0, replace(template.request, request_id=request_id, messages=(Message("user", parts),)))

    async def scenario(cluster: SimCluster) -> None:
        (first,) = await play(cluster.router, [ask("doomed", images[0])])
        assert isinstance(first.error, TransferFailed)
        check_right(await play(cluster.router, [ask("fine", images[1]), *make_asks(3, 10)]))

    simulate(World(seed=6, before_pull=before_pull), scenario)


@pytest.mark.parametrize("seed", seeds(6, usual=2))
def test_clients_that_cancel_at_any_time_leak_nothing(seed: int) -> None:
    rng = Random(seed)
    asks = [
        replace(ask, leave_after_s=rng.uniform(0, 0.1) if rng.random() < 0.6 else None)
        for ask in make_asks(seed, 120, rate_per_s=150)
    ]

    async def scenario(cluster: SimCluster) -> None:
        replies = await play(cluster.router, asks)
        check_right([reply for reply in replies if not reply.left])
        assert sum(reply.left for reply in replies) > 20

    simulate(World(seed=seed), scenario)


@pytest.mark.parametrize("seed", seeds(4, usual=2))
def test_a_burst_larger_than_the_arena_waits_without_losses(seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        check_right(await play(cluster.router, make_asks(seed, 100, rate_per_s=None, distinct_images=500)))

    simulate(World(seed=seed, encoder_arena_bytes=6 * 1024, text_arena_bytes=8 * 1024), scenario, limit_s=300)


@pytest.mark.parametrize("seed", seeds(4, usual=2))
def test_an_unresponsive_encoder_blocks_no_request_beyond_its_deadline(seed: int) -> None:
    timeout_s = 30.0

    async def scenario(cluster: SimCluster) -> None:
        async def stall() -> None:
            await asyncio.sleep(0.2)
            for link in cluster.encoders[0].links:
                link.stall()

        asks = make_asks(seed, 60, rate_per_s=100, timeout_s=timeout_s)
        replies = await play_while(cluster, asks, stall())
        for reply in check_right_or(replies, DeadlineExceeded, Unavailable):
            assert reply.ended_s <= reply.ask.at_s + timeout_s + 1
        assert any(reply.error is None for reply in replies)
        began_s = now_s()
        check_right(await play(cluster.router, make_asks(seed + 50, 30, rate_per_s=100)))
        assert now_s() < began_s + 5
        for link in cluster.encoders[0].links:
            link.resume()

    simulate(World(seed=seed), scenario)


def test_an_item_that_breaks_a_batch_does_not_affect_the_others() -> None:
    async def scenario(cluster: SimCluster) -> None:
        for node in cluster.encoders:
            node.engine.failures.append(EngineFailure("on purpose"))
        replies = await play(cluster.router, make_asks(7, 40, rate_per_s=None, images=(1, 3), distinct_images=400))
        assert len(check_right_or(replies, EngineFailure)) <= 2

    simulate(World(seed=7), scenario)


def test_a_sequence_failed_by_the_engine_fails_alone() -> None:
    async def scenario(cluster: SimCluster) -> None:
        cluster.texts[0].engine.failures.append(EngineFailure("on purpose"))
        failed = check_right_or(await play(cluster.router, make_asks(8, 40)), EngineFailure)
        assert len(failed) == 1

    simulate(World(seed=8), scenario)


def test_an_undecodable_image_is_refused_every_time_without_side_effects() -> None:
    """After vllm#43941: an error on an image, then the same image again."""
    broken = png(20, 20) + BROKEN_MEDIA

    async def scenario(cluster: SimCluster) -> None:
        asks = make_asks(9, 20)
        for place in (3, 7, 12):
            message = Message("user", (MediaPart(Modality.IMAGE, broken), *asks[place].request.messages[0].parts))
            asks[place] = replace(asks[place], request=replace(asks[place].request, messages=(message,)))
        failed = check_right_or(await play(cluster.router, asks), InvalidMedia)
        assert [reply.ask.request.request_id for reply in failed] == ["r3", "r7", "r12"]

    simulate(World(seed=9), scenario)
