"""Leases on a prompt's prefix: what is not passed on is given back, and nothing waits long."""

import asyncio
import random
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from triptych.domain.embedding import LEASE_ID_NBYTES, LeaseId, Ticket
from triptych.domain.encoding import LeaseRequest
from triptych.domain.kv_segment import KnownSegment
from triptych.errors import LeaseLost, Unavailable
from triptych.machine.router.shared_events import LeasesReturned, LeasesTaken, Release
from triptych.services.router.leases import CallLeases
from triptych.virtual import virtual_time

SEGMENTS = tuple(KnownSegment(name, f"i-{name}", b"key %d" % at, 64 * at, 64) for at, name in enumerate("aabb"))


def granted(request: LeaseRequest, holder: str) -> Ticket:
    return Ticket(
        key=request.key, holder=holder, epoch=1, offset=0, payload_nbytes=8, generation=3, checksum=0, tensors=(), tokens=64,
        lease_id=request.lease_id, lease_s=request.lease_s,
    )  # fmt: skip


class Holders:
    """A cluster of holders that answer as they are told."""

    def __init__(
        self, answer: Callable[[int, Ticket], Ticket | Exception] = lambda _, ticket: ticket, wait_s: float = 0.0
    ) -> None:
        self.prefix_leases = {"granted": 0, "refused": 0}
        self.held: dict[str, set[LeaseId]] = {"a": set(), "b": set()}
        self.counted: set[tuple[str, LeaseId]] = set()
        self._answer = answer
        self._wait_s = wait_s

    @contextmanager
    def call(self, name: str) -> Any:
        holders = self

        class Holder:
            async def lease(self, request: LeaseRequest) -> Ticket:
                assert request.generation is None
                assert (name, request.lease_id) in holders.counted, "before it may be held"
                holders.held[name].add(request.lease_id)
                await asyncio.sleep(holders._wait_s)
                place = next(at for at, segment in enumerate(SEGMENTS) if segment.key == request.key)
                answer = holders._answer(place, granted(request, f"i-{name}"))
                if isinstance(answer, Exception):
                    raise answer
                return answer

        yield Holder()

    def feed(self, event: LeasesTaken | LeasesReturned) -> None:
        leases = {(event.name, lease_id) for lease_id in event.lease_ids}
        self.counted = self.counted | leases if isinstance(event, LeasesTaken) else self.counted - leases

    def release(self, release: Release) -> None:
        assert release.credit is None
        self.held[release.name] -= set(release.lease_ids)
        self.feed(LeasesReturned(release.name, release.lease_ids))

    @property
    def leases(self) -> int:
        return sum(map(len, self.held.values()))


def taken(holders: Holders, *, read: bool) -> tuple[int, int]:
    """The segments passed on, and the leases that are still held then."""

    async def scenario() -> tuple[int, int]:
        leases = CallLeases(holders, partial(random.Random(1).randbytes, LEASE_ID_NBYTES))  # type: ignore[arg-type]
        placements = await leases.take_prefix(SEGMENTS, 30.0)
        assert [placement.first for placement in placements] == [
            segment.first for segment in SEGMENTS[: len(placements)]
        ]
        assert [placement.ticket.address for placement in placements] == [
            segment.name for segment in SEGMENTS[: len(placements)]
        ]
        held = holders.leases
        if read:
            leases.read()
        leases.release()
        assert holders.leases == (held if read else 0), "the reader releases what it has read"
        assert not holders.counted
        return len(placements), held

    return virtual_time.run(scenario(), seed=1, limit_s=10)


@pytest.mark.parametrize("read", [False, True])
def test_all_are_passed_on_with_a_lease_each(read: bool) -> None:
    holders = Holders()
    assert taken(holders, read=read) == (4, 4)
    assert holders.prefix_leases == {"granted": 4, "refused": 0}


@pytest.mark.parametrize(
    "wrong",
    [
        LeaseLost("evicted"),
        Unavailable("gone"),
        lambda ticket: replace(ticket, key=b"another"),
        lambda ticket: replace(ticket, holder="another"),
        lambda ticket: replace(ticket, tokens=63),
        lambda ticket: replace(ticket, lease_id=b"another"),
    ],
)
def test_what_follows_one_that_is_refused_or_wrong_is_given_back(wrong: Any) -> None:
    def answer(place: int, ticket: Ticket) -> Ticket | Exception:
        if place != 2:
            return ticket
        return wrong if isinstance(wrong, Exception) else wrong(ticket)

    holders = Holders(answer)
    assert taken(holders, read=False) == (2, 2)
    assert holders.prefix_leases == {"granted": 2, "refused": 2}


def test_a_holder_that_does_not_answer_is_not_waited_for() -> None:
    assert taken(Holders(wait_s=1.0), read=False) == (0, 0)
