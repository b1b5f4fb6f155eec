"""The instances of one pool, with the candidates that policies see of them."""

from collections.abc import Callable, Iterable
from math import inf

from triptych.machine.router.instance import Instance, Stages
from triptych.policy.backlog import Backlog
from triptych.policy.routing import Candidate


class KeptPool:
    """Part of ``machine.router.instances.Instances``, which alone sets its members.

    A candidate is kept until its instance changes, which the instance notes in ``changed``, or until its time is up.
    """

    def __init__(self, stages: Stages, backlog_of: Callable[[Instance], Backlog | None] | None = None) -> None:
        """``backlog_of`` predicts what an instance has to do; None if no policy needs that."""
        self.members: dict[str, Instance] = {}
        """By name, in this order."""
        self.changed: set[str] = set()
        """Members whose kept candidates no longer hold."""
        self._stages = stages
        self._backlog_of = backlog_of
        self._kept: dict[str, Candidate] = {}
        """By name, in the order of ``members``; empty until they are asked for."""
        self._until_s: dict[str, float] = {}
        """Until when those hold that change with time."""
        self._candidates: tuple[Candidate, ...] = ()
        """The values of ``_kept``; empty if these have changed."""
        self._at_s = -inf

    def set_members(self, members: Iterable[Instance]) -> None:
        """Replace all members. What was kept is dropped."""
        self.members = {member.name: member for member in members}
        self.changed.clear()
        self._kept.clear()
        self._until_s.clear()
        self._candidates = ()

    def candidates(self, now_s: float) -> tuple[Candidate, ...]:
        """One for each member, in their order. ``now_s`` never falls."""
        if self._until_s:
            self.changed.update([name for name, until_s in self._until_s.items() if until_s <= now_s])
        names: Iterable[str] = self.changed if self._kept else self.members
        for name in names:
            self._make(name, now_s)
        self.changed.clear()
        if not self._candidates:
            self._candidates = tuple(self._kept.values())
        return self._candidates

    def predict_again(self) -> None:
        """Predictions have changed."""
        self.changed.update(self.members)

    def _candidate(self, name: str, now_s: float) -> tuple[Candidate, float]:
        instance = self.members[name]
        return instance.candidate(self._stages, now_s, self._backlog_of(instance) if self._backlog_of else None)

    def _make(self, name: str, now_s: float) -> None:
        self._kept[name], until_s = self._candidate(name, now_s)
        if until_s < inf:
            self._until_s[name] = until_s
        elif self._until_s:
            self._until_s.pop(name, None)
        self._candidates, self._at_s = (), max(self._at_s, now_s)

    def validate(self) -> None:
        """Raise AssertionError where a kept candidate is not what its instance gives now."""
        assert not self._kept or list(self._kept) == list(self.members), "candidates of other instances"  # noqa: S101
        assert self._candidates in ((), tuple(self._kept.values())), "candidates are not the kept ones"  # noqa: S101
        for name, kept in self._kept.items():
            until_s = self._until_s.get(name, inf)
            if name not in self.changed and until_s > self._at_s:
                made = self._candidate(name, self._at_s)
                assert made == (kept, until_s), f"{name}: its candidate is out of date"  # noqa: S101
