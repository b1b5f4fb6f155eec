"""Promises of which refused requests may come back when: a schedule of promised capacity, so that ``Retry-After`` is kept.

A tenant's refused requests are promised places one after the other, as far apart as its share of the slowest stage takes for
them. A request that comes back is known by its content and its tenant. What is promised is no place in a queue: other requests
are admitted as if it was taken, and whoever does not come back leaves it to the next. A content has one place at a time, so
that who comes too early gets nothing by it; equal requests of several callers are told different times all the same.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import inf

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


@dataclass(slots=True)
class _Content:
    place_s: float
    """The promised place; -inf once that is taken."""
    told_s: float
    """When the last that was refused with it was told to come, at ``place_s`` or later."""


class Promises:
    """Owner of the promises of a router. Contents are any values that are equal for a request that is sent again."""

    def __init__(self) -> None:
        self._ends_s: OrderedDict[str, float] = OrderedDict()
        """When the schedule of each tenant ends. The one that got a place longest ago is first."""
        self._contents: OrderedDict[int, _Content] = OrderedDict()
        """The one that was refused longest ago is first."""

    def __len__(self) -> int:
        """Contents that are remembered, with or without a place."""
        return len(self._contents)

    @property
    def has_given(self) -> bool:
        """Whether any place has been promised since the start."""
        return bool(self._ends_s)

    def promise(self, tenant: str, content: int, *, after_s: float, takes_s: float, now_s: float) -> float:
        """The time after which a refused request is to come: at least ``after_s``, and behind the places promised before.

        It takes ``takes_s`` of its tenant's share. If that would be after ``LONGEST_S``, nothing is promised and it is that.
        """
        self._forget_expired(now_s)
        at_s, apart_s, latest_s = now_s + after_s, takes_s / PROMISED_SHARE, now_s + LONGEST_S
        known = self._contents.get(content)
        if known is not None and known.place_s + GRACE_S >= now_s:  # it is early, or is another's
            known.told_s = min(max(at_s, known.told_s + apart_s), latest_s)
            self._contents.move_to_end(content)
            return min(known.told_s - now_s, LONGEST_S)  # it is rounded
        place_s = max(at_s, self._ends_s.get(tenant, now_s))
        if place_s > latest_s or len(self._contents) >= _MAX_PROMISES:
            return LONGEST_S
        self._ends_s[tenant] = place_s + apart_s
        self._ends_s.move_to_end(tenant)
        if len(self._ends_s) > _MAX_TENANTS:
            self._ends_s.popitem(last=False)
        self._contents[content] = _Content(place_s, place_s if known is None else max(place_s, known.told_s))
        self._contents.move_to_end(content)
        return min(place_s - now_s, LONGEST_S)

    def is_due(self, content: int, now_s: float) -> bool:
        """Whether a request with this content has been promised a place for now."""
        known = self._contents.get(content)
        return known is not None and known.place_s - EARLY_S <= now_s <= known.place_s + GRACE_S

    def take(self, content: int) -> None:
        """A request with this content, which is due, has come."""
        self._contents[content].place_s = -inf

    def ahead_s(self, tenant: str, within_s: float, now_s: float) -> float:
        """How much of a tenant's share is promised in the next ``within_s``, in seconds of it."""
        return PROMISED_SHARE * max(0.0, min(within_s, self._ends_s.get(tenant, now_s) - now_s))

    def _forget_expired(self, now_s: float) -> None:
        while self._contents:
            content, known = next(iter(self._contents.items()))
            if known.told_s + GRACE_S >= now_s:
                return
            del self._contents[content]

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        assert len(self._contents) <= _MAX_PROMISES, "more contents than are remembered"
        for known in self._contents.values():
            assert known.place_s <= known.told_s, "a place after the time that was told"
