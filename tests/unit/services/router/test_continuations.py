"""An answer whose text instance is lost in mid-stream goes on at another one, and its caller sees no difference."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.unit.services.router.fakes import Bench, FakeText, ask, bench, collect, image
from tests.unit.services.router.test_service import now_s, until, virtual
from triptych.domain.chat import ChatRequest
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.generation import (
    ChatEvent,
    ChatFinished,
    ChoiceFinished,
    Finished,
    FinishReason,
    Ready,
    TextEvent,
    TextRequest,
    TokenChunk,
)
from triptych.domain.sampling import SamplingParams
from triptych.domain.timeline import Outcome
from triptych.errors import DeadlineExceeded, EngineFailure, InstanceLost, Overloaded, TriptychError, Unavailable

SEEDED = SamplingParams(max_tokens=16, seed=5)


def shape(events: Sequence[ChatEvent]) -> tuple[dict[int, tuple[tuple[int, ...], str, FinishReason]], int]:
    """By choice the tokens, the text and the reason; and the completion tokens."""
    tokens: dict[int, tuple[int, ...]] = {}
    text: dict[int, str] = {}
    reasons: dict[int, FinishReason] = {}
    completion_tokens = 0
    for event in events:
        match event:
            case TokenChunk(token_ids, piece, choice):
                tokens[choice] = tokens.get(choice, ()) + token_ids
                text[choice] = text.get(choice, "") + piece
            case ChoiceFinished(reason, choice):
                assert choice not in reasons
                reasons[choice] = reason
            case ChatFinished(usage):
                completion_tokens = usage.completion_tokens
    return {choice: (tokens[choice], text[choice], reasons[choice]) for choice in sorted(reasons)}, completion_tokens


async def serving(made: Bench) -> FakeText:
    await until(lambda: any(text.running for text in made.texts))
    return next(text for text in made.texts if text.running)


async def collect_killing(made: Bench, request: ChatRequest, after: int) -> tuple[list[ChatEvent], FakeText, FakeText]:
    """The whole answer, where its first text instance dies once ``after`` events have arrived; and both instances."""
    seen: list[ChatEvent] = []
    first: FakeText | None = None
    async with aclosing(made.router.chat(request)) as stream:
        async for events in stream:
            seen += events
            if first is None and len(seen) >= after:
                first = await serving(made)
                first.kill()
    assert first is not None
    (second,) = (text for text in made.texts if text is not first and text.requests)
    return seen, first, second


@virtual
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("images", [0, 2])
@pytest.mark.parametrize("position", range(1, 4))
async def test_a_stream_goes_on_at_another_text_instance_from_every_token(
    position: int, images: int, choices: int
) -> None:
    sampling = replace(SEEDED, n=choices)
    media = [image(seed) for seed in range(images)]
    async with bench(texts=2) as made:
        whole = shape(await collect(made.router, ask("whole", media, sampling=sampling)))
        for text in made.texts:
            text.requests.clear()
        seen, first, second = await collect_killing(
            made, ask("broken", media, sampling=sampling), after=position * choices
        )
        assert shape(seen) == whole
        (begun,), (continued,) = first.requests, second.requests
        assert begun.continued == ()
        sent = tuple(range(position))
        assert continued.continued == tuple(ContinuedChoice(choice, sent) for choice in range(choices))
        assert (continued.token_ids, continued.sampling) == (begun.token_ids, begun.sampling)
        assert [placement.item for placement in continued.placements] == list(range(images))
        timeline = await made.router.timeline("broken")
        assert (timeline.outcome, timeline.completion_tokens) == (Outcome.DONE, 4 * choices)
        assert (timeline.continuations, timeline.text_attempts) == (1, 2)
        assert timeline.text_instance == second.instance_id
        assert 0 < timeline.interrupted_s < timeline.decode_s <= timeline.total_s


@virtual
async def test_items_are_placed_at_encoders_again() -> None:
    async with bench(texts=2, encoders=1) as made:
        seen, _, second = await collect_killing(made, ask("r", [image(1), image(2)], sampling=SEEDED), after=2)
        assert isinstance(seen[-1], ChatFinished)
        assert len(second.requests[0].placements) == 2
        assert len(made.encoders[0].encoded) == 4
        assert [item.encode_attempts for item in (await made.router.timeline("r")).items] == [2, 2]


@virtual
async def test_every_attempt_has_the_same_seed_and_two_requests_have_not() -> None:
    async with bench(texts=2) as made:
        _, first, second = await collect_killing(made, ask("r", sampling=SamplingParams(max_tokens=16)), after=1)
        seed = first.requests[0].sampling.seed
        assert seed is not None
        assert second.requests[0].sampling.seed == seed
        await collect(made.router, ask("other", sampling=SamplingParams(max_tokens=16)))
        await collect(made.router, ask("own", sampling=SEEDED))
        other, own = second.requests[1:]
        assert other.sampling.seed not in {None, seed}
        assert own.sampling.seed == SEEDED.seed


class Uneven(FakeText):
    """Sends four tokens of choice 0 and two of choice 1, each with a step of its own."""

    async def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        self.requests.append(request)
        self.running += 1
        try:
            yield (Ready((), 0.0, 0.0),)
            lengths = {0: 4, 1: 2}
            for number in range(4):
                running = [choice for choice, sent in request.begun.items() if len(sent) <= number < lengths[choice]]
                for choice in running:
                    await self.spend(self.token_s)
                    chunk = TokenChunk((number,), f"w{number} ", choice)
                    last = number + 1 == lengths[choice]
                    yield [chunk, Finished(FinishReason.STOP, number + 1, 0.0, 0.0, choice)] if last else [chunk]
        finally:
            self.running -= 1


@virtual
@pytest.mark.parametrize(
    ("after", "continued"),
    [
        (1, {0: (0,), 1: ()}),
        (2, {0: (0,), 1: (0,)}),
        (3, {0: (0, 1), 1: (0,)}),
        (5, {0: (0, 1)}),
        (6, {0: (0, 1, 2)}),
    ],
)
async def test_choices_go_on_from_where_each_is_and_one_that_has_finished_does_not_run_again(
    after: int, continued: dict[int, tuple[int, ...]]
) -> None:
    async with bench(texts=2) as made:
        for text in made.texts:
            text.__class__ = Uneven
        seen, _, second = await collect_killing(made, ask("r", sampling=replace(SEEDED, n=2)), after)
        assert second.requests[0].begun == continued
        choices, completion_tokens = shape(seen)
        assert {choice: tokens for choice, (tokens, _, _) in choices.items()} == {0: (0, 1, 2, 3), 1: (0, 1)}
        assert completion_tokens == 6


@virtual
async def test_the_only_text_instance_goes_on_once_it_is_back() -> None:
    async with bench() as made:
        (text,) = made.texts
        seen: list[ChatEvent] = []
        async for events in made.router.chat(ask("r", [image(1)], sampling=SEEDED)):
            seen += events
            if text.epoch == 1:
                text.kill()
                await asyncio.sleep(0.3)
                text.restart()
        assert shape(seen) == ({0: ((0, 1, 2, 3), "w0 w1 w2 w3 ", FinishReason.STOP)}, 4)
        assert [len(request.continued) for request in text.requests] == [0, 1]


@virtual
@pytest.mark.parametrize(("drains", "is_answered"), [(True, True), (False, False)])
async def test_a_rolling_restart_of_text_instances_costs_an_answer_no_attempts(drains: bool, is_answered: bool) -> None:
    """The answer outlasts the drain of each, so that each ends with it. Those that only died may have died of it."""
    async with bench(texts=6) as made:
        for text in made.texts:
            text.tokens, text.token_s = 10, 0.2
        asked = asyncio.Task(collect(made.router, ask("r", sampling=SEEDED)))
        for _ in made.texts:
            if asked.done():
                break
            text = await serving(made)
            text.drains = drains
            await asyncio.sleep(0.3)
            text.kill()
            await asyncio.sleep(0.05)
            text.drains = False
            text.restart()
            if not drains:
                await asyncio.sleep(0.1)  # a death is acted on a little later
        if is_answered:
            assert shape(await asked)[1] == 10
            assert (await made.router.timeline("r")).text_attempts > 4
        else:
            with pytest.raises(InstanceLost):
                await asked


@virtual
@pytest.mark.parametrize("images", [0, 1])
async def test_a_stream_ends_soon_with_a_clear_error_if_no_text_instance_is_left(images: int) -> None:
    async with bench() as made:
        with pytest.raises(Unavailable):  # noqa: PT012 - the instance dies in mid-stream
            async for _ in made.router.chat(ask("r", [image(1)] * images)):
                made.texts[0].kill()
                killed_s = now_s()
        assert now_s() - killed_s < 2
        assert (await made.router.timeline("r")).error == "instance_lost"


@virtual
async def test_an_instance_of_the_release_before_gets_no_continuation() -> None:
    async with bench(texts=2) as made:
        for text in made.texts:
            text.continues = False
            text.kill()
            text.restart()
        await asyncio.sleep(3)
        with pytest.raises(InstanceLost):  # noqa: PT012 - the instance dies in mid-stream
            async for _ in made.router.chat(ask("r", sampling=SEEDED)):
                (await serving(made)).kill()
                killed_s = now_s()
        assert now_s() - killed_s < 0.1, "nothing to wait for"
        assert sum(len(text.requests) for text in made.texts) == 1


@virtual
@pytest.mark.parametrize(
    ("error", "is_continued"),
    [
        (EngineFailure("not finite"), True),
        (Unavailable("shutting down"), True),
        (Overloaded("full"), True),
        (DeadlineExceeded("late"), False),
    ],
    ids=str,
)
async def test_only_errors_that_another_instance_may_not_have_are_continued(
    error: TriptychError, is_continued: bool
) -> None:
    async with bench(texts=2) as made:
        for text in made.texts:
            text.token_s = 0.1
        answer = asyncio.Task(collect(made.router, ask("r", [image(1)], sampling=SEEDED)))
        (await serving(made)).late_failures.append(error)
        if is_continued:
            assert shape(await answer)[0] == {0: ((0, 1, 2, 3), "w0 w1 w2 w3 ", FinishReason.STOP)}
        else:
            with pytest.raises(type(error)):
                await answer
        assert sum(len(text.requests) for text in made.texts) == 1 + is_continued


@virtual
async def test_an_engine_that_fails_twice_on_an_answer_is_its_error() -> None:
    async with bench(texts=3) as made:
        for text in made.texts:
            text.late_failures.append(EngineFailure("not finite"))
        with pytest.raises(EngineFailure):
            await collect(made.router, ask("r"))
        assert sum(len(text.requests) for text in made.texts) == 2


@virtual
async def test_a_deadline_that_passes_between_two_text_instances_ends_the_stream() -> None:
    async with bench(encoders=1) as made:
        (text,), (encoder,) = made.texts, made.encoders
        with pytest.raises(DeadlineExceeded):  # noqa: PT012 - the instance dies in mid-stream
            async for _ in made.router.chat(ask("r", [image(1)], sampling=SEEDED, timeout_s=2.0)):
                encoder.encode_s = 100.0
                text.kill()
                text.restart()
        timeline = await made.router.timeline("r")
        assert timeline.total_s == pytest.approx(2.0)
        assert timeline.continuations == 0
        acted_on_s = 0.05  # after the death
        assert timeline.interrupted_s == pytest.approx(2.0 - timeline.ttft_s - acted_on_s, abs=0.01)


@virtual
async def test_a_caller_that_leaves_between_two_text_instances_leaves_nothing_behind() -> None:
    async with bench(encoders=1) as made:
        (encoder,) = made.encoders
        async with aclosing(made.router.chat(ask("r", [image(1)], sampling=SEEDED))) as stream:
            await anext(stream)
            encoder.encode_s = 100.0
            made.texts[0].kill()
            made.texts[0].restart()
            await asyncio.sleep(0.5)
            assert encoder.working == 1
        await asyncio.sleep(0.1)
        assert not encoder.working
        assert (await made.router.timeline("r")).outcome is Outcome.CANCELLED
