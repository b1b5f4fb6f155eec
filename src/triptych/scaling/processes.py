"""Keeps pools of local processes at their wanted size (``ports.Scaler``), and starts again what died."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from triptych.domain.scaling import PoolName, ProcessPhase, ScaledInstance, ScaledPool
from triptych.errors import NotFound, Unavailable
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
from triptych.machine.process_pools import ProcessPools, RestartRules
from triptych.ports import Clock

logger = logging.getLogger(__name__)

_READY_POLL_S = 0.2
_ANSWERED_POLL_S = 1.0

Done = Effect | ProcessReady
"""An effect that was begun, or a process that has started."""


class Processes(Protocol):
    """Starts processes and ends them. Who implements it also calls ``ProcessScaler.ended``."""

    async def start(self, pool: str, process: str) -> None:
        """Start a process, again with the same ports if it has run before. Raises Unavailable or OSError."""
        ...

    def check_degree(self, pool: str, degree: int) -> None:
        """Raises InvalidRequest if new processes of a pool cannot have this tensor-parallel degree."""
        ...

    def terminate(self, process: str) -> None:
        """Ask a process to finish what runs and to end."""
        ...

    def kill(self, process: str) -> None: ...

    async def serves(self, processes: Sequence[str]) -> list[str]:
        """Names of the processes that have finished starting."""
        ...

    async def answered(self, processes: Sequence[str]) -> list[str]:
        """Names of the processes that have done what they are for at least once."""
        ...


class ProcessScaler:
    """``ports.Scaler`` for the processes of one machine, while ``run`` runs. It refuses orders and questions before that,
    until it is told what runs already (``adopt``).

    ``scaled`` are the pools of instances that others may scale, and the names of their processes; ``others`` are pools that
    are only kept: a router, for example.
    """

    def __init__(
        self,
        processes: Processes,
        *,
        scaled: Mapping[PoolName, str],
        others: Mapping[str, str],
        rules: RestartRules,
        clock: Clock,
    ) -> None:
        self.on_event: Callable[[Done], None] = lambda _: None
        """Called with everything that is done; set before ``run``."""
        self._processes = processes
        self._keys = {name: str(name) for name in scaled}
        self._machine = ProcessPools({**{str(name): names for name, names in scaled.items()}, **others}, rules)
        self._clock = clock
        self._effects: deque[Effect] = deque()
        self._news = asyncio.Event()
        self._begun = False
        self._closed = False

    # --- orders ---

    async def scale(self, pool: PoolName, size: int, token: int) -> None:
        self._refuse_before_it_begins()
        self._handle(SetSize(self._key(pool), size, token))

    async def remove(self, pool: PoolName, instance: str, token: int) -> None:
        self._refuse_before_it_begins()
        self._handle(Remove(self._key(pool), instance, token))

    async def set_degree(self, pool: PoolName, degree: int, token: int) -> None:
        self._refuse_before_it_begins()
        key = self._key(pool)
        self._processes.check_degree(key, degree)
        self._handle(SetDegree(key, degree, token))

    def degree(self, pool: str) -> int | None:
        """The tensor-parallel degree that was ordered for new processes of a pool, by its name as a string."""
        return self._machine.degree(pool)

    async def pools(self) -> tuple[ScaledPool, ...]:
        self._refuse_before_it_begins()
        return tuple(
            ScaledPool(
                name,
                self._machine.wanted(key),
                tuple(
                    ScaledInstance(process.name, process.phase, process.reason)
                    for process in self._machine.processes(key)
                ),
                self._machine.fault(key),
            )
            for name, key in self._keys.items()
        )

    async def close(self) -> None:
        self._closed = True
        self._news.set()

    # --- what happens to processes ---

    def adopt(self, pool: str, processes: Sequence[str]) -> None:
        """Processes of a pool (by its name as a string) that run already."""
        self._begun = True
        self._handle(Adopt(pool, tuple(processes)))

    def ended(self, process: str, reason: str) -> None:
        """A process has ended."""
        self._handle(ProcessEnded(process, reason))

    def phase(self, process: str) -> ProcessPhase | None:
        """Phase of a process. None if it belongs to no pool (any more)."""
        return next((state.phase for state in self._machine.all_processes() if state.name == process), None)

    async def run(self) -> None:
        """Carry out what is due, until closed."""
        self._begun = True
        while not self._closed:
            self._news.clear()
            for process in await self._processes.serves(list(self._starting())):
                self._handle(ProcessReady(process))
                self.on_event(ProcessReady(process))
            for process in await self._processes.answered(self._machine.on_trial):
                self._handle(ProcessAnswered(process))
            self._handle(TimePassed())
            while self._effects:
                await self._perform(self._effects.popleft())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._news.wait()

    def _refuse_before_it_begins(self) -> None:
        """Refuse until it runs. Running processes are not adopted yet, so an answer would be wrong."""
        if not self._begun:
            raise Unavailable("the processes of the cluster are starting")

    def _key(self, pool: PoolName) -> str:
        try:
            return self._keys[pool]
        except KeyError:
            raise NotFound(f"there is no pool {pool}") from None

    def _handle(self, event: Event) -> None:
        effects = self._machine.handle(event, self._clock())
        if effects:
            self._effects.extend(effects)
            self._news.set()
        elif not isinstance(event, TimePassed):
            self._news.set()  # something may be due earlier

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case StartProcess(pool, process, _):
                try:
                    await self._processes.start(pool, process)
                except (Unavailable, OSError) as error:
                    logger.warning("%s cannot be started: %s", process, error)
                    self._handle(ProcessEnded(process, f"it cannot be started: {error}"))
            case StopProcess(process, _):
                self._processes.terminate(process)
            case KillProcess(process, _):
                self._processes.kill(process)
            case GaveUp(pool, reason):
                logger.error("pool %s %s", pool, reason)
        self.on_event(effect)

    def _starting(self) -> Iterator[str]:
        """Processes that were started and are not ready yet."""
        pending = {effect.process for effect in self._effects if isinstance(effect, StartProcess)}
        for state in self._machine.all_processes():
            if state.phase is ProcessPhase.STARTING and state.name not in pending:
                yield state.name

    def _pause_s(self) -> float | None:
        due_s = self._machine.due_s
        left_s = None if due_s is None else max(0.0, due_s - self._clock())
        poll_s = None
        if any(True for _ in self._starting()):
            poll_s = _READY_POLL_S
        elif self._machine.on_trial:
            poll_s = _ANSWERED_POLL_S
        return min((pause_s for pause_s in (left_s, poll_s) if pause_s is not None), default=None)
