"""One instance as a router sees it."""

from dataclasses import replace

import pytest

from triptych.domain.embedding import DType
from triptych.domain.instance import EncoderLoad, InstanceInfo, ModelInfo, TextLoad
from triptych.domain.stage import Role, Stage
from triptych.machine.router.instance import Instance, InstanceState

MODEL = ModelInfo("m", "r", DType.F32, 8, 100)
INFO = InstanceInfo("i-a", 1, Role.E, MODEL, 1000, (), max_items=4)


@pytest.mark.parametrize(
    ("instance", "state"),
    [
        (Instance("a", Stage.ENCODE), InstanceState.NOT_SEEN),
        (Instance("a", Stage.ENCODE, INFO), InstanceState.NOT_REACHABLE),
        (Instance("a", Stage.DECODE, INFO, reachable=True), InstanceState.OTHER_ROLE),
        (
            Instance("a", Stage.ENCODE, replace(INFO, model=replace(MODEL, revision="s")), True),
            InstanceState.OTHER_MODEL,
        ),
        (Instance("a", Stage.ENCODE, INFO, True, load=EncoderLoad(0, 0, 9, 0, 0, True)), InstanceState.DRAINING),
        (Instance("a", Stage.ENCODE, INFO, True), InstanceState.READY),
    ],
    ids=str,
)
def test_its_state_says_why_it_gets_nothing(instance: Instance, state: InstanceState) -> None:
    assert instance.state_under(MODEL) is state


def test_an_engine_that_fails_again_is_avoided_for_longer_until_it_works() -> None:
    instance = Instance("a", Stage.ENCODE, INFO, True)
    ends_s = []
    for now_s in (0.0, 0.5, 1.0, 3.0, 7.0):  # the second is of the same bad pass
        instance.engine_failed(now_s, 1.0, 5.0)
        ends_s.append(instance.backoff_until_s)
    assert ends_s == [1.0, 1.0, 3.0, 7.0, 12.0]
    assert instance.encoder_view(11.9).backoff
    instance.worked()
    assert not instance.encoder_view(11.9).backoff
    instance.engine_failed(20.0, 1.0, 5.0)
    assert instance.backoff_until_s == 21.0


def test_a_report_and_what_was_given_since_make_up_an_encoders_load() -> None:
    instance = Instance("a", Stage.ENCODE, INFO, True, state=InstanceState.READY)
    instance.own_tokens = instance.new_tokens = 10
    instance.own_items = instance.new_items = 1
    instance.own_bytes = instance.new_bytes = 300
    view = instance.encoder_view(0.0)
    assert (view.usable, view.pending_tokens, view.pending_items, view.available_bytes) == (True, 10, 1, 700)
    assert (view.arena_bytes, view.max_items) == (1000, 4)
    instance.reported(EncoderLoad(50, 5, 400, 0, 0))
    instance.new_tokens, instance.new_items, instance.new_bytes = 7, 1, 100
    view = instance.encoder_view(0.0)
    assert (view.pending_tokens, view.pending_items, view.available_bytes) == (57, 6, 300)
    instance.full_until_s = 1.0
    assert instance.encoder_view(0.9).available_bytes == 0
    assert instance.encoder_view(1.0).available_bytes == 300


def test_a_text_instances_report_replaces_what_was_given_before_it() -> None:
    instance = Instance("t", Stage.DECODE, replace(INFO, role=Role.PD), True, state=InstanceState.READY)
    instance.own_tokens, instance.own_items = 90, 3
    assert (instance.text_view(0.0).pending_tokens, instance.text_view(0.0).pending_requests) == (90, 3)
    instance.reported(TextLoad(40, 1, 1))
    instance.new_tokens, instance.new_items = 5, 1
    assert (instance.text_view(0.0).pending_tokens, instance.text_view(0.0).pending_requests) == (45, 3)
