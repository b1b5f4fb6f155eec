from collections.abc import Iterator
from itertools import product as pairs

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from triptych.engine import product_attention as module
from triptych.engine.product_attention import is_faster, is_worth_it, product_attention

SHAPES = [(1, 1, 1, 1, 8), (2, 3, 5, 5, 16), (1, 4, 16, 64, 32), (3, 1, 17, 65, 8), (2, 7, 130, 300, 16)]
"""kv heads, heads that share a key, rows, positions, size."""


def by_torch(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    k, v = (tensor[:, None].expand(-1, query.shape[1], -1, -1) for tensor in (keys, values))
    return scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scaling)


def drawn(kv_heads: int, group: int, count: int, length: int, size: int) -> Iterator[torch.Tensor]:
    torch.manual_seed(count + length)
    yield torch.randn(kv_heads, group, count, size)
    for _ in range(2):
        yield torch.randn(length, kv_heads, size).transpose(0, 1)  # as blocks of a cache lie


def causal(count: int, length: int) -> torch.Tensor:
    return torch.full((count, length), -torch.inf).triu_(length - count + 1)


@pytest.mark.parametrize(("shape", "tile_nbytes"), list(pairs(SHAPES, [1, 1 << 15, 1 << 30])))
def test_it_is_the_same_as_torchs(
    shape: tuple[int, int, int, int, int], tile_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TILE_NBYTES", tile_nbytes)
    query, keys, values = drawn(*shape)
    _, _, count, length, _ = shape
    window = causal(count, length)
    window[:, : length // 3] = -torch.inf  # each row sees the last position at least
    window[:, -1] = 0.0
    for mask, options in (
        (causal(count, length), {"is_causal": True}),
        (torch.zeros(count, length), {}),
        (window, {"mask": window}),
    ):
        made = product_attention(query, keys, values, scaling=0.3, **options)
        assert made.shape == query.shape
        assert torch.allclose(made, by_torch(query, keys, values, mask, 0.3), atol=1e-5)


def test_rows_do_not_see_what_comes_later() -> None:
    query, keys, values = drawn(2, 2, 40, 100, 8)
    before = product_attention(query, keys, values, scaling=1.0, is_causal=True)
    keys[:, 90:], values[:, 90:] = 5.0, 5.0
    after = product_attention(query, keys, values, scaling=1.0, is_causal=True)
    assert torch.equal(before[:, :, :30], after[:, :, :30])
    assert not torch.isclose(before[:, :, 30:], after[:, :, 30:]).all(-1).any()


def test_what_is_no_number_stays_so_and_in_its_head() -> None:
    query, keys, values = drawn(2, 1, 20, 20, 8)
    keys[1, 3, 0] = torch.nan
    made = product_attention(query, keys, values, scaling=1.0, is_causal=True)
    assert made[0].isfinite().all()
    assert made[1, 0, 3:].isnan().all()


def test_few_kernels_are_made_for_many_shapes() -> None:
    """For each shape of a product oneDNN keeps one, which takes some hundred KB."""
    shapes = set[tuple[int, ...]]()

    def noted(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shapes.add((*rows.shape, *weight.shape))
        return rows @ weight.t()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "onednn_linear", noted)
        for length in range(256, 512):
            product_attention(*drawn(1, 1, 30 + length % 3, length, 8), scaling=1.0, is_causal=True)
        assert len(shapes) <= 2 * 17
        for length in range(2048, 4096, 7):
            product_attention(*drawn(1, 1, 30, length, 8), scaling=1.0, is_causal=True)
    assert len(shapes) <= 4 * 17


def test_small_ones_are_not_worth_it() -> None:
    assert not is_worth_it(4, 16, 64, 64)
    assert is_worth_it(4, 128, 512, 64)
    assert is_worth_it(1, 256, 256, 64)


@pytest.mark.parametrize(("torch_s", "faster"), [(1.0, True), (0.25, False)])
def test_it_is_measured_which_is_faster(torch_s: float, *, faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def takes(seconds: float) -> object:
        def attend(*_: object, **__: object) -> None:
            clock[0] += seconds

        return attend

    monkeypatch.setattr(module, "has_onednn", lambda: True)
    monkeypatch.setattr("triptych.engine.product_attention.time.thread_time", lambda: clock[0])
    monkeypatch.setattr(module, "scaled_dot_product_attention", takes(torch_s))
    monkeypatch.setattr(module, "product_attention", takes(0.5))
    assert is_faster(2, 4, 64) is faster
    assert is_faster(12, 1, 64, rows=256, is_causal=False) is faster
    assert not is_faster(2, 1, 8), "too small"
    monkeypatch.setattr(module, "has_onednn", lambda: False)
    assert not is_faster(2, 4, 64)
