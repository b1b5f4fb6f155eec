"""More requests than the cluster can serve, with deadlines: the real services under virtual time."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from random import Random
from statistics import median

import pytest

from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, now_s, simulate
from tests.simulation.test_ordering import asked
from tests.simulation.workload import Ask, Reply, play
from triptych.domain.embedding import Tensor
from triptych.domain.engine import EngineOutput
from triptych.errors import DeadlineExceeded, NotFound, Overloaded
from triptych.machine.encoder.batch_queue import BatchLimits
from triptych.policy.policies import PolicyNames
from triptych.testing.fakes import FakeEncoderEngine, FakePrepared, FakeTextEngine

LASTS_S = 20.0
TEXT_PER_S = 10.0
"""About what a text engine bears that computes 4 answers of 4 to 11 tokens together, with 50 ms per step."""
IMAGES_PER_S = 3.8
"""About what an encoder bears that takes 1 ms per token and 5 ms per batch, of images of 256 tokens."""


def text_world(deadlines: str) -> World:
    return World(
        seed=7, encoders=1, max_running=4, text_step_s=0.05, router={"policies": PolicyNames(deadlines=deadlines)}
    )


def image_world(deadlines: str) -> World:
    return World(
        seed=8,
        encoders=1,
        encode_token_s=0.001,
        encoder={"batches": BatchLimits(max_batch_items=1)},
        router={"policies": PolicyNames(deadlines=deadlines)},
    )


def poisson(per_s: float, *, images: bool, timeouts_s: tuple[float, float] = (3.0, 5.0)) -> list[Ask]:
    rng = Random(f"{per_s} {images}")
    asks: list[Ask] = []
    at_s = rng.expovariate(per_s)
    while at_s < LASTS_S:
        sides_px = (224,) if images else ()
        asks.append(asked("ask", at_s, sides_px=sides_px, timeout_s=rng.uniform(*timeouts_s), seed=len(asks)))
        at_s += rng.expovariate(per_s)
    return asks


class Begun:
    """When encoders and engines begin with the items and prompts of requests."""

    def __init__(self, cluster: SimCluster, asks: list[Ask]) -> None:
        self.items: list[tuple[str, float]] = []
        """By their request, as all are different."""
        self.prompts: list[tuple[str, float]] = []
        of_item = {part.data: ask.request.request_id for ask in asks for part in ask.request.media}
        for node in cluster.encoders:
            self._watch_encoder(node.engine, of_item)
        for text in cluster.texts:
            self._watch_text(text.engine)

    def _watch_encoder(self, engine: FakeEncoderEngine, of_item: dict[bytes, str]) -> None:
        encode = engine.encode

        def encoding(batch: Sequence[FakePrepared]) -> list[tuple[Tensor, ...]]:
            self.items += [(of_item[item.media], now_s()) for item in batch]
            return encode(batch)

        engine.encode = encoding  # type: ignore[method-assign]

    def _watch_text(self, engine: FakeTextEngine) -> None:
        step = engine.step

        def stepping() -> list[EngineOutput]:
            waiting, began_s = engine.waiting, now_s()
            outputs = step()
            self.prompts += [(name.rpartition("/")[0], began_s) for name in waiting - engine.waiting]
            return outputs

        engine.step = stepping  # type: ignore[method-assign]


class Run:
    """What became of the requests."""

    def __init__(self, world: World, asks: list[Ask]) -> None:
        self.replies: list[Reply] = []
        self.began_s = 0.0
        self.counted = 0
        """Refusals that the router reports with its load."""
        self.prepared = 0
        """Refused requests that had been prepared."""

        async def scenario(cluster: SimCluster) -> None:
            self.began_s = now_s()
            self.begun = Begun(cluster, asks)
            self.replies = await play(cluster.router, asks)
            cluster.router.attainment.validate()
            for reply in self.refused:
                with suppress(NotFound):
                    await cluster.router.timeline(reply.ask.request.request_id)
                    self.prepared += 1
            await asyncio.sleep(2.0)
            self.counted = sum(report.refusals.overloaded for report in cluster.router.attainment.reports())

        simulate(world, scenario)
        check_right([reply for reply in self.replies if reply.error is None])

    @property
    def answered(self) -> int:
        """While requests arrived; what was answered afterwards is no throughput."""
        return sum(reply.error is None and reply.ended_s - self.began_s < LASTS_S for reply in self.replies)

    @property
    def late(self) -> int:
        return sum(isinstance(reply.error, DeadlineExceeded) for reply in self.replies)

    @property
    def begun_late(self) -> list[tuple[str, float]]:
        """Requests whose deadlines had passed when something of them was begun, and for how long."""
        due_s = {
            reply.ask.request.request_id: self.began_s + reply.ask.at_s + reply.ask.request.timeout_s
            for reply in self.replies
        }
        begun = (*self.begun.items, *self.begun.prompts)
        return [(name, at_s - due_s[name]) for name, at_s in begun if at_s > due_s[name]]

    @property
    def refused(self) -> list[Reply]:
        return [reply for reply in self.replies if isinstance(reply.error, Overloaded)]


@pytest.mark.parametrize(("images", "per_s"), [(False, TEXT_PER_S), (True, IMAGES_PER_S)], ids=["text", "images"])
def test_goodput_stays_at_its_peak_under_overload_and_the_rest_is_refused_at_once(images: bool, per_s: float) -> None:
    world = (image_world if images else text_world)("refuse")
    peak = Run(world, poisson(per_s, images=images))
    assert peak.late <= 0.02 * len(peak.replies)
    for load in (2, 4, 5):
        run = Run(world, poisson(load * per_s, images=images))
        assert run.answered >= 0.9 * peak.answered, (load, run.answered, peak.answered)
        failed = [reply for reply in run.replies if reply.error is not None]
        assert run.late + len(run.refused) == len(failed)
        assert run.counted == len(run.refused)
        assert run.late <= 0.1 * len(run.replies), (load, run.late, len(run.replies))
        assert run.prepared <= 0.1 * len(run.refused), "most are refused before anything is computed"
        assert median(reply.ended_s - run.began_s - reply.ask.at_s for reply in run.refused) < 0.05
        assert all(reply.error is not None and (reply.error.retry_after_s or 0) > 0 for reply in run.refused)
        assert len(run.begun.prompts) >= run.answered
        assert len(run.begun.items) >= (run.answered if images else 0)
        assert not run.begun_late, "no work for a request whose deadline has passed"


@pytest.mark.parametrize(("images", "per_s"), [(False, TEXT_PER_S), (True, IMAGES_PER_S)], ids=["text", "images"])
def test_goodput_does_not_collapse_where_deadlines_are_two_to_four_times_the_service(
    images: bool, per_s: float
) -> None:
    """Most of what is admitted at first ends by its deadline, so that hardly anything is served by which to tell the rate."""
    world, short_s = (image_world if images else text_world)("refuse"), (0.5, 1.0)
    peak = Run(world, poisson(per_s, images=images, timeouts_s=short_s)).answered
    for load in (2, 4, 8):
        run = Run(world, poisson(load * per_s, images=images, timeouts_s=short_s))
        assert run.answered >= 0.9 * peak, (load, run.answered, peak)
        assert run.late <= 0.1 * len(run.replies), (load, run.late, len(run.replies))


def test_without_the_refusals_what_cannot_be_served_ends_by_its_deadline() -> None:
    run = Run(text_world("admit"), poisson(4 * TEXT_PER_S, images=False))
    assert not run.refused
    assert run.late > 0.5 * len(run.replies)
    assert not run.begun_late


def test_below_the_capacity_nothing_is_refused() -> None:
    for load in (0.3, 0.6, 0.8):
        run = Run(text_world("refuse"), poisson(load * TEXT_PER_S, images=False))
        assert (run.late, run.refused) == (0, [])


@pytest.mark.parametrize("load", [2, 4])
@pytest.mark.parametrize(("images", "per_s"), [(False, TEXT_PER_S), (True, IMAGES_PER_S)], ids=["text", "images"])
def test_clients_that_wait_their_retry_after_are_admitted_at_the_next_try(
    images: bool, per_s: float, load: int
) -> None:
    """While others come for the first time, at several times the capacity, and of all, as most are told to come after that."""
    world = (image_world if images else text_world)("refuse")
    asks = poisson(load * per_s, images=images)
    first: list[Reply] = [Reply(ask) for ask in asks]
    again: list[Reply] = []
    meanwhile: list[Reply] = []

    async def scenario(cluster: SimCluster) -> None:
        async def come_back(reply: Reply) -> None:
            """As over HTTP, after whole seconds."""
            await asyncio.sleep(reply.ask.at_s)
            (retried,) = await play(cluster.router, [replace(reply.ask, at_s=0.0)])
            reply.error, reply.finished, reply.answers = retried.error, retried.finished, retried.answers
            if not isinstance(retried.error, Overloaded):
                return
            await asyncio.sleep(max(1, ceil(retried.error.retry_after_s or 0.0)))
            came_s = now_s() - began_s
            (second,) = await play(cluster.router, [replace(reply.ask, at_s=0.0)])
            again.append(second)
            if came_s < LASTS_S:
                meanwhile.append(second)

        began_s = now_s()

        async with asyncio.TaskGroup() as group:
            for reply in first:
                group.create_task(come_back(reply))

    simulate(world, scenario)
    refused = [reply for reply in first if isinstance(reply.error, Overloaded)]
    assert len(again) == len(refused) > 0.3 * len(first)
    assert len(meanwhile) > 0.1 * len(again)
    for tries in (meanwhile, again):
        admitted = [reply for reply in tries if not isinstance(reply.error, Overloaded)]
        assert len(admitted) >= 0.8 * len(tries)
        assert sum(reply.error is None for reply in tries) >= 0.8 * len(tries), "and answered before their deadlines"
