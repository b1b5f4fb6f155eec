"""An order to switch, as the reports of its member tell of it."""

import pytest

from triptych.domain.instance import ClosedStage, InstanceLoad, StageLoad
from triptych.domain.stage import Role, Stage
from triptych.machine.pool_manager.member_events import SwitchServed
from triptych.machine.pool_manager.switch_order import SwitchOrder


def order(version: int = 5) -> SwitchOrder:
    return SwitchOrder(Role.P, Role.PD, "decode is short", since_s=10.0, version=version)


def load(version: int, *, pending: int = 0, served: int | None = 0, stages: Role = Role.PD) -> InstanceLoad:
    of_stage = StageLoad(0, pending, served=served)
    return InstanceLoad(dict.fromkeys(stages.stages, of_stage), stages_version=version)


def test_an_order_opens_what_its_member_did_not_serve() -> None:
    assert order().opened == {Stage.DECODE}
    assert SwitchOrder(Role.PD, Role.D, "", since_s=0.0).opened == set()


@pytest.mark.parametrize(
    ("version", "overtaken", "obeyed", "unknown"),
    [(4, False, False, True), (5, False, True, False), (6, True, False, False)],
)
def test_the_version_that_a_member_reports_tells_what_became_of_it(
    version: int, overtaken: bool, obeyed: bool, unknown: bool
) -> None:
    reported = load(version)
    assert order().is_overtaken(reported) is overtaken
    assert order().is_obeyed(reported) is obeyed
    assert order().is_unknown(reported) is unknown


def test_an_order_that_is_not_sent_is_neither_obeyed_nor_overtaken() -> None:
    assert order(0).is_unknown(load(7))
    assert not order(0).is_obeyed(load(0))
    assert not order(0).is_overtaken(load(7))


def test_an_order_is_obeyed_once_all_its_stages_are_open() -> None:
    assert not order().is_obeyed(load(5, stages=Role.P))


def test_the_fault_of_an_order_is_that_of_a_stage_which_it_wants() -> None:
    closed = (ClosedStage(Stage.ENCODE, fault="no encoder"), ClosedStage(Stage.DECODE, fault="no memory"))
    given_up = InstanceLoad({}, stages_version=5, closed=closed)
    assert order().fault(given_up) == "no memory"
    assert order(4).fault(given_up) == ""
    assert order().fault(InstanceLoad({}, stages_version=5)) == ""


def test_a_switch_has_served_once_each_opened_stage_has() -> None:
    obeyed = order()
    assert obeyed.check_served(load(5), 11.0) == []
    assert obeyed.check_served(load(5, served=1), 12.5) == [SwitchServed(2.5)]
    assert obeyed.check_served(load(5, served=2), 13.0) == [], "it is said once"


def test_a_stage_that_has_work_and_serves_nothing_is_noted() -> None:
    obeyed = order()
    obeyed.check_served(load(5, pending=1), 11.0)
    obeyed.check_served(load(5, pending=2), 14.0)
    assert obeyed.waits_since_s == 11.0
    obeyed.check_served(load(5), 15.0)
    assert obeyed.waits_since_s is None, "its work has gone"
