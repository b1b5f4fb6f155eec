"""Instances that fail at once, are suspect, lose their heartbeat, or outlive one watch call."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.unit.services.router.fakes import Bench, FakeEncoder, FakeText, ask, bench, collect, image
from tests.unit.services.router.test_service import now_s, virtual
from triptych.domain.embedding import LeaseId
from triptych.domain.embedding_hints import EmbeddingHints
from triptych.domain.encoding import EncodeRequest, EncodeResult
from triptych.domain.generation import ChatFinished, TextEvent, TextRequest
from triptych.domain.instance import InstanceInfo, InstanceLoad
from triptych.domain.membership import Member
from triptych.domain.timeline import Outcome
from triptych.errors import DeadlineExceeded, EngineFailure, InstanceLost, Overloaded, Unavailable
from triptych.machine.router.cluster_events import MemberJoined, MemberLeaving, MemberLeft
from triptych.machine.router.shared_events import CallFailed
from triptych.services.router.settings import RouterSettings


@virtual
async def test_failures_in_consecutive_loop_iterations_are_each_handled() -> None:
    async with bench() as made:
        for _ in range(10):
            made.router.cluster.feed(CallFailed(0, "text-0", InstanceLost("gone")))
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert isinstance((await collect(made.router, ask("next")))[-1], ChatFinished)


@virtual
async def test_a_stub_is_opened_when_its_member_joins_and_closed_after_its_last_call() -> None:
    async with bench(texts=2) as made:
        encoder, text = made.encoders[0], made.texts[0]
        encoder.encode_s, text.token_s = 0.5, 0.1
        answers = [asyncio.Task(collect(made.router, ask(f"r{n}", [image(n)]))) for n in range(4)]
        await asyncio.sleep(0.2)
        made.router.cluster.feed(MemberLeaving(encoder.instance_id))
        await asyncio.sleep(0.1)
        assert encoder.working
        assert not encoder.closed, "it is still prefilling"
        await asyncio.sleep(0.4)
        made.router.cluster.feed(MemberLeaving(text.instance_id))
        outcomes = await asyncio.gather(*answers)
        assert all(isinstance(outcome[-1], ChatFinished) for outcome in outcomes)
        await asyncio.sleep(0.1)
        assert (encoder.closed, text.closed) == (1, 1)
        assert [instance.closed for instance in (made.encoders[1], made.texts[1])] == [0, 0]
        made.router.cluster.feed(MemberJoined(Member(encoder.instance_id)))
        await asyncio.sleep(0.1)
        assert f"{encoder.instance_id}: ready" in (await made.router.readiness()).instances


@virtual
async def test_calls_to_a_member_that_left_are_cancelled_at_once() -> None:
    async with bench(texts=2) as made:
        for encoder in made.encoders:
            encoder.encode_s = 100.0
        answer = asyncio.Task(collect(made.router, ask("r", [image(1)])))
        await asyncio.sleep(0.2)
        victim, other = sorted(made.encoders, key=lambda encoder: -encoder.working)
        other.encode_s = 0.01
        made.router.cluster.feed(MemberLeft(victim.instance_id))
        await asyncio.sleep(0.1)
        assert victim.closed
        assert isinstance((await answer)[-1], ChatFinished)
        assert now_s() < 2
        victim.leases.clear()


@virtual
async def test_a_wrongly_suspected_instance_that_kept_reporting_returns_at_once() -> None:
    async with bench() as made:
        text = made.texts[0]
        for number in range(50):
            text.failures.append(InstanceLost("gone"))
            began_s = now_s()
            assert isinstance((await collect(made.router, ask(f"lost {number}")))[-1], ChatFinished)
            assert now_s() - began_s < 1.0, "it waits for the next report, and not for the whole grace"
            await asyncio.sleep(0.11 + number * 0.001)
            assert isinstance((await collect(made.router, ask(f"next {number}")))[-1], ChatFinished)


@virtual
async def test_a_watch_that_reached_its_deadline_is_restarted_without_suspicion() -> None:
    async with bench() as made:
        text = made.texts[0]
        watch, watches = text.watch_load, 0

        async def watch_for_a_while() -> AsyncGenerator[InstanceLoad]:
            nonlocal watches
            watches += 1
            async with aclosing(watch()) as loads:
                for _ in range(3):
                    yield await anext(loads)
            raise DeadlineExceeded("the call's time is over")

        text.watch_load = watch_for_a_while  # type: ignore[method-assign]
        made.router.cluster.feed(CallFailed(0, "text-0", InstanceLost("gone")))
        await asyncio.sleep(0.2)
        for _ in range(1000):
            assert "prefill" not in made.router.cluster.machine.instances.readiness().missing
            await asyncio.sleep(0.001)
        assert watches > 5


@virtual
async def test_a_missing_report_of_embeddings_starts_the_watch_again_without_suspicion() -> None:
    async with bench() as made:
        encoder, cluster = made.encoders[0], made.router.cluster
        watch, watches = encoder.watch_load, 0

        async def watch_with_a_gap() -> AsyncGenerator[InstanceLoad]:
            nonlocal watches
            watches += 1
            async with aclosing(watch()) as loads:
                for sequence in (1, 2, 4):
                    yield replace(await anext(loads), hints=EmbeddingHints(sequence))
            await asyncio.sleep(10_000)

        encoder.watch_load = watch_with_a_gap  # type: ignore[method-assign]
        cluster.feed(CallFailed(0, "encoder-0", InstanceLost("gone")))
        await asyncio.sleep(0.2)
        for _ in range(1000):
            assert [candidate.usable for candidate in cluster.encoders.candidates if candidate.name == "encoder-0"] == [
                True
            ]
            await asyncio.sleep(0.001)
        assert watches > 2
        assert not cluster.machine.instances.in_backoff()


@virtual
async def test_an_instance_that_ends_every_watch_at_once_does_not_keep_the_router_busy() -> None:
    async with bench() as made:
        encoder, cluster = made.encoders[0], made.router.cluster
        watch, watches = encoder.watch_load, 0

        async def watch_with_a_gap() -> AsyncGenerator[InstanceLoad]:
            nonlocal watches
            watches += 1
            async with aclosing(watch()) as loads:
                load = await anext(loads)
            for sequence in (1, 3):
                yield replace(load, hints=EmbeddingHints(sequence))

        encoder.watch_load = watch_with_a_gap  # type: ignore[method-assign]
        cluster.feed(CallFailed(0, "encoder-0", InstanceLost("gone")))
        await asyncio.sleep(10.0)
        assert watches < 250


class Stopped(FakeText):
    """As under SIGSTOP: connections stay open without traffic."""

    stopped = False

    async def spend(self, duration_s: float) -> None:
        await super().spend(duration_s)
        if self.stopped:
            await asyncio.sleep(10_000)

    async def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        async with aclosing(super().generate(request)) as stream:
            async for events in stream:
                yield events


@virtual
async def test_calls_to_an_instance_that_is_stopped_are_redone_elsewhere() -> None:
    settings = RouterSettings(heartbeat_timeout_s=3)
    async with bench(texts=2, settings=settings) as made:
        text = made.texts[0]
        text.__class__ = Stopped
        for encoder in made.encoders:
            encoder.encode_s = 0.5
        answers = [asyncio.Task(collect(made.router, ask(f"r{n}", [image(n)]))) for n in range(6)]
        await asyncio.sleep(0.45)
        text.stopped = True  # type: ignore[attr-defined]
        stopped_s = now_s()
        outcomes = await asyncio.gather(*answers)
        assert all(isinstance(outcome[-1], ChatFinished) for outcome in outcomes)
        assert 2 < now_s() - stopped_s < 5


class LongPrefill(Stopped):
    async def spend(self, duration_s: float) -> None:
        await super().spend(1.0 if duration_s == 0.002 else duration_s)  # the prefill runs


@pytest.mark.parametrize("reason", ["the watch ends as planned", "a call fails"])
@virtual
async def test_calls_to_an_instance_that_stops_while_it_is_described_are_redone_elsewhere(reason: str) -> None:
    async with bench(texts=2, settings=RouterSettings(heartbeat_timeout_s=3)) as made:
        text = made.texts[0]
        text.__class__ = LongPrefill
        watch, planned, ended = text.watch_load, asyncio.Event(), asyncio.Event()

        async def watch_until_planned() -> AsyncGenerator[InstanceLoad]:
            async with aclosing(watch()) as loads:
                async for load in loads:
                    if planned.is_set():
                        ended.set()
                        raise DeadlineExceeded("the call's time is over")
                    yield load

        text.watch_load = watch_until_planned  # type: ignore[method-assign]
        made.router.cluster.feed(CallFailed(0, "text-0", InstanceLost("gone")))
        await asyncio.sleep(0.3)
        answers = [asyncio.Task(collect(made.router, ask(f"r{n}", [image(n)], timeout_s=60))) for n in range(6)]
        await asyncio.sleep(0.3)
        assert text.running
        if reason == "a call fails":
            made.router.cluster.feed(CallFailed(0, "text-0", InstanceLost("another call failed")))
        else:
            planned.set()
            await ended.wait()
        text.stopped = True  # type: ignore[attr-defined]
        stopped_s = now_s()
        outcomes = await asyncio.gather(*answers)
        assert all(isinstance(outcome[-1], ChatFinished) for outcome in outcomes)
        assert now_s() - stopped_s < 8


class Paused(FakeText):
    """As under SIGSTOP until SIGCONT, when pending messages arrive."""

    going: asyncio.Event

    async def spend(self, duration_s: float) -> None:
        await super().spend(duration_s)
        await self.going.wait()


@virtual
@pytest.mark.parametrize("stopped_s", [20 + 0.17 * number for number in range(12)])
async def test_the_only_text_instance_serves_as_soon_as_it_resumes_after_a_stop(stopped_s: float) -> None:
    async with bench(settings=RouterSettings(heartbeat_timeout_s=3)) as made:
        text = made.texts[0]
        text.__class__ = Paused
        text.going = asyncio.Event()  # type: ignore[attr-defined]
        await asyncio.sleep(stopped_s)
        with pytest.raises(Unavailable):
            await collect(made.router, ask("stopped"))
        text.going.set()  # type: ignore[attr-defined]
        assert isinstance((await collect(made.router, ask("next")))[-1], ChatFinished)


class Bounded(FakeEncoder):
    """Accepts a bounded number of items at once, as the encoder service does."""

    max_items = 64
    says = True
    calls = 0

    async def describe(self) -> InstanceInfo:
        return replace(await super().describe(), max_items=self.max_items if self.says else 0)

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        self.calls += 1
        if self.working >= self.max_items:
            raise Overloaded("too many items wait")
        return await super().encode(request)


async def bounded(made: Bench, *, says: bool) -> list[Bounded]:
    """Bounds the encoders of the bench from now on."""
    pool: list[Bounded] = []
    for encoder in made.encoders:
        encoder.__class__ = Bounded
        assert isinstance(encoder, Bounded)
        encoder.says = says
        made.router.cluster.feed(CallFailed(0, encoder.instance_id, InstanceLost("asked again")))
        pool.append(encoder)
    await asyncio.sleep(0.2)
    return pool


@virtual
@pytest.mark.parametrize("says", [True, False])
async def test_a_burst_above_the_encoders_item_limit_is_answered(says: bool) -> None:
    async with bench() as made:
        pool = await bounded(made, says=says)
        for encoder in pool:
            encoder.encode_s = 0.3
        images = [image(n) for n in range(240)]
        answers = [
            asyncio.Task(collect(made.router, ask(f"r{n}", images[4 * n : 4 * n + 4], timeout_s=100)))
            for n in range(60)
        ]
        outcomes = await asyncio.gather(*answers)
        assert all(isinstance(outcome[-1], ChatFinished) for outcome in outcomes)
        assert sum(len(encoder.encoded) for encoder in pool) == 240
        calls = sum(encoder.calls for encoder in pool)
        assert calls == 240 if says else calls < 3 * 240


@virtual
async def test_an_instance_that_fails_fast_does_not_attract_requests() -> None:
    async with bench(encoders=2, texts=2) as made:
        for instance in (made.encoders[0], made.texts[0]):
            instance.failures.extend(EngineFailure("broken") for _ in range(10_000))
        made.encoders[1].encode_s = 0.2
        answers = []
        for number in range(200):
            answers.append(asyncio.Task(collect(made.router, ask(f"r{number}", [image(number)]))))
            await asyncio.sleep(0.005)
        outcomes = await asyncio.gather(*answers)
        assert all(isinstance(outcome[-1], ChatFinished) for outcome in outcomes)
        assert 10_000 - len(made.encoders[0].failures) < 10
        assert 10_000 - len(made.texts[0].failures) < 10


@virtual
async def test_a_short_absence_of_the_text_pool_fails_no_request() -> None:
    async with bench() as made:
        text = made.texts[0]
        text.kill()
        await asyncio.sleep(0.1)
        assert "prefill" in made.router.cluster.machine.instances.readiness().missing
        answers = [asyncio.Task(collect(made.router, ask(f"r{n}", [image(n)] if n % 2 else []))) for n in range(6)]
        await asyncio.sleep(0.3)
        text.restart()
        outcomes = await asyncio.gather(*answers)
        assert all(isinstance(outcome[-1], ChatFinished) for outcome in outcomes)
        assert len(text.requests) == 6
        assert (await made.router.timeline("r1")).text_attempts == 1


@virtual
async def test_a_text_pool_absent_beyond_the_grace_period_is_one_error_within_two_seconds() -> None:
    async with bench() as made:
        made.texts[0].kill()
        await asyncio.sleep(0.1)
        started_s = now_s()
        with pytest.raises(Unavailable):
            await collect(made.router, ask("r", [image(1)]))
        assert now_s() - started_s < 2
        started_s = now_s()
        with pytest.raises(Unavailable):
            await collect(made.router, ask("later", [image(1)]))
        assert now_s() - started_s < 0.3


@virtual
async def test_the_id_of_a_cancelled_request_can_be_reused_at_once() -> None:
    async with bench() as made:
        first = made.router.chat(ask("r", [image(1)]))
        reading = asyncio.Task(anext(first))
        await asyncio.sleep(0.005)
        reading.cancel()
        await asyncio.wait([reading])
        assert made.router.running == 1, "its credit has not returned yet"
        assert isinstance((await collect(made.router, ask("r", [image(2)])))[-1], ChatFinished)
        await asyncio.sleep(0.1)
        assert (await made.router.timeline("r")).outcome is Outcome.DONE


@virtual
async def test_a_request_past_its_deadline_on_arrival_is_a_timeout() -> None:
    async with bench() as made:
        with pytest.raises(DeadlineExceeded):
            await collect(made.router, ask("r", timeout_s=0))


@virtual
async def test_a_router_that_drains_is_not_ready() -> None:
    async with bench() as made:
        assert (await made.router.readiness()).ready
        await made.router.drain()
        assert not (await made.router.readiness()).ready
        assert await made.router.missing() == ("router",)


class SlowToRelease(FakeEncoder):
    """Counts the calls; each waits for ``going``."""

    going: asyncio.Event
    released: list[int]

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        self.released.append(len(lease_ids))
        await self.going.wait()
        await super().release(lease_ids)


class ReleasingNothing(FakeText):
    async def generate(self, request: TextRequest) -> AsyncGenerator[Sequence[TextEvent]]:
        async with aclosing(super().generate(replace(request, placements=()))) as stream:
            async for events in stream:
                yield events


@virtual
async def test_leases_that_are_released_during_a_call_share_the_next_one() -> None:
    async with bench(encoders=1, settings=RouterSettings(control_timeout_s=30)) as made:
        encoder = made.encoders[0]
        encoder.__class__ = SlowToRelease
        encoder.going, encoder.released = asyncio.Event(), []  # type: ignore[attr-defined]
        made.texts[0].__class__ = ReleasingNothing
        first = await collect(made.router, ask("first", [image(0)]))
        answers = await asyncio.gather(*(collect(made.router, ask(f"r{n}", [image(n)])) for n in range(1, 6)))
        assert all(isinstance(answer[-1], ChatFinished) for answer in (first, *answers))
        assert encoder.released == [2]  # type: ignore[attr-defined]
        assert made.router.cluster.machine.outstanding > 0
        encoder.going.set()  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)
        assert encoder.released == [2, 10]  # type: ignore[attr-defined]
        assert not encoder.leases
        assert made.router.cluster.machine.outstanding == 0


@virtual
async def test_leases_that_cannot_be_released_in_time_do_not_keep_their_credits() -> None:
    async with bench(encoders=1, settings=RouterSettings(control_timeout_s=1)) as made:
        encoder = made.encoders[0]
        encoder.__class__ = SlowToRelease
        encoder.going, encoder.released = asyncio.Event(), []  # type: ignore[attr-defined]
        made.texts[0].__class__ = ReleasingNothing
        await asyncio.gather(*(collect(made.router, ask(f"r{n}", [image(n)])) for n in range(3)))
        await collect(made.router, ask("last", [image(9)]))
        await asyncio.sleep(3)
        assert made.router.cluster.machine.outstanding == 0
        encoder.leases.clear()
