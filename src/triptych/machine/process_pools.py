"""Pools of processes on one machine: how many are wanted, which exist, and when one is started again.


    ORDERED -- StartProcess -> STARTING -- ready -> RUNNING -- Remove, StopProcess -> STOPPING -- ended -> gone
       ^                          |                   |
       +------- after a backoff --+------- ended -----+        FAILED: after several ends without success

A size above what exists orders new processes. A size below it forgets those that do not run yet, the newest first; a running
process ends only when an order names it. A process that ended by itself is started again, under its name, until it ends again
and again without having answered anything. The others of its pool go on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from triptych.domain.scaling import ProcessPhase
from triptych.errors import Deposed, InvalidRequest, NotFound
from triptych.machine.process_pool_events import (
    Adopt,
    Effect,
    Event,
    GaveUp,
    KillProcess,
    ProcessAnswered,
    ProcessEnded,
    ProcessReady,
    Remove,
    SetDegree,
    SetSize,
    StartProcess,
    StopProcess,
    TimePassed,
)


@dataclass(frozen=True, slots=True)
class RestartRules:
    """Rules for starting processes again and for killing them."""

    first_backoff_s: float = 1.0
    """Pause before a process that ended is started again. Doubles each time."""
    longest_backoff_s: float = 60.0
    stable_s: float = 60.0
    """A process that was ready for so long, or has answered, begins with the first pause again."""
    start_crashes: int = 3
    """Number of crashes at the start in a row, none of a pool being ready in between, after which the pool gives up."""
    most_ends: int = 6
    """A process that ended so many times in a row, with no such success in between, is not started again."""
    start_timeout_s: float = 300.0
    """A process that is not ready after this time is killed, and counts as crashed."""
    grace_s: float = 30.0
    """Time from the request to end to the kill, seconds. Longer than the process's own drain."""
    max_processes: int = 64
    """Most processes of one pool."""

    def __post_init__(self) -> None:
        if not 0 < self.first_backoff_s <= self.longest_backoff_s:
            raise ValueError("0 < first_backoff_s <= longest_backoff_s must hold")
        if (
            min(self.stable_s, self.start_timeout_s, self.grace_s) <= 0
            or min(self.start_crashes, self.most_ends, self.max_processes) < 1
        ):
            raise ValueError("times must be positive, and numbers at least 1")


@dataclass(slots=True)
class _Process:
    name: str
    phase: ProcessPhase
    since_s: float
    due_s: float = 0.0
    """ORDERED: when it is started. STARTING, STOPPING: when it is killed."""
    backoff_s: float = 0.0
    """The last pause; 0 if it has not ended since its last success."""
    ends: int = 0
    """Ends since its last success."""
    reason: str = ""
    killed: bool = False


@dataclass(slots=True)
class _Pool:
    pattern: str
    wanted: int | None = None
    crashes: int = 0
    fault: str = ""
    degree: int | None = None
    """Tensor-parallel degree of processes that are new; None for that of their settings."""
    numbers: int = 0
    """Processes that the pool has had; names are not reused."""
    processes: dict[str, _Process] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process of a pool, read-only."""

    name: str
    phase: ProcessPhase
    reason: str


class ProcessPools:
    """Owner of how many local processes are wanted, which there are, and when one is started again.

    ``names`` has the pools and the names of their processes, ``encoder-{}`` for example.

    A name without ``{}`` allows one process.
    """

    def __init__(self, names: Mapping[str, str], rules: RestartRules) -> None:
        self._rules = rules
        self._pools = {pool: _Pool(pattern) for pool, pattern in names.items()}
        self._token = 0

    # --- what it knows ---

    def wanted(self, pool: str) -> int | None:
        return self._pool(pool).wanted

    def degree(self, pool: str) -> int | None:
        """The tensor-parallel degree of processes that are new; None for that of their settings."""
        return self._pool(pool).degree

    def fault(self, pool: str) -> str:
        """Why the pool does not become what is wanted; empty if nothing is wrong."""
        state = self._pool(pool)
        given_up = (process.reason for process in state.processes.values() if self._is_given_up(process))
        return state.fault or next(given_up, "")

    @property
    def on_trial(self) -> tuple[str, ...]:
        """Running processes that have ended before, and not answered since."""
        return tuple(process.name for process in self._all() if process.phase is ProcessPhase.RUNNING and process.ends)

    def processes(self, pool: str) -> tuple[ProcessState, ...]:
        """Processes in the order of their names' numbers."""
        return tuple(
            ProcessState(process.name, process.phase, process.reason) for process in self._pool(pool).processes.values()
        )

    def all_processes(self) -> tuple[ProcessState, ...]:
        return tuple(state for pool in self._pools for state in self.processes(pool))

    @property
    def due_s(self) -> float | None:
        """Time when ``TimePassed`` has something to do next."""
        waits = (ProcessPhase.ORDERED, ProcessPhase.STARTING, ProcessPhase.STOPPING)
        return min(
            (process.due_s for process in self._all() if process.phase in waits and not process.killed), default=None
        )

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        for name, pool in self._pools.items():
            active = [
                process.phase for process in pool.processes.values() if process.phase is not ProcessPhase.STOPPING
            ]
            idle = active.count(ProcessPhase.ORDERED) + active.count(ProcessPhase.FAILED)
            wanted = len(active) if pool.wanted is None else pool.wanted
            violated = {
                "has more processes than names": len(pool.processes) > pool.numbers,
                "keeps processes that do not run and are too many": len(active) > wanted and idle > 0,
                "lacks processes without a reason": len(active) < wanted
                and not (pool.fault or "{}" not in pool.pattern),
                "has failed processes but did not give up": ProcessPhase.FAILED in active and not self.fault(name),
                "did not give up": pool.crashes >= self._rules.start_crashes and not pool.fault,
            }
            if any(violated.values()):
                raise AssertionError(f"pool {name} {next(violation for violation, is_so in violated.items() if is_so)}")

    # --- what happens ---

    def handle(self, event: Event, now_s: float) -> list[Effect]:  # noqa: PLR0911 - one dispatch
        """The only mutator. Raises Deposed, NotFound or InvalidRequest for an order; nothing has changed then."""
        match event:
            case Adopt():
                return self._adopt(event, now_s)
            case SetSize():
                return self._set_size(event, now_s)
            case Remove():
                return self._remove(event, now_s)
            case SetDegree(key, degree, token):
                self._check(token)
                self._pool(key).degree = degree
                return []
            case ProcessReady(name):
                return self._ready(name, now_s)
            case ProcessAnswered(name):
                return self._answered(name)
            case ProcessEnded(name, reason):
                return self._ended(name, reason, now_s)
            case TimePassed():
                return [effect for name in self._pools for effect in self._advance(name, now_s)]

    def _adopt(self, event: Adopt, now_s: float) -> list[Effect]:
        pool = self._pool(event.pool)
        for name in event.processes:
            pool.processes[name] = _Process(name, ProcessPhase.RUNNING, now_s)
        pool.numbers += len(event.processes)
        pool.wanted = len(pool.processes)
        return []

    def _set_size(self, event: SetSize, now_s: float) -> list[Effect]:
        pool = self._pool(event.pool)
        limit = self._rules.max_processes if "{}" in pool.pattern else 1
        if not 0 <= event.size <= limit:
            raise InvalidRequest(f"the size of pool {event.pool} is {event.size}, it must be 0 to {limit}")
        self._check(event.token)
        is_another = event.size != pool.wanted
        if is_another or self.fault(event.pool):
            # Whoever declares a size again that was given up wants another attempt. Another size, as by a load that changes, is none.
            for process in () if is_another else pool.processes.values():
                process.ends = 0
            pool.wanted = event.size
            self._try_again(pool, now_s, now_s)
        return self._advance(event.pool, now_s)

    def _remove(self, event: Remove, now_s: float) -> list[Effect]:
        pool = self._pool(event.pool)
        process = pool.processes.get(event.process)
        if process is None:
            raise NotFound(f"pool {event.pool} has no process {event.process[:80]!r}")
        self._check(event.token)
        effects: list[Effect] = []
        if process.phase in (ProcessPhase.RUNNING, ProcessPhase.STARTING):
            effects.append(self._stop(process, "removed", now_s))
        elif process.phase is not ProcessPhase.STOPPING:
            del pool.processes[process.name]
        return effects + self._advance(event.pool, now_s)

    def _ready(self, name: str, now_s: float) -> list[Effect]:
        key, process = self._find(name)
        if process is None or process.phase is not ProcessPhase.STARTING:
            return []
        pool = self._pools[key]
        process.phase, process.since_s, process.reason = ProcessPhase.RUNNING, now_s, ""
        self._try_again(pool, now_s, now_s + self._rules.first_backoff_s)  # it can start after all
        return self._advance(key, now_s)

    def _answered(self, name: str) -> list[Effect]:
        _, process = self._find(name)
        if process is not None and process.phase is ProcessPhase.RUNNING:
            process.ends, process.backoff_s = 0, 0.0
        return []

    def _ended(self, name: str, reason: str, now_s: float) -> list[Effect]:
        key, process = self._find(name)
        if process is None or process.phase in (ProcessPhase.ORDERED, ProcessPhase.FAILED):
            return []
        pool = self._pools[key]
        effects: list[Effect] = []
        if process.phase is ProcessPhase.STOPPING:
            del pool.processes[name]
        else:
            if process.phase is ProcessPhase.STARTING:
                pool.crashes += 1
                reason = f"{process.reason}: {reason}" if process.killed else f"{reason} while starting"
            else:
                # Its replacement gets its attempts, whatever happened to others before.
                self._try_again(pool, now_s, now_s + self._rules.longest_backoff_s)
                if now_s - process.since_s >= self._rules.stable_s:
                    process.ends, process.backoff_s = 0, 0.0
            process.backoff_s = min(
                max(2 * process.backoff_s, self._rules.first_backoff_s), self._rules.longest_backoff_s
            )
            process.phase, process.since_s, process.due_s = ProcessPhase.ORDERED, now_s, now_s + process.backoff_s
            process.reason, process.killed = reason, False
            process.ends += 1
            if process.ends >= self._rules.most_ends:
                process.phase = ProcessPhase.FAILED
                process.reason = f"gave up {name}, which ended {process.ends} times without an answer: {reason}"
                effects.append(GaveUp(key, process.reason))
            if pool.crashes >= self._rules.start_crashes and not pool.fault:
                pool.fault = f"gave up after {pool.crashes} crashes at the start: {reason}"
                effects.append(GaveUp(key, pool.fault))
        return effects + self._advance(key, now_s)

    # --- how ---

    def _advance(self, key: str, now_s: float) -> list[Effect]:
        """Make the pool what is wanted, as far as it is time for that."""
        pool = self._pools[key]
        effects: list[Effect] = []
        if pool.wanted is not None:
            effects += self._shrink(pool, pool.wanted, now_s)
            self._grow(pool, pool.wanted, now_s)
        for process in pool.processes.values():
            if pool.fault and process.phase is ProcessPhase.ORDERED:
                process.phase, process.since_s = ProcessPhase.FAILED, now_s
            elif process.phase is ProcessPhase.ORDERED and process.due_s <= now_s:
                why = f"again: {process.reason}" if process.reason else f"{pool.wanted} wanted"
                process.phase, process.since_s, process.due_s = (
                    ProcessPhase.STARTING,
                    now_s,
                    now_s + self._rules.start_timeout_s,
                )
                effects.append(StartProcess(key, process.name, why))
            elif (
                process.phase in (ProcessPhase.STARTING, ProcessPhase.STOPPING)
                and process.due_s <= now_s
                and not process.killed
            ):
                limit_s = now_s - process.since_s
                process.reason = (
                    f"{'not ready' if process.phase is ProcessPhase.STARTING else 'not ended'} after {limit_s:.0f} s"
                )
                process.killed = True
                effects.append(KillProcess(process.name, process.reason))
        return effects

    def _shrink(self, pool: _Pool, wanted: int, now_s: float) -> Iterator[Effect]:
        active = [process for process in pool.processes.values() if process.phase is not ProcessPhase.STOPPING]
        surplus = len(active) - wanted
        for phase in (ProcessPhase.FAILED, ProcessPhase.ORDERED, ProcessPhase.STARTING):
            for process in reversed(active):
                if surplus <= 0 or process.phase is not phase:
                    continue
                surplus -= 1
                if phase is ProcessPhase.STARTING:
                    yield self._stop(process, f"{wanted} wanted", now_s)
                else:
                    del pool.processes[process.name]

    @staticmethod
    def _grow(pool: _Pool, wanted: int, now_s: float) -> None:
        active = sum(process.phase is not ProcessPhase.STOPPING for process in pool.processes.values())
        while active < wanted and not pool.fault:
            name = pool.pattern.format(pool.numbers + 1)
            if name in pool.processes:  # one that may exist once, and still ends
                return
            pool.numbers += 1
            active += 1
            pool.processes[name] = _Process(name, ProcessPhase.ORDERED, now_s, now_s)

    def _is_given_up(self, process: _Process) -> bool:
        return process.phase is ProcessPhase.FAILED and process.ends >= self._rules.most_ends

    def _try_again(self, pool: _Pool, now_s: float, due_s: float) -> None:
        pool.crashes, pool.fault = 0, ""
        for process in pool.processes.values():
            if process.phase is ProcessPhase.FAILED and not self._is_given_up(process):
                process.phase, process.since_s, process.due_s, process.backoff_s = (
                    ProcessPhase.ORDERED,
                    now_s,
                    due_s,
                    0.0,
                )

    def _stop(self, process: _Process, reason: str, now_s: float) -> StopProcess:
        process.phase, process.since_s, process.due_s = ProcessPhase.STOPPING, now_s, now_s + self._rules.grace_s
        process.reason, process.killed = reason, False
        return StopProcess(process.name, reason)

    def _check(self, token: int) -> None:
        if token < self._token:
            raise Deposed(f"the order's token is {token}, a later leader has {self._token}")
        self._token = token

    def _pool(self, name: str) -> _Pool:
        try:
            return self._pools[name]
        except KeyError:
            raise NotFound(f"there is no pool {name[:80]!r}") from None

    def _find(self, name: str) -> tuple[str, _Process | None]:
        for key, pool in self._pools.items():
            if name in pool.processes:
                return key, pool.processes[name]
        return "", None

    def _all(self) -> Iterator[_Process]:
        for pool in self._pools.values():
            yield from pool.processes.values()
