"""The instances of one pool, with what policies see of them."""

from collections.abc import Callable, Iterable
from math import inf

from triptych.machine.router.instance import Instance, Stages
from triptych.machine.router.others_work import OthersWork
from triptych.policy.backlog import Backlog
from triptych.policy.placement.affinity import Having, nothing_held
from triptych.policy.placement.pool import Pool


class KeptPool:
    """Owner of the columns of one pool.

    Part of ``machine.router.instances.Instances``, which alone sets its members.

    A row is kept until its instance changes, which it notes in ``changed``, or until its time is up. It is put again when the pool
    is read next.
    """

    def __init__(
        self,
        stages: Stages,
        backlog_of: Callable[[Instance], Backlog | None] | None = None,
        held: Having = nothing_held,
    ) -> None:
        """``backlog_of`` predicts what an instance has to do; None if no policy needs that. ``held`` are hints for policies."""
        self.members: dict[str, Instance] = {}
        """By name, in this order."""
        self.changed: set[str] = set()
        """Members that have changed since the last update."""
        self.others = OthersWork()
        """What other routers send to them."""
        self.pool = Pool(held=held, text_load=lambda place: self.members[self.pool.name[place]].text_load)
        """As of the last update."""
        self._stages = stages
        self._backlog_of = backlog_of
        self._until_s: dict[str, float] = {}
        """Until when what changes with time holds."""
        self._at_s = -inf

    def set_members(self, members: Iterable[Instance]) -> None:
        """Replace all members."""
        self.members = {member.name: member for member in members}
        self.pool.set([member.row(self._stages) for member in self.members.values()])
        self._until_s.clear()
        self.changed.clear()
        self.all_changed()

    def all_changed(self) -> None:
        """Predictions have changed, or the members."""
        self.changed.update(self.members)

    def update(self, now_s: float) -> Pool:
        """The pool as it is at this time, which never falls."""
        self._at_s = now_s
        if self._until_s:
            self.changed.update([name for name, until_s in self._until_s.items() if until_s <= now_s])
        if self.changed:
            pool, backlog_of = self.pool, self._backlog_of
            for name in self.changed:
                member = self.members[name]
                backlog = None if backlog_of is None else backlog_of(member)
                until_s = member.put(pool, pool.places[name], self._stages, now_s, backlog)
                if until_s < inf:
                    self._until_s[name] = until_s
                elif self._until_s:
                    self._until_s.pop(name, None)
            self.changed.clear()
        self.pool.shared = self.others.is_much
        return self.pool

    def validate(self) -> None:
        """Raise AssertionError where what is kept of an instance is not what it gives now."""
        assert self.pool.name == list(self.members), "rows of other instances"
        for place, (name, member) in enumerate(self.members.items()):
            until_s = self._until_s.get(name, inf)
            if name in self.changed or until_s <= self._at_s:
                continue
            anew, backlog = Pool([member.row(self._stages)]), self._backlog_of and self._backlog_of(member)
            holds_until_s = member.put(anew, 0, self._stages, self._at_s, backlog)
            assert holds_until_s == until_s, f"{name}: holds for another time"
            assert self.pool.candidate(place) == anew.candidate(0), f"{name}: its row is out of date"
