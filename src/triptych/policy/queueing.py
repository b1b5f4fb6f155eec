"""The order of every queue (requests, pulls, sequences, items), and how many items make a batch."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

AGEING_S = 30.0
"""A request that has waited this long is not overtaken by later arrivals of its priority."""
SHOWN_PRIORITIES = 8
"""Largest absolute priority with a label of its own in metrics."""
SHARE_NBYTES_PER_S = 100 << 20
"""Pulled bytes that make a request count as one second less urgent."""


class Turn(NamedTuple):
    """A queue position; the smallest goes first.

    The lower priority number goes first, as in vLLM, regardless of deadlines: a higher number may starve until its own
    deadline. Within a priority the earlier deadline goes first (least slack), but no deadline counts as later than
    ``AGEING_S`` after arrival, so nothing is overtaken by requests that arrived ``AGEING_S`` after it. Ties go in order
    of arrival.
    """

    priority: int
    due_s: float
    arrival: int


FIRST_COME = Turn(0, 0.0, 0)
"""The same for all, so that they go in order of arrival."""


def turn(*, priority: int, deadline_s: float, arrived_s: float, arrival: int) -> Turn:
    """``deadline_s`` and ``arrived_s`` are on the clock of the queue's process; ``arrival`` is a counter there."""
    return Turn(priority, min(deadline_s, arrived_s + AGEING_S), arrival)


def first_come(*, priority: int, deadline_s: float, arrived_s: float, arrival: int) -> Turn:
    """Like ``turn``, but in order of arrival within a priority, regardless of deadlines."""
    del deadline_s, arrived_s
    return Turn(priority, 0.0, arrival)


def after_share(waiting: Turn, had_nbytes: int) -> Turn:
    """The position of a request's next pull after pulls of ``had_nbytes`` were started for it.

    A large request counts as if it had arrived in parts, at ``SHARE_NBYTES_PER_S`` (ModServe section 4.3, many-to-one
    transfers). An urgent request overtakes at once; small requests that arrived a little later overtake a huge one
    between two of its pulls. Nothing starves: a request is postponed only by what it already received.
    """
    return waiting._replace(due_s=waiting.due_s + had_nbytes / SHARE_NBYTES_PER_S)


def longest_waits(waiting: Iterable[tuple[int, float]]) -> dict[int, float]:
    """By priority, the longest wait, given (priority, seconds waited) of each waiting request.

    Priorities are clipped to ``SHOWN_PRIORITIES``, as callers choose them and the number of labels must be bounded.
    """
    longest: dict[int, float] = {}
    for priority, waited_s in waiting:
        shown = max(-SHOWN_PRIORITIES, min(SHOWN_PRIORITIES, priority))
        longest[shown] = max(waited_s, longest.get(shown, 0.0))
    return longest


def batch_length(sizes: Sequence[tuple[int, int]], *, max_items: int, max_tokens: int, max_nbytes: int) -> int:
    """How many items from the head of the queue form the next batch, given each one's (tokens, bytes).

    Tokens bound the output; bytes (of pixels or features) bound the input: an encoder that merges patches needs much
    memory per token.

    The batch does not wait to fill up: encoding is compute-bound, so a fuller batch gains little (ModServe section 3,
    insights 3 and 4). At least one item is taken, so that one above the limits runs alone.
    """
    tokens = nbytes = 0
    for position, (item_tokens, item_nbytes) in enumerate(sizes[:max_items]):
        tokens += item_tokens
        nbytes += item_nbytes
        if position > 0 and (tokens > max_tokens or nbytes > max_nbytes):
            return position
    return min(len(sizes), max_items)
