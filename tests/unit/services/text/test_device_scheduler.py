"""A text service whose loop also runs an encoder's batches, in one thread."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.unit.services.instances import (
    ITEM_TOKENS,
    VOCABULARY,
    Instances,
    answer,
    encode_and_keep_only_tickets,
    encode_request,
    hybrid_instances,
    question,
    under_virtual_time,
)
from triptych.domain.encoding import EncodeResult
from triptych.domain.engine import EngineOutput
from triptych.domain.instance import StageLoad
from triptych.domain.queue_position import FIRST_COME, QueuePosition
from triptych.domain.stage import Role, Stage
from triptych.errors import DeadlineExceeded, EngineFailure, InternalError, Unavailable
from triptych.machine.text.device_turns import DeviceTurns
from triptych.policy.iteration import ImageBudget
from triptych.services.text.device_scheduler import DeviceScheduler
from triptych.testing.fakes import FakeEncoderEngine, FakeTextEngine


def make_encoder(**options: float) -> FakeEncoderEngine:
    return FakeEncoderEngine(tokens_of=lambda info: 2 * info.width, **options)  # type: ignore[arg-type]


async def encode(p: Instances, *names: str) -> list[EncodeResult]:
    results = await asyncio.gather(*(p.encoder.service.encode(encode_request(name)) for name in names))
    await p.encoder.service.release(
        [lease for result in results for lease in (result.ticket.lease_id, result.router_lease)]
    )
    return results


def test_both_services_are_one_instance_of_all_stages_with_one_load() -> None:
    async def scenario() -> None:
        async with hybrid_instances() as p:
            whole = p.whole.service
            info, encoder, text = [await service.describe() for service in (whole, p.encoder.service, p.text.service)]
            assert (encoder.role, info.role) == (Role.E, Role.EPD)
            assert text.kv_kind
            assert info == replace(
                encoder,
                role=Role.EPD,
                kv_tokens=text.kv_tokens,
                kv_block_tokens=text.kv_block_tokens,
                parts=encoder.parts + text.parts,
                continues=True,
                prefills_early=True,
                kv_kind=text.kv_kind,
                transfers_kv=True,
                kv_segment_tokens=text.kv_segment_tokens,
                kv_position_bytes=text.kv_position_bytes,
            )
            async with aclosing(whole.watch_load()) as loads:
                idle = dict.fromkeys(Stage, StageLoad(0, 0))
                assert (await anext(loads)).stages == {
                    **idle,
                    Stage.DECODE: StageLoad(0, 0, free_tokens=p.text.engine.kv_tokens),
                }
                kept = await p.encoder.service.encode(encode_request("bird"))
                assert (await anext(loads)).at(Stage.ENCODE).leased_bytes > 0
                await p.encoder.service.release([kept.ticket.lease_id, kept.router_lease])
            asked = question("who", await encode_and_keep_only_tickets(p.encoder, "cat", "dog"))
            assert (await answer(p.text.service, asked.request)).token_ids == asked.expected

    under_virtual_time(scenario)


def test_an_idle_engine_wakes_for_items_and_runs_no_steps() -> None:
    async def scenario() -> None:
        async with hybrid_instances() as p:
            await asyncio.sleep(5)
            for name in ("cat", "dog"):
                (result,) = await encode(p, name)
                assert result.queue_s < 0.01
                await asyncio.sleep(5)

    under_virtual_time(scenario)


def test_decodes_continue_while_many_items_are_encoded() -> None:
    """Batches of one item, 10 ms each, and steps of 5 ms: a token every 15 ms."""

    async def scenario() -> None:
        budget = ImageBudget(tokens=ITEM_TOKENS, nbytes=1 << 20)
        vision = make_encoder(batch_s=0.01, token_s=0.0, prepare_s=0.0)
        async with hybrid_instances(budget=budget, vision=vision) as p, asyncio.TaskGroup() as group:
            clock = asyncio.get_running_loop().time
            async with aclosing(p.text.service.generate(question("a long one", []).request)) as stream:
                await anext(stream)
                encoding = group.create_task(encode(p, *(f"item-{number}" for number in range(30))))
                times = [clock() async for _ in stream]
            assert not encoding.done(), "the answer finished before the items"
            assert max(after - before for before, after in pairwise(times)) == pytest.approx(0.015, abs=1e-6)
            assert len(await encoding) == 30

    under_virtual_time(scenario)


def test_failures_of_encoder_and_engine_do_not_affect_each_other() -> None:
    async def scenario() -> None:
        async with hybrid_instances() as p, asyncio.TaskGroup() as group:
            p.encoder.engine.failures.extend([RuntimeError("secret")] * 2)
            asked = question("who", [])
            answering = group.create_task(answer(p.text.service, asked.request))
            with pytest.raises(InternalError) as raised:
                await p.encoder.service.encode(encode_request("cat"))
            assert "secret" not in raised.value.message
            assert (await answering).token_ids == asked.expected
            p.encoder.engine.failures.clear()

            p.text.engine.failures.append(EngineFailure("on purpose"))
            encoding = group.create_task(encode(p, "dog"))
            with pytest.raises(EngineFailure):
                await answer(p.text.service, asked.request)
            assert len(await encoding) == 1

    under_virtual_time(scenario)


def test_items_are_encoded_although_steps_raise() -> None:
    class Broken(FakeTextEngine):
        def decode_step(self) -> list[EngineOutput]:
            raise RuntimeError("on purpose")

    async def scenario() -> None:
        async with hybrid_instances(engine=Broken(VOCABULARY)) as p, asyncio.TaskGroup() as group:
            encoding = group.create_task(encode(p, "dog"))
            with pytest.raises(EngineFailure):
                await answer(p.text.service, question("who", []).request)
            assert len(await encoding) == 1

    under_virtual_time(scenario)


def test_abandoned_items_are_not_encoded() -> None:
    async def scenario() -> None:
        slow = FakeTextEngine(VOCABULARY, step_s=0.5)
        async with hybrid_instances(engine=slow) as p, asyncio.TaskGroup() as group:
            group.create_task(answer(p.text.service, question("who", []).request))
            await asyncio.sleep(0.1)  # a step runs
            left = group.create_task(encode(p, "cat"))
            await asyncio.sleep(0.1)
            left.cancel()
            with pytest.raises(DeadlineExceeded):
                await p.encoder.service.encode(encode_request("dog", timeout_s=0.2))
        assert p.encoder.engine.encoded_items == 0

    under_virtual_time(scenario)


def test_draining_waits_for_answers_and_items() -> None:
    async def scenario() -> None:
        async with (
            hybrid_instances(engine=FakeTextEngine(VOCABULARY, step_s=0.1)) as p,
            asyncio.TaskGroup() as group,
        ):
            answering = group.create_task(answer(p.text.service, question("who", []).request))
            encoding = group.create_task(encode(p, "cat"))
            await asyncio.sleep(0.05)
            await asyncio.gather(p.text.service.drain(), p.encoder.service.drain())
            assert answering.done()
            assert encoding.done()
            with pytest.raises(Unavailable, match="the encoder is draining"):
                await p.encoder.service.encode(encode_request("dog"))
            with pytest.raises(Unavailable, match="the text instance is draining"):
                await answer(p.text.service, question("x", []).request)

    under_virtual_time(scenario)


class IdleEncoder:
    """An encoder without items."""

    waiting_since_s: float | None = None
    first_queue_position: QueuePosition | None = None

    def when_ready(self, wake: object) -> None: ...

    async def encode_batch(self, budget: ImageBudget | None = None) -> bool:
        raise AssertionError(f"nothing waits, and a batch is encoded within {budget}")


class SlowEncoder(IdleEncoder):
    """A batch takes ``batch_s``."""

    def __init__(self, now_s: list[float], batch_s: float) -> None:
        self.waiting_since_s = 0.0
        self._now_s, self._batch_s = now_s, batch_s

    async def encode_batch(self, budget: ImageBudget | None = None) -> bool:
        self._now_s[0] += self._batch_s
        return True


class SlowText(FakeTextEngine):
    """A step takes 0.1 s."""

    def __init__(self, now_s: list[float]) -> None:
        super().__init__(VOCABULARY)
        self._now_s = now_s

    def decode_step(self) -> list[EngineOutput]:
        self._now_s[0] += 0.1
        return []

    step = decode_step


@pytest.mark.parametrize(("share", "steps"), [(1.0, 1), (0.5, 5), (0.25, 14)])
@pytest.mark.parametrize("prompt", [None, FIRST_COME])
def test_items_take_at_most_their_share_of_the_time_in_which_text_can_be_computed(
    share: float, steps: int, prompt: QueuePosition | None
) -> None:
    """A batch takes 0.45 s: 0.45 s of steps follow it at a half of the time, 1.35 s at a quarter. Each batch has a step in its own iteration."""
    now_s = [0.0]
    scheduler = DeviceScheduler(
        SlowText(now_s), SlowEncoder(now_s, 0.45), None, DeviceTurns(0.0, encode_share=share), lambda: now_s[0]
    )

    async def steps_until(batches: int) -> int:
        taken = 0
        while batches:
            iteration = scheduler.next(prefill_queue_position=prompt, can_step=True)
            scheduler.step(iteration)
            taken += 1
            if iteration.encode:
                await scheduler.encode()
                batches -= 1
        return taken

    asyncio.run(steps_until(1))
    between = asyncio.run(steps_until(4)) / 4
    assert between == (2 if prompt and share == 1.0 else steps + 1 if share < 1.0 else 1)


def test_items_are_held_back_by_nothing_where_no_text_can_be_computed() -> None:
    now_s = [0.0]
    scheduler = DeviceScheduler(
        SlowText(now_s), SlowEncoder(now_s, 0.45), None, DeviceTurns(0.0, encode_share=0.25), lambda: now_s[0]
    )
    asyncio.run(scheduler.encode())
    assert not scheduler.next(prefill_queue_position=None, can_step=True).encode
    assert scheduler.next(prefill_queue_position=None, can_step=False).encode
