from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from triptych.domain.embedding import DType
from triptych.domain.instance import (
    InstanceInfo,
    InstanceLimits,
    InstanceLoad,
    LimitsReport,
    ModelInfo,
    ServedPart,
    StageLoad,
)
from triptych.domain.membership import Member
from triptych.domain.profile import ProfileIdentity
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.machine.router.health import BackoffReason
from triptych.machine.router.instance import Instance, InstanceState, Stages
from triptych.policy.placement.pool import Candidate, Pool

ENCODE, TEXT = (Stage.ENCODE,), (Stage.PREFILL, Stage.DECODE)
MODEL = ModelInfo("m", "r", DType.F32, 8, 100)
INFO = InstanceInfo("i-a", 1, Role.E, MODEL, 1000, (), max_items=4)


def instance(info: InstanceInfo | None = INFO, **changes: Any) -> Instance:
    made = Instance(Member("a", epoch=changes.pop("epoch", None)))
    if info is not None:
        made.seen(info)
    for name, value in changes.items():
        setattr(made, name, value)
    made.review(MODEL)
    return made


def candidate(made: Instance, stages: Stages, now_s: float) -> Candidate:
    pool = Pool([made.row(stages)])
    made.put(pool, 0, stages, now_s)
    return pool.candidate(0)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"info": None}, InstanceState.NOT_SEEN),
        ({"reachable": False}, InstanceState.NOT_REACHABLE),
        ({"epoch": 2}, InstanceState.OTHER_MEMBER),
        ({"duplicate": True, "draining": True}, InstanceState.SAME_PROCESS),
        ({"info": replace(INFO, model=replace(MODEL, revision="s"))}, InstanceState.OTHER_MODEL),
        ({"leaving": True, "draining": True}, InstanceState.LEAVING),
        ({"draining": True}, InstanceState.DRAINING),
        ({}, InstanceState.READY),
    ],
    ids=str,
)
def test_the_state_says_why_an_instance_gets_no_work(changes: dict[str, Any], state: InstanceState) -> None:
    made = instance(**changes)
    assert made.state is state
    assert candidate(made, ENCODE, 0.0).usable is (state is InstanceState.READY)


def test_an_instance_in_backoff_is_avoided_and_then_gets_one_item_at_a_time() -> None:
    made = instance()
    made.back_off(Stage.ENCODE, BackoffReason.ENGINE, 0.0, first_s=1.0, longest_s=5.0)
    assert candidate(made, ENCODE, 0.9).backoff
    assert not candidate(made, TEXT, 0.9).backoff, "the other engine works"
    made.probe(Stage.ENCODE, 7, 0.5)
    made.give(Stage.ENCODE, 10, 100)
    view = candidate(made, ENCODE, 1.0)
    assert (view.backoff, view.probation) == (False, True), "what was granted during the backoff is no probe"
    made.probe(Stage.ENCODE, 8, 1.0)
    made.give(Stage.ENCODE, 10, 100)
    assert candidate(made, ENCODE, 1.0).backoff, "one at a time"
    made.probe_ended(Stage.ENCODE, 7)
    assert candidate(made, ENCODE, 1.0).backoff
    made.probe_ended(Stage.ENCODE, 8)
    view = candidate(made, ENCODE, 1.0)
    assert (view.backoff, view.probation) == (False, True)
    made.worked(Stage.PREFILL, BackoffReason.ENGINE)
    assert candidate(made, ENCODE, 1.0).probation
    made.worked(Stage.ENCODE, BackoffReason.ENGINE)
    view = candidate(made, ENCODE, 1.0)
    assert (view.backoff, view.probation) == (False, False)


def test_a_restarted_instance_is_well() -> None:
    made = instance()
    made.back_off(Stage.ENCODE, BackoffReason.ENGINE, 0.0, first_s=1.0, longest_s=5.0)
    assert made.seen(replace(INFO, epoch=2))
    made.review(MODEL)
    view = candidate(made, ENCODE, 0.1)
    assert (view.backoff, view.probation) == (False, False)


def test_an_encoders_load_is_its_report_plus_later_dispatches() -> None:
    made = instance()
    made.give(Stage.ENCODE, 10, 300)
    view = candidate(made, ENCODE, 0.0)
    assert (view.usable, view.pending_tokens, view.pending, view.available_bytes) == (True, 10, 1, 700)
    assert (view.arena_bytes, view.max_items, view.instance_id) == (1000, 4, "i-a")
    made.reported(InstanceLoad({Stage.ENCODE: StageLoad(50, 5, 400)}))
    made.give(Stage.ENCODE, 7, 100)
    view = candidate(made, ENCODE, 0.0)
    assert (view.pending_tokens, view.pending, view.available_bytes) == (57, 6, 500)
    made.refused_memory(1.0)
    assert candidate(made, ENCODE, 0.9).available_bytes == 0
    assert candidate(made, ENCODE, 1.0).available_bytes == 500
    made.work_ended(Stage.ENCODE, 7, made.reports)
    made.take_back(Stage.ENCODE, 100, 0, made.reports)
    view = candidate(made, ENCODE, 1.0)
    assert (view.pending_tokens, view.pending, view.available_bytes, made.credits) == (50, 5, 600, 1)


def test_a_text_instances_load_is_its_report_plus_later_dispatches_or_its_own_work_if_more() -> None:
    made = instance(replace(INFO, role=Role.PD))
    for _ in range(3):
        made.give(Stage.PREFILL, 30, 0, 10)
    view = candidate(made, TEXT, 0.0)
    assert (view.pending_tokens, view.pending, view.arena_bytes) == (120, 3, 0)
    made.reported(InstanceLoad({Stage.PREFILL: StageLoad(10, 1), Stage.DECODE: StageLoad(30, 1)}))
    view = candidate(made, TEXT, 0.0)
    assert (view.pending_tokens, view.pending) == (120, 3), "two of its requests are still on their way"
    made.reported(InstanceLoad({Stage.PREFILL: StageLoad(200, 5), Stage.DECODE: StageLoad(30, 1)}))
    made.give(Stage.PREFILL, 5, 0, 2)
    view = candidate(made, TEXT, 0.0)
    assert (view.pending_tokens, view.pending) == (237, 7)
    made.work_ended(Stage.PREFILL, 30, report=0, output_tokens=10)
    view = candidate(made, TEXT, 0.0)
    assert (view.pending_tokens, view.pending) == (237, 7), "how much of it the report still counted is unknown"


def test_a_prompt_that_is_computed_counts_no_more_but_the_rest_of_its_request_does() -> None:
    made = instance(replace(INFO, role=Role.PD))
    made.give(Stage.PREFILL, 30, 0, 10)
    made.work_done(Stage.PREFILL, 30, made.reports)
    view = candidate(made, TEXT, 0.0)
    assert (view.pending_tokens, view.pending) == (10, 1)
    made.work_ended(Stage.PREFILL, 0, made.reports, 10)
    view = candidate(made, TEXT, 0.0)
    assert (view.pending_tokens, view.pending) == (0, 0)


def test_a_load_says_until_when_it_holds_if_nothing_happens() -> None:
    made = instance()
    pool = Pool([made.row(ENCODE)])
    assert made.put(pool, 0, ENCODE, 0.0) == inf
    made.back_off(Stage.ENCODE, BackoffReason.ENGINE, 0.0, first_s=2.0, longest_s=5.0)
    made.refused_memory(1.0)
    untils = [made.put(pool, 0, ENCODE, now_s) for now_s in (0.0, 0.9, 1.0, 1.9, 2.0)]
    assert untils == [1.0, 1.0, 2.0, 2.0, inf]
    assert made.put(pool, 0, TEXT, 0.0) == inf


def test_work_of_a_stage_that_is_not_reported_is_forgotten_with_the_next_report() -> None:
    made, answers = instance(replace(INFO, role=Role.D)), (Stage.DECODE, Stage.PREFILL)
    made.give(Stage.PREFILL, 30, 0)
    made.reported(report(Stage.DECODE))
    assert candidate(made, answers, 0.0).pending_tokens == 30
    made.work_ended(Stage.PREFILL, 30, report=0)
    assert candidate(made, answers, 0.0).pending_tokens == 5


def report(*stages: Stage, tokens: int = 5) -> InstanceLoad:
    return InstanceLoad({stage: StageLoad(tokens, 1) for stage in stages})


def test_one_that_switches_serves_the_stages_of_its_last_report() -> None:
    made = instance(replace(INFO, role=Role.PD, switchable=Role.EPD))
    assert (made.role, made.serves(TEXT), made.serves(ENCODE)) == (Role.PD, True, False)
    assert not made.reported(report(*Role.PD.stages))
    made.give(Stage.PREFILL, 10, 0)
    assert made.reported(report(Stage.ENCODE)), "it has switched"
    assert (made.role, made.serves(TEXT), made.serves(ENCODE)) == (Role.E, False, True)
    assert made.pending_tokens(Stage.PREFILL) == 10, "what the router has there stays"
    assert made.pending_tokens(Stage.DECODE) == 0
    assert not made.reported(report(Stage.ENCODE))
    assert made.reported(report(*Role.PD.stages))
    assert made.pending_tokens(Stage.PREFILL) == 10
    assert made.pending_tokens(Stage.DECODE) == 5


def test_one_that_starts_again_serves_its_first_role() -> None:
    made = instance(replace(INFO, role=Role.PD, switchable=Role.EPD))
    made.reported(report(Stage.ENCODE))
    made.seen(replace(INFO, role=Role.PD, switchable=Role.EPD))
    assert made.serves(ENCODE), "it is the same process"
    made.seen(replace(INFO, role=Role.PD, switchable=Role.EPD, epoch=2))
    assert made.role is Role.PD


def test_one_that_does_not_switch_serves_its_role_whatever_it_reports() -> None:
    made = instance(replace(INFO, role=Role.EPD))
    assert not made.reported(report(Stage.PREFILL))
    assert made.role is Role.EPD


def test_room_that_is_given_back_is_available_again_and_its_pools_learn_of_it() -> None:
    made, changed = instance(), set[str]()
    made.give(Stage.ENCODE, 10, 300)
    made.changed_in = (changed,)
    assert candidate(made, ENCODE, 0.0).available_bytes == 700
    made.work_ended(Stage.ENCODE, 10, made.reports)
    changed.clear()
    assert candidate(made, ENCODE, 0.0).available_bytes == 700
    made.take_back(Stage.ENCODE, 300, 0, made.reports)
    assert changed == {"a"}
    assert candidate(made, ENCODE, 0.0).available_bytes == 1000


def test_kv_memory_has_room_beside_its_own_answers_and_as_far_as_the_last_report_had_it_free() -> None:
    made = instance(replace(INFO, role=Role.PD, kv_tokens=100))

    def report_free(tokens: int, *, running: int) -> None:
        made.reported(InstanceLoad({Stage.DECODE: StageLoad(5, running, free_tokens=tokens)}))

    made.give(Stage.PREFILL, 30, 0, 10, 40)
    assert made.kv_room == 60
    report_free(50, running=1)
    assert made.kv_room == 50, "others have some"
    made.give(Stage.PREFILL, 10, 0, 10, 20)
    assert made.kv_room == 30, "the report was before"
    made.take_back(Stage.PREFILL, 0, 20, made.reports)
    assert made.kv_room == 50
    made.take_back(Stage.PREFILL, 0, 40, 0)
    assert made.kv_room == 50
    report_free(70, running=0)
    assert made.kv_room == 100, "what is only cached makes way"


def test_items_of_other_routers_take_as_long_to_prepare_as_its_own() -> None:
    made = instance()
    assert made.prepare_s(4) == 0.0, "nothing is known of them"
    for _ in range(2):
        made.prepares(0.25)
        made.give(Stage.ENCODE, 10, 0)
    assert made.prepare_s(4) == 1.0


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.give(Stage.ENCODE, 1, 1),
        lambda made: made.work_done(Stage.ENCODE, 1, 0),
        lambda made: made.work_ended(Stage.ENCODE, 1, 0),
        lambda made: made.take_back(Stage.ENCODE, 1, 0, 0),
        lambda made: made.reported(report(Stage.ENCODE)),
        lambda made: made.refused_memory(1.0),
        lambda made: made.back_off(Stage.ENCODE, BackoffReason.ENGINE, 0.0, first_s=1.0, longest_s=5.0),
        lambda made: made.probe(Stage.PREFILL, 8, 1.0),
        lambda made: made.probe_ended(Stage.PREFILL, 7),
        lambda made: made.worked(Stage.PREFILL, BackoffReason.ENGINE),
        lambda made: made.review(MODEL),
    ],
)
def test_its_pools_learn_of_every_change(change: Callable[[Instance], object]) -> None:
    made, changed = instance(), set[str]()
    made.back_off(Stage.PREFILL, BackoffReason.ENGINE, 0.0, first_s=0.5, longest_s=5.0)
    made.probe(Stage.PREFILL, 7, 1.0)
    candidate(made, ENCODE, 1.0)
    made.changed_in = (changed,)
    change(made)
    assert changed == {"a"}


def test_limits_of_batches_are_those_of_the_last_report_until_the_process_restarts() -> None:
    part = ServedPart(ProfileIdentity(ModelPart.ENCODER, "ab", frozenset({Stage.ENCODE}), "cpu", DType.F32), 8)
    made = instance(replace(INFO, parts=(part,)))
    assert made.limited_info == made.info
    load = InstanceLoad({Stage.ENCODE: StageLoad(0, 0)}, limits=LimitsReport(InstanceLimits(max_batch_items=2), 1))
    assert made.reported(load), "what is predicted of it changes"
    assert not made.reported(load)
    assert made.limited_info is not None
    assert made.limited_info.parts == (replace(part, max_batch=2),)
    assert made.seen(replace(INFO, epoch=2, parts=(part,)))
    assert made.limited_info == made.info
