from dataclasses import replace
from typing import Any

import pytest

from triptych.domain.embedding import DType
from triptych.domain.instance import InstanceInfo, InstanceLoad, ModelInfo, StageLoad
from triptych.domain.membership import Member
from triptych.domain.stage import Role, Stage
from triptych.machine.router.instance import Instance, InstanceState

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
    assert made.candidate(ENCODE, 0.0).usable is (state is InstanceState.READY)


def test_backoff_grows_with_engine_failures_until_a_success() -> None:
    made = instance()
    for failed_s, until_s in (
        (0.0, 1.0),
        (0.5, 1.0),
        (1.0, 3.0),
        (3.0, 7.0),
        (7.0, 12.0),
    ):  # the second: same failed batch
        made.engine_failed(Stage.ENCODE, failed_s, 1.0, 5.0)
        assert made.candidate(ENCODE, until_s - 0.1).backoff
    assert not made.candidate(TEXT, 11.9).backoff
    made.worked(Stage.PREFILL)
    assert made.candidate(ENCODE, 11.9).backoff
    made.worked(Stage.ENCODE)
    assert not made.candidate(ENCODE, 11.9).backoff
    made.engine_failed(Stage.ENCODE, 20.0, 1.0, 5.0)
    assert made.candidate(ENCODE, 20.9).backoff
    assert not made.candidate(ENCODE, 21.0).backoff


def test_an_encoders_load_is_its_report_plus_later_dispatches() -> None:
    made = instance()
    made.give(Stage.ENCODE, 10, 300)
    view = made.candidate(ENCODE, 0.0)
    assert (view.usable, view.pending_tokens, view.pending, view.available_bytes) == (True, 10, 1, 700)
    assert (view.arena_bytes, view.max_items, view.instance_id) == (1000, 4, "i-a")
    made.reported(InstanceLoad({Stage.ENCODE: StageLoad(50, 5, 400)}))
    made.give(Stage.ENCODE, 7, 100)
    view = made.candidate(ENCODE, 0.0)
    assert (view.pending_tokens, view.pending, view.available_bytes) == (57, 6, 500)
    made.refused_memory(1.0)
    assert made.candidate(ENCODE, 0.9).available_bytes == 0
    assert made.candidate(ENCODE, 1.0).available_bytes == 500
    made.work_ended(Stage.ENCODE, 7, made.reports)
    made.take_back(Stage.ENCODE, 100)
    view = made.candidate(ENCODE, 1.0)
    assert (view.pending_tokens, view.pending, view.available_bytes, made.credits) == (50, 5, 600, 1)


def test_a_text_instances_report_replaces_earlier_dispatches() -> None:
    made = instance(replace(INFO, role=Role.PD))
    for _ in range(3):
        made.give(Stage.PREFILL, 30, 0)
    view = made.candidate(TEXT, 0.0)
    assert (view.pending_tokens, view.pending, view.arena_bytes) == (90, 3, 0)
    made.reported(InstanceLoad({Stage.PREFILL: StageLoad(10, 1), Stage.DECODE: StageLoad(30, 1)}))
    made.give(Stage.PREFILL, 5, 0)
    view = made.candidate(TEXT, 0.0)
    assert (view.pending_tokens, view.pending) == (45, 4)
    made.work_ended(Stage.PREFILL, 30, report=0)
    view = made.candidate(TEXT, 0.0)
    assert (view.pending_tokens, view.pending) == (45, 3), "how much of it the report still counted is unknown"


def test_the_snapshot_is_recomputed_only_after_a_change() -> None:
    made = instance()
    made.engine_failed(Stage.ENCODE, 0.0, 1.0, 5.0)
    first = made.candidate(ENCODE, 0.0)
    assert made.candidate(ENCODE, 0.9) is first
    second = made.candidate(ENCODE, 1.0)
    assert second is not first
    assert made.candidate(ENCODE, 100.0) is second
    made.reported(InstanceLoad({}))
    assert made.candidate(ENCODE, 100.0) is not second
