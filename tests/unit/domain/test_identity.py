from dataclasses import fields, replace
from itertools import pairwise

import pytest

from triptych.domain.embedding import DType, EmbeddingIdentity
from triptych.domain.media import MediaInfo, Modality, Shard

INFO = MediaInfo(Modality.VIDEO, "mp4", 30, 100, 1234, bytes(32), frames=12, duration_s=1.5)
IDENTITY = EmbeddingIdentity("model", "revision", "encoder", b"processor", DType.F32, INFO)

OTHER_MEDIA = {
    "modality": Modality.IMAGE,
    "format": "webm",
    "width": 100,
    "height": 30,
    "digest": bytes(31) + b"\1",
    "frames": 13,
    "duration_s": 1.25,
    "samples": 16_000,
    "sample_rate_hz": 8000,
    "rotation_deg": 90,
    "options": (("fps", "2"),),
}
OTHERS = {
    "model_id": "another",
    "model_revision": "another",
    "encoder_version": "another",
    "processor_digest": b"another",
    "dtype": DType.BF16,
    "shard": Shard(0, 1, 2),
    "tenant_salt": b"another",
}


@pytest.mark.parametrize("name", OTHER_MEDIA)
def test_other_media_have_another_key(name: str) -> None:
    other = replace(INFO, **{name: OTHER_MEDIA[name]})  # type: ignore[arg-type]
    assert replace(IDENTITY, media=other).key != IDENTITY.key


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_or_shard_has_another_key(name: str) -> None:
    assert replace(IDENTITY, **{name: OTHERS[name]}).key != IDENTITY.key  # type: ignore[arg-type]


def test_the_key_covers_every_field() -> None:
    assert {field.name for field in fields(MediaInfo)} == {*OTHER_MEDIA, "nbytes"}  # covered by the digest
    assert {field.name for field in fields(EmbeddingIdentity)} == {*OTHERS, "media"}


def test_width_and_height_are_not_interchangeable() -> None:
    assert replace(IDENTITY, media=replace(INFO, width=100, height=30)).key != IDENTITY.key


def test_every_shard_has_its_own_key() -> None:
    shards = [Shard(0, 1, 4), Shard(0, 2, 4), Shard(1, 1, 4), Shard(2, 2, 4), Shard(0, 1, 2), Shard(0, 1, 41), None]
    keys = sorted(replace(IDENTITY, shard=shard).key for shard in shards)
    assert all(key != next_key for key, next_key in pairwise(keys))


def test_the_key_is_not_truncated_and_stable() -> None:
    assert len(IDENTITY.key) == 32
    assert replace(IDENTITY).key == IDENTITY.key
