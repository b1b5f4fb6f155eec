"""An asyncio event loop with virtual time: an hour of timers takes only the time of its callbacks.

The loop is the standard library's own, over a selector that never waits: when no callback is ready, it moves the
clock to the next timer (trio calls this an autojump clock). So a whole cluster runs in one process with real
timeouts and no real waiting, and the same program with the same seed runs the same way each time:

- there is no I/O and there are no threads, so nothing outside the program affects the order;
- tasks and futures hash by number, not by address, so that sets of them have a fixed order;
- a seed delays each timer a little, as real timers are, so that seeds give different interleavings.

What would hang under a real clock is an error here: ``Deadlock`` when nothing can ever become ready again,
``Livelock`` when callbacks run on and on while time stands still, ``OutOfTime`` when the clock passes its limit.
"""

import asyncio
import heapq
import random
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, NoReturn, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LATENESS_S = 1e-6
"""Largest delay that a seeded loop adds to a timer."""

SPINS_PER_INSTANT = 200_000
"""Rounds of the loop at one instant that count as a livelock."""


class VirtualTimeError(Exception):
    """The program makes no progress; the message lists the tasks that still exist."""


class Deadlock(VirtualTimeError):
    """Nothing is ready and no timer is set, but the program is not done."""


class Livelock(VirtualTimeError):
    """Callbacks keep running while time stands still."""


class OutOfTime(VirtualTimeError):
    """The clock has passed the program's limit."""


class UnhandledInLoop(VirtualTimeError):
    """The program succeeded, but an exception in one of its tasks or callbacks was never retrieved."""


class _AutojumpSelector:
    """Replaces the selector: instead of waiting, it advances the clock."""

    def __init__(self, limit_s: float, next_timer_s: Callable[[], float]) -> None:
        self.now_s = 0.0
        self.limit_s = limit_s
        self.spins = 0
        self._next_timer_s = next_timer_s

    def select(self, timeout_s: float | None) -> list[NoReturn]:
        """As ``selectors.BaseSelector.select``, but never returns events."""
        if timeout_s is None:
            raise Deadlock(f"at {self.now_s:g} s nothing is ready and no timer is set\n{_tasks()}")
        if timeout_s > 0:
            self.spins = 0
            self.now_s = self._next_timer_s()  # the sum with the timeout, a difference, would be rounded
            if self.now_s > self.limit_s:
                raise OutOfTime(f"not done after {self.limit_s:g} s of virtual time\n{_tasks()}")
            return []
        self.spins += 1
        if self.spins > SPINS_PER_INSTANT:
            raise Livelock(f"time stands still at {self.now_s:g} s over {self.spins} rounds of the loop\n{_tasks()}")
        return []

    def close(self) -> None:
        """Nothing to close."""


class _Numbered:
    """Hashes by order of creation, so that iterating over a set does not depend on addresses."""

    _number: int

    def __hash__(self) -> int:
        return self._number


class _Task(_Numbered, asyncio.Task[Any]):
    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number  # before Task registers itself in a set
        super().__init__(coro, **options)


class _Future(_Numbered, asyncio.Future[Any]):
    def __init__(self, number: int, *, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)


class _Timer(asyncio.TimerHandle):
    """Of those of one time, the first that was set is the first to run."""

    def __init__(self, number: int, when: float, callback: Callable[..., object], *args: Any) -> None:
        super().__init__(when, callback, *args)
        self._number = number

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, _Timer):
            return NotImplemented
        return (self.when(), self._number) < (other.when(), other._number)


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """The standard loop without I/O and threads, on a clock that starts at 0 and jumps from timer to timer.

    ``limit_s`` bounds the clock, so that periodic timers cannot keep a program alive that is stuck.
    """

    def __init__(self, *, seed: int | None = None, limit_s: float = 3600.0) -> None:
        super().__init__()
        self._selector = _AutojumpSelector(limit_s, self._next_timer_s)
        self._lateness = None if seed is None else random.Random(seed)  # noqa: S311  # not for secrets
        self._count = 0
        self.unhandled: list[dict[str, Any]] = []
        """Contexts of exceptions that were never retrieved."""
        self.set_task_factory(self._numbered_task)
        self.set_exception_handler(lambda _, context: self.unhandled.append(context))

    def time(self) -> float:
        return self._selector.now_s

    def block(self, seconds: float) -> None:
        """Advance the clock, as a callback does that takes so long."""
        self._selector.now_s += seconds

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self._lateness is not None:
            when += self._lateness.random() * LATENESS_S
        self._count += 1
        timer = _Timer(self._count, when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]  # as BaseEventLoop.call_at
        timer._scheduled = True  # type: ignore[attr-defined]  # noqa: SLF001
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        self._count += 1
        return _Future(self._count, loop=self)

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> NoReturn:
        raise NotImplementedError("threads do not follow virtual time: inject virtual.offload.InlineOffload")

    def _numbered_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> asyncio.Future[Any]:
        self._count += 1
        return _Task(self._count, coro, loop=loop, **options)  # type: ignore[arg-type]  # typeshed allows generators

    def _next_timer_s(self) -> float:
        return self._scheduled[0].when()  # type: ignore[attr-defined,no-any-return]

    def _process_events(self, event_list: list[NoReturn]) -> None:
        """Nothing to process."""

    def _write_to_self(self) -> None:
        """Not needed: the selector never waits."""


def run(main: Coroutine[Any, Any, T], *, seed: int | None = None, limit_s: float = 3600.0) -> T:
    """Run a program under virtual time, as ``asyncio.run`` does under real time, and return its result.

    ``seed`` determines small delays of timers; without one timers are exact, and those of one instant run in a fixed
    order. Raises ``Deadlock``, ``Livelock``, ``OutOfTime`` when the program gets stuck, and ``UnhandledInLoop`` when it
    succeeds but an exception in one of its tasks was never retrieved.
    """
    loop = VirtualTimeLoop(seed=seed, limit_s=limit_s)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(main)
    if loop.unhandled:
        first = loop.unhandled[0]
        raise UnhandledInLoop(f"{len(loop.unhandled)} seen by nobody, the first: {first}") from first.get("exception")
    return result


def _tasks() -> str:
    """The waiting tasks, one per line, with where each waits."""
    lines = []
    for task in sorted(asyncio.all_tasks(), key=hash)[:20]:
        frames = task.get_stack(limit=1)
        where = f"{frames[-1].f_code.co_qualname}:{frames[-1].f_lineno}" if frames else "not started"
        lines.append(f"  {task.get_name()} at {where}")
    return "\n".join(lines)
