"""Any packing of items into arenas, regardless of load: the last step, where largest first finds none."""

from collections.abc import Sequence

from triptych.domain.item_plan import Content
from triptych.policy.placement.filters import Filter, Places, not_excluded, usable
from triptych.policy.placement.pool import Pool
from triptych.policy.placement.wants import Placeable, Want

_MAX_STEPS = 500
_ANY_NUMBER = 1 << 31
"""Of items, where their number has no limit."""


class Search:
    """Searches for packings in a bounded number of steps, which count together."""

    def __init__(self, filters: Sequence[Filter[Placeable]] = ()) -> None:
        """``filters`` are those of the policy."""
        self._filters = [condition.keep for condition in filters if not condition.soft]
        self._steps = 0

    @property
    def spent(self) -> bool:
        """Whether the search gave up, so that finding nothing proves nothing."""
        return self._steps >= _MAX_STEPS

    def pack(self, pool: Pool, wants: Sequence[Want]) -> dict[Content, str] | None:
        """The encoder of each content; None if none was found."""
        firsts = {want.content: want for want in reversed(wants)}
        distinct = sorted(firsts.values(), key=lambda want: -want.nbytes)
        rooms = {place: pool.rooms[place] for place in usable(pool, distinct[0], pool.all)}
        slots = {place: self._slots(pool, place) for place in rooms}
        found = self._fill([(want, self._able(pool, want)) for want in distinct], rooms, slots)
        return None if found is None else {content: pool.names[place] for content, place in found.items()}

    def _able(self, pool: Pool, want: Want) -> Places:
        places = not_excluded(pool, want, usable(pool, want, pool.all))
        for keep in self._filters:
            places = keep(pool, want, places)
        return places

    @staticmethod
    def _slots(pool: Pool, place: int) -> int:
        most = pool.most_items[place]
        return max(0, most - pool.pending[place]) if most else _ANY_NUMBER

    def _fill(
        self, wants: list[tuple[Want, Places]], rooms: dict[int, int], slots: dict[int, int]
    ) -> dict[Content, int] | None:
        """``wants`` with the places that may take them; ``rooms`` and ``slots`` are what is left, and left as they were."""
        self._steps += 1
        if self.spent or sum(want.nbytes for want, _ in wants) > sum(max(0, room) for room in rooms.values()):
            return None
        if len(wants) > sum(slots.values()):
            return None
        if not wants:
            return {}
        (want, able), *rest = wants
        fitting = [place for place in able if rooms[place] >= want.nbytes and slots[place]]
        for place in sorted(fitting, key=lambda place: rooms[place]):
            rooms[place] -= want.nbytes
            slots[place] -= 1
            placed = self._fill(rest, rooms, slots)
            rooms[place] += want.nbytes
            slots[place] += 1
            if placed is not None:
                return placed | {want.content: place}
        return None
