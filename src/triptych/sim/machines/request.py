"""One request at the router: performs its machine's effects and feeds the results back, as the services' ``RequestTask`` does."""

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.encoding import EncodeResult
from triptych.domain.generation import Finished, Ready
from triptych.domain.item_plan import ItemPlan
from triptych.domain.kv_segment import SealedSegment
from triptych.domain.timeline import Timeline
from triptych.errors import TriptychError
from triptych.machine.router.request import RequestMachine, RequestPhase
from triptych.machine.router.request_events import (
    Abort,
    After,
    AnswerTransferred,
    Encode,
    End,
    Generate,
    Renew,
    Renewed,
    RequestEffect,
    RequestEvent,
    Resolved,
    TextReported,
)
from triptych.machine.router.shared_events import CallFailed, FirstToken, ItemEncoded, Release

from .encoder import EncodeCall, nobody
from .text import Caller as TextCaller
from .text import TextCall

if TYPE_CHECKING:
    from .router import SimRouter

_RESULTS = ItemEncoded | TextReported | FirstToken


class Caller(Protocol):
    """Whoever has sent a request. It learns at once what comes."""

    def token(self) -> None:
        """The first one."""
        ...

    def ended(self, error: TriptychError | None) -> None:
        """It has the whole answer, or its error."""
        ...

    def timed_out(self) -> None:
        """It waits no longer."""
        ...


class _Renewal:
    """A call for leases, one after the other, up to the first that is refused."""

    def __init__(self, renew: Renew, sent_s: float) -> None:
        self.renew = renew
        self.sent_s = sent_s
        self.tickets: list[Ticket] = []
        self.is_over = False

    def end(self) -> None:
        self.is_over = True


_Call = EncodeCall | TextCall | _Renewal


class SimRequest:
    """A request that runs. It has what ``services.router.attainment`` asks of one."""

    __slots__ = (
        "_calls",
        "_events",
        "_feeding",
        "_router",
        "caller",
        "machine",
        "number",
        "output_tokens",
        "prompt_tokens",
        "running",
        "tokens",
    )

    def __init__(
        self,
        number: int,
        router: "SimRouter",
        caller: Caller,
        prompt_tokens: int,
        output_tokens: int,
    ) -> None:
        """``output_tokens``: of the answer, which is as long as it may be."""
        self.number = number
        self.machine: RequestMachine
        """Set before anything else."""
        self.caller = caller
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.tokens = 0
        """Of the answer, so far; those after the first message, when it has ended."""
        self.running = 0
        """Calls that are not over."""
        self._router = router
        self._events: deque[RequestEvent] = deque()
        self._feeding = False
        self._calls: dict[int, _Call] = {}
        """By credit: those that the machine may abort."""

    @property
    def text_instance(self) -> str:
        """Id of the text instance chosen last."""
        return self.machine.text_instance

    @property
    def has_ended(self) -> bool:
        return self.machine.phase.has_ended

    def timeline(self) -> Timeline:
        return self.machine.timeline(self._router.agenda.now_s, self.tokens)

    def feed(self, event: RequestEvent) -> None:
        """An event: to the cluster, if it is a result of a call; then to the request's machine; then to the listeners."""
        if isinstance(event, _RESULTS):
            self._router.feed(event)
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        router, events = self._router, self._events
        while events:
            event = events.popleft()
            if effects := self.machine.handle(event, router.agenda.now_s):
                self._apply(effects)
            if isinstance(event, FirstToken):
                router.answering(self)
        self._feeding = False

    def _apply(self, effects: list[RequestEffect]) -> None:  # noqa: C901, PLR0912 - one dispatch
        router, agenda = self._router, self._router.agenda
        releases: dict[str, list[Release]] = {}
        for effect in effects:
            match effect:
                case Encode():
                    call = self._encode(effect)
                    self._begin(effect.credit, call)
                    agenda.soon(router.send_encode, self, effect, call)
                case Generate():
                    text_call = router.text_call(self, effect)
                    self._begin(effect.credit, text_call)
                    agenda.soon(router.send_text, self, effect, text_call)
                case Renew():
                    renewal = _Renewal(effect, agenda.now_s)
                    self.running += 1
                    if not effect.extends:
                        self._calls[effect.credit] = renewal
                    agenda.soon(self._renew, renewal)
                case Abort(credit):
                    if (running := self._calls.get(credit)) is not None:
                        self._cancel(credit, running)
                case Release(name):
                    releases.setdefault(name, []).append(effect)
                case After(delay_s, event):
                    agenda.after(delay_s, self._feed_if_running, event)
                case End(error):
                    agenda.soon(self._over, error)
                case Resolved():
                    raise AssertionError("a simulated request is a chat")
                case _:
                    router.feed(effect)
        for name, group in releases.items():
            lease_ids: list[LeaseId] = []
            credits_: list[int] = []
            for release in group:
                lease_ids += release.lease_ids
                if release.credit is not None:
                    credits_.append(release.credit)
            router.release(name, tuple(lease_ids), tuple(credits_))

    def _feed_if_running(self, event: RequestEvent) -> None:
        if not self.machine.phase.has_ended:
            self.feed(event)

    def _over(self, error: TriptychError | None) -> None:
        """The machine has ended: calls that still run are cancelled, unless they are the end of the answer."""
        self.caller.ended(error)
        if self.machine.phase is not RequestPhase.DONE:
            for credit, call in list(self._calls.items()):
                self._cancel(credit, call)
        self._end_if_idle()

    # --- calls -------------------------------------------------------------------------------------------------------

    def _begin(self, credit: int, call: _Call) -> None:
        self._calls[credit] = call
        self.running += 1

    def ended(self, credit: int, call: _Call) -> None:
        """A call is over."""
        if self._calls.get(credit) is call:
            del self._calls[credit]
        self.running -= 1
        self._end_if_idle()

    def call_of(self, credit: int) -> TextCall | None:
        call = self._calls.get(credit)
        return call if isinstance(call, TextCall) else None

    def _end_if_idle(self) -> None:
        if self.machine.phase.has_ended and not self.running:
            self._router.agenda.soon(self._router.over, self)

    def _cancel(self, credit: int, call: _Call) -> None:
        """It goes no further, and its instance learns of it at once."""
        if not call.is_over:
            call.end()
            self._router.agenda.soon(self._cancelled, credit, call)

    def _cancelled(self, credit: int, call: _Call) -> None:
        if not isinstance(call, _Renewal):
            self._router.cancel(call)
        if isinstance(call, TextCall):
            self.text_ended(credit, call)
        else:
            self.ended(credit, call)

    def _encode(self, effect: Encode) -> EncodeCall:
        router = self._router
        plan: ItemPlan = effect.plan
        call = EncodeCall(
            effect.name,
            plan,
            router.left_s(self),
            effect.lease_s,
            effect.reader_lease,
            effect.router_lease,
            0,
            effect.queue_position.relative(router.agenda.now_s),
            nobody,
        )
        call.answered = partial(self._encoded, effect, call)
        return call

    def _encoded(self, effect: Encode, call: EncodeCall, answer: EncodeResult | TriptychError) -> None:
        """At the encoder. Errors come at once, as links bring them."""
        if isinstance(answer, TriptychError):
            self._got(effect, call, answer)
        else:
            self._router.agenda.after(self._router.control_s, self._got, effect, call, answer)

    def _got(self, effect: Encode, call: EncodeCall, answer: EncodeResult | TriptychError) -> None:
        if call.is_over:
            return
        call.end()
        if isinstance(answer, TriptychError):
            self.failed(effect.credit, effect.name, answer)
        else:
            self.feed(ItemEncoded(effect.credit, effect.name, answer))
        self.ended(effect.credit, call)

    def failed(self, credit: int, name: str, error: TriptychError) -> None:
        event = CallFailed(credit, name, error, self._router.machine.instances.drains(name))
        self._router.feed(event)
        self.feed(event)

    def _renew(self, renewal: _Renewal) -> None:
        """Request the next lease."""
        if not renewal.is_over:
            self._router.agenda.after(self._router.control_s, self._at_holder, renewal)

    def _at_holder(self, renewal: _Renewal) -> None:
        if renewal.is_over:
            return
        renew, place = renewal.renew, len(renewal.tickets)
        known, arena = renew.tickets[place], self._router.arena(renew.name)
        try:
            ticket = arena.grant(known.key, renew.lease_ids[place], renew.lease_s, known.generation)
        except TriptychError as error:
            self._renewed(renewal, error)
            return
        self._router.agenda.after(self._router.control_s, self._renewed_one, renewal, ticket)

    def _renewed_one(self, renewal: _Renewal, ticket: Ticket) -> None:
        if renewal.is_over:
            return
        renewal.tickets.append(ticket)
        if len(renewal.tickets) < len(renewal.renew.tickets):
            self._router.agenda.after(self._router.control_s, self._at_holder, renewal)
        else:
            self._renewed(renewal, None)

    def _renewed(self, renewal: _Renewal, error: TriptychError | None) -> None:
        renew = renewal.renew
        renewal.end()
        if error is not None:
            self._router.feed(CallFailed(renew.credit, renew.name, error))
        self.feed(Renewed(renew, renewal.sent_s, tuple(renewal.tickets), error))
        self.ended(renew.credit, renewal)

    def answer(self, effect: Generate) -> TextCaller:
        """What takes the answer to a call."""
        return _Answer(effect, self)

    def text_ended(self, credit: int, call: TextCall | None) -> None:
        agenda = self._router.agenda
        if call is not None:
            agenda.soon(self.ended, credit, call)
        agenda.soon(self._router.returned, credit)


class _Answer(TextCaller):
    """Takes the answer of one call."""

    def __init__(self, effect: Generate, request: SimRequest) -> None:
        self._credit = effect.credit
        self._name = effect.name
        self._request = request
        self._began = False

    def ready(self, ready: Ready) -> None:
        self._request.feed(TextReported(self._credit, ready))

    def tokens(self, count: int, finished: Finished | None) -> None:
        request = self._request
        if not self._began:
            self._began = True
            request.feed(FirstToken(self._credit))
        if not request.tokens:
            request.caller.token()
        request.tokens += count
        if finished is not None:
            request.feed(TextReported(self._credit, finished))

    def transferred(self, segments: tuple[SealedSegment, ...], prefill_s: float) -> None:
        self._request.feed(AnswerTransferred(self._credit, self._name, segments, prefill_s))

    def over(self) -> None:
        self._request.text_ended(self._credit, self._request.call_of(self._credit))

    def failed(self, error: TriptychError) -> None:
        call = self._request.call_of(self._credit)
        self._request.failed(self._credit, self._name, error)
        self._request.text_ended(self._credit, call)
