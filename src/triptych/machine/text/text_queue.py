"""Memory of a text instance's queue: who waits, who pulls embeddings, who may run.

    Arrive -> QUEUED -- (StartPulls) -> PULLING -- AllPulled -> PULLED -- (StartRun) -> RUNNING -- Leave -> gone

A request without items starts out PULLED. Both turns, to pull and to run, are given in the order of
``policy.queueing``. A request that is too large to pull for now is not overtaken by smaller ones behind it,
so that they cannot starve it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from triptych.policy.queueing import Turn


class Phase(Enum):
    QUEUED = "queued"
    PULLING = "pulling"
    PULLED = "pulled"
    RUNNING = "running"


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrive:
    """``tokens``: prompt and the most that may be generated. ``nbytes``: of all its embeddings together."""

    request_id: str
    tokens: int
    items: int
    nbytes: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class AllPulled:
    """All embeddings of the request are here. Events of a request that has left meanwhile change nothing."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The request is over, however it ended."""

    request_id: str


Event = Arrive | AllPulled | Leave

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refuse:
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StartPulls:
    request_id: str


@dataclass(frozen=True, slots=True)
class StartRun:
    request_id: str


Effect = Refuse | StartPulls | StartRun


@dataclass(frozen=True, slots=True)
class QueueLimits:
    max_waiting: int
    """Requests that are not RUNNING."""
    max_running: int
    max_pulling_requests_nbytes: int
    """Bytes of all requests that are PULLING; a request that is larger than this pulls alone. How many of them are
    on their way at a time is ``machine.text.tensor_cache``'s."""
    max_running_nbytes: int = 1 << 62
    """Bytes of all requests that are RUNNING, of which the engine holds copies; a larger request runs alone."""


@dataclass(slots=True)
class _Entry:
    request_id: str
    turn: Turn
    tokens: int
    nbytes: int
    phase: Phase


class TextQueue:
    """``handle`` is the only mutator. Deadlines are on the clock of the caller."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._entries: dict[str, _Entry] = {}
        self._running = 0
        self._waiting_tokens = 0
        self._pulling_nbytes = 0
        self._running_nbytes = 0

    @property
    def waiting(self) -> int:
        return len(self._entries) - self._running

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting_tokens(self) -> int:
        """Of requests that are not RUNNING: prompt and the most that may be generated."""
        return self._waiting_tokens

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def handle(self, event: Event, now_s: float) -> list[Effect]:  # noqa: ARG002 - the order by slack is that by deadline at any time
        match event:
            case Arrive():
                if (refused := self._arrive(event)) is not None:
                    return [refused]
            case AllPulled(request_id):
                entry = self._entries.get(request_id)
                if entry is not None and entry.phase is Phase.PULLING:
                    entry.phase = Phase.PULLED
                    self._pulling_nbytes -= entry.nbytes
            case Leave(request_id):
                self._leave(request_id)
        return [*self._start_runs(), *self._start_pulls()]

    def _arrive(self, event: Arrive) -> Refuse | None:
        if event.request_id in self._entries:
            return Refuse(event.request_id, f"request {event.request_id!r} is here already")
        if self.waiting >= self._limits.max_waiting:
            return Refuse(event.request_id, f"{self.waiting} requests are waiting, which is the limit")
        phase = Phase.QUEUED if event.items else Phase.PULLED
        self._entries[event.request_id] = _Entry(event.request_id, event.turn, event.tokens, event.nbytes, phase)
        self._waiting_tokens += event.tokens
        return None

    def _leave(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        if entry.phase is Phase.RUNNING:
            self._running -= 1
            self._running_nbytes -= entry.nbytes
        else:
            self._waiting_tokens -= entry.tokens
        if entry.phase is Phase.PULLING:
            self._pulling_nbytes -= entry.nbytes

    def _start_runs(self) -> Iterator[StartRun]:
        room = self._limits.max_running - self._running
        if room <= 0:
            return
        for entry in self._in(Phase.PULLED)[:room]:
            if not self._fits(entry):
                return
            entry.phase = Phase.RUNNING
            self._running += 1
            self._running_nbytes += entry.nbytes
            self._waiting_tokens -= entry.tokens
            yield StartRun(entry.request_id)

    def _fits(self, entry: _Entry) -> bool:
        return not self._running_nbytes or self._running_nbytes + entry.nbytes <= self._limits.max_running_nbytes

    def _start_pulls(self) -> Iterator[StartPulls]:
        for entry in self._in(Phase.QUEUED):
            if self._pulling_nbytes and self._pulling_nbytes + entry.nbytes > self._limits.max_pulling_requests_nbytes:
                return
            self._pulling_nbytes += entry.nbytes
            entry.phase = Phase.PULLING
            yield StartPulls(entry.request_id)

    def _in(self, phase: Phase) -> list[_Entry]:
        """Those in a phase, in their order."""
        return sorted((entry for entry in self._entries.values() if entry.phase is phase), key=lambda one: one.turn)

    def validate(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        entries = self._entries.values()
        running = [entry for entry in entries if entry.phase is Phase.RUNNING]
        tokens = sum(entry.tokens for entry in entries if entry.phase is not Phase.RUNNING)
        nbytes = sum(entry.nbytes for entry in entries if entry.phase is Phase.PULLING)
        held = [entry.nbytes for entry in running if entry.nbytes]
        kept = (self._running, self._waiting_tokens, self._pulling_nbytes, self._running_nbytes)
        assert kept == (len(running), tokens, nbytes, sum(held)), "counters do not add up"  # noqa: S101 - invariant
        assert self.running <= self._limits.max_running, "too many run"  # noqa: S101 - invariant
        pulling = [entry.nbytes for entry in self._entries.values() if entry.phase is Phase.PULLING and entry.nbytes]
        fits = len(pulling) <= 1 or sum(pulling) <= self._limits.max_pulling_requests_nbytes
        assert fits, "too many bytes are being pulled"  # noqa: S101 - invariant
        fits = len(held) <= 1 or sum(held) <= self._limits.max_running_nbytes
        assert fits, "running requests hold too many bytes"  # noqa: S101 - invariant
        first = next(iter(self._in(Phase.PULLED)), None)
        could = first is not None and self._fits(first)
        assert not could or self.running == self._limits.max_running, "a request waits although it could run"  # noqa: S101 - invariant
