"""The kernels of paged attention, interpreted on the CPU, against attention in torch. ``tests/gpu`` runs them compiled."""

import importlib.util
from collections.abc import Sequence

import pytest
import torch

from tests.unit.engine.on_cuda import reference_attention
from triptych.engine.decoder import paged_attention as paged
from triptych.families.base import Span

CPU = torch.device("cpu")
BLOCK_TOKENS, BLOCKS = 16, 64
DECODES = [1, 1, 1], [1, 130, 70]
MIXED = [1, 1, 40, 5], [120, 17, 110, 5]


HAS_TRITON = importlib.util.find_spec("triton") is not None
interpreted = pytest.mark.skipif(
    not HAS_TRITON or torch.cuda.is_available(),
    reason="TRITON IS NOT INSTALLED, or compiles: kernels are not interpreted",
)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("multiprocessors", [1, 20], ids=["whole", "divided"])
@pytest.mark.parametrize("window", [None, 20], ids=["all", "window"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [*(pytest.param(*other, marks=pytest.mark.extended) for other in ((8, 2, 64), (4, 4, 16))), (7, 1, 80)],
)
@pytest.mark.parametrize(("counts", "lengths"), [DECODES, MIXED], ids=["decodes", "mixed"])
def test_the_kernels_equal_attention_in_torch(
    monkeypatch: pytest.MonkeyPatch,
    counts: Sequence[int],
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    size: int,
    window: int | None,
    multiprocessors: int,
) -> None:
    """Groups of heads that are no power of two, and heads whose size is none; with and without spans that are seen whole."""
    monkeypatch.setattr(paged, "_multiprocessors", lambda device: multiprocessors)
    torch.manual_seed(0)
    blocks = iter(torch.randperm(BLOCKS).tolist())
    tables = [[next(blocks) for _ in range(-(-length // BLOCK_TOKENS))] for length in lengths]
    keys, values = (torch.randn(BLOCKS * BLOCK_TOKENS, kv_heads, size) for _ in range(2))
    query = torch.randn(1, heads, sum(counts), size)
    spans = [(Span(1, 12), Span(90, 15)) if count > 1 else () for count in counts]
    for bidirectional in ([()] * len(counts), spans):
        layout = paged.paged_layout(counts, lengths, tables, bidirectional, BLOCK_TOKENS, CPU, group=heads // kv_heads)
        found = paged.paged_attention(layout, query, keys, values, 0.2, window)
        expected = reference_attention(layout, query, keys, values, 0.2, window)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@interpreted
@pytest.mark.slow
def test_all_variants_can_be_compiled_before_they_are_needed() -> None:
    keys, values = (torch.randn(BLOCKS * BLOCK_TOKENS, 2, 16) for _ in range(2))
    paged.compile_kernels(keys, values, BLOCK_TOKENS, heads=8, windows={None, 20}, spans=True)


def test_keys_are_divided_among_the_programs_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not into more parts than there are tiles of keys."""
    monkeypatch.setattr(paged, "_multiprocessors", lambda device: 132)
    assert [paged._parts(programs, 1000, CPU) for programs in (1, 16, 17, 70, 264, 1000)] == [16, 16, 16, 4, 1, 1]
    assert [paged._parts(1, tiles, CPU) for tiles in (1, 3, 4, 5)] == [1, 4, 4, 16]


def test_a_device_without_kernels_has_none() -> None:
    assert not paged.has_paged_kernel(CPU)
