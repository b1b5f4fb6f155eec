"""Linear layers of the same rows, computed as one, whose weights stay theirs."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from triptych.engine import fastest_products
from triptych.engine.fastest_products import choose_products, load_copies, unload_copies
from triptych.engine.joined_layers import JoinedLinear, first_outputs, nbytes_of, together, weights_of
from triptych.engine.linear_products import By
from triptych.engine.worker_threads import WorkerThreads

SHAPES = [(8,), (8, 8), (32, 4, 4)]


def layers(outputs: tuple[int, ...], *, bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(16, count, bias=bias).requires_grad_(False) for count in outputs]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", SHAPES)
def test_outputs_are_those_of_all_layers(*, outputs: tuple[int, ...], bias: bool) -> None:
    parts, hidden = layers(outputs, bias=bias), torch.randn(3, 16)
    joined = JoinedLinear(parts)
    expected = torch.cat([layer(hidden) for layer in parts], 1)
    torch.testing.assert_close(joined(hidden), expected)
    torch.testing.assert_close(linear(hidden, *together(weights_of(joined))), expected)
    assert not list(joined.parameters()), "it has none of its own"
    assert nbytes_of(joined) == 4 * 16 * sum(outputs)
    for count in (1, 8, sum(outputs)):
        torch.testing.assert_close(first_outputs(joined, count)(hidden), expected[:, :count])


@pytest.mark.parametrize("by", By)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", SHAPES)
def test_every_product_computes_them(
    *, outputs: tuple[int, ...], bias: bool, by: By, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LEAST_NBYTES", "LEAST_PACKED_NBYTES"):
        monkeypatch.setattr(fastest_products, name, 0)
    parts = layers(outputs, bias=bias)
    other = nn.Linear(16, 5).requires_grad_(False)
    joined = JoinedLinear(parts)
    model = nn.ModuleList([*parts, other, joined])
    copied = choose_products(
        model,
        most_packed_nbytes=1 << 20,
        without=parts,
        threads=WorkerThreads(2),
        measure=lambda shapes, rows: [[{by: 0.0, By.PLAIN: 1.0 * (by is not By.PLAIN)} for _ in rows] for _ in shapes],
    )
    assert copied == (by in {By.PACKED, By.JOINED}) * (nbytes_of(joined) + other.weight.nbytes)
    assert not any("forward" in vars(part) for part in parts), "they compute nothing"
    assert ("forward" in vars(joined)) is (by is not By.PLAIN)
    for rows in (1, 3, 9, 40):
        hidden = torch.randn(1, rows, 16)
        expected = torch.cat([linear(hidden, part.weight, part.bias) for part in parts], -1)
        torch.testing.assert_close(joined(hidden), expected)
    parts[-1].weight.mul_(2.0)
    unload_copies(model)
    load_copies(model)
    expected = torch.cat([linear(hidden, part.weight, part.bias) for part in parts], -1)
    torch.testing.assert_close(joined(hidden), expected)
