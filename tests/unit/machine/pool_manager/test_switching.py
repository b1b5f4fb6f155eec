from dataclasses import replace

import pytest

from tests.unit.machine.pool_manager.switching_model import Asked, Modelled, alternating
from triptych.domain.stage import Role, Stage
from triptych.machine.pool_manager.switching import SwitchMachine
from triptych.policy.switching import Movable, StageView, SwitchLimits

LIMITS = SwitchLimits()
SIZES = {Stage.ENCODE: 5, Stage.PREFILL: 1, Stage.DECODE: 2}
"""As in EPD-Serve's experiment (table 6)."""
MOVABLE = tuple(Movable(f"e{number}", Role.EPD.stages) for number in range(5))


def seen(answers: float) -> list[StageView]:
    encode = StageView(Stage.ENCODE, 5, 0.5, 3.0, 1.4, 1.0, MOVABLE)
    return [encode, StageView(Stage.DECODE, 2, answers, 10.0, 0.0)]


def ordered(machine: SwitchMachine, now_s: float, answers: float) -> int:
    """How many instances are to switch now."""
    return sum(len(switch.instances) for switch in machine.handle(seen(answers), now_s))


def test_a_growth_is_acted_upon_when_two_windows_agree() -> None:
    machine = SwitchMachine(LIMITS)
    orders = [ordered(machine, float(at_s), 3.0 * max(0, at_s - 4)) for at_s in range(10)]
    assert orders == [0, 0, 0, 0, 0, 0, 0, 0, 0, 3]
    assert machine.pressures == {Stage.ENCODE: 0.0, Stage.DECODE: pytest.approx((15 + 5 * (9 / 3)) / 20, rel=0.5)}
    assert machine.pressures[Stage.DECODE] > 1


def test_one_window_alone_is_a_burst() -> None:
    machine = SwitchMachine(LIMITS)
    assert [ordered(machine, at_s, held) for at_s, held in enumerate((4, 4, 30, 4, 4, 30))] == [0] * 6


def test_the_same_two_stages_rest_after_a_switch_in_either_direction() -> None:
    machine = SwitchMachine(replace(LIMITS, switch_windows=1))
    assert ordered(machine, 0.0, 40.0)
    assert machine.since_s(4.0) == 4.0
    assert [at_s for at_s in range(1, 25) if ordered(machine, float(at_s), 40.0)] == [10, 20]


def test_trends_begin_anew_after_an_interruption_and_the_rest_goes_on() -> None:
    machine = SwitchMachine(replace(LIMITS, switch_windows=1))
    assert machine.since_s(0.0) is None
    assert ordered(machine, 0.0, 40.0)
    machine.forget()
    assert not machine.pressures
    assert not ordered(machine, 9.0, 40.0)
    machine.forget()
    assert not ordered(machine, 30.0, 19.0), "19 more than 21 s ago is no trend"
    assert ordered(machine, 31.0, 25.0)


def test_there_is_no_trend_of_a_stage_that_was_not_seen_before() -> None:
    machine = SwitchMachine(replace(LIMITS, switch_windows=1))
    encode, decode = seen(18.0)
    machine.handle([encode], 0.0)
    assert machine.handle([encode, decode], 1.0) == []
    machine = SwitchMachine(replace(LIMITS, switch_windows=1))
    machine.handle([encode, replace(decode, held=1.0)], 0.0)
    machine.forget()
    assert machine.handle([encode, decode], 1.0) == [], "17 more than before an interruption is none either"


def test_answers_that_become_longer_get_three_of_five_encoders_within_seconds() -> None:
    """The experiment of EPD-Serve (table 6): 10 requests with 50 output tokens, then 90 with 500, 3 per second."""

    def asked() -> list[Asked]:
        return [Asked(number / 3, 1, 50 if number < 10 else 500) for number in range(100)]

    machine = SwitchMachine(LIMITS)
    switching = Modelled(SIZES, machine)
    with_switching_s = switching.run(asked())
    ((at_s, first), *_) = switching.switches
    assert (first.source, first.target, len(first.instances)) == (Stage.ENCODE, Stage.DECODE, 3)
    assert at_s < 10 / 3 + 6
    switching.check_bound(LIMITS)
    assert Modelled(SIZES, None).run(asked()) > 2.5 * with_switching_s


@pytest.mark.parametrize("kinds", [((3.0, 3, 50), (3.0, 1, 400)), ((4.0, 2, 20), (1.5, 1, 300)), ((3.0, 1, 50),)])
def test_loads_that_alternate_every_minute_are_never_much_worse_off(kinds: tuple[tuple[float, int, int], ...]) -> None:
    def asked() -> list[Asked]:
        return alternating(7, 240.0, 60.0, *kinds)

    switching = Modelled(SIZES, SwitchMachine(LIMITS))
    assert switching.run(asked()) <= 1.05 * Modelled(SIZES, None).run(asked())
    switching.check_bound(LIMITS)
