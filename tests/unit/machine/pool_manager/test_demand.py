from collections.abc import Mapping

import pytest

from triptych.domain.decision import Bounds, InstancePhase, PoolFacts, PoolInstance, PoolLoad, PoolView
from triptych.domain.stage import Role
from triptych.domain.windows import ClassWindow, Judged, NamedClass, NamedInstance, WindowReport
from triptych.machine.pool_manager.demand import Demand
from triptych.machine.pool_manager.reports import RouterReports

SEEN = PoolView("m/E", 1, Bounds(1, 9), instances=(PoolInstance("e1", InstancePhase.READY),), start_s=60.0)


def told(sequence: int, *, arrivals: int = 10, missed: int = 0) -> WindowReport:
    window = ClassWindow(
        arrivals=arrivals,
        items=arrivals,
        media_tokens=100 * arrivals,
        prompt_tokens=10 * arrivals,
        output_tokens=20 * arrivals,
        done=arrivals,
        tbt=Judged(arrivals - 1, 1) if arrivals else Judged(),
        ttft=Judged(arrivals - missed, missed),
        missed_encode=missed,
        missed_uncharged=1,
    )
    blamed = (NamedInstance("e1", Judged(5, missed)),)
    return WindowReport(
        1,
        sequence,
        1.0,
        0.0,
        "m",
        (NamedClass("image-256", window),),
        blamed,
        waiting_media_tokens=700,
        waiting_prompt_tokens=30,
    )


def facts(classes: Mapping[str, ClassWindow]) -> PoolFacts:
    """Known under load only."""
    return PoolFacts(500.0, 1.0, start_s=20.0) if any(window.arrivals for window in classes.values()) else PoolFacts()


def load(view: PoolView) -> PoolLoad:
    assert view.load is not None
    return view.load


@pytest.mark.parametrize(
    ("role", "per_s", "waiting", "announced", "missed"),
    [
        (Role.E, 1000, 700, 0, 2),
        (Role.P, 100, 30, 70, 0),
        (Role.PD, 100, 30, 70, 0),
        (Role.EP, 100, 100, 0, 2),
        (Role.EPD, 100, 100, 0, 2),
        (Role.D, 200, 0, 200, 1),
        (Role.ED, 200, 140, 60, 2),
    ],
)
def test_a_pool_has_the_load_and_the_misses_of_its_stages(
    role: Role, per_s: float, waiting: float, announced: float, missed: int
) -> None:
    reports = RouterReports()
    reports.accept("r", told(1, missed=2), 1.0)
    view = Demand(role, facts, reports).observe(SEEN, 1.0)
    assert load(view).short_per_s == pytest.approx(per_s)
    assert (load(view).waiting, load(view).announced) == (waiting, announced)
    assert view.attainment == Judged(10 - missed, missed)
    assert view.instances[0].judged == Judged(5, 2)
    assert (view.facts.capacity_per_s, view.facts.wait_objective_s, view.start_s) == (500.0, 1.0, 20.0)
    assert view.facts.missing == ("isolated latencies: 1 missed TTFTs are charged to no stage",)


def test_without_reports_or_profiles_nothing_is_known_and_the_start_time_stays() -> None:
    view = Demand(Role.E, lambda classes: PoolFacts(missing=("profile",)), RouterReports()).observe(SEEN, 1.0)
    assert (view.load, view.report_age_s, view.facts.capacity_per_s) == (None, None, None)
    assert (view.facts.missing, view.start_s) == (("profile",), 60.0)


def test_the_peak_is_that_of_the_period_and_an_idle_pool_keeps_its_capacity() -> None:
    reports = RouterReports()
    demand = Demand(Role.E, facts, reports)
    for at_s in range(1, 31):
        reports.accept("r", told(at_s), float(at_s))
    assert load(demand.observe(SEEN, 30.0)).peak_per_s == pytest.approx(1000)
    for at_s in range(31, 401):
        reports.accept("r", told(at_s, arrivals=0), float(at_s))
    view = demand.observe(SEEN, 400.0)
    assert (load(view).short_per_s, view.facts.capacity_per_s) == (0.0, 500.0)
    assert load(view).peak_per_s == pytest.approx(1000)
    demand.begin_period()
    assert load(demand.observe(SEEN, 400.0)).peak_per_s == 0.0


def test_one_that_encodes_and_decodes_is_charged_with_the_worse_objective() -> None:
    reports = RouterReports()
    reports.accept("r", told(1), 1.0)
    assert Demand(Role.ED, facts, reports).observe(SEEN, 1.0).attainment == Judged(9, 1), (
        "no image was late, but tokens were"
    )


def test_a_manager_that_comes_to_an_idle_pool_knows_the_mix_of_the_last_minutes() -> None:
    reports = RouterReports()
    for at_s in range(1, 101):
        reports.accept("r", told(at_s, arrivals=10 if at_s < 50 else 0), float(at_s))
    view = Demand(Role.E, facts, reports).observe(SEEN, 100.0)
    assert (load(view).short_per_s, view.facts.capacity_per_s) == (0.0, 500.0)
    assert 0 < load(view).long_per_s < 1000


def test_where_nobody_waits_for_a_first_token_no_burst_is_absorbed() -> None:
    reports = RouterReports()
    reports.accept("r", told(1), 1.0)
    view = Demand(Role.E, lambda _: PoolFacts(500.0), reports).observe(SEEN, 1.0)
    assert load(view).peak_per_s == max(load(view).burst_per_s, load(view).short_per_s)
