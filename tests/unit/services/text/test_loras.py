"""LoRA adapters of a text instance, over fake engines whose answers depend on the adapter."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.services.instances import VOCABULARY, TextInstance, answer, question, text_instance, under_virtual_time
from tests.unit.services.text.test_kv_transfer import (
    apart,
    decode_call,
    events_of,
    prefill_call,
    release_routers,
    tokens_of,
)
from triptych.domain.generation import Ready, TokenChunk
from triptych.domain.lora import LoadedLora, LoadLora, LoraLimits
from triptych.errors import FailedPrecondition, InvalidRequest, ModelNotFound, StageClosed
from triptych.runtime.process import CannotStart
from triptych.testing.fake_kv import answer_tokens
from triptych.testing.fakes import FAKE_MODEL, FakeTextEngine
from triptych.transport.memory import MemoryNetwork


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With adapters ``a`` and ``b``."""
    for name in "ab":
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / "adapter").write_text(name)
    return tmp_path / "root"


def expected(name: str, lora: LoadedLora | None) -> tuple[int, ...]:
    """The answer to the prompt of ``question(name, [])``."""
    return answer_tokens(tuple(map(ord, name)), (), vocabulary=VOCABULARY, lora=lora.digest if lora else "")


async def unused(text: TextInstance) -> None:
    """Until what was unloaded is free."""
    async with asyncio.timeout(10):
        while len(text.scope) > text.lasting_tasks:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)


def test_each_request_is_computed_with_its_adapter(root: Path) -> None:
    async def scenario() -> None:
        async with text_instance(MemoryNetwork(), [], lora=(f"first={root / 'a'}",), lora_root=root) as text:
            (first,) = text.service.load().loras
            second = await text.service.load_lora(LoadLora("second", "b"))
            assert text.service.load().loras == (first, second)
            assert [lora.name for lora in (first, second)] == ["first", "second"]
            loras = [None, first, second, None, first]
            asked = [replace(question("hello", []).request, lora=lora.digest if lora else "") for lora in loras]
            got = await asyncio.gather(*(answer(text.service, request) for request in asked))
            assert [each.token_ids for each in got] == [expected("hello", lora) for lora in loras]

    under_virtual_time(scenario)


def test_an_unloaded_adapter_stays_until_its_last_request_ends_and_takes_no_other(root: Path) -> None:
    async def scenario() -> None:
        engine = FakeTextEngine(VOCABULARY, step_s=0.5)
        async with text_instance(MemoryNetwork(), [], engine=engine, lora_root=root) as text:
            lora = await text.service.load_lora(LoadLora("name", "a"))
            request = replace(question("hello", []).request, lora=lora.digest)
            async with aclosing(text.service.generate(request)) as running:
                assert isinstance((await anext(running))[0], Ready)
                await text.service.unload_lora("name")
                assert text.service.load().loras == ()
                with pytest.raises(StageClosed, match="not loaded here"):
                    await answer(text.service, request)
                await asyncio.sleep(1)
                assert engine.loras.digests == {lora.digest}
                events = [event async for together in running for event in together]
            sent = [token for event in events if isinstance(event, TokenChunk) for token in event.token_ids]
            assert tuple(sent) == expected("hello", lora)
            await unused(text)
            assert engine.loras.digests == set()
            with pytest.raises(ModelNotFound):
                await text.service.unload_lora("name")

    under_virtual_time(scenario)


def test_an_adapter_that_is_loaded_again_before_it_is_free_stays(root: Path) -> None:
    async def scenario() -> None:
        engine = FakeTextEngine(VOCABULARY, step_s=0.5)
        async with text_instance(MemoryNetwork(), [], engine=engine, lora_root=root) as text:
            lora = await text.service.load_lora(LoadLora("name", "a"))
            request = replace(question("hello", []).request, lora=lora.digest)
            async with aclosing(text.service.generate(request)) as running:
                await anext(running)
                await text.service.unload_lora("name")
                again = await text.service.load_lora(LoadLora("other", "a"))
                assert again == replace(lora, name="other")
            await unused(text)
            assert engine.loras.digests == {lora.digest}
            assert (await answer(text.service, request)).token_ids == expected("hello", lora)

    under_virtual_time(scenario)


def test_keys_and_values_move_between_instances_with_the_adapter(root: Path) -> None:
    async def scenario() -> None:
        settings = {"lora": (f"name={root / 'a'}",)}
        async with apart(prefill=settings, decode=settings) as made:
            (lora,) = made.decode.service.load().loras
            plain = (await made.asked("a prompt of more than one segment")).request
            for chosen in (lora, None):
                request = replace(plain, lora=chosen.digest if chosen else "")
                sent = await events_of(made.prefill, prefill_call(request))
                events = await events_of(made.decode, decode_call(request, sent))
                ready = events[0]
                assert isinstance(ready, Ready)
                assert ready.kv is not None
                assert (ready.kv.pulled_tokens > 0, ready.kv.cached_tokens) == (True, 0), (
                    "nothing of the other is found"
                )
                tokens = tokens_of(sent)[0] + tokens_of(events)[0]
                assert tokens == expected(plain.request_id, chosen)
                await release_routers(made.prefill, sent)

    under_virtual_time(scenario)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (LoadLora("name", "missing"), "below lora_root"),
        (LoadLora("name", ".."), "below lora_root"),
        (LoadLora("name", "/etc"), "below lora_root"),
        (LoadLora("name", "outside"), "below lora_root"),
        (LoadLora("name", "linked"), "below lora_root"),
        (LoadLora("name", "a\0"), "below lora_root"),
        (LoadLora("name", "empty"), "adapter is missing"),
        (LoadLora("taken", "b"), "loaded already"),
        (LoadLora("twin", "a"), "the same LoRA adapter"),
        (LoadLora(FAKE_MODEL.model_id, "b"), "name of the base model"),
        (LoadLora("a b", "b"), "name has"),
        (LoadLora("name", "b", "another"), "serves 'fake'"),
    ],
)
def test_orders_are_refused_by_what_is_wrong(root: Path, order: LoadLora, message: str) -> None:
    (root / "empty").mkdir()
    (root / "linked").mkdir()
    (root / "outside").symlink_to("/etc")
    (root / "linked" / "adapter").symlink_to("/etc/hostname")

    async def scenario() -> None:
        async with text_instance(MemoryNetwork(), [], lora=(f"taken={root / 'a'}",), lora_root=root) as text:
            with pytest.raises(InvalidRequest, match=message):
                await text.service.load_lora(order)
            assert [lora.name for lora in text.service.load().loras] == ["taken"]

    under_virtual_time(scenario)


def test_without_a_root_nothing_is_loaded_on_order(root: Path) -> None:
    async def scenario() -> None:
        async with text_instance(MemoryNetwork(), [], lora=(f"one={root / 'a'}",)) as text:
            with pytest.raises(FailedPrecondition, match="lora_root"):
                await text.service.load_lora(LoadLora("two", "b"))

    under_virtual_time(scenario)


def test_an_instance_does_not_start_with_an_adapter_that_cannot_be_loaded(root: Path) -> None:
    async def scenario() -> None:
        for given, limits in (
            ((f"one={root / 'missing'}",), LoraLimits()),
            ((f"one={root / 'a'}", f"two={root / 'b'}"), LoraLimits(max_loras=1)),
        ):
            with pytest.raises(CannotStart, match=r"lora (one|two): "):
                async with text_instance(MemoryNetwork(), [], lora=given, lora_limits=limits):
                    pass

    under_virtual_time(scenario)
