"""Answers that one text instance begins and another one goes on with, by its keys and values."""

import asyncio
from dataclasses import replace

import pytest

from tests.unit.services.router.fakes import Bench, FakeText, ask, bench, collect, image
from tests.unit.services.router.test_continuations import shape
from tests.unit.services.router.test_service import until, virtual
from triptych.domain.chat import ChatRequest
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.generation import ChatEvent
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import Role
from triptych.domain.timeline import Outcome
from triptych.errors import EngineFailure, Overloaded, TransferFailed, TriptychError, Unavailable
from triptych.policy.policies import PolicyNames
from triptych.services.router.settings import RouterSettings

SEEDED = SamplingParams(max_tokens=16, seed=5)
APART = (Role.P, Role.D)


async def whole(images: int = 0, sampling: SamplingParams = SEEDED) -> object:
    """The answer of one instance."""
    async with bench() as made:
        return shape(await collect(made.router, ask("whole", [image(n) for n in range(images)], sampling=sampling)))


def texts(made: Bench, role: Role) -> list[FakeText]:
    return [text for text in made.texts if text.role is role]


@virtual
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("images", [0, 2])
async def test_an_answer_goes_on_where_its_keys_and_values_are_pulled(images: int, choices: int) -> None:
    sampling = SamplingParams(max_tokens=16, seed=5, n=choices)
    expected = await whole(images, sampling)
    async with bench(roles=APART) as made:
        prefill, decode = made.texts
        media = [image(number) for number in range(images)]
        assert shape(await collect(made.router, ask("r", media, sampling=sampling))) == expected
        (first,), (second,) = prefill.requests, decode.requests
        assert (first.transfers_kv, first.continued, first.kv_segments) == (True, (), ())
        assert first.kv_lease_s > 0
        assert (second.transfers_kv, len(second.continued), second.sampling) == (False, choices, first.sampling)
        assert [placement.item for placement in second.placements] == list(range(images))
        prompt = len(first.token_ids)
        assert second.kv_segments[-1].end == prompt
        timeline = await made.router.timeline("r")
        assert (timeline.outcome, timeline.text_attempts, timeline.continuations) == (Outcome.DONE, 1, 0)
        assert (timeline.prefill_instance, timeline.text_instance) == ("text-0", "text-1")
        assert (timeline.kv_pulled_tokens, timeline.kv_computed_tokens) == (prompt, 0)
        assert timeline.kv_pull_bytes == 32 * prompt
        assert 0 < timeline.kv_transfer_s < timeline.decode_s
        assert timeline.interrupted_s == 0
        assert timeline.ttft_s + timeline.decode_s == pytest.approx(timeline.total_s)
        assert all(item.pull_bytes == 1 for item in timeline.items), "those of the one that prefilled"
        assert [len(encoder.encoded) for encoder in made.encoders] in ([0, 0], [1, 1])


@virtual
async def test_nothing_waits_for_leases_once_the_prompt_is_computed() -> None:
    async with bench(roles=APART) as made:
        made.texts[0].token_s = 0.05
        await collect(made.router, ask("r", [image(1)], sampling=SEEDED))
        timeline = await made.router.timeline("r")
        assert timeline.kv_transfer_s == pytest.approx(0.002 + 0.001 * 4 + 0.005, abs=0.003)


@virtual
async def test_an_answer_of_one_token_is_not_kv_transferred() -> None:
    async with bench(roles=APART) as made:
        for text in made.texts:
            text.tokens = 1
        await collect(made.router, ask("r", [image(1)], sampling=SEEDED))
        assert [len(text.requests) for text in made.texts] == [1, 0]
        assert not (await made.router.timeline("r")).prefill_instance


@virtual
@pytest.mark.parametrize("images", [0, 2])
async def test_what_could_not_be_sealed_is_computed(images: int) -> None:
    expected = await whole(images)
    async with bench(roles=APART) as made:
        made.texts[0].seals = False
        seen = await collect(made.router, ask("r", [image(n) for n in range(images)], sampling=SEEDED))
        assert shape(seen) == expected
        assert made.texts[1].requests[0].kv_segments == ()


async def broken(made: Bench, request: ChatRequest) -> tuple[object, list[FakeText]]:
    """The answer, and where it was asked for."""
    seen: list[ChatEvent] = await collect(made.router, request)
    return shape(seen), [text for text in made.texts if text.requests]


@virtual
@pytest.mark.parametrize("images", [0, 2])
@pytest.mark.parametrize("error", [Unavailable("gone"), Overloaded("full"), EngineFailure("broke")])
async def test_another_one_goes_on_if_the_first_fails_before_its_first_token(error: TriptychError, images: int) -> None:
    expected = await whole(images)
    async with bench(roles=(Role.P, Role.D, Role.D)) as made:
        for text in texts(made, Role.D):
            text.failures.append(error)
            break
        made.texts[2].failures.clear()
        results = []
        for number in range(2):  # one of the two meets the failure
            media = [image(10 * number + n) for n in range(images)]
            results.append(shape(await collect(made.router, ask(f"r{number}", media, sampling=SEEDED))))
        assert results == [expected, expected]
        assert not made.texts[1].failures
        assert len(made.texts[0].requests) == 2, "no prompt was computed twice"
        reports = made.texts[1].kv_reports + made.texts[2].kv_reports
        assert [report.computed_tokens for report in reports] == [0, 0], "the segments were leased anew"
        attempts = sorted([(await made.router.timeline(f"r{number}")).text_attempts for number in range(2)])
        assert attempts == [1, 2]


@virtual
async def test_segments_that_are_gone_are_not_sent_again() -> None:
    expected = await whole()
    async with bench(roles=(Role.P, Role.D)) as made:
        prefill, decode = made.texts

        async def generate_and_lose() -> None:
            await until(lambda: bool(decode.requests))
            prefill.segments.clear()

        decode.failures.append(Overloaded("full"))
        losing = asyncio.get_running_loop().create_task(generate_and_lose())
        assert shape(await collect(made.router, ask("r", sampling=SEEDED))) == expected
        await losing
        assert [len(request.kv_segments) > 0 for request in decode.requests] == [True, False]


@virtual
@pytest.mark.parametrize("images", [0, 2])
async def test_the_prefill_instance_dies_after_the_first_token(images: int) -> None:
    expected = await whole(images)
    async with bench(roles=(Role.P, Role.P, Role.D)) as made:
        for text in texts(made, Role.P):
            text.seal_s = 5.0
        asking = asyncio.get_running_loop().create_task(
            collect(made.router, ask("r", [image(n) for n in range(images)], sampling=SEEDED))
        )
        await until(lambda: any(text.running for text in made.texts[:2]))
        await asyncio.sleep(0.1)
        next(text for text in made.texts[:2] if text.running).kill()
        assert shape(await asking) == expected
        (request,) = made.texts[2].requests
        assert (len(request.continued), request.kv_segments, len(request.placements)) == (1, (), images)
        timeline = await made.router.timeline("r")
        assert (timeline.continuations, timeline.prefill_instance) == (1, "")


@virtual
async def test_the_only_prefill_instance_dies_after_the_first_token() -> None:
    expected = await whole(2)
    async with bench(roles=APART) as made:
        made.texts[0].seal_s = 5.0
        asking = asyncio.get_running_loop().create_task(
            collect(made.router, ask("r", [image(0), image(1)], sampling=SEEDED))
        )
        await until(lambda: made.texts[0].running > 0)
        await asyncio.sleep(0.1)
        made.texts[0].kill()
        assert shape(await asking) == expected
        with pytest.raises(Unavailable):
            await collect(made.router, ask("other", sampling=SEEDED))


@virtual
@pytest.mark.parametrize("images", [0, 2])
async def test_a_decode_instance_dies_in_mid_answer(images: int) -> None:
    expected = await whole(images)
    async with bench(roles=(Role.P, Role.D, Role.D)) as made:
        for text in made.texts[1:]:
            text.token_s = 0.1
        asking = asyncio.get_running_loop().create_task(
            collect(made.router, ask("r", [image(n) for n in range(images)], sampling=SEEDED))
        )
        await until(lambda: any(text.running for text in made.texts[1:]))
        await asyncio.sleep(0.15)
        next(text for text in made.texts[1:] if text.running).kill()
        assert shape(await asking) == expected
        timeline = await made.router.timeline("r")
        assert (timeline.continuations, timeline.text_attempts, timeline.prefill_instance) == (1, 2, "text-0")


@virtual
@pytest.mark.parametrize("images", [0, 2])
@pytest.mark.parametrize("after", [0, 2])
async def test_an_instance_that_drains_transfers_kv_in_mid_answer(after: int, images: int) -> None:
    expected = await whole(images)
    async with bench(roles=(Role.PD, Role.PD)) as made:
        made.texts[0].drain_after = after
        results = []
        for number in range(2):
            media = [image(10 * number + n) for n in range(images)]
            results.append(shape(await collect(made.router, ask(f"r{number}", media, sampling=SEEDED))))
            made.texts[0].drains = True
        assert results == [expected, expected]
        handed = [request for request in made.texts[1].requests if request.kv_segments]
        timelines = [await made.router.timeline(f"r{number}") for number in range(2)]
        assert len(handed) == sum(bool(timeline.prefill_instance) for timeline in timelines) >= 1
        assert [timeline.text_attempts for timeline in timelines] == [1, 1]
        assert [timeline.continuations for timeline in timelines] == [0, 0]


@virtual
async def test_an_item_whose_lease_cannot_be_renewed_is_encoded_again() -> None:
    expected = await whole(2)
    async with bench(roles=APART, encoders=1) as made:
        made.texts[0].token_s = 0.05
        asking = asyncio.get_running_loop().create_task(
            collect(made.router, ask("r", [image(0), image(1)], sampling=SEEDED))
        )
        await until(lambda: made.texts[0].running > 0)
        made.encoders[0].forgets = True
        await asyncio.sleep(0.04)
        made.encoders[0].forgets = False
        assert shape(await asking) == expected
        assert len(made.encoders[0].encoded) == 4
        assert len(made.texts[1].requests[0].placements) == 2


@virtual
async def test_a_failed_pull_of_an_item_is_repaired_with_the_same_segments() -> None:
    expected = await whole(2)
    async with bench(roles=APART) as made:
        made.texts[1].failures.append(TransferFailed("gone", items=(1,)))
        assert shape(await collect(made.router, ask("r", [image(0), image(1)], sampling=SEEDED))) == expected
        first, second = made.texts[1].requests
        assert len(first.kv_segments) == len(second.kv_segments) > 0


@virtual
@pytest.mark.parametrize("when_s", [0.001, 0.015, 0.02, 0.03, 0.05])
async def test_a_caller_that_leaves_leaves_nothing_behind(when_s: float) -> None:
    async with bench(roles=APART) as made:
        asking = asyncio.get_running_loop().create_task(collect(made.router, ask("r", [image(0)], sampling=SEEDED)))
        await asyncio.sleep(when_s)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


@virtual
async def test_a_prompt_waits_until_there_is_memory_for_its_answer() -> None:
    async with bench(roles=APART) as made:
        prefill, decode = made.texts
        decode.kv_tokens, decode.token_s = 10, 0.2
        decode.kill()
        decode.restart()
        prefill.tokens = decode.tokens = 3
        await asyncio.sleep(1)
        requests = [ask(f"r{number}", sampling=SamplingParams(max_tokens=4, seed=5)) for number in range(3)]
        asking = [asyncio.get_running_loop().create_task(collect(made.router, request)) for request in requests]
        await asyncio.sleep(0.1)
        assert len(prefill.requests) == 1
        assert made.router.cluster.machine.waiting_for_kv == 2
        asking.pop().cancel()
        await asyncio.sleep(0.01)
        assert made.router.cluster.machine.waiting_for_kv == 1
        await asyncio.gather(*asking)
        assert len(prefill.requests) == 2


@virtual
async def test_an_answer_of_another_router_goes_on_where_answers_are_decoded() -> None:
    async with bench(roles=APART) as made:
        request = replace(ask("r", [image(0)], sampling=SEEDED), continued=(ContinuedChoice(0, (0, 1)),))
        await collect(made.router, request)
        assert [len(text.requests) for text in made.texts] == [0, 1]
        (sent,) = made.texts[1].requests
        assert (sent.continued, sent.kv_segments, len(sent.placements)) == (request.continued, (), 1)
        timeline = await made.router.timeline("r")
        assert (timeline.continued_tokens, timeline.prefill_instance) == (2, "")


@virtual
@pytest.mark.parametrize(("kv_transfer", "handed"), [("never", 0), ("by-need", 0), ("always", 1)])
async def test_an_instance_that_decodes_transfers_kv_by_policy(kv_transfer: str, handed: int) -> None:
    settings = RouterSettings(policies=PolicyNames(kv_transfer=kv_transfer))
    async with bench(roles=(Role.PD, Role.D), settings=settings) as made:
        await collect(made.router, ask("r", [image(0)], sampling=SEEDED))
        assert [len(text.requests) for text in made.texts] == [1, handed]
