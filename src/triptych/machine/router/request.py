"""One request's life in the router, from the first byte looked at to one of three ends.

    PREPARING -> WAITING -> ENCODING -> DISPATCHING -> STREAMING -> DONE | FAILED | CANCELLED

What is lost on the way is redone at the smallest grain (docs/adr/0005): an item is encoded again elsewhere, a lease
is renewed, a text instance is replaced, each a bounded number of times, and all of it only until the first token. An
arena that refuses sends the whole request back to the queue, holding nothing; an encoder that is busy is asked again
later for that item alone. Both go on until the deadline, with growing pauses.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf

from triptych.domain.embedding import LeaseId
from triptych.domain.generation import Placement
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
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.machine.router.cluster_events import Grant
from triptych.machine.router.request_books import Books
from triptych.machine.router.request_events import (
    AbandonCredits,
    Alarm,
    CallerLeft,
    CountedItem,
    CreditsGranted,
    CreditsRefused,
    DeadlinePassed,
    Dispatch,
    EmbeddingMissing,
    Encode,
    End,
    Extend,
    Failed,
    FirstToken,
    ItemEncoded,
    ItemFailed,
    LeaseFailed,
    LeaseGranted,
    LeasesDue,
    LeasesExtended,
    NoText,
    Pause,
    PoolLost,
    Prepared,
    Release,
    Renew,
    RequestEffect,
    RequestEvent,
    Resumed,
    TextChosen,
    TextFailed,
    TextFinished,
    TextReady,
    WantCredits,
)
from triptych.machine.router.request_item import RequestItem
from triptych.policy.retrying import pause_s
from triptych.policy.routing import Want

_LAST_TRY_S = 0.5
"""With less left of a lease it is not asked again for more."""


class Phase(Enum):
    PREPARING = "preparing"
    WAITING = "waiting"
    """For credits at encoders; nothing is held."""
    ENCODING = "encoding"
    DISPATCHING = "dispatching"
    STREAMING = "streaming"
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
    max_encode_attempts: int
    """Per item."""
    max_text_attempts: int
    first_pause_s: float
    """Before what was refused for want of room is tried again; it doubles from there ..."""
    longest_pause_s: float
    """... up to this. Only the deadline ends it."""
    max_lease_s: float
    min_lease_s: float
    """A ticket whose lease has less left is renewed before it is sent out."""


class RequestMachine:
    """Single owner of a request's phase, items and attempts. ``handle`` is the only mutator."""

    def __init__(
        self,
        request_id: str,
        model: str,
        *,
        now_s: float,
        deadline_s: float,
        limits: RequestLimits,
        new_lease: Callable[[], LeaseId],
        choices: int = 1,
    ) -> None:
        """The request is done when so many ``choices`` have finished. ``new_lease`` gives an id never used before."""
        self._request_id = request_id
        self._deadline_s = deadline_s
        self._limits = limits
        self._new_lease = new_lease
        self._choices = choices
        self._phase = Phase.PREPARING
        self._items: list[RequestItem] = []
        self._alarm_s = inf
        """When ``LeasesDue`` will come."""
        # Items whose credits are asked for and not yet answered.
        self._reserving: frozenset[int] = frozenset()
        self._requeues = 0
        # By number: the items that are asked for again when the pause is over; none where a text instance is.
        self._pauses: dict[int, frozenset[int]] = {}
        self._pause_number = 0
        self._text: str | None = None
        self._text_attempt = 0
        self._avoid_texts: frozenset[str] = frozenset()
        self._engine_failed = False
        self._text_refusals = 0
        self._expired_attempts = 0
        # Why the last attempt failed: what the client is told when there is no other text instance.
        self._text_error: TriptychError | None = None
        self._books = Books(request_id, model, started_s=now_s)

    # --- what it knows -----------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def image_tokens(self) -> int:
        return sum(item.counted.tokens for item in self._items)

    @property
    def holds(self) -> int:
        """Credits that this request has and has not given back."""
        return sum(item.grant is not None for item in self._items)

    def timeline(self, now_s: float, completion_tokens: int) -> Timeline:
        """The request so far; of one that is over, for ever the same."""
        items = tuple(item.timeline(index, self._books.ready) for index, item in enumerate(self._items))
        return self._books.timeline(
            now_s,
            self._phase.outcome,
            items,
            text_attempts=self._text_attempt,
            completion_tokens=completion_tokens,
        )

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        for index, item in enumerate(self._items):
            assert item.result is None or item.grant is not None, f"item {index}: encoded nowhere"  # noqa: S101
            assert item.ticket is None or item.result is not None, f"item {index}: ticket of nothing"  # noqa: S101
            assert bool(item.lease_ids) == (item.grant is not None), f"item {index}: leases"  # noqa: S101
            assert not (item.renewing and item.result is None), f"item {index}: renews nothing"  # noqa: S101
            assert item.losses <= self._limits.max_encode_attempts, f"item {index}: attempts"  # noqa: S101
        if self._phase in {Phase.PREPARING, Phase.WAITING, Phase.STREAMING} or self._phase.over:
            assert self.holds == 0, f"{self._phase.value} holds credits"  # noqa: S101
        if self._phase is Phase.WAITING:
            wanted = self._reserving.union(*self._pauses.values())
            assert len(wanted) == len(self._items) > 0, "waits for less than everything"  # noqa: S101
        if self._phase is Phase.ENCODING:
            busy = [item for item in self._items if item.encoding or item.renewing]
            assert busy or self._reserving or self._pauses, "encodes nothing"  # noqa: S101
        if self._phase is Phase.DISPATCHING:
            assert all(item.result is not None for item in self._items), "dispatched before every item was there"  # noqa: S101
            attempts = self._text_attempt - self._expired_attempts
            assert 0 < attempts <= self._limits.max_text_attempts, "text attempts"  # noqa: S101
        assert not (self._phase.over and self._pauses), "pauses for nothing"  # noqa: S101

    # --- what happens ------------------------------------------------------------------------------------------------

    def handle(self, event: RequestEvent, now_s: float) -> list[RequestEffect]:  # noqa: C901, PLR0911, PLR0912 - one dispatch
        """Take one event in and say what is to be done; an answer that nobody waits for any more gives its leases back."""
        match event:
            case ItemEncoded():
                return self._item_encoded(event, now_s)
            case LeaseGranted():
                return self._lease_granted(event, now_s)
            case LeasesExtended():
                return self._leases_extended(event, now_s)
            case CreditsGranted(grants) if self._phase.over:
                return [Release(grant.encoder, grant.credit, (), "the request is over") for grant in grants]
            case _ if self._phase.over:
                return []
            case Prepared(items, prompt_tokens):
                return self._prepared(items, prompt_tokens, now_s)
            case CreditsGranted(grants):
                return self._placed(grants, now_s)
            case CreditsRefused(error):
                return self._placement_refused(error, now_s)
            case ItemFailed(item, credit, error):
                return self._item_failed(item, credit, error, now_s)
            case LeaseFailed(item, credit, error):
                return self._lease_failed(item, credit, error, now_s)
            case Resumed(number):
                return self._resumed(number, now_s)
            case LeasesDue():
                return self._leases_due(now_s)
            case Failed(error):
                return self._end(Phase.FAILED, error, now_s)
            case PoolLost(error):
                if self._phase in {Phase.DISPATCHING, Phase.STREAMING}:
                    return []
                return self._end(Phase.FAILED, error, now_s)
            case CallerLeft():
                return self._end(Phase.CANCELLED, Cancelled("the caller went away"), now_s)
            case DeadlinePassed():
                error = DeadlineExceeded(f"not done within {self._deadline_s - self._books.started_s:.3f} s")
                return self._end(Phase.FAILED, error, now_s)
            case _ if event.attempt != self._text_attempt or self._phase not in {Phase.DISPATCHING, Phase.STREAMING}:
                return []
            case TextChosen(_, text, instance_id):
                self._text, self._books.instance_id = text, instance_id
                for sent in self._items:
                    sent.ticket = None
            case NoText(_, error):
                return self._text_refused(error, now_s)
            case TextReady(_, ready):
                self._books.ready = ready
            case FirstToken():
                return self._first_token(now_s)
            case TextFinished(_, finished):
                self._books.finished[finished.choice] = finished
                return self._end(Phase.DONE, None, now_s) if len(self._books.finished) == self._choices else []
            case TextFailed(_, error):
                return self._text_failed(error, now_s)
        return []

    def _prepared(self, items: tuple[CountedItem, ...], prompt_tokens: int, now_s: float) -> list[RequestEffect]:
        self._books.prepared_s = now_s
        self._books.prompt_tokens = prompt_tokens
        self._items = [RequestItem(item) for item in items]
        if not items:
            return self._dispatch(now_s, "nothing to encode")
        return self._queue("a new request")

    def _queue(self, reason: str) -> list[RequestEffect]:
        self._phase = Phase.WAITING
        return [self._reserve(range(len(self._items)), wait=True, reason=reason)]

    def _reserve(self, items: Iterable[int], *, wait: bool, reason: str) -> WantCredits:
        wanted = frozenset(items)
        self._reserving |= wanted
        wants = tuple(
            Want(
                item=index,
                tokens=self._items[index].counted.tokens,
                nbytes=self._items[index].counted.nbytes,
                content=self._items[index].counted.content,
                avoid=self._items[index].avoid,
                exclude=self._items[index].exclude,
            )
            for index in sorted(wanted)
        )
        return WantCredits(wants, wait, reason)

    def _placed(self, grants: tuple[Grant, ...], now_s: float) -> list[RequestEffect]:
        effects: list[RequestEffect] = []
        for grant in grants:
            if grant.item not in self._reserving:
                effects.append(Release(grant.encoder, grant.credit, (), "no longer wanted"))
                continue
            self._reserving -= {grant.item}
            self._phase = Phase.ENCODING
            item = self._items[grant.item]
            item.grant = grant
            item.attempts += 1
            router_lease = self._new_lease()
            item.reader_lease = self._new_lease()
            item.lease_ids = (router_lease, item.reader_lease)
            effects.append(
                Encode(
                    item=grant.item,
                    credit=grant.credit,
                    encoder=grant.encoder,
                    reader_lease=item.reader_lease,
                    router_lease=router_lease,
                    lease_s=self._lease_s(now_s),
                    reason=grant.reason,
                )
            )
        return effects

    def _placement_refused(self, error: TriptychError, now_s: float) -> list[RequestEffect]:
        if not self._reserving:
            return []
        failures = [self._items[index].engine_failure for index in sorted(self._reserving)]
        failure = next((failure for failure in failures if failure is not None), None)
        if failure is not None and not isinstance(error, Overloaded):
            return self._end(Phase.FAILED, failure, now_s)
        if self._phase is Phase.WAITING or not error.retryable:
            return self._end(Phase.FAILED, error, now_s)
        return self._requeue(error, now_s)

    def _pause(self, items: Iterable[int], refusals: int, error: TriptychError, now_s: float) -> list[RequestEffect]:
        """Ask again after a while, for these items' places or, without any, for a text instance.

        The request ends here where that would be too late.
        """
        limits = self._limits
        delay_s = pause_s(self._request_id, refusals, first_s=limits.first_pause_s, longest_s=limits.longest_pause_s)
        if now_s + delay_s >= self._deadline_s:
            return self._end(Phase.FAILED, error, now_s)
        self._pause_number += 1
        self._pauses[self._pause_number] = frozenset(items)
        return [Pause(self._pause_number, delay_s, error.message)]

    def _resumed(self, number: int, now_s: float) -> list[RequestEffect]:
        items = self._pauses.pop(number, None)
        if items is None:
            return []
        if not items:
            return self._advance(now_s)
        return [self._reserve(items, wait=self._phase is Phase.WAITING, reason="the pause is over")]

    # --- items -------------------------------------------------------------------------------------------------------

    def _item_encoded(self, event: ItemEncoded, now_s: float) -> list[RequestEffect]:
        ticket, leases = event.result.ticket, (event.result.router_lease, event.result.ticket.lease_id)
        item = self._current(event.item, event.credit)
        if item is None or item.grant is None or item.result is not None:
            return [Release(event.encoder, None, leases, "came too late")]
        item.result = item.served = event.result
        item.ticket, item.encoder_id = ticket, event.instance_id
        fault = item.fault(ticket, event.instance_id)
        if leases != item.lease_ids:
            item.lease_ids += leases
            fault = "other leases than those that were asked for"
        if fault is not None:
            return self._end(Phase.FAILED, InternalError(f"encoder {item.encoder_id} returned {fault}"), now_s)
        item.lasts(item.lease_ids, event.asked_s, event.lease_s, self._deadline_s)
        return [*self._set_alarm(now_s), *self._advance(now_s)]

    def _item_failed(self, index: int, credit: int, error: TriptychError, now_s: float) -> list[RequestEffect]:
        item = self._current(index, credit)
        if item is None or item.grant is None or item.result is not None:
            return []
        if not isinstance(error, Unavailable | DeadlineExceeded | Cancelled):
            item.lease_ids = ()  # it was answered: nothing was granted
        if isinstance(error, ArenaFull):
            return self._requeue(error, now_s)
        if isinstance(error, Overloaded):
            # What it waits for comes free without any memory: the others may stay where they are.
            item.avoid |= {item.grant.encoder}
            item.refusals += 1
            effects = self._give_up(index, error.message)
            return effects + self._pause([index], item.refusals, error, now_s)
        if isinstance(error, EngineFailure) and item.engine_failure is None:
            item.engine_failure, item.exclude = error, frozenset({item.grant.encoder})
            return self._encode_again([index], error, now_s)
        if isinstance(error, Unavailable):
            return self._encode_again([index], error, now_s)
        return self._end(Phase.FAILED, error, now_s)

    def _lease_granted(self, event: LeaseGranted, now_s: float) -> list[RequestEffect]:
        item = self._current(event.item, event.credit)
        if item is None or not item.renewing or item.result is None:
            return [Release(event.encoder, None, (event.ticket.lease_id,), "came too late")]
        item.renewing, item.renewed = False, True
        item.ticket = event.ticket
        item.expires_s = event.asked_s + event.lease_s
        known = item.result.ticket
        got = (event.ticket.key, event.ticket.tokens, event.ticket.tensors, event.ticket.lease_id)
        if got != (known.key, known.tokens, known.tensors, item.reader_lease):
            item.lease_ids += (event.ticket.lease_id,)
            fault = InternalError(f"encoder {item.encoder_id} leased another embedding than the one asked for")
            return self._end(Phase.FAILED, fault, now_s)
        return self._advance(now_s)

    def _lease_failed(self, index: int, credit: int, error: TriptychError, now_s: float) -> list[RequestEffect]:
        item = self._current(index, credit)
        if item is None or not item.renewing:
            return []
        if isinstance(error, LeaseLost | Unavailable | Overloaded):
            return self._encode_again([index], error, now_s)
        return self._end(Phase.FAILED, error, now_s)

    def _leases_extended(self, event: LeasesExtended, now_s: float) -> list[RequestEffect]:
        item = self._current(event.item, event.credit)
        if item is None or item.result is None:
            return []  # they were given back, and stay so
        item.lasts(event.lease_ids, event.asked_s, event.lease_s, self._deadline_s)
        return self._set_alarm(now_s)

    def _leases_due(self, now_s: float) -> list[RequestEffect]:
        """A request may wait for minutes, for other items or at its text instance: what it has must not end meanwhile."""
        self._alarm_s = inf
        effects: list[RequestEffect] = []
        for index, item in enumerate(self._items):
            if item.grant is None or item.result is None or item.extend_s > now_s:
                continue
            ticket, left_s = item.result.ticket, item.held_until_s - now_s
            effects.append(
                Extend(
                    item=index,
                    credit=item.grant.credit,
                    encoder=item.grant.encoder,
                    key=ticket.key,
                    generation=ticket.generation,
                    lease_ids=(item.lease_ids[0], item.reader_lease),
                    lease_s=self._lease_s(now_s),
                )
            )
            # Should it fail: once more at half of what is left then, until nothing is.
            item.extend_s = now_s + left_s / 2 if left_s > _LAST_TRY_S else inf
        return [*effects, *self._set_alarm(now_s)]

    def _set_alarm(self, now_s: float) -> list[RequestEffect]:
        due_s = min((item.extend_s for item in self._items if item.result is not None), default=inf)
        if due_s >= self._alarm_s:
            return []
        self._alarm_s = due_s
        return [Alarm(max(0.0, due_s - now_s))]

    def _current(self, index: int, credit: int) -> RequestItem | None:
        """The item, if the call that answers is the one it waits for."""
        item = self._items[index]
        return item if item.grant is not None and item.grant.credit == credit else None

    def _encode_again(self, indices: Iterable[int], error: TriptychError, now_s: float) -> list[RequestEffect]:
        """Give up these items' places and ask for others at once, the other items staying where they are."""
        effects: list[RequestEffect] = []
        for index in indices:
            item = self._items[index]
            if item.grant is not None:
                effects.append(EmbeddingMissing(item.grant.encoder, item.counted.content))
                if not isinstance(error, LeaseLost):
                    # An evicted embedding says nothing against its encoder.
                    item.avoid |= {item.grant.encoder}
            effects += self._give_up(index, error.message)
            item.losses += 1
            if item.losses >= self._limits.max_encode_attempts:
                return effects + self._end(Phase.FAILED, error, now_s)
        self._phase = Phase.ENCODING
        return [*effects, self._reserve(indices, wait=False, reason=error.message)]

    def _requeue(self, error: TriptychError, now_s: float) -> list[RequestEffect]:
        """Let go of everything and start over at the end of the queue."""
        self._requeues += 1
        self._reserving = frozenset()
        self._pauses.clear()
        effects = self._give_up_all(error.message)
        self._phase = Phase.WAITING
        return effects + self._pause(range(len(self._items)), self._requeues, error, now_s)

    def _give_up(self, index: int, reason: str) -> list[RequestEffect]:
        return self._items[index].let_go(index, reason)

    def _give_up_all(self, reason: str) -> list[RequestEffect]:
        return [effect for index in range(len(self._items)) for effect in self._give_up(index, reason)]

    # --- text --------------------------------------------------------------------------------------------------------

    def _advance(self, now_s: float) -> list[RequestEffect]:
        """Once every item is encoded: renew what leases are spent or short, then dispatch."""
        if any(item.result is None or item.renewing for item in self._items):
            return []
        needed_until_s = min(self._deadline_s, now_s + self._limits.min_lease_s)
        stale = [index for index, item in enumerate(self._items) if item.stale(needed_until_s)]
        if not stale:
            return self._dispatch(now_s, "every item is encoded")
        effects: list[RequestEffect] = []
        self._phase = Phase.ENCODING
        for index in stale:
            item = self._items[index]
            if item.grant is None or item.result is None:
                raise AssertionError("an encoded item has a place")
            item.renewing, item.ticket = True, None
            item.reader_lease = self._new_lease()
            item.lease_ids += (item.reader_lease,)
            effects.append(
                Renew(
                    item=index,
                    credit=item.grant.credit,
                    encoder=item.grant.encoder,
                    key=item.result.ticket.key,
                    generation=item.result.ticket.generation,
                    lease_id=item.reader_lease,
                    lease_s=self._lease_s(now_s),
                    reason="a further attempt" if self._text_attempt else "the lease is running out",
                )
            )
        return effects

    def _dispatch(self, now_s: float, reason: str) -> list[RequestEffect]:
        self._phase = Phase.DISPATCHING
        self._books.encoded_s = now_s
        self._text_attempt += 1
        placements: list[Placement] = []
        for index, item in enumerate(self._items):
            if item.ticket is None:
                raise AssertionError("dispatched without a ticket")
            shard = item.counted.shard
            continues = shard is not None and shard.first > 0
            placements.append(Placement(index, item.counted.start, item.ticket, continues))
        return [Dispatch(self._text_attempt, tuple(placements), self._avoid_texts, reason)]

    def _text_refused(self, error: TriptychError, now_s: float) -> list[RequestEffect]:
        """An instance that is away may be back within the grace; that it is not, PoolLost says."""
        if self._text_error is not None:
            return self._end(Phase.FAILED, self._text_error, now_s)
        self._phase = Phase.ENCODING
        self._text_attempt -= 1  # nothing was sent
        self._text_refusals += 1
        return self._pause((), self._text_refusals, error, now_s)

    def _first_token(self, now_s: float) -> list[RequestEffect]:
        if self._phase is Phase.STREAMING:
            return []
        self._phase = Phase.STREAMING
        self._books.first_token_s = now_s
        return self._give_up_all("the text instance has what it needs")

    def _text_failed(self, error: TriptychError, now_s: float) -> list[RequestEffect]:
        if isinstance(error, EngineFailure):
            retryable = not self._engine_failed
            self._engine_failed = True
        else:
            retryable = isinstance(error, Unavailable | Overloaded | LeaseLost)
        lost = self._lost_items(error)
        expired = [index for index in lost if self._items[index].expires_s <= now_s]
        if lost == expired != [] and self._phase is Phase.DISPATCHING:
            # It waited at the text instance for longer than a lease lasts: nobody's fault, and fresh leases will do.
            self._expired_attempts += 1
            self._text_error = error
            return self._again(now_s)
        spent = self._text_attempt - self._expired_attempts >= self._limits.max_text_attempts
        if self._phase is Phase.STREAMING or spent or not retryable:
            return self._end(Phase.FAILED, _clear(error, self._books.instance_id), now_s)
        self._text_error = _clear(error, self._books.instance_id)
        if isinstance(error, TransferFailed):
            gone = [index for index in lost if index not in expired] or range(len(self._items))
            return self._encode_again(gone, error, now_s) if self._items else self._again(now_s)
        if not isinstance(error, LeaseLost) and self._text is not None:
            self._avoid_texts |= {self._text}
        return self._again(now_s)

    def _lost_items(self, error: TriptychError) -> list[int]:
        """The items that a failed pull names, as far as there are such."""
        named = error.items if isinstance(error, TransferFailed) else ()
        return sorted({index for index in named if 0 <= index < len(self._items)})

    def _again(self, now_s: float) -> list[RequestEffect]:
        self._books.ready = None
        return self._advance(now_s)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _end(self, phase: Phase, error: TriptychError | None, now_s: float) -> list[RequestEffect]:
        effects: list[RequestEffect] = []
        if self._phase is Phase.WAITING:
            effects.append(AbandonCredits(phase.value))
        self._pauses.clear()
        if isinstance(error, LeaseLost):
            # Which lease was lost is between the services; to the client its images did not arrive.
            error = TransferFailed("the embeddings of the request's images were lost again and again")
        effects += self._give_up_all(phase.value if error is None else error.message)
        if self._books.first_token_s is None and phase is Phase.DONE:
            self._books.first_token_s = now_s
        self._phase = phase
        self._books.over_s = now_s
        self._books.error = error.code if error is not None and phase is Phase.FAILED else ""
        return [*effects, End(error)]

    def _lease_s(self, now_s: float) -> float:
        """As long as the request may still take, but not longer than an encoder should promise."""
        return max(0.0, min(self._deadline_s - now_s, self._limits.max_lease_s))


def _clear(error: TriptychError, instance_id: str) -> TriptychError:
    """What the client is told when a text instance fails the request."""
    if isinstance(error, Unavailable) and not isinstance(error, TransferFailed):
        return InstanceLost(f"text instance {instance_id} was lost while it worked on the request")
    return error
