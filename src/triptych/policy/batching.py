"""Batching: which sequences of a text instance run in its next step, and how many tokens of each (HydraInfer, algorithm 1).

Ongoing decodes go first, so that a new prompt never delays the next token of an answer by more than one step. What
the token budget then leaves goes to prompts in the order of their turns, begun or not: a prompt of many chunks is passed
between two of them by one that is due earlier. The budget bounds the time of a step, and with it the time between two tokens;
steps without decodes may compute more of the prompts than steps with some.
"""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

from triptych.domain.record import record
from triptych.domain.stage import Stage
from triptych.families.base import Span

MEASURED_SHARE = 0.75
"""The share of an objective that a step may take when measured on an idle machine. Under load, preprocessing on the
same cores, longer contexts and the event loop add to it: a quarter more was measured on two cores."""


ALL_NBYTES = 1 << 62
"""More than there is."""


@record
class Prefill:
    """The next ``tokens`` positions of a prompt from ``first`` on: still to compute, or in a plan the chunk to compute.

    A chunk contains all or nothing of each span of ``bidirectional``, whose positions attend to each other both ways.
    """

    sequence_id: str
    tokens: int
    first: int = 0
    bidirectional: tuple[Span, ...] = ()
    sequences: int = 1
    """Number of sequences it becomes: one per choice."""


@record
class StepPlan:
    """Work of one step: one token for each of ``decodes``, then ``prefills`` in order."""

    decodes: tuple[str, ...]
    prefills: tuple[Prefill, ...]

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(prefill.tokens for prefill in self.prefills)


def plan_step(
    decoding: Sequence[str], prompts: Iterable[Prefill], *, token_budget: int, beside_decodes: int | None = None
) -> StepPlan:
    """Fill one step.

    ``decoding`` already hold KV blocks, and all of them run; callers keep their number within ``token_budget``. Beside them
    ``beside_decodes`` tokens of prompts are computed at most; None: as many as ``token_budget`` leaves. ``prompts``: as for
    ``plan_prefills``.
    """
    left = token_budget - len(decoding)
    if decoding and beside_decodes is not None:
        left = min(left, beside_decodes)
    return StepPlan(tuple(decoding), plan_prefills(prompts, left))


def plan_prefills(prompts: Iterable[Prefill], left: int) -> tuple[Prefill, ...]:
    """Fill what decodes leave of a step: ``left`` tokens.

    ``prompts`` come in queue order, those that hold blocks and those that can start. It is a lazy iterator: the next element is
    taken only when there is budget for it, and may allocate blocks then. Only a bidirectional span that is the first prefill of a
    step may exceed the budget, as it could never run otherwise.
    """
    prefills: list[Prefill] = []
    coming = iter(prompts)
    while left > 0 and (work := next(coming, None)) is not None:
        tokens = chunk(work, left)
        if not tokens and not prefills:
            tokens = chunk(work, _first_end(work) - work.first)
        if tokens:
            prefills.append(Prefill(work.sequence_id, tokens, work.first, work.bidirectional, work.sequences))
        left -= tokens
    return tuple(prefills)


def chunk(work: Prefill, limit: int) -> int:
    """The most tokens of ``work``, up to ``limit``, that do not end inside a bidirectional span; may be 0."""
    end = work.first + min(work.tokens, limit)
    for run in reversed(work.bidirectional):
        if run.start < end < run.start + run.tokens:
            end = run.start
    return max(0, end - work.first)


def preemption_victim(running: Sequence[str], idle: AbstractSet[str] = frozenset()) -> str:
    """The sequence of ``running``, in queue order, to preempt when no KV block is free: the last. So the first one
    always runs to its end.

    Those in ``idle`` compute nothing, and leave or begin by themselves: they are spared until only one other is left.
    """
    computing = [sequence_id for sequence_id in running if sequence_id not in idle]
    return (
        computing[-1]
        if len(computing) > 1 or not idle
        else [sequence_id for sequence_id in running if sequence_id in idle][-1]
    )


def largest_within(objective_s: float, most: int, measure_s: Callable[[int], float], *, least: int = 1) -> int:
    """The largest batch from ``least`` to ``most`` whose measured time is within the objective, by binary search.

    ``measure_s`` is assumed to grow with the batch. No batch is measured that is more than twice as large as one that
    was within. Returns ``least`` if nothing larger is.
    """
    low = least
    while low < most and measure_s(min(2 * low, most)) <= objective_s:
        low = min(2 * low, most)
    high = min(2 * low, most)  # too large, or equal to low
    while high - low > 1:
        middle = (low + high) // 2
        if measure_s(middle) <= objective_s:
            low = middle
        else:
            high = middle
    return low


def smallest_efficient(
    most: int, measure_s: Callable[[int], float], *, enough_s: float, worthwhile: float, short_s: float = 0.0
) -> int:
    """The smallest batch, of 1, 2, 4, ... up to ``most``, after which twice as many would take more than ``worthwhile`` of twice the time.

    None is measured that is larger than one that took ``enough_s``: what is so long has few costs that a larger batch would share. One that
    took less than ``short_s`` is too small, whatever a larger one gains.
    """
    size, taken_s = 1, measure_s(1)
    while taken_s < enough_s and 2 * size <= most:
        doubled_s = measure_s(2 * size)
        if taken_s >= short_s and doubled_s > worthwhile * 2 * taken_s:
            break
        size, taken_s = 2 * size, doubled_s
    return size


def _first_end(work: Prefill) -> int:
    """The end of the bidirectional span in which ``work`` starts."""
    ends = [run.start + run.tokens for run in work.bidirectional if run.start <= work.first < run.start + run.tokens]
    return max(ends, default=work.first + 1)


def most_copied_nbytes(stages: AbstractSet[Stage], beside_decodes: int) -> int:
    """Bytes of keys and values that may be copied between two steps of an instance with these open stages.

    Only decodes are held up by copies. Without them a bound would delay the copies alone: a step that computes 2,048 tokens leaves
    112 MiB of them to copy in a model of 7 billion parameters with grouped heads, and 1 GiB without.
    """
    return beside_decodes if Stage.DECODE in stages else ALL_NBYTES
