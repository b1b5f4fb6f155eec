"""What a request wants of the cluster, and its positions in queues."""

from math import inf

import pytest

from triptych.domain.queue_position import QueuePosition
from triptych.domain.slo import Expected, Isolated
from triptych.machine.router.attempts import TextAttempts
from triptych.machine.router.request_events import Prepared
from triptych.machine.router.request_items import RequestItems
from triptych.machine.router.request_wants import RequestWants

ARRIVED_S, LIMIT_S = 10.0, 2.0


def wants(isolated: Isolated | None = None, *, begun: bool = False) -> RequestWants:
    made = RequestWants(3, priority=1, arrived_s=ARRIVED_S, deadline_s=60.0)
    made.prepared(Prepared((), 50, 16, Expected(ttft_limit_s=LIMIT_S, isolated=isolated)))
    made.begun = begun
    return made


def queue_positions(made: RequestWants) -> tuple[QueuePosition, QueuePosition]:
    """Where it waits for encoders, and for a text instance."""
    encoders = made.encoders(RequestItems(), (), "test", wait=True, again=False, suspect=False)
    return encoders.queue_position, made.text_instance(RequestItems(), TextAttempts(3), "test").queue_position


def test_it_is_due_by_its_objective_in_every_queue() -> None:
    for queue_position in queue_positions(wants()):
        assert (queue_position.priority, queue_position.due_s) == (1, ARRIVED_S + LIMIT_S)


def test_its_last_positions_are_kept() -> None:
    made = wants()
    assert queue_positions(made) == (made.encode_queue_position, made.text_queue_position)


def test_it_is_lost_earlier_while_its_items_are_still_to_be_encoded() -> None:
    encode, text = queue_positions(wants(Isolated(prepare_s=0.0, encode_s=0.5, prefill_s=0.25, tbt_s=0.01)))
    assert text.lost_s - encode.lost_s == pytest.approx(0.5)


def test_what_has_begun_is_never_too_late() -> None:
    assert all(queue_position.lost_s < inf for queue_position in queue_positions(wants()))
    assert all(queue_position.lost_s == inf for queue_position in queue_positions(wants(begun=True)))
