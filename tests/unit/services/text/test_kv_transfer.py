"""One text instance prefills and transfers, another one pulls the keys and values and goes on; or computes what it lacks."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.unit.services.instances import (
    VOCABULARY,
    Asked,
    EncoderInstance,
    TextInstance,
    address_of,
    encode_and_keep_only_tickets,
    encode_request,
    encoder_instance,
    new_lease,
    question,
    text_instance,
    under_virtual_time,
)
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.embedding import Ticket
from triptych.domain.encoding import LeaseRequest
from triptych.domain.generation import Finished, KvReport, KvTransferred, Ready, TextEvent, TextRequest, TokenChunk
from triptych.domain.kv_segment import KvPlacement
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import Role, Stage
from triptych.errors import DeadlineExceeded, InvalidRequest, LeaseLost, TransferFailed, TriptychError, Unavailable
from triptych.services.text.record import Record
from triptych.testing.fake_kv import POSITION_NBYTES, answer_tokens
from triptych.testing.fakes import FakeTextEngine
from triptych.transport.memory import BeforePull, MemoryNetwork

SEGMENT_TOKENS = 16
ROOM = 64 * SEGMENT_TOKENS * POSITION_NBYTES
LEASE_S = 20.0


class Counts(Record):
    """What became of segments, and how many answers were transferred."""

    def __init__(self) -> None:
        self.segments = Counter[str]()
        self.kv_transfers = 0

    def kv_segments(self, outcome: str, count: int = 1, nbytes: int = 0) -> None:
        del nbytes
        self.segments[outcome] += count

    def kv_transferred(self, segments: int, prefill_s: float, why: str) -> None:
        del segments, why
        self.kv_transfers += 1


@dataclass
class Apart:
    """An encoder, an instance that prefills, and one that decodes."""

    encoder: EncoderInstance
    prefill: TextInstance
    decode: TextInstance
    sent: Counts
    taken: Counts

    async def asked(self, name: str, *items: str, **told: Any) -> Asked:
        return question(name, await encode_and_keep_only_tickets(self.encoder, *items), **told)

    async def fresh_leases(self, request: TextRequest) -> TextRequest:
        """With new readers' leases on its embeddings, as the router gets them."""
        placements = []
        for placement in request.placements:
            lease = new_lease()
            wants = lease_request(placement.ticket, lease)
            placements.append(
                replace(placement, ticket=(await self.encoder.service.lease(wants)).at(placement.ticket.address))
            )
        return replace(request, placements=tuple(placements))


@asynccontextmanager
async def apart(
    *,
    before_pull: BeforePull | None = None,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    chunk_tokens: int = 24,
) -> AsyncIterator[Apart]:
    network = MemoryNetwork(before_pull)
    sent, taken = Counts(), Counts()
    first = {
        "engine": FakeTextEngine(vocabulary=VOCABULARY, chunk_tokens=chunk_tokens),
        "kv_bytes": ROOM,
        "role": Role.P,
        "record": sent,
        **(prefill or {}),
    }
    second = {"role": Role.D, "record": taken, **(decode or {})}
    async with (
        encoder_instance(network=network) as encoder,
        text_instance(network, [encoder.service], instance_id="prefill", **first) as prefilling,
        text_instance(network, [encoder.service, prefilling.service], instance_id="decode", **second) as decoding,
    ):
        yield Apart(encoder, prefilling, decoding, sent, taken)


def lease_request(ticket: Ticket, lease_id: bytes) -> LeaseRequest:
    return LeaseRequest(ticket.key, ticket.generation, lease_id, lease_s=LEASE_S, timeout_s=5.0)


async def events_of(instance: TextInstance, request: TextRequest) -> list[TextEvent]:
    async with aclosing(instance.service.generate(request)) as stream:
        return [event async for together in stream for event in together]


def prefill_call(request: TextRequest) -> TextRequest:
    return replace(request, transfers_kv=True, kv_lease_s=LEASE_S, sampling=replace(request.sampling, seed=1))


def tokens_of(events: Sequence[TextEvent]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for event in events:
        if isinstance(event, TokenChunk):
            found[event.choice] = found.get(event.choice, ()) + event.token_ids
    return found


def decode_call(request: TextRequest, events: Sequence[TextEvent], holder: str = "prefill") -> TextRequest:
    """The continuation that a router makes of a KV transfer."""
    last = events[-1]
    assert isinstance(last, KvTransferred)
    ended = {event.choice for event in events if isinstance(event, Finished)}
    return replace(
        request,
        sampling=replace(request.sampling, seed=1),
        continued=tuple(
            ContinuedChoice(choice, tokens)
            for choice, tokens in sorted(tokens_of(events).items())
            if choice not in ended
        ),
        kv_segments=tuple(
            replace(segment.placement, ticket=segment.placement.ticket.at(address_of(holder)))
            for segment in last.segments
        ),
    )


async def release_routers(instance: TextInstance, events: Sequence[TextEvent]) -> None:
    last = events[-1]
    assert isinstance(last, KvTransferred)
    await instance.service.release([segment.router_lease for segment in last.segments])


def kv_of(events: Sequence[TextEvent]) -> KvReport:
    ready = events[0]
    assert isinstance(ready, Ready)
    assert ready.kv is not None
    return ready.kv


async def through_both(p: Apart, asked: Asked) -> tuple[list[TextEvent], list[TextEvent]]:
    first = await events_of(p.prefill, prefill_call(asked.request))
    second = await events_of(p.decode, await p.fresh_leases(decode_call(asked.request, first)))
    await release_routers(p.prefill, first)
    return first, second


def is_whole(asked: Asked, first: Sequence[TextEvent], second: Sequence[TextEvent]) -> bool:
    return tokens_of(first)[0] + tokens_of(second)[0] == asked.expected


def test_an_answer_goes_on_elsewhere_from_the_keys_and_values_of_its_prompt() -> None:
    async def scenario() -> None:
        async with apart() as p:
            asked = await p.asked("what is this?", "cat", "dog")
            first, second = await through_both(p, asked)
            assert is_whole(asked, first, second)
            prompt = len(asked.request.token_ids)
            assert kv_of(second) == KvReport(
                pulled_tokens=prompt, nbytes=kv_of(second).nbytes, pull_s=kv_of(second).pull_s
            )
            assert kv_of(second).nbytes > prompt * POSITION_NBYTES
            segments = -(-prompt // SEGMENT_TOKENS)
            assert (p.sent.segments, p.taken.segments) == ({"sealed": segments}, {"pulled": segments})
            assert p.sent.kv_transfers == 1
            end = second[-1]
            assert isinstance(end, Finished)
            assert end.completion_tokens == len(asked.expected)

    under_virtual_time(scenario)


def test_its_role_and_kind_are_described_and_its_load_has_its_stages() -> None:
    async def scenario() -> None:
        async with apart() as p:
            first, second = await p.prefill.service.describe(), await p.decode.service.describe()
            assert (first.role, first.transfers_kv, second.role, second.transfers_kv) == (Role.P, True, Role.D, False)
            kind = p.prefill.engine.kv.kind
            assert kind is not None
            assert first.kv_kind == second.kv_kind == kind.digest
            assert set(p.prefill.service.load().stages) == {Stage.PREFILL}
            asked = await p.asked("who?")
            events = await events_of(p.prefill, prefill_call(asked.request))
            assert p.prefill.service.load().at(Stage.PREFILL).leased_bytes > 0
            await p.prefill.service.release(
                [segment.placement.ticket.lease_id for segment in events[-1].segments]  # type: ignore[union-attr]
            )
            await release_routers(p.prefill, events)
            assert p.prefill.service.load().at(Stage.PREFILL).leased_bytes == 0
            await events_of(p.decode, replace(asked.request, sampling=replace(asked.request.sampling, seed=1)))
            assert set(p.decode.service.load().stages) == {Stage.DECODE}
            assert p.decode.service.load().at(Stage.DECODE).free_tokens == p.decode.engine.kv_tokens

    under_virtual_time(scenario)


def test_it_serves_leases_and_refuses_items() -> None:
    async def scenario() -> None:
        async with apart() as p:
            with pytest.raises(InvalidRequest, match="does not encode, its role is P"):
                await p.prefill.service.encode(encode_request("cat"))
            with pytest.raises(LeaseLost):
                await p.decode.service.lease(LeaseRequest(bytes(32), 1, bytes(16), lease_s=1.0, timeout_s=1.0))
            asked = await p.asked("who?")
            first = await events_of(p.prefill, prefill_call(asked.request))
            last = first[-1]
            assert isinstance(last, KvTransferred)
            old = last.segments[0].placement.ticket
            await p.prefill.service.release([old.lease_id])
            again = await p.prefill.service.lease(lease_request(old, b"2" * 16))
            assert replace(again, lease_id=old.lease_id) == old
            await p.prefill.service.release([again.lease_id])
            await p.prefill.service.release([segment.placement.ticket.lease_id for segment in last.segments])
            await release_routers(p.prefill, first)

    under_virtual_time(scenario)


def test_equal_beginnings_are_sealed_once_and_pulled_once() -> None:
    async def scenario() -> None:
        async with apart() as p:
            beginning = "the same for all of them, over and over "
            first = await p.asked(beginning + "one")
            second = await p.asked(beginning + "another")
            assert is_whole(first, *await through_both(p, first))
            sealed = p.sent.segments["sealed"]
            assert is_whole(second, *await through_both(p, second))
            assert p.sent.segments == {"sealed": sealed + 1, "cached": 2}
            assert p.taken.segments == {"pulled": sealed + 1, "found": 2}

    under_virtual_time(scenario)


def test_choices_share_the_prompt() -> None:
    async def scenario() -> None:
        async with apart() as p:
            asked = await p.asked("what is this?", "cat")
            request = replace(asked.request, sampling=SamplingParams(max_tokens=64, n=3, seed=1))
            first = await events_of(p.prefill, prefill_call(request))
            second = await events_of(p.decode, await p.fresh_leases(decode_call(request, first)))
            await release_routers(p.prefill, first)
            before, after = tokens_of(first), tokens_of(second)
            assert all(len(tokens) == 1 for tokens in before.values())
            whole = await events_of(p.decode, await p.fresh_leases(request))
            assert {choice: before[choice] + after[choice] for choice in range(3)} == tokens_of(whole)
            assert kv_of(second).computed_tokens == 0

    under_virtual_time(scenario)


def test_what_ends_with_its_first_token_is_not_kv_transferred() -> None:
    async def scenario() -> None:
        async with apart() as p:
            asked = await p.asked("what is this?", "cat", max_tokens=1)
            events = await events_of(p.prefill, prefill_call(asked.request))
            assert [type(event) for event in events] == [Ready, TokenChunk, Finished]
            assert p.sent.kv_transfers == 0

    under_virtual_time(scenario)


@pytest.mark.parametrize("later_s", [0.0, 0.05])
def test_a_caller_that_leaves_while_the_kv_transfer_is_on_its_way_leaves_no_leases(later_s: float) -> None:
    """The transport has taken it, and drops it, as its call is cancelled: nobody learns of the leases."""

    async def scenario() -> None:
        async with apart() as p:
            asked = await p.asked("what is this?", "cat")
            stream = p.prefill.service.generate(prefill_call(asked.request))
            async for events in stream:
                if isinstance(events[-1], KvTransferred):
                    break
            assert p.prefill.service.load().at(Stage.PREFILL).leased_bytes > 0
            going_on = asyncio.Task(anext(stream))  # as transports do once they have taken it
            await asyncio.sleep(later_s)
            going_on.cancel()
            await asyncio.gather(going_on, return_exceptions=True)
            await stream.aclose()
            assert p.prefill.service.load().at(Stage.PREFILL).leased_bytes == 0

    under_virtual_time(scenario)


@pytest.mark.parametrize(("used_s", "ends_s"), [(0.02, 0.02), (1.0, 0.1)])
def test_a_call_that_transfers_kv_ends_when_one_of_its_leases_is_used(used_s: float, ends_s: float) -> None:
    async def scenario() -> None:
        async with apart() as p:
            loop = asyncio.get_running_loop()
            asked = await p.asked("what is this?", "cat")
            stream = p.prefill.service.generate(prefill_call(asked.request))
            last: TextEvent | None = None
            while not isinstance(last, KvTransferred):
                last = (await anext(stream))[-1]
            ticket = last.segments[-1].placement.ticket
            began_s = loop.time()
            loop.call_later(used_s, p.prefill.store.release, [ticket.lease_id])  # type: ignore[union-attr]
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert loop.time() - began_s == pytest.approx(ends_s)
            await p.prefill.service.release([segment.placement.ticket.lease_id for segment in last.segments])
            await p.prefill.service.release([segment.router_lease for segment in last.segments])

    under_virtual_time(scenario)


@pytest.mark.parametrize("kv_bytes", [0, SEGMENT_TOKENS * POSITION_NBYTES // 2])
def test_without_room_it_is_kv_transferred_without_segments_and_computed(kv_bytes: int) -> None:
    async def scenario() -> None:
        async with apart(prefill={"kv_bytes": kv_bytes}) as p:
            asked = await p.asked("what is this?", "cat")
            first, second = await through_both(p, asked)
            assert isinstance(first[-1], KvTransferred)
            assert first[-1].segments == ()
            assert first[-1].prefill_s > 0
            assert is_whole(asked, first, second)

    under_virtual_time(scenario)


def test_what_can_never_all_have_room_is_kv_transferred_in_part() -> None:
    async def scenario() -> None:
        async with apart(prefill={"kv_bytes": 2 * (SEGMENT_TOKENS * POSITION_NBYTES + 64)}) as p:
            asked = await p.asked("what is this?", "cat")
            first, second = await through_both(p, asked)
            assert is_whole(asked, first, second)
            report, prompt = kv_of(second), len(asked.request.token_ids)
            assert report.pulled_tokens == 2 * SEGMENT_TOKENS
            assert report.computed_tokens == prompt - report.pulled_tokens

    under_virtual_time(scenario)


def test_a_prompt_waits_for_room_before_it_is_computed_and_gets_it_in_turn() -> None:
    async def scenario() -> None:
        async with apart(prefill={"kv_bytes": 4 * (SEGMENT_TOKENS * POSITION_NBYTES + 64)}) as p:
            asked = [await p.asked("x" * 60 + str(number)) for number in range(3)]
            first = await events_of(p.prefill, prefill_call(asked[0].request))
            later = [
                asyncio.get_running_loop().create_task(events_of(p.prefill, prefill_call(late.request)))
                for late in asked[1:]
            ]
            await asyncio.sleep(1)
            assert not any(task.done() for task in later)
            assert p.prefill.engine.pending_tokens == 0
            assert p.prefill.service.load().at(Stage.PREFILL).pending == 2
            for asking, earlier in ((asked[0], None), (asked[1], later[0]), (asked[2], later[1])):
                if earlier is not None:
                    first = await earlier
                second = await events_of(p.decode, decode_call(asking.request, first))
                await release_routers(p.prefill, first)
                assert is_whole(asking, first, second)

    under_virtual_time(scenario)


def test_one_that_waits_for_room_ends_at_its_deadline() -> None:
    async def scenario() -> None:
        async with apart(prefill={"kv_bytes": 4 * (SEGMENT_TOKENS * POSITION_NBYTES + 64)}) as p:
            first = await events_of(p.prefill, prefill_call((await p.asked("x" * 60)).request))
            with pytest.raises(DeadlineExceeded):
                await events_of(p.prefill, prefill_call((await p.asked("y" * 60, timeout_s=2.0)).request))
            await p.prefill.service.release(
                [segment.placement.ticket.lease_id for segment in first[-1].segments]  # type: ignore[union-attr]
            )
            await release_routers(p.prefill, first)

    under_virtual_time(scenario)


@pytest.mark.parametrize("damaged", [0, 2, 3])
def test_what_does_not_arrive_whole_is_computed(damaged: int) -> None:
    async def scenario() -> None:
        async with apart(decode={"damage": lambda ticket: ticket.key in bad}) as p:
            asked = await p.asked("y" * 60)
            first = await events_of(p.prefill, prefill_call(asked.request))
            call = decode_call(asked.request, first)
            bad.add(call.kv_segments[damaged].ticket.key)
            second = await events_of(p.decode, call)
            await release_routers(p.prefill, first)
            assert is_whole(asked, first, second)
            assert kv_of(second).pulled_tokens == damaged * SEGMENT_TOKENS
            assert kv_of(second).computed_tokens == 60 - damaged * SEGMENT_TOKENS
            assert p.taken.segments["lost"] == 1

    bad = set[bytes]()
    under_virtual_time(scenario)


def test_a_lost_lease_costs_computation_only() -> None:
    async def scenario() -> None:
        async with apart() as p:
            asked = await p.asked("z" * 60)
            first = await events_of(p.prefill, prefill_call(asked.request))
            call = decode_call(asked.request, first)
            await p.prefill.service.release([kv_segment.ticket.lease_id for kv_segment in call.kv_segments[1:2]])
            second = await events_of(p.decode, call)
            assert is_whole(asked, first, second)
            assert kv_of(second).pulled_tokens == SEGMENT_TOKENS
            await release_routers(p.prefill, first)

    under_virtual_time(scenario)


def test_segments_of_another_kind_are_ignored_and_given_back() -> None:
    async def scenario() -> None:
        async with apart() as p:
            asked = await p.asked("k" * 60)
            first = await events_of(p.prefill, prefill_call(asked.request))
            call = decode_call(asked.request, first)
            wrong = replace(call.kv_segments[1], ticket=replace(call.kv_segments[1].ticket, tensors=()))
            call = replace(call, kv_segments=(call.kv_segments[0], wrong, *call.kv_segments[2:]))
            second = await events_of(p.decode, call)
            await release_routers(p.prefill, first)
            assert is_whole(asked, first, second)
            assert p.taken.segments == {"pulled": 1, "computed": 3}

    under_virtual_time(scenario)


def test_an_engine_that_takes_none_computes() -> None:
    engine = FakeTextEngine(vocabulary=VOCABULARY)
    engine.kv = None  # type: ignore[assignment]

    async def scenario() -> None:
        async with apart(decode={"engine": engine, "role": Role.PD}) as p:
            asked = await p.asked("what is this?", "cat")
            first, second = await through_both(p, asked)
            assert is_whole(asked, first, second)
            assert (await p.decode.service.describe()).kv_kind == ""
            with pytest.raises(InvalidRequest, match="does not transfer"):
                await events_of(p.decode, prefill_call(asked.request))

    under_virtual_time(scenario)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda kv: kv[1:],
        lambda kv: (kv[0], *kv[2:]),
        lambda kv: (kv[1], kv[0]),
        lambda kv: (kv[0], kv[0]),
        lambda kv: (replace(kv[0], ticket=replace(kv[0].ticket, tokens=4096)),),
        lambda kv: (replace(kv[0], ticket=replace(kv[0].ticket, tokens=0)),),
    ],
)
def test_segments_that_do_not_cover_a_beginning_are_refused(
    wrong: Callable[[tuple[KvPlacement, ...]], tuple[KvPlacement, ...]],
) -> None:
    async def scenario() -> None:
        async with apart() as p:
            asked = await p.asked("k" * 60)
            first = await events_of(p.prefill, prefill_call(asked.request))
            call = decode_call(asked.request, first)
            with pytest.raises(InvalidRequest, match="keys and values"):
                await events_of(p.decode, replace(call, kv_segments=wrong(call.kv_segments)))
            await p.prefill.service.release([kv_segment.ticket.lease_id for kv_segment in call.kv_segments])
            await release_routers(p.prefill, first)

    under_virtual_time(scenario)


def test_one_that_is_preempted_while_it_arrives_is_computed() -> None:
    async def scenario() -> None:
        async def preempts(reader: str, ticket: Ticket) -> None:
            del ticket
            if reader == "decode":
                await asyncio.sleep(0.1)
                for name in {name for name, _ in p.decode.engine.kv.awaiting}:
                    p.decode.engine.preempt(name)

        async with apart(before_pull=preempts) as p:
            asked = await p.asked("k" * 60)
            first = await events_of(p.prefill, prefill_call(asked.request))
            second = await events_of(p.decode, decode_call(asked.request, first))
            await release_routers(p.prefill, first)
            assert is_whole(asked, first, second)
            assert kv_of(second).pulled_tokens == 0

    under_virtual_time(scenario)


@pytest.mark.parametrize(("copy", "segments"), [(1, 4), (2, 4), (4, 3)])
def test_one_that_is_preempted_before_a_copy_is_computed_again_unless_it_has_paused(copy: int, segments: int) -> None:
    async def scenario() -> None:
        async with apart() as p:
            engine, copies = p.prefill.engine, 0
            pack = engine.kv.pack

            def preempts(request_id: str, *told: Any) -> bool:
                nonlocal copies
                copies += 1
                if copies == copy:
                    engine.preempt(request_id)
                return pack(request_id, *told)

            engine.kv.pack = preempts  # type: ignore[assignment, method-assign]
            asked = await p.asked("k" * 60)
            first, second = await through_both(p, asked)
            assert is_whole(asked, first, second)
            assert p.taken.segments["pulled"] == segments

    under_virtual_time(scenario)


def test_it_takes_memory_for_all_positions_before_it_pulls_and_frees_it_when_the_caller_leaves() -> None:
    async def scenario() -> None:
        async def slowly(reader: str, ticket: Ticket) -> None:
            del ticket
            await asyncio.sleep(3600 if reader == "decode" else 0)

        async with apart(before_pull=slowly, decode={"sweep_interval_s": 0.5}) as p:
            asked = await p.asked("k" * 60)
            first = await events_of(p.prefill, prefill_call(asked.request))
            call = decode_call(asked.request, first)
            going = asyncio.get_running_loop().create_task(events_of(p.decode, call))
            await asyncio.sleep(1)
            assert {choice for _, choice in p.decode.engine.kv.awaiting} == {0}
            going.cancel()
            await asyncio.wait((going,))
            await release_routers(p.prefill, first)

    under_virtual_time(scenario)


@asynccontextmanager
async def draining(p: Apart, request: TextRequest, events: list[TextEvent]) -> AsyncIterator[None]:
    """An answer, each of whose choices has three tokens, while its instance drains; its events are in ``events`` at the end."""
    tokens = asyncio.Event()

    async def read() -> None:
        async with aclosing(p.prefill.service.generate(request)) as stream:
            async for together in stream:
                events.extend(together)
                if sum(isinstance(event, TokenChunk) for event in events) >= 3 * request.sampling.n:
                    tokens.set()

    async with asyncio.TaskGroup() as group:
        reading = group.create_task(read())
        await tokens.wait()
        drained = group.create_task(p.prefill.service.drain())
        yield
        await reading
        last = events[-1]
        if isinstance(last, KvTransferred):
            assert not drained.done()
            await p.prefill.service.release([segment.placement.ticket.lease_id for segment in last.segments])
            await release_routers(p.prefill, events)


@pytest.mark.parametrize("choices", [1, 2])
def test_a_draining_instance_transfers_kv_the_answers_that_it_has_begun(choices: int) -> None:
    async def scenario() -> None:
        async with apart(prefill={"role": Role.PD, "transfer_kv_on_drain": True}) as p:
            asked = await p.asked("what is this?", "cat", "dog")
            request = replace(prefill_call(asked.request), transfers_kv=False)
            request = replace(request, sampling=replace(request.sampling, n=choices))
            first: list[TextEvent] = []
            async with draining(p, request, first):
                pass
            last = first[-1]
            assert isinstance(last, KvTransferred)
            assert {segment.placement.choices for segment in last.segments} >= (
                {()} if choices == 1 else {(), (0,), (1,)}
            )
            items = await encode_and_keep_only_tickets(p.encoder, "cat", "dog")
            again = replace(request, placements=question("what is this?", items).request.placements)
            second = await events_of(p.decode, decode_call(again, first))
            before, after = tokens_of(first), tokens_of(second)
            whole = await events_of(p.decode, await p.fresh_leases(again))
            assert all(len(before[choice]) > 1 for choice in range(choices))
            assert {choice: before[choice] + after[choice] for choice in range(choices)} == tokens_of(whole)

    under_virtual_time(scenario)


@pytest.mark.parametrize("wait_s", [3.0, 0.0])
def test_a_drained_instance_waits_a_bounded_time_for_leases_on_what_it_kv_transferred(
    wait_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a router that has died, whose leases last much longer."""

    async def scenario() -> None:
        told = {"role": Role.PD, "transfer_kv_on_drain": True, "kv_transfer_wait_s": wait_s}
        async with apart(prefill=told) as p:
            first = await events_of(p.prefill, prefill_call((await p.asked("what is this?")).request))
            last = first[-1]
            assert isinstance(last, KvTransferred)
            ticket, loop = last.segments[0].placement.ticket, asyncio.get_running_loop()
            began_s = loop.time()
            async with asyncio.TaskGroup() as group:
                group.create_task(p.prefill.service.drain())
                await asyncio.sleep(0)
                own = await p.prefill.service.lease(lease_request(ticket, b"another reader's"))
                with pytest.raises(LeaseLost, match="about to end"):
                    await p.prefill.service.lease(replace(lease_request(ticket, b"of a prefix"), generation=None))
            assert wait_s <= loop.time() - began_s < wait_s + 0.5 < LEASE_S
            await p.prefill.service.release(
                [own.lease_id, *(segment.placement.ticket.lease_id for segment in last.segments)]
            )
            await release_routers(p.prefill, first)

    under_virtual_time(scenario)
    assert "leases on what was transferred" in caplog.text


def test_a_draining_instance_refuses_what_it_has_not_begun() -> None:
    async def scenario() -> None:
        slow = FakeTextEngine(vocabulary=VOCABULARY, max_running=1)
        async with apart(prefill={"role": Role.PD, "engine": slow, "transfer_kv_on_drain": True}) as p:
            asked = await p.asked("what is this?")
            first: list[TextEvent] = []
            late = prefill_call((await p.asked("and that?")).request)

            async def comes_later() -> None:
                await asyncio.sleep(0.002)
                await events_of(p.prefill, late)

            waiting = asyncio.get_running_loop().create_task(comes_later())
            async with draining(p, replace(prefill_call(asked.request), transfers_kv=False), first):
                await asyncio.wait((waiting,))
            assert isinstance(first[-1], KvTransferred)
            assert isinstance(waiting.exception(), Unavailable)

    under_virtual_time(scenario)


@pytest.mark.parametrize(
    ("told", "lease_s"),
    [
        ({}, LEASE_S),
        ({"transfer_kv_on_drain": True, "kv_bytes": SEGMENT_TOKENS * POSITION_NBYTES}, LEASE_S),
        ({"transfer_kv_on_drain": True}, 0.0),
    ],
)
def test_what_cannot_be_kv_transferred_ends_where_it_is(told: dict[str, Any], lease_s: float) -> None:
    async def scenario() -> None:
        async with apart(prefill={"role": Role.PD, **told}) as p:
            asked = await p.asked("what is this?", "cat")
            first: list[TextEvent] = []
            async with draining(p, replace(asked.request, kv_lease_s=lease_s), first):
                pass
            assert isinstance(first[-1], Finished)
            assert tokens_of(first)[0] == asked.expected

    under_virtual_time(scenario)


@pytest.mark.slow
def test_after_many_kv_transfers_with_aborts_at_random_moments_nothing_is_left() -> None:
    async def scenario() -> None:
        draw = random.Random(7)

        async def slowly(reader: str, ticket: Ticket) -> None:
            del reader, ticket
            await asyncio.sleep(draw.choice((0.0, 0.001, 0.02)))
            if draw.random() < 0.03:
                raise TransferFailed("on purpose")

        async def answered(number: int) -> bool:
            asked = await p.asked("the same beginning " * draw.randrange(4) + str(number % 50), timeout_s=30.0)
            choices = draw.choice((1, 1, 2))
            request = replace(asked.request, sampling=SamplingParams(max_tokens=64, n=choices, seed=1))
            patience_s = draw.choice((60.0, draw.random() * 0.1))
            try:
                async with asyncio.timeout(patience_s):
                    first = await events_of(p.prefill, prefill_call(request))
            except (TimeoutError, TriptychError):
                return False
            if not isinstance(first[-1], KvTransferred):
                return True
            call = decode_call(request, first)
            try:
                async with asyncio.timeout(draw.choice((60.0, draw.random() * 0.1))):
                    second = await events_of(p.decode, call)
            except (TimeoutError, TriptychError):
                return False
            finally:
                await release_routers(p.prefill, first)
            for choice in range(choices):
                expected = answer_tokens(request.token_ids, (), vocabulary=VOCABULARY, choice=choice)
                assert tokens_of(first)[choice] + tokens_of(second).get(choice, ()) == expected
            return True

        async with apart(before_pull=slowly, prefill={"max_running": 8}, decode={"max_running": 8}) as p:
            whole = 0
            for batch in range(50):
                done = await asyncio.gather(*(answered(20 * batch + number) for number in range(20)))
                whole += sum(done)
            assert 300 < whole < 900
            assert p.sent.segments.keys() == {"sealed", "cached"}
            assert p.taken.segments.keys() >= {"pulled", "found", "lost"}
            await asyncio.sleep(60)
            for instance in (p.prefill, p.decode):
                assert not instance.engine.has_work
                assert not instance.service._jobs
                assert not instance.receiver._wanted
            assert p.prefill.store is not None
            assert p.prefill.store.memory.leased_bytes == 0

    under_virtual_time(scenario)
