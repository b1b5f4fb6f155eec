"""The batch of engines that sleep: many steps of decoding at once come to the same as one after the other."""

from random import Random
from typing import Any

import pytest

from triptych.domain.queue_position import QueuePosition
from triptych.machine.text.counted_batch import CountedBatch, CountedSequence


def batch(kv_tokens: int = 400, max_sequences: int = 6, token_budget: int = 48) -> CountedBatch[CountedSequence]:
    return CountedBatch(kv_tokens=kv_tokens, max_sequences=max_sequences, token_budget=token_budget)


def test_by_arrival_nothing_passes_what_came_before_in_its_priority() -> None:
    def order(*, by_arrival: bool) -> list[str]:
        running = CountedBatch[CountedSequence](kv_tokens=400, max_sequences=1, token_budget=48, by_arrival=by_arrival)
        running.add(sequence("late", tokens=1, place=3))
        running.add(sequence("urgent", tokens=1, place=1))
        running.add(sequence("first", tokens=1, place=2))
        running.reorder("first", QueuePosition(0, 0.0, 0))
        return [name for _ in range(3) for name in step(running)]

    assert order(by_arrival=True) == ["late", "urgent", "first"]
    assert order(by_arrival=False) == ["first", "urgent", "late"]


def sequence(name: str, prompt: int = 10, tokens: int = 5, place: int = 0, **more: Any) -> CountedSequence:
    position = QueuePosition(0, 0.0, place)
    return CountedSequence(
        request_id=name, prompt_tokens=prompt, limit=tokens, length=tokens, queue_position=position, **more
    )


def step(running: CountedBatch[CountedSequence]) -> list[str]:
    found = [answered.request_id for answered in running.end(running.begin())]
    running.validate()
    return found


def state(running: CountedBatch[CountedSequence]) -> tuple[object, ...]:
    return (
        running.pending_tokens,
        running.free_tokens,
        running.decoding(),
        list(running.waiting),
        [(name, known.computed, known.sent) for name, known in running.running.items()],
    )


@pytest.mark.parametrize("seed", range(20))
def test_many_steps_at_once_are_as_many_steps(seed: int) -> None:
    rng, other = Random(seed), Random(seed)
    stepwise, many = batch(), batch()
    for number in range(60):
        if rng.random() < 0.5:
            sizes = rng.randrange(1, 60), rng.randrange(1, 40)
            choices = tuple(range(rng.choice((1, 1, 2))))
            for running in (stepwise, many):
                running.add(sequence(str(number), *sizes, place=number, choices=choices))
        if rng.random() < 0.1 and stepwise.running:
            leaving = rng.choice(list(stepwise.running))
            for running in (stepwise, many):
                running.cancel(leaving)
        if steps := many.steady_steps():
            steps = other.randrange(1, steps + 1)
            ends = steps == many.steady_steps()
            many.advance(steps - ends)
            answered = [known.request_id for known in many.end(many.begin(prefill=False))] if ends else []
            for left in range(steps, 0, -1):
                assert stepwise.steady_steps() >= left, "nothing else may happen before"
                before = step(stepwise)
            assert not ends or answered == before
        else:
            assert step(many) == step(stepwise)
        many.validate()
        assert state(many) == state(stepwise)


def test_nothing_is_steady_while_a_prompt_can_be_computed() -> None:
    running = batch()
    running.add(sequence("first", tokens=10))
    assert running.steady_steps() == 0
    assert step(running) == ["first"]
    assert running.steady_steps() == 9
    running.add(sequence("second", place=1))
    assert running.steady_steps() == 0, "it starts with the next step"


def test_one_that_waits_for_memory_disturbs_nobody() -> None:
    running = batch(kv_tokens=20)
    running.add(sequence("first", prompt=10, tokens=8))
    assert step(running) == ["first"]
    running.add(sequence("second", prompt=10, tokens=8, place=1))
    assert running.steady_steps() == 7
    running.advance(6)
    assert step(running) == ["first"]
    assert step(running) == ["second"]


def test_a_paused_sequence_keeps_its_memory_and_gets_no_tokens() -> None:
    running = batch()
    running.add(sequence("handed over", pauses=True))
    assert step(running) == ["handed over"]
    assert (running.steady_steps(), running.can_step, running.pending_tokens) == (0, False, 0)
    assert running.free_tokens == 400 - 11
    running.cancel("handed over")
    assert running.free_tokens == 400


def test_keys_and_values_that_arrive_are_not_computed() -> None:
    running = batch()
    running.add(sequence("arrives", prompt=20, begun=1, arriving=20))
    assert step(running) == []
    assert list(running.awaiting) == ["arrives"]
    running.arrive(running.running["arrives"], 20)
    computed = running.begin()
    assert computed.prompts == ((1, 20),)
    assert [known.request_id for known in running.end(computed)] == ["arrives"]


def test_limits_of_steps_change_between_two_of_them_and_what_runs_goes_on() -> None:
    running = batch(max_sequences=4)
    for number in range(6):
        running.add(sequence(f"r{number}", prompt=1, tokens=6))
    step(running)
    assert len(running.running) == 4
    running.limit(1, 8)
    assert len(step(running)) == 4
    running.limit(6, 48)
    step(running)
    assert len(running.running) == 6
    running.limit(1, 1)
    while running.has_work:
        assert step(running), "no sequence makes progress"
