"""The text service with a real encoder service."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any, ClassVar

import pytest

from tests.unit.services.instances import (
    ITEM_TOKENS,
    VOCABULARY,
    Answered,
    Asked,
    answer,
    encode_and_keep_only_tickets,
    encoder_instance,
    instances,
    question,
    text_instance,
    under_virtual_time,
)
from triptych.domain.embedding import DType, TensorSpec, Ticket
from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.generation import Finished, FinishReason, KvTransferred, Ready, TextEvent, TextRequest, TokenChunk
from triptych.domain.instance import InstanceLimits, LimitsReport
from triptych.domain.queue_position import QueuePosition, RelativeQueuePosition
from triptych.domain.sampling import Grammar, ResponseFormat, SamplingParams
from triptych.domain.stage import Role, Stage
from triptych.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineFailure,
    InstanceLost,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.machine.text.tensor_cache import CacheLimits
from triptych.ports import Encoder
from triptych.services.text.engine_loop import EngineLoop
from triptych.services.text.sequences import Sequences
from triptych.services.text.service import TextService
from triptych.testing.fakes import FakeTextEngine
from triptych.transport.memory import MemoryNetwork
from triptych.transport.options import TransferOptions
from triptych.virtual.links import Link, LinkedInstance
from triptych.virtual.offload import InlineOffload, spend


def test_an_answer_depends_on_every_embedding_and_its_position() -> None:
    async def scenario() -> None:
        async with instances() as p:
            items = await encode_and_keep_only_tickets(p.encoder, "cat", "dog", "owl")
            asked = question("who", items)
            got = await answer(p.text.service, asked.request)
            assert got.token_ids == asked.expected
            assert got.text == "".join(map(chr, asked.expected))
            assert got.finished.reason is FinishReason.STOP
            assert got.finished.completion_tokens == len(asked.expected)
            assert got.finished.prefill_s > 0
            assert got.finished.decode_s > 0
            assert [(r.item, r.backend, r.cached) for r in got.ready.pulls] == [
                (0, "memory", False),
                (1, "memory", False),
                (2, "memory", False),
            ]
            assert all(report.nbytes == 1024 + 16 for report in got.ready.pulls)

    under_virtual_time(scenario)


def test_text_alone_needs_no_encoder() -> None:
    async def scenario() -> None:
        async with text_instance(MemoryNetwork(), []) as text:
            asked = question("hello", [])
            got = await answer(text.service, asked.request)
            assert (got.token_ids, got.ready.pulls) == (asked.expected, ())

    under_virtual_time(scenario)


def test_leases_are_released_as_soon_as_everything_is_pulled() -> None:
    async def scenario() -> None:
        async with instances(engine=FakeTextEngine(VOCABULARY, step_s=1.0)) as p:
            asked = question("who", await encode_and_keep_only_tickets(p.encoder, "cat", "dog"))
            async with aclosing(p.text.service.generate(asked.request)) as stream:
                assert isinstance((await anext(stream))[0], Ready)
                await asyncio.sleep(0.1)
                assert p.encoder.store.memory.leases == 0
                assert p.text.receiver.cache.pinned_bytes == 0  # the engine has its copy

    under_virtual_time(scenario)


def test_a_cached_embedding_is_not_pulled_again() -> None:
    async def scenario() -> None:
        pulls: list[str] = []

        async def count(reader: str, ticket: Ticket) -> None:
            pulls.append(reader)

        async with instances(before_pull=count) as p:
            for name in ("first", "second"):
                asked = question(name, await encode_and_keep_only_tickets(p.encoder, "cat", "dog"))
                got = await answer(p.text.service, asked.request)
                assert got.token_ids == asked.expected
            assert [report.cached for report in got.ready.pulls] == [True, True]
            assert len(pulls) == 2

    under_virtual_time(scenario)


def test_concurrent_requests_for_an_embedding_share_one_pull() -> None:
    async def scenario() -> None:
        pulls: list[str] = []

        async def count(reader: str, ticket: Ticket) -> None:
            pulls.append(reader)
            await asyncio.sleep(0.05)

        async with instances(before_pull=count) as p:
            asked = [question(f"q{n}", await encode_and_keep_only_tickets(p.encoder, "cat")) for n in range(10)]
            got = await asyncio.gather(*(answer(p.text.service, case.request) for case in asked))
            assert [answered.token_ids for answered in got] == [case.expected for case in asked]
            assert len(pulls) == 1

    under_virtual_time(scenario)


def test_an_item_used_twice_in_a_request_is_pulled_once() -> None:
    async def scenario() -> None:
        async with instances() as p:
            asked = question("twins", await encode_and_keep_only_tickets(p.encoder, "cat", "cat"))
            assert (await answer(p.text.service, asked.request)).token_ids == asked.expected

    under_virtual_time(scenario)


def test_a_burst_of_200_is_answered_without_losses_or_mix_ups() -> None:
    async def scenario() -> None:
        async with instances(slots=24, encoder={"slots": 512}, max_running=8) as p:

            async def ask(number: int) -> tuple[Asked, Answered]:
                names = [f"image-{(number * 7 + k) % 61}" for k in range(number % 4)]
                asked = question(f"q{number}", await encode_and_keep_only_tickets(p.encoder, *names))
                return asked, await answer(p.text.service, asked.request)

            for asked, got in await asyncio.gather(*map(ask, range(200))):
                assert got.token_ids == asked.expected

    under_virtual_time(scenario)


@pytest.mark.parametrize("seed", range(4))
def test_clients_that_cancel_at_any_time_leak_nothing(seed: int) -> None:
    async def scenario() -> None:
        async def slowly(reader: str, ticket: Ticket) -> None:
            await asyncio.sleep(0.01)

        async with instances(before_pull=slowly, slots=8, max_running=2) as p:

            async def ask_and_leave(number: int) -> None:
                names = [f"image-{(number + k) % 5}" for k in range(number % 3)]
                asked = question(f"q{number}", await encode_and_keep_only_tickets(p.encoder, *names))
                try:
                    async with asyncio.timeout(0.0021 * number):
                        assert (await answer(p.text.service, asked.request)).token_ids == asked.expected
                except TimeoutError:
                    pass

            await asyncio.gather(*map(ask_and_leave, range(60)))

    under_virtual_time(scenario, seed=seed)


def test_a_closed_stream_ends_the_sequence_within_one_step() -> None:
    async def scenario() -> None:
        async with instances(engine=FakeTextEngine(VOCABULARY, step_s=0.1)) as p:
            asked = question("who", await encode_and_keep_only_tickets(p.encoder, "cat"))
            async with aclosing(p.text.service.generate(asked.request)) as stream:
                await anext(stream)
                await anext(stream)
            await asyncio.sleep(0.15)
            assert not p.text.engine.has_work

    under_virtual_time(scenario)


def test_a_failed_pull_names_its_items_and_keeps_the_others() -> None:
    async def scenario() -> None:
        async def dead_twice(reader: str, ticket: Ticket) -> None:
            await asyncio.sleep(0.01 * ticket.generation)
            if ticket.generation in (1, 3):
                raise TransferFailed("the holder is gone")

        async with instances(before_pull=dead_twice) as p:
            items = []
            for name in ("cat", "dog", "owl", "fox"):
                items += await encode_and_keep_only_tickets(p.encoder, name)
            with pytest.raises(TransferFailed) as raised:
                await answer(p.text.service, question("who", items).request)
            assert raised.value.items == (0, 2)
            assert p.text.receiver.cache.cached == 2

    under_virtual_time(scenario)


def test_an_expired_lease_fails_the_transfer_of_its_item() -> None:
    async def scenario() -> None:
        async with instances() as p:
            items = await encode_and_keep_only_tickets(p.encoder, "cat", "dog")
            await p.encoder.service.release([items[1][1].ticket.lease_id])
            with pytest.raises(TransferFailed) as raised:
                await answer(p.text.service, question("who", items).request)
            assert raised.value.items == (1,)

    under_virtual_time(scenario)


def test_corruption_in_transit_is_detected() -> None:
    async def scenario() -> None:
        async with instances(damage=lambda _: True) as p:
            items = await encode_and_keep_only_tickets(p.encoder, "cat")
            with pytest.raises(TransferFailed, match="checksum") as raised:
                await answer(p.text.service, question("who", items).request)
            assert raised.value.items == (0,)

    under_virtual_time(scenario)


def test_a_lost_lease_does_not_fail_another_request_for_the_embedding() -> None:
    async def scenario() -> None:
        async def slowly(reader: str, ticket: Ticket) -> None:
            await asyncio.sleep(0.02)

        async with instances(before_pull=slowly) as p:
            lost = await encode_and_keep_only_tickets(p.encoder, "cat")
            kept = await encode_and_keep_only_tickets(p.encoder, "cat")
            await p.encoder.service.release([lost[0][1].ticket.lease_id])
            asked = question("kept", kept)
            first, second = await asyncio.gather(
                answer(p.text.service, question("lost", lost).request),
                answer(p.text.service, asked.request),
                return_exceptions=True,
            )
            assert isinstance(first, TransferFailed)
            assert isinstance(second, Answered)
            assert second.token_ids == asked.expected

    under_virtual_time(scenario)


def test_an_unknown_holder_fails_the_transfer() -> None:
    async def scenario() -> None:
        async with instances() as p:
            items = await encode_and_keep_only_tickets(p.encoder, "cat")
            asked = question("who", items)
            [placement] = asked.request.placements
            strangers = (replace(placement.ticket, holder="stranger"), replace(placement.ticket, epoch=9))
            for ticket in strangers:
                elsewhere = replace(placement, ticket=ticket)
                with pytest.raises(TransferFailed, match="is not where its ticket says") as raised:
                    await answer(p.text.service, replace(asked.request, placements=(elsewhere,)))
                assert raised.value.items == (0,)
            await p.encoder.service.release([placement.ticket.lease_id])

    under_virtual_time(scenario)


def test_a_hanging_encoder_does_not_delay_requests_for_another() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        async with (
            encoder_instance(network=network, instance_id="good") as good,
            encoder_instance(network=network, instance_id="hung", settle=False) as hung,
        ):
            link: Link[Encoder] = Link("hung", hung.service)
            encoders: list[Encoder] = [LinkedInstance(link), good.service]
            async with text_instance(network, encoders) as text:
                link.stall()
                asked = question("who", await encode_and_keep_only_tickets(good, "cat"))
                began_s = asyncio.get_running_loop().time()
                assert (await answer(text.service, asked.request)).token_ids == asked.expected
                assert asyncio.get_running_loop().time() - began_s < 0.5
                with pytest.raises(TransferFailed):
                    await answer(
                        text.service, question("other", await encode_and_keep_only_tickets(hung, "dog")).request
                    )

    under_virtual_time(scenario)


def test_a_hanging_pull_times_out() -> None:
    async def scenario() -> None:
        async def hang(reader: str, ticket: Ticket) -> None:
            if ticket.generation == 1:
                await asyncio.sleep(1000)

        async with instances(before_pull=hang, transfers=TransferOptions(max_pull_s=2.0)) as p:
            items = [
                *await encode_and_keep_only_tickets(p.encoder, "cat"),
                *await encode_and_keep_only_tickets(p.encoder, "dog"),
            ]
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(TransferFailed, match="within 2 s") as raised:
                await answer(p.text.service, question("who", items).request)
            assert raised.value.items == (0,)
            assert asyncio.get_running_loop().time() - began_s < 2.1

    under_virtual_time(scenario)


def test_stop_strings_end_an_answer_at_any_chunk_boundary() -> None:
    async def scenario() -> None:
        async with instances() as p:
            asked = question("who", await encode_and_keep_only_tickets(p.encoder, "cat", "dog"))
            whole = (await answer(p.text.service, asked.request)).text
            for begin in range(len(whole) - 1):
                stop = whole[begin : begin + 2]
                items = await encode_and_keep_only_tickets(p.encoder, "cat", "dog")
                got = await answer(p.text.service, question("who", items, stop=("never", stop)).request)
                assert got.text == whole[: whole.index(stop)]
                assert got.finished.reason is FinishReason.STOP
                assert got.finished.completion_tokens == whole.index(stop) + 2 == len(got.token_ids)

    under_virtual_time(scenario)


def test_max_tokens_bounds_an_answer() -> None:
    async def scenario() -> None:
        async with instances() as p:
            asked = question("who", await encode_and_keep_only_tickets(p.encoder, "cat"), max_tokens=3)
            got = await answer(p.text.service, asked.request)
            assert (got.token_ids, got.finished.reason) == (asked.expected, FinishReason.LENGTH)

    under_virtual_time(scenario)


def test_a_slow_client_delays_no_other_and_gets_everything() -> None:
    async def scenario() -> None:
        async with instances(max_running=1) as p:
            slow = question("slow", await encode_and_keep_only_tickets(p.encoder, "cat"))
            fast = question("fast", await encode_and_keep_only_tickets(p.encoder, "dog"))
            async with aclosing(p.text.service.generate(slow.request)) as stream:
                await anext(stream)
                await asyncio.sleep(5)
                got = await answer(p.text.service, fast.request)
                assert got.token_ids == fast.expected
                rest = [events async for events in stream]
            assert len(rest) == 1, "all tokens were ready together, and the end with them"
            chunk, finished = rest[0]
            assert isinstance(chunk, TokenChunk)
            assert chunk.token_ids == slow.expected
            assert isinstance(finished, Finished)

    under_virtual_time(scenario)


@pytest.mark.parametrize("interval_s", [0.012, 0.5])
def test_a_stream_interval_merges_messages_and_delays_neither_first_nor_last(interval_s: float) -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        async with text_instance(MemoryNetwork(), [], stream_interval_s=interval_s) as text:
            asked = question("hello", [])
            times: list[float] = []
            chunks: list[TokenChunk] = []
            async with aclosing(text.service.generate(asked.request)) as stream:
                async for events in stream:
                    match events:
                        case [TokenChunk() as chunk, *end]:
                            chunks.append(chunk)
                            times.append(clock())
            assert isinstance(end[0], Finished), "the end comes with the last tokens"
            finished = end[0]
            assert tuple(token for chunk in chunks for token in chunk.token_ids) == asked.expected
            assert len(chunks[0].token_ids) == 1, "the first token goes at once"
            assert 1 < len(chunks) < len(asked.expected)
            gaps = [later - earlier for earlier, later in pairwise(times)]
            assert all(gap >= interval_s for gap in gaps[:-1])
            assert times[-1] - times[0] == pytest.approx(finished.decode_s), "the end is not held back"

    under_virtual_time(scenario)


def test_tokens_of_an_answer_that_is_read_as_a_whole_wait_for_each_other_after_the_first() -> None:
    async def scenario() -> None:
        async with text_instance(MemoryNetwork(), []) as text:
            asked = question("hello", [])
            chunks: list[TokenChunk] = []
            async with aclosing(text.service.generate(replace(asked.request, whole=True))) as stream:
                async for events in stream:
                    chunks += [event for event in events if isinstance(event, TokenChunk)]
            assert tuple(token for chunk in chunks for token in chunk.token_ids) == asked.expected
            assert len(chunks[0].token_ids) == 1
            assert len(chunks) < len(asked.expected)
            assert chunks[0].waited_s == 0
            assert all(0 <= chunk.waited_s < 0.05 for chunk in chunks)

    under_virtual_time(scenario)


def test_a_failed_sequence_fails_alone() -> None:
    async def scenario() -> None:
        async with instances() as p:
            first = question("one", await encode_and_keep_only_tickets(p.encoder, "cat"))
            second = question("two", await encode_and_keep_only_tickets(p.encoder, "dog"))
            p.text.engine.failures.append(ValueError("secret"))
            results = await asyncio.gather(
                answer(p.text.service, first.request), answer(p.text.service, second.request), return_exceptions=True
            )
            failed = [result for result in results if isinstance(result, EngineFailure)]
            assert len(failed) == 1
            assert "secret" not in failed[0].message
            assert any(isinstance(result, Answered) for result in results)

    under_virtual_time(scenario)


def test_a_step_that_raises_fails_its_sequences_and_the_loop_continues() -> None:
    class Fragile(FakeTextEngine):
        broken = False

        def step(self) -> list[EngineOutput]:
            if self.broken:
                raise RuntimeError("secret")
            return super().step()

    async def scenario() -> None:
        engine = Fragile(VOCABULARY)
        async with instances(engine=engine) as p:
            asked = question("who", await encode_and_keep_only_tickets(p.encoder, "cat"))
            engine.broken = True
            with pytest.raises(EngineFailure) as raised:
                await answer(p.text.service, asked.request)
            assert "secret" not in raised.value.message
            engine.broken = False
            again = question("who", await encode_and_keep_only_tickets(p.encoder, "cat"))
            assert (await answer(p.text.service, again.request)).token_ids == asked.expected

    under_virtual_time(scenario)


async def by_choice(service: TextService, request: TextRequest) -> tuple[list[Ready], dict[int, list[TextEvent]]]:
    """The events of a stream by choice; no event follows a choice's end."""
    readies: list[Ready] = []
    choices: dict[int, list[TextEvent]] = {}
    async with aclosing(service.generate(request)) as stream:
        async for events in stream:
            for event in events:
                if isinstance(event, Ready):
                    readies.append(event)
                    continue
                assert not isinstance(event, KvTransferred)
                said = choices.setdefault(event.choice, [])
                assert not said or not isinstance(said[-1], Finished)
                said.append(event)
    return readies, choices


def sampled(request: TextRequest, **changes: Any) -> TextRequest:
    return replace(request, sampling=replace(request.sampling, **changes))


def test_several_choices_share_one_pull_and_one_prompt() -> None:
    async def scenario() -> None:
        pulls: list[str] = []

        async def count(reader: str, ticket: Ticket) -> None:
            pulls.append(reader)

        async with instances(before_pull=count) as p:
            asked = question("who", await encode_and_keep_only_tickets(p.encoder, "cat"))
            readies, choices = await by_choice(p.text.service, sampled(asked.request, n=3))
            assert (len(readies), len(pulls)) == (1, 1)
            assert sorted(choices) == [0, 1, 2]
            answers = {}
            for choice, events in choices.items():
                *chunks, finished = events
                tokens = [token for chunk in chunks if isinstance(chunk, TokenChunk) for token in chunk.token_ids]
                assert isinstance(finished, Finished)
                assert (finished.reason, finished.completion_tokens) == (FinishReason.STOP, len(tokens))
                assert finished.prefill_s > 0
                answers[choice] = tuple(tokens)
            assert answers[0] == asked.expected
            assert len(set(answers.values())) == 3
            assert p.text.service.load().at(Stage.DECODE).pending == 0

    under_virtual_time(scenario)


def test_a_stop_string_ends_only_its_choice() -> None:
    async def scenario() -> None:
        engine = FakeTextEngine(VOCABULARY)
        async with text_instance(MemoryNetwork(), [], engine=engine) as text:
            request = sampled(question("hello", []).request, n=3)
            _, whole = await by_choice(text.service, request)
            texts = {
                choice: "".join(e.text for e in events if isinstance(e, TokenChunk)) for choice, events in whole.items()
            }
            stop = next(letter for letter in texts[1] if letter not in texts[0] + texts[2])
            _, stopped = await by_choice(text.service, sampled(request, stop=(stop,)))
            cut = {
                choice: "".join(e.text for e in events if isinstance(e, TokenChunk))
                for choice, events in stopped.items()
            }
            assert cut == texts | {1: texts[1][: texts[1].index(stop)]}
            assert text.service.load().at(Stage.DECODE).pending_tokens == 0

    under_virtual_time(scenario)


def test_a_choice_failed_by_the_engine_fails_the_request_once() -> None:
    async def scenario() -> None:
        async with text_instance(MemoryNetwork(), []) as text:
            text.engine.failures.append(ValueError("secret"))
            with pytest.raises(EngineFailure):
                await by_choice(text.service, sampled(question("hello", []).request, n=4))
            assert not text.engine.has_work
            assert (await answer(text.service, question("next", []).request)).token_ids

    under_virtual_time(scenario)


def test_closing_the_stream_cancels_all_choices() -> None:
    async def scenario() -> None:
        async with text_instance(MemoryNetwork(), [], engine=FakeTextEngine(VOCABULARY, step_s=0.1)) as text:
            async with aclosing(text.service.generate(sampled(question("hello", []).request, n=4))) as stream:
                assert isinstance((await anext(stream))[0], Ready)
                first = await anext(stream)
                assert [event.choice for event in first if isinstance(event, TokenChunk)] == [0, 1, 2, 3], (
                    "in one message"
                )
                assert text.engine.has_work
            await asyncio.sleep(0.2)
            assert not text.engine.has_work

    under_virtual_time(scenario)


def test_logprobs_have_the_bytes_of_their_tokens() -> None:
    async def scenario() -> None:
        async with text_instance(MemoryNetwork(), []) as text:
            asked = question("hello", [])
            _, choices = await by_choice(text.service, sampled(asked.request, logprobs=2))
            chunks = [event for event in choices[0] if isinstance(event, TokenChunk)]
            for chunk in chunks:
                assert [entry.chosen.token_id for entry in chunk.logprobs] == list(chunk.token_ids)
                assert [entry.chosen.token for entry in chunk.logprobs] == [
                    chr(token_id).encode() for token_id in chunk.token_ids
                ]
                assert all(len(entry.top) == 2 and entry.top[0] == entry.chosen for entry in chunk.logprobs)
            assert sum(len(chunk.logprobs) for chunk in chunks) == len(asked.expected)
            _, choices = await by_choice(text.service, asked.request)
            assert all(event.logprobs == () for event in choices[0] if isinstance(event, TokenChunk))

    under_virtual_time(scenario)


def test_an_unsupported_response_format_is_refused_before_pulling() -> None:
    async def scenario() -> None:
        async with instances() as p:
            asked = question("who", await encode_and_keep_only_tickets(p.encoder, "cat"))
            with pytest.raises(InvalidRequest, match="response format"):
                await answer(
                    p.text.service, sampled(asked.request, response_format=ResponseFormat(Grammar.JSON_OBJECT))
                )
            await asyncio.sleep(1.0)
            assert p.encoder.store.memory.leases == 0

    under_virtual_time(scenario)


def test_an_engine_that_cannot_go_on_ends_its_loop_and_only_what_it_had_begun_is_lost_with_it() -> None:
    class Dead(FakeTextEngine):
        def decode_step(self) -> list[EngineOutput]:
            raise InstanceLost("the engine has failed")

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        engine, thread = Dead(VOCABULARY, max_running=1), InlineOffload(1)
        loop = EngineLoop(
            engine, thread, clock=clock, on_change=lambda: None, on_gap=lambda _: None, on_step=lambda _: None
        )
        ended = list[str]()

        def submit(name: str) -> Sequences:
            request = EngineRequest(name, (97, 98), (), SamplingParams(max_tokens=4, seed=0))
            return loop.submit(request, 6, on_copied=lambda: None, on_over=lambda: ended.append(name))

        begun, waiting = submit("begun"), submit("waiting")
        with pytest.raises(InstanceLost, match="the engine has failed"):
            await loop.run()
        with pytest.raises(InstanceLost):
            await begun.next()
        with pytest.raises(Unavailable) as raised:
            await waiting.next()
        assert not isinstance(raised.value, InstanceLost)
        with pytest.raises(Unavailable):
            await submit("late").next()
        assert ended == ["begun", "waiting", "late"]

    under_virtual_time(scenario)


def test_an_engine_that_is_lost_while_it_has_no_request_ends_its_loop() -> None:
    class Dead(FakeTextEngine):
        def step(self) -> list[EngineOutput]:
            raise InstanceLost("the engine has failed")

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        loop = EngineLoop(
            Dead(VOCABULARY),
            InlineOffload(1),
            clock=clock,
            on_change=lambda: None,
            on_gap=lambda _: None,
            on_step=lambda _: None,
        )
        asyncio.get_running_loop().call_later(1.0, loop.lose)
        with pytest.raises(InstanceLost, match="the engine has failed"):
            await loop.run()
        assert clock() == 1.0

    under_virtual_time(scenario)


@pytest.mark.parametrize(("most", "together"), [(10, [1, 1, 2]), (1000, [4])])
def test_copies_between_two_steps_are_as_many_as_may_be_but_one_at_least(most: int, together: list[int]) -> None:
    """Of copies of 30, 12, 5 and 5 bytes. The bound is asked for each time."""

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        done = list[float]()

        def copy() -> None:
            spend(1.0)

        loop = EngineLoop(
            FakeTextEngine(VOCABULARY),
            InlineOffload(1),
            clock=clock,
            on_change=lambda: None,
            on_gap=lambda _: None,
            on_step=lambda _: None,
            most_copied_bytes=lambda: most,
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(loop.run())
            for result in [loop.between(copy, nbytes) for nbytes in (30, 12, 5, 5)]:
                await result
                done.append(clock())
            running.cancel()
        assert [done.count(at_s) for at_s in sorted(set(done))] == together

    under_virtual_time(scenario)


def test_the_end_of_a_choice_tells_how_often_and_how_long_it_was_preempted() -> None:
    class Preempting(FakeTextEngine):
        """The third and the fifth token of each choice come late, after one and two further preemptions."""

        told = 0

        def step(self) -> list[EngineOutput]:
            self.told += 1
            spend({3: 2.0, 5: 1.5}.get(self.told, 0.0))
            times = (self.told >= 3) + 2 * (self.told >= 5)
            return [replace(output, preemptions=times) for output in super().step()]

    async def scenario() -> None:
        async with instances(engine=Preempting(VOCABULARY)) as p:
            finished = (await answer(p.text.service, question("who", []).request)).finished
            assert finished.completion_tokens > 5
            assert finished.preemptions == 3
            assert finished.preempted_s == pytest.approx(3.5 + 2 * 0.005)
            assert finished.preempted_s < finished.decode_s

    under_virtual_time(scenario)


def test_what_waits_is_counted_and_moved_when_it_is_lost_whatever_leaves_meanwhile() -> None:
    """Of 300 requests each third is cancelled, as a whole or by its only choice."""

    class Ordered(FakeTextEngine):
        moved: ClassVar[list[str]] = []

        def reorder(self, request_id: str, queue_position: QueuePosition) -> None:
            self.moved.append(request_id)
            super().reorder(request_id, queue_position)

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        engine = Ordered(VOCABULARY, max_running=1, step_s=0.01)
        loop = EngineLoop(
            engine, InlineOffload(1), clock=clock, on_change=lambda: None, on_gap=lambda _: None, on_step=lambda _: None
        )
        sequences: dict[str, Sequences] = {}

        def submit(name: str, lost_s: float) -> None:
            queue_position = QueuePosition(0, 1000.0 + len(sequences), len(sequences), lost_s, 5000.0)
            asked = EngineRequest(
                name,
                (97, 98),
                (),
                SamplingParams(max_tokens=100, seed=0, ignore_eos=True),
                queue_position=queue_position,
            )
            sequences[name] = loop.submit(asked, 102, on_copied=lambda: None, on_over=lambda: None)

        async with asyncio.TaskGroup() as group:
            running = group.create_task(loop.run())
            submit("first", inf)
            for number in range(300):
                submit(str(number), 0.2 + (number * 7 % 300) / 1000)
            await asyncio.sleep(0.1)
            assert loop.requests == (300, 1)
            for number in range(0, 300, 3):
                loop.cancel(str(number))
                loop.cancel_choice(str(number + 1), 0)
                await asyncio.sleep(0)
            assert loop.requests == (100, 1)
            await asyncio.sleep(0.5)
            left = sorted(range(2, 300, 3), key=lambda number: number * 7 % 300)
            assert engine.moved == [str(number) for number in left]
            for name in sequences:
                loop.cancel(name)
            await asyncio.sleep(0.1)
            assert loop.requests == (0, 0)
            running.cancel()

    under_virtual_time(scenario)


def test_a_sequence_lost_by_the_engine_fails() -> None:
    class Forgetful(FakeTextEngine):
        def step(self) -> list[EngineOutput]:
            self._waiting.clear()
            return []

    async def scenario() -> None:
        async with instances(engine=Forgetful(VOCABULARY)) as p:
            with pytest.raises(EngineFailure, match="lost"):
                await answer(p.text.service, question("who", []).request)

    under_virtual_time(scenario)


def test_a_deadline_during_an_answer_ends_it() -> None:
    async def scenario() -> None:
        async with instances(engine=FakeTextEngine(VOCABULARY, step_s=1.0)) as p:
            items = await encode_and_keep_only_tickets(p.encoder, "cat")
            with pytest.raises(DeadlineExceeded):
                await answer(p.text.service, question("who", items, timeout_s=2.5).request)
            await asyncio.sleep(1.0)
            assert not p.text.engine.has_work

    under_virtual_time(scenario)


def test_a_deadline_in_the_queue_ends_the_request_and_frees_everything() -> None:
    async def scenario() -> None:
        async with instances(engine=FakeTextEngine(VOCABULARY, step_s=1.0, max_running=1)) as p:
            first = question("first", await encode_and_keep_only_tickets(p.encoder, "cat"))
            late = question("late", await encode_and_keep_only_tickets(p.encoder, "dog"), timeout_s=2.0)
            got, failed = await asyncio.gather(
                answer(p.text.service, first.request), answer(p.text.service, late.request), return_exceptions=True
            )
            assert isinstance(got, Answered)
            assert isinstance(failed, DeadlineExceeded)

    under_virtual_time(scenario)


def test_the_most_urgent_request_runs_first() -> None:
    async def scenario() -> None:
        async with instances(max_running=1) as p:
            ended: list[str] = []

            async def ask(name: str, timeout_s: float) -> None:
                await answer(p.text.service, question(name, [], timeout_s=timeout_s).request)
                ended.append(name)

            async with asyncio.TaskGroup() as group:
                group.create_task(ask("running", 50.0))
                await asyncio.sleep(0.001)
                group.create_task(ask("patient", 40.0))
                group.create_task(ask("urgent", 5.0))
                group.create_task(ask("middle", 20.0))
            assert ended == ["running", "urgent", "middle", "patient"]

    under_virtual_time(scenario)


def test_requests_run_by_what_is_due_and_those_that_are_lost_last() -> None:
    """One answer takes 1 s or more, so "soon" is lost while it waits in the engine, and "late" before."""

    async def scenario() -> None:
        engine = FakeTextEngine(VOCABULARY, step_s=0.25, max_running=1)
        async with text_instance(MemoryNetwork(), [], engine=engine) as text:
            ended: list[str] = []

            async def ask(name: str, due_in_s: float, lost_in_s: float | None) -> None:
                asked = replace(question(name, []).request, position=RelativeQueuePosition(due_in_s, lost_in_s))
                await answer(text.service, asked)
                ended.append(name)

            async with asyncio.TaskGroup() as group:
                group.create_task(ask("runs", 0.0, None))
                await asyncio.sleep(0.1)
                group.create_task(ask("long", 3.5, None))
                group.create_task(ask("soon", 1.0, 0.5))
                group.create_task(ask("late", -1.0, -2.0))
                group.create_task(ask("short", 3.0, None))
            assert ended == ["runs", "short", "long", "late", "soon"]

    under_virtual_time(scenario)


def test_a_lower_priority_number_runs_first_regardless_of_deadlines() -> None:
    async def scenario() -> None:
        async with instances(max_running=1) as p:
            ended: list[str] = []

            async def ask(name: str, priority: int, timeout_s: float) -> None:
                asked = replace(question(name, [], timeout_s=timeout_s).request, priority=priority)
                await answer(p.text.service, asked)
                ended.append(name)

            async with asyncio.TaskGroup() as group:
                group.create_task(ask("running", 9, 50.0))
                await asyncio.sleep(0.001)
                group.create_task(ask("low", 1, 5.0))
                group.create_task(ask("middle", 0, 20.0))
                group.create_task(ask("high", -1, 40.0))
            assert ended == ["running", "high", "middle", "low"]

    under_virtual_time(scenario)


def test_a_late_urgent_request_overtakes_all_waiting_for_the_engine() -> None:
    async def scenario() -> None:
        async with instances(max_running=1, slots=256, encoder={"slots": 256}) as p:
            ended: list[str] = []

            async def ask(name: str, priority: int) -> None:
                items = await encode_and_keep_only_tickets(p.encoder, name)
                await answer(p.text.service, replace(question(name, items).request, priority=priority))
                ended.append(name)

            async with asyncio.TaskGroup() as group:
                for number in range(100):
                    group.create_task(ask(f"low-{number}", 1))
                await asyncio.sleep(1.0)
                group.create_task(ask("high", 0))
                await asyncio.sleep(0.05)
                assert p.text.service.load().stages[Stage.PREFILL].pending > 50
                before = len(ended)
            assert ended.index("high") <= before + 2

    under_virtual_time(scenario)


def test_the_longest_wait_is_reported_by_priority() -> None:
    async def scenario() -> None:
        async with instances(max_running=1, engine=FakeTextEngine(VOCABULARY, step_s=1.0, max_running=1)) as p:
            assert p.text.service.longest_waits_s() == {}
            async with asyncio.TaskGroup() as group:
                for name, priority in (("runs", 0), ("a", 0), ("b", 3), ("c", 1000)):
                    asked = replace(question(name, [], max_tokens=20).request, priority=priority)
                    group.create_task(answer(p.text.service, asked))
                    await asyncio.sleep(1.0)
                waits = p.text.service.longest_waits_s()
                assert {priority: round(waited_s) for priority, waited_s in waits.items()} == {0: 3, 3: 2, 8: 1}

    under_virtual_time(scenario)


def test_a_full_queue_refuses_and_releases_the_leases() -> None:
    async def scenario() -> None:
        async with instances(tensor_cache=CacheLimits(max_waiting_requests=3), max_running=1) as p:
            asked = [question(f"q{n}", await encode_and_keep_only_tickets(p.encoder, "cat")) for n in range(10)]
            results = await asyncio.gather(
                *(answer(p.text.service, case.request) for case in asked), return_exceptions=True
            )
            refused = [result for result in results if isinstance(result, Overloaded)]
            served = [result for result in results if isinstance(result, Answered)]
            assert len(served) + len(refused) == 10
            assert len(refused) >= 6

    under_virtual_time(scenario)


def test_requests_wait_for_cache_room_and_all_finish() -> None:
    async def scenario() -> None:
        async def slowly(reader: str, ticket: Ticket) -> None:
            await asyncio.sleep(0.01)

        async with instances(before_pull=slowly, slots=3) as p:
            asked = [
                question(
                    f"q{n}", await encode_and_keep_only_tickets(p.encoder, *(f"{n}-{k}" for k in range(1 + n % 3)))
                )
                for n in range(12)
            ]
            got = await asyncio.gather(*(answer(p.text.service, case.request) for case in asked))
            assert [answered.token_ids for answered in got] == [case.expected for case in asked]

    under_virtual_time(scenario)


def test_a_request_larger_than_the_cache_is_invalid() -> None:
    async def scenario() -> None:
        async with instances(slots=2) as p:
            items = await encode_and_keep_only_tickets(p.encoder, "a", "b", "c")
            with pytest.raises(InvalidRequest, match="image cache"):
                await answer(p.text.service, question("who", items).request)

    under_virtual_time(scenario)


def _with_run(request: TextRequest, start: int) -> TextRequest:
    return replace(request, placements=(replace(request.placements[0], start=start),))


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (lambda r: replace(r, model="other"), ModelNotFound, "'other'"),
        (lambda r: replace(r, token_ids=()), InvalidRequest, "empty"),
        (lambda r: replace(r, sampling=replace(r.sampling, max_tokens=None)), InvalidRequest, "max_tokens"),
        (lambda r: replace(r, sampling=replace(r.sampling, max_tokens=4096)), ContextTooLong, "4096"),
        (lambda r: _with_run(r, -1), InvalidRequest, "starts at -1"),
        (lambda r: _with_run(r, 2), InvalidRequest, "no item of 32 tokens at position 2"),
        (lambda r: _with_run(r, 30), InvalidRequest, "the prompt has 5 placeholders"),
        (lambda r: replace(r, placements=r.placements * 2), InvalidRequest, "twice"),
        (
            lambda r: replace(r, placements=(r.placements[0], replace(r.placements[0], item=1))),
            InvalidRequest,
            "item 1 starts at 3",
        ),
    ],
)
def test_an_invalid_request_is_refused_before_ready(
    spoil: Callable[[TextRequest], TextRequest], error: type[TriptychError], says: str
) -> None:
    async def scenario() -> None:
        async with instances() as p:
            asked = question("who", await encode_and_keep_only_tickets(p.encoder, "cat"))
            with pytest.raises(error, match=says):
                await answer(p.text.service, spoil(asked.request))
            [placement] = asked.request.placements
            await p.encoder.service.release([placement.ticket.lease_id])

    under_virtual_time(scenario)


def test_embeddings_of_another_shape_are_refused() -> None:
    async def scenario() -> None:
        async with instances() as p:
            asked = question("who", await encode_and_keep_only_tickets(p.encoder, "cat"))
            [placement] = asked.request.placements
            [spec] = placement.ticket.tensors
            turned = replace(placement.ticket, tensors=(replace(spec, shape=(8, ITEM_TOKENS)),))
            with pytest.raises(TransferFailed, match=r"\[8, 32\], which the model does not accept"):
                await answer(p.text.service, replace(asked.request, placements=(replace(placement, ticket=turned),)))

    under_virtual_time(scenario)


@pytest.mark.parametrize(
    "tampered",
    [
        {"payload_nbytes": 0},
        {"payload_nbytes": 1 << 40},
        {"tensors": ()},
        {"tensors": (TensorSpec("embeddings", DType.F32, ()),)},
        {"tensors": (TensorSpec("embeddings", DType.F32, (1 << 40, 1 << 40)),)},
        {"tensors": (TensorSpec("other", DType.U8, (ITEM_TOKENS, 8)),)},
        {"tokens": 0},
        {"tokens": ITEM_TOKENS + 1},
        {"offset": 1 << 48},
        {"offset": 1},
        {"checksum": 1},
        {"generation": 1 << 63},
        {"epoch": 9},
        {"holder": "nobody"},
        {"lease_id": bytes(16)},
    ],
    ids=str,
)
def test_a_tampered_ticket_is_the_callers_error(tampered: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with instances() as p:
            asked = question("who", await encode_and_keep_only_tickets(p.encoder, "cat"))
            [placement] = asked.request.placements
            bad = replace(placement, ticket=replace(placement.ticket, **tampered))
            with pytest.raises((InvalidRequest, TransferFailed)) as caught:
                await answer(p.text.service, replace(asked.request, placements=(bad,)))
            if isinstance(caught.value, TransferFailed):
                assert caught.value.items == (placement.item,)
            good = await answer(
                p.text.service, question("who", await encode_and_keep_only_tickets(p.encoder, "dog")).request
            )
            assert good.token_ids
            await p.encoder.service.release([placement.ticket.lease_id])

    under_virtual_time(scenario)


def test_equal_requests_can_be_sent_repeatedly_and_concurrently() -> None:
    async def scenario() -> None:
        async with instances() as p:
            asked = [question("same", await encode_and_keep_only_tickets(p.encoder, "cat")) for _ in range(2)]
            got = await asyncio.gather(*(answer(p.text.service, case.request) for case in asked))
            assert [answered.token_ids for answered in got] == [asked[0].expected] * 2

    under_virtual_time(scenario)


def test_the_load_counts_waiting_and_running_requests() -> None:
    async def scenario() -> None:
        async with instances(max_running=1) as p:
            async with asyncio.TaskGroup() as group, aclosing(p.text.service.watch_load()) as watch:
                for n in range(4):
                    group.create_task(answer(p.text.service, question(f"q{n}", []).request))
                loads = []
                async for load in watch:
                    loads.append(load)
                    if len(loads) > 2 and not load.at(Stage.DECODE).pending:
                        break
            waiting, running = ([load.at(stage) for load in loads] for stage in (Stage.PREFILL, Stage.DECODE))
            assert max(load.pending for load in waiting) == 3
            assert max(load.pending for load in running) == 1
            assert (
                max(waits.pending_tokens + runs.pending_tokens for waits, runs in zip(waiting, running, strict=True))
                > 64
            )
            assert (waiting[-1].pending_tokens, running[-1].pending_tokens) == (0, 0)

    under_virtual_time(scenario)


def test_a_prompt_is_prefill_load_until_the_first_token_and_the_most_to_generate_decode_load() -> None:
    async def scenario() -> None:
        async with instances(engine=FakeTextEngine(VOCABULARY, step_s=1.0)) as p, asyncio.TaskGroup() as group:
            asked = question("who", []).request
            running = group.create_task(answer(p.text.service, asked))
            await asyncio.sleep(0)
            seen = []
            while not running.done():
                load = p.text.service.load()
                seen.append((load.at(Stage.PREFILL).pending_tokens, load.at(Stage.DECODE).pending_tokens))
                await asyncio.sleep(0.25)
            assert seen[0] == (len(asked.token_ids), asked.sampling.max_tokens)
            assert {prompt for prompt, _ in seen} == {len(asked.token_ids), 0}
            assert seen[-1][0] == 0 < seen[-1][1]

    under_virtual_time(scenario)


def test_a_draining_instance_refuses_new_requests_and_finishes_running_ones() -> None:
    async def scenario() -> None:
        async with instances() as p, asyncio.TaskGroup() as group:
            asked = question("who", await encode_and_keep_only_tickets(p.encoder, "cat"))
            running = group.create_task(answer(p.text.service, asked.request))
            await asyncio.sleep(0.001)
            drained = group.create_task(p.text.service.drain())
            await asyncio.sleep(0)
            with pytest.raises(Unavailable):
                await answer(p.text.service, question("late", []).request)
            assert (await running).token_ids == asked.expected
            await drained

    under_virtual_time(scenario)


def test_a_text_instance_describes_itself() -> None:
    async def scenario() -> None:
        async with instances() as p:
            info = await p.text.service.describe()
            assert (info.instance_id, info.role, info.encoder_version) == ("text", Role.PD, "")
            assert info.model == p.text.engine.model

    under_virtual_time(scenario)


class _SlowToAdd(FakeTextEngine):
    """Copies a request's tensors for a second."""

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        spend(1.0)


def test_the_load_counts_the_tokens_of_a_request_once_at_every_time() -> None:
    async def scenario() -> None:
        async with instances(engine=_SlowToAdd(VOCABULARY, step_s=1.0)) as p, asyncio.TaskGroup() as group:
            asked = question("who", await encode_and_keep_only_tickets(p.encoder, "cat")).request
            most = len(asked.token_ids) + asked.sampling.n * (asked.sampling.max_tokens or 0)

            def pending_tokens() -> int:
                return sum(stage.pending_tokens for stage in p.text.service.load().stages.values())

            running = group.create_task(answer(p.text.service, asked))
            await asyncio.sleep(0)
            seen = []
            while not running.done():
                seen.append(pending_tokens())
                await asyncio.sleep(0.25)
            assert seen[0] == most
            assert seen == sorted(seen, reverse=True)
            assert seen[-1] > 0
            assert pending_tokens() == 0

    under_virtual_time(scenario)


def test_limits_of_steps_change_while_it_serves() -> None:
    async def scenario() -> None:
        engine = FakeTextEngine(VOCABULARY, step_s=0.1, max_running=4)
        async with instances(engine=engine) as p, asyncio.TaskGroup() as group:
            service = p.text.service
            asked = [question(f"q{number}", []) for number in range(12)]
            answers = [group.create_task(answer(service, case.request)) for case in asked]
            await asyncio.sleep(0.15)
            assert service.load().at(Stage.DECODE).pending == 4
            service.live_limits.set(InstanceLimits(max_sequences=8, token_budget=64), 1, True, "a test")
            await asyncio.sleep(0.3)
            assert service.load().limits == LimitsReport(InstanceLimits(None, 8, 64), 1, by_hand=True)
            assert service.load().at(Stage.DECODE).pending > 4
            with pytest.raises(InvalidRequest, match="token_budget is 4, must be from 8, the sequences of a step, to"):
                service.live_limits.set(InstanceLimits(max_sequences=8, token_budget=4), 2, True, "a test")
            with pytest.raises(InvalidRequest, match="max_sequences is 0, must be from 1 to"):
                service.live_limits.set(InstanceLimits(max_sequences=0), 3, True, "a test")
            got = await asyncio.gather(*answers)
            assert [answered.token_ids for answered in got] == [case.expected for case in asked]

    under_virtual_time(scenario)
