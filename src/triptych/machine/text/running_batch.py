"""The scheduler of the text engine: which sequences run, which wait, and which KV blocks they have.


    add -> WAITING -- (blocks for its tokens so far) -> RUNNING -- remove -> gone
              ^------- preempted: no block is free -------/

A sequence starts when there are blocks for its tokens so far and one more; until then it holds none. The callers' turns
(``policy.queueing``) order the queue. A sequence gets blocks as it grows. When none is free, the last running sequence
in that order is preempted: it keeps its tokens and frees its blocks. Its keys and values are copied to host memory and
back when its turn comes; where there is no room for a copy, they are recomputed (ADR 42). The first is never preempted,
so it runs to its end. Waiting sequences never take blocks from running ones.

The choices of one request start together. The first, their leader, computes the prompt; ``fork`` gives its blocks to
the others, which are then independent.

Hand-overs (ADR 44): a paused sequence has blocks and computes nothing, until it is removed. An arriving one starts like
others, and computes nothing either until its keys and values are there, or ``end_arrival`` says that no more come. When memory runs
out, both are spared as long as others can give way. A preempted arriving one is computed like others; a paused one does not
return.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from triptych.families.base import Span
from triptych.machine.text.host_copies import CopyIn, CopyOut, HostCopies
from triptych.machine.text.kv_blocks import Copy, KvBlocks
from triptych.machine.text.sequence import Sequence
from triptych.machine.text.waiting_line import WaitingLine, order
from triptych.policy.batching import Prefill, plan_step, preemption_victim
from triptych.policy.fairness import RESERVED_SHARE, may_start
from triptych.policy.queueing import Turn

S = TypeVar("S", bound=Sequence)
Move = Copy | CopyOut | CopyIn
"""Keys and values to copy, before anything else is written."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    block_tokens: int
    token_budget: int
    max_sequences: int
    fixed_blocks: int = 0
    """Blocks of a sequence beside those of its tokens; prefixes are not shared then."""
    growth_tokens: int = 256
    """Sequences are placed with room for this many more tokens, if there is any."""
    supports_chunked_prefill: bool = True
    """Whether a prompt may be computed in chunks."""
    beside_decodes: int | None = None
    """Most tokens of prompts in a step that has decodes; None: as many as ``token_budget`` leaves."""


@dataclass(frozen=True, slots=True)
class Part(Generic[S]):
    """Compute ``count`` positions of a sequence, from ``first`` on."""

    sequence: S
    first: int
    count: int
    reaches_end: bool
    """Whether the next token follows from it."""


@dataclass(frozen=True, slots=True)
class Step(Generic[S]):
    """One forward pass: first the moves, in order, then all parts, decodes first.

    ``preempted`` sequences have lost what they have in blocks and beside them.
    """

    parts: tuple[Part[S], ...]
    moves: tuple[Move, ...]
    preempted: tuple[S, ...] = ()


class RunningBatch(Generic[S]):
    """Owner of the sequences of an engine: which run, wait, pause or arrive."""

    def __init__(self, blocks: KvBlocks, limits: BatchLimits, copies: HostCopies | None = None) -> None:
        """``copies``: where preempted sequences' keys and values go; None: they are recomputed."""
        self.blocks = blocks
        self.limits = limits
        self.copies = copies
        self._arrivals = 0
        self._known: dict[str, dict[int, S]] = {}
        """By request and choice, followers included."""
        self._running: list[S] = []
        self._waiting: WaitingLine[S] = WaitingLine()
        """Leaders and single sequences."""
        self.preemptions = 0
        self.prefix_queries_tokens = 0
        """Tokens looked up in the prefix cache, counted once per sequence ..."""
        self.prefix_hits_tokens = 0
        """... and found there."""

    @property
    def has_work(self) -> bool:
        return bool(self._known)

    @property
    def waiting(self) -> frozenset[str]:
        """Requests with a sequence that has no blocks."""
        return self._waiting.requests

    @property
    def arriving(self) -> frozenset[tuple[str, int]]:
        """Requests and choices that have blocks, for keys and values that come from elsewhere."""
        return frozenset((one.request_id, one.choice) for one in self._running if one.is_arriving and not one.paused)

    @property
    def pending_tokens(self) -> int:
        return self._waiting.pending_tokens + sum(one.pending_tokens for one in self._running)

    @property
    def prefill_turn(self) -> Turn | None:
        """The first turn of those that the next step could compute part of, or start when they arrive: prompts, and preempted
        sequences. None if there are none.
        """
        turns = [one.turn for one in self._running if not (one.is_decoding or one.is_idle)]
        first = self._next
        if first is not None and self._may_start(first, 0) and self._has_room(first):
            turns.append(first.turn)
        return min(turns, default=None)

    @property
    def can_step(self) -> bool:
        """Whether the next step would do anything."""
        return any(not one.is_idle for one in self._running) or self.prefill_turn is not None

    @property
    def _next(self) -> S | None:
        """The next one to start."""
        return next((one for one in self._waiting if not one.paused), None)

    @property
    def shares_prefixes(self) -> bool:
        return not self.limits.fixed_blocks

    @property
    def running(self) -> int:
        """Number of sequences with blocks."""
        return sum(1 + len(one.followers) for one in self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def choices(self, request_id: str) -> list[S]:
        """The request's unfinished sequences."""
        return list(self._known.get(request_id, {}).values())

    def running_choice(self, request_id: str, choice: int) -> S | None:
        """A choice with blocks and no leader; None if it waits, is a follower, or is unknown."""
        one = self._known.get(request_id, {}).get(choice)
        return one if one is not None and one in self._running else None

    def blocks_for(self, tokens: int) -> int:
        return self.limits.fixed_blocks + -(-tokens // self.limits.block_tokens)

    # --- events ------------------------------------------------------------------------------------------------------

    def add(self, sequences: list[S]) -> None:
        """The choices of one request wait from now on. Those that have begun already share no prefill: each waits alone, and
        arrives alone. Of the others only the first one arrives.

        The caller makes sure that each of them fits into the KV cache on its own, and all into ``max_sequences``.
        """
        for one in sequences:
            one.arrival = self._arrivals
            one.arriving = min(one.arriving, one.length - 1)
        self._arrivals += 1
        self._known[sequences[0].request_id] = {one.choice: one for one in sequences}
        fresh = [one for one in sequences if not one.generated]
        for leader, *followers in ([fresh] if fresh else []) + [[one] for one in sequences if one.generated]:
            leader.followers = followers
            for one in followers:
                one.arriving = 0
            self._waiting.add(leader)

    def reorder(self, request_id: str, turn: Turn) -> None:
        """Give a request another turn, unless it has begun or is unknown."""
        for one in self._waiting.of(request_id):
            if not one.generated:
                self._waiting.reorder(one, turn)

    def remove(self, request_id: str, choice: int | None = None, *, is_sound: bool = True) -> list[S]:
        """Remove a request or one of its choices, and free the blocks. Returns the removed sequences.

        With ``is_sound=False`` its blocks are not found by others.
        """
        known = self._known.get(request_id, {})
        gone = [one for one in known.values() if choice is None or one.choice == choice]
        for one in gone:
            del known[one.choice]
            if not is_sound:
                self.blocks.evict_hashes(one.sequence_id)
            self._leave(one)
            self.blocks.free(one.sequence_id)
            self._forget_copy(one)
        if not known:
            self._known.pop(request_id, None)
        return gone

    def pause(self, request_id: str) -> None:
        """The request's choices get no more tokens."""
        for one in self._known.get(request_id, {}).values():
            one.paused = True
            self._forget_copy(one)
        self._recount(request_id)

    def arrive(self, one: S, end: int) -> None:
        """The positions of an arriving sequence up to ``end`` are in its blocks. Its last token is always computed."""
        self._advance_to(one, max(one.computed, min(end, one.length - 1)))

    def end_arrival(self, request_id: str) -> None:
        """No more keys and values come: what is missing is computed."""
        for one in self._known.get(request_id, {}).values():
            one.arriving = 0
        self._recount(request_id)

    def _recount(self, request_id: str) -> None:
        for one in self._waiting.of(request_id):
            self._waiting.recount(one)

    def plan(self, *, prefill: bool = True) -> Step[S]:
        """Plan the next forward pass and allocate its blocks. The step must run before the next event.

        Without ``prefill`` it contains decodes only.
        """
        moves: list[Move] = []
        preempted: list[S] = []
        for one in self._decoding():
            if one not in preempted:
                self._grow(one, moves, preempted)
        units = {one.sequence_id: one for one in self._running}
        step = plan_step(
            [one.sequence_id for one in self._decoding()],
            self._prompts(units, moves) if prefill else (),
            token_budget=self.limits.token_budget,
            beside_decodes=self.limits.beside_decodes,
        )
        parts = [_part(units[name], 1) for name in step.decodes]
        parts += [_part(units[work.sequence_id], work.tokens) for work in step.prefills]
        return Step(tuple(parts), tuple(moves), tuple(preempted))

    def _decoding(self) -> list[S]:
        return [one for one in self._running if one.is_decoding and not one.is_idle]

    def advance(self, one: S, count: int) -> None:
        """``count`` more positions are computed: their full blocks can be found from now on."""
        self._advance_to(one, one.computed + count)

    def _advance_to(self, one: S, computed: int) -> None:
        before, one.computed = one.computed, computed
        if one.prefix_hashes is not None:
            size = self.limits.block_tokens
            for index in range(before // size, one.computed // size):
                self.blocks.register_hash(one.sequence_id, index, one.prefix_hashes.hashes[index])

    def fork(self, leader: S) -> tuple[list[S], tuple[Copy, ...]]:
        """The prompt is computed: share or copy its blocks for the other choices. Returns these and the copies."""
        followers, leader.followers = leader.followers, []
        copies: list[Copy] = []
        for one in followers:
            shared = leader.computed // self.limits.block_tokens
            used = self.blocks_for(leader.computed)
            copies += self.blocks.fork(leader.sequence_id, one.sequence_id, shared, used)
            one.computed = leader.computed
            insort(self._running, one, key=order)
        return followers, tuple(copies)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        self.blocks.validate()
        self._waiting.validate()
        running, waiting = self._running, list(self._waiting)
        assert running == sorted(running, key=order), "out of order"  # noqa: S101 - invariant
        everyone = [other for one in (*running, *waiting) for other in (one, *one.followers)]
        known = [one for choices in self._known.values() for one in choices.values()]
        assert sorted(map(order, everyone)) == sorted(map(order, known)), "a sequence is lost"  # noqa: S101 - invariant
        for one in waiting:
            held = [self.blocks.table(other.sequence_id) for other in (one, *one.followers)]
            assert not any(held), f"{one.sequence_id} holds memory while it waits"  # noqa: S101 - invariant
            assert not one.computed, f"{one.sequence_id} waits and has computed"  # noqa: S101 - invariant
            assert not (one.preemptions and one.arriving), f"{one.sequence_id} awaits what was lost"  # noqa: S101 - invariant
            assert not (one.paused and one.copy), f"{one.sequence_id} is copied for nothing"  # noqa: S101 - invariant
        if self.copies is not None:
            self.copies.validate([one.copy for one in waiting if one.copy is not None])
            others = [one for one in everyone if one not in waiting]
            assert not any(one.copy for one in others), "a sequence with blocks has a copy"  # noqa: S101 - invariant
        for one in running:
            held_tokens = (
                len(self.blocks.table(one.sequence_id)) - self.limits.fixed_blocks
            ) * self.limits.block_tokens
            needed = one.length + 1 if one.is_arriving else one.computed
            assert needed <= held_tokens, f"{one.sequence_id} has no memory"  # noqa: S101 - invariant
            assert one.arriving < one.length, f"the last token of {one.sequence_id} is not computed"  # noqa: S101 - invariant
            assert not any(other.arriving for other in one.followers), "a follower arrives alone"  # noqa: S101 - invariant
        assert sum(1 + len(one.followers) for one in running) <= self.limits.max_sequences, "too many"  # noqa: S101 - invariant

    # --- memory ------------------------------------------------------------------------------------------------------

    def _grow(self, one: S, moves: list[Move], preempted: list[S]) -> None:
        """Allocate a block for a decode's next token. If none is free, preempt later sequences, and finally itself."""
        while True:
            missing = self.blocks_for(one.length) - len(self.blocks.table(one.sequence_id))
            if missing <= 0:
                return
            moved = self.blocks.allocate(one.sequence_id, missing, room=self._room(one))
            if moved is not None:
                moves.extend(moved)
                return
            by_id = {other.sequence_id: other for other in self._running}
            idle = {name for name, other in by_id.items() if other.is_idle}
            victim = by_id[preemption_victim(list(by_id), idle)]
            preempted += self._preempt(victim, moves)
            if victim is one:
                return

    def _preempt(self, one: S, moves: list[Move]) -> list[S]:
        """Free its blocks, after a copy if there is room for one. Followers have computed nothing yet."""
        self.preemptions += 1
        one.preemptions += 1
        self._running.remove(one)
        one.arriving = 0
        if self.copies is not None and not one.paused and (copy := self.copies.take(one.computed)) is not None:
            one.copy = copy
            used = self.blocks.table(one.sequence_id)[: self.blocks_for(one.computed)]
            moves.append(CopyOut(tuple(used), copy.segment, copy.offset))
        everyone = [one, *one.followers]
        for other in everyone:
            self.blocks.free(other.sequence_id)
            other.computed = 0
        self._waiting.add(one)
        return everyone

    def _prompts(self, units: dict[str, S], moves: list[Move]) -> Iterator[Prefill]:
        """Those that have blocks and those that wait, by their turns. The latter start, one per iteration, while there are
        batch slots and blocks.
        """
        begun = [one for one in self._running if not (one.is_decoding or one.is_idle)]
        started_beyond = 0
        while (one := self._next) is not None:
            while begun and begun[0].order < one.order:
                yield self._prefill(begun.pop(0))
            if not self._may_start(one, started_beyond) or not self._start(one, moves):
                break
            if one.turn.beyond_share:
                started_beyond += 1 + len(one.followers)
            self._waiting.remove(one)
            insort(self._running, one, key=order)
            if not one.is_arriving:
                units[one.sequence_id] = one
                yield self._prefill(one)
        yield from map(self._prefill, begun)

    def _may_start(self, one: S, started_beyond: int) -> bool:
        wanted, places = 1 + len(one.followers), self.limits.max_sequences
        return may_start(one.turn, wanted=wanted, running=self.running, places=places, begun=started_beyond)

    def _has_room(self, one: S) -> bool:
        """Whether enough blocks are available for it to start."""
        wanted, shared = self._wanted(one)
        in_all = wanted + len(one.followers) * (wanted - shared)
        reserved = self.blocks.blocks // RESERVED_SHARE if one.turn.beyond_share and self._running else 0
        return in_all + len(self._running) + reserved <= self.blocks.available + self._found_here(one)

    def _wanted(self, one: S) -> tuple[int, int]:
        """Number of blocks for its tokens and one more, and how many of them its choices share."""
        shared = 0 if self.blocks.contiguous else one.length // self.limits.block_tokens
        return self.blocks_for(one.length + 1), shared

    def _start(self, one: S, moves: list[Move]) -> bool:
        """Allocate blocks for its tokens and one more, for all choices or for none."""
        if not self._has_room(one):
            return False
        wanted, shared = self._wanted(one)
        made = self._take_with_prefix(one, wanted)
        for follower in one.followers if made is not None else ():
            taken = self.blocks.allocate(follower.sequence_id, wanted - shared, room=self._room(follower))
            made = made + taken if made is not None and taken is not None else None
        if made is None:
            for other in (one, *one.followers):
                self.blocks.free(other.sequence_id)
            one.computed = 0
            return False
        moves.extend(made)
        if one.prefix_hashes is not None and not one.was_looked_up:
            self.prefix_queries_tokens += one.length
            self.prefix_hits_tokens += one.computed
        one.was_looked_up = True
        self._restore(one, moves)
        return True

    def _restore(self, one: S, moves: list[Move]) -> None:
        """Copy back what the prefix cache has not kept."""
        if self.copies is None or one.copy is None:
            return
        copy, one.copy = one.copy, None
        moves.extend(self.copies.use(copy, one.computed, tuple(self.blocks.table(one.sequence_id))))
        self._advance_to(one, max(one.computed, copy.segment.end))

    def _forget_copy(self, one: S) -> None:
        if self.copies is not None and one.copy is not None:
            self.copies.free(one.copy)
            one.copy = None

    def _found_here(self, one: S) -> int:
        """Number of blocks that it can share with current owners."""
        found = () if self.blocks.contiguous else self._found(one)
        return sum(self.blocks.is_owned(block) for block in found)

    def _found(self, one: S) -> tuple[int, ...]:
        """Cached blocks of its prefix, before its last token and not ending inside a bidirectional span."""
        if one.prefix_hashes is None:
            return ()
        size = self.limits.block_tokens
        found = self.blocks.find(one.prefix_hashes.hashes[: (one.length - 1) // size])
        end = len(found) * size
        for run in reversed(one.bidirectional):
            if run.start < end < run.start + run.tokens:
                end = run.start
        return found[: end // size]

    def _take_with_prefix(self, one: S, wanted: int) -> tuple[Copy, ...] | None:
        """Allocate blocks, starting with the cached ones of its prefix."""
        found = self._found(one)
        if found and self.blocks.contiguous:
            copies = self.blocks.copy_in(one.sequence_id, found, wanted, room=self._room(one))
            if copies is not None:
                one.computed = len(found) * self.limits.block_tokens
                return copies
            found = ()  # source and copy together need too many blocks: recompute
        if found:
            self.blocks.share(one.sequence_id, found)
        one.computed = len(found) * self.limits.block_tokens
        return self.blocks.allocate(one.sequence_id, wanted - len(found), room=self._room(one))

    def _room(self, one: S) -> int:
        most = min(one.prompt_tokens + one.max_tokens, one.length + self.limits.growth_tokens)
        return self.blocks_for(most)

    def _prefill(self, one: S) -> Prefill:
        bidirectional = one.bidirectional if self.limits.supports_chunked_prefill else (Span(0, one.length),)
        return Prefill(one.sequence_id, one.length - one.computed, one.computed, bidirectional, 1 + len(one.followers))

    def _leave(self, one: S) -> None:
        """Leave the queue. The next choice waiting for its prompt becomes the leader and gets its blocks."""
        if one in self._waiting:
            self._waiting.remove(one)
            if (leader := self._heir(one)) is not None:
                self._waiting.add(leader)
        elif one in self._running:
            self._running.remove(one)
            if (leader := self._heir(one)) is not None:
                insort(self._running, leader, key=order)
        else:
            for other in self._known.get(one.request_id, {}).values():
                if one in other.followers:
                    other.followers.remove(one)
            self._recount(one.request_id)

    def _heir(self, leader: S) -> S | None:
        """The first of its followers, which leads the others from now on."""
        if not leader.followers:
            return None
        heir, *heir.followers = leader.followers
        self.blocks.transfer(leader.sequence_id, heir.sequence_id)
        return heir


def _part(one: S, count: int) -> Part[S]:
    return Part(one, one.computed, count, one.computed + count == one.length)
