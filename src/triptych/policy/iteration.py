"""Iterations: which stages share the next iteration of an instance that also encodes (HydraInfer, section 4.2, algorithm 1).

Running decodes are part of every iteration. They are joined either by prompts, within the token budget
(``policy.batching``), or by items for the vision encoder, within the image budget; never by both, which bounds the
duration of an iteration. Prompts go first, as they are closest to a first token; where nothing is decoded (role EP), so
that no iteration has to be short, what is due first goes first; and in an encoder that lends its idle time to text requests
(HeteroServe, section 5.3), items go first.
"""

from dataclasses import dataclass

from triptych.domain.queue_position import QueuePosition


@dataclass(frozen=True, slots=True)
class ImageBudget:
    """The most that the vision encoder computes in one iteration. A larger item runs alone, as it cannot be split."""

    tokens: int
    """Embedding tokens, the output."""
    nbytes: int
    """Bytes of preprocessed items, the input."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """Work that joins the decodes."""

    prefill: bool
    encode: bool


def by_queue_position(*, prompt: QueuePosition | None, item: QueuePosition | None) -> Iteration:
    """The prompt that can be computed or the item that waits, by their queue positions; None if there is none.

    Positions age, so neither stage starves the other.
    """
    encode = item is not None and (prompt is None or item < prompt)
    return Iteration(prefill=not encode, encode=encode)


def encode_first(*, encode_ready: bool, held_back_s: float | None, patience_s: float) -> Iteration:
    """Items if any wait, else prompts: an item waits for the iteration in progress, and for no prompt.

    ``held_back_s`` is for how long prompts that could be computed were not, None if there are none. One that others do not take back
    (the router does) would starve: so prompts run in one iteration every ``patience_s``.
    """
    starves = held_back_s is not None and held_back_s >= patience_s
    return Iteration(prefill=starves or not encode_ready, encode=encode_ready and not starves)


def plan_iteration(
    *, prefill_ready: bool, encode_waited_s: float | None, patience_s: float, held_back: bool
) -> Iteration:
    """Prompts if any can be computed, else items.

    ``encode_waited_s`` is how long the first item has waited, None if there is none.

    The paper's algorithm would starve items while prompts keep coming. Here an item that has waited for ``patience_s``
    goes before prompts, in at most every second iteration (``held_back``: the last iteration held prompts back). So the
    n-th batch of items starts at most ``patience_s`` and 2 n iterations after it was ready, and prompts run at least in
    every second iteration.
    """
    if encode_waited_s is None:
        return Iteration(prefill=True, encode=False)
    if not prefill_ready:
        return Iteration(prefill=False, encode=True)
    queue_positions = encode_waited_s >= patience_s and not held_back
    return Iteration(prefill=not queue_positions, encode=queue_positions)
