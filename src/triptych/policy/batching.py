"""Which sequences of a text instance run in its next step, and how far (HydraInfer, algorithm 1).

Ongoing decodes go first, so that a new prompt never delays the next token of an answer by more than one step. What
the token budget then leaves goes to prompts that are already being prefilled, in the order of their turns, and
after them to prompts that wait. The budget bounds the time of a step, and with it the time between two tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from triptych.families.base import Span

MEASURED_SHARE = 0.75
"""Of an objective, what a step may take that is measured while nothing else runs. Preparing items on the same cores, contexts
of sequences and the event loop take their part when it counts: a quarter more was seen on two cores.
"""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt of which ``tokens`` positions from ``first`` on are not computed yet (as an order: are to be computed).

    ``bidirectional``: spans whose positions attend to each other in both directions: a chunk contains all of one or nothing.
    """

    sequence_id: str
    tokens: int
    first: int = 0
    bidirectional: tuple[Span, ...] = ()
    sequences: int = 1
    """Places that it takes: one for each answer to it."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: one token for each of ``decodes``, then ``prefills`` in their order."""

    decodes: tuple[str, ...]
    prefills: tuple[Prefill, ...]

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(prefill.tokens for prefill in self.prefills)


def plan_step(
    decoding: Sequence[str],
    prefilling: Sequence[Prefill],
    waiting: Iterable[Prefill],
    *,
    token_budget: int,
    max_sequences: int,
) -> StepPlan:
    """Fill one step.

    ``decoding`` and ``prefilling`` hold memory already, each in the order of their turns. ``waiting`` holds none, and is asked
    for the next only when that one can begin: it may give out memory then, and ends when there is none. All of
    ``decoding`` run; callers keep ``max_sequences <= token_budget`` so that they fit. The budget is exceeded only by a
    run that may not be cut and that is the first prefill of a step: it would never get its turn otherwise.
    """
    left = token_budget - len(decoding)
    places = max_sequences - len(decoding) - sum(work.sequences for work in prefilling)
    prefills: list[Prefill] = []

    def cut(work: Prefill) -> int:
        tokens = chunk(work, left)
        if not tokens and not prefills:
            tokens = chunk(work, _first_end(work) - work.first)
        if tokens:
            prefills.append(Prefill(work.sequence_id, tokens, work.first, work.bidirectional, work.sequences))
        return tokens

    for work in prefilling:
        if left <= 0:
            break
        left -= cut(work)
    new = iter(waiting)
    while left > 0 and places > 0 and (one := next(new, None)) is not None:
        places -= one.sequences
        left -= cut(one)
    return StepPlan(tuple(decoding), tuple(prefills))


def chunk(work: Prefill, limit: int) -> int:
    """The most tokens of ``work``, up to ``limit``, that do not end inside a bidirectional span; maybe 0."""
    end = work.first + min(work.tokens, limit)
    for run in reversed(work.bidirectional):
        if run.start < end < run.start + run.tokens:
            end = run.start
    return max(0, end - work.first)


def preemption_victim(running: Sequence[str]) -> str:
    """Which sequence to preempt when no KV block is free, of ``running`` in the order of their turns.

    The last: the first is never preempted, so that it always gets to its end, and after it the next.
    """
    return running[-1]


def largest_within(objective_s: float, most: int, measure_s: Callable[[int], float], *, least: int = 1) -> int:
    """The largest batch of ``least`` to ``most`` whose measured time is within the objective, by binary search.

    ``measure_s`` is taken to grow with the batch; none is asked for that is more than twice as large as one that was
    within. ``least`` where nothing larger is.
    """
    low = least
    while low < most and measure_s(min(2 * low, most)) <= objective_s:
        low = min(2 * low, most)
    high = min(2 * low, most)  # too large, unless it is what was found
    while high - low > 1:
        middle = (low + high) // 2
        if measure_s(middle) <= objective_s:
            low = middle
        else:
            high = middle
    return low


def _first_end(work: Prefill) -> int:
    """Where the span that ``work`` begins in ends."""
    ends = [run.start + run.tokens for run in work.bidirectional if run.start <= work.first < run.start + run.tokens]
    return max(ends, default=work.first + 1)
