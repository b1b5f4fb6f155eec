"""The scheduler of the text engine: which sequences run, which wait, and which KV blocks they have.


    add -> WAITING -- (blocks for its tokens so far) -> RUNNING -- remove -> gone
              ^------- preempted: no block is free -------/

A sequence starts when there are blocks for its tokens so far and one more; until then it holds none. The callers' queue positions
(``policy.queueing``) order the queue. A sequence gets blocks as it grows. When none is free, the last running sequence
in that order is preempted: it keeps its tokens and frees its blocks. Its keys and values are copied to host memory and
back when its turn comes; where there is no room for a copy, they are recomputed (docs/engine.md). The first is never preempted,
so it runs to its end. Waiting sequences never take blocks from running ones.

The choices of one request start together. The first, their leader, computes the prompt; ``fork`` gives its blocks to
the others, which are then independent.

KV transfers (ADR 44): a paused sequence has blocks and computes nothing, until it is removed. An arriving one starts like
others, and computes nothing either until its keys and values are there, or ``end_arrival`` says that no more come. When memory runs
out, both are spared as long as others can give way. A preempted arriving one is computed like others; a paused one does not
return.
"""

from bisect import insort
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from triptych.domain.queue_position import QueuePosition
from triptych.families.base import Span
from triptych.machine.text.host_copies import CopyIn, CopyOut, HostCopies
from triptych.machine.text.kept_states import KeptStates, StateIn
from triptych.machine.text.kv_blocks import Copy, KvBlocks
from triptych.machine.text.sequence import Sequence
from triptych.machine.text.waiting_line import WaitingLine, order
from triptych.policy.batching import Prefill, plan_step, preemption_victim
from triptych.policy.fairness import RESERVED_SHARE, may_start

S = TypeVar("S", bound=Sequence)
Move = Copy | CopyOut | CopyIn | StateIn
"""Keys and values, or states, to copy, before anything else is written."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    block_tokens: int
    token_budget: int
    max_sequences: int
    fixed_blocks: int = 0
    """Blocks of a sequence beside those of its tokens; blocks are not shared then."""
    growth_tokens: int = 256
    """Sequences are placed with room for this many more tokens, if there is any."""
    supports_chunked_prefill: bool = True
    """Whether a prompt may be computed in chunks."""
    beside_decodes: int | None = None
    """Most tokens of prompts in a step that has decodes; None: as many as ``token_budget`` leaves."""


@dataclass(frozen=True, slots=True)
class StepPart(Generic[S]):
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

    parts: tuple[StepPart[S], ...]
    moves: tuple[Move, ...]
    preempted: tuple[S, ...] = ()


class RunningBatch(Generic[S]):
    """Owner of the sequences of an engine: which run, wait, pause or arrive."""

    def __init__(
        self,
        blocks: KvBlocks,
        limits: StepLimits,
        copies: HostCopies | None = None,
        kept: KeptStates | None = None,
    ) -> None:
        """``copies``: where preempted sequences' keys and values go; None: they are recomputed. ``kept``: where blocks have no prefixes."""
        self.blocks = blocks
        self.limits = limits
        """Changed by ``limit``."""
        self._most_sequences = limits.max_sequences
        """The largest ``max_sequences`` so far: what began under it runs on."""
        self.copies = copies
        self.kept = kept
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
        return frozenset(
            (sequence.request_id, sequence.choice)
            for sequence in self._running
            if sequence.is_arriving and not sequence.paused
        )

    @property
    def pending_tokens(self) -> int:
        return self._waiting.pending_tokens + sum(sequence.pending_tokens for sequence in self._running)

    @property
    def prefill_queue_position(self) -> QueuePosition | None:
        """The first queue position of those that the next step could compute part of, or start when they arrive: prompts, and preempted
        sequences. None if there are none.
        """
        queue_positions = [
            sequence.queue_position for sequence in self._running if not (sequence.is_decoding or sequence.is_idle)
        ]
        first = self._next
        if first is not None and self._may_start(first, 0) and self._has_room(first):
            queue_positions.append(first.queue_position)
        return min(queue_positions, default=None)

    @property
    def can_step(self) -> bool:
        """Whether the next step would do anything."""
        return any(not sequence.is_idle for sequence in self._running) or self.prefill_queue_position is not None

    @property
    def _next(self) -> S | None:
        """The next one to start."""
        return next((sequence for sequence in self._waiting if not sequence.paused), None)

    @property
    def shares_prefixes(self) -> bool:
        return not self.limits.fixed_blocks or self.kept is not None

    @property
    def hashed_tokens(self) -> int:
        """Tokens of each hash of a sequence's ``prefix_hashes``."""
        return self.limits.block_tokens if self.kept is None else self.kept.border_tokens

    @property
    def running(self) -> int:
        """Number of sequences with blocks."""
        return sum(1 + len(sequence.followers) for sequence in self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def choices(self, request_id: str) -> list[S]:
        """The request's unfinished sequences."""
        return list(self._known.get(request_id, {}).values())

    def running_choice(self, request_id: str, choice: int) -> S | None:
        """A choice with blocks and no leader; None if it waits, is a follower, or is unknown."""
        sequence = self._known.get(request_id, {}).get(choice)
        return sequence if sequence is not None and sequence in self._running else None

    def blocks_for(self, tokens: int) -> int:
        return self.limits.fixed_blocks + -(-tokens // self.limits.block_tokens)

    # --- events ------------------------------------------------------------------------------------------------------

    def add(self, sequences: list[S]) -> None:
        """The choices of one request wait from now on. Those that have begun already share no prefill: each waits alone, and
        arrives alone. Of the others only the first one arrives.

        The caller makes sure that each of them fits into the KV cache on its own, and all into ``max_sequences``.
        """
        for sequence in sequences:
            sequence.arrival = self._arrivals
            sequence.arriving = min(sequence.arriving, sequence.length - 1)
        self._arrivals += 1
        self._known[sequences[0].request_id] = {sequence.choice: sequence for sequence in sequences}
        fresh = [sequence for sequence in sequences if not sequence.generated]
        for leader, *followers in ([fresh] if fresh else []) + [
            [sequence] for sequence in sequences if sequence.generated
        ]:
            leader.followers = followers
            for follower in followers:
                follower.arriving = 0
            self._waiting.add(leader)

    def reorder(self, request_id: str, queue_position: QueuePosition) -> None:
        """Give a request another queue position, unless it has begun or is unknown."""
        for sequence in self._waiting.of(request_id):
            if not sequence.generated:
                self._waiting.reorder(sequence, queue_position)

    def remove(self, request_id: str, choice: int | None = None, *, is_sound: bool = True) -> list[S]:
        """Remove a request or one of its choices, and free the blocks. Returns the removed sequences.

        With ``is_sound=False`` its blocks are not found by others.
        """
        known = self._known.get(request_id, {})
        gone = [sequence for sequence in known.values() if choice is None or sequence.choice == choice]
        for sequence in gone:
            del known[sequence.choice]
            if not is_sound:
                self.blocks.evict_hashes(sequence.sequence_id)
                self.discard_states(sequence)
            self._leave(sequence)
            self.blocks.free(sequence.sequence_id)
            self._forget_copy(sequence)
        if not known:
            self._known.pop(request_id, None)
        return gone

    def limit(self, max_sequences: int, token_budget: int) -> None:
        """Set the limits of the next steps. What runs goes on."""
        self.limits = replace(self.limits, max_sequences=max_sequences, token_budget=token_budget)
        self._most_sequences = max(self._most_sequences, max_sequences)

    def pause(self, request_id: str) -> None:
        """The request's choices get no more tokens."""
        for sequence in self._known.get(request_id, {}).values():
            sequence.paused = True
            self._forget_copy(sequence)
        self._recount(request_id)

    def arrive(self, sequence: S, end: int) -> None:
        """The positions of an arriving sequence up to ``end`` are in its blocks. Its last token is always computed."""
        self._advance_to(sequence, max(sequence.computed, min(end, sequence.length - 1)))

    def end_arrival(self, request_id: str) -> None:
        """No more keys and values come: what is missing is computed."""
        for sequence in self._known.get(request_id, {}).values():
            sequence.arriving = 0
        self._recount(request_id)

    def _recount(self, request_id: str) -> None:
        for sequence in self._waiting.of(request_id):
            self._waiting.recount(sequence)

    def plan(self, *, prefill: bool = True) -> Step[S]:
        """Plan the next forward pass and allocate its blocks. The step must run before the next event.

        Without ``prefill`` it contains decodes only.
        """
        moves: list[Move] = []
        preempted: list[S] = []
        for sequence in self._decoding():
            if sequence not in preempted:
                self._grow(sequence, moves, preempted)
        units = {sequence.sequence_id: sequence for sequence in self._running}
        step = plan_step(
            [sequence.sequence_id for sequence in self._decoding()],
            self._prompts(units, moves) if prefill else (),
            token_budget=self.limits.token_budget,
            beside_decodes=self.limits.beside_decodes,
        )
        parts = [_part(units[name], 1) for name in step.decodes]
        parts += [_part(units[work.sequence_id], work.tokens) for work in step.prefills]
        if self.kept is not None:
            self.kept.shrink(self._unused_nbytes(self.kept))
        return Step(tuple(parts), tuple(moves), tuple(preempted))

    def _decoding(self) -> list[S]:
        return [sequence for sequence in self._running if sequence.is_decoding and not sequence.is_idle]

    def advance(self, sequence: S, count: int) -> None:
        """``count`` more positions are computed: their full blocks can be found from now on."""
        self._advance_to(sequence, sequence.computed + count)

    def _advance_to(self, sequence: S, computed: int) -> None:
        before, sequence.computed = sequence.computed, computed
        if sequence.prefix_hashes is not None and self.kept is None:
            size = self.limits.block_tokens
            for index in range(before // size, sequence.computed // size):
                self.blocks.register_hash(sequence.sequence_id, index, sequence.prefix_hashes.hashes[index])

    def take_border(self, sequence: S) -> bytearray | None:
        """Memory for the sequence's state, to be kept as it is now. None: it is not at a border, it is kept already, or there is no room."""
        if self.kept is None or sequence.prefix_hashes is None or sequence.computed not in (sequence.borders or ()):
            return None
        prefix_hash = sequence.prefix_hashes.hashes[sequence.computed // self.kept.border_tokens - 1]
        return self.kept.take(prefix_hash, sequence.computed, self._unused_nbytes(self.kept))

    def discard_states(self, sequence: S) -> None:
        """Forget the kept states of its prefixes, which are not sound."""
        if self.kept is not None and sequence.prefix_hashes is not None:
            self.kept.discard(sequence.prefix_hashes.hashes)

    def lose_states(self, sequence_ids: AbstractSet[str]) -> None:
        """These have not got the states that they were to go on from. They are computed whole, and no other goes on from these states."""
        for sequence in self._running:
            if sequence.sequence_id in sequence_ids:
                self.discard_states(sequence)
                sequence.computed = 0
                self._recount_cached(sequence)

    def _unused_nbytes(self, kept: KeptStates) -> int:
        """KV memory that sequences leave."""
        return kept.nbytes * self.blocks.available // self.blocks.blocks

    def fork(self, leader: S) -> tuple[list[S], tuple[Copy, ...]]:
        """The prompt is computed: share or copy its blocks for the other choices. Returns these and the copies."""
        followers, leader.followers = leader.followers, []
        copies: list[Copy] = []
        for follower in followers:
            shared = leader.computed // self.limits.block_tokens
            used = self.blocks_for(leader.computed)
            copies += self.blocks.fork(leader.sequence_id, follower.sequence_id, shared, used)
            follower.computed = leader.computed
            insort(self._running, follower, key=order)
        return followers, tuple(copies)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        self.blocks.validate()
        self._waiting.validate()
        running, waiting = self._running, list(self._waiting)
        assert running == sorted(running, key=order), "out of order"
        everyone = [other for sequence in (*running, *waiting) for other in (sequence, *sequence.followers)]
        known = [sequence for choices in self._known.values() for sequence in choices.values()]
        assert sorted(map(order, everyone)) == sorted(map(order, known)), "a sequence is lost"
        for sequence in waiting:
            held = [self.blocks.table(other.sequence_id) for other in (sequence, *sequence.followers)]
            assert not any(held), f"{sequence.sequence_id} holds memory while it waits"
            assert not sequence.computed, f"{sequence.sequence_id} waits and has computed"
            assert not (sequence.preemptions and sequence.arriving), f"{sequence.sequence_id} awaits what was lost"
            assert not (sequence.paused and sequence.copy), f"{sequence.sequence_id} is copied for nothing"
        if self.copies is not None:
            self.copies.validate([sequence.copy for sequence in waiting if sequence.copy is not None])
            others = [sequence for sequence in everyone if sequence not in waiting]
            assert not any(sequence.copy for sequence in others), "a sequence with blocks has a copy"
        if self.kept is not None:
            self.kept.validate()
            assert self.kept.held_nbytes <= self._unused_nbytes(self.kept), "kept states take what sequences have"
        for sequence in running:
            held_tokens = (
                len(self.blocks.table(sequence.sequence_id)) - self.limits.fixed_blocks
            ) * self.limits.block_tokens
            needed = sequence.length + 1 if sequence.is_arriving else sequence.computed
            assert needed <= held_tokens, f"{sequence.sequence_id} has no memory"
            assert sequence.arriving < sequence.length, f"the last token of {sequence.sequence_id} is not computed"
            assert not any(other.arriving for other in sequence.followers), "a follower arrives alone"
        assert sum(1 + len(sequence.followers) for sequence in running) <= self._most_sequences, "too many"

    # --- memory ------------------------------------------------------------------------------------------------------

    def _grow(self, sequence: S, moves: list[Move], preempted: list[S]) -> None:
        """Allocate a block for a decode's next token. If none is free, preempt later sequences, and finally itself."""
        while True:
            missing = self.blocks_for(sequence.length) - len(self.blocks.table(sequence.sequence_id))
            if missing <= 0:
                return
            moved = self.blocks.allocate(sequence.sequence_id, missing, room=self._room(sequence))
            if moved is not None:
                moves.extend(moved)
                return
            by_id = {other.sequence_id: other for other in self._running}
            idle = {name for name, other in by_id.items() if other.is_idle}
            victim = by_id[preemption_victim(list(by_id), idle)]
            preempted += self._preempt(victim, moves)
            if victim is sequence:
                return

    def _preempt(self, sequence: S, moves: list[Move]) -> list[S]:
        """Free its blocks, after a copy if there is room for one. Followers have computed nothing yet."""
        self.preemptions += 1
        sequence.preemptions += 1
        self._running.remove(sequence)
        sequence.arriving = 0
        if (
            self.copies is not None
            and not sequence.paused
            and (copy := self.copies.take(sequence.computed)) is not None
        ):
            sequence.copy = copy
            used = self.blocks.table(sequence.sequence_id)[: self.blocks_for(sequence.computed)]
            moves.append(CopyOut(tuple(used), copy.segment, copy.offset))
        everyone = [sequence, *sequence.followers]
        for other in everyone:
            self.blocks.free(other.sequence_id)
            other.computed = 0
        self._waiting.add(sequence)
        return everyone

    def _prompts(self, units: dict[str, S], moves: list[Move]) -> Iterator[Prefill]:
        """Prompts that have blocks and those that wait, by their queue positions. The latter start, one per iteration, while there are
        batch slots and blocks.
        """
        begun = [sequence for sequence in self._running if not (sequence.is_decoding or sequence.is_idle)]
        if self.kept is not None:
            for pending in begun:
                moves.extend(self._take_late_state(pending, self.kept))
        started_beyond = 0
        while (sequence := self._next) is not None:
            while begun and begun[0].order < sequence.order:
                yield self._prefill(begun.pop(0))
            if not self._may_start(sequence, started_beyond) or not self._start(sequence, moves):
                break
            if sequence.queue_position.beyond_share:
                started_beyond += 1 + len(sequence.followers)
            self._waiting.remove(sequence)
            insort(self._running, sequence, key=order)
            if not sequence.is_arriving:
                units[sequence.sequence_id] = sequence
                yield self._prefill(sequence)
        yield from map(self._prefill, begun)

    def _may_start(self, sequence: S, started_beyond: int) -> bool:
        wanted, places = 1 + len(sequence.followers), self.limits.max_sequences
        return may_start(
            sequence.queue_position, wanted=wanted, running=self.running, places=places, begun=started_beyond
        )

    def _has_room(self, sequence: S) -> bool:
        """Whether enough blocks are available for it to start."""
        wanted, shared = self._wanted(sequence)
        in_all = wanted + len(sequence.followers) * (wanted - shared)
        reserved = self.blocks.blocks // RESERVED_SHARE if sequence.queue_position.beyond_share and self._running else 0
        return in_all + len(self._running) + reserved <= self.blocks.available + self._found_here(sequence)

    def _wanted(self, sequence: S) -> tuple[int, int]:
        """Number of blocks for its tokens and one more, and how many of them its choices share."""
        shared = 0 if self.blocks.contiguous else sequence.length // self.limits.block_tokens
        return self.blocks_for(sequence.length + 1), shared

    def _start(self, sequence: S, moves: list[Move]) -> bool:
        """Allocate blocks for its tokens and one more, for all choices or for none."""
        if not self._has_room(sequence):
            return False
        wanted, shared = self._wanted(sequence)
        made = self._take_with_prefix(sequence, wanted)
        for follower in sequence.followers if made is not None else ():
            taken = self.blocks.allocate(follower.sequence_id, wanted - shared, room=self._room(follower))
            made = made + taken if made is not None and taken is not None else None
        if made is None:
            for other in (sequence, *sequence.followers):
                self.blocks.free(other.sequence_id)
            sequence.computed = 0
            return False
        moves.extend(made)
        if self.kept is not None:
            moves.extend(self._take_state(sequence, self.kept))
        if sequence.prefix_hashes is not None and sequence.cached is None:
            self.prefix_queries_tokens += sequence.length
            self.prefix_hits_tokens += sequence.computed
        sequence.cached = sequence.computed if sequence.cached is None else sequence.cached
        self._restore(sequence, moves)
        return True

    def _take_state(self, sequence: S, kept: KeptStates) -> tuple[StateIn, ...]:
        """Let it go on from the last border before its last token that has a state, unless its own one comes from elsewhere."""
        if sequence.prefix_hashes is None or sequence.arriving:
            return ()
        hashes, size = sequence.prefix_hashes.hashes, kept.border_tokens
        found = kept.find(hashes[: (sequence.length - 1) // size])
        if sequence.borders is None:
            sequence.borders = kept.borders(hashes[: (sequence.prompt_tokens - 1) // size])
        if found is None:
            return ()
        sequence.computed, memory = found
        return (StateIn(sequence.sequence_id, sequence.computed, memory),)

    def _take_late_state(self, sequence: S, kept: KeptStates) -> tuple[StateIn, ...]:
        """The same for one that has blocks and has computed nothing, as what was to arrive is lost, or it succeeds its leader."""
        if sequence.computed:
            return ()
        found = self._take_state(sequence, kept)
        self._recount_cached(sequence)
        return found

    def _recount_cached(self, sequence: S) -> None:
        """Count what it has now as cached from its first start on."""
        if sequence.cached is not None and not sequence.preemptions:
            self.prefix_hits_tokens += sequence.computed - sequence.cached
            sequence.cached = sequence.computed

    def _restore(self, sequence: S, moves: list[Move]) -> None:
        """Copy back what the prefix cache has not kept."""
        if self.copies is None or sequence.copy is None:
            return
        copy, sequence.copy = sequence.copy, None
        moves.extend(self.copies.use(copy, sequence.computed, tuple(self.blocks.table(sequence.sequence_id))))
        self._advance_to(sequence, max(sequence.computed, copy.segment.end))

    def _forget_copy(self, sequence: S) -> None:
        if self.copies is not None and sequence.copy is not None:
            self.copies.free(sequence.copy)
            sequence.copy = None

    def _found_here(self, sequence: S) -> int:
        """Number of blocks that it can share with current owners."""
        found = () if self.blocks.contiguous else self._found(sequence)
        return sum(self.blocks.is_owned(block) for block in found)

    def _found(self, sequence: S) -> tuple[int, ...]:
        """Cached blocks of its prefix, before its last token and not ending inside a bidirectional span."""
        if sequence.prefix_hashes is None or self.kept is not None:
            return ()
        size = self.limits.block_tokens
        found = self.blocks.find(sequence.prefix_hashes.hashes[: (sequence.length - 1) // size])
        end = len(found) * size
        for run in reversed(sequence.bidirectional):
            if run.start < end < run.start + run.tokens:
                end = run.start
        return found[: end // size]

    def _take_with_prefix(self, sequence: S, wanted: int) -> tuple[Copy, ...] | None:
        """Allocate blocks, starting with the cached ones of its prefix."""
        found = self._found(sequence)
        if found and self.blocks.contiguous:
            copies = self.blocks.copy_in(sequence.sequence_id, found, wanted, room=self._room(sequence))
            if copies is not None:
                sequence.computed = len(found) * self.limits.block_tokens
                return copies
            found = ()  # source and copy together need too many blocks: recompute
        if found:
            self.blocks.share(sequence.sequence_id, found)
        sequence.computed = len(found) * self.limits.block_tokens
        return self.blocks.allocate(sequence.sequence_id, wanted - len(found), room=self._room(sequence))

    def _room(self, sequence: S) -> int:
        most = min(sequence.prompt_tokens + sequence.max_tokens, sequence.length + self.limits.growth_tokens)
        return self.blocks_for(most)

    def _prefill(self, sequence: S) -> Prefill:
        end = next((border for border in sequence.borders or () if border > sequence.computed), sequence.length)
        bidirectional = sequence.bidirectional if self.limits.supports_chunked_prefill else (Span(0, end),)
        return Prefill(
            sequence.sequence_id,
            end - sequence.computed,
            sequence.computed,
            bidirectional,
            1 + len(sequence.followers),
        )

    def _leave(self, sequence: S) -> None:
        """Leave the queue. The next choice waiting for its prompt becomes the leader and gets its blocks."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            if (leader := self._heir(sequence)) is not None:
                self._waiting.add(leader)
        elif sequence in self._running:
            self._running.remove(sequence)
            if (leader := self._heir(sequence)) is not None:
                insort(self._running, leader, key=order)
        else:
            for other in self._known.get(sequence.request_id, {}).values():
                if sequence in other.followers:
                    other.followers.remove(sequence)
            self._recount(sequence.request_id)

    def _heir(self, leader: S) -> S | None:
        """The first of its followers, which leads the others from now on."""
        if not leader.followers:
            return None
        heir, *heir.followers = leader.followers
        heir.borders = leader.borders
        self.blocks.transfer(leader.sequence_id, heir.sequence_id)
        return heir


def _part(sequence: S, count: int) -> StepPart[S]:
    return StepPart(sequence, sequence.computed, count, sequence.computed + count == sequence.length)
