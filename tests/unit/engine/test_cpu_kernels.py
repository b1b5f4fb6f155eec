"""The compiled operations, against the same in torch."""

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch.nn.functional import rms_norm, silu

from triptych.engine import cpu_kernels

EPSILON = np.float32(1e-6)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 96), (33, 100)])
def test_rows_are_normalized(rows: int, width: int) -> None:
    hidden, weight, normed = 3 * torch.randn(rows, width), torch.randn(width), torch.empty(rows, width)
    cpu_kernels.rms_norm(hidden.numpy(), weight.numpy(), EPSILON, normed.numpy())
    torch.testing.assert_close(normed, rms_norm(hidden, (width,), weight, float(EPSILON)))
    added = torch.randn(rows, width)
    total = hidden + added
    cpu_kernels.add_rms_norm(hidden.numpy(), added.numpy(), weight.numpy(), EPSILON, normed.numpy())
    torch.testing.assert_close(added, total)
    torch.testing.assert_close(normed, rms_norm(total, (width,), weight, float(EPSILON)))


def test_gates_are_multiplied() -> None:
    values = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30])])
    gate, up = values.repeat(2, 1), torch.randn(2, len(values))
    product = torch.empty_like(gate)
    cpu_kernels.silu_times(torch.cat((gate, up), 1).numpy(), product.numpy())
    torch.testing.assert_close(product, silu(gate) * up, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_in_its_row_alone(bad: float) -> None:
    """The engine ends such a sequence, and no other."""
    hidden, weight = torch.randn(3, 16), torch.ones(16)
    hidden[1, 5] = bad
    normed = torch.empty_like(hidden)
    cpu_kernels.rms_norm(hidden.numpy(), weight.numpy(), EPSILON, normed.numpy())
    assert normed.isfinite().all(1).tolist() == [True, False, True]
    product = torch.empty_like(hidden)
    cpu_kernels.silu_times(torch.cat((hidden, torch.ones_like(hidden)), 1).numpy(), product.numpy())
    assert product.isfinite().all(1).tolist() == [True, False, True]
    query, keys, values = torch.randn(3, 2, 8), torch.randn(6, 1, 8), torch.randn(6, 1, 8)
    query[1, 0, 3] = bad
    attended = _attend(query, keys, values, [[0], [1], [2]], [2, 2, 2], 2)
    assert attended.isfinite().flatten(1).all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("normalizes", [False, True])
def test_heads_are_rotated_and_stored(*, normalizes: bool) -> None:
    rows, heads, kv_heads, size = 5, 4, 2, 16
    all_heads = torch.randn(rows, heads + 2 * kv_heads, size)
    query, key, value = (
        all_heads[:, first:last] for first, last in ((0, heads), (heads, -kv_heads), (-kv_heads, None))
    )
    angles = torch.rand(rows, size) * 6
    weights = [torch.randn(size) for _ in range(2)]
    keys, values = torch.zeros(12, kv_heads, size), torch.zeros(12, kv_heads, size)
    slots = torch.tensor([7, 0, 3, 11, 4])

    def rotated(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(states, (size,), weight, float(EPSILON)) if normalizes else states
        first, second = normed.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return normed * angles.cos()[:, None] + turned * angles.sin()[:, None]

    expected = [rotated(query, weights[0]), rotated(key, weights[1]), value.clone()]
    none = np.empty(0, np.float32)
    norms = [weight.numpy() if normalizes else none for weight in weights]
    cpu_kernels.rotate_and_store(
        all_heads.numpy(),
        angles.cos().numpy(),
        angles.sin().numpy(),
        norms[0],
        norms[1],
        EPSILON,
        slots.numpy(),
        keys.numpy(),
        values.numpy(),
    )
    for found, wanted in zip((query, key, value), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(keys[slots], expected[1])
    torch.testing.assert_close(values[slots], expected[2])
    others = [slot for slot in range(12) if slot not in slots]
    assert not keys[others].any()
    assert not values[others].any()


@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_rows_attend_to_their_own_blocks(window: int, scale: float) -> None:
    heads, kv_heads, size, block = 6, 2, 24, 4
    tables, lengths = [[5, 0, 9], [3], [2, 8], [1, 4, 6, 7, 10]], [11, 1, 8, 17]
    query = scale * torch.randn(len(tables), heads, size)
    keys, values = torch.randn(44, kv_heads, size), torch.randn(44, kv_heads, size)
    attended = _attend(query, keys, values, tables, lengths, block, window)
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        positions = range(max(0, length - window) if window else 0, length)
        slots = [table[at // block] * block + at % block for at in positions]
        for head in range(heads):
            k, v = keys[slots, head * kv_heads // heads], values[slots, head * kv_heads // heads]
            weights = (k @ query[row, head] * size**-0.5).softmax(0)
            torch.testing.assert_close(attended[row, head], weights @ v, rtol=1e-4, atol=1e-5)


def heads() -> Iterator[ParameterSet]:
    """Sizes of heads and of groups; every other pair, and all with other blocks or a window, are ``extended``."""
    for (block, window), (at, size), (number, group) in product(
        ((16, 0), (5, 0), (16, 70)), enumerate((20, 33, 64, 80, 128)), enumerate((1, 3, 7, 8))
    ):
        is_usual = (block, window) == (16, 0) and (at + number) % 2 == 0
        yield pytest.param(size, group, block, window, marks=() if is_usual else pytest.mark.extended)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "group", "block", "window"), list(heads()))
def test_heads_of_any_size_attend_alike_alone_and_among_others(size: int, group: int, block: int, window: int) -> None:
    kv_heads, lengths = 2, [*range(1, 41), 63, 64, 65, 128, 129, 200]
    numbers = [-(-length // block) for length in lengths]
    blocks = iter(torch.randperm(sum(numbers)).tolist())
    own = [[next(blocks) for _ in range(number)] for number in numbers]
    query = torch.randn(len(lengths), group * kv_heads, size)
    keys, values = (torch.full((sum(numbers) * block, kv_heads, size), math.nan) for _ in range(2))
    seen = [range(max(0, length - window) if window else 0, length) for length in lengths]
    slots = [
        [table[at // block] * block + at % block for at in positions]
        for table, positions in zip(own, seen, strict=True)
    ]
    used = torch.tensor([slot for of_row in slots for slot in of_row])  # of all others one would be missed
    keys[used], values[used] = torch.randn(2, len(used), kv_heads, size)
    attended = _attend(query, keys, values, own, lengths, block, window)
    for row, slot in enumerate(slots):
        grouped = query[row].view(kv_heads, group, size)
        weights = torch.einsum("kgs,tks->kgt", grouped, keys[slot] * size**-0.5).softmax(-1)
        expected = torch.einsum("kgt,tks->kgs", weights, values[slot]).reshape(-1, size)
        torch.testing.assert_close(attended[row], expected, rtol=1e-4, atol=1e-5)
        alone = [torch.cat([whole[at * block :][:block] for at in own[row]]) for whole in (keys, values)]
        table = list(range(numbers[row]))
        found = _attend(query[row : row + 1], alone[0], alone[1], [table], [lengths[row]], block, window)
        assert found[0].equal(attended[row]), "alone, in blocks that follow each other"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_memory_stays_in_its_sequence(bad: float) -> None:
    """Of slots that follow those of the others, and of heads whose last lanes are not full."""
    query, keys, values = torch.randn(3, 4, 20), torch.randn(12, 2, 20), torch.randn(12, 2, 20)
    expected = _attend(query, keys, values, [[0], [1], [2]], [3, 4, 3], 4)
    keys[4:8], values[4:8] = bad, bad
    attended = _attend(query, keys, values, [[0], [1], [2]], [3, 4, 3], 4)
    assert not attended[1].isfinite().any()
    assert attended[[0, 2]].equal(expected[[0, 2]])


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: list[list[int]],
    lengths: list[int],
    block: int,
    window: int = 0,
) -> torch.Tensor:
    attended = torch.empty_like(query)
    starts = np.cumsum([0, *(len(table) for table in tables)])[:-1]
    cpu_kernels.attend(
        query.numpy(),
        keys.numpy(),
        values.numpy(),
        np.concatenate([np.array(table) for table in tables]),
        starts,
        np.array(lengths),
        block,
        window,
        np.float32(query.shape[-1] ** -0.5),
        attended.numpy(),
    )
    return attended


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 9, 13, 16, 21])
@pytest.mark.parametrize("biased", [True, False])
def test_products_of_few_rows(rows: int, *, biased: bool) -> None:
    hidden, weight, bias = torch.randn(rows, 50), torch.randn(11, 50), torch.randn(11)
    product = torch.full((rows, 16), math.inf)
    added = bias if biased else torch.empty(0)
    cpu_kernels.few_rows_product(hidden.numpy(), weight.numpy(), added.numpy(), 3, 10, product.numpy(), 4)
    expected = torch.nn.functional.linear(hidden, weight, bias if biased else None)
    torch.testing.assert_close(product[:, 7:14], expected[:, 3:10], rtol=1e-5, atol=1e-5)
    assert product[:, [*range(7), 14, 15]].isinf().all(), "outputs that were not asked for, or of others"


@pytest.mark.parametrize("vocabulary", [1, 5, 16, 100, 1024, 1040, 5003])
def test_the_best_token_is_the_first_of_the_greatest(vocabulary: int) -> None:
    logits = torch.randn(9, vocabulary) - 5
    logits[1] = -torch.inf
    logits[2] = 0.0
    logits[3, vocabulary // 2 :] = 7.0
    logits[4, -1] = 7.0
    logits[5, 0] = logits[5, -1] = 7.0
    logits[6, vocabulary // 3] = math.nan
    logits[7, -1] = math.inf
    tokens, are_finite = np.empty(9, np.int64), np.empty(9, np.bool_)
    cpu_kernels.best_tokens(logits.numpy(), tokens, are_finite)
    assert are_finite.tolist() == [row not in {1, 6, 7} for row in range(9)]
    expected = logits.numpy().argmax(1)
    assert [tokens[row] for row in range(9) if row != 6] == [expected[row] for row in range(9) if row != 6]
    assert 0 <= tokens[6] < vocabulary
