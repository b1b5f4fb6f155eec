"""The instances of one pool, with what policies see of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import overload

from triptych.machine.router.instance import Instance, Stages
from triptych.machine.router.others_work import OthersWork
from triptych.policy.backlog import Backlog
from triptych.policy.loads import Loads
from triptych.policy.routing import Candidate


class KeptPool(Sequence[Candidate]):
    """Part of ``machine.router.instances.Instances``, which alone sets its members. As a sequence, their candidates.

    Loads and candidates are kept until their instance changes, which it notes in ``changed``, or until their time is up, and
    made again when they are read: routing by load reads no candidates, and other policies no loads.
    """

    def __init__(self, stages: Stages, backlog_of: Callable[[Instance], Backlog | None] | None = None) -> None:
        """``backlog_of`` predicts what an instance has to do; None if no policy needs that."""
        self.members: dict[str, Instance] = {}
        """By name, in this order."""
        self.changed: set[str] = set()
        """Members that have changed since the last update."""
        self.others = OthersWork()
        """What other routers send to them."""
        self._stages = stages
        self._backlog_of = backlog_of
        self._loads = Loads((), ())
        self._stale_loads: set[str] = set()
        """Members whose loads no longer hold."""
        self._candidates: list[Candidate] = []
        """In the order of ``members``; empty until they are asked for."""
        self._stale_candidates: set[str] = set()
        """Members whose candidates no longer hold."""
        self._until_s: dict[str, float] = {}
        """Until when what changes with time holds."""
        self._at_s = -inf

    def set_members(self, members: Iterable[Instance]) -> None:
        """Replace all members. What was kept is dropped."""
        self.members = {member.name: member for member in members}
        ids = ["" if one.info is None else one.info.instance_id for one in self.members.values()]
        self._loads, self._candidates = Loads(tuple(self.members), ids), []
        self._stale_loads = set(self.members)
        self._stale_candidates.clear()
        self.changed.clear()
        self._until_s.clear()

    def update(self, now_s: float) -> None:
        """Note what no longer holds at this time, which never falls."""
        self._at_s = now_s
        if self._until_s:
            self.changed.update([name for name, until_s in self._until_s.items() if until_s <= now_s])
        if self.changed:
            self._stale_loads |= self.changed
            if self._candidates:
                self._stale_candidates |= self.changed
            self.changed.clear()

    def predict_again(self) -> None:
        """Predictions have changed."""
        self._candidates = []

    def loads(self) -> Loads:
        """As of the last update."""
        if self._stale_loads:
            loads, members, stages, now_s = self._loads, self.members, self._stages, self._at_s
            for name in self._stale_loads:
                self._holds(name, members[name].put_load(loads, loads.places[name], stages, now_s))
            self._stale_loads.clear()
        return self._loads

    def _up_to_date(self) -> list[Candidate]:
        if not self._candidates:
            self._candidates = [self._candidate(name) for name in self.members]
        else:
            for name in self._stale_candidates:
                self._candidates[self._loads.places[name]] = self._candidate(name)
        self._stale_candidates.clear()
        return self._candidates

    def _candidate(self, name: str) -> Candidate:
        instance = self.members[name]
        backlog = None if self._backlog_of is None else self._backlog_of(instance)
        made, until_s = instance.candidate(self._stages, self._at_s, backlog)
        self._holds(name, until_s)
        return made

    def _holds(self, name: str, until_s: float) -> None:
        if until_s < inf:
            self._until_s[name] = until_s
        elif self._until_s:
            self._until_s.pop(name, None)

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._up_to_date())

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._up_to_date()[index]

    def validate(self) -> None:
        """Raise AssertionError where what is kept of an instance is not what it gives now."""
        assert list(self._loads.names) == list(self.members), "loads of other instances"  # noqa: S101
        assert len(self._candidates) in {0, len(self.members)}, "candidates of other instances"  # noqa: S101
        made = Loads(self._loads.names, self._loads.ids)
        for place, (name, instance) in enumerate(self.members.items()):
            until_s = self._until_s.get(name, inf)
            if name in self.changed or until_s <= self._at_s:
                continue
            if name not in self._stale_loads:
                holds_until_s = instance.put_load(made, place, self._stages, self._at_s)
                assert holds_until_s == until_s, f"{name}: holds for another time"  # noqa: S101
                assert made.of(place) == self._loads.of(place), f"{name}: its load is out of date"  # noqa: S101
            if self._candidates and name not in self._stale_candidates:
                kept = self._candidates[place]
                assert kept == self._candidate(name), f"{name}: its candidate is out of date"  # noqa: S101
