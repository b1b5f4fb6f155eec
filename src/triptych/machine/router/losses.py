"""Instances that a request was lost with: it may be what ends them (docs/adr/0057)."""

from collections.abc import Set as AbstractSet

from triptych.domain.record import record

MOST_ENDED = 2
"""Instances that may end while they work on a request. Then it fails alone."""


@record
class Loss:
    """An instance was lost while it worked on a request. It has ended, unless it turns out that it answers."""

    name: str
    """Address of the instance."""
    epoch: int
    """A restarted instance has another one."""


class Losses:
    """Owner of the instances that a request was lost with.

    Part of ``machine.router.request.RequestMachine``, which alone changes it.

    All attempts count together: at items, at text instances, and at beginnings of the prompt. They count until the request gets further
    than where it was lost, as what ends an instance ends the next one at the same place.
    """

    def __init__(self) -> None:
        self.lost: frozenset[Loss] = frozenset()
        """For reading: while there are any, the request is suspected of ending instances."""
        self._ended: frozenset[Loss] = frozenset()
        """Losses of instances whose engines said that they have failed."""

    @property
    def too_many(self) -> bool:
        return len(self.lost) >= MOST_ENDED

    def doubtful(self, loss: Loss, *, certain: bool) -> AbstractSet[Loss]:
        """Whose ends are to be made sure of before this further loss counts; none while nothing depends on it."""
        lost = self.lost | {loss}
        ended = self._ended | {loss} if certain else self._ended
        return lost - ended if len(lost) >= MOST_ENDED else frozenset()

    def got_further(self) -> None:
        """An instance has computed what the others ended by."""
        self.lost = self._ended = frozenset()

    def add(self, loss: Loss, survivors: AbstractSet[Loss], *, certain: bool) -> None:
        """``certain``: its engine said so. ``survivors`` still answer: only the connection to them had broken."""
        self._ended |= {loss} if certain else frozenset()
        self.lost = (self.lost | {loss}) - (survivors - self._ended)
