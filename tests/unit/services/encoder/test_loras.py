"""LoRA adapters of an encoder, over fake engines whose embeddings depend on the adapter."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.services.instances import (
    encode_request,
    encoder_instance,
    hybrid_instances,
    under_virtual_time,
)
from triptych.domain.encoding import EncodeRequest
from triptych.domain.lora import LoadLora
from triptych.errors import InvalidRequest, ModelNotFound, StageClosed
from triptych.testing.fakes import fake_embedding
from triptych.transport.slot import tensors


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With adapters ``a`` and ``b``, which change embeddings."""
    for name in "ab":
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / "adapter").write_text(name)
        (tmp_path / "root" / name / "encodes").touch()
    return tmp_path / "root"


def with_lora(request: EncodeRequest, digest: str) -> EncodeRequest:
    return replace(request, info=request.info.with_lora(digest)) if digest else request


def test_an_items_embedding_and_its_key_are_those_of_its_adapter(root: Path) -> None:
    async def scenario() -> None:
        async with encoder_instance(lora=(f"first={root / 'a'}",), lora_root=root) as instance:
            (first,) = instance.service.load().loras
            second = await instance.service.load_lora(LoadLora("second", "b"))
            assert instance.service.load().loras == (first, second)
            assert first.encodes
            digests = ["", first.digest, second.digest, first.digest]
            asked = [with_lora(encode_request("cat"), digest) for digest in digests]
            got = await asyncio.gather(*map(instance.service.encode, asked))
            assert len({result.ticket.key for result in got}) == 3
            assert len({request.content for request in asked}) == 3
            assert instance.engine.encoded_items == 3
            for request, digest, result in zip(asked, digests, got, strict=True):
                found = tensors(instance.store.arena, result.ticket.offset, result.ticket)
                expected = fake_embedding(request.media + bytes.fromhex(digest), 32, 8)
                assert bytes(found["embeddings"].data) == expected
            leases = [(result.ticket.lease_id, result.router_lease) for result in got]
            await instance.service.release([lease for pair in leases for lease in pair])

    under_virtual_time(scenario)


def test_an_unloaded_adapter_takes_no_items_and_is_freed_when_those_that_run_are_encoded(root: Path) -> None:
    async def scenario() -> None:
        async with encoder_instance(lora_root=root) as instance, asyncio.TaskGroup() as group:
            lora = await instance.service.load_lora(LoadLora("one", "a"))
            running = group.create_task(instance.service.encode(with_lora(encode_request("cat"), lora.digest)))
            await asyncio.sleep(0.001)
            await instance.service.unload_lora("one")
            assert instance.service.load().loras == ()
            with pytest.raises(StageClosed, match="not loaded"):
                await instance.service.encode(with_lora(encode_request("dog"), lora.digest))
            assert instance.engine.loras.digests == {lora.digest}
            result = await running
            await instance.service.release([result.ticket.lease_id, result.router_lease])
            await asyncio.sleep(1)
            assert instance.engine.loras.digests == set()
            with pytest.raises(StageClosed, match="not loaded"):
                await instance.service.encode(with_lora(encode_request("cat"), lora.digest))

    under_virtual_time(scenario)


def test_an_instance_of_all_stages_loads_an_adapter_for_both_engines_or_for_none(root: Path) -> None:
    async def scenario() -> None:
        options: dict[str, Any] = {"lora": (f"a={root / 'a'}",), "lora_root": root}
        async with hybrid_instances(encoder=options, **options) as made:
            whole = made.whole.service
            (lora,) = whole.load().loras
            both = [made.encoder.engine.loras, made.text.engine.loras]
            assert [engine.digests for engine in both] == [{lora.digest}] * 2
            await made.encoder.service.load_lora(LoadLora("b", "b"))
            with pytest.raises(InvalidRequest):
                await whole.load_lora(LoadLora("b", "b"))
            await made.encoder.service.unload_lora("b")
            await whole.load_lora(LoadLora("c", "b"))
            await whole.unload_lora("c")
            await whole.unload_lora("a")
            await asyncio.sleep(1)
            assert [engine.digests for engine in both] == [set()] * 2
            with pytest.raises(ModelNotFound):
                await whole.unload_lora("a")

    under_virtual_time(scenario)
