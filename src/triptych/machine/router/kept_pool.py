"""The instances of one pool, with what policies see of them."""

from collections.abc import Callable, Iterable
from math import inf

from triptych.machine.router.instance import Instance, Stages
from triptych.machine.router.others_work import OthersWork
from triptych.policy.backlog import Backlog
from triptych.policy.placement.affinity import Having, nothing_held
from triptych.policy.placement.pool import Candidate, Pool


class KeptPool:
    """Part of ``machine.router.instances.Instances``, which alone sets its members.

    A row is kept until its instance changes, which it notes in ``changed``, or until its time is up, and is put again when the pool is
    read next.
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
        self.pool = Pool(held=held, text_load=lambda place: self.members[self.pool.names[place]].text_load)
        """As of the last update."""
        self._stages = stages
        self._backlog_of = backlog_of
        self._until_s: dict[str, float] = {}
        """Until when what changes with time holds."""
        self._at_s = -inf

    def set_members(self, members: Iterable[Instance], now_s: float) -> None:
        """Replace all members."""
        self.members = {member.name: member for member in members}
        self._at_s = now_s
        self.changed.clear()
        self._until_s.clear()
        self.pool.set([self._candidate(member) for member in self.members.values()])

    def predict_again(self) -> None:
        """Predictions have changed."""
        self.changed.update(self.members)

    def update(self, now_s: float) -> Pool:
        """The pool as it is at this time, which never falls."""
        self._at_s = now_s
        if self._until_s:
            self.changed.update([name for name, until_s in self._until_s.items() if until_s <= now_s])
        if self.changed:
            pool, stages, backlog_of = self.pool, self._stages, self._backlog_of
            for name in self.changed:
                member = self.members[name]
                backlog = None if backlog_of is None else backlog_of(member)
                self._holds(name, member.put(pool, pool.places[name], stages, now_s, backlog))
            self.changed.clear()
        self.pool.shared = self.others.is_much
        return self.pool

    def _candidate(self, member: Instance) -> Candidate:
        backlog = None if self._backlog_of is None else self._backlog_of(member)
        made, until_s = member.candidate(self._stages, self._at_s, backlog)
        self._holds(member.name, until_s)
        return made

    def _holds(self, name: str, until_s: float) -> None:
        if until_s < inf:
            self._until_s[name] = until_s
        elif self._until_s:
            self._until_s.pop(name, None)

    def validate(self) -> None:
        """Raise AssertionError where what is kept of an instance is not what it gives now."""
        assert self.pool.names == list(self.members), "rows of other instances"  # noqa: S101
        for place, (name, member) in enumerate(self.members.items()):
            until_s = self._until_s.get(name, inf)
            if name in self.changed or until_s <= self._at_s:
                continue
            backlog = None if self._backlog_of is None else self._backlog_of(member)
            made, holds_until_s = member.candidate(self._stages, self._at_s, backlog)
            assert self.pool.candidate(place) == made, f"{name}: its row is out of date"  # noqa: S101
            assert holds_until_s == until_s, f"{name}: holds for another time"  # noqa: S101
