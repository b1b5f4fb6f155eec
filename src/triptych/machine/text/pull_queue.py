"""Memory of a reader's pulls: which wait for their turn and which are under way (ModServe section 4.3, many-to-one).

    Want -> WAITING -- (Begin) -> UNDER WAY -- Ended -> gone
               +------ Drop -> gone

Turns are given in the order of ``policy.pulling.pull_order``. Bytes under way are bounded, all together and for each
holder; a pull that is larger than a bound has it for itself. A pull that is too large for now is not overtaken by
smaller ones behind it, unless what it waits for is its own holder: a holder that hangs keeps nobody from others.
"""

from collections import Counter
from dataclasses import dataclass

from triptych.domain.embedding import HolderRef
from triptych.policy.pulling import WaitingPull, pull_order

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Want:
    """A pull for a request; ``deadline_s`` is the request's."""

    pull_id: int
    request_id: str
    holder: HolderRef
    nbytes: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Hasten:
    """A more urgent request needs the same embedding. Nothing changes for a pull that does not wait."""

    pull_id: int
    request_id: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Drop:
    """The pull waits and shall not begin."""

    pull_id: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The pull was under way and is over, well or not."""

    pull_id: int


Event = Want | Hasten | Drop | Ended

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """``Ended`` must follow."""

    pull_id: int
    reason: str


Effect = Begin


@dataclass(frozen=True, slots=True)
class PullLimits:
    max_nbytes: int
    """Bytes under way."""
    max_holder_nbytes: int
    """Bytes under way from one holder."""
    max_holder_pulls: int
    """Pulls under way from one holder."""


@dataclass(slots=True)
class _Pull:
    request_id: str
    holder: HolderRef
    nbytes: int
    deadline_s: float
    arrival: int


class PullQueue:
    """``handle`` is the only mutator."""

    def __init__(self, limits: PullLimits) -> None:
        self._limits = limits
        self._waiting: dict[int, _Pull] = {}
        self._under_way: dict[int, _Pull] = {}
        self._pulls: Counter[HolderRef] = Counter()
        self._nbytes: Counter[HolderRef] = Counter()
        self._here: Counter[str] = Counter()
        """Pulls of each request, waiting or under way."""
        self._had: dict[str, int] = {}
        """Bytes of pulls that have begun for a request, for as long as it has pulls here."""
        self._nbytes_under_way = 0
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    @property
    def nbytes_under_way(self) -> int:
        return self._nbytes_under_way

    def waits(self, pull_id: int) -> bool:
        return pull_id in self._waiting

    def handle(self, event: Event, now_s: float) -> list[Effect]:  # noqa: ARG002 - the order by slack is that by deadline at any time
        match event:
            case Want():
                self._want(event)
            case Hasten():
                pull = self._waiting.get(event.pull_id)
                if pull is not None and event.deadline_s < pull.deadline_s:
                    former, pull.request_id, pull.deadline_s = pull.request_id, event.request_id, event.deadline_s
                    self._here[event.request_id] += 1
                    self._settle(former)
            case Drop(pull_id):
                self._settle(self._waiting.pop(pull_id).request_id)
            case Ended(pull_id):
                self._end(pull_id)
        return self._begin()

    def _want(self, event: Want) -> None:
        if event.pull_id in self._waiting or event.pull_id in self._under_way:
            raise ValueError(f"pull {event.pull_id} is here already")
        self._waiting[event.pull_id] = _Pull(
            event.request_id, event.holder, event.nbytes, event.deadline_s, self._arrivals
        )
        self._here[event.request_id] += 1
        self._arrivals += 1

    def _end(self, pull_id: int) -> None:
        pull = self._under_way.pop(pull_id)
        self._pulls[pull.holder] -= 1
        self._nbytes[pull.holder] -= pull.nbytes
        self._nbytes_under_way -= pull.nbytes
        if self._pulls[pull.holder] == 0:
            del self._pulls[pull.holder], self._nbytes[pull.holder]
        self._settle(pull.request_id)

    def _settle(self, request_id: str) -> None:
        """A pull less; what a request had is forgotten with its last one."""
        self._here[request_id] -= 1
        if self._here[request_id] == 0:
            del self._here[request_id]
            self._had.pop(request_id, None)

    def _begin(self) -> list[Effect]:
        effects: list[Effect] = []
        while (pull_id := self._next()) is not None:
            pull = self._under_way[pull_id] = self._waiting.pop(pull_id)
            self._pulls[pull.holder] += 1
            self._nbytes[pull.holder] += pull.nbytes
            self._nbytes_under_way += pull.nbytes
            self._had[pull.request_id] = self._had.get(pull.request_id, 0) + pull.nbytes
            effects.append(Begin(pull_id, f"{self.under_way} pulls of {self.nbytes_under_way} bytes are under way"))
        return effects

    def _next(self) -> int | None:
        """The most urgent pull whose holder has a turn for it, if its bytes fit."""
        ready = [
            WaitingPull(pull_id, pull.deadline_s, self._had.get(pull.request_id, 0), pull.arrival)
            for pull_id, pull in self._waiting.items()
            if self._holder_has_room(pull)
        ]
        if not ready:
            return None
        first = min(ready, key=pull_order).pull_id
        nbytes = self.nbytes_under_way
        return first if nbytes == 0 or nbytes + self._waiting[first].nbytes <= self._limits.max_nbytes else None

    def _holder_has_room(self, pull: _Pull) -> bool:
        if self._pulls[pull.holder] >= self._limits.max_holder_pulls:
            return False
        nbytes = self._nbytes[pull.holder]
        return nbytes == 0 or nbytes + pull.nbytes <= self._limits.max_holder_nbytes

    def validate(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        limits, here = self._limits, self._under_way.values()
        assert self.under_way <= 1 or self.nbytes_under_way <= limits.max_nbytes, "too many bytes"  # noqa: S101 - invariant
        assert self.nbytes_under_way == sum(pull.nbytes for pull in here), "bytes do not add up"  # noqa: S101 - invariant
        holders = {pull.holder for pull in here}
        assert self._pulls.keys() == self._nbytes.keys() == holders, "a holder is remembered for nothing"  # noqa: S101 - invariant
        for holder in holders:
            sizes = [pull.nbytes for pull in here if pull.holder == holder]
            assert len(sizes) <= limits.max_holder_pulls, "too many pulls from a holder"  # noqa: S101 - invariant
            fits = len(sizes) == 1 or sum(sizes) <= limits.max_holder_nbytes
            assert fits, "too many bytes from a holder"  # noqa: S101 - invariant
        known = Counter(pull.request_id for pull in (*self._waiting.values(), *here))
        assert known == self._here, "pulls of requests do not add up"  # noqa: S101 - invariant
        assert self._here.keys() == known.keys() >= self._had.keys(), "a request that is gone is remembered"  # noqa: S101 - invariant
        assert self.under_way or not self._waiting, "pulls wait for nothing"  # noqa: S101 - invariant
