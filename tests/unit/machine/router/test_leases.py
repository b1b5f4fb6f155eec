"""Validation of tickets, durations of their leases, and renewals."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from triptych.domain.embedding import KEY_NBYTES, DType, TensorSpec, Ticket
from triptych.domain.item_plan import ItemPlan
from triptych.domain.kv_segment import KvPlacement, SealedSegment
from triptych.domain.media import MediaInfo, Modality
from triptych.machine.router.attempts import TextAttempt
from triptych.machine.router.leases import AttemptLeases, leases_of
from triptych.machine.router.request_events import Abort, AttemptKind, Renew
from triptych.machine.router.shared_events import Grant, LeasesTaken, Release, released_together

TICKET = Ticket(
    key=bytes(32),
    holder="encoder-1",
    epoch=1,
    offset=0,
    payload_nbytes=128,
    generation=1,
    checksum=1,
    tensors=(TensorSpec("t", DType.F32, (4, 8)),),
    tokens=4,
    lease_id=b"reader",
    lease_s=10.0,
)
PLAN = ItemPlan(
    item=0,
    param="messages[0]",
    media=b"",
    info=MediaInfo(Modality.IMAGE, "png", 28, 28, 100, bytes(32)),
    content=(bytes(32), b""),
    start=1,
    tokens=4,
    tensors=TICKET.tensors,
    nbytes=192,
    units=(4,),
)
GRANT = Grant(7, 0, "e", "encoder-1", "least loaded")


def asked(now_s: float = 0.0, lease_s: float = 10.0) -> AttemptLeases:
    leases = iter((b"router", b"reader"))
    return AttemptLeases.requested(GRANT, lambda: next(leases), now_s, lease_s)


def held(now_s: float = 0.0, lease_s: float = 10.0, *, deadline_s: float = 60.0) -> AttemptLeases:
    made = asked(now_s, lease_s)
    assert made.granted(TICKET, b"router", PLAN, deadline_s) is None
    return made


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"key": b"short"}, "a key of 5 bytes instead of 32"),
        ({"holder": "encoder-2"}, "a ticket of encoder-2"),
        ({"tokens": 5}, "5 tokens for an item of 4"),
        ({"tensors": ()}, "tensors of another form than the item's"),
        ({"tensors": (TensorSpec("t", DType.F32, (8, 4)),)}, "tensors of another form than the item's"),
        ({"tensors": (TensorSpec("t", DType.I32, (4, 8)),)}, "tensors of another form than the item's"),
        ({"payload_nbytes": 127}, "tensors that do not sum to 127 bytes"),
        ({"lease_id": b"other"}, "other leases than those requested"),
    ],
)
def test_a_ticket_that_does_not_match_its_request_is_refused_with_a_reason(changes: Any, fault: str | None) -> None:
    assert asked().granted(replace(TICKET, **changes), b"router", PLAN, 60.0) == fault


def test_lease_ids_are_chosen_before_the_call_and_kept_while_they_may_be_held() -> None:
    lease = asked()
    assert (lease.lease_ids, lease.is_pending) == ((b"router", b"reader"), True)
    lease.granted(TICKET, b"another", PLAN, 60.0)
    assert lease.lease_ids == (b"router", b"reader", b"another", b"reader")
    refused = asked()
    refused.not_granted()
    assert refused.lease_ids == ()


def test_a_lease_is_extended_at_half_its_time_unless_it_outlasts_the_request() -> None:
    lease = held(10.0, 4.0)
    assert (lease.router_until_s, lease.reader_until_s, lease.extend_s) == (14.0, 14.0, 12.0)
    lease.extended((b"router",), 20.0, 4.0, 60.0)
    assert (lease.router_until_s, lease.reader_until_s, lease.extend_s) == (24.0, 14.0, 22.0)
    lease.extended((b"router", b"reader"), 50.0, 9.5, 60.0)
    assert (lease.reader_until_s, lease.extend_s) == (59.5, inf)


def test_extensions_repeat_until_the_remaining_time_is_too_short() -> None:
    lease = held(0.0, 4.0)
    renew = lease.extend(2.0, 5.0)
    assert (renew.credit, renew.name, renew.tickets) == (7, "e", (TICKET, TICKET))
    assert (renew.lease_ids, renew.lease_s, renew.extends) == ((b"router", b"reader"), 5.0, True)
    assert lease.extend_s == 3.0
    lease.extend(3.6, 5.0)
    assert lease.extend_s == inf


def test_a_ticket_is_stale_once_sent_or_short_but_is_renewed_only_once() -> None:
    lease = held(0.0, 5.0)
    assert not lease.is_stale(5.0)
    assert lease.is_stale(5.1)
    assert lease.renew(lambda: b"second", 4.0, 1.0, "short") == [Renew(7, "e", (TICKET,), (b"second",), 1.0, "short")]
    assert (lease.is_renewing, lease.lease_ids) == (True, (b"router", b"reader", b"second"))
    assert lease.renewed((replace(TICKET, lease_id=b"second"),)) == 1
    assert (lease.is_pending, lease.reader_until_s) == (False, 5.0)
    assert not lease.is_stale(9.0)
    lease.is_sent = True
    assert lease.is_stale(0.0)


@pytest.mark.parametrize("changes", [{"key": b"x" * 32}, {"tokens": 5}, {"tensors": ()}, {"lease_id": b"third"}])
def test_a_renewal_for_another_embedding_is_detected(changes: Any) -> None:
    lease = held()
    lease.renew(lambda: b"second", 4.0, 1.0, "short")
    ticket = replace(TICKET, **{"lease_id": b"second", **changes})
    assert lease.renewed((ticket,)) == 0
    assert ticket.lease_id in lease.lease_ids


def test_a_place_is_returned_with_all_leases_and_its_call_is_cancelled() -> None:
    assert held().release("over") == [Release("e", 7, (b"router", b"reader"), "over")]
    assert [type(effect) for effect in asked().release("over")] == [Abort, Release]


# --- segments of keys and values that an attempt has transferred ---

PREFILL = Grant(7, None, "prefill:1", "p")
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


def kv_transferred(*segments: SealedSegment) -> tuple[TextAttempt, AttemptLeases]:
    attempt = TextAttempt(AttemptKind.PREFILL, PREFILL, 0.0)
    taken = [LeasesTaken(PREFILL.name, leases_of(segments))]
    assert attempt.transfer_kv(segments, 5.0) == taken, "no credit covers them"
    assert attempt.leases is not None
    attempt.leases.validate()
    return attempt, attempt.leases


def new_leases() -> list[bytes]:
    return [b"new %d" % number for number in range(8)]


def renewing(held: AttemptLeases) -> Renew:
    leases = iter(new_leases())
    taken, renew = held.renew(lambda: next(leases), 1.0, 9.0, "a further attempt")
    assert isinstance(renew, Renew)
    assert taken == LeasesTaken(PREFILL.name, renew.lease_ids), "before they are asked for"
    return renew


def answered(renew: Renew, count: int) -> list[Ticket]:
    """The first ``count`` are leased, the next is lost."""
    pairs = zip(renew.tickets, renew.lease_ids, strict=True)
    return [replace(ticket, lease_id=lease) for ticket, lease in pairs][:count]


def test_segments_are_sent_with_the_address_of_their_holder() -> None:
    attempt, _ = kv_transferred(sealed(0, 10), sealed(10, 6))
    segments = attempt.kv_segments
    assert attempt.covered_tokens == 16
    assert [segment.ticket.address for segment in segments] == ["prefill:1"] * 2
    assert [segment.end for segment in segments] == [10, 16]


def test_segments_of_single_choices_cover_no_other() -> None:
    attempt, _ = kv_transferred(sealed(0, 10), sealed(10, 6, (1,)))
    assert attempt.covered_tokens == 10


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
    attempt, _ = kv_transferred(*segments)
    assert len(attempt.kv_segments) == kept
    (released,) = attempt.release("over")
    assert isinstance(released, Release)
    assert released.credit is None
    assert set(released.lease_ids) == set(leases_of(segments)), "their leases are returned all the same"


def test_a_second_reader_of_segments_needs_new_leases_and_so_does_one_that_comes_late() -> None:
    _, leases = kv_transferred(sealed(0, 10))
    assert not leases.is_stale(4.0)
    assert leases.is_stale(6.0)
    leases.is_sent = True
    assert leases.is_stale(4.0)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_renewed_segments_count_up_to_the_first_that_is_lost(kept: int) -> None:
    attempt, leases = kv_transferred(sealed(0, 10), sealed(10, 6))
    leases.is_sent = True
    renew = renewing(leases)
    leases.validate()
    assert leases.renewed(answered(renew, kept)) == kept
    leases.validate()
    assert [segment.ticket.lease_id for segment in attempt.kv_segments][:kept] == new_leases()[:kept]
    assert not leases.is_stale(9.0)


def test_all_leases_that_may_be_held_are_returned_once() -> None:
    attempt, leases = kv_transferred(sealed(0, 10))
    renew = renewing(leases)
    aborted, released = attempt.release("the request is over")
    assert aborted == Abort(PREFILL.credit, "the request is over")
    assert isinstance(released, Release)
    assert {*leases_of([sealed(0, 10)]), *renew.lease_ids} == set(released.lease_ids)
    assert attempt.release("again") == []


def test_releases_at_one_instance_are_one_call_for_all_leases_and_credits() -> None:
    releases = [Release("e", 7, (b"1", b"2")), Release("e", None, (b"3",)), Release("e", 0, ())]
    assert released_together(releases) == ((b"1", b"2", b"3"), (7, 0))
