"""The router's state of its instances: membership, load, and the credits that it has granted.

Members join and leave at any time. A leaving member gets no new work and is forgotten once it has no credits; one that
has left is forgotten at once, with its credits. Events about forgotten members are ignored.

Load reports lag, so everything that the router has assigned since the last report is added: bursts between two reports
spread evenly (ModServe section 4.3). Arena bytes are granted as *credits*, for all items of a request at once or for
none. Until then a request waits in a bounded queue, ordered by the policies, and holds nothing (no hold-and-wait).
"""

from bisect import insort
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from triptych.domain.instance import InstanceInfo
from triptych.domain.item_plan import Content
from triptych.domain.limits import Count, PositiveSeconds, Seconds, check_limits
from triptych.domain.membership import Member
from triptych.domain.rng import Rng
from triptych.domain.stage import Stage
from triptych.errors import (
    ArenaFull,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.machine.router.cluster_events import (
    ClusterEffect,
    ClusterEvent,
    Connect,
    DescribeAgain,
    Disconnect,
    InstanceSeen,
    InstanceSuspected,
    LoadReported,
    Logged,
    MemberJoined,
    MemberLeaving,
    MemberLeft,
    Tick,
    WakeAt,
)
from triptych.machine.router.instances import ENCODE, TEXT, Instances
from triptych.machine.router.shared_events import (
    CallFailed,
    CreditReturned,
    CreditsAbandoned,
    CreditsWanted,
    EmbeddingGone,
    FirstToken,
    Grant,
    Granted,
    ItemEncoded,
    Refused,
    TextPoolLost,
    TextWanted,
)
from triptych.policy.policies import Policies
from triptych.policy.queueing import Turn, longest_waits
from triptych.policy.routing import Shortage, Why, assign_items, choose_text


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """Limits of waiting requests and embedding hints, and timings of backoff."""

    max_waiting_requests: Count = 1024
    """Most requests that wait for room in the encoders' arenas."""
    max_embedding_hints: Count = 65_536
    """Most items whose encoder the router remembers, to reuse cached embeddings."""
    pool_grace_s: Seconds = 1.0
    """How long requests wait for a pool without any instance before they fail."""
    first_backoff_s: PositiveSeconds = 1.0
    """First backoff of an instance whose engine failed; it doubles with each failure. Other instances are preferred."""
    longest_backoff_s: PositiveSeconds = 30.0
    """Longest backoff."""

    def __post_init__(self) -> None:
        check_limits(self, ("first_backoff_s", "longest_backoff_s"))


@dataclass(slots=True)
class _Credit:
    name: str
    stage: Stage
    content: Content | None
    """The item's content; None for a request at a text instance."""
    tokens: int
    nbytes: int
    report: int = 0
    """The number of the instance's last report when the credit was granted."""
    working: bool = True


@dataclass(frozen=True, slots=True)
class _Waiting:
    wanted: CreditsWanted
    since_s: float
    turn: Turn


class ClusterMachine:
    """Owner of membership, load and credits as this router sees them. ``handle`` is the only mutator."""

    def __init__(
        self, limits: ClusterLimits, policies: Policies, rng: Rng, *, arena_retry_s: float, retry_after_s: float
    ) -> None:
        """An encoder whose arena is full gets no items for ``arena_retry_s``. Refusals carry ``retry_after_s``."""
        self._limits = limits
        self._arena_retry_s = arena_retry_s
        self._retry_after_s = retry_after_s
        self._policies = policies
        self._rng = rng
        self._arrivals = 0
        self._instances = Instances(limits.max_embedding_hints)
        self._credits: dict[int, _Credit] = {}
        self._next_credit = 0
        self._waiting: list[_Waiting] = []
        """In the order in which they are served."""
        self._unplaceable: set[int] = set()
        """Those of them that the encoders could not take even without load, since the last review."""
        self._wake_at_s: float | None = None
        self._textless_s: float | None = None
        self._text_lost = False

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def instances(self) -> Instances:
        """For reading."""
        return self._instances

    @property
    def waiting(self) -> int:
        """Requests that wait for credits."""
        return len(self._waiting)

    def longest_waits_s(self, now_s: float) -> dict[int, float]:
        """By priority, for how long the first of the requests that wait for credits has waited (``policy.queueing``)."""
        return longest_waits((waiting.wanted.priority, now_s - waiting.since_s) for waiting in self._waiting)

    @property
    def outstanding(self) -> int:
        """Number of credits, of items and of dispatches, not yet returned."""
        return len(self._credits)

    @property
    def credits(self) -> AbstractSet[int]:
        """The credits not yet returned."""
        return self._credits.keys()

    @property
    def text_lost(self) -> bool:
        """Whether no text instance has been usable for the whole grace period, and TextPoolLost was sent."""
        return self._text_lost

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        self._instances.validate()
        for name, instance in self._instances.by_name.items():
            out = [credit for credit in self._credits.values() if credit.name == name]
            assert instance.credits == len(out), f"{name}: credits"  # noqa: S101
            assert out or not instance.leaving, f"{name}: leaving with nothing left"  # noqa: S101
            for stage, one in instance.stages.items():
                own = [credit for credit in out if credit.stage is stage]
                working = [credit for credit in own if credit.working]
                assert one.own_tokens == sum(credit.tokens for credit in working), f"{name}: tokens"  # noqa: S101
                assert one.own_pending == len(working), f"{name}: pending"  # noqa: S101
                assert one.own_bytes == sum(credit.nbytes for credit in own), f"{name}: bytes"  # noqa: S101
        known = self._instances.by_name.keys()
        assert {credit.name for credit in self._credits.values()} <= known, "credits of an unknown instance"  # noqa: S101
        assert len(self._waiting) <= self._limits.max_waiting_requests, "queue above its bound"  # noqa: S101
        assert self._unplaceable <= {one.wanted.request for one in self._waiting}, "unplaceable but gone"  # noqa: S101

    # --- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: ClusterEvent, now_s: float) -> list[ClusterEffect]:  # noqa: C901, PLR0912 - one dispatch
        """Apply one event and return the effects. Events about what no longer exists are ignored."""
        effects: list[ClusterEffect] = []
        match event:
            case MemberJoined(member):
                effects = self._joined(member, now_s)
            case MemberLeaving(name):
                effects = self._leaving(name, now_s)
            case MemberLeft(name):
                effects = self._forget(name, "has left", now_s)
            case InstanceSeen(name, info):
                effects = self._seen(name, info, now_s)
            case LoadReported(name, load):
                instance = self._instances.by_name.get(name)
                if instance is not None and instance.info is not None and instance.reported(load):
                    self._review(now_s)
            case InstanceSuspected(name):
                effects = self._suspected(name, now_s)
            case CreditsWanted():
                effects = self._wanted(event, now_s)
            case CreditsAbandoned(request):
                self._waiting = [waiting for waiting in self._waiting if waiting.wanted.request != request]
                self._unplaceable.discard(request)
            case TextWanted():
                effects = self._text_wanted(event, now_s)
            case ItemEncoded(credit):
                self._encoded(credit)
            case CallFailed():
                effects = self._failed(event, now_s)
            case FirstToken(credit):
                if (placed := self._credits.get(credit)) is not None:
                    self._instances.by_name[placed.name].worked(placed.stage)
            case EmbeddingGone(credit):
                self._embedding_gone(credit)
            case CreditReturned(credit):
                effects = self._return(credit, now_s)
            case Tick():
                self._wake_at_s = None
        if self._waiting:
            effects += self._serve_waiting(now_s)
        if not self._instances.has_text or self._textless_s is not None:
            effects += self._check_text_pool(now_s)
        return effects

    # --- members -----------------------------------------------------------------------------------------------------

    def _joined(self, member: Member, now_s: float) -> list[ClusterEffect]:
        is_new = self._instances.join(member)
        self._review(now_s)
        return [Connect(member.address)] if is_new else []

    def _leaving(self, name: str, now_s: float) -> list[ClusterEffect]:
        instance = self._instances.by_name.get(name)
        if instance is None or instance.leaving:
            return []
        if not instance.credits:
            return self._forget(name, "has left", now_s)
        self._instances.leave(instance)
        self._review(now_s)
        return [Logged(name, f"leaving, {instance.credits} credits in use")]

    def _forget(self, name: str, what: str, now_s: float) -> list[ClusterEffect]:
        if not self._instances.forget(name):
            return []
        self._credits = {number: credit for number, credit in self._credits.items() if credit.name != name}
        self._review(now_s)
        return [Logged(name, what), Disconnect(name)]

    def _seen(self, name: str, info: InstanceInfo, now_s: float) -> list[ClusterEffect]:
        instance = self._instances.by_name.get(name)
        if instance is None:
            return []
        restarted = self._instances.see(instance, info)
        self._review(now_s)
        return [Logged(name, f"restarted, {instance.state}" if restarted else instance.state)]

    def _suspected(self, name: str, now_s: float) -> list[ClusterEffect]:
        instance = self._instances.by_name.get(name)
        if instance is None or not instance.reachable:
            return []
        instance.reachable = False
        self._review(now_s)
        return [Logged(name, instance.state)]

    def _review(self, now_s: float) -> None:
        self._instances.review(now_s)
        self._unplaceable.clear()

    # --- results of calls --------------------------------------------------------------------------------------------

    def _failed(self, event: CallFailed, now_s: float) -> list[ClusterEffect]:
        """What a failed call means for its instance: arena full, engine backoff, or suspected until described again."""
        self._stop_work(event.credit)
        credit, instance, error = self._credits.get(event.credit), self._instances.by_name.get(event.name), event.error
        if instance is None:
            return []
        if isinstance(error, ArenaFull):
            instance.refused_memory(now_s + self._arena_retry_s)
        elif isinstance(error, EngineFailure) and credit is not None:
            instance.engine_failed(credit.stage, now_s, self._limits.first_backoff_s, self._limits.longest_backoff_s)
        elif isinstance(error, Unavailable) and not isinstance(error, TransferFailed):
            return [*self._suspected(event.name, now_s), DescribeAgain(event.name)]
        return []

    def _encoded(self, number: int) -> None:
        credit = self._credits.get(number)
        if credit is None:
            return
        instance = self._instances.by_name[credit.name]
        instance.worked(credit.stage)
        if credit.content is not None:
            self._instances.remember(credit.content, instance)
        self._stop_work(number)

    def _embedding_gone(self, number: int) -> None:
        credit, hints = self._credits.get(number), self._instances.hints
        if credit is not None and credit.content is not None and hints.get(credit.content) == credit.name:
            del hints[credit.content]

    # --- credits -----------------------------------------------------------------------------------------------------

    def _wanted(self, event: CreditsWanted, now_s: float) -> list[ClusterEffect]:
        if any(waiting.wanted.request == event.request for waiting in self._waiting):
            raise ValueError(f"request {event.request} is waiting already")
        if not event.wait:
            outcome = self._assign(event, now_s)
            return [outcome if isinstance(outcome, Granted) else Refused(event.request, self._error(outcome))]
        if len(self._waiting) >= self._limits.max_waiting_requests:
            error = Overloaded(
                f"{len(self._waiting)} requests wait for an encoder, the limit is {self._limits.max_waiting_requests}",
                retry_after_s=self._retry_after_s,
            )
            return [Refused(event.request, error)]
        self._arrivals += 1
        turn = self._policies.ordering(
            priority=event.priority, deadline_s=event.deadline_s, arrived_s=now_s, arrival=self._arrivals
        )
        insort(self._waiting, _Waiting(event, now_s, turn), key=lambda waiting: waiting.turn)
        return []

    def _serve_waiting(self, now_s: float) -> list[ClusterEffect]:
        """Grant in queue order.

        A request that must wait for credits holds up those behind it, so that large requests are not starved. One that
        needs another encoder does not: no credit returned helps it.
        """
        effects: list[ClusterEffect] = []
        wakes: list[tuple[float, str]] = []
        index = 0
        while index < len(self._waiting):
            waiting = self._waiting[index]
            wanted, until_s = waiting.wanted, self._grace_until_s(waiting)
            known = wanted.request in self._unplaceable
            outcome = Shortage.NO_ENCODER if known else self._assign(wanted, now_s)
            if outcome is Shortage.NO_ENCODER and now_s < until_s:
                self._unplaceable.add(wanted.request)
                wakes.append((until_s, "no encoder within the grace"))
                index += 1
                continue
            if outcome is Shortage.NO_CREDIT:
                times = [at_s for one in self._instances.pools[ENCODE] for at_s in one.may_be_tried_s(Stage.ENCODE)]
                wakes += [(at_s, "an encoder leaves its backoff") for at_s in times if at_s > now_s]
                break
            effects.append(outcome if isinstance(outcome, Granted) else Refused(wanted.request, self._error(outcome)))
            del self._waiting[index]
            self._unplaceable.discard(wanted.request)
        return effects + (self._wake(*min(wakes)) if wakes else [])

    def _grace_until_s(self, waiting: _Waiting) -> float:
        """Counts from the loss of an encoder, however long the request has already waited."""
        return max(waiting.since_s, self._instances.encoder_lost_s) + self._limits.pool_grace_s

    def _assign(self, wanted: CreditsWanted, now_s: float) -> Granted | Shortage:
        choices = assign_items(
            self._instances.pool(ENCODE, now_s), wanted.wants, self._policies.encoder_routing, self._rng
        )
        if isinstance(choices, Shortage):
            return choices
        self._instances.turns[ENCODE] += 1
        content = {want.item: want.content for want in wanted.wants}
        grants = []
        for choice in choices:
            place = _Credit(choice.encoder, Stage.ENCODE, content[choice.item], choice.tokens, choice.nbytes)
            grants.append(self._grant(place, choice.item, choice.why.value))
        return Granted(wanted.request, tuple(grants))

    def _grant(self, credit: _Credit, item: int | None, reason: str) -> Grant:
        instance = self._instances.by_name[credit.name]
        if instance.info is None:
            raise AssertionError("a chosen instance has been described")
        self._next_credit += 1
        credit.report = instance.reports
        self._credits[self._next_credit] = credit
        instance.give(credit.stage, credit.tokens, credit.nbytes)
        return Grant(self._next_credit, item, credit.name, instance.info.instance_id, reason)

    def _stop_work(self, number: int) -> None:
        credit = self._credits.get(number)
        if credit is None or not credit.working:
            return
        credit.working = False
        self._instances.by_name[credit.name].work_ended(credit.stage, credit.tokens, credit.report)

    def _return(self, number: int, now_s: float) -> list[ClusterEffect]:
        self._stop_work(number)
        credit = self._credits.pop(number, None)
        if credit is None:
            return []
        instance = self._instances.by_name[credit.name]
        instance.take_back(credit.stage, credit.nbytes)
        return self._forget(credit.name, "has left", now_s) if instance.leaving and not instance.credits else []

    def _text_wanted(self, event: TextWanted, now_s: float) -> list[ClusterEffect]:
        chosen = choose_text(
            self._instances.pool(TEXT, now_s),
            self._policies.text_routing,
            self._rng,
            avoid=event.avoid,
            holders=event.holders,
        )
        if chosen is None:
            return [Refused(event.request, self._no_text())]
        self._instances.turns[TEXT] += 1
        place = _Credit(chosen.name, TEXT[0], None, event.tokens, 0)
        return [Granted(event.request, (self._grant(place, None, Why.ROUTED.value),))]

    def _check_text_pool(self, now_s: float) -> list[ClusterEffect]:
        """Send TextPoolLost once when no text instance has been usable for the whole grace period."""
        if self._instances.has_text:
            self._textless_s, self._text_lost = None, False
            return []
        if self._textless_s is None:
            self._textless_s = now_s
        if self._text_lost:
            return []
        if now_s < self._textless_s + self._limits.pool_grace_s:
            return self._wake(self._textless_s + self._limits.pool_grace_s, "no text instance within the grace")
        if self._instances.adopt_model():
            self._review(now_s)
            return self._check_text_pool(now_s) + self._serve_waiting(now_s)
        self._text_lost = True
        return [TextPoolLost(self._no_text())]

    def _no_text(self) -> TriptychError:
        return Unavailable("no text instance is available", retry_after_s=self._retry_after_s)

    def _wake(self, at_s: float, reason: str) -> list[ClusterEffect]:
        if self._wake_at_s is not None and self._wake_at_s <= at_s:
            return []
        self._wake_at_s = at_s
        return [WakeAt(at_s, reason)]

    def _error(self, shortage: Shortage) -> TriptychError:
        if shortage is Shortage.NEVER_FITS:
            arena_bytes = sum(one.info.arena_bytes for one in self._instances.pools[ENCODE] if one.info is not None)
            return InvalidRequest(
                f"the request's images are larger than the encoders' arenas of {arena_bytes} bytes", param="messages"
            )
        if shortage is Shortage.TOO_MANY_ITEMS:
            items = sum(one.info.max_items for one in self._instances.pools[ENCODE] if one.info is not None)
            return InvalidRequest(
                f"the request has more images, or parts of videos, than the {items} that the encoders take at once",
                param="messages",
            )
        if shortage is Shortage.NO_CREDIT:
            return ArenaFull("the encoders' arenas are full", retry_after_s=self._retry_after_s)
        return Unavailable("no encoder is available", retry_after_s=self._retry_after_s)
