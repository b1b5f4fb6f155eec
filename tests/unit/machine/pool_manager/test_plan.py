"""A plan that is followed: drifts, searches and moves."""

from collections.abc import Sequence

import pytest

from triptych.domain.mix import Form, Mix
from triptych.domain.replanning import PlanOutcome, PlanStatus, Proposal, RoleCount, in_letters
from triptych.domain.scaling import Kind
from triptych.domain.stage import Role, Stage
from triptych.machine.pool_manager.plan import PlanMachine, ReplanLimits
from triptych.machine.pool_manager.plan_events import (
    HoldSizes,
    PlanDecided,
    PlanEffect,
    PlanFound,
    PlanPaused,
    PlanTick,
    SearchFailed,
    SearchPlan,
    SwitchTo,
)
from triptych.policy.moving import Placed, PoolSize

ALL = frozenset(Stage)
WHOLE = Kind(Role.EPD)
LIMITS = ReplanLimits(drift_persists_s=30.0, replan_rest_s=120.0, replan_move_s=300.0)


def mix(kind: str, requests: int = 200) -> Mix:
    if kind == "text":
        return Mix.of([Form("text", requests, requests, prompt_tokens=200 * requests, output_tokens=50 * requests)])
    items = 2 * requests
    return Mix.of([Form("image", requests, requests, items, 500_000 * items, items, 0.0, 700 * items, 50 * requests)])


class Follower:
    """A machine with a clock, and a cluster that obeys at once."""

    def __init__(self, *, replans: bool = True, scales: bool = True) -> None:
        self.machine = PlanMachine("m", mix("text"), 2.0, LIMITS, replans=replans)
        self.now_s = 0.0
        self.roles = {"a": Role.EPD, "b": Role.EPD}
        self.scales = scales
        self.window_s = 30.0
        self.wanted = 2
        self.sizes: dict[Kind, int] = {}
        self.searches: list[SearchPlan] = []
        self.decided: list[PlanDecided] = []

    def ticks(self, seconds: int, kind: str = "text", *, rate: float = 2.0, requests: int = 200) -> None:
        for _ in range(seconds):
            self.now_s += 1
            instances = tuple(Placed(name, WHOLE, role, True, ALL) for name, role in self.roles.items())
            pools = {WHOLE: PoolSize(self.wanted, 1, 8)} if self.scales else {}
            self.feed(
                self.machine.handle(PlanTick(mix(kind, requests), rate, self.window_s, instances, pools), self.now_s)
            )

    def feed(self, effects: Sequence[PlanEffect]) -> None:
        self.machine.validate()
        for effect in effects:
            match effect:
                case SearchPlan():
                    self.searches.append(effect)
                case SwitchTo(name, role, _):
                    self.roles[name] = role
                case HoldSizes(sizes, drain, _):
                    self.wanted = sizes[WHOLE]
                    for number in range(self.wanted - len(self.roles)):
                        self.roles[f"new{self.now_s:g}-{number}"] = Role.EPD
                    self.roles.pop(drain, None)
                case PlanDecided():
                    self.decided.append(effect)

    def finds(self, gain: float = 0.4, **roles: int) -> None:
        wanted = tuple(RoleCount(Role(letters), count) for letters, count in roles.items())
        self.feed(self.machine.handle(PlanFound(Proposal(wanted, gain, "it is better")), self.now_s))

    @property
    def status(self) -> PlanStatus:
        return self.machine.status(self.now_s)

    @property
    def outcomes(self) -> list[PlanOutcome]:
        return [decision.outcome for decision in self.status.decisions]


def test_a_mix_that_stays_is_never_searched_for() -> None:
    follower = Follower()
    follower.ticks(600)
    assert not follower.searches
    assert follower.status.state == "steady"
    assert {drift.figure for drift in follower.status.drifts} >= {"items per request", "tokens per answer"}


def test_a_drift_leads_to_a_search_once_it_has_persisted() -> None:
    follower = Follower()
    follower.ticks(30, "image")
    assert not follower.searches
    assert follower.status.state.startswith("drifting")
    follower.ticks(10, "image")
    [search] = follower.searches
    assert search.question.present == (RoleCount(Role.EPD, 2),)
    assert search.question.mix == mix("image")
    assert search.question.kinds == {Kind(role) for role in Role}, "they can switch to any"
    assert (search.question.most, search.question.scales, search.question.gain) == ({"": 8}, True, 0.1)
    follower.ticks(100, "image")
    assert len(follower.searches) == 1, "one at a time"


def test_where_few_requests_come_it_waits_until_all_that_it_sees_came_after_the_drift() -> None:
    follower = Follower()
    follower.window_s = 120.0
    follower.ticks(115, "image")
    assert not follower.searches
    follower.ticks(10, "image")
    assert len(follower.searches) == 1


def test_a_figure_that_drifts_later_than_others_begins_the_wait_again() -> None:
    """So that no request from before it is in the mix that is searched for."""
    follower = Follower()
    follower.ticks(25, rate=3.0)
    follower.ticks(29, "image", rate=3.0)
    assert not follower.searches
    follower.ticks(5, "image", rate=3.0)
    [search] = follower.searches
    assert search.question.mix == mix("image")


def test_each_tier_is_asked_about_by_itself() -> None:
    machine = PlanMachine("m", mix("text"), 2.0, LIMITS, replans=True)
    slow, fast, encoders = Kind(Role.PD, "slow"), Kind(Role.PD, "fast"), Kind(Role.E, "slow")
    instances = (
        Placed("a", slow, Role.PD, True, ALL),
        Placed("b", encoders, Role.E, True, ALL),
        Placed("c", fast, Role.PD, True, frozenset()),
    )
    pools = {slow: PoolSize(1, 0, 4), fast: PoolSize(1, 0, 2), encoders: PoolSize(1, 1, 4)}
    effects = [machine.handle(PlanTick(mix("image"), 2.0, 30.0, instances, pools), float(at_s)) for at_s in range(40)]
    [search] = [effect for found in effects for effect in found if isinstance(effect, SearchPlan)]
    assert in_letters(search.question.present) == "E@slow:1,PD@fast:1,PD@slow:1"
    assert search.question.kinds == {*(Kind(role, "slow") for role in Role), fast}
    assert search.question.most == {"slow": 4, "fast": 2}
    wanted = (RoleCount(Role.E, 1, "slow"), RoleCount(Role.PD, 1, "slow"), RoleCount(Role.PD, 2, "fast"))
    machine.handle(PlanFound(Proposal(wanted, 0.4, "it is better")), 41.0)
    [hold] = machine.handle(PlanTick(mix("image"), 2.0, 30.0, instances, pools), 42.0)
    assert isinstance(hold, HoldSizes)
    assert hold.sizes == {slow: 1, fast: 2, encoders: 1}


def test_a_drift_that_is_soon_over_leads_to_none() -> None:
    follower = Follower()
    for _ in range(20):
        follower.ticks(25, "image")
        follower.ticks(2)
    assert not follower.searches


def test_too_few_requests_say_nothing() -> None:
    follower = Follower()
    follower.ticks(200, "image", requests=49)
    assert not follower.searches


def test_what_is_better_is_said_once_and_nothing_moves_without_replan() -> None:
    follower = Follower(replans=False)
    follower.ticks(40, "image")
    follower.finds(E=1, PD=1)
    follower.ticks(600, "image")
    assert follower.outcomes == [PlanOutcome.ADVISED]
    [decided] = follower.decided
    assert "it is better" in decided.decision.reason
    assert "items per request" in decided.decision.reason
    assert in_letters(decided.decision.wanted) == "E:1,PD:1"
    assert set(follower.roles.values()) == {Role.EPD}
    assert len(follower.searches) == 1


def test_with_replan_instances_switch_and_others_start() -> None:
    follower = Follower()
    follower.ticks(40, "image")
    follower.finds(E=3, PD=2)
    follower.ticks(20, "image")
    assert sorted(role.value for role in follower.roles.values()) == ["E", "E", "E", "PD", "PD"]
    assert {"a", "b"} <= set(follower.roles), "those that were there have switched"
    assert follower.outcomes == [PlanOutcome.MOVED]
    follower.ticks(600, "image")
    assert len(follower.searches) == 1, "the placement is for images now"


def test_after_a_move_it_rests_before_the_next_search() -> None:
    follower = Follower()
    follower.ticks(40, "image")
    follower.finds(E=1, PD=2)
    follower.ticks(5, "image")
    assert follower.outcomes == [PlanOutcome.MOVED]
    follower.ticks(140)
    assert len(follower.searches) == 1
    assert follower.status.state.startswith(("rests", "drifting"))
    follower.ticks(20)
    assert len(follower.searches) == 2


def test_a_mix_that_goes_to_and_fro_moves_at_most_once_in_a_rest() -> None:
    follower = Follower()
    for turn in range(40):
        follower.ticks(45, "image" if turn % 2 else "text")
        if follower.status.state.startswith("searching"):
            follower.finds(**({"E": 1, "PD": 1} if turn % 2 else {"EPD": 2}))
    moves = [decision for decision in follower.decided if decision.decision.outcome is PlanOutcome.MOVED]
    assert len(moves) <= follower.now_s / LIMITS.replan_rest_s


def test_nothing_better_keeps_the_placement_which_is_then_for_the_mix_that_was_seen() -> None:
    follower = Follower()
    follower.ticks(40, "image")
    follower.finds(0.0, EPD=2)
    follower.ticks(600, "image")
    assert follower.outcomes == [PlanOutcome.KEPT]
    assert len(follower.searches) == 1


def test_a_search_that_fails_keeps_all_and_says_so_and_is_tried_again() -> None:
    follower = Follower()
    follower.ticks(40, "image")
    follower.feed(follower.machine.handle(SearchFailed("no memory"), follower.now_s))
    assert follower.outcomes == [PlanOutcome.FAILED]
    assert "no memory" in follower.decided[0].decision.reason
    follower.ticks(100, "image")
    assert len(follower.searches) == 1
    follower.ticks(60, "image")
    assert len(follower.searches) == 2


def test_another_rate_counts_where_plans_decide_on_sizes() -> None:
    for replans in (True, False):
        follower = Follower(replans=replans)
        follower.ticks(60, rate=3.0)
        assert len(follower.searches) == replans


def test_instances_that_came_otherwise_are_looked_at_again() -> None:
    follower = Follower()
    follower.ticks(60)
    follower.wanted = 5
    follower.roles |= {"c": Role.EPD, "d": Role.EPD, "e": Role.EPD}
    follower.ticks(40)
    assert len(follower.searches) == 1
    follower.finds(EPD=2)
    follower.ticks(10)
    assert len(follower.roles) == 2
    assert "instances 1.50" in follower.status.decisions[-1].reason
    follower.ticks(400)
    assert len(follower.searches) == 1


def test_sizes_are_held_between_moves() -> None:
    follower = Follower()
    instances = (Placed("a", WHOLE, Role.EPD, True, ALL),)
    tick = PlanTick(mix("text"), 2.0, 30.0, instances, {WHOLE: PoolSize(2, 1, 8)})
    [hold] = follower.machine.handle(tick, 1.0)
    assert isinstance(hold, HoldSizes)
    assert hold.sizes == {WHOLE: 2}
    advising = Follower(replans=False)
    assert advising.machine.handle(tick, 1.0) == []


def test_a_move_that_cannot_be_done_is_said() -> None:
    follower = Follower(scales=False)
    follower.ticks(40, "image")
    follower.finds(E=1, PD=1)
    follower.roles = {"a": Role.EPD}  # one is lost, and nothing starts another
    follower.ticks(350, "image")
    assert follower.outcomes == [PlanOutcome.FAILED]
    assert "there is EPD:1" in follower.status.decisions[-1].reason


def test_a_move_that_takes_too_long_is_given_up() -> None:
    follower = Follower()
    follower.ticks(40, "image")
    follower.finds(E=1, PD=1)
    unsettled = Placed("a", WHOLE, Role.E, False, ALL)
    tick = PlanTick(mix("image"), 2.0, 30.0, (unsettled,), {WHOLE: PoolSize(1, 1, 8)})
    for at_s in (50.0, 200.0, 341.0):
        follower.feed(follower.machine.handle(tick, at_s))
    assert follower.outcomes == [PlanOutcome.FAILED]
    assert "there is E:1 after 5 min" in follower.status.decisions[-1].reason


def test_while_another_manager_leads_nothing_is_searched_for_or_moved() -> None:
    follower = Follower()
    follower.ticks(40, "image")
    follower.feed(follower.machine.handle(PlanPaused("another manager leads"), follower.now_s))
    follower.finds(E=1, PD=1)
    assert follower.outcomes == [PlanOutcome.ADVISED]
    assert follower.status.state == "paused: another manager leads"
    follower.ticks(160)
    follower.finds(E=2, PD=2)
    assert follower.machine.is_moving
    follower.feed(follower.machine.handle(PlanPaused("the store is away"), follower.now_s))
    assert follower.outcomes[-1] is PlanOutcome.FAILED
    follower.ticks(5)


def test_an_answer_that_nobody_waits_for_is_left_out() -> None:
    follower = Follower()
    follower.finds(E=1, PD=1)
    assert not follower.decided


@pytest.mark.parametrize("wrong", [{"replan_gain": 0.0}, {"drift_requests": 0}, {"replan_rest_s": -1.0}])
def test_limits_out_of_bounds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ReplanLimits(**wrong)  # type: ignore[arg-type]
