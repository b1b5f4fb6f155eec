from dataclasses import replace
from itertools import count

import pytest

from triptych.domain.embedding import DType, TensorSpec, Ticket
from triptych.domain.encoding import EncodeResult
from triptych.domain.generation import PullReport, Ready
from triptych.domain.item_plan import ItemPlan
from triptych.domain.media import MediaInfo, Modality, Shard
from triptych.domain.queue_position import FIRST_COME
from triptych.errors import EngineFailure, InstanceLost, LeaseLost, Overloaded
from triptych.machine.router.attempts import Attempt, Ending
from triptych.machine.router.request_events import Abort, After, AttemptKind, Renew, RequestEffect, Signal
from triptych.machine.router.request_items import RequestItem, RequestItems
from triptych.machine.router.shared_events import EmbeddingsRead, Grant, HedgeWanted, Overtaken, Release

TENSORS = (TensorSpec("t", DType.F32, (4, 8)),)
DEADLINE_S = 100.0


def plan(item: int) -> ItemPlan:
    info = MediaInfo(Modality.IMAGE, "png", 28, 14, 100, bytes(32))
    return ItemPlan(item, "messages", b"", info, (b"%d" % item, b""), item, 4, TENSORS, 128, (4,))


def items(encoders: str, *, lease_s: float = 10.0) -> RequestItems:
    """Items at these encoders, which have been asked at 0 s, with credits from 0 on."""
    made, leases = RequestItems(), count()
    made.add(plan(number) for number in range(len(encoders)))
    for item, encoder in zip(made.all, encoders, strict=True):
        grant = Grant(item.index, item.index, encoder, f"i-{encoder}")
        item.begin(grant, FIRST_COME, lambda: b"%d" % next(leases), 0.0, lease_s)
    made.validate()
    return made


def encode(made: RequestItems, number: int) -> None:
    answer(made.all[number])
    made.validate()


def answer(item: RequestItem, index: int = 0) -> list[RequestEffect]:
    attempt = (item.held, item.hedge)[index]
    assert attempt is not None
    assert attempt.leases is not None
    own, reader = attempt.leases.lease_ids
    ticket = Ticket(bytes(32), attempt.grant.instance_id, 1, 0, 128, 1, 1, TENSORS, 4, reader, attempt.leases.lease_s)
    assert attempt.leases.granted(ticket, own, item.plan, DEADLINE_S) is None
    return item.answered(attempt, EncodeResult(ticket, own, cached=True, queue_s=0.5, encode_s=0.25), 1.0)


def hedge(item: RequestItem) -> Attempt:
    item.begin(Grant(7, item.index, "c", "i-c", hedges=True), FIRST_COME, lambda: b"hedge", 0.0, 10.0)
    return item.attempts[-1]


def alarms(effects: list[RequestEffect]) -> list[tuple[float, object]]:
    return [(effect.delay_s, effect.event) for effect in effects if isinstance(effect, After)]


def test_a_reader_gets_all_tickets_once_every_item_is_encoded() -> None:
    made, ready = items("aba"), list[bool]()
    for number in (0, 2, 1):
        encode(made, number)
        ready.append(made.are_ready)
    assert ready == [False, False, True]
    assert made.nbytes_by_encoder() == {"i-a": 256, "i-b": 128}
    assert [placement.ticket.address for placement in made.placements()] == ["a", "b", "a"]
    assert [leases.is_sent for leases in made.leases] == [True] * 3
    assert made.read() == [EmbeddingsRead((0, 1, 2))]
    assert [effect.name for effect in made.release("over", 2.0) if isinstance(effect, Release)] == ["a", "b", "a"]
    assert (made.leases, made.read(), made.are_ready) == ([], [], False)


def test_an_item_is_found_by_the_credit_of_its_call_or_hedge() -> None:
    made = items("ab")
    second = hedge(made.all[1])
    assert made.attempt_of(7) is second
    assert made.of(second) is made.all[1]
    assert made.attempt_of(1) is made.all[1].held
    assert made.attempt_of(0) is made.all[0].held
    assert made.attempt_of(99) is None
    made.release("over", 2.0)
    assert made.attempt_of(7) is None


def test_leases_are_extended_at_half_of_their_time_by_one_alarm() -> None:
    made = items("ab")
    encode(made, 0)
    assert alarms(made.watch_leases(1.0)) == [(4.0, Signal.LEASES_DUE)]
    encode(made, 1)
    assert made.watch_leases(2.0) == [], "the alarm that is set comes in time"
    effects = made.leases_due(5.0, 20.0)
    assert [(effect.credit, effect.lease_s) for effect in effects if isinstance(effect, Renew) and effect.extends] == [
        (0, 20.0),
        (1, 20.0),
    ]
    assert alarms(effects) == [(2.5, Signal.LEASES_DUE)], "half of the time that is left, in case that they fail"


def test_hedges_are_wanted_again_while_the_item_takes_long() -> None:
    made = items("ab")
    made.all[0].hedge_s, made.all[1].hedge_s = 4.0, 6.0
    assert alarms(made.watch_hedges(4.0, 0.0)) == [(4.0, Signal.HEDGES_DUE)]
    assert made.watch_hedges(6.0, 0.0) == []
    effects = made.hedges_due(3, 4.0)
    assert [(effect.request, effect.want.item) for effect in effects if isinstance(effect, HedgeWanted)] == [(3, 0)]
    assert alarms(effects) == [(1.0, Signal.HEDGES_DUE)], "a quarter of what it has taken"


def test_a_hedge_of_an_item_that_is_encoded_is_noticed() -> None:
    made = items("a")
    encode(made, 0)
    hedge(made.all[0])
    with pytest.raises(AssertionError, match="item 0: a hedge of nothing"):
        made.validate()


def test_the_slower_of_two_calls_is_overtaken() -> None:
    for index in (0, 1):
        (item,) = items("a").all
        hedge(item)
        slower = (item.held, item.hedge)[1 - index]
        assert slower is not None
        effects = answer(item, index)
        assert [type(effect) for effect in effects] == [Overtaken, Abort, Release][1 - index :]
        assert (slower.ended, item.held, item.losses) == (Ending.OVERTAKEN, item.served, 0)
        assert item.timeline(None).hedge_won == bool(index)


def test_credits_and_leases_are_released_once() -> None:
    (item,) = items("e").all
    answer(item)
    assert item.is_ready
    assert item.release("over", 2.0) == [Release("e", 0, (b"0", b"1"), "over")]
    assert item.release("over", 2.0) == []
    (running,), (renewing,) = items("e").all, items("e").all
    answer(renewing)
    assert renewing.held is not None
    assert renewing.held.leases is not None
    renewing.held.leases.renew(lambda: b"second", 1.0, 1.0, "short")
    for under_way in (running, renewing):
        assert not under_way.is_ready
        assert [type(effect) for effect in under_way.release("over", 2.0)] == [Abort, Release]


def test_the_beginning_for_a_reader_ends_before_the_first_item_that_is_missing() -> None:
    """The second item has two shards, which count together."""
    made, leases = RequestItems(), count()
    shards = [replace(plan(1), start=start, shard=Shard(first, 2, 4)) for start, first in ((10, 0), (14, 2))]
    made.add([replace(plan(0), start=3), *shards, replace(plan(2), start=20)])
    for item in made.all:
        grant = Grant(item.index, item.index, "e", "i-e")
        item.begin(grant, FIRST_COME, lambda: b"%d" % next(leases), 0.0, 10.0)
    assert made.beginning() == (0, 3)
    encode(made, 0)
    encode(made, 1)
    assert made.beginning() == (1, 10)
    encode(made, 2)
    assert made.beginning() == (3, 20)
    encode(made, 3)
    identified = [(item.start, item.tokens) for item in made.identified()]
    assert [start for start, _ in identified] == [3, 10, 20]


SHARD = replace(plan(1), start=1, shard=Shard(first=2, count=3, of=8))


def shard() -> RequestItem:
    """A shard that is encoded."""
    item = RequestItem(3, SHARD)
    leases = iter((b"router", b"reader"))
    item.begin(Grant(7, 3, "e", "i-e"), FIRST_COME, lambda: next(leases), 0.0, 10.0)
    answer(item)
    return item


def test_the_embedding_is_placed_at_its_placeholders() -> None:
    placement = shard().placement
    assert (placement.item, placement.start, placement.continues) == (3, 1, True)
    assert (placement.ticket.lease_id, placement.ticket.address) == (b"reader", "e")


def test_the_timeline_has_the_reports_of_encoder_and_receiver() -> None:
    ready = Ready((PullReport(0, "tcp", 9, 0.1, cached=False), PullReport(3, "shm", 128, 0.5, cached=True)), 0.0, 0.0)
    line = shard().timeline(ready)
    assert (line.item, line.shard, line.modality, line.width, line.height, line.tokens) == (
        1,
        str(Shard(2, 3, 8)),
        "image",
        28,
        14,
        4,
    )
    assert (line.encoder, line.encode_attempts, line.encoder_cached) == ("i-e", 1, True)
    assert (line.queue_s, line.encode_s) == (0.5, 0.25)
    assert (line.pull_backend, line.pull_bytes, line.pull_s, line.text_cached) == ("shm", 128, 0.5, True)
    line = RequestItem(0, SHARD).timeline(None)
    assert (line.encoder, line.encoder_cached, line.pull_backend, line.text_cached) == ("", False, "", False)
    assert (line.queue_s, line.encode_s, line.pull_s) == (0.0, 0.0, 0.0)


def test_what_an_item_has_cost_is_told_by_how_its_attempts_ended() -> None:
    item = RequestItem(0, plan(0))
    endings = [
        ("busy", Ending.REFUSED, Overloaded("busy")),
        ("gone", Ending.FAILED, InstanceLost("gone")),
        ("broken", Ending.FAILED, EngineFailure("failed")),
        ("evicted", Ending.FAILED, LeaseLost("evicted")),
        ("slow", Ending.OVERTAKEN, None),
    ]
    for credit, (name, how, error) in enumerate(endings):
        attempt = Attempt(AttemptKind.ENCODE, Grant(credit, 0, name, f"i-{name}"), 0.0)
        attempt.end(how, 1.0, error)
        item.attempts.append(attempt)
    assert (item.refusals, item.losses) == (1, 3)
    assert item.want.avoid == {"busy", "gone", "broken"}
    assert item.want.exclude == {"broken"}
    assert item.engine_failure is endings[2][2]
