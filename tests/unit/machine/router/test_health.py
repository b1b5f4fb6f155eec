import pytest

from triptych.machine.router.health import BackoffReason, Health


def backed_off(*reasons: BackoffReason, now_s: float = 0.0) -> Health:
    health = Health()
    for reason in reasons:
        health.back_off(reason, now_s, first_s=1.0, longest_s=5.0)
    return health


def test_a_backoff_is_due_after_failures_of_one_kind_in_a_row() -> None:
    health = Health()
    assert not health.failed(BackoffReason.CALLS, 3, 0.0)
    assert not health.failed(BackoffReason.EMBEDDINGS, 3, 0.0)
    assert not health.failed(BackoffReason.CALLS, 3, 0.0)
    assert not health.worked(BackoffReason.CALLS)
    assert not health.failed(BackoffReason.CALLS, 3, 0.0), "they start over"
    assert not health.failed(BackoffReason.EMBEDDINGS, 3, 0.0)
    assert health.failed(BackoffReason.EMBEDDINGS, 3, 0.0), "a call that works says nothing about the embeddings"
    assert health.failed(BackoffReason.ENGINE, 1, 0.0)


def test_after_a_backoff_it_is_on_probation_where_one_failure_is_enough() -> None:
    health = backed_off(BackoffReason.CALLS)
    assert health.in_backoff(0.9)
    assert not health.on_probation(0.9)
    assert not health.failed(BackoffReason.CALLS, 3, 0.9), "of the same incident"
    assert not health.in_backoff(1.0)
    assert health.on_probation(1.0)
    assert health.failed(BackoffReason.EMBEDDINGS, 3, 1.0)


def test_backoffs_in_a_row_grow() -> None:
    health = Health()
    lengths = [health.back_off(BackoffReason.ENGINE, 0.0, first_s=1.0, longest_s=5.0) for _ in range(4)]
    assert lengths == [1.0, 2.0, 4.0, 5.0]
    assert health.worked(BackoffReason.ENGINE)
    assert health.back_off(BackoffReason.ENGINE, 0.0, first_s=1.0, longest_s=5.0) == 1.0


@pytest.mark.parametrize("reason", BackoffReason)
def test_only_what_was_wrong_can_make_it_well(reason: BackoffReason) -> None:
    health = backed_off(reason)
    assert not health.worked(*(other for other in BackoffReason if other is not reason))
    assert health.in_backoff(0.5)
    assert health.on_probation(1.0)
    assert health.worked(reason)
    assert health.reason is None
    assert not health.in_backoff(0.5)
    assert not health.on_probation(1.0)
