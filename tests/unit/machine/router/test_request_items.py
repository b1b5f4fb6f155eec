from itertools import count

import pytest

from triptych.domain.embedding import DType, TensorSpec, Ticket
from triptych.domain.item_plan import ItemPlan
from triptych.domain.media import MediaInfo, Modality
from triptych.machine.router.held_ticket import HeldTicket
from triptych.machine.router.request_events import After, Extend, RequestEffect, Signal
from triptych.machine.router.request_items import RequestItems
from triptych.machine.router.shared_events import EmbeddingsRead, Grant, HedgeWanted, Release

TENSORS = (TensorSpec("t", DType.F32, (4, 8)),)
DEADLINE_S = 100.0


def plan(item: int) -> ItemPlan:
    info = MediaInfo(Modality.IMAGE, "png", 28, 14, 100, bytes(32))
    return ItemPlan(item, "messages", b"", info, (b"%d" % item, b""), item, 4, TENSORS, 128, (4,))


def items(encoders: str, *, lease_s: float = 10.0) -> RequestItems:
    """Items at these encoders, which have been asked at 0 s, with credits from 0 on."""
    made, leases = RequestItems(plan(number) for number in range(len(encoders))), count()
    for item, encoder in zip(made, encoders, strict=True):
        grant = Grant(item.index, item.index, encoder, f"i-{encoder}")
        item.held = HeldTicket.requested(grant, lambda: b"%d" % next(leases), 0.0, lease_s)
    made.validate()
    return made


def encode(made: RequestItems, number: int) -> None:
    item = made[number]
    assert item.held is not None
    item.encoder_id = item.held.grant.instance_id
    ticket = Ticket(bytes(32), item.encoder_id, 1, 0, 128, 1, 1, TENSORS, 4, item.held.reader_lease, item.held.lease_s)
    assert item.held.granted(ticket, item.held.router_lease, item.plan, DEADLINE_S) is None
    made.validate()


def alarms(effects: list[RequestEffect]) -> list[tuple[float, object]]:
    return [(effect.delay_s, effect.event) for effect in effects if isinstance(effect, After)]


def test_a_reader_gets_all_tickets_once_every_item_is_encoded() -> None:
    made, ready = items("aba"), list[bool]()
    for number in (0, 2, 1):
        encode(made, number)
        ready.append(made.ready)
    assert ready == [False, False, True]
    assert made.nbytes_by_encoder() == {"i-a": 256, "i-b": 128}
    assert [one.ticket.address for one in made.placements()] == ["a", "b", "a"]
    assert [held.unsent for held in made.held] == [None] * 3
    assert made.read() == [EmbeddingsRead((0, 1, 2))]
    assert [effect.name for effect in made.release("over") if isinstance(effect, Release)] == ["a", "b", "a"]
    assert (made.held, made.read(), made.ready) == ([], [], False)


def test_an_item_is_found_by_the_credit_of_its_call_or_hedge() -> None:
    made = items("ab")
    hedge = HeldTicket.requested(Grant(7, 1, "c", "i-c"), lambda: b"hedge", 0.0, 10.0)
    made[1].hedge = hedge
    assert made.call_of(7) == (made[1], hedge)
    assert made.call_of(1) == (made[1], made[1].held)
    assert (made.holder_of(0), made.holder_of(7)) == (made[0], None)
    assert made.call_of(99) == (None, None)


def test_leases_are_extended_at_half_of_their_time_by_one_alarm() -> None:
    made = items("ab")
    encode(made, 0)
    assert alarms(made.watch_leases(1.0)) == [(4.0, Signal.LEASES_DUE)]
    encode(made, 1)
    assert made.watch_leases(2.0) == [], "the alarm that is set comes in time"
    effects = made.leases_due(5.0, 20.0)
    assert [(one.credit, one.lease_s) for one in effects if isinstance(one, Extend)] == [(0, 20.0), (1, 20.0)]
    assert alarms(effects) == [(2.5, Signal.LEASES_DUE)], "half of the time that is left, in case that they fail"


def test_hedges_are_wanted_again_while_the_item_takes_long() -> None:
    made = items("ab")
    made[0].hedge_s, made[1].hedge_s = 4.0, 6.0
    assert alarms(made.watch_hedges(4.0, 0.0)) == [(4.0, Signal.HEDGES_DUE)]
    assert made.watch_hedges(6.0, 0.0) == []
    effects = made.hedges_due(3, 4.0)
    assert [(one.request, one.want.item) for one in effects if isinstance(one, HedgeWanted)] == [(3, 0)]
    assert alarms(effects) == [(1.0, Signal.HEDGES_DUE)], "a quarter of what it has taken"


def test_a_hedge_of_an_item_that_is_encoded_is_noticed() -> None:
    made = items("a")
    encode(made, 0)
    made[0].hedge = HeldTicket.requested(Grant(7, 0, "c", "i-c"), lambda: b"hedge", 0.0, 10.0)
    with pytest.raises(AssertionError, match="item 0: a hedge of nothing"):
        made.validate()
