"""Whose turn it is on a device that an encoder and a text engine share."""

import pytest

from triptych.domain.queue_position import FIRST_COME, QueuePosition
from triptych.machine.text.device_turns import DeviceTurns


def encodes(turns: DeviceTurns, now_s: float, since_s: float | None, *, prompt: bool, can_step: bool = True) -> bool:
    """Whether the next iteration encodes, where an item waits since ``since_s``."""
    first = FIRST_COME if prompt else None
    iteration = turns.next(now_s, prompt=first, can_step=can_step, item=None, item_waits_since_s=since_s)
    assert iteration.prefill is not iteration.encode
    return iteration.encode


def test_after_the_patience_items_and_prompts_alternate() -> None:
    turns = DeviceTurns(0.5)
    assert not encodes(turns, 10.0, None, prompt=True)
    assert not encodes(turns, 10.0, 9.6, prompt=True), "it has waited for 0.4 s"
    assert [encodes(turns, 10.2, 9.6, prompt=True) for _ in range(4)] == [True, False, True, False]
    assert all(encodes(turns, 10.2, 9.6, prompt=False) for _ in range(3))


@pytest.mark.parametrize(("share", "steps"), [(1.0, 0), (0.5, 5), (0.25, 14)])
def test_a_batch_is_followed_by_steps_for_as_long_as_its_share_asks(share: float, steps: int) -> None:
    turns = DeviceTurns(0.0, encode_share=share)
    turns.encoded(0.45)
    taken = 0
    while not encodes(turns, 1.0, 0.0, prompt=False):
        turns.stepped(0.1)
        taken += 1
    assert taken == steps
    turns.encoded(0.45)
    assert encodes(turns, 1.0, 0.0, prompt=False, can_step=False), "no text can be computed"


def test_where_nothing_is_decoded_the_stages_go_in_the_order_in_which_they_are_due() -> None:
    turns = DeviceTurns(0.5, by_queue_position=True)
    early, late = QueuePosition(0, 1.0, 1), QueuePosition(0, 2.0, 0)
    chosen = [
        turns.next(0.0, prompt=prompt, can_step=True, item=item, item_waits_since_s=0.0).encode
        for item, prompt in ((None, None), (late, None), (late, early), (early, late), (None, late))
    ]
    assert chosen == [False, True, False, True, False]


def test_items_go_first_in_an_encoder_that_lends_its_time_but_do_not_starve_prompts() -> None:
    turns = DeviceTurns(0.5, encode_first=True)
    assert not encodes(turns, 10.0, None, prompt=True)
    times_s = (10.0, 10.4, 10.6, 10.7, 11.1, 11.3)
    assert [encodes(turns, at_s, 10.0, prompt=True) for at_s in times_s] == [True, True, False, True, True, False]
    assert encodes(turns, 11.3, 10.0, prompt=False)
    assert not encodes(turns, 11.3, None, prompt=True)
