"""A text instance as queues: requests wait for a place, and steps compute prompts and answers together.

Steps that only decode are made many at once, until something comes between. What runs is kept as sums: how many answers are decoded, their
context, and at which step each ends. So a step costs the same however many they are.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate, count
from typing import Protocol

from triptych.domain.kv_segment import KvKind
from triptych.machine.text.device_turns import DeviceTurns
from triptych.policy.batching import Prefill, most_copied_nbytes, plan_prefills
from triptych.policy.costs import Costs
from triptych.policy.iteration import ImageBudget
from triptych.services.text.settings import TextSettings

from ..agenda import Agenda  # noqa: TID252 - of the simulator
from ..engines import Activity  # noqa: TID252
from .encoder import QueueEncoder
from .line import Line
from .request import Visit
from .transfers import Transfers

_MOST_STEPS = 64
"""Steps that are made at once at most."""
_SEGMENTS = 4
"""Segments of keys and values of a request that are pulled or wait to be copied in, at most."""


class RequestListener(Protocol):
    """Who is told how requests get on, as it happens."""

    def first_token(self, visit: Visit, at_s: float, *, in_first_step: bool) -> None:
        """``in_first_step``: its whole prompt was computed in one step."""
        ...

    def ended(self, visit: Visit, at_s: float) -> None:
        """It has its last token."""
        ...

    def exported(self, visit: Visit, at_s: float) -> None:
        """All its keys and values can be pulled."""
        ...

    def imported(self, visit: Visit) -> None:
        """All keys and values that it goes on with have come."""
        ...


class QueueText:
    """Owner of the requests at one text instance."""

    def __init__(
        self,
        name: str,
        settings: TextSettings,
        costs: Costs,
        kv: tuple[int, KvKind],
        agenda: Agenda,
        activity: Activity,
        transfers: Transfers,
        *,
        arena_nbytes: int,
        copied_bytes_per_s: float,
        encoder: QueueEncoder | None = None,
        turns: DeviceTurns | None = None,
        budget: ImageBudget | None = None,
    ) -> None:
        """``kv``: positions of KV memory, and their kind. ``arena_nbytes``: for those that are exported. ``encoder``: of an instance that encodes as well, in ``turns`` with the batch."""
        options = settings.engine_options
        self._name = name
        self._costs = costs
        self._kv_tokens, self.kv_kind = kv
        self._max_sequences, self._token_budget = options.max_sequences, options.most_step_tokens
        self._copied_bytes_per_s = copied_bytes_per_s
        self._copied_per_step = most_copied_nbytes(settings.role.stages, settings.kv_bytes_per_step)
        self.most_pulled_nbytes = settings.pulls.max_holder_nbytes
        """Most that is pulled from one holder at the same time."""
        self._agenda = agenda
        self._activity = activity
        self.router: RequestListener
        """The router, which sets it."""
        self._transfers = transfers
        self._encoder = encoder
        self._turns = turns
        self._budget = budget
        if encoder is not None:
            encoder.on_ready = self._wake
        self.visits = 0
        """Requests that have come and have not left."""
        self._arena_nbytes = self._room_nbytes = arena_nbytes
        """Memory for keys and values that are exported, and what is free of it."""
        self._for_room: Line[Visit] = Line()
        self._line: Line[Visit] = Line()
        """For a place in the batch."""
        self._numbers = count()
        self._joining: list[Visit] = []
        self._cancelled: list[Visit] = []
        self._copies: deque[_Copy] = deque()
        self._places = self._reserved_tokens = 0
        """What running requests have, and may come to need."""
        self._prompting: list[Visit] = []
        self._decoding = self._context_tokens = self._steps = 0
        self._ends: list[tuple[int, int, Visit]] = []
        """The step that has the last token of each answer that is decoded, as a heap."""
        self._is_idle, self._is_woken = True, False
        self._ends_s: list[float] = []
        """When the steps end that are made at once; empty where there are none."""
        self._run_began_s = 0.0
        self._run = 0
        """Number of the run, or of its last change."""

    @property
    def waiting(self) -> int:
        """Requests without a place in the batch."""
        return self.visits - self._places

    def busy_s(self, now_s: float) -> float:
        """Of steps that are made at once, how long they have taken until now."""
        return min(now_s, self._ends_s[-1]) - self._run_began_s if self._ends_s else 0.0

    # --- requests ----------------------------------------------------------------------------------------------------

    def enter(self, visit: Visit) -> None:
        """A request has come, with its embeddings."""
        if visit.is_over:
            return
        if not visit.transfers_kv:
            self._join(visit)
            return
        visit.offered = visit.prompt_tokens
        visit.holds_nbytes = nbytes = visit.prompt_tokens * self.kv_kind.position_nbytes
        if self._encoder is None and nbytes <= self._arena_nbytes:
            self._for_room.add(visit, self._agenda.now_s)
            self._admit()
        else:  # nothing waits for room beside embeddings, or for more than there is
            if nbytes > self._room_nbytes:
                size = self.kv_kind.segment_tokens
                visit.offered = self._room_nbytes // (size * self.kv_kind.position_nbytes) * size
                visit.holds_nbytes = visit.offered * self.kv_kind.position_nbytes
            self._room_nbytes -= visit.holds_nbytes
            self._join(visit)

    def _admit(self) -> None:
        """Those that wait for room for what they will export, as far as there is some."""
        now_s = self._agenda.now_s
        while (visit := self._for_room.first(now_s)) is not None and visit.holds_nbytes <= self._room_nbytes:
            self._for_room.remove(visit)
            self._room_nbytes -= visit.holds_nbytes
            self._join(visit)

    def free_room(self, visit: Visit) -> None:
        """What it exports is pulled, or not wanted any more."""
        self._room_nbytes += visit.holds_nbytes
        visit.holds_nbytes = 0
        self._admit()

    def _join(self, visit: Visit) -> None:
        self._joining.append(visit)
        if self._is_idle or self._may_start(visit):
            self._wake()

    def leave(self, visit: Visit) -> None:
        """Its request is over before its last token."""
        visit.is_over = True
        self.visits -= 1
        if visit.has_place:
            self._cancelled.append(visit)
            self._wake()
        elif self._for_room.remove(visit):
            visit.holds_nbytes = 0
            self._admit()
        else:
            self._line.remove(visit)
            if visit.holds_nbytes:
                self.free_room(visit)

    def _may_start(self, visit: Visit) -> bool:
        if self._places >= self._max_sequences:
            return False
        return not self._places or self._reserved_tokens + visit.most_tokens <= self._kv_tokens

    def _start(self, visit: Visit) -> None:
        visit.has_place = True
        self._places += 1
        self._reserved_tokens += visit.most_tokens

    def _give_back(self, visit: Visit) -> None:
        """Its place and memory."""
        visit.has_place = False
        self._places -= 1
        self._reserved_tokens -= visit.most_tokens

    def _remove(self, visit: Visit) -> None:
        """What was cancelled leaves the batch."""
        if not visit.has_place:
            return
        if visit.end_step:
            self._decoding -= 1
            self._context_tokens -= visit.prompt_tokens + visit.limit - (visit.end_step - self._steps)
        elif visit in self._prompting:
            self._prompting.remove(visit)
        self._give_back(visit)
        if visit.holds_nbytes:
            self.free_room(visit)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._is_idle:
            if not self._is_woken:
                self._is_woken = True
                self._agenda.soon(self._iterate)
        elif self._ends_s:
            self._cut()

    def _iterate(self) -> None:
        self._is_woken = self._is_idle = False
        now_s = self._agenda.now_s
        if self._joining:
            for visit in self._joining:
                if not visit.is_over:
                    self._line.add(visit, now_s)
            self._joining.clear()
        if self._cancelled:
            for visit in self._cancelled:
                self._remove(visit)
            self._cancelled.clear()
        if self._copies:
            nbytes, then = self._next_copies()
            if nbytes:
                took_s = nbytes / self._copied_bytes_per_s
                self._activity.did("copy", now_s, now_s + took_s, nbytes)
                self._agenda.after(took_s, self._copied, then)
                return
            self._copied(then)
            return
        self._turn()

    def _copied(self, then: Sequence[Callable[[], None]]) -> None:
        for call in then:
            call()
        self._turn()

    def _next_copies(self) -> tuple[int, list[Callable[[], None]]]:
        """Bytes to copy before the next step, in whole segments, and what is to be called then."""
        nbytes, most, then = 0, self._copied_per_step, list[Callable[[], None]]()
        while self._copies:
            copy = self._copies[0]
            part = min(copy.left, max(0, most - nbytes) // copy.segment * copy.segment)
            if copy.left and not part:
                if nbytes:
                    break
                part = min(copy.left, copy.segment)
            copy.left -= part
            nbytes += part
            if copy.left:
                break
            self._copies.popleft()
            then.append(copy.then)
        return nbytes, then

    def between(self, positions: int, then: Callable[[], None]) -> None:
        """Copy keys and values of so many positions between steps, and then call ``then``."""
        kind = self.kv_kind
        self._copies.append(_Copy(positions * kind.position_nbytes, kind.segment_tokens * kind.position_nbytes, then))
        self._wake()

    def _turn(self) -> None:
        """What the iteration does besides decodes."""
        now_s, encoder, turns = self._agenda.now_s, self._encoder, self._turns
        prompt = self._next_prompt(now_s)
        item_waits_since_s = None if encoder is None else encoder.waiting_since_s
        if encoder is not None and turns is not None:
            iteration = turns.next(
                now_s,
                prompt=None if prompt is None else prompt.position.at(now_s),
                can_step=bool(self._decoding) or prompt is not None,
                item=encoder.first_position if turns.by_queue_position else None,
                item_waits_since_s=item_waits_since_s,
            )
            if iteration.encode:
                if self._decoding:
                    self._step(prefill=False, then=self._encode)
                else:
                    self._encode()
                return
        if prompt is not None:
            self._step(prefill=True, then=self._iterate)
        elif not self._decoding:
            if self._copies or self._joining or self._cancelled:
                self._agenda.soon(self._iterate)
            else:
                self._is_idle = True
        elif self._copies or self._joining or self._cancelled or item_waits_since_s is not None:
            self._step(prefill=False, then=self._iterate)
        else:
            self._run_steps()

    def _encode(self) -> None:
        """Run the encoder's part of an iteration."""
        turns, encoder, began_s = self._turns, self._encoder, self._agenda.now_s
        assert turns is not None  # noqa: S101 - as it is asked for
        assert encoder is not None  # noqa: S101

        def encoded() -> None:
            turns.encoded(self._agenda.now_s - began_s)
            self._iterate()

        if not encoder.encode_batch(encoded, self._budget):
            encoded()

    # --- steps -------------------------------------------------------------------------------------------------------

    def _next_prompt(self, now_s: float) -> Visit | None:
        """The first that the next step could compute some of, or start."""
        first = min(self._prompting, key=lambda visit: visit.position, default=None)
        waiting = self._line.first(now_s) if self._line else None
        if waiting is None or not self._may_start(waiting):
            return first
        return waiting if first is None or waiting.position.at(now_s) < first.position else first

    def _prompts(self, computing: list[Visit]) -> Iterator[Prefill]:
        """Those that have begun and those that can start, in their order. Each is added to ``computing``."""
        now_s = self._agenda.now_s
        begun = iter(sorted(self._prompting, key=lambda visit: visit.position) if self._prompting else ())
        first = next(begun, None)
        while True:
            waiting = self._line.first(now_s) if self._line else None
            if waiting is not None and not self._may_start(waiting):
                waiting = None  # nobody passes it
            if waiting is not None and (first is None or waiting.position.at(now_s) < first.position):
                self._line.pop(now_s)
                self._start(waiting)
                if waiting.arrives:
                    computing.append(waiting)
                    continue
                self._prompting.append(waiting)
                visit = waiting
            elif first is not None:
                visit, first = first, next(begun, None)
            else:
                return
            computing.append(visit)
            yield Prefill("", visit.left, visit.computed)

    def _step(self, *, prefill: bool, then: Callable[[], None]) -> None:
        now_s, decoding = self._agenda.now_s, self._decoding
        computing: list[Visit] = []
        parts: list[tuple[int, int]] = []
        if prefill:
            works = iter(plan_prefills(self._prompts(computing), self._token_budget - decoding))
            for visit in computing:
                if not visit.arrives:
                    work = next(works)
                    parts.append((work.tokens, work.first))
                    visit.computed += work.tokens
        took_s = 0.0
        if decoding or parts:
            took_s = self._costs.step_seconds(decoding, self._context_tokens / (decoding or 1), parts)
            self._activity.did("step", now_s, now_s + took_s, decoding + sum([tokens for tokens, _ in parts]))
        self._agenda.after(took_s, self._stepped, computing, now_s, then)

    def _stepped(self, computing: Sequence[Visit], began_s: float, then: Callable[[], None]) -> None:
        now_s = self._agenda.now_s
        if self._turns is not None:
            self._turns.stepped(now_s - began_s)
        if self._decoding:
            self._advance(1, now_s)
        if computing:
            for visit in computing:
                if not visit.is_over:
                    self._computed(visit, began_s, now_s)
            self._prompting = [visit for visit in self._prompting if visit.left]
        then()

    def _computed(self, visit: Visit, began_s: float, now_s: float) -> None:
        """A step has computed some of it, or it has begun to wait for its keys and values."""
        in_first_step = visit.joined_s is None
        if in_first_step:
            visit.joined_s = began_s
        if visit.arrives:
            self._agenda.soon(self.between, 0, partial(self._import, visit))
            return
        if not visit.left:
            visit.sent += 1
            if not visit.begun:
                self.router.first_token(visit, now_s, in_first_step=in_first_step)
            if visit.sent >= visit.limit:
                self._end(visit, now_s)
            elif not visit.transfers_kv:
                self._decoding += 1
                self._context_tokens += visit.prompt_tokens + visit.sent
                visit.end_step = self._steps + visit.limit - visit.sent
                heappush(self._ends, (visit.end_step, next(self._numbers), visit))
        if visit.transfers_kv and visit.has_place:
            self._export(visit)

    def _advance(self, steps: int, now_s: float) -> None:
        """So many steps of decoding have ended, and with the last of them some answers."""
        self._steps += steps
        self._context_tokens += steps * self._decoding
        ends, done = self._ends, self._steps
        while ends and ends[0][0] <= done:
            _, _, visit = heappop(ends)
            if not visit.is_over:
                self._decoding -= 1
                self._context_tokens -= visit.prompt_tokens + visit.limit
                self._end(visit, now_s)

    def _end(self, visit: Visit, now_s: float) -> None:
        visit.is_over = True
        self.visits -= 1
        self._give_back(visit)
        if visit.holds_nbytes:
            self.free_room(visit)
        self.router.ended(visit, now_s)

    def _run_steps(self) -> None:
        """Make many steps that only decode, at most until the first answer ends."""
        ends = self._ends
        while ends[0][2].is_over:
            heappop(ends)
        steps, now_s, decoding = min(ends[0][0] - self._steps, _MOST_STEPS), self._agenda.now_s, self._decoding
        durations_s = self._costs.decode_steps_s(decoding, self._context_tokens / decoding, steps)
        ends_s = list(accumulate(durations_s, initial=now_s))
        del ends_s[0]
        self._ends_s, self._run_began_s = ends_s, now_s
        self._run += 1
        self._agenda.at(ends_s[-1], self._ran, self._run)

    def _cut(self) -> None:
        """The loop is to see to something else after the step that is under way."""
        ends_s = self._ends_s
        done = bisect_right(ends_s, self._agenda.now_s)
        if done + 1 < len(ends_s):
            del ends_s[done + 1 :]
            self._run += 1
            self._agenda.at(ends_s[-1], self._ran, self._run)

    def _ran(self, run: int) -> None:
        if run != self._run:
            return
        steps, end_s = len(self._ends_s), self._ends_s[-1]
        if self._turns is not None:
            self._turns.stepped(end_s - self._run_began_s)
        self.settle()
        self._advance(steps, end_s)
        self._iterate()

    def settle(self) -> None:
        """Note the steps that are made at once, as far as they have begun; none of them goes on."""
        ends_s, self._ends_s = self._ends_s, []
        self._activity.ran(self._run_began_s, ends_s, self._agenda.now_s, self._decoding)

    # --- going on elsewhere ------------------------------------------------------------------------------------------

    def _export(self, visit: Visit) -> None:
        """Copy out the keys and values of segments that are computed."""
        size = self.kv_kind.segment_tokens
        computed = min(visit.offered, visit.computed if not visit.left else visit.computed // size * size)
        positions, visit.copied = computed - visit.copied, computed
        is_last = not visit.left
        if positions or is_last:
            self.between(positions, partial(self._exported, visit) if is_last else _nothing)

    def _exported(self, visit: Visit) -> None:
        if visit.is_over:
            return
        visit.is_over = True
        self.visits -= 1
        self._give_back(visit)
        self.router.exported(visit, self._agenda.now_s)

    def _import(self, visit: Visit) -> None:
        """Begin to bring keys and values of its prompt: some are pulled while others are copied in between steps."""
        if not visit.is_over and visit.request.prefiller is not None:
            _Import(visit, visit.request.prefiller, self).more()

    def pull(self, holder: str, positions: int, then: Callable[[], None]) -> None:
        """Pull keys and values."""
        holders = {holder: positions * self.kv_kind.position_nbytes}
        delay_s = self._transfers.delay_s(self._name, holders)
        self._agenda.after(delay_s, self._transfers.pull, self._name, holders, then)

    def imported(self, visit: Visit) -> None:
        """All that it goes on with has come."""
        if not visit.is_over:
            assert visit.request.prefiller is not None  # noqa: S101 - as it has brought something
            visit.arrives, visit.computed = False, visit.request.prefiller.offered
            self._prompting.append(visit)
            self.router.imported(visit)


class _Import:
    """Keys and values that a request brings from where its prompt was computed, in positions."""

    __slots__ = (
        "_at_once",
        "_came",
        "_copying",
        "_is_pulling",
        "_left",
        "_most",
        "_sender",
        "_text",
        "_visit",
        "_wanted",
    )

    def __init__(self, visit: Visit, sender: Visit, text: QueueText) -> None:
        size = text.kv_kind.segment_tokens
        self._visit = visit
        self._sender = sender
        self._text = text
        self._left = sender.offered
        """Not asked for yet."""
        self._wanted = self._came = 0
        """Asked for, and come and not copied in."""
        self._copying = self._is_pulling = False
        self._most = _SEGMENTS * size
        self._at_once = size * max(1, text.most_pulled_nbytes // (size * text.kv_kind.position_nbytes))

    def more(self) -> None:
        """Ask for more; then copy in what has come."""
        asked = min(self._left, self._most - self._wanted - self._came)
        self._left -= asked
        self._wanted += asked
        if self._wanted or self._came:
            self._pull()
            self._copy()
        else:
            self._text.imported(self._visit)

    def _pull(self) -> None:
        if self._wanted and not self._is_pulling:
            self._is_pulling = True
            positions = min(self._wanted, self._at_once)
            self._text.pull(self._sender.text.id, positions, partial(self._pulled, positions))

    def _pulled(self, positions: int) -> None:
        self._is_pulling = False
        self._wanted -= positions
        self._came += positions
        self._pull()
        self._copy()

    def _copy(self) -> None:
        if self._came and not self._copying:
            positions, self._came = self._came, 0
            self._copying = True
            self._text.between(positions, self._copied)

    def _copied(self) -> None:
        self._copying = False
        if not self._visit.is_over:
            self.more()


class _Copy:
    """Keys and values to copy between steps."""

    __slots__ = ("left", "segment", "then")

    def __init__(self, left: int, segment: int, then: Callable[[], None]) -> None:
        self.left = left
        self.segment = segment
        self.then = then


def _nothing() -> None:
    """Nothing waits for this copy."""
