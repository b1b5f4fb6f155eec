"""What a tenant's share makes of a request's queue position, and of its predicted wait."""

import math
from dataclasses import replace

import pytest

from triptych.domain.queue_position import AGEING_S, QueuePosition, RelativeQueuePosition
from triptych.policy.fairness import BURST_S, UNSHARED, Share, by_weight, may_start, share_wait_s
from triptych.policy.queueing import as_called, by_slo


def queue_position(due_s: float = 5.0, *, arrived_s: float = 0.0, priority: int = 0) -> QueuePosition:
    return by_slo(priority=priority, deadline_s=60.0, arrived_s=arrived_s, arrival=1, due_s=due_s, needs_s=1.0)


def test_what_is_beyond_a_share_goes_behind_what_is_within_whatever_its_objective() -> None:
    beyond = by_weight(ahead_s=BURST_S + 0.1).of(queue_position(0.5))
    within = by_weight(ahead_s=BURST_S).of(queue_position(math.inf))
    assert within < beyond
    assert within.at(1e6) == within, "it is never lost"
    assert by_weight(ahead_s=0.2).of(queue_position(5.0)) < by_weight(ahead_s=0.1).of(queue_position(9.0)), (
        "objectives count within shares"
    )
    assert by_weight(ahead_s=99.0).of(queue_position(priority=-1)) < within, "priority goes before shares"


def test_what_is_beyond_a_share_stays_so_once_it_is_lost() -> None:
    beyond = by_weight(ahead_s=BURST_S + 0.1).of(queue_position(0.5))
    lost = beyond.at(1e6)
    assert lost > beyond
    assert lost.beyond_share
    assert lost.relative(0.0).due_in_s == pytest.approx(beyond.relative(0.0).aged_in_s), (
        "its own objective is told without the share"
    )


def test_a_turn_without_a_share_is_unchanged() -> None:
    assert UNSHARED.of(queue_position()) == queue_position()


@pytest.mark.parametrize("share", [Share(40.0), Share(-12.0, within=True), Share(0.3, within=True), UNSHARED])
def test_an_instance_gives_a_call_the_position_that_the_router_computed(share: Share) -> None:
    now_s, here = 2.0, share.of(queue_position())
    there = as_called(
        priority=0,
        deadline_s=58.0,
        arrived_s=0.0,
        arrival=1,
        position=replace(here.relative(now_s), aged_in_s=None),
    )
    assert (there.due_s + now_s, there.lost_s + now_s) == pytest.approx((here.due_s, here.lost_s))
    assert there.behind_s == here.behind_s


def test_the_ageing_counts_from_when_a_request_counts_as_having_come() -> None:
    late = as_called(
        priority=0, deadline_s=600.0, arrived_s=0.0, arrival=1, position=RelativeQueuePosition(500.0, behind_s=100.0)
    )
    assert late.due_s == AGEING_S + 100.0


@pytest.mark.parametrize(
    ("ahead_s", "own_s", "more_urgent_s", "share", "wait_s"),
    [
        (10.0, 10.0, 0.0, 1.0, 10.0),
        (10.0, 0.0, 0.0, 0.5, 0.0),
        (10.0, 2.0, 0.0, 0.25, 8.0),
        (10.0, 4.0, 0.0, 0.25, 10.0),
        (10.0, 1.0, 3.0, 0.5, 5.0),
    ],
)
def test_a_tenant_waits_for_its_own_work_at_its_part_of_the_rate_and_never_for_more_than_there_is(
    ahead_s: float, own_s: float, more_urgent_s: float, share: float, wait_s: float
) -> None:
    assert share_wait_s(ahead_s=ahead_s, own_s=own_s, more_urgent_s=more_urgent_s, share=share) == wait_s


@pytest.mark.parametrize(
    ("beyond", "wanted", "running", "begun", "starts"),
    [
        (False, 1, 15, 0, True),
        (False, 2, 15, 0, False),
        (True, 16, 0, 0, True),
        (True, 1, 13, 0, True),
        (True, 1, 14, 0, False),
        (True, 1, 5, 1, True),
        (True, 1, 5, 2, False),
        (True, 4, 5, 0, True),
    ],
)
def test_what_is_beyond_a_share_leaves_places_free_and_takes_few_in_a_step(
    *, beyond: bool, wanted: int, running: int, begun: int, starts: bool
) -> None:
    position = by_weight(ahead_s=BURST_S + beyond).of(queue_position())
    assert may_start(position, wanted=wanted, running=running, places=16, begun=begun) is starts


def test_a_request_with_more_choices_than_places_runs_alone() -> None:
    position = QueuePosition(0, 0.0, 1)
    assert may_start(position, wanted=4, running=0, places=2, begun=0)
    assert not may_start(position, wanted=4, running=1, places=2, begun=0)
