"""Who is next: the order of waiting requests, and how many waiting items make a batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in a queue: when its caller gives up (``deadline_s``), and how many came before it (``arrival``).

    ``priority`` is its caller's: lower goes first.
    """

    request_id: str
    deadline_s: float
    arrival: int
    priority: int = 0


def turn_order(waiting: Iterable[Waiting]) -> list[Waiting]:
    """The lowest priority first, as vLLM has it, and of one priority the most urgent.

    Slack is the time left until the deadline. ``now_s`` is the same for all of them, so the order by slack is the order
    by deadline (earliest deadline first), and it does not change while nothing arrives: of one priority nobody starves,
    because every deadline is overtaken by later arrivals' deadlines in the end. Ties are served as they came.

    Between priorities the order is strict, and no deadline, however near, lifts a request over it. So one of a high
    number may wait for as long as lower ones keep coming, but never longer than until its own deadline: then its
    caller gets one DeadlineExceeded, and its place is free.
    """
    return sorted(waiting, key=lambda one: (one.priority, one.deadline_s, one.arrival))


def batch_length(sizes: Sequence[tuple[int, int]], *, max_items: int, max_tokens: int, max_nbytes: int) -> int:
    """How many items from the head of the queue make the next batch, given (tokens, bytes) of each in order of arrival.

    Tokens bound what comes out of a pass, bytes (of pixels, of features) what goes into it: a tower that merges patches
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
