"""``scaling.processes.Processes`` over simulated instances, which take time to start."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from triptych.domain.stage import Role
from triptych.errors import InvalidRequest
from triptych.runtime.tasks import TaskScope

DRAIN_S = 30.0
"""How long an instance that is told to end may take, as ``--drain-s``."""


class Node(Protocol):
    """An instance as a scaler handles it."""

    is_up: bool

    async def stop(self, drain_s: float) -> None: ...

    async def kill(self) -> None: ...


class SimProcesses:
    """``boot`` makes an instance run, ``boot_s`` after its start was ordered, and is told when that was; ``find`` returns it."""

    def __init__(
        self,
        boot: Callable[[Role, str, float], Awaitable[None]],
        find: Callable[[str], Node | None],
        *,
        boot_s: Callable[[Role], float],
        scope: TaskScope,
    ) -> None:
        self.ended: Callable[[str, str], None] = lambda _process, _reason: None
        """Called when a process has ended; set before the first order."""
        self.boot_s = boot_s
        self._boot = boot
        self._find = find
        self._scope = scope
        self._starting: dict[str, asyncio.Event] = {}
        """Set to give up the start."""

    def is_alive(self, process: str) -> bool:
        node = self._find(process)
        return process in self._starting or (node is not None and node.is_up)

    async def start(self, pool: str, process: str) -> None:
        role = Role(pool.rpartition("/")[2])
        self._starting[process] = asyncio.Event()
        self._scope.spawn(self._start(role, process), name=f"start of {process}")

    def check_degree(self, pool: str, degree: int) -> None:
        raise InvalidRequest(f"instances of pool {pool} are simulated with one degree, not {degree}", param="degree")

    def terminate(self, process: str) -> None:
        if process in self._starting:
            self._starting[process].set()
        else:
            self._scope.spawn(self._stop(process), name=f"stop of {process}")

    def kill(self, process: str) -> None:
        if process in self._starting:
            self._starting[process].set()
        else:
            self._scope.spawn(self.lose(process, "signal 9"), name=f"kill of {process}")

    async def serves(self, processes: Sequence[str]) -> list[str]:
        return [name for name in processes if (node := self._find(name)) is not None and node.is_up]

    async def answered(self, processes: Sequence[str]) -> list[str]:
        """Processes that answer: what runs works."""
        return await self.serves(processes)

    async def lose(self, process: str, reason: str) -> None:
        """The process dies."""
        if (node := self._find(process)) is not None and node.is_up:
            await node.kill()
            self.ended(process, reason)

    async def _start(self, role: Role, process: str) -> None:
        stopped, ordered_s = self._starting[process], asyncio.get_running_loop().time()
        await self._comes_up(role, stopped)
        del self._starting[process]
        if stopped.is_set():
            self.ended(process, "signal 15")
        else:
            await self._boot(role, process, ordered_s)

    async def _comes_up(self, role: Role, stopped: asyncio.Event) -> None:
        """Return after the time of a start, or when it is given up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.boot_s(role)):
                await stopped.wait()

    async def _stop(self, process: str) -> None:
        node = self._find(process)
        if node is not None and node.is_up:
            await node.stop(DRAIN_S)
            self.ended(process, "exit status 0")
