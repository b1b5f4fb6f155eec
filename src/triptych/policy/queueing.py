"""Who is next, wherever something waits: one order for requests, pulls, sequences and items. And how many make a batch."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

AGEING_S = 30.0
"""Whoever has waited for so long is overtaken by nobody of its priority that comes from then on."""
SHOWN_PRIORITIES = 8
"""Of either sign."""
SHARE_NBYTES_PER_S = 100 << 20
"""What a request may pull before it counts as a second less urgent."""


class Turn(NamedTuple):
    """A place in the order; the smaller one goes first.

    Of two priorities the lower number goes first, as vLLM has it, however little time the other has left: it may wait
    for as long as lower numbers keep coming, but never beyond its own deadline. Within a priority the earlier
    deadline goes first (least slack), but no deadline counts as later than ``AGEING_S`` after the arrival. So nobody is
    overtaken by one of its own priority that came ``AGEING_S`` after it. Ties go as they came.
    """

    priority: int
    due_s: float
    arrival: int


FIRST_COME = Turn(0, 0.0, 0)
"""Of those that have no other turn: they go as they came."""


def turn(*, priority: int, deadline_s: float, arrived_s: float, arrival: int) -> Turn:
    """``deadline_s`` and ``arrived_s`` are on one clock, that of the place where it waits; ``arrival`` counts up there."""
    return Turn(priority, min(deadline_s, arrived_s + AGEING_S), arrival)


def first_come(*, priority: int, deadline_s: float, arrived_s: float, arrival: int) -> Turn:
    """As ``turn``, but within a priority they go as they came, whatever time each has left."""
    del deadline_s, arrived_s
    return Turn(priority, 0.0, arrival)


def after_share(waiting: Turn, had_nbytes: int) -> Turn:
    """The turn of a request's next pull, when pulls of ``had_nbytes`` have begun for it.

    A request with many bytes counts as if it had come a part at a time, at ``SHARE_NBYTES_PER_S`` (ModServe section 4.3,
    many-to-one transfers): an urgent one overtakes at once, and a huge one is overtaken, between two of its pulls, by small
    ones that came a little later. Nobody starves: a turn is put off only by what its own request was given.
    """
    return waiting._replace(due_s=waiting.due_s + had_nbytes / SHARE_NBYTES_PER_S)


def longest_waits(waiting: Iterable[tuple[int, float]]) -> dict[int, float]:
    """By priority, the longest of the times waited, given the priority and the time of each that waits.

    Priorities beyond ``-SHOWN_PRIORITIES`` and ``SHOWN_PRIORITIES`` count as these: callers choose them, and what is shown is
    bounded.
    """
    longest: dict[int, float] = {}
    for priority, waited_s in waiting:
        shown = max(-SHOWN_PRIORITIES, min(SHOWN_PRIORITIES, priority))
        longest[shown] = max(waited_s, longest.get(shown, 0.0))
    return longest


def batch_length(sizes: Sequence[tuple[int, int]], *, max_items: int, max_tokens: int, max_nbytes: int) -> int:
    """How many items from the head of the queue make the next batch, given (tokens, bytes) of each in their order.

    Tokens bound what comes out of a pass, bytes (of pixels, of features) what goes into it: an encoder that merges patches
    has much memory to spend on few tokens.

    The batch takes what is there and waits for nothing: encoding is bound by compute, a fuller batch gains little
    (ModServe section 3, insights 3 and 4). At least one item is taken, so that one above the bounds runs
    alone rather than never.
    """
    tokens = nbytes = 0
    for position, (item_tokens, item_nbytes) in enumerate(sizes[:max_items]):
        tokens += item_tokens
        nbytes += item_nbytes
        if position > 0 and (tokens > max_tokens or nbytes > max_nbytes):
            return position
    return min(len(sizes), max_items)
