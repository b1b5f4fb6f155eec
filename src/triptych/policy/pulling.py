"""Whose embedding is pulled next: the most urgent request's, but no request takes more than its share of the link."""

from dataclasses import dataclass

SHARE_NBYTES_PER_S = 100 << 20
"""What a request may pull before it counts as a second less urgent."""


@dataclass(frozen=True, slots=True)
class WaitingPull:
    """``had_nbytes``: of pulls that have begun for the same request. ``arrival``: how many pulls came before it."""

    pull_id: int
    deadline_s: float
    had_nbytes: int
    arrival: int


def pull_order(pull: WaitingPull) -> tuple[float, int]:
    """Sort key: the least slack first, slack being counted as if a request with many bytes had
    come a part at a time, at ``SHARE_NBYTES_PER_S`` (ModServe section 4.3: many-to-one transfers).

    So an urgent request overtakes at once, and a huge one is overtaken, between two of its pulls, by small ones that
    came a little later. Nobody starves: the key of a pull that waits only grows by what its own request was given,
    and deadlines of later arrivals pass it in the end.
    """
    return pull.deadline_s + pull.had_nbytes / SHARE_NBYTES_PER_S, pull.arrival
