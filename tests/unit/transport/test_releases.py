import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.services.instances import address_of, encode_and_keep_only_tickets, encoder_instance, under_virtual_time
from triptych.domain.embedding import LeaseId
from triptych.ports import Encoder, Peer
from triptych.runtime.tasks import TaskScope
from triptych.transport import releases
from triptych.transport.peer_pool import PeerPool
from triptych.transport.releases import Releases
from triptych.virtual.links import Link, LinkedInstance


class ReleaseRecorder(LinkedInstance):
    """Records released leases."""

    def __init__(self, link: Link[Encoder]) -> None:
        super().__init__(link)
        self.calls: list[int] = []

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        self.calls.append(len(lease_ids))
        await super().release(lease_ids)


def pool(**encoders: LinkedInstance) -> PeerPool:
    """A pool of encoders by instance id, without data-plane links, which releases do not need."""
    stubs = {address_of(instance_id): encoder for instance_id, encoder in encoders.items()}

    async def no_link(_: object) -> Peer:
        raise AssertionError("a lease is given back without a link")

    return PeerPool(stubs.__getitem__, no_link, limit=8, clock=asyncio.get_running_loop().time)


def test_leases_released_during_a_call_are_batched_in_the_next() -> None:
    async def scenario() -> None:
        async with encoder_instance() as instance, TaskScope("test") as scope:
            encoder = ReleaseRecorder(Link[Encoder]("encoder", instance.service, latency_s=lambda: 0.1))
            back = Releases(pool(encoder=encoder), scope=scope, timeout_s=1.0)
            items = await encode_and_keep_only_tickets(instance, *(f"item-{n}" for n in range(20)))
            for number, (_, result) in enumerate(items):
                back.add(result.ticket)
                if number == 4:
                    await asyncio.sleep(0.25)
            await back.released()
            assert encoder.calls == [5, 15]
            assert instance.store.memory.leases == 0
            await asyncio.sleep(0.1)
            assert len(scope) == 0

    under_virtual_time(scenario)


def test_where_the_process_ends_leases_are_left_to_expire() -> None:
    async def scenario() -> None:
        async with encoder_instance() as instance:
            scope = TaskScope("test")
            back = Releases(
                pool(encoder=ReleaseRecorder(Link[Encoder]("encoder", instance.service))), scope=scope, timeout_s=1.0
            )
            [[_, result]] = await encode_and_keep_only_tickets(instance, "cat")
            await scope.close()
            back.add(result.ticket)
            await back.released()
            await asyncio.sleep(result.ticket.lease_s + 5.0)
            assert instance.store.memory.leases == 0

    under_virtual_time(scenario)


@pytest.mark.parametrize("gone", [True, False])
def test_an_unresponsive_holder_delays_no_other_and_its_leases_expire(*, gone: bool) -> None:
    async def scenario() -> None:
        async with (
            encoder_instance(instance_id="good") as good,
            encoder_instance(instance_id="bad", settle=False) as bad,
            TaskScope("test") as scope,
        ):
            link = Link[Encoder]("bad", bad.service)
            peers = pool(bad=LinkedInstance(link), good=LinkedInstance(Link("good", good.service)))
            back = Releases(peers, scope=scope, timeout_s=1.0)
            [[_, lost]] = await encode_and_keep_only_tickets(bad, "cat")
            [[_, kept]] = await encode_and_keep_only_tickets(good, "dog")
            if gone:
                link.kill()
            else:
                link.stall()
            back.add(lost.ticket)
            back.add(kept.ticket)
            await asyncio.sleep(0.2)
            assert good.store.memory.leases == 0
            async with asyncio.timeout(3.0):
                await back.released()
            await asyncio.sleep(0.1)
            assert len(scope) == 0
            await asyncio.sleep(lost.ticket.lease_s + 5.0)
            assert bad.store.memory.leases == 0

    under_virtual_time(scenario)


def test_pending_releases_of_a_holder_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "_MAX_PENDING", 10)

    async def scenario() -> None:
        async with encoder_instance() as instance, TaskScope("test") as scope:
            encoder = ReleaseRecorder(Link[Encoder]("encoder", instance.service))
            back = Releases(pool(encoder=encoder), scope=scope, timeout_s=1.0)
            [[_, result]] = await encode_and_keep_only_tickets(instance, "cat")
            for number in range(100):
                back.add(replace(result.ticket, lease_id=number.to_bytes(16, "big")))
            await asyncio.sleep(1.0)
            assert encoder.calls == [10]
            await instance.service.release([result.ticket.lease_id])

    under_virtual_time(scenario)
