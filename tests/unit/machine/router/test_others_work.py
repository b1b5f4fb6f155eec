"""Whether a router notices that others send work to the same instances."""

from random import Random

import pytest

from triptych.machine.router.others_work import OthersWork


def noticed(others: OthersWork, *observed: tuple[int, int]) -> bool:
    for reported, own in observed:
        others.observe(reported, own)
    return others.is_much


def test_nothing_is_known_at_first_and_idle_instances_tell_nothing() -> None:
    others = OthersWork()
    assert not noticed(others)
    assert not noticed(others, (3, 0)), "this may be what has just ended"
    assert noticed(others, (9, 0))
    assert noticed(others, *[(0, 0)] * 1000), "it is what was so last"


def test_a_single_router_is_alone_although_reports_are_late() -> None:
    """What it has sent is not reported yet, and what it knows to have ended is reported still."""
    rng, others = Random(7), OthersWork()
    own = 50
    for _ in range(2000):
        was, own = own, max(0, own + rng.randrange(-3, 4))
        others.observe(was, own)
    assert not others.is_much


@pytest.mark.parametrize(("part", "is_much"), [(0.9, False), (0.7, True), (0.5, True), (0.1, True)])
def test_others_are_noticed_by_their_part(part: float, is_much: bool) -> None:
    others = OthersWork()
    for reported in [10, 20, 40] * 20:
        others.observe(reported, round(part * reported))
    assert others.is_much is is_much


def test_others_that_come_and_go_are_noticed() -> None:
    others = OthersWork()
    assert not noticed(others, *[(20, 22)] * 300)
    assert noticed(others, *[(20, 10)] * 100)
    assert not noticed(others, *[(20, 20)] * 300)
