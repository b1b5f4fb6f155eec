"""One request at the router: performs its machine's effects and feeds the results back, as the services' ``RequestTask`` does."""

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol

from triptych.domain.embedding import Ticket
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
from triptych.machine.router.shared_events import CallFailed, FirstToken, ItemEncoded, Release, released_together

from .encoder import EncodeCall, nobody
from .text import TextCall, TextCaller

if TYPE_CHECKING:
    from .router import SimRouter

_RESULTS = (ItemEncoded, TextReported, FirstToken)


class Caller(Protocol):
    """The sender of a request. It learns at once what comes."""

    def token(self) -> None:
        """The first one."""
        ...

    def ended(self, error: TriptychError | None) -> None:
        """Learn that the answer is whole, or its error."""
        ...

    def timed_out(self) -> None:
        """Wait no longer."""
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
        "deadline_s",
        "machine",
        "media_bytes",
        "number",
        "output_tokens",
        "prompt_tokens",
        "tokens",
    )

    def __init__(
        self,
        number: int,
        router: "SimRouter",
        caller: Caller,
        *,
        prompt_tokens: int,
        output_tokens: int,
        media_bytes: int,
        deadline_s: float,
    ) -> None:
        """``output_tokens``: of the answer, which is as long as it may be."""
        self.number = number
        self.machine: RequestMachine
        """Set before anything else."""
        self.caller = caller
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.media_bytes = media_bytes
        self.deadline_s = deadline_s
        self.tokens = 0
        """Of the answer, so far; those after the first message, when it has ended."""
        self._router = router
        self._events: deque[RequestEvent] = deque()
        self._feeding = False
        self._calls: dict[_Call, int] = {}
        """Calls that are not over, with their credits."""

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

    def _apply(self, effects: list[RequestEffect]) -> None:
        router, agenda = self._router, self._router.agenda
        releases: dict[str, list[Release]] = {}
        for effect in effects:
            match effect:
                case Encode():
                    call = self._encode(effect)
                    self._calls[call] = effect.credit
                    agenda.soon(router.send_encode, self, effect, call)
                case Generate():
                    text_call = router.text_call(self, effect)
                    self._calls[text_call] = effect.credit
                    agenda.soon(router.send_text, self, effect, text_call)
                case Renew():
                    renewal = _Renewal(effect, agenda.now_s)
                    self._calls[renewal] = effect.credit
                    agenda.soon(self._renew, renewal)
                case Abort(credit):
                    self._abort(credit)
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
            router.release(name, *released_together(group))

    def _feed_if_running(self, event: RequestEvent) -> None:
        if not self.machine.phase.has_ended:
            self.feed(event)

    def _over(self, error: TriptychError | None) -> None:
        """The machine has ended: calls that still run are cancelled, unless they are the end of the answer."""
        self.caller.ended(error)
        if self.machine.phase is not RequestPhase.DONE:
            for call in list(self._calls):
                self._cancel(call)
        self._end_if_idle()

    # --- calls -------------------------------------------------------------------------------------------------------

    def ended(self, call: _Call) -> None:
        """A call is over."""
        credit = self._calls.pop(call)
        if isinstance(call, TextCall):
            self._router.returned(credit)
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self.machine.phase.has_ended and not self._calls:
            self._router.agenda.soon(self._router.over, self)

    def _abort(self, credit: int) -> None:
        """Cancel the call of this credit. What only extends leases ends by itself."""
        for call, of in list(self._calls.items()):
            if of == credit and not (isinstance(call, _Renewal) and call.renew.extends):
                self._cancel(call)

    def _cancel(self, call: _Call) -> None:
        """Cancel a call, of which its instance learns at once."""
        if not call.is_over:
            call.end()
            self._router.agenda.soon(self._cancelled, call)

    def _cancelled(self, call: _Call) -> None:
        if not isinstance(call, _Renewal):
            self._router.cancel(call)
        self.soon_ended(call)

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
        self.ended(call)

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
        self.ended(renewal)

    def soon_ended(self, call: _Call) -> None:
        """A call is over, as its task's end will tell."""
        self._router.agenda.soon(self.ended, call)

    def answer(self, effect: Generate) -> TextCaller:
        """The callback that takes the answer to a call."""
        return _Answer(effect, self)


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

    def over(self, call: TextCall) -> None:
        self._request.soon_ended(call)

    def failed(self, call: TextCall, error: TriptychError) -> None:
        self._request.failed(self._credit, self._name, error)
        self._request.soon_ended(call)
