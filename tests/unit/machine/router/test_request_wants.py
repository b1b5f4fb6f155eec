"""What a request wants of the cluster, and its positions in queues."""

from math import inf

import pytest

from triptych.domain.slo import Expected, Isolated
from triptych.machine.router.attempts import TextAttempts
from triptych.machine.router.request_events import Prepared
from triptych.machine.router.request_items import RequestItems
from triptych.machine.router.request_wants import RequestWants
from triptych.policy.queueing import Turn

ARRIVED_S, LIMIT_S = 10.0, 2.0


def wants(isolated: Isolated | None = None, *, begun: bool = False) -> RequestWants:
    made = RequestWants(3, priority=1, arrived_s=ARRIVED_S, deadline_s=60.0)
    made.prepared(Prepared((), 50, 16, Expected(ttft_limit_s=LIMIT_S, isolated=isolated)))
    made.begun = begun
    return made


def turns(made: RequestWants) -> tuple[Turn, Turn]:
    """Where it waits for encoders, and for a text instance."""
    encoders = made.encoders(RequestItems(), (), "test", wait=True, again=False, suspect=False)
    return encoders.turn, made.text_instance(RequestItems(), TextAttempts(3), "test").turn


def test_it_is_due_by_its_objective_in_every_queue() -> None:
    for turn in turns(wants()):
        assert (turn.priority, turn.due_s) == (1, ARRIVED_S + LIMIT_S)


def test_its_last_positions_are_kept() -> None:
    made = wants()
    assert turns(made) == (made.encode_turn, made.text_turn)


def test_it_is_lost_earlier_while_its_items_are_still_to_be_encoded() -> None:
    encode, text = turns(wants(Isolated(prepare_s=0.0, encode_s=0.5, prefill_s=0.25, tbt_s=0.01)))
    assert text.lost_s - encode.lost_s == pytest.approx(0.5)


def test_what_has_begun_is_never_too_late() -> None:
    assert all(turn.lost_s < inf for turn in turns(wants()))
    assert all(turn.lost_s == inf for turn in turns(wants(begun=True)))
