"""The router's memory of its instances: who is there, how loaded they are, and what the router itself has given them.

Load reports lag behind, so everything the router has assigned since the last one is added to it: a burst between two
reports spreads as it should (ModServe section 4.3). Arena bytes are handed out as *credits*, for all items of a
request at once or not at all; a request that cannot have them waits in a bounded queue, first come, first served
within its priority, and holds nothing meanwhile: no hold-and-wait.
"""

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from triptych.domain.instance import EncoderLoad, InstanceInfo, ModelInfo, TextLoad
from triptych.domain.item_plan import Content
from triptych.domain.stage import Stage
from triptych.domain.timeline import Readiness
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
    AskAgain,
    ClusterEffect,
    ClusterEvent,
    InstanceSeen,
    InstanceSuspected,
    LoadReported,
    Noticed,
    Tick,
    WakeAt,
)
from triptych.machine.router.instance import Instance, InstanceState
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
from triptych.policy.routing import (
    ClusterView,
    Shortage,
    assign_items,
    choose_text,
)


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    max_waiting: int
    """Requests that wait for credits."""
    max_hints: int
    """Embeddings whose encoder is remembered."""
    grace_s: float
    """How long a request waits for a pool that has no instance."""
    full_s: float
    """For how long an encoder that refused for want of memory is left alone."""
    retry_after_s: float
    first_backoff_s: float
    """For how long an instance whose engine failed is avoided; it doubles with each further failure ..."""
    longest_backoff_s: float
    """... up to this, until it does something right."""


@dataclass(slots=True)
class _Credit:
    name: str
    content: Content | None
    """Of the item; None for a place at a text instance."""
    tokens: int
    nbytes: int
    report: int
    """Number of the instance's last report when the credit was given."""
    working: bool = True


@dataclass(frozen=True, slots=True)
class _Waiting:
    wanted: CreditsWanted
    since_s: float


class ClusterMachine:
    """Single owner of membership, load and credits as this router sees them. ``handle`` is the only mutator."""

    def __init__(
        self,
        encoders: Iterable[str],
        texts: Iterable[str],
        limits: ClusterLimits,
        *,
        hybrids: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``hybrids`` are instances that are in both pools: what each is called as an encoder, and as a text instance."""
        self._limits = limits
        self._partners = {**hybrids, **{text: encoder for encoder, text in hybrids.items()}}
        self._encoders = {name: Instance(name, Stage.ENCODE) for name in sorted(encoders)}
        self._texts = {name: Instance(name, Stage.DECODE) for name in sorted(texts)}
        self._instances = {**self._encoders, **self._texts}
        if len(self._instances) != len(self._encoders) + len(self._texts):
            raise ValueError("an encoder and a text instance have the same name")
        self._model: ModelInfo | None = None
        self._credits: dict[int, _Credit] = {}
        self._next_credit = 0
        self._waiting: list[_Waiting] = []
        """In the order in which they are served."""
        self._hints: OrderedDict[Content, str] = OrderedDict()
        self._encoder_turn = self._text_turn = 0
        self._wake_at_s: float | None = None
        self._textless_s: float | None = None
        self._text_lost = False
        self._ready_encoders: frozenset[str] = frozenset()
        self._encoder_lost_s = float("-inf")
        self._has_text = False

    # --- what it knows -----------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo | None:
        """The model that the instances serve; None before the first was seen."""
        return self._model

    @property
    def kv_tokens(self) -> int:
        """Most tokens that any usable text instance keeps for one request; 0 where one does not say, or there is none."""
        kept = [text.info.kv_tokens for text in self._texts.values() if text.info is not None and text.usable]
        return max(kept, default=0) if all(kept) else 0

    @property
    def waiting(self) -> int:
        """Requests that wait for credits."""
        return len(self._waiting)

    @property
    def outstanding(self) -> int:
        """Credits, of items and of dispatches, that have not come back."""
        return len(self._credits)

    @property
    def text_lost(self) -> bool:
        """Whether there has been no text instance for the whole grace, and everyone was told."""
        return self._text_lost

    def info(self, name: str) -> InstanceInfo | None:
        """What the instance last said of itself."""
        return self._instances[name].info

    def snapshot(self, now_s: float) -> ClusterView:
        """All instances as the policies see them."""
        return ClusterView(
            encoders=tuple(encoder.encoder_view(now_s) for encoder in self._encoders.values()),
            texts=tuple(text.text_view(now_s) for text in self._texts.values()),
            encoder_turn=self._encoder_turn,
            text_turn=self._text_turn,
            held=MappingProxyType(self._hints),
        )

    def states(self) -> dict[tuple[Stage, str], int]:
        """How many instances are asked for each stage (of a text instance: decode) and in which state they are."""
        return dict(Counter((instance.stage, instance.state) for instance in self._instances.values()))

    def readiness(self) -> Readiness:
        """Whether every stage has a usable instance; an instance that serves another model says so in its line.

        One that is in both pools has one line, which says ready when it is so in both.
        """
        states: dict[tuple[str, int], InstanceState] = {}
        for instance in self._instances.values():
            if (info := instance.info) is not None:
                whose = info.instance_id, info.epoch
                partner = self._partners.get(instance.name)
                if partner is not None and self._instances[partner].info is None:
                    states[whose] = InstanceState.NOT_SEEN
                elif states.get(whose, InstanceState.READY) is InstanceState.READY:
                    states[whose] = instance.state
        lines = tuple(f"{instance_id}: {state}" for (instance_id, _), state in states.items())
        missing: list[str] = []
        if not self._ready_encoders:
            missing.append(Stage.ENCODE.value)
        if not self._has_text:
            missing += [Stage.PREFILL.value, Stage.DECODE.value]
        return Readiness(ready=not missing, missing=tuple(missing), instances=lines)

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        for instance in self._instances.values():
            own = [credit for credit in self._credits.values() if credit.name == instance.name]
            working = [credit for credit in own if credit.working]
            assert instance.own_tokens == sum(credit.tokens for credit in working), f"{instance.name}: tokens"  # noqa: S101
            assert instance.own_items == len(working), f"{instance.name}: items"  # noqa: S101
            assert instance.own_bytes == sum(credit.nbytes for credit in own), f"{instance.name}: bytes"  # noqa: S101
            assert instance.state == instance.state_under(self._model), f"{instance.name}: state"  # noqa: S101
        assert len(self._waiting) <= self._limits.max_waiting, "queue above its bound"  # noqa: S101
        assert len(self._hints) <= self._limits.max_hints, "hints above their bound"  # noqa: S101

    # --- what happens ------------------------------------------------------------------------------------------------

    def handle(self, event: ClusterEvent, now_s: float) -> list[ClusterEffect]:
        """Take one event in and say what is to be done. Events about what is gone already change nothing."""
        return self._handle(event, now_s) + self._mind_texts(now_s)

    def _handle(self, event: ClusterEvent, now_s: float) -> list[ClusterEffect]:  # noqa: C901, PLR0912 - one dispatch
        match event:
            case InstanceSeen(name, info):
                return self._seen(self._instances[name], info, now_s) + self._serve_waiting(now_s)
            case LoadReported(name, load):
                self._reported(self._instances[name], load, now_s)
            case InstanceSuspected(name):
                return self._suspected(self._instances[name], now_s) + self._serve_waiting(now_s)
            case CreditsWanted():
                return self._wanted(event, now_s)
            case CreditsAbandoned(request):
                self._waiting = [waiting for waiting in self._waiting if waiting.wanted.request != request]
            case TextWanted():
                return self._text_wanted(event, now_s)
            case ItemEncoded(credit, name):
                self._instances[name].worked()
                self._remember(credit)
                self._stop_work(credit)
            case CallFailed(credit, name, error):
                self._stop_work(credit)
                return self._failed(self._instances[name], error, now_s) + self._serve_waiting(now_s)
            case FirstToken(credit):
                if (placed := self._credits.get(credit)) is not None:
                    self._instances[placed.name].worked()
            case EmbeddingGone(credit):
                self._forget(credit)
            case CreditReturned(credit):
                self._return(credit)
            case Tick():
                self._wake_at_s = None
        return self._serve_waiting(now_s)

    def _seen(self, instance: Instance, info: InstanceInfo, now_s: float) -> list[ClusterEffect]:
        restarted = instance.info is not None and instance.info.epoch != info.epoch
        if restarted:
            for content in [content for content, name in self._hints.items() if name == instance.name]:
                del self._hints[content]
            instance.load, instance.full_until_s = None, float("-inf")
            instance.worked()
        instance.info, instance.reachable = info, True
        followed = [other for other in self._instances.values() if other is not instance and other.reachable]
        if not any(other.info is not None and other.info.model == self._model for other in followed):
            # Nobody serves the model known so far any more: what is there now is the model.
            self._model = info.model
        self._review(now_s)
        return [Noticed(instance.name, f"restarted, {instance.state}" if restarted else instance.state)]

    def _reported(self, instance: Instance, load: EncoderLoad | TextLoad, now_s: float) -> None:
        if instance.info is None:
            return  # a report is of the process that was seen
        instance.reported(load)
        if instance.state is not instance.state_under(self._model):
            self._review(now_s)

    def _suspected(self, instance: Instance, now_s: float) -> list[ClusterEffect]:
        if not instance.reachable:
            return []
        instance.reachable = False
        self._review(now_s)
        return [Noticed(instance.name, instance.state)]

    def _failed(self, instance: Instance, error: TriptychError, now_s: float) -> list[ClusterEffect]:
        """What a failed call says of its instance: full, its engine at fault, or down until it is seen again."""
        if isinstance(error, ArenaFull) and instance.stage is Stage.ENCODE:
            instance.full_until_s = now_s + self._limits.full_s
        elif isinstance(error, EngineFailure):
            instance.engine_failed(now_s, self._limits.first_backoff_s, self._limits.longest_backoff_s)
        elif isinstance(error, Unavailable) and not isinstance(error, TransferFailed):
            return [*self._suspected(instance, now_s), AskAgain(instance.name)]
        return []

    def _remember(self, number: int) -> None:
        credit = self._credits.get(number)
        if credit is None or credit.content is None:
            return
        self._hints[credit.content] = credit.name
        self._hints.move_to_end(credit.content)
        while len(self._hints) > self._limits.max_hints:
            self._hints.popitem(last=False)

    def _forget(self, number: int) -> None:
        credit = self._credits.get(number)
        if credit is not None and credit.content is not None and self._hints.get(credit.content) == credit.name:
            del self._hints[credit.content]

    def _review(self, now_s: float) -> None:
        """Where one instance changed, the model may have, and with it all states. No other event looks at them all."""
        for instance in self._instances.values():
            instance.state = instance.state_under(self._model)
        ready = frozenset(name for name, encoder in self._encoders.items() if encoder.usable)
        if not self._ready_encoders <= ready:
            self._encoder_lost_s = now_s
        self._ready_encoders = ready
        self._has_text = any(text.usable for text in self._texts.values())

    # --- credits -----------------------------------------------------------------------------------------------------

    def _wanted(self, event: CreditsWanted, now_s: float) -> list[ClusterEffect]:
        if any(waiting.wanted.request == event.request for waiting in self._waiting):
            raise ValueError(f"request {event.request} waits already")
        if not event.wait:
            outcome = self._assign(event, now_s)
            return [outcome if isinstance(outcome, Granted) else Refused(event.request, self._error(outcome))]
        if len(self._waiting) >= self._limits.max_waiting:
            error = Overloaded(
                f"{len(self._waiting)} requests wait for an encoder, the limit is {self._limits.max_waiting}",
                retry_after_s=self._limits.retry_after_s,
            )
            return [Refused(event.request, error)]
        insort(self._waiting, _Waiting(event, now_s), key=lambda waiting: waiting.wanted.priority)
        return self._serve_waiting(now_s)

    def _serve_waiting(self, now_s: float) -> list[ClusterEffect]:
        """Grant from the head on; a head that has to wait stops all behind it, so that large requests get a turn."""
        effects: list[ClusterEffect] = []
        while self._waiting:
            head = self._waiting[0]
            outcome = self._assign(head.wanted, now_s)
            if isinstance(outcome, Granted):
                effects.append(outcome)
            elif outcome is Shortage.NO_CREDIT:
                times = [at_s for e in self._encoders.values() for at_s in (e.full_until_s, e.backoff_until_s)]
                full = [at_s for at_s in times if at_s > now_s]
                return effects + (self._wake(min(full), "an encoder that refused may be tried again") if full else [])
            elif outcome is Shortage.NO_ENCODER and now_s < (until_s := self._grace_until_s(head)):
                return effects + self._wake(until_s, "no encoder within the grace")
            else:
                effects.append(Refused(head.wanted.request, self._error(outcome)))
            del self._waiting[0]
        return effects

    def _grace_until_s(self, waiting: _Waiting) -> float:
        """Counted from when an encoder was lost, however long the request had waited for its turn before."""
        return max(waiting.since_s, self._encoder_lost_s) + self._limits.grace_s

    def _assign(self, wanted: CreditsWanted, now_s: float) -> Granted | Shortage:
        choices = assign_items(self.snapshot(now_s), wanted.wants)
        if isinstance(choices, Shortage):
            return choices
        self._encoder_turn += 1
        content = {want.item: want.content for want in wanted.wants}
        grants = tuple(
            self._grant(
                self._encoders[choice.encoder],
                choice.item,
                content[choice.item],
                choice.tokens,
                choice.nbytes,
                choice.why.value,
            )
            for choice in choices
        )
        return Granted(wanted.request, grants)

    def _grant(
        self, instance: Instance, item: int | None, content: Content | None, tokens: int, nbytes: int, reason: str
    ) -> Grant:
        if instance.info is None:
            raise AssertionError("an instance that was chosen has been seen")
        self._next_credit += 1
        self._credits[self._next_credit] = _Credit(instance.name, content, tokens, nbytes, instance.reports)
        instance.own_tokens += tokens
        instance.own_items += 1
        instance.own_bytes += nbytes
        instance.new_tokens += tokens
        instance.new_items += 1
        instance.new_bytes += nbytes
        return Grant(self._next_credit, item, instance.name, instance.info.instance_id, reason)

    def _stop_work(self, number: int) -> None:
        credit = self._credits.get(number)
        if credit is None or not credit.working:
            return
        credit.working = False
        instance = self._instances[credit.name]
        instance.own_tokens -= credit.tokens
        instance.own_items -= 1
        # A text instance's report shrinks token by token: what it still counted of this dispatch is not known.
        if instance.stage is Stage.ENCODE or credit.report == instance.reports:
            instance.new_tokens -= credit.tokens
            instance.new_items -= 1

    def _return(self, number: int) -> None:
        self._stop_work(number)
        credit = self._credits.pop(number, None)
        if credit is None:
            return
        instance = self._instances[credit.name]
        instance.own_bytes -= credit.nbytes
        instance.new_bytes -= credit.nbytes

    def _text_wanted(self, event: TextWanted, now_s: float) -> list[ClusterEffect]:
        pool = ClusterView(
            texts=tuple(text.text_view(now_s) for text in self._texts.values()), text_turn=self._text_turn
        )
        name = choose_text(pool, avoid=event.avoid, holders=event.holders)
        if name is None:
            return [Refused(event.request, self._no_text())]
        self._text_turn += 1
        grant = self._grant(self._texts[name], None, None, event.tokens, 0, "least pending tokens")
        return [Granted(event.request, (grant,))]

    def _mind_texts(self, now_s: float) -> list[ClusterEffect]:
        """Tell everyone, once, when there has been no text instance for the whole grace."""
        if self._has_text:
            self._textless_s, self._text_lost = None, False
            return []
        if self._textless_s is None:
            self._textless_s = now_s
        if self._text_lost:
            return []
        if now_s < self._textless_s + self._limits.grace_s:
            return self._wake(self._textless_s + self._limits.grace_s, "no text instance within the grace")
        self._text_lost = True
        return [TextPoolLost(self._no_text())]

    def _no_text(self) -> TriptychError:
        return Unavailable("no text instance is available", retry_after_s=self._limits.retry_after_s)

    def _wake(self, at_s: float, reason: str) -> list[ClusterEffect]:
        if self._wake_at_s is not None and self._wake_at_s <= at_s:
            return []
        self._wake_at_s = at_s
        return [WakeAt(at_s, reason)]

    def _error(self, shortage: Shortage) -> TriptychError:
        if shortage is Shortage.NEVER_FITS:
            arena_bytes = sum(encoder.info.arena_bytes for encoder in self._encoders.values() if encoder.info)
            return InvalidRequest(
                f"the request's images are larger than the encoders' arenas of {arena_bytes} bytes", param="messages"
            )
        if shortage is Shortage.NO_CREDIT:
            return ArenaFull("the encoders' arenas are full", retry_after_s=self._limits.retry_after_s)
        return Unavailable("no encoder is available", retry_after_s=self._limits.retry_after_s)
