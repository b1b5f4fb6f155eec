import pytest
import torch
from torch import nn

from triptych.engine import linear_products
from triptych.engine.joined_layers import nbytes_of
from triptych.engine.linear_products import (
    By,
    CompiledProduct,
    JoinedProduct,
    Make,
    OneDnnProduct,
    PackedProduct,
    PlainProduct,
)
from triptych.engine.worker_threads import WorkerThreads

MAKES: dict[By, Make] = {
    By.PLAIN: PlainProduct,
    By.ONEDNN: OneDnnProduct,
    By.PACKED: PackedProduct,
    By.JOINED: JoinedProduct,
    By.COMPILED: lambda layer: CompiledProduct(layer, WorkerThreads(1)),
}


def linear(*, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 96, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("by", By)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 64), (2, 9, 64), (1, 40, 64)])
def test_each_product_is_the_layers(*, by: By, bias: bool, shape: tuple[int, ...]) -> None:
    layer, rows = linear(bias=bias), torch.randn(shape)
    torch.testing.assert_close(MAKES[by](layer)(rows), layer(rows))


@pytest.mark.parametrize("pieces", [2, 3, 7, 200])
def test_outputs_are_divided_among_threads(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = linear()
    monkeypatch.setattr(linear_products, "_NBYTES_PER_THREAD", nbytes_of(layer) // pieces)
    torch.set_num_threads(pieces)
    try:
        made = CompiledProduct(layer, WorkerThreads(min(pieces, 4)))(hidden := torch.randn(5, 64))
    finally:
        torch.set_num_threads(1)
    assert torch.allclose(made, layer(hidden), atol=1e-5)


def test_unloaded_packed_weights_compute_nothing() -> None:
    layer, rows = linear(), torch.randn(3, 64)
    product = PackedProduct(layer)
    product.unload()
    with pytest.raises(AssertionError, match="unloaded"):
        product(rows)
    product.load()
    torch.testing.assert_close(product(rows), layer(rows))
