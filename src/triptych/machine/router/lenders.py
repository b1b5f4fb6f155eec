"""The instances that encode first and lend what time is left to text requests (docs/adr/0047), and the requests that wait."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.domain.stage import Stage
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.machine.router.instances import ENCODE, TEXT, Instances
from triptych.machine.router.shared_events import TextWanted
from triptych.policy.lending import MOST_MOVES, Lender, LenderState, Lending


@dataclass(frozen=True, slots=True)
class LendingCounts:
    """For metrics."""

    lenders: Mapping[LenderState, int]
    """By state."""
    requests: int
    """At them now, from this router."""
    lent: Mapping[str, int]
    """Requests that were given to them while they lent: ``new`` ones, ``moved`` from a text instance where they waited, ``continued``
    after a first token."""
    taken_back: Mapping[str, int]
    """Requests that they had, without a token: ``held_up`` by items; and of those moved, on the way: it lends no more (``closed``),
    others had become faster (``slower``), it was not usable any more (``lost``)."""


@dataclass(slots=True)
class _Placed:
    """A request whose answer has not begun."""

    wanted: TextWanted
    name: str
    started: bool = False


class Lenders:
    """Owner of which encoders lend their idle time to text requests, and of the requests that wait at text instances.

    Part of ``machine.router.text_places.TextPlaces``, which alone changes it.
    """

    def __init__(self, instances: Instances, policy: Lending | None, limits: ClusterLimits) -> None:
        """Without a policy there are none."""
        self._instances = instances
        self._policy = policy
        self._limits = limits
        self.states: dict[str, LenderState] = {}
        """By name; for reading."""
        self._busy_since_s: dict[str, float] = {}
        """Since when those that have items have had some."""
        self._placed: dict[int, _Placed] = {}
        """By credit."""
        self._lent = {"new": 0, "moved": 0, "continued": 0}
        self._taken_back = {"held_up": 0, "closed": 0, "slower": 0, "lost": 0}

    # --- events ------------------------------------------------------------------------------------------------------

    def review(self) -> None:
        """The instances have changed."""
        if self._policy is None:
            return
        members = self._instances.pools[TEXT].members
        names = [name for name, member in members.items() if member.serves(ENCODE)]
        self.states = {name: self.states.get(name, LenderState.ENCODE_ONLY) for name in names}
        self._instances.lend(self.states)
        self._busy_since_s = {name: since_s for name, since_s in self._busy_since_s.items() if name in self.states}

    def placed(self, credit: int, wanted: TextWanted, name: str) -> None:
        """A request with nothing of its answer has got a place."""
        if self._policy is not None:
            self._placed[credit] = _Placed(wanted, name)

    def lent(self, name: str, how: str) -> None:
        """A request has got a place here. One that does not lend now has it for want of others: that is not counted."""
        if self.states and self.states.get(name, LenderState.ENCODE_ONLY) is not LenderState.ENCODE_ONLY:
            self._lent[how] += 1

    def taken_back(self, why: str) -> None:
        """A request goes elsewhere that had a place at a lender, but no token."""
        self._taken_back[why] += 1

    def started(self, credit: int) -> None:
        """Note that its text instance has begun to compute it."""
        if (placed := self._placed.get(credit)) is not None:
            placed.started = True

    def gone(self, credit: int) -> None:
        """Note that it waits there no more: its answer has begun, its call has ended, or it is about to."""
        self._placed.pop(credit, None)

    def update(self, now_s: float, waiting: int) -> None:
        """Take over the loads of now. ``waiting`` are the requests that no text instance has yet."""
        if self._policy is None or not self.states:
            return
        waiting += sum(not placed.started and placed.name not in self.states for placed in self._placed.values())
        for name, state in self.states.items():
            instance = self._instances.by_name[name]
            items = instance.pending(Stage.ENCODE)
            lender = Lender(state, items, instance.requests, self._limits.max_lent)
            self.states[name] = self._policy(lender, waiting=waiting, above=self._limits.lend_above)
            if items:
                self._busy_since_s.setdefault(name, now_s)
            else:
                self._busy_since_s.pop(name, None)

    # --- readers -----------------------------------------------------------------------------------------------------

    @property
    def lending(self) -> bool:
        """Whether one takes more."""
        return LenderState.LENDING in self.states.values()

    def counts(self, requests: int) -> LendingCounts:
        """``requests`` are at lenders now."""
        states = list(self.states.values())
        by_state = {state: states.count(state) for state in LenderState}
        return LendingCounts(by_state, requests, self._lent, self._taken_back)

    def last_waiting(self) -> tuple[int, TextWanted, str] | None:
        """Of the requests that may go to a lender, the one that would be served last: its credit, and where it waits."""
        able = [
            (placed.wanted.queue_position, credit, placed)
            for credit, placed in self._placed.items()
            if not placed.started and placed.name not in self.states and placed.wanted.moves < MOST_MOVES
        ]
        if not able:
            return None
        _, credit, placed = max(able, key=lambda found: found[:2])
        return credit, placed.wanted, placed.name

    def held_up(self, now_s: float) -> Sequence[tuple[int, TextWanted]]:
        """By credit, the requests without a token at lenders that have had items for too long."""
        busy = {name for name, since_s in self._busy_since_s.items() if now_s - since_s >= self._limits.lent_patience_s}
        if not busy:
            return ()
        return [(credit, placed.wanted) for credit, placed in self._placed.items() if placed.name in busy]
