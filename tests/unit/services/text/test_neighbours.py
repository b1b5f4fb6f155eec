"""Encoders are met ahead of the first pull, and met again after whatever happened."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from services.text.holders import HolderDirectory
from services.text.neighbours import Neighbours
from tests.unit.services.panels import encoder_panel, under_virtual_time
from triptych.domain.instance import TransportOffer
from triptych.errors import TransferFailed
from triptych.ports import Encoder, Peer
from triptych.runtime.tasks import TaskScope
from triptych.testing.links import Link, LinkedEncoder
from triptych.transport.arena import HEADER_NBYTES, HostArena
from triptych.transport.memory import MemoryNetwork, MemoryTransport
from triptych.transport.probe import PeerBook

CONNECT_S = 0.07


class Book(PeerBook):
    """Links that take CONNECT_S to make; ``broken`` ones cannot be made. ``made_s`` says when each was begun."""

    def __init__(self, network: MemoryNetwork) -> None:
        arena = HostArena(HEADER_NBYTES + 4096, instance_id="text", epoch=1)
        self._reader = MemoryTransport(network, arena, host="here", check=lambda *_: False)
        self.broken = False
        self.made_s: list[float] = []
        super().__init__(self._slowly, limit=8)

    async def _slowly(self, offers: Sequence[TransportOffer]) -> Peer:
        self.made_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(CONNECT_S)
        if self.broken:
            raise TransferFailed("no way")
        return await self._reader.connect(offers[0])


@asynccontextmanager
async def met(network: MemoryNetwork, *encoders: Encoder, interval_s: float = 1.0) -> AsyncIterator[Book]:
    book = Book(network)
    async with TaskScope("test") as scope:
        holders = HolderDirectory(encoders, scope=scope, describe_timeout_s=2.0)
        Neighbours(holders, book, scope=scope, interval_s=interval_s).start()
        yield book
    await book.close()


def test_a_first_pull_finds_its_link_made() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        async with encoder_panel(network=network) as panel, met(network, panel.service) as book:
            await asyncio.sleep(CONNECT_S + 0.01)
            began_s = asyncio.get_running_loop().time()
            info = await panel.service.describe()
            await book.meet(info.instance_id, info.epoch, info.offers)
            assert asyncio.get_running_loop().time() == began_s
            await asyncio.sleep(10)
            assert len(book.made_s) == 1, "a link that stands is not made again"

    under_virtual_time(scenario)


def test_a_pull_that_comes_while_the_link_is_made_shares_the_attempt() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        async with encoder_panel(network=network) as panel, met(network, panel.service) as book:
            await asyncio.sleep(CONNECT_S / 2)
            info = await panel.service.describe()
            await book.meet(info.instance_id, info.epoch, info.offers)
            assert asyncio.get_running_loop().time() < CONNECT_S + 0.001
            assert len(book.made_s) == 1

    under_virtual_time(scenario)


def test_an_encoder_that_restarts_is_met_again_and_its_old_link_is_closed() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        async with (
            encoder_panel(network=network, instance_id="old") as old,
            encoder_panel(network=network, instance_id="new") as new,
        ):
            link = Link[Encoder]("encoder", old.service)
            async with met(network, LinkedEncoder(link)) as book:
                await asyncio.sleep(0.5)
                link.kill()
                await asyncio.sleep(5.0)
                link.restart(new.service)
                await asyncio.sleep(1.2)
                assert len(book.made_s) == 2

    under_virtual_time(scenario)


def test_failures_are_tried_again_at_growing_intervals_up_to_a_bound() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        async with encoder_panel(network=network) as panel, met(network, panel.service) as book:
            book.broken = True
            await asyncio.sleep(20.0)
            tries = book.made_s
            gaps = [round(later - earlier - CONNECT_S, 2) for earlier, later in pairwise(tries)]
            assert gaps[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]
            assert set(gaps[6:]) == {1.0}
            book.broken = False
            await asyncio.sleep(1.2)
            assert len(book) == 1

    under_virtual_time(scenario)


def test_a_link_that_failed_is_made_again_without_a_pull() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        async with encoder_panel(network=network) as panel, met(network, panel.service) as book:
            await asyncio.sleep(0.5)
            info = await panel.service.describe()
            with pytest.raises(TransferFailed):
                async with book.use(info.instance_id, info.epoch, info.offers):
                    raise TransferFailed("broken")
            assert len(book) == 0
            await asyncio.sleep(1.2)
            assert len(book) == 1

    under_virtual_time(scenario)


def test_an_encoder_that_hangs_or_is_gone_delays_nobody() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        async with encoder_panel(network=network, instance_id="good") as good:
            hung, gone = Link[Encoder]("hung", good.service), Link[Encoder]("gone", good.service)
            hung.stall()
            gone.kill()
            async with met(network, LinkedEncoder(hung), LinkedEncoder(gone), good.service) as book:
                await asyncio.sleep(CONNECT_S + 0.01)
                assert len(book) == 1

    under_virtual_time(scenario)
