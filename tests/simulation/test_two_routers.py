"""Two routers under load that die, break connections and come back: every answer is right, and nothing is left anywhere."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from random import Random
from typing import Any

import pytest

from services.router.service import RouterService
from tests.router_client import LocalRouter
from tests.simulation.cluster import SimCluster, SimMembership, World, running
from tests.simulation.workload import make_asks, play
from triptych.domain.chat import ChatRequest
from triptych.domain.generation import ChatEvent
from triptych.domain.instance import ModelInfo
from triptych.errors import TriptychError
from triptych.rpc.routers import Routers
from triptych.runtime.tasks import TaskScope
from triptych.testing.links import Fault, Link, LinkedInstance
from triptych.testing.virtual_time import run

BROKEN_SHARE = 0.1
"""Of the calls to a router that is alive: those whose connection breaks after the first events."""


class RouterNode(LocalRouter):
    """A router's process with its connections, and its callers' connection to it (``RouterClient``)."""

    def __init__(self, name: str, cluster: SimCluster) -> None:
        self.name = name
        self._cluster = cluster
        self._rng = cluster.rng(f"connections to {name}")
        self.continues = True
        self._was_broken = False
        self._epoch = 0
        self._links: list[Link[Any]] = []
        self._start()
        self._link = Link(f"gateway->{name}", self.service, fault=self._fault)

    def _fault(self, method: str) -> Fault:
        """Never two calls in a row: a request that loses too many routers is given up (``router_attempts.MOST_BREAKS``)."""
        if method == "Chat":
            self._was_broken = not self._was_broken and self._rng.random() < BROKEN_SHARE
        return Fault.REPLY_LOST if method == "Chat" and self._was_broken else Fault.NONE

    def _start(self) -> None:
        self.is_up, self._scope, self._links = True, TaskScope(self.name), []
        self._epoch += 1
        membership, name = SimMembership(self._cluster.processes), f"{self.name}.{self._epoch}"
        self.service = self._cluster.make_router(membership, self._connect, name=name, scope=self._scope)
        self.service.start()

    def _connect(self, address: str) -> LinkedInstance:
        self._links.append(self._cluster.link(f"{self.name}->{address}", self._cluster.processes[address]))
        return LinkedInstance(self._links[-1])

    def restart(self) -> None:
        self._start()
        self._link.restart(self.service)

    async def kill(self) -> None:
        """At once: its leases and calls are left to the instances."""
        self.is_up = False
        for link in (self._link, *self._links):
            link.kill()
        self.service.close()
        await self._scope.close()

    # --- RouterClient ------------------------------------------------------------------------------------------------

    @property
    def refused(self) -> bool:
        return not self.is_up

    @property
    def connected(self) -> bool:
        return self.is_up

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        async with aclosing(self._link.stream("Chat", lambda one: _told(one, request), request.timeout_s)) as answer:
            async for events in answer:
                yield events

    async def models(self) -> tuple[ModelInfo, ...]:
        return await self._link.call("Models", lambda one: one.models())


async def _told(service: RouterService, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
    try:
        async with aclosing(service.chat(request)) as answer:
            async for events in answer:
                yield events
    except TriptychError as error:
        error.sent_by_peer = True
        raise


async def kill_in_turns(nodes: Sequence[RouterNode], rng: Random, cluster: SimCluster) -> None:
    """Of the two routers one at a time, and now and then a text instance with them."""
    while True:
        node = rng.choice(nodes)
        await asyncio.sleep(rng.uniform(0.2, 1.0))
        await node.kill()
        text = rng.choice(cluster.texts) if rng.random() < 0.3 else None
        if text is not None:
            await text.kill()
        await asyncio.sleep(rng.uniform(0.05, 1.0))
        if text is not None:
            text.start()
        node.restart()
        await asyncio.sleep(0.5)  # it sees the instances again


@pytest.mark.parametrize("seed", range(12))
def test_routers_that_die_cost_no_answer(seed: int) -> None:
    async def scenario() -> None:
        world = World(seed=seed, encoders=2, texts=3, text_step_s=0.02)
        async with running(world) as cluster:
            nodes = [RouterNode(f"router-{number}", cluster) for number in range(2)]
            by_name = {node.name: node for node in nodes}
            routers = Routers(by_name.__getitem__, cluster.rng("seeds"))
            routers.use(by_name)
            await asyncio.sleep(0.5)
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(routers.keep_asking())
                await routers.asked()
                killing = group.create_task(kill_in_turns(nodes, cluster.rng("victims"), cluster))
                replies = await play(routers, make_asks(seed, 60, rate_per_s=15.0, images=(0, 3)))
                killing.cancel()
                asking.cancel()
            for reply in replies:
                reply.check_right()
            assert routers.continuations > 0
            await cluster.check_nothing_is_held()
            for node in nodes:
                node.service.cluster.validate()
                assert (node.service.running, node.service.cluster.outstanding_credits) == (0, 0)
                if node.is_up:
                    await node.kill()

    run(scenario())
