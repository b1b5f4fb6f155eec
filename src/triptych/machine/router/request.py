"""The state of one request in the router, from its arrival to one of three ends.


    PREPARING -> WAITING -> ENCODING -> DISPATCHING -> STREAMING -> DONE | FAILED | CANCELLED
                               +------> HOLDING -> DONE

A chat is dispatched to a text instance. If that one computes the prompt only, it is dispatched again once it is transferred,
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
from triptych.domain.stage import Stage
from triptych.domain.timeline import Beginning, Outcome, Timeline
from triptych.errors import (
    ArenaFull,
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    InstanceLost,
    InternalError,
    LeaseLost,
    NotFound,
    Overloaded,
    StageClosed,
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.machine.router.attempts import Attempt, Ending, TextAttempts
from triptych.machine.router.leases import AttemptLeases, leases_of
from triptych.machine.router.losses import Losses
from triptych.machine.router.request_events import (
    Abort,
    After,
    AnswerTransferred,
    AttemptKind,
    End,
    Failed,
    Generate,
    PrefilledEarly,
    Prepared,
    Renewed,
    RequestEffect,
    RequestEvent,
    Resolved,
    Resumed,
    Signal,
    TextReported,
)
from triptych.machine.router.request_items import RequestItem, RequestItems
from triptych.machine.router.request_timeline import RequestTimes
from triptych.machine.router.request_wants import RequestWants
from triptych.machine.router.shared_events import (
    CallFailed,
    CreditsAbandoned,
    CreditsWanted,
    FirstToken,
    Grant,
    Granted,
    ItemEncoded,
    Moved,
    PlaceRefused,
    Release,
    TextPoolLost,
    TextWanted,
)
from triptych.policy.dispatching import Dispatch
from triptych.policy.fairness import UNSHARED, Share
from triptych.policy.policies import Ordering
from triptych.policy.queueing import by_slo
from triptych.policy.retrying import pause_s


class RequestPhase(Enum):
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
    def has_ended(self) -> bool:
        return self in _ENDS

    @property
    def outcome(self) -> Outcome:
        return _OUTCOMES.get(self, Outcome.RUNNING)


_ENDS = (RequestPhase.DONE, RequestPhase.FAILED, RequestPhase.CANCELLED)
_OUTCOMES = {
    RequestPhase.DONE: Outcome.DONE,
    RequestPhase.FAILED: Outcome.FAILED,
    RequestPhase.CANCELLED: Outcome.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Retries and leases of one request."""

    max_encode_attempts: Positive = 3
    """Attempts to encode an item before the request fails. One whose encoder drains does not count."""
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


_DONE = End(None)


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
        lora: str = "",
        ordering: Ordering = by_slo,
        share: Callable[[Stage], Share] = lambda _: UNSHARED,
        dispatch: Dispatch | None = None,
        resolves: bool = False,
        continued_tokens: int | None = None,
    ) -> None:
        """``number`` is never reused, unlike the id, and grows with the arrivals.

        A chat is done when ``choices`` choices have finished. ``resolves``: it is no chat, and has items.
        ``continued_tokens``: another router began its answer, and has passed on so many tokens of these choices.
        ``lora`` is the digest of its LoRA adapter. ``share`` gives the request's share of its tenant at a stage that it has come to. ``new_lease`` returns a fresh lease id.
        """
        self.number = number
        """For reading; unlike the request id, never reused."""
        self._request_id = request_id
        self.deadline_s = deadline_s
        """For reading."""
        self._limits = limits
        self._new_lease = new_lease
        self._choices = choices
        self._sends_early = dispatch
        self._resolves = resolves
        self.phase = RequestPhase.PREPARING
        """For reading."""
        self._times = RequestTimes(request_id, model, now_s, continued_tokens=continued_tokens)
        self._wants = RequestWants(
            number,
            arrived_s=now_s,
            deadline_s=deadline_s,
            choices=choices,
            priority=priority,
            lora=lora,
            ordering=ordering,
            share=share,
        )
        self._wants.begun = continued_tokens is not None
        self._items = RequestItems()
        self._texts = TextAttempts(limits.max_text_attempts)
        self._reserving: frozenset[int] = frozenset()
        """Items whose credits have been requested and not answered."""
        self._waits = 0
        """How often the whole request paused, as there was no place for it."""
        self._pauses: dict[int, frozenset[int]] = {}
        """By number: the items to request again after the pause; empty when waiting for a text instance."""
        self._pause_number = 0
        self.losses = Losses()
        """For reading."""

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def text_instance(self) -> str:
        """Id of the text instance chosen last."""
        return self._texts.sent[-1].grant.instance_id if self._texts.sent else ""

    @property
    def holds(self) -> int:
        """Number of items whose credits are held."""
        return len(self._items.leases)

    def timeline(self, now_s: float, completion_tokens: int) -> Timeline:
        """The timeline so far; constant once the request is over."""
        return self._times.timeline(
            now_s,
            self.phase.outcome,
            self._items.all,
            self._texts,
            prompt_tokens=self._wants.prompt_tokens,
            completion_tokens=completion_tokens,
        )

    def beginning(self) -> Beginning | None:
        """How long the first token has taken; None before the last attempt has sent one."""
        return self._times.beginning(self._items, self._texts.sent[-1]) if self._texts.sent else None

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        self._items.validate()
        self._texts.validate()
        losses = max((item.losses for item in self._items.all), default=0)
        assert losses <= self._limits.max_encode_attempts, "attempts"
        segments = self._texts.segment_leases
        waits = self.phase in {RequestPhase.PREPARING, RequestPhase.WAITING} or self.phase.has_ended
        if waits or (self.phase is RequestPhase.STREAMING and not self._texts.transfers_kv):
            assert self.holds == 0, f"{self.phase.value} holds credits"
        if self.phase.has_ended or (self.phase is RequestPhase.STREAMING and not self._texts.transfers_kv):
            assert segments is None, f"{self.phase.value} holds segments"
        if self.phase is not RequestPhase.ENCODING:
            assert self._texts.kept is None, f"{self.phase.value} with a place that is kept"
        if self.phase is RequestPhase.WAITING:
            wanted = self._reserving.union(*self._pauses.values())
            assert len(wanted) == len(self._items.all) > 0, "waits for only some of its items"
        if self.phase is RequestPhase.ENCODING:
            held = [*self._items.leases, *([] if segments is None else [segments])]
            busy = any(leases.is_pending for leases in held)
            assert busy or self._reserving or self._pauses, "is encoding without a call, reservation or pause"
        if self.phase in {RequestPhase.DISPATCHING, RequestPhase.HOLDING} and not self._texts.transfers_kv:
            assert self._items.are_ready, "dispatched or resolved before every item was there"
        assert self.phase.has_ended or not self.losses.too_many, "goes on after too many losses"
        assert self.phase.has_ended == (self._times.over_s is not None), "over before its end"
        assert not (self.phase.has_ended and (self._pauses or self._texts.current)), "a finished request goes on"

    # --- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: RequestEvent, now_s: float) -> list[RequestEffect]:  # noqa: C901, PLR0911, PLR0912 - one dispatch
        """Apply one event and return the effects. Late answers have their leases released."""
        match event:
            case ItemEncoded():
                return self._item_encoded(event, now_s)
            case Renewed():
                return self._renewed(event, now_s)
            case Granted(_, grants):
                effects: list[RequestEffect] = []
                for grant in grants:
                    effects += self._granted(grant, now_s)
                return effects if self._sends_early is None else effects + self._prefill_early(now_s)
            case Moved():
                return self._moved(event, now_s)
            case AnswerTransferred():
                return self._kv_transferred(event, now_s)
            case _ if self._times.over_s is not None:
                return []
            case Prepared():
                return self._prepared(event, now_s)
            case FirstToken(credit):
                return self._first_token(now_s) if self._texts.has(credit) else []
            case TextReported(credit, what):
                return self._text_reported(what, now_s) if self._texts.has(credit) else []
            case PrefilledEarly(credit):
                return self._prefilled_early(credit, now_s)
            case PlaceRefused():
                wants_text = self.phase is RequestPhase.DISPATCHING
                return self._text_refused(event, now_s) if wants_text else self._placement_refused(event, now_s)
            case CallFailed():
                return self._call_failed(event, now_s)
            case Resumed(number):
                return self._resumed(number, now_s)
            case Signal.LEASES_DUE:
                return self._items.leases_due(now_s, self._lease_s(now_s))
            case Signal.HEDGES_DUE:
                if self.losses.lost:
                    return []  # a second encoder might end with it
                return self._items.hedges_due(self.number, now_s)
            case Failed(error):
                return self._end(RequestPhase.FAILED, error, now_s)
            case TextPoolLost(error, begun):
                return self._text_pool_lost(error, now_s, begun=begun)
            case Signal.CALLER_LEFT | Signal.DEADLINE_PASSED if self.phase is RequestPhase.HOLDING:
                return self._end(RequestPhase.DONE, None, now_s)
            case Signal.CALLER_LEFT:
                return self._end(RequestPhase.CANCELLED, Cancelled("the client disconnected"), now_s)
            case Signal.DEADLINE_PASSED:
                error = DeadlineExceeded(f"not done within {self.deadline_s - self._times.started_s:.3f} s")
                return self._end(RequestPhase.FAILED, error, now_s)

    def _prepared(self, event: Prepared, now_s: float) -> list[RequestEffect]:
        self._times.prepared_s = now_s
        self._wants.prepared(event)
        self._items.add(event.items)
        if not self._items.all:
            return self._dispatch(now_s, "nothing to encode")
        self.phase = RequestPhase.WAITING
        return [self._reserve(range(len(self._items.all)), wait=True, reason="a new request")]

    def _call_failed(self, event: CallFailed, now_s: float) -> list[RequestEffect]:
        attempt = self._running(event.credit)
        if attempt is None:
            return []
        if event.loss is not None:
            self.losses.add(event.loss, event.survivors, certain=event.has_ended)
            if self.losses.too_many:
                failure = EngineFailure("instances ended while they worked on the request")
                return self._end(RequestPhase.FAILED, failure, now_s)
        match attempt.kind:
            case AttemptKind.ENCODE:
                return self._encode_failed(attempt, event.error, now_s, drains=event.drains)
            case AttemptKind.EARLY_PREFILL:
                return self._early_failed(event.error, now_s)
            case _:
                return self._text_failed(event.error, now_s, drains=event.drains)

    def _running(self, credit: int) -> Attempt | None:
        """The attempt with this credit whose call runs."""
        current = self._texts.current
        attempt = current if current and current.grant.credit == credit else self._items.attempt_of(credit)
        return attempt if attempt is not None and attempt.result is None else None

    # --- places at encoders ------------------------------------------------------------------------------------------

    def _reserve(self, items: Iterable[int], *, wait: bool, reason: str, again: bool = False) -> CreditsWanted:
        wanted = sorted(items)
        self._reserving = self._reserving.union(wanted)
        return self._wants.encoders(self._items, wanted, reason, wait=wait, again=again, suspect=bool(self.losses.lost))

    def _granted(self, grant: Grant, now_s: float) -> list[RequestEffect]:
        if grant.item is None:
            return self._text_granted(grant, now_s)
        item = self._items.all[grant.item]
        wanted = item.may_be_hedged if grant.hedges else item.index in self._reserving
        if not wanted or self.phase.has_ended:
            return [_not_wanted(grant)]
        encode = item.begin(grant, self._wants.encode_queue_position, self._new_lease, now_s, self._lease_s(now_s))
        if grant.hedges:
            return [encode]
        self._reserving -= {item.index}
        self.phase = RequestPhase.ENCODING
        item.hedge_s = now_s + grant.hedge_after_s
        return [encode, *self._items.watch_hedges(item.hedge_s, now_s)]

    def _placement_refused(self, event: PlaceRefused, now_s: float) -> list[RequestEffect]:
        if not self._reserving:
            return []
        error = event.error
        if event.final:
            return self._end(RequestPhase.FAILED, error, now_s)
        if self._wants.begun and isinstance(error, Overloaded):
            return self._requeue(error, now_s)
        failures = [self._items.all[index].engine_failure for index in sorted(self._reserving)]
        failure = next((failure for failure in failures if failure is not None), None)
        if failure is not None and not isinstance(error, Overloaded):
            return self._end(RequestPhase.FAILED, failure, now_s)
        if self.phase is RequestPhase.WAITING or not error.retryable:
            return self._end(RequestPhase.FAILED, error, now_s)
        return self._requeue(error, now_s)

    def _requeue(self, error: TriptychError, now_s: float) -> list[RequestEffect]:
        """Release everything and, after a pause, wait again at the old place, as queue positions go by the arrival."""
        self._reserving = frozenset()
        self._pauses.clear()
        effects = self._texts.give_up_place(now_s, error.message) + self._release(error.message, now_s)
        self.phase = RequestPhase.WAITING
        self._waits += 1
        return effects + self._pause(range(len(self._items.all)), self._waits, error, now_s)

    def _pause(self, items: Iterable[int], refusals: int, error: TriptychError, now_s: float) -> list[RequestEffect]:
        """Retry after a pause: for these items' credits or, without items, for a text instance.

        Fails the request if that would be past its deadline.
        """
        limits = self._limits
        delay_s = pause_s(self._request_id, refusals, first_s=limits.arena_retry_s, longest_s=limits.longest_pause_s)
        if now_s + delay_s >= self.deadline_s:
            return self._end(RequestPhase.FAILED, error, now_s)
        self._pause_number += 1
        self._pauses[self._pause_number] = frozenset(items)
        return [After(delay_s, Resumed(self._pause_number), error.message)]

    def _resumed(self, number: int, now_s: float) -> list[RequestEffect]:
        items = self._pauses.pop(number, None)
        if items is None:
            return []
        if not items:
            return self._advance(now_s)
        return [self._reserve(items, wait=self.phase is RequestPhase.WAITING, reason="the pause is over")]

    # --- items -------------------------------------------------------------------------------------------------------

    def _item_encoded(self, event: ItemEncoded, now_s: float) -> list[RequestEffect]:
        result, attempt = event.result, self._items.attempt_of(event.credit)
        if attempt is None or attempt.leases is None or attempt.result is not None:
            return _too_late(event.name, (result.router_lease, result.ticket.lease_id))
        item = self._items.of(attempt)
        fault = attempt.leases.granted(result.ticket, result.router_lease, item.plan, self.deadline_s)
        if fault is not None:
            error = InternalError(f"encoder {attempt.grant.instance_id} returned {fault}")
            return self._encode_elsewhere(attempt, error, now_s)
        overtaken = item.answered(attempt, result, now_s)
        return [*overtaken, *self._items.watch_leases(now_s), *self._advance(now_s)]

    def _encode_failed(
        self, attempt: Attempt, error: TriptychError, now_s: float, *, drains: bool
    ) -> list[RequestEffect]:
        item, unsure = self._items.of(attempt), isinstance(error, Unavailable | DeadlineExceeded | Cancelled)
        if attempt.leases is not None and (isinstance(error, StageClosed) or not unsure):
            attempt.leases.not_granted()
        if item.hedge is not None and isinstance(error, Unavailable | Overloaded | InternalError):
            return item.lose(attempt, error, now_s)
        if isinstance(error, ArenaFull):
            return self._requeue(error, now_s)
        if isinstance(error, Overloaded | StageClosed):
            # This one needs no memory: the other items keep their places.
            return item.refuse(attempt, error, now_s) + self._pause([item.index], item.refusals, error, now_s)
        if isinstance(error, InternalError):
            return self._encode_elsewhere(attempt, error, now_s)
        if isinstance(error, Unavailable):
            return self._encode_again([item], error, now_s, drains=drains)
        return self._end(RequestPhase.FAILED, error, now_s)

    def _encode_elsewhere(self, attempt: Attempt, error: InternalError, now_s: float) -> list[RequestEffect]:
        """Try another encoder, once: one has failed on the item, or returned something else."""
        item = self._items.of(attempt)
        if item.hedge is not None:
            return item.lose(attempt, error, now_s)
        if item.engine_failure is not None:
            return self._end(RequestPhase.FAILED, error, now_s)
        return self._encode_again([item], error, now_s)

    def _encode_again(
        self, items: Iterable[RequestItem], error: TriptychError, now_s: float, *, drains: bool = False
    ) -> list[RequestEffect]:
        """Release these items and request other places at once. Other items keep theirs. ``drains``: their encoders do."""
        effects: list[RequestEffect] = []
        again: list[int] = []
        for item in items:
            if item.held is not None:
                effects += item.lose(item.held, error, now_s, drains=drains)
            again.append(item.index)
            if item.losses >= self._limits.max_encode_attempts:
                return effects + self._end(RequestPhase.FAILED, error, now_s)
        self.phase = RequestPhase.ENCODING
        return [*effects, self._reserve(again, wait=False, reason=error.message, again=True)]

    # --- leases ------------------------------------------------------------------------------------------------------

    def _renewed(self, event: Renewed, now_s: float) -> list[RequestEffect]:
        """Leases were extended, or granted for another reader."""
        renew, tickets = event.renew, event.tickets
        attempt = self._items.attempt_of(renew.credit) or self._texts.kv_transferred
        leases = None if attempt is None or attempt.grant.credit != renew.credit else attempt.leases
        if renew.extends:
            if leases is None or not tickets:
                return []  # released in the meantime, or retried at half of the time left
            leases.extended(renew.lease_ids[: len(tickets)], event.requested_s, renew.lease_s, self.deadline_s)
            return self._items.watch_leases(now_s)
        if attempt is None or leases is None or leases.readers != renew.lease_ids or not leases.is_pending:
            return _too_late(renew.name, [ticket.lease_id for ticket in tickets])
        kept = leases.renewed(tickets)
        if kept or attempt.kind is not AttemptKind.ENCODE:  # keys and values that are lost are computed
            return self._advance(now_s)
        return self._renewal_failed(attempt, event.error, now_s)

    def _renewal_failed(self, attempt: Attempt, error: TriptychError | None, now_s: float) -> list[RequestEffect]:
        """Do without the ticket for another reader. There is none, or one of something else: then an ``error`` is missing."""
        item = self._items.of(attempt)
        wrong = InternalError(f"encoder {attempt.grant.instance_id} leased another embedding than requested")
        if self._texts.transfers_kv:
            # The prompt is computed with the item, which is encoded again once the answer is transferred.
            return item.lose(attempt, error or wrong, now_s)
        if error is None:
            return self._encode_elsewhere(attempt, wrong, now_s)
        if isinstance(error, LeaseLost | Unavailable | Overloaded):
            return self._encode_again([item], error, now_s)
        return self._end(RequestPhase.FAILED, error, now_s)

    def _renew(self, sent: Iterable[AttemptLeases], now_s: float, reason: str) -> list[RequestEffect]:
        """Request leases for another reader, as one has got the tickets."""
        lease_s = self._lease_s(now_s)
        return [effect for leases in sent for effect in leases.renew(self._new_lease, now_s, lease_s, reason)]

    def _lease_s(self, now_s: float) -> float:
        """The time that the request may still take, capped."""
        return max(0.0, min(self.deadline_s - now_s, self._limits.max_lease_s))

    # --- what is next ------------------------------------------------------------------------------------------------

    def _place_missing(self, reason: str, now_s: float) -> list[RequestEffect]:
        """Go on at another text instance, for which items that are held no more are placed at encoders again.

        Meanwhile it may hold segments, for one lease: nobody waits for them longer.
        """
        missing = [item for item in self._items.all if item.held is None]
        if any(item.losses >= self._limits.max_encode_attempts for item in missing):
            return self._end(RequestPhase.FAILED, LeaseLost(reason), now_s)
        indices = [item.index for item in missing]
        if len(missing) == len(self._items.all) > 0:
            self.phase = RequestPhase.WAITING
            return [self._reserve(indices, wait=True, reason=reason)]
        self.phase = RequestPhase.ENCODING
        if missing:
            return [self._reserve(indices, wait=False, reason=reason, again=True)]
        return self._advance(now_s)

    def _advance(self, now_s: float) -> list[RequestEffect]:
        """Once every item is encoded: renew used or short leases, then dispatch."""
        if self.phase is RequestPhase.DISPATCHING or self.phase is RequestPhase.STREAMING:
            return []  # it is for the next attempt
        if not self._items.are_ready:
            return self._prefill_early(now_s)
        held = self._items.leases
        if (segments := self._texts.segment_leases) is not None:
            if segments.is_pending:
                return []
            held.append(segments)
        needed_until_s = min(self.deadline_s, now_s + self._limits.min_lease_s)
        stale = [leases for leases in held if leases.is_stale(needed_until_s)]
        if not stale:
            return self._hold(now_s) if self._resolves else self._dispatch(now_s, "every item is encoded")
        self.phase = RequestPhase.ENCODING
        return self._renew(stale, now_s, "a further attempt" if self._texts.sent else "the lease is running out")

    def _hold(self, now_s: float) -> list[RequestEffect]:
        self.phase = RequestPhase.HOLDING
        self._times.encoded_s = now_s
        resolved = self._items.resolved()
        return [*self._items.read(), Resolved(resolved)]

    def _dispatch(self, now_s: float, reason: str) -> list[RequestEffect]:
        self.phase = RequestPhase.DISPATCHING
        if not (self._texts.sent or self._texts.early_has_failed):  # only encoders were lost, and all items are encoded
            self.losses.got_further()
        if not self._wants.begun or self._times.encoded_s is None:
            self._times.encoded_s = now_s
        wanted = self._text_wanted(reason)  # a place that is kept is granted again, or returned
        return [*self._texts.stop_early(now_s, reason), wanted]

    def _text_wanted(self, reason: str, *, early: bool = False) -> TextWanted:
        return self._wants.text_instance(self._items, self._texts, reason, early=early, suspect=bool(self.losses.lost))

    def _text_granted(self, grant: Grant, now_s: float) -> list[RequestEffect]:
        encodes = self.phase is RequestPhase.ENCODING and not self._items.are_ready
        if encodes and self._texts.kept is None and self._may_prefill_early:
            self._texts.kept = grant
            return []
        if self.phase is not RequestPhase.DISPATCHING or self._texts.current is not None:
            return [_not_wanted(grant)]
        kind = AttemptKind.PREFILL if grant.transfers_kv else AttemptKind.WHOLE
        if self._wants.begun:
            kind = AttemptKind.DECODE
        segments = self._texts.send_segments()
        self._texts.begin(kind, grant, now_s)
        generate = Generate(
            grant.credit,
            grant.name,
            kind,
            self._items.placements(),
            self._wants.text_queue_position,
            kv_segments=segments,
            kv_lease_s=self._lease_s(now_s) if grant.transfers_kv else self._limits.max_lease_s,
            prefix=() if segments else grant.prefix,
        )
        return [generate]

    # --- early prefill -----------------------------------------------------------------------------------------------

    @property
    def _may_prefill_early(self) -> bool:
        """Whether the request is new, and no early prefill of it has failed."""
        texts = self._texts
        return not (self._wants.begun or texts.sent or self.losses.lost or self._resolves or texts.early_has_failed)

    def _prefill_early(self, now_s: float) -> list[RequestEffect]:
        """Send the prompt up to the first item that is missing, if the policy says so.

        The text instance finds that in its prefix cache when the whole request comes. Items sent with it need new leases for that.
        """
        sends_early = self._sends_early
        if sends_early is None or self.phase is not RequestPhase.ENCODING or self._texts.current:
            return []
        if not self._may_prefill_early:
            return []
        count, tokens = self._items.beginning()
        if not sends_early(tokens=tokens, sent_tokens=self._texts.early_tokens) or self._items.are_ready:
            return []
        if (kept := self._texts.kept) is None:
            return [self._text_wanted("items are missing", early=True)]
        self._texts.begin(AttemptKind.EARLY_PREFILL, kept, now_s, tokens)
        placements, queue_position = self._items.placements(count), self._wants.text_queue_position
        generate = Generate(kept.credit, kept.name, AttemptKind.EARLY_PREFILL, placements, queue_position, tokens)
        return [generate, *self._renew(self._items.leases_of(count), now_s, "a beginning was sent with it")]

    def _prefilled_early(self, credit: int, now_s: float) -> list[RequestEffect]:
        early = self._running(credit)
        if early is None or early.kind is not AttemptKind.EARLY_PREFILL:
            return []
        self._texts.end(Ending.RELEASED, now_s)
        return self._prefill_early(now_s)

    def _early_failed(self, error: TriptychError, now_s: float) -> list[RequestEffect]:
        """Give up early prefills. Nothing is lost but time."""
        self._texts.end(Ending.FAILED, now_s, error)
        return self._texts.give_up_place(now_s, error.message)

    # --- answers -----------------------------------------------------------------------------------------------------

    def _text_refused(self, event: PlaceRefused, now_s: float) -> list[RequestEffect]:
        """Retry after a pause, as an instance may return within the grace period; TextPoolLost says if not.

        A request that one refused, or whose engine failed on it, does not wait for that one, unless some of its answer has
        been sent and would be lost.
        """
        error = None if isinstance(event.error, NotFound) else self._texts.error
        turned_down = isinstance(error, Overloaded | EngineFailure)
        if event.final or (turned_down and not self._wants.begun):
            return self._end(RequestPhase.FAILED, error or event.error, now_s)
        self.phase = RequestPhase.ENCODING
        self._texts.forgive()
        self._waits += 1
        return self._pause((), self._waits, error or event.error, now_s)

    def _text_pool_lost(self, error: TriptychError, now_s: float, *, begun: bool) -> list[RequestEffect]:
        has_begun = self._wants.begun
        if (
            self._resolves
            or self.phase in {RequestPhase.DISPATCHING, RequestPhase.STREAMING}
            or (has_begun and not begun)
        ):
            return []
        return self._end(RequestPhase.FAILED, (self._texts.error if has_begun else None) or error, now_s)

    def _first_token(self, now_s: float) -> list[RequestEffect]:
        if self.phase is RequestPhase.STREAMING:
            return []
        self.phase = RequestPhase.STREAMING
        self._wants.begun = True
        self.losses.got_further()
        self._texts.sent[-1].first_token_s = now_s
        read = self._items.read()
        if self._texts.transfers_kv:
            return read
        return read + self._release("the text instance has what it needs", now_s)

    def _release(self, reason: str, now_s: float) -> list[RequestEffect]:
        """Give back all that is held for text instances."""
        effects = self._items.release(reason, now_s)
        return effects if self._texts.kv_transferred is None else effects + self._texts.release_segments(reason)

    def _text_reported(self, what: Ready | Finished, now_s: float) -> list[RequestEffect]:
        if isinstance(what, Ready):
            return self._text_is_ready(what, now_s)
        finished = self._times.finished
        finished[what.choice] = what
        return self._end(RequestPhase.DONE, None, now_s) if len(finished) == self._choices else []

    def _text_is_ready(self, ready: Ready, now_s: float) -> list[RequestEffect]:
        """Renew the leases if it transfers: those for the next instance are there when the prompt is computed."""
        attempt = self._texts.sent[-1]
        attempt.ready, attempt.ready_s = ready, now_s
        if not attempt.grant.transfers_kv or self.phase is not RequestPhase.DISPATCHING:
            return []
        sent = [leases for leases in self._items.leases if not leases.is_pending]
        return self._renew(sent, now_s, "the answer will be transferred")

    def _text_failed(self, error: TriptychError, now_s: float, *, drains: bool) -> list[RequestEffect]:
        named = error.items if isinstance(error, TransferFailed) and self.phase is RequestPhase.DISPATCHING else ()
        lost = [item for item in self._items.all if item.index in named]
        alive = [item for item in lost if item.reader_until_s > now_s]
        if lost and not alive:
            self._texts.end(Ending.EXPIRED, now_s, error)
        elif not self._texts.fail(error, now_s, drains=drains):
            return self._end(RequestPhase.FAILED, self._texts.error, now_s)
        if self.phase is RequestPhase.STREAMING:  # it goes on with the answer, and needs the items again
            return self._place_missing(error.message, now_s)
        if isinstance(error, TransferFailed) and self._items.all and (alive or not lost):
            return self._encode_again(alive or self._items.all, error, now_s)
        return self._place_missing("lost while the prompt was computed", now_s)

    def _moved(self, event: Moved, now_s: float) -> list[RequestEffect]:
        """Leave the text instance where it waits: that call is cancelled, and its items get leases for another reader."""
        grant, waits = event.grant, self.phase is RequestPhase.DISPATCHING and self._texts.has(event.credit)
        keeps = waits and all(item.held is not None for item in self._items.all)
        effects: list[RequestEffect] = []
        if grant is not None and not keeps:
            effects.append(_not_wanted(grant))
        if not waits:
            return effects
        self._texts.end(Ending.MOVED, now_s)
        self._texts.kept = grant if keeps else None
        return [*effects, Abort(event.credit, event.reason), *self._place_missing(event.reason, now_s)]

    def _kv_transferred(self, event: AnswerTransferred, now_s: float) -> list[RequestEffect]:
        """Choose the instance that goes on, by the loads of now: this one has done its part, or drains."""
        if self.phase.has_ended or not self._texts.has(event.credit):
            return _too_late(event.name, leases_of(event.segments))
        effects = self._texts.transfer_kv(event, now_s)
        if not self._texts.may_follow:
            error = InternalError("the answer was transferred again and again")
            return effects + self._end(RequestPhase.FAILED, error, now_s)
        return effects + self._place_missing("the answer was transferred", now_s)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _end(self, phase: RequestPhase, error: TriptychError | None, now_s: float) -> list[RequestEffect]:
        effects: list[RequestEffect] = []
        waits = self.phase is RequestPhase.DISPATCHING and self._texts.current is None
        if waits or self.phase is RequestPhase.WAITING:
            effects.append(CreditsAbandoned(self.number, phase.value))
        self._pauses.clear()
        if isinstance(error, LeaseLost):
            # Leases are internal: tell the client that its media was lost.
            error = TransferFailed("the embeddings of the request's images were lost again and again")
        elif self.losses.lost and isinstance(error, Unavailable) and not isinstance(error, InstanceLost):
            # It is not to be tried at another router, which would begin to count again.
            error = InstanceLost("an instance was lost while it worked on the request, and no other is available")
        effects += self._texts.give_up_place(now_s, phase.value)
        effects += self._release(phase.value if error is None else error.message, now_s)
        self._texts.end(Ending.RELEASED, now_s)
        self.phase, self._times.over_s = phase, now_s
        self._times.error = error.code if error is not None and phase is RequestPhase.FAILED else ""
        return [*effects, _DONE if error is None else End(error)]


def _not_wanted(grant: Grant) -> Release:
    return Release(grant.name, grant.credit, (), "no longer wanted")


def _too_late(name: str, lease_ids: Sequence[LeaseId]) -> list[RequestEffect]:
    return [Release(name, None, tuple(lease_ids), "came too late")] if lease_ids else []
