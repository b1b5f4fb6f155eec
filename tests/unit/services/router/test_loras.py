"""LoRA adapters as models of a router: which instances get their requests, and orders to load and unload them."""

import asyncio

import pytest

from tests.unit.services.router.fakes import ENCODES, Bench, KillableInstance, ask, bench, collect, image, lora_of
from tests.unit.services.router.test_service import until, virtual
from triptych.domain.generation import ChatFinished
from triptych.domain.lora import LoadLora
from triptych.domain.stage import Role
from triptych.errors import FailedPrecondition, InvalidRequest, ModelNotFound, Unavailable
from triptych.machine.text.prefix_hashes import salt_of
from triptych.policy.policies import PolicyNames
from triptych.services.router.settings import RouterSettings
from triptych.testing.fakes import FAKE_MODEL

REPORTS_S = 0.2
"""In which every instance reports its load."""


async def have(name: str, directory: str, *instances: KillableInstance) -> None:
    for instance in instances:
        instance.loras[name] = lora_of(name, directory)
    await asyncio.sleep(REPORTS_S)


async def answered(made: Bench, request_id: str, model: str, images: int = 0) -> bool:
    events = await collect(made.router, ask(request_id, [image(n) for n in range(images)], model=model))
    return isinstance(events[-1], ChatFinished)


@virtual
async def test_requests_for_an_adapter_go_to_the_instances_that_have_it_and_others_anywhere() -> None:
    async with bench(texts=3) as made:
        await have("digits", "d", made.texts[1])
        for number in range(6):
            assert await answered(made, f"r{number}", "digits", images=number % 2)
        assert [len(text.requests) for text in made.texts] == [0, 6, 0]
        digest = lora_of("digits", "d").digest
        assert {(request.model, request.lora) for request in made.texts[1].requests} == {(FAKE_MODEL.model_id, digest)}
        timeline = await made.router.timeline("r0")
        assert timeline.model == "digits"
        for number in range(6):
            assert await answered(made, f"s{number}", FAKE_MODEL.model_id)
        assert all(text.requests for text in made.texts)
        assert all(not request.lora for request in made.texts[0].requests)


@virtual
async def test_adapters_are_listed_with_their_parent_and_unknown_names_are_refused() -> None:
    async with bench(texts=2) as made:
        await have("digits", "d", *made.texts)
        base, digits = await made.router.models()
        assert (base, base.parent) == (FAKE_MODEL, "")
        assert (digits.model_id, digits.parent, digits.revision) == (
            "digits",
            FAKE_MODEL.model_id,
            lora_of("digits", "d").digest,
        )
        assert (await made.router.tokenize(ask("t", model="digits"))).token_ids
        with pytest.raises(ModelNotFound, match="'other' is not served"):
            await answered(made, "r", "other")


@virtual
async def test_of_two_adapters_with_one_name_the_one_that_most_instances_have_is_used() -> None:
    async with bench(texts=3) as made:
        await have("digits", "old", made.texts[0])
        await have("digits", "new", *made.texts[1:])
        for number in range(4):
            assert await answered(made, f"r{number}", "digits")
        assert not made.texts[0].requests


@virtual
async def test_a_request_whose_instance_has_just_unloaded_the_adapter_goes_to_another_or_is_refused_as_unknown() -> (
    None
):
    async with bench(texts=2) as made:
        await have("digits", "d", *made.texts)
        made.texts[0].loras.clear()
        assert await answered(made, "first", "digits")
        assert await answered(made, "second", "digits")
        made.texts[1].loras.clear()
        with pytest.raises(ModelNotFound):
            await answered(made, "third", "digits")
        await asyncio.sleep(REPORTS_S)
        with pytest.raises(ModelNotFound):
            await answered(made, "fourth", "digits")
        assert [model.model_id for model in await made.router.models()] == [FAKE_MODEL.model_id]


@virtual
async def test_a_lost_instance_makes_its_adapter_unavailable_not_unknown() -> None:
    async with bench(texts=2) as made:
        await have("digits", "d", made.texts[0])
        made.texts[0].kill()
        with pytest.raises(Unavailable):
            await answered(made, "r", "digits")
        assert await answered(made, "s", FAKE_MODEL.model_id)
        made.texts[0].restart()
        made.texts[0].loras["digits"] = lora_of("digits", "d")
        await until(lambda: made.router.cluster.machine.instances.by_name["text-0"].usable)
        await asyncio.sleep(REPORTS_S)
        assert await answered(made, "t", "digits")


@virtual
async def test_prompts_are_prefilled_only_where_an_instance_that_decodes_has_the_adapter_as_well() -> None:
    async with bench(roles=(Role.P, Role.P, Role.D, Role.D)) as made:
        first, second, third, fourth = made.texts
        await have("digits", "d", first)
        with pytest.raises(ModelNotFound):
            await answered(made, "alone", "digits")
        await have("digits", "d", fourth)
        for number in range(4):
            assert await answered(made, f"r{number}", "digits", images=number % 2)
        assert [len(text.requests) for text in (first, second, third, fourth)] == [4, 0, 0, 4]
        assert all(request.lora == lora_of("digits", "d").digest for request in fourth.requests)
        fourth.kill()
        await until(lambda: not made.router.cluster.machine.instances.by_name["text-3"].usable)
        with pytest.raises(Unavailable):
            await answered(made, "lost", "digits")
        assert await answered(made, "base", FAKE_MODEL.model_id), "nothing waits for the lost one"


@virtual
async def test_prefixes_at_other_instances_are_those_of_the_same_adapter() -> None:
    assert len({salt_of(salt, digest) for salt in (b"", b"a") for digest in ("", "00" * 32, "11" * 32)}) == 6
    assert len(salt_of(b"", "00" * 32)) > 256, "no tenant can have it"


@virtual
async def test_an_order_loads_the_adapter_everywhere_it_lacks_and_an_unload_removes_it() -> None:
    async with bench(texts=2) as made:
        await have("digits", "d", made.texts[0])
        made.texts[0].lora_errors.append(AssertionError("it has it"))
        lora = await made.router.load_lora(LoadLora("digits", "d", FAKE_MODEL.model_id))
        assert lora == lora_of("digits", "d")
        assert all(text.loras == {"digits": lora} for text in made.texts)
        assert await answered(made, "at once", "digits")
        with pytest.raises(InvalidRequest, match="loaded already"):
            await made.router.load_lora(LoadLora("digits", "d"))
        await made.router.unload_lora("digits")
        assert not any(text.loras for text in made.texts)
        with pytest.raises(ModelNotFound):
            await answered(made, "gone", "digits")
        with pytest.raises(ModelNotFound):
            await made.router.unload_lora("digits")


@virtual
async def test_an_order_that_one_instance_cannot_carry_out_leaves_the_others_as_they_were() -> None:
    async with bench(texts=3) as made:
        made.texts[1].lora_errors.append(InvalidRequest("r is 512", param="directory"))
        with pytest.raises(InvalidRequest, match="r is 512"):
            await made.router.load_lora(LoadLora("digits", "d"))
        assert not any(text.loras for text in made.texts)
        await have("digits", "other files", made.texts[0])
        with pytest.raises(InvalidRequest, match="different files"):
            await made.router.load_lora(LoadLora("digits", "d"))
        assert [list(text.loras) for text in made.texts] == [["digits"], [], []]
        with pytest.raises(ModelNotFound, match="'else' is not served"):
            await made.router.load_lora(LoadLora("more", "d", "else"))


@virtual
async def test_requests_with_adapters_are_prefilled_early_where_the_adapter_is() -> None:
    settings = RouterSettings(policies=PolicyNames(dispatch="prefix"))
    async with bench(texts=2, settings=settings, prefills_early=True) as made:
        await have("digits", "d", made.texts[1])
        assert await answered(made, "r", "digits", images=3)
        assert not made.texts[0].requests
        assert {request.lora for request in made.texts[1].requests} == {lora_of("digits", "d").digest}


@virtual
async def test_items_of_an_adapter_that_changes_embeddings_go_to_the_encoders_that_have_it() -> None:
    async with bench(encoders=3, texts=2) as made:
        await have("digits", ENCODES, *made.texts)
        with pytest.raises(ModelNotFound):
            await answered(made, "no encoder has it", "digits", images=1)
        await have("digits", ENCODES, made.encoders[1])
        await have("plain", "d", *made.texts)
        digest = lora_of("digits", ENCODES).digest
        for number in range(4):
            assert await answered(made, f"r{number}", "digits", images=2)
        assert {encoder.instance_id for encoder in made.encoders if encoder.encoded} == {"encoder-1"}
        assert set(made.encoders[1].encoded_loras) == {digest}
        for number in range(4):
            assert await answered(made, f"p{number}", "plain", images=2)
            assert await answered(made, f"b{number}", FAKE_MODEL.model_id, images=2)
        assert {lora for encoder in made.encoders for lora in encoder.encoded_loras} == {"", digest}
        made.encoders[1].loras.clear()
        with pytest.raises(ModelNotFound):
            await answered(made, "unloaded just now", "digits", images=1)


@virtual
async def test_a_lost_encoder_makes_its_adapter_unavailable_and_items_wait_for_it() -> None:
    async with bench(encoders=2) as made:
        await have("digits", ENCODES, made.encoders[0], *made.texts)
        made.encoders[0].kill()
        with pytest.raises(Unavailable):
            await answered(made, "r", "digits", images=1)
        assert not made.encoders[1].encoded


@virtual
async def test_an_order_loads_what_changes_embeddings_at_encoders_too_and_nothing_if_one_cannot() -> None:
    async with bench(encoders=2, texts=2) as made:
        instances: list[KillableInstance] = [*made.encoders, *made.texts]
        made.encoders[1].lora_errors.append(FailedPrecondition("it has no lora_root"))
        with pytest.raises(FailedPrecondition):
            await made.router.load_lora(LoadLora("digits", ENCODES))
        assert not any(instance.loras for instance in instances)
        made.encoders[1].lora_errors.append(FailedPrecondition("it has no lora_root"))
        assert await made.router.load_lora(LoadLora("plain", "d")) == lora_of("plain", "d")
        assert await made.router.load_lora(LoadLora("digits", ENCODES)) == lora_of("digits", ENCODES)
        assert all("digits" in instance.loras for instance in instances)
        assert await answered(made, "at once", "digits", images=1)
        for name in ("plain", "digits"):
            with pytest.raises(InvalidRequest, match="loaded already"):
                await made.router.load_lora(LoadLora(name, "d"))
            await made.router.unload_lora(name)
        assert not any(instance.loras for instance in instances)
