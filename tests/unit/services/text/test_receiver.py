"""Pulls of embeddings: from many encoders at once, fair, bounded in bytes, most urgent first."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from tests.unit.services.instances import (
    EncoderInstance,
    answer,
    encode_and_keep_only_tickets,
    encoder_instance,
    instances,
    question,
    text_instance,
    under_virtual_time,
)
from triptych.domain.embedding import Ticket
from triptych.domain.encoding import EncodeResult
from triptych.machine.text.pull_queue import PullLimits
from triptych.transport.memory import MemoryNetwork
from triptych.transport.options import TransferOptions

PULL_S = 0.1
ITEM_NBYTES = 1024 + 16
"""On the way; in the image cache it is rounded up."""


class RecordingPull:
    """A fake pull that takes PULL_S and records the bytes in flight and the order in which pulls start."""

    def __init__(self) -> None:
        self.order: list[bytes] = []
        self.nbytes = 0
        self.most_nbytes = 0
        self.most_pulls: dict[str, int] = {}
        self._pulls: dict[str, int] = {}

    async def __call__(self, reader: str, ticket: Ticket) -> None:
        self.order.append(ticket.key)
        self.nbytes += ticket.slot_nbytes
        self.most_nbytes = max(self.most_nbytes, self.nbytes)
        self._pulls[ticket.holder] = self._pulls.get(ticket.holder, 0) + 1
        self.most_pulls[ticket.holder] = max(self.most_pulls.get(ticket.holder, 0), self._pulls[ticket.holder])
        try:
            await asyncio.sleep(PULL_S)
        finally:
            self.nbytes -= ticket.slot_nbytes
            self._pulls[ticket.holder] -= 1


def now_s() -> float:
    return asyncio.get_running_loop().time()


Items = list[tuple[str, EncodeResult]]


async def items(instance: EncoderInstance, prefix: str, count: int) -> Items:
    return await encode_and_keep_only_tickets(instance, *(f"{prefix}-{n}" for n in range(count)))


def test_items_are_pulled_concurrently_from_all_their_encoders() -> None:
    async def scenario() -> None:
        road = RecordingPull()
        network = MemoryNetwork(road)
        async with AsyncExitStack() as stack:
            encoders = [
                await stack.enter_async_context(encoder_instance(network=network, instance_id=f"e{n}"))
                for n in range(4)
            ]
            text = await stack.enter_async_context(
                text_instance(
                    network, [instance.service for instance in encoders], pulls=PullLimits(max_pulls_per_encoder=1)
                )
            )
            embedded = [item for n, instance in enumerate(encoders) for item in await items(instance, f"from-{n}", 2)]
            asked = question("who", embedded)
            began_s = now_s()
            assert (await answer(text.service, asked.request)).token_ids == asked.expected
            assert now_s() - began_s < 2 * PULL_S + 0.1, "two rounds of four pulls at a time"
            assert road.most_pulls == {f"e{n}": 1 for n in range(4)}

    under_virtual_time(scenario)


def test_bytes_in_flight_are_bounded_with_half_of_the_bound_per_encoder() -> None:
    async def scenario() -> None:
        road = RecordingPull()
        bound = 6 * ITEM_NBYTES
        async with instances(
            before_pull=road, pulls=PullLimits(bound, max_pulls_per_encoder=64), encoder={"slots": 256}, slots=256
        ) as p:
            asked = [question(f"q{n}", await items(p.encoder, f"q{n}", 5)) for n in range(8)]
            got = await asyncio.gather(*(answer(p.text.service, case.request) for case in asked))
            assert [answered.token_ids for answered in got] == [case.expected for case in asked]
            assert road.most_nbytes == bound // 2

    under_virtual_time(scenario)


def test_an_urgent_request_pulls_before_waiting_ones() -> None:
    async def scenario() -> None:
        road = RecordingPull()
        async with instances(
            before_pull=road, pulls=PullLimits(max_pulls_per_encoder=1), encoder={"slots": 256}, slots=256
        ) as p:
            patient = [question(f"p{n}", await items(p.encoder, f"p{n}", 3), timeout_s=60.0) for n in range(5)]
            urgent = question("urgent", await items(p.encoder, "urgent", 3), timeout_s=5.0)
            async with asyncio.TaskGroup() as group:
                waiting = [group.create_task(answer(p.text.service, case.request)) for case in patient]
                await asyncio.sleep(1.5 * PULL_S)
                began_s = now_s()
                got = await answer(p.text.service, urgent.request)
                assert got.token_ids == urgent.expected
                assert now_s() - began_s < 0.5 * PULL_S + 3 * PULL_S + 0.1, "one pull was in flight, three were its own"
            assert [task.result().token_ids for task in waiting] == [case.expected for case in patient]

    under_virtual_time(scenario)


def test_a_lower_priority_number_pulls_before_waiting_ones() -> None:
    async def scenario() -> None:
        road = RecordingPull()
        async with instances(
            before_pull=road, pulls=PullLimits(max_pulls_per_encoder=1), encoder={"slots": 256}, slots=256
        ) as p:
            low = [question(f"p{n}", await items(p.encoder, f"p{n}", 3), timeout_s=5.0) for n in range(5)]
            high = question("high", await items(p.encoder, "high", 3), timeout_s=60.0)
            async with asyncio.TaskGroup() as group:
                for asked in low:
                    group.create_task(answer(p.text.service, replace(asked.request, priority=1)))
                await asyncio.sleep(1.5 * PULL_S)
                await answer(p.text.service, high.request)
            assert road.order[2:5] == [placement.ticket.key for placement in high.request.placements]

    under_virtual_time(scenario)


def test_an_urgent_request_gets_memory_before_waiting_ones() -> None:
    async def scenario() -> None:
        road = RecordingPull()
        async with instances(before_pull=road, slots=3, max_running=1, encoder={"slots": 64}) as p:
            patient = [question(f"p{n}", await items(p.encoder, f"p{n}", 3), timeout_s=60.0) for n in range(5)]
            urgent = question("urgent", await items(p.encoder, "urgent", 3), timeout_s=5.0)
            ended: list[str] = []

            async def ask(name: str, case: object) -> None:
                assert (await answer(p.text.service, case.request)).token_ids == case.expected  # type: ignore[attr-defined]
                ended.append(name)

            async with asyncio.TaskGroup() as group:
                for number, case in enumerate(patient):
                    group.create_task(ask(f"p{number}", case))
                await asyncio.sleep(0.5 * PULL_S)
                group.create_task(ask("urgent", urgent))
            assert ended == ["p0", "urgent", "p1", "p2", "p3", "p4"]

    under_virtual_time(scenario)


def test_a_huge_request_does_not_starve_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.policy.queueing.SHARE_NBYTES_PER_S", 10 * ITEM_NBYTES)

    async def scenario() -> None:
        road = RecordingPull()
        async with instances(
            before_pull=road, pulls=PullLimits(max_pulls_per_encoder=1), encoder={"slots": 256}, slots=256
        ) as p:
            huge = question("huge", await items(p.encoder, "huge", 100), timeout_s=60.0)
            small = [question(f"s{n}", await items(p.encoder, f"s{n}", 1), timeout_s=60.0) for n in range(8)]
            async with asyncio.TaskGroup() as group:
                long = group.create_task(answer(p.text.service, huge.request))
                for asked in small:
                    await asyncio.sleep(5 * PULL_S)
                    began_s = now_s()
                    assert (await answer(p.text.service, asked.request)).token_ids == asked.expected
                    assert now_s() - began_s < 12 * PULL_S, "not the ten seconds of the huge request"
                assert not long.done()
            assert long.result().token_ids == huge.expected

    under_virtual_time(scenario)


def test_pulls_of_a_cancelled_request_are_dropped_or_stopped_and_release_everything() -> None:
    async def scenario() -> None:
        road = RecordingPull()
        async with instances(before_pull=road, pulls=PullLimits(max_pulls_per_encoder=1)) as p:
            leaving = question("leaving", await items(p.encoder, "item", 10))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.5 * PULL_S):
                    await answer(p.text.service, leaving.request)
            assert p.text.receiver.cache.pulls.waiting == 0
            await asyncio.sleep(0.01)
            assert p.text.receiver.cache.pinned_bytes == 0
            await asyncio.sleep(PULL_S)
            assert (len(road.order), p.text.receiver.cache.cached) == (2, 1)
            assert p.encoder.store.memory.leases == 0

    under_virtual_time(scenario)


def test_a_pull_that_another_request_needs_continues() -> None:
    async def scenario() -> None:
        road = RecordingPull()
        async with instances(before_pull=road, pulls=PullLimits(max_pulls_per_encoder=1)) as p:
            first = question("first", await items(p.encoder, "item", 4))
            second = question("second", await items(p.encoder, "item", 4))

            async def leave() -> None:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5 * PULL_S):
                        await answer(p.text.service, first.request)

            _, got = await asyncio.gather(leave(), answer(p.text.service, second.request))
            assert got.token_ids == second.expected
            assert len(road.order) == 4

    under_virtual_time(scenario)


def test_a_hanging_encoder_does_not_block_pulls_from_others() -> None:
    async def scenario() -> None:
        async def hang(reader: str, ticket: Ticket) -> None:
            await asyncio.sleep(1000.0 if ticket.holder == "hung" else PULL_S)

        network = MemoryNetwork(hang)
        async with (
            encoder_instance(network=network, instance_id="good") as good,
            encoder_instance(network=network, instance_id="hung", settle=False) as hung,
            text_instance(
                network,
                [good.service, hung.service],
                pulls=PullLimits(4 * ITEM_NBYTES),
                transfers=TransferOptions(max_pull_s=5.0),
            ) as text,
        ):
            stuck = question("stuck", await items(hung, "stuck", 20), timeout_s=2.0)
            asked = question("who", await items(good, "fine", 2), timeout_s=60.0)
            async with asyncio.TaskGroup() as group:
                lost = group.create_task(fail(answer(text.service, stuck.request)))
                await asyncio.sleep(PULL_S)
                began_s = now_s()
                assert (await answer(text.service, asked.request)).token_ids == asked.expected
                assert now_s() - began_s < 2 * PULL_S
            assert "within 2 s" in lost.result()

    under_virtual_time(scenario)


async def fail(work: object) -> str:
    """The error of a request that must fail."""
    try:
        await work  # type: ignore[misc]
    except Exception as error:  # noqa: BLE001 - the message is the subject
        return str(error)
    raise AssertionError("it was answered")
