"""Which refused requests may come back when: a schedule of promised capacity, so that ``Retry-After`` is kept.

A tenant's refused requests are promised places one after the other, as far apart as its share of the slowest stage takes for
them. A request that comes back is known by its content and its tenant. What is promised is no place in a queue: other requests
are admitted as if it was taken, and whoever does not come back leaves it to the next.
"""

from collections import OrderedDict, deque

PROMISED_SHARE = 0.8
"""Of the capacity; the rest is for requests that come for the first time."""
LONGEST_S = 60.0
"""A place is promised within this time. Clients commonly ignore a longer Retry-After."""
EARLY_S = 0.5
"""A request may come back this much before its place ..."""
GRACE_S = 10.0
"""... and until this much after it."""
_MAX_PROMISES = 8192
_MAX_TENANTS = 1024


class Promises:
    """Owner of the promises of a router. Contents are any values that are equal for a request that is sent again."""

    def __init__(self) -> None:
        self._ends_s: OrderedDict[str, float] = OrderedDict()
        """When the schedule of each tenant ends. The one that got a place longest ago is first."""
        self._places: OrderedDict[int, deque[float]] = OrderedDict()
        """The places of each content, in order. The content that was promised one longest ago is first."""
        self._count = 0

    @property
    def count(self) -> int:
        """Promises that have been made and not been taken, of which some may have expired."""
        return self._count

    def promise(self, tenant: str, content: int, *, after_s: float, takes_s: float, now_s: float) -> float:
        """The time after which a refused request is admitted: at least ``after_s``, and behind the places promised before.

        It takes ``takes_s`` of its tenant's share. If that would be after ``LONGEST_S``, nothing is promised and it is that.
        """
        self._forget_expired(now_s)
        begins_s = max(now_s + after_s, self._ends_s.get(tenant, now_s))
        if begins_s > now_s + LONGEST_S or self._count >= _MAX_PROMISES:
            return LONGEST_S
        self._ends_s[tenant] = begins_s + takes_s / PROMISED_SHARE
        self._ends_s.move_to_end(tenant)
        if len(self._ends_s) > _MAX_TENANTS:
            self._ends_s.popitem(last=False)
        self._places.setdefault(content, deque()).append(begins_s)
        self._places.move_to_end(content)
        self._count += 1
        return begins_s - now_s

    def is_due(self, content: int, now_s: float) -> bool:
        """Whether a request with this content has been promised a place for now."""
        places = self._places.get(content)
        if places is None:
            return False
        while places and places[0] + GRACE_S < now_s:
            places.popleft()
            self._count -= 1
        if not places:
            del self._places[content]
            return False
        return places[0] - EARLY_S <= now_s

    def take(self, content: int) -> None:
        """The request has been admitted at its place."""
        places = self._places[content]
        places.popleft()
        self._count -= 1
        if not places:
            del self._places[content]

    def ahead_s(self, tenant: str, within_s: float, now_s: float) -> float:
        """How much of a tenant's share is promised in the next ``within_s``, in seconds of it."""
        return PROMISED_SHARE * max(0.0, min(within_s, self._ends_s.get(tenant, now_s) - now_s))

    def _forget_expired(self, now_s: float) -> None:
        while self._places:
            content, places = next(iter(self._places.items()))
            if places[-1] + GRACE_S >= now_s:
                return
            self._count -= len(places)
            del self._places[content]

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        assert self._count == sum(map(len, self._places.values())), "promises do not add up"  # noqa: S101 - invariant
        for places in self._places.values():
            assert places, "a content without promises"  # noqa: S101 - invariant
