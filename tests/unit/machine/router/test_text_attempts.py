"""Attempts at text instances: which failures allow another one, and which error the client gets."""

import pytest

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
from triptych.machine.router.shared_events import Grant
from triptych.machine.router.text_attempts import MOST_DRAINED, TextAttempts


def sent(most: int = 3) -> TextAttempts:
    attempts = TextAttempts(most)
    attempts.send(Grant(7, None, "t1", "text-1"))
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
    assert attempts.fail(error) is again
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
    assert attempts.fail(error, drains=True)
    assert attempts.counted == counts
    assert counts or not attempts.avoid, "the instance may be back"


def test_drains_do_not_keep_a_request_alive_for_ever() -> None:
    attempts = TextAttempts(2)
    for _ in range(MOST_DRAINED + 1):
        attempts.send(Grant(7, None, "t1", "text-1"))
        assert attempts.fail(InstanceLost("ended"), drains=True)
    attempts.send(Grant(7, None, "t1", "text-1"))
    assert not attempts.fail(InstanceLost("ended"), drains=True)


def test_a_lost_instance_is_named() -> None:
    attempts = sent()
    attempts.fail(Unavailable("10.0.0.1:80 refuses"))
    assert attempts.error is not None
    assert attempts.error.message == "text instance text-1 was lost while it worked on the request"


def test_attempts_are_bounded_except_after_leases_expired_in_a_queue() -> None:
    attempts = sent(most=2)
    attempts.expire(TransferFailed("over"))
    assert (attempts.sent, attempts.counted) == (1, 0)
    attempts.send(Grant(8, None, "t2", "text-2"))
    assert attempts.fail(InstanceLost("gone"))
    attempts.send(Grant(9, None, "t1", "text-1"))
    assert not attempts.fail(InstanceLost("gone"))


def test_one_engine_failure_is_retried() -> None:
    attempts = sent()
    assert attempts.fail(EngineFailure("failed"))
    attempts.send(Grant(8, None, "t2", "text-2"))
    assert not attempts.fail(EngineFailure("failed"))


def test_a_stage_that_has_just_closed_is_no_attempt_and_its_instance_is_avoided() -> None:
    attempts = sent(most=1)
    assert attempts.fail(StageClosed("switched"))
    assert (attempts.counted, attempts.avoid) == (0, frozenset({"t1"}))
    assert type(attempts.error) is StageClosed
    for _ in range(MOST_DRAINED - 1):
        attempts.send(Grant(7, None, "t1", "text-1"))
        assert attempts.fail(StageClosed("switched"))
    attempts.send(Grant(7, None, "t1", "text-1"))
    assert not attempts.fail(StageClosed("switched")), "but not for ever"
