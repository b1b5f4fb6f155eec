"""Whether to split an item into shards for several encoders (EPD-Serve, section 3.2.2), and how.

Every shard decodes and preprocesses the whole item again, so an item is split only if the request's last shard then
ends clearly sooner. Items of one request already run in parallel: what counts is when the last one ends.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import Annotated

from triptych.domain.bounds import Between
from triptych.domain.embedding import slot_nbytes, with_rows
from triptych.domain.item_plan import ItemPlan, content_of
from triptych.domain.limits import Count, check_limits
from triptych.domain.media import Shard
from triptych.domain.record import record
from triptych.policy.placement.pool import Pool

WORTH = 0.9
"""A further split must reduce the end to this fraction."""


@dataclass(frozen=True, slots=True)
class ShardLimits:
    min_shard_tokens: Count = 512
    """Smallest shard, in tokens, when an item is split over several encoders; 0 never splits."""
    max_shards: Annotated[int, Between(1, 64)] = 8
    """Most shards of one item."""

    def __post_init__(self) -> None:
        check_limits(self)


@record
class Divisible:
    """An item's tokens per unit, in order. A unit cannot be split.

    ``held`` are the shard counts for which encoders are believed to hold all embeddings, so that they cost nothing.
    """

    units: tuple[int, ...]
    held: frozenset[int] = frozenset()

    @property
    def tokens(self) -> int:
        return sum(self.units)

    def most_shards(self, limits: ShardLimits) -> int:
        """The most shards it may be split into."""
        least = limits.min_shard_tokens
        return max(1, min(len(self.units), limits.max_shards, self.tokens // least)) if least else 1


def can_split(items: Sequence[ItemPlan], limits: ShardLimits) -> bool:
    """Whether one of these items has enough units and tokens for two shards."""
    least = limits.min_shard_tokens
    if not least or limits.max_shards < 2:
        return False
    return any(len(item.units) > 1 and item.tokens >= 2 * least for item in items)


def in_shards(items: Sequence[ItemPlan], pool: Pool, limits: ShardLimits) -> tuple[ItemPlan, ...]:
    """The items, split where several encoders finish sooner. The shards of an item are adjacent."""
    divisible: list[Divisible] = []
    for item in items:
        numbers = range(1, Divisible(item.units).most_shards(limits) + 1)
        held = frozenset(
            number for number in numbers if all(pool.held(part.content) for part in cut_into(item, number))
        )
        divisible.append(Divisible(item.units, held))
    numbers_chosen = cut(divisible, pool, limits)
    return tuple(part for item, number in zip(items, numbers_chosen, strict=True) for part in cut_into(item, number))


def never(items: Sequence[ItemPlan], pool: Pool, limits: ShardLimits) -> tuple[ItemPlan, ...]:
    """Splits nothing."""
    del pool, limits
    return tuple(items)


def cut_into(item: ItemPlan, number: int) -> tuple[ItemPlan, ...]:
    """The item split into ``number`` shards."""
    if number == 1:
        return (item,)
    _, salt = item.content
    parts: list[ItemPlan] = []
    for shard in shards_of(item.units, number):
        units = slice(shard.first, shard.first + shard.count)
        tensors = with_rows(item.tensors, sum(item.units[units]))
        parts.append(
            replace(
                item,
                content=content_of(item.info.digest, shard, salt),
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
    """The number of shards of each item; 1 for no split.

    Shards are at most as large as the largest item's share of 1, 2, 3 ... encoders, and are placed like
    ``place_items``: largest first, on the encoder with the fewest pending tokens. The number of encoders grows while
    each step pays.
    """
    pending = [
        tokens
        for tokens, is_usable, in_backoff in zip(pool.pending_tokens, pool.usable, pool.backoff, strict=True)
        if is_usable and not in_backoff
    ]
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
    """Shards of these units, as even in tokens as possible; at most one per unit."""
    number = min(number, len(units))
    done = list(accumulate(units))
    ends = [0]
    for shard in range(1, number):
        even = bisect_left(done, done[-1] * shard / number) + 1
        ends.append(max(ends[-1] + 1, min(even, len(units) - number + shard)))
    ends.append(len(units))
    return tuple(Shard(first, end - first, len(units)) for first, end in pairwise(ends))


def tokens_of(units: Sequence[int], shard: Shard) -> int:
    """Tokens of a shard."""
    return sum(units[shard.first : shard.first + shard.count])


def _end(items: Sequence[Divisible], numbers: Sequence[int], pending: Sequence[int]) -> int:
    """Pending tokens of the encoder that finishes last."""
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
