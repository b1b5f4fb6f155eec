from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from triptych.machine.agent_health import (
    AgentHealth,
    Cause,
    Down,
    Effect,
    Event,
    Failed,
    HealthLimits,
    Look,
    NotDown,
    NotReplaced,
    Replace,
    Replaced,
    TakeDown,
    Worked,
)

LIMITS = HealthLimits(
    stuck_s=10, hanging_s=10, max_failures=3, min_retired_s=2, linger_s=20, max_retired=2, longest_pause_s=8
)
FINE = Look(0.0, 0.0, frozenset())


def look(stuck_s: float = 0.0, hanging_s: float = 0.0, *idle: int) -> Look:
    return Look(stuck_s, hanging_s, frozenset(idle))


def causes(effects: list[Effect]) -> list[Cause]:
    return [effect.cause for effect in effects if isinstance(effect, Replace)]


def downs(effects: list[Effect]) -> list[int]:
    return [effect.number for effect in effects if isinstance(effect, TakeDown)]


def test_each_of_the_three_causes_replaces_the_agent_once() -> None:
    for cause, seen in ((Cause.STUCK, look(stuck_s=10)), (Cause.HANGING, look(hanging_s=10))):
        health = AgentHealth(LIMITS)
        assert health.handle(look(9.9, 9.9), 0) == []
        assert causes(health.handle(seen, 1)) == [cause]
        assert health.handle(seen, 2) == []  # its replacement is under way
    health = AgentHealth(LIMITS)
    for _ in range(3):
        assert health.handle(FINE, 0) == []
        assert health.handle(Failed(), 0) == []
    assert causes(health.handle(FINE, 0)) == [Cause.FAILING]


def test_failures_of_a_replaced_agent_do_not_count_for_the_new_one() -> None:
    health = AgentHealth(LIMITS)
    for _ in range(3):
        health.handle(Failed(), 0)
    assert causes(health.handle(FINE, 0)) == [Cause.FAILING]
    health.handle(Failed(), 0)
    health.handle(Replaced(0), 0)
    for _ in range(3):
        assert health.handle(FINE, 1) == []
        health.handle(Failed(), 1)
    assert causes(health.handle(FINE, 1)) == [Cause.FAILING]


def test_a_success_resets_the_failure_count() -> None:
    health = AgentHealth(LIMITS)
    for event in (Failed(), Failed(), Worked(), Failed(), Failed()):
        health.handle(event, 0)
    assert health.handle(FINE, 0) == []
    health.handle(Failed(), 0)
    assert causes(health.handle(FINE, 0)) == [Cause.FAILING]


def test_pauses_between_replacements_double_and_reset_after_a_healthy_period() -> None:
    health = AgentHealth(LIMITS)
    now_s = 0.0
    at_s: list[float] = []
    while len(at_s) < 6:
        if causes(health.handle(look(stuck_s=10), now_s)):
            health.handle(NotReplaced(), now_s)
            at_s.append(now_s)
        now_s += 0.5
    assert [later - earlier for earlier, later in pairwise(at_s)] == [1, 2, 4, 8, 8]
    health.handle(Worked(), now_s + 8)
    assert causes(health.handle(look(stuck_s=10), now_s + 8)) == [Cause.STUCK]
    health.handle(NotReplaced(), now_s + 8)
    assert causes(health.handle(look(stuck_s=10), now_s + 10)) == [Cause.STUCK]


def test_a_healthy_period_is_as_long_as_the_longest_pause() -> None:
    for well_s, pause_s in ((7.9, 4.0), (8.0, 2.0)):
        health = AgentHealth(LIMITS)
        for now_s in (0.0, 1.0):
            health.handle(look(stuck_s=10), now_s)
            health.handle(NotReplaced(), now_s)
        health.handle(Worked(), 1.0 + well_s)
        health.handle(look(stuck_s=10), 20.0)
        health.handle(NotReplaced(), 20.0)
        assert causes(health.handle(look(stuck_s=10), 20.0 + pause_s - 0.1)) == []
        assert causes(health.handle(look(stuck_s=10), 20.0 + pause_s)) == [Cause.STUCK]


def test_each_retired_agent_is_closed_at_its_own_time() -> None:
    health = AgentHealth(LIMITS)
    for number, now_s in ((0, 0.0), (1, 10.0)):
        health.handle(look(stuck_s=10), now_s)
        health.handle(Replaced(number), now_s)
    assert downs(health.handle(look(0, 0, 0), 11.0)) == [0]
    assert downs(health.handle(look(0, 0, 0, 1), 12.0)) == [1], "as soon as peers had time to learn of the new agent"
    for number in (0, 1):
        health.handle(Down(number), 13.0)
        health.validate()
    assert health.retired == 0


def test_the_number_of_retired_agents_is_bounded() -> None:
    health = AgentHealth(LIMITS)
    now_s = 0.0
    for number in range(2):
        assert causes(health.handle(look(stuck_s=10), now_s))
        health.handle(Replaced(number), now_s)
        now_s += 8
    assert causes(health.handle(look(stuck_s=10), now_s)) == []
    assert downs(health.handle(look(10, 0, 0), now_s)) == [0]
    health.handle(Down(0), now_s)
    assert health.retired == 1
    assert causes(health.handle(look(stuck_s=10), now_s)) == [Cause.STUCK]


def test_a_retired_agent_is_closed_when_idle_or_overdue_and_closing_is_retried() -> None:
    health = AgentHealth(LIMITS)
    health.handle(look(stuck_s=10), 0)
    health.handle(Replaced(0), 0)
    assert downs(health.handle(look(0, 0, 0), 1.9)) == []  # peers must learn of the new agent
    assert downs(health.handle(look(), 19)) == []
    assert downs(health.handle(look(), 20)) == [0]
    assert downs(health.handle(look(), 21)) == []  # it is being closed
    health.handle(NotDown(0), 22)
    assert downs(health.handle(look(), 41)) == []
    assert downs(health.handle(look(), 42)) == [0]
    health.handle(Down(0), 42)
    assert health.retired == 0


@given(
    st.lists(st.sampled_from(["worked", "failed", "fine", "stuck", "hanging", "later"]), max_size=200), st.booleans()
)
def test_bounds_hold_under_any_events(script: list[str], replaceable: bool) -> None:
    health = AgentHealth(LIMITS)
    now_s, number = 0.0, 0
    replaced_s: list[float] = []
    events: dict[str, Event] = {
        "worked": Worked(),
        "failed": Failed(),
        "stuck": look(stuck_s=11),
        "hanging": look(0, 11),
    }
    for step in script:
        now_s += 0.3 if step != "later" else 5.0
        for effect in health.handle(events.get(step, FINE), now_s):
            if isinstance(effect, Replace):
                replaced_s.append(now_s)
                health.handle(Replaced(number) if replaceable else NotReplaced(), now_s)
                number += 1
            else:
                health.handle(Down(effect.number) if effect.number % 2 else NotDown(effect.number), now_s)
        health.validate()
    assert all(later - earlier >= 1 for earlier, later in pairwise(replaced_s))
