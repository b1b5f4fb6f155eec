"""The order of every queue (requests, pulls, sequences, items), and how many items make a batch."""

from collections.abc import Iterable, Sequence
from math import inf

from triptych.domain.queue_position import AGEING_S, QueuePosition, RelativeQueuePosition

AGEING_FACTOR = 4.0
"""A request that has missed its objective passes later arrivals again after this many times its objective ..."""
AGEING_SHARE = 0.5
"""... or this share of its time, ..."""
PATIENCE_S = 5.0
"""... or this long after it was due, whichever is first."""
SHOWN_PRIORITIES = 8
"""Largest absolute priority with a label of its own in metrics."""
SHARE_NBYTES_PER_S = 100 << 20
"""Pulled bytes that make a request count as one second less urgent."""


def by_slo(
    *, priority: int, deadline_s: float, arrived_s: float, arrival: int, due_s: float = inf, needs_s: float = 0.0
) -> QueuePosition:
    """By ``due_s``: arrival and the TTFT objective of the request's class, or the caller's deadline if that is earlier.

    Short requests have short objectives and so pass long ones (ModServe section 5.1 derives both from the isolated
    latency). It is lost when less than ``needs_s`` is left: what it takes from here to its first token with the system
    to itself. All times are on the clock of one process; ``arrival`` is a counter there.
    """
    due_s = min(due_s, deadline_s)
    aged_s = _aged_s(due_s, deadline_s, arrived_s, AGEING_FACTOR * (due_s - arrived_s))
    return QueuePosition(priority, min(due_s, arrived_s + AGEING_S), arrival, due_s - needs_s, aged_s)


def _aged_s(due_s: float, deadline_s: float, arrived_s: float, patience_s: float = inf) -> float:
    """When a request is due that is lost.

    One that has missed only its objective is due again after ``patience_s``, and after half of its time at the latest, so
    that it does not end by its deadline. One whose deadline cannot be met has the last place.
    """
    oldest_s = arrived_s + AGEING_S
    if due_s >= deadline_s:
        return oldest_s
    within_s = min(patience_s, AGEING_SHARE * (deadline_s - arrived_s))
    return min(oldest_s, due_s + PATIENCE_S, max(due_s, arrived_s + within_s))


def by_deadline(
    *, priority: int, deadline_s: float, arrived_s: float, arrival: int, due_s: float = inf, needs_s: float = 0.0
) -> QueuePosition:
    """By the caller's deadline alone: with equal timeouts in order of arrival."""
    del due_s, needs_s
    return QueuePosition(priority, min(deadline_s, arrived_s + AGEING_S), arrival)


def first_come(
    *, priority: int, deadline_s: float, arrived_s: float, arrival: int, due_s: float = inf, needs_s: float = 0.0
) -> QueuePosition:
    """In order of arrival within a priority."""
    del deadline_s, due_s, needs_s
    return QueuePosition(priority, arrived_s, arrival)


def as_called(
    *,
    priority: int,
    deadline_s: float,
    arrived_s: float,
    arrival: int,
    position: RelativeQueuePosition,
) -> QueuePosition:
    """The queue position of a call at an instance. The durations of its ``position`` count from ``arrived_s``.

    If its caller does not say when it is due, it goes by deadline. If the caller does not say when it ages, that counts from the arrival here.
    """
    if position.due_in_s is None:
        return by_deadline(priority=priority, deadline_s=deadline_s, arrived_s=arrived_s, arrival=arrival)
    due_s = arrived_s + position.due_in_s
    lost_s = inf if position.lost_in_s is None else arrived_s + position.lost_in_s
    aged_in_s = position.aged_in_s
    aged_s = _aged_s(due_s, deadline_s, arrived_s) if aged_in_s is None else arrived_s + aged_in_s
    return QueuePosition(priority, min(due_s, arrived_s + AGEING_S), arrival, lost_s, aged_s).behind(position.behind_s)


def after_share(waiting: QueuePosition, had_nbytes: int) -> QueuePosition:
    """The position of a request's next pull after pulls of ``had_nbytes`` were started for it.

    A large request counts as if it had arrived in parts, at ``SHARE_NBYTES_PER_S`` (ModServe section 4.3, many-to-one
    transfers). An urgent request overtakes at once; small requests that arrived a little later overtake a huge one
    between two of its pulls. Nothing starves: a request is postponed only by what it already received.
    """
    return waiting._replace(due_s=waiting.due_s + had_nbytes / SHARE_NBYTES_PER_S) if had_nbytes else waiting


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
