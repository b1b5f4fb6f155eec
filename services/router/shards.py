"""Large items in pieces, for several encoders at once: what ``policy.sharding`` decides, as items to be encoded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

from triptych.domain.embedding import TensorSpec, with_rows
from triptych.domain.media import Shard
from triptych.machine.router.request_events import CountedItem
from triptych.policy.routing import ClusterView, Content, slot_nbytes
from triptych.policy.sharding import Divisible, ShardLimits, cut, shards_of, tokens_of


@dataclass(frozen=True, slots=True)
class Cuttable:
    """Of an item of several units: the tokens of each, where each starts in the prompt, and the item's tensors."""

    units: tuple[int, ...]
    starts: tuple[int, ...]
    outputs: tuple[TensorSpec, ...]

    @classmethod
    def find(cls, units: tuple[int, ...], positions: Sequence[int], outputs: tuple[TensorSpec, ...]) -> Self:
        """``positions`` are those that the item fills, in order."""
        return cls(units, tuple(positions[done] for done in (0, *accumulate(units[:-1]))), outputs)

    def pieces(self, item: CountedItem, number: int) -> tuple[CountedItem, ...]:
        """The item in so many shards."""
        return tuple(self._piece(item, shard) for shard in shards_of(self.units, number)) if number > 1 else (item,)

    def _piece(self, item: CountedItem, shard: Shard) -> CountedItem:
        tokens = tokens_of(self.units, shard)
        digest, salt = item.content
        return replace(
            item,
            content=(digest + str(shard).encode(), salt),
            start=self.starts[shard.first],
            tokens=tokens,
            nbytes=slot_nbytes(with_rows(self.outputs, tokens)),
            shard=shard,
        )


def in_pieces(
    items: Sequence[CountedItem],
    cuttable: Sequence[Cuttable | None],
    view: ClusterView,
    holds: Callable[[Content], bool],
    limits: ShardLimits,
) -> tuple[CountedItem, ...]:
    """The items, those that are better done by several encoders in shards; the shards of an item are neighbours."""
    if limits.max_shards < 2 or not any(cuttable):
        return tuple(items)
    divisible = []
    for item, one in zip(items, cuttable, strict=True):
        known = Divisible(one.units if one else (item.tokens,))
        numbers = range(1, known.most_shards(limits) + 1)
        held = frozenset(
            number
            for number in numbers
            if all(holds(piece.content) for piece in (one.pieces(item, number) if one else (item,)))
        )
        divisible.append(replace(known, held=held))
    numbers_chosen = cut(divisible, view, limits)
    return tuple(
        piece
        for item, one, number in zip(items, cuttable, numbers_chosen, strict=True)
        for piece in (one.pieces(item, number) if one else (item,))
    )
