"""Sequences that wait for blocks, their order and their sums."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.queue_position import QueuePosition
from triptych.machine.text.sequence import Sequence
from triptych.machine.text.waiting_line import WaitingLine


def waits(request_id: str, due_s: float, *, arrival: int = 0, choice: int = 0, followers: int = 0) -> Sequence:
    """A prompt of 10 tokens with an answer of 5, for each of its choices."""

    def sequence(number: int) -> Sequence:
        queue_position = QueuePosition(0, due_s, arrival)
        return Sequence(
            request_id=request_id,
            choice=number,
            token_ids=[1] * 10,
            prompt_tokens=10,
            max_tokens=5,
            queue_position=queue_position,
            arrival=arrival,
        )

    leader = sequence(choice)
    leader.followers = [sequence(choice + 1 + number) for number in range(followers)]
    return leader


def test_they_wait_in_the_order_of_their_queue_positions() -> None:
    line: WaitingLine[Sequence] = WaitingLine()
    late, soon, again = waits("late", 9.0), waits("soon", 1.0), waits("late", 5.0, arrival=1, choice=1)
    for sequence in (late, soon, again):
        line.add(sequence)
    assert list(line) == [soon, again, late]
    assert line.requests == {"late", "soon"}
    assert (line.of("late"), list(line.of("unknown"))) == ((late, again), [])
    line.remove(late)
    assert (list(line), late in line, again in line) == ([soon, again], False, True)
    assert line.requests == {"late", "soon"}
    line.remove(again)
    assert line.requests == {"soon"}
    line.validate()


def test_another_turn_is_that_of_the_followers_too() -> None:
    line: WaitingLine[Sequence] = WaitingLine()
    first, second = waits("first", 1.0, followers=2), waits("second", 2.0)
    line.add(first)
    line.add(second)
    line.reorder(first, QueuePosition(0, 3.0, 0))
    assert list(line) == [second, first]
    assert {sequence.queue_position.due_s for sequence in (first, *first.followers)} == {3.0}
    line.validate()


def test_pending_tokens_are_counted_again_when_they_may_have_changed() -> None:
    line: WaitingLine[Sequence] = WaitingLine()
    leader = waits("one", 1.0, followers=2)
    line.add(leader)
    assert line.pending_tokens == 10 + 3 * 5
    leader.followers.pop()
    with pytest.raises(AssertionError, match="do not add up"):
        line.validate()
    line.recount(leader)
    assert line.pending_tokens == 10 + 2 * 5
    leader.paused = True
    line.recount(leader)
    assert line.pending_tokens == 0
    line.validate()
    line.remove(leader)
    assert (line.pending_tokens, list(line)) == (0, [])


@given(rng=st.randoms(use_true_random=False))
def test_nothing_is_lost_whatever_comes_and_goes(rng: random.Random) -> None:
    line: WaitingLine[Sequence] = WaitingLine()
    there: list[Sequence] = []
    for arrival in range(40):
        if there and rng.random() < 0.4:
            line.remove(there.pop(rng.randrange(len(there))))
        elif there and rng.random() < 0.3:
            line.reorder(rng.choice(there), QueuePosition(0, rng.uniform(0, 9), arrival))
        else:
            waiting = waits(f"{rng.randrange(5)}", rng.uniform(0, 9), arrival=arrival, followers=rng.randrange(3))
            there.append(waiting)
            line.add(waiting)
        line.validate()
        assert list(line) == sorted(there, key=lambda sequence: sequence.order)
