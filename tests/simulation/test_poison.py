"""A request that ends each instance which works on it, among others: it fails alone, and ends two instances at most."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Never

import pytest

from tests.simulation.cluster import EncoderNode, SimCluster, TextNode, World
from tests.simulation.test_cluster import check_right, check_right_or, play_while, simulate
from tests.simulation.workload import Ask, Reply, make_asks, play
from triptych.domain.chat import MediaPart
from triptych.domain.embedding import Tensor
from triptych.domain.engine import EngineOutput
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.errors import EngineFailure, InstanceLost
from triptych.machine.router.text_places import MOST_TOGETHER
from triptych.testing.fakes import FakeEncoderEngine, FakePrepared, FakeTextEngine
from triptych.testing.media import png

_RESTART_S = 1.0
"""After which an instance that has ended is back, as with ``triptych up``."""
_POISON = "poison"
"""With which the ids of such requests begin."""
_LATE_POISON = "pending-poison"
"""Of those that do so after a few tokens of their answers."""
_IMAGE = png(48, 48, seed=13)
_MOST = 2


@dataclass
class Endings:
    """Ends instances whose engines compute something poisonous, as a fault in native code does: without a word."""

    cluster: SimCluster
    count: int = 0
    _ending: "asyncio.Queue[EncoderNode | TextNode]" = field(default_factory=asyncio.Queue)

    def end(self, engine: object) -> Never:
        nodes: list[EncoderNode | TextNode] = [*self.cluster.encoders, *self.cluster.texts]
        self._ending.put_nowait(next(node for node in nodes if node.engine is engine))
        self.count += 1
        raise InstanceLost("the process ends now")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                node = await self._ending.get()
                await node.kill()
                group.create_task(self._start_again(node))

    async def _start_again(self, node: EncoderNode | TextNode) -> None:
        await asyncio.sleep(_RESTART_S)
        await node.start()


@asynccontextmanager
async def poisonable(cluster: SimCluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Endings]:
    endings = Endings(cluster)
    encode, decode_step = FakeEncoderEngine.encode, FakeTextEngine.decode_step

    def encode_or_end(engine: FakeEncoderEngine, batch: Sequence[FakePrepared]) -> list[tuple[Tensor, ...]]:
        if any(item.media == _IMAGE for item in batch):
            endings.end(engine)
        return encode(engine, batch)

    def step_or_end(engine: FakeTextEngine) -> list[EngineOutput]:
        late = (
            name.startswith(_LATE_POISON) and any(sequence.sent >= 3 for sequence in of)
            for name, of in engine._running.items()
        )
        if any(late) or any(name.startswith(_POISON) for name in engine._running):
            endings.end(engine)
        return decode_step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(FakeEncoderEngine, "encode", encode_or_end)
        patch.setattr(FakeTextEngine, "decode_step", step_or_end)
        async with asyncio.TaskGroup() as group:
            ending = group.create_task(endings.run())
            yield endings
            await asyncio.sleep(2 * _RESTART_S)  # what has ended is back
            ending.cancel()


def asks_with(seed: int, poison: Iterable[Ask], count: int = 60) -> list[Ask]:
    """Requests with and without images, and the poisonous ones among them: most instances have several at a time."""
    rng = Random(f"{seed}/times")
    asks = make_asks(seed, count, images=(0, 3), rate_per_s=None, timeout_s=60.0)
    return [replace(ask, at_s=rng.uniform(0.3, 0.6)) for ask in asks] + list(poison)


def poisonous(name: str, at_s: float, *, image: bool) -> Ask:
    (ask,) = make_asks(7, 1, images=(0, 0))
    (message,) = ask.request.messages
    if image:
        message = replace(message, parts=(MediaPart(Modality.IMAGE, _IMAGE), *message.parts))
    return replace(ask, at_s=at_s, request=replace(ask.request, request_id=name, messages=(message,)))


def check_alone(replies: Sequence[Reply]) -> None:
    """The poisonous requests fail with EngineFailure, and no others fail."""
    innocent = [reply for reply in replies if not reply.ask.request.request_id.startswith("p")]
    check_right(innocent)
    for reply in replies:
        assert reply in innocent or isinstance(reply.error, EngineFailure), repr(reply.error)


@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
@pytest.mark.parametrize("seed", range(4))
def test_a_request_that_ends_instances_fails_alone(seed: int, image: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: SimCluster) -> None:
        async with poisonable(cluster, monkeypatch) as endings:
            name = "pictured" if image else _POISON
            replies = await play(cluster.router, asks_with(seed, [poisonous(name, 0.5, image=image)]))
        check_alone(replies)
        assert endings.count == _MOST

    simulate(World(seed=seed, encoders=3, texts=3, encode_token_s=0.002, text_step_s=0.05), scenario)


@pytest.mark.parametrize("seed", range(4))
def test_a_request_that_ends_instances_in_mid_answer_takes_few_others_with_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: SimCluster) -> None:
        async with poisonable(cluster, monkeypatch) as endings:
            (poison,) = make_asks(8, 1, images=(0, 0))
            sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            poison = replace(
                poison, at_s=0.5, request=replace(poison.request, request_id=_LATE_POISON, sampling=sampling)
            )
            replies = await play(cluster.router, asks_with(seed, [poison]))
        failed = check_right_or(replies, EngineFailure)
        assert _LATE_POISON in [reply.ask.request.request_id for reply in failed]
        assert len(failed) <= MOST_TOGETHER
        assert endings.count == _MOST

    simulate(World(seed=seed, encoders=3, texts=3, encode_token_s=0.002, text_step_s=0.05), scenario)


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_share_an_item_end_no_more_instances_than_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: SimCluster) -> None:
        async with poisonable(cluster, monkeypatch) as endings:
            shared = [poisonous(f"pictured-{number}", 0.5, image=True) for number in range(5)]
            replies = await play(cluster.router, asks_with(seed, shared, count=20))
        check_alone(replies)
        assert endings.count == _MOST

    simulate(World(seed=seed, encoders=4), scenario)


@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
def test_a_request_that_ends_instances_is_not_tried_at_another_router(
    image: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: SimCluster) -> None:
        async with cluster.clients() as routers, poisonable(cluster, monkeypatch) as endings:
            name = "pictured" if image else _POISON
            replies = await play(routers, asks_with(1, [poisonous(name, 0.5, image=image)], count=20))
        check_alone(replies)
        assert endings.count == _MOST

    simulate(World(seed=1, encoders=4, texts=4, routers=2), scenario)


@pytest.mark.parametrize("seed", range(2))
def test_no_request_fails_for_instances_that_are_killed_together(seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        async def kill_two() -> None:
            await asyncio.sleep(0.55)
            for node in (*cluster.texts[:2], cluster.encoders[0]):
                await node.kill()

        check_right(await play_while(cluster, asks_with(seed, ()), kill_two()))

    simulate(World(seed=seed, encoders=3, texts=4, encode_token_s=0.002, text_step_s=0.05), scenario)


def test_the_only_instance_is_not_ended_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instance is back before the request's time is over."""

    async def scenario(cluster: SimCluster) -> None:
        async with cluster.clients() as routers, poisonable(cluster, monkeypatch) as endings:
            (reply,) = await play(routers, [poisonous("pictured", 0.1, image=True)])
            assert isinstance(reply.error, EngineFailure | InstanceLost)
        assert endings.count <= _MOST

    simulate(World(seed=1, encoders=1, routers=2), scenario)
