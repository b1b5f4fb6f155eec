from triptych.domain.decision import Bounds, PoolFacts, PoolLoad, PoolView
from triptych.domain.history import HOURS_OF_WEEK, WEEKS
from triptych.machine.pool_manager.history import LoadHistory


def view(per_s: float | None, capacity_per_s: float | None = None) -> PoolView:
    load = None if per_s is None else PoolLoad(per_s, per_s, per_s, per_s, 0.0, 1.0)
    return PoolView("m/E", 1, Bounds(1, 9), load=load, facts=PoolFacts(capacity_per_s))


def test_the_peak_of_an_hour_and_the_last_capacity_are_kept() -> None:
    history = LoadHistory()
    for per_s, capacity_per_s in ((5.0, 10.0), (9.0, 20.0), (None, None), (2.0, None)):
        history.observe(view(per_s, capacity_per_s), 7)
    assert history.same_hour(7) == ()
    assert history.same_hour(7 + HOURS_OF_WEEK) == (9.0,)
    assert history.same_hour(8 + HOURS_OF_WEEK) == ()
    assert history.capacity_per_s == 20.0


def test_only_the_last_weeks_are_kept() -> None:
    history = LoadHistory()
    for hour in range(6 * HOURS_OF_WEEK):
        history.observe(view(float(hour)), hour)
    assert len(history.kept().hours) == WEEKS * HOURS_OF_WEEK
    last = 6 * HOURS_OF_WEEK - 1
    assert history.same_hour(last) == tuple(float(last - week * HOURS_OF_WEEK) for week in (1, 2, 3))


def test_a_history_goes_on_from_what_was_kept() -> None:
    history = LoadHistory()
    history.observe(view(5.0, 10.0), 7)
    again = LoadHistory(history.kept())
    assert again.kept() == history.kept()
    assert again.same_hour(7 + HOURS_OF_WEEK) == (5.0,)
