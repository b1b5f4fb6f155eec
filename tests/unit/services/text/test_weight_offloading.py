"""An instance that has only those weights in memory that its role needs: it loads the others for a switch, while it serves."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.services.instances import encode_request
from triptych.demo import MODEL_DIR
from triptych.domain.generation import Finished, TextRequest, TokenChunk
from triptych.domain.instance import ClosedStage
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.engine.decoder.options import EngineOptions
from triptych.errors import StageClosed
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.runtime.telemetry import Telemetry
from triptych.services.text.app import InstanceApp, app
from triptych.services.text.settings import TextSettings
from triptych.services.text.weight_offloading import PART_OF, Unloadable, WeightOffloading, parts_of
from triptych.testing.media import png
from triptych.transport.options import TransferOptions
from triptych.virtual.offload import InlineOffload

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MIB = 1 << 20
MODEL = "demo"
TOKENS = 24


class Instance:
    def __init__(self, running: InstanceApp, telemetry: Telemetry) -> None:
        self.running = running
        self._telemetry = telemetry
        self._version = 0

    @property
    def resident(self) -> dict[str, float]:
        """Bytes of the weights in memory, by part."""
        families = text_string_to_metric_families(self._telemetry.metrics.render().decode())
        samples = [
            sample
            for family in families
            for sample in family.samples
            if sample.name == "triptych_resident_weight_bytes"
        ]
        return {sample.labels["part"]: sample.value for sample in samples}

    @property
    def parts(self) -> set[str]:
        return {part for part, nbytes in self.resident.items() if nbytes}

    @property
    def closed(self) -> tuple[ClosedStage, ...]:
        return self.running.instance.text.load().closed

    @property
    def open(self) -> frozenset[Stage]:
        return frozenset(self.running.service.load().stages)

    def order(self, role: Role) -> None:
        assert self.running.instance.switching is not None
        self._version += 1
        self.running.instance.switching.set_stages(role.stages, self._version, "a test")

    async def switch(self, role: Role) -> None:
        """Until it has switched, has unloaded what it does not need, and says so."""
        self.order(role)
        parts = {part.value for part in parts_of(role.stages)}
        to_load = {stage for stage, part in PART_OF.items() if part.value not in parts}
        async with asyncio.timeout(60):
            while True:
                if (self.open, self.parts, {closed.stage for closed in self.closed}) == (role.stages, parts, to_load):
                    return
                await asyncio.sleep(0.005)

    async def answer(self, prompt: Sequence[int], tokens: int = TOKENS) -> list[int]:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, seed=1, ignore_eos=True)
        request = TextRequest(f"q{prompt[0]}", MODEL, tuple(prompt), (), sampling, 60.0)
        got: list[int] = []
        async with aclosing(self.running.instance.text.generate(request)) as stream:
            async for events in stream:
                for event in events:
                    if isinstance(event, TokenChunk):
                        got.extend(event.token_ids)
            assert isinstance(events[-1], Finished)
        return got

    async def embedding(self, shade: int) -> bytes:
        """Of an image, encoded here."""
        media = png(32 + shade, 32)
        info = inspect_media(media, MediaLimits())
        request = replace(encode_request("x"), model=MODEL, media=media, info=info, tokens=2000)
        assert self.running.instance.encoder is not None
        service, store = self.running.instance.encoder.service, self.running.instance.encoder.store
        result = await service.encode(request)
        ticket = result.ticket
        found = bytes(store.arena.read(ticket.offset, ticket.slot_nbytes))
        await service.release([ticket.lease_id, result.router_lease])
        return found


@asynccontextmanager
async def instance(
    role: Role, resident: str = "role", model: Path = MODEL_DIR, **engine: Any
) -> AsyncIterator[Instance]:
    telemetry = Telemetry()
    settings = TextSettings(
        model=model,
        model_id=MODEL,
        role=role,
        switchable=Role.EPD,
        resident=resident,  # type: ignore[arg-type]
        port=0,
        image_cache_bytes=MIB,
        kv_arena_bytes=MIB,
        transfers=TransferOptions(("shm",)),
        mount_encoder=f"--arena-bytes {4 * MIB}",
        engine=EngineOptions(kv_cache_bytes=4 * MIB, **engine),
    )
    async with app(settings, telemetry) as running:
        yield Instance(running, telemetry)


PROMPTS = [[14, 15, 16, 17], [18, 19, 20, 21, 22], [25] * 40]


async def test_answers_and_embeddings_are_those_of_an_instance_with_all_weights() -> None:
    async with instance(Role.EPD, "all") as whole:
        expected = [await whole.answer(prompt) for prompt in PROMPTS]
        embeddings = [await whole.embedding(shade) for shade in range(3)]
        assert not whole.resident, "nothing is loaded or unloaded"
    async with instance(Role.E) as offloaded:
        assert offloaded.parts == {"encoder"}
        opens_s = {closed.stage: closed.opens_s for closed in offloaded.closed}
        assert opens_s.keys() == {Stage.PREFILL, Stage.DECODE}
        assert all(opens_s.values())
        for shade in range(3):
            assert await offloaded.embedding(shade) == embeddings[shade]
            with pytest.raises(StageClosed):
                await offloaded.answer(PROMPTS[0])
            await offloaded.switch(Role.PD)
            assert [closed.stage for closed in offloaded.closed] == [Stage.ENCODE]
            with pytest.raises(StageClosed):
                await offloaded.embedding(9)
            assert await asyncio.gather(*map(offloaded.answer, PROMPTS)) == expected
            assert await offloaded.answer(PROMPTS[2]) == expected[2], "with a cached prefix"
            await offloaded.switch(Role.E)


async def test_what_runs_goes_on_while_the_other_part_is_loaded_and_unloaded() -> None:
    async with instance(Role.PD) as offloaded:
        expected = await offloaded.answer(PROMPTS[1], 400)
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(offloaded.answer(PROMPTS[1], 400)) for _ in range(3)]
            for role in (Role.EPD, Role.PD, Role.EPD, Role.PD):
                await offloaded.switch(role)
        assert [task.result() for task in answers] == [expected] * 3


async def test_a_part_that_cannot_be_loaded_leaves_all_as_it_was(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL_DIR, model)
    weights, away = model / "model.safetensors", tmp_path / "away"
    async with instance(Role.E, model=model) as offloaded:
        expected = await offloaded.embedding(1)
        weights.rename(away)
        offloaded.order(Role.PD)
        assert not any(closed.fault for closed in offloaded.closed)
        async with asyncio.timeout(60):
            while not any(closed.fault for closed in offloaded.closed):  # noqa: ASYNC110 - load reports are read
                await asyncio.sleep(0.005)
        assert {closed.fault for closed in offloaded.closed} == {
            "weights cannot be loaded: model.safetensors: No such file or directory"
        }
        assert offloaded.open == Role.E.stages
        assert offloaded.parts == {"encoder"}
        assert offloaded.running.instance.text.load().stages_version == 1, "the order is not obeyed, and over"
        assert await offloaded.embedding(1) == expected
        shutil.copy(away, weights)
        offloaded.order(Role.D)
        async with asyncio.timeout(60):
            while not any("has changed since the start" in closed.fault for closed in offloaded.closed):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        away.rename(weights)
        await offloaded.switch(Role.PD)
        assert len(await offloaded.answer(PROMPTS[0])) == TOKENS


async def test_with_room_for_all_weights_auto_keeps_them() -> None:
    async with instance(Role.E, "auto") as offloaded:
        assert not offloaded.closed, "every stage opens at once"


async def test_steps_are_measured_with_both_parts_and_then_one_stays() -> None:
    async with instance(Role.E, tpot_slo_s=0.05, max_sequences=4) as offloaded:
        assert offloaded.parts == {"encoder"}
        await offloaded.switch(Role.EPD)
        assert len(await offloaded.answer(PROMPTS[0])) == TOKENS


async def test_a_model_whose_weights_do_not_fit_together_has_those_of_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.engine.device_memory.available_nbytes", lambda: 12 * MIB)
    async with instance(Role.PD, "auto") as offloaded:
        assert offloaded.parts == {"decoder"}


@dataclass
class Weights:
    """Takes ``load_s`` to load, by its own account."""

    after_load: Callable[[], None]
    load_s: float = 2.0
    nbytes: int = 1
    resident: bool = False

    def load(self) -> None:
        self.resident = True

    def before_unload(self) -> None: ...

    def unload(self) -> None:
        self.resident = False


async def test_what_follows_a_load_counts_to_the_time_of_the_next() -> None:
    """As where CUDA graphs are captured again."""
    now_s = 0.0

    def captures_graphs() -> None:
        nonlocal now_s
        now_s += 3.0

    offloading = WeightOffloading(thread=InlineOffload(), clock=lambda: now_s)
    offloading.add(ModelPart.DECODER, Unloadable(Weights(captures_graphs)))
    assert offloading.opens_s(Stage.DECODE) == 2.0
    for needed, opens_s in (({ModelPart.DECODER}, 0.0), (set[ModelPart](), 5.0)):
        offloading.need(needed)
        await offloading.settle()
        assert offloading.opens_s(Stage.DECODE) == opens_s
