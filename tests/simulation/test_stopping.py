"""A client that leaves, or a deadline that passes, stops a request wherever it is: nothing of it is left 100 ms and one engine
step later, and no work is begun for it any more. The real services under virtual time.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, now_s, simulate
from tests.simulation.test_ordering import asked
from tests.simulation.workload import play
from triptych.domain.embedding import Ticket
from triptych.domain.stage import Stage
from triptych.errors import DeadlineExceeded
from triptych.machine.encoder.batch_queue import BatchLimits
from triptych.machine.router.request import Phase
from triptych.policy.policies import PolicyNames

STOPS_WITHIN_S = 0.1
SENT_S = 0.1
"""When the request is sent, after the one that it waits for."""
STOPPED_S = 0.5
"""When its client leaves, or its deadline is."""
PULL_S = 5.0
PATIENT_S = 300.0
SIDE_PX, ITEM_BYTES = 224, 256 * 8 * 4
"""An image, and its embedding in the fake model."""


async def slow_pull(reader: str, ticket: Ticket) -> None:
    del reader, ticket
    await asyncio.sleep(PULL_S)


@dataclass(frozen=True)
class Place:
    """Where a request is at ``STOPPED_S``. One that it waits for was sent before it, if ``behind``; ``step_s`` is the longest
    engine step, in which nothing can be stopped.
    """

    is_there: Callable[[SimCluster, Phase], bool]
    world: dict[str, Any] = field(default_factory=dict)
    images: int = 1
    behind: bool = False
    encodes: int = 0
    """Items that are encoded in all, then and afterwards."""
    step_s: float = 0.0
    prefill_token_s: float = 0.00005


def text_load(cluster: SimCluster, stage: Stage) -> int:
    return cluster.texts[0].service.load().at(stage).pending


def items(cluster: SimCluster) -> int:
    return cluster.encoders[0].service.load().at(Stage.ENCODE).pending


PLACES = {
    "router queue": Place(
        lambda cluster, phase: phase is Phase.WAITING,
        {"encoder_arena_bytes": ITEM_BYTES + 1024, "before_pull": slow_pull},
        behind=True,
        encodes=1,
    ),
    "encoder queue": Place(
        lambda cluster, phase: phase is Phase.ENCODING and items(cluster) == 2,
        {"encode_token_s": 0.008},
        behind=True,
        encodes=1,
    ),
    "batch": Place(
        lambda cluster, phase: phase is Phase.ENCODING and items(cluster) == 1,
        {"encode_token_s": 0.004},
        step_s=1.1,
        encodes=1,
    ),
    "pull": Place(
        lambda cluster, phase: phase is Phase.DISPATCHING and text_load(cluster, Stage.PREFILL) == 1,
        {"before_pull": slow_pull},
        encodes=1,
    ),
    "engine queue": Place(
        lambda cluster, phase: cluster.texts[0].engine.waiting != frozenset(),
        {"max_running": 1, "text_step_s": 0.2},
        images=0,
        behind=True,
        step_s=0.2,
    ),
    "prefill": Place(
        lambda cluster, phase: phase is Phase.DISPATCHING and not cluster.texts[0].engine.waiting,
        images=0,
        step_s=1.0,
        prefill_token_s=0.1,
    ),
    "decode": Place(
        lambda cluster, phase: phase is Phase.STREAMING,
        {"text_step_s": 0.15},
        images=0,
        step_s=0.15,
    ),
}


def counts(cluster: SimCluster) -> dict[str, int]:
    """What is held, but for numbers of tokens, which a request that goes on uses up."""
    return {name: number for name, number in cluster.held().items() if "tokens" not in name}


@pytest.mark.parametrize("leaves", [True, False], ids=["the client leaves", "the deadline passes"])
@pytest.mark.parametrize("name", PLACES)
def test_a_request_stops_within_100_ms_and_one_engine_step(name: str, leaves: bool) -> None:
    place = PLACES[name]
    first = asked("first", sides_px=(SIDE_PX,) * place.images, timeout_s=PATIENT_S, seed=1)
    ask = asked("stopped", sides_px=(SIDE_PX,) * place.images, timeout_s=PATIENT_S, seed=2)
    if leaves:
        ask = replace(ask, leave_after_s=STOPPED_S)
    else:
        ask = replace(ask, request=replace(ask.request, timeout_s=STOPPED_S))

    async def scenario(cluster: SimCluster) -> None:
        (text,) = cluster.texts
        text.engine.prefill_token_s = place.prefill_token_s
        async with asyncio.TaskGroup() as group:
            others = group.create_task(play(cluster.router, [first] if place.behind else []))
            await asyncio.sleep(SENT_S)
            before, began_s = counts(cluster), now_s()
            playing = group.create_task(play(cluster.router, [ask]))
            await asyncio.sleep(STOPPED_S - 0.01)
            (task,) = [
                one for one in cluster.router._tasks.values() if one.request.request_id == ask.request.request_id
            ]
            assert place.is_there(cluster, task.phase), (task.phase, cluster.held())
            await asyncio.sleep(began_s + STOPPED_S + STOPS_WITHIN_S + place.step_s - now_s())
            assert counts(cluster) == before
            (reply,) = playing.result()
            assert reply.left if leaves else isinstance(reply.error, DeadlineExceeded), reply
            assert reply.ended_s <= began_s + STOPPED_S + STOPS_WITHIN_S
            await others
        check_right(others.result())
        await asyncio.sleep(PATIENT_S)
        assert cluster.encoders[0].engine.encoded_items == place.encodes

    world = World(
        seed=9,
        encoders=1,
        encoder={"batches": BatchLimits(max_batch_items=1)},
        router={"policies": PolicyNames(deadlines="admit")},
        **place.world,
    )
    simulate(world, scenario)
