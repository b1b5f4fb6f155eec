"""Which stages share the next iteration of an instance that encodes as well (HydraInfer, section 4.2, algorithm 1).

Ongoing decodes are in every iteration. Beside them go either prompts, within the token budget (``policy.batching``), or
items for the tower, within the image budget: never both, so that an iteration takes no longer than decodes with the
one or the other. Prompts go first: who is in prefill is closest to a first token, and encoding ahead of prompts that
cannot be computed yet would bring nobody closer to one.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageBudget:
    """The most that the tower does in one iteration. An item that is larger on its own goes alone, for it cannot be cut."""

    tokens: int
    """Embedding tokens: what comes out."""
    nbytes: int
    """Of preprocessed items: what goes in."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """What goes beside the decodes."""

    prefill: bool
    encode: bool


def plan_iteration(
    *, prefill_ready: bool, encode_waited_s: float | None, patience_s: float, held_back: bool
) -> Iteration:
    """Prompts while there are any that can be computed, else items.

    ``encode_waited_s`` is how long the first item has waited for the tower, None where none waits.

    The algorithm says no more, and so lets prompts that never end keep items waiting for ever. Here an item that has
    waited for ``patience_s`` goes before prompts, in every second iteration at most (``held_back``: prompts had to wait
    in the last one). So the tower's n-th batch begins at most ``patience_s`` and 2 n iterations after its items were
    ready, and prompts are computed in every second iteration at least.
    """
    if encode_waited_s is None:
        return Iteration(prefill=True, encode=False)
    if not prefill_ready:
        return Iteration(prefill=False, encode=True)
    turns = encode_waited_s >= patience_s and not held_back
    return Iteration(prefill=not turns, encode=turns)
