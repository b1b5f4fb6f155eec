"""The life of one request: minimal recomputation, no leaked lease or credit, exactly one end."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from triptych.domain.embedding import DType, LeaseId, TensorSpec, Ticket
from triptych.domain.encoding import EncodeResult
from triptych.domain.generation import Finished, FinishReason, PullReport, Ready
from triptych.domain.item_plan import ItemPlan
from triptych.domain.kv_segment import KvPlacement, SealedSegment
from triptych.domain.media import MediaInfo, Modality, Shard
from triptych.domain.queue_position import QueuePosition
from triptych.domain.slo import NOTHING_EXPECTED, Expected, Isolated
from triptych.domain.stage import Stage
from triptych.domain.timeline import Outcome
from triptych.errors import (
    ArenaFull,
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    InstanceLost,
    InternalError,
    InvalidMedia,
    LeaseLost,
    Overloaded,
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.machine.router.attempts import MOST_EXCUSED
from triptych.machine.router.losses import Loss
from triptych.machine.router.request import RequestLimits, RequestMachine, RequestPhase
from triptych.machine.router.request_events import (
    Abort,
    After,
    AnswerTransferred,
    AttemptKind,
    Encode,
    End,
    Failed,
    Generate,
    PrefilledEarly,
    Prepared,
    Renew,
    Renewed,
    RequestEffect,
    RequestEvent,
    Resolved,
    Resumed,
    Signal,
    TextReported,
)
from triptych.machine.router.shared_events import (
    CallFailed,
    CreditsAbandoned,
    CreditsWanted,
    EmbeddingGone,
    EmbeddingsRead,
    FirstToken,
    Grant,
    Granted,
    HedgeWanted,
    ItemEncoded,
    Moved,
    Overtaken,
    PlaceRefused,
    Release,
    TextPoolLost,
    TextWanted,
)
from triptych.policy.dispatching import Dispatch
from triptych.policy.fairness import UNSHARED, Share
from triptych.policy.policies import ORDERINGS
from triptych.policy.queueing import PATIENCE_S

LIMITS = RequestLimits(
    max_encode_attempts=3,
    max_text_attempts=3,
    arena_retry_s=1.0,
    longest_pause_s=30.0,
    max_lease_s=30.0,
    min_lease_s=2.0,
)
TENSORS = (TensorSpec("embeddings", DType.F32, (4, 8)),)
DEADLINE_S = 100.0


def items(count: int) -> tuple[ItemPlan, ...]:
    return tuple(
        ItemPlan(
            item=index,
            media=b"image",
            info=MediaInfo(Modality.IMAGE, "png", 28, 28, 100, bytes([index]) * 32),
            content=(bytes([index]) * 32, b""),
            start=10 * index,
            tokens=4,
            tensors=TENSORS,
            nbytes=192,
            units=(4,),
            param=f"messages[0].content[{index}]",
        )
        for index in range(count)
    )


Call = Encode | Renew | Generate | TextWanted | CreditsWanted


def is_early(call: Call) -> bool:
    return isinstance(call, Generate) and call.kind is AttemptKind.EARLY_PREFILL


class World:
    """Performs the machine's effects on command, and tracks leases and credits."""

    def __init__(
        self,
        count: int,
        limits: RequestLimits = LIMITS,
        *,
        resolves: bool = False,
        hedge_after_s: float = inf,
        dispatch: Dispatch | None = None,
        plans: tuple[ItemPlan, ...] = (),
    ) -> None:
        self.machine = RequestMachine(
            1,
            "r",
            "m",
            now_s=0.0,
            deadline_s=DEADLINE_S,
            limits=limits,
            new_lease=self.new_lease,
            resolves=resolves,
            dispatch=dispatch,
        )
        self.now_s = 0.0
        self.credits: dict[int, str] = {}
        self.leases: dict[LeaseId, str] = {}
        self.serial = self.text_serial = 0
        self.credits_of_texts: set[int] = set()
        self.early: dict[int, str] = {}
        """Places for early prefills that have not become that of the request."""
        self.avoided: frozenset[str] = frozenset()
        self.named: set[LeaseId] = set()
        self.calls: list[Call] = []
        self.aborted: list[Call] = []
        self.pauses: list[After] = []
        self.alarmed = False
        self.extending: list[Renew] = []
        self.hedge_after_s = hedge_after_s
        self.hedges_wanted: list[HedgeWanted] = []
        self.has_items = False
        self.effects: list[RequestEffect] = []
        self.ends: list[TriptychError | None] = []
        self.feed(Prepared(plans or items(count), prompt_tokens=50, answer_tokens=16))

    def feed(self, event: RequestEvent) -> list[RequestEffect]:  # noqa: C901, PLR0912 - one dispatch
        if isinstance(event, Prepared):
            self.has_items = bool(event.items)
        effects = self.machine.handle(event, self.now_s)
        self.machine.validate()
        self.effects += effects
        for effect in effects:
            match effect:
                case Renew(extends=True):
                    assert all(lease_id in self.named for lease_id in effect.lease_ids)
                    self.extending.append(effect)
                case Encode() | Renew() | Generate() | TextWanted() | CreditsWanted():
                    self.calls.append(effect)
                case After(_, Signal.LEASES_DUE):
                    self.alarmed = True
                case After():
                    self.pauses.append(effect)
                case Abort(credit=credit):
                    self.aborted += [call for call in self.calls if self.is_for(call, credit)]
                    self.calls = [call for call in self.calls if not self.is_for(call, credit)]
                case HedgeWanted():
                    self.hedges_wanted.append(effect)
                case Overtaken(credit):
                    assert credit in self.credits, "it is reported before the credit is returned"
                case CreditsAbandoned():
                    self.calls = [call for call in self.calls if not isinstance(call, CreditsWanted)]
                case EmbeddingGone(credit):
                    assert credit in self.credits, "the loss is reported before the credit is returned"
                case Release(_, credit, lease_ids):
                    if credit is not None and credit not in self.credits_of_texts:
                        del self.credits[credit]
                    elif credit is not None:
                        self.early.pop(credit, None)
                    for lease_id in lease_ids:
                        self.leases.pop(lease_id, None)
                case End(error):
                    self.ends.append(error)
        return effects

    @staticmethod
    def is_for(call: Call, credit: int) -> bool:
        return (isinstance(call, Encode | Renew) or is_early(call)) and getattr(call, "credit", None) == credit

    def take(self, kind: type) -> list[Call]:
        """The calls of this kind that are no early prefills and concern no segments."""
        return self._take(lambda call: isinstance(call, kind) and not is_early(call) and not self.is_of_segments(call))

    def take_early(self) -> list[Generate]:
        return [call for call in self._take(is_early) if isinstance(call, Generate)]

    def take_of_segments(self) -> list[Renew]:
        return [call for call in self._take(self.is_of_segments) if isinstance(call, Renew)]

    def is_of_segments(self, call: Call) -> bool:
        return isinstance(call, Renew) and call.credit in self.credits_of_texts

    def _take(self, wanted: Callable[[Call], bool]) -> list[Call]:
        found = [call for call in self.calls if wanted(call)]
        self.calls = [call for call in self.calls if not wanted(call)]
        return found

    def new_lease(self) -> LeaseId:
        lease_id = (len(self.named) + 1).to_bytes(16, "big")
        self.named.add(lease_id)
        return lease_id

    def lease(self, lease_id: LeaseId, encoder: str) -> LeaseId:
        assert lease_id in self.named
        assert lease_id not in self.leases
        self.leases[lease_id] = encoder
        return lease_id

    def ticket(self, key: bytes, encoder: str, lease_id: LeaseId, lease_s: float) -> Ticket:
        lease = self.lease(lease_id, encoder)
        return Ticket(key, f"i-{encoder}", 1, 0, 128, 1, 0, TENSORS, 4, lease, lease_s)

    # One response each.

    def place(self, call: CreditsWanted, encoder: str = "") -> None:
        grants = []
        for number, want in enumerate(call.wants):
            self.serial += 1
            name = encoder or f"e{number % 2}"
            self.credits[self.serial] = name
            grants.append(Grant(self.serial, want.item, name, f"i-{name}", "test", self.hedge_after_s))
        self.feed(Granted(1, tuple(grants)))

    def grant_hedge(self) -> None:
        """Grants the hedge that was wanted last."""
        wanted = self.hedges_wanted.pop()
        self.serial += 1
        name = f"h{self.serial}"
        self.credits[self.serial] = name
        self.feed(Granted(1, (Grant(self.serial, wanted.want.item, name, f"i-{name}", "test", hedges=True),)))

    def encoded(self, call: Encode) -> None:
        ticket = self.ticket(bytes([call.index]) * 32, call.name, call.reader_lease, call.lease_s)
        own = self.lease(call.router_lease, call.name)
        result = EncodeResult(ticket, own, cached=False, queue_s=0.1, encode_s=0.2)
        self.feed(ItemEncoded(call.credit, call.name, result))

    def renewed(self, call: Renew) -> None:
        (known,), (lease_id,) = call.tickets, call.lease_ids
        self.feed(Renewed(call, self.now_s, (self.ticket(known.key, call.name, lease_id, call.lease_s),)))

    def extended(self, call: Renew, requested_s: float | None = None) -> list[RequestEffect]:
        tickets = tuple(
            replace(ticket, lease_id=lease_id) for ticket, lease_id in zip(call.tickets, call.lease_ids, strict=True)
        )
        return self.feed(Renewed(call, self.now_s if requested_s is None else requested_s, tickets))

    def sealed(self, dispatch: Generate, count: int, lease_s: float = 30.0) -> tuple[SealedSegment, ...]:
        """So many segments of 10 positions, with leases."""
        made: list[SealedSegment] = []
        for number in range(count):
            reader, router = self.new_lease(), self.lease(self.new_lease(), dispatch.name)
            ticket = self.ticket(b"%032d" % number, dispatch.name, reader, lease_s)
            made.append(SealedSegment(KvPlacement(10 * number, replace(ticket, tokens=10)), router))
        return tuple(made)

    def transfer_kv(self, dispatch: Generate, count: int = 2, lease_s: float = 30.0) -> list[RequestEffect]:
        segments = self.sealed(dispatch, count, lease_s)
        return self.feed(AnswerTransferred(dispatch.credit, dispatch.name, segments))

    def renew_segments(self, call: Renew, kept: int = 99) -> None:
        """All but those after the first ``kept``."""
        tickets: list[Ticket] = []
        for known, lease_id in list(zip(call.tickets, call.lease_ids, strict=True))[:kept]:
            self.lease(lease_id, call.name)
            tickets.append(replace(known, lease_id=lease_id, lease_s=call.lease_s))
        error = LeaseLost("gone") if kept < len(call.tickets) else None
        self.feed(Renewed(call, self.now_s, tuple(tickets), error))

    def succeed(self, call: Encode | Renew | Generate) -> None:
        match call:
            case Encode():
                self.encoded(call)
            case Renew():
                self.renewed(call)
            case Generate(credit):
                self.feed(PrefilledEarly(credit))

    def place_early(self, call: TextWanted) -> None:
        assert call.early
        self.feed(Granted(1, (self.text_grant(call),)))

    def text_grant(self, call: TextWanted, *, transfers_kv: bool = False) -> Grant:
        if call.kept_credit is not None:
            name = self.early.pop(call.kept_credit)
            return Grant(call.kept_credit, None, name, f"i-{name}")
        self.serial += 1
        self.text_serial += 1
        name = f"t{self.text_serial}"
        self.credits_of_texts.add(self.serial)
        if call.early:
            self.early[self.serial] = name
        return Grant(self.serial, None, name, f"i-{name}", transfers_kv=transfers_kv)

    def move(self, dispatch: Generate) -> list[RequestEffect]:
        """From where it waits, to a place that is kept for it."""
        self.serial += 1
        self.credits_of_texts.add(self.serial)
        self.early[self.serial] = "lender"
        return self.feed(Moved(1, dispatch.credit, Grant(self.serial, None, "lender", "i-lender"), "test"))

    def place_text(self, call: TextWanted, *, transfers_kv: bool = False) -> Generate:
        assert not call.early
        self.avoided = call.avoid
        self.feed(Granted(1, (self.text_grant(call, transfers_kv=transfers_kv),)))
        (started,) = [effect for effect in self.take(Generate) if isinstance(effect, Generate)]
        assert (call.tokens, call.max_tokens) == (50, 16)
        assert call.with_items is self.has_items
        return started

    # Whole steps.

    def place_all(self) -> None:
        for call in self.take(CreditsWanted):
            assert isinstance(call, CreditsWanted)
            self.place(call)

    def encode_all(self) -> None:
        for call in self.take(Encode):
            assert isinstance(call, Encode)
            self.encoded(call)

    def renew_all(self) -> None:
        for call in self.take(Renew):
            assert isinstance(call, Renew)
            self.renewed(call)

    def resume(self) -> None:
        """Lets the next pause elapse."""
        pause = self.pauses.pop(0)
        self.now_s += pause.delay_s
        self.feed(pause.event)

    def dispatched(self, *, transfers_kv: bool = False) -> Generate:
        (call,) = self.take(TextWanted)
        assert isinstance(call, TextWanted)
        return self.place_text(call, transfers_kv=transfers_kv)

    def up_to_text(self, *, transfers_kv: bool = False) -> Generate:
        self.place_all()
        self.encode_all()
        return self.dispatched(transfers_kv=transfers_kv)

    def assert_over(self, phase: RequestPhase) -> None:
        assert self.machine.phase is phase
        assert len(self.ends) == 1
        assert not self.credits
        assert not self.early
        assert not self.leases
        assert not self.calls_left

    @property
    def calls_left(self) -> list[Call]:
        """Calls that were not cancelled; the text call ends with the request."""
        return [call for call in self.calls if not isinstance(call, Generate) or is_early(call)]

    @property
    def error(self) -> TriptychError:
        (error,) = self.ends
        assert error is not None
        return error


def failed(call: Encode | Renew | Generate, error: TriptychError) -> RequestEvent:
    if isinstance(call, Renew):
        return Renewed(call, 0.0, (), error)
    return CallFailed(call.credit, call.name, error)


def finished() -> Finished:
    return Finished(FinishReason.STOP, 7, 0.3, 0.4)


def test_a_text_only_request_uses_no_encoder() -> None:
    world = World(0)
    call = world.dispatched()
    assert call.placements == ()
    world.feed(FirstToken(call.credit))
    world.feed(TextReported(call.credit, finished()))
    world.assert_over(RequestPhase.DONE)


def test_the_bytes_of_the_embeddings_at_each_encoder_are_told_when_a_text_instance_is_wanted() -> None:
    world = World(3)
    world.place_all()
    world.encode_all()
    (call,) = world.take(TextWanted)
    assert isinstance(call, TextWanted)
    assert call.holders == {"i-e0": 2 * 192, "i-e1": 192}


def test_leases_are_held_until_the_first_token_and_the_timeline_is_complete() -> None:
    world = World(2)
    world.now_s = 1.0
    world.place_all()
    world.now_s = 2.0
    world.encode_all()
    call = world.dispatched()
    assert [(place.item, place.start, place.tokens) for place in call.placements] == [(0, 0, 4), (1, 10, 4)]
    pulls = tuple(PullReport(item, "tcp", 128, 0.01, cached=False) for item in range(2))
    world.feed(TextReported(call.credit, Ready(pulls, 0.5, 0.6)))
    assert len(world.leases) == 4
    world.now_s = 3.0
    world.feed(FirstToken(call.credit))
    assert not world.leases
    world.now_s = 5.0
    world.feed(TextReported(call.credit, finished()))
    world.assert_over(RequestPhase.DONE)
    timeline = world.machine.timeline(99.0, 0)
    assert timeline.outcome is Outcome.DONE
    assert (timeline.encode_s, timeline.ttft_s, timeline.total_s, timeline.completion_tokens) == (2.0, 3.0, 5.0, 7)
    assert (timeline.queue_s, timeline.pull_s, timeline.prefill_s, timeline.decode_s) == (0.5, 0.6, 0.3, 0.4)
    assert [(item.encoder, item.pull_bytes, item.encode_attempts) for item in timeline.items] == [
        ("i-e0", 128, 1),
        ("i-e1", 128, 1),
    ]


def test_the_timeline_has_durations_and_instances_of_each_step() -> None:
    world = World(2)
    machine = world.machine = RequestMachine(
        1, "r", "m", now_s=1.0, deadline_s=DEADLINE_S, limits=LIMITS, new_lease=world.new_lease, choices=2
    )
    world.calls.clear()
    world.now_s = 3.0
    world.feed(Prepared(items(2), prompt_tokens=50, answer_tokens=16))
    world.place_all()
    world.now_s = 6.0
    world.encode_all()
    call = world.dispatched()
    assert [effect.choices for effect in world.effects if isinstance(effect, TextWanted)] == [2]
    pulls = (PullReport(1, "tcp", 64, 0.02, cached=False), PullReport(0, "shm", 128, 0.01, cached=True))
    world.feed(TextReported(call.credit, Ready(pulls, 0.5, 0.6)))
    running = machine.timeline(7.0, 11)
    assert (running.outcome, running.completion_tokens, running.ttft_s, running.total_s) == (
        Outcome.RUNNING,
        11,
        0.0,
        6.0,
    )
    world.now_s = 8.0
    world.feed(FirstToken(call.credit))
    world.now_s = 9.0
    world.feed(FirstToken(call.credit))
    world.feed(TextReported(call.credit, replace(finished(), preemptions=2, preempted_s=0.1)))
    assert machine.phase is RequestPhase.STREAMING, "one choice is left"
    world.now_s = 11.0
    world.feed(TextReported(call.credit, replace(finished(), choice=1, prefill_s=0.2, decode_s=0.9, preemptions=1)))
    timeline = machine.timeline(99.0, 0)
    assert (timeline.preemptions, timeline.preempted_s) == (3, 0.1)
    assert (timeline.prepare_s, timeline.encode_s, timeline.ttft_s, timeline.total_s) == (2.0, 3.0, 7.0, 10.0)
    assert (timeline.prefill_s, timeline.decode_s) == (0.3, 0.9)
    assert (timeline.prompt_tokens, timeline.completion_tokens, timeline.text_attempts) == (50, 14, 1)
    assert [(item.pull_backend, item.pull_bytes, item.pull_s, item.text_cached) for item in timeline.items] == [
        ("shm", 128, 0.01, True),
        ("tcp", 64, 0.02, False),
    ]
    assert [(item.queue_s, item.encode_s, item.encoder_cached) for item in timeline.items] == [(0.1, 0.2, False)] * 2


ALONE = Isolated(prepare_s=0.1, encode_s=0.5, prefill_s=0.25, tbt_s=0.01)


def expecting(
    expected: Expected,
    *,
    name: str = "slo",
    deadline_s: float = DEADLINE_S,
    share: Callable[[Stage], Share] = lambda _: UNSHARED,
) -> World:
    """A world whose request arrived at 1 s and is prepared."""
    world = World(0)
    world.machine = RequestMachine(
        1,
        "r",
        "m",
        now_s=1.0,
        deadline_s=deadline_s,
        limits=LIMITS,
        new_lease=world.new_lease,
        priority=3,
        ordering=ORDERINGS[name],
        share=share,
    )
    world.calls.clear()
    world.now_s = 2.0
    world.feed(Prepared(items(1), prompt_tokens=50, answer_tokens=16, expected=expected))
    return world


def test_an_item_is_as_much_work_as_its_embedding_has_rows() -> None:
    """With cross-attention it has one position in the prompt."""
    (item,) = items(1)
    tiles = TensorSpec("tiles", DType.F32, (4, 1601, 8))
    world = World(0)
    world.machine = RequestMachine(
        1, "r", "m", now_s=1.0, deadline_s=DEADLINE_S, limits=LIMITS, new_lease=world.new_lease
    )
    world.calls.clear()
    world.feed(Prepared((replace(item, tokens=1, tensors=(tiles,)),), prompt_tokens=50, answer_tokens=16))
    (wanted,) = [call for call in world.calls if isinstance(call, CreditsWanted)]
    assert [want.tokens for want in wanted.wants] == [4 * 1601]


def queue_positions(world: World) -> list[QueuePosition]:
    """Of the request in the queues of the router, of its encoder and of its text instance."""
    (wanted,) = [call for call in world.calls if isinstance(call, CreditsWanted)]
    world.place_all()
    (encode,) = [call for call in world.calls if isinstance(call, Encode)]
    world.encode_all()
    return [wanted.queue_position, encode.queue_position, world.dispatched().queue_position]


def test_a_request_is_due_by_its_objective_and_lost_by_what_each_stage_needs() -> None:
    found = queue_positions(expecting(Expected(4.0, ALONE)))
    assert [(position.priority, position.due_s, position.lost_s, position.aged_s) for position in found] == [
        (3, 5.0, 5.0 - 0.75, 5.0 + PATIENCE_S),
        (3, 5.0, 5.0 - 0.75, 5.0 + PATIENCE_S),
        (3, 5.0, 5.0 - 0.25, 5.0 + PATIENCE_S),
    ]


def test_each_position_counts_its_tenants_share_of_that_stage() -> None:
    shares = {Stage.ENCODE: Share(1.0), Stage.PREFILL: Share(40.0)}
    world = expecting(Expected(4.0, ALONE), share=shares.__getitem__)
    assert [position.behind_s for position in queue_positions(world)] == [1.0, 1.0, 40.0]


def test_an_answer_that_goes_on_is_due_as_before_and_never_lost() -> None:
    world = expecting(Expected(4.0, ALONE))
    call = world.up_to_text()
    world.feed(FirstToken(call.credit))
    world.now_s = 60.0
    world.feed(failed(call, InstanceLost("gone")))
    assert [(position.due_s, position.lost_s) for position in queue_positions(world)] == [(5.0, inf)] * 3


@pytest.mark.parametrize(
    ("expected", "deadline_s", "due_s", "lost_s"),
    [
        (Expected(4.0), DEADLINE_S, 5.0, 5.0),
        (Expected(4.0, ALONE), 3.0, 3.0, 2.25),
        (NOTHING_EXPECTED, 20.0, 20.0, 20.0),
        (Expected(None, ALONE), 20.0, 20.0, 19.25),
    ],
)
def test_the_shorter_deadline_wins_and_what_is_unknown_counts_as_nothing(
    expected: Expected, deadline_s: float, due_s: float, lost_s: float
) -> None:
    (wanted,) = [call for call in expecting(expected, deadline_s=deadline_s).calls if isinstance(call, CreditsWanted)]
    assert (wanted.queue_position.due_s, wanted.queue_position.lost_s) == (due_s, lost_s)


def test_the_ordering_that_is_chosen_orders_every_queue() -> None:
    assert {position.due_s for position in queue_positions(expecting(Expected(4.0, ALONE), name="first-come"))} == {1.0}
    assert {
        position.due_s for position in queue_positions(expecting(Expected(4.0, ALONE), name="deadline", deadline_s=9.0))
    } == {9.0}


def test_shards_of_an_item_are_placed_consecutively() -> None:
    world = World(0)
    world.machine = RequestMachine(
        1, "r", "m", now_s=0.0, deadline_s=DEADLINE_S, limits=LIMITS, new_lease=world.new_lease
    )
    world.calls.clear()
    shards = (Shard(0, 1, 3), Shard(1, 2, 3), None)
    parts = tuple(replace(item, shard=shard) for item, shard in zip(items(3), shards, strict=True))
    world.feed(Prepared(parts, prompt_tokens=50, answer_tokens=16))
    assert [placement.continues for placement in world.up_to_text().placements] == [False, True, False]
    assert [item.shard for item in world.machine.timeline(1.0, 0).items] == ["1-1/3", "2-3/3", ""]


def test_the_timeline_omits_failed_attempts() -> None:
    world = World(0)
    call = world.dispatched()
    world.feed(TextReported(call.credit, Ready((), 0.5, 0.6)))
    world.feed(failed(call, InstanceLost("gone")))
    timeline = world.machine.timeline(1.0, 0)
    assert (timeline.queue_s, timeline.pull_s) == (0.0, 0.0)


def test_the_timeline_of_an_unfinished_request_has_only_its_past_steps() -> None:
    fresh = RequestMachine(1, "r", "m", now_s=1.0, deadline_s=9.0, limits=LIMITS, new_lease=lambda: b"")
    timeline = fresh.timeline(4.0, 0)
    assert (timeline.prepare_s, timeline.encode_s, timeline.total_s, timeline.prompt_tokens) == (3.0, 0.0, 3.0, 0)
    timeline = World(1).machine.timeline(4.0, 0)
    assert (timeline.prepare_s, timeline.encode_s, timeline.total_s) == (0.0, 4.0, 4.0)
    assert (timeline.queue_s, timeline.pull_s, timeline.prefill_s, timeline.decode_s, timeline.ttft_s) == (0.0,) * 5
    [item] = timeline.items
    assert (item.encode_attempts, item.queue_s, item.encode_s, item.pull_bytes, item.pull_s) == (0, 0.0, 0.0, 0, 0.0)
    assert (item.encoder_cached, item.text_cached) == (False, False)
    assert World(0).machine.timeline(4.0, 0).encode_s == 0.0


def test_the_timeline_names_errors_of_failed_requests_only() -> None:
    failed, left = World(1), World(1)
    failed.feed(Failed(InternalError("defect")))
    left.feed(Signal.CALLER_LEFT)
    assert [world.machine.timeline(1.0, 0).error for world in (failed, left)] == [InternalError.code, ""]


def test_an_answer_without_chunks_has_its_first_token_at_its_end() -> None:
    world = World(0)
    world.now_s = 2.0
    world.feed(TextReported(world.dispatched().credit, finished()))
    assert world.machine.timeline(9.0, 0).ttft_s == 2.0


def test_only_the_items_of_a_lost_encoder_are_encoded_again_elsewhere() -> None:
    world = World(4)
    world.place_all()
    for call in world.take(Encode):
        assert isinstance(call, Encode)
        if call.name == "e0":
            world.feed(failed(call, InstanceLost("gone")))
        else:
            world.encoded(call)
    again = world.take(CreditsWanted)
    wants = [want for call in again if isinstance(call, CreditsWanted) for want in call.wants]
    assert [(want.item, want.avoid) for want in wants] == [(0, frozenset({"e0"})), (2, frozenset({"e0"}))]
    assert not any(call.wait for call in again if isinstance(call, CreditsWanted))
    for call in again:
        assert isinstance(call, CreditsWanted)
        world.place(call, "e1")
    world.encode_all()
    assert len(world.dispatched().placements) == 4


def test_repeated_losses_of_an_item_end_the_request() -> None:
    world = World(1)
    for _ in range(3):
        world.place_all()
        (call,) = world.take(Encode)
        assert isinstance(call, Encode)
        world.feed(failed(call, InstanceLost("gone")))
    world.assert_over(RequestPhase.FAILED)
    assert isinstance(world.error, InstanceLost)


@pytest.mark.parametrize(("drained", "phase"), [(MOST_EXCUSED, RequestPhase.DISPATCHING), (19, RequestPhase.FAILED)])
def test_an_attempt_whose_encoder_drains_does_not_count_as_a_loss(drained: int, phase: RequestPhase) -> None:
    """But there are only so many."""
    world = World(1)
    for _ in range(drained):
        world.place_all()
        (call,) = world.take(Encode)
        assert isinstance(call, Encode)
        world.feed(CallFailed(call.credit, call.name, Unavailable("the encoder is draining"), drains=True))
    world.place_all()
    world.encode_all()
    assert world.machine.phase is phase


@pytest.mark.parametrize("error", [InvalidMedia("bad"), DeadlineExceeded("late")])
def test_a_permanent_error_ends_the_request_at_once(error: TriptychError) -> None:
    world = World(3)
    world.place_all()
    first, second, _ = world.take(Encode)
    assert isinstance(first, Encode)
    assert isinstance(second, Encode)
    world.encoded(second)
    world.feed(failed(first, error))
    world.assert_over(RequestPhase.FAILED)
    assert world.error is error


def test_a_full_arena_requeues_the_request_with_growing_backoff_until_the_deadline() -> None:
    world = World(3)
    delays_s: list[float] = []
    while not world.ends:
        world.place_all()
        first, second, _ = world.take(Encode)
        assert isinstance(first, Encode)
        assert isinstance(second, Encode)
        world.encoded(first)
        world.feed(failed(second, ArenaFull("full")))
        assert not world.credits
        assert not world.leases
        if not world.ends:
            assert world.machine.phase is RequestPhase.WAITING
            delays_s.append(world.pauses[0].delay_s)
            world.resume()
    world.assert_over(RequestPhase.FAILED)
    assert isinstance(world.error, ArenaFull)
    assert world.now_s < DEADLINE_S <= world.now_s + 30
    assert all(2**k / 2 <= delay_s <= min(2**k, 30) for k, delay_s in enumerate(delays_s[:5]))


def test_a_new_request_waits_for_credits_and_is_refused_when_it_can_never_fit() -> None:
    world = World(1)
    (call,) = world.take(CreditsWanted)
    assert isinstance(call, CreditsWanted)
    assert call.wait
    error = InvalidMedia("too large for every arena")
    world.feed(PlaceRefused(1, error))
    world.assert_over(RequestPhase.FAILED)
    assert world.error is error


def test_credits_that_arrive_after_a_requeue_are_released() -> None:
    world = World(2)
    world.place_all()
    first, second = world.take(Encode)
    assert isinstance(first, Encode)
    assert isinstance(second, Encode)
    world.feed(failed(first, InstanceLost("gone")))
    (repair,) = world.take(CreditsWanted)
    assert isinstance(repair, CreditsWanted)
    world.feed(failed(second, ArenaFull("full")))
    world.place(repair)
    assert (world.machine.phase, world.credits) == (RequestPhase.WAITING, {})
    world.resume()
    assert world.up_to_text()


def test_a_late_credit_is_used_if_one_is_needed_again_and_the_second_is_released() -> None:
    world = World(2)
    world.place_all()
    first, second = world.take(Encode)
    assert isinstance(first, Encode)
    assert isinstance(second, Encode)
    world.feed(failed(first, InstanceLost("gone")))
    (repair,) = world.take(CreditsWanted)
    assert isinstance(repair, CreditsWanted)
    world.feed(failed(second, ArenaFull("full")))
    world.resume()
    world.place(repair)
    world.place_all()
    assert len(world.credits) == 2
    assert sorted(call.index for call in world.calls if isinstance(call, Encode)) == [0, 1]
    assert world.up_to_text()


def test_a_requeue_ends_the_pause_of_an_item() -> None:
    world = World(2)
    world.place_all()
    first, second = world.take(Encode)
    assert isinstance(first, Encode)
    assert isinstance(second, Encode)
    world.feed(failed(first, Overloaded("busy")))
    world.feed(failed(second, ArenaFull("full")))
    single, everything = world.pauses
    assert world.feed(single.event) == []
    (again,) = [effect for effect in world.feed(everything.event) if isinstance(effect, CreditsWanted)]
    assert ([want.item for want in again.wants], again.wait) == ([0, 1], True)


def test_a_second_response_to_a_call_is_ignored() -> None:
    world = World(2)
    world.place_all()
    first, second = world.take(Encode)
    assert isinstance(first, Encode)
    assert isinstance(second, Encode)
    world.encoded(first)
    twice = replace(first, reader_lease=b"s" * 16, router_lease=b"t" * 16)
    world.named |= {twice.reader_lease, twice.router_lease}
    world.encoded(twice)
    assert len(world.leases) == 2
    assert world.feed(failed(first, InstanceLost("gone"))) == []
    assert world.feed(CallFailed(99, first.name, InstanceLost("gone"))) == [], "nor one for a released credit"
    assert world.feed(failed(first, LeaseLost("over"))) == []
    world.encoded(second)
    call = world.dispatched()
    stray = replace(call.placements[0].ticket, lease_id=b"s" * 16)
    renew = Renew(first.credit, first.name, (call.placements[0].ticket,), (b"s" * 16,), 30.0, "another reader")
    assert released(world.feed(Renewed(renew, 0.0, (stray,)))) == {b"s" * 16}
    assert len(world.credits) == 2


def test_a_finished_call_is_not_cancelled() -> None:
    world = World(2)
    world.up_to_text()
    assert not [effect for effect in world.feed(Signal.CALLER_LEFT) if isinstance(effect, Abort)]
    world.assert_over(RequestPhase.CANCELLED)


def test_two_busy_encoders_are_retried_independently() -> None:
    world = World(2)
    world.place_all()
    for call in world.take(Encode):
        assert isinstance(call, Encode)
        world.feed(failed(call, Overloaded("busy")))
    assert all(0.5 <= pause.delay_s <= 1.0 for pause in world.pauses)
    for item in (0, 1):
        world.resume()
        (again,) = world.take(CreditsWanted)
        assert isinstance(again, CreditsWanted)
        assert [want.item for want in again.wants] == [item]
        world.place(again)
    assert world.feed(Resumed(1)) == [], "a pause ends once"
    world.encode_all()
    assert world.dispatched()


def test_a_busy_encoder_is_retried_for_that_item_only() -> None:
    world = World(2)
    world.place_all()
    first, second = world.take(Encode)
    assert isinstance(first, Encode)
    assert isinstance(second, Encode)
    world.encoded(first)
    for _ in range(4):
        world.feed(failed(second, Overloaded("busy")))
        assert len(world.credits) == 1
        world.resume()
        (again,) = world.take(CreditsWanted)
        assert isinstance(again, CreditsWanted)
        assert ([want.item for want in again.wants], again.wait) == ([1], False)
        assert second.name in again.wants[0].avoid
        world.place(again)
        (second,) = world.take(Encode)
        assert isinstance(second, Encode)
    world.encoded(second)
    assert world.dispatched()
    assert world.machine.timeline(world.now_s, 0).items[1].encode_attempts == 5


@pytest.mark.parametrize("error", [EngineFailure("failed"), InternalError("a defect")])
def test_an_encoder_that_failed_an_item_does_not_get_it_again(error: TriptychError) -> None:
    world = World(1)
    world.place_all()
    (first,) = world.take(Encode)
    assert isinstance(first, Encode)
    assert EmbeddingGone(first.credit) in world.feed(failed(first, error))
    (again,) = world.take(CreditsWanted)
    assert isinstance(again, CreditsWanted)
    assert again.wants[0].exclude == {first.name}
    assert again.again
    world.place(again, "other")
    (second,) = world.take(Encode)
    assert isinstance(second, Encode)
    world.feed(failed(second, EngineFailure("failed again")))
    world.assert_over(RequestPhase.FAILED)
    assert world.error.message == "failed again"


def test_an_engine_failure_ends_the_request_without_another_encoder() -> None:
    world = World(1)
    world.place_all()
    (first,) = world.take(Encode)
    assert isinstance(first, Encode)
    world.feed(failed(first, EngineFailure("failed")))
    world.take(CreditsWanted)
    world.feed(PlaceRefused(1, Unavailable("none")))
    world.assert_over(RequestPhase.FAILED)
    assert isinstance(world.error, EngineFailure)


def test_a_text_engine_that_failed_is_replaced_once() -> None:
    world = World(0)
    first = world.dispatched()
    world.feed(failed(first, EngineFailure("failed")))
    second = world.dispatched()
    assert world.avoided == {"t1"}
    world.feed(failed(second, EngineFailure("failed")))
    world.assert_over(RequestPhase.FAILED)


def test_a_repair_without_room_releases_everything() -> None:
    world = World(2)
    world.place_all()
    first, second = world.take(Encode)
    assert isinstance(first, Encode)
    assert isinstance(second, Encode)
    world.encoded(second)
    world.feed(failed(first, InstanceLost("gone")))
    world.take(CreditsWanted)
    world.feed(PlaceRefused(1, ArenaFull("full")))
    assert (world.machine.phase, world.credits, world.leases) == (RequestPhase.WAITING, {}, {})


@pytest.mark.parametrize(
    ("error", "phase"), [(Unavailable("none"), RequestPhase.WAITING), (InvalidMedia("no"), RequestPhase.FAILED)]
)
def test_a_repair_without_an_encoder_requeues_unless_the_pool_is_lost(
    error: TriptychError, phase: RequestPhase
) -> None:
    world = World(1)
    world.place_all()
    (call,) = world.take(Encode)
    assert isinstance(call, Encode)
    world.feed(failed(call, InstanceLost("gone")))
    world.take(CreditsWanted)
    world.feed(PlaceRefused(1, error))
    assert (world.machine.phase, world.credits) == (phase, {})
    assert world.feed(PlaceRefused(1, error)) == [], "a response to a cancelled wait"


def test_a_failed_pull_reencodes_the_named_items_and_renews_the_others() -> None:
    world = World(3)
    first = world.up_to_text()
    world.feed(failed(first, TransferFailed("broken", items=(1,))))
    assert [effect.credit for effect in world.effects if isinstance(effect, EmbeddingGone)] == [2]
    world.place_all()
    assert [call.index for call in world.calls if isinstance(call, Encode)] == [1]
    world.encode_all()
    assert [call.tickets[0].key[0] for call in world.calls if isinstance(call, Renew)] == [0, 2]
    world.renew_all()
    second = world.dispatched()
    before = {place.ticket.lease_id for place in first.placements}
    assert not before & {place.ticket.lease_id for place in second.placements}


@pytest.mark.parametrize(("named", "again"), [((0,), [0]), ((1,), [1]), ((-1,), [0, 1]), ((2,), [0, 1]), ((), [0, 1])])
def test_a_failed_pull_without_item_names_concerns_all_items(named: tuple[int, ...], again: list[int]) -> None:
    world = World(2)
    world.feed(failed(world.up_to_text(), TransferFailed("broken", items=named)))
    (call,) = world.take(CreditsWanted)
    assert isinstance(call, CreditsWanted)
    assert [want.item for want in call.wants] == again


def test_an_expired_lease_does_not_count_towards_later_failures() -> None:
    world = World(1)
    attempt = world.up_to_text()
    for _ in range(2):
        world.now_s += 30.0
        world.feed(failed(attempt, TransferFailed("the lease is over", items=(0,))))
        assert not world.take(CreditsWanted)
        world.renew_all()
        attempt = world.dispatched()
    for _ in range(2):
        world.feed(failed(attempt, InstanceLost("gone")))
        world.renew_all()
        attempt = world.dispatched()
    world.feed(failed(attempt, InstanceLost("gone")))
    world.assert_over(RequestPhase.FAILED)


def test_an_expired_lease_is_the_error_when_no_text_instance_is_left() -> None:
    world = World(1)
    call = world.up_to_text()
    world.now_s = 30.0
    error = TransferFailed("the lease is over", items=(0,))
    world.feed(failed(call, error))
    world.renew_all()
    assert world.take(TextWanted)
    world.feed(PlaceRefused(1, Unavailable("none"), final=True))
    world.assert_over(RequestPhase.FAILED)
    assert world.error is error


def test_a_reader_lease_that_expired_in_a_queue_is_replaced_without_using_an_attempt() -> None:
    world = World(2)
    for number in range(1, 4):
        attempt = world.up_to_text() if number == 1 else world.dispatched()
        world.now_s += 30.5
        world.feed(failed(attempt, TransferFailed("the lease is over", items=(0, 1))))
        if world.ends:
            break
        assert not world.take(CreditsWanted)
        world.renew_all()
    world.feed(FirstToken(world.dispatched().credit))
    assert [item.encode_attempts for item in world.machine.timeline(world.now_s, 0).items] == [1, 1]


def test_a_failed_pull_with_unknown_items_reencodes_everything() -> None:
    world = World(2)
    world.feed(failed(world.up_to_text(), TransferFailed("broken", items=(7,))))
    world.place_all()
    assert [call.index for call in world.calls if isinstance(call, Encode)] == [0, 1]


def test_a_text_instance_lost_before_the_first_token_is_replaced_by_another() -> None:
    world = World(2)
    first = world.up_to_text()
    world.feed(failed(first, InstanceLost("gone")))
    assert not world.take(Encode)
    world.renew_all()
    second = world.dispatched()
    assert world.avoided == frozenset({"t1"})
    # Late events of the first instance are ignored.
    world.feed(FirstToken(first.credit))
    assert world.machine.phase is RequestPhase.DISPATCHING
    world.feed(FirstToken(second.credit))
    world.feed(TextReported(second.credit, finished()))
    world.assert_over(RequestPhase.DONE)


def test_without_another_text_instance_the_loss_is_one_clear_error() -> None:
    world = World(1)
    first = world.up_to_text()
    world.feed(failed(first, Unavailable("gone")))
    world.renew_all()
    assert world.take(TextWanted)
    world.feed(PlaceRefused(1, Unavailable("none"), final=True))
    world.assert_over(RequestPhase.FAILED)
    assert isinstance(world.error, InstanceLost)


def test_a_request_may_return_to_where_it_was_lost_once_no_other_was_usable() -> None:
    world = World(1)
    lost = world.up_to_text()
    world.feed(failed(lost, Unavailable("gone")))
    world.renew_all()
    assert [wanted.avoid for wanted in world.take(TextWanted) if isinstance(wanted, TextWanted)] == [{lost.name}]
    world.feed(PlaceRefused(1, Unavailable("none")))
    world.resume()
    world.renew_all()
    assert [wanted.avoid for wanted in world.take(TextWanted) if isinstance(wanted, TextWanted)] == [frozenset()]


@pytest.mark.parametrize("error", [Overloaded("full"), EngineFailure("broken")])
def test_a_request_does_not_wait_for_an_instance_that_turned_it_down(error: TriptychError) -> None:
    world = World(1)
    world.feed(failed(world.up_to_text(), error))
    world.renew_all()
    assert world.take(TextWanted)
    world.feed(PlaceRefused(1, Unavailable("none")))
    world.assert_over(RequestPhase.FAILED)
    assert world.error is error


def test_an_absent_text_pool_is_retried_without_using_an_attempt() -> None:
    world = World(1)
    world.place_all()
    world.encode_all()
    delays_s: list[float] = []
    for _ in range(5):
        assert world.take(TextWanted)
        world.feed(PlaceRefused(1, Unavailable("none")))
        delays_s.append(world.pauses[0].delay_s)
        world.resume()
        world.renew_all()
    assert all(2**k / 2 <= delay_s <= 2**k for k, delay_s in enumerate(delays_s))
    world.feed(FirstToken(world.dispatched().credit))
    assert world.machine.timeline(world.now_s, 0).text_attempts == 1


# --- continuations ---------------------------------------------------------------------------------------------------


def streaming(count: int) -> tuple[World, Generate]:
    """A request of ``count`` items whose first token came at 1 s."""
    world = World(count)
    call = world.up_to_text() if count else world.dispatched()
    world.now_s = 1.0
    world.feed(FirstToken(call.credit))
    assert call.kind is AttemptKind.WHOLE
    return world, call


def wanted_text(world: World) -> TextWanted:
    (call,) = world.take(TextWanted)
    assert isinstance(call, TextWanted)
    return call


@pytest.mark.parametrize(
    "error", [InstanceLost("gone"), TransferFailed("x", items=(0,)), Overloaded("full"), EngineFailure("not finite")]
)
def test_a_stream_that_breaks_goes_on_elsewhere_with_its_items_placed_anew(error: TriptychError) -> None:
    world, first = streaming(2)
    assert not world.leases
    world.now_s = 5.0
    world.feed(failed(first, error))
    (call,) = world.take(CreditsWanted)
    assert isinstance(call, CreditsWanted)
    assert (call.wait, [want.item for want in call.wants]) == (True, [0, 1])
    world.place(call)
    world.encode_all()
    wanted = wanted_text(world)
    assert wanted.continues
    second = world.place_text(wanted)
    assert second.kind is AttemptKind.DECODE
    assert [placement.item for placement in second.placements] == [0, 1]
    assert len(world.leases) == 4, "they are held until the second instance has its first token"
    world.feed(FirstToken(first.credit))
    assert world.machine.phase is RequestPhase.DISPATCHING, "a late event of the first instance"
    world.now_s = 7.0
    world.feed(FirstToken(second.credit))
    assert not world.leases
    world.now_s = 8.0
    world.feed(TextReported(second.credit, finished()))
    world.assert_over(RequestPhase.DONE)
    timeline = world.machine.timeline(9.0, 0)
    assert (timeline.continuations, timeline.text_attempts, timeline.text_instance) == (1, 2, "i-t2")
    assert (timeline.ttft_s, timeline.interrupted_s, timeline.decode_s, timeline.total_s) == (1.0, 2.0, 7.0, 8.0)
    assert timeline.encode_s == 0.0, "until the first dispatch"


def test_a_text_only_stream_goes_on_at_once_and_not_where_it_broke() -> None:
    world, first = streaming(0)
    world.feed(failed(first, InstanceLost("gone")))
    wanted = wanted_text(world)
    assert (wanted.continues, wanted.avoid) == (True, frozenset({"t1"}))
    assert world.place_text(wanted).kind is AttemptKind.DECODE


@pytest.mark.parametrize("error", [DeadlineExceeded("late"), InternalError("defect"), Cancelled("?")])
def test_a_stream_is_not_continued_after_an_error_that_would_come_again(error: TriptychError) -> None:
    world, call = streaming(1)
    world.feed(failed(call, error))
    world.assert_over(RequestPhase.FAILED)
    assert world.error is error


def test_the_attempts_of_an_answer_are_bounded_however_many_tokens_each_has_sent() -> None:
    world, call = streaming(1)
    for _ in range(LIMITS.max_text_attempts - 1):
        world.feed(failed(call, InstanceLost("gone")))
        call = world.up_to_text()
        world.feed(FirstToken(call.credit))
    world.feed(failed(call, InstanceLost("gone")))
    world.assert_over(RequestPhase.FAILED)
    assert isinstance(world.error, InstanceLost)
    assert world.machine.timeline(world.now_s, 0).continuations == LIMITS.max_text_attempts - 1


def test_an_engine_may_fail_an_answer_once() -> None:
    world, call = streaming(0)
    world.feed(failed(call, EngineFailure("first")))
    call = world.dispatched()
    world.feed(FirstToken(call.credit))
    error = EngineFailure("second")
    world.feed(failed(call, error))
    world.assert_over(RequestPhase.FAILED)
    assert world.error is error


def test_an_answer_that_has_begun_waits_for_a_text_instance_to_return() -> None:
    world, call = streaming(0)
    world.feed(failed(call, InstanceLost("gone")))
    for _ in range(3):
        assert wanted_text(world).continues
        world.feed(PlaceRefused(1, Unavailable("none")))
        world.resume()
    assert world.dispatched().kind is AttemptKind.DECODE
    assert world.machine.timeline(world.now_s, 0).text_attempts == 2


@pytest.mark.parametrize("lost", [PlaceRefused(1, Unavailable("none"), final=True), TextPoolLost(Unavailable("none"))])
def test_an_answer_that_has_begun_ends_as_lost_when_no_text_instance_will_return(lost: RequestEvent) -> None:
    world, call = streaming(1)
    world.feed(failed(call, InstanceLost("gone")))
    world.place_all()
    world.encode_all()
    assert wanted_text(world)
    if isinstance(lost, TextPoolLost):
        world.feed(PlaceRefused(1, Unavailable("none")))
    world.feed(lost)
    world.assert_over(RequestPhase.FAILED)
    assert isinstance(world.error, InstanceLost)


def test_an_answer_that_has_begun_waits_if_the_queue_for_encoders_is_full() -> None:
    world, call = streaming(1)
    world.feed(failed(call, InstanceLost("gone")))
    assert world.take(CreditsWanted)
    world.feed(PlaceRefused(1, Overloaded("the queue is full")))
    assert world.machine.phase is RequestPhase.WAITING
    world.resume()
    assert world.up_to_text().kind is AttemptKind.DECODE


def test_items_lost_again_before_an_answer_goes_on_are_encoded_again() -> None:
    world, call = streaming(2)
    world.feed(failed(call, InstanceLost("gone")))
    second = world.up_to_text()
    world.feed(failed(second, TransferFailed("lost", items=(1,))))
    world.place_all()
    world.encode_all()
    world.renew_all()
    third = world.dispatched()
    assert (third.kind, len(third.placements)) == (AttemptKind.DECODE, 2)


@pytest.mark.parametrize("signal", [Signal.CALLER_LEFT, Signal.DEADLINE_PASSED])
def test_a_request_that_ends_between_two_text_instances_holds_nothing(signal: Signal) -> None:
    world, call = streaming(2)
    world.feed(failed(call, InstanceLost("gone")))
    world.place_all()
    world.feed(signal)
    world.assert_over(RequestPhase.CANCELLED if signal is Signal.CALLER_LEFT else RequestPhase.FAILED)


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_lost_lease_is_not_a_failure_of_the_text_instance() -> None:
    world = World(1)
    world.feed(failed(world.up_to_text(), LeaseLost("over")))
    world.renew_all()
    assert world.dispatched()
    assert world.avoided == frozenset()


def test_a_lease_is_renewed_once_per_attempt_however_short_it_is() -> None:
    world = World(1)
    world.feed(failed(world.up_to_text(), LeaseLost("over")))
    (call,) = world.take(Renew)
    assert isinstance(call, Renew)
    world.now_s = 29.5
    world.renewed(call)
    assert (world.dispatched().placements[0].ticket.lease_id,) == call.lease_ids


def test_a_lost_lease_reencodes_the_item_on_its_encoder() -> None:
    world = World(2)
    world.feed(failed(world.up_to_text(), LeaseLost("over")))
    first, second = world.take(Renew)
    assert isinstance(first, Renew)
    assert isinstance(second, Renew)
    world.feed(failed(first, LeaseLost("over")))
    world.renewed(second)
    (again,) = world.take(CreditsWanted)
    assert isinstance(again, CreditsWanted)
    assert [(want.item, want.avoid) for want in again.wants] == [(0, frozenset())]


def test_repeatedly_lost_leases_end_as_a_failed_transfer() -> None:
    world = World(1)
    for _ in range(3):
        world.feed(failed(world.up_to_text(), LeaseLost("over")))
        for call in world.take(Renew):
            assert isinstance(call, Renew)
            world.feed(failed(call, LeaseLost("over")))
    world.assert_over(RequestPhase.FAILED)
    assert isinstance(world.error, TransferFailed)


def test_a_lease_close_to_expiry_is_renewed_before_it_is_sent() -> None:
    world = World(2)
    world.place_all()
    first, second = world.take(Encode)
    assert isinstance(first, Encode)
    assert isinstance(second, Encode)
    assert first.lease_s == 30.0
    world.encoded(first)
    world.now_s = 20.0
    world.feed(failed(second, Overloaded("busy")))
    world.resume()
    world.place_all()
    world.now_s = 29.0
    world.encode_all()
    assert [call.tickets[0].key[0] for call in world.calls if isinstance(call, Renew)] == [0]
    world.renew_all()
    assert world.dispatched()


def test_a_renewed_lease_starts_at_the_time_of_its_request() -> None:
    world = World(1)
    first = world.up_to_text()
    world.now_s = 20.0
    world.feed(failed(first, LeaseLost("over")))
    world.now_s = 29.0
    world.renew_all()
    call = world.dispatched()
    world.now_s = 49.0
    world.feed(failed(call, TransferFailed("broken", items=(0,))))
    assert not world.take(Renew), "it had a second left: the transfer failed for another reason"
    assert world.take(CreditsWanted)


def test_a_lease_on_another_embedding_is_released_and_only_another_encoder_is_tried() -> None:
    world = World(1)
    world.feed(failed(world.up_to_text(), LeaseLost("over")))
    (call,) = world.take(Renew)
    assert isinstance(call, Renew)
    ticket = replace(world.ticket(bytes(32), call.name, call.lease_ids[0], 1.0), lease_id=b"x" * 16)
    effects = world.feed(Renewed(call, world.now_s, (ticket,)))
    assert released(effects) >= {call.lease_ids[0], b"x" * 16}
    assert EmbeddingGone(call.credit, unusable=True) in effects
    assert_only_another_is_tried(world, call.name)


def assert_only_another_is_tried(world: World, name: str) -> None:
    """The encoder with this name is not; without another the request fails."""
    (again,) = world.take(CreditsWanted)
    assert isinstance(again, CreditsWanted)
    assert again.wants[0].exclude == {name}
    world.feed(PlaceRefused(1, Unavailable("none")))
    world.assert_over(RequestPhase.FAILED)
    assert isinstance(world.error, InternalError)


def test_no_lease_is_extended_after_the_deadline() -> None:
    world = World(1)
    world.now_s = DEADLINE_S + 1
    world.place_all()
    (call,) = world.take(Encode)
    assert isinstance(call, Encode)
    assert call.lease_s == 0.0


def test_a_lease_is_never_longer_than_the_request_timeout() -> None:
    world = World(1)
    world.now_s = 99.0
    world.place_all()
    (call,) = world.take(Encode)
    assert isinstance(call, Encode)
    assert call.lease_s == pytest.approx(1.0)
    world.encoded(call)
    assert world.dispatched()


@pytest.mark.parametrize(
    "broken",
    [
        {"key": b"short"},
        {"holder": "i-other"},
        {"tokens": 5},
        {"tensors": ()},
        {"tensors": (TensorSpec("embeddings", DType.F32, (8, 4)),)},
        {"payload_nbytes": 129},
    ],
)
def test_an_item_with_an_invalid_ticket_is_encoded_elsewhere(broken: dict[str, object]) -> None:
    world = World(1)
    world.place_all()
    (call,) = world.take(Encode)
    assert isinstance(call, Encode)
    ticket = replace(world.ticket(bytes(32), call.name, call.reader_lease, 1.0), **broken)  # type: ignore[arg-type]
    result = EncodeResult(ticket, world.lease(call.router_lease, call.name), cached=False, queue_s=0, encode_s=0)
    effects = world.feed(ItemEncoded(call.credit, call.name, result))
    assert EmbeddingGone(call.credit, unusable=True) in effects
    assert not world.leases
    assert_only_another_is_tried(world, call.name)


def test_leases_that_arrive_after_the_end_are_released() -> None:
    world = World(2)
    world.place_all()
    first, second = world.take(Encode)
    assert isinstance(first, Encode)
    assert isinstance(second, Encode)
    world.feed(Signal.CALLER_LEFT)
    world.encoded(first)
    world.encoded(second)
    world.assert_over(RequestPhase.CANCELLED)
    assert isinstance(world.error, Cancelled)


def test_leaving_the_queue_is_reported_and_late_credits_are_released() -> None:
    world = World(2)
    (call,) = world.calls
    assert isinstance(call, CreditsWanted)
    assert any(isinstance(effect, CreditsAbandoned) for effect in world.feed(Signal.DEADLINE_PASSED))
    world.place(call)
    world.assert_over(RequestPhase.FAILED)
    assert isinstance(world.error, DeadlineExceeded)


def test_losing_the_text_pool_ends_requests_not_yet_dispatched() -> None:
    world = World(1)
    world.place_all()
    world.feed(TextPoolLost(Unavailable("none")))
    world.assert_over(RequestPhase.FAILED)
    world = World(1)
    world.up_to_text()
    world.feed(TextPoolLost(Unavailable("none")))
    assert world.machine.phase is RequestPhase.DISPATCHING


# --- lease ids chosen by the router, and extensions --------------------------------------------------------------------


def released(effects: list[RequestEffect]) -> set[LeaseId]:
    return {lease_id for effect in effects if isinstance(effect, Release) for lease_id in effect.lease_ids}


def test_leases_of_a_cancelled_encode_are_released_without_a_response() -> None:
    world = World(1)
    world.place_all()
    (call,) = world.take(Encode)
    assert isinstance(call, Encode)
    assert released(world.feed(Signal.CALLER_LEFT)) == {call.reader_lease, call.router_lease}
    world.assert_over(RequestPhase.CANCELLED)


@pytest.mark.parametrize(
    ("error", "unsure"),
    [(InstanceLost("?"), True), (Unavailable("?"), True), (Overloaded("no"), False), (ArenaFull("no"), False)],
)
def test_leases_are_released_after_an_ambiguous_error(error: TriptychError, unsure: bool) -> None:
    world = World(1)
    world.place_all()
    (call,) = world.take(Encode)
    assert isinstance(call, Encode)
    named = {call.reader_lease, call.router_lease}
    assert released(world.feed(failed(call, error))) == (named if unsure else set())


def test_unexpected_lease_ids_are_released_and_only_another_encoder_is_tried() -> None:
    world = World(1)
    world.place_all()
    (call,) = world.take(Encode)
    assert isinstance(call, Encode)
    ticket = world.ticket(bytes(32), call.name, call.reader_lease, 1.0)
    result = EncodeResult(ticket, b"x" * 16, cached=False, queue_s=0, encode_s=0)
    effects = world.feed(ItemEncoded(call.credit, call.name, result))
    assert released(effects) == {call.reader_lease, call.router_lease, b"x" * 16}
    assert_only_another_is_tried(world, call.name)


def test_an_item_is_right_at_the_second_encoder_after_an_invalid_ticket() -> None:
    world = World(1)
    world.place_all()
    (call,) = world.take(Encode)
    assert isinstance(call, Encode)
    ticket = replace(world.ticket(bytes(32), call.name, call.reader_lease, 1.0), tokens=5)
    result = EncodeResult(ticket, world.lease(call.router_lease, call.name), cached=False, queue_s=0, encode_s=0)
    world.feed(ItemEncoded(call.credit, call.name, result))
    (again,) = world.take(CreditsWanted)
    assert isinstance(again, CreditsWanted)
    world.place(again, "other")
    world.encode_all()
    dispatch = world.dispatched()
    assert [placement.ticket.holder for placement in dispatch.placements] == ["i-other"]


def test_the_encoders_of_named_items_are_blamed_for_failed_pulls_and_all_others_praised_for_reads() -> None:
    world = World(3)
    effects = world.feed(failed(world.up_to_text(), TransferFailed("damaged", items=(1,))))
    gone = [effect for effect in effects if isinstance(effect, EmbeddingGone)]
    assert gone == [EmbeddingGone(2, unusable=True)]
    world.place_all()
    world.encode_all()
    world.renew_all()
    effects = world.feed(FirstToken(world.dispatched().credit))
    assert [effect for effect in effects if isinstance(effect, EmbeddingsRead)] == [EmbeddingsRead((1, 5, 3))]
    world = World(2)
    effects = world.feed(failed(world.up_to_text(), TransferFailed("of nobody knows what")))
    gone = [effect for effect in effects if isinstance(effect, EmbeddingGone)]
    assert gone == [EmbeddingGone(1), EmbeddingGone(2)]


def test_when_the_retry_budget_is_spent_the_request_fails_with_that() -> None:
    world = World(2)
    world.place_all()
    first, _ = world.take(Encode)
    assert isinstance(first, Encode)
    world.feed(failed(first, EngineFailure("failed")))
    spent = Unavailable("encoders fail", retry_after_s=1.0)
    world.take(CreditsWanted)
    world.feed(PlaceRefused(1, spent, final=True))
    world.assert_over(RequestPhase.FAILED)
    assert world.error is spent


# --- hedges ------------------------------------------------------------------------------------------------------------


def two_calls() -> tuple[World, Encode, Encode]:
    """A request with one item, which is being encoded and takes long, and its hedge."""
    world = World(1, hedge_after_s=1.0)
    world.place_all()
    (first,) = [call for call in world.calls if isinstance(call, Encode)]
    world.resume()
    assert world.now_s == 1.0
    assert world.hedges_wanted[0].want.exclude == {first.name}
    world.grant_hedge()
    (second,) = [call for call in world.calls if isinstance(call, Encode) and call is not first]
    return world, first, second


def answers(world: World, call: Encode) -> list[RequestEffect]:
    """The effects of this call's answer."""
    world.effects.clear()
    world.calls.remove(call)
    world.encoded(call)
    return list(world.effects)


def test_the_hedge_of_an_item_may_win_and_the_first_call_is_cancelled() -> None:
    world, first, second = two_calls()
    effects = answers(world, second)
    assert [effect for effect in effects if isinstance(effect, Overtaken | Abort)] == [
        Overtaken(first.credit),
        Abort(first.credit, "another encoder was faster"),
    ]
    assert released(effects) == {first.reader_lease, first.router_lease}
    (placement,) = world.dispatched().placements
    assert placement.ticket.holder == f"i-{second.name}"
    line = world.machine.timeline(world.now_s, 0).items[0]
    assert (line.encoder, line.encode_attempts, line.hedges, line.hedge_won) == (f"i-{second.name}", 1, 1, True)
    world.encoded(first)  # at the same moment
    assert set(world.leases) == {second.reader_lease, second.router_lease}


def test_a_hedge_may_lose_which_says_nothing_about_its_encoder() -> None:
    world, first, second = two_calls()
    effects = answers(world, first)
    assert [effect for effect in effects if isinstance(effect, Overtaken | Abort)] == [
        Abort(second.credit, "another encoder was faster")
    ]
    assert released(effects) == {second.reader_lease, second.router_lease}
    assert world.credits == {first.credit: first.name}
    line = world.machine.timeline(world.now_s, 0).items[0]
    assert (line.encoder, line.hedges, line.hedge_won) == (f"i-{first.name}", 1, False)


ONE_CALL_ENDS = [InstanceLost("gone"), Overloaded("busy"), ArenaFull("full"), EngineFailure("failed")]


@pytest.mark.parametrize("error", ONE_CALL_ENDS)
@pytest.mark.parametrize("index", [0, 1])
def test_when_one_of_two_calls_fails_the_other_one_goes_on(index: int, error: TriptychError) -> None:
    world, *calls = two_calls()
    failing, other = calls[index], calls[1 - index]
    world.calls.remove(failing)
    effects = world.feed(failed(failing, error))
    assert EmbeddingGone(failing.credit) in effects
    assert not world.take(CreditsWanted)
    assert world.credits == {other.credit: other.name}
    answers(world, other)
    assert world.dispatched().placements[0].ticket.holder == f"i-{other.name}"


def test_a_wrong_answer_of_a_hedge_is_dropped() -> None:
    world, first, second = two_calls()
    ticket = replace(world.ticket(bytes(32), second.name, second.reader_lease, 1.0), tokens=5)
    result = EncodeResult(ticket, world.lease(second.router_lease, second.name), cached=False, queue_s=0, encode_s=0)
    effects = world.feed(ItemEncoded(second.credit, second.name, result))
    assert EmbeddingGone(second.credit, unusable=True) in effects
    assert not world.leases
    answers(world, first)
    assert world.dispatched().placements[0].ticket.holder == f"i-{first.name}"


def test_an_item_both_of_whose_calls_fail_is_encoded_again() -> None:
    world, first, second = two_calls()
    world.feed(failed(second, InstanceLost("gone")))
    world.feed(failed(first, InstanceLost("gone")))
    (again,) = world.take(CreditsWanted)
    assert isinstance(again, CreditsWanted)
    assert again.wants[0].avoid == {first.name, second.name}
    assert not world.credits


def test_a_permanent_error_of_a_hedge_ends_the_request() -> None:
    world, _, second = two_calls()
    world.feed(failed(second, InvalidMedia("bad")))
    world.assert_over(RequestPhase.FAILED)


def test_both_calls_end_with_the_request() -> None:
    world, first, second = two_calls()
    effects = world.feed(Signal.CALLER_LEFT)
    assert released(effects) == {
        first.reader_lease,
        first.router_lease,
        second.reader_lease,
        second.router_lease,
    }
    world.assert_over(RequestPhase.CANCELLED)


def test_a_hedge_that_is_not_granted_is_wanted_again_at_growing_times() -> None:
    world = World(1, hedge_after_s=1.0)
    world.place_all()
    times = []
    for _ in range(4):
        world.resume()
        times.append(world.now_s)
    assert times == [1.0, 1.25, 1.5625, 1.953125]
    assert len(world.hedges_wanted) == 4
    world.encode_all()
    world.resume()
    assert len(world.hedges_wanted) == 4, "it is encoded"


def test_one_alarm_serves_all_items() -> None:
    world = World(3, hedge_after_s=1.0)
    world.place_all()
    assert len(world.pauses) == 1
    (first, *_) = world.take(Encode)
    assert isinstance(first, Encode)
    world.encoded(first)
    world.resume()
    assert [wanted.want.item for wanted in world.hedges_wanted] == [1, 2]
    assert len(world.pauses) == 1


def test_a_hedge_that_comes_too_late_is_given_back() -> None:
    world = World(1, hedge_after_s=1.0)
    world.place_all()
    world.resume()
    world.up_to_text()
    world.credits[99] = "late"
    late = Grant(99, 0, "late", "i-late", hedges=True)
    assert world.feed(Granted(1, (late,))) == [Release("late", 99, (), "no longer wanted")]
    world.feed(Signal.CALLER_LEFT)
    world.credits[100] = "later"
    world.feed(Granted(1, (replace(late, credit=100),)))
    world.assert_over(RequestPhase.CANCELLED)


def alarms(effects: list[RequestEffect]) -> list[float]:
    return [effect.delay_s for effect in effects if isinstance(effect, After) and effect.event is Signal.LEASES_DUE]


def extends(effects: list[RequestEffect]) -> list[Renew]:
    return [effect for effect in effects if isinstance(effect, Renew) and effect.extends]


def test_leases_are_extended_at_half_their_time_while_the_request_waits() -> None:
    world = World(1)
    call = world.up_to_text()
    assert alarms(world.effects) == [15.0]  # of 30 s
    requested_s: list[float] = []
    while delays_s := alarms(world.effects):
        world.effects.clear()
        world.now_s += delays_s[-1]
        for extend in extends(world.feed(Signal.LEASES_DUE)):
            assert set(extend.lease_ids) == set(world.leases)
            requested_s.append(world.now_s)
            world.extended(extend)
    # With 25 s left the requested lease lasts until the request's deadline.
    assert requested_s == [15.0, 30.0, 45.0, 60.0, 75.0]
    world.feed(failed(call, TransferFailed("the lease is over", items=(0,))))
    assert not world.take(Renew), "the extended lease had not expired: the transfer failed for another reason"


def test_one_alarm_serves_all_leases_and_fires_at_once_when_half_is_over() -> None:
    world = World(2)
    world.up_to_text()
    assert alarms(world.effects) == [15.0]
    world.now_s = 15.0
    first, second = extends(world.feed(Signal.LEASES_DUE))
    world.now_s = 21.0
    world.effects.clear()
    world.extended(first, 5.0)
    assert alarms(world.effects) == [0.0]
    world.extended(second, 15.0)
    assert alarms(world.effects) == [0.0], "an earlier alarm is set"


def test_only_the_leases_that_are_due_are_extended() -> None:
    world = World(2)
    world.place_all()
    first, second = world.take(Encode)
    assert isinstance(first, Encode)
    assert isinstance(second, Encode)
    world.encoded(second)
    world.feed(failed(first, Overloaded("busy")))
    world.now_s = 10.0
    world.feed(world.pauses.pop().event)
    world.place_all()
    world.encode_all()
    world.now_s = 15.0
    assert [extend.tickets[0].key[0] for extend in extends(world.feed(Signal.LEASES_DUE))] == [1]


def test_failed_extensions_are_retried_until_the_lease_expires() -> None:
    world = World(1)
    world.up_to_text()
    tried_s: list[float] = []
    while delays_s := alarms(world.effects):
        world.effects.clear()
        world.now_s += delays_s[-1]
        tried_s += [world.now_s for _ in extends(world.feed(Signal.LEASES_DUE))]
    assert tried_s == pytest.approx([15.0, 22.5, 26.25, 28.125, 29.0625, 29.53125])


def test_released_and_long_enough_leases_are_not_extended() -> None:
    world = World(1)
    world.now_s = DEADLINE_S - 25.0
    world.up_to_text()
    assert not alarms(world.effects)
    world = World(1)
    world.now_s = DEADLINE_S - 30.5  # half a second is not worth a call
    world.up_to_text()
    assert not alarms(world.effects)
    world = World(1)
    call = world.up_to_text()
    world.feed(FirstToken(call.credit))
    world.now_s = 15.0
    assert extends(world.feed(Signal.LEASES_DUE)) == []
    ticket = call.placements[0].ticket
    late = Renew(1, ticket.address, (ticket,), (b"x" * 16,), 30.0, "half of its time has passed", extends=True)
    assert world.feed(Renewed(late, 14.0, (ticket,))) == []


def growing(*, tokens: int, sent_tokens: int) -> bool:
    """Each beginning that is longer than the one before."""
    return tokens > sent_tokens


ERRORS: tuple[TriptychError, ...] = (
    InstanceLost("gone"),
    Unavailable("draining"),
    ArenaFull("full"),
    Overloaded("busy"),
    LeaseLost("over"),
    TransferFailed("broken"),
    TransferFailed("broken", items=(0, 2)),
)
FATAL: tuple[TriptychError, ...] = (EngineFailure("failed"), InvalidMedia("bad"))


def some_error(rng: Random) -> TriptychError:
    return rng.choice(FATAL if rng.random() < 0.05 else ERRORS)


@settings(max_examples=examples(300))
@given(count=st.integers(0, 4), seed=st.integers(0, 2**32), failing=st.floats(0, 0.6))
def test_every_run_has_exactly_one_end_with_nothing_held(count: int, seed: int, failing: float) -> None:  # noqa: C901, PLR0912
    """Any failures, in any order of responses: bounded work, one end, every lease and credit returned."""
    # A seed rather than drawn steps: walks stay long, where shrinking draws would end them early.
    rng = Random(seed)
    dispatching = rng.choice([None, growing])
    world = World(count, hedge_after_s=rng.choice([inf, 0.1, 5.0]), dispatch=dispatching)
    dispatch: Generate | None = None
    for _ in range(400):
        if world.ends:
            break
        # A request that does not wait for credits is answered before anything else happens.
        at_once = [call for call in world.calls if isinstance(call, TextWanted) or _is_repair(call)]
        if at_once:
            world.calls.remove(at_once[0])
            dispatch = _answer(world, at_once[0], rng, failing) or dispatch
            continue
        if world.hedges_wanted and rng.random() < 0.8:
            world.grant_hedge()
            continue
        world.now_s += rng.choice([0.0, 0.1, 0.1, 5.0])
        if dispatch is not None and rng.random() < 0.1:
            world.transfer_kv(dispatch, rng.randrange(4), rng.choice([1.0, 30.0]))
            dispatch = None
            continue
        if world.pauses and rng.random() < 0.3:
            world.resume()
            continue
        if world.alarmed and rng.random() < 0.3:
            world.feed(Signal.LEASES_DUE)
        if world.extending and rng.random() < 0.5:
            extend = world.extending.pop()
            if rng.random() > failing:
                world.extended(extend, world.now_s - 0.1)
        if world.now_s >= DEADLINE_S or (not world.calls and dispatch is None and not world.pauses):
            world.feed(Signal.DEADLINE_PASSED)
            break
        if rng.random() < 0.01:
            endings: list[RequestEvent] = [Signal.CALLER_LEFT, Signal.DEADLINE_PASSED, Failed(InternalError("defect"))]
            world.feed(rng.choice(endings))
            break
        if world.calls and (dispatch is None or rng.random() < 0.5):
            call = rng.choice(world.calls)
            world.calls.remove(call)
            if is_early(call):
                assert isinstance(call, Generate)
                assert call.credit in world.early, "a call whose place is returned is cancelled"
            if isinstance(call, Encode | Renew) and not world.is_of_segments(call):
                assert call.credit in world.credits, "a call whose credit is released is cancelled"
            _answer(world, call, rng, failing)
        elif dispatch is not None:
            dispatch = _stream(world, dispatch, rng, failing)
    assert len(world.ends) == 1, "it does not end"
    assert world.machine.phase.has_ended
    assert not world.credits
    assert not world.early
    assert not world.leases
    assert not world.calls_left, "abandoned calls are cancelled"
    # Leases in responses that were still in flight are released too.
    for call in world.aborted:
        if isinstance(call, Encode):
            world.encoded(call)
        elif isinstance(call, Renew) and world.is_of_segments(call):
            world.renew_segments(call, rng.randrange(4))
        elif isinstance(call, Renew):
            world.renewed(call)
    assert not world.leases
    assert len(world.ends) == 1
    timeline = world.machine.timeline(world.now_s, 0)
    assert timeline.outcome is not Outcome.RUNNING


def _is_repair(call: Call) -> bool:
    return isinstance(call, CreditsWanted) and not call.wait


def _answer(world: World, call: Call, rng: Random, failing: float) -> Generate | None:
    fails = rng.random() < failing
    match call:
        case CreditsWanted(wait=wait):
            if wait or not fails:
                world.place(call)
            else:
                refusal = rng.choice([ArenaFull("full"), Unavailable("none")])
                world.feed(PlaceRefused(1, refusal, final=rng.random() < 0.05))
        case Renew() if world.is_of_segments(call):
            world.renew_segments(call, 0 if fails else rng.choice([1, 99]))
        case Encode() | Renew() | Generate():
            if fails:
                world.feed(failed(call, some_error(rng)))
            else:
                world.succeed(call)
        case TextWanted():
            return _answer_text(world, call, rng)
    return None


def _answer_text(world: World, call: TextWanted, rng: Random) -> Generate | None:
    if call.early:
        if rng.random() < 0.7:
            world.place_early(call)
        return None
    if call.kept_credit is not None and rng.random() < 0.3:  # its instance was lost
        del world.early[call.kept_credit]
        call = replace(call, kept_credit=None)
    if call.kept_credit is None and rng.random() < 0.1:
        world.feed(PlaceRefused(1, Unavailable("none")))
        return None
    return world.place_text(call, transfers_kv=call.kept_credit is None and rng.random() < 0.4)


def _stream(world: World, dispatch: Generate, rng: Random, failing: float) -> Generate | None:
    """One event of the text stream; None when that was the last."""
    if rng.random() < failing:
        world.feed(failed(dispatch, some_error(rng)))
        return None
    events: list[RequestEvent] = [
        TextReported(dispatch.credit, Ready((), 0.0, 0.0)),
        FirstToken(dispatch.credit),
        TextReported(dispatch.credit, finished()),
    ]
    event = rng.choice(events)
    world.feed(event)
    return None if isinstance(event, TextReported) and isinstance(event.what, Finished) else dispatch


def resolving() -> tuple[World, Resolved]:
    """A resolve of two items, whose caller has been told where they are."""
    world = World(2, resolves=True)
    world.place_all()
    world.encode_all()
    (told,) = [effect for effect in world.effects if isinstance(effect, Resolved)]
    assert world.machine.phase is RequestPhase.HOLDING
    return world, told


def test_a_resolve_tells_where_its_items_are_and_asks_for_no_text_instance() -> None:
    world, told = resolving()
    assert not world.take(TextWanted)
    assert [item.ticket.key for item in told.items] == [bytes([index]) * 32 for index in range(2)]
    assert [item.ticket.address for item in told.items] == ["e0", "e1"]
    assert [item.cached for item in told.items] == [False, False]
    assert {item.ticket.lease_id for item in told.items} <= world.leases.keys()
    assert len(world.leases) == 4


def test_a_resolve_is_done_when_its_caller_leaves_and_holds_nothing_then() -> None:
    world, _ = resolving()
    world.now_s = 3.0
    world.feed(Signal.CALLER_LEFT)
    world.assert_over(RequestPhase.DONE)
    timeline = world.machine.timeline(99.0, 0)
    assert (timeline.outcome, timeline.total_s, timeline.ttft_s, timeline.text_attempts) == (Outcome.DONE, 3.0, 0.0, 0)


def test_a_resolve_is_done_at_its_deadline() -> None:
    world, _ = resolving()
    world.now_s = DEADLINE_S
    world.feed(Signal.DEADLINE_PASSED)
    world.assert_over(RequestPhase.DONE)


def test_a_resolve_that_is_not_encoded_in_time_fails() -> None:
    world = World(1, resolves=True)
    world.place_all()
    world.feed(Signal.DEADLINE_PASSED)
    world.assert_over(RequestPhase.FAILED)
    assert isinstance(world.error, DeadlineExceeded)


def test_a_caller_that_leaves_before_its_items_are_encoded_has_cancelled() -> None:
    world = World(1, resolves=True)
    world.place_all()
    world.feed(Signal.CALLER_LEFT)
    world.assert_over(RequestPhase.CANCELLED)


def test_leases_of_a_resolve_are_extended_while_it_is_held() -> None:
    world, told = resolving()
    world.now_s = 15.0
    world.feed(Signal.LEASES_DUE)
    extended = {lease_id for effect in world.extending for lease_id in effect.lease_ids}
    assert extended >= {item.ticket.lease_id for item in told.items}
    assert len(extended) == 4


def test_a_resolve_needs_no_text_pool() -> None:
    world = World(1, resolves=True)
    world.feed(TextPoolLost(Unavailable("no text instance")))
    world.place_all()
    world.encode_all()
    assert world.machine.phase is RequestPhase.HOLDING


def test_an_item_of_a_resolve_whose_encoder_dies_is_encoded_elsewhere() -> None:
    world = World(1, resolves=True)
    world.place_all()
    (call,) = world.take(Encode)
    assert isinstance(call, Encode)
    world.feed(failed(call, InstanceLost("it died")))
    world.place_all()
    world.encode_all()
    assert world.machine.phase is RequestPhase.HOLDING
    assert world.machine.timeline(1.0, 0).items[0].encode_attempts == 2


def test_a_request_that_waits_is_moved_to_the_place_that_is_kept_for_it() -> None:
    world = World(1)
    world.place_all()
    world.encode_all()
    first = world.dispatched()
    world.move(first)
    assert [effect.credit for effect in world.effects if isinstance(effect, Abort)] == [first.credit]
    world.renew_all()
    (call,) = world.take(TextWanted)
    assert isinstance(call, TextWanted)
    assert (call.kept_credit, call.moves, call.avoid) == (world.serial, 1, frozenset())
    second = world.place_text(call)
    assert second.credit == call.kept_credit
    assert second.placements[0].ticket.lease_id != first.placements[0].ticket.lease_id
    world.feed(FirstToken(second.credit))
    assert world.machine.timeline(world.now_s, 0).text_attempts == 1


def test_a_request_that_has_begun_or_is_over_is_not_moved() -> None:
    world = World(0)
    first = world.dispatched()
    world.feed(FirstToken(first.credit))
    (returned,) = world.move(first)
    assert isinstance(returned, Release)
    assert not world.early
    world.feed(Signal.CALLER_LEFT)
    (returned,) = world.move(first)
    assert isinstance(returned, Release)
    assert not world.early


def test_a_request_may_leave_without_another_place_and_gives_a_kept_one_back_at_its_end() -> None:
    world = World(1)
    world.place_all()
    world.encode_all()
    world.feed(Moved(1, world.dispatched().credit, None, "test"))
    world.renew_all()
    (call,) = world.take(TextWanted)
    assert isinstance(call, TextWanted)
    assert call.kept_credit is None
    second = world.place_text(call)
    world.move(second)
    assert world.early
    world.feed(Signal.CALLER_LEFT)
    assert not world.early


# --- what may end instances ---


def lost(world: World, call: Encode | Generate, *, epoch: int = 1) -> list[RequestEffect]:
    loss = Loss(call.name, epoch)
    return world.feed(CallFailed(call.credit, call.name, InstanceLost("gone"), loss=loss))


def placed_text(world: World) -> Generate:
    (call,) = world.take(TextWanted)
    assert isinstance(call, TextWanted)
    return world.place_text(call)


def test_a_request_lost_with_two_text_instances_before_a_token_fails_alone() -> None:
    world = World(0)
    lost(world, placed_text(world))
    (again,) = world.take(TextWanted)
    assert isinstance(again, TextWanted)
    assert again.suspect
    lost(world, world.place_text(again))
    (error,) = world.ends
    assert isinstance(error, EngineFailure)


def test_a_request_that_got_further_at_each_text_instance_is_not_suspected() -> None:
    world = World(0)
    for _ in range(LIMITS.max_text_attempts - 1):
        dispatch = placed_text(world)
        world.feed(FirstToken(dispatch.credit))
        lost(world, dispatch)
    assert not world.ends
    world.feed(FirstToken(placed_text(world).credit))
    assert not world.machine.losses.lost


def test_a_request_lost_with_two_encoders_fails_alone_whichever_items_they_had() -> None:
    world = World(2)
    world.place_all()
    first, second = world.take(Encode)
    assert isinstance(first, Encode)
    assert isinstance(second, Encode)
    lost(world, first)
    assert [call.suspect for call in world.calls if isinstance(call, CreditsWanted)] == [True]
    lost(world, second)
    (error,) = world.ends
    assert isinstance(error, EngineFailure)


def test_the_items_of_a_request_that_one_encoder_ended_with_are_one_loss() -> None:
    world = World(2)
    (call,) = world.take(CreditsWanted)
    assert isinstance(call, CreditsWanted)
    world.place(call, "e0")
    for encode in world.take(Encode):
        assert isinstance(encode, Encode)
        lost(world, encode)
    assert not world.ends
    world.place_all()
    world.encode_all()
    assert not world.machine.losses.lost


def test_a_beginning_of_the_prompt_counts_as_an_attempt() -> None:
    world = World(2, dispatch=lambda *, tokens, sent_tokens: tokens > sent_tokens)
    world.place_all()
    first, second = world.take(Encode)
    assert isinstance(first, Encode)
    assert isinstance(second, Encode)
    world.encoded(first)
    (wanted,) = world.take(TextWanted)
    assert isinstance(wanted, TextWanted)
    world.place_early(wanted)
    (early,) = world.take_early()
    lost(world, early)
    world.renew_all()
    world.encoded(second)
    lost(world, placed_text(world))
    (error,) = world.ends
    assert isinstance(error, EngineFailure)


def test_no_second_encoder_gets_an_item_of_a_suspect() -> None:
    world = World(2, hedge_after_s=1.0)
    world.place_all()
    first, _ = world.take(Encode)
    assert isinstance(first, Encode)
    lost(world, first)
    world.now_s = 5.0
    world.feed(Signal.HEDGES_DUE)
    assert not world.hedges_wanted


def test_a_suspect_that_finds_no_instance_is_lost_so_that_no_other_router_tries_it() -> None:
    world = World(1)
    world.place_all()
    (call,) = world.take(Encode)
    assert isinstance(call, Encode)
    lost(world, call)
    world.feed(PlaceRefused(1, Unavailable("no encoder is available"), final=True))
    (error,) = world.ends
    assert isinstance(error, InstanceLost)
