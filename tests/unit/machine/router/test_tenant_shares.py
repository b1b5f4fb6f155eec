"""Shares of tenants at one stage: accounts, and how much later requests count as having come."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.examples import examples
from triptych.domain.queue_position import AGEING_S
from triptych.domain.tenant import Tenant
from triptych.machine.router.tenant_shares import MAX_IDLE, Place, TenantShares
from triptych.policy.fairness import BURST_S, UNSHARED, by_weight

A, B = Tenant("a"), Tenant("b")
PER_S = 10.0


class Stage:
    def __init__(self) -> None:
        self.shares = TenantShares(by_weight)
        self.now_s = 0.0

    def enter(self, tenant: Tenant, work: int = 10, *, per_s: float | None = PER_S, alone: bool = False) -> Place:
        return self.shares.enter(tenant, 0, work, per_s, self.now_s, alone=alone)

    def serve(self, place: Place) -> None:
        self.now_s += place.work / PER_S
        self.shares.leave(place, served=True)
        self.shares.validate()


def test_what_a_tenant_has_waiting_puts_its_next_request_behind_by_its_part_of_the_rate() -> None:
    stage = Stage()
    stage.enter(B)
    behind = [stage.enter(A).share.behind_s for _ in range(3)]
    assert behind == [0.0, 2.0 + AGEING_S, 4.0 + AGEING_S], "1 s of work each, at half of the rate"
    stage = Stage()
    stage.enter(B)
    heavy = Tenant("heavy", 3.0)
    assert [stage.enter(heavy, 3).share.behind_s for _ in range(2)] == pytest.approx([0.0, 0.4])


def test_what_is_within_the_share_is_never_lost_and_goes_before_what_is_beyond() -> None:
    stage = Stage()
    stage.enter(B)
    shares = [stage.enter(A, 3).share for _ in range(4)]
    assert (
        [share.within for share in shares]
        == [share.behind_s <= BURST_S for share in shares]
        == [True, True, False, False]
    )


def test_a_tenant_alone_is_ordered_as_without_tenants() -> None:
    stage = Stage()
    assert {stage.enter(A, alone=True).share for _ in range(9)} == {UNSHARED}


def test_one_that_comes_beside_a_backlog_counts_as_having_come_with_what_is_served_now() -> None:
    stage = Stage()
    backlog = [stage.enter(A, alone=True) for _ in range(40)]
    for place in backlog[:20]:
        stage.serve(place)
    first, second = stage.enter(B).share, stage.enter(B).share
    assert first.behind_s == pytest.approx(-20.0 - AGEING_S), "before all of it"
    assert second.behind_s == pytest.approx(2.0 - 20.0), "among it"
    assert stage.enter(A).share.behind_s > AGEING_S, "what comes of the first from now on is beyond its share"


def test_nothing_is_saved_up_while_idle() -> None:
    stage = Stage()
    for _ in range(20):
        place = stage.enter(A)
        stage.enter(A)
        stage.serve(place)
    behind = [stage.enter(B, 4).share.behind_s for _ in range(3)]
    assert behind == pytest.approx([0.0, 0.8, 1.6 + AGEING_S])


def test_accounts_are_forgotten_when_nobody_waits() -> None:
    stage = Stage()
    for _ in range(20):
        stage.serve(stage.enter(A))
    stage.enter(B)
    assert stage.enter(A).share.behind_s == 0.0


def test_accounts_of_any_number_of_tenants_are_bounded_and_the_largest_are_kept() -> None:
    stage = Stage()
    stage.enter(B)
    for _ in range(5):
        stage.shares.leave(stage.enter(A), served=True)
    for number in range(3 * MAX_IDLE):
        stage.shares.leave(stage.enter(Tenant(f"tenant-{number}")), served=True)
        assert stage.shares.accounts <= MAX_IDLE + 1
    stage.shares.validate()
    assert stage.enter(A).share.behind_s == pytest.approx(10.0 + AGEING_S), "5 s of work, at half of the rate"


def test_what_was_served_in_the_end_counts() -> None:
    stage = Stage()
    stage.enter(B)
    place = stage.enter(A)
    stage.serve(place)
    stage.shares.correct(place, 30)
    assert stage.enter(A, 1).share.behind_s == pytest.approx(6.0 + AGEING_S)


def test_what_leaves_unserved_costs_nothing() -> None:
    stage = Stage()
    stage.enter(B)
    for place in [stage.enter(A) for _ in range(5)]:
        stage.shares.leave(place, served=False)
    stage.shares.validate()
    assert stage.enter(A).share.behind_s == 0.0


def test_until_the_rate_is_known_a_request_counts_as_a_tenth_of_a_second() -> None:
    stage = Stage()
    stage.enter(B, per_s=None)
    assert [stage.enter(A, per_s=None).share.behind_s for _ in range(3)] == pytest.approx([0.0, 0.2, 0.4])


def test_tenants_that_were_idle_are_remembered_up_to_the_bound_and_forgotten_by_halves() -> None:
    stage = Stage()
    stage.enter(B)
    for number in range(MAX_IDLE):
        stage.shares.leave(stage.enter(Tenant(f"tenant-{number}")), served=True)
    assert stage.shares.accounts == MAX_IDLE + 1, "those that are idle, and the one that waits"
    stage.shares.leave(stage.enter(Tenant("one more")), served=True)
    assert stage.shares.accounts == MAX_IDLE // 2 + 2


def test_a_tenants_part_is_its_weight_beside_all_that_wait() -> None:
    stage, heavy = Stage(), Tenant("heavy", 3.0)
    assert stage.shares.part(A) == 1.0
    stage.enter(heavy)
    assert (stage.shares.part(A), stage.shares.part(heavy)) == (0.25, 1.0)
    stage.enter(A)
    assert (stage.shares.part(A), stage.shares.part(heavy)) == (0.25, 0.75)


def test_the_work_of_a_tenant_is_counted_by_priority() -> None:
    stage = Stage()
    place = stage.shares.enter(A, 0, 5, PER_S, 0.0, alone=False)
    stage.shares.enter(A, 1, 7, PER_S, 0.0, alone=False)
    assert [stage.shares.waiting_work("a", priority) for priority in (0, 1, 2)] == [(5, 0), (7, 5), (0, 12)]
    stage.shares.leave(place, served=False)
    assert stage.shares.waiting_work("a", 1) == (7, 0)
    assert stage.shares.waiting_work("nobody", 1) == (0, 0)


class Steps(RuleBasedStateMachine):
    """The accounts add up after any steps, and two that always want more get equal work."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()
        self.places: list[Place] = []

    @rule(
        name=st.sampled_from("abc"),
        weight=st.sampled_from([0.01, 1.0, 7.3]),
        work=st.integers(1, 10**6),
        alone=st.booleans(),
    )
    def enter(self, name: str, weight: float, work: int, alone: bool) -> None:
        self.places.append(self.stage.enter(Tenant(name, weight), work, alone=alone))

    @precondition(lambda self: self.places)
    @rule(data=st.data(), served=st.booleans(), more=st.integers(-5, 5))
    def leave(self, data: st.DataObject, served: bool, more: int) -> None:
        place = self.places.pop(data.draw(st.integers(0, len(self.places) - 1)))
        self.stage.now_s += 0.1
        self.stage.shares.leave(place, served=served)
        if served:
            self.stage.shares.correct(place, max(0, place.work + more))

    @invariant()
    def adds_up(self) -> None:
        self.stage.shares.validate()


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


def test_served_by_their_order_two_that_always_want_more_get_work_by_their_weights() -> None:
    stage, heavy = Stage(), Tenant("heavy", 3.0)
    waiting: list[tuple[float, Place]] = []

    def send(tenant: Tenant) -> None:
        place = stage.enter(tenant, 5)
        waiting.append((stage.now_s + place.share.behind_s, place))

    for _ in range(20):
        send(A)
        send(heavy)
    got = {"a": 0, "heavy": 0}
    for _ in range(200):
        first = min(waiting, key=lambda entry: entry[0])
        waiting.remove(first)
        stage.serve(first[1])
        got[first[1].tenant] += first[1].work
        send(A if first[1].tenant == "a" else heavy)
    assert got["heavy"] / got["a"] == pytest.approx(3.0, rel=0.1)
