from collections.abc import Sequence
from dataclasses import replace

import pytest

from triptych.domain.embedding import KEY_NBYTES, DType, TensorSpec, Ticket
from triptych.domain.kv_segment import KvPlacement, SealedSegment
from triptych.machine.router.held_segments import HeldSegments, leases_of
from triptych.machine.router.request_events import Abort, RenewSegments
from triptych.machine.router.shared_events import Grant, LeasesTaken, Release

GRANT = Grant(7, None, "prefill:1", "p")
NBYTES = 40


def sealed(first: int, tokens: int, choices: tuple[int, ...] = (), holder: str = "p") -> SealedSegment:
    ticket = Ticket(
        key=bytes([first]) * KEY_NBYTES,
        holder=holder,
        epoch=1,
        offset=0,
        payload_nbytes=NBYTES,
        generation=1,
        checksum=0,
        tensors=(TensorSpec("kv", DType.F32, (2, 1, 1, 1, 5)),),
        tokens=tokens,
        lease_id=b"reader %02d %02d ....." % (first, len(choices)),
        lease_s=5.0,
    )
    return SealedSegment(KvPlacement(first, ticket, choices), b"router %02d" % first)


def held(*segments: SealedSegment) -> HeldSegments:
    one = HeldSegments()
    assert one.take(GRANT, segments, 5.0) == [LeasesTaken(GRANT.name, leases_of(segments))], "no credit covers them"
    one.validate()
    return one


def new_leases() -> list[bytes]:
    return [b"new %d" % number for number in range(8)]


def renewing(one: HeldSegments) -> RenewSegments:
    leases = iter(new_leases())
    taken, renew = one.renew(lambda: next(leases), 1.0, 9.0, "a further attempt")
    assert isinstance(renew, RenewSegments)
    assert taken == LeasesTaken(GRANT.name, renew.lease_ids), "before they are asked for"
    return renew


def answered(asked: RenewSegments, count: int) -> list[Ticket | None]:
    """The first ``count`` are leased, the next is lost."""
    pairs = zip(asked.tickets, asked.lease_ids, strict=True)
    tickets: list[Ticket | None] = [replace(ticket, lease_id=lease) for ticket, lease in pairs]
    return [*tickets[:count], None] if count < len(tickets) else tickets


def test_they_are_sent_with_the_address_of_their_holder() -> None:
    one = held(sealed(0, 10), sealed(10, 6))
    assert (one.tokens, one.nbytes_by_holder(), one.name) == (16, {"p": 2 * NBYTES}, "prefill:1")
    assert [place.ticket.address for place in one.send()] == ["prefill:1"] * 2


def test_those_of_single_choices_count_for_no_other() -> None:
    assert held(sealed(0, 10), sealed(10, 6, (1,))).tokens == 10


@pytest.mark.parametrize(
    ("segments", "kept"),
    [
        ([sealed(0, 10), sealed(12, 4)], 1),
        ([sealed(0, 10), sealed(10, 4, holder="another")], 1),
        ([sealed(3, 10)], 0),
        ([sealed(0, 10), sealed(10, 2, (0,)), sealed(10, 3, (1,))], 3),
    ],
)
def test_what_does_not_follow_or_is_of_another_holder_is_not_used(segments: list[SealedSegment], kept: int) -> None:
    one = held(*segments)
    assert len(one.placements) == kept
    (released,) = one.release("over")
    assert isinstance(released, Release)
    assert set(released.lease_ids) == set(leases_of(segments)), "their leases are returned all the same"


def test_a_second_reader_needs_new_leases_and_so_does_one_that_comes_late() -> None:
    one = held(sealed(0, 10))
    assert not one.stale(4.0)
    assert one.stale(6.0)
    one.send()
    assert one.stale(4.0)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_renewed_ones_are_kept_up_to_the_first_that_is_lost(kept: int) -> None:
    one = held(sealed(0, 10), sealed(10, 6))
    one.send()
    asked = renewing(one)
    one.validate()
    assert one.renewed(asked.credit, answered(asked, kept))
    one.validate()
    assert [place.ticket.lease_id for place in one.placements] == new_leases()[:kept]
    assert not one.stale(9.0)


def test_an_answer_that_nobody_asked_for_is_not_taken() -> None:
    one = held(sealed(0, 10))
    assert not one.renewed(GRANT.credit, ())
    asked = renewing(one)
    assert not one.renewed(asked.credit + 1, answered(asked, 1))


def test_all_leases_that_may_be_held_are_returned_once() -> None:
    one = held(sealed(0, 10))
    asked = renewing(one)
    aborted, released = one.release("the request is over")
    assert aborted == Abort(GRANT.credit, "the request is over")
    assert isinstance(released, Release)
    assert {*leases_of([sealed(0, 10)]), *asked.lease_ids} == set(released.lease_ids)
    assert one.release("again") == []
    one.validate()


def test_others_replace_them() -> None:
    one = held(sealed(0, 10))
    other = replace(GRANT, credit=8, name="decode:1", instance_id="d")
    segments: Sequence[SealedSegment] = [sealed(0, 12, holder="d")]
    released, taken = one.take(other, segments, 5.0)
    assert isinstance(released, Release)
    assert taken == LeasesTaken("decode:1", leases_of(segments))
    assert (released.name, one.name, one.tokens) == ("prefill:1", "decode:1", 12)
