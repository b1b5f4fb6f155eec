"""Memory of a text instance's queue: who waits, who fetches embeddings, who may run.

    Arrive -> QUEUED -- (StartFetch) -> FETCHING -- Fetched -> FETCHED -- (StartRun) -> RUNNING -- Leave -> gone

A request without items starts out FETCHED. Both turns, to fetch and to run, are given in the order of
``policy.queueing.slack_order``. A fetch that is too large for now is not overtaken by smaller ones behind it, so that
they cannot starve it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from triptych.policy.queueing import Waiting, slack_order


class Phase(Enum):
    QUEUED = "queued"
    FETCHING = "fetching"
    FETCHED = "fetched"
    RUNNING = "running"


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrive:
    """``tokens``: prompt and the most that may be generated. ``nbytes``: of all its embeddings together."""

    request_id: str
    tokens: int
    items: int
    nbytes: int
    deadline_s: float
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Fetched:
    """All embeddings of the request are here. Events of a request that has left meanwhile change nothing."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The request is over, however it ended."""

    request_id: str


Event = Arrive | Fetched | Leave

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refuse:
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StartFetch:
    request_id: str


@dataclass(frozen=True, slots=True)
class StartRun:
    request_id: str


Effect = Refuse | StartFetch | StartRun


@dataclass(frozen=True, slots=True)
class QueueLimits:
    max_waiting: int
    """Requests that are not RUNNING."""
    max_running: int
    max_fetching_nbytes: int
    """Bytes of all requests that are FETCHING; a request that is larger than this fetches alone. How many of them are
    on their way at a time is ``machine.pull_queue``'s."""


@dataclass(slots=True)
class _Entry:
    waiting: Waiting
    tokens: int
    nbytes: int
    phase: Phase


class TextQueue:
    """``handle`` is the only mutator. Deadlines are on the clock of the caller."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._entries: dict[str, _Entry] = {}
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        return len(self._entries) - self.running

    @property
    def running(self) -> int:
        return sum(1 for _ in self._in(Phase.RUNNING))

    @property
    def waiting_tokens(self) -> int:
        """Of requests that are not RUNNING: prompt and the most that may be generated."""
        return sum(entry.tokens for entry in self._entries.values() if entry.phase is not Phase.RUNNING)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def handle(self, event: Event, now_s: float) -> list[Effect]:  # noqa: ARG002 - the order by slack is that by deadline at any time
        match event:
            case Arrive():
                if (refused := self._arrive(event)) is not None:
                    return [refused]
            case Fetched(request_id):
                entry = self._entries.get(request_id)
                if entry is not None and entry.phase is Phase.FETCHING:
                    entry.phase = Phase.FETCHED
            case Leave(request_id):
                self._entries.pop(request_id, None)
        return [*self._start_runs(), *self._start_fetches()]

    def _arrive(self, event: Arrive) -> Refuse | None:
        if event.request_id in self._entries:
            return Refuse(event.request_id, f"request {event.request_id!r} is here already")
        if self.waiting >= self._limits.max_waiting:
            return Refuse(event.request_id, f"{self.waiting} requests are waiting, which is the limit")
        waiting = Waiting(event.request_id, event.deadline_s, self._arrivals, event.priority)
        self._arrivals += 1
        phase = Phase.QUEUED if event.items else Phase.FETCHED
        self._entries[event.request_id] = _Entry(waiting, event.tokens, event.nbytes, phase)
        return None

    def _start_runs(self) -> Iterator[StartRun]:
        room = self._limits.max_running - self.running
        for waiting in slack_order(self._in(Phase.FETCHED))[: max(room, 0)]:
            self._entries[waiting.request_id].phase = Phase.RUNNING
            yield StartRun(waiting.request_id)

    def _start_fetches(self) -> Iterator[StartFetch]:
        fetching_nbytes = sum(entry.nbytes for entry in self._entries.values() if entry.phase is Phase.FETCHING)
        for waiting in slack_order(self._in(Phase.QUEUED)):
            entry = self._entries[waiting.request_id]
            if fetching_nbytes and fetching_nbytes + entry.nbytes > self._limits.max_fetching_nbytes:
                return
            fetching_nbytes += entry.nbytes
            entry.phase = Phase.FETCHING
            yield StartFetch(waiting.request_id)

    def _in(self, phase: Phase) -> Iterator[Waiting]:
        return (entry.waiting for entry in self._entries.values() if entry.phase is phase)

    def validate(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        assert self.running <= self._limits.max_running, "too many run"  # noqa: S101 - invariant
        fetching = [entry.nbytes for entry in self._entries.values() if entry.phase is Phase.FETCHING and entry.nbytes]
        fits = len(fetching) <= 1 or sum(fetching) <= self._limits.max_fetching_nbytes
        assert fits, "too many bytes are being fetched"  # noqa: S101 - invariant
        room = self._limits.max_running - self.running
        assert room == 0 or not any(self._in(Phase.FETCHED)), "a request waits although it could run"  # noqa: S101 - invariant
