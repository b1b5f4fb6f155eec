"""The scheduler of a text engine whose sequences are counts of tokens: for engines that sleep, and for simulations.


    add -> WAITING -- (a place, and KV memory for its longest answers) -> RUNNING -- its last token, or cancel -> gone

Memory is reserved for the longest answers, so nothing is preempted. All choices of a request advance together. As nothing is listed,
many steps of decoding can be made at once (``steady_steps``, ``advance``), and what is asked for at each step is kept as sums.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from triptych.domain.queue_position import FIRST_COME, QueuePosition
from triptych.domain.record import record
from triptych.policy.batching import Prefill, plan_prefills
from triptych.policy.fairness import may_start

S = TypeVar("S", bound="CountedSequence")


@dataclass(eq=False, slots=True, kw_only=True)
class CountedSequence:
    """The choices of one request. Only ``CountedBatch`` changes it."""

    request_id: str
    prompt_tokens: int
    limit: int
    """Most tokens of each choice."""
    length: int
    """Tokens at which each choice ends by itself."""
    choices: tuple[int, ...] = (0,)
    begun: int = 0
    """Tokens that each choice had when it came."""
    queue_position: QueuePosition = FIRST_COME
    arriving: int = 0
    """Positions that come from elsewhere."""
    pauses: bool = False
    """Whether it pauses at its next token."""
    computed: int = field(init=False, default=0)
    """Tokens of the prompt and of ``begun`` that are computed; all choices share them."""
    sent: int = field(init=False)
    """Tokens of each choice."""
    paused: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.sent = self.begun

    @property
    def left(self) -> int:
        """Positions to compute before the next token."""
        return self.prompt_tokens + self.begun - self.computed

    @property
    def is_arriving(self) -> bool:
        return self.computed < self.arriving

    @property
    def is_idle(self) -> bool:
        """Whether it computes nothing although it has a place."""
        return self.paused or self.is_arriving

    @property
    def has_ended(self) -> bool:
        """Whether each choice has its last token."""
        return self.sent >= self.length

    @property
    def most_tokens(self) -> int:
        """KV memory that it may come to need."""
        return self.prompt_tokens + len(self.choices) * self.limit

    @property
    def held_tokens(self) -> int:
        """KV memory that it takes."""
        return self.computed + len(self.choices) * (self.sent - self.begun)

    @property
    def positions(self) -> int:
        """Positions of a choice whose keys and values are there."""
        return self.computed + max(0, self.sent - self.begun - 1)

    @property
    def pending_tokens(self) -> int:
        """Tokens to compute before the next one, and to generate."""
        if self.paused:
            return 0
        arriving = max(0, self.arriving - self.computed)
        return self.left + len(self.choices) * (self.limit - self.sent) - arriving


@record
class CountedStep(Generic[S]):
    """Work of one pass."""

    decodes: int
    """Choices that get their next token."""
    context_tokens: int
    """Tokens of all these choices."""
    prompts: tuple[tuple[int, int], ...]
    """New and cached tokens of each prompt, or part of one."""
    computing: tuple[S, ...]
    """The sequences of these prompts."""
    answered: tuple[S, ...]
    """Sequences that have another token at its end."""

    @property
    def tokens(self) -> int:
        return self.decodes + sum([new_tokens for new_tokens, _ in self.prompts])

    @property
    def mean_context(self) -> float:
        return self.context_tokens / max(1, self.decodes)


class CountedBatch(Generic[S]):
    """Owner of the sequences of an engine that counts tokens: which run, wait, pause or arrive."""

    def __init__(
        self,
        *,
        kv_tokens: int,
        max_sequences: int,
        token_budget: int,
        by_arrival: bool = False,
        known: Callable[[S], int] = lambda _: 0,
    ) -> None:
        """``by_arrival``: within a priority in the order of ``add``, as vLLM does, whatever is due. ``known`` says how many positions of a
        sequence that is about to start need not be computed.
        """
        self.kv_tokens = kv_tokens
        self.max_sequences = max_sequences
        self.token_budget = token_budget
        self._most_sequences = max_sequences
        """The largest ``max_sequences`` so far: what began under it runs on."""
        self._known = known
        self._arrivals = count() if by_arrival else None
        self._waiting: dict[str, S] = {}
        self._running: dict[str, S] = {}
        self._decoding: list[S] | None = None
        """Sequences that get a token with each step, in the order in which they started; None where that is to be found anew."""
        self.pending_tokens = 0
        """Of all together, paused ones apart."""
        self._held_tokens = 0
        """KV memory that is taken, ..."""
        self._reserved_tokens = 0
        """... and that running ones may come to need."""
        self._places = 0
        """Choices that run."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def waiting(self) -> Mapping[str, S]:
        """Sequences that have not started, by request. For reading."""
        return self._waiting

    @property
    def running(self) -> Mapping[str, S]:
        """The others, in the order in which they started. For reading."""
        return self._running

    @property
    def free_tokens(self) -> int:
        """KV memory that nothing takes."""
        return max(0, self.kv_tokens - self._held_tokens)

    def find(self, request_id: str) -> S | None:
        return self._running.get(request_id) or self._waiting.get(request_id)

    # --- requests ----------------------------------------------------------------------------------------------------

    def add(self, sequence: S) -> None:
        """Let a sequence wait from now on. The caller makes sure that it fits on its own."""
        sequence.arriving = min(sequence.arriving, sequence.left - 1)
        if self._arrivals is not None:
            sequence.queue_position = QueuePosition(sequence.queue_position.priority, 0.0, next(self._arrivals))
        self._waiting[sequence.request_id] = sequence
        self.pending_tokens += sequence.pending_tokens

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """Remove a request or one of its choices. Unknown ones are ignored."""
        sequence = self.find(request_id)
        if sequence is None:
            return
        self._count(sequence, -1)
        sequence.choices = tuple([number for number in sequence.choices if choice is not None and number != choice])
        if sequence.choices:
            self._count(sequence, 1)
        else:
            self._waiting.pop(request_id, None)
            self._running.pop(request_id, None)
        self._decoding = None

    def limit(self, max_sequences: int, token_budget: int) -> None:
        """Set the limits of the next steps. What runs goes on."""
        self.max_sequences, self.token_budget = max_sequences, token_budget
        self._most_sequences = max(self._most_sequences, max_sequences)

    def reorder(self, request_id: str, queue_position: QueuePosition) -> None:
        """Give a request another queue position, if it waits and not only its arrival counts."""
        if self._arrivals is None and (sequence := self._waiting.get(request_id)) is not None:
            sequence.queue_position = queue_position

    def pause(self, request_id: str) -> None:
        """Give a request no more tokens. Unknown ones are ignored."""
        if (sequence := self.find(request_id)) is not None:
            self._set(sequence, paused=True)

    @property
    def awaiting(self) -> dict[str, S]:
        """Sequences that have started, and whose keys and values come from elsewhere, by request."""
        return {
            name: sequence
            for name, sequence in self._running.items()
            if sequence.computed < sequence.arriving and not sequence.paused
        }

    def arrive(self, sequence: S, end: int) -> None:
        """The positions up to ``end`` have arrived. The last token is always computed."""
        self._set(sequence, computed=max(sequence.computed, min(end, sequence.computed + sequence.left - 1)))

    def end_arrival(self, request_id: str) -> None:
        """Nothing more arrives: what is missing is computed. Unknown ones are ignored."""
        if (sequence := self.find(request_id)) is not None:
            self._set(sequence, arriving=0)

    def _set(
        self, sequence: S, *, paused: bool | None = None, computed: int | None = None, arriving: int | None = None
    ) -> None:
        self._count(sequence, -1)
        sequence.paused = sequence.paused if paused is None else paused
        sequence.computed = sequence.computed if computed is None else computed
        sequence.arriving = sequence.arriving if arriving is None else arriving
        self._count(sequence, 1)
        self._decoding = None

    def _count(self, sequence: S, times: int) -> None:
        self.pending_tokens += times * sequence.pending_tokens
        if sequence.request_id in self._running:
            self._held_tokens += times * sequence.held_tokens
            self._reserved_tokens += times * sequence.most_tokens
            self._places += times * len(sequence.choices)

    # --- what is next ------------------------------------------------------------------------------------------------

    @property
    def prefill_queue_position(self) -> QueuePosition | None:
        """The first queue position of those that the next step could compute part of, or start; None if there are none."""
        positions = [sequence.queue_position for sequence in self._prompting()]
        if self._waiting:
            startable = [
                sequence
                for sequence in self._waiting.values()
                if not sequence.paused and self._may_start(sequence, self._places, 0)
            ]
            first = min(startable, key=_order, default=None)
            if first is not None and (first.most_tokens <= self._unreserved_tokens or not self._running):
                positions.append(first.queue_position)
        return min(positions, default=None)

    @property
    def can_step(self) -> bool:
        """Whether the next step would do anything."""
        return (
            bool(self._decodes())
            or any(not sequence.is_idle for sequence in self._running.values())
            or self.prefill_queue_position is not None
        )

    def steady_steps(self) -> int:
        """How many steps, from the next one on, only decode the sequences that decode now; 0 if the next may do anything else.

        With the last of them a sequence ends, unless something comes before.
        """
        decoding = self._decodes()
        if not decoding or self.prefill_queue_position is not None:
            return 0
        return min([sequence.length - sequence.sent for sequence in decoding])

    def decoding(self) -> tuple[int, int]:
        """The choices that a step of decoding alone gives a token, and their tokens together."""
        decoding = self._decodes()
        decodes = context_tokens = 0
        for sequence in decoding:
            choices = len(sequence.choices)
            decodes += choices
            context_tokens += choices * (sequence.prompt_tokens + sequence.sent)
        return decodes, context_tokens

    @property
    def decoding_sequences(self) -> tuple[S, ...]:
        """Sequences that get a token with each step, in the order in which they started."""
        return tuple(self._decodes())

    def _decodes(self) -> list[S]:
        if self._decoding is None:
            self._decoding = [
                sequence for sequence in self._running.values() if not (sequence.left or sequence.is_idle)
            ]
        return self._decoding

    def _prompting(self) -> list[S]:
        if len(self._decodes()) == len(self._running):
            return []
        return [sequence for sequence in self._running.values() if sequence.left and not sequence.is_idle]

    @property
    def _unreserved_tokens(self) -> int:
        """KV memory that no running request may come to need."""
        return self.kv_tokens - self._reserved_tokens

    def _may_start(self, sequence: S, running: int, started_beyond: int) -> bool:
        return may_start(
            sequence.queue_position,
            wanted=len(sequence.choices),
            running=running,
            places=self.max_sequences,
            begun=started_beyond,
        )

    # --- steps -------------------------------------------------------------------------------------------------------

    def begin(self, *, prefill: bool = True) -> CountedStep[S]:
        """Compute the next step. Its tokens are there with ``end``. Without ``prefill`` it only decodes."""
        decoding = self._decodes()
        decodes, context_tokens = self.decoding()
        answered = list(decoding)
        prompts: list[tuple[int, int]] = []
        computing: list[S] = []
        if prefill and (self._waiting or len(decoding) < len(self._running)):
            for work in plan_prefills(self._prompts(), self.token_budget - decodes):
                sequence = self._running.get(work.sequence_id) or self._start(self._waiting[work.sequence_id])
                prompts.append((work.tokens, sequence.computed))
                computing.append(sequence)
                self._set(sequence, computed=sequence.computed + work.tokens)
                if not sequence.left:
                    answered.append(sequence)
        return CountedStep(decodes, context_tokens, tuple(prompts), tuple(computing), tuple(answered))

    def end(self, step: CountedStep[S]) -> Sequence[S]:
        """Give the sequences of a step their tokens. Returns them; those that end with it are gone."""
        for sequence in step.answered:
            choices = len(sequence.choices)
            self.pending_tokens -= choices
            self._held_tokens += choices
            sequence.sent += 1
            if sequence.pauses:
                self._set(sequence, paused=True)
            if sequence.sent >= sequence.length:
                self._count(sequence, -1)
                del self._running[sequence.request_id]
                self._decoding = None
        return step.answered

    def advance(self, steps: int) -> None:
        """Make so many steps that only decode, at most all but the last of ``steady_steps``: no sequence ends."""
        decoding, choices = self._decodes(), 0
        for sequence in decoding:
            sequence.sent += steps
            choices += len(sequence.choices)
        self.pending_tokens -= steps * choices
        self._held_tokens += steps * choices

    def _prompts(self) -> Iterator[Prefill]:
        """Sequences that have begun and those for which there is a place, by their queue positions."""
        running, started_beyond = self._places, 0
        waiting = [sequence for sequence in self._waiting.values() if not sequence.paused]
        left_tokens = self._unreserved_tokens
        for sequence in sorted([*self._prompting(), *waiting], key=_order):
            if sequence.request_id in self._waiting:
                if not self._may_start(sequence, running, started_beyond):
                    continue
                if sequence.most_tokens > left_tokens and running:
                    left_tokens = 0  # nobody passes it
                    continue
                self._set(sequence, computed=self._known(sequence))
                running += len(sequence.choices)
                left_tokens -= sequence.most_tokens
                started_beyond += sequence.queue_position.beyond_share * len(sequence.choices)
                if sequence.is_arriving:
                    self._start(sequence)
                    continue
            yield Prefill(sequence.request_id, sequence.left, sequence.computed, sequences=len(sequence.choices))

    def _start(self, sequence: S) -> S:
        self._count(sequence, -1)
        self._running[sequence.request_id] = self._waiting.pop(sequence.request_id)
        self._count(sequence, 1)
        self._decoding = None
        return sequence

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        everyone = [*self._waiting.values(), *self._running.values()]
        running = self._running.values()
        assert self.pending_tokens == sum(sequence.pending_tokens for sequence in everyone), (
            "pending tokens do not add up"
        )
        assert self._held_tokens == sum(sequence.held_tokens for sequence in running), "KV memory does not add up"
        assert self._reserved_tokens == sum(sequence.most_tokens for sequence in running), (
            "reserved memory does not add up"
        )
        assert self._places == sum(len(sequence.choices) for sequence in running), "places do not add up"
        assert self._places <= self._most_sequences, "too many run"
        assert not self._waiting.keys() & self._running.keys(), "a sequence waits and runs"
        assert len(self._running) < 2 or self._reserved_tokens <= self.kv_tokens, "too much memory is reserved"
        decoding = [sequence for sequence in running if not (sequence.left or sequence.is_idle)]
        assert self._decoding is None or self._decoding == decoding, "other sequences decode"


def _order(sequence: CountedSequence) -> QueuePosition:
    return sequence.queue_position
