"""Embeddings that outlive the encoder, and everything about their files that may go wrong."""

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.services.instances import (
    EncoderInstance,
    encode_request,
    encoder_instance,
    under_virtual_time,
)
from triptych.domain.embedding import DType
from triptych.domain.encoding import EncodeResult
from triptych.domain.media import MediaInfo
from triptych.errors import ArenaFull
from triptych.services.encoder.embedding_files import EmbeddingFiles, StoredEmbedding
from triptych.services.encoder.file_tier import PAUSE_S, READ_PATIENCE_S
from triptych.testing.fakes import FAKE_MODEL, FakeEncoderEngine, fake_embedding
from triptych.transport.slot import tensors, verify
from triptych.virtual.offload import spend

MIB = 1 << 20


def tokens_of(info: MediaInfo) -> int:
    return 2 * info.width


@pytest.fixture
def files(tmp_path: Path) -> EmbeddingFiles:
    return EmbeddingFiles(tmp_path / "kept", MIB)


@pytest.fixture
def kept(files: EmbeddingFiles, tmp_path: Path) -> Callable[[], list[Path]]:
    return lambda: sorted((tmp_path / "kept").glob("*.embedding"))


async def encoded(instance: EncoderInstance, name: str = "cat", tenant_salt: bytes = b"") -> EncodeResult:
    """Encode, check the embedding, and give the leases back."""
    request = encode_request(name, tenant_salt=tenant_salt)
    result = await instance.service.encode(request)
    ticket = result.ticket
    verify(instance.store.arena, ticket.offset, ticket)
    found = tensors(instance.store.arena, ticket.offset, ticket)
    assert bytes(found["embeddings"].data) == fake_embedding(request.media, ticket.tokens, 8)
    await instance.service.release((ticket.lease_id, result.router_lease))
    return result


async def encoded_once(files: EmbeddingFiles, *names: str) -> None:
    """By a process that has ended."""
    async with encoder_instance(files=files) as instance:
        for name in names:
            await encoded(instance, name)
        await instance.settled()
        assert instance.files.writes["written"] == len(names)


def test_an_embedding_outlives_the_encoder(files: EmbeddingFiles) -> None:
    async def scenario() -> None:
        await encoded_once(files, "cat")
        async with encoder_instance(epoch=2, files=files) as again:
            result = await encoded(again)
            assert (result.cached, result.ticket.epoch, result.ticket.tokens) == (True, 2, 32)
            assert again.engine.encoded_items == 0
            assert (await encoded(again)).cached
            assert again.files.reads == {"hit": 1}, "the second time it is in the arena"
            assert not (await encoded(again, "dog")).cached

    under_virtual_time(scenario)


def test_what_the_arena_evicted_is_read_back(files: EmbeddingFiles) -> None:
    async def scenario() -> None:
        async with encoder_instance(slots=2, files=files) as instance:
            for name in ("cat", "dog", "cow", "cat", "dog", "cow"):
                await encoded(instance, name)
                await asyncio.sleep(0.1)
            assert instance.engine.encoded_items == 3
            assert instance.files.reads == {"miss": 3, "hit": 3}

    under_virtual_time(scenario)


@pytest.mark.parametrize(
    "other",
    [
        FakeEncoderEngine(tokens_of, model=replace(FAKE_MODEL, revision="1" * 64)),
        FakeEncoderEngine(tokens_of, model=replace(FAKE_MODEL, dtype=DType.F16)),
        FakeEncoderEngine(tokens_of, version="fake-2"),
        FakeEncoderEngine(tokens_of, processor_digest=b"1" * 32),
    ],
    ids=["weights", "dtype", "software", "processor"],
)
def test_another_model_is_never_served_the_old_embedding(files: EmbeddingFiles, other: FakeEncoderEngine) -> None:
    async def scenario() -> None:
        await encoded_once(files, "cat")
        async with encoder_instance(engine=replace(other), files=files) as instance:
            assert not (await encoded(instance)).cached
            assert instance.files.reads == {"miss": 1}

    under_virtual_time(scenario)


def test_tenants_share_no_files(files: EmbeddingFiles) -> None:
    async def scenario() -> None:
        await encoded_once(files, "cat")
        async with encoder_instance(files=files) as instance:
            assert not (await encoded(instance, tenant_salt=b"other")).cached

    under_virtual_time(scenario)


def test_callers_at_the_same_time_share_one_read_or_one_encoding(files: EmbeddingFiles) -> None:
    async def scenario() -> None:
        await encoded_once(files, "cat")
        async with encoder_instance(files=files) as instance:
            names = ["cat", "dog"] * 10
            results = await asyncio.gather(*(encoded(instance, name) for name in names))
            assert [result.cached for result in results] == [name == "cat" for name in names]
            assert instance.engine.encoded_items == 1
            assert instance.files.reads == {"hit": 1, "miss": 1}

    under_virtual_time(scenario)


@pytest.mark.parametrize("steps", range(12))
def test_a_caller_that_cancels_while_a_file_is_read_leaks_nothing(files: EmbeddingFiles, steps: int) -> None:
    async def scenario() -> None:
        await encoded_once(files, "cat")
        async with encoder_instance(files=files) as instance, asyncio.TaskGroup() as group:
            call = group.create_task(instance.service.encode(encode_request("cat")))
            other = group.create_task(encoded(instance))
            for _ in range(steps):
                await asyncio.sleep(0)
            if not call.cancel():
                result = call.result()
                await instance.service.release((result.ticket.lease_id, result.router_lease))
            assert (await other).cached
            assert instance.engine.encoded_items == 0

    under_virtual_time(scenario)


def test_a_damaged_file_is_removed_counted_and_written_anew(
    files: EmbeddingFiles, kept: Callable[[], list[Path]]
) -> None:
    async def scenario() -> None:
        await encoded_once(files, "cat")
        (file,) = kept()
        file.write_bytes(file.read_bytes()[:-9])
        async with encoder_instance(files=files) as instance:
            assert not (await encoded(instance)).cached
            await instance.settled()
            assert instance.files.reads == {"damaged": 1}
            assert instance.files.writes == {"written": 1}
        async with encoder_instance(files=files) as instance:
            assert (await encoded(instance)).cached

    under_virtual_time(scenario)


def test_a_full_disk_is_tried_again_later_and_nothing_fails(
    files: EmbeddingFiles, kept: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scenario() -> None:
        async with encoder_instance(files=files) as instance:
            with monkeypatch.context() as disk:
                disk.setattr(os, "write", full)
                for name in ("cat", "dog"):
                    assert not (await encoded(instance, name)).cached
                    await instance.settled()
            assert instance.files.writes == {"failed": 1, "dropped": 1}
            assert kept() == []
            await encoded(instance, "cow")
            await asyncio.sleep(PAUSE_S)
            await encoded(instance, "hen")
            await instance.settled()
            assert instance.files.writes == {"failed": 1, "dropped": 2, "written": 1}
            assert len(kept()) == 1

    under_virtual_time(scenario)


def test_files_that_cannot_be_opened_are_encoded(files: EmbeddingFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, *args: object, **told: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

    async def scenario() -> None:
        await encoded_once(files, "cat")
        async with encoder_instance(files=files) as instance:
            with monkeypatch.context() as disk:
                disk.setattr(os, "open", refused)
                assert not (await encoded(instance, "cat")).cached
                await instance.settled()
            assert instance.files.reads == {"failed": 1}

    under_virtual_time(scenario)


class BusyFiles(EmbeddingFiles):
    """On a slow disk."""

    begun = 0

    def read(self, key: bytes, most_nbytes: int) -> StoredEmbedding | None:
        self.begun += 1
        spend(0.4)
        return super().read(key, most_nbytes)


def test_a_file_that_all_callers_have_left_is_not_read(tmp_path: Path) -> None:
    """Two can be read at a time. What has begun is not copied to the arena."""
    names = ("cat", "dog", "cow")

    async def scenario() -> None:
        await encoded_once(EmbeddingFiles(tmp_path / "kept", MIB), *names)
        files = BusyFiles(tmp_path / "kept", MIB)
        async with encoder_instance(files=files) as instance, asyncio.TaskGroup() as group:
            calls = [group.create_task(instance.service.encode(encode_request(name))) for name in names]
            await asyncio.sleep(0.1)
            assert files.begun == 2
            for call in calls:
                call.cancel()
            await asyncio.sleep(2)
            assert (files.begun, instance.files.reads) == (2, {"left": 3})
            assert instance.store.memory.cached_bytes == 0
            assert (await encoded(instance, "cow")).cached, "a later caller has it read"
            assert (files.begun, instance.engine.encoded_items) == (3, 0)

    under_virtual_time(scenario)


def test_an_embedding_that_is_wanted_again_while_its_left_read_runs_is_read_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        await encoded_once(EmbeddingFiles(tmp_path / "kept", MIB), "cat")
        files = BusyFiles(tmp_path / "kept", MIB)
        async with encoder_instance(files=files) as instance, asyncio.TaskGroup() as group:
            call = group.create_task(instance.service.encode(encode_request("cat")))
            await asyncio.sleep(0.1)
            call.cancel()
            await asyncio.sleep(0.1)
            assert (await encoded(instance)).cached
            assert (files.begun, instance.files.reads, instance.engine.encoded_items) == (2, {"left": 1, "hit": 1}, 0)

    under_virtual_time(scenario)


class SlowFiles(EmbeddingFiles):
    """On a disk that hangs."""

    def read(self, key: bytes, most_nbytes: int) -> StoredEmbedding | None:
        spend(5.0)
        return super().read(key, most_nbytes)


def test_an_item_whose_file_is_not_read_in_time_is_encoded(tmp_path: Path) -> None:
    async def scenario() -> None:
        await encoded_once(EmbeddingFiles(tmp_path / "kept", MIB), "cat")
        async with encoder_instance(files=SlowFiles(tmp_path / "kept", MIB)) as instance:
            clock = asyncio.get_running_loop().time
            started_s = clock()
            results = await asyncio.gather(*(encoded(instance) for _ in range(3)))
            assert not any(result.cached for result in results)
            assert instance.engine.encoded_items == 1
            assert READ_PATIENCE_S <= clock() - started_s < READ_PATIENCE_S + 0.5
            started_s = clock()
            await encoded(instance, "dog")
            assert clock() - started_s < 0.5, "nothing is read for a time"
            await asyncio.sleep(PAUSE_S)
            await encoded(instance, "cow")
            assert instance.files.reads == {"failed": 1}, "and then again"
            await asyncio.sleep(10.0)
            assert instance.files.reads == {"failed": 2}

    under_virtual_time(scenario)


def test_an_embedding_for_which_the_arena_has_no_room_is_refused_as_without_files(files: EmbeddingFiles) -> None:
    async def scenario() -> None:
        await encoded_once(files, "cat", "dog")
        async with encoder_instance(slots=1, files=files) as instance:
            held = await instance.service.encode(encode_request("cat"))
            with pytest.raises(ArenaFull):
                await instance.service.encode(encode_request("dog"))
            await instance.service.release((held.ticket.lease_id, held.router_lease))
            assert (await encoded(instance, "dog")).cached
            assert instance.files.reads == {"hit": 2, "failed": 1}

    under_virtual_time(scenario)


def test_what_waits_to_be_written_is_bounded(files: EmbeddingFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of an arena of 16 embeddings holds 4."""
    write = files.write

    def slow(stored: StoredEmbedding) -> bool:
        spend(1.0)
        return write(stored)

    async def scenario() -> None:
        monkeypatch.setattr(files, "write", slow)
        async with encoder_instance(slots=16, files=files) as instance:
            await asyncio.gather(*(encoded(instance, f"cat{number}") for number in range(10)))
            await instance.settled()
            assert instance.files.writes == {"written": 4, "dropped": 6}

    under_virtual_time(scenario)
