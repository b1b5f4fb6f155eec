from dataclasses import replace

from triptych.domain.embedding import DType, TensorSpec, Ticket
from triptych.domain.encoding import EncodeResult
from triptych.domain.generation import PullReport, Ready
from triptych.domain.item_plan import ItemPlan
from triptych.domain.media import MediaInfo, Modality, Shard
from triptych.machine.router.held_ticket import HeldTicket
from triptych.machine.router.request_events import Abort
from triptych.machine.router.request_item import RequestItem
from triptych.machine.router.shared_events import Grant, Release

INFO = MediaInfo(Modality.IMAGE, "png", 28, 14, 100, bytes(32))
TENSORS = (TensorSpec("t", DType.F32, (4, 8)),)
PLAN = ItemPlan(
    1, "messages[0]", b"", INFO, (bytes(32), b""), 1, 4, TENSORS, 128, (4,), shard=Shard(first=2, count=3, of=8)
)
TICKET = Ticket(bytes(32), "encoder-1", 1, 0, 128, 1, 1, TENSORS, 4, b"reader", 10.0)


def held(*, answered: bool = True) -> RequestItem:
    leases = iter((b"router", b"reader"))
    ticket = HeldTicket.requested(Grant(7, 0, "e", "encoder-1"), lambda: next(leases), 0.0, 10.0)
    if answered:
        ticket.granted(TICKET, b"router", PLAN, 60.0)
    result = EncodeResult(TICKET, b"router", cached=True, queue_s=0.5, encode_s=0.25)
    return RequestItem(3, PLAN, ticket, served=result, encoder_id="encoder-1", attempts=1)


def test_credits_and_leases_are_released_once() -> None:
    item = held()
    assert item.ready
    assert item.release("over") == [Release("e", 7, (b"router", b"reader"), "over")]
    assert item.release("over") == []
    renewing = held()
    assert renewing.held is not None
    renewing.held.renew(lambda: b"second", 1.0, 1.0, "short")
    for under_way in (held(answered=False), renewing):
        assert not under_way.ready
        assert [type(effect) for effect in under_way.release("over")] == [Abort, Release]


def test_the_embedding_is_placed_at_its_placeholders() -> None:
    placement = held().placement
    assert (placement.item, placement.start, placement.ticket, placement.continues) == (
        3,
        1,
        replace(TICKET, address="e"),
        True,
    )


def test_the_timeline_has_the_reports_of_encoder_and_receiver() -> None:
    ready = Ready((PullReport(0, "tcp", 9, 0.1, cached=False), PullReport(3, "shm", 128, 0.5, cached=True)), 0.0, 0.0)
    line = held().timeline(ready)
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
    line = RequestItem(0, PLAN).timeline(None)
    assert (line.encoder, line.pull_backend, line.text_cached) == ("", "", False)
