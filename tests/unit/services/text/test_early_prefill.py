"""The prefix of a prompt, sent while items are being encoded: computed for the prefix cache, and no request in metrics."""

from dataclasses import replace

import pytest

from tests.unit.services.instances import (
    VOCABULARY,
    answer,
    encode_and_keep_only_tickets,
    instances,
    question,
    text_instance,
    under_virtual_time,
)
from tests.unit.services.text.test_service import sampled
from triptych.domain.generation import Finished, Ready
from triptych.errors import EngineFailure, TriptychError
from triptych.services.text.record import NoRecord
from triptych.testing.fakes import FakeTextEngine
from triptych.transport.memory import MemoryNetwork


class Requests(NoRecord):
    """What is recorded of requests."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def ready(self, ready: Ready) -> None:
        self.seen.append(f"{len(ready.pulls)} items")

    def finished(self, finished: Finished) -> None:
        self.seen.append(finished.reason.value)

    def failed(self, error: TriptychError) -> None:
        self.seen.append(error.code)


@pytest.mark.parametrize("finds", [True, False])
def test_an_instance_says_whether_its_engine_finds_what_it_has_computed(*, finds: bool) -> None:
    async def scenario() -> None:
        engine = FakeTextEngine(VOCABULARY, finds_prefixes=finds)
        async with text_instance(MemoryNetwork(), [], engine=engine) as made:
            assert (await made.service.describe()).prefills_early is finds

    under_virtual_time(scenario)


def test_items_of_a_beginning_are_pulled_once_and_their_leases_released() -> None:
    async def scenario() -> None:
        record = Requests()
        async with instances(record=record) as p:
            first = await encode_and_keep_only_tickets(p.encoder, "cat")
            asked = question("who", first)
            beginning = replace(sampled(asked.request, max_tokens=1), early=True)
            await answer(p.text.service, beginning)
            assert p.encoder.store.memory.leases == 0
            assert record.seen == []
            asked = question("who", await encode_and_keep_only_tickets(p.encoder, "cat", "dog"))
            got = await answer(p.text.service, asked.request)
            assert got.token_ids == asked.expected
            assert [report.cached for report in got.ready.pulls] == [True, False]
            assert record.seen == ["2 items", "stop"]

    under_virtual_time(scenario)


def test_a_beginning_that_fails_is_no_failed_request() -> None:
    async def scenario() -> None:
        engine = FakeTextEngine(VOCABULARY)
        engine.failures.append(EngineFailure("failed"))
        record = Requests()
        async with text_instance(MemoryNetwork(), [], engine=engine, record=record) as made:
            with pytest.raises(EngineFailure):
                await answer(made.service, replace(question("who", []).request, early=True))
            assert record.seen == []

    under_virtual_time(scenario)
