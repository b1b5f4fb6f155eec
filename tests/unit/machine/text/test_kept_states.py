"""States kept for prefixes, in a batch whose sequences have state outside of blocks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.machine.text.test_running_batch import (
    BORDER,
    STATE,
    Engine,
    lengths,
    new_engine,
    new_stateful_engine,
)


def passes(engine: Engine, name: str, prompt: list[int], salt: bytes = b"") -> list[tuple[int, int]]:
    """First position and length of each pass over the prompt."""
    done = len(engine.steps)
    engine.add(name, prompt, 1, salt=salt)
    engine.run(10)
    return [(part.first, part.count) for step in engine.steps[done:] for part in step.parts]


def test_a_prompt_goes_on_from_the_state_at_the_last_border_that_has_one() -> None:
    engine, prompt = new_stateful_engine(), list(range(20))
    assert passes(engine, "new", prompt) == [(0, 16), (16, 4)]
    assert passes(engine, "again", prompt) == [(16, 4)]
    assert passes(engine, "longer", [*prompt, *range(30)]) == [(16, 32), (48, 2)]
    assert passes(engine, "elsewhere", prompt, salt=b"other") == [(0, 16), (16, 4)]
    assert (engine.batch.prefix_queries_tokens, engine.batch.prefix_hits_tokens) == (110, 32)


def test_a_state_is_kept_where_a_prompt_leaves_an_earlier_one() -> None:
    engine, shared = new_stateful_engine(), list(range(12))
    assert passes(engine, "first", shared + [1] * 14) == [(0, 24), (24, 2)]
    assert passes(engine, "second", shared + [2] * 14) == [(0, 8), (8, 16), (24, 2)]
    assert passes(engine, "third", shared + [3] * 14) == [(8, 16), (24, 2)]


def test_a_prompt_within_its_first_border_takes_one_pass_and_keeps_nothing() -> None:
    engine = new_stateful_engine()
    for name in ("new", "again"):
        assert passes(engine, name, [1] * BORDER) == [(0, BORDER)]


def test_a_short_prompt_takes_a_second_pass_only_once_another_has_shared_its_border() -> None:
    engine, short, long = new_stateful_engine(), [1] * (2 * BORDER), [2] * (2 * BORDER + 1)
    assert passes(engine, "new", short) == [(0, 2 * BORDER)]
    assert passes(engine, "again", short) == [(0, BORDER), (BORDER, BORDER)]
    assert passes(engine, "third", short) == [(BORDER, BORDER)]
    assert passes(engine, "long", long) == [(0, 2 * BORDER), (2 * BORDER, 1)]


def test_kept_states_give_way_to_each_other_and_to_sequences() -> None:
    engine = new_stateful_engine(blocks=16, kept_nbytes=2 * (STATE + 16))
    prompts = [[kind] * 20 for kind in range(3)]
    assert len(passes(engine, "large", [9] * 58)) == 1, "a state that never fits is not kept"
    for kind, prompt in enumerate(prompts[:2]):
        passes(engine, str(kind), prompt)
    assert engine.batch.kept is not None
    assert engine.batch.kept.held_nbytes == STATE + 16, "a sequence needs the memory of another state"
    assert passes(engine, "last", prompts[1]) == [(16, 4)]
    assert passes(engine, "evicted", prompts[0]) == [(0, 16), (16, 4)]
    engine.add("many", [5] * 4, 50)
    engine.run(100)
    assert engine.batch.kept.held_nbytes == 0


def test_states_of_a_failed_sequence_are_not_reused() -> None:
    engine = new_stateful_engine()
    engine.add("a", [0] * 20, 4)
    engine.step()
    engine.batch.remove("a", is_sound=False)
    assert passes(engine, "b", [0] * 20) == [(0, 16), (16, 4)]


def test_a_preempted_sequence_goes_on_from_a_kept_state() -> None:
    """If memory for it is left until then: both grow in the same step."""
    engine = new_stateful_engine(blocks=17, kept_nbytes=1 << 12)
    engine.add("old", [0] * 11, 25)
    engine.add("young", [1] * 20, 20)
    engine.run(100)
    preempted = next(number for number, step in enumerate(engine.steps) if step.preempted)
    again = next(
        part for step in engine.steps[preempted:] for part in step.parts if part.sequence.request_id == "young"
    )
    assert again.first == 16


def test_a_prompt_whose_transfer_is_lost_goes_on_from_a_kept_state() -> None:
    engine, prompt = new_stateful_engine(), [0] * 26
    passes(engine, "first", prompt[:20])
    engine.add("lost", prompt, 1, arriving=26)
    engine.step()
    engine.batch.end_arrival("lost")
    engine.run(10)
    assert [(part.first, part.count) for step in engine.steps[-2:] for part in step.parts] == [(16, 8), (24, 2)]
    assert (engine.batch.prefix_queries_tokens, engine.batch.prefix_hits_tokens) == (46, 16)
    assert passes(engine, "again", prompt) == [(24, 2)], "its own state is kept"


def test_a_choice_that_succeeds_its_leader_goes_on_from_a_kept_state() -> None:
    engine = new_stateful_engine(token_budget=20)
    passes(engine, "first", [0] * 20)
    engine.add("large", [1] * 24, 1)
    engine.add("choices", [0] * 26, 1, choices=2)
    engine.step()
    engine.batch.remove("choices", 0)
    engine.run(10)
    parts = [part for step in engine.steps for part in step.parts if part.sequence.sequence_id == "choices/1"]
    assert [(part.first, part.count) for part in parts] == [(16, 8), (24, 2)]


@settings(max_examples=examples(60), deadline=None)
@given(
    requests=st.lists(
        st.tuples(lengths, st.integers(1, 16), st.integers(1, 2), st.integers(0, 2), st.integers(0, 30)),
        min_size=1,
        max_size=9,
    ),
    token_budget=st.integers(4, 80),
    blocks=st.integers(40, 56),
    kept_nbytes=st.integers(1, 600),
)
def test_answers_after_kept_states_are_right(
    requests: list[tuple[int, int, int, int, int]], token_budget: int, blocks: int, kept_nbytes: int
) -> None:
    engine, alone = new_stateful_engine(blocks, kept_nbytes=kept_nbytes, token_budget=token_budget), new_engine(64)
    for number, (prompt, answer, choices, kind, arriving) in enumerate(requests):
        ids = [kind] * min(prompt, 17) + list(range(max(0, prompt - 17)))
        engine.add(str(number), ids, answer, choices=choices, arriving=arriving if number % 3 == 0 else 0)
        alone.add(str(number), ids, answer, choices=choices, keyed=False)
        engine.step()
        alone.run(1000)
        if number % 2:
            engine.batch.end_arrival(str(number - 1))
    for number in range(len(requests)):
        engine.batch.end_arrival(str(number))
    engine.run(2000)
    assert engine.answers == alone.answers
    assert engine.batch.blocks.available == blocks
