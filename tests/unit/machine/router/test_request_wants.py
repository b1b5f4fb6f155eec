"""What a request wants of the cluster, and its positions in queues."""

from math import inf

import pytest

from triptych.domain.embedding import Ticket
from triptych.domain.kv_segment import KvPlacement, SealedSegment
from triptych.domain.queue_position import QueuePosition
from triptych.domain.slo import Expected, Isolated
from triptych.domain.stage import Stage
from triptych.machine.router.attempts import TextAttempts
from triptych.machine.router.request_events import AnswerTransferred, AttemptKind, Prepared
from triptych.machine.router.request_items import RequestItems
from triptych.machine.router.request_wants import RequestWants
from triptych.machine.router.shared_events import Grant
from triptych.policy.fairness import UNSHARED, Share

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


def test_where_its_latencies_alone_are_unknown_it_may_begin_until_it_is_due() -> None:
    assert [queue_position.lost_s for queue_position in queue_positions(wants())] == [ARRIVED_S + LIMIT_S] * 2


def test_its_share_of_a_stage_is_taken_where_it_waits() -> None:
    stages: list[Stage] = []

    def share(stage: Stage) -> Share:
        stages.append(stage)
        return UNSHARED

    made = RequestWants(3, arrived_s=ARRIVED_S, deadline_s=60.0, share=share)
    queue_positions(made)
    early = made.text_instance(RequestItems(), TextAttempts(3), "test", early=True)
    assert stages == [Stage.ENCODE, Stage.PREFILL, Stage.ENCODE], "an early prefill waits for items"
    assert early.early


def test_an_answer_that_was_handed_over_asks_for_one_that_takes_its_keys_and_values() -> None:
    made, texts = wants(), TextAttempts(3)
    plain = made.text_instance(RequestItems(), texts, "test")
    assert (plain.sender, plain.covered_tokens, plain.holders) == ("", 0, {})
    texts.begin(AttemptKind.PREFILL, Grant(7, None, "t1", "text-1"), 0.0)
    ticket = Ticket(bytes(32), "text-1", 1, 0, 640, 1, 0, (), 10, b"reader", 5.0)
    segments = tuple(SealedSegment(KvPlacement(first, ticket), b"router") for first in (0, 10))
    texts.transfer_kv(AnswerTransferred(7, "t1", segments), 1.0)
    handed = made.text_instance(RequestItems(), texts, "test")
    assert (handed.sender, handed.covered_tokens, handed.holders) == ("t1", 20, {"text-1": 2 * 640})
    texts.release_segments("lost")
    assert made.text_instance(RequestItems(), texts, "test").sender == ""


def test_what_has_begun_is_never_too_late() -> None:
    assert all(queue_position.lost_s < inf for queue_position in queue_positions(wants()))
    assert all(queue_position.lost_s == inf for queue_position in queue_positions(wants(begun=True)))
