"""Stages open before others close, whatever orders come; something is always open."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.instance import ClosedStage
from triptych.domain.stage import Role, Stage
from triptych.errors import Conflict, InvalidRequest, Unavailable
from triptych.machine.stage_states import (
    Close,
    Emptied,
    GivenUp,
    Open,
    Opened,
    OpeningFailed,
    OpensIn,
    OrderOvertaken,
    RefuseOrder,
    StageStates,
    Switched,
    SwitchEffect,
    SwitchEvent,
    SwitchWanted,
)

E, P, D = Stage.ENCODE, Stage.PREFILL, Stage.DECODE


def wanted(role: Role, version: int) -> SwitchWanted:
    return SwitchWanted(role.stages, version)


def test_new_stages_are_open_before_old_ones_close() -> None:
    states = StageStates(Role.P, Role.EPD)
    assert states.pending_s(1.0) == 0.0
    assert states.handle(wanted(Role.ED, 1), 1.0) == [Open(E), Open(D)]
    assert states.handle(Opened(E), 2.0) == []
    assert states.open == {E, P}
    assert states.handle(Opened(D), 3.0) == [Close(P)]
    assert (states.open, states.closing, states.pending_s(4.0)) == (Role.ED.stages, Role.P.stages, 3.0)
    assert states.handle(Emptied(P), 4.5) == [Switched(3.5)]
    assert not states.closing
    assert states.pending_s(9.0) == 0.0
    assert states.version == 1


def test_a_newer_order_may_come_before_the_last_one_is_obeyed() -> None:
    states = StageStates(Role.P, Role.EPD)
    states.handle(wanted(Role.D, 1), 0.0)
    states.handle(Opened(D), 1.0)
    assert states.handle(wanted(Role.PD, 3), 2.0) == [OrderOvertaken(), Open(P)], "it closes, and opens again"
    assert states.pending_s(2.5) == 0.5, "the last order counts"
    assert states.handle(Emptied(P), 2.5) == [], "it is empty, but wanted"
    assert states.handle(Opened(P), 3.0) == [Switched(1.0)]
    assert states.open == {P, D}


def test_what_opens_is_closed_again_once_it_is_open() -> None:
    states = StageStates(Role.P, Role.EPD)
    states.handle(wanted(Role.D, 1), 0.0)
    assert states.handle(wanted(Role.P, 2), 1.0) == [OrderOvertaken()]
    assert states.handle(Opened(D), 2.0) == [Close(D)]
    assert states.handle(Emptied(D), 3.0) == [Switched(2.0)]


def test_a_stage_that_cannot_be_opened_ends_the_order_and_what_was_open_stays() -> None:
    states, error = StageStates(Role.E, Role.EPD), Unavailable("no memory")
    states.handle(OpensIn(P, 2.0), 0.0)
    assert states.closed == (ClosedStage(P, 2.0),)
    states.handle(wanted(Role.PD, 1), 0.0)
    assert states.handle(OpeningFailed(P, error), 1.0) == [GivenUp(error)]
    assert states.open == {E}
    assert states.closed == (ClosedStage(P, 2.0, "no memory"),)
    assert states.handle(Opened(D), 2.0) == [Close(D)], "it is not wanted any more"
    assert states.handle(Emptied(D), 3.0) == [], "it has not switched"
    assert states.open == states.in_use == {E}
    states.handle(wanted(Role.PD, 2), 4.0)
    assert states.closed == (ClosedStage(P, 2.0),), "it is tried again"
    assert states.handle(Opened(P), 5.0) == []
    assert states.handle(Opened(D), 5.0) == [Close(E)]
    assert states.handle(Emptied(E), 6.0) == [Switched(2.0)]
    assert not states.closed


def test_a_stage_that_cannot_be_opened_and_is_not_wanted_any_more_is_only_closed() -> None:
    states = StageStates(Role.P, Role.EPD)
    states.handle(wanted(Role.E, 1), 0.0)
    states.handle(wanted(Role.P, 2), 1.0)
    assert states.handle(OpeningFailed(E, Unavailable("no memory")), 2.0) == [Switched(1.0)]
    assert states.handle(OpeningFailed(E, Unavailable("no memory")), 3.0) == [], "it is not opening"


@pytest.mark.parametrize("version", [0, 4, 5])
def test_orders_that_are_not_newer_are_refused(version: int) -> None:
    states = StageStates(Role.P, Role.PD)
    assert states.handle(wanted(Role.P, 5), 0.0) == [Switched(0.0)]
    (refused,) = states.handle(wanted(Role.D, version), 1.0)
    assert isinstance(refused, RefuseOrder)
    assert isinstance(refused.error, Conflict)
    assert (states.open, states.version) == (Role.P.stages, 5)


@pytest.mark.parametrize("stages", [frozenset[Stage](), Role.E.stages, Role.EPD.stages])
def test_stages_that_it_cannot_serve_are_refused(stages: frozenset[Stage]) -> None:
    states = StageStates(Role.P, Role.PD)
    (refused,) = states.handle(SwitchWanted(stages, 1), 1.0)
    assert isinstance(refused, RefuseOrder)
    assert isinstance(refused.error, InvalidRequest)
    assert (states.open, states.version) == (Role.P.stages, 0)


EVENTS = st.lists(
    st.one_of(
        st.builds(SwitchWanted, st.frozensets(st.sampled_from(Stage)), st.integers(0, 12)),
        st.builds(Opened, st.sampled_from(Stage)),
        st.builds(OpeningFailed, st.sampled_from(Stage), st.just(Unavailable("no memory"))),
        st.builds(Emptied, st.sampled_from(Stage)),
    ),
    max_size=40,
)


@given(role=st.sampled_from([Role.P, Role.D, Role.PD]), widest=st.sampled_from([Role.PD, Role.EPD]), events=EVENTS)
def test_whatever_comes_it_ends_as_the_last_order_wants(role: Role, widest: Role, events: list[SwitchEvent]) -> None:
    states, last = StageStates(role, widest), role.stages
    for number, event in enumerate(events):
        effects = states.handle(event, float(number))
        states.validate()
        if isinstance(event, SwitchWanted) and not any(isinstance(effect, RefuseOrder) for effect in effects):
            last = event.stages
        if any(isinstance(effect, GivenUp) for effect in effects):
            last = states.open
    pending: list[SwitchEffect] = [*map(Open, Stage), *map(Close, Stage)]
    for effect in [*pending, *pending]:
        match effect:
            case Open(stage):
                states.handle(Opened(stage), 100.0)
            case Close(stage):
                states.handle(Emptied(stage), 100.0)
            case _:
                pass
        states.validate()
    assert (states.open, states.closing) == (last, frozenset())
