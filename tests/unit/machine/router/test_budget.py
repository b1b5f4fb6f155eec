import pytest

from triptych.machine.router.budget import Budget


def test_each_success_earns_a_share_of_an_additional_call() -> None:
    budget = Budget(0.25, 2.0, 0.0)
    assert not budget.has(1)
    for _ in range(4):
        budget.earn()
    assert budget.has(1)
    assert not budget.has(2)
    budget.spend(1)
    assert budget.left == 0.0


def test_savings_are_limited() -> None:
    budget = Budget(0.25, 2.0, 1.5)
    for _ in range(100):
        budget.earn()
    assert budget.left == 2.0


def test_what_is_not_there_cannot_be_spent() -> None:
    with pytest.raises(ValueError, match=r"2 calls, but only 1\.5 are left"):
        Budget(0.1, 9.0, 1.5).spend(2)
