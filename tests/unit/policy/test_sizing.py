"""Size of instances: the batch and the degree with the most capacity per device."""

from collections.abc import Callable

import pytest

from tests.unit.policy.profiles import ENCODER
from triptych.policy.capacity import Capacity, ItemClass, encode_capacity
from triptych.policy.costs import Costs
from triptych.policy.sizing import BatchChange, DegreeChange, better_batch, better_degree, choose_size


def replica(*tokens_per_s: float) -> Callable[[int], Capacity]:
    """Capacity by largest batch 1, 2, 4, ...; the last holds for all larger ones."""

    def at(batch: int) -> Capacity:
        value = tokens_per_s[min(batch.bit_length() - 1, len(tokens_per_s) - 1)]
        return Capacity(value, value, batch, 0.1)

    return at


def test_a_batch_grows_only_while_a_doubling_adds_more_than_5_percent() -> None:
    assert choose_size({1: replica(100, 150, 157, 300)}, most=64).max_batch == 2
    assert choose_size({1: replica(100, 106, 113)}, most=64).max_batch == 4
    assert choose_size({1: lambda batch: replica(100 * batch)(batch)}, most=3).max_batch == 3


def test_the_degree_with_the_most_capacity_per_device_is_chosen() -> None:
    chosen = choose_size({1: replica(100), 2: replica(250), 4: replica(440)}, most=8)
    assert chosen.tensor_parallel == 2
    assert chosen.capacity.per_s > 0
    assert "125 tokens/s per device" in chosen.reason


def test_a_smaller_degree_is_preferred_within_5_percent() -> None:
    assert choose_size({2: replica(2 * 104), 1: replica(100)}, most=8).tensor_parallel == 1
    assert choose_size({2: replica(2 * 106), 1: replica(100)}, most=8).tensor_parallel == 2


def test_a_degree_that_misses_the_objectives_is_not_chosen() -> None:
    chosen = choose_size({1: lambda batch: Capacity(0, 0, batch, 0.5), 2: replica(10)}, most=8)
    assert chosen.tensor_parallel == 2


def test_it_says_so_when_nothing_meets_the_objectives() -> None:
    chosen = choose_size({1: lambda _: Capacity(0, 0, 1, 0.5), 2: lambda _: Capacity(0, 0, 1, 0.25)}, most=8)
    assert chosen.capacity.per_s == 0
    assert (chosen.tensor_parallel, chosen.max_batch, chosen.capacity.latency_s) == (2, 1, 0.25)
    assert chosen.reason == "no size meets the objectives: even without load it takes 0.25 s"


def test_no_profile_is_an_error() -> None:
    with pytest.raises(ValueError, match="no profile"):
        choose_size({}, most=8)


def test_batches_of_a_profile_grow_while_that_pays() -> None:
    costs = Costs(ENCODER)

    def capacity(item_tokens: int, slo_s: float) -> Callable[[int], Capacity]:
        return lambda batch: encode_capacity(costs, [ItemClass(item_tokens)], slo_s, max_items=batch)

    small = choose_size({1: capacity(100, 10.0)}, most=64)  # a pass of 100 tokens costs 3 times its own 10 ms
    large = choose_size({1: capacity(400, 10.0)}, most=64)
    assert small.max_batch > large.max_batch > 1
    assert choose_size({1: capacity(400, 0.13)}, most=64).max_batch == 1


def test_a_batch_changes_while_instances_run_only_for_over_5_percent_more() -> None:
    change = better_batch(replica(100, 150, 200), 1, most=64)
    assert change == BatchChange(now=1, best=4, gain=1.0)
    assert str(change) == "batches of up to 4 instead of 1 bear 100% more within the objectives"
    assert better_batch(replica(100, 150, 200), 4, most=64) is None
    assert better_batch(replica(100, 150, 200), 32, most=64) is None, "no less is borne with larger ones"
    assert better_batch(replica(100, 150, 157), 2, most=64) is None
    assert better_batch(lambda batch: Capacity(0, 0, batch, 0.5), 1, most=8) is None, "nothing meets the objectives"


def test_a_batch_that_misses_the_objectives_is_lowered() -> None:
    change = better_batch(lambda batch: replica(100 if batch < 8 else 0)(batch), 32, most=64)
    assert change == BatchChange(now=32, best=1, gain=1.0)


def test_a_degree_is_better_for_over_5_percent_more_per_device() -> None:
    change = better_degree({1: replica(100), 2: replica(250)}, 1, most=8)
    assert change == DegreeChange(now=1, best=2, gain=0.25)
    assert str(change) == "degree 2 instead of 1 bears 25% more per device within the objectives"
    assert better_degree({1: replica(100), 2: replica(204)}, 1, most=8) is None
    assert better_degree({1: replica(100), 2: replica(250)}, 2, most=8) is None
    assert better_degree({2: replica(250)}, 1, most=8) is None, "nothing is known of the degree of now"
    assert better_degree({1: lambda _: Capacity(0, 0, 1, 0.5), 2: replica(10)}, 1, most=8) == DegreeChange(1, 2, 1.0)
