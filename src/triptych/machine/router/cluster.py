"""The router's state of its instances: membership, load, and the credits that it has granted.

Members join and leave at any time. A leaving member gets no new work and is forgotten once nothing is held there: neither
credits nor leases. One that has left is forgotten at once, with all that is held there; so is a leaving one without calls
that has not been reached for a while, as nothing can be released there. Events about forgotten members are ignored.

Load reports lag, so everything that the router has assigned since the last report is added: bursts between two reports
spread evenly (ModServe section 4.3). Arena bytes are granted as *credits*, for all items of a request at once or for
none. Until then a request waits in a bounded queue, ordered by the policies, and holds nothing (no hold-and-wait).
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from math import inf

from triptych.domain.generation import Ready
from triptych.domain.instance import InstanceInfo, InstanceLoad
from triptych.domain.membership import Member
from triptych.domain.rng import Rng
from triptych.domain.stage import Stage
from triptych.errors import (
    ArenaFull,
    EngineFailure,
    InternalError,
    InvalidRequest,
    Overloaded,
    StageClosed,
    TransferFailed,
    TriptychError,
    Unavailable,
)
from triptych.machine.router.backlogs import Backlogs, CostsOf
from triptych.machine.router.budget import Budget
from triptych.machine.router.cluster_events import (
    ClusterEffect,
    ClusterEvent,
    ClusterTick,
    Connect,
    DescribeAgain,
    Disconnect,
    InstanceSeen,
    InstanceSuspected,
    KeyGone,
    KeysTold,
    LoadReported,
    Logged,
    MemberJoined,
    MemberLeaving,
    MemberLeft,
    WakeAt,
    WatchAgain,
)
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.machine.router.credit_ledger import Credit, CreditLedger
from triptych.machine.router.encode_times import EncodeTimes
from triptych.machine.router.health import BackoffReason
from triptych.machine.router.instance import Instance
from triptych.machine.router.instances import ENCODE, Instances
from triptych.machine.router.lenders import LendingCounts
from triptych.machine.router.pool_health import PoolHealth
from triptych.machine.router.relative_times import RelativeTimes
from triptych.machine.router.request_events import TextReported
from triptych.machine.router.shared_events import (
    CallFailed,
    CreditReturned,
    CreditsAbandoned,
    CreditsWanted,
    EmbeddingGone,
    EmbeddingsRead,
    FirstToken,
    Grant,
    Granted,
    HedgeWanted,
    ItemEncoded,
    LeasesReturned,
    LeasesTaken,
    Overtaken,
    PlaceRefused,
    TextPoolLost,
    TextWanted,
)
from triptych.machine.router.text_places import TextPlaces, no_lora
from triptych.machine.router.waiting_requests import Waiting, WaitingRequests
from triptych.policy.placement.items import Choice, Shortage, Why, place_hedge, place_items
from triptych.policy.placement.wants import Want
from triptych.policy.policies import Policies

_ENGINE_ERRORS: Mapping[Stage, type[TriptychError]] = {
    Stage.ENCODE: InternalError,  # whatever it is, another encoder may do better
    Stage.PREFILL: EngineFailure,
    Stage.DECODE: EngineFailure,
}
_MAKES_KV_ROOM = (
    LoadReported
    | CreditReturned
    | LeasesReturned
    | InstanceSeen
    | InstanceSuspected
    | CallFailed
    | MemberJoined
    | MemberLeaving
    | MemberLeft
    | CreditsAbandoned
    | FirstToken
)
"""Events after which a prompt may no longer wait for KV memory."""
_MOVES_TEXT = LoadReported | ItemEncoded | CreditReturned | LeasesReturned
"""Events after which requests that wait may better do so elsewhere."""
_MAX_SAVED_HEDGES = 50.0
_BY_HINT = (Why.HOLDS_EMBEDDING, Why.ENCODES_ALREADY)


class ClusterMachine:
    """Owner of membership, load and credits as this router sees them. ``handle`` is the only mutator."""

    def __init__(
        self,
        limits: ClusterLimits,
        policies: Policies,
        rng: Rng,
        *,
        arena_retry_s: float,
        retry_after_s: float,
        costs: CostsOf = lambda _: None,
        max_keys: int = 0,
    ) -> None:
        """An encoder whose arena is full gets no items for ``arena_retry_s``. Refusals carry ``retry_after_s``.

        ``costs`` are those of profiles, for policies that predict, or compare costs. The slots of ``max_keys`` keys are remembered, those that
        callers were told or have read last.
        """
        self._limits = limits
        self._arena_retry_s = arena_retry_s
        self._retry_after_s = retry_after_s
        self._policies = policies
        self._rng = rng
        encode_times, text_times = EncodeTimes(), RelativeTimes()
        self._lends = policies.lending is not None
        self._backlogs = Backlogs(costs, encode_times, text_times, self._lends) if policies.predict else None
        self.instances = Instances(limits.max_embedding_hints, self._backlogs, max_keys)
        """For reading."""
        self._credits = CreditLedger(self.instances)
        self._texts = TextPlaces(
            self.instances,
            self._credits,
            policies,
            rng,
            limits=limits,
            retry_after_s=retry_after_s,
            costs=costs,
        )
        self.expected_output = self._texts.expected
        """For reading: the tokens that answers will have."""
        self._retries = Budget(limits.retry_share, limits.retry_burst, limits.retry_burst)
        self._hedges = Budget(limits.hedge_share, _MAX_SAVED_HEDGES, 0.0)
        self._health = PoolHealth(self.instances, limits, encode_times)
        self._waiting: WaitingRequests[CreditsWanted] = WaitingRequests()
        self._wake_at_s: float | None = None
        self._textless_s: float | None = None
        self._text_lost = False

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that wait for credits."""
        return len(self._waiting.in_order)

    @property
    def waiting_for_kv(self) -> int:
        """Requests that wait for KV memory where their answers go on."""
        return len(self._texts.waiting.in_order)

    @property
    def lending(self) -> LendingCounts:
        return self._texts.lending

    def longest_waits_s(self, now_s: float) -> dict[int, float]:
        """By priority, for how long the first of the requests that wait for credits has waited (``policy.queueing``)."""
        return self._waiting.longest_s(now_s)

    @property
    def outstanding(self) -> int:
        """Number of credits, of items and of dispatches, not yet returned."""
        return len(self._credits.by_number)

    @property
    def leases(self) -> int:
        """Number of leases that no credit covers and that may be held."""
        return sum(map(len, self._credits.leases.values()))

    @property
    def credits(self) -> AbstractSet[int]:
        """The credits not yet returned."""
        return self._credits.by_number.keys()

    @property
    def retries_left(self) -> float:
        """Items that may be encoded again now."""
        return self._retries.left

    @property
    def text_lost(self) -> bool:
        """Whether no text instance has been usable for the whole grace period, and TextPoolLost was sent."""
        return self._text_lost

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        self.instances.validate()
        self._credits.validate()
        self._waiting.validate()
        self._texts.waiting.validate()
        assert len(self._waiting.in_order) <= self._limits.max_waiting_requests, "queue above its bound"

    # --- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: ClusterEvent, now_s: float) -> list[ClusterEffect]:  # noqa: C901, PLR0912, PLR0915 - one dispatch
        """Apply one event and return the effects. Events about what no longer exists are ignored."""
        effects: list[ClusterEffect] = []
        match event:
            case LoadReported(name, load):  # from the most frequent ones on
                effects = self._reported(name, load, now_s)
            case CreditReturned(credit):
                effects = self._return(credit, now_s)
            case CreditsWanted():
                effects = self._wanted(event, now_s)
            case ItemEncoded(credit, _, result):
                effects = self._encoded(credit, now_s, cached=result.cached)
            case TextWanted():
                effects = self._text_wanted(event, now_s)
            case TextReported():
                self._text_reported(event)
            case FirstToken(credit):
                self._answer_began(credit, now_s)
            case EmbeddingsRead(credits_):
                for credit in credits_:
                    if (placed := self._credits.by_number.get(credit)) is not None:
                        self._health.read(placed)
            case MemberJoined(member):
                effects = self._joined(member, now_s)
            case MemberLeaving(name):
                effects = self._leaving(name, now_s)
            case MemberLeft(name):
                effects = self._forget(name, "has left", now_s)
            case InstanceSeen(name, info):
                effects = self._seen(name, info, now_s)
            case KeysTold() | KeyGone():
                self._know_keys(event)
            case InstanceSuspected(name):
                effects = self._suspected(name, now_s)
            case CreditsAbandoned(request):
                self._waiting.remove(request)
                self._texts.waiting.remove(request)
            case CallFailed():
                effects = self._failed(event, now_s)
            case LeasesTaken(name, lease_ids):
                self._credits.take_leases(name, lease_ids)
                return []
            case LeasesReturned(name, lease_ids, credits_):
                self._credits.give_back_leases(name, lease_ids)
                for credit in credits_:
                    effects += self._return(credit, now_s)
                if (instance := self.instances.by_name.get(name)) is not None and instance.leaving:
                    effects += self._forget_if_over(instance, now_s)
                if not credits_ and not effects:
                    return []  # it makes no room
            case EmbeddingGone():
                effects = self._embedding_gone(event, now_s)
            case HedgeWanted():
                effects = self._hedge(event, now_s)
            case Overtaken(credit):
                if (placed := self._credits.by_number.get(credit)) is not None:
                    effects = self._health.overtaken(credit, placed, now_s)
            case ClusterTick():
                self._wake_at_s = None
                for instance in [known for known in self.instances.by_name.values() if known.leaving]:
                    effects += self._forget_if_over(instance, now_s)
        if self._waiting.in_order:
            effects += self._serve_waiting(now_s)
        if self._texts.waiting.in_order and isinstance(event, _MAKES_KV_ROOM):
            effects += self._texts.serve_waiting(now_s, lost=self._text_lost)
        if self._texts.lenders.states and isinstance(event, _MOVES_TEXT):
            effects += self._texts.move(now_s)
        if not self.instances.has_text or self._textless_s is not None:
            effects += self._check_text_pool(now_s)
        return effects

    # --- members -----------------------------------------------------------------------------------------------------

    def _joined(self, member: Member, now_s: float) -> list[ClusterEffect]:
        is_new = self.instances.join(member)
        self._review(now_s)
        return [Connect(member.address)] if is_new else []

    def _leaving(self, name: str, now_s: float) -> list[ClusterEffect]:
        instance = self.instances.by_name.get(name)
        if instance is None or instance.leaving:
            return []
        if not self._credits.holds(instance):
            return self._forget(name, "has left", now_s)
        self.instances.leave(instance)
        self._review(now_s)
        leases = len(self._credits.leases.get(name, ()))
        leaving = Logged(name, f"leaving, {instance.credits} credits and {leases} other leases in use")
        return [leaving, *self._forget_if_over(instance, now_s)]

    def _forget_if_over(self, instance: Instance, now_s: float) -> list[ClusterEffect]:
        """Forget a leaving instance at which nothing is held, or nothing that could still be released."""
        if not self._credits.holds(instance):
            return self._forget(instance.name, "has left", now_s)
        if instance.reachable or instance.calls:
            return []
        until_s = instance.lost_s + self._limits.lost_after_s
        if now_s < until_s:
            return self._wake(until_s, "a leaving instance may be reached again")
        return self._forget(instance.name, "is lost, with all that was held there", now_s)

    def _forget(self, name: str, what: str, now_s: float) -> list[ClusterEffect]:
        if not self.instances.forget(name):
            return []
        self._credits.forget(name)
        self._forget_times(name)
        self._review(now_s)
        return [Logged(name, what), Disconnect(name)]

    def _seen(self, name: str, info: InstanceInfo, now_s: float) -> list[ClusterEffect]:
        instance = self.instances.by_name.get(name)
        if instance is None:
            return []
        restarted = self.instances.see(instance, info)
        if restarted:
            self._forget_times(name)
        self._review(now_s)
        return [Logged(name, f"restarted, {instance.state}" if restarted else instance.state)]

    def _reported(self, name: str, load: InstanceLoad, now_s: float) -> list[ClusterEffect]:
        instance = self.instances.by_name.get(name)
        if instance is None or instance.info is None:
            return []
        decode = load.stages.get(Stage.DECODE)
        expected_tokens = None if decode is None else self._texts.expected_tokens(decode, load.at(Stage.PREFILL))
        if instance.reported(load, expected_tokens):
            self._review(now_s)
        hints = load.hints
        if hints is None or instance.leaving:
            return []
        return [WatchAgain(name)] if self.instances.directory.apply_hints(name, hints) else []

    def _know_keys(self, event: KeysTold | KeyGone) -> None:
        if isinstance(event, KeyGone):
            self.instances.directory.key_gone(event.key, event.slot)
            return
        for key, slot in event.slots.items():
            if slot.name in self.instances.by_name:
                self.instances.directory.told_key(key, slot)

    def _suspected(self, name: str, now_s: float) -> list[ClusterEffect]:
        instance = self.instances.by_name.get(name)
        if instance is None or not instance.reachable:
            return []
        instance.reachable, instance.lost_s = False, now_s
        self._review(now_s)
        lost = Logged(name, instance.state)
        return [lost, *self._forget_if_over(instance, now_s)] if instance.leaving else [lost]

    def _review(self, now_s: float) -> None:
        self.instances.review(now_s)
        self._waiting.encoders_changed()
        self._texts.review()

    # --- results of calls --------------------------------------------------------------------------------------------

    def _failed(self, event: CallFailed, now_s: float) -> list[ClusterEffect]:
        """What a failed call means for its instance: arena full, a failure, or suspected until described again."""
        self._credits.work_ended(event.credit)
        credit, instance, error = (
            self._credits.by_number.get(event.credit),
            self.instances.by_name.get(event.name),
            event.error,
        )
        if instance is None:
            return []
        if isinstance(error, ArenaFull):
            instance.refused_memory(now_s + self._arena_retry_s)
            return []
        if isinstance(error, StageClosed):
            return []  # it is well, and its next report says what it serves
        if isinstance(error, Unavailable) and not isinstance(error, TransferFailed):
            effects: list[ClusterEffect] = []
            if instance.reachable and credit is not None:  # one failure, however many calls broke with it
                effects = self._health.failed(instance, credit.stage, BackoffReason.CALLS, now_s)
            return [*effects, *self._suspected(event.name, now_s), DescribeAgain(event.name)]
        if credit is not None and isinstance(error, _ENGINE_ERRORS[credit.stage]):
            return self._health.failed(instance, credit.stage, BackoffReason.ENGINE, now_s)
        return []

    def _answer_began(self, number: int, now_s: float) -> None:
        """The prompt has been computed: it is no work any more. What is expected of the answer remains, to its end."""
        if self._lends:
            self._texts.lenders.gone(number)
        credit = self._credits.by_number.get(number)
        if credit is None:
            return
        self._credits.is_cleared(number)
        self._health.worked(credit)
        held_up = credit.early or credit.name in self._texts.lenders.states  # by items that are missing, or go first
        prefilled = credit.stage is Stage.PREFILL and credit.tokens and not held_up
        if self._backlogs is not None and credit.working and prefilled:
            self._backlogs.text_times.took(credit.name, credit.pending_tokens, now_s - credit.granted_s)
            self._backlogs.observed()
        if credit.working and credit.content is None:
            self._credits.prompt_computed(credit)

    def _text_reported(self, event: TextReported) -> None:
        """Note that an instance computes the prompt now, or that a choice is over."""
        if isinstance(event.what, Ready):
            if self._lends:
                self._texts.lenders.started(event.credit)
        elif (credit := self._credits.by_number.get(event.credit)) is not None:
            self._texts.answer_ended(credit, event.what)

    def _encoded(self, number: int, now_s: float, *, cached: bool) -> list[ClusterEffect]:
        credit = self._credits.by_number.get(number)
        if credit is None:
            return []
        self._health.worked(credit)
        self._retries.earn()
        if credit.working and credit.why in _BY_HINT:
            self.instances.directory.answered(encoding=credit.why is Why.ENCODES_ALREADY, cached=cached)
        if credit.content is not None and not self.instances.by_name[credit.name].leaving:
            self.instances.directory.remember(credit.content, credit.name)
        effects: list[ClusterEffect] = []
        if credit.working and not cached:
            self._hedges.earn()
            effects = self._health.encoded(number, credit, now_s)
            if self._backlogs is not None:
                self._backlogs.observed()
        self._credits.work_ended(number)
        return effects

    def _embedding_gone(self, event: EmbeddingGone, now_s: float) -> list[ClusterEffect]:
        credit = self._credits.by_number.get(event.credit)
        if credit is None:
            return []
        if credit.content is not None:
            self.instances.directory.gone(credit.content, credit.name)
        if not event.unusable:
            return []
        instance = self.instances.by_name[credit.name]
        return self._health.failed(instance, credit.stage, BackoffReason.EMBEDDINGS, now_s)

    # --- credits -----------------------------------------------------------------------------------------------------

    def _wanted(self, event: CreditsWanted, now_s: float) -> list[ClusterEffect]:
        waiting = self._waiting.in_order
        if waiting and any(waiting_request.wanted.request == event.request for waiting_request in waiting):
            raise ValueError(f"request {event.request} is waiting already")
        if event.suspect:
            self._credits.suspect(event.request)
        if event.again and not self._retries.has(len(event.wants)):
            return [PlaceRefused(event.request, self._too_many_retries(), final=True)]
        if event.wait and not waiting:
            outcome = self._assign(event, now_s)
            if isinstance(outcome, Granted):
                return [outcome]
        if not event.wait:
            outcome = self._assign(event, now_s)
            if not isinstance(outcome, Granted):
                return [PlaceRefused(event.request, self._error(outcome))]
            if event.again:
                self._retries.spend(len(event.wants))
            return [outcome]
        if len(waiting) >= self._limits.max_waiting_requests:
            error = Overloaded(
                f"{len(waiting)} requests wait for an encoder, the limit is {self._limits.max_waiting_requests}",
                retry_after_s=self._retry_after_s,
            )
            return [PlaceRefused(event.request, error)]
        self._waiting.add(event, now_s)
        return []

    def _serve_waiting(self, now_s: float) -> list[ClusterEffect]:
        """Grant in queue order.

        A request that must wait for credits holds up those behind it, so that large requests are not starved. One that
        needs another encoder does not: no credit returned helps it.
        """
        self._waiting.put_lost_back(now_s)
        effects: list[ClusterEffect] = []
        wakes: list[tuple[float, str]] = []
        for waiting in self._waiting.in_order.copy():
            wanted, until_s = waiting.wanted, self._grace_until_s(waiting)
            known = self._waiting.is_known_unplaceable(wanted.request)
            outcome = Shortage.NO_ENCODER if known else self._assign(wanted, now_s)
            if outcome is Shortage.NO_ENCODER and now_s < until_s:
                self._waiting.cannot_be_placed(wanted.request)
                wakes.append((until_s, "no encoder within the grace"))
                continue
            if outcome is Shortage.NO_CREDIT and wanted.suspect and self._has_room(wanted, now_s):
                continue  # kept apart from other suspects, for which nobody else waits
            if outcome is Shortage.NO_CREDIT:
                encoders = self.instances.pools[ENCODE].members.values()
                times = [at_s for encoder in encoders for at_s in encoder.may_be_tried_s(Stage.ENCODE)]
                wakes += [(at_s, "an encoder leaves its backoff") for at_s in times if at_s > now_s]
                break
            effects.append(
                outcome if isinstance(outcome, Granted) else PlaceRefused(wanted.request, self._error(outcome))
            )
            self._waiting.remove(wanted.request)
        return effects + (self._wake(*min(wakes)) if wakes else [])

    def _grace_until_s(self, waiting: Waiting[CreditsWanted]) -> float:
        """Counts from the loss of an encoder, however long the request has already waited."""
        return max(waiting.since_s, self.instances.encoder_lost_s) + self._limits.pool_grace_s

    def _assign(self, wanted: CreditsWanted, now_s: float) -> Granted | Shortage:
        wants = self._apart(wanted) if wanted.suspect else wanted.wants
        pool = self.instances.pool(ENCODE, now_s)
        choices = place_items(pool, wants, self._policies.encoder_routing, self._rng)
        if isinstance(choices, Shortage):
            is_kept_out = choices is Shortage.NO_ENCODER and wants != wanted.wants
            return Shortage.NO_CREDIT if is_kept_out else choices
        pool.turn += 1
        if len(choices) == 1:
            return Granted(wanted.request, (self._grant_item(wanted, choices[0], wants[0], now_s),))
        by_item = {want.item: want for want in wants}
        grants = [self._grant_item(wanted, choice, by_item[choice.item], now_s) for choice in choices]
        return Granted(wanted.request, tuple(grants))

    def _has_room(self, wanted: CreditsWanted, now_s: float) -> bool:
        """Whether it could be placed, if it were no suspect."""
        pool, routing = self.instances.pool(ENCODE, now_s), self._policies.encoder_routing
        return not isinstance(place_items(pool, wanted.wants, routing, self._rng), Shortage)

    def _apart(self, wanted: CreditsWanted) -> tuple[Want, ...]:
        """Not at encoders that may end with another request. Equal items may end one encoder together."""
        suspects = [credit for credit in self._credits.suspects.values() if credit.request != wanted.request]
        kept_out = [
            frozenset(credit.name for credit in suspects if credit.content != want.content) for want in wanted.wants
        ]
        return tuple(
            replace(want, exclude=want.exclude | names) if names else want
            for want, names in zip(wanted.wants, kept_out, strict=True)
        )

    def _grant_item(self, wanted: CreditsWanted, choice: Choice, want: Want, now_s: float) -> Grant:
        request, name, why = wanted.request, choice.encoder, choice.why
        place = Credit(request, name, Stage.ENCODE, want.content, choice.tokens, choice.nbytes, why=why)
        if choice.tokens:
            place.prepare_s = self._prepare_s(choice.encoder, want)
        hedge_after_s = self._health.times.tail_s(want.tokens) if self._limits.hedge_share else inf
        return self._credits.grant(place, choice.item, now_s, hedge_after_s, suspect=wanted.suspect)

    def _hedge(self, event: HedgeWanted, now_s: float) -> list[ClusterEffect]:
        """Grant it only where it holds up nobody: at an encoder without work, while no request waits for one."""
        if self._waiting.in_order or not self._hedges.has(1):
            return []
        want, pool = event.want, self.instances.pool(ENCODE, now_s)
        chosen = place_hedge(pool, want, self._policies.encoder_routing, self._rng)
        if chosen is None:
            return []
        encoder, tokens = chosen
        pool.turn += 1
        self._hedges.spend(1)
        place = Credit(event.request, encoder, Stage.ENCODE, want.content, tokens, want.nbytes, why=Why.HEDGE)
        place.prepare_s = self._prepare_s(encoder, want) if tokens else 0.0
        grant = self._credits.grant(place, want.item, now_s)
        return [Granted(event.request, (replace(grant, hedges=True),))]

    def _prepare_s(self, encoder: str, want: Want) -> float:
        return 0.0 if self._backlogs is None else self._backlogs.prepare_s(self.instances.by_name[encoder], want)

    def _forget_times(self, name: str) -> None:
        self._health.times.forget(name)
        if self._backlogs is not None:
            self._backlogs.text_times.forget(name)

    def _return(self, number: int, now_s: float) -> list[ClusterEffect]:
        if self._lends:
            self._texts.lenders.gone(number)
        if (credit := self._credits.give_back(number)) is None:
            return []
        instance = self.instances.by_name[credit.name]
        return self._forget_if_over(instance, now_s) if instance.leaving else []

    def _text_wanted(self, event: TextWanted, now_s: float) -> list[ClusterEffect]:
        effects: list[ClusterEffect] = []
        if event.kept_credit is not None:
            if (kept := self._texts.kept(event.kept_credit, event, now_s)) is not None:
                return [Granted(event.request, (kept,))]
            effects = self._return(event.kept_credit, now_s)
            event = replace(event, kept_credit=None)
        return [*effects, *self._texts.wanted(event, now_s, lost=self._text_lost)]

    def _check_text_pool(self, now_s: float) -> list[ClusterEffect]:
        """Send TextPoolLost once when no text instance has been usable for the whole grace period."""
        if self.instances.has_text:
            self._textless_s, self._text_lost = None, False
            return []
        if self._textless_s is None:
            self._textless_s = now_s
        if self._text_lost:
            return []
        if now_s < self._textless_s + self._limits.pool_grace_s:
            return self._wake(self._textless_s + self._limits.pool_grace_s, "no text instance within the grace")
        if self.instances.adopt_model():
            self._review(now_s)
            return self._check_text_pool(now_s) + self._serve_waiting(now_s)
        self._text_lost = True
        return [TextPoolLost(self._texts.no_text(), begun=not self.instances.goes_on)]

    def _too_many_retries(self) -> TriptychError:
        return Unavailable(
            f"encoders fail: no more than {self._limits.retry_share:.0%} of the items are encoded again",
            retry_after_s=self._retry_after_s,
        )

    def _wake(self, at_s: float, reason: str) -> list[ClusterEffect]:
        if self._wake_at_s is not None and self._wake_at_s <= at_s:
            return []
        self._wake_at_s = at_s
        return [WakeAt(at_s, reason)]

    def _error(self, shortage: Shortage) -> TriptychError:
        if shortage is Shortage.NEVER_FITS:
            arena_bytes = sum(encoder.arena_bytes for encoder in self._encoders())
            return InvalidRequest(
                f"the request's images are larger than the encoders' arenas of {arena_bytes} bytes", param="messages"
            )
        if shortage is Shortage.TOO_MANY_ITEMS:
            items = sum(encoder.max_items for encoder in self._encoders())
            return InvalidRequest(
                f"the request has more images, or parts of videos, than the {items} that the encoders take at once",
                param="messages",
            )
        if shortage is Shortage.NO_LORA:
            return no_lora()
        if shortage is Shortage.NO_CREDIT:
            return ArenaFull("the encoders' arenas are full", retry_after_s=self._retry_after_s)
        return Unavailable("no encoder is available", retry_after_s=self._retry_after_s)

    def _encoders(self) -> list[InstanceInfo]:
        members = self.instances.pools[ENCODE].members.values()
        return [member.info for member in members if member.info is not None]
