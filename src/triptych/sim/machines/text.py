"""A text instance: acquires embeddings, runs steps of its batch, and sends tokens, as the services' text service does.

Steps that only decode are made many at once, until something comes between: when each ends follows from the costs. What is asked for
meanwhile (load reports) is answered as of the last step that has ended.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from typing import Protocol

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.generation import Finished, FinishReason, KvReport, PullReport, Ready
from triptych.domain.instance import StageLoad
from triptych.domain.kv_segment import KvSegment, SealedSegment
from triptych.domain.queue_position import QueuePosition, RelativeQueuePosition
from triptych.domain.stage import Role, Stage
from triptych.errors import InvalidRequest, Overloaded, TriptychError
from triptych.machine.arena.extents import round_up
from triptych.machine.arena.slots import Slot
from triptych.machine.router.request_events import AttemptKind, Generate
from triptych.machine.text.counted_batch import CountedBatch, CountedSequence, CountedStep
from triptych.machine.text.device_turns import DeviceTurns
from triptych.machine.text.tensor_effects import CachedSlot
from triptych.machine.text.unbegun import UnbegunPositions
from triptych.policy.batching import most_copied_nbytes
from triptych.policy.costs import Costs
from triptych.policy.iteration import ImageBudget, Iteration
from triptych.policy.queueing import as_called
from triptych.services.text.open_stages import stage_loads
from triptych.services.text.settings import TextSettings

from ..agenda import Agenda  # noqa: TID252 - of the simulator
from ..engines import Activity  # noqa: TID252
from .encoder import SimEncoder
from .kv import KvExport, KvImport, SimKvStore
from .pulls import SimReceiver
from .reports import Reporter

_ALONE = Iteration(prefill=True, encode=False)
_MOST_UNCLAIMED_S = 0.1
"""Longest wait for a sign that the caller has got the leases of a transfer."""
_MOST_STEPS = 4096
"""Steps that are made at once at most."""


class TextCaller(Protocol):
    """The maker of a call, as the text instance answers it. Each is called when the message has come."""

    def ready(self, ready: Ready) -> None: ...

    def tokens(self, count: int, finished: Finished | None) -> None:
        """More tokens; ``finished`` with the last ones."""
        ...

    def transferred(self, segments: tuple[SealedSegment, ...], prefill_s: float) -> None:
        """The answer goes on elsewhere, with these keys and values."""
        ...

    def over(self, call: "TextCall") -> None:
        """The call has ended, and the answer or ``transferred`` has come."""
        ...

    def failed(self, call: "TextCall", error: TriptychError) -> None: ...


@dataclass(eq=False, slots=True, kw_only=True)
class _Sequence(CountedSequence):
    call: "TextCall"


class TextCall:
    """A request at a text instance, from its call to its last token."""

    __slots__ = (
        "answered",
        "arrived_s",
        "begun",
        "caller",
        "deadline_s",
        "effect",
        "export",
        "first_s",
        "free_s",
        "has_copies",
        "has_first",
        "import_",
        "in_engine",
        "in_receiver",
        "is_live",
        "is_over",
        "job_id",
        "joined_s",
        "last_s",
        "limit",
        "name",
        "position",
        "prompt_tokens",
        "pull_s",
        "queue_position",
        "reports",
        "sent_s",
        "sequence",
        "timeout_s",
        "unread",
        "waits",
        "waits_for_room",
    )

    def __init__(self, effect: Generate, prompt_tokens: int, limit: int, begun: int, caller: TextCaller) -> None:
        """``limit``: tokens of the answer, of which the caller has ``begun`` already."""
        self.effect = effect
        self.name = effect.name
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self.begun = begun
        self.caller = caller
        self.export: KvExport | None = None
        self.import_: KvImport | None = None
        self.deadline_s = 0.0
        self.timeout_s = 0.0
        self.position: RelativeQueuePosition
        self.queue_position: QueuePosition
        self.is_over = False
        """Whether it has ended, or its caller has left."""
        self.is_live = False
        """The batch has it, or is about to."""
        self.job_id = ""
        self.arrived_s = self.pull_s = 0.0
        self.reports: tuple[PullReport, ...] = ()
        self.in_receiver = self.has_copies = self.in_engine = False
        self.sequence: _Sequence | None = None
        """In the batch, or about to be."""
        self.joined_s: float | None = None
        """When the batch started it."""
        self.first_s = self.last_s = 0.0
        """When its first and last token were there."""
        self.unread = 0
        """Tokens that are there and not sent."""
        self.waits_for_room: Callable[[Sequence[Slot]], None] | None = None
        self.waits = False
        """Whether it waits for its first token, to send it."""
        self.has_first = False
        """The first token has come to the caller."""
        self.answered = False
        """The first token is sent."""
        self.sent_s = 0.0
        """When the first message with tokens was sent."""
        self.free_s = 0.0
        """When it can send the next message, once the first token has come."""

    def end(self) -> None:
        self.is_over = True

    @property
    def transfers_kv(self) -> bool:
        """Whether it goes on elsewhere once it has a token."""
        return self.effect.kind is AttemptKind.PREFILL

    @property
    def tokens(self) -> int:
        """The prompt's, and the most that may be generated here."""
        return self.prompt_tokens + (1 if self.transfers_kv else self.limit)

    @property
    def known_tokens(self) -> int:
        """The prompt's, and those of its answer when it comes."""
        return self.prompt_tokens + self.begun


class SimText:
    """``services.text``'s engine loop and requests over the same machines."""

    def __init__(
        self,
        settings: TextSettings,
        costs: Costs,
        batch: "CountedBatch[_Sequence]",
        receiver: SimReceiver,
        agenda: Agenda,
        activity: Activity,
        reporter: Reporter,
        *,
        control_s: float,
        encoder: SimEncoder | None = None,
        turns: DeviceTurns | None = None,
        budget: ImageBudget | None = None,
        store: SimKvStore,
        copied_bytes_per_s: float,
    ) -> None:
        """``encoder``: of an instance that encodes as well, in ``turns`` with the batch."""
        self._settings = settings
        self._most_copied_nbytes = most_copied_nbytes(settings.role.stages, settings.kv_bytes_per_step)
        self._costs = costs
        self.batch = batch
        self.receiver = receiver
        self._agenda = agenda
        self._activity = activity
        self._reporter = reporter
        self._control_s = control_s
        self._encoder = encoder
        self._turns = turns
        self._budget = budget
        self._store = store
        self._copied_bytes_per_s = copied_bytes_per_s
        self._copies: deque[_Copy] = deque()
        self._followed: dict[TextCall, Callable[[int], None]] = {}
        self._adding_tokens = 0
        if encoder is not None:
            encoder.on_ready = self._wake
        self._numbers = count()
        self._jobs: set[TextCall] = set()
        self._outside = self._outside_tokens = self._unanswered_tokens = 0
        """Of jobs: those that the batch does not have yet, their tokens, and prompt tokens of those without a first token."""
        self._joining: dict[str, TextCall] = {}
        self._cancelled: list[str] = []
        self._unbegun = UnbegunPositions()
        """Of those in the batch that have not begun."""
        self._live = 0
        self._is_idle, self._is_woken = True, False
        self._ends_s: list[float] = []
        """When the steps end that are made at once; empty where there are none."""
        self._run_began_s = 0.0
        self._run = 0
        """Number of the run, or of its last change."""
        self._run_choices = self._steady = 0
        self._pending_tokens = 0
        self._free_tokens = batch.free_tokens

    # --- state -------------------------------------------------------------------------------------------------------

    def stages(self, role: Role, leased_bytes: int) -> dict[Stage, StageLoad]:
        """The load as of the last step that has ended."""
        done = bisect_right(self._ends_s, self._agenda.now_s) * self._run_choices
        joining = self._adding_tokens
        if self._joining:
            joining += sum([call.tokens for call in self._joining.values()])
        return stage_loads(
            role.stages,
            waiting=self._waiting,
            running=self._live - len(self._unbegun.by_request),
            tokens=self._pending_tokens - done + joining + self._outside_tokens,
            unanswered_tokens=self._unanswered_tokens,
            leased_bytes=leased_bytes,
            free_tokens=max(0, self._free_tokens - done),
        )

    @property
    def _waiting(self) -> int:
        """Requests that the batch has not started."""
        return len(self._joining) + len(self._unbegun.by_request) + self._outside

    def busy_s(self, now_s: float) -> float:
        """Of steps that are made at once, how long they have taken until now."""
        return min(now_s, self._ends_s[-1]) - self._run_began_s if self._ends_s else 0.0

    # --- calls -------------------------------------------------------------------------------------------------------

    def generate(self, call: TextCall) -> None:
        """A call has come."""
        if call.is_over:
            return
        now_s, number, effect = self._agenda.now_s, next(self._numbers), call.effect
        call.arrived_s, call.deadline_s = now_s, now_s + call.timeout_s
        call.job_id = f"{number}"
        call.queue_position = as_called(
            priority=0,
            deadline_s=call.deadline_s,
            arrived_s=now_s,
            arrival=number,
            position=call.position,
        )
        tickets = tuple([placement.ticket for placement in effect.placements])
        if (error := self._why_not(tickets)) is not None:
            call.is_over = True
            for ticket in (*tickets, *(placement.ticket for placement in effect.kv_segments)):
                self.receiver.release(ticket)
            self._reporter.notify()
            call.caller.failed(call, error)
            return
        if effect.kv_segments:
            call.import_ = KvImport(call, self._store.kind, self, self._agenda)
        self._jobs.add(call)
        self._outside += 1
        self._outside_tokens += call.tokens
        self._unanswered_tokens += call.prompt_tokens
        self._reporter.notify()
        if tickets:
            call.in_receiver = call.has_copies = True
            self.receiver.acquire(call.job_id, tickets, call.queue_position, lambda slots: self._acquired(call, slots))
        else:
            self._enter(call)

    def _why_not(self, tickets: Sequence[Ticket]) -> TriptychError | None:
        limits, settings = self._settings.tensor_cache, self._settings
        if len(self._jobs) >= settings.max_concurrent_requests:
            return Overloaded(f"{settings.max_concurrent_requests} requests are open, which is the limit")
        nbytes = sum([round_up(ticket.slot_nbytes) for ticket in tickets])
        if nbytes > limits.max_embedding_bytes:
            return InvalidRequest(
                f"the request's embeddings take {nbytes} bytes, the limit is {limits.max_embedding_bytes}"
            )
        if (waiting := self._waiting) >= limits.max_waiting_requests:
            return Overloaded(f"{waiting} requests are waiting, which is the limit")
        return None

    def _acquired(self, call: TextCall, slots: tuple[CachedSlot, ...] | TriptychError) -> None:
        if call.is_over:
            return
        if isinstance(slots, TriptychError):
            self._end(call)
            call.caller.failed(call, slots)
            return
        call.pull_s = self._agenda.now_s - call.arrived_s
        call.reports = tuple(
            [_report(placement.item, slot) for placement, slot in zip(call.effect.placements, slots, strict=True)]
        )
        self._enter(call)

    def _enter(self, call: TextCall) -> None:
        """Enter the engine with the embeddings, which are here. What it will transfer needs room first."""
        if not call.transfers_kv:
            self._submit(call)
            return
        segments = self._store.kind.segments(0, call.known_tokens)
        call.waits_for_room = partial(self._reserved, call, segments)
        self._store.reserve(segments, call.queue_position, call.waits_for_room)

    def _reserved(self, call: TextCall, segments: Sequence[KvSegment], slots: Sequence[Slot]) -> None:
        call.export = KvExport(call, segments, slots, self._store, self, self._agenda)
        self._submit(call)

    def _submit(self, call: TextCall) -> None:
        """The batch is to have it."""
        self._outside -= 1
        self._outside_tokens -= call.tokens
        call.in_engine = True
        call.sequence = _Sequence(
            request_id=call.job_id,
            prompt_tokens=call.prompt_tokens,
            limit=call.limit,
            length=call.limit,
            begun=call.begun,
            pauses=call.transfers_kv,
            arriving=0 if call.import_ is None else call.import_.positions,
            queue_position=call.queue_position,
            call=call,
        )
        self._joining[call.job_id] = call
        self._wake()

    def cancel(self, call: TextCall) -> None:
        """The caller has left, after the call has come."""
        if call in self._jobs:
            self._end(call)

    def _end(self, call: TextCall) -> None:
        """Release everything that a request still has."""
        call.is_over = True
        if call.in_engine:
            if self._joining.pop(call.job_id, None) is not None:
                self._read(call)
            else:
                self._cancel(call)
        else:
            self._read(call)
            if call.waits_for_room is not None:
                self._store.leave(call.waits_for_room)
        if not call.in_receiver:
            for placement in call.effect.placements:
                self.receiver.release(placement.ticket)
        self._copies_gone(call)
        if call.import_ is not None:
            call.import_.stop()
        if call.export is not None:
            call.export.stop()
        self._jobs.discard(call)
        call.sequence = None
        if not call.in_engine:
            self._outside -= 1
            self._outside_tokens -= call.tokens
        if not call.answered:
            self._unanswered_tokens -= call.prompt_tokens
        self._reporter.notify()

    def _cancel(self, call: TextCall) -> None:
        """The batch is to forget it, unless it has ended there."""
        if call.is_live:
            self._cancelled.append(call.job_id)
            self._wake()
            self._leave(call)

    def _leave(self, call: TextCall) -> None:
        """No more tokens of it will come."""
        self._unbegun.discard(call.job_id)
        call.is_live = False
        self._live -= 1
        self._copies_gone(call)

    def _read(self, call: TextCall) -> None:
        """Note that its embeddings are copied, or not needed any more."""
        if call.in_receiver:
            self.receiver.leave(call.job_id)

    def _copies_gone(self, call: TextCall) -> None:
        """No copies of its embeddings are left."""
        if call.has_copies:
            call.has_copies = False
            self.receiver.copies_gone(call.job_id)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._is_idle:
            if not self._is_woken:
                self._is_woken = True
                self._agenda.soon(self._iterate)
        elif self._ends_s:
            self._cut()

    def _iterate(self) -> None:
        self._is_woken = False
        self._is_idle = not (
            self._joining or self._cancelled or self._copies or self.batch.can_step or self._encode_ready
        )
        if not self._is_idle:
            self._apply()

    def _turn(self) -> None:
        """Choose what the iteration does besides decodes."""
        iteration = _ALONE
        if self._turns is not None and self._encoder is not None:
            iteration = self._turns.next(
                self._agenda.now_s,
                prompt=self.batch.prefill_queue_position,
                can_step=self.batch.can_step,
                item=self._encoder.first_queue_position if self._turns.by_queue_position else None,
                item_waits_since_s=self._encoder.waiting_since_s,
            )
        if not iteration.encode:
            self._step(iteration, self._iterated)
        elif self._turns is not None and self._turns.encode_first:
            self._encode(lambda: self._step(iteration, self._iterated))
        else:
            self._step(iteration, lambda: self._encode(self._iterated))

    def _iterated(self) -> None:
        self._reporter.notify()
        self._agenda.soon(self._iterate)

    @property
    def _encode_ready(self) -> bool:
        return self._encoder is not None and self._encoder.waiting_since_s is not None

    def _apply(self) -> None:
        """Pass cancelled and new requests to the batch, and the new queue positions of those that are lost by now; and copy."""
        joining, self._joining = self._joining, {}
        for job_id, call in joining.items():
            self._live += 1
            call.is_live = True
            self._unbegun.add(job_id, call.queue_position)
        lost, copies = self._unbegun.lost(self._agenda.now_s), self._next_copies()
        if not (joining or self._cancelled or lost or copies):
            self._turn()
            return
        for job_id in self._cancelled:
            self.batch.cancel(job_id)
        self._cancelled.clear()
        for call in joining.values():
            assert call.sequence is not None  # noqa: S101 - set with it
            self.batch.add(call.sequence)
        for job_id, position in lost:
            self.batch.reorder(job_id, position)
        now_s, took_s, results = self._agenda.now_s, 0.0, list[bool]()
        for copy in copies:
            results.append(copy.call())
            if copy.nbytes and results[-1]:
                copied_s = copy.nbytes / self._copied_bytes_per_s
                self._activity.did("copy", now_s + took_s, now_s + took_s + copied_s, copy.nbytes)
                took_s += copied_s
        if took_s:
            self._adding_tokens = sum([call.tokens for call in joining.values()])
            self._agenda.after(took_s, self._applied, joining, copies, results)
        else:
            self._applied(joining, copies, results)

    def _applied(self, joining: Mapping[str, TextCall], copies: Sequence["_Copy"], results: Sequence[bool]) -> None:
        self._adding_tokens = 0
        self._note()
        for copy, result in zip(copies, results, strict=True):
            self._agenda.soon(copy.then, result)
        for call in joining.values():
            self._read(call)
        self._turn()

    def _next_copies(self) -> list["_Copy"]:
        """Take the copies to run now."""
        copies: list[_Copy] = []
        nbytes = 0
        while self._copies and (not copies or nbytes + self._copies[0].nbytes <= self._most_copied_nbytes):
            copies.append(self._copies.popleft())
            nbytes += copies[-1].nbytes
        return copies

    def between(self, nbytes: int, call: Callable[[], bool], then: Callable[[bool], None]) -> None:
        """Call ``call`` between two steps, and then ``then`` with its result. ``nbytes``: that are copied if it returns True."""
        self._copies.append(_Copy(nbytes, call, then))
        self._wake()

    def follow(self, call: TextCall, tell: Callable[[int], None]) -> None:
        """Until ``unfollow``, ``tell`` after each call of the engine how many positions are computed."""
        self._followed[call] = tell

    def unfollow(self, call: TextCall) -> None:
        self._followed.pop(call, None)

    def _note(self) -> None:
        """Remember the load, as of the last call of the engine."""
        self._pending_tokens = self.batch.pending_tokens
        self._free_tokens = self.batch.free_tokens
        for call, tell in list(self._followed.items()):
            sequence = self.batch.running.get(call.job_id)
            tell(0 if sequence is None else sequence.positions)

    def _encode(self, then: Callable[[], None]) -> None:
        """Run the encoder's part of an iteration."""
        turns, encoder, began_s = self._turns, self._encoder, self._agenda.now_s
        assert turns is not None  # noqa: S101 - as it is asked for
        assert encoder is not None  # noqa: S101 - as it is asked for

        def encoded() -> None:
            turns.encoded(self._agenda.now_s - began_s)
            then()

        if not encoder.encode_batch(encoded, self._budget):
            encoded()

    # --- steps -------------------------------------------------------------------------------------------------------

    def _step(self, iteration: Iteration, then: Callable[[], None]) -> None:
        """Run the engine's part of an iteration, or many that only decode."""
        batch, now_s = self.batch, self._agenda.now_s
        if not batch.can_step:
            then()
            return
        is_asked = self._joining or self._cancelled or self._copies or self._encode_ready
        if not (iteration.encode or is_asked) and (steady := min(batch.steady_steps(), _MOST_STEPS)) > 1:
            self._run_steps(steady)
            return
        step = batch.begin(prefill=iteration.prefill)
        took_s = 0.0
        if step.tokens:
            took_s = self._costs.step_seconds(step.decodes, step.mean_context, step.prompts)
            self._activity.did("step", now_s, now_s + took_s, step.tokens)
        self._agenda.after(took_s, self._stepped, step, now_s, then)

    def _stepped(self, step: CountedStep[_Sequence], began_s: float, then: Callable[[], None]) -> None:
        now_s = self._agenda.now_s
        if self._turns is not None:
            self._turns.stepped(now_s - began_s)
        answered = self.batch.end(step)
        self._note()
        if self._unbegun.by_request:
            waiting = self.batch.waiting
            for job_id in [name for name in self._unbegun.by_request if name not in waiting]:
                self._unbegun.discard(job_id)
                running = self.batch.running.get(job_id)
                self._join(_of(answered, job_id) if running is None else running.call, began_s)
        for sequence in answered:
            if sequence.request_id not in self._cancelled:
                self._deliver(sequence, now_s)
        then()

    def _run_steps(self, steps: int) -> None:
        batch, now_s = self.batch, self._agenda.now_s
        choices, context_tokens = batch.decoding()
        durations_s = self._costs.decode_steps_s(choices, context_tokens / choices, steps)
        ends_s = list(accumulate(durations_s, initial=now_s))
        if batch.waiting:  # whose order may change then
            del ends_s[bisect_right(ends_s, self._unbegun.next_lost_s) + 1 :]
        del ends_s[0]
        self._ends_s, self._run_began_s, self._run_choices, self._steady = ends_s, now_s, choices, steps
        self._run += 1
        self._reporter.changes(ends_s)
        self._agenda.at(ends_s[-1], self._ran, self._run)

    def _cut(self) -> None:
        """The loop is to see to something else after the step that is under way."""
        done = bisect_right(self._ends_s, self._agenda.now_s)
        if done + 1 < len(self._ends_s):
            del self._ends_s[done + 1 :]
            self._run += 1
            self._agenda.at(self._ends_s[-1], self._ran, self._run)

    def _ran(self, run: int) -> None:
        if run != self._run:
            return
        batch, ends_s, began_s = self.batch, self._ends_s, self._run_began_s
        steps = len(ends_s)
        self.settle()
        if self._turns is not None:
            self._turns.stepped(ends_s[-1] - began_s)
        if steps == self._steady:
            batch.advance(steps - 1)
            answered = batch.end(batch.begin(prefill=False))
        else:
            answered = batch.decoding_sequences
            batch.advance(steps)
        self._reporter.changes(())
        self._note()
        control_s, end_s = self._control_s, ends_s[-1]
        # Then a message has come before the next token is there: nothing but the last step matters.
        even = steps > 1 and ends_s[0] - began_s >= control_s and ends_s[-2] + control_s <= end_s
        for sequence in answered:
            call = sequence.call
            if sequence.request_id in self._cancelled:
                continue
            if even and call.has_first and not call.unread and call.free_s <= ends_s[0]:
                if not sequence.has_ended:
                    call.last_s, call.free_s = end_s, end_s + control_s
                    continue
                call.last_s, call.free_s = ends_s[-2], ends_s[-2] + control_s
            else:
                for before_s in ends_s[:-1]:
                    self._token(call, before_s)
            self._deliver(sequence, end_s)
        self._iterated()

    def settle(self) -> None:
        """Note the steps that are made at once as far as they have begun; none of them goes on."""
        ends_s, self._ends_s = self._ends_s, []
        self._activity.ran(self._run_began_s, ends_s, self._agenda.now_s, self._run_choices)

    def _join(self, call: TextCall, began_s: float) -> None:
        call.joined_s = began_s
        self._agenda.soon(self._began, call)

    # --- tokens ------------------------------------------------------------------------------------------------------

    def _began(self, call: TextCall) -> None:
        if call.is_over:
            return
        assert call.joined_s is not None  # noqa: S101 - it has joined
        if call.import_ is None:
            self._is_ready(call, None)
        else:
            call.import_.run(partial(self._is_ready, call))

    def _is_ready(self, call: TextCall, kv: KvReport | None) -> None:
        if call.is_over:
            return
        assert call.joined_s is not None  # noqa: S101 - it has joined
        ready = Ready(call.reports, max(0.0, call.joined_s - call.arrived_s - call.pull_s), call.pull_s, kv)
        self._agenda.after(self._control_s, self._told, call, ready)

    def _told(self, call: TextCall, ready: Ready) -> None:
        if call.is_over:
            return
        call.caller.ready(ready)
        if call.unread:
            self._send(call)
        else:
            call.waits = True

    def _deliver(self, sequence: _Sequence, now_s: float) -> None:
        """Note that its last token so far has come."""
        call = sequence.call
        if sequence.has_ended:
            self._leave(call)
            if call.has_first:
                sent_s = self._last_token(call, now_s)
                self._agenda.at(sent_s + self._control_s, self._came, call, 1, True)
                return
        self._token(call, now_s)

    def _token(self, call: TextCall, at_s: float) -> None:
        """A token is there. Once the first has come, messages follow by themselves."""
        if not call.first_s:
            call.first_s = at_s
        call.last_s = at_s
        if call.has_first:
            if at_s <= call.sent_s:
                return
            if call.unread and call.free_s <= at_s:
                call.unread, call.free_s = 0, call.free_s + self._control_s
            if call.free_s <= at_s:
                call.free_s = at_s + self._control_s
            else:
                call.unread += 1
            return
        call.unread += 1
        if call.waits:
            call.waits = False
            self._agenda.soon(self._send, call)

    def _last_token(self, call: TextCall, at_s: float) -> float:
        """When the message with the last token is sent."""
        call.last_s = at_s
        if call.unread and call.free_s <= at_s:
            call.free_s += self._control_s
        return max(at_s, call.free_s)

    def _send(self, call: TextCall) -> None:
        """The first message with tokens."""
        if call.is_over:
            return
        if not call.answered:
            call.answered = True
            self._unanswered_tokens -= call.prompt_tokens
        tokens, call.unread, call.sent_s = call.unread, 0, self._agenda.now_s
        assert call.sequence is not None  # noqa: S101 - it has tokens
        self._agenda.after(self._control_s, self._came, call, tokens, call.sequence.has_ended)

    def _came(self, call: TextCall, tokens: int, is_last: bool) -> None:
        """A message has come to the caller, who then waits for the next one."""
        if call.is_over:
            return
        finished = None
        assert call.joined_s is not None  # noqa: S101 - it has tokens
        if is_last:
            prefill_s, decode_s = call.first_s - call.joined_s, call.last_s - call.first_s
            finished = Finished(FinishReason.LENGTH, call.limit, prefill_s=prefill_s, decode_s=decode_s)
        call.caller.tokens(tokens, finished)
        if is_last:
            self._end(call)
            call.caller.over(call)
            return
        call.has_first = True
        call.free_s = self._agenda.now_s
        if call.export is not None:
            call.export.sealed(partial(self._sealed, call))
            return
        assert call.sequence is not None  # noqa: S101 - it has tokens
        if call.sequence.has_ended:  # its last token has come meanwhile
            call.unread = 0
            self._agenda.at(call.free_s + self._control_s, self._came, call, 1, True)

    # --- going on elsewhere ------------------------------------------------------------------------------------------

    def _sealed(self, call: TextCall) -> None:
        """All its keys and values can be pulled."""
        if call.is_over or call.export is None or call.joined_s is None:
            return
        self._cancel(call)
        segments = call.export.granted(call.effect.kv_lease_s)
        prefill_s = call.first_s - call.joined_s
        self._agenda.after(self._control_s, self._transferred, call, segments, prefill_s)

    def _transferred(self, call: TextCall, segments: tuple[SealedSegment, ...], prefill_s: float) -> None:
        if call.is_over:
            return
        call.caller.transferred(segments, prefill_s)
        if not segments:
            self._end(call)
            call.caller.over(call)
            return
        lease_ids = [
            lease_id for sealed in segments for lease_id in (sealed.placement.ticket.lease_id, sealed.router_lease)
        ]
        claimed = partial(self._claimed, call, lease_ids)
        self._store.arena.when_released(lease_ids, claimed)
        self._agenda.after(_MOST_UNCLAIMED_S, claimed)

    def _claimed(self, call: TextCall, lease_ids: Sequence[LeaseId]) -> None:
        """The caller has got the leases, or time is up."""
        if call.is_over:
            return
        self._store.arena.forget(lease_ids)
        self._end(call)
        call.caller.over(call)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A call of the engine between two steps."""

    nbytes: int
    call: Callable[[], bool]
    then: Callable[[bool], None]


def _of(sequences: Sequence[_Sequence], job_id: str) -> TextCall:
    return next(sequence.call for sequence in sequences if sequence.request_id == job_id)


def _report(item: int, slot: CachedSlot) -> PullReport:
    return PullReport(item, slot.backend, slot.pulled_nbytes, slot.duration_s, cached=not slot.backend)
