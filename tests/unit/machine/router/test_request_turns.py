from math import inf

import pytest

from triptych.domain.slo import Expected, Isolated
from triptych.machine.router.request_turns import RequestTurns
from triptych.policy.queueing import by_slo

ARRIVED_S, LIMIT_S = 10.0, 2.0


def turns(isolated: Isolated | None = None) -> RequestTurns:
    made = RequestTurns(by_slo, number=3, priority=1, arrived_s=ARRIVED_S, deadline_s=60.0)
    made.expected = Expected(ttft_limit_s=LIMIT_S, isolated=isolated)
    return made


def test_it_is_due_by_its_objective_in_every_queue() -> None:
    made = turns()
    for turn in (made.wants_encoders(begun=False), made.wants_text(begun=False)):
        assert (turn.priority, turn.due_s) == (1, ARRIVED_S + LIMIT_S)


def test_its_last_positions_are_kept() -> None:
    made = turns()
    assert made.wants_encoders(begun=False) == made.encode
    assert made.wants_text(begun=False) == made.text


def test_it_is_lost_earlier_while_its_items_are_still_to_be_encoded() -> None:
    made = turns(Isolated(prepare_s=0.0, encode_s=0.5, prefill_s=0.25, tbt_s=0.01))
    encode, text = made.wants_encoders(begun=False), made.wants_text(begun=False)
    assert text.lost_s - encode.lost_s == pytest.approx(0.5)


def test_what_has_begun_is_never_too_late() -> None:
    made = turns()
    assert made.wants_encoders(begun=False).lost_s < inf
    assert made.wants_encoders(begun=True).lost_s == inf
    assert made.wants_text(begun=True).lost_s == inf
