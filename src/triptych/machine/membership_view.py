"""Membership as a watcher of a pool manager sees it: the manager's list, and members that it lost, for a while.

The manager's word is enough to use a member, and enough to drop one that has left. It is not enough to drop one that
the manager has merely lost, or that a restarted manager does not list yet. The watcher may still reach it, and finds
out by itself.

So such a member stays, marked as suspected, for a grace period, and as long as more than half of all members are lost.
In that case the manager is more likely to be cut off than they are to be dead.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from triptych.domain.limits import Seconds, check_limits
from triptych.domain.membership import MAX_MEMBERS, Member, MembershipSnapshot, MemberState
from triptych.domain.pool import Departure, MembershipDelta


@dataclass(frozen=True, slots=True)
class ViewLimits:
    """Use of members that a pool manager no longer lists."""

    lost_grace_s: Seconds = 60.0
    """Time that a member which the pool manager has lost stays in use, as far as it can be reached, seconds."""

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True)
class _Lost:
    member: Member
    since_s: float


class MembershipView:
    """Owner of the members that a watcher uses, those that its pool manager has lost included.

    ``handle`` is the only mutator.
    """

    def __init__(self, limits: ViewLimits) -> None:
        self._limits = limits
        self._incarnation = 0
        self._known = 0
        self._listed: dict[str, Member] = {}
        """Members of the manager's list, by address."""
        self._lost: dict[str, _Lost] = {}
        """Members that are not listed any more, the longest lost one first."""
        self._snapshot = MembershipSnapshot()

    @property
    def snapshot(self) -> MembershipSnapshot:
        """Version 0 until the manager has told its list for the first time."""
        return self._snapshot

    @property
    def known(self) -> tuple[int, int]:
        """The manager's incarnation and version of the last delta."""
        return self._incarnation, self._known

    def handle(self, delta: MembershipDelta, now_s: float) -> bool:
        """Returns whether the snapshot has changed. A delta that does not continue what is known is ignored."""
        if delta.full:
            reported = {member.address: member for member in delta.members}
            self._lose((address for address in self._listed if address not in reported), now_s)
            self._listed = {}
        elif delta.incarnation != self._incarnation or delta.version < self._known:
            return False
        self._incarnation, self._known = delta.incarnation, delta.version
        for removal in delta.removed:
            if removal.departure is Departure.LOST:
                self._lose((removal.address,), now_s)
            else:
                self._lost.pop(removal.address, None)
            self._listed.pop(removal.address, None)
        for member in delta.members:
            self._lost.pop(member.address, None)
            self._listed[member.address] = member
        self._give_up(now_s)
        return self._publish()

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        assert not self._listed.keys() & self._lost.keys(), "a member is both listed and lost"
        assert len(self._listed) + len(self._lost) <= MAX_MEMBERS, "more members than allowed"
        since = [lost.since_s for lost in self._lost.values()]
        assert since == sorted(since), "lost members are out of order"

    def _lose(self, addresses: Iterable[str], now_s: float) -> None:
        for address in addresses:
            member = self._listed.get(address)
            if member is not None and member.state is MemberState.ACTIVE:
                self._lost[address] = _Lost(replace(member, suspected=True), now_s)

    def _give_up(self, now_s: float) -> None:
        while len(self._listed) + len(self._lost) > MAX_MEMBERS:
            del self._lost[next(iter(self._lost))]
        given_up = [
            address for address, lost in self._lost.items() if now_s - lost.since_s >= self._limits.lost_grace_s
        ]
        for address in given_up if len(self._lost) <= len(self._listed) else ():
            del self._lost[address]

    def _publish(self) -> bool:
        members = (*self._listed.values(), *(lost.member for lost in self._lost.values()))
        if self._snapshot.version and members == self._snapshot.members:
            return False
        self._snapshot = MembershipSnapshot(self._snapshot.version + 1, members)
        return True
