"""Decoding rows: their reads of the KV cache, and the tokens chosen from their logits."""

import math

import pytest
import torch

from triptych.domain.embedding import DType
from triptych.domain.kv_segment import KvKind
from triptych.engine.decoder.attention import Context, PackedBatch, decodes, packed_attention
from triptych.engine.decoder.kv_cache import KvCache
from triptych.engine.decoder.model_runner import forward_outputs

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 2, 4, 2, 8, 4


class Layer:
    def __init__(self, layer_idx: int) -> None:
        self.layer_idx = layer_idx


@pytest.fixture
def cache() -> KvCache:
    torch.manual_seed(0)
    kind = KvKind("model", DType.F32, LAYERS, KV_HEADS, HEAD_SIZE)
    made = KvCache(kind, nbytes=kind.position_nbytes * BLOCK * 32, block_tokens=BLOCK, device=torch.device("cpu"))
    made.keys.normal_()
    made.values.normal_()
    return made


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_each_row_reads_its_own_positions(cache: KvCache, layer: int, window: int | None) -> None:
    """In place, gathered together, and gathered from pieces: rows equal attention by its definition."""
    alone = [Context(7, (0, 1), True), Context(20, (5, 6, 7, 8, 9), True)]
    pieces = [Context(9, (3, 12, 2), False), Context(3, (14,), True), Context(12, (20, 17, 30), False)]
    whole = [Context(2, (10,), True), Context(11, (22, 23, 24), True), Context(8, (26, 27), True)]
    contexts = [alone[0], *pieces, alone[1], *whole]
    groups = tuple(decodes(row, of, cache) for row, of in ((0, alone[:1]), (1, pieces), (4, alone[1:]), (5, whole)))
    last = [cache.slots(context.table, context.length - 1, context.length)[0] for context in contexts]
    query = torch.randn(1, HEADS, len(contexts), HEAD_SIZE)
    key, value = (torch.randn(1, KV_HEADS, len(contexts), HEAD_SIZE) for _ in range(2))
    packed = PackedBatch(cache, torch.tensor(last), groups, ())
    made, _ = packed_attention(Layer(layer), query, key, value, None, packed=packed, sliding_window=window)
    for row, context in enumerate(contexts):
        first = 0 if window is None else max(0, context.length - window)
        slots = cache.slots(context.table, first, context.length)
        for head in range(HEADS):
            at = head * KV_HEADS // HEADS
            keys, values = cache.keys[layer, slots, at], cache.values[layer, slots, at]
            weights = (keys @ query[0, head, row] / math.sqrt(HEAD_SIZE)).softmax(0)
            assert torch.allclose(made[0, row, head], weights @ values, atol=1e-5)


def test_ties_of_logits_go_to_the_first_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-5.0, -7.0, -4.0]])
    assert [output.argmax for output in forward_outputs(logits, [False] * 3)] == [1, 0, 2]


def test_non_finite_logits_are_reported() -> None:
    logits = torch.tensor([[1.0, float("nan")], [float("inf"), 0.0], [0.0, 1.0], [float("-inf"), 1.0]])
    outcomes = forward_outputs(logits, [False, False, True, False])
    assert [outcome.is_finite for outcome in outcomes] == [False, False, True, False]
    assert outcomes[2].logits is not None
    assert outcomes[2].logits.tolist() == [0.0, 1.0]
