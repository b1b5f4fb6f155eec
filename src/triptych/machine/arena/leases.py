"""Leases on the slots of an arena: who may read which one, and until when (docs/adr/0002).

    LIVE -- released -> gone
      +---- expires  -> LAPSED -- released, or ``max_pull_s`` later -> gone

A lapsed lease still holds its slot, as a read that began in time may be running. A released id is not granted again while it is
remembered: a release may overtake the grant.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Annotated

from triptych.domain.bounds import Between
from triptych.domain.embedding import LeaseId
from triptych.domain.limits import PositiveSeconds, check_limits
from triptych.errors import InvalidRequest, LeaseLost, Overloaded, TriptychError
from triptych.machine.arena.slots import Key

_HEAP_SLACK = 64
"""Stale entries allowed in the heap of expiry times, beyond the number of live leases."""


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    max_lease_s: PositiveSeconds = 600.0
    """Longest lease; longer requests are cut to this."""
    max_leases: Annotated[int, Between(2)] = 65_536
    """Most leases at the same time."""

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(slots=True)
class _Lease:
    key: Key
    expires_s: float


class ArenaLeases:
    """Owner of the leases of an arena.

    Part of ``ArenaMachine``, which alone changes it.
    """

    def __init__(self, limits: LeaseLimits, *, max_pull_s: float, max_released: int) -> None:
        """``max_pull_s``: longest duration of a read. The last ``max_released`` released ids are remembered."""
        self._limits = limits
        self._max_pull_s = max_pull_s
        self._max_released = max_released
        self._leases: dict[LeaseId, _Lease] = {}
        self._by_key: dict[Key, set[LeaseId]] = {}
        self._by_expiry: list[tuple[float, LeaseId]] = []
        """A heap; entries of released or extended leases are stale and skipped."""
        self._released: dict[LeaseId, None] = {}
        """Oldest first."""

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: Key) -> bool:
        """Whether there is a lease, live or lapsed, on this key."""
        return key in self._by_key

    def readable(self, lease_id: LeaseId, now_s: float) -> Key | None:
        """The key that a live lease is on; None if there is no such lease."""
        lease = self._leases.get(lease_id)
        return None if lease is None or now_s >= lease.expires_s else lease.key

    def refusal(self, lease_ids: Sequence[LeaseId], key: Key) -> TriptychError | None:
        """Why these leases cannot be granted or extended; None if they can."""
        new = 0
        for lease_id in lease_ids:
            if lease_id in self._released:
                return LeaseLost("the lease was released")
            known = self._leases.get(lease_id)
            new += known is None
            if known is not None and known.key != key:
                return InvalidRequest("the lease id belongs to another embedding")
        if new and len(self._leases) + new > self._limits.max_leases:
            return Overloaded(f"{self._limits.max_leases} leases are out, which is the limit")
        return None

    def grant(self, lease_ids: Sequence[LeaseId], key: Key, lease_s: float, now_s: float) -> float:
        """Grant leases, or extend them; none is shortened. Returns their duration in seconds, as far as the limit allows."""
        lease_s = min(max(lease_s, 0.0), self._limits.max_lease_s)
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None:
                lease = self._leases[lease_id] = _Lease(key, now_s + lease_s)
                self._by_key.setdefault(key, set()).add(lease_id)
            else:
                lease.expires_s = max(lease.expires_s, now_s + lease_s)
            heappush(self._by_expiry, (lease.expires_s, lease_id))
        if len(self._by_expiry) > 2 * len(self._leases) + _HEAP_SLACK:
            self._by_expiry = [(lease.expires_s, lease_id) for lease_id, lease in self._leases.items()]
            heapify(self._by_expiry)
        return lease_s

    def release(self, lease_ids: Iterable[LeaseId]) -> list[Key]:
        """Drop leases; unknown ones are only remembered. Returns the keys that have no lease any more."""
        freed: list[Key] = []
        for lease_id in lease_ids:
            freed += self._drop(lease_id)
            self._released[lease_id] = None
        while len(self._released) > self._max_released:
            del self._released[next(iter(self._released))]
        return freed

    def lapsed(self, now_s: float) -> tuple[list[Key], list[Key]]:
        """Drop the lapsed leases whose reads are over. Returns the key of each, and the keys that have no lease any more."""
        dropped: list[Key] = []
        freed: list[Key] = []
        while self._by_expiry and self._by_expiry[0][0] + self._max_pull_s <= now_s:
            expires_s, lease_id = heappop(self._by_expiry)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_s <= expires_s:
                dropped.append(lease.key)
                freed += self._drop(lease_id)
        return dropped, freed

    def _drop(self, lease_id: LeaseId) -> list[Key]:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return []
        others = self._by_key[lease.key]
        others.remove(lease_id)
        if others:
            return []
        del self._by_key[lease.key]
        return [lease.key]

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        due = set(self._by_expiry)
        assert all((lease.expires_s, i) in due for i, lease in self._leases.items()), "a lease without an expiry"
        assert len(self._released) <= self._max_released, "too many released ids"
        assert not self._released.keys() & self._leases.keys(), "a released lease is live"
        by_key = {lease_id: key for key, lease_ids in self._by_key.items() for lease_id in lease_ids}
        assert by_key == {i: lease.key for i, lease in self._leases.items()}, "leases and keys differ"
        assert all(self._by_key.values()), "a key without leases"
        assert len(self._leases) <= self._limits.max_leases, "too many leases"
