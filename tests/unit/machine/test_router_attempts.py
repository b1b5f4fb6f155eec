import pytest

from triptych.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    InstanceLost,
    InvalidRequest,
    Overloaded,
    TriptychError,
    Unavailable,
)
from triptych.machine.router_attempts import MOST_BREAKS, MOST_LOST, RESTART_S, RETURN_S, Next, RouterAttempts

LOST = InstanceLost("the connection broke")
REPORTED = InstanceLost("a text instance was lost")
REPORTED.sent_by_peer = True


def failed(
    attempts: RouterAttempts, error: TriptychError, at_s: float = 0.0, *, address: str = "a", refused: bool = False
) -> Next:
    return attempts.failed(address, error, at_s, refused=refused, may_repeat=True)


@pytest.mark.parametrize(
    ("error", "refused", "follows"),
    [
        (Unavailable("draining"), False, Next.OTHER),
        (LOST, True, Next.OTHER),
        (LOST, False, Next.ANY),
        (REPORTED, False, Next.FAIL),
        (Overloaded("full"), False, Next.FAIL),
        (InvalidRequest("no"), False, Next.FAIL),
        (EngineFailure("x"), False, Next.FAIL),
        (Cancelled("the client is closed"), False, Next.FAIL),
    ],
)
def test_before_any_output(error: TriptychError, refused: bool, follows: Next) -> None:
    attempts = RouterAttempts(60.0)
    assert failed(attempts, error, refused=refused) is follows
    assert attempts.tried == {"a"}
    assert (attempts.error is LOST) is (follows is Next.ANY)


@pytest.mark.parametrize("order", [1, -1])
def test_where_one_router_ends_and_another_is_not_there_yet_both_are_asked_again(order: int) -> None:
    attempts, draining = RouterAttempts(60.0), Unavailable("draining")
    follows = [
        failed(attempts, error, 5.0, address=address, refused=error is LOST)
        for address, error in (("a", draining), ("b", LOST))[::order]
    ]
    assert follows == [Next.OTHER, Next.ANY]
    assert (attempts.error, attempts.tried) == (draining, {"a", "b"})
    assert attempts.pause_s(5.0) == pytest.approx(0.1)
    assert failed(attempts, draining, 5.0 + RESTART_S) is Next.ANY
    assert attempts.pause_s(5.0 + RESTART_S) is None


def test_where_none_of_several_is_reached_they_are_asked_again() -> None:
    """One was killed just now; the other, which was killed before it, is back and not connected yet."""
    attempts = RouterAttempts(60.0)
    assert [failed(attempts, LOST, 5.0, address=address, refused=True) for address in "ab"] == [Next.OTHER] * 2
    assert attempts.all_tried(LOST, 5.0) is Next.ANY
    assert (attempts.error, attempts.tried) == (LOST, {"a", "b"})
    assert attempts.pause_s(5.0) == pytest.approx(0.1)
    assert failed(attempts, LOST, 5.1, refused=True) is Next.ANY
    assert attempts.pause_s(5.0 + RESTART_S) is None


@pytest.mark.parametrize(("addresses", "error"), [("a", LOST), ("ab", Unavailable("no text instance"))])
def test_an_only_router_that_is_not_reached_and_several_that_refuse_are_not_asked_again(
    addresses: str, error: Unavailable
) -> None:
    attempts = RouterAttempts(60.0)
    for address in addresses:
        assert failed(attempts, error, address=address, refused=error is LOST) is Next.OTHER
    assert attempts.all_tried(error, 0.0) is Next.FAIL


@pytest.mark.parametrize(
    ("error", "follows"),
    [(LOST, Next.ANY), (REPORTED, Next.FAIL), (Unavailable("x"), Next.FAIL), (Overloaded("x"), Next.FAIL)],
)
@pytest.mark.parametrize("refused", [False, True])
def test_after_output_only_a_lost_router_is_replaced(error: TriptychError, follows: Next, refused: bool) -> None:
    attempts = RouterAttempts(60.0)
    attempts.progressed()
    assert failed(attempts, error, refused=refused) is follows


def test_what_cannot_be_had_elsewhere_fails() -> None:
    attempts = RouterAttempts(60.0)
    assert attempts.failed("a", LOST, 0.0, refused=False, may_repeat=False) is Next.FAIL


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (LOST, Next.ANY),
        (Unavailable("no text instance"), Next.ANY),
        (REPORTED, Next.FAIL),
        (Overloaded("full"), Next.ANY),
        (InvalidRequest("it is running already", param="request_id"), Next.ANY),
        (InvalidRequest("no", param="continued"), Next.FAIL),
        (DeadlineExceeded("late"), Next.FAIL),
    ],
)
def test_while_it_looks_for_a_router_refusals_are_asked_again(error: TriptychError, follows: Next) -> None:
    attempts = RouterAttempts(60.0)
    failed(attempts, LOST)
    assert failed(attempts, error, address="b", refused=True) is follows
    assert (attempts.tried, attempts.error) == ({"a", "b"}, LOST)


@pytest.mark.parametrize(("deadline_s", "until_s"), [(60.0, 5 + RETURN_S), (7.0, 7.0)])
def test_it_looks_for_a_router_with_growing_pauses_and_for_a_time(deadline_s: float, until_s: float) -> None:
    attempts, now_s, pauses = RouterAttempts(deadline_s), 5.0, []
    failed(attempts, LOST, now_s)
    while (pause_s := attempts.pause_s(now_s)) is not None:
        assert not attempts.tried, "all of them again"
        pauses.append(pause_s)
        now_s += pause_s
        failed(attempts, LOST, now_s, refused=True)
    assert now_s == pytest.approx(until_s)
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.4, 0.5])
    assert max(pauses) == 0.5
    assert attempts.left_s(100.0) == 0


def lose(attempts: RouterAttempts, *, outputs: bool) -> Next:
    """A router, before or after it has sent some of the answer."""
    if outputs:
        attempts.progressed()
        assert attempts.error is None
    return failed(attempts, LOST)


def test_an_answer_that_gets_on_at_each_router_survives_more_of_them_than_one_that_does_not() -> None:
    stuck, going = RouterAttempts(60.0), RouterAttempts(60.0)
    assert [lose(stuck, outputs=False) for _ in range(MOST_BREAKS)] == [Next.ANY] * MOST_BREAKS
    assert lose(stuck, outputs=False) is Next.FAIL
    assert [lose(going, outputs=True) for _ in range(MOST_LOST)] == [Next.ANY] * MOST_LOST
    assert lose(going, outputs=True) is Next.FAIL


def test_routers_that_sent_nothing_are_counted_anew_once_one_has() -> None:
    attempts = RouterAttempts(60.0)
    routers = [False] * MOST_BREAKS + [True] + [False] * MOST_BREAKS
    assert {lose(attempts, outputs=outputs) for outputs in routers} == {Next.ANY}
    assert lose(attempts, outputs=False) is Next.FAIL
