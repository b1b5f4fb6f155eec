"""Attempts at text instances: which failures allow another one, and which error the client gets."""

from dataclasses import replace

import pytest

from triptych.domain.embedding import Ticket
from triptych.domain.kv_segment import KvPlacement, SealedSegment
from triptych.errors import (
    EngineFailure,
    InstanceLost,
    InvalidRequest,
    LeaseLost,
    Overloaded,
    StageClosed,
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.machine.router.attempts import MOST_EXCUSED, Ending, TextAttempts
from triptych.machine.router.request_events import Abort, AnswerTransferred, AttemptKind
from triptych.machine.router.shared_events import Grant, LeasesTaken, Release


def send(attempts: TextAttempts, credit: int = 7, name: str = "t1") -> None:
    grant = Grant(credit, None, name, f"text-{name[1:]}")
    attempts.begin(AttemptKind.WHOLE, grant, 0.0)


def sent(most: int = 3) -> TextAttempts:
    attempts = TextAttempts(most)
    send(attempts)
    return attempts


@pytest.mark.parametrize(
    ("error", "again", "avoided", "told"),
    [
        (Unavailable("draining"), True, {"t1"}, InstanceLost),
        (InstanceLost("gone"), True, {"t1"}, InstanceLost),
        (Overloaded("full"), True, {"t1"}, Overloaded),
        (TransferFailed("broken"), True, set(), TransferFailed),
        (LeaseLost("over"), True, set(), LeaseLost),
        (EngineFailure("failed"), True, {"t1"}, EngineFailure),
        (InvalidRequest("bad"), False, {"t1"}, InvalidRequest),
    ],
)
def test_the_error_decides_whether_another_instance_is_tried(
    error: TriptychError, again: bool, avoided: set[str], told: type[TriptychError]
) -> None:
    attempts = sent()
    assert attempts.has(7)
    assert attempts.fail(error, 1.0) is again
    assert not attempts.has(7)
    assert attempts.avoid == avoided
    assert type(attempts.error) is told


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (Unavailable("shutting down"), False),
        (InstanceLost("ended"), False),
        (TransferFailed("broken"), True),
        (EngineFailure("failed"), True),
        (Overloaded("full"), True),
    ],
)
def test_an_attempt_whose_instance_drains_does_not_count(error: TriptychError, counts: bool) -> None:
    attempts = sent()
    assert attempts.fail(error, 1.0, drains=True)
    assert attempts.counted == counts
    assert counts or not attempts.avoid, "the instance may be back"


def test_drains_do_not_keep_a_request_alive_for_ever() -> None:
    attempts = TextAttempts(2)
    for _ in range(MOST_EXCUSED + 1):
        send(attempts, 7, "t1")
        assert attempts.fail(InstanceLost("ended"), 1.0, drains=True)
    send(attempts, 7, "t1")
    assert not attempts.fail(InstanceLost("ended"), 1.0, drains=True)


def test_a_lost_instance_is_named() -> None:
    attempts = sent()
    attempts.fail(Unavailable("10.0.0.1:80 refuses"), 1.0)
    assert attempts.error is not None
    assert attempts.error.message == "text instance text-1 was lost while it worked on the request"


def test_attempts_are_bounded_except_after_leases_expired_in_a_queue() -> None:
    attempts = sent(most=2)
    attempts.end(Ending.EXPIRED, 1.0, TransferFailed("over"))
    assert (len(attempts.sent), attempts.counted) == (1, 0)
    send(attempts, 8, "t2")
    assert attempts.fail(InstanceLost("gone"), 1.0)
    send(attempts, 9, "t1")
    assert not attempts.fail(InstanceLost("gone"), 1.0)


def test_one_engine_failure_is_retried() -> None:
    attempts = sent()
    assert attempts.fail(EngineFailure("failed"), 1.0)
    send(attempts, 8, "t2")
    assert not attempts.fail(EngineFailure("failed"), 1.0)


def test_a_stage_that_has_just_closed_is_no_attempt_and_its_instance_is_avoided() -> None:
    attempts = sent(most=1)
    assert attempts.fail(StageClosed("switched"), 1.0)
    assert (attempts.counted, attempts.avoid) == (0, frozenset({"t1"}))
    assert type(attempts.error) is StageClosed
    for _ in range(MOST_EXCUSED - 1):
        send(attempts, 7, "t1")
        assert attempts.fail(StageClosed("switched"), 1.0)
    send(attempts, 7, "t1")
    assert not attempts.fail(StageClosed("switched"), 1.0), "but not for ever"


def test_where_no_other_instance_is_usable_all_are_allowed_again() -> None:
    attempts = sent()
    attempts.fail(InstanceLost("gone"), 1.0)
    attempts.forgive()
    assert attempts.avoid == frozenset()
    send(attempts, 8, "t2")
    attempts.fail(InstanceLost("gone"), 2.0)
    assert attempts.avoid == {"t2"}


def test_an_instance_that_failed_an_early_prefill_is_avoided_until_no_other_is_usable() -> None:
    attempts = TextAttempts(3)
    attempts.kept = Grant(7, None, "t1", "text-1")
    attempts.begin(AttemptKind.EARLY_PREFILL, attempts.kept, 0.0, 9)
    assert not attempts.has(7)
    assert attempts.early_tokens == 9
    attempts.end(Ending.FAILED, 1.0, EngineFailure("failed"))
    assert attempts.avoid == {"t1"}
    assert (attempts.error, attempts.early_has_failed) == (None, True)
    attempts.forgive()
    assert attempts.avoid == frozenset()
    attempts.kept = Grant(8, None, "t1", "text-1")
    assert attempts.early_tokens == 0, "they were sent to another place"


def test_an_early_prefill_is_cancelled_when_its_place_is_given_up() -> None:
    attempts = TextAttempts(3)
    assert attempts.give_up_place(1.0, "no need") == []
    attempts.kept = Grant(7, None, "t1", "text-1")
    attempts.begin(AttemptKind.EARLY_PREFILL, attempts.kept, 0.0, 9)
    assert attempts.give_up_place(1.0, "no need") == [Abort(7, "no need"), Release("t1", 7, (), "no need")]
    attempts.validate()
    assert (attempts.early[0].ended, attempts.give_up_place(2.0, "again")) == (Ending.RELEASED, [])


def test_only_an_early_prefill_is_stopped_early() -> None:
    attempts = sent()
    attempts.kept = Grant(8, None, "t2", "text-2")
    assert attempts.stop_early(1.0, "all of it is sent") == []
    assert attempts.has(7)
    assert attempts.give_up_place(2.0, "again") == [], "it is kept no longer"


# --- answers that are handed over ------------------------------------------------------------------------------------

TICKET = Ticket(bytes(32), "text-1", 1, 0, 64, 1, 0, (), 10, b"", 5.0)


def hand_over(attempts: TextAttempts, *firsts: int, now_s: float = 1.0) -> list[object]:
    """The attempt that runs ends with segments of ten positions from these on."""
    segments = [
        SealedSegment(KvPlacement(first, replace(TICKET, lease_id=b"reader %d" % first)), b"router %d" % first)
        for first in firsts
    ]
    effects = attempts.transfer_kv(AnswerTransferred(7, "t1", tuple(segments), prefill_s=0.25), now_s)
    attempts.validate()
    return list(effects)


def test_segments_are_held_until_they_are_released_once() -> None:
    attempts = sent()
    leases = (b"router 0", b"reader 0", b"router 10", b"reader 10")
    assert hand_over(attempts, 0, 10) == [LeasesTaken("t1", leases)]
    holder = attempts.kv_transferred
    assert holder is not None
    assert (holder.ended, holder.prefill_s, holder.covered_tokens) == (Ending.KV_TRANSFERRED, 0.25, 20)
    assert attempts.segment_leases is holder.leases
    assert [(segment.first, segment.ticket.address) for segment in attempts.send_segments()] == [(0, "t1"), (10, "t1")]
    assert holder.leases is not None
    assert holder.leases.is_sent
    assert attempts.release_segments("over") == [Release("t1", None, leases, "over")]
    assert (attempts.kv_transferred, attempts.segment_leases, holder.kv_segments) == (None, None, ())
    assert (attempts.send_segments(), attempts.release_segments("over"), holder.release("over")) == ((), [], [])


def test_new_segments_are_held_in_place_of_earlier_ones_unless_there_are_none() -> None:
    attempts = sent()
    hand_over(attempts, 0)
    first = attempts.kv_transferred
    send(attempts, 8)
    assert hand_over(attempts) == []
    assert attempts.kv_transferred is first
    send(attempts, 9)
    released, taken = hand_over(attempts, 0, 10)
    assert isinstance(released, Release)
    assert released.lease_ids == (b"router 0", b"reader 0")
    assert isinstance(taken, LeasesTaken)
    assert attempts.kv_transferred is attempts.sent[-1]


def test_an_attempt_that_hands_over_or_is_left_is_one_with_the_next() -> None:
    attempts = sent()
    assert attempts.shown == 1
    hand_over(attempts, 0)
    assert attempts.shown == 1
    send(attempts, 8, "t2")
    assert attempts.shown == 1
    attempts.end(Ending.MOVED, 2.0)
    assert (attempts.shown, attempts.moves) == (1, 1)
    send(attempts, 9, "t3")
    attempts.fail(Overloaded("full"), 3.0)
    assert attempts.shown == 1
    send(attempts, 10, "t1")
    assert attempts.shown == 2


def test_an_attempt_computes_the_prompt_only_if_its_place_was_granted_so() -> None:
    attempts, handed = TextAttempts(3), Grant(7, None, "t1", "text-1", transfers_kv=True)
    found = [attempts.transfers_kv]
    for kind, grant in (
        (AttemptKind.EARLY_PREFILL, handed),
        (AttemptKind.PREFILL, handed),
        (AttemptKind.WHOLE, Grant(8, None, "t1", "text-1")),
    ):
        attempts.begin(kind, grant, 0.0)
        found.append(attempts.transfers_kv)
        attempts.end(Ending.RELEASED, 1.0)
    assert found == [False, False, True, False]
