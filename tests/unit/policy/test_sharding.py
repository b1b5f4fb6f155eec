from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.embedding import DType, TensorSpec, slot_nbytes
from triptych.domain.item_plan import ItemPlan
from triptych.domain.media import MediaInfo, Modality, Shard
from triptych.policy.placement.affinity import Holding
from triptych.policy.placement.pool import Candidate, Pool
from triptych.policy.sharding import (
    Divisible,
    ShardLimits,
    can_split,
    cut,
    cut_into,
    in_shards,
    never,
    shards_of,
    tokens_of,
)

LIMITS = ShardLimits(min_shard_tokens=100, max_shards=8)


def pool(*pending: int) -> Pool:
    return Pool(
        tuple(Candidate(f"e{index}", True, tokens, 0, 1 << 20, 1 << 20) for index, tokens in enumerate(pending))
    )


def item(tokens: int, units: int = 100) -> Divisible:
    return Divisible((tokens // units,) * units)


@pytest.mark.parametrize(
    ("items", "pending", "numbers"),
    [
        ((item(1000),), (0,), (1,)),
        ((item(1000),), (0, 0), (2,)),
        ((item(1000),), (0, 0, 0, 0), (4,)),
        ((item(1000, units=1),), (0, 0, 0, 0), (1,)),
        ((item(1000, units=2),), (0, 0, 0, 0), (2,)),
        ((item(300),), (0, 0, 0, 0, 0), (3,)),  # no shard under 100 tokens
        ((item(100_000),), (0,) * 16, (8,)),  # no more than eight shards
        # All encoders are busy with the request's other items, or with others' anyway.
        ((item(1000), item(1000)), (0, 0), (1, 1)),
        ((item(1000), item(1000)), (0, 0, 0, 0), (2, 2)),
        ((item(4000), item(100)), (0, 0), (2, 1)),
        ((item(1000),), (0, 5000), (1,)),
        ((item(1000),), (0, 0, 5000), (2,)),
        # The second one is free too late to be worth the work.
        ((item(1000),), (0, 450), (1,)),
        ((item(1000),), (0, 400), (2,)),
        ((item(1000),), (5000, 0, 0), (2,)),
        # The largest pieces are placed first, each where the least is pending then.
        ((item(300), item(100), item(100)), (1000, 1000), (1, 1, 1)),
        ((item(100), item(100), item(300)), (0, 0), (1, 1, 2)),
        ((), (0, 0), ()),
        ((item(1000),), (), (1,)),
    ],
)
def test_items_are_split_where_it_shortens_the_encode_stage(
    items: tuple[Divisible, ...], pending: tuple[int, ...], numbers: object
) -> None:
    assert cut(items, pool(*pending), LIMITS) == numbers


def test_unusable_encoders_are_not_counted() -> None:
    first, second, third = pool(0, 0, 0).candidates
    down, backed_off = second._replace(usable=False), third._replace(backoff=True)
    assert cut([item(1000)], Pool((first, down, backed_off)), LIMITS) == (1,)


def test_a_cached_split_is_reused() -> None:
    held = replace(item(1000), held=frozenset({3}))
    assert cut([held], pool(0, 0, 0, 0), LIMITS) == (3,)
    assert cut([held, item(1000)], pool(0, 0), LIMITS) == (3, 2), "what costs nothing leaves room"
    assert cut([replace(item(1000), held=frozenset({1, 4}))], pool(0, 0, 0, 0), LIMITS) == (1,)


@pytest.mark.parametrize(("min_tokens", "shards"), [(0, 1), (1, 3), (2, 1)])
def test_a_shard_has_a_minimum_of_tokens_and_0_disables_sharding(min_tokens: int, shards: int) -> None:
    assert Divisible((1, 1, 1)).most_shards(ShardLimits(min_tokens, 8)) == shards


def test_shards_are_even_and_in_order() -> None:
    assert shards_of((5,) * 6, 3) == (Shard(0, 2, 6), Shard(2, 2, 6), Shard(4, 2, 6))
    assert shards_of((5,) * 7, 2) == (Shard(0, 4, 7), Shard(4, 3, 7))
    assert shards_of((90, 5, 5), 2) == (Shard(0, 1, 3), Shard(1, 2, 3))
    assert shards_of((5, 5, 90), 2) == (Shard(0, 2, 3), Shard(2, 1, 3))
    assert shards_of((5,), 4) == (Shard(0, 1, 1),)


@given(units=st.lists(st.integers(1, 50), min_size=1, max_size=40), number=st.integers(1, 50))
def test_shards_cover_the_item(units: list[int], number: int) -> None:
    shards = shards_of(units, number)
    assert len(shards) == min(number, len(units))
    assert [shard.first for shard in shards] == [
        sum(shard.count for shard in shards[:place]) for place in range(len(shards))
    ]
    assert all(shard.count >= 1 and shard.of == len(units) for shard in shards)
    assert sum(tokens_of(units, shard) for shard in shards) == sum(units)


@given(
    items=st.lists(st.builds(Divisible, st.lists(st.integers(1, 400), min_size=1, max_size=12).map(tuple)), max_size=5),
    pending=st.lists(st.integers(0, 5000), max_size=6),
    min_tokens=st.integers(0, 1000),
)
def test_limits_hold_for_any_input(items: list[Divisible], pending: list[int], min_tokens: int) -> None:
    limits = ShardLimits(min_tokens, max_shards=4)
    for media_item, number in zip(items, cut(items, pool(*pending), limits), strict=True):
        assert 1 <= number <= min(4, len(media_item.units))
        assert number == 1 or media_item.tokens >= number * min_tokens


def plan(units: tuple[int, ...]) -> ItemPlan:
    starts = tuple(range(10, 10 + 2 * len(units), 2)) if len(units) > 1 else ()
    tensors = (TensorSpec("embeds", DType.F32, (sum(units), 8)),)
    info = MediaInfo(Modality.IMAGE, "png", 8, 8, 1, bytes(32))
    content = (bytes(32), b"salt")
    return ItemPlan(
        0, "messages[0]", b"", info, content, 10, sum(units), tensors, slot_nbytes(tensors), units, unit_starts=starts
    )


def test_a_shard_is_planned_like_its_item() -> None:
    whole = plan((100, 100, 100))
    assert cut_into(whole, 1) == (whole,)
    first, second = cut_into(whole, 2)
    assert (first.shard, second.shard) == (Shard(0, 2, 3), Shard(2, 1, 3))
    assert (first.start, first.tokens, second.start, second.tokens) == (10, 200, 14, 100)
    assert [spec.shape for spec in second.tensors] == [(100, 8)]
    assert second.nbytes == slot_nbytes(second.tensors)
    assert second.content == (bytes(32) + b"3-3/3", b"salt")
    assert (first.units, first.unit_starts) == ((100, 100), (10, 12))


def test_items_are_planned_in_shards_where_it_pays_or_shards_are_cached() -> None:
    whole, small = plan((100,) * 4), plan((400,))
    assert in_shards((small, whole), pool(0), LIMITS) == (small, whole)
    assert in_shards((whole,), pool(0, 0), replace(LIMITS, max_shards=1)) == (whole,)
    assert in_shards((whole,), pool(0, 0), LIMITS) == cut_into(whole, 2)
    held = {part.content: (Holding("e0"),) for part in cut_into(whole, 3)}
    known = Pool(pool(0, 0).candidates, held=lambda content: held.get(content, ()))
    assert in_shards((whole,), known, LIMITS) == cut_into(whole, 3)


def test_only_an_item_with_units_and_tokens_for_two_shards_can_be_split() -> None:
    assert can_split((plan((99, 100)), plan((100, 100))), LIMITS)
    assert not can_split((plan((99, 100)), plan((400,))), LIMITS)
    assert not can_split((plan((100, 100)),), replace(LIMITS, max_shards=1))
    assert not can_split((plan((100, 100)),), replace(LIMITS, min_shard_tokens=0))


def test_the_policy_that_splits_nothing_leaves_items_whole() -> None:
    whole = plan((100,) * 4)
    assert never([whole], pool(0, 0), LIMITS) == (whole,)
