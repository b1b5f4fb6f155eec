"""Whether an item is cut into shards that several encoders do at once (EPD-Serve, section 3.2.2), and where.

Every shard costs the decoding and preprocessing of the whole item once more, so an item is cut only where the request's
last shard is done that much sooner. Items of one request are parallel already: what counts is when all are done.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import Annotated

from triptych.domain.bounds import Between
from triptych.domain.embedding import with_rows
from triptych.domain.item_plan import ItemPlan
from triptych.domain.limits import Count, check_limits
from triptych.domain.media import Shard
from triptych.policy.routing import Pool, slot_nbytes

WORTH = 0.9
"""One more cut has to bring the end down to this part of what it would be without it."""


@dataclass(frozen=True, slots=True)
class ShardLimits:
    min_shard_tokens: Count = 512
    """Smallest shard, in tokens, when an item is split over several encoders; 0 never splits."""
    max_shards: Annotated[int, Between(1, 64)] = 8
    """Most shards of one item."""

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True)
class Divisible:
    """An item: the tokens of each of its units, in order, of which one alone cannot be cut.

    ``held`` are the numbers of shards for which encoders are believed to hold all embeddings: cut so, it costs nothing.
    """

    units: tuple[int, ...]
    held: frozenset[int] = frozenset()

    @property
    def tokens(self) -> int:
        return sum(self.units)

    def most_shards(self, limits: ShardLimits) -> int:
        """Into so many shards it may be cut."""
        least = limits.min_shard_tokens
        return max(1, min(len(self.units), limits.max_shards, self.tokens // least)) if least else 1


def in_shards(items: Sequence[ItemPlan], pool: Pool, limits: ShardLimits) -> tuple[ItemPlan, ...]:
    """The items, those that are better done by several encoders in shards; the shards of an item are neighbours."""
    wholes = [Divisible(item.units) for item in items]
    most = [whole.most_shards(limits) for whole in wholes]
    if max(most, default=1) == 1:
        return tuple(items)
    divisible: list[Divisible] = []
    for item, largest in zip(items, most, strict=True):
        numbers = range(1, largest + 1)
        held = frozenset(
            number for number in numbers if all(part.content in pool.held for part in cut_into(item, number))
        )
        divisible.append(Divisible(item.units, held))
    numbers_chosen = cut(divisible, pool, limits)
    return tuple(part for item, number in zip(items, numbers_chosen, strict=True) for part in cut_into(item, number))


def never(items: Sequence[ItemPlan], pool: Pool, limits: ShardLimits) -> tuple[ItemPlan, ...]:
    """Every item stays whole."""
    del pool, limits
    return tuple(items)


def cut_into(item: ItemPlan, number: int) -> tuple[ItemPlan, ...]:
    """The item in so many shards."""
    if number == 1:
        return (item,)
    digest, salt = item.content
    parts: list[ItemPlan] = []
    for shard in shards_of(item.units, number):
        units = slice(shard.first, shard.first + shard.count)
        tensors = with_rows(item.tensors, sum(item.units[units]))
        parts.append(
            replace(
                item,
                content=(digest + str(shard).encode(), salt),
                start=item.unit_starts[shard.first],
                tokens=sum(item.units[units]),
                tensors=tensors,
                nbytes=slot_nbytes(tensors),
                units=item.units[units],
                unit_starts=item.unit_starts[units],
                shard=shard,
            )
        )
    return tuple(parts)


def cut(items: Sequence[Divisible], pool: Pool, limits: ShardLimits) -> tuple[int, ...]:
    """For each item the number of its shards, 1 where it stays whole.

    Pieces are made no larger than the largest item's share of 1, 2, 3 ... encoders, and placed as ``assign_items`` does:
    the largest first, where the least is pending. More pieces are taken while each step is worth it.
    """
    pending = [one.pending_tokens for one in pool.candidates if one.usable and not one.backoff]
    chosen = tuple(min(item.held, default=1) for item in items)
    free = [item for item in items if not item.held]
    largest = max((item.tokens for item in free), default=0)
    best = _end(items, chosen, pending)
    for share in range(2, min(limits.max_shards, len(pending)) + 1):
        numbers = tuple(
            number if item.held else min(item.most_shards(limits), -(-item.tokens * share // largest))
            for item, number in zip(items, chosen, strict=True)
        )
        end = _end(items, numbers, pending)
        if end <= WORTH * best:
            chosen, best = numbers, end
    return chosen


def shards_of(units: Sequence[int], number: int) -> tuple[Shard, ...]:
    """An item of these units in so many shards, as even in tokens as units allow; at most one for each unit."""
    number = min(number, len(units))
    done = list(accumulate(units))
    ends = [0]
    for shard in range(1, number):
        even = bisect_left(done, done[-1] * shard / number) + 1
        ends.append(max(ends[-1] + 1, min(even, len(units) - number + shard)))
    ends.append(len(units))
    return tuple(Shard(first, end - first, len(units)) for first, end in pairwise(ends))


def tokens_of(units: Sequence[int], shard: Shard) -> int:
    """Positions that a shard fills."""
    return sum(units[shard.first : shard.first + shard.count])


def _end(items: Sequence[Divisible], numbers: Sequence[int], pending: Sequence[int]) -> int:
    """Tokens that the encoder which is done last has before it is."""
    if not pending:
        return 0
    pieces = [
        tokens_of(item.units, shard)
        for item, number in zip(items, numbers, strict=True)
        if number not in item.held
        for shard in shards_of(item.units, number)
    ]
    queues = list(pending)
    heapify(queues)
    last = 0
    for piece in sorted(pieces, reverse=True):
        last = max(last, queues[0] + piece)
        heapreplace(queues, queues[0] + piece)
    return last
