from triptych.domain.decision import Bounds, Decision, DecisionOutcome, DecisionRecord, PoolView, Reason, Why
from triptych.machine.pool_manager.decision_log import DecisionLog


def record(number: int, outcome: DecisionOutcome = DecisionOutcome.PENDING) -> DecisionRecord:
    return DecisionRecord(number, PoolView("e", 2, Bounds(1, 9)), Decision(3, (Reason(Why.LOAD, "much"),)), outcome)


def test_the_last_decisions_are_kept_with_their_age() -> None:
    log = DecisionLog(2)
    for at_s in (1.0, 2.0, 3.0):
        log.add(record(log.next_number()), at_s)
    assert [(record.number, record.age_s) for record in log.records(5.0)] == [(2, 3.0), (3, 2.0)]


def test_an_open_decision_has_one_outcome() -> None:
    log = DecisionLog(4)
    log.add(record(log.next_number()), 0.0)
    log.add(record(log.next_number(), DecisionOutcome.ADVISED), 0.0)
    late = log.close(1, DecisionOutcome.TIMED_OUT, "late")
    assert late is not None
    assert (late.outcome, late.detail) == (DecisionOutcome.TIMED_OUT, "late")
    assert log.close(1, DecisionOutcome.DONE, "") is not None
    assert log.close(1, DecisionOutcome.REPLACED, "") is None
    assert log.close(2, DecisionOutcome.DONE, "") is None
    assert log.close(9, DecisionOutcome.DONE, "") is None
    assert [record.outcome for record in log.records(0.0)] == [DecisionOutcome.DONE, DecisionOutcome.ADVISED]


def test_numbers_go_on_after_those_of_another_leader_and_never_back() -> None:
    log = DecisionLog(2)
    log.add(record(log.next_number()), 0.0)
    log.resume((record(5), record(6), record(7)), {6: 10.0, 7: 4.0}, 100.0)
    assert [(record.number, record.age_s) for record in log.records(101.0)] == [(6, 11.0), (7, 5.0)]
    assert log.next_number() == 8
    log.add(record(8), 101.0)
    log.resume((record(3),), {}, 100.0)
    assert [(record.number, record.age_s) for record in log.records(102.0)] == [(3, 2.0)]
    assert log.next_number() == 9


def test_a_decision_that_is_replaced_before_anything_came_of_it_says_so() -> None:
    log = DecisionLog(4)
    for outcome in (DecisionOutcome.DONE, DecisionOutcome.PENDING, DecisionOutcome.PENDING):
        log.add(record(log.next_number(), outcome), 0.0)
    assert [(record.number, record.detail) for record in log.replace_pending("by 4")] == [(2, "by 4"), (3, "by 4")]
    assert [record.outcome for record in log.records(0.0)] == [DecisionOutcome.DONE, *[DecisionOutcome.REPLACED] * 2]
    assert log.replace_pending("by 5") == []
