"""The size of a pool. Loads are in tokens per second, and one replica bears 100 of them, unless a test says otherwise."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.decision import (
    Bounds,
    InstancePhase,
    Override,
    PlannedSize,
    PoolFacts,
    PoolInstance,
    PoolLoad,
    PoolView,
    Why,
)
from triptych.domain.windows import ClassWindow, Judged
from triptych.policy.capacity import ItemClass, RequestClass
from triptych.policy.scaling import (
    Colocation,
    ScalingLimits,
    answer_tokens,
    colocation,
    decide,
    encode_tokens,
    initial_size,
    instance_to_drain,
    item_mix,
    predicted_wait_s,
    prompt_tokens,
    request_mix,
)

LIMITS = ScalingLimits()
FINE, BAD = Judged(1000, 0), Judged(900, 100)


def pool(ready: int, starting: int = 0, draining: int = 0) -> tuple[PoolInstance, ...]:
    phases = [InstancePhase.READY] * ready + [InstancePhase.STARTING] * starting + [InstancePhase.DRAINING] * draining
    return tuple(PoolInstance(f"i{number}", phase) for number, phase in enumerate(phases))


def load(per_s: float, *, waiting: float = 0.0, coverage: float = 1.0) -> PoolLoad:
    return PoolLoad(per_s, per_s, per_s, per_s, waiting, coverage)


VIEW = PoolView(
    pool="m/E",
    wanted=2,
    bounds=Bounds(1, 20),
    instances=pool(2),
    load=load(150),
    report_age_s=1.0,
    facts=PoolFacts(100.0, 1.0),
    attainment=FINE,
    start_s=10.0,
)
LOW = replace(VIEW, load=load(50), period_due=True, low_periods=1)
"""The first view that may shrink."""


def test_a_pool_has_as_many_replicas_as_its_load_needs() -> None:
    decision = decide(replace(VIEW, load=load(301)), LIMITS)
    assert (decision.target, decision.needed, decision.why) == (4, 4, Why.LOAD)
    assert decide(VIEW, LIMITS).target == 2
    assert decide(VIEW, LIMITS).why is Why.STEADY


def test_the_larger_of_the_short_and_the_long_window_counts() -> None:
    for load in (PoolLoad(0, 301, 100, 0, 0, 1), PoolLoad(0, 100, 301, 0, 0, 1)):
        assert decide(replace(VIEW, load=load), LIMITS).target == 4


def test_a_burst_of_seconds_counts_only_while_requests_wait() -> None:
    burst = PoolLoad(501, 150, 150, 0, 0, 1)
    assert decide(replace(VIEW, load=burst), LIMITS).target == 2
    assert decide(replace(VIEW, load=replace(burst, waiting=300)), LIMITS).target == 6
    cured = decide(replace(VIEW, load=burst, attainment=BAD), LIMITS)
    assert (cured.target, cured.why) == (3, Why.BREACH), "its misses may be from before the last growth"


def test_a_queue_that_breaks_its_objective_is_worked_off() -> None:
    decision = decide(replace(VIEW, load=load(150, waiting=1500)), LIMITS)
    assert (decision.needed, decision.target, decision.why) == (3, 3, Why.WAIT)


def test_a_queue_is_worked_off_by_instances_that_are_never_idle() -> None:
    busy = replace(VIEW, facts=PoolFacts(100.0, 1.0, busy_per_s=200.0), start_s=0.0)
    assert decide(replace(busy, load=load(400, waiting=3000)), LIMITS).needed == 4, "in 15 s they could do 12,000"
    assert decide(replace(busy, load=load(400, waiting=15_000)), LIMITS).needed == 7
    assert decide(replace(VIEW, load=load(400, waiting=3000), start_s=0.0), LIMITS).needed == 6, "if that is unknown"


def test_a_wait_takes_what_is_starting_into_account() -> None:
    assert predicted_wait_s(VIEW, load(0, waiting=400)) == 2.0
    growing = replace(VIEW, instances=pool(2, starting=2))
    assert predicted_wait_s(growing, load(0, waiting=400)) == 2.0
    assert predicted_wait_s(growing, load(0, waiting=2400)) == 11.0
    assert predicted_wait_s(replace(VIEW, instances=()), load(0, waiting=1)) == float("inf")
    for unknown in (PoolFacts(), PoolFacts(0.0)):
        assert predicted_wait_s(replace(VIEW, facts=unknown), load(0, waiting=1)) is None


def test_attainment_below_its_threshold_grows_the_pool_at_once() -> None:
    decision = decide(replace(VIEW, attainment=BAD), LIMITS)
    assert (decision.target, decision.why, decision.breach) == (3, Why.BREACH, True)


@pytest.mark.parametrize("judged", [Judged(0, 19), Judged(99, 1), Judged(980, 20 - 6), Judged(10, 0), Judged()])
def test_too_few_misses_or_requests_prove_nothing(judged: Judged) -> None:
    assert not decide(replace(VIEW, attainment=judged), LIMITS).breach


def test_a_small_pool_grows_by_a_step_and_a_larger_one_at_most_doubles() -> None:
    assert decide(replace(VIEW, load=load(1900)), LIMITS).target == 6
    large = replace(VIEW, wanted=8, instances=pool(8), bounds=Bounds(1, 64))
    assert decide(replace(large, load=load(1900)), LIMITS).target == 16


def test_what_queues_up_until_an_ordered_instance_is_ready_is_worked_off_as_well() -> None:
    waiting = replace(VIEW, load=load(400, waiting=500), bounds=Bounds(1, 64))
    assert decide(replace(waiting, start_s=0.0), LIMITS).needed == 5
    assert decide(replace(waiting, start_s=15.0), LIMITS).needed == 7
    assert decide(replace(waiting, start_s=600.0), LIMITS).needed == 7
    enough = replace(waiting, start_s=600.0, wanted=4, instances=pool(2, starting=2))
    assert decide(enough, LIMITS).needed == 5


def test_what_an_earlier_stage_will_pass_on_counts_as_load() -> None:
    announced = replace(load(150), announced=1500.0)
    assert decide(replace(VIEW, load=announced), LIMITS).needed == 3
    burst = PoolLoad(350, 150, 150, 150, 0, 1, announced=900.0)
    assert decide(replace(VIEW, load=burst), LIMITS).needed == 3
    assert decide(replace(VIEW, load=replace(burst, announced=1100.0)), LIMITS).needed == 5


def test_instances_that_were_ordered_count() -> None:
    ordered = replace(VIEW, wanted=4, instances=pool(2, starting=2))
    assert decide(replace(ordered, load=load(400)), LIMITS).target == 4
    decision = decide(replace(ordered, attainment=BAD), LIMITS)
    assert (decision.target, decision.why) == (4, Why.SETTLING)


def test_growth_for_attainment_waits_until_the_last_one_shows() -> None:
    for since_s, target in ((69.0, 2), (71.0, 3)):
        view = replace(VIEW, attainment=BAD, since_growth_s=since_s)
        assert decide(view, LIMITS).target == target


def test_two_growths_are_a_cooldown_apart() -> None:
    view = replace(VIEW, load=load(301), since_growth_s=4.0)
    assert (decide(view, LIMITS).target, decide(view, LIMITS).why) == (2, Why.COOLDOWN)
    assert decide(replace(view, since_growth_s=6.0), LIMITS).target == 4


def test_at_the_upper_bound_saturation_is_said() -> None:
    decision = decide(replace(VIEW, load=load(900), bounds=Bounds(1, 3)), LIMITS)
    assert (decision.target, decision.saturated) == (3, True)
    assert decision.reasons[-1].why is Why.SATURATED
    assert not decide(replace(VIEW, load=load(300), bounds=Bounds(1, 3)), LIMITS).saturated


def test_the_budget_of_changes_is_kept() -> None:
    view = replace(VIEW, load=load(301), changes_last_hour=30)
    assert (decide(view, LIMITS).target, decide(view, LIMITS).why) == (2, Why.BUDGET)
    assert decide(replace(LOW, changes_last_hour=15), LIMITS).target == 2
    assert decide(replace(LOW, changes_last_hour=14), LIMITS).target == 1


# --- shrinking ----------------------------------------------------------------------------------------------------------


def test_a_pool_shrinks_by_one_after_two_low_periods_by_draining() -> None:
    decision = decide(LOW, LIMITS)
    assert (decision.target, decision.drain, decision.why) == (1, "i0", Why.LOW_LOAD)
    first = decide(replace(LOW, low_periods=0), LIMITS)
    assert (first.target, first.low) == (2, True)
    assert decide(replace(LOW, period_due=False), LIMITS).target == 2
    assert decide(replace(LOW, wanted=20, instances=pool(20), low_periods=9), LIMITS).target == 19


def test_a_smaller_pool_must_bear_more_than_the_load() -> None:
    assert not decide(replace(LOW, load=load(90)), LIMITS).low
    assert not decide(replace(LOW, load=PoolLoad(10, 10, 10, 90, 0, 1)), LIMITS).low
    assert decide(replace(LOW, load=load(80)), LIMITS).low


@pytest.mark.parametrize(
    "view",
    [
        replace(LOW, attainment=BAD),
        replace(LOW, attainment=Judged(985, 15 - 3)),
        replace(LOW, instances=pool(1, starting=1)),
        replace(LOW, instances=pool(2, draining=1)),
        replace(LOW, instances=pool(1)),
        replace(LOW, since_growth_s=200.0),
        replace(LOW, load=load(50, coverage=0.8)),
        replace(LOW, load=load(50, waiting=300)),
        replace(LOW, bounds=Bounds(2, 20)),
        replace(LOW, facts=PoolFacts()),
    ],
)
def test_a_pool_does_not_shrink_while_anything_speaks_against_it(view: PoolView) -> None:
    decision = decide(view, LIMITS)
    assert (max(decision.target, 2), decision.drain) == (decision.target, "")


def test_a_pool_does_not_shrink_while_an_earlier_stage_has_work_for_it() -> None:
    assert decide(LOW, LIMITS).target == 1
    assert decide(replace(LOW, load=replace(load(50), announced=900.0)), LIMITS).target == 2


def test_the_instance_with_the_least_to_finish_is_drained() -> None:
    ready = InstancePhase.READY
    pool_ = (
        PoolInstance("a", ready, running=2),
        PoolInstance("b", ready, running=1, leased_bytes=9),
        PoolInstance("d", ready, running=1, leased_bytes=5),
        PoolInstance("c", ready, running=1, leased_bytes=5),
        PoolInstance("e", InstancePhase.STARTING),
    )
    assert instance_to_drain(pool_) == "c"
    assert instance_to_drain(pool_[4:]) == ""


def test_a_pool_above_a_lowered_bound_shrinks() -> None:
    view = replace(LOW, load=load(190), bounds=Bounds(1, 1))
    assert decide(view, LIMITS).target == 1


# --- what instances do not cure -------------------------------------------------------------------------------------------


def test_one_sick_instance_is_named_and_the_pool_does_not_grow() -> None:
    sick = (
        PoolInstance("bad", InstancePhase.READY, judged=Judged(50, 90)),
        PoolInstance("good", InstancePhase.READY, judged=Judged(850, 2)),
    )
    decision = decide(replace(VIEW, attainment=Judged(908, 92), instances=sick), LIMITS)
    assert (decision.target, decision.sick, decision.why, decision.breach) == (2, "bad", Why.SICK, True)


def test_misses_everywhere_are_no_sickness() -> None:
    both = tuple(PoolInstance(name, InstancePhase.READY, judged=Judged(450, 50)) for name in ("a", "b"))
    decision = decide(replace(VIEW, attainment=BAD, instances=both), LIMITS)
    assert (decision.target, decision.sick) == (3, "")


def test_growth_that_does_not_help_stops() -> None:
    decision = decide(replace(VIEW, attainment=BAD, futile_growths=2), LIMITS)
    assert (decision.target, decision.why) == (2, Why.NOT_CURED)
    assert decide(replace(VIEW, attainment=BAD, futile_growths=2, load=load(301)), LIMITS).target == 4


# --- missing facts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (replace(VIEW, load=None), "no router has reported"),
        (replace(VIEW, report_age_s=None), "no router has reported"),
        (replace(VIEW, report_age_s=16.0), "the last report is 16 s old"),
        (replace(VIEW, load=load(900, coverage=0.4)), "reports cover 40%"),
    ],
)
def test_without_usable_reports_the_size_is_held(view: PoolView, text: str) -> None:
    view = replace(view, attainment=BAD)
    decision = decide(view, LIMITS)
    assert (decision.target, decision.why) == (2, Why.NO_REPORT)
    assert text in decision.reasons[0].text


def test_without_a_profile_the_load_decides_nothing_and_the_fact_is_named() -> None:
    view = replace(VIEW, facts=PoolFacts(missing=("profile of the encoder",)))
    decision = decide(replace(view, load=load(900)), LIMITS)
    assert (decision.target, decision.needed, decision.missing) == (2, None, ("profile of the encoder",))
    assert "profile of the encoder" in decision.reasons[0].text
    assert decide(replace(view, attainment=BAD), LIMITS).target == 3


def test_nothing_is_decided_while_the_store_is_away() -> None:
    decision = decide(replace(VIEW, load=load(900), frozen="the store does not answer"), LIMITS)
    assert (decision.target, decision.why) == (2, Why.FROZEN)


# --- override -----------------------------------------------------------------------------------------------------------


def test_a_manual_size_wins_within_the_bounds() -> None:
    for size, target in ((7, 7), (25, 20), (2, 2)):
        decision = decide(replace(VIEW, override=Override(size, 60.0)), LIMITS)
        assert (decision.target, decision.why) == (target, Why.OVERRIDE)
    assert decide(replace(VIEW, load=load(900), override=Override(2, 60.0)), LIMITS).target == 2
    assert decide(replace(VIEW, load=None, override=Override(5, 60.0)), LIMITS).target == 5


def test_a_smaller_size_by_hand_takes_back_what_starts_before_anything_drains() -> None:
    view = replace(VIEW, wanted=2, instances=pool(1, starting=1), override=Override(1, 60.0))
    assert (decide(view, LIMITS).target, decide(view, LIMITS).drain) == (1, "")
    view = replace(view, instances=pool(2))
    assert (decide(view, LIMITS).target, decide(view, LIMITS).drain) == (1, "i0")


def test_a_smaller_manual_size_drains_one_after_the_other() -> None:
    view = replace(VIEW, wanted=5, instances=pool(5), override=Override(2, 60.0))
    assert (decide(view, LIMITS).target, decide(view, LIMITS).drain) == (4, "i0")
    assert decide(replace(view, instances=pool(4, draining=1)), LIMITS).target == 5


def test_the_size_of_a_plan_is_kept_whatever_the_load() -> None:
    decision = decide(replace(VIEW, load=load(900), planned=PlannedSize(2, "plan 1")), LIMITS)
    assert (decision.target, decision.why, decision.reasons[0].text) == (2, Why.PLAN, "plan 1")
    assert decide(replace(VIEW, planned=PlannedSize(30, "plan 1")), LIMITS).target == 20


def test_the_instance_that_a_plan_names_ends_first() -> None:
    view = replace(VIEW, wanted=5, instances=pool(5), planned=PlannedSize(4, "plan 1", "i3"))
    assert (decide(view, LIMITS).target, decide(view, LIMITS).drain) == (4, "i3")


def test_a_person_overrides_a_plan() -> None:
    view = replace(VIEW, planned=PlannedSize(4, "plan 1"), override=Override(7, 60.0))
    assert (decide(view, LIMITS).target, decide(view, LIMITS).why) == (7, Why.OVERRIDE)


# --- properties -----------------------------------------------------------------------------------------------------------

rates = st.floats(0, 5000)
views = st.builds(
    PoolView,
    pool=st.just("p"),
    wanted=st.integers(0, 12),
    bounds=st.builds(Bounds, st.integers(0, 3), st.integers(3, 10)),
    instances=st.builds(pool, st.integers(0, 8), st.integers(0, 4), st.integers(0, 2)),
    load=st.none() | st.builds(PoolLoad, rates, rates, rates, rates, rates, st.floats(0, 1), rates),
    report_age_s=st.none() | st.floats(0, 40),
    facts=st.builds(
        PoolFacts,
        capacity_per_s=st.none() | st.floats(1, 500),
        wait_objective_s=st.none() | st.floats(0.1, 10),
        busy_per_s=st.none() | st.floats(1, 1000),
    ),
    attainment=st.builds(Judged, st.integers(0, 200), st.integers(0, 50)),
    start_s=st.floats(0, 60),
    since_growth_s=st.none() | st.floats(0, 900),
    changes_last_hour=st.integers(0, 40),
    period_due=st.booleans(),
    low_periods=st.integers(0, 4),
    futile_growths=st.integers(0, 3),
)


@given(views)
def test_every_decision_is_within_its_limits(view: PoolView) -> None:
    decision = decide(view, LIMITS)
    assert decide(view, LIMITS) == decision
    assert decision.reasons
    assert view.wanted - 1 <= decision.target <= max(2 * view.wanted, view.wanted + LIMITS.growth_step)
    assert decision.target <= max(view.wanted, view.bounds.most)
    if decision.breach:
        assert decision.target >= view.wanted
        assert not decision.drain
    if view.load is None or view.report_age_s is None or view.report_age_s > LIMITS.report_stale_s:
        assert decision.target == view.wanted
    if view.changes_last_hour >= LIMITS.max_changes_per_hour:
        assert decision.target == view.wanted
    if decision.target < view.wanted:
        assert not any(instance.phase is InstancePhase.STARTING for instance in view.instances)


@given(views, st.floats(0, 5000), st.floats(0, 5000), st.floats(0, 5000), st.floats(0, 5000))
def test_more_load_never_means_fewer_instances(
    view: PoolView, burst: float, short: float, waiting: float, announced: float
) -> None:
    if view.load is None:
        return
    more = replace(
        view.load,
        burst_per_s=view.load.burst_per_s + burst,
        short_per_s=view.load.short_per_s + short,
        waiting=view.load.waiting + waiting,
        announced=view.load.announced + announced,
    )
    assert decide(replace(view, load=more), LIMITS).target >= decide(view, LIMITS).target


# --- first size, load, mix -------------------------------------------------------------------------------------------------


def test_the_first_size_is_the_median_of_history_or_the_upper_bound() -> None:
    bounds = Bounds(1, 9)
    assert initial_size([90, 310, 900], 100.0, bounds) == 4
    assert initial_size([9000], 100.0, bounds) == 9
    assert initial_size([0.0], 100.0, bounds) == 1
    assert initial_size([], 100.0, bounds) == 9
    assert initial_size([100.0], None, bounds) == 9


WINDOW = {
    "image-256": ClassWindow(
        arrivals=10,
        items=20,
        media_tokens=4000,
        media_bytes=200_000,
        pixels=2_000_000,
        prompt_tokens=5000,
        output_tokens=400,
        done=8,
        cached_tokens=1000,
        finished_media_tokens=4000,
    ),
    "text": ClassWindow(arrivals=30, prompt_tokens=3000),
}


def test_the_mix_of_a_window_is_that_of_its_classes() -> None:
    assert item_mix(WINDOW) == (ItemClass(200, 10_000, 100_000, share=20),)
    assert request_mix(WINDOW) == (RequestClass(500, 50, share=10), RequestClass(100, 50, share=30))
    assert request_mix({"text": ClassWindow(arrivals=1, prompt_tokens=9)}) == ()


def test_cached_embeddings_are_no_load_of_the_encoders() -> None:
    assert encode_tokens(WINDOW) == 3000
    assert encode_tokens({"image-256": ClassWindow(arrivals=1, media_tokens=100)}) == 100
    assert prompt_tokens(WINDOW) == 8000
    assert answer_tokens({"text": ClassWindow(arrivals=1, prompt_tokens=9)}) == 0
    classes = {
        "text": ClassWindow(arrivals=6, prompt_tokens=9, done=2, output_tokens=10),
        "image-256": ClassWindow(arrivals=4),
    }
    assert answer_tokens(classes) == 10 * 5, "arrivals of a class without an ended answer have the mean of the others"


def test_encoders_share_the_host_of_a_text_instance_that_leaves_devices() -> None:
    assert colocation(text_devices=4, encoder_devices=2, host_devices=8) == Colocation(text=1, encoders=2)
    assert colocation(text_devices=8, encoder_devices=1, host_devices=8) is None
    assert colocation(text_devices=7, encoder_devices=2, host_devices=8) is None
    with pytest.raises(ValueError, match="at least 1"):
        colocation(text_devices=0, encoder_devices=1, host_devices=8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attainment_threshold": 1.0}, "below 1"),
        ({"shrink_margin": 0.9}, "at least 1"),
        ({"growth_cooldown_s": 400.0}, "exceeds period_s"),
        ({"attainment_window_s": 301.0}, "at most 300"),
    ],
)
def test_limits_are_checked(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScalingLimits(**values)  # type: ignore[arg-type]  # whatever a test asks for


# --- instances that switch ------------------------------------------------------------------------------------------------


def test_instances_of_other_pools_that_help_out_are_not_ordered_again() -> None:
    busy = replace(VIEW, load=load(401))
    assert decide(busy, LIMITS).target == 5
    assert decide(replace(busy, switched=3), LIMITS).target == 2
    few = decide(replace(busy, switched=1), LIMITS)
    assert few.target == 4
    assert few.reasons[0].text.endswith("4 replicas, while 1 of other pools help")


def test_a_pool_does_not_shrink_because_its_own_help_elsewhere() -> None:
    assert decide(LOW, LIMITS).target == 1
    assert decide(replace(LOW, switched=-1), LIMITS).target == 2
    lent = decide(replace(VIEW, load=load(401), switched=-1), LIMITS)
    assert lent.target == 6
    assert lent.reasons[0].text.endswith("6 replicas, while 1 of this pool serve another stage")


def test_a_wait_is_predicted_with_those_that_serve() -> None:
    waiting = load(150, waiting=400)
    assert predicted_wait_s(VIEW, waiting) == 2.0
    assert predicted_wait_s(replace(VIEW, switched=2), waiting) == 1.0
    assert predicted_wait_s(replace(VIEW, switched=-1), waiting) == 4.0


def test_sizes_wait_until_a_switch_shows() -> None:
    decision = decide(replace(VIEW, load=load(301), since_switch_s=9.0), LIMITS)
    assert (decision.target, decision.why) == (2, Why.SETTLING)
    assert decide(replace(VIEW, load=load(301), since_switch_s=11.0), LIMITS).target == 4
    assert decide(replace(LOW, since_switch_s=9.0), LIMITS).target == 2


def test_a_report_counts_up_to_its_largest_age() -> None:
    at_most = replace(VIEW, load=load(301), report_age_s=LIMITS.report_stale_s)
    assert decide(at_most, LIMITS).target == 4
    assert decide(replace(at_most, report_age_s=LIMITS.report_stale_s + 0.1), LIMITS).why is Why.NO_REPORT


def test_a_size_that_was_asked_for_is_kept_within_the_bounds_which_are_named_then() -> None:
    inside, beyond = (decide(replace(VIEW, override=Override(size, 60.0)), LIMITS) for size in (5, 30))
    assert (inside.target, beyond.target) == (5, 20)
    assert "bounds" not in inside.reasons[0].text
    assert "the bounds are 1 to 20" in beyond.reasons[0].text


def test_a_pool_shrinks_also_where_one_instance_bears_less_than_a_token_per_second() -> None:
    slow = replace(LOW, facts=PoolFacts(0.5, 1.0), load=load(0.1))
    assert decide(slow, LIMITS).target == 1
