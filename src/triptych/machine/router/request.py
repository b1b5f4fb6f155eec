"""The state of one request in the router, from its arrival to one of three ends.


    PREPARING -> WAITING -> ENCODING -> DISPATCHING -> STREAMING -> DONE | FAILED | CANCELLED
                               +------> HOLDING -> DONE

A chat is dispatched to a text instance. If that one computes the prompt only, it is dispatched again once it is handed over,
after its first token: from STREAMING back to DISPATCHING (docs/adr/0044). While it waits there it may be moved to another one: from
DISPATCHING to DISPATCHING (docs/adr/0047). A resolve ends in HOLDING: its caller is told where the items are, and they are held
until it leaves or the deadline passes.

Losses are redone at the smallest grain: an item is encoded again elsewhere, a lease renewed, a text instance replaced; each
a bounded number of times. After the first token, another text instance goes on with the answer (docs/adr/0031), for which
the request is placed at encoders anew: from STREAMING back to WAITING or DISPATCHING. If an arena is full, the whole
request returns to the queue, holding nothing; if an encoder is busy, only that item is retried later. Both continue
until the deadline, with growing pauses.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from triptych.domain.embedding import LeaseId
from triptych.domain.generation import Finished, Ready
from triptych.domain.limits import Positive, PositiveSeconds, Seconds, check_limits
from triptych.domain.timeline import Outcome, Timeline
from triptych.errors import (
    ArenaFull,
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    InstanceLost,
    InternalError,
    LeaseLost,
    Overloaded,
    StageClosed,
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.machine.router.early_prefill import EarlyPrefill
from triptych.machine.router.held_segments import HeldSegments, leases_of
from triptych.machine.router.held_ticket import HeldTicket
from triptych.machine.router.losses import Losses
from triptych.machine.router.prompt_identity import PromptIdentity, PromptTokens
from triptych.machine.router.request_events import (
    Abort,
    After,
    AnswerHandedOver,
    End,
    Failed,
    Generate,
    LeaseGranted,
    LeasesExtended,
    PrefillEarly,
    PrefilledEarly,
    Prepared,
    RequestEffect,
    RequestEvent,
    Resolved,
    Resumed,
    SegmentsRenewed,
    Signal,
    TextReported,
)
from triptych.machine.router.request_item import RequestItem
from triptych.machine.router.request_items import RequestItems
from triptych.machine.router.request_stats import RequestStats
from triptych.machine.router.request_turns import RequestTurns
from triptych.machine.router.shared_events import (
    CallFailed,
    CreditsAbandoned,
    CreditsWanted,
    EmbeddingGone,
    FirstToken,
    Grant,
    Granted,
    ItemEncoded,
    Moved,
    Refused,
    Release,
    TextPoolLost,
    TextWanted,
)
from triptych.machine.router.text_attempts import TextAttempts
from triptych.policy.dispatching import Dispatch, complete
from triptych.policy.policies import Ordering
from triptych.policy.queueing import by_slo
from triptych.policy.retrying import pause_s


class Phase(Enum):
    PREPARING = "preparing"
    WAITING = "waiting"
    """For credits at encoders; the request holds nothing."""
    ENCODING = "encoding"
    DISPATCHING = "dispatching"
    STREAMING = "streaming"
    HOLDING = "holding"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self in _OUTCOMES

    @property
    def outcome(self) -> Outcome:
        return _OUTCOMES.get(self, Outcome.RUNNING)


_OUTCOMES = {Phase.DONE: Outcome.DONE, Phase.FAILED: Outcome.FAILED, Phase.CANCELLED: Outcome.CANCELLED}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Retries and leases of one request."""

    max_encode_attempts: Positive = 3
    """Attempts to encode an item before the request fails."""
    max_text_attempts: Positive = 3
    """Attempts at text instances before a request fails, those that go on with its answer included. One whose instance
    drains, or has switched to other stages, does not count."""
    arena_retry_s: PositiveSeconds = 0.1
    """How long an encoder whose arena is full gets no items, and the first pause before an item it refused is retried."""
    longest_pause_s: PositiveSeconds = 2.0
    """Longest pause between retries of an item that no encoder has room for; pauses double up to this."""
    max_lease_s: PositiveSeconds = 60.0
    """Longest lease to request from an encoder. When a lease expires, it is renewed or the item encoded again."""
    min_lease_s: Seconds = 2.0
    """A lease with less time left than this is renewed before its ticket is sent to a text instance."""

    def __post_init__(self) -> None:
        check_limits(self, ("min_lease_s", "max_lease_s"), ("arena_retry_s", "longest_pause_s"))


class RequestMachine:
    """Owner of a request's phase, items and attempts. ``handle`` is the only mutator."""

    def __init__(
        self,
        number: int,
        request_id: str,
        model: str,
        *,
        now_s: float,
        deadline_s: float,
        limits: RequestLimits,
        new_lease: Callable[[], LeaseId],
        choices: int = 1,
        priority: int = 0,
        ordering: Ordering = by_slo,
        dispatch: Dispatch = complete,
        resolves: bool = False,
        continued_tokens: int | None = None,
    ) -> None:
        """``number`` is never reused, unlike the id, and grows with the arrivals.

        A chat is done when ``choices`` choices have finished. ``resolves``: it is no chat, and has items.
        ``continued_tokens``: another router began its answer, and has passed on so many tokens of these choices.
        ``new_lease`` returns a fresh lease id.
        """
        self._number = number
        self._request_id = request_id
        self._deadline_s = deadline_s
        self._limits = limits
        self._new_lease = new_lease
        self._choices = choices
        self._turns = RequestTurns(ordering, number, priority, now_s, deadline_s)
        self._sends_early = dispatch
        self._resolves = resolves
        self._phase = Phase.PREPARING
        self._over = False
        self._begun = continued_tokens is not None
        """Whether some of its answer has been sent."""
        self._items = RequestItems()
        self._answer_tokens = 0
        self._prompt: PromptTokens | None = None
        # Items whose credits have been requested and not answered.
        self._reserving: frozenset[int] = frozenset()
        self._requeues = 0
        # By number: the items to request again after the pause; empty when waiting for a text instance.
        self._pauses: dict[int, frozenset[int]] = {}
        self._pause_number = 0
        self._text = TextAttempts(limits.max_text_attempts)
        self._early = EarlyPrefill()
        self._segments = HeldSegments()
        self.losses = Losses()
        """For reading."""
        self._handed_s = 0.0
        """When the current attempt said that it has the embeddings: what it hands over is sealed later."""
        self._stats = RequestStats(request_id, model, started_s=now_s)
        if continued_tokens is not None:
            self._stats.goes_on(now_s, continued_tokens)

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def text_instance(self) -> str:
        """Id of the text instance chosen last."""
        return self._stats.instance_id

    @property
    def image_tokens(self) -> int:
        return sum(item.plan.tokens for item in self._items)

    @property
    def holds(self) -> int:
        """Number of items whose credits are held."""
        return len(self._items.held)

    def timeline(self, now_s: float, completion_tokens: int) -> Timeline:
        """The timeline so far; constant once the request is over."""
        items = tuple(item.timeline(self._stats.ready) for item in self._items)
        return self._stats.timeline(now_s, self._phase.outcome, items, completion_tokens=completion_tokens)

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        self._items.validate()
        losses = max((item.losses for item in self._items), default=0)
        assert losses <= self._limits.max_encode_attempts, "attempts"  # noqa: S101
        self._segments.validate()
        waits = self._phase in {Phase.PREPARING, Phase.WAITING} or self._phase.over
        if waits or (self._phase is Phase.STREAMING and not self._text.hands_over):
            assert self.holds == 0, f"{self._phase.value} holds credits"  # noqa: S101
        if self._phase.over or (self._phase is Phase.STREAMING and not self._text.hands_over):
            assert self._segments.grant is None, f"{self._phase.value} holds segments"  # noqa: S101
        if self._phase is not Phase.ENCODING:
            assert self._early.grant is None, f"{self._phase.value} with a place for an early prefill"  # noqa: S101
        if self._phase is Phase.WAITING:
            wanted = self._reserving.union(*self._pauses.values())
            assert len(wanted) == len(self._items) > 0, "waits for only some of its items"  # noqa: S101
        if self._phase is Phase.ENCODING:
            busy = any(held.pending for held in self._items.held) or self._segments.renewing
            assert busy or self._reserving or self._pauses, "is encoding without a call, reservation or pause"  # noqa: S101
        if self._phase in {Phase.DISPATCHING, Phase.HOLDING} and not self._text.hands_over:
            assert self._items.ready, "dispatched or resolved before every item was there"  # noqa: S101
        assert self._text.counted <= self._text.most, "text attempts"  # noqa: S101
        assert self._over or not self.losses.too_many, "goes on after too many losses"  # noqa: S101
        assert self._over == self._phase.over, "over before its end"  # noqa: S101
        assert not (self._over and self._pauses), "a finished request has pauses"  # noqa: S101

    # --- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: RequestEvent, now_s: float) -> list[RequestEffect]:  # noqa: C901, PLR0911, PLR0912 - one dispatch
        """Apply one event and return the effects. Late answers have their leases released."""
        match event:
            case ItemEncoded():
                return self._item_encoded(event, now_s)
            case LeaseGranted():
                return self._lease_granted(event, now_s)
            case LeasesExtended():
                return self._leases_extended(event, now_s)
            case Granted(_, grants):
                effects: list[RequestEffect] = []
                for grant in grants:
                    effects += self._granted(grant, now_s)
                return effects + self._prefill_early(now_s)
            case Moved():
                return self._moved(event, now_s)
            case AnswerHandedOver():
                return self._handed_over(event, now_s)
            case SegmentsRenewed(credit, name, tickets):
                if self._segments.renewed(credit, tickets):
                    return self._advance(now_s)
                return _too_late(name, [ticket.lease_id for ticket in tickets if ticket is not None])
            case _ if self._over:
                return []
            case Prepared():
                return self._prepared(event, now_s)
            case FirstToken(credit):
                return self._first_token(now_s) if self._text.has(credit) else []
            case TextReported(credit, what):
                return self._text_reported(what, now_s) if self._text.has(credit) else []
            case PrefilledEarly(credit):
                return self._prefilled_early(credit, now_s)
            case Refused():
                wants_text = self._phase is Phase.DISPATCHING
                return self._text_refused(event, now_s) if wants_text else self._placement_refused(event, now_s)
            case CallFailed() if self._is_lost_too_often(event):
                failure = EngineFailure("instances ended while they worked on the request")
                return self._end(Phase.FAILED, failure, now_s)
            case CallFailed(credit, _, error, drains):
                return self._call_failed(credit, error, now_s, drains=drains)
            case Resumed(number):
                return self._resumed(number, now_s)
            case Signal.LEASES_DUE:
                return self._items.leases_due(now_s, self._lease_s(now_s))
            case Signal.HEDGES_DUE:
                if self.losses:
                    return []  # a second encoder might end with it
                return self._items.hedges_due(self._number, now_s)
            case Failed(error):
                return self._end(Phase.FAILED, error, now_s)
            case TextPoolLost(error, begun):
                sent = self._resolves or self._phase in {Phase.DISPATCHING, Phase.STREAMING}
                sent = sent or (self._begun and not begun)
                return [] if sent else self._end(Phase.FAILED, (self._begun and self._text.error) or error, now_s)
            case Signal.CALLER_LEFT | Signal.DEADLINE_PASSED if self._phase is Phase.HOLDING:
                return self._end(Phase.DONE, None, now_s)
            case Signal.CALLER_LEFT:
                return self._end(Phase.CANCELLED, Cancelled("the client disconnected"), now_s)
            case Signal.DEADLINE_PASSED:
                error = DeadlineExceeded(f"not done within {self._deadline_s - self._stats.started_s:.3f} s")
                return self._end(Phase.FAILED, error, now_s)

    def _prepared(self, event: Prepared, now_s: float) -> list[RequestEffect]:
        self._stats.prepared_s = now_s
        self._stats.prompt_tokens = event.prompt_tokens
        self._answer_tokens, self._prompt = event.answer_tokens, event.prompt
        self._turns.expected, self._turns.share = event.expected, event.share
        self._items = RequestItems(event.items)
        if not self._items:
            return self._dispatch(now_s, "nothing to encode")
        self._phase = Phase.WAITING
        return [self._reserve(range(len(self._items)), wait=True, reason="a new request")]

    def _reserve(self, items: Iterable[int], *, wait: bool, reason: str, again: bool = False) -> CreditsWanted:
        wanted = sorted(items)
        self._reserving = self._reserving.union(wanted)
        turn = self._turns.wants_encoders(begun=self._begun)
        wants = tuple([self._items[index].want for index in wanted])
        return CreditsWanted(self._number, wants, wait, turn, reason, again, suspect=bool(self.losses))

    def _granted(self, grant: Grant, now_s: float) -> list[RequestEffect]:
        if grant.item is None:
            return self._text_granted(grant, now_s)
        if grant.hedges:
            return self._hedge_granted(grant, self._items[grant.item], now_s)
        if grant.item not in self._reserving or self._over:
            return [Release(grant.name, grant.credit, (), "no longer wanted")]
        self._reserving -= {grant.item}
        self._phase = Phase.ENCODING
        item = self._items[grant.item]
        item.attempts += 1
        item.held = HeldTicket.requested(grant, self._new_lease, now_s, self._lease_s(now_s))
        item.hedge_s, item.hedge_won = now_s + grant.hedge_after_s, False
        return [item.encode(item.held, self._turns.encode), *self._items.watch_hedges(item.hedge_s, now_s)]

    def _hedge_granted(self, grant: Grant, item: RequestItem, now_s: float) -> list[RequestEffect]:
        if self._over or not item.may_be_hedged:
            return [Release(grant.name, grant.credit, (), "no longer wanted")]
        item.hedges += 1
        item.hedge = HeldTicket.requested(grant, self._new_lease, now_s, self._lease_s(now_s))
        return [item.encode(item.hedge, self._turns.encode)]

    def _placement_refused(self, event: Refused, now_s: float) -> list[RequestEffect]:
        if not self._reserving:
            return []
        error = event.error
        if event.final:
            return self._end(Phase.FAILED, error, now_s)
        if self._begun and isinstance(error, Overloaded):
            return self._requeue(error, now_s)
        failures = [self._items[index].engine_failure for index in sorted(self._reserving)]
        failure = next((failure for failure in failures if failure is not None), None)
        if failure is not None and not isinstance(error, Overloaded):
            return self._end(Phase.FAILED, failure, now_s)
        if self._phase is Phase.WAITING or not error.retryable:
            return self._end(Phase.FAILED, error, now_s)
        return self._requeue(error, now_s)

    def _pause(self, items: Iterable[int], refusals: int, error: TriptychError, now_s: float) -> list[RequestEffect]:
        """Retry after a pause: for these items' credits or, without items, for a text instance.

        Fails the request if that would be past its deadline.
        """
        limits = self._limits
        delay_s = pause_s(self._request_id, refusals, first_s=limits.arena_retry_s, longest_s=limits.longest_pause_s)
        if now_s + delay_s >= self._deadline_s:
            return self._end(Phase.FAILED, error, now_s)
        self._pause_number += 1
        self._pauses[self._pause_number] = frozenset(items)
        return [After(delay_s, Resumed(self._pause_number), error.message)]

    def _resumed(self, number: int, now_s: float) -> list[RequestEffect]:
        items = self._pauses.pop(number, None)
        if items is None:
            return []
        if not items:
            return self._advance(now_s)
        return [self._reserve(items, wait=self._phase is Phase.WAITING, reason="the pause is over")]

    # --- items -------------------------------------------------------------------------------------------------------

    def _item_encoded(self, event: ItemEncoded, now_s: float) -> list[RequestEffect]:
        result = event.result
        item, held = self._items.call_of(event.credit)
        if item is None or held is None or held.sealed is not None:
            return [Release(event.name, None, (result.router_lease, result.ticket.lease_id), "came too late")]
        fault = held.granted(result.ticket, result.router_lease, item.plan, self._deadline_s)
        if fault is not None:
            error = InternalError(f"encoder {held.grant.instance_id} returned {fault}")
            return self._encode_elsewhere(item, held, error, now_s)
        item.served, item.encoder_id = result, held.grant.instance_id
        return [*item.won_by(held), *self._items.watch_leases(now_s), *self._advance(now_s)]

    def _is_lost_too_often(self, event: CallFailed) -> bool:
        """Count the loss of an instance that worked on the request. Calls for leases are no work."""
        if event.loss is None:
            return False
        _, held = self._items.call_of(event.credit)
        if self._text.has(event.credit) or self._early.has(event.credit) or (held is not None and held.sealed is None):
            self.losses.add(event.loss, event.survivors, certain=event.has_ended)
        return self.losses.too_many

    def _call_failed(self, credit: int, error: TriptychError, now_s: float, *, drains: bool) -> list[RequestEffect]:
        if self._text.has(credit):
            return self._text_failed(error, now_s, drains=drains)
        if self._early.has(credit):
            return self._early_failed(error)
        item, held = self._items.call_of(credit)
        if item is None or held is None or not held.pending:
            return []
        if held.renewing and self._text.hands_over:
            return self._lost_meanwhile(item, held, error)
        if held.renewing:
            again = isinstance(error, LeaseLost | Unavailable | Overloaded)
            return self._encode_again([item], error, now_s) if again else self._end(Phase.FAILED, error, now_s)
        return self._encode_failed(item, held, error, now_s)

    def _encode_failed(
        self, item: RequestItem, held: HeldTicket, error: TriptychError, now_s: float
    ) -> list[RequestEffect]:
        if isinstance(error, StageClosed) or not isinstance(error, Unavailable | DeadlineExceeded | Cancelled):
            held.not_granted()
        if item.hedge is not None and isinstance(error, Unavailable | Overloaded | InternalError):
            return self._go_on_without(item, held, error)
        if isinstance(error, ArenaFull):
            return self._requeue(error, now_s)
        if isinstance(error, Overloaded | StageClosed):
            # This one needs no memory: the other items keep their places.
            item.avoid |= {held.grant.name}
            item.refusals += 1
            return item.release(error.message) + self._pause([item.index], item.refusals, error, now_s)
        if isinstance(error, InternalError):
            return self._encode_elsewhere(item, held, error, now_s)
        if isinstance(error, Unavailable):
            return self._encode_again([item], error, now_s)
        return self._end(Phase.FAILED, error, now_s)

    def _encode_elsewhere(
        self, item: RequestItem, held: HeldTicket, error: InternalError, now_s: float
    ) -> list[RequestEffect]:
        """An encoder failed on the item, or returned something else: only another one is tried, once."""
        if item.hedge is not None:
            return self._go_on_without(item, held, error)
        if item.engine_failure is not None:
            return self._end(Phase.FAILED, error, now_s)
        item.engine_failure, item.exclude = error, item.exclude | {held.grant.name}
        return self._encode_again([item], error, now_s)

    def _go_on_without(self, item: RequestItem, held: HeldTicket, error: TriptychError) -> list[RequestEffect]:
        """One of an item's two calls has failed: nothing is lost while the other one runs."""
        item.avoid |= {held.grant.name}
        if isinstance(error, InternalError):
            item.engine_failure, item.exclude = error, item.exclude | {held.grant.name}
        gone = EmbeddingGone(held.grant.credit, _is_unusable(item, held, error))
        return [gone, *item.go_on_without(held, error.message)]

    def _lease_granted(self, event: LeaseGranted, now_s: float) -> list[RequestEffect]:
        item = self._items.holder_of(event.credit)
        if item is None or item.held is None or not item.held.renewing:
            return [Release(event.name, None, (event.ticket.lease_id,), "came too late")]
        if item.held.renewed_as(event.ticket):
            return self._advance(now_s)
        fault = InternalError(f"encoder {item.encoder_id} leased another embedding than requested")
        if self._text.hands_over:
            return self._lost_meanwhile(item, item.held, fault)
        return self._encode_elsewhere(item, item.held, fault, now_s)

    def _leases_extended(self, event: LeasesExtended, now_s: float) -> list[RequestEffect]:
        item = self._items.holder_of(event.credit)
        if item is None or item.held is None:
            return []  # released in the meantime
        item.held.extended(event.lease_ids, event.requested_s, event.lease_s, self._deadline_s)
        return self._items.watch_leases(now_s)

    def _encode_again(self, items: Iterable[RequestItem], error: TriptychError, now_s: float) -> list[RequestEffect]:
        """Release these items and request other places at once. Other items keep theirs."""
        effects: list[RequestEffect] = []
        again: list[int] = []
        for item in items:
            if item.held is not None:
                effects.append(EmbeddingGone(item.held.grant.credit, _is_unusable(item, item.held, error)))
                if not isinstance(error, LeaseLost):
                    # An eviction is no failure of the encoder.
                    item.avoid |= {item.held.grant.name}
            effects += item.release(error.message)
            item.losses += 1
            again.append(item.index)
            if item.losses >= self._limits.max_encode_attempts:
                return effects + self._end(Phase.FAILED, error, now_s)
        self._phase = Phase.ENCODING
        return [*effects, self._reserve(again, wait=False, reason=error.message, again=True)]

    def _requeue(self, error: TriptychError, now_s: float) -> list[RequestEffect]:
        """Release everything and, after a pause, wait again at the old place, as turns go by the arrival."""
        self._requeues += 1
        self._reserving = frozenset()
        self._pauses.clear()
        effects = self._early.give_up(error.message) + self._release(error.message)
        self._phase = Phase.WAITING
        return effects + self._pause(range(len(self._items)), self._requeues, error, now_s)

    # --- text --------------------------------------------------------------------------------------------------------

    def _advance(self, now_s: float) -> list[RequestEffect]:
        """Once every item is encoded: renew used or short leases, then dispatch."""
        if self._text.current is not None:
            return []  # for the next one
        if not self._items.ready:
            return self._prefill_early(now_s)
        if self._segments.renewing:
            return []
        needed_until_s = min(self._deadline_s, now_s + self._limits.min_lease_s)
        stale = [held for held in self._items.held if held.stale(needed_until_s)]
        stale_segments = bool(self._segments.placements) and self._segments.stale(needed_until_s)
        if not (stale or stale_segments):
            return self._hold(now_s) if self._resolves else self._dispatch(now_s, "every item is encoded")
        self._phase = Phase.ENCODING
        reason = "a further attempt" if self._text.sent else "the lease is running out"
        effects = self._renew(stale, now_s, reason)
        if stale_segments:
            effects += self._segments.renew(self._new_lease, now_s, self._lease_s(now_s), reason)
        return effects

    def _hold(self, now_s: float) -> list[RequestEffect]:
        self._phase = Phase.HOLDING
        self._stats.encoded_s = now_s
        resolved = self._items.resolved()
        return [*self._items.read(), Resolved(resolved)]

    def _dispatch(self, now_s: float, reason: str) -> list[RequestEffect]:
        self._phase = Phase.DISPATCHING
        if not (self._text.sent or self._early.failed):  # only encoders were lost, and all items are encoded
            self.losses.got_further()
        if not self._begun or self._stats.encoded_s is None:
            self._stats.encoded_s = now_s
        wanted = self._text_wanted(reason)
        return [*self._early.stop(reason), wanted]

    def _text_wanted(self, reason: str, *, early: bool = False) -> TextWanted:
        holders, sender, covered_tokens = self._items.nbytes_by_encoder(), "", 0
        if self._segments.placements:
            sender, covered_tokens = self._segments.name, self._segments.tokens
            holders |= self._segments.nbytes_by_holder()
        prompt = None
        if self._prompt is not None and not (early or self._segments.placements):
            prompt = PromptIdentity(self._prompt, self._items.identified())
        return TextWanted(
            self._number,
            self._stats.prompt_tokens,
            self._text.avoid,
            holders,
            reason,
            choices=self._choices,
            max_tokens=self._answer_tokens,
            with_items=bool(self._items),
            continues=self._begun,
            early=early,
            kept_credit=self._early.kept_credit,
            kept_tokens=self._early.tokens,
            turn=self._turns.wants_text(begun=self._begun),
            sender=sender,
            covered_tokens=covered_tokens,
            moves=self._text.moved,
            prompt=prompt,
            suspect=bool(self.losses),
        )

    def _text_granted(self, grant: Grant, now_s: float) -> list[RequestEffect]:
        if self._may_prefill_early and self._early.grant is None:
            self._early.grant = grant
            return []
        if self._phase is not Phase.DISPATCHING or self._text.current is not None:
            return [Release(grant.name, grant.credit, (), "no longer wanted")]
        self._text.send(grant)
        self._stats.text_attempts, self._stats.instance_id = self._text.dispatches, grant.instance_id
        placements = self._items.placements()
        lease_s = self._lease_s(now_s) if grant.hands_over else self._limits.max_lease_s
        segments = self._segments.send() if self._segments.placements else ()
        turn, begun, hands_over = self._turns.text, self._begun, grant.hands_over
        prefix = () if segments else grant.prefix
        return [Generate(grant.credit, grant.name, placements, turn, begun, hands_over, segments, lease_s, prefix)]

    # --- early prefill -----------------------------------------------------------------------------------------------

    @property
    def _may_prefill_early(self) -> bool:
        encodes = self._phase is Phase.ENCODING and not self._items.ready
        is_new = not (self._begun or self._text.sent or self.losses)
        return encodes and is_new and not (self._resolves or self._early.failed)

    def _prefill_early(self, now_s: float) -> list[RequestEffect]:
        """Some items are missing. The text instance computes the prompt up to the first of them, if the policy says so, and finds
        that in its prefix cache when the whole request comes. The items sent with it need new leases for that.
        """
        early = self._early
        if early.running or not self._may_prefill_early:
            return []
        count, tokens = self._items.beginning()
        if not self._sends_early(tokens=tokens, sent_tokens=early.tokens):
            return []
        if early.grant is None:
            return [self._text_wanted("items are missing", early=True)]
        early.running, early.tokens, self._stats.early_tokens = True, tokens, tokens
        placements = self._items.placements(count)
        turn = self._turns.wants_text(begun=self._begun)
        early_call = PrefillEarly(early.grant.credit, early.grant.name, placements, tokens, turn)
        return [early_call, *self._renew(self._items.held_of(count), now_s, "a beginning was sent with it")]

    def _renew(self, sent: Iterable[HeldTicket], now_s: float, reason: str) -> list[RequestEffect]:
        """Request leases for another reader, as one has got the tickets."""
        lease_s = self._lease_s(now_s)
        return [held.renew(self._new_lease, now_s, lease_s, reason) for held in sent]

    def _prefilled_early(self, credit: int, now_s: float) -> list[RequestEffect]:
        if not self._early.has(credit):
            return []
        self._early.running = False
        return self._prefill_early(now_s)

    def _early_failed(self, error: TriptychError) -> list[RequestEffect]:
        """Nothing is lost but time. What a pull has found wrong, the next one finds too."""
        grant = self._early.grant
        if grant is not None and not isinstance(error, TransferFailed | LeaseLost):
            self._text.avoid |= {grant.name}
        self._early.failed, self._early.running, self._stats.early_tokens = True, False, 0
        return self._early.give_up(error.message)

    # --- answers -----------------------------------------------------------------------------------------------------

    def _text_refused(self, event: Refused, now_s: float) -> list[RequestEffect]:
        """No instance is usable: retry, as one may return within the grace period; TextPoolLost says if not.

        A request that one refused, or whose engine failed on it, does not wait for that one, unless some of its answer has
        been sent and would be lost.
        """
        turned_down = isinstance(self._text.error, Overloaded | EngineFailure)
        if event.final or (turned_down and not self._begun):
            return self._end(Phase.FAILED, self._text.error or event.error, now_s)
        self._phase = Phase.ENCODING
        self._text.wait()
        return self._pause((), self._text.refusals, self._text.error or event.error, now_s)

    def _first_token(self, now_s: float) -> list[RequestEffect]:
        if self._phase is Phase.STREAMING:
            return []
        self._phase = Phase.STREAMING
        self._begun = True
        self.losses.got_further()
        self._stats.token_arrived(now_s)
        read = self._items.read()
        return read if self._text.hands_over else read + self._release("the text instance has what it needs")

    def _release(self, reason: str) -> list[RequestEffect]:
        """Give back all that is held for text instances."""
        effects = self._items.release(reason)
        return effects if self._segments.grant is None else effects + self._segments.release(reason)

    def _text_reported(self, what: Ready | Finished, now_s: float) -> list[RequestEffect]:
        if isinstance(what, Ready):
            return self._text_is_ready(what, now_s)
        self._stats.finished[what.choice] = what
        return self._end(Phase.DONE, None, now_s) if len(self._stats.finished) == self._choices else []

    def _text_failed(self, error: TriptychError, now_s: float, *, drains: bool) -> list[RequestEffect]:
        if self._phase is Phase.STREAMING:
            return self._stream_broke(error, now_s, drains=drains)
        named = error.items if isinstance(error, TransferFailed) else ()
        lost = [item for item in self._items if item.index in named]
        alive = [item for item in lost if item.held is not None and item.held.reader_until_s > now_s]
        if lost and not alive:
            self._text.expire(error)
            return self._again(now_s)
        if not self._text.fail(error, drains=drains):
            return self._end(Phase.FAILED, self._text.error, now_s)
        if isinstance(error, TransferFailed) and self._items:
            return self._encode_again(alive or self._items, error, now_s)
        return self._again(now_s)

    def _stream_broke(self, error: TriptychError, now_s: float, *, drains: bool) -> list[RequestEffect]:
        """Go on with the answer at another text instance, which needs the items again: their leases were released, unless the
        answer was to be handed over.
        """
        if not self._text.fail(error, drains=drains):
            return self._end(Phase.FAILED, self._text.error, now_s)
        self._stats.broke(now_s)
        return self._place_missing(error.message, now_s)

    def _again(self, now_s: float) -> list[RequestEffect]:
        self._stats.text_failed()
        return self._place_missing("lost while the prompt was computed", now_s)

    def _moved(self, event: Moved, now_s: float) -> list[RequestEffect]:
        """It waits at its text instance, and is to do so elsewhere: that call is cancelled, and its items get leases for another one."""
        grant, waits = event.grant, self._phase is Phase.DISPATCHING and self._text.has(event.credit)
        keeps = waits and all(item.held is not None for item in self._items)
        effects: list[RequestEffect] = []
        if grant is not None and not keeps:
            effects.append(Release(grant.name, grant.credit, (), "no longer wanted"))
        if not waits:
            return effects
        self._text.move()
        self._early.grant, self._early.tokens = grant if keeps else None, 0
        self._stats.text_failed()
        return [*effects, Abort(event.credit, event.reason), *self._place_missing(event.reason, now_s)]

    # --- hand-over ---------------------------------------------------------------------------------------------------

    def _text_is_ready(self, ready: Ready, now_s: float) -> list[RequestEffect]:
        """If it hands over, the next instance needs the embeddings too: the leases for it are there when the prompt is computed."""
        self._stats.text_is_ready(ready)
        self._handed_s = now_s
        if not self._text.hands_over or self._phase is not Phase.DISPATCHING:
            return []
        sent = [held for held in self._items.held if not held.pending]
        return self._renew(sent, now_s, "the answer will be handed over")

    def _lost_meanwhile(self, item: RequestItem, held: HeldTicket, error: TriptychError) -> list[RequestEffect]:
        """While a prompt is computed that has the item already: it is encoded again once the answer is handed over."""
        gone = EmbeddingGone(held.grant.credit, _is_unusable(item, held, error))
        if not isinstance(error, LeaseLost):
            item.avoid |= {held.grant.name}
        item.losses += 1
        return [gone, *item.release(error.message)]

    def _handed_over(self, event: AnswerHandedOver, now_s: float) -> list[RequestEffect]:
        """The instance has done its part, or drains. Choose the one that goes on only now, by the loads of now."""
        grant = self._text.current
        if self._over or grant is None or grant.credit != event.credit:
            return _too_late(event.name, leases_of(event.segments))
        sealed_s = self._handed_s if grant.hands_over else now_s
        until_s = sealed_s + min([one.placement.ticket.lease_s for one in event.segments], default=0.0)
        effects = self._segments.take(grant, event.segments, until_s) if event.segments else []
        if not self._text.hand_over():
            error = InternalError("the answer was handed over again and again")
            return effects + self._end(Phase.FAILED, error, now_s)
        self._stats.handed_over(now_s, event.prefill_s)
        return effects + self._place_missing("the answer was handed over", now_s)

    def _place_missing(self, reason: str, now_s: float) -> list[RequestEffect]:
        """Go on at another text instance, for which items that are held no more are placed at encoders again.

        Meanwhile it may hold segments, for one lease: nobody waits for them longer.
        """
        missing = [item for item in self._items if item.held is None]
        if any(item.losses >= self._limits.max_encode_attempts for item in missing):
            return self._end(Phase.FAILED, LeaseLost(reason), now_s)
        indices = [item.index for item in missing]
        if len(missing) == len(self._items) > 0:
            self._phase = Phase.WAITING
            return [self._reserve(indices, wait=True, reason=reason)]
        self._phase = Phase.ENCODING
        if missing:
            return [self._reserve(indices, wait=False, reason=reason, again=True)]
        return self._advance(now_s)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _end(self, phase: Phase, error: TriptychError | None, now_s: float) -> list[RequestEffect]:
        effects: list[RequestEffect] = []
        waits = self._phase is Phase.DISPATCHING and self._text.current is None
        if waits or self._phase is Phase.WAITING:
            effects.append(CreditsAbandoned(self._number, phase.value))
        self._pauses.clear()
        if isinstance(error, LeaseLost):
            # Leases are internal: tell the client that its media was lost.
            error = TransferFailed("the embeddings of the request's images were lost again and again")
        elif self.losses and isinstance(error, Unavailable) and not isinstance(error, InstanceLost):
            # It is not to be tried at another router, which would begin to count again.
            error = InstanceLost("an instance was lost while it worked on the request, and no other is available")
        effects += self._early.give_up(phase.value)
        effects += self._release(phase.value if error is None else error.message)
        if self._stats.first_token_s is None and phase is Phase.DONE and not self._resolves:
            self._stats.first_token_s = now_s
        self._phase, self._over = phase, True
        self._stats.over_s = now_s
        self._stats.error = error.code if error is not None and phase is Phase.FAILED else ""
        return [*effects, End(error)]

    def _lease_s(self, now_s: float) -> float:
        """The time that the request may still take, capped."""
        return max(0.0, min(self._deadline_s - now_s, self._limits.max_lease_s))


def _too_late(name: str, lease_ids: Sequence[LeaseId]) -> list[RequestEffect]:
    return [Release(name, None, tuple(lease_ids), "came too late")] if lease_ids else []


def _is_unusable(item: RequestItem, held: HeldTicket, error: TriptychError) -> bool:
    """Whether the error means that the embedding is wrong, or that its reader could not pull it."""
    pulled = isinstance(error, TransferFailed) and item.index in error.items
    return held.sealed is not None and (pulled or isinstance(error, InternalError))
