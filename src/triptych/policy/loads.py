"""What the instances of a pool have to do, as lists of numbers, so that the least loaded one is found without a loop over
objects: a router that decides 1,000 times per second before 100 instances has 10 us for each decision.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import TypeVar

from triptych.domain.item_plan import Content
from triptych.domain.rng import Rng

NOT_USED = 1 << 62
"""Load of an instance that gets nothing while there is another: it is not usable, in backoff, or takes no further item."""
ANY_NUMBER = 1 << 31
"""Of items, where their number has no limit."""
_PENDING_BITS = 32
_MOST_TOKENS = (NOT_USED >> _PENDING_BITS) - 1
"""More are not told apart."""
_LEAST_CHOICE = 3
"""Of two instances the less loaded would always be the same one, for all routers."""

Load = TypeVar("Load", int, float, tuple[int, int])


class Loads:
    """By place, which is the order of the instances' names. ``machine.router.kept_pool`` keeps it up to date.

    Loads are compared by tokens, then by items or requests: both are in one number.
    """

    __slots__ = ("hashes", "ids", "left", "loads", "names", "places", "rooms")

    def __init__(self, names: Sequence[str], ids: Sequence[str]) -> None:
        """Nothing is known of the instances' loads yet: they are not used. ``ids`` are their own, empty if unknown."""
        self.names = names
        self.ids = ids
        self.places = {name: place for place, name in enumerate(names)}
        self.hashes = [_hashed_id(own or name) for own, name in zip(ids, names, strict=True)]
        self.loads = [NOT_USED] * len(names)
        self.rooms = [0] * len(names)
        self.left = [0] * len(names)

    def put(self, place: int, tokens: int, pending: int, room: int = 0, left: int = ANY_NUMBER) -> None:
        """An instance has these tokens of so many items or requests to do, and room for so many bytes and further items."""
        self.loads[place] = (min(tokens, _MOST_TOKENS) << _PENDING_BITS) + pending if left > 0 else NOT_USED
        self.rooms[place] = room
        self.left[place] = left

    def put_aside(self, place: int) -> None:
        """The instance is not used."""
        self.loads[place], self.rooms[place], self.left[place] = NOT_USED, 0, 0

    def copy(self) -> "Loads":
        """With numbers of its own, to count what a decision adds before it is complete."""
        made = Loads.__new__(Loads)
        made.names, made.ids, made.places, made.hashes = self.names, self.ids, self.places, self.hashes
        made.loads, made.rooms, made.left = self.loads.copy(), self.rooms.copy(), self.left.copy()
        return made

    def add(self, place: int, tokens: int, nbytes: int) -> None:
        """One more item."""
        self.rooms[place] -= nbytes
        self.left[place] -= 1
        self.loads[place] = self.loads[place] + (tokens << _PENDING_BITS) + 1 if self.left[place] > 0 else NOT_USED

    def of(self, place: int) -> tuple[int, int, int]:
        """The load, room and number of further items of an instance."""
        return self.loads[place], self.rooms[place], self.left[place]

    @property
    def used_ids(self) -> list[str]:
        """The ids of those in use."""
        return [one for one, load in zip(self.ids, self.loads, strict=True) if load < NOT_USED]

    def tokens(self, place: int) -> int:
        return self.loads[place] >> _PENDING_BITS

    def takes(self, place: int, nbytes: int) -> bool:
        """Whether an item of this size fits there now."""
        return self.loads[place] < NOT_USED and self.rooms[place] >= nbytes

    def least(self, nbytes: int, content: Content) -> int | None:
        """The least loaded that has room for the item, of equal ones that which the content prefers; None if none has room."""
        loads, rooms = self.loads, self.rooms
        if not loads:
            return None
        least = min(loads)
        if least == NOT_USED:
            return None
        place, equal = loads.index(least), loads.count(least)
        if equal == 1 and rooms[place] >= nbytes:
            return place
        if equal == len(loads) and min(rooms) >= nbytes:
            return _heaviest(self.hashes, content)
        places = [place for place, load in enumerate(loads) if load == least and rooms[place] >= nbytes]
        if not places:
            roomy = [load for load, room in zip(loads, rooms, strict=True) if load < NOT_USED and room >= nbytes]
            if not roomy:
                return None
            least = min(roomy)
            places = [place for place, load in enumerate(loads) if load == least and rooms[place] >= nbytes]
        return self._preferred(places, content)

    def less_of_two(self, nbytes: int, content: Content) -> int | None:
        """The less loaded of the two that the content prefers among the ``less_loaded`` with room for the item; None if none has room."""
        loads = self.loads
        roomy = [place for place, load in enumerate(loads) if load < NOT_USED and self.rooms[place] >= nbytes]
        if not roomy:
            return None
        half = [roomy[one] for one in less_loaded([loads[place] for place in roomy])]
        two = [half[one] for one in _two_heaviest([self.hashes[place] for place in half], content)]
        return min(two, key=lambda place: loads[place])

    def least_of_two(self, rng: Rng) -> list[int]:
        """The least loaded of two random ones among the ``less_loaded``, both if they are equal; empty if none is in use."""
        loads = self.loads
        used = [place for place, load in enumerate(loads) if load < NOT_USED]
        two = [used[one] for one in two_of(less_loaded([loads[place] for place in used]), rng)]
        least = min([loads[place] for place in two], default=NOT_USED)
        return [place for place in two if loads[place] == least]

    def _preferred(self, places: list[int], content: Content) -> int:
        hashes = self.hashes
        return places[_heaviest([hashes[place] for place in places], content)]

    def least_in_turn(self, turn: int) -> list[int]:
        """The least loaded ones, ``turn`` of those in use being skipped and put last; empty if none is in use."""
        loads = self.loads
        least = min(loads, default=NOT_USED)
        if least == NOT_USED:
            return []
        equal = [place for place, load in enumerate(loads) if load == least]
        if len(equal) == 1:
            return equal
        first = turn % len(loads)
        if NOT_USED in loads:
            used = [place for place, load in enumerate(loads) if load < NOT_USED]
            first = used[turn % len(used)]
        skipped = bisect_left(equal, first)
        return equal[skipped:] + equal[:skipped]


def less_loaded(loads: Sequence[Load]) -> list[int]:
    """The places of the less loaded half of these, but of no fewer than three, and of all that are equal to one of these."""
    if len(loads) <= _LEAST_CHOICE:
        return list(range(len(loads)))
    most = sorted(loads)[max(_LEAST_CHOICE, (len(loads) + 1) // 2) - 1]
    return [place for place, load in enumerate(loads) if load <= most]


def two_of(places: Sequence[int], rng: Rng) -> list[int]:
    """Two random ones, in random order, or all if they are fewer."""
    if len(places) < 2:
        return list(places)
    first = int(rng.random() * len(places))
    second = int(rng.random() * (len(places) - 1))
    return [places[first], places[second + (second >= first)]]


def preferred(ids: Sequence[str], content: Content) -> int:
    """The place of the id with the highest weight for this content (rendezvous hashing: Thaler and Ravishankar, 1998).

    Routers that know nothing of each other agree on it, so that the encoder joins what they send it at the same time,
    and finds what it encoded for another. Different contents spread evenly. An instance that joins takes only its own
    share of the contents from the others; of one that leaves, the others get equal parts.
    """
    return _heaviest([_hashed_id(one) for one in ids], content)


def preferred_two(ids: Sequence[str], content: Content) -> list[int]:
    """The places of the two with the highest weights, or of all if they are fewer; the highest first."""
    return _two_heaviest([_hashed_id(one) for one in ids], content)


def _two_heaviest(hashes: list[int], content: Content) -> list[int]:
    weights = _weights(hashes, content)
    return sorted(range(len(weights)), key=lambda place: -weights[place])[:2]


def _heaviest(hashes: list[int], content: Content) -> int:
    if len(hashes) == 1:
        return 0
    weights = _weights(hashes, content)
    return weights.index(max(weights))


def _weights(hashes: list[int], content: Content) -> list[int]:
    digest, salt = content
    item = _hashed(b"%d %b %b" % (len(digest), digest, salt))
    # Of two hashes the product's upper bits depend on all bits of both, which is all that a comparison needs.
    # Of 30 bits, as Python computes with as many at once.
    return [(item ^ one) * _MULTIPLIER & _MASK for one in hashes]


@lru_cache(maxsize=4096)
def _hashed_id(instance_id: str) -> int:
    return _hashed(instance_id.encode())


def _hashed(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=4, person=b"triptych-prefer").digest(), "little") & _MASK


_MASK = (1 << 30) - 1
_MULTIPLIER = 0x278DDE6D  # 2**30 over the golden ratio, as in Fibonacci hashing
