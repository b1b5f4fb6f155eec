"""One item of a request: what its ticket must be, how long its leases last, and what is given back."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from triptych.domain.embedding import DType, TensorSpec, Ticket
from triptych.domain.encoding import EncodeResult
from triptych.domain.generation import PullReport, Ready
from triptych.domain.media import MediaInfo, Modality, Shard
from triptych.machine.router.cluster_events import Grant
from triptych.machine.router.request_events import Abort, CountedItem, Release
from triptych.machine.router.request_item import RequestItem

INFO = MediaInfo(Modality.IMAGE, "png", 28, 14, 100, bytes(32))
COUNTED = CountedItem(0, INFO, (bytes(32), b""), start=1, tokens=4, nbytes=128, param="messages[0]")
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


def held(**fields: Any) -> RequestItem:
    result = EncodeResult(TICKET, b"router", cached=True, queue_s=0.5, encode_s=0.25)
    has: dict[str, Any] = {
        "grant": Grant(7, 0, "e", "least loaded"),
        "result": result,
        "served": result,
        "ticket": TICKET,
        "lease_ids": (b"router", b"reader"),
        "reader_lease": b"reader",
        "encoder_id": "encoder-1",
        "attempts": 1,
    }
    return RequestItem(COUNTED, **{**has, **fields})


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"key": b"short"}, "a key of 5 bytes instead of 32"),
        ({"holder": "encoder-2"}, "a ticket of encoder-2"),
        ({"tokens": 5}, "5 tokens for an item that was counted as 4"),
        ({"tensors": ()}, "tensors that do not make up 128 bytes"),
        ({"payload_nbytes": 127}, "tensors that do not make up 127 bytes"),
    ],
)
def test_a_ticket_that_is_not_what_was_asked_for_is_told_by_its_fault(changes: Any, fault: str | None) -> None:
    assert RequestItem(COUNTED).fault(replace(TICKET, **changes), "encoder-1") == fault


def test_more_time_is_asked_for_at_half_a_lease_unless_it_outlasts_the_request() -> None:
    item = held()
    item.lasts((b"router", b"reader"), asked_s=10.0, lease_s=4.0, deadline_s=60.0)
    assert (item.held_until_s, item.expires_s, item.extend_s) == (14.0, 14.0, 12.0)
    item.lasts((b"router",), asked_s=20.0, lease_s=4.0, deadline_s=60.0)
    assert (item.held_until_s, item.expires_s, item.extend_s) == (24.0, 14.0, 22.0)
    item.lasts((b"router", b"reader"), asked_s=50.0, lease_s=9.5, deadline_s=60.0)
    assert (item.expires_s, item.extend_s) == (59.5, inf)


def test_a_ticket_is_stale_once_sent_or_short_but_is_renewed_only_once() -> None:
    assert not held(expires_s=5.0).stale(5.0)
    assert held(expires_s=4.9).stale(5.0)
    assert not held(expires_s=4.9, renewed=True).stale(5.0)
    assert held(expires_s=9.0, renewed=True, ticket=None).stale(5.0)


def test_letting_go_gives_place_and_leases_back_once() -> None:
    item = held(extend_s=3.0)
    assert item.let_go(2, "over") == [Release("e", 7, (b"router", b"reader"), "over")]
    assert (item.grant, item.result, item.ticket, item.lease_ids, item.extend_s) == (None, None, None, (), inf)
    assert item.let_go(2, "over") == []
    for under_way in (held(result=None, ticket=None), held(renewing=True, ticket=None)):
        assert [type(effect) for effect in under_way.let_go(2, "over")] == [Abort, Release]
        assert not under_way.renewing


def test_its_timeline_has_what_encoder_and_puller_said_of_it() -> None:
    ready = Ready((PullReport(0, "tcp", 9, 0.1, cached=False), PullReport(3, "shm", 128, 0.5, cached=True)), 0.0, 0.0)
    item = held()
    item.counted = replace(COUNTED, item=1, shard=Shard(2, 3, 8))
    line = item.timeline(3, ready)
    assert (line.item, line.shard, line.modality, line.width, line.height, line.tokens) == (
        1,
        str(Shard(2, 3, 8)),
        "image",
        28,
        14,
        4,
    )
    assert (line.encoder, line.encode_attempts, line.encoder_cached) == ("encoder-1", 1, True)
    assert (line.queue_s, line.encode_s) == (0.5, 0.25)
    assert (line.pull_backend, line.pull_bytes, line.pull_s, line.text_cached) == ("shm", 128, 0.5, True)
    line = RequestItem(COUNTED).timeline(0, None)
    assert (line.shard, line.encoder, line.pull_backend, line.text_cached) == ("", "", "", False)
