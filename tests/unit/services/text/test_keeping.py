"""An instance that keeps keys and values for prompts elsewhere: routers hear of them, and another one begins with them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.services.instances import (
    TextInstance,
    address_of,
    new_lease,
    question,
    text_instance,
    under_virtual_time,
)
from triptych.domain.embedding_hints import hint_of_segment
from triptych.domain.encoding import LeaseRequest
from triptych.domain.generation import Ready, TextEvent, TextRequest, TokenChunk
from triptych.domain.kv_segment import KvPlacement
from triptych.machine.router.prompt_identity import PromptIdentity, PromptTokens
from triptych.services.text.record import Record
from triptych.testing.fake_kv import POSITION_NBYTES
from triptych.transport.memory import MemoryNetwork

SIZE = 16
ROOM = 64 * SIZE * POSITION_NBYTES
PROMPT = "a long text that many prompts begin with, of sixty-four letters."
"""A token for each letter."""


class Counts(Record):
    def __init__(self) -> None:
        self.kept = 0
        self.prefixes = Counter[str]()

    def kv_segments(self, outcome: str, count: int = 1, nbytes: int = 0) -> None:
        del nbytes
        self.kept += count if outcome == "kept" else 0

    def prefix_segments(self, outcome: str, count: int = 1) -> None:
        self.prefixes[outcome] += count


@asynccontextmanager
async def keeper(network: MemoryNetwork, record: Counts, **told: Any) -> AsyncIterator[TextInstance]:
    settings = {"kv_bytes": ROOM, "kv_prefixes": True, "record": record, **told}
    async with text_instance(network, (), instance_id="keeper", **settings) as instance:
        yield instance


async def events_of(instance: TextInstance, request: TextRequest) -> list[TextEvent]:
    async with aclosing(instance.service.generate(request)) as stream:
        return [event async for together in stream for event in together]


def tokens_of(events: list[TextEvent]) -> tuple[int, ...]:
    return tuple(token for event in events if isinstance(event, TokenChunk) for token in event.token_ids)


async def held(instance: TextInstance) -> set[bytes]:
    """What it tells a router that begins to listen."""
    async with aclosing(instance.service.watch_load()) as loads:
        async for load in loads:
            return set() if load.hints is None else set(load.hints.held)
    raise AssertionError("no report")


def keys_of(instance: TextInstance, token_ids: tuple[int, ...]) -> tuple[bytes, ...]:
    kind = instance.engine.kv.kind
    assert kind is not None
    return PromptIdentity(PromptTokens(token_ids, b""), ()).segment_keys(kind.digest, SIZE)


async def settled() -> None:
    await asyncio.sleep(0.1)


def test_prompt_and_answer_are_kept_and_told_by_the_names_that_routers_compute() -> None:
    async def scenario() -> None:
        record = Counts()
        async with keeper(MemoryNetwork(), record) as instance:
            asked = question(PROMPT, ())
            answer = tokens_of(await events_of(instance, asked.request))
            assert answer == asked.expected
            await settled()
            keys = keys_of(instance, (*asked.request.token_ids, *answer))
            assert len(keys) >= 4
            assert await held(instance) == set(map(hint_of_segment, keys[: record.kept]))
            assert record.kept >= 4
            await events_of(instance, replace(asked.request, request_id="again"))
            await settled()
            assert record.kept == len(await held(instance)), "what it has is not copied again"

    under_virtual_time(scenario)


@pytest.mark.parametrize("max_tokens", [2, 3])
def test_a_prompt_is_kept_also_if_the_answer_is_short(max_tokens: int) -> None:
    async def scenario() -> None:
        record = Counts()
        async with keeper(MemoryNetwork(), record) as instance:
            await events_of(instance, question(PROMPT, (), max_tokens=max_tokens).request)
            await settled()
            assert record.kept == (4 if max_tokens > 2 else record.kept)

    under_virtual_time(scenario)


@pytest.mark.parametrize("told", [{"kv_prefixes": False}, {"kv_bytes": 0}], ids=str)
def test_nothing_is_kept_without_the_setting_or_an_arena(told: dict[str, Any]) -> None:
    async def scenario() -> None:
        record = Counts()
        async with keeper(MemoryNetwork(), record, **told) as instance:
            asked = question(PROMPT, ())
            assert tokens_of(await events_of(instance, asked.request)) == asked.expected
            assert (record.kept, await held(instance)) == (0, set())

    under_virtual_time(scenario)


def test_what_has_no_room_is_not_kept() -> None:
    async def scenario() -> None:
        record = Counts()
        async with keeper(MemoryNetwork(), record, kv_bytes=2 * (SIZE * POSITION_NBYTES + 64)) as instance:
            asked = question(PROMPT, ())
            assert tokens_of(await events_of(instance, asked.request)) == asked.expected
            await settled()
            assert len(await held(instance)) <= 2

    under_virtual_time(scenario)


@pytest.mark.parametrize("events", [1, 2, 3])
def test_a_caller_that_leaves_leaves_nothing_behind(events: int) -> None:
    async def scenario() -> None:
        async with keeper(MemoryNetwork(), Counts()) as instance:
            async with aclosing(instance.service.generate(question(PROMPT, ()).request)) as stream:
                for _ in range(events):
                    await anext(stream)
            await settled()
            assert instance.store is not None
            assert instance.store.memory.leased_bytes == 0
            instance.service.validate()

    under_virtual_time(scenario)


@pytest.mark.parametrize("lost", [None, 1])
def test_another_instance_begins_with_it(lost: int | None) -> None:
    async def scenario() -> None:
        network, record = MemoryNetwork(), Counts()
        async with (
            keeper(network, Counts()) as instance,
            text_instance(network, [instance.service], instance_id="other", record=record) as other,
        ):
            await events_of(instance, question(PROMPT, ()).request)
            await settled()
            asked = question(PROMPT + "And then?", ())
            placements = []
            for at, key in enumerate(keys_of(instance, asked.request.token_ids)):
                wants = LeaseRequest(key, None, new_lease(), lease_s=20.0, timeout_s=5.0)
                ticket = (await instance.service.lease(wants)).at(address_of("keeper"))
                placements.append(KvPlacement(at * SIZE, ticket))
            if lost is not None:
                await instance.service.release([placements[lost].ticket.lease_id])
            events = await events_of(other, replace(asked.request, kv_segments=tuple(placements)))
            assert tokens_of(events) == asked.expected
            ready = next(event for event in events if isinstance(event, Ready))
            assert ready.kv is not None
            pulled = 4 if lost is None else lost
            assert ready.kv.pulled_tokens == pulled * SIZE
            assert record.prefixes["pulled"] == pulled
            assert record.prefixes["lost"] == (lost is not None)
            await settled()
            assert instance.store is not None
            assert not instance.store.memory.leases

    under_virtual_time(scenario)
