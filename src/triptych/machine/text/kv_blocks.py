"""The block manager of the KV cache: which blocks belong to which sequence, which are cached, which are free.

A sequence (an *owner*) has a block table. A full block may be registered under its prefix hash, which covers its tokens
and all before them. It can then be found and shared, and stays cached without an owner. Cached blocks count as
available: they are evicted, least recently used first, when blocks are needed.

There are two layouts. *Scattered*: any free block will do, as a kernel follows the table. *Contiguous*: an owner's
blocks are adjacent where possible, as CPU attention over contiguous memory is two to four times faster than over
gathered blocks (docs/engine.md). An owner is placed with room to grow. If a neighbour is in the way, the owner moves once to a
larger gap; only without such a gap does it continue in pieces.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from triptych.machine.free_runs import FreeRun, FreeRuns


class Copy(NamedTuple):
    """Blocks to copy before anything else is written, in the given order."""

    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(eq=False, slots=True)
class _Owner:
    table: list[int] = field(default_factory=list)
    room: int = 0
    """Blocks that it is expected to need; the blocks after its table are left free for it while there are others."""
    is_contiguous: bool = True


class KvBlocks:
    """Owner of the blocks of one KV cache.

    Their holders are identified by names.
    """

    def __init__(self, blocks: int, *, contiguous: bool) -> None:
        self.blocks = blocks
        self.contiguous = contiguous
        self._unused = FreeRuns(blocks)
        self._references = [0] * blocks
        self._owners: dict[str, _Owner] = {}
        self._ending_at: dict[int, _Owner] = {}
        """Contiguous owners, by the block after their last."""
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Blocks with a hash and without an owner, least recently used first."""

    @property
    def available(self) -> int:
        """Blocks that can be allocated now, including cached ones."""
        return self._unused.free + len(self._cached)

    @property
    def cached(self) -> int:
        """Cached blocks without an owner."""
        return len(self._cached)

    def table(self, owner: str) -> Sequence[int]:
        """The owner's blocks, in order; empty for an unknown owner. Read-only."""
        known = self._owners.get(owner)
        return known.table if known is not None else ()

    def is_contiguous(self, owner: str) -> bool:
        known = self._owners.get(owner)
        return known is None or known.is_contiguous

    def is_owned(self, block: int) -> bool:
        """Whether the block has an owner."""
        return self._references[block] > 0

    # --- prefix cache ------------------------------------------------------------------------------------------------

    def find(self, prefix_hashes: Sequence[bytes]) -> tuple[int, ...]:
        """The blocks of the longest run of ``prefix_hashes``, from the first on, that are all here."""
        found: list[int] = []
        for prefix_hash in prefix_hashes:
            block = self._block_of.get(prefix_hash)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def register_hash(self, owner: str, index: int, prefix_hash: bytes) -> None:
        """Register an owner's full block under its prefix hash. If the hash is registered already, that block stays."""
        block = self._owners[owner].table[index]
        if prefix_hash not in self._block_of and block not in self._hash_of:
            self._block_of[prefix_hash] = block
            self._hash_of[block] = prefix_hash

    def evict_hashes(self, owner: str) -> None:
        """Evict all hashes of an owner's blocks, whose contents are invalid."""
        for block in self.table(owner):
            prefix_hash = self._hash_of.pop(block, None)
            if prefix_hash is not None:
                del self._block_of[prefix_hash]

    def evict_cached(self) -> None:
        """Evict all blocks without an owner, whose contents are going to be lost."""
        while self._cached:
            self._evict()

    # --- allocating and freeing -------------------------------------------------------------------------------------------

    def share(self, owner: str, blocks: Sequence[int]) -> None:
        """Start a new owner's table with existing blocks, which may have other owners too."""
        if self.contiguous or self.table(owner):
            raise ValueError(f"{owner} cannot begin with others' blocks")
        for block in blocks:
            self._reference(block)
        self._owners[owner] = _Owner(list(blocks), is_contiguous=_is_run(blocks))

    def fork(self, source: str, owner: str, shared: int, used: int) -> tuple[Copy, ...]:
        """Give ``owner`` the contents of the first ``used`` blocks of ``source``.

        In the scattered layout the first ``shared`` blocks are full and are shared; the others are copied into the owner's
        own blocks.
        """
        known, begins = self._owners[owner], self.table(source)[:used]
        if self.contiguous:
            return (Copy(tuple(begins), tuple(known.table[:used])),)
        for block in begins[:shared]:
            self._reference(block)
        own = known.table
        known.table = [*begins[:shared], *own]
        known.is_contiguous = _is_run(known.table)
        rest = tuple(begins[shared:])
        return (Copy(rest, tuple(own[: len(rest)])),) if rest else ()

    def allocate(self, owner: str, count: int, *, room: int = 0) -> tuple[Copy, ...] | None:
        """Append ``count`` blocks to the owner's table. Returns None, changing nothing, if too few are available.

        ``room`` is the number of blocks it is expected to need, which guides placement. The returned copies move its
        contents to the new place, which its table already shows.
        """
        if count > self.available:
            return None
        if not count:
            return ()
        known = self._owners.setdefault(owner, _Owner())
        wanted = len(known.table) + count
        if not self.contiguous:
            self._append(known, [self._any() for _ in range(count)])
            return ()
        if known.table and known.is_contiguous and self._clear(known.table[-1] + 1, count):
            behind = known.table[-1] + 1
            self._unused.take(behind, count)
            self._append(known, range(behind, behind + count))
            return ()
        known.room = max(room, wanted)
        # A moving owner frees its old blocks only once it has the new ones.
        start = self._place(wanted, known.room) if wanted <= self.available else None
        if start is not None:
            self._unused.take(start, wanted)
            return self._settle(known, start, wanted)
        self._append(known, [self._any() for _ in range(count)])
        return ()

    def copy_in(self, owner: str, blocks: Sequence[int], count: int, *, room: int = 0) -> tuple[Copy, ...] | None:
        """``allocate`` for a new owner, whose first blocks are copies of ``blocks``; None if not possible."""
        for block in blocks:
            self._reference(block)
        copies = self.allocate(owner, count, room=room)
        for block in reversed(blocks):
            self._unreference(block)
        if copies is None:
            return None
        return (*copies, Copy(tuple(blocks), tuple(self.table(owner)[: len(blocks)])))

    def transfer(self, owner: str, heir: str) -> None:
        """Give an owner's table to another, whose own blocks are freed."""
        self.free(heir)
        if owner in self._owners:
            self._owners[heir] = self._owners.pop(owner)

    def free(self, owner: str) -> None:
        """Remove an owner. Its blocks with a hash stay cached; those at the end of its table are evicted first."""
        known = self._owners.pop(owner, None)
        if known is not None:
            self._clear_end(known)
            for block in reversed(known.table):
                self._unreference(block)

    def validate(self) -> None:
        """Raises AssertionError unless every block is in exactly one state and all counts are consistent."""
        self._unused.validate()
        counts = [0] * self.blocks
        for owner in self._owners.values():
            assert len(set(owner.table)) == len(owner.table), "a table has a block twice"
            assert owner.is_contiguous == _is_run(owner.table), "is_contiguous is wrong"
            for block in owner.table:
                counts[block] += 1
        assert counts == self._references, "references do not add up"
        for block, references in enumerate(counts):
            states = (references > 0) + (block in self._cached) + (block in self._unused)
            assert states == 1, f"block {block} is in {states} states"
        assert set(self._cached) <= set(self._hash_of), "a block is cached without a hash"
        assert {block: prefix_hash for prefix_hash, block in self._block_of.items()} == self._hash_of, "hashes differ"
        assert all(block not in self._unused for block in self._hash_of), "an unused block has a hash"
        ends = {owner.table[-1] + 1: owner for owner in self._owners.values() if owner.table and owner.is_contiguous}
        assert not self.contiguous or set(ends) == set(self._ending_at), "ends differ"

    # --- placement ---------------------------------------------------------------------------------------------------

    def _place(self, wanted: int, room: int) -> int | None:
        """Find ``wanted`` adjacent blocks, and ``room`` in all if no needed block is evicted for it.

        In order of preference: room outside what others may grow into; the same after evicting cached blocks; without
        room; inside what others may grow into, from its far end.
        """
        if (fitting := self._fitting(room)) is not None:
            return fitting.start
        while self._cached:
            rest = self._unclaimed(self._evict())
            if rest.length >= room:
                return rest.start
        largest = max((self._unclaimed(run) for run in self._unused), key=lambda rest: rest.length)
        if largest.length >= wanted:
            return largest.start
        whole = max(self._unused, key=lambda run: run.length)
        return whole.end - wanted if whole.length >= wanted else None

    def _fitting(self, room: int) -> FreeRun | None:
        """Of the unclaimed parts of free runs that have this much room, the shortest, and of equally long ones the first."""
        claimed = [run for end in self._ending_at if (run := self._unused.get(end)) is not None]
        rests = [rest for run in claimed if (rest := self._unclaimed(run)).length >= room]
        whole = next((run for run in self._unused.fitting(room) if run.start not in self._ending_at), None)
        if whole is not None:
            rests.append(whole)
        return min(rests, key=lambda rest: (rest.length, rest.start), default=None)

    def _unclaimed(self, run: FreeRun) -> FreeRun:
        """The part of a free run that the owner before it is not expected to grow into."""
        owner = self._ending_at.get(run.start)
        claimed = min(run.length, max(0, owner.room - len(owner.table))) if owner is not None else 0
        return FreeRun(run.start + claimed, run.length - claimed)

    def _clear(self, start: int, count: int) -> bool:
        """Free these blocks by evicting cached ones. Returns whether all are free."""
        blocks = range(start, start + count)
        if start + count > self.blocks or any(self._references[block] for block in blocks):
            return False
        for block in blocks:
            if block in self._cached:
                del self._cached[block]
                self._forget(block)
        return True

    def _settle(self, known: _Owner, start: int, count: int) -> tuple[Copy, ...]:
        """Move an owner to the ``count`` blocks from ``start`` on, which are already taken."""
        old, new = known.table, range(start, start + count)
        self._clear_end(known)
        known.table, known.is_contiguous = [], True
        self._append(known, new)
        if not old:
            return ()
        for before, after in zip(old, new, strict=False):
            if self._references[before] == 1 and (prefix_hash := self._hash_of.pop(before, None)) is not None:
                self._hash_of[after] = prefix_hash
                self._block_of[prefix_hash] = after
        for block in reversed(old):
            self._unreference(block)
        return (Copy(tuple(old), tuple(new[: len(old)])),)

    def _append(self, known: _Owner, blocks: Sequence[int]) -> None:
        """Append blocks that are removed from ``_unused`` and have no owner."""
        self._clear_end(known)
        for block in blocks:
            self._references[block] += 1
        joins = not known.table or not blocks or known.table[-1] + 1 == blocks[0]
        known.is_contiguous = known.is_contiguous and joins and _is_run(blocks)
        known.table.extend(blocks)
        self._set_end(known)

    def _set_end(self, known: _Owner) -> None:
        if self.contiguous and known.table and known.is_contiguous:
            self._ending_at[known.table[-1] + 1] = known

    def _clear_end(self, known: _Owner) -> None:
        if known.table and self._ending_at.get(known.table[-1] + 1) is known:
            del self._ending_at[known.table[-1] + 1]

    # --- single blocks -----------------------------------------------------------------------------------------------

    def _any(self) -> int:
        if not self._unused.free:
            self._evict()
        return self._unused.take_any()

    def _reference(self, block: int) -> None:
        if not self._references[block]:
            if block not in self._cached:
                raise ValueError(f"block {block} has no contents to share")
            del self._cached[block]
        self._references[block] += 1

    def _unreference(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        if block in self._hash_of:
            self._cached[block] = None
        else:
            self._unused.give(block)

    def _evict(self) -> FreeRun:
        """Evict the least recently used cached block. Returns the free run that it is now part of."""
        block, _ = self._cached.popitem(last=False)
        return self._forget(block)

    def _forget(self, block: int) -> FreeRun:
        del self._block_of[self._hash_of.pop(block)]
        return self._unused.give(block)


def _is_run(blocks: Sequence[int]) -> bool:
    return all(before + 1 == after for before, after in pairwise(blocks))
