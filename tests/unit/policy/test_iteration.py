"""Iterations and the stages that share them: prompts before items, within bounded waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.queue_position import AGEING_S, QueuePosition
from triptych.policy.iteration import Iteration, by_queue_position, encode_first, plan_iteration
from triptych.policy.queueing import by_slo

PREFILL, ENCODE = Iteration(prefill=True, encode=False), Iteration(prefill=False, encode=True)
PATIENCE_S = 0.5


def plan(*, prefill_ready: bool, waited_s: float | None, held_back: bool = False) -> Iteration:
    return plan_iteration(
        prefill_ready=prefill_ready, encode_waited_s=waited_s, patience_s=PATIENCE_S, held_back=held_back
    )


@pytest.mark.parametrize(
    ("prefill_ready", "waited_s", "held_back", "expected"),
    [
        (True, None, False, PREFILL),
        (False, None, False, PREFILL),  # no item waits: any prompt may be computed
        (False, 0.0, False, ENCODE),
        (False, 9.0, True, ENCODE),
        (True, 0.0, False, PREFILL),
        (True, 0.49, False, PREFILL),
        (True, 0.5, False, ENCODE),
        (True, 9.0, True, PREFILL),
    ],
)
def test_prompts_go_before_items_until_the_patience_ends(
    prefill_ready: bool, waited_s: float | None, held_back: bool, expected: Iteration
) -> None:
    assert plan(prefill_ready=prefill_ready, waited_s=waited_s, held_back=held_back) == expected


@given(st.booleans(), st.none() | st.floats(0, 10), st.booleans())
def test_prompts_and_items_never_share_an_iteration_and_one_of_them_runs(
    prefill_ready: bool, waited_s: float | None, held_back: bool
) -> None:
    chosen = plan(prefill_ready=prefill_ready, waited_s=waited_s, held_back=held_back)
    assert chosen.prefill != chosen.encode
    assert not chosen.encode or waited_s is not None, "an encode without items"
    if prefill_ready and chosen.encode:
        assert waited_s is not None
        assert waited_s >= PATIENCE_S, "an item preceded prompts without having waited"
    if not prefill_ready and waited_s is not None:
        assert chosen.encode, "the device is idle while the item waits"


@given(
    st.lists(st.booleans(), min_size=200, max_size=200),
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.floats(0.01, 0.2),
)
def test_neither_stage_waits_longer_than_its_bound(
    prompts: list[bool], ready_at: list[int], iteration_s: float
) -> None:
    """Batches become ready in iterations ``ready_at``; prompts are ready as ``prompts`` says, and always afterwards."""
    pending = sorted(ready_at)
    held_back, in_a_row = False, 0
    order: list[tuple[int, int]] = []
    """When each batch was ready, and when it ran."""
    for number in range(1000):
        waits = bool(pending) and pending[0] <= number
        waited_s = (number - pending[0]) * iteration_s if waits else None
        prefill_ready = prompts[number] if number < len(prompts) else True
        chosen = plan(prefill_ready=prefill_ready, waited_s=waited_s, held_back=held_back)
        held_back = chosen.encode and prefill_ready
        in_a_row = in_a_row + 1 if held_back else 0
        assert in_a_row <= 1, "prompts are delayed twice in a row"
        if chosen.encode:
            order.append((pending.pop(0), number))
    assert not pending
    for before, (ready, ran) in enumerate(order, 1):
        assert (ran - ready) * iteration_s <= PATIENCE_S + 2 * before * iteration_s


# --- where items go first ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encode_ready", "held_back_s", "expected"),
    [
        (False, None, PREFILL),
        (False, 9.0, PREFILL),
        (True, None, ENCODE),
        (True, 0.49, ENCODE),
        (True, 0.5, PREFILL),
    ],
)
def test_a_lender_encodes_first_until_a_prompt_has_been_held_back_for_long(
    encode_ready: bool, held_back_s: float | None, expected: Iteration
) -> None:
    assert encode_first(encode_ready=encode_ready, held_back_s=held_back_s, patience_s=PATIENCE_S) == expected


# --- where nothing is decoded -------------------------------------------------------------------------------------------


def test_what_is_due_first_goes_first() -> None:
    early, late = QueuePosition(0, 1.0, 7), QueuePosition(0, 2.0, 3)
    assert by_queue_position(prompt=early, item=late) == PREFILL
    assert by_queue_position(prompt=late, item=early) == ENCODE
    assert by_queue_position(prompt=QueuePosition(0, 1.0, 0), item=QueuePosition(-1, 9.0, 1)) == ENCODE, (
        "priority before all else"
    )
    assert by_queue_position(prompt=None, item=late) == ENCODE
    assert by_queue_position(prompt=late, item=None) == by_queue_position(prompt=None, item=None) == PREFILL


@given(st.floats(0, 600), st.floats(0.1, 600))
def test_an_item_passes_prompts_that_came_long_after_it(arrived_s: float, objective_s: float) -> None:
    item = by_slo(priority=0, deadline_s=2000, arrived_s=arrived_s, arrival=0, due_s=arrived_s + objective_s)
    later_s = arrived_s + AGEING_S + 1
    prompt = by_slo(priority=0, deadline_s=2000, arrived_s=later_s, arrival=1, due_s=later_s)
    assert by_queue_position(prompt=prompt, item=item) == ENCODE
