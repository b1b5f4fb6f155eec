"""What the services of an instance do when one of its stages closes, and what is refused then."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from tests.unit.services.instances import (
    EncoderInstance,
    TextInstance,
    address_of,
    encode_request,
    hybrid_instances,
    question,
    under_virtual_time,
)
from tests.unit.services.text.test_kv_transfer import LEASE_S, events_of, prefill_call, release_routers
from triptych.domain.generation import Finished, KvTransferred, Ready, TextEvent, TextRequest
from triptych.domain.stage import Role, Stage
from triptych.errors import Conflict, StageClosed
from triptych.machine.encoder.batch_queue import BatchLimits
from triptych.machine.stage_states import StageStates
from triptych.runtime.metrics import Metrics
from triptych.services.text.gauges import watch_stages
from triptych.services.text.record import MeteredSwitches, Record
from triptych.services.text.switching import Switching
from triptych.testing.fakes import FakeEncoderEngine, FakeTextEngine


@dataclass
class Switchable:
    text: TextInstance
    encoder: EncoderInstance
    states: StageStates
    switching: Switching
    metrics: Metrics
    left: list[str]
    """Why answers were transferred."""
    version: int = 0

    def to(self, role: Role) -> None:
        self.version += 1
        self.switching.set_stages(role.stages, self.version, "a test")

    @property
    def reported(self) -> frozenset[Stage]:
        """The stages of the load reports of both services."""
        return frozenset({*self.text.service.load().stages, *self.encoder.service.load().stages})

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"triptych_{name}", labels)


class Left(Record):
    """Keeps why answers were transferred."""

    def __init__(self) -> None:
        self.why = list[str]()

    def kv_transferred(self, segments: int, prefill_s: float, why: str) -> None:
        del segments, prefill_s
        self.why.append(why)


@asynccontextmanager
async def switchable(role: Role, engine: FakeTextEngine | None = None) -> AsyncIterator[Switchable]:
    metrics, left = Metrics(), Left()
    async with hybrid_instances(
        role=role,
        switchable=Role.EPD,
        at_once=True,
        engine=engine,
        vision=FakeEncoderEngine(tokens_of=lambda info: 2 * info.width, batch_s=1.0),
        encoder={"batches": BatchLimits(max_batch_items=1)},
        record=left,
        switch_record=MeteredSwitches(metrics),
    ) as made:
        switching = made.whole.switching
        assert switching is not None
        watch_stages(metrics, switching.states, asyncio.get_running_loop().time)
        yield Switchable(made.text, made.encoder, switching.states, switching, metrics, left.why)


def asked(name: str, *, transfers_kv: bool = False) -> TextRequest:
    return replace(prefill_call(question(name, []).request), transfers_kv=transfers_kv)


async def give_back(s: Switchable, events: Sequence[TextEvent]) -> None:
    last = events[-1]
    assert isinstance(last, KvTransferred)
    await s.text.service.release([segment.placement.ticket.lease_id for segment in last.segments])
    await release_routers(s.text, events)


@pytest.mark.parametrize("to", [Role.P, Role.E])
def test_answers_are_kv_transferred_when_decode_closes(to: Role) -> None:
    async def scenario() -> None:
        async with switchable(Role.PD) as s:
            events: list[TextEvent] = []
            async with aclosing(s.text.service.generate(asked("what is this?"))) as stream:
                async for together in stream:
                    events.extend(together)
                    if len(events) == 3:
                        s.to(to)
                        assert s.reported == to.stages, "at once"
                        assert [s.metric("stage_open", stage=stage.value) for stage in Stage] == [
                            stage in to.stages for stage in Stage
                        ]
                        await asyncio.sleep(0.001)
                        assert s.metric("switch_pending_seconds") == pytest.approx(0.001)
            await give_back(s, events)
            await asyncio.sleep(1)
            assert not s.states.closing
            assert s.left == ["switch"]
            assert s.metric("switch_pending_seconds") == 0
            assert s.metric("switches_total", outcome="done") == s.metric("switch_seconds_count") == 1
            assert 0.001 <= (s.metric("switch_seconds_sum") or 0) < 1

    under_virtual_time(scenario)


def test_a_prompt_that_has_begun_is_computed_when_prefill_closes_and_one_that_waits_is_refused() -> None:
    async def scenario() -> None:
        async with switchable(Role.PD, FakeTextEngine(vocabulary=range(97, 123), max_running=1, chunk_tokens=4)) as s:
            loop = asyncio.get_running_loop()
            begun = loop.create_task(events_of(s.text, asked("what is this?")))
            await asyncio.sleep(0.012)
            waits = loop.create_task(events_of(s.text, asked("and that?")))
            await asyncio.sleep(0.001)
            s.to(Role.D)
            await asyncio.wait((waits, begun))
            assert isinstance(waits.exception(), StageClosed)
            assert isinstance(begun.result()[-1], Finished), "decode is open"
            assert s.states.open == Role.D.stages

    under_virtual_time(scenario)


def test_a_prompt_whose_answer_goes_elsewhere_is_taken_without_decode() -> None:
    async def scenario() -> None:
        async with switchable(Role.PD) as s:
            s.to(Role.P)
            with pytest.raises(StageClosed):
                await events_of(s.text, asked("what is this?"))
            await give_back(s, await events_of(s.text, asked("what is this?", transfers_kv=True)))
            assert s.left == ["asked"]

    under_virtual_time(scenario)


def test_a_batch_of_items_ends_when_encode_closes_and_what_waits_is_refused() -> None:
    async def scenario() -> None:
        async with switchable(Role.EPD) as s:
            loop, encode = asyncio.get_running_loop(), s.encoder.service.encode
            running = loop.create_task(encode(encode_request("cat")))
            await asyncio.sleep(0.1)
            waits = loop.create_task(encode(encode_request("dog")))
            await asyncio.sleep(0.1)
            s.to(Role.PD)
            with pytest.raises(StageClosed):
                await encode(encode_request("bird"))
            s.to(Role.D)
            s.to(Role.PD)
            await asyncio.wait((running, waits))
            assert isinstance(waits.exception(), StageClosed)
            result = running.result()
            assert not s.states.closing
            assert s.metric("switches_total", outcome="overtaken") == 2, "the batch was not over"
            assert s.metric("switches_total", outcome="done") == 1
            there = replace(result, ticket=result.ticket.at(address_of("encoder")))
            asked_of = question("what is it?", [("cat", there)])
            events = await events_of(s.text, replace(asked_of.request, kv_lease_s=LEASE_S))
            assert isinstance(events[-1], Finished), "the ticket is valid"
            await s.encoder.service.release([result.router_lease])
            s.to(Role.E)
            again = await encode(encode_request("cat"))
            assert again.cached
            await s.encoder.service.release([again.ticket.lease_id, again.router_lease])

    under_virtual_time(scenario)


def test_old_orders_are_refused() -> None:
    async def scenario() -> None:
        async with switchable(Role.PD) as s:
            s.switching.set_stages(Role.D.stages, 4, "a test")
            for version in (3, 4):
                with pytest.raises(Conflict):
                    s.switching.set_stages(Role.E.stages, version, "a test")
            assert (s.reported, s.text.service.load().stages_version) == (Role.D.stages, 4)
            assert s.metric("switches_total", outcome="refused") == 2
            info = await s.text.service.describe()
            assert (info.role, info.switchable) == (Role.PD, Role.EPD), "what it began with, and can be"

    under_virtual_time(scenario)


def test_an_opened_stage_says_what_it_has_served_since() -> None:
    async def scenario() -> None:
        async with switchable(Role.E) as s:

            def served() -> dict[Stage, int | None]:
                loads = (s.text.service.load(), s.encoder.service.load())
                return {stage: load.served for report in loads for stage, load in report.stages.items()}

            assert served() == {Stage.ENCODE: 0}
            for _ in range(2):
                result = await s.encoder.service.encode(encode_request("cat"))
                await s.encoder.service.release([result.ticket.lease_id, result.router_lease])
            assert served() == {Stage.ENCODE: 1}, "the second was there"
            s.to(Role.PD)
            assert served() == {Stage.PREFILL: 0, Stage.DECODE: 0}
            async with aclosing(s.text.service.generate(asked("what is this?"))) as stream:
                assert [type(event) for event in await anext(stream)] == [Ready]
                assert served() == {Stage.PREFILL: 0, Stage.DECODE: 0}
                await anext(stream)
                assert served() == {Stage.PREFILL: 1, Stage.DECODE: 0}, "the first token is the prompt's"
                await anext(stream)
                assert served() == {Stage.PREFILL: 1, Stage.DECODE: 1}
            s.to(Role.P)
            assert served() == {Stage.PREFILL: 1}, "it was open all the time"
            await give_back(s, await events_of(s.text, asked("what is this?", transfers_kv=True)))
            assert served() == {Stage.PREFILL: 2}
            s.to(Role.EPD)
            assert served() == {Stage.ENCODE: 0, Stage.PREFILL: 2, Stage.DECODE: 0}

    under_virtual_time(scenario)
