"""Validation of tickets, durations of their leases, and renewals."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from triptych.domain.embedding import DType, TensorSpec, Ticket
from triptych.domain.item_plan import ItemPlan
from triptych.domain.media import MediaInfo, Modality
from triptych.machine.router.held_ticket import HeldTicket
from triptych.machine.router.request_events import Extend, Renew
from triptych.machine.router.shared_events import Grant

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


def asked(now_s: float = 0.0, lease_s: float = 10.0) -> HeldTicket:
    leases = iter((b"router", b"reader"))
    return HeldTicket.requested(GRANT, lambda: next(leases), now_s, lease_s)


def held(now_s: float = 0.0, lease_s: float = 10.0, *, deadline_s: float = 60.0) -> HeldTicket:
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
    one = asked()
    assert (one.lease_ids, one.pending) == ((b"router", b"reader"), True)
    one.granted(TICKET, b"another", PLAN, 60.0)
    assert one.lease_ids == (b"router", b"reader", b"another", b"reader")
    refused = asked()
    refused.not_granted()
    assert refused.lease_ids == ()


def test_a_lease_is_extended_at_half_its_time_unless_it_outlasts_the_request() -> None:
    one = held(10.0, 4.0)
    assert (one.router_until_s, one.reader_until_s, one.extend_s) == (14.0, 14.0, 12.0)
    one.extended((b"router",), 20.0, 4.0, 60.0)
    assert (one.router_until_s, one.reader_until_s, one.extend_s) == (24.0, 14.0, 22.0)
    one.extended((b"router", b"reader"), 50.0, 9.5, 60.0)
    assert (one.reader_until_s, one.extend_s) == (59.5, inf)


def test_extensions_repeat_until_the_remaining_time_is_too_short() -> None:
    one = held(0.0, 4.0)
    assert one.extend(2.0, 5.0) == Extend(7, "e", TICKET.key, 1, (b"router", b"reader"), 5.0)
    assert one.extend_s == 3.0
    one.extend(3.6, 5.0)
    assert one.extend_s == inf


def test_a_ticket_is_stale_once_sent_or_short_but_is_renewed_only_once() -> None:
    one = held(0.0, 5.0)
    assert not one.stale(5.0)
    assert one.stale(5.1)
    assert one.renew(lambda: b"second", 4.0, 1.0, "short") == Renew(7, "e", TICKET.key, 1, b"second", 1.0, "short")
    assert (one.pending, one.lease_ids) == (True, (b"router", b"reader", b"second"))
    assert one.renewed_as(replace(TICKET, lease_id=b"second"))
    assert (one.pending, one.reader_until_s) == (False, 5.0)
    assert not one.stale(9.0)
    one.unsent = None
    assert one.stale(0.0)


@pytest.mark.parametrize("changes", [{"key": b"x" * 32}, {"tokens": 5}, {"tensors": ()}, {"lease_id": b"third"}])
def test_a_renewal_for_another_embedding_is_detected(changes: Any) -> None:
    one = held()
    one.renew(lambda: b"second", 4.0, 1.0, "short")
    ticket = replace(TICKET, **{"lease_id": b"second", **changes})
    assert not one.renewed_as(ticket)
    assert ticket.lease_id in one.lease_ids
