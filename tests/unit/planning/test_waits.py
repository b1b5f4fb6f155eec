"""Waiting times in closed form, beside queues that are played."""

import random
from heapq import heapify, heapreplace
from math import exp, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.planning.waits import ENDLESS, NO_WAIT, Wait, wait, within


def played(per_s: float, services_s: tuple[float, ...], servers: int, customers: int = 60_000) -> list[float]:
    """Waits of customers that come at random, first come, first served."""
    rng = random.Random(1)
    free_s, now_s, waits = [0.0] * servers, 0.0, []
    heapify(free_s)
    for _ in range(customers):
        now_s += rng.expovariate(per_s)
        start_s = max(now_s, free_s[0])
        heapreplace(free_s, start_s + rng.choice(services_s))
        waits.append(start_s - now_s)
    return waits


@pytest.mark.parametrize("services_s", [(0.1,), (0.05, 0.15), (0.01, 0.01, 0.01, 0.37)])
@pytest.mark.parametrize(("per_s", "servers"), [(3.0, 1), (7.0, 1), (14.0, 2), (32.0, 4)])
def test_the_mean_wait_is_that_of_a_queue(services_s: tuple[float, ...], per_s: float, servers: int) -> None:
    mean_s = sum(services_s) / len(services_s)
    square_s2 = sum(value * value for value in services_s) / len(services_s)
    waits = played(per_s, services_s, servers)
    found = wait(per_s, mean_s, square_s2, servers=servers)
    assert found.mean_s == pytest.approx(sum(waits) / len(waits), rel=0.08 if servers == 1 else 0.25)
    limit_s = 2 * found.mean_s
    share = sum(value <= limit_s for value in waits) / len(waits)
    assert within(limit_s, found) == pytest.approx(share, abs=0.08)


def test_a_server_that_does_not_keep_up_has_waits_without_end() -> None:
    assert wait(10.0, 0.1, 0.01) == ENDLESS
    assert wait(0.0, 0.1, 0.01) == NO_WAIT
    assert within(1e9, ENDLESS) == 0.0
    assert within(-0.1, NO_WAIT) == 0.0
    assert within(0.0, NO_WAIT) == 1.0


def test_two_waits_are_added() -> None:
    rng = random.Random(2)
    first, second = Wait(0.6, 0.3), Wait(0.9, 0.2)
    sums = [
        sum(rng.expovariate(each.rate) if rng.random() < each.share else 0.0 for each in (first, second))
        for _ in range(40_000)
    ]
    for limit_s in (0.1, 0.4, 1.0):
        share = sum(value <= limit_s for value in sums) / len(sums)
        assert within(limit_s, first, second) == pytest.approx(share, abs=0.01)
    assert within(0.5, first, first) == pytest.approx(within(0.5, first, Wait(0.6, 0.3000001)), abs=1e-5)
    assert first.then(second).mean_s == pytest.approx(0.5)


@given(st.floats(0, 1), st.floats(0, 10), st.floats(0, 1), st.floats(0, 10), st.floats(0, 20), st.floats(0, 20))
def test_more_time_is_never_worse(
    share: float, mean_s: float, other: float, other_s: float, limit_s: float, more_s: float
) -> None:
    waits = Wait(share, mean_s if share else 0.0), Wait(other, other_s if other else 0.0)
    before, after = within(limit_s, *waits), within(limit_s + more_s, *waits)
    assert -1e-9 <= before <= after + 1e-9 <= 1 + 2e-9


def test_an_exponential_wait_is_within_its_mean_as_often_as_it_should() -> None:
    assert within(2.0, Wait(1.0, 2.0)) == pytest.approx(1 - exp(-1))
    assert Wait(0.5, 0.0).rate == inf
