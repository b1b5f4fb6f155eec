"""A policy of placement: a row of filters, scores and a pick. docs/adding_a_policy.md shows how to add one."""

from collections.abc import Sequence

from triptych.domain.record import record
from triptych.domain.rng import Rng
from triptych.policy.placement.filters import Filter
from triptych.policy.placement.picks import Pick, in_turn, of_two, spread
from triptych.policy.placement.pool import Pool
from triptych.policy.placement.scores import Score, distance, load, pending, predicted_end
from triptych.policy.placement.wants import Placeable


@record
class PlacementPolicy:
    """How one of the instances that can take an item or a request is chosen, and to which of them it is given."""

    scores: tuple[Score, ...] = ()
    """Compared in this order."""
    pick: Pick = in_turn
    filters: tuple[Filter[Placeable], ...] = ()
    """Beside those that hold for every policy (``items.FILTERS``, ``requests.PROMPT_FILTERS``, ``requests.ANSWER_FILTERS``)."""
    predicts: bool = False
    """It reads backlogs, which are kept only then. What holding an embedding is worth is then weighed in seconds, not in tokens."""

    def choose(self, pool: Pool, want: Placeable, places: Sequence[int], rng: Rng) -> int:
        """One of these places, of which there is at least one."""
        return self.pick(pool, want, places, self.scores, rng)


LEAST_LOADED = PlacementPolicy((load, distance), spread)
PLACEMENTS: dict[str, PlacementPolicy] = {
    "least-loaded": LEAST_LOADED,
    "least-requests": PlacementPolicy((pending,)),
    "power-of-two": PlacementPolicy((load, distance), of_two),
    "predicted": PlacementPolicy((predicted_end, distance), spread, predicts=True),
    "round-robin": PlacementPolicy(),
}
