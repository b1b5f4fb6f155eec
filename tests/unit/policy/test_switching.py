from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.stage import Role, Stage
from triptych.policy.switching import Movable, StageView, Switch, SwitchLimits, decide

LIMITS = SwitchLimits()
ENCODE, PREFILL, DECODE = Stage.ENCODE, Stage.PREFILL, Stage.DECODE


def stage(
    of_stage: Stage,
    instances: int,
    held: float = 0.0,
    *,
    holds: float = 3.0,
    arriving: float = 0.0,
    served: float = 1.0,
    each_held: tuple[float, ...] = (),
    can: Role = Role.EPD,
) -> StageView:
    movable = tuple(
        Movable(f"{of_stage.name[0].lower()}{number}", can.stages, each_held[number] if each_held else held / instances)
        for number in range(instances)
    )
    return StageView(of_stage, instances, held, holds, arriving, served, movable)


def decode(instances: int, held: float = 0.0, growth: float = 0.0) -> StageView:
    return stage(DECODE, instances, held, holds=10.0, arriving=growth, served=0.0)


IDLE = (stage(ENCODE, 5, arriving=1.4), stage(PREFILL, 1, arriving=0.1), decode(2, 4.0))


def switched(stages: tuple[StageView, ...]) -> Switch:
    found = decide(stages, LIMITS)
    assert found is not None
    return found


def test_nothing_is_switched_while_no_stage_is_short() -> None:
    assert decide(IDLE, LIMITS) is None


def test_encoders_help_where_answers_pile_up() -> None:
    """Three of five, as published (EPD-Serve table 6): two are needed for the images."""
    found = switched((*IDLE[:2], decode(2, 8.0, growth=3.0)))
    assert (found.source, found.target, found.instances) == (ENCODE, DECODE, ("e0", "e1", "e2"))
    assert found.reason == "decode holds 23 in 5 s, 20 are within its objective"


def test_decode_instances_help_where_images_pile_up() -> None:
    found = switched((stage(ENCODE, 2, 4.0, arriving=3.5), IDLE[1], decode(5, 8.0)))
    assert (found.source, found.target) == (DECODE, ENCODE)


def test_no_more_instances_are_switched_than_are_needed() -> None:
    """In a minute there are 27 answers, which three instances hold."""
    found = switched((*IDLE[:2], decode(2, 21.0, growth=0.1)))
    assert found.instances == ("e0",)


def test_a_growth_that_is_far_from_the_objective_is_waited_for() -> None:
    assert decide((*IDLE[:2], decode(2, 4.0, growth=1.5)), LIMITS) is None


def test_the_last_instance_of_a_stage_stays() -> None:
    idle = stage(ENCODE, 1), stage(PREFILL, 1), decode(1, 50.0, growth=5.0)
    assert decide(idle, LIMITS) is None


def test_a_stage_without_instances_gets_one() -> None:
    assert switched((IDLE[0], IDLE[1], decode(0, 3.0))).target is DECODE


def test_a_busy_stage_gives_none() -> None:
    """What arrives needs more than four of five encoders."""
    busy = replace(IDLE[0], arriving=4.1)
    assert decide((busy, IDLE[1], decode(2, 15.0, growth=3.0)), LIMITS) is None


def test_a_stage_whose_queue_is_half_of_the_limit_gives_none() -> None:
    waiting = replace(IDLE[0], held=8.0, arriving=3.0)
    assert decide((waiting, IDLE[1], decode(2, 15.0, growth=3.0)), LIMITS) is None


def test_those_with_least_to_finish_are_switched() -> None:
    encoders = stage(ENCODE, 4, 1.0, arriving=2.3, each_held=(0.4, 0.1, 0.5, 0.0))
    assert switched((encoders, IDLE[1], decode(2, 15.0, growth=3.0))).instances == ("e3",)


def test_only_instances_that_can_are_switched() -> None:
    encoders = stage(ENCODE, 5, arriving=1.4, can=Role.EP)
    assert decide((encoders, IDLE[1], decode(2, 15.0, growth=3.0)), LIMITS) is None


def test_a_switch_that_costs_more_than_it_saves_is_not_made() -> None:
    just_over = (*IDLE[:2], decode(2, 20.05))
    assert decide(just_over, LIMITS) is None
    assert decide(just_over, replace(LIMITS, switch_cost_s=0.0)) is not None


def test_what_its_instances_have_to_finish_is_part_of_a_switchs_cost() -> None:
    idle, busy = (stage(ENCODE, 5, arriving=1.4, each_held=(held,) * 5) for held in (0.0, 3.0))
    limits = replace(LIMITS, switch_cost_s=0.0)
    assert decide((idle, IDLE[1], decode(2, 20.05)), limits) is not None
    assert decide((busy, IDLE[1], decode(2, 20.05)), limits) is None


def test_a_stage_gives_one_that_it_does_not_need_for_what_arrives() -> None:
    exactly = replace(IDLE[0], arriving=4.0)
    assert switched((exactly, IDLE[1], decode(2, 15.0, growth=3.0))).instances == ("e0",)


@pytest.mark.parametrize(
    ("held", "growth", "late_s"),
    [
        (10.0, 0.0, 0.0),
        (10.0, -1.0, 0.0),
        (25.0, 0.0, 15.0 * 30 / 10),
        (25.0, 1.0, (15.0 + 45.0) / 2 * 30 / 10),
        (0.0, 1.0, 20.0 * 20.0 / 2 / 10),
        (30.0, -2.0, 20.0 * 10.0 / 2 / 10),
    ],
)
def test_what_is_late_is_summed_from_when_it_exceeds_what_the_instances_hold(
    held: float, growth: float, late_s: float
) -> None:
    assert decode(1, held, growth).late_s(1, 30.0) == pytest.approx(late_s)


@pytest.mark.parametrize(("name", "value"), [("switch_spare", 1.0), ("switch_rest_s", 0.0), ("switch_windows", 0)])
def test_limits_are_checked(name: str, value: float) -> None:
    changed: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=name):
        replace(LIMITS, **changed)


amounts = st.floats(0, 100)


@st.composite
def views(draw: st.DrawFn) -> tuple[StageView, ...]:
    def view(of_stage: Stage, served: float) -> StageView:
        instances = draw(st.integers(0, 6))
        made = stage(of_stage, max(1, instances), holds=draw(st.floats(0.5, 20)), served=served)
        held = draw(st.lists(st.floats(0, 10), min_size=len(made.movable), max_size=len(made.movable)))
        movable = tuple(
            replace(instance, held=part, stages=draw(st.sampled_from(list(Role))).stages)
            for instance, part in zip(made.movable, held, strict=True)
        )
        arriving = draw(st.floats(-5, 5)) if not served else draw(st.floats(0, 6))
        kept = movable[: draw(st.integers(0, instances))]
        return replace(made, instances=instances, held=draw(amounts), arriving=arriving, movable=kept)

    return view(ENCODE, 1.0), view(PREFILL, 1.0), view(DECODE, 0.0)


@given(views())
def test_a_switch_is_possible_and_leaves_enough(stages: tuple[StageView, ...]) -> None:
    found = decide(stages, LIMITS)
    if found is None:
        return
    by_stage = {view.stage: view for view in stages}
    source, target = by_stage[found.source], by_stage[found.target]
    assert source is not target
    assert 1 <= len(found.instances) == len(set(found.instances)) < source.instances
    movable = {instance.instance_id: instance for instance in source.movable}
    assert all(found.target in movable[name].stages for name in found.instances)
    left = source.instances - len(found.instances)
    assert source.pressure(LIMITS.switch_ahead_s, left) < LIMITS.switch_spare
    assert target.pressure(LIMITS.switch_ahead_s, target.instances) > 1
    most_moved = max(movable[name].held for name in found.instances)
    stayed = [
        instance
        for name, instance in movable.items()
        if name not in found.instances and found.target in instance.stages
    ]
    assert all(instance.held >= most_moved for instance in stayed)


@given(views())
def test_no_switch_is_undone_at_once(stages: tuple[StageView, ...]) -> None:
    """A stage that gave instances takes none back while nothing else changes."""
    found = decide(stages, LIMITS)
    if found is None:
        return
    count = len(found.instances)
    moved = {found.source: -count, found.target: count}
    after = tuple(replace(view, instances=view.instances + moved.get(view.stage, 0)) for view in stages)
    again = decide(after, LIMITS)
    assert again is None or (again.source, again.target) != (found.target, found.source)


@given(views(), st.integers(1, 8), st.floats(0, 120))
def test_what_is_late_falls_with_more_instances(
    stages: tuple[StageView, ...], instances: int, horizon_s: float
) -> None:
    for stage in stages:
        assert stage.late_s(instances + 1, horizon_s) <= stage.late_s(instances, horizon_s) + 1e-6


def test_an_instance_that_must_load_first_is_taken_last_and_not_for_little() -> None:
    """The time of the load counts as part of the switch's cost."""
    encoders = stage(ENCODE, 5, arriving=1.4)
    slow = {DECODE: 20.0}
    first, *others = encoders.movable
    loads = replace(encoders, movable=(replace(first, opens_s=slow), *others))
    short = decode(2, 8.0, growth=3.0)
    assert switched((loads, IDLE[1], short)).instances == ("e1", "e2", "e3")
    all_load = replace(
        encoders, movable=tuple(replace(instance, opens_s={DECODE: 10_000.0}) for instance in encoders.movable)
    )
    assert decide((all_load, IDLE[1], short), LIMITS) is None
