import random
from pathlib import Path

import torch

from tests.integration.families.clips import RATE_HZ, random_clip
from tests.integration.families.tiny_voxtral import TOKENS, TinyVoxtral
from tests.unit.engine.tiny import encoder_engine
from triptych.domain.embedding import Tensor
from triptych.domain.media import Shard
from triptych.engine.tensors import from_bytes


def rows(tensors: tuple[Tensor, ...]) -> torch.Tensor:
    (tensor,) = tensors
    return from_bytes(tensor, torch.device("cpu"))


def test_shards_of_a_clip_are_its_windows(tmp_path: Path) -> None:
    TinyVoxtral().make(tmp_path)
    engine = encoder_engine(tmp_path)
    clip = random_clip(random.Random(3), RATE_HZ * 9 // 4, RATE_HZ)
    (whole,) = engine.encode([engine.prepare(clip.media, clip.info)])
    shards = [engine.prepare(clip.media, clip.info, shard) for shard in (Shard(0, 1, 3), Shard(1, 2, 3))]
    assert [shard.tokens for shard in shards] == [TOKENS, 2 * TOKENS]
    parts = [rows(tensors) for tensors in engine.encode(shards)]
    assert torch.allclose(torch.cat(parts), rows(whole), atol=1e-5)
