"""Pools in a closed loop under virtual time: a modelled cluster, the real machine and policy."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.machine.pool_manager.modelled import Modelled, fixed_facts
from triptych.domain.decision import (
    Acting,
    Bounds,
    Decision,
    DecisionOutcome,
    DecisionRecord,
    InstancePhase,
    Override,
    PlannedSize,
    PoolFacts,
    PoolInstance,
    PoolState,
    PoolView,
    Reason,
    SavedPool,
    Why,
)
from triptych.domain.stage import Role
from triptych.domain.windows import WindowReport
from triptych.machine.pool_manager.pool import PoolLimits, PoolMachine, PoolSettings
from triptych.machine.pool_manager.pool_events import (
    DrainInstance,
    Frozen,
    InstancesSeen,
    OrderFailed,
    OverrideEnded,
    OverrideSet,
    PoolResumed,
    PoolTick,
    RecordDecision,
    RemoveInstance,
    RolesSeen,
    ScaleTo,
    SizePlanned,
    StartFailed,
)
from triptych.machine.pool_manager.reports import Dropped, RouterReports
from triptych.policy.scaling import ScalingLimits, decide

FAST = ScalingLimits(period_s=60.0)


def burst(at_s: float, *, factor: float = 4.0, until_s: float = 400.0) -> float:
    """70 % of one instance, and ``factor`` instances from 100 s on."""
    return 1000.0 * factor if 100 < at_s <= until_s else 700.0


def flat(at_s: float) -> float:
    del at_s
    return 500.0


# --- a burst of images ----------------------------------------------------------------------------------------------------


def test_with_cross_attention_an_image_burst_grows_the_image_pool_alone() -> None:
    cluster = Modelled(burst, flat, FAST)
    cluster.run(400)
    assert max(size for _, size in cluster.changes("e")) >= 5
    assert cluster.changes("t") == []
    assert cluster.attainment(130, 400) >= 0.99
    assert cluster.attainment(0, 100) == 1.0


def test_for_decoder_only_models_the_text_pool_grows_too_but_less() -> None:
    cluster = Modelled(burst, lambda at_s: 500 + (burst(at_s) - 700) / 2, FAST)
    cluster.run(400)
    encoders, texts = (max(size for _, size in cluster.changes(pool)) for pool in "et")
    assert 1 < texts < encoders
    assert cluster.attainment(130, 400) >= 0.99


def test_without_scaling_the_same_burst_is_missed() -> None:
    cluster = Modelled(burst, flat, FAST, most=1)
    cluster.run(400)
    assert cluster.attainment(130, 400) < 0.5
    status = cluster.status("e")
    assert status.state is PoolState.BREACH
    assert cluster.machines["e"].records(cluster.now_s)[-1].decision.saturated


def test_a_burst_gets_no_more_instances_than_work_off_its_queue() -> None:
    """Instances bear half of what they work off while they are never idle."""
    facts = PoolFacts(500.0, 1.0, busy_per_s=1000.0)
    cluster = Modelled(lambda at_s: burst(at_s, factor=2.45), flat, start_s=15.0, facts=lambda _: facts)
    cluster.run(170)
    assert max(size for _, size in cluster.changes("e")) == 5, "a load of 4.9 instances"
    assert cluster.attainment(140, 170) == 1.0


def test_after_the_burst_the_pool_gives_up_one_instance_after_the_other_and_keeps_its_objective() -> None:
    """A period that permits fewer instances goes on until no more are given up, and the next one begins then."""
    cluster = Modelled(burst, flat, FAST)
    cluster.run(1500)
    assert cluster.sizes[-1][1] == 1
    shrinks = [(at_s, size) for at_s, size in cluster.changes("e") if at_s > 400]
    assert [size for _, size in shrinks] == list(range(len(shrinks), 0, -1))
    gaps_s = [after - before for (before, _), (after, _) in pairwise(shrinks)]
    assert min(gaps_s) < 5, "several in one period"
    assert all(gap_s < 5 or gap_s >= 60 for gap_s in gaps_s)
    assert cluster.attainment(430, 1500) == 1.0
    assert cluster.state("e") is PoolState.STEADY


def test_a_longer_start_delays_growth_and_does_not_multiply_it() -> None:
    slow = Modelled(burst, flat, replace(FAST, recover_s=60.0), start_s=40.0, most=32)
    slow.run(400)
    assert max(size for _, size in slow.changes("e")) <= 10


def test_every_decision_can_be_replayed() -> None:
    cluster = Modelled(burst, flat, FAST)
    cluster.run(600)
    assert len(cluster.records) > 5
    assert all(decide(record.view, FAST) == record.decision for record in cluster.records)


def test_every_change_has_an_outcome() -> None:
    cluster = Modelled(burst, flat, FAST)
    cluster.run(1500)
    last: dict[int, DecisionRecord] = {record.number: record for record in cluster.records}
    changed = [record for record in last.values() if record.decision.target != record.view.wanted]
    assert {record.outcome for record in changed} <= {DecisionOutcome.DONE, DecisionOutcome.REPLACED}
    assert changed[-1].outcome is DecisionOutcome.DONE


def test_in_advisory_mode_nothing_is_ordered_and_the_advice_is_recorded_once() -> None:
    cluster = Modelled(burst, flat, FAST, advisory=True)
    cluster.run(400)
    assert cluster.changes("e") == []
    assert len(cluster.encoders.instances) == 1
    advised = [record for record in cluster.records if record.outcome is DecisionOutcome.ADVISED]
    assert advised
    assert all(record.decision.target > 1 for record in advised)
    assert len(cluster.records) < 60


# --- flapping, oscillation ------------------------------------------------------------------------------------------------


def turns(cluster: Modelled) -> int:
    """How often the pool of encoders grew after it had shrunk."""
    sizes = [cluster.initial, *(size for _, size in cluster.changes("e"))]
    steps = [after - before for before, after in pairwise(sizes)]
    return sum(before < 0 < after for before, after in pairwise(steps))


@pytest.mark.slow
@pytest.mark.parametrize("high", [3000.0, 8000.0])
@pytest.mark.parametrize("half_s", [7, 14, 16, 45])
def test_a_load_that_flaps_does_not_make_the_pool_oscillate(half_s: int, high: float) -> None:
    cluster = Modelled(lambda at_s: high if int(at_s / half_s) % 2 else high / 16, flat, FAST)
    cluster.run(1800)
    assert turns(cluster) == 0
    assert max(size for _, size in cluster.changes("e")) > 1


@pytest.mark.slow
def test_a_load_that_stays_low_for_several_periods_is_followed_within_the_budget() -> None:
    cluster = Modelled(lambda at_s: 3000.0 if int(at_s / 240) % 2 else 300.0, flat, FAST)
    cluster.run(1800)
    assert turns(cluster) <= 2
    assert len(cluster.changes("e")) <= FAST.max_changes_per_hour


loads = st.lists(st.tuples(st.integers(1, 200), st.floats(0, 12_000)), min_size=1, max_size=12)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(loads, st.integers(0, 2**32))
def test_adversarial_load_causes_a_bounded_number_of_changes(phases: list[tuple[int, float]], seed: int) -> None:
    rng = random.Random(seed)
    per_s = [level for seconds, level in phases for _ in range(seconds)]
    cluster = Modelled(lambda at_s: per_s[int(at_s) % len(per_s)] * rng.uniform(0.5, 1.5), flat, FAST)
    cluster.run(600)
    changes = cluster.changes("e")
    assert len(changes) <= FAST.max_changes_per_hour
    assert all(1 <= size <= 16 for _, size in changes)
    before = 1
    for at_s, size in changes:
        assert before - 1 <= size <= max(2 * before, before + FAST.growth_step)
        if size < before:
            record = next(r for r in cluster.records if r.decision.target == size and r.view.wanted == before)
            assert not record.decision.breach
            assert at_s >= FAST.low_periods * FAST.period_s
        before = size


hours = st.lists(st.tuples(st.integers(30, 1800), st.floats(0, 12_000)), min_size=1, max_size=8)


@pytest.mark.extended
@pytest.mark.timeout(300)
@settings(max_examples=3, deadline=None)
@given(hours, st.integers(0, 2**32))
def test_hours_of_any_load_cause_a_bounded_number_of_changes_in_every_hour(
    phases: list[tuple[int, float]], seed: int
) -> None:
    rng = random.Random(seed)
    per_s = [level for seconds, level in phases for _ in range(seconds)]
    cluster = Modelled(lambda at_s: per_s[int(at_s) % len(per_s)] * rng.uniform(0.5, 1.5), flat, FAST)
    cluster.run(6000)
    changes = cluster.changes("e")
    for begin_s, _ in changes:
        hour = [change for change in changes if begin_s <= change[0] < begin_s + 3600]
        assert len(hour) <= FAST.max_changes_per_hour
        sizes = [size for _, size in hour]
        assert sum(after < before for before, after in pairwise(sizes)) <= FAST.max_changes_per_hour / 2
    shrinks = [at_s for (_, before), (at_s, after) in pairwise([(0.0, 1), *changes]) if after < before]
    gaps_s = [later - earlier for earlier, later in pairwise(shrinks)]
    assert all(gap_s < 5 or gap_s >= FAST.period_s for gap_s in gaps_s), "in one period, or in another"


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=5, deadline=None)
@given(st.floats(0, 12_000), st.floats(0, 0.1), st.integers(1, 16), st.integers(0, 2**32))
def test_under_a_steady_load_no_pool_oscillates(level: float, noise: float, initial: int, seed: int) -> None:
    rng = random.Random(seed)
    cluster = Modelled(lambda at_s: level * rng.uniform(1 - noise, 1 + noise), flat, FAST, initial=initial)
    cluster.run(1200)
    assert turns(cluster) == 0


# --- reports ----------------------------------------------------------------------------------------------------------------


def test_without_reports_the_size_is_held_and_that_is_said() -> None:
    cluster = Modelled(burst, flat, FAST, initial=3)
    cluster.run(50)
    cluster.reporting = False
    cluster.run(400)
    assert cluster.changes("e") == []
    assert cluster.records[-1].decision.why is Why.NO_REPORT
    cluster.reporting = True
    cluster.image_tokens = lambda at_s: 6000.0
    cluster.run(60)
    assert cluster.sizes[-1][1] >= 6


def test_reports_that_are_not_counted_are_shown_by_cause() -> None:
    cluster = Modelled(burst, flat)
    cluster.run(5)
    report = WindowReport(1, 3, 1.0, 2.0, "m")
    cluster.reports.accept("r", report, cluster.now_s)
    cluster.reports.accept("r", replace(report, sequence=99, age_s=999.0), cluster.now_s)
    assert cluster.reports.dropped == {Dropped.DUPLICATE: 1, Dropped.OLD: 1}
    cluster.reports.retain(())
    cluster.run(1)
    assert cluster.records[-1].decision.why in (Why.NO_REPORT, Why.STEADY)


def test_a_pool_without_requests_shrinks_by_its_last_capacity() -> None:
    cluster = Modelled(
        lambda at_s: 700.0 if at_s < 60 else 0.0,
        lambda at_s: 500.0 if at_s < 60 else 0.0,
        FAST,
        initial=3,
        facts=lambda classes: fixed_facts(classes) if any(window.items for window in classes.values()) else PoolFacts(),
    )
    cluster.run(900)
    assert cluster.sizes[-1][1:] == (1, 1)


def test_a_pool_that_never_had_a_profile_keeps_its_size_and_says_what_is_missing() -> None:
    cluster = Modelled(
        burst, flat, FAST, initial=4, facts=lambda classes: PoolFacts(missing=("profile of the encoder",))
    )
    cluster.run(90)
    assert cluster.changes("e") == []
    assert cluster.records[-1].decision.missing == ("profile of the encoder",)


# --- orders, failures -------------------------------------------------------------------------------------------------------


def test_an_instance_that_died_is_ordered_again() -> None:
    cluster = Modelled(flat, flat, FAST, initial=3)
    cluster.run(30)
    del cluster.encoders.instances[0]
    cluster.run(10)
    assert cluster.encoders.ready(cluster.now_s) == 3
    assert cluster.changes("e") == []
    assert cluster.state("e") is PoolState.STEADY


def test_a_scaler_that_does_nothing_is_asked_again_for_the_newest_size_and_shown() -> None:
    cluster = Modelled(lambda at_s: 3500.0, flat, FAST)
    cluster.encoders.scaler_works = False
    cluster.run(200)
    status = cluster.status("e")
    assert "of" in status.fault
    assert DecisionOutcome.TIMED_OUT in {decision.outcome for decision in status.decisions}
    cluster.encoders.scaler_works = True
    cluster.run(400)
    assert cluster.encoders.ready(cluster.now_s) == cluster.machines["e"].wanted > 1
    assert cluster.status("e").fault == ""


def one_pool(*, initial: int = 2, advisory: bool = False) -> PoolMachine:
    pool = PoolSettings("e", Role.E, Bounds(1, 9), initial, 5.0, fixed_facts)
    limits = PoolLimits()
    acting = Acting.MANUAL if advisory else Acting.ALL
    return PoolMachine(pool, RouterReports(), scaling=FAST, limits=limits, now_s=0.0, acting=acting)


def ready(*names: str) -> tuple[PoolInstance, ...]:
    return tuple(PoolInstance(name, InstancePhase.READY) for name in names)


def test_a_decision_knows_of_instances_that_switch() -> None:
    machine = one_pool()
    machine.handle(InstancesSeen(ready("e1", "e2")), 0.0)
    machine.handle(RolesSeen(-1, 3.0), 0.0)
    machine.handle(PoolTick(), 0.0)
    assert machine.view is not None
    assert (machine.view.switched, machine.view.since_switch_s, machine.view.serving) == (-1, 3.0, 1)


def test_a_size_by_hand_is_ordered_at_once_also_if_it_is_the_one_that_the_pool_does_not_get() -> None:
    machine = one_pool()
    here = ready("e1", "e2")

    def ordered(until_s: float, from_s: float) -> list[float]:
        found = []
        for at_s in range(int(from_s), int(until_s)):
            machine.handle(InstancesSeen(here), float(at_s))
            effects = machine.handle(PoolTick(), float(at_s))
            found += [float(at_s) for effect in effects if isinstance(effect, ScaleTo) and effect.size == 4]
        return found

    machine.handle(OverrideSet(4, 1e4), 10.0)
    times = ordered(300, 10)
    assert len(times) > 2
    assert times[-1] - times[-2] > 2 * (times[1] - times[0]), "repeated at growing distances"
    machine.handle(OverrideSet(4, 1e4), 300.0)
    assert ordered(302, 300) == [300.0]


def test_the_size_of_a_plan_is_ordered_and_its_instance_drains() -> None:
    machine = one_pool(initial=2)
    machine.handle(InstancesSeen(ready("a", "b")), 0.0)
    machine.handle(PoolTick(), 0.0)
    machine.handle(SizePlanned(PlannedSize(4, "plan 1")), 1.0)
    [order] = [effect for effect in machine.handle(PoolTick(), 1.0) if isinstance(effect, ScaleTo)]
    assert (order.size, order.reason) == (4, "plan 1")
    machine.handle(InstancesSeen(ready("a", "b", "c", "d")), 2.0)
    machine.handle(SizePlanned(PlannedSize(3, "plan 2", "b")), 3.0)
    [drain] = [effect for effect in machine.handle(PoolTick(), 3.0) if isinstance(effect, DrainInstance)]
    assert (drain.instance_id, drain.reason) == ("b", "plan 2")
    assert machine.records(3.0)[-1].decision.why is Why.PLAN
    machine.validate()


def test_an_order_that_the_scaler_refuses_is_shown() -> None:
    machine = one_pool()
    order = next(effect for effect in machine.handle(PoolTick(), 0.0) if isinstance(effect, ScaleTo))
    assert order.size == 2
    machine.handle(OrderFailed(order.number, "forbidden"), 0.1)
    assert machine.status(0.2).fault == "the scaler failed: forbidden"
    machine.handle(InstancesSeen(ready("a", "b")), 1.0)
    assert machine.status(1.0).fault == ""


def test_three_crashes_at_start_are_given_up_visibly_and_the_old_instances_stay() -> None:
    machine = one_pool()
    machine.handle(InstancesSeen(ready("a")), 0.0)
    assert machine.handle(PoolTick(), 0.5)
    for _ in range(3):
        assert machine.status(1.0).state is not PoolState.FROZEN
        machine.handle(StartFailed("no such model"), 1.0)
    status = machine.status(1.0)
    assert (status.state, status.wanted) == (PoolState.FROZEN, 1)
    assert "no such model" in status.fault
    assert not any(isinstance(effect, ScaleTo) for at_s in range(2, 200) for effect in machine.handle(PoolTick(), at_s))
    machine.handle(OverrideSet(2, 60.0), 200.0)
    orders = [effect for effect in machine.handle(PoolTick(), 200.0) if isinstance(effect, ScaleTo)]
    assert [order.size for order in orders] == [2]
    machine.validate()


def test_a_start_in_between_forgives_crashes() -> None:
    machine = one_pool()
    for number in range(5):
        machine.handle(StartFailed("out of memory"), float(number))
        machine.handle(StartFailed("out of memory"), float(number))
        machine.handle(InstancesSeen(ready(f"i{number}")), float(number))
    assert machine.status(9.0).state is not PoolState.FROZEN


def test_nothing_is_ordered_while_the_store_is_away_or_another_manager_leads() -> None:
    cluster = Modelled(lambda at_s: 3500.0, flat, FAST)
    cluster.feed("e", Frozen("the store does not answer"))
    cluster.run(100)
    assert cluster.changes("e") == []
    assert cluster.state("e") is PoolState.FROZEN
    assert cluster.status("e").fault == "the store does not answer"
    cluster.feed("e", Frozen(""))
    cluster.run(60)
    assert cluster.encoders.ready(cluster.now_s) >= 4


def test_a_newer_growth_replaces_a_shrink_that_is_draining() -> None:
    cluster = Modelled(lambda at_s: 700.0 if at_s < 300 else 8000.0, flat, replace(FAST, low_periods=1), initial=4)
    while not any(instance.draining for instance in cluster.encoders.instances):
        cluster.second()
    cluster.image_tokens = lambda at_s: 8000.0
    cluster.run(120)
    assert cluster.encoders.ready(cluster.now_s) >= 8


def test_what_a_person_drains_is_stopped_and_replaced() -> None:
    cluster = Modelled(flat, flat, FAST, initial=2)
    cluster.run(20)
    cluster.encoders.instances[0].draining = True
    name = cluster.encoders.instances[0].instance_id
    cluster.run(20)
    assert cluster.encoders.ready(cluster.now_s) == 2
    assert name not in [instance.instance_id for instance in cluster.encoders.instances]


def test_one_drain_at_a_time_even_before_it_shows() -> None:
    machine = one_pool(initial=4)
    names = ready("a", "b", "c", "d")
    machine.handle(InstancesSeen(names), 0.0)
    machine.handle(OverrideSet(1, 600.0), 0.0)
    drains = [effect for at_s in range(5) for effect in machine.handle(PoolTick(), float(at_s))]
    assert [effect.instance_id for effect in drains if isinstance(effect, DrainInstance)] == ["a"]
    assert not any(isinstance(effect, ScaleTo) for effect in drains)
    machine.handle(InstancesSeen(names[1:]), 6.0)
    assert DrainInstance in [type(effect) for effect in machine.handle(PoolTick(), 6.0)]


def test_an_instance_that_does_not_drain_in_time_is_stopped() -> None:
    machine = one_pool(initial=2)
    machine.handle(InstancesSeen(ready("a", "b")), 0.0)
    machine.handle(OverrideSet(1, 6000.0), 0.0)
    machine.handle(PoolTick(), 0.0)
    assert [type(effect) for effect in machine.handle(PoolTick(), 599.0)] == []
    late = [effect for effect in machine.handle(PoolTick(), 601.0) if isinstance(effect, ScaleTo | RemoveInstance)]
    assert [type(effect) for effect in late] == [ScaleTo, RemoveInstance]


def lost(name: str, age_s: float) -> PoolInstance:
    return PoolInstance(name, InstancePhase.LOST, age_s=age_s)


def test_an_instance_that_hangs_is_stopped_and_replaced_unless_the_manager_seems_to_be_cut_off() -> None:
    machine = one_pool(initial=4)
    machine.handle(InstancesSeen((*ready("a", "b", "c"), lost("d", 40.0))), 0.0)
    assert [type(effect) for effect in machine.handle(PoolTick(), 0.0) if not isinstance(effect, RecordDecision)] == [
        ScaleTo
    ]
    machine.handle(InstancesSeen((*ready("a", "b", "c"), lost("d", 90.0))), 1.0)
    removed = [effect for effect in machine.handle(PoolTick(), 1.0) if isinstance(effect, RemoveInstance)]
    assert [effect.instance_id for effect in removed] == ["d"]
    assert "not been heard of for 90 s" in removed[0].reason
    machine.handle(InstancesSeen((*ready("a", "b"), lost("c", 90.0), lost("d", 90.0)), cut_off=True), 2.0)
    assert not [effect for effect in machine.handle(PoolTick(), 2.0) if isinstance(effect, RemoveInstance)]


def test_instances_that_nobody_ordered_are_wanted_after_a_while() -> None:
    machine = one_pool(initial=2)
    for at_s in range(40):
        machine.handle(InstancesSeen(ready("a", "b", "c")), float(at_s))
        sizes = [effect.size for effect in machine.handle(PoolTick(), float(at_s)) if isinstance(effect, ScaleTo)]
        assert sizes == ([3] if at_s == 30 else [])
    assert machine.status(40.0).wanted == 3


@pytest.mark.parametrize("advisory", [False, True])
def test_one_that_became_ready_although_a_smaller_size_was_set_by_hand_drains_after_a_while(*, advisory: bool) -> None:
    """The instance was starting when the size was ordered, and the scaler has not taken it back in time."""
    machine = one_pool(initial=2, advisory=advisory)
    machine.handle(InstancesSeen((*ready("a"), PoolInstance("b", InstancePhase.STARTING))), 0.0)
    machine.handle(PoolTick(), 0.0)
    machine.handle(OverrideSet(1, 600.0), 1.0)
    effects = machine.handle(PoolTick(), 1.0)
    assert [effect.size for effect in effects if isinstance(effect, ScaleTo)] == [1]
    drains: dict[int, str] = {}
    for at_s in range(2, 60):
        machine.handle(InstancesSeen(ready("a", "b")), float(at_s))
        for effect in machine.handle(PoolTick(), float(at_s)):
            if isinstance(effect, DrainInstance):
                drains[at_s] = effect.instance_id
    assert list(drains.values()) == ["a"]
    assert 30 <= min(drains) <= 34


def test_a_new_leader_orders_the_size_that_the_one_before_has_left_and_keeps_what_is_there() -> None:
    machine = one_pool(initial=2)
    kept = SavedPool(4, Override(4, 50.0), changes_s=(3000.0, 10.0), decisions_s=((7, 30.0),))
    machine.handle(InstancesSeen(ready("a", "b")), 0.0)
    old = DecisionRecord(7, PoolView("e", 2, Bounds(1, 9)), Decision(4, (Reason(Why.LOAD, "much"),)))
    machine.handle(PoolResumed(kept, (old,)), 100.0)
    assert [effect.size for effect in machine.handle(PoolTick(), 100.0) if isinstance(effect, ScaleTo)] == [4]
    assert machine.kept(101.0).override == Override(4, 49.0)
    assert machine.kept(101.0).changes_s == (3001.0, 11.0)
    first = machine.records(101.0)[0]
    assert (first.number, first.age_s) == (7, 31.0)
    assert (first.outcome, first.detail) == (DecisionOutcome.REPLACED, "by a later leader")
    assert machine.records(101.0)[-1].number > 7
    machine.handle(PoolResumed(SavedPool(1)), 200.0)
    machine.handle(InstancesSeen(ready("a", "b", "c")), 200.0)
    assert [effect.size for effect in machine.handle(PoolTick(), 200.0) if isinstance(effect, ScaleTo)] == [3]
    machine.validate()


def test_a_manual_size_wins_until_it_ends() -> None:
    cluster = Modelled(lambda at_s: 3500.0, flat, FAST)
    cluster.feed("e", OverrideSet(2, 200.0))
    cluster.run(150)
    assert cluster.sizes[-1][1] == 2
    assert cluster.status("e").override is not None
    cluster.run(150)
    assert cluster.sizes[-1][1] >= 4
    cluster.feed("e", OverrideSet(16, 1000.0))
    cluster.run(2)
    assert cluster.sizes[-1][1] == 16
    cluster.feed("e", OverrideEnded())
    assert cluster.status("e").override is None


def test_the_status_has_the_last_decisions_with_their_age_reasons_and_outcome() -> None:
    cluster = Modelled(burst, flat, FAST)
    cluster.run(1500)
    decisions = cluster.status("e").decisions
    assert len(decisions) == 10
    records = cluster.machines["e"].records(cluster.now_s)[-10:]
    assert [(decision.number, decision.age_s) for decision in decisions] == [
        (decision.number, decision.age_s) for decision in records
    ]
    assert all(before.age_s > after.age_s >= 0 for before, after in pairwise(decisions))
    changed = next(decision for decision in decisions if decision.target != decision.wanted)
    assert (changed.outcome, changed.ready) == (DecisionOutcome.DONE, changed.wanted)
    assert changed.load is not None
    assert changed.needed is not None
    assert changed.reasons[0].text


def test_growth_that_does_not_improve_attainment_ends() -> None:
    """Misses that have another cause than the number of instances."""
    cluster = Modelled(flat, flat, FAST)
    cluster.encoders.work = lambda tokens, now_s: False  # type: ignore[method-assign]
    cluster.run(1200)
    sizes = [size for _, size in cluster.changes("e")]
    assert sizes == [2, 3]
    assert cluster.state("e") is PoolState.BREACH
    assert cluster.records[-1].decision.why is Why.NOT_CURED


def test_records_are_bounded() -> None:
    cluster = Modelled(lambda at_s: 1500 + 1500 * math.sin(at_s / 9), flat, FAST)
    cluster.run(900)
    assert len(cluster.machines["e"].records(cluster.now_s)) <= PoolLimits().max_records
