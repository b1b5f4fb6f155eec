"""The attempts of a request: what was tried where, what came of it, and whether more may follow."""

from dataclasses import dataclass
from enum import Enum

from triptych.domain.encoding import EncodeResult
from triptych.domain.generation import Ready
from triptych.domain.kv_segment import KvPlacement, SealedSegment
from triptych.errors import (
    EngineFailure,
    InstanceLost,
    LeaseLost,
    Overloaded,
    StageClosed,
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.machine.router.leases import AttemptLeases, usable
from triptych.machine.router.request_events import Abort, AnswerTransferred, AttemptKind, RequestEffect
from triptych.machine.router.shared_events import Grant, LeasesTaken, Release

MOST_EXCUSED = 16
"""Attempts that end because their instance drains, or has switched, and do not count: more than an answer lives through in a rolling
restart. As many that end with a KV transfer do not count either."""
_NONE = frozenset[str]()


class Ending(Enum):
    """How an attempt ended."""

    RELEASED = "what it was for is done, or given up"
    OVERTAKEN = "another call for the same item was answered first"
    DROPPED = "it failed while another call for the same item went on"
    REFUSED = "the encoder had no room, or had just closed its stage"
    FAILED = "it failed, or what it left at its instance was lost"
    EXCUSED = "its instance drained, or its text instance had just closed its stage"
    EXPIRED = "leases on the embeddings expired while it waited at its text instance"
    MOVED = "the request went elsewhere from where it waited"
    KV_TRANSFERRED = "its text instance has handed the answer over"


@dataclass(slots=True)
class Attempt:
    """A try of one instance at an item, at the prompt or at the answer. Part of ``machine.router.request.RequestMachine``."""

    kind: AttemptKind
    grant: Grant
    """The place of the attempt."""
    started_s: float
    leases: AttemptLeases | None = None
    """On what it leaves there: an embedding, or the segments that it transfers. None once they are released."""
    result: EncodeResult | None = None
    """The encoder's result for an item."""
    ended: Ending | None = None
    ended_s: float = 0.0
    error: TriptychError | None = None
    """Why it ended, if it failed."""

    def end(self, how: Ending, now_s: float, error: TriptychError | None = None) -> None:
        self.ended, self.ended_s, self.error = how, now_s, error

    def release(self, reason: str) -> list[RequestEffect]:
        """Return its leases, and the place that they cover."""
        leases, self.leases = self.leases, None
        return [] if leases is None else leases.release(reason)

    @property
    def is_blamed(self) -> bool:
        """Whether its instance is to be avoided: it failed for a reason that may last, or does not serve the stage."""
        passing = LeaseLost if self.kind is AttemptKind.ENCODE else TransferFailed | LeaseLost
        failed = self.ended in _FAILED and not isinstance(self.error, passing)
        return failed or isinstance(self.error, StageClosed)


@dataclass(slots=True)
class TextAttempt(Attempt):
    """An attempt at a text instance, and what that has reported."""

    tokens: int = 0
    """Tokens of the prompt, in an early prefill."""
    ready: Ready | None = None
    """The instance's report that the embeddings have arrived ..."""
    ready_s: float = 0.0
    """... and when that came."""
    first_token_s: float | None = None
    segments: tuple[KvPlacement, ...] = ()
    """Keys and values that it transferred, as far as they can be used."""
    prefill_s: float = 0.0
    """From its start to its first token there, if it transferred."""

    def transfer_kv(self, segments: tuple[SealedSegment, ...], until_s: float) -> list[RequestEffect]:
        """Hold segments that its instance has sealed, with leases until then at least. What it sealed wrongly is not used."""
        self.segments = usable([sealed.placement for sealed in segments], self.grant.instance_id)
        self.leases = AttemptLeases.kv_transferred(self.grant, segments, len(self.segments), until_s)
        return [LeasesTaken(self.grant.name, self.leases.lease_ids)]

    @property
    def kv_segments(self) -> tuple[KvPlacement, ...]:
        """The segments that are held, with their newest tickets and the address where a reader will connect."""
        if self.leases is None:
            return ()
        name, tickets = self.grant.name, self.leases.tickets  # an instance's name is its address
        pairs = zip(self.segments, tickets, strict=False)
        return tuple([KvPlacement(segment.first, ticket.at(name), segment.choices) for segment, ticket in pairs])

    @property
    def covered_tokens(self) -> int:
        """Positions that the segments cover from the first one on, of every choice."""
        return max([segment.end for segment in self.kv_segments if not segment.choices], default=0)


_FAILED = (Ending.FAILED, Ending.DROPPED, Ending.REFUSED)


class TextAttempts:
    """The attempts at text instances. Part of ``machine.router.request.RequestMachine``, which alone changes it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.early: list[TextAttempt] = []
        """Early prefills, which come before the others."""
        self.sent: list[TextAttempt] = []
        """The others."""
        self.current: TextAttempt | None = None
        """The one that runs, of either kind."""
        self.kept: Grant | None = None
        """The place for early prefills, or that the request was moved to, until the request itself is sent."""
        self.kv_transferred: TextAttempt | None = None
        """The attempt whose segments are held for the next one."""
        self._forgiven = 0
        """So many attempts, from the first on, no longer keep the request away from their instances."""

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def early_tokens(self) -> int:
        """Tokens of the beginning of the prompt that was sent last to the place that is kept."""
        sent_there = self.kept is not None and self.early and self.early[-1].grant is self.kept
        return self.early[-1].tokens if sent_there else 0

    @property
    def early_has_failed(self) -> bool:
        """Whether an early prefill has failed. None is tried again: the request is sent as a whole."""
        return bool(self.early) and self.early[-1].ended is Ending.FAILED

    @property
    def segment_leases(self) -> AttemptLeases | None:
        """The leases on the segments that are held."""
        return None if (holder := self.kv_transferred) is None else holder.leases

    @property
    def transfers_kv(self) -> bool:
        """Whether the attempt that runs is to compute the prompt only."""
        current = self.current
        return current is not None and current.grant.transfers_kv and current.kind is not AttemptKind.EARLY_PREFILL

    def has(self, credit: int) -> bool:
        """Whether this credit belongs to the attempt that runs, early prefills apart."""
        current = self.current
        return current is not None and current.grant.credit == credit and current.kind is not AttemptKind.EARLY_PREFILL

    # --- limits ------------------------------------------------------------------------------------------------------

    def _ended(self, how: Ending) -> int:
        return sum([attempt.ended is how for attempt in self.sent])

    @property
    def moves(self) -> int:
        """How often the request went elsewhere from where it waited."""
        return self._ended(Ending.MOVED) if self.sent else 0

    @property
    def shown(self) -> int:
        """Attempts, where one that transfers and the next are one."""
        if len(self.sent) < 2:
            return len(self.sent)
        before = self.sent[:-1]
        kv_transferred = sum([attempt.ended is Ending.KV_TRANSFERRED for attempt in before])
        return (
            len(self.sent)
            - min(kv_transferred, MOST_EXCUSED)
            - sum([attempt.ended is Ending.MOVED for attempt in before])
        )

    @property
    def counted(self) -> int:
        """Attempts that count against ``most``."""
        several = (Ending.KV_TRANSFERRED, Ending.EXCUSED)
        excused = sum([min(self._ended(how), MOST_EXCUSED) for how in several])
        return len(self.sent) - excused - self._ended(Ending.MOVED) - self._ended(Ending.EXPIRED)

    @property
    def may_follow(self) -> bool:
        """Whether another attempt may follow those that have ended."""
        return self.counted < self.most

    @property
    def avoid(self) -> frozenset[str]:
        """The instances that are not to be chosen again."""
        if not (self.early or self.sent):
            return _NONE
        attempts = (*self.early, *self.sent)[self._forgiven :]  # none is early once one is sent
        return frozenset([attempt.grant.name for attempt in attempts if attempt.is_blamed])

    @property
    def error(self) -> TriptychError | None:
        """Why the last attempt failed, for the client if there is no further one."""
        return self.sent[-1].error if self.sent else None

    # --- events ------------------------------------------------------------------------------------------------------

    def begin(self, kind: AttemptKind, grant: Grant, now_s: float, tokens: int = 0) -> None:
        """Start an attempt. ``tokens`` are those of the prompt in an early prefill."""
        self.current = TextAttempt(kind, grant, now_s, tokens=tokens)
        (self.early if kind is AttemptKind.EARLY_PREFILL else self.sent).append(self.current)

    def end(self, how: Ending, now_s: float, error: TriptychError | None = None) -> None:
        """End the attempt that runs, if any."""
        if self.current is not None:
            self.current.end(how, now_s, error)
            self.current = None

    def forgive(self) -> None:
        """Allow every instance again, as no other is usable: the next that is may be one that the request was lost at."""
        self._forgiven = len(self.early) + len(self.sent)

    def fail(self, error: TriptychError, now_s: float, *, drains: bool = False) -> bool:
        """End the attempt that runs. Returns whether another may follow.

        One whose instance ``drains`` is excused, and the instance is not avoided once it is back. So is one whose instance has
        switched, which is avoided.
        """
        instance_id = self.sent[-1].grant.instance_id
        retryable = isinstance(error, Unavailable | Overloaded | LeaseLost)
        if isinstance(error, EngineFailure):
            retryable = not any(isinstance(earlier.error, EngineFailure) for earlier in self.sent)
        switched = isinstance(error, StageClosed)
        lost = isinstance(error, Unavailable) and not isinstance(error, TransferFailed) and not switched
        if lost:
            error = InstanceLost(f"text instance {instance_id} was lost while it worked on the request")
        self.end(Ending.EXCUSED if switched or (lost and drains) else Ending.FAILED, now_s, error)
        return retryable and self.may_follow

    def transfer_kv(self, event: AnswerTransferred, now_s: float) -> list[RequestEffect]:
        """End the attempt that runs. The segments that it transfers are held in place of others."""
        attempt, effects = self.current, list[RequestEffect]()
        if attempt is None:
            raise AssertionError("nothing runs")
        if event.segments:
            effects += self.release_segments("others were transferred")
            sealed_s = attempt.ready_s if attempt.grant.transfers_kv else now_s
            until_s = sealed_s + min([sealed.placement.ticket.lease_s for sealed in event.segments])
            effects += attempt.transfer_kv(event.segments, until_s)
            self.kv_transferred = attempt
        attempt.prefill_s = event.prefill_s
        self.end(Ending.KV_TRANSFERRED, now_s)
        return effects

    def send_segments(self) -> tuple[KvPlacement, ...]:
        """The segments that are held, which are in the hands of a reader then."""
        holder = self.kv_transferred
        if holder is None or holder.leases is None:
            return ()
        holder.leases.is_sent = True
        return holder.kv_segments

    def release_segments(self, reason: str) -> list[RequestEffect]:
        """Return the leases on the segments that are held, if there are any."""
        holder, self.kv_transferred = self.kv_transferred, None
        return [] if holder is None else holder.release(reason)

    def stop_early(self, now_s: float, reason: str) -> list[RequestEffect]:
        """Cancel the early prefill that runs, if any. The place is no longer kept: the request itself is about to be sent there."""
        attempt, self.kept = self.current, None
        if attempt is None or attempt.kind is not AttemptKind.EARLY_PREFILL:
            return []
        self.end(Ending.RELEASED, now_s)
        return [Abort(attempt.grant.credit, reason)]

    def give_up_place(self, now_s: float, reason: str) -> list[RequestEffect]:
        """Return the place that is kept, if there is one."""
        if (kept := self.kept) is None:
            return []
        return [*self.stop_early(now_s, reason), Release(kept.name, kept.credit, (), reason)]

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        assert self.counted <= self.most, "text attempts"
        running = [] if self.current is None else [self.current]
        assert running == [attempt for attempt in (*self.early, *self.sent) if attempt.ended is None], "lost track"
        holders = [attempt for attempt in self.sent if attempt.leases is not None]
        assert holders == ([] if self.kv_transferred is None else [self.kv_transferred]), "segments of two attempts"
        held = [attempt.leases for attempt in holders if attempt.leases is not None]
        for leases in held:
            leases.validate()
