"""Linear layers of the same rows, computed as one, whose weights stay theirs."""

import pytest
import torch
from torch import nn

from triptych.engine.joined_layers import joined


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [(8,), (8, 8), (32, 4, 4)])
def test_outputs_are_those_of_all_layers_and_weights_are_shared(*, outputs: tuple[int, ...], bias: bool) -> None:
    layers = [nn.Linear(16, count, bias=bias).requires_grad_(False) for count in outputs]
    hidden = torch.randn(3, 16)
    expected = torch.cat([layer(hidden) for layer in layers], 1)
    one = joined(layers)
    torch.testing.assert_close(one(hidden), expected)
    torch.testing.assert_close(torch.cat([layer(hidden) for layer in layers], 1), expected)
    layers[-1].weight.mul_(2.0)
    if bias:
        layers[-1].bias.mul_(2.0)
    torch.testing.assert_close(one(hidden)[:, -outputs[-1] :], 2 * expected[:, -outputs[-1] :])
    again = joined(layers)
    assert again.weight.data_ptr() == one.weight.data_ptr(), "nothing is moved that is together"
