"""The running batch against a fake KV memory that records from which tokens each slot was computed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from triptych.domain.embedding import DType
from triptych.domain.kv_segment import KvKind
from triptych.domain.queue_position import AGEING_S, FIRST_COME, QueuePosition
from triptych.families.base import Span
from triptych.machine.text.host_copies import CopyIn, CopyOut, HostCopies
from triptych.machine.text.kept_states import KeptStates, StateIn
from triptych.machine.text.kv_blocks import KvBlocks
from triptych.machine.text.prefix_hashes import BlockHashes
from triptych.machine.text.running_batch import Move, RunningBatch, Step, StepLimits
from triptych.machine.text.sequence import Sequence

BLOCK = 4
BORDER = 8
STATE = 16
"""Bytes of a state beside those of its positions."""
KIND = KvKind("model", DType.F32, layers=1, heads=1, head_size=8)
"""64 bytes per position."""


@dataclass
class Engine:
    """A fake computation: a slot records all tokens up to its own, and the next token is a function of the last."""

    batch: RunningBatch[Sequence]
    seed: int = 0
    memory: dict[int, tuple[int, ...]] = field(default_factory=dict)
    host: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By byte offset."""
    answers: dict[str, list[int]] = field(default_factory=dict)
    steps: list[Step[Sequence]] = field(default_factory=list)

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        *,
        choices: int = 1,
        keyed: bool = True,
        bidirectional: tuple[Span, ...] = (),
        salt: bytes = b"",
        queue_position: QueuePosition = FIRST_COME,
        begun: tuple[int, ...] = (),
        arriving: int = 0,
        pauses: bool = False,
    ) -> None:
        """``begun``: how many tokens each choice has already."""
        size, keyed = self.batch.hashed_tokens, keyed and self.batch.shares_prefixes
        sequences = [
            Sequence(
                request_id=name,
                choice=choice,
                token_ids=list(prompt),
                prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                bidirectional=bidirectional,
                queue_position=queue_position,
                prefix_hashes=BlockHashes(size, prompt, (), salt=salt) if keyed else None,
            )
            for choice in range(choices)
        ]
        for sequence, tokens in zip(sequences, begun, strict=False):
            for _ in range(tokens):
                sequence.append(self._next(sequence))
        for sequence in sequences:
            sequence.arriving, sequence.pauses = arriving, pauses
        self.batch.add(sequences)

    def unpack(self, name: str, choice: int, end: int) -> None:
        """Bring the positions of an arriving choice up to ``end``."""
        sequence = self.batch.running_choice(name, choice)
        assert sequence is not None
        assert (name, choice) in self.batch.arriving
        for position in range(sequence.computed, end):
            self.memory[self.slot(sequence.sequence_id, position)] = tuple(sequence.token_ids[: position + 1])
        self.batch.arrive(sequence, end)
        self.batch.validate()

    def slot(self, sequence_id: str, position: int) -> int:
        size, fixed = self.batch.limits.block_tokens, self.batch.limits.fixed_blocks
        return self.batch.blocks.table(sequence_id)[fixed + position // size] * size + position % size

    def move(self, moves: tuple[Move, ...]) -> None:
        size = self.batch.limits.block_tokens
        for move in moves:
            if isinstance(move, StateIn):
                for position in range(move.positions):
                    self.memory[self.slot(move.sequence_id, position)] = tuple(move.memory[: position + 1])
                continue
            if isinstance(move, CopyOut | CopyIn):
                first = move.first if isinstance(move, CopyIn) else 0
                for position in range(first, move.segment.end):
                    slot = move.blocks[position // size] * size + position % size
                    at = move.offset + position * KIND.position_nbytes
                    if isinstance(move, CopyIn):
                        self.memory[slot] = self.host[at]
                    else:
                        self.host[at] = self.memory[slot]
                continue
            for before, after in zip(move.source, move.target, strict=True):
                for at in range(size):
                    self.memory[after * size + at] = self.memory.get(before * size + at, ())

    def step(self) -> Step[Sequence]:
        step = self.batch.plan()
        self.steps.append(step)
        self.move(step.moves)
        for part in step.parts:
            for position in range(part.first):
                seen = self.memory[self.slot(part.sequence.sequence_id, position)]
                expected = tuple(part.sequence.token_ids[: position + 1])
                assert seen == expected, f"{part.sequence.sequence_id} reads what is not its own"
        for part in step.parts:
            for position in range(part.first, part.first + part.count):
                slot = self.slot(part.sequence.sequence_id, position)
                self.memory[slot] = tuple(part.sequence.token_ids[: position + 1])
        for part in step.parts:
            self.batch.advance(part.sequence, part.count)
            if (state := self.batch.take_border(part.sequence)) is not None:
                state[: part.sequence.computed] = bytes(part.sequence.token_ids[: part.sequence.computed])
            if part.reaches_end:
                followers, copies = self.batch.fork(part.sequence)
                self.move(copies)
                for sequence in (part.sequence, *followers):
                    self._extend(sequence)
        self.batch.validate()
        return step

    def _extend(self, sequence: Sequence) -> None:
        sequence.append(self._next(sequence))
        self.answers[sequence.sequence_id] = sequence.answer
        if sequence.generated == sequence.max_tokens:
            self.batch.remove(sequence.request_id, sequence.choice)

    def _next(self, sequence: Sequence) -> int:
        return Random(f"{self.seed} {sequence.choice} {sequence.token_ids}").randrange(3)

    def run(self, most_steps: int) -> None:
        for _ in range(most_steps):
            if not self.batch.has_work:
                return
            assert self.step().parts, "a step without work: no sequence makes progress"
        raise AssertionError(f"not through after {most_steps} steps")

    def run_while_it_can(self, most_steps: int) -> None:
        while self.batch.can_step:
            assert most_steps, "it has not ended"
            step = self.step()
            assert step.parts or self.batch.arriving, "a step without work"
            most_steps -= 1


def new_engine(
    blocks: int = 16,
    *,
    contiguous: bool = True,
    token_budget: int = 16,
    max_sequences: int = 8,
    fixed_blocks: int = 0,
    supports_chunked_prefill: bool = True,
    copied_positions: int = 0,
    beside_decodes: int | None = None,
    kept_nbytes: int = 0,
) -> Engine:
    limits = StepLimits(
        BLOCK,
        token_budget,
        max_sequences,
        fixed_blocks=fixed_blocks,
        growth_tokens=16,
        supports_chunked_prefill=supports_chunked_prefill,
        beside_decodes=beside_decodes,
    )
    copies = HostCopies(KIND, copied_positions * KIND.position_nbytes) if copied_positions else None
    kept = KeptStates(kept_nbytes, lambda positions: STATE + positions, border_tokens=BORDER) if kept_nbytes else None
    return Engine(RunningBatch(KvBlocks(blocks, contiguous=contiguous), limits, copies, kept))


def new_stateful_engine(blocks: int = 32, *, kept_nbytes: int = 1 << 10, token_budget: int = 64) -> Engine:
    """Of sequences with state outside of blocks."""
    return new_engine(
        blocks,
        fixed_blocks=1,
        supports_chunked_prefill=False,
        kept_nbytes=kept_nbytes,
        token_budget=token_budget,
        max_sequences=4,
    )


def test_a_sequence_takes_the_blocks_it_needs_now_and_grows() -> None:
    engine = new_engine()
    engine.add("a", [0] * 7, 9)
    engine.step()
    assert engine.batch.blocks.available == 14
    engine.step()
    engine.step()
    assert engine.batch.blocks.available == 13


def test_pending_tokens_are_those_to_compute_and_to_generate() -> None:
    engine = new_engine(token_budget=4)
    engine.add("a", [0] * 6, 3, choices=2, keyed=False)
    pending = [engine.batch.pending_tokens]
    while engine.batch.has_work:
        engine.step()
        pending.append(engine.batch.pending_tokens)
    assert pending == [12, 8, 4, 2, 0]


def test_decodes_go_before_prefills() -> None:
    engine = new_engine(token_budget=8)
    engine.add("a", list(range(20)), 2, keyed=False, bidirectional=(Span(4, 8),))
    engine.add("b", [0] * 3, 4, keyed=False)
    assert [(part.sequence.request_id, part.count) for part in engine.step().parts] == [("a", 4), ("b", 3)]
    assert [(part.sequence.request_id, part.count) for part in engine.step().parts] == [("b", 1), ("a", 8)]
    engine = new_engine(token_budget=8)
    engine.add("a", list(range(20)), 2, keyed=False, bidirectional=(Span(4, 8),))
    engine.add("b", [0] * 5, 4, keyed=False)
    assert [(part.sequence.request_id, part.count) for part in engine.step().parts] == [("a", 4), ("b", 4)]
    assert [(part.sequence.request_id, part.count) for part in engine.step().parts] == [("a", 8)], (
        "the last token of a prompt is not a decode"
    )


def test_prompts_get_fewer_tokens_of_a_step_while_answers_run() -> None:
    engine = new_engine(token_budget=8, beside_decodes=3)
    engine.add("a", [0] * 5, 3, keyed=False)
    engine.add("b", list(range(20)), 2, keyed=False)
    sizes = [[part.count for part in engine.step().parts] for _ in range(5)]
    assert sizes == [[5, 3], [1, 3], [1, 3], [8], [3]]
    engine.run(2)
    assert len(engine.answers["b/0"]) == 2


def test_prefills_can_be_paused_while_decodes_continue() -> None:
    engine = new_engine(token_budget=8)
    engine.add("a", [0] * 3, 9, keyed=False)
    engine.step()
    engine.add("b", list(range(12)), 2, keyed=False)
    assert [part.sequence.request_id for part in engine.batch.plan(prefill=False).parts] == ["a"]
    assert not engine.batch.blocks.table("b/0"), "a paused sequence holds no memory"
    assert [(part.sequence.request_id, part.count) for part in engine.step().parts] == [("a", 1), ("b", 7)]
    assert [part.sequence.request_id for part in engine.batch.plan(prefill=False).parts] == ["a"], (
        "a started prefill waits too"
    )
    engine.run(20)
    assert len(engine.answers["a/0"]) == 9
    assert len(engine.answers["b/0"]) == 2


def test_the_first_turn_is_that_of_a_prompt_that_the_next_step_could_compute() -> None:
    engine = new_engine(8, max_sequences=2, token_budget=4)
    queue_positions = [QueuePosition(0, float(due_s), due_s) for due_s in range(4)]

    def first() -> QueuePosition | None:
        return engine.batch.prefill_queue_position

    engine.add("a", [0] * 6, 20, keyed=False, queue_position=queue_positions[2])
    assert first() == queue_positions[2]
    engine.step()
    assert first() == queue_positions[2], "half of it is computed"
    engine.add("b", [1] * 6, 20, keyed=False, queue_position=queue_positions[1])
    assert first() == queue_positions[1]
    for _ in range(4):
        engine.step()
    assert first() is None, "both decode"
    engine.add("c", [2] * 6, 20, keyed=False, queue_position=queue_positions[0])
    assert first() is None, "there is no place for it"


def test_a_prompt_is_ready_while_it_can_be_prefilled() -> None:
    engine = new_engine(8, max_sequences=2, token_budget=4)

    def ready() -> bool:
        return engine.batch.prefill_queue_position is not None

    assert not ready()
    engine.add("a", [0] * 6, 20, keyed=False)
    assert ready()
    engine.step()
    assert ready(), "two of its positions are left"
    engine.step()
    assert not ready()
    engine.add("large", [0] * 30, 2, keyed=False)
    assert not ready(), "there is no memory for it while the other has its own"
    engine.batch.remove("a")
    assert ready()
    engine.batch.remove("large")
    engine.add("b", [0] * 2, 4, choices=2, keyed=False)
    engine.step()
    engine.add("c", [0] * 2, 4, keyed=False)
    assert not ready(), "no place is free"
    engine.run(20)
    assert not ready()


def test_a_position_computed_ahead_of_its_token_is_not_pending() -> None:
    batch = new_engine().batch
    sequence = Sequence(request_id="a", token_ids=[1, 2, 3, 4], prompt_tokens=4, max_tokens=3)
    batch.add([sequence])
    batch.plan()
    batch.advance(sequence, 4)
    assert batch.pending_tokens == 3
    sequence.append(7)
    batch.plan()
    batch.advance(sequence, 1)
    assert batch.pending_tokens == 2


def test_placement_reserves_bounded_room_for_the_answer() -> None:
    for max_tokens, behind in ((8, 3), (100, 5)):
        engine = new_engine(32)
        engine.add("a", [0] * 4, max_tokens, keyed=False)
        engine.add("b", [1] * 4, 4, keyed=False)
        engine.step()
        assert engine.batch.blocks.table("b/0")[0] == behind


def test_choices_start_when_there_is_memory_for_all_of_them() -> None:
    for blocks, starts in ((9, True), (8, False)):
        engine = new_engine(blocks)
        engine.add("a", [0] * 9, 2, choices=3, keyed=False)
        assert bool(engine.step().parts) == starts


def test_blocks_of_a_failed_sequence_are_not_reused() -> None:
    for is_sound, first in ((True, 8), (False, 0)):
        engine = new_engine()
        engine.add("a", [0] * 9, 4)
        engine.step()
        engine.batch.remove("a", is_sound=is_sound)
        engine.add("b", [0] * 9, 4)
        assert engine.step().parts[0].first == first


def test_a_preempted_sequence_is_recomputed_in_chunks() -> None:
    engine = new_engine(6, token_budget=4)
    engine.add("old", [0] * 7, 9, keyed=False)
    engine.add("young", [1] * 6, 8, keyed=False)
    engine.run(100)
    at = next(number for number, step in enumerate(engine.steps) if step.preempted)
    again = [part for step in engine.steps[at:] for part in step.parts if part.sequence.request_id == "young"]
    assert (again[0].first, again[0].count, again[1].first) == (0, 4, 4)
    assert again[1].count > 1


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_preempted_sequence_goes_on_from_its_copy(contiguous: bool) -> None:
    engine = new_engine(6, contiguous=contiguous, copied_positions=11)
    engine.add("old", [0] * 7, 9, keyed=False)
    engine.add("young", [1] * 6, 8, keyed=False)
    (sequence,) = until_preempted(engine)
    length = sequence.length
    assert sequence.copy is not None
    assert sequence.copy.segment.positions == length - 1 == 11
    assert (
        engine.batch.pending_tokens - sum(other.pending_tokens for other in engine.batch.choices("old"))
        == sequence.left_tokens
    )
    engine.run(100)
    at = next(number for number, step in enumerate(engine.steps) if step.preempted)
    again = [part for step in engine.steps[at:] for part in step.parts if part.sequence.request_id == "young"]
    assert (again[0].first, again[0].count) == (length - 1, 1), "only its last token is computed"
    assert engine.answers == engine_alone(("old", [0] * 7, 9), ("young", [1] * 6, 8))
    assert engine.batch.copies is not None
    assert engine.batch.copies.stats.out == engine.batch.copies.stats.back == 1
    assert engine.batch.copies.stats.back_bytes == engine.batch.copies.stats.out_bytes == 11 * 64
    assert engine.batch.copies.stats.back_tokens == 11
    assert engine.batch.copies.stats.held_bytes == 0


def test_without_room_for_a_copy_a_sequence_is_recomputed() -> None:
    engine = new_engine(6, copied_positions=10)
    engine.add("old", [0] * 7, 9, keyed=False)
    engine.add("young", [1] * 6, 8, keyed=False)
    engine.run(100)
    assert engine.answers == engine_alone(("old", [0] * 7, 9), ("young", [1] * 6, 8))
    assert engine.batch.preemptions == 1
    assert engine.batch.copies is not None
    assert engine.batch.copies.stats.out == 0


def test_a_half_computed_prompt_goes_on_from_its_copy() -> None:
    engine = new_engine(7, token_budget=2, copied_positions=64)
    engine.add("old", [0] * 3, 24, keyed=False)
    for _ in range(3):
        engine.step()
    engine.add("young", list(range(14)), 2, keyed=False)
    preempted = until_preempted(engine)
    assert [gone.request_id for gone in preempted] == ["young"]
    computed = preempted[0].copy
    assert computed is not None
    assert 0 < computed.segment.positions < 14
    engine.run(200)
    assert engine.answers == engine_alone(("old", [0] * 3, 24), ("young", list(range(14)), 2))


def test_what_the_prefix_cache_has_kept_is_not_copied_back() -> None:
    engine = new_engine(8, contiguous=False, copied_positions=64)
    engine.add("old", [0] * 4, 20)
    engine.step()
    engine.add("young", [1] * 12, 9)
    until_preempted(engine)
    (sequence,) = engine.batch.choices("young")
    assert sequence.copy is not None
    kept, copied = len(engine.batch._found(sequence)) * BLOCK, sequence.copy.segment.positions
    assert 0 < kept < copied
    engine.batch.remove("old")
    engine.step()
    assert engine.batch.copies is not None
    assert engine.batch.copies.stats.back_tokens == copied - kept
    engine.run(30)
    assert engine.answers["young/0"] == engine_alone(("young", [1] * 12, 9))["young/0"]


def test_a_copied_prefix_is_found_by_others() -> None:
    engine = new_engine(12, contiguous=False, copied_positions=64, max_sequences=2)
    engine.add("old", [0] * 4, 40)
    engine.step()
    engine.add("young", [1] * 9, 20)
    until_preempted(engine)
    assert any(isinstance(move, CopyIn) for _ in range(60) for move in engine.step().moves)
    engine.batch.remove("old")
    engine.add("like", [1] * 9, 3)
    assert next(part.first for part in engine.step().parts if part.sequence.request_id == "like") == 8
    engine.run(60)
    assert engine.answers["young/0"] == engine_alone(("young", [1] * 9, 20))["young/0"]


@pytest.mark.parametrize("choice", [None, 0])
def test_a_sequence_that_ends_while_it_is_preempted_frees_its_copy(choice: int | None) -> None:
    engine = new_engine(6, copied_positions=64)
    engine.add("old", [0] * 7, 9, keyed=False)
    engine.add("young", [1] * 6, 8, keyed=False)
    until_preempted(engine)
    assert engine.batch.copies is not None
    assert engine.batch.copies.stats.held_bytes == 11 * 64
    engine.batch.remove("young", choice)
    assert engine.batch.copies.stats.held_bytes == 0
    engine.batch.validate()
    engine.run(30)


def test_the_next_choice_begins_anew_when_a_preempted_leader_is_cancelled() -> None:
    engine = new_engine(11, token_budget=2, max_sequences=4, copied_positions=64)
    engine.add("old", [0] * 3, 24, keyed=False)
    for _ in range(3):
        engine.step()
    engine.add("young", list(range(14)), 2, choices=2, keyed=False)
    preempted = until_preempted(engine)
    assert [gone.sequence_id for gone in preempted] == ["young/0", "young/1"]
    assert preempted[0].copy is not None
    engine.batch.remove("young", 0)
    assert engine.batch.copies is not None
    assert engine.batch.copies.stats.held_bytes == 0
    engine.run(100)
    assert len(engine.answers["young/1"]) == 2


def until_preempted(sequence: Engine) -> tuple[Sequence, ...]:
    """Steps until sequences are preempted, and returns them."""
    return next(step.preempted for step in (sequence.step() for _ in range(60)) if step.preempted)


def engine_alone(*added: tuple[str, list[int], int]) -> dict[str, list[int]]:
    """Answers with memory for all."""
    alone = new_engine(64, token_budget=64)
    for name, prompt, max_tokens in added:
        alone.add(name, prompt, max_tokens, keyed=False)
    alone.run(100)
    return alone.answers


def test_a_new_sequence_joins_an_unfinished_prefill() -> None:
    engine = new_engine(token_budget=4, max_sequences=2)
    engine.add("a", [0] * 6, 2, keyed=False)
    engine.add("b", [0] * 6, 2, keyed=False)
    engine.step()
    assert [(part.sequence.request_id, part.first, part.count) for part in engine.step().parts] == [
        ("a", 4, 2),
        ("b", 0, 2),
    ]


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_prompt_of_many_chunks_is_passed_by_one_that_is_due_earlier(contiguous: bool) -> None:
    engine = new_engine(32, contiguous=contiguous, token_budget=4)
    engine.add("long", [0] * 12, 1, queue_position=QueuePosition(0, 9.0, 0))
    engine.step()
    engine.add("short", [1] * 2, 1, queue_position=QueuePosition(0, 5.0, 1))
    engine.add("later", [2] * 2, 1, queue_position=QueuePosition(0, 10.0, 2))
    assert [(part.sequence.request_id, part.first, part.count) for part in engine.step().parts] == [
        ("short", 0, 2),
        ("long", 4, 2),
    ]
    engine.run(20)
    assert list(engine.answers) == ["short/0", "long/0", "later/0"]


def test_a_prompt_that_cannot_start_does_not_hold_up_the_one_that_it_would_pass() -> None:
    engine = new_engine(6, token_budget=4)
    engine.add("long", [0] * 12, 1, keyed=False, queue_position=QueuePosition(0, 9.0, 0))
    engine.step()
    engine.add("short", [1] * 12, 1, keyed=False, queue_position=QueuePosition(0, 5.0, 1))
    assert [(part.sequence.request_id, part.first) for part in engine.step().parts] == [("long", 4)]
    engine.run(20)
    assert list(engine.answers) == ["long/0", "short/0"]


def test_prompts_are_chunked_unless_forbidden() -> None:
    limits = StepLimits(BLOCK, token_budget=8, max_sequences=4)
    engine = Engine(RunningBatch(KvBlocks(16, contiguous=True), limits))
    engine.add("a", [0] * 20, 1)
    assert [part.count for part in engine.step().parts] == [8]
    assert engine.batch.blocks.available == 10, "six blocks for twenty tokens and the next"
    uncut = new_engine(token_budget=10, supports_chunked_prefill=False)
    uncut.add("a", [0] * 4, 1)
    uncut.add("b", [0] * 7, 1)
    assert [part.sequence.request_id for part in uncut.step().parts] == ["a"], (
        "there is room for all but one block of the second"
    )
    assert [(part.sequence.request_id, part.count) for part in uncut.step().parts] == [("b", 7)]


BEYOND = FIRST_COME.behind(AGEING_S + 1.0)
"""The queue position of a request beyond its tenant's share."""


def test_requests_beyond_a_share_start_few_at_a_time_and_leave_places_free() -> None:
    engine = new_engine(blocks=400, token_budget=400, max_sequences=32)
    for number in range(40):
        engine.add(f"hog-{number}", [number] * 4, 64, queue_position=BEYOND)
    started = [len([part for part in engine.step().parts if not part.first]) for _ in range(9)]
    assert started == [4, 4, 4, 4, 4, 4, 4, 0, 0], "an eighth of the places in each step, up to seven eighths"
    for number in range(5):
        engine.add(f"other-{number}", [number] * 4, 64)
    assert [part.sequence.request_id for part in engine.step().parts if not part.first] == [
        f"other-{number}" for number in range(4)
    ]


@pytest.mark.parametrize(("queue_position", "started"), [(FIRST_COME, 11), (BEYOND, 9)])
def test_requests_beyond_a_share_leave_memory_free(queue_position: QueuePosition, started: int) -> None:
    engine = new_engine(blocks=32, token_budget=128, max_sequences=64)
    for number in range(12):
        engine.add(f"hog-{number}", [number] * 4, 4, queue_position=queue_position, keyed=False)
    engine.step()
    engine.step()
    assert engine.batch.running == started, "each has two blocks, and one is left for each to grow"
    engine.run(20)


def test_a_request_beyond_a_share_starts_alone_however_large_it_is() -> None:
    engine = new_engine(blocks=16, token_budget=64, max_sequences=2)
    engine.add("hog", [0] * 20, 2, choices=2, queue_position=BEYOND, keyed=False)
    engine.run(5)
    assert len(engine.answers) == 2


def test_a_sequence_starts_only_if_every_running_one_can_grow_by_a_block() -> None:
    for blocks, starts in ((5, True), (4, False)):
        engine = new_engine(blocks)
        engine.add("a", [0] * 4, 9, keyed=False)
        engine.step()
        engine.add("b", [1] * 4, 2, keyed=False)
        assert [part.sequence.request_id for part in engine.step().parts] == (["a", "b"] if starts else ["a"])


def test_the_latest_arrival_is_preempted_and_recomputed() -> None:
    engine = new_engine(6)
    engine.add("old", [0] * 7, 9, keyed=False)
    engine.add("young", [1] * 6, 8, keyed=False)
    engine.run(100)
    assert engine.batch.preemptions == 1
    assert {name: len(answer) for name, answer in engine.answers.items()} == {"old/0": 9, "young/0": 8}
    assert engine.batch.blocks.available == 6


def test_waiting_sequences_start_in_order_and_running_ones_continue() -> None:
    engine = new_engine(max_sequences=1)
    for name, queue_position in (
        ("runs", QueuePosition(5, 9.0, 0)),
        ("low", QueuePosition(1, 0.5, 1)),
        ("late", QueuePosition(0, 9.0, 2)),
        ("soon", QueuePosition(0, 2.0, 3)),
        ("high", QueuePosition(-1, 99.0, 4)),
    ):
        engine.add(name, [1] * 4, 2, queue_position=queue_position)
        engine.batch.validate()
        if name == "runs":
            engine.step()
    assert engine.batch.waiting == {"low", "late", "soon", "high"}
    engine.run(20)
    assert list(engine.answers) == ["runs/0", "high/0", "soon/0", "late/0", "low/0"]


def test_the_last_in_order_is_preempted_regardless_of_arrival() -> None:
    engine = new_engine(blocks=6, contiguous=False, max_sequences=4)
    engine.add("low", [1] * 7, 12, keyed=False, queue_position=QueuePosition(1, 1.0, 0))
    engine.step()
    engine.add("high", [2] * 7, 12, keyed=False, queue_position=QueuePosition(0, 9.0, 1))
    preempted = [gone.sequence_id for _ in range(12) for gone in engine.step().preempted]
    assert preempted == ["low/0"]
    engine.run(40)
    assert len(engine.answers["low/0"]) == len(engine.answers["high/0"]) == 12


def test_a_waiting_sequence_gets_another_turn_with_all_its_choices() -> None:
    engine = new_engine(max_sequences=2)
    engine.add("runs", [1] * 4, 2, choices=2, queue_position=QueuePosition(0, 0.0, 0))
    engine.step()
    for name, due_s in (("lost", 1.0), ("short", 2.0)):
        engine.add(name, [1] * 4, 2, choices=2, queue_position=QueuePosition(0, due_s, 1))
    engine.batch.reorder("lost", QueuePosition(0, 30.0, 1))
    engine.batch.validate()
    engine.run(20)
    assert list(engine.answers) == [f"{name}/{choice}" for name in ("runs", "short", "lost") for choice in (0, 1)]


def test_what_has_begun_keeps_its_turn_even_when_it_was_preempted() -> None:
    engine = new_engine(blocks=6, contiguous=False, max_sequences=4)
    engine.add("low", [1] * 7, 12, keyed=False, queue_position=QueuePosition(1, 1.0, 0))
    engine.step()
    engine.add("high", [2] * 7, 12, keyed=False, queue_position=QueuePosition(0, 9.0, 1))
    for _ in range(12):
        if engine.step().preempted:
            break
    assert engine.batch.waiting == {"low"}
    for name in ("low", "high", "unknown"):
        engine.batch.reorder(name, QueuePosition(9, 99.0, 9))
    engine.batch.validate()
    assert [sequence.queue_position for name in ("low", "high") for sequence in engine.batch.choices(name)] == [
        QueuePosition(1, 1.0, 0),
        QueuePosition(0, 9.0, 1),
    ]


def test_a_waiting_sequence_is_not_overtaken() -> None:
    engine = new_engine(6)
    engine.add("runs", [0] * 14, 2, keyed=False)
    engine.add("large", [1] * 12, 2, keyed=False)
    engine.add("small", [2], 1, keyed=False)
    assert [part.sequence.sequence_id for part in engine.step().parts] == ["runs/0"]
    engine.run(20)
    assert list(engine.answers) == ["runs/0", "large/0", "small/0"]


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_cached_prefix_is_not_recomputed(contiguous: bool) -> None:
    engine = new_engine(contiguous=contiguous)
    prompt = list(range(14))
    engine.add("a", prompt, 2)
    engine.run(5)
    engine.add("b", prompt, 2)
    engine.add("other tenant", prompt, 2, salt=b"x")
    assert [(part.first, part.count) for part in engine.step().parts] == [(12, 2), (0, 14)]
    assert (engine.batch.prefix_queries_tokens, engine.batch.prefix_hits_tokens) == (42, 12)
    engine.run(5)
    assert engine.answers["a/0"] == engine.answers["b/0"]


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    engine = new_engine()
    engine.add("a", [0] * 8, 1)
    engine.add("b", [0] * 8, 1)
    engine.run(5)
    engine.add("c", [0] * 8, 1)
    assert [(part.first, part.count) for part in engine.step().parts] == [(4, 4)]


def test_a_shared_prefix_takes_no_memory_and_copies_nothing() -> None:
    engine = new_engine(7, contiguous=False)
    engine.add("a", [0] * 12, 4)
    engine.step()
    engine.add("b", [0] * 12, 2)
    step = engine.step()
    assert [(part.sequence.request_id, part.first, part.count) for part in step.parts] == [("a", 12, 1), ("b", 8, 4)]
    assert (step.moves, engine.batch.blocks.available) == ((), 1)


def test_each_chunk_of_a_prompt_is_cached_for_others() -> None:
    engine = new_engine(token_budget=6)
    engine.add("a", list(range(16)), 1)
    engine.run(5)
    engine.add("b", list(range(16)), 1)
    assert [(part.first, part.count) for part in engine.step().parts] == [(12, 4)]


def test_prefix_cache_lookups_are_counted_once() -> None:
    engine = new_engine(6)
    engine.add("old", [0] * 7, 9)
    engine.add("young", [1] * 6, 8)
    engine.add("unkeyed", [2] * 5, 1, keyed=False)
    engine.run(100)
    assert engine.batch.preemptions
    assert engine.batch.prefix_queries_tokens == 13


def test_a_cached_prefix_may_end_with_a_bidirectional_span() -> None:
    engine = new_engine()
    engine.add("a", list(range(12)), 1, bidirectional=(Span(0, 8),))
    engine.run(3)
    engine.add("b", list(range(12)), 1, bidirectional=(Span(0, 8),))
    assert [(part.first, part.count) for part in engine.step().parts] == [(8, 4)]


def test_a_cached_prefix_does_not_cut_a_bidirectional_span() -> None:
    engine = new_engine()
    bidirectional = (Span(3, 6),)
    engine.add("a", list(range(12)), 1, bidirectional=bidirectional)
    engine.run(3)
    engine.add("b", list(range(12)), 1, bidirectional=bidirectional)
    assert [(part.first, part.count) for part in engine.step().parts] == [(0, 12)]
    engine.run(3)


def test_chunks_do_not_cut_bidirectional_spans() -> None:
    engine = new_engine(token_budget=8)
    engine.add("a", list(range(30)), 1, bidirectional=(Span(5, 6), Span(14, 12)))
    engine.run(10)
    assert [(part.first, part.count) for step in engine.steps for part in step.parts] == [
        (0, 5),
        (5, 8),
        (13, 1),
        (14, 12),
        (26, 4),
    ]


def test_without_chunking_every_prompt_is_one_forward_pass() -> None:
    engine = new_engine(6, token_budget=4, supports_chunked_prefill=False, max_sequences=2)
    engine.add("a", [0] * 7, 9, keyed=False)
    engine.add("b", [1] * 6, 8, keyed=False)
    engine.run(100)
    assert engine.batch.preemptions
    assert {name: len(answer) for name, answer in engine.answers.items()} == {"a/0": 9, "b/0": 8}


@pytest.mark.parametrize(("contiguous", "taken"), [(True, 9), (False, 5)])
def test_choices_share_full_blocks_if_the_layout_allows(contiguous: bool, taken: int) -> None:
    engine = new_engine(contiguous=contiguous)
    engine.add("a", [0] * 9, 2, choices=3, keyed=False)
    engine.step()
    assert engine.batch.blocks.available == 16 - taken
    engine.run(5)
    assert len(engine.answers) == 3
    assert engine.batch.blocks.available == 16


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_next_choice_takes_over_the_prefill_of_a_cancelled_one(contiguous: bool) -> None:
    engine = new_engine(contiguous=contiguous, token_budget=4, max_sequences=4)
    engine.add("a", [0] * 9, 2, choices=3, keyed=False)
    engine.step()
    engine.batch.remove("a", 0)
    engine.batch.remove("a", 2)
    engine.batch.validate()
    engine.run(10)
    assert list(engine.answers) == ["a/1"]


def test_choices_that_have_begun_are_sequences_of_their_own() -> None:
    engine = new_engine(token_budget=40)
    engine.add("a", [0] * 6, 5, choices=4, keyed=False, begun=(2, 0, 1, 0))
    assert engine.batch.waiting == {"a"}
    assert engine.batch.pending_tokens == (7 + 3) + (6 + 5 + 5) + (6 + 4)
    assert {(part.sequence.choice, part.first, part.count) for part in engine.step().parts} == {
        (0, 0, 8),
        (1, 0, 6),
        (2, 0, 7),
    }
    engine.run(10)
    assert {name: len(answer) for name, answer in engine.answers.items()} == {f"a/{choice}": 5 for choice in range(4)}
    again = new_engine()
    again.add("a", [0] * 6, 5, choices=4, keyed=False)
    again.run(10)
    assert again.answers == engine.answers


def test_choices_that_have_begun_start_as_there_is_memory_for_each() -> None:
    engine = new_engine(6, token_budget=40)
    engine.add("a", [0] * 6, 9, choices=2, keyed=False, begun=(6, 6))
    assert [part.sequence.choice for part in engine.step().parts] == [0]
    engine.run(20)
    assert {name: len(answer) for name, answer in engine.answers.items()} == {"a/0": 9, "a/1": 9}


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_sequence_that_pauses_gets_one_token_and_keeps_its_blocks(contiguous: bool) -> None:
    engine = new_engine(contiguous=contiguous)
    engine.add("goes", [0] * 6, 5, choices=2, pauses=True)
    engine.add("stays", [1] * 6, 5)
    engine.step()
    assert [(part.sequence.request_id, part.count) for part in engine.step().parts] == [("stays", 1)]
    assert [(choice.computed, choice.length) for choice in engine.batch.choices("goes")] == [(6, 7), (6, 7)]
    engine.batch.remove("stays")
    assert engine.batch.has_work
    assert not engine.batch.can_step
    assert engine.batch.prefill_queue_position is None
    assert engine.batch.pending_tokens == 0
    assert engine.step().parts == ()
    engine.batch.remove("goes")
    assert engine.batch.blocks.available == 16


def test_a_sequence_may_be_paused_at_any_time() -> None:
    engine = new_engine(token_budget=4)
    engine.add("decodes", [0] * 3, 9, keyed=False)
    engine.step()
    engine.add("prompt", [1] * 9, 3, choices=2, keyed=False)
    engine.step()
    engine.add("waits", [2] * 3, 3, keyed=False)
    for name in ("decodes", "prompt", "waits", "unknown"):
        engine.batch.pause(name)
    engine.batch.validate()
    assert not engine.batch.can_step
    assert engine.step().parts == ()
    assert engine.batch.waiting == {"waits"}
    engine.add("next", [3] * 3, 2)
    engine.step()
    assert "next/0" in engine.answers, "what is paused holds up nothing"


@pytest.mark.parametrize("contiguous", [True, False])
def test_an_arriving_sequence_has_all_its_blocks_and_is_computed_when_the_rest_is_missing(contiguous: bool) -> None:
    engine = new_engine(contiguous=contiguous)
    engine.add("a", [0] * 11, 3, arriving=11)
    assert engine.batch.pending_tokens == 1 + 3
    ready = [engine.batch.can_step, engine.batch.prefill_queue_position is not None]
    assert engine.step().parts == ()
    ready += [engine.batch.can_step, engine.batch.prefill_queue_position is not None]
    assert ready == [True, True, False, False], "it can start, and no more"
    assert engine.batch.arriving == {("a", 0)}
    assert not engine.batch.waiting
    assert engine.batch.blocks.available == 13, "for its prompt and one token"
    engine.unpack("a", 0, 6)
    assert not engine.batch.can_step
    engine.batch.end_arrival("a")
    assert [(part.first, part.count) for part in engine.step().parts] == [(6, 5)]
    engine.run(5)
    assert engine.answers == engine_alone(("a", [0] * 11, 3))


def test_a_sequence_goes_on_when_all_has_arrived() -> None:
    engine = new_engine(token_budget=40)
    engine.add("begun", [0] * 6, 5, choices=3, keyed=False, begun=(2, 0, 1), arriving=7)
    engine.step()
    assert engine.batch.arriving == {("begun", choice) for choice in range(3)}
    for choice in range(3):
        engine.unpack("begun", choice, 7)
    assert not engine.batch.arriving
    assert {(part.sequence.choice, part.first, part.count) for part in engine.step().parts} == {
        (0, 7, 1),
        (1, 5, 1),
        (2, 6, 1),
    }
    engine.run(10)
    again = new_engine()
    again.add("begun", [0] * 6, 5, choices=3, keyed=False)
    again.run(10)
    assert again.answers == engine.answers


def test_choices_that_share_a_prompt_arrive_with_their_leader() -> None:
    engine = new_engine()
    engine.add("a", [0] * 9, 3, choices=3, keyed=False, arriving=8)
    engine.step()
    assert engine.batch.arriving == {("a", 0)}
    assert engine.batch.running_choice("a", 1) is None, "it follows"
    engine.unpack("a", 0, 8)
    engine.run(10)
    assert len(engine.answers) == 3
    engine.add("b", [0] * 9, 3, choices=2, keyed=False, arriving=8)
    engine.step()
    engine.batch.remove("b", 0)
    engine.batch.validate()
    assert [(part.sequence.sequence_id, part.first, part.count) for part in engine.step().parts] == [("b/1", 0, 9)]


@pytest.mark.parametrize("contiguous", [True, False])
def test_what_the_prefix_cache_has_need_not_arrive(contiguous: bool) -> None:
    engine = new_engine(contiguous=contiguous)
    prompt = list(range(14))
    engine.add("a", prompt, 2)
    engine.run(5)
    engine.add("known", prompt, 2, arriving=12)
    assert [(part.first, part.count) for part in engine.step().parts] == [(12, 2)]
    engine.run(5)
    engine.add("more", [*prompt, 14, 15, 16], 2, arriving=16)
    engine.step()
    assert [choice.computed for choice in engine.batch.choices("more")] == [12]
    engine.unpack("more", 0, 16)
    engine.run(5)
    engine.add("others", [*prompt, 14, 15, 16], 2)
    assert next(part.first for part in engine.step().parts) == 16, "what has arrived is found"
    engine.run(5)
    assert engine.answers["others/0"] == engine.answers["more/0"]


@pytest.mark.parametrize("copied_positions", [0, 64])
def test_idle_sequences_are_preempted_when_only_one_computes(copied_positions: int) -> None:
    engine = new_engine(8, contiguous=False, copied_positions=copied_positions)
    engine.add("paused", [0] * 7, 9, keyed=False, pauses=True)
    engine.step()
    engine.add("arriving", [1] * 7, 3, keyed=False, arriving=6)
    engine.step()
    engine.unpack("arriving", 0, 4)
    engine.add("runs", [2] * 7, 25, keyed=False)
    gone = [sequence.sequence_id for _ in range(22) for sequence in engine.step().preempted]
    assert gone == ["arriving/0", "paused/0"]
    engine.run_while_it_can(40)
    assert engine.batch.waiting == {"paused"}
    assert not engine.batch.arriving
    engine.batch.remove("paused")
    assert engine.answers["arriving/0"] == engine_alone(("arriving", [1] * 7, 3))["arriving/0"]
    assert engine.answers["runs/0"] == engine_alone(("runs", [2] * 7, 25))["runs/0"]
    assert engine.batch.blocks.available == 8


def test_an_idle_sequence_is_spared_while_another_can_give_way() -> None:
    engine = new_engine(9, contiguous=False)
    engine.add("old", [0] * 7, 12, keyed=False)
    engine.add("young", [1] * 7, 12, keyed=False)
    engine.step()
    engine.add("paused", [2] * 7, 9, keyed=False, pauses=True)
    assert [gone.sequence_id for gone in until_preempted(engine)] == ["young/0"]


lengths = st.integers(1, 40)
requests = st.lists(
    st.tuples(lengths, st.integers(1, 24), st.integers(1, 3), st.booleans(), st.integers(0, 2)), min_size=1, max_size=9
)


@settings(max_examples=examples(60), deadline=None)
@given(
    requests=requests,
    contiguous=st.booleans(),
    token_budget=st.integers(4, 40),
    beside_decodes=st.none() | st.integers(1, 40),
    blocks=st.integers(48, 64),
    fixed_blocks=st.integers(0, 1),
    copied_positions=st.integers(0, 80),
    cancels=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8), st.integers(0, 2)), max_size=6),
)
def test_all_sequences_finish_for_any_lengths(
    requests: list[tuple[int, int, int, bool, int]],
    contiguous: bool,
    token_budget: int,
    beside_decodes: int | None,
    blocks: int,
    fixed_blocks: int,
    copied_positions: int,
    cancels: list[tuple[int, int, int]],
) -> None:
    """No livelock: each step makes progress, and every answer is right."""
    engine = new_engine(
        blocks,
        contiguous=contiguous,
        token_budget=token_budget,
        max_sequences=4,
        fixed_blocks=fixed_blocks if contiguous else 0,
        copied_positions=0 if contiguous and fixed_blocks else copied_positions,
        beside_decodes=beside_decodes,
    )
    coming: dict[int, list[Callable[[], None]]] = {}
    for number, (prompt, answer, choices, keyed, kind) in enumerate(requests):
        start = 0 if prompt < 12 else 5
        bidirectional = (Span(start, min(7, prompt - start)),) if number % 3 == 0 else ()
        ids = [kind] * min(prompt, 10) + list(range(max(0, prompt - 10)))
        queue_position = QueuePosition((prompt + answer) % 3, 0.0, number)
        add = partial(engine.add, str(number), ids, answer, choices=choices, keyed=keyed, bidirectional=bidirectional)
        begun = tuple((5 * choice + 3 * kind) % answer for choice in range(choices)) if number % 2 else ()
        coming.setdefault(number * kind, []).append(partial(add, queue_position=queue_position, begun=begun))
    work = sum(prompt + choices * answer for prompt, answer, choices, _, _ in requests)
    for number in range(20 * work + 20):
        for add_one in coming.pop(number, ()):
            add_one()
        for at, request, choice in cancels:
            if at == number:
                engine.batch.remove(str(request % len(requests)), choice)
        if not (engine.batch.has_work or coming):
            break
        step = engine.step()
        assert step.parts or not engine.batch.has_work
        assert sum(part.count for part in step.parts) <= token_budget + 40
    assert not engine.batch.has_work
    assert engine.batch.blocks.available == blocks
    assert engine.batch.copies is None or not engine.batch.copies.stats.held_bytes
    alone = new_engine(64, token_budget=64)
    for number, (prompt, answer, choices, _, kind) in enumerate(requests):
        alone.add(
            str(number),
            [kind] * min(prompt, 10) + list(range(max(0, prompt - 10))),
            answer,
            choices=choices,
            keyed=False,
        )
        alone.run(1000)
    for name, tokens in engine.answers.items():
        assert tokens == alone.answers[name][: len(tokens)]


def carry_out(engine: Engine, order: str, name: str) -> None:
    if order in {"all comes", "some comes"}:
        for request_id, choice in sorted(engine.batch.arriving):
            if request_id == name and (sequence := engine.batch.running_choice(request_id, choice)) is not None:
                count = 44 if order == "all comes" else 5
                engine.unpack(request_id, choice, min(sequence.computed + count, sequence.arriving))
    elif order == "end":
        engine.batch.end_arrival(name)
    elif order == "pause":
        engine.batch.pause(name)
    else:
        engine.batch.remove(name, None if order == "cancel" else 0)
    engine.batch.validate()


handed = st.lists(
    st.tuples(lengths, st.integers(1, 12), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 44)),
    min_size=1,
    max_size=7,
)


@settings(max_examples=examples(80), deadline=None)
@given(
    requests=handed,
    contiguous=st.booleans(),
    token_budget=st.integers(4, 40),
    blocks=st.integers(48, 64),
    copied_positions=st.integers(0, 80),
    orders=st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from(("unpack", "end", "pause", "cancel", "part")), st.integers(0, 6)),
        max_size=20,
    ),
)
def test_sequences_are_kv_transferred_in_any_order(
    requests: list[tuple[int, int, int, bool, bool, int]],
    contiguous: bool,
    token_budget: int,
    blocks: int,
    copied_positions: int,
    orders: list[tuple[int, str, int]],
) -> None:
    """Sequences arrive in parts, pause, are preempted and cancelled: every answer is right, and no block is lost."""
    engine = new_engine(
        blocks,
        contiguous=contiguous,
        token_budget=token_budget,
        max_sequences=4,
        copied_positions=copied_positions,
    )
    alone = new_engine(64, token_budget=64)

    for number, (prompt, answer, choices, keyed, pauses, arriving) in enumerate(requests):
        ids = [number % 2] * min(prompt, 10) + list(range(max(0, prompt - 10)))
        begun = tuple((5 * choice + 3 * number) % answer for choice in range(choices)) if number % 2 else ()
        bidirectional = (Span(2, min(7, prompt - 2)),) if number % 3 == 0 and prompt > 3 else ()
        engine.add(
            str(number),
            ids,
            answer,
            choices=choices,
            keyed=keyed,
            bidirectional=bidirectional,
            begun=begun,
            arriving=arriving,
            pauses=pauses,
        )
        alone.add(str(number), ids, answer, choices=choices, keyed=False)
        alone.run(1000)
    for number in range(31):
        for _, order, request in (placed for placed in orders if placed[0] == number):
            carry_out(engine, order, str(request))
        engine.step()
    for _ in range(100):
        engine.run_while_it_can(4000)
        for number in range(len(requests)):
            carry_out(engine, "end", str(number))
            if any(choice.paused for choice in engine.batch.choices(str(number))):
                engine.batch.remove(str(number))
    assert not engine.batch.has_work
    assert engine.batch.blocks.available == blocks
    assert engine.batch.copies is None or not engine.batch.copies.stats.held_bytes
    for name, tokens in engine.answers.items():
        assert tokens == alone.answers[name][: len(tokens)]


def test_limits_of_steps_change_between_two_of_them() -> None:
    engine = new_engine(64, max_sequences=4, token_budget=16)
    for number in range(6):
        engine.add(f"r{number}", [1], 8)
    engine.step()
    assert engine.batch.running == 4
    engine.batch.limit(2, 2)
    assert len(engine.step().parts) == 4, "what runs goes on"
    engine.batch.limit(6, 16)
    engine.step()
    assert engine.batch.running == 6
    engine.batch.limit(1, 1)
    engine.run(64)
    assert all(len(answer) == 8 for answer in engine.answers.values())


def test_a_request_that_waits_with_more_choices_than_places_runs_alone() -> None:
    engine = new_engine(64, max_sequences=4, token_budget=16)
    engine.add("first", [1], 4)
    engine.add("choices", [2], 4, choices=4)
    engine.batch.limit(2, 16)
    engine.run(64)
    assert all(len(answer) == 4 for answer in engine.answers.values())
