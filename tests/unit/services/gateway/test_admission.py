"""The limits of a gateway over all requests, and what the refused are told."""

from contextlib import ExitStack

import pytest

from triptych.errors import Overloaded
from triptych.services.gateway.admission import Admission
from triptych.services.gateway.lifetime import RequestLifetime


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def serve(admission: Admission, clock: Clock, count: int, *, nbytes: int = 0, took_s: float = 2.0) -> None:
    """One request after the other."""
    for number in range(count):
        with admission.request(f"r{number}", RequestLifetime(600.0, clock.now_s, clock)) as hold:
            hold.grow(nbytes)
            clock.now_s += took_s


async def test_those_above_the_limit_are_told_when_places_will_be_free_as_fast_as_requests_end() -> None:
    clock = Clock()
    admission = Admission(1, 1 << 20, clock)
    await serve(admission, clock, 10)
    told = []
    with admission.request("running", RequestLifetime(600.0, clock.now_s, clock)):
        for number in range(4):
            with (
                pytest.raises(Overloaded) as refused,
                admission.request(f"s{number}", RequestLifetime(600.0, clock.now_s, clock)),
            ):
                pass
            told.append(refused.value.retry_after_s)
    assert told == pytest.approx([2.0, 4.0, 6.0, 8.0], rel=0.15)


async def test_those_whose_bodies_find_no_room_are_told_when_there_will_be_some() -> None:
    clock = Clock()
    admission = Admission(100, 1000, clock)
    await serve(admission, clock, 10, nbytes=800)
    with ExitStack() as stack:
        stack.enter_context(admission.request("running", RequestLifetime(600.0, clock.now_s, clock))).grow(800)
        hold = stack.enter_context(admission.request("large", RequestLifetime(600.0, clock.now_s, clock)))
        with pytest.raises(Overloaded) as refused:
            hold.grow(1000)
        assert refused.value.retry_after_s == pytest.approx(2.5, rel=0.15)
        hold.grow(200)
    assert admission.nbytes == 0
