"""Memory of the text engine: which sequences run, which wait, how far each is, and what KV memory they have.

    add -> WAITING -- (memory for what is there) -> RUNNING -- remove -> gone
              ^------- put back: memory ran out -------/

A sequence starts when there is memory for its tokens so far and one more, or waits holding none; first come, first
served. It takes blocks as it grows. When there are none, the sequence that came last is put back: it keeps its tokens,
gives all its memory, and computes again from the start when its turn comes, before all that came after it. The oldest is
never put back, so it gets to its end; whatever waits is younger than whatever runs.

The answers to one prompt start together. The first, their leader, computes the prompt; ``fork`` gives the others what
it has; from then on each is on its own.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from triptych.families.base import Span
from triptych.machine.text.kv_blocks import Copy, KvBlocks
from triptych.machine.text.prefix_hashes import PrefixHashes
from triptych.policy.batching import Prefill, plan_step, preemption_victim


def sequence_id(request_id: str, choice: int) -> str:
    """By which batch, engine and passes know one answer to a request."""
    return f"{request_id}/{choice}"


@dataclass(frozen=True, slots=True)
class BatchLimits:
    block_tokens: int
    token_budget: int
    max_sequences: int
    fixed_blocks: int = 0
    """What a sequence takes beside its tokens; beginnings are not shared then."""
    growth_tokens: int = 256
    """A sequence is placed with room for so many more than it has, where there is."""
    is_cuttable: bool = True
    """Whether a prompt may be computed in chunks at all."""


@dataclass(eq=False, slots=True)
class Progress:
    """How far one answer is. To be read only."""

    request_id: str
    choice: int
    order: tuple[int, int]
    prompt_tokens: int
    max_tokens: int
    bidirectional: tuple[Span, ...]
    prefix_hashes: PrefixHashes | None
    length: int
    """Tokens of prompt and answer."""
    computed: int = 0
    """... of which so many have their keys and values in memory."""
    was_looked_up: bool = False
    followers: list["Progress"] = field(default_factory=list)

    @property
    def sequence_id(self) -> str:
        return sequence_id(self.request_id, self.choice)

    @property
    def generated(self) -> int:
        return self.length - self.prompt_tokens

    @property
    def is_decoding(self) -> bool:
        return self.generated > 0 and self.length == self.computed + 1

    @property
    def pending_tokens(self) -> int:
        """To be computed before the next token, and to be generated, by this one and its followers."""
        first = max(0, self.length - self.computed - (self.generated > 0))
        return first + sum(one.max_tokens - one.generated for one in (self, *self.followers))


@dataclass(frozen=True, slots=True)
class Part:
    """Compute ``count`` positions of a sequence from ``first`` on."""

    request_id: str
    choice: int
    first: int
    count: int
    reaches_end: bool
    """Whether the next token follows from it."""

    @property
    def sequence_id(self) -> str:
        return sequence_id(self.request_id, self.choice)


@dataclass(frozen=True, slots=True)
class Step:
    """One pass: first the copies, in their order, then all parts, those that decode first.

    ``put_back`` are the sequences that have lost what was computed of them.
    """

    parts: tuple[Part, ...]
    copies: tuple[Copy, ...]
    preempted: tuple[str, ...] = ()


class RunningBatch:
    """See the module. Sequences are named ``request/choice``."""

    def __init__(self, blocks: KvBlocks, limits: BatchLimits) -> None:
        self.blocks = blocks
        self.limits = limits
        self._arrivals = 0
        self._known: dict[str, dict[int, Progress]] = {}
        """By request and choice, followers included."""
        self._running: list[Progress] = []
        self._waiting: list[Progress] = []
        """Leaders and those on their own, each in order of arrival."""
        self.preemptions = 0
        self.prefix_queries_tokens = 0
        """Tokens of sequences that were looked up in what is kept, when they started first."""
        self.prefix_hits_tokens = 0
        """... and were found."""

    @property
    def has_work(self) -> bool:
        return bool(self._known)

    @property
    def pending_tokens(self) -> int:
        return sum(one.pending_tokens for one in (*self._running, *self._waiting))

    @property
    def prefill_ready(self) -> bool:
        """Whether there is a prompt, or one that is computed again, that the next step could work on."""
        if any(not one.is_decoding for one in self._running):
            return True
        return bool(self._waiting) and self._has_place(self._waiting[0]) and self._has_room(self._waiting[0])

    @property
    def shares_beginnings(self) -> bool:
        return not self.limits.fixed_blocks

    @property
    def running(self) -> int:
        """Sequences that have memory."""
        return sum(1 + len(one.followers) for one in self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def choices(self, request_id: str) -> list[int]:
        """The choices of a request that are not over."""
        return list(self._known.get(request_id, ()))

    def blocks_for(self, tokens: int) -> int:
        return self.limits.fixed_blocks + -(-tokens // self.limits.block_tokens)

    # --- events ------------------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        *,
        choices: int,
        prompt_tokens: int,
        max_tokens: int,
        bidirectional: tuple[Span, ...] = (),
        prefix_hashes: PrefixHashes | None = None,
    ) -> None:
        """A request waits from now on. ``chain`` says what its prompt is, where others may make use of it.

        The caller sees to it that each of its sequences fits into the memory on its own, and all into the places.
        """
        sequences = [
            Progress(
                request_id,
                choice,
                (self._arrivals, choice),
                prompt_tokens,
                max_tokens,
                bidirectional,
                prefix_hashes.fork() if prefix_hashes is not None and self.shares_beginnings else None,
                prompt_tokens,
            )
            for choice in range(choices)
        ]
        self._arrivals += 1
        self._known[request_id] = {one.choice: one for one in sequences}
        sequences[0].followers = sequences[1:]
        self._waiting.append(sequences[0])

    def remove(self, request_id: str, choice: int | None = None, *, is_sound: bool = True) -> list[str]:
        """Forget a request or one choice of it, and give its memory; returns the sequences that are no more.

        What was computed of one that is not sound is not kept for others.
        """
        known = self._known.get(request_id, {})
        gone = [one for one in known.values() if choice is None or one.choice == choice]
        for one in gone:
            del known[one.choice]
            if not is_sound:
                self.blocks.evict_hashes(one.sequence_id)
            self._leave(one)
            self.blocks.free(one.sequence_id)
        if not known:
            self._known.pop(request_id, None)
        return [one.sequence_id for one in gone]

    def plan(self, *, prefill: bool = True) -> Step:
        """Decide on the next pass and give it its memory. What it says is to be done before the next event.

        Without ``prefill`` those that decode go on alone.
        """
        copies: list[Copy] = []
        preempted: list[str] = []
        at = 0
        while at < len(self._running):  # whoever is put back stands behind
            if self._running[at].is_decoding:
                self._grow(self._running[at], copies, preempted)
            at += 1
        units = {one.sequence_id: one for one in self._running}
        step = plan_step(
            [name for name, one in units.items() if one.is_decoding],
            [self._prefill(one) for one in self._running if prefill and not one.is_decoding],
            self._starting(units, copies) if prefill else (),
            token_budget=self.limits.token_budget,
            max_sequences=self.limits.max_sequences,
        )
        parts = [_part(units[name], 1) for name in step.decodes]
        parts += [_part(units[work.sequence_id], work.tokens) for work in step.prefills]
        return Step(tuple(parts), tuple(copies), tuple(preempted))

    def advance(self, request_id: str, choice: int, count: int) -> None:
        """``count`` more positions are computed: their full blocks can be found from now on."""
        one = self._known[request_id][choice]
        before, one.computed = one.computed, one.computed + count
        if one.prefix_hashes is not None:
            size = self.limits.block_tokens
            for index in range(before // size, one.computed // size):
                self.blocks.register_hash(one.sequence_id, index, one.prefix_hashes.hashes[index])

    def fork(self, request_id: str, choice: int) -> tuple[list[int], tuple[Copy, ...]]:
        """The prompt is through: the choices that go on from here, and what has to be copied for them."""
        leader = self._known[request_id][choice]
        followers, leader.followers = leader.followers, []
        copies: list[Copy] = []
        for one in followers:
            shared = leader.computed // self.limits.block_tokens
            used = self.blocks_for(leader.computed)
            copies += self.blocks.fork(leader.sequence_id, one.sequence_id, shared, used)
            one.computed = leader.computed
            insort(self._running, one, key=_order)
        return [one.choice for one in followers], tuple(copies)

    def extend(self, request_id: str, choice: int, token: int) -> Progress:
        """The next token is known."""
        one = self._known[request_id][choice]
        one.length += 1
        if one.prefix_hashes is not None:
            one.prefix_hashes.append(token)
        return one

    def validate(self) -> None:
        """Raises AssertionError unless the invariants hold."""
        self.blocks.validate()
        running, waiting = self._running, self._waiting
        assert [*running, *waiting] == sorted([*running, *waiting], key=_order), "out of order"  # noqa: S101 - invariant
        everyone = [other for one in (*running, *waiting) for other in (one, *one.followers)]
        known = [one for choices in self._known.values() for one in choices.values()]
        assert sorted(map(_order, everyone)) == sorted(map(_order, known)), "somebody is lost"  # noqa: S101 - invariant
        for one in waiting:
            held = [self.blocks.table(other.sequence_id) for other in (one, *one.followers)]
            assert not any(held), f"{one.sequence_id} holds memory while it waits"  # noqa: S101 - invariant
            assert not one.computed, f"{one.sequence_id} waits and has computed"  # noqa: S101 - invariant
        for one in running:
            held_tokens = (
                len(self.blocks.table(one.sequence_id)) - self.limits.fixed_blocks
            ) * self.limits.block_tokens
            assert one.computed <= held_tokens, f"{one.sequence_id} has no memory"  # noqa: S101 - invariant
        assert sum(1 + len(one.followers) for one in running) <= self.limits.max_sequences, "too many"  # noqa: S101 - invariant

    # --- memory ------------------------------------------------------------------------------------------------------

    def _grow(self, one: Progress, copies: list[Copy], preempted: list[str]) -> None:
        """Memory for the next token of a sequence that decodes, or one that came later, itself at last, is put back."""
        while True:
            missing = self.blocks_for(one.length) - len(self.blocks.table(one.sequence_id))
            if missing <= 0:
                return
            moved = self.blocks.allocate(one.sequence_id, missing, room=self._room(one))
            if moved is not None:
                copies.extend(moved)
                return
            by_id = {other.sequence_id: other for other in self._running}
            victim = by_id[preemption_victim(list(by_id))]
            preempted += self._preempt(victim)
            if victim is one:
                return

    def _preempt(self, one: Progress) -> list[str]:
        self.preemptions += 1
        self._running.remove(one)
        for other in (one, *one.followers):
            self.blocks.free(other.sequence_id)
            other.computed = 0
        insort(self._waiting, one, key=_order)
        return [other.sequence_id for other in (one, *one.followers)]

    def _starting(self, units: dict[str, Progress], copies: list[Copy]) -> Iterator[Prefill]:
        """Start those that wait, one at each call, while there are places and memory."""
        while self._waiting:
            one = self._waiting[0]
            if not self._has_place(one) or not self._start(one, copies):
                return
            self._running.append(self._waiting.pop(0))
            units[one.sequence_id] = one
            yield self._prefill(one)

    def _has_place(self, one: Progress) -> bool:
        return self.running + 1 + len(one.followers) <= self.limits.max_sequences

    def _has_room(self, one: Progress) -> bool:
        """Whether there is memory for it to start, as far as numbers of blocks tell."""
        wanted, shared = self._wanted(one)
        in_all = wanted + len(one.followers) * (wanted - shared)
        return in_all + len(self._running) <= self.blocks.available + self._found_here(one)

    def _wanted(self, one: Progress) -> tuple[int, int]:
        """Blocks for the tokens that are there and one more, and how many of them all its choices share."""
        shared = 0 if self.blocks.contiguous else one.length // self.limits.block_tokens
        return self.blocks_for(one.length + 1), shared

    def _start(self, one: Progress, copies: list[Copy]) -> bool:
        """Memory for the tokens that are there and one more, for all choices, or none."""
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
        copies.extend(made)
        if one.prefix_hashes is not None and not one.was_looked_up:
            self.prefix_queries_tokens += one.length
            self.prefix_hits_tokens += one.computed
        one.was_looked_up = True
        return True

    def _found_here(self, one: Progress) -> int:
        """Blocks that it does not have to take, since others hold them and it can share them."""
        found = () if self.blocks.contiguous else self._found(one)
        return sum(self.blocks.is_owned(block) for block in found)

    def _found(self, one: Progress) -> tuple[int, ...]:
        """Blocks with the beginning of a sequence, all before its last token and none into a run that stays whole."""
        if one.prefix_hashes is None:
            return ()
        size = self.limits.block_tokens
        found = self.blocks.find(one.prefix_hashes.hashes[: (one.length - 1) // size])
        end = len(found) * size
        for run in reversed(one.bidirectional):
            if run.start < end < run.start + run.tokens:
                end = run.start
        return found[: end // size]

    def _take_with_prefix(self, one: Progress, wanted: int) -> tuple[Copy, ...] | None:
        """Blocks for a sequence; where its beginning is known, it begins with that."""
        found = self._found(one)
        if found and self.blocks.contiguous:
            copies = self.blocks.copy_in(one.sequence_id, found, wanted, room=self._room(one))
            if copies is not None:
                one.computed = len(found) * self.limits.block_tokens
                return copies
            found = ()  # source and target together are too much: compute it
        if found:
            self.blocks.share(one.sequence_id, found)
        one.computed = len(found) * self.limits.block_tokens
        return self.blocks.allocate(one.sequence_id, wanted - len(found), room=self._room(one))

    def _room(self, one: Progress) -> int:
        most = min(one.prompt_tokens + one.max_tokens, one.length + self.limits.growth_tokens)
        return self.blocks_for(most)

    def _prefill(self, one: Progress) -> Prefill:
        bidirectional = one.bidirectional if self.limits.is_cuttable else (Span(0, one.length),)
        return Prefill(one.sequence_id, one.length - one.computed, one.computed, bidirectional, 1 + len(one.followers))

    def _leave(self, one: Progress) -> None:
        """Out of the order; the next of the choices that wait for their prompt begins with it, in the same memory."""
        for standing in (self._running, self._waiting):
            if one in standing:
                standing.remove(one)
                if one.followers:
                    leader, *leader.followers = one.followers
                    self.blocks.transfer(one.sequence_id, leader.sequence_id)
                    insort(standing, leader, key=_order)
                return
        for other in (*self._running, *self._waiting):
            if one in other.followers:
                other.followers.remove(one)


def _part(one: Progress, count: int) -> Part:
    return Part(one.request_id, one.choice, one.computed, count, one.computed + count == one.length)


def _order(one: Progress) -> tuple[int, int]:
    return one.order
