"""Merges the shards of items that several encoders encoded."""

from collections.abc import Sequence

from triptych.domain.embedding import Tensor, joined, whole_key
from triptych.domain.engine import EmbeddingInput


def merge(inputs: Sequence[EmbeddingInput], continues: Sequence[bool]) -> tuple[EmbeddingInput, ...]:
    """Merge shards into one input per item. ``continues`` tells which inputs are further shards of the previous one's
    item. Blocks while it copies shards; whole items are passed on.
    """
    items: list[list[EmbeddingInput]] = []
    for tensor, goes_on in zip(inputs, continues, strict=True):
        if goes_on:
            items[-1].append(tensor)
        else:
            items.append([tensor])
    return tuple(item[0] if len(item) == 1 else _whole(item) for item in items)


def _whole(shards: Sequence[EmbeddingInput]) -> EmbeddingInput:
    specs = joined([tuple(tensor.spec for tensor in shard.tensors.values()) for shard in shards])
    tensors = {
        spec.name: Tensor(spec, memoryview(b"".join(shard.tensors[spec.name].data for shard in shards)))
        for spec in specs
    }
    known = all(shard.key for shard in shards)
    key = whole_key([shard.key for shard in shards])
    return EmbeddingInput(shards[0].start, sum(shard.tokens for shard in shards), tensors, key if known else b"")
