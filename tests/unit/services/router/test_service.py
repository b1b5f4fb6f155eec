"""The router over in-process instances, under virtual time. ``bench`` checks after each test that nothing is held."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import wraps
from hashlib import blake2b
from typing import Any

import pytest

from tests.unit.services.router.fakes import Bench, FakeText, ask, bench, collect, image
from triptych.domain.generation import (
    ChatEvent,
    ChatFinished,
    ChoiceFinished,
    FinishReason,
    TextEvent,
    TextRequest,
    TokenChunk,
    Usage,
)
from triptych.domain.instance import ModelInfo
from triptych.domain.sampling import Grammar, ResponseFormat, SamplingParams
from triptych.domain.timeline import Outcome
from triptych.errors import (
    ArenaFull,
    ContextTooLong,
    DeadlineExceeded,
    EngineFailure,
    InstanceLost,
    InternalError,
    InvalidMedia,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
    RequestTooLarge,
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.policy.admission import RequestBounds, ServerBounds
from triptych.services.router.settings import RouterSettings
from triptych.virtual.virtual_time import run
from triptych.wire.documents import recent_document

JSON = ResponseFormat(Grammar.JSON_OBJECT)
"""A format that no tokenizer without bytes can be held to."""


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def under_virtual_time(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return under_virtual_time


def digest(media: bytes) -> bytes:
    return blake2b(media, digest_size=32).digest()


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - what is waited for is in many places
        await asyncio.sleep(0.001)


def arrived(made: Bench, images: list[bytes]) -> bool:
    """Whether the last request sent to text has each image's embedding at its placeholder."""
    last = made.texts[0].requests[-1]
    return [place.ticket.key for place in last.placements] == [digest(data) for data in images]


@virtual
async def test_eight_images_spread_evenly_and_arrive_in_order() -> None:
    async with bench() as made:
        images = [image(seed) for seed in range(8)]
        events = await collect(made.router, ask("r", images))
        assert [len(encoder.encoded) for encoder in made.encoders] == [4, 4]
        assert arrived(made, images)
        assert "".join(event.text for event in events if isinstance(event, TokenChunk)) == "w0 w1 w2 w3 "
        prompt = len(made.texts[0].requests[0].token_ids)
        assert events[-1] == ChatFinished(Usage(prompt, 4, 32))
        assert events[-2] == ChoiceFinished(FinishReason.STOP)
        assert made.texts[0].requests[0].sampling.max_tokens == 16


@virtual
async def test_single_images_spread_over_equal_encoders() -> None:
    async with bench() as made:
        for seed in range(20):
            await collect(made.router, ask("r", [image(seed)]))
            await asyncio.sleep(0.2)
        assert all(6 <= len(encoder.encoded) <= 14 for encoder in made.encoders)


@virtual
async def test_an_image_goes_to_the_encoder_that_holds_its_embedding() -> None:
    async with bench() as made:
        for _ in range(6):
            await collect(made.router, ask("r", [image(1)]))
            await asyncio.sleep(0.2)
        assert sorted(len(encoder.encoded) for encoder in made.encoders) == [0, 6]


@virtual
async def test_a_text_only_request_calls_no_encoder() -> None:
    async with bench(encoders=0) as made:
        assert isinstance((await collect(made.router, ask("r")))[-1], ChatFinished)


@virtual
async def test_what_is_expected_of_answers_follows_those_that_have_ended() -> None:
    async with bench() as made:
        for number in range(30):
            await collect(made.router, ask(f"r{number}"))
        expected = made.router.cluster.machine.expected_output
        assert expected.predict(False, 100_000) < 100, "they had four tokens"
        assert expected.predict(True, 100_000) == 256


@virtual
async def test_the_timeline_is_complete() -> None:
    async with bench() as made:
        await collect(made.router, ask("r", [image(1), image(2)]))
        timeline = await made.router.timeline("r")
        assert (timeline.outcome, timeline.completion_tokens, timeline.text_instance) == (Outcome.DONE, 4, "text-0")
        assert {item.encoder for item in timeline.items} == {"encoder-0", "encoder-1"}
        assert [(item.pull_backend, item.pull_bytes, item.encode_attempts) for item in timeline.items] == [
            ("memory", 1, 1)
        ] * 2
        assert timeline.encode_s == pytest.approx(0.01)
        assert (timeline.queue_s, timeline.pull_s, timeline.prefill_s, timeline.decode_s) == (0.1, 0.2, 0.3, 0.4)
        assert 0 < timeline.ttft_s < timeline.total_s
        with pytest.raises(NotFound):
            await made.router.timeline("another")


@virtual
async def test_the_timeline_of_a_running_request_can_be_seen_and_history_is_bounded() -> None:
    async with bench(settings=RouterSettings(history_requests=2)) as made:
        async with asyncio.TaskGroup() as group:
            group.create_task(collect(made.router, ask("r0", [image(1)])))
            await asyncio.sleep(0.005)
            assert (await made.router.timeline("r0")).outcome is Outcome.RUNNING
        for number in (1, 2):
            await collect(made.router, ask(f"r{number}"))
        await asyncio.sleep(1)
        with pytest.raises(NotFound):
            await made.router.timeline("r0")
        assert (await made.router.timeline("r2")).outcome is Outcome.DONE


@virtual
async def test_ended_chats_are_told_without_contents_and_those_no_longer_kept_are_counted() -> None:
    async with bench(settings=RouterSettings(history_requests=2)) as made:
        router, began_s = made.router, asyncio.get_running_loop().time()
        assert router.recent_chats(None).position == 0
        async with asyncio.TaskGroup() as group:
            group.create_task(collect(router, ask("r0", [image(1), image(2)])))
            await asyncio.sleep(0.005)
            assert router.recent_chats(0).chats == []
            [since_s] = router.recent_chats(0).running_since_s
            assert since_s == pytest.approx(began_s, abs=0.001)
        await asyncio.sleep(2)
        recent = router.recent_chats(0)
        [chat] = recent.chats
        assert (recent.position, recent.missed, recent.running_since_s) == (1, 0, [])
        assert chat.started_s == pytest.approx(began_s, abs=0.001)
        assert len(chat.shape.media) == 2
        assert 0 < chat.shape.item_tokens < chat.shape.prompt_tokens == chat.timeline.prompt_tokens
        document = recent_document(recent)
        assert document["requests"][0]["images"] == [[info.width, info.height] for info in chat.shape.media]
        assert document["requests"][0]["came_s"] == pytest.approx(recent.now_s - chat.started_s, abs=1e-5)
        assert "r0" not in json.dumps(document)
        for number in (1, 2, 3):
            await collect(router, ask(f"r{number}"))
        await asyncio.sleep(2)
        recent = router.recent_chats(1)
        assert (recent.position, recent.missed, len(recent.chats), recent.left) == (4, 1, 2, 0)
        assert router.recent_chats(4).chats == router.recent_chats(9).chats == router.recent_chats(None).chats == []


@virtual
async def test_chats_that_were_refused_or_never_prepared_are_counted_apart() -> None:
    async with bench() as made:
        with pytest.raises(TriptychError):
            await collect(made.router, replace(ask("r0"), timeout_s=0))
        with pytest.raises(TriptychError):
            await collect(made.router, ask("r1", [b"no image"]))
        await asyncio.sleep(2)
        recent = made.router.recent_chats(0)
        assert (recent.refused, recent.unprepared, recent.chats) == (1, 1, [])


@virtual
async def test_a_lost_encoder_costs_only_its_items() -> None:
    async with bench() as made:
        images = [image(seed) for seed in range(4)]
        made.encoders[0].encode_s = 0.05
        answer = asyncio.Task(collect(made.router, ask("r", images)))
        await asyncio.sleep(0.03)
        made.encoders[0].kill()
        assert isinstance((await answer)[-1], ChatFinished)
        assert arrived(made, images)
        assert len(made.encoders[1].encoded) == 4
        attempts = [item.encode_attempts for item in (await made.router.timeline("r")).items]
        assert sorted(attempts) == [1, 1, 2, 2]


@virtual
async def test_killing_an_encoder_during_a_burst_loses_no_request() -> None:
    async with bench() as made:
        async with asyncio.TaskGroup() as group:
            answers = [
                group.create_task(collect(made.router, ask(f"r{n}", [image(3 * n + k) for k in range(3)])))
                for n in range(100)
            ]
            await asyncio.sleep(0.015)
            made.encoders[1].kill()
        assert all(isinstance(answer.result()[-1], ChatFinished) for answer in answers)


@virtual
async def test_a_restarted_encoder_is_used_again() -> None:
    async with bench(encoders=1) as made:
        made.encoders[0].kill()
        answer = asyncio.Task(collect(made.router, ask("r", [image(1)])))
        await asyncio.sleep(0.2)
        made.encoders[0].restart()
        assert isinstance((await answer)[-1], ChatFinished)


@virtual
async def test_without_encoders_images_are_unavailable_after_the_grace_period_and_text_works() -> None:
    async with bench(encoders=1) as made:
        made.encoders[0].kill()
        await asyncio.sleep(0.2)
        started_s = now_s()
        with pytest.raises(Unavailable):
            await collect(made.router, ask("r", [image(1)]))
        assert now_s() - started_s <= 1.1
        assert isinstance((await collect(made.router, ask("text")))[-1], ChatFinished)
        readiness = await made.router.readiness()
        assert (readiness.ready, readiness.missing) == (False, ("encode",))


@virtual
async def test_a_failed_pull_reencodes_exactly_the_named_items() -> None:
    async with bench() as made:
        images = [image(seed) for seed in range(4)]
        made.texts[0].failures.append(TransferFailed("broken", items=(2,)))
        assert isinstance((await collect(made.router, ask("r", images)))[-1], ChatFinished)
        assert arrived(made, images)
        assert sum(len(encoder.encoded) for encoder in made.encoders) == 5
        first, second = made.texts[0].requests
        assert [
            a.ticket.lease_id != b.ticket.lease_id for a, b in zip(first.placements, second.placements, strict=True)
        ]
        assert first.placements[2].ticket.holder != second.placements[2].ticket.holder


@virtual
async def test_repeatedly_failing_pulls_end_in_one_error() -> None:
    async with bench() as made:
        made.texts[0].failures.extend(TransferFailed("broken", items=(0,)) for _ in range(9))
        with pytest.raises(TransferFailed):
            await collect(made.router, ask("r", [image(1)]))
        assert len(made.texts[0].requests) == 3


@virtual
async def test_an_evicted_embedding_is_encoded_again() -> None:
    async with bench(encoders=1) as made:
        made.texts[0].failures.append(TransferFailed("broken", items=(0,)))
        made.encoders[0].forgets = True
        assert isinstance((await collect(made.router, ask("r", [image(1), image(2)])))[-1], ChatFinished)
        assert len(made.encoders[0].encoded) == 4


@virtual
async def test_a_text_instance_lost_before_the_first_token_is_replaced() -> None:
    async with bench(texts=2) as made:
        answer = asyncio.Task(collect(made.router, ask("r", [image(1), image(2)])))
        await until(lambda: any(text.requests for text in made.texts))
        next(text for text in made.texts if text.requests).kill()
        assert isinstance((await answer)[-1], ChatFinished)
        timeline = await made.router.timeline("r")
        assert (timeline.text_attempts, [item.encode_attempts for item in timeline.items]) == (2, [1, 1])


@virtual
async def test_losing_the_only_text_instance_ends_every_request_in_one_error_within_two_seconds() -> None:
    async with bench() as made:
        answers = [asyncio.Task(collect(made.router, ask(f"r{n}", [image(n)] if n % 2 else []))) for n in range(20)]
        await until(lambda: made.texts[0].running > 5)
        made.texts[0].kill()
        killed_s = now_s()
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
        assert now_s() - killed_s < 2
        with pytest.raises(Unavailable):
            await collect(made.router, ask("later"))


@virtual
async def test_losing_text_ends_requests_that_are_still_being_encoded() -> None:
    async with bench() as made:
        for encoder in made.encoders:
            encoder.encode_s = 30
        answer = asyncio.Task(collect(made.router, ask("r", [image(1)])))
        await asyncio.sleep(0.1)
        made.texts[0].kill()
        killed_s = now_s()
        with pytest.raises(Unavailable):
            await answer
        assert now_s() - killed_s < 2


@virtual
async def test_text_lost_in_mid_stream_again_and_again_is_one_clear_error() -> None:
    async with bench(texts=3) as made:
        for text in made.texts:
            text.late_failures.append(InstanceLost("gone"))
        seen: list[ChatEvent] = []
        with pytest.raises(InstanceLost):  # noqa: PT012 - what came before the error counts
            async for events in made.router.chat(ask("r", [image(1)])):
                seen += events
        assert [event.token_ids for event in seen if isinstance(event, TokenChunk)] == [(0,), (1,), (2,)]
        timeline = await made.router.timeline("r")
        assert (timeline.outcome, timeline.error, timeline.completion_tokens) == (Outcome.FAILED, "instance_lost", 3)
        assert (timeline.text_attempts, timeline.continuations) == (3, 2)


@virtual
async def test_a_text_stream_without_an_end_is_a_lost_instance() -> None:
    async with bench() as made:
        made.texts[0].finishes = False
        with pytest.raises(InstanceLost):
            await collect(made.router, ask("r"))


class Lingering(FakeText):
    """Ends its calls ``lingers_s`` after the end of the answer."""

    lingers_s = 0.0
    ended = 0

    async def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        async with aclosing(super().generate(request)) as stream:
            async for events in stream:
                yield events
        await asyncio.sleep(self.lingers_s)
        self.ended += 1


@virtual
@pytest.mark.parametrize(("lingers_s", "ended"), [(0.0, 1), (0.5, 1), (60.0, 0)])
async def test_a_call_that_outlives_its_answer_is_cancelled_after_a_bound(lingers_s: float, ended: int) -> None:
    async with bench() as made:
        text = made.texts[0]
        text.__class__ = Lingering
        assert isinstance(text, Lingering)
        text.lingers_s = lingers_s
        began_s = now_s()
        assert isinstance((await collect(made.router, ask("r")))[-1], ChatFinished)
        assert now_s() - began_s < 0.1, "the caller does not wait for the call's end"
        await asyncio.sleep(1.1)
        assert (text.ended, made.router.running) == (ended, 0)


@virtual
@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.0105, 0.013, 0.02, 0.03])
async def test_a_cancelled_request_stops_all_its_calls(after_s: float) -> None:
    async with bench() as made:
        async with aclosing(made.router.chat(ask("r", [image(1), image(2)]))) as answer:
            reading = asyncio.Task(_read(answer))
            await asyncio.sleep(after_s)
            reading.cancel()
            await asyncio.wait([reading])
        await asyncio.sleep(0.002)
        assert not any(encoder.working for encoder in made.encoders)
        assert not any(text.running for text in made.texts)
        if after_s:
            assert (await made.router.timeline("r")).outcome is Outcome.CANCELLED


async def _read(answer: Any) -> None:
    async for _ in answer:
        pass


@virtual
async def test_the_deadline_ends_a_request_in_any_phase() -> None:
    async with bench() as made:
        made.encoders[0].encode_s = 100
        with pytest.raises(DeadlineExceeded):
            await collect(made.router, ask("r", [image(1), image(2)], timeout_s=0.5))
        assert not made.encoders[0].working
        made.texts[0].token_s = 100
        with pytest.raises(DeadlineExceeded):
            await collect(made.router, ask("r2", timeout_s=0.5))


@virtual
async def test_requests_above_the_limit_are_refused_with_retry_after() -> None:
    async with bench(
        settings=RouterSettings(capacity=ServerBounds(max_concurrent_requests=2, retry_after_s=7))
    ) as made:
        answers = [asyncio.Task(collect(made.router, ask(f"r{n}"))) for n in range(3)]
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, Overloaded)]
        assert [error.retry_after_s for error in refused] == [7]


@virtual
@pytest.mark.parametrize("images", [0, 1])
async def test_refused_requests_are_told_when_there_will_be_places_as_fast_as_requests_end(images: int) -> None:
    """By their number, or by the bytes of their media."""
    nbytes = len(image(0))
    limits = ServerBounds(max_media_bytes=2 * nbytes) if images else ServerBounds(max_concurrent_requests=2)
    async with bench(texts=1, settings=RouterSettings(capacity=limits)) as made:

        def sent(name: str, number: int) -> asyncio.Task[object]:
            media = [image(number * 2 + ord(name[0]) * 100)] * images
            return asyncio.Task(collect(made.router, ask(f"{name}{number}", media)))

        made.texts[0].token_s = 1.0
        for number in range(4):
            await asyncio.gather(sent("p", number), sent("q", number))
        running = [sent("r", number) for number in range(2)]
        await asyncio.sleep(0.01)
        outcomes = await asyncio.gather(*(sent("s", number) for number in range(8)), return_exceptions=True)
        told = [error.retry_after_s or 0.0 for error in outcomes if isinstance(error, Overloaded)]
        assert len(told) == 8
        assert told == sorted(told)
        answer_s = made.router.attainment.read().ttft_s if False else 4.0
        assert told[-1] == pytest.approx(4 * answer_s, rel=0.3), "two of them at a time"
        await asyncio.gather(*running)


@virtual
@pytest.mark.parametrize(
    "bad", [(), (TokenChunk((1,), "x", 5),), (TokenChunk(tuple(range(500)), "x"),)], ids=["nothing", "choice", "many"]
)
async def test_an_instance_that_sends_what_it_may_not_costs_no_answer(bad: tuple[TextEvent, ...]) -> None:
    async with bench(texts=2) as made:
        generate = made.texts[0].generate

        async def strange(request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
            async with aclosing(generate(request)) as stream:
                async for events in stream:
                    yield bad
                    yield events

        made.texts[0].generate = strange  # type: ignore[method-assign]
        expected = await collect(made.router, ask("before"))
        for number in range(6):
            assert len(await collect(made.router, ask(f"r{number}"))) == len(expected)


@virtual
async def test_a_burst_of_200_requests_is_answered_in_full() -> None:
    async with bench() as made:
        answers = [
            asyncio.Task(collect(made.router, ask(f"r{n}", [image(n * 4 + k) for k in range(n % 5)])))
            for n in range(200)
        ]
        outcomes = await asyncio.gather(*answers)
        assert all(isinstance(outcome[-1], ChatFinished) for outcome in outcomes)
        left, right = (len(encoder.encoded) for encoder in made.encoders)
        assert abs(left - right) <= 20


@virtual
async def test_requests_wait_for_arena_room_without_holding_memory() -> None:
    # Room for four embeddings in all; each request needs three.
    async with bench(arena_bytes=2 * 192) as made:
        answers = [
            asyncio.Task(collect(made.router, ask(f"r{n}", [image(n * 3 + k) for k in range(3)]))) for n in range(20)
        ]
        outcomes = await asyncio.gather(*answers)
        assert all(isinstance(outcome[-1], ChatFinished) for outcome in outcomes)
        assert sum(len(encoder.encoded) for encoder in made.encoders) == 60


@virtual
async def test_a_full_arena_requeues_the_request() -> None:
    async with bench() as made:
        made.encoders[0].failures.extend(ArenaFull("full") for _ in range(3))
        made.encoders[1].encode_s = 0.05
        images = [image(1), image(2)]
        assert isinstance((await collect(made.router, ask("r", images)))[-1], ChatFinished)
        assert arrived(made, images)


@virtual
async def test_a_permanently_full_encoder_ends_in_overload_before_the_deadline() -> None:
    async with bench(encoders=1) as made:
        made.encoders[0].failures.extend(ArenaFull("full") for _ in range(100))
        started_s = now_s()
        with pytest.raises(ArenaFull):
            await collect(made.router, ask("r", [image(1)], timeout_s=30))
        assert 27 < now_s() - started_s < 30
        assert len(made.encoders[0].failures) > 70


@virtual
async def test_the_waiting_queue_is_bounded() -> None:
    async with bench(
        encoders=1, arena_bytes=192, settings=RouterSettings(cluster=ClusterLimits(max_waiting_requests=1))
    ) as made:
        answers = [asyncio.Task(collect(made.router, ask(f"r{n}", [image(n)]))) for n in range(4)]
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        assert sum(isinstance(outcome, Overloaded) for outcome in outcomes) == 2
        assert sum(isinstance(outcome, list) for outcome in outcomes) == 2


@virtual
async def test_a_request_larger_than_all_arenas_is_refused_for_good() -> None:
    async with bench(arena_bytes=2 * 192) as made:
        with pytest.raises(InvalidRequest, match="larger than the encoders' arenas"):
            await collect(made.router, ask("r", [image(n) for n in range(5)]))
        with pytest.raises(InvalidRequest, match="larger than the encoders' arenas"):
            await collect(made.router, ask("r2", [image(1, side_px=140)]))


@virtual
async def test_choices_end_independently_and_usage_is_their_sum() -> None:
    async with bench() as made:
        events = await collect(made.router, ask("r", [image(1)], sampling=SamplingParams(max_tokens=16, n=3)))
        assert len(made.texts[0].requests) == 1
        assert sum(len(encoder.encoded) for encoder in made.encoders) == 1
        for choice in range(3):
            chunks = [event for event in events if isinstance(event, TokenChunk) and event.choice == choice]
            assert "".join(chunk.text for chunk in chunks) == "w0 w1 w2 w3 "
        ends = [event for event in events if isinstance(event, ChoiceFinished)]
        assert ends == [ChoiceFinished(FinishReason.STOP, choice) for choice in range(3)]
        prompt = len(made.texts[0].requests[0].token_ids)
        assert events[-1] == ChatFinished(Usage(prompt, 12, 4))
        timeline = await made.router.timeline("r")
        assert (timeline.completion_tokens, timeline.decode_s) == (12, 2.4)


@virtual
async def test_a_request_above_every_text_instances_kv_memory_is_refused_before_encoding() -> None:
    async with bench(texts=2) as made:
        for text, kv_tokens in zip(made.texts, (50, 80), strict=True):
            text.kv_tokens = kv_tokens
            text.kill()
            text.restart()
        await until(lambda: made.router.cluster.machine.instances.kv_tokens == 80)
        with pytest.raises(InvalidRequest) as caught:
            await collect(made.router, ask("r", [image(1)], sampling=SamplingParams(max_tokens=16, n=4)))
        assert caught.value.param == "n"
        assert not any(encoder.encoded for encoder in made.encoders)
        await collect(made.router, ask("open", [image(1)], sampling=SamplingParams(n=4)))
        (request,) = (request for text in made.texts for request in text.requests)
        assert request.sampling.max_tokens == 80 // 4 - len(request.token_ids)


@virtual
async def test_an_answer_without_max_tokens_ends_with_the_last_whole_block_of_its_choice() -> None:
    async with bench() as made:
        made.texts[0].kv_tokens, made.texts[0].kv_block_tokens = 112, 16
        made.texts[0].kill()
        made.texts[0].restart()
        await until(lambda: made.router.cluster.machine.instances.kv_tokens == 112)
        await collect(made.router, ask("r", [image(1)], sampling=SamplingParams(n=3)))
        (request,) = made.texts[0].requests
        assert request.sampling.max_tokens == 32 - len(request.token_ids)


@virtual
async def test_a_stream_that_ends_before_all_choices_is_an_error() -> None:
    async with bench() as made:
        made.texts[0].finishes = False
        with pytest.raises(InstanceLost):
            await collect(made.router, ask("r", sampling=SamplingParams(max_tokens=16, n=2)))


@virtual
@pytest.mark.parametrize(
    ("request_", "expected", "param"),
    [
        (ask("r", [b"not an image"]), InvalidMedia, "messages[0].content[0]"),
        (ask("r", [image(1), image(2)[:20]]), InvalidMedia, "messages[0].content[1]"),
        (ask("r", [image(1, side_px=14 * 17)]), InvalidMedia, "messages[0].content[0]"),
        (ask("r", [image(1)] * 5), InvalidRequest, "messages"),
        (ask("r", model="another"), ModelNotFound, "model"),
        (ask(""), InvalidRequest, "request_id"),
        (ask("x" * 257), InvalidRequest, "request_id"),
        (ask("r", timeout_s=-1), InvalidRequest, "timeout"),
        (replace(ask("r"), priority=2**31), InvalidRequest, "priority"),
        (ask("r", timeout_s=float("nan")), InvalidRequest, "timeout"),
        (ask("r", sampling=SamplingParams(temperature=-1)), InvalidRequest, "temperature"),
        (ask("r", sampling=SamplingParams(max_tokens=5000)), ContextTooLong, "max_tokens"),
        (ask("r", [image(1)], sampling=SamplingParams(n=17)), InvalidRequest, "n"),
        (ask("r", [image(1)], sampling=SamplingParams(logit_bias=((1005, 1.0),))), InvalidRequest, "logit_bias"),
        (ask("r", [image(1)], sampling=SamplingParams(stop_token_ids=(1005,))), InvalidRequest, "stop_token_ids"),
        (ask("r", [image(1)], sampling=SamplingParams(min_tokens=4090)), InvalidRequest, "min_tokens"),
        (ask("r", [image(1)], sampling=SamplingParams(response_format=JSON)), InvalidRequest, "response_format"),
    ],
)
async def test_invalid_input_is_named(request_: Any, expected: type[TriptychError], param: str) -> None:
    async with bench(settings=RouterSettings(request_size=RequestBounds(max_items_per_request=4))) as made:
        with pytest.raises(expected) as caught:
            await collect(made.router, request_)
        assert (type(caught.value), caught.value.param) == (expected, param)
        assert not any(encoder.encoded for encoder in made.encoders)


@pytest.mark.parametrize(
    "error", [InvalidMedia("cannot be decoded"), RequestTooLarge("has 9 bytes"), InvalidRequest("takes 3 tokens")]
)
@virtual
async def test_an_image_refused_by_an_encoder_is_named_and_fails_only_its_request(error: TriptychError) -> None:
    async with bench(encoders=1) as made:
        made.encoders[0].failures.append(error)
        with pytest.raises(type(error)) as caught:
            await collect(made.router, ask("r", [image(1), image(2)]))
        assert caught.value.param == "messages[0].content[0]"
        assert isinstance((await collect(made.router, ask("next", [image(1)])))[-1], ChatFinished)


@virtual
@pytest.mark.parametrize("error", [EngineFailure("failed"), ValueError("a defect")])
async def test_engine_failures_and_unexpected_errors_fail_one_request(error: Exception) -> None:
    async with bench(encoders=1) as made:
        made.encoders[0].failures.append(error)
        with pytest.raises(InternalError):
            await collect(made.router, ask("r", [image(1)]))
        assert isinstance((await collect(made.router, ask("next", [image(1)])))[-1], ChatFinished)


@virtual
async def test_a_ticket_of_another_length_is_never_used() -> None:
    async with bench(encoders=1) as made:
        made.encoders[0].extra_tokens = 1
        with pytest.raises(InternalError):
            await collect(made.router, ask("r", [image(1)]))
        assert not made.texts[0].requests


@virtual
async def test_a_request_id_can_be_used_once_at_a_time() -> None:
    async with bench() as made:
        first = asyncio.Task(collect(made.router, ask("r", [image(1)])))
        await asyncio.sleep(0.005)
        with pytest.raises(InvalidRequest) as caught:
            await collect(made.router, ask("r"))
        assert caught.value.param == "request_id"
        assert isinstance((await first)[-1], ChatFinished)
        await asyncio.sleep(0.1)
        assert isinstance((await collect(made.router, ask("r")))[-1], ChatFinished)


@virtual
async def test_an_instance_with_another_model_gets_no_work_and_is_listed() -> None:
    async with bench() as made:
        other = ModelInfo("other", "1", made.encoders[0].model.dtype, 8, 4096)
        made.encoders[1].kill()
        await asyncio.sleep(1)
        made.encoders[1].model = other
        made.encoders[1].restart()
        await asyncio.sleep(2)
        await collect(made.router, ask("r", [image(n) for n in range(4)]))
        assert [len(encoder.encoded) for encoder in made.encoders] == [4, 0]
        readiness = await made.router.readiness()
        assert readiness.ready
        assert "encoder-1: serves another model" in readiness.instances
        assert [model.model_id for model in await made.router.models()] == ["fake"]


@virtual
async def test_a_draining_router_refuses_new_requests_and_finishes_running_ones() -> None:
    async with bench() as made:
        answer = asyncio.Task(collect(made.router, ask("r", [image(1)])))
        await asyncio.sleep(0.005)
        draining = asyncio.Task(made.router.drain())
        await asyncio.sleep(0.001)
        with pytest.raises(Unavailable):
            await collect(made.router, ask("late"))
        assert isinstance((await answer)[-1], ChatFinished)
        await draining
        assert made.idle, "what it held is released"


@virtual
async def test_before_any_instance_is_seen_requests_are_unavailable() -> None:
    async with bench(encoders=0, texts=0) as made:
        with pytest.raises(Unavailable):
            await collect(made.router, ask("r"))
        assert (await made.router.readiness()).missing == ("encode", "prefill", "decode")
        assert await made.router.models() == ()


@virtual
async def test_tokenize_gives_the_ids_that_a_chat_would_prefill() -> None:
    async with bench() as made:
        request = ask("r", [image(0)])
        told = await made.router.tokenize(request)
        await collect(made.router, request)
        assert (made.texts[0].requests[-1].token_ids, told.token_strs) == (told.token_ids, ())
        spelled = await made.router.tokenize(request, return_token_strs=True)
        assert (spelled.token_ids, spelled.token_strs.count("<image>")) == (told.token_ids, 4)
        raw = replace(request, messages=(), prompt="w5 w6", request_id="raw")
        await collect(made.router, raw)
        assert made.texts[0].requests[-1].token_ids == (await made.router.tokenize(raw)).token_ids
        with pytest.raises(InvalidRequest, match="not both"):
            await made.router.tokenize(replace(request, prompt="w5"))
        with pytest.raises(InvalidRequest, match="does not support tools"):
            await made.router.tokenize(replace(request, tools="[]"))
        with pytest.raises(ModelNotFound):
            await made.router.tokenize(ask("r", model="other"))
