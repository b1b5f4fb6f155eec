"""What cannot be cut by position is transferred as a whole: the state after all positions that are computed."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.services.instances import (
    VOCABULARY,
    encode_and_keep_only_tickets,
    question,
    under_virtual_time,
)
from tests.unit.services.text.test_kv_transfer import (
    LEASE_S,
    ROOM,
    Apart,
    apart,
    decode_call,
    draining,
    events_of,
    is_whole,
    kv_of,
    prefill_call,
    release_routers,
    through_both,
    tokens_of,
)
from triptych.domain.embedding import Ticket
from triptych.domain.generation import Finished, KvTransferred, TextEvent
from triptych.domain.stage import Role
from triptych.errors import TransferFailed
from triptych.testing.fake_kv import POSITION_NBYTES
from triptych.testing.fakes import FakeTextEngine
from triptych.transport.memory import BeforePull


@asynccontextmanager
async def stateful(*, before_pull: BeforePull | None = None, **prefill: Any) -> AsyncIterator[Apart]:
    first = {"engine": FakeTextEngine(vocabulary=VOCABULARY, has_states=True), **prefill}
    second = {"engine": FakeTextEngine(vocabulary=VOCABULARY, has_states=True)}
    async with apart(before_pull=before_pull, prefill=first, decode=second) as p:
        yield p


def ends_of(events: Sequence[TextEvent]) -> list[tuple[int, int, tuple[int, ...]]]:
    """First and last position, and choices, of what is transferred."""
    last = events[-1]
    assert isinstance(last, KvTransferred)
    placements = [segment.placement for segment in last.segments]
    return [(placement.first, placement.end, placement.choices) for placement in placements]


def test_a_prompts_state_is_one_segment_which_all_choices_share() -> None:
    async def scenario() -> None:
        async with stateful() as p:
            asked = await p.asked("what is this?", "cat", "dog")
            first, second = await through_both(p, asked)
            assert is_whole(asked, first, second)
            prompt = len(asked.request.token_ids)
            assert ends_of(first) == [(0, prompt, ())]
            assert (kv_of(second).pulled_tokens, kv_of(second).computed_tokens) == (prompt, 0)
            assert (p.sent.segments, p.taken.segments) == ({"sealed": 1}, {"pulled": 1})
            three = await p.fresh_leases(replace(asked.request, sampling=replace(asked.request.sampling, n=3)))
            first = await events_of(p.prefill, prefill_call(three))
            assert ends_of(first) == [(0, prompt, ())]
            second = await events_of(p.decode, await p.fresh_leases(decode_call(three, first)))
            await release_routers(p.prefill, first)
            assert kv_of(second).computed_tokens == 0
            assert (p.sent.segments, p.taken.segments) == ({"sealed": 1, "cached": 1}, {"pulled": 1, "found": 1})
            whole = await events_of(p.decode, await p.fresh_leases(three))
            before, after = tokens_of(first), tokens_of(second)
            assert {choice: before[choice] + after[choice] for choice in range(3)} == tokens_of(whole)

    under_virtual_time(scenario)


@pytest.mark.parametrize("choices", [1, 2])
def test_an_answer_that_leaves_takes_the_state_of_each_choice_as_it_is_when_it_pauses(choices: int) -> None:
    """A step that ran meanwhile has added a token, of which the state is as well."""

    async def scenario() -> None:
        async with stateful(role=Role.PD, transfer_kv_on_drain=True) as p:
            asked = await p.asked("what is this?", "cat", "dog")
            request = replace(prefill_call(asked.request), transfers_kv=False)
            request = replace(request, sampling=replace(request.sampling, n=choices))
            items = await encode_and_keep_only_tickets(p.encoder, "cat", "dog")
            again = replace(request, placements=question("what is this?", items).request.placements)
            first: list[TextEvent] = []
            async with draining(p, request, first):
                await asyncio.sleep(0.1)
                second = await events_of(p.decode, decode_call(again, first))
            prompt, before = len(request.token_ids), tokens_of(first)
            assert all(len(before[choice]) > 1 for choice in range(choices))
            assert ends_of(first) == [
                (0, prompt + len(before[choice]) - 1, () if choices == 1 else (choice,)) for choice in range(choices)
            ]
            assert kv_of(second).computed_tokens == 0, "nothing is computed twice"
            whole = await events_of(p.decode, await p.fresh_leases(again))
            after = tokens_of(second)
            assert {choice: before[choice] + after[choice] for choice in range(choices)} == tokens_of(whole)

    under_virtual_time(scenario)


def test_a_state_that_is_lost_or_without_room_is_computed() -> None:
    async def lose(reader: str, ticket: Ticket) -> None:
        if reader == "decode" and ticket.tensors[0].name == "kv":
            raise TransferFailed("lost")

    async def scenario() -> None:
        for changes in ({"before_pull": lose}, {"kv_bytes": 8 * POSITION_NBYTES}):
            async with stateful(**changes) as p:
                asked = await p.asked("what is this?", "cat", "dog")
                first, second = await through_both(p, asked)
                assert is_whole(asked, first, second)

    under_virtual_time(scenario)


def test_an_answer_stays_where_there_is_no_room_for_its_state() -> None:
    async def scenario() -> None:
        async with stateful(role=Role.PD, transfer_kv_on_drain=True, kv_bytes=8 * POSITION_NBYTES) as p:
            asked = await p.asked("what is this?", "cat")
            first: list[TextEvent] = []
            async with draining(p, replace(asked.request, kv_lease_s=LEASE_S), first):
                pass
            assert isinstance(first[-1], Finished)
            assert tokens_of(first)[0] == asked.expected

    under_virtual_time(scenario)


def test_prefixes_are_neither_kept_nor_looked_for() -> None:
    async def scenario() -> None:
        async with stateful(role=Role.PD, kv_prefixes=True, kv_bytes=ROOM) as p:
            described = await p.prefill.service.describe()
            assert (described.kv_segment_tokens, described.kv_kind) == (0, p.prefill.engine.kv.kind.digest)
            asked = await p.asked("what is this? " * 8)
            await events_of(p.prefill, asked.request)
            assert not p.sent.segments

    under_virtual_time(scenario)
